//! Which CPU time of a QEMU's vCPUs its guest has used, and between which two looks.
//!
//! Pure: is told what the vCPUs have used up to a look, and gives windows in which the guest certainly ran. It goes by how much
//! was used, not by how fast: on a loaded machine a guest may have a hundredth of a CPU, and a QEMU that only waits uses more
//! than on an idle one. Owns the counts of one QEMU. Refuses nothing.

use crate::soak::checks::Window;

/// CPU time that the vCPUs of a QEMU may use before a guest runs in it: to begin, and once more when a guest's state is loaded
/// and what was translated is thrown away. Up to 5.0 ms were seen on a machine with a load of 20.
pub const WAITING_NS: u64 = 16_000_000;
/// CPU time beyond that which is a guest's.
pub const ADVANCE_NS: u64 = 4_000_000;
/// Longest time over which a little CPU time is added up: what is less than [`ADVANCE_NS`] then is no guest that runs.
pub const LONGEST_NS: u64 = 5_000_000_000;

/// The counts of one QEMU.
#[derive(Debug)]
pub struct Meter {
    has_run: bool,
    /// CPU time up to the last window.
    counted_ns: u64,
    /// When that was looked at.
    since: u64,
}

impl Meter {
    /// Of a QEMU that has used nothing yet.
    pub fn new(began: u64) -> Self {
        Self {
            has_run: false,
            counted_ns: 0,
            since: began,
        }
    }

    /// All its vCPUs together have used so much by now. Gives a window once its guest certainly ran in it.
    pub fn look(&mut self, now: u64, used_ns: u64) -> Option<Window> {
        let waiting_ns = if self.has_run { 0 } else { WAITING_NS };
        let ran_ns = used_ns.saturating_sub(self.counted_ns + waiting_ns);
        let from = self.since;
        let runs = ran_ns >= ADVANCE_NS;
        // Before it runs all is added up, so that a guest that has next to no CPU is seen, too.
        let is_idle = self.has_run && now.saturating_sub(from) >= LONGEST_NS;
        if runs || is_idle {
            (self.counted_ns, self.since) = (used_ns, now);
        }
        self.has_run |= runs;
        runs.then_some(Window {
            from,
            to: now,
            ran_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn one_that_only_waits_runs_no_guest_however_long_it_takes_for_that() {
        let mut meter = Meter::new(0);
        let used = [0, 3, 5, 5, 5, 10, 15];
        let seen: Vec<_> = (1..)
            .zip(used)
            .filter_map(|(look, used)| meter.look(look * 60 * MS, used * MS))
            .collect();
        assert_eq!(seen, []);
    }

    #[test]
    fn a_guest_runs_once_it_used_more_than_waiting_takes_and_then_with_every_little_bit() {
        let mut meter = Meter::new(0);
        assert_eq!(meter.look(15 * MS, WAITING_NS + 3 * MS), None);
        let first = Window {
            from: 0,
            to: 30 * MS,
            ran_ns: ADVANCE_NS,
        };
        assert_eq!(meter.look(30 * MS, WAITING_NS + ADVANCE_NS), Some(first));
        assert_eq!(meter.look(45 * MS, WAITING_NS + 7 * MS), None);
        // It was not looked at, or had no CPU, for seconds.
        let next = Window {
            from: 30 * MS,
            to: 4000 * MS,
            ran_ns: ADVANCE_NS,
        };
        assert_eq!(meter.look(4000 * MS, WAITING_NS + 8 * MS), Some(next));
    }

    #[test]
    fn what_one_that_stands_still_uses_now_and_then_never_adds_up_to_a_run() {
        let mut meter = Meter::new(0);
        assert!(meter.look(MS, WAITING_NS + ADVANCE_NS).is_some());
        let used = WAITING_NS + ADVANCE_NS;
        let seen = (1..100).find_map(|look| meter.look(look * LONGEST_NS, used + look * MS));
        assert_eq!(seen, None);
    }
}
