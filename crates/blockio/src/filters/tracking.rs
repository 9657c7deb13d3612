//! Copies a disk to somewhere else while its guest works with it, by marking what the guest writes meanwhile and copying that again.
//!
//! A laboratory method beside [`super::Mirroring`]. What is copied next is decided by `godwit_tracking`; here it is carried out. The guest's
//! writes go to the source alone, with its own buffers, and no guest ever waits for the destination, until the disk is closed
//! ([`Course::close`]): then nothing new is taken from above, and what is marked is copied. Once nothing is left, and is durable where the
//! destination may be the only one that is left one day, both sides are the same, until the disk is opened.
//!
//! Who owns the state: the disk's thread; [`Course`] is how others see and steer it. Refuses: nothing of the guest's. A region that cannot be
//! read ends the tracking and no request.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_mirror::{Destination, Flushes, Phase};
use godwit_tracking::{
    BLOCK, Convergence, Copy, Decision, Ended, Iteration, Options, Tracking, WriteId,
};

use super::copying::{Copying, Has, LOOK_EVERY, give_copy};
use super::course::{Course, lock};
use super::outlet::{Origin, Outlet};
use crate::{Buffer, Data, Filter, Flow, Outcome, Request, Work};

/// Where the guest could be held and is not, an iteration begins so long after the last one at the earliest: each copies 64 KiB for every
/// few that the guest writes.
const PAUSE: Duration = Duration::from_millis(50);
/// So often the destination is flushed before the guest is held: one that falls silent each time is not to be waited for for ever.
const EARLY_FLUSHES_MAX: u32 = 3;
/// A disk that is closed asks for nothing before it is opened.
const NEVER: Duration = Duration::from_secs(3600);

/// What the destination has when the guest could be held for the first time is made durable there while it works: else all of the disk would be
/// while it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EarlyFlush {
    Due,
    UnderWay(u64),
    Done,
}

/// Tracks the writes of one disk that is copied to an [`Outlet`].
pub struct DirtyTracking {
    tracking: Tracking,
    convergence: Convergence,
    outlet: Box<dyn Outlet>,
    course: Course,
    copying: Copying,
    /// The guest's writes under way, by who made them and what he knows them by: each maker has tokens of his own.
    below: BTreeMap<(Option<usize>, u64), WriteId>,
    /// Writes that came while the destination is bound: of these nobody may be told.
    held: Vec<Request>,
    /// Copies that are being read, by their numbers,
    reads: BTreeMap<u64, Copy>,
    /// and those for which there is no room.
    read: VecDeque<(Copy, Buffer)>,
    /// What is durable at the destination.
    flushes: Flushes,
    /// The number that a write or a flush had last.
    last_number: u64,
    /// When this iteration began.
    began: Instant,
    /// Whether the guest could have been held before.
    could_finish: bool,
    early_flush: EarlyFlush,
    early_flushes: u32,
    /// Whether the destination does not answer: the time in which it does not counts for no iteration, and none begins.
    is_silent: bool,
    /// Whether both sides are told to be the same.
    is_equal: bool,
    next_look: Instant,
    has_ended: bool,
}

impl DirtyTracking {
    /// Of a disk of so many bytes. To be put below all other filters while nothing is under way.
    pub fn new(bytes: u64, outlet: Box<dyn Outlet>, course: &Course, options: Options) -> Self {
        course.0.left_bytes.store(bytes, Ordering::Relaxed);
        Self {
            tracking: Tracking::new(bytes, BLOCK, options),
            convergence: Convergence::default(),
            outlet,
            course: course.clone(),
            copying: Copying::new(),
            below: BTreeMap::new(),
            held: Vec::new(),
            reads: BTreeMap::new(),
            read: VecDeque::new(),
            flushes: Flushes::default(),
            last_number: 0,
            began: Instant::now(),
            could_finish: false,
            early_flush: EarlyFlush::Due,
            early_flushes: 0,
            is_silent: false,
            is_equal: false,
            next_look: Instant::now(),
            has_ended: false,
        }
    }

    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// As the flushes have it: there is none of both sides, since nothing is written to both.
    fn phase(&self) -> Phase {
        match self.course.0.tracked.is_closed() && self.tracking.is_equal() {
            true => Phase::Synchronised,
            false => Phase::Copying,
        }
    }

    fn destination(&self) -> Destination {
        Destination {
            confirms: self.outlet.confirms(),
            may_be_left_alone: self.outlet.may_be_left_alone(),
            is_bound: self.course.is_bound(),
        }
    }

    /// A write of the guest's goes down.
    fn begin(&mut self, request: &Request) {
        let Some(range) = request.work.range().cloned() else {
            return;
        };
        let id = self.number();
        self.below.insert((request.maker, request.token), id);
        self.tracking.write(id, range);
        let written = &self.course.0.guest_bytes;
        written.fetch_add(request.work.transfers(), Ordering::Relaxed);
        if self.is_equal {
            self.tell();
        }
    }

    /// Tells others how far it is.
    fn tell(&mut self) {
        let phase = self.phase();
        self.flushes.observe(phase);
        self.is_equal = phase == Phase::Synchronised;
        let synchronised = self.flushes.is_synchronised(phase, self.destination());
        let (shared, left) = (&self.course.0, self.tracking.left_bytes());
        shared.left_bytes.store(left, Ordering::Relaxed);
        shared.synchronised.store(synchronised, Ordering::Release);
        if !self.is_equal {
            self.course.has_parted();
        }
    }

    /// Does all that can be done now: gives what was read, reads more, and goes on to the next iteration.
    fn advance(&mut self, flow: &mut Flow<'_>) {
        loop {
            self.give_copies(flow.now());
            self.read_more(flow);
            if let Some(ended) = self.tracking.ended() {
                self.ends(ended, flow.now());
            }
            if !self.iterates(flow.now()) {
                return self.tell();
            }
        }
    }

    fn give_copies(&mut self, now: Instant) {
        while !self.read.is_empty() && self.outlet.takes(Origin::Copy) {
            let Some((copy, bytes)) = self.read.pop_front() else {
                return;
            };
            let to = (&self.course, &mut *self.outlet);
            give_copy(to, copy.range.start, &Arc::new(bytes), now);
            self.gave(&copy);
        }
    }

    fn gave(&mut self, copy: &Copy) {
        self.course
            .0
            .tracked
            .copied(copy.range.end - copy.range.start);
        self.tracking.copied(copy.number);
    }

    fn read_more(&mut self, flow: &mut Flow<'_>) {
        while self.reads.len() + self.read.len() < self.copying.allowed(&self.course, flow.now()) {
            let Some(copy) = self.tracking.next_copy() else {
                return;
            };
            // A clone has what is there then; what is written later is marked, and given later.
            if self.outlet.try_clone(&copy.range) {
                self.copying.cloned(&mut *self.outlet);
                self.gave(&copy);
                continue;
            }
            let buffer = Buffer::zeroed((copy.range.end - copy.range.start) as usize);
            let work = Work::Read(copy.range.clone());
            flow.make(work, Data::Own(buffer), copy.number);
            self.reads.insert(copy.number, copy);
        }
    }

    /// An iteration has ended.
    fn ends(&mut self, ended: Ended, now: Instant) {
        let ended = Iteration {
            number: ended.number,
            copied: ended.copied,
            seconds: now.saturating_duration_since(self.began).as_secs_f64(),
            dirty: ended.dirty,
            hot: ended.hot,
            deferred: ended.deferred,
        };
        let tracked = &self.course.0.tracked;
        let is_closed = tracked.is_closed();
        if is_closed || !self.could_finish {
            tracked.keep(ended);
        }
        if !is_closed {
            let decision = self.convergence.decide(ended);
            self.could_finish |= decision == Decision::Finish;
            tracked.decide(decision);
        }
    }

    /// Begins the next iteration if it is time.
    fn iterates(&mut self, now: Instant) -> bool {
        if self.is_silent {
            return false;
        }
        let tracked = &self.course.0.tracked;
        let with_hot = match tracked.decision() {
            _ if tracked.is_closed() => match self.tracking.dirty_bytes() > 0 {
                true => true,
                false => return false,
            },
            Some(Decision::GoOn) => false,
            Some(Decision::GoOnWithHot) | None => true,
            Some(Decision::Finish) if now >= self.began + PAUSE => true,
            Some(Decision::Finish | Decision::Abort(_)) => return false,
        };
        let begins = self.tracking.iterate(with_hot);
        if begins {
            self.began = now;
        }
        begins
    }

    /// What the destination has is to be durable there before both sides count as the same.
    fn make_base(&mut self) {
        if self.flushes.wants_base(self.phase(), self.destination()) {
            let id = self.number();
            if self.outlet.flush(id) {
                self.flushes.begin_base(id);
            }
        }
    }

    /// While the guest works, so that little is left to be made durable while it waits. A destination that is not left alone keeps nobody
    /// waiting for that.
    fn flush_early(&mut self) {
        if !self.could_finish || self.course.0.tracked.is_closed() {
            return;
        }
        if self.early_flush == EarlyFlush::Due {
            let is_of_use = self.early_flushes < EARLY_FLUSHES_MAX;
            let id = self.number();
            let begins = is_of_use && self.outlet.may_be_left_alone() && self.outlet.flush(id);
            self.early_flushes += u32::from(begins);
            self.early_flush = match begins {
                true => EarlyFlush::UnderWay(id),
                false => EarlyFlush::Done,
            };
        }
        let is_done = self.early_flush == EarlyFlush::Done;
        self.course.0.tracked.flushed(is_done);
    }

    /// What the destination was given may not have come there, a flush among it.
    fn lost_there(&mut self) {
        self.flushes.lost();
        self.early_flush = EarlyFlush::Due;
        self.course.0.tracked.flushed(false);
    }

    /// Looks whether the destination answers. It is `since` that it was looked last: if it did not answer then, that time counts for nothing.
    fn look_whether_silent(&mut self, since: Duration, now: Instant) {
        if self.is_silent {
            self.began = (self.began + since).min(now);
        }
        self.is_silent = !self.course.is_bound() && self.outlet.is_silent();
    }

    fn look(&mut self, flow: &mut Flow<'_>) {
        let now = flow.now();
        let since = now.saturating_duration_since(self.copying.last_look);
        let has = Has {
            reads: !self.reads.is_empty(),
            read: !self.read.is_empty(),
        };
        let between = (&self.course, &mut *self.outlet);
        self.copying.book_wait(between, Some(has), now);
        for range in self.course.take_lost() {
            self.lost_there();
            self.tracking.lost(&range);
        }
        if !self.course.is_bound() {
            self.let_go(flow);
            if self.course.0.given_up.load(Ordering::Acquire) {
                return self.give_up();
            }
        }
        if self.course.0.begun.load(Ordering::Acquire) {
            let zero = std::mem::take(&mut *lock(&self.course.0.zero));
            if self.tracking.begin(&zero) {
                self.began = now;
            }
        }
        // What is silent takes nothing. A flush may be lost with the rest.
        self.look_whether_silent(since, now);
        if self.is_silent {
            self.lost_there();
        } else {
            self.make_base();
            self.flush_early();
        }
        self.copying.look(&mut *self.outlet);
        self.advance(flow);
        if self.is_equal && self.outlet.confirms() {
            self.course.may_bind();
        }
        let wait_s = self.convergence.wait_s(self.tracking.left_bytes());
        self.course.0.tracked.would_wait(wait_s);
    }

    /// Writes that were held go on.
    fn let_go(&mut self, flow: &mut Flow<'_>) {
        for request in std::mem::take(&mut self.held) {
            self.begin(&request);
            flow.down(request);
        }
    }

    /// Everything passes from here on.
    fn give_up(&mut self) {
        self.has_ended = true;
        self.read.clear();
        self.is_equal = false;
        self.course.0.synchronised.store(false, Ordering::Release);
        self.course.has_parted();
    }
}

impl Filter for DirtyTracking {
    fn passes_down(&mut self, request: &Request, _now: Instant) -> bool {
        let changes = request.work.changes() && !self.has_ended;
        if changes && self.course.is_bound() {
            return false;
        }
        self.copying.begins();
        if changes {
            self.begin(request);
        }
        true
    }

    fn passes_up(&mut self, request: &Request, outcome: Outcome, _now: Instant) -> bool {
        self.copying.ends();
        if let Some(id) = self.below.remove(&(request.maker, request.token)) {
            self.tracking.written(id, outcome == Outcome::Done);
        }
        true
    }

    /// The destination would not have it, and the guest must not be told: it waits until it is certain which of both is the disk.
    fn down(&mut self, request: Request, _flow: &mut Flow<'_>) {
        self.copying.begins();
        self.is_equal = false;
        self.course.has_parted();
        self.held.push(request);
    }

    fn made(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        let Some(copy) = self.reads.remove(&request.token) else {
            return;
        };
        match (outcome, request.data) {
            _ if self.has_ended => {}
            (Outcome::Done, Data::Own(bytes)) => {
                self.read.push_back((copy, bytes));
                self.advance(flow);
            }
            (outcome, _) => {
                let (range, why) = (copy.range, told(outcome));
                let reason = format!("its bytes {range:?} cannot be read: {why}");
                self.course.fail_to_read(reason);
            }
        }
    }

    fn opens_at(&self) -> Option<Instant> {
        let given_up = self.course.0.given_up.load(Ordering::Acquire);
        let is_closed = self.course.0.tracked.is_closed() && !self.has_ended && !given_up;
        is_closed.then(|| Instant::now() + NEVER)
    }

    fn rest(&mut self, rests: bool) {
        self.copying.rests = rests;
        if rests {
            self.copying.pause();
        }
        self.next_look = Instant::now();
    }

    fn wake_at(&self) -> Option<Instant> {
        (!self.has_ended).then_some(self.next_look)
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.outlet.bell()
    }

    fn wake(&mut self, flow: &mut Flow<'_>) {
        for id in self.outlet.take_ended() {
            self.flushes.base_ended(id);
            if self.early_flush == EarlyFlush::UnderWay(id) {
                self.early_flush = EarlyFlush::Done;
            }
        }
        if !self.has_ended && flow.now() >= self.next_look {
            self.next_look = flow.now() + LOOK_EVERY;
            self.look(flow);
        }
    }
}

fn told(outcome: Outcome) -> String {
    match outcome {
        Outcome::Failed(errno) => errno.to_string(),
        _ => "no bytes came".to_owned(),
    }
}

/// Whoever steers it must not take both sides for equal any longer: what is written from now on goes to one alone.
impl Drop for DirtyTracking {
    fn drop(&mut self) {
        if !self.has_ended {
            self.course
                .fail("its writes are not tracked any more".to_owned());
        }
    }
}

#[cfg(test)]
#[path = "tracking_tests.rs"]
mod tests;
