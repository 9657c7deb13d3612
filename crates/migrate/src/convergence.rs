//! When to stop the guest, when to go round again, when to slow it down.
//!
//! A pure function of what each iteration did. The rule: after every iteration the downtime is predicted from what is
//! still dirty, the speed seen and the fixed cost of a switchover; if it fits the promise the guest is stopped. If two
//! iterations in a row do not shrink what remains, the guest is slowed, step by step, down to a floor. A guest that does
//! not converge at the floor ends the migration with a sentence that says so: it is never stopped for longer than was
//! promised without being asked.
//!
//! Owns: the history of one migration's iterations. Refuses: to guess from an iteration too short to measure.

/// Shares of its speed that a guest is left with, percent, in the order they are tried.
const SPEED_STEPS_PERCENT: [u32; 6] = [100, 70, 45, 25, 12, 5];
/// An iteration counts as progress when what remains falls to this share of the last.
const PROGRESS_SHARE: f64 = 0.75;
/// Iterations at the floor without fitting before giving up.
const FLOOR_ITERATIONS_MAX: u32 = 12;
/// Iterations in all before giving up.
pub const ITERATIONS_MAX: u32 = 200;
/// A pass over fewer bytes says more about its round trips than about the link.
const BYTES_MEASURABLE: u64 = 4 << 20;

/// What one iteration did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IterationFacts {
    /// Page bytes sent (not zero pages).
    pub data_bytes: u64,
    /// How long it took, s.
    pub seconds: f64,
    /// Bytes of pages that are dirty at its end.
    pub dirty_bytes: u64,
    /// Round trip of the control channel, s.
    pub rtt_s: f64,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Send what is dirty while the guest runs.
    Iterate,
    /// Leave the guest this share of its speed, percent, and go round again.
    SlowTo(u32),
    /// Stop the guest and switch over.
    Switchover,
    /// It does not converge.
    GiveUp,
}

/// The history that decisions are made from.
#[derive(Debug, Clone)]
pub struct Convergence {
    max_downtime_s: f64,
    fixed_s: f64,
    bytes_per_s: Option<f64>,
    last_dirty_bytes: Option<u64>,
    stalled: u32,
    step: usize,
    at_floor: u32,
    iterations: u32,
}

impl Convergence {
    /// A new history. `fixed_s` is the part of the switchover that does not depend on memory (stop, device state,
    /// permit), seconds.
    pub fn new(max_downtime_s: f64, fixed_s: f64) -> Self {
        Self {
            max_downtime_s,
            fixed_s,
            bytes_per_s: None,
            last_dirty_bytes: None,
            stalled: 0,
            step: 0,
            at_floor: 0,
            iterations: 0,
        }
    }

    /// Speed seen so far, page bytes per second.
    pub fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// Share of its speed that the guest has now, percent.
    pub fn speed_percent(&self) -> u32 {
        SPEED_STEPS_PERCENT.get(self.step).copied().unwrap_or(100)
    }

    /// The guest runs at full speed again: slowing begins anew.
    pub fn released(&mut self) {
        (self.step, self.at_floor, self.stalled) = (0, 0, 0);
    }

    /// Predicted downtime for what is dirty, seconds.
    pub fn predict_s(&self, dirty_bytes: u64, rtt_s: f64) -> f64 {
        // Four one-way trips: last barrier and its answer, device state, ready, permit, resumed.
        let trips_s = 2.5 * rtt_s;
        let pages_s = self
            .bytes_per_s
            .map_or(0.0, |speed| dirty_bytes as f64 / speed.max(1.0));
        self.fixed_s + trips_s + pages_s
    }

    /// Takes an iteration's facts and decides.
    pub fn decide(&mut self, facts: IterationFacts) -> Decision {
        self.iterations += 1;
        self.learn_speed(facts);
        self.learn_progress(facts.dirty_bytes);
        if self.bytes_per_s.is_none() && facts.dirty_bytes > BYTES_MEASURABLE {
            // Nothing was sent so far, so nothing can be predicted.
            return Decision::Iterate;
        }
        let budget_s = self
            .max_downtime_s
            .max(self.fixed_s + 2.5 * facts.rtt_s + 0.005);
        if self.predict_s(facts.dirty_bytes, facts.rtt_s) <= budget_s {
            return Decision::Switchover;
        }
        if self.iterations >= ITERATIONS_MAX || self.at_floor >= FLOOR_ITERATIONS_MAX {
            return Decision::GiveUp;
        }
        self.slow_if_stalled()
    }

    fn learn_speed(&mut self, facts: IterationFacts) {
        if facts.data_bytes < BYTES_MEASURABLE && self.bytes_per_s.is_some() {
            return;
        }
        if facts.seconds <= 0.0 || facts.data_bytes == 0 {
            return;
        }
        let seen = facts.data_bytes as f64 / facts.seconds;
        self.bytes_per_s = Some(self.bytes_per_s.map_or(seen, |old| 0.5 * old + 0.5 * seen));
    }

    fn learn_progress(&mut self, dirty_bytes: u64) {
        let shrunk = self
            .last_dirty_bytes
            .is_none_or(|last| (dirty_bytes as f64) < PROGRESS_SHARE * last as f64);
        self.stalled = if shrunk { 0 } else { self.stalled + 1 };
        self.last_dirty_bytes = Some(dirty_bytes);
        if self.step + 1 == SPEED_STEPS_PERCENT.len() {
            self.at_floor += 1;
        }
    }

    fn slow_if_stalled(&mut self) -> Decision {
        let floor = self.step + 1 == SPEED_STEPS_PERCENT.len();
        if self.stalled < 2 || floor {
            return Decision::Iterate;
        }
        self.step += 1;
        self.stalled = 0;
        Decision::SlowTo(self.speed_percent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn facts(data_bytes: u64, dirty_bytes: u64) -> IterationFacts {
        IterationFacts {
            data_bytes,
            seconds: data_bytes as f64 / GB as f64,
            dirty_bytes,
            rtt_s: 0.0005,
        }
    }

    #[test]
    fn a_quiet_guest_switches_over_after_the_first_pass() {
        let mut history = Convergence::new(0.05, 0.015);
        assert_eq!(history.decide(facts(GB, 4 << 20)), Decision::Switchover);
    }

    #[test]
    fn a_guest_that_dirties_too_much_goes_round_again() {
        let mut history = Convergence::new(0.05, 0.015);
        assert_eq!(history.decide(facts(GB, GB / 2)), Decision::Iterate);
        assert_eq!(history.decide(facts(GB / 2, GB / 8)), Decision::Iterate);
        assert_eq!(history.decide(facts(GB / 8, GB / 50)), Decision::Switchover);
    }

    #[test]
    fn a_guest_that_never_gets_ahead_is_slowed_and_at_last_given_up() {
        let mut history = Convergence::new(0.05, 0.015);
        let mut speeds = Vec::new();
        let last = loop {
            match history.decide(facts(GB, GB)) {
                Decision::SlowTo(percent) => speeds.push(percent),
                Decision::Iterate => {}
                end => break end,
            }
        };
        assert_eq!(speeds, [70, 45, 25, 12, 5]);
        assert_eq!(last, Decision::GiveUp);
    }

    #[test]
    fn a_round_trip_longer_than_the_promise_does_not_forbid_the_switchover() {
        let mut history = Convergence::new(0.05, 0.015);
        let far = IterationFacts {
            rtt_s: 0.15,
            ..facts(GB, 1 << 20)
        };
        assert_eq!(history.decide(far), Decision::Switchover);
    }

    #[test]
    fn a_first_pass_without_data_predicts_nothing() {
        let mut history = Convergence::new(0.05, 0.015);
        assert_eq!(history.decide(facts(0, GB)), Decision::Iterate);
        assert_eq!(history.decide(facts(0, 1 << 20)), Decision::Switchover);
    }

    #[test]
    fn a_guest_that_was_released_is_slowed_from_the_beginning() {
        let mut history = Convergence::new(0.05, 0.015);
        while history.speed_percent() == 100 {
            history.decide(facts(GB, GB));
        }
        history.released();
        assert_eq!(history.speed_percent(), 100);
        let next = std::iter::repeat_with(|| history.decide(facts(GB, GB)));
        let slowed = next
            .take(5)
            .find(|decision| matches!(decision, Decision::SlowTo(_)));
        assert_eq!(slowed, Some(Decision::SlowTo(70)));
    }

    #[test]
    fn a_tiny_pass_does_not_spoil_the_speed() {
        let mut history = Convergence::new(0.05, 0.015);
        history.decide(facts(GB, GB));
        history.decide(IterationFacts {
            data_bytes: 4096,
            seconds: 1.0,
            dirty_bytes: GB,
            rtt_s: 0.0,
        });
        assert!(
            history
                .bytes_per_s()
                .is_some_and(|speed| speed > 0.9 * GB as f64)
        );
    }
}
