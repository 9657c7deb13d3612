//! How long to wait before a VM process is started, or a guest booted, again.
//!
//! Pure. One that worked and died is followed at once, however often; one that dies before it ever answered is
//! followed more and more slowly, for ever. Refuses: to give up.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// The same of boots.
const BOOT_FIRST: Duration = Duration::from_secs(1);
const BOOT_LONGEST: Duration = Duration::from_secs(60);

/// Counts starts that came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
    first: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            failures: 0,
            first: FIRST,
            longest: LONGEST,
        }
    }
}

impl Backoff {
    /// For boots of guests.
    pub fn of_boots() -> Self {
        Self {
            failures: 0,
            first: BOOT_FIRST,
            longest: BOOT_LONGEST,
        }
    }

    /// It answered: whatever came before is forgotten.
    pub fn worked(&mut self) {
        self.failures = 0;
    }

    /// It ended or hung before it answered; how long to wait now.
    pub fn failed(&mut self) -> Duration {
        let wait = self
            .first
            .saturating_mul(1 << self.failures.min(10))
            .min(self.longest);
        self.failures = self.failures.saturating_add(1);
        wait
    }

    /// How many starts in a row came to nothing.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_their_limit_and_start_anew() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..9).map(|_| backoff.failed().as_millis()).collect();
        assert_eq!(
            waits,
            [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]
        );
        backoff.worked();
        assert_eq!(backoff.failed(), FIRST);
        assert_eq!(backoff.failures(), 1);
    }
}
