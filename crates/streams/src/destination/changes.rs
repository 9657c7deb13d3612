//! The channels on which changes of disks come: one thread each, which writes what comes into the image that it is for.
//!
//! Owned by the connection set. Threads share the images, where the later number wins, and the way back to the source, which hears at once
//! of what a guest waits for. Refuses: a disk that does not come, and whatever is no change.

use super::progress::{End, Progress};
use super::receiver::{ReceiveError, SILENCE_MAX};
use crate::faults::{planted, reached};
use godwit_blockio::{Arriving, Buffer};
use godwit_migrate::protocol::{CHANGE_CHANNELS_MAX, ToSource};
use godwit_transport::{Closer, Connection, Meter, Patience, RecordReader, TransportError};
use godwit_wire::{BELOW, ChangeKind, DiskChange, PAYLOAD_LEN_MAX, RecordKind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::control::SharedControl;

/// How often a source with disks hears how far they are, also where that is no news: it lets guests wait for a destination
/// that is slow, and not for one that is silent.
const TOLD_EVERY: Duration = Duration::from_millis(100);

/// The images that are to be filled, by the disk's place in the VM, and by that with [`godwit_wire::BELOW`] what lies below a top; empty: one that stays,
/// is there already, or is not known yet.
pub type Disks = Arc<Vec<OnceLock<Arriving>>>;

/// Tells the source at once that so many records of a channel, by its index, are carried out.
pub type TellApplied = Arc<dyn Fn(u32, u64) -> Result<(), TransportError> + Send + Sync>;

/// What tells it on this control channel.
pub fn tell_on(control: &Arc<SharedControl>) -> TellApplied {
    let control = Arc::clone(control);
    Arc::new(move |channel, records| {
        control.send(&ToSource::ChangesApplied {
            channel,
            records,
            writing_ms: None,
        })
    })
}

/// One that has connected.
struct Channel {
    progress: Arc<Progress>,
    closer: Closer,
    meter: Arc<Meter>,
    /// Gives the channel back: closed any sooner, the source would take a failure here for a lost link.
    thread: JoinHandle<RecordReader>,
    told: u64,
    /// How long it has written to disks.
    writing: Duration,
}

impl Channel {
    fn writes_for(&mut self) -> Duration {
        self.writing += self.progress.take_times().0;
        self.writing
    }
}

/// Those of a connection set, and the images that they fill.
pub struct ChangeChannels {
    disks: Disks,
    tell: TellApplied,
    /// The source said that it makes so many.
    expected: usize,
    /// At each index what has connected.
    slots: Vec<Option<Channel>>,
    told_at: Option<Instant>,
}

impl ChangeChannels {
    /// Before the set's first word; what comes goes to these images.
    pub fn new(disks: Disks, tell: TellApplied) -> Self {
        Self {
            disks,
            tell,
            expected: 0,
            slots: (0..CHANGE_CHANNELS_MAX).map(|_| None).collect(),
            told_at: None,
        }
    }

    /// All have come, and the images are disks: nothing keeps them from here on.
    pub fn let_go_of_disks(&mut self) {
        self.disks = Disks::default();
    }

    /// So many will come, on which later numbers than ever before are sent.
    pub fn begin(&mut self, expected: u32) {
        self.expected = expected as usize;
        let disks = self.disks.iter().filter_map(OnceLock::get);
        disks.for_each(Arriving::begin_anew);
    }

    /// Whether all have come.
    pub fn complete(&self) -> bool {
        self.slots.iter().flatten().count() >= self.expected
    }

    /// Takes a channel in.
    pub fn admit(&mut self, index: usize, connection: Connection) -> Result<(), String> {
        let expected = self.expected;
        let slot = self.slots.get_mut(index).filter(|_| index < expected);
        let Some(slot @ None) = slot else {
            return Err("the source opened more channels for disks than it said".into());
        };
        let closer = connection.closer();
        let reader = connection.split().0;
        let (meter, progress) = (reader.meter(), Arc::<Progress>::default());
        let mut receiver = ChangeReceiver {
            reader,
            content: Buffer::zeroed(PAYLOAD_LEN_MAX),
            disks: Arc::clone(&self.disks),
            progress: Arc::clone(&progress),
            tell: Arc::clone(&self.tell),
            index: index as u32,
        };
        let work = move || {
            let end = receiver.run();
            let end = end.map_or_else(|error| error.end(), |()| End::Finished);
            receiver.progress.ended(end);
            receiver.reader
        };
        let thread = std::thread::Builder::new()
            .name("receive-disk".into())
            .spawn(work);
        let thread = thread.map_err(|error| format!("cannot start a receiving thread: {error}"));
        *slot = Some(Channel {
            progress,
            closer,
            meter,
            thread: thread?,
            told: 0,
            writing: Duration::ZERO,
        });
        Ok(())
    }

    /// How a channel ended that did not end in good order.
    pub fn failure(&self) -> Option<End> {
        let open = self.slots.iter().flatten();
        let mut ends = open.filter_map(|channel| channel.progress.read().1);
        ends.find(|end| *end != End::Finished)
    }

    /// Waits until everything has come and was carried out: each has ended with its final record. `false`: not by then.
    pub fn have_ended(&self, deadline: Instant) -> Result<bool, End> {
        for channel in self.slots.iter().flatten() {
            match channel.progress.wait_for_end(deadline) {
                Some(End::Finished) => {}
                Some(end) => return Err(end),
                None => return Ok(false),
            }
        }
        Ok(self.complete())
    }

    /// Says what was carried out since it was last said.
    pub fn tell_applied(&mut self, control: &SharedControl) -> Result<(), TransportError> {
        let now = Instant::now();
        let is_time = self.told_at.is_none_or(|at| now >= at + TOLD_EVERY);
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(channel) = slot else { continue };
            let (records, _) = channel.progress.read();
            if records == channel.told && !is_time {
                continue;
            }
            (channel.told, self.told_at) = (records, Some(now));
            let writing_ms = u64::try_from(channel.writes_for().as_millis()).ok();
            let channel = index as u32;
            control.send(&ToSource::ChangesApplied {
                channel,
                records,
                writing_ms,
            })?;
        }
        Ok(())
    }

    /// By channel: records that were carried out, and how long it has written.
    #[cfg(test)]
    pub(crate) fn applied(&mut self) -> Vec<(u64, Duration)> {
        let open = self.slots.iter_mut().flatten();
        open.map(|channel| (channel.progress.read().0, channel.writes_for()))
            .collect()
    }

    /// Bytes that have come on them.
    pub fn bytes(&self) -> u64 {
        let open = self.slots.iter().flatten();
        open.map(|channel| channel.meter.read().bytes).sum()
    }

    /// Makes everything durable that has come, but for what lies below tops, which was so before these came.
    pub fn sync(&self) -> Result<(), String> {
        let tops = self.disks.iter().take(usize::from(BELOW));
        let mut disks = tops.filter_map(OnceLock::get);
        let synced = disks.try_for_each(Arriving::sync);
        synced.map_err(|error| error.to_string())
    }

    /// Closes all: when this returns nothing of them writes to a disk any more.
    pub fn close(&mut self) {
        let open = || self.slots.iter().flatten();
        open().for_each(|channel| channel.closer.close());
        for channel in self.slots.iter_mut().filter_map(Option::take) {
            let _ = channel.thread.join();
        }
    }
}

struct ChangeReceiver {
    reader: RecordReader,
    /// Of the change that is carried out.
    content: Buffer,
    disks: Disks,
    progress: Arc<Progress>,
    tell: TellApplied,
    /// The channel's among those of its set.
    index: u32,
}

impl ChangeReceiver {
    fn run(&mut self) -> Result<(), ReceiveError> {
        let patience = Patience::idle(SILENCE_MAX);
        loop {
            let record = self.reader.next(&patience)?;
            let change = match record.kind {
                RecordKind::DiskChange => DiskChange::decode(record.payload)?,
                RecordKind::Final => return Ok(()),
                _ => return Err(ReceiveError::OutOfPlace),
            };
            if let Some(len) = change.payload_len() {
                let content = self.content.bytes_mut().get_mut(..len);
                let content = content.ok_or(ReceiveError::OutOfPlace)?;
                self.reader.next_payload_into(content, &patience)?;
            }
            self.carry_out(&change)?;
            let records = self.reader.next_counter();
            self.progress.applied(records);
            if change.awaited {
                (self.tell)(self.index, records)?;
            }
            reached("destination.disk-change");
        }
    }

    fn carry_out(&self, change: &DiskChange) -> Result<(), ReceiveError> {
        let disk = self.disks.get(usize::from(change.disk));
        let disk = disk
            .and_then(OnceLock::get)
            .ok_or(ReceiveError::OutOfPlace)?;
        let began = Instant::now();
        if change.kind == ChangeKind::Flushed {
            // On a near link what a guest writes is made durable as it comes, which would hide that nothing else is.
            if !planted("awaited-flush-skipped") && !planted("ready-before-flush") {
                disk.sync()?;
            }
        } else {
            let len = change.payload_len();
            let content = len.and_then(|len| self.content.bytes().get(..len));
            disk.apply(change.number, change.below, &change.range, content)?;
        }
        self.progress.spent(began.elapsed(), Duration::ZERO);
        Ok(())
    }
}
