//! What every copying of a disk does alike, however it keeps both sides equal: how many regions it reads at once beside its guest, what it
//! waits for, and how it gives what was read.
//!
//! Owned by the filter that copies. Refuses nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::content::{runs, written};
use super::course::{Course, lock};
use super::outlet::{COPIES, Change, Origin, Outlet};
use super::pace::copies_beside;
use crate::Buffer;

/// How often it is looked whether there is room again, and what others want.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);
/// What one look counts for in the average of how many requests the guest has under way, which goes back over a tenth of a second or so.
const LOOK_COUNTS: f64 = 1.0 / 32.0;

/// How much is copied at once.
pub(super) struct Copying {
    /// How many requests the guest has under way,
    under_way: usize,
    /// and how many it had lately, on average.
    load: f64,
    /// When [`Self::book_wait`] was called last.
    pub last_look: Instant,
    /// How many regions may be copied at once, but for the pace.
    region_limit: usize,
    /// Whether the pace let none be copied at a time since the last look.
    is_held: bool,
    /// Whether nothing more is to be copied for now.
    pub rests: bool,
}

/// What a copying has under way.
pub(super) struct Has {
    /// Reads that have not ended,
    pub reads: bool,
    /// and regions that were read and could not be given.
    pub read: bool,
}

impl Copying {
    pub fn new() -> Self {
        Self {
            under_way: 0,
            load: 0.0,
            last_look: Instant::now(),
            region_limit: 0,
            is_held: false,
            rests: false,
        }
    }

    /// A request of the guest comes down, or goes up again.
    pub fn begins(&mut self) {
        self.under_way += 1;
    }

    /// The counterpart of [`Self::begins`].
    pub fn ends(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// Takes in how much the guest does, and how much the destination takes.
    pub fn look(&mut self, outlet: &mut dyn Outlet) {
        self.load += (self.under_way as f64 - self.load) * LOOK_COUNTS;
        self.region_limit = match self.rests {
            true => 0,
            false => copies_beside(self.load).min(outlet.region_limit()),
        };
    }

    /// Nothing is to be begun before [`Self::look`] says otherwise.
    pub fn pause(&mut self) {
        self.region_limit = 0;
    }

    /// A region was cloned: what follows waits for the next look, as it would for a read.
    pub fn cloned(&mut self, outlet: &mut dyn Outlet) {
        let left = self.region_limit.saturating_sub(1);
        self.region_limit = left.min(outlet.region_limit());
    }

    /// How many regions may be copied at once now: as many as there is room for everywhere.
    pub fn allowed(&mut self, course: &Course, now: Instant) -> usize {
        // A guest that is held for the last blocks waits for no cap.
        let cap = match course.0.tracked.is_closed() {
            true => None,
            false => course.0.pace.region_limit(now),
        };
        let paced = cap.unwrap_or(COPIES);
        self.is_held |= paced == 0;
        self.region_limit.min(paced)
    }

    /// Counts for what it has waited since the last look.
    pub fn book_wait(
        &mut self,
        (course, outlet): (&Course, &mut (dyn Outlet + 'static)),
        has: Option<Has>,
        now: Instant,
    ) {
        let since = std::mem::replace(&mut self.last_look, now);
        let was_held = std::mem::take(&mut self.is_held);
        let Some(has) = has.filter(|_| !self.rests) else {
            return;
        };
        let mut waited = lock(&course.0.wait_times);
        let wait = if was_held {
            &mut waited.cap
        } else if has.read || outlet.is_behind() {
            &mut waited.writes
        } else if has.reads {
            &mut waited.reads
        } else {
            return;
        };
        *wait += now.saturating_duration_since(since);
    }
}

/// Gives the destination what was read from here on.
pub(super) fn give_copy(
    (course, outlet): (&Course, &mut (dyn Outlet + 'static)),
    start: u64,
    bytes: &Arc<Buffer>,
    now: Instant,
) {
    for (run, is_zero) in runs(bytes.bytes()) {
        let range = start + run.start as u64..start + run.end as u64;
        let change = match is_zero {
            true => Change::Zeroed,
            false => {
                course.0.pace.take(now, run.len() as u64);
                written(bytes, &run)
            }
        };
        outlet.give(Origin::Copy, range, change);
    }
}
