//! Copies a disk to somewhere else while its guest works with it, and passes on what the guest writes meanwhile.
//!
//! What goes where is decided by `godwit_mirror`; here it is carried out. The bytes of a write that goes to both sides are read
//! from the guest once: a guest may change them meanwhile. The destination ([`Outlet`]) gets changes in the order in which the
//! source began them. One that confirms them is waited for as the source is, by a flush once both sides are equal; of another one a guest
//! waits for room alone. Where the destination is silent, or has let somebody wait for too long, nobody waits, and what it missed is copied
//! again, but while it is bound ([`Course`]).
//!
//! Who owns the state: the disk's thread; [`Course`] is how others see and steer it. Refuses: nothing of the guest's. A region
//! that cannot be read ends the mirroring and no request.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use godwit_mirror::{Copy, Destination, Flushes, Mirror, Phase, Route, Side, Step};
use godwit_types::plant::planted;
use rustix::io::Errno;

use super::REGION;
use super::content::read_once;
use super::copying::{Copying, Has, LOOK_EVERY, give_copy};
use super::course::{Course, lock};
use super::outlet::{Change, Origin, Outlet};
use super::waits::{Flushing, Given};
use crate::{Buffer, Data, Filter, Flow, Outcome, Request, Work};

/// So long nobody waits for a destination that has let somebody wait for too long: what it misses is copied again.
const AWAY: Duration = Duration::from_secs(5);

/// What a request of the filter's own is for, in the upper bits of its token; numbers of writes and copies are below.
const SOURCE: u64 = 1 << 56;
const COPY: u64 = 2 << 56;
const FLUSH: u64 = 3 << 56;
const KIND: u64 = 0xff << 56;

/// Mirrors one disk to an [`Outlet`].
pub struct Mirroring {
    mirror: Mirror,
    outlet: Box<dyn Outlet>,
    course: Course,
    /// Writes from above that are not answered, by numbers of the filter's own, and what became of them at the source.
    writes: BTreeMap<u64, (Option<Request>, Option<Outcome>)>,
    /// The number of the last of them.
    last_write: u64,
    /// The numbers of those that went down unchanged, by who made them and what he knows them by: each maker has tokens of his own.
    below: BTreeMap<(Option<usize>, u64), u64>,
    copying: Copying,
    /// Those to both sides for which there is no room, oldest first.
    waiting: VecDeque<(u64, Instant)>,
    /// What the destination is to confirm, by numbers of the filter's own,
    given: BTreeMap<u64, Given>,
    /// the guest's flushes of both sides,
    flushing: BTreeMap<u64, Flushing>,
    /// and what is durable on which side.
    flushes: Flushes,
    /// Writes to the source alone, which nobody may be told of while the destination is bound.
    unlike: Vec<u64>,
    /// Copies that are being read, by their numbers.
    reads: BTreeMap<u64, Copy>,
    /// Copies for which there is no room.
    read: VecDeque<(Copy, Buffer)>,
    next_look: Instant,
    /// Until when nobody waits for the destination, since somebody has waited too long.
    away_until: Option<Instant>,
}

impl Mirroring {
    /// Of a disk of so many bytes. To be put below all other filters while nothing is under way.
    pub fn new(bytes: u64, outlet: Box<dyn Outlet>, course: &Course) -> Self {
        course.0.left_bytes.store(bytes, Ordering::Relaxed);
        Self {
            mirror: Mirror::new(bytes, REGION),
            outlet,
            course: course.clone(),
            writes: BTreeMap::new(),
            last_write: 0,
            below: BTreeMap::new(),
            copying: Copying::new(),
            waiting: VecDeque::new(),
            given: BTreeMap::new(),
            flushing: BTreeMap::new(),
            flushes: Flushes::default(),
            unlike: Vec::new(),
            reads: BTreeMap::new(),
            read: VecDeque::new(),
            next_look: Instant::now(),
            away_until: None,
        }
    }

    fn carry_out(&mut self, steps: Vec<Step>, flow: &mut Flow<'_>) {
        let mut steps = VecDeque::from(steps);
        while let Some(step) = steps.pop_front() {
            match step {
                Step::Source(id) if self.course.is_bound() => self.unlike.push(id),
                Step::Source(id) => self.leave_to_the_source(id, flow),
                Step::Both(id) => steps.extend(self.send_both_ways(id, flow)),
                Step::Copy(copy) => steps.extend(self.copy(copy, flow)),
                Step::Answer { write, .. } => self.answer(write, flow),
            }
        }
        let shared = &self.course.0;
        let left_bytes = self.mirror.left_bytes();
        shared.left_bytes.store(left_bytes, Ordering::Relaxed);
        // What waits for room is under way, too: a guest that outruns the destination always has something that does.
        let phase = self.mirror.phase();
        self.flushes.observe(phase);
        let synchronised = self.flushes.is_synchronised(phase, self.destination());
        shared.synchronised.store(synchronised, Ordering::Release);
        if phase != Phase::Synchronised {
            self.course.has_parted();
        }
    }

    /// What was durable at the source before both sides were equal is to be so at a destination that may be left alone.
    fn make_base(&mut self) {
        let (phase, to) = (self.mirror.phase(), self.destination());
        if self.flushes.wants_base(phase, to) {
            self.last_write += 1;
            let (id, since) = (self.last_write, self.copying.last_look);
            if self.flush_there(id, since) {
                self.flushes.begin_base(id);
            }
        }
    }

    /// Returns whether the destination will tell of it.
    fn flush_there(&mut self, id: u64, since: Instant) -> bool {
        let confirms = self.outlet.flush(id);
        if confirms {
            let durable = false;
            self.given.insert(id, Given { since, durable });
        }
        confirms
    }

    fn copy(&mut self, copy: Copy, flow: &mut Flow<'_>) -> Vec<Step> {
        if !self.outlet.try_clone(&copy.range) {
            let buffer = Buffer::zeroed((copy.range.end - copy.range.start) as usize);
            let work = Work::Read(copy.range.clone());
            flow.make(work, Data::Own(buffer), COPY | copy.number);
            self.reads.insert(copy.number, copy);
            return Vec::new();
        }
        // It counts as copied at once, and that both sides were not equal is to be seen all the same.
        self.flushes.lost();
        self.course.has_parted();
        self.copying.cloned(&mut *self.outlet);
        let mut steps = self.keep_pace(flow.now());
        steps.extend(self.mirror.copied(&copy));
        steps
    }

    /// It goes down unchanged, with the guest's own buffers.
    fn leave_to_the_source(&mut self, id: u64, flow: &mut Flow<'_>) {
        if let Some(request) = self.writes.get_mut(&id).and_then(|write| write.0.take()) {
            let bytes = request.data.len() as u64;
            let written = &self.course.0.guest_bytes;
            written.fetch_add(bytes, Ordering::Relaxed);
            self.below.insert((request.maker, request.token), id);
            flow.down(request);
        }
    }

    fn send_both_ways(&mut self, id: u64, flow: &mut Flow<'_>) -> Vec<Step> {
        if !self.waiting.is_empty() || !self.outlet.takes(Origin::Guest) {
            self.waiting.push_back((id, flow.now()));
            return Vec::new();
        }
        self.give((id, flow.now()), flow)
    }

    /// A write that has waited since then.
    fn give(&mut self, (id, since): (u64, Instant), flow: &mut Flow<'_>) -> Vec<Step> {
        let Some((Some(request), _)) = self.writes.get(&id) else {
            return Vec::new();
        };
        let Some(range) = request.work.range().cloned() else {
            return Vec::new();
        };
        let (change, data) = match read_once(&request.data) {
            Ok(Some(bytes)) => {
                let (course, written) = (&self.course.0, bytes.len() as u64);
                course.guest_bytes.fetch_add(written, Ordering::Relaxed);
                course.mirrored_bytes.fetch_add(written, Ordering::Relaxed);
                (Change::Written(Arc::clone(&bytes), 0), Data::Shared(bytes))
            }
            Ok(None) => (Change::Zeroed, Data::None),
            // The guest's memory cannot be read: nothing is written anywhere.
            Err(error) => {
                if let Some(write) = self.writes.get_mut(&id) {
                    write.1 = Some(Outcome::Failed(error));
                }
                let mut steps = self.mirror.written(id, Side::Destination, true);
                steps.extend(self.mirror.written(id, Side::Source, false));
                return steps;
            }
        };
        let data = match planted("memory-read-twice") {
            true => read_once(&request.data)
                .ok()
                .flatten()
                .map_or(Data::None, Data::Shared),
            false => data,
        };
        let durable = request.durable;
        flow.make_like(request, data, SOURCE | id);
        let confirms = self.outlet.give_write(id, range, change);
        if confirms && !planted("answered-before-destination") {
            self.given.insert(id, Given { since, durable });
            return Vec::new();
        }
        // From here on the later number wins.
        self.mirror.written(id, Side::Destination, true)
    }

    fn flush_both(&mut self, request: Request, flow: &mut Flow<'_>) {
        self.last_write += 1;
        let (id, since) = (self.last_write, flow.now());
        flow.make_like(&request, Data::None, FLUSH | id);
        let is_told_of = self.flush_there(id, since);
        self.flushes.begin(id, is_told_of);
        let outcome = None;
        self.flushing.insert(id, Flushing { request, outcome });
    }

    /// Hears what the destination has carried out.
    fn hear(&mut self, flow: &mut Flow<'_>) {
        for id in self.outlet.take_ended() {
            // What is not equal yet is made durable before it is.
            let (phase, to) = (self.mirror.phase(), self.destination());
            let is_due = self.flushes.is_due_there(phase, to);
            let Some(given) = self.given.get_mut(&id) else {
                continue;
            };
            // What becomes durable is told of once more.
            let is_to_flush = std::mem::take(&mut given.durable) && is_due;
            if !(is_to_flush && self.outlet.flush(id)) {
                self.has_ended_there(id, flow);
            }
        }
    }

    /// The destination has carried this out, or is not waited for.
    fn has_ended_there(&mut self, id: u64, flow: &mut Flow<'_>) {
        self.given.remove(&id);
        if self.flushes.base_ended(id) {
            return self.carry_out(Vec::new(), flow);
        }
        if self.flushes.awaits(id) {
            return self.end_flush(id, Side::Destination, flow);
        }
        let steps = self.mirror.written(id, Side::Destination, true);
        self.carry_out(steps, flow);
    }

    fn end_flush(&mut self, id: u64, side: Side, flow: &mut Flow<'_>) {
        if self.flushes.ended(id, side)
            && let Some(flush) = self.flushing.remove(&id)
        {
            let outcome = flush.outcome.unwrap_or(Outcome::Failed(Errno::INVAL));
            self.pass_up(flush.request, outcome, flow);
        }
    }

    /// The destination is silent: what waits for it goes to the source alone.
    fn detach(&mut self, flow: &mut Flow<'_>) {
        let steps = self.mirror.detach();
        self.carry_out(steps, flow);
        self.read.clear();
        let given: Vec<u64> = self.given.keys().copied().collect();
        for id in given {
            // It may still come, or hang for long: it is copied again, which comes later.
            let request = self.writes.get(&id).and_then(|write| write.0.as_ref());
            let range = request.and_then(|request| request.work.range().cloned());
            let steps = range.map_or_else(Vec::new, |range| self.mirror.lost(&range));
            self.carry_out(steps, flow);
            self.has_ended_there(id, flow);
        }
        for (id, _) in std::mem::take(&mut self.waiting) {
            let Some((Some(request), _)) = self.writes.get(&id) else {
                continue;
            };
            let range = request.work.range().cloned().unwrap_or_default();
            let mut steps = self.mirror.lost(&range);
            self.leave_to_the_source(id, flow);
            steps.extend(self.mirror.written(id, Side::Destination, true));
            self.carry_out(steps, flow);
        }
    }

    fn destination(&self) -> Destination {
        Destination {
            confirms: self.outlet.confirms() && !planted("flushed-at-source-alone"),
            may_be_left_alone: self.outlet.may_be_left_alone(),
            is_bound: self.course.is_bound(),
        }
    }

    fn route(&self, work: &Work) -> Route {
        let phase = self.mirror.phase();
        self.flushes.route(work.kind(), phase, self.destination())
    }

    fn answer(&mut self, id: u64, flow: &mut Flow<'_>) {
        if let Some((Some(request), outcome)) = self.writes.remove(&id) {
            self.pass_up(
                request,
                outcome.unwrap_or(Outcome::Failed(Errno::INVAL)),
                flow,
            );
        }
    }

    fn pass_up(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        self.copying.ends();
        flow.up(request, outcome);
    }

    fn read_region(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        let Some(copy) = self.reads.remove(&(request.token & !KIND)) else {
            return;
        };
        match (outcome, request.data) {
            _ if !self.mirror.wants(&copy) => {}
            (Outcome::Done, Data::Own(bytes)) => {
                self.read.push_back((copy, bytes));
                self.give_copies(flow);
            }
            (outcome, _) => {
                let range = copy.range;
                let why = match outcome {
                    Outcome::Failed(errno) => errno.to_string(),
                    _ => "no bytes came".to_owned(),
                };
                let reason = format!("its bytes {range:?} cannot be read: {why}");
                self.course.fail_to_read(reason);
            }
        }
    }

    fn give_copies(&mut self, flow: &mut Flow<'_>) {
        while let Some((copy, bytes)) = self.read.pop_front() {
            if !self.mirror.wants(&copy) {
                continue;
            }
            if !self.outlet.takes(Origin::Copy) {
                if self.mirror.held() == 0 {
                    return self.read.push_front((copy, bytes));
                }
                // Writes wait for a region that waits for room.
                let steps = self.mirror.put_back(&copy);
                self.carry_out(steps, flow);
                continue;
            }
            let to = (&self.course, &mut *self.outlet);
            give_copy(to, copy.range.start, &Arc::new(bytes), flow.now());
            let mut steps = self.keep_pace(flow.now());
            steps.extend(self.mirror.copied(&copy));
            self.carry_out(steps, flow);
        }
    }

    /// Lets so many regions be copied at once as there is room for everywhere.
    fn keep_pace(&mut self, now: Instant) -> Vec<Step> {
        let allowed = self.copying.allowed(&self.course, now);
        self.mirror.allow(allowed)
    }

    fn book_wait(&mut self, now: Instant) {
        let copies = self.mirror.phase() == Phase::Copying;
        let has = copies.then_some(Has {
            reads: !self.reads.is_empty(),
            read: !self.read.is_empty(),
        });
        let between = (&self.course, &mut *self.outlet);
        self.copying.book_wait(between, has, now);
    }

    fn give_writes(&mut self, flow: &mut Flow<'_>) {
        while !self.waiting.is_empty() && self.outlet.takes(Origin::Guest) {
            let Some(oldest) = self.waiting.pop_front() else {
                return;
            };
            let steps = self.give(oldest, flow);
            self.carry_out(steps, flow);
        }
    }

    /// Whether a write has waited for too long, or one has just before.
    fn keeps_somebody_waiting(&mut self, now: Instant) -> bool {
        let waiting = self.waiting.front().map(|(_, since)| *since);
        let is_guests = |id: &u64| !self.flushes.is_base(*id);
        let given = self.given.iter().filter(|(id, _)| is_guests(id));
        let given = given.map(|(_, given)| given.since).min();
        let oldest = waiting.into_iter().chain(given).min();
        if oldest.is_some_and(|since| now >= since + self.outlet.patience()) {
            self.away_until = Some(now + AWAY);
            self.outlet.kept_waiting();
        }
        self.away_until.is_some_and(|until| now < until)
    }

    fn look(&mut self, flow: &mut Flow<'_>) {
        self.book_wait(flow.now());
        let lost = self.course.take_lost();
        // A flush may be lost, too.
        if !lost.is_empty() {
            self.flushes.lost();
        }
        let steps = lost.iter().flat_map(|range| self.mirror.lost(range));
        let steps = steps.collect();
        self.carry_out(steps, flow);
        for range in std::mem::take(&mut *lock(&self.course.0.zero)) {
            self.mirror.skip(&range);
        }
        let is_bound = self.course.is_bound();
        if !is_bound {
            for id in std::mem::take(&mut self.unlike) {
                self.leave_to_the_source(id, flow);
            }
            if self.course.0.given_up.load(Ordering::Acquire) {
                self.detach(flow);
                let steps = self.mirror.give_up();
                return self.carry_out(steps, flow);
            }
        }
        if self.copying.rests {
            self.copying.pause();
            let steps = self.mirror.allow(0);
            self.carry_out(steps, flow);
        }
        let is_silent =
            !is_bound && (self.keeps_somebody_waiting(flow.now()) || self.outlet.is_silent());
        match self.mirror.phase() {
            Phase::Detached if !is_silent && self.course.0.begun.load(Ordering::Acquire) => {
                let steps = self.mirror.attach();
                self.carry_out(steps, flow);
            }
            Phase::Copying | Phase::Synchronised if is_silent => self.detach(flow),
            Phase::Synchronised => self.make_base(),
            _ => {}
        }
        if self.mirror.phase() == Phase::Synchronised && self.outlet.confirms() {
            self.course.may_bind();
        }
        self.give_writes(flow);
        self.give_copies(flow);
        self.copying.look(&mut *self.outlet);
        let steps = self.keep_pace(flow.now());
        self.carry_out(steps, flow);
    }
}

impl Filter for Mirroring {
    fn passes_down(&mut self, request: &Request, _now: Instant) -> bool {
        let passes = self.route(&request.work) == Route::Alone(Side::Source);
        if passes {
            self.copying.begins();
        }
        passes
    }

    fn passes_up(&mut self, request: &Request, _outcome: Outcome, _now: Instant) -> bool {
        let passes = !request.work.changes();
        if passes {
            self.copying.ends();
        }
        passes
    }

    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        self.copying.begins();
        match (self.route(&request.work), request.work.range().cloned()) {
            (Route::Mirrored, Some(range)) => {
                self.last_write += 1;
                let id = self.last_write;
                self.writes.insert(id, (Some(request), None));
                let steps = self.mirror.write(id, range);
                self.carry_out(steps, flow);
            }
            (Route::Both, _) => self.flush_both(request, flow),
            _ => flow.down(request),
        }
    }

    fn up(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        let Some(id) = self.below.remove(&(request.maker, request.token)) else {
            return self.pass_up(request, outcome, flow);
        };
        self.writes.insert(id, (Some(request), Some(outcome)));
        let steps = self
            .mirror
            .written(id, Side::Source, outcome == Outcome::Done);
        self.carry_out(steps, flow);
    }

    fn made(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        let (kind, id) = (request.token & KIND, request.token & !KIND);
        if kind == COPY {
            return self.read_region(request, outcome, flow);
        }
        if let Some(flush) = self.flushing.get_mut(&id) {
            flush.outcome = Some(outcome);
            return self.end_flush(id, Side::Source, flow);
        }
        if let Some(write) = self.writes.get_mut(&id) {
            write.1 = Some(outcome);
        }
        let steps = self
            .mirror
            .written(id, Side::Source, outcome == Outcome::Done);
        self.carry_out(steps, flow);
    }

    fn rest(&mut self, rests: bool) {
        self.copying.rests = rests;
        self.next_look = Instant::now();
    }

    fn wake_at(&self) -> Option<Instant> {
        (self.mirror.phase() != Phase::Ended).then_some(self.next_look)
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.outlet.bell()
    }

    fn wake(&mut self, flow: &mut Flow<'_>) {
        self.hear(flow);
        if flow.now() < self.next_look {
            return self.give_writes(flow);
        }
        self.next_look = flow.now() + LOOK_EVERY;
        self.look(flow);
    }
}

/// Whoever steers it must not take both sides for equal any longer: what is written from now on goes to one alone.
impl Drop for Mirroring {
    fn drop(&mut self) {
        if self.mirror.phase() != Phase::Ended {
            self.course.fail("it is not mirrored any more".to_owned());
        }
    }
}

#[cfg(test)]
#[path = "mirroring_tests.rs"]
mod tests;
