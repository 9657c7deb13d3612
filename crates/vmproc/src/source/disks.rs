//! The source's disks: copied first, and kept equal while memory follows.
//!
//! Works on the driver's state. Refuses: a switchover while the two hosts' images may be unlike.

use super::driver::{Halt, PING_EVERY, SourceDriver, halt_of};
use crate::disks::{SourceDisks, Together};
use crate::faults::{planted, reached};
use godwit_blockio::Closed;
use godwit_blockio::filters::Bottleneck;
use godwit_migrate::protocol::ToDestination;
use godwit_streams::source::ConnectionSet;
use godwit_tracking::DOWNTIME_MAX_S;
use godwit_types::migration::{LimitedBy, MigrationReport, Phase};
use std::time::{Duration, Instant};

/// How often progress is shown, and looked whether the disks are copied.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How often it is looked whether the last blocks are copied of disks whose guest stands still,
const CLOSED_LOOK_EVERY: Duration = Duration::from_millis(1);
/// and the destination hears from here meanwhile.
const CLOSED_PING_EVERY: Duration = Duration::from_millis(100);

/// A destination whose channels write for so much of the time is the limit of a copying that waits for it; else the link is.
const WRITING_SHARE: f64 = 0.5;

/// The copying over one set of channels.
#[derive(Debug, Clone, Copy)]
struct Began {
    at: Instant,
    /// Bytes that were left then.
    left: u64,
    /// How long the destination's channels had written then.
    writing: Option<Duration>,
}

impl Began {
    fn seconds(&self) -> f64 {
        self.at.elapsed().as_secs_f64()
    }

    /// For how much of the time since then the channels have written, by what they have by now; nothing where the destination does not tell.
    fn writing_share(&self, writing: Option<Duration>) -> Option<f64> {
        let since = writing?.saturating_sub(self.writing.unwrap_or_default());
        Some(since.as_secs_f64() / self.seconds().max(1e-3))
    }
}

/// The planted fault: nobody looks whether the two hosts' images are equal.
const UNSYNCHRONISED: &str = "unsynchronised-switch";

/// Whether both hosts' images are equal but for what is under way.
fn are_equal(disks: &SourceDisks) -> bool {
    disks.are_synchronised() || planted(UNSYNCHRONISED)
}

impl SourceDriver {
    /// Waits until both hosts have the same on all disks that go along. Memory follows only then: what the guest writes to it
    /// meanwhile need not be sent twice.
    pub(super) fn copy_disks(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        self.send_layers(set)?;
        let Some(disks) = &self.parts.disks else {
            return Ok(());
        };
        if !std::mem::replace(&mut self.disks_begun, true) {
            let bytes = disks.below_bytes() + disks.begin();
            self.parts.report.update(|report| report.disk_bytes = bytes);
        }
        self.show_copying();
        let (mut begun, mut together) = (None, Together::default());
        loop {
            let Some(disks) = self.disks_after_a_while(set)? else {
                return Ok(());
            };
            if let Some(why) = disks.failure() {
                disks.note_read();
                return Err(Halt::Failed(why));
            }
            // What is left is looked at last: of disks that are equal nothing is.
            disks.wait_on();
            let synchronised = disks.are_ready() || planted(UNSYNCHRONISED);
            let left = disks.left_bytes();
            // Holes are known to the disks' threads by now.
            let writing = disks.changes.writing();
            let began = *begun.get_or_insert_with(|| Began {
                at: Instant::now(),
                left,
                writing,
            });
            let share = began.writing_share(writing);
            let limit = disks
                .bottleneck()
                .and_then(|bottleneck| limited_by(bottleneck, share));
            if synchronised {
                disks.note_read();
            }
            let of_use = together.must_be_of_use(Instant::now(), disks);
            self.show_disks(began, left, limit);
            self.show_sent(set);
            of_use.map_err(Halt::Failed)?;
            if synchronised {
                reached("source.disks-copied");
                return Ok(());
            }
        }
    }

    /// Disks are copied from now on, or again: as whoever watches sees it.
    pub(super) fn show_copying(&self) {
        let update = |report: &mut MigrationReport| report.phase = Phase::Precopy;
        self.parts.report.update(update);
    }

    /// Sleeps until the copying is to be looked at again, lets the destination know that this side lives, and shows what iterations came to: also where
    /// the copying is given up for that. Nothing where no disks go along any more.
    pub(super) fn disks_after_a_while(
        &mut self,
        set: &ConnectionSet,
    ) -> Result<Option<&SourceDisks>, Halt> {
        self.next(Some(set), LOOK_EVERY)?;
        self.sign_of_life(set, PING_EVERY)?;
        self.show_iterations();
        Ok(self.parts.disks.as_ref())
    }

    /// What has come of disks whose writes are tracked, or that are sent by redo logs.
    fn show_iterations(&self) {
        let disks = self.parts.disks.as_ref();
        let (ended, sent) = disks.map(SourceDisks::came_to).unwrap_or_default();
        if !ended.is_empty() {
            self.parts.report.update(|report| {
                report.disk_iterations = ended;
                report.redo_logs = sent;
            });
        }
    }

    /// How much is left, and when disks and memory will be there.
    fn show_disks(&self, began: Began, left: u64, limit: Option<LimitedBy>) {
        let copied = began.left.saturating_sub(left) as f64;
        let seconds = began.seconds();
        let memory = (self.dirty.count() * godwit_migrate::account::PAGE_BYTES) as f64;
        let eta_s = (copied > 0.0).then(|| (left as f64 + memory) * seconds / copied);
        self.parts.report.update(|report| {
            report.disk_left_bytes = left.min(report.disk_bytes);
            if left > 0 || report.disks_limited_by.is_none() {
                report.disks_limited_by = limit;
            }
            report.eta_s = eta_s;
            let gone = report.disk_bytes.saturating_sub(left) as f64;
            let done_percent = 100.0 * gone / (report.disk_bytes as f64 + memory).max(1.0);
            report.done_percent = report.done_percent.max(done_percent);
        });
    }

    /// Whether what disks have under way is little enough for a switchover.
    pub(super) fn disks_are_close(&self) -> bool {
        let disks = self.parts.disks.as_ref();
        disks.is_none_or(|disks| disks.are_close() || planted(UNSYNCHRONISED))
    }

    /// The guest stands still: nothing more comes of its disks, all of which must be the same on both hosts. Returns how long it stood still for
    /// blocks that were still to be copied.
    pub(super) fn last_changes(&mut self, set: &mut ConnectionSet) -> Result<Duration, Halt> {
        let disks = self.parts.disks.as_ref();
        let tracked = disks.filter(|disks| disks.need_a_stop());
        let Some(limit_s) = tracked.map(SourceDisks::last_copy_limit_s) else {
            return self.end_changes(set).map(|()| Duration::ZERO);
        };
        let began = Instant::now();
        self.last_blocks(set, limit_s)?;
        Ok(began.elapsed())
    }

    /// Whatever comes of it, a guest that goes on here does not find its disks closed; of one that stands still nothing comes.
    fn last_blocks(&mut self, set: &mut ConnectionSet, limit_s: f64) -> Result<(), Halt> {
        let close = |closes: bool, this: &Self| match (&this.parts.disks, closes) {
            (Some(disks), true) => disks.close(),
            (Some(disks), false) => disks.open(),
            (None, _) => {}
        };
        close(true, self);
        let ended = self
            .copy_last_blocks(set, limit_s)
            .and_then(|()| self.end_changes(set));
        close(false, self);
        self.show_iterations();
        ended
    }

    fn copy_last_blocks(&mut self, set: &mut ConnectionSet, limit_s: f64) -> Result<(), Halt> {
        reached("source.disks-closed");
        let (began, limit) = (Instant::now(), Duration::from_secs_f64(limit_s));
        loop {
            let Some(disks) = &self.parts.disks else {
                return Ok(());
            };
            if let Some(why) = disks.failure() {
                return Err(Halt::Failed(why));
            }
            match Closed::after(began.elapsed(), limit, are_equal(disks)) {
                Closed::Equal => return Ok(()),
                Closed::NotYet => {
                    self.next(Some(set), CLOSED_LOOK_EVERY)?;
                    self.sign_of_life(set, CLOSED_PING_EVERY)?;
                }
                // As soon as whoever held it hears of this.
                Closed::Opened => {
                    let last = disks.what_is_last();
                    return Err(Halt::Failed(format!(
                        "{last} were not copied within {limit_s:.1} s: a guest may stand still for them for {DOWNTIME_MAX_S} s in all attempts together: the mirror, which is the default method, moves such disks: leave out --method"
                    )));
                }
            }
        }
    }

    fn end_changes(&self, set: &ConnectionSet) -> Result<(), Halt> {
        let Some(disks) = &self.parts.disks else {
            return Ok(());
        };
        if !are_equal(disks) {
            return Err(Halt::Lost(
                "the disks of the two hosts were not the same when the guest was stopped".into(),
            ));
        }
        set.end_changes();
        let disks = disks.sizes();
        let mirrored = ToDestination::Mirrored { disks };
        set.control.send(&mirrored).map_err(halt_of)
    }
}

/// What limits a copying that waits for this, while the destination's channels write for such a share of the time; nothing where that would
/// have to be known, and is not told.
fn limited_by(bottleneck: Bottleneck, writing: Option<f64>) -> Option<LimitedBy> {
    match bottleneck {
        Bottleneck::Cap => Some(LimitedBy::Cap),
        Bottleneck::Reads => Some(LimitedBy::SourceDisk),
        Bottleneck::Writes if writing? >= WRITING_SHARE => Some(LimitedBy::DestinationDisk),
        Bottleneck::Writes => Some(LimitedBy::Link),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copying_that_waits_for_the_destination_is_limited_by_its_disk_only_where_that_is_busy() {
        let of = |writing| limited_by(Bottleneck::Writes, writing);
        assert_eq!(of(Some(0.9)), Some(LimitedBy::DestinationDisk));
        assert_eq!(of(Some(0.1)), Some(LimitedBy::Link));
        assert_eq!(of(None), None, "an older destination does not tell");
        for writing in [None, Some(0.9)] {
            let source = limited_by(Bottleneck::Reads, writing);
            assert_eq!(source, Some(LimitedBy::SourceDisk));
            assert_eq!(limited_by(Bottleneck::Cap, writing), Some(LimitedBy::Cap));
        }
    }
}
