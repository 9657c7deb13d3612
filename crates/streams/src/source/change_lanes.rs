//! The channels on which changes of disks leave, each with a thread that owns its queue.
//!
//! Owned by [`Changes`](super::changes::Changes), which chooses the channel. Refuses nothing that is given; what was not sent when a channel
//! ends is given back.

use super::awaited::Awaited;
use super::changes::lock;
use super::events::{FromPeer, Happened, SetEvent, TellDriver};
use super::sender::{FINISH_WAIT, SILENCE_MAX};
use godwit_blockio::filters::{Change, Origin};
use godwit_transport::{Closer, Connection, Meter, Patience, RecordWriter, TransportError};
use godwit_wire::{ChangeKind, DiskChange};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the destination is to do.
#[derive(Debug)]
pub(super) enum Order {
    Change(Change),
    /// Makes durable what it has carried out before.
    Flush,
}

impl Order {
    fn kind(&self) -> ChangeKind {
        match self {
            Self::Change(Change::Written(..)) => ChangeKind::Written,
            Self::Change(Change::Zeroed) => ChangeKind::Zeroed,
            Self::Flush => ChangeKind::Flushed,
        }
    }
}

/// An order that is under way.
#[derive(Debug)]
pub(super) struct Sent {
    pub disk: u8,
    pub number: u64,
    pub range: Range<u64>,
    pub origin: Origin,
    /// Bytes that it counts for among those that are under way.
    pub cost: u64,
    /// The guest waits for it.
    pub awaited: Option<Arc<Awaited>>,
}

/// A flush takes as long as a change of so many bytes, or so.
const FLUSH_WEIGHT: u64 = 1 << 20;

impl Sent {
    /// A flush has no bytes, and its number is that of the change that follows.
    pub fn is_flush(&self) -> bool {
        self.range.is_empty()
    }

    /// What it counts for in the choice of a channel.
    pub fn weight(&self) -> u64 {
        match self.is_flush() {
            true => FLUSH_WEIGHT,
            false => self.cost,
        }
    }
}

/// An order that waits for its channel.
#[derive(Debug)]
pub(super) enum Task {
    Send(Sent, Order),
    End,
}

/// One thread and what it has to send.
#[derive(Debug)]
pub(super) struct Lane {
    pub tasks: Sender<Task>,
    /// Weight of all that was given to it and is not carried out.
    pub load: u64,
    /// By the number of records that had left with it, ascending.
    pub sent: Arc<Mutex<VecDeque<(u64, Sent)>>>,
    pub meter: Arc<Meter>,
    /// How long the destination has written what came on it, once it has told.
    pub writing: Option<Duration>,
    pub closer: Closer,
    /// Gives back what it has not sent.
    pub thread: JoinHandle<Vec<Sent>>,
}

impl Lane {
    pub(super) fn start(
        set: u16,
        connection: Connection,
        below: Arc<AtomicU64>,
        tell: &TellDriver,
    ) -> Result<Self, TransportError> {
        let closer = connection.closer();
        let writer = connection.split().1;
        let meter = writer.meter();
        let (tasks, received) = channel();
        let sent = Arc::default();
        let mut worker = Worker {
            writer,
            below,
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
            load: 0,
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
                Task::Send(sent, order) => self.send(sent, &order),
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
    fn send(&mut self, sent: Sent, order: &Order) -> Result<(), TransportError> {
        let (range, number) = (sent.range.clone(), sent.number);
        let len = (range.end - range.start) as usize;
        let bytes = match order {
            Order::Change(Change::Written(buffer, at)) => buffer.bytes().get(*at..*at + len),
            Order::Change(Change::Zeroed) | Order::Flush => None,
        };
        let change = DiskChange {
            disk: sent.disk,
            kind: order.kind(),
            awaited: sent.awaited.is_some(),
            range,
            number,
            below: self.below.load(Ordering::Acquire).min(number),
        };
        let follows = change.kind == ChangeKind::Written;
        let records = self.writer.next_counter() + 1 + u64::from(follows);
        lock(&self.sent).push_back((records, sent));
        let patience = Patience::idle(SILENCE_MAX);
        self.writer
            .send_change(&change, bytes.unwrap_or_default(), &patience)
    }
}
