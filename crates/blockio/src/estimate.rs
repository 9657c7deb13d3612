//! How long a copying takes yet, from how fast it was so far and what the guest wrote meanwhile.
//!
//! Who owns the state: whoever looks how much is left. Refuses to guess before anything came. Pure: the caller says what time it
//! is.

use std::time::Instant;

use crate::filters::GuestWrites;

/// A speed counts once so much came, or a smaller part of the whole: before, most of what is copied is still on its way from one image
/// to the other, which takes time that it does not take again.
const UNDER_WAY: u64 = 16 << 20;
const UNDER_WAY_PART: u64 = 64;
/// Steps in which the rest of the way is looked at.
const STEPS: u32 = 32;

/// What is seen of a copying at one time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    /// Bytes that are not copied.
    pub left: u64,
    /// What the guest wrote since it began.
    pub guest: GuestWrites,
    /// Whether the destination is what holds it up.
    pub destination_limits: bool,
}

/// What is known of a copying's speed.
#[derive(Debug, Default)]
pub(crate) struct Estimate {
    /// The most that was left yet,
    most: u64,
    /// when there was less of it first, and what was seen then,
    first: Option<(Instant, Seen)>,
    /// and the same of when as much had come as is under way at once.
    flowing: Option<(Instant, Seen)>,
}

impl Estimate {
    /// Seconds until nothing is left, now that this is seen.
    pub fn seconds(&mut self, now: Instant, seen: Seen) -> Option<f64> {
        self.most = self.most.max(seen.left);
        let under_way = UNDER_WAY.min(self.most / UNDER_WAY_PART).max(1);
        match self.first {
            // More is left than then: what was copied has been lost.
            Some((_, then)) if seen.left > then.left => {
                *self = Self {
                    most: seen.left,
                    ..Self::default()
                };
            }
            None if seen.left < self.most => self.first = Some((now, seen)),
            _ => {}
        }
        if self.most - seen.left >= under_way {
            self.flowing.get_or_insert((now, seen));
        }
        let came = |then: Seen| then.left.saturating_sub(seen.left);
        let flowing = self.flowing.filter(|(_, then)| came(*then) >= under_way);
        let (since, then) = flowing.or(self.first)?;
        let took = now.saturating_duration_since(since).as_secs_f64();
        (came(then) > 0).then(|| self.rest(took, then, seen))
    }

    /// What the rest takes, at the speed between two times.
    fn rest(&self, took: f64, then: Seen, now: Seen) -> f64 {
        let (left, came) = (now.left as f64, then.left.saturating_sub(now.left) as f64);
        if !now.destination_limits {
            return took * left / came;
        }
        let written = now.guest.bytes.saturating_sub(then.guest.bytes) as f64;
        let mirrored = now.guest.mirrored.saturating_sub(then.guest.mirrored) as f64;
        // The more is copied, the more of the guest's writes go to the destination, up to half of what it does: it has as
        // many of the one under way as of the other.
        let carried = came + mirrored;
        let step = left / f64::from(STEPS);
        let seconds = |number| {
            let copied = 1.0 - (f64::from(number) + 0.5) * step / self.most.max(1) as f64;
            let of_guest = (written * copied).min(carried / 2.0);
            took * step / (carried - of_guest)
        };
        (0..STEPS).map(seconds).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    fn left(left: u64) -> Seen {
        Seen {
            left,
            ..Seen::default()
        }
    }

    #[test]
    fn the_time_until_the_first_bytes_came_does_not_count_and_a_loss_begins_anew() {
        let mut estimate = Estimate::default();
        let began = Instant::now();
        let mut at = |ms, bytes| estimate.seconds(began + Duration::from_millis(ms), left(bytes));
        assert_eq!((at(0, 1000), at(900, 1000)), (None, None));
        assert_eq!(at(1000, 990), None);
        assert_eq!(at(1100, 980), Some(9.8));
        assert_eq!(
            at(2000, 490),
            Some(0.9),
            "since as much came as is under way at once"
        );
        assert_eq!((at(2100, 1000), at(7000, 1000)), (None, None));
        assert_eq!((at(7100, 900), at(7200, 800)), (None, Some(0.8)));
        assert_eq!(at(8000, 0), Some(0.0));
    }

    #[test]
    fn a_copying_that_begins_slowly_is_estimated_by_its_speed_once_it_flows() {
        let mut estimate = Estimate::default();
        let began = Instant::now();
        let mut at = |ms, mib| estimate.seconds(began + Duration::from_millis(ms), left(mib * MIB));
        assert_eq!((at(0, 512), at(500, 511)), (None, None));
        assert_eq!(at(1000, 504), Some(0.5 * 504.0 / 7.0));
        // Until as much has come once more, the speed since the beginning counts.
        assert_eq!(at(1100, 500), Some(0.6 * 500.0 / 11.0));
        assert_eq!(at(1200, 496), Some(0.2 * 496.0 / 8.0));
        assert_eq!(at(1600, 448), Some(0.6 * 448.0 / 56.0));
    }

    #[test]
    fn where_the_destination_is_the_limit_the_guests_writes_take_up_to_half_of_it() {
        let mut estimate = Estimate::default();
        let began = Instant::now();
        // In a second the guest writes 20 MiB, and the destination 10, of a disk of 100: its writes take half once a quarter is copied.
        let mut at = |ms, mib, written, mirrored, destination_limits| {
            let guest = GuestWrites {
                bytes: written * MIB,
                mirrored: mirrored * MIB,
            };
            let seen = Seen {
                left: mib * MIB,
                guest,
                destination_limits,
            };
            estimate.seconds(began + Duration::from_millis(ms), seen)
        };
        at(0, 100, 0, 0, true);
        at(1000, 95, 20, 1, true);
        let seconds = at(2000, 86, 40, 2, true).expect("it came nearer");
        assert!((16.6..17.0).contains(&seconds), "{seconds}");
        let seconds = at(2000, 86, 40, 2, false).expect("it came nearer");
        assert!((9.5..9.6).contains(&seconds), "{seconds}");
    }
}
