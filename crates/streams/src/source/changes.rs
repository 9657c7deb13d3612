//! Changes of a VM's disks on their way to the destination.
//!
//! Whoever mirrors a disk gives changes; each gets the next number and goes to the channel that has least to send. One thread
//! per channel owns its queue, so that channels share nothing; the later number wins at the destination, whichever way is
//! faster. What is under way is bounded: whoever gives asks for room first.
//!
//! [`Changes`] lives as long as the migration; channels come and go with its connection sets. What a lost set had under way is
//! told to who gave it, by disk. Refuses: nothing that is given; without channels it is lost at once.

use super::connections::FAR_RTT;
use super::ending::Ending;
use super::events::{FromPeer, Happened, SetEvent, TellDriver};
use super::maker::{Joining, Maker};
use super::sender::{FINISH_WAIT, SILENCE_MAX};
use godwit_blockio::filters::{Change, Course, Origin, Outlet};
use godwit_transport::{Closer, Connection, Meter, Patience, RecordWriter, TransportError};
use godwit_wire::{ChangeKind, DiskChange, PAYLOAD_LEN_MAX};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes of each origin that may be under way.
const UNDER_WAY_MAX: u64 = 64 << 20;
/// Changes of both together that may be, which bounds what the destination has to remember.
const COUNT_MAX: usize = 1 << 16;
/// A change without content counts as so many bytes.
const ZERO_COST: u64 = 4096;
/// A destination from which nothing is heard for so long, or for four round trips, is waited for by nobody.
const SILENT_FOR: Duration = Duration::from_millis(500);
/// Nor is one that is heard and carries nothing out for so long.
const STUCK_FOR: Duration = Duration::from_secs(2);

/// How many channels are made. Each carries out one change at a time at the destination, and a far one has more under way.
pub(super) fn channels_for(rtt: Duration) -> u32 {
    if rtt < FAR_RTT { 8 } else { 16 }
}

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
}

/// A change that is under way.
#[derive(Debug)]
struct Sent {
    disk: u8,
    number: u64,
    range: Range<u64>,
    origin: Origin,
    cost: u64,
}

/// A change that waits for its channel.
#[derive(Debug)]
enum Task {
    Send(Sent, Change),
    End,
}

/// One thread and what it has to send.
#[derive(Debug)]
struct Lane {
    tasks: Sender<Task>,
    waiting: Arc<AtomicU64>,
    /// By the number of records that had left with it, ascending.
    sent: Arc<Mutex<VecDeque<(u64, Sent)>>>,
    meter: Arc<Meter>,
    /// How long the destination has written what came on it, once it has told.
    writing: Option<Duration>,
    closer: Closer,
    /// Gives back what it has not sent.
    thread: JoinHandle<Vec<Sent>>,
}

impl Default for Changes {
    fn default() -> Self {
        Self(Arc::new(Shared {
            began: Instant::now(),
            under_way: [AtomicU64::new(0), AtomicU64::new(0)],
            heard_ms: AtomicU64::new(0),
            moved_ms: AtomicU64::new(0),
            silent_ms: AtomicU64::new(SILENT_FOR.as_millis() as u64),
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
    pub fn of_disk(&self, disk: u8, course: &Course) -> Box<dyn Outlet> {
        lock(&self.0.courses).insert(disk, course.clone());
        Box::new(DiskOutlet {
            changes: self.clone(),
            disk,
        })
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
            state.carried_out(sent.number);
            self.0.ended(sent);
        }
        self.0.below.store(state.below, Ordering::Release);
        if !done.is_empty() {
            self.0.moved_ms.store(self.0.now_ms(), Ordering::Relaxed);
        }
    }

    /// Makes the channels of a new set.
    pub(super) fn open(
        &self,
        maker: &Maker,
        rtt: Duration,
        (until, ending): (Instant, &Ending),
        tell: &TellDriver,
    ) -> Result<(), TransportError> {
        let indices = 0..channels_for(rtt) as usize;
        let joining = indices.map(|index| maker.begin_changes(index, until));
        let joining: Vec<Joining> = joining.collect::<Result<_, _>>()?;
        let made = joining.iter().map(|joining| joining.wait(until, ending));
        let made: Vec<Connection> = made.collect::<Result<_, _>>()?;
        self.attach(maker.number, made, rtt, tell)
    }

    /// Takes the channels of a new set.
    fn attach(
        &self,
        set: u16,
        connections: Vec<Connection>,
        rtt: Duration,
        tell: &TellDriver,
    ) -> Result<(), TransportError> {
        let lanes = connections.into_iter().map(|connection| {
            let below = Arc::clone(&self.0.below);
            Lane::start(set, connection, below, tell)
        });
        let lanes: Result<Vec<Lane>, TransportError> = lanes.collect();
        let silent = SILENT_FOR.max(4 * rtt).as_millis() as u64;
        self.0.silent_ms.store(silent, Ordering::Relaxed);
        self.heard();
        let mut state = self.0.lock();
        (state.set, state.lanes) = (set, lanes?);
        Ok(())
    }

    /// The channels are lost, with what was under way. When this returns nothing leaves on them any more.
    pub(super) fn detach(&self) {
        let lanes = std::mem::take(&mut self.0.lock().lanes);
        lanes.iter().for_each(|lane| lane.closer.close());
        for lane in lanes {
            drop(lane.tasks);
            let unsent = lane.thread.join().unwrap_or_default();
            let sent = std::mem::take(&mut *lock(&lane.sent));
            for one in unsent
                .into_iter()
                .chain(sent.into_iter().map(|(_, sent)| sent))
            {
                self.lose(one);
            }
        }
    }

    fn lose(&self, one: Sent) {
        // First of all: who sees it as no longer under way must see it as lost.
        if let Some(course) = lock(&self.0.courses).get(&one.disk) {
            course.lose(one.range.clone());
        }
        self.0.lock().carried_out(one.number);
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

    fn give(&self, disk: u8, origin: Origin, range: Range<u64>, change: Change) {
        let len = range.end.saturating_sub(range.start);
        let cost = match &change {
            Change::Written(..) => len,
            Change::Zeroed => ZERO_COST,
        };
        let shared = &self.0;
        if self.under_way_bytes() == 0 {
            // It had nothing to carry out before.
            shared.moved_ms.store(shared.now_ms(), Ordering::Relaxed);
        }
        shared
            .under_way_of(origin)
            .fetch_add(cost, Ordering::AcqRel);
        let mut state = shared.lock();
        let number = state.below + state.carried.len() as u64;
        state.carried.push_back(false);
        let sent = Sent {
            disk,
            number,
            range,
            origin,
            cost,
        };
        let lanes = state.lanes.iter();
        let Some(lane) = lanes.min_by_key(|lane| lane.waiting.load(Ordering::Relaxed)) else {
            drop(state);
            return self.lose(sent);
        };
        lane.waiting.fetch_add(cost, Ordering::Relaxed);
        if let Err(unsent) = lane.tasks.send(Task::Send(sent, change)) {
            drop(state);
            if let Task::Send(sent, _) = unsent.0 {
                self.lose(sent);
            }
        }
    }

    fn is_silent(&self) -> bool {
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

impl Lane {
    fn start(
        set: u16,
        connection: Connection,
        below: Arc<AtomicU64>,
        tell: &TellDriver,
    ) -> Result<Self, TransportError> {
        let closer = connection.closer();
        let writer = connection.split().1;
        let meter = writer.meter();
        let (tasks, received) = channel();
        let (waiting, sent) = (Arc::new(AtomicU64::new(0)), Arc::default());
        let mut worker = Worker {
            writer,
            below,
            waiting: Arc::clone(&waiting),
            sent: Arc::clone(&sent),
        };
        let tell = Arc::clone(tell);
        let work = move || worker.run(&received, set, &tell);
        let thread = std::thread::Builder::new()
            .name("send-disk".into())
            .spawn(work);
        let thread = thread.map_err(|source| TransportError::System {
            doing: "start a thread that sends a disk's changes",
            source,
        })?;
        Ok(Self {
            tasks,
            waiting,
            sent,
            meter,
            writing: None,
            closer,
            thread,
        })
    }
}

/// What a channel's thread has.
struct Worker {
    writer: RecordWriter,
    below: Arc<AtomicU64>,
    waiting: Arc<AtomicU64>,
    sent: Arc<Mutex<VecDeque<(u64, Sent)>>>,
}

impl Worker {
    /// Sends until the channel fails or is to end; gives back what was not sent.
    fn run(&mut self, tasks: &Receiver<Task>, set: u16, tell: &TellDriver) -> Vec<Sent> {
        let mut unsent = Vec::new();
        let mut has_failed = false;
        for task in tasks {
            let failed = match task {
                Task::Send(sent, _) if has_failed => {
                    unsent.push(sent);
                    continue;
                }
                Task::Send(sent, change) => self.send(sent, &change),
                Task::End => self.writer.finish(&Patience::idle(FINISH_WAIT)),
            };
            if let Err(error) = failed
                && !std::mem::replace(&mut has_failed, true)
            {
                let (from, at) = (FromPeer::of(&error), Instant::now());
                let what = Happened::Peer { from, at };
                // The driver is gone only when nobody needs to know.
                let _ = tell(SetEvent { set, what });
            }
        }
        unsent
    }

    /// Booked before it leaves: the destination may answer at once.
    fn send(&mut self, sent: Sent, change: &Change) -> Result<(), TransportError> {
        let (range, number) = (sent.range.clone(), sent.number);
        let len = (range.end - range.start) as usize;
        let (kind, bytes) = match change {
            Change::Written(buffer, at) => {
                let bytes = buffer.bytes().get(*at..*at + len);
                (ChangeKind::Written, bytes.unwrap_or_default())
            }
            Change::Zeroed => (ChangeKind::Zeroed, &[][..]),
        };
        let change = DiskChange {
            disk: sent.disk,
            kind,
            range,
            number,
            below: self.below.load(Ordering::Acquire).min(number),
        };
        self.waiting.fetch_sub(sent.cost, Ordering::Relaxed);
        let records = self.writer.next_counter() + 1 + u64::from(kind == ChangeKind::Written);
        lock(&self.sent).push_back((records, sent));
        let patience = Patience::idle(SILENCE_MAX);
        self.writer.send_change(&change, bytes, &patience)
    }
}

/// Where the changes of one disk go.
struct DiskOutlet {
    changes: Changes,
    disk: u8,
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

    /// A record holds a part of a change at most.
    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change) {
        let Change::Written(buffer, at) = change else {
            return self.changes.give(self.disk, origin, range, change);
        };
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start + PAYLOAD_LEN_MAX as u64);
            let inside = at + (start - range.start) as usize;
            let piece = Change::Written(Arc::clone(&buffer), inside);
            self.changes.give(self.disk, origin, start..end, piece);
            start = end;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
