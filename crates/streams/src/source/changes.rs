//! Changes of a VM's disks on their way to the destination.
//!
//! Whoever mirrors a disk gives changes; each gets the next number and goes to the channel that has least under way. One thread
//! per channel owns its queue, so that channels share nothing; the later number wins at the destination, whichever way is
//! faster. What is under way is bounded: whoever gives asks for room first.
//!
//! On a near link the guest waits until its writes are carried out, and has channels of its own, so that they do not queue behind
//! what is copied; on a far one its source's answer is enough.
//!
//! [`Changes`] lives as long as the migration; channels come and go with its connection sets. What a lost set had under way is
//! told to who gave it, by disk. Refuses: nothing that is given; without channels it is lost at once.

use super::awaited::{Awaited, Over};
use super::change_lanes::{Lane, Order, Sent, Task};
use super::connections::FAR_RTT;
use super::ending::Ending;
use super::events::TellDriver;
use super::maker::{Joining, Maker};
use godwit_blockio::filters::{Change, Course, Origin, Outlet, PATIENCE};
use godwit_transport::{Connection, TransportError};
use godwit_types::version::MIGRATION_WITH_AWAITED_CHANGES;
use godwit_wire::PAYLOAD_LEN_MAX;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SendError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many channels are made. Each carries out one change at a time at the destination, and a far one has more under way.
pub(super) const CHANNELS: u32 = 16;
/// Bytes of each origin that may be under way.
const UNDER_WAY_MAX: u64 = 64 << 20;
/// Changes of both together that may be, which bounds what the destination has to remember.
const COUNT_MAX: usize = 1 << 16;
/// A change without content counts as so many bytes.
const ZERO_COST: u64 = 4096;
/// A destination that is heard and carries nothing out for so long is waited for by nobody, as is one that is silent.
const STUCK_FOR: Duration = Duration::from_secs(2);

/// A VM's disks' changes. Clones are the same ones.
#[derive(Debug, Clone)]
pub struct Changes(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    began: Instant,
    /// By origin: bytes.
    under_way: [AtomicU64; 2],
    /// When the destination was heard, and when it had carried something out, in ms since it began.
    heard_ms: AtomicU64,
    moved_ms: AtomicU64,
    silent_ms: AtomicU64,
    /// Whether guests wait until the destination has carried out what they write.
    awaits: AtomicBool,
    /// The destination has kept a guest waiting for too long: nobody waits for it any more.
    is_slow: AtomicBool,
    /// No change with a lower number is under way.
    below: Arc<AtomicU64>,
    state: Mutex<State>,
    /// By disk: who hears what may have been lost.
    courses: Mutex<BTreeMap<u8, Course>>,
}

#[derive(Debug, Default)]
struct State {
    /// The connection set of the lanes.
    set: u16,
    lanes: Vec<Lane>,
    /// The number of the first of `carried`, or of the next change.
    below: u64,
    /// Whether the destination has carried it out, or it is lost.
    carried: VecDeque<bool>,
    /// Flushes that wait until all is carried out that was given before, oldest first.
    flushes: VecDeque<Sent>,
}

/// What the channels of a set are made on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub rtt: Duration,
    /// The version of the control channel.
    pub protocol: u32,
}

impl Link {
    /// Whether guests wait for the destination: where that costs them little, and it says at once what it has done.
    fn is_awaited(&self) -> bool {
        self.rtt < FAR_RTT && self.protocol >= MIGRATION_WITH_AWAITED_CHANGES
    }
}

/// Where an order belongs.
struct To {
    disk: u8,
    origin: Origin,
    range: Range<u64>,
    awaited: Option<Arc<Awaited>>,
}

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(Shared {
            began: Instant::now(),
            under_way: [AtomicU64::new(0), AtomicU64::new(0)],
            heard_ms: AtomicU64::new(0),
            moved_ms: AtomicU64::new(0),
            silent_ms: AtomicU64::new(PATIENCE.as_millis() as u64),
            awaits: AtomicBool::new(false),
            is_slow: AtomicBool::new(false),
            below: Arc::new(AtomicU64::new(1)),
            state: Mutex::new(State {
                below: 1,
                ..State::default()
            }),
            courses: Mutex::default(),
        }))
    }
}

impl Changes {
    /// Where the changes of a disk go, by its place in the VM. What may not come is told to its course.
    pub fn of_disk(
        &self,
        disk: u8,
        course: &Course,
    ) -> Result<Box<dyn Outlet>, godwit_blockio::Error> {
        let over = Over::new()?;
        lock(&self.0.courses).insert(disk, course.clone());
        Ok(Box::new(DiskOutlet {
            changes: self.clone(),
            disk,
            over,
        }))
    }

    /// Bytes that the destination has not carried out.
    pub fn under_way_bytes(&self) -> u64 {
        let bytes = self.0.under_way.iter();
        bytes.map(|bytes| bytes.load(Ordering::Acquire)).sum()
    }

    /// The destination was heard.
    fn heard(&self) {
        self.0.heard_ms.store(self.0.now_ms(), Ordering::Relaxed);
    }

    /// How long each channel of the present set has written at the destination, on average; nothing where that is not told.
    pub fn writing(&self) -> Option<Duration> {
        let state = self.0.lock();
        let count = u32::try_from(state.lanes.len()).ok()?;
        let all: Option<Duration> = state.lanes.iter().map(|lane| lane.writing).sum();
        all?.checked_div(count)
    }

    /// The destination has carried out what came in so many records of a channel of this connection set, and has written for so
    /// long. What is still heard of an earlier set is of channels that are gone.
    pub(super) fn applied(
        &self,
        set: u16,
        channel: u32,
        (records, writing): (u64, Option<Duration>),
    ) {
        self.heard();
        let mut state = self.0.lock();
        if state.set != set {
            return;
        }
        let Some(lane) = state.lanes.get_mut(channel as usize) else {
            return;
        };
        lane.writing = lane.writing.max(writing);
        let mut done = Vec::new();
        {
            let mut sent = lock(&lane.sent);
            while sent.front().is_some_and(|(at, _)| *at <= records) {
                done.extend(sent.pop_front());
            }
        }
        for (_, sent) in &done {
            lane.load = lane.load.saturating_sub(sent.weight());
            self.0.ended(sent);
        }
        for (_, sent) in done.iter().filter(|(_, sent)| !sent.is_flush()) {
            state.carried_out(sent.number);
        }
        self.0.below.store(state.below, Ordering::Release);
        let unsent = state.begin_flushes();
        drop(state);
        unsent.into_iter().for_each(|flush| self.lose(flush));
        if !done.is_empty() {
            self.0.moved_ms.store(self.0.now_ms(), Ordering::Relaxed);
        }
    }

    /// Makes the channels of a new set.
    pub(super) fn open(
        &self,
        maker: &Maker,
        link: Link,
        (until, ending): (Instant, &Ending),
        tell: &TellDriver,
    ) -> Result<(), TransportError> {
        let indices = 0..CHANNELS as usize;
        let joining = indices.map(|index| maker.begin_changes(index, until));
        let joining: Vec<Joining> = joining.collect::<Result<_, _>>()?;
        let made = joining.iter().map(|joining| joining.wait(until, ending));
        let made: Vec<Connection> = made.collect::<Result<_, _>>()?;
        // The channels go over all ways there are.
        let rtts = made.iter().map(Connection::rtt);
        let rtt = rtts.fold(link.rtt, Duration::max);
        let link = Link { rtt, ..link };
        self.attach(maker.number, made, link, tell)
    }

    /// Takes the channels of a new set.
    fn attach(
        &self,
        set: u16,
        connections: Vec<Connection>,
        link: Link,
        tell: &TellDriver,
    ) -> Result<(), TransportError> {
        let lanes = connections.into_iter().map(|connection| {
            let below = Arc::clone(&self.0.below);
            Lane::start(set, connection, below, tell)
        });
        let lanes: Result<Vec<Lane>, TransportError> = lanes.collect();
        let silent = PATIENCE.max(4 * link.rtt).as_millis() as u64;
        self.0.silent_ms.store(silent, Ordering::Relaxed);
        let awaits = link.is_awaited();
        self.0.awaits.store(awaits, Ordering::Relaxed);
        let rtt_ms = link.rtt.as_secs_f64() * 1e3;
        match awaits {
            true => tracing::info!(
                rtt_ms,
                "guests wait until the destination has their writes, too"
            ),
            false => tracing::info!(
                rtt_ms,
                "guests' writes are answered by their own host alone"
            ),
        }
        self.heard();
        let mut state = self.0.lock();
        (state.set, state.lanes) = (set, lanes?);
        Ok(())
    }

    /// The channels are lost, with what was under way. When this returns nothing leaves on them any more.
    pub(super) fn detach(&self) {
        let (lanes, flushes) = {
            let mut state = self.0.lock();
            let flushes = std::mem::take(&mut state.flushes);
            (std::mem::take(&mut state.lanes), flushes)
        };
        lanes.iter().for_each(|lane| lane.closer.close());
        for lane in lanes {
            drop(lane.tasks);
            let Ok(unsent) = lane.thread.join() else {
                self.fail("a thread that sends changes of disks has ended by itself");
                continue;
            };
            let sent = std::mem::take(&mut *lock(&lane.sent));
            let sent = sent.into_iter().map(|(_, sent)| sent);
            unsent
                .into_iter()
                .chain(sent)
                .for_each(|one| self.lose(one));
        }
        flushes.into_iter().for_each(|flush| self.lose(flush));
    }

    /// Nobody knows what was lost.
    fn fail(&self, why: &str) {
        for course in lock(&self.0.courses).values() {
            course.fail(why.to_owned());
        }
    }

    fn lose(&self, one: Sent) {
        // First of all: who sees it as no longer under way must see it as lost.
        if let Some(course) = lock(&self.0.courses).get(&one.disk) {
            course.lose(one.range.clone());
        }
        if !one.is_flush() {
            self.0.lock().carried_out(one.number);
        }
        self.0.ended(&one);
    }

    /// Nothing more will be given: final records follow what is under way.
    pub(super) fn end(&self) {
        for lane in &self.0.lock().lanes {
            let _ = lane.tasks.send(Task::End);
        }
    }

    /// Bytes that the channels of the present set have carried.
    pub(super) fn bytes(&self) -> u64 {
        let state = self.0.lock();
        let bytes = state.lanes.iter().map(|lane| lane.meter.read().bytes);
        bytes.sum()
    }

    fn give(&self, order: Order, to: To) {
        let len = to.range.end.saturating_sub(to.range.start);
        let cost = match &order {
            Order::Change(Change::Written(..)) => len,
            Order::Change(Change::Zeroed) | Order::Flush => ZERO_COST,
        };
        let shared = &self.0;
        if self.under_way_bytes() == 0 {
            // It had nothing to carry out before.
            shared.moved_ms.store(shared.now_ms(), Ordering::Relaxed);
        }
        shared
            .under_way_of(to.origin)
            .fetch_add(cost, Ordering::AcqRel);
        let mut state = shared.lock();
        let number = state.below + state.carried.len() as u64;
        let sent = Sent {
            disk: to.disk,
            number,
            range: to.range,
            origin: to.origin,
            cost,
            awaited: to.awaited,
        };
        let unsent = match order {
            Order::Flush if !state.lanes.is_empty() => {
                state.flushes.push_back(sent);
                state.begin_flushes()
            }
            Order::Flush => vec![sent],
            order => {
                state.carried.push_back(false);
                let unsent = state.send((sent, order), self.awaits());
                unsent.into_iter().collect()
            }
        };
        drop(state);
        unsent.into_iter().for_each(|one| self.lose(one));
    }

    fn awaits(&self) -> bool {
        let is = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        is(&self.0.awaits) && !is(&self.0.is_slow)
    }

    /// Whether the destination does not answer what was given.
    pub fn is_silent(&self) -> bool {
        let shared = &self.0;
        let since = |at: &AtomicU64| shared.now_ms().saturating_sub(at.load(Ordering::Relaxed));
        let is_silent = since(&shared.heard_ms) > shared.silent_ms.load(Ordering::Relaxed);
        let is_stuck = since(&shared.moved_ms) > STUCK_FOR.as_millis() as u64;
        let waits = self.under_way_bytes() > 0 && (is_silent || is_stuck);
        waits || shared.lock().lanes.is_empty()
    }

    fn takes(&self, origin: Origin) -> bool {
        let under_way = self.0.under_way_of(origin).load(Ordering::Acquire);
        under_way < UNDER_WAY_MAX && self.0.lock().carried.len() < COUNT_MAX && !self.is_silent()
    }
}

impl Shared {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn under_way_of(&self, origin: Origin) -> &AtomicU64 {
        let [guest, copies] = &self.under_way;
        match origin {
            Origin::Guest => guest,
            Origin::Copy => copies,
        }
    }

    fn ended(&self, one: &Sent) {
        let under_way = self.under_way_of(one.origin);
        under_way.fetch_sub(one.cost, Ordering::AcqRel);
    }
}

impl State {
    /// The one with the least load: where guests wait, of those that are theirs.
    fn lane_for(&mut self, origin: Origin, awaits: bool) -> Option<&mut Lane> {
        let half = self.lanes.len() / 2;
        let lanes = match (awaits && half > 0, origin) {
            (false, _) => &mut self.lanes[..],
            (true, Origin::Guest) => self.lanes.split_at_mut(half).0,
            (true, Origin::Copy) => self.lanes.split_at_mut(half).1,
        };
        lanes.iter_mut().min_by_key(|lane| lane.load)
    }

    /// Gives back what no channel takes.
    fn send(&mut self, (sent, order): (Sent, Order), awaits: bool) -> Option<Sent> {
        let Some(lane) = self.lane_for(sent.origin, awaits) else {
            return Some(sent);
        };
        lane.load += sent.weight();
        match lane.tasks.send(Task::Send(sent, order)) {
            Err(SendError(Task::Send(sent, _))) => Some(sent),
            Err(SendError(Task::End)) | Ok(()) => None,
        }
    }

    /// Sends the flushes before which all is carried out. Gives back those that no channel takes.
    fn begin_flushes(&mut self) -> Vec<Sent> {
        let mut unsent = Vec::new();
        while let Some(flush) = self
            .flushes
            .pop_front_if(|flush| flush.number <= self.below)
        {
            unsent.extend(self.send((flush, Order::Flush), true));
        }
        unsent
    }

    fn carried_out(&mut self, number: u64) {
        let place = number.checked_sub(self.below);
        let place = place.and_then(|place| usize::try_from(place).ok());
        if let Some(carried) = place.and_then(|place| self.carried.get_mut(place)) {
            *carried = true;
        }
        while self.carried.front() == Some(&true) {
            self.carried.pop_front();
            self.below += 1;
        }
    }
}

/// Where the changes of one disk go.
struct DiskOutlet {
    changes: Changes,
    disk: u8,
    over: Arc<Over>,
}

impl DiskOutlet {
    /// A record holds a part of a change at most.
    fn give_parts(&self, whole: To, change: Change) {
        let Change::Written(buffer, at) = change else {
            return self.changes.give(Order::Change(change), whole);
        };
        let mut start = whole.range.start;
        while start < whole.range.end {
            let end = whole.range.end.min(start + PAYLOAD_LEN_MAX as u64);
            let inside = at + (start - whole.range.start) as usize;
            let piece = Change::Written(Arc::clone(&buffer), inside);
            let part = To {
                range: start..end,
                awaited: whole.awaited.clone(),
                ..whole
            };
            self.changes.give(Order::Change(piece), part);
            start = end;
        }
    }

    fn to(&self, origin: Origin, range: Range<u64>, awaited: Option<Arc<Awaited>>) -> To {
        let disk = self.disk;
        To {
            disk,
            origin,
            range,
            awaited,
        }
    }
}

impl Outlet for DiskOutlet {
    fn is_silent(&mut self) -> bool {
        self.changes.is_silent()
    }

    fn takes(&mut self, origin: Origin) -> bool {
        self.changes.takes(origin)
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(self.changes.0.silent_ms.load(Ordering::Relaxed))
    }

    fn is_behind(&mut self) -> bool {
        let under_way = self.changes.0.under_way_of(Origin::Copy);
        2 * under_way.load(Ordering::Acquire) > UNDER_WAY_MAX
    }

    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        self.give_parts(self.to(origin, range, None), change);
    }

    fn confirms(&self) -> bool {
        self.changes.awaits()
    }

    fn may_be_left_alone(&self) -> bool {
        self.confirms()
    }

    fn kept_waiting(&mut self) {
        if self.confirms() {
            self.changes.0.is_slow.store(true, Ordering::Relaxed);
            tracing::warn!(
                "the destination kept a guest waiting for too long: from now on it is answered by its own host alone"
            );
        }
    }

    fn give_write(&mut self, number: u64, range: Range<u64>, change: Change) -> bool {
        let awaited = self.confirms().then(|| Awaited::begin(number, &self.over));
        let confirms = awaited.is_some();
        self.give_parts(self.to(Origin::Guest, range, awaited), change);
        confirms
    }

    fn flush(&mut self, number: u64) -> bool {
        if !self.confirms() {
            return false;
        }
        let awaited = Awaited::begin(number, &self.over);
        let to = self.to(Origin::Guest, 0..0, Some(awaited));
        self.changes.give(Order::Flush, to);
        true
    }

    fn take_ended(&mut self) -> Vec<u64> {
        self.over.take()
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.over.bell.as_fd())
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
