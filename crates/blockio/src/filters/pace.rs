//! How fast a disk is copied at most, and what its copying waits for.
//!
//! A cap is for what is copied alone: whoever copies asks how many regions may be read for it now, so that none is locked
//! against the guest while the cap holds it up. Several copyings may keep one cap together.
//!
//! Who owns the state: clones of a pace share it. Pure but for how a guest is looked at: the caller says what time it is. Refuses nothing.

use super::outlet::COPIES;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::REGION;

/// Beside a guest that does much no more regions are copied at once than it has requests under way, times a factor; so few at least,
const COPIES_MIN: usize = 4;
/// and so many for each request that the guest has under way: storage that serves all alike would else leave a guest of few
/// requests a small part of what it can do.
const COPIES_PER_REQUEST: f64 = 2.0;
/// A guest that has fewer requests under way, on average, does nothing.
const IDLE: f64 = 0.05;

/// How much may be done at once after nothing was.
const BURST: Duration = Duration::from_millis(100);
/// A copying that waits for its cap for so much of its time is held by that.
const CAP_SHARE: f64 = 0.2;

/// What a limit lets through, by the generic cell rate algorithm (ITU-T I.371): each piece of work takes the time that it would
/// take at the limit, and may come early by a tenth of a second's worth.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Due(Option<Instant>);

impl Due {
    /// Lets work through that takes so long at the limit.
    pub(crate) fn take(&mut self, now: Instant, cost: Duration) {
        let from = self.0.map_or(now, |due| due.max(now));
        self.0 = from.checked_add(cost);
    }

    /// When the next may come; `None`: at any time.
    pub(crate) fn opens_at(&self) -> Option<Instant> {
        self.0?.checked_sub(BURST)
    }

    /// How much time's worth may come now.
    fn room(&self, now: Instant) -> Duration {
        let opens = self.opens_at();
        opens.map_or(BURST, |at| now.saturating_duration_since(at).min(BURST))
    }
}

/// How fast disks are copied at most. Clones are the same one, which those that have it keep together.
#[derive(Debug, Clone, Default)]
pub struct Pace(Option<Arc<Cap>>);

#[derive(Debug)]
struct Cap {
    bytes_per_s: f64,
    due: Mutex<Due>,
}

impl Pace {
    /// So many bytes in a second, or as many as storage takes.
    pub fn at_most(bytes_per_s: Option<f64>) -> Self {
        Self(bytes_per_s.map(|bytes_per_s| {
            Arc::new(Cap {
                bytes_per_s: bytes_per_s.max(1.0),
                due: Mutex::default(),
            })
        }))
    }

    /// So many bytes are copied.
    pub(crate) fn take(&self, now: Instant, bytes: u64) {
        if let Some(cap) = &self.0 {
            let cost = Duration::from_secs_f64(bytes as f64 / cap.bytes_per_s);
            let mut due = cap.due.lock().unwrap_or_else(PoisonError::into_inner);
            due.take(now, cost);
        }
    }

    /// So many bytes are about to be copied, one piece after the other: for how long whoever copies them is to wait before that.
    pub fn delay(&self, now: Instant, bytes: u64) -> Duration {
        let Some(cap) = &self.0 else {
            return Duration::ZERO;
        };
        let due = *cap.due.lock().unwrap_or_else(PoisonError::into_inner);
        self.take(now, bytes);
        let opens = due.opens_at();
        opens.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }

    /// How many regions may be on their way that have not been taken; `None`: any number.
    pub(crate) fn region_limit(&self, now: Instant) -> Option<usize> {
        let cap = self.0.as_ref()?;
        let due = cap.due.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = due.room(now).as_secs_f64() * cap.bytes_per_s;
        Some((bytes / REGION as f64).ceil() as usize)
    }
}

/// How long a copying waited for what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WaitTimes {
    pub reads: Duration,
    pub writes: Duration,
    pub cap: Duration,
}

/// What holds a copying up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// Reads of the image that is copied.
    Reads,
    /// What takes the copy.
    Writes,
    Cap,
}

impl WaitTimes {
    /// What it waited for most; nothing where it never did.
    pub fn bottleneck(&self) -> Option<Bottleneck> {
        let all = self.reads + self.writes + self.cap;
        if all.is_zero() {
            return None;
        }
        // While it waits for its cap, reads and writes that were under way go on: less than half of the time is much.
        if self.cap > all.mul_f64(CAP_SHARE) {
            return Some(Bottleneck::Cap);
        }
        Some(match self.reads >= self.writes {
            true => Bottleneck::Reads,
            false => Bottleneck::Writes,
        })
    }
}

impl std::ops::Add for WaitTimes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            reads: self.reads + other.reads,
            writes: self.writes + other.writes,
            cap: self.cap + other.cap,
        }
    }
}

/// How many regions are copied at once beside a guest that has so many requests under way.
pub(crate) fn copies_beside(load: f64) -> usize {
    match load < IDLE {
        true => COPIES,
        false => ((load * COPIES_PER_REQUEST).ceil() as usize).clamp(COPIES_MIN, COPIES),
    }
}

/// How often it is looked how much a guest does,
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(10);
/// and what one look counts for in the average.
const LOOK_COUNTS: f64 = 0.15;

/// A guest beside which an image is copied, or pieces of deltas are moved.
#[derive(Debug, Clone, Copy, Default)]
pub struct Beside {
    looked: Option<Instant>,
    /// Requests that it has under way, on average.
    load: f64,
}

impl Beside {
    /// How many pieces may be moved at once: they are small, for the most part, so that it may be twice as many as of regions. `under_way` tells how many requests the
    /// guest has under way, where it was not asked a moment ago.
    pub fn pieces(&mut self, under_way: impl FnOnce() -> usize) -> usize {
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            self.looked = Some(Instant::now());
            self.saw(under_way());
        }
        2 * self.copies()
    }

    /// Its requests that are under way, each [`LOOK_EVERY`].
    pub(crate) fn saw(&mut self, under_way: usize) {
        self.load += (under_way as f64 - self.load) * LOOK_COUNTS;
    }

    /// How many regions may be copied at once.
    pub(crate) fn copies(&self) -> usize {
        copies_beside(self.load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn as_many_regions_may_be_on_their_way_as_the_cap_has_room_for_and_none_is_saved_up() {
        let began = Instant::now();
        assert_eq!(Pace::default().region_limit(began), None);
        let pace = Pace::at_most(Some(40.0 * REGION as f64));
        assert_eq!(pace.region_limit(began), Some(4));
        pace.take(began, 4 * REGION);
        assert_eq!(pace.region_limit(began), Some(0));
        let other = pace.clone();
        assert_eq!(other.region_limit(began + MS), Some(1));
        other.take(began + MS, REGION);
        assert_eq!(pace.region_limit(began + 20 * MS), Some(0));
        assert_eq!(pace.region_limit(began + 60 * MS), Some(2));
        // Nothing for a minute.
        assert_eq!(pace.region_limit(began + 60_000 * MS), Some(4));
    }

    #[test]
    fn who_copies_one_piece_after_the_other_waits_as_long_as_the_cap_wants() {
        let began = Instant::now();
        assert_eq!(Pace::default().delay(began, REGION), Duration::ZERO);
        let pace = Pace::at_most(Some(10.0 * REGION as f64));
        assert_eq!(pace.delay(began, 3 * REGION), Duration::ZERO);
        let waits = pace.delay(began, REGION);
        assert!(waits > 199 * MS && waits < 201 * MS, "{waits:?}");
    }

    #[test]
    fn beside_a_guest_that_works_twice_its_requests_are_copied_at_once_and_at_least_four() {
        let at = [0.0, 0.04, 0.05, 1.0, 2.0, 2.5, 4.0, 7.6, 64.0];
        let copies = at.map(copies_beside);
        assert_eq!(copies, [16, 16, 4, 4, 4, 5, 8, 16, 16]);
    }

    #[test]
    fn beside_a_guest_that_works_twice_as_many_pieces_are_moved_and_it_is_not_asked_for_each() {
        let mut beside = Beside::default();
        assert_eq!(beside.pieces(|| 0), 2 * COPIES);
        beside.looked = None;
        assert_eq!(beside.pieces(|| 100), 2 * COPIES);
        beside.load = 2.0;
        beside.looked = Some(Instant::now() + Duration::from_secs(60));
        assert_eq!(beside.pieces(|| unreachable!()), 2 * COPIES_MIN);
    }

    #[test]
    fn what_a_copying_waited_for_most_limits_it_and_a_cap_does_where_it_is_much_of_it() {
        let waited = |reads: u32, writes: u32, cap: u32| WaitTimes {
            reads: reads * MS,
            writes: writes * MS,
            cap: cap * MS,
        };
        assert_eq!(waited(0, 0, 0).bottleneck(), None);
        assert_eq!(waited(3, 2, 1).bottleneck(), Some(Bottleneck::Reads));
        assert_eq!(waited(2, 3, 1).bottleneck(), Some(Bottleneck::Writes));
        assert_eq!(waited(3, 0, 1).bottleneck(), Some(Bottleneck::Cap));
        let sum = waited(3, 0, 0) + waited(0, 4, 0);
        assert_eq!(sum.bottleneck(), Some(Bottleneck::Writes));
    }
}
