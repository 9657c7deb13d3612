//! The data channels of one connection set at the destination, and the barrier that waits for what they carry.
//!
//! Owned by the driver. Channels join as long as the set lives and end in good order or take the set with them. A
//! barrier is a state and no wait, so that the driver hears its other peers meanwhile. Refuses: an index beyond the
//! protocol's bound, and a barrier for which nothing moves any more.

use super::changes::{ChangeChannels, Disks, TellApplied};
use super::memory::Memory;
use super::progress::{End, Progress};
use super::receiver;
use crate::control::SharedControl;
use godwit_migrate::protocol::{STREAMS_MAX, ToSource};
use godwit_transport::{Closer, Connection, Meter, RecordReader, TransportError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A barrier for which no byte comes for this long is lost.
const STANDSTILL_MAX: Duration = Duration::from_secs(30);

/// A data channel, or the place of one that may still come.
#[derive(Default)]
struct Channel {
    progress: Arc<Progress>,
    closer: Option<Closer>,
    meter: Option<Arc<Meter>>,
    /// Gives the channel back.
    thread: Option<JoinHandle<RecordReader>>,
    /// A channel that is read no more. It stays open, since to the source an end would be a lost link.
    unread: Option<RecordReader>,
    told: u64,
}

/// A barrier that is not reached yet.
struct Barrier {
    iteration: u32,
    sent: Vec<u64>,
    /// Nothing follows: disks are whole, too.
    is_last: bool,
    bytes: u64,
    moved: Instant,
}

/// What an iteration looked like from here: shares of its time, means over the channels.
pub struct Shares {
    pub memory_wait: f32,
    pub busy: f32,
}

/// The channels of a connection set.
pub struct Channels {
    slots: Vec<Channel>,
    /// So many connect at once; further ones join later.
    first: usize,
    barrier: Option<Barrier>,
    barrier_at: Instant,
    first_pass: Arc<AtomicBool>,
    /// The last barrier is reached: nothing is read any more.
    received: bool,
    /// Channels that came after that.
    late: Vec<Connection>,
    /// On them come disks, and no memory.
    changes: ChangeChannels,
}

impl Channels {
    /// None yet: the set's first word has not come. `first_pass` outlives the set: whether no pass was complete so far. What a guest waits
    /// for is told by `tell`.
    pub fn new(first_pass: Arc<AtomicBool>, disks: Disks, tell: TellApplied) -> Self {
        Self {
            slots: Vec::new(),
            first: 0,
            barrier: None,
            barrier_at: Instant::now(),
            first_pass,
            received: false,
            late: Vec::new(),
            changes: ChangeChannels::new(disks, tell),
        }
    }

    /// The disks are a guest's that runs here: nothing keeps their images from here on.
    pub fn let_go_of_disks(&mut self) {
        self.changes.let_go_of_disks();
    }

    /// The set has begun with this many, and these beside them for changes of disks; `false`: it had begun before.
    pub fn begin(&mut self, first: u32, changes: u32) -> bool {
        if !self.slots.is_empty() {
            return false;
        }
        self.first = first as usize;
        self.changes.begin(changes);
        self.slots = (0..STREAMS_MAX).map(|_| Channel::default()).collect();
        true
    }

    /// Whether those that connect at once have come.
    pub fn complete(&self) -> bool {
        let come = self.slots.iter().filter(|slot| slot.thread.is_some());
        !self.slots.is_empty() && come.count() >= self.first && self.changes.complete()
    }

    /// Channels that carry something now.
    pub fn open(&self) -> u32 {
        let open = |slot: &&Channel| slot.thread.is_some() && slot.progress.read().1.is_none();
        self.slots.iter().filter(open).count() as u32
    }

    /// Takes a channel in; gives it back when the set has not begun.
    pub fn admit(
        &mut self,
        connection: Connection,
        memory: &Arc<Memory>,
    ) -> Result<Option<Connection>, String> {
        if self.slots.is_empty() {
            return Ok(Some(connection));
        }
        if let Some(index) = connection.channel().changes_index() {
            return self.changes.admit(index, connection).map(|()| None);
        }
        if self.received {
            return self.keep_unread(connection).map(|()| None);
        }
        let index = usize::from(connection.channel().index());
        let Some(slot) = self.slots.get_mut(index) else {
            return Err("the source opened more channels than may be".into());
        };
        slot.closer = Some(connection.closer());
        let (reader, _) = connection.split();
        slot.meter = Some(reader.meter());
        let (memory, progress) = (Arc::clone(memory), Arc::clone(&slot.progress));
        let thread = receiver::start(reader, memory, progress, Arc::clone(&self.first_pass));
        let thread = thread.map_err(|error| format!("cannot start a receiving thread: {error}"));
        slot.thread = Some(thread?);
        Ok(None)
    }

    /// One that was on its way when the last pages had come: it carries nothing, and stays open until the set ends.
    fn keep_unread(&mut self, connection: Connection) -> Result<(), String> {
        if self.late.len() >= STREAMS_MAX as usize {
            return Err("the source opened more channels than may be".into());
        }
        self.late.push(connection);
        Ok(())
    }

    /// Everything has come: when this returns nothing that the source sends reaches guest memory any more, neither on
    /// these channels nor on later ones of this set.
    pub fn end_receiving(&mut self) {
        self.received = true;
        for closer in self.slots.iter().filter_map(|slot| slot.closer.as_ref()) {
            closer.stop_reading();
        }
        for slot in &mut self.slots {
            let ended = slot.thread.take().map(JoinHandle::join);
            slot.unread = ended.and_then(Result::ok);
        }
    }

    /// How a channel ended that did not end in good order.
    pub fn failure(&self) -> Option<End> {
        if self.received {
            return None;
        }
        let mut ends = self.slots.iter().filter_map(|slot| slot.progress.read().1);
        let failed = ends.find(|end| *end != End::Finished);
        failed.or_else(|| self.changes.failure())
    }

    /// Says what was applied since it was last said.
    pub fn tell_applied(&mut self, control: &SharedControl) -> Result<(), TransportError> {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let (applied, _) = slot.progress.read();
            if applied > slot.told {
                slot.told = applied;
                control.send(&ToSource::Applied {
                    channel: index as u32,
                    records: applied,
                })?;
            }
        }
        self.changes.tell_applied(control)
    }

    /// Everything that was sent before must be applied before anything that follows. Of the last one, what disks were to
    /// get, too: their channels end.
    pub fn raise_barrier(&mut self, iteration: u32, sent: Vec<u64>, is_last: bool) {
        self.barrier = Some(Barrier {
            iteration,
            sent,
            is_last,
            bytes: self.bytes(),
            moved: Instant::now(),
        });
    }

    /// Whether a barrier waits.
    pub fn is_barred(&self) -> bool {
        self.barrier.is_some()
    }

    /// Waits a moment for the barrier; gives its iteration once it is reached.
    pub fn reach_barrier(&mut self, moment: Duration) -> Result<Option<u32>, End> {
        let Some(barrier) = &self.barrier else {
            return Ok(None);
        };
        let until = Instant::now() + moment;
        for (slot, records) in self.slots.iter().zip(&barrier.sent) {
            if !slot.progress.wait_for(*records, until)? {
                return self.still_moving().map(|()| None);
            }
        }
        if barrier.is_last && !self.changes.have_ended(until)? {
            return self.still_moving().map(|()| None);
        }
        let iteration = barrier.iteration;
        self.barrier = None;
        self.first_pass.store(false, Ordering::Relaxed);
        Ok(Some(iteration))
    }

    fn still_moving(&mut self) -> Result<(), End> {
        let bytes = self.bytes();
        let Some(barrier) = &mut self.barrier else {
            return Ok(());
        };
        if bytes != barrier.bytes {
            barrier.bytes = bytes;
            barrier.moved = Instant::now();
        }
        if barrier.moved.elapsed() < STANDSTILL_MAX {
            return Ok(());
        }
        let seconds = STANDSTILL_MAX.as_secs();
        Err(End::Lost(format!(
            "nothing came on the data channels for {seconds} s"
        )))
    }

    /// Bytes that have come on them so far.
    pub fn bytes(&self) -> u64 {
        let meters = self.slots.iter().filter_map(|slot| slot.meter.as_ref());
        let memory: u64 = meters.map(|meter| meter.read().bytes).sum();
        memory.saturating_add(self.changes.bytes())
    }

    /// What the iteration that ends now looked like.
    pub fn take_shares(&mut self) -> Shares {
        let times = self.slots.iter().map(|slot| slot.progress.take_times());
        let (busy, memory) = times.fold((0.0, 0.0), |(busy, memory), (b, m)| {
            (busy + b.as_secs_f64(), memory + m.as_secs_f64())
        });
        let threads_s = self.barrier_at.elapsed().as_secs_f64() * f64::from(self.open().max(1));
        self.barrier_at = Instant::now();
        Shares {
            memory_wait: (memory / threads_s) as f32,
            busy: (busy / threads_s) as f32,
        }
    }

    /// Makes everything durable that disks were to get.
    pub fn sync_disks(&self) -> Result<(), String> {
        self.changes.sync()
    }

    /// Closes all: when this returns nothing of them writes memory or disks any more.
    pub fn close(&mut self) {
        self.changes.close();
        for slot in &mut self.slots {
            if let Some(closer) = &slot.closer {
                closer.close();
            }
            if let Some(thread) = slot.thread.take() {
                let _ = thread.join();
            }
            slot.unread = None;
        }
        self.late.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun() -> Channels {
        let first_pass = Arc::new(AtomicBool::new(true));
        let mut channels = Channels::new(first_pass, Disks::default(), Arc::new(|_, _| Ok(())));
        assert!(channels.begin(2, 0));
        assert!(!channels.begin(2, 0), "begun twice");
        channels
    }

    #[test]
    fn a_barrier_waits_for_the_channels_that_it_names_and_for_no_others() {
        let mut channels = begun();
        channels.raise_barrier(3, vec![2, 0, 5], false);
        channels.slots[0].progress.applied(2);
        assert_eq!(channels.reach_barrier(Duration::ZERO), Ok(None));
        channels.slots[2].progress.applied(5);
        assert_eq!(channels.reach_barrier(Duration::ZERO), Ok(Some(3)));
        assert!(!channels.is_barred());
    }

    #[test]
    fn a_channel_that_was_taken_out_holds_no_barrier_up() {
        let mut channels = begun();
        channels.slots[0].progress.applied(7);
        channels.slots[0].progress.ended(End::Finished);
        channels.raise_barrier(1, vec![7], true);
        assert_eq!(channels.reach_barrier(Duration::ZERO), Ok(Some(1)));
        assert_eq!(channels.failure(), None);
    }

    #[test]
    fn a_channel_that_ended_too_early_fails_the_barrier() {
        let mut channels = begun();
        channels.slots[1].progress.ended(End::Finished);
        channels.raise_barrier(1, vec![0, 1], false);
        let failed = channels.reach_barrier(Duration::from_secs(60));
        assert!(matches!(failed, Err(End::Failed(_))), "{failed:?}");
    }
}
