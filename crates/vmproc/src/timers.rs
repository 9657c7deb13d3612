//! The core's timers and the migration's deadline, as one sorted look at the clock.
//!
//! Owned by the VM's own thread, which asks how long it may sleep and what has fired.

use godwit_ownership::Timer;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// When which of the core's timers is due.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    armed: BTreeMap<Timer, Instant>,
}

impl Timers {
    /// Arms a timer, replacing an earlier one of its kind.
    pub(crate) fn arm(&mut self, timer: Timer, after: Duration) {
        self.armed.insert(timer, Instant::now() + after);
    }

    /// Forgets a timer that has not gone off.
    pub(crate) fn disarm(&mut self, timer: Timer) {
        self.armed.remove(&timer);
    }

    /// Whether it is armed.
    pub(crate) fn is_armed(&self, timer: Timer) -> bool {
        self.armed.contains_key(&timer)
    }

    /// How long until the next one fires, `longest` at most.
    pub(crate) fn next_in(&self, longest: Duration) -> Duration {
        let now = Instant::now();
        let waits = self
            .armed
            .values()
            .map(|at| at.saturating_duration_since(now));
        waits.min().unwrap_or(longest).min(longest)
    }

    /// Takes one that has fired.
    pub(crate) fn fired(&mut self) -> Option<Timer> {
        let now = Instant::now();
        let timer = self
            .armed
            .iter()
            .find(|(_, at)| **at <= now)
            .map(|(timer, _)| *timer)?;
        self.armed.remove(&timer);
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_fires_once_and_not_when_disarmed() {
        let mut timers = Timers::default();
        timers.arm(Timer::Ask, Duration::ZERO);
        timers.arm(Timer::Switchover, Duration::ZERO);
        timers.disarm(Timer::Switchover);
        assert_eq!(timers.fired(), Some(Timer::Ask));
        assert_eq!(timers.fired(), None);
        assert_eq!(
            timers.next_in(Duration::from_secs(1)),
            Duration::from_secs(1)
        );
    }
}
