//! Disks that are copied to another host, as one: whether each of them gets nearer, and whether all of them could be held at once.
//!
//! By dirty block tracking each disk decides alone when its guest could be held for it (`godwit_tracking`), and the guest is held for all of
//! them. Owns what it has seen; the caller says what time it is. Refuses: to wait on for a disk of which nothing is copied any more, and for
//! disks that could be held one by one and not together.

use super::going_along::SourceDisks;
use godwit_blockio::Nearer;
use std::time::{Duration, Instant};

/// For so long all disks together may have too many blocks left while each alone has few.
const TOO_MANY_MAX: Duration = Duration::from_secs(60);

/// The last blocks of all disks, where the guest could be held for each of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LastOfAll {
    /// For so long the guest would stand still if it were stopped now, s,
    pub wait_s: f64,
    /// and for so long it may, s.
    pub limit_s: f64,
    /// Whether the destination does not answer now: what is left says nothing of the guest then.
    pub is_silent: bool,
}

impl LastOfAll {
    pub fn are_few(&self) -> bool {
        self.wait_s <= self.limit_s
    }
}

/// What was seen of them.
#[derive(Debug, Default)]
pub(crate) struct Together {
    nearer: Vec<Nearer>,
    /// For how long they had too many, since they had few or one of them could not be held.
    too_many: Duration,
    looked: Option<Instant>,
}

impl Together {
    /// Why it is of no use to wait for these any longer.
    pub(crate) fn must_be_of_use(
        &mut self,
        now: Instant,
        disks: &SourceDisks,
    ) -> Result<(), String> {
        match self.stalled(now, &disks.not_copied()) {
            Some(place) => Err(disks.stalled(place)),
            None => self.must_become_few(now, disks.last_blocks()),
        }
    }

    /// The first of these that becomes no less; of nothing nothing is waited for.
    fn stalled(&mut self, now: Instant, not_copied: &[Option<u64>]) -> Option<usize> {
        self.nearer.resize_with(not_copied.len(), Nearer::default);
        let mut stalled = None;
        for (place, (nearer, left)) in self.nearer.iter_mut().zip(not_copied).enumerate() {
            match left {
                None => *nearer = Nearer::default(),
                Some(left) if nearer.observe(now, *left) => {}
                Some(_) => stalled = stalled.or(Some(place)),
            }
        }
        stalled
    }

    fn must_become_few(&mut self, now: Instant, last: Option<LastOfAll>) -> Result<(), String> {
        let looked = self.looked.replace(now).unwrap_or(now);
        let Some(last) = last.filter(|last| !last.are_few()) else {
            self.too_many = Duration::ZERO;
            return Ok(());
        };
        if !last.is_silent {
            self.too_many += now.saturating_duration_since(looked);
        }
        if self.too_many <= TOO_MANY_MAX {
            return Ok(());
        }
        let LastOfAll {
            wait_s, limit_s, ..
        } = last;
        Err(format!(
            "for {} s the guest would have stood still for the last blocks of all its disks together for longer than it may: for about {wait_s:.1} s now, and it may for {limit_s:.1} s: the mirror, which is the default method, moves such disks: leave out --method",
            TOO_MANY_MAX.as_secs()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_blockio::NO_NEARER;

    const TOO_MANY: LastOfAll = LastOfAll {
        wait_s: 3.2,
        limit_s: 3.0,
        is_silent: false,
    };

    #[test]
    fn disks_that_could_be_held_one_by_one_and_not_together_are_waited_for_for_a_minute() {
        let (mut together, began) = (Together::default(), Instant::now());
        let mut at = |s, last| together.must_become_few(began + Duration::from_secs(s), last);
        assert_eq!(at(0, Some(TOO_MANY)), Ok(()));
        assert_eq!(at(60, Some(TOO_MANY)), Ok(()));
        let why = at(61, Some(TOO_MANY)).unwrap_err();
        assert!(why.contains("for about 3.2 s now"), "{why}");
        assert!(why.contains("leave out --method"), "{why}");
        // One of them could not be held, or all had few: it is waited anew.
        let few = LastOfAll {
            wait_s: 2.9,
            ..TOO_MANY
        };
        for between in [None, Some(few)] {
            assert_eq!(at(62, between), Ok(()));
            assert_eq!(at(122, Some(TOO_MANY)), Ok(()));
            assert!(at(123, Some(TOO_MANY)).is_err());
        }
    }

    #[test]
    fn disks_whose_destination_is_silent_are_not_given_up_for_what_their_guest_writes() {
        let (mut together, began) = (Together::default(), Instant::now());
        let mut at = |s, last| together.must_become_few(began + Duration::from_secs(s), last);
        let silent = LastOfAll {
            is_silent: true,
            ..TOO_MANY
        };
        assert_eq!(at(0, Some(TOO_MANY)), Ok(()));
        assert_eq!(at(50, Some(silent)), Ok(()));
        assert_eq!(at(119, Some(silent)), Ok(()));
        assert_eq!(at(179, Some(TOO_MANY)), Ok(()));
        assert!(at(180, Some(TOO_MANY)).is_err());
    }

    #[test]
    fn what_a_forecast_counts_for_the_last_blocks_is_what_they_may_take() {
        let told = godwit_types::disk_move::LAST_BLOCKS_MAX_S as f64;
        assert_eq!(told, godwit_tracking::LAST_COPY_MAX_S);
    }

    #[test]
    fn one_disk_of_two_that_hangs_is_seen_though_the_other_is_copied_again_and_again() {
        let (mut together, began) = (Together::default(), Instant::now());
        let limit = NO_NEARER.as_secs();
        for s in 0..=limit {
            let now = began + Duration::from_secs(s);
            let left = [Some(1000 - s), Some(7), None];
            assert_eq!(together.stalled(now, &left), None);
        }
        let now = began + Duration::from_secs(limit + 1);
        let left = [Some(1), Some(7), None];
        assert_eq!(together.stalled(now, &left), Some(1));
        // Nothing is left of it.
        assert_eq!(together.stalled(now, &[Some(1), None, None]), None);
        assert_eq!(together.stalled(now, &left), None);
    }
}
