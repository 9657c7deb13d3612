//! How many lines a minute about what a guest does are written to the log.
//!
//! Owns the count. Refuses: lines over the limit, and tells how many those were once there is room again.

use std::time::{Duration, Instant};

/// Most lines in each minute.
const LINES_MAX: u64 = 20;
/// For how long the count goes on.
const EACH: Duration = Duration::from_secs(60);

/// What is said of one kind of thing.
#[derive(Debug)]
pub struct Rate {
    began: Instant,
    lines: u64,
}

impl Rate {
    /// Begins to count now.
    pub fn new(now: Instant) -> Self {
        Self {
            began: now,
            lines: 0,
        }
    }

    /// Whether a line is written now, and how many before it were not.
    pub fn admits(&mut self, now: Instant) -> Option<u64> {
        let mut left_out = 0;
        if now.saturating_duration_since(self.began) >= EACH {
            left_out = self.lines.saturating_sub(LINES_MAX);
            *self = Self::new(now);
        }
        self.lines += 1;
        (self.lines <= LINES_MAX).then_some(left_out)
    }

    /// Whether the line that was admitted last is the last for now.
    pub fn is_spent(&self) -> bool {
        self.lines == LINES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_resets_in_a_loop_writes_a_few_lines_a_minute() {
        let began = Instant::now();
        let mut rate = Rate::new(began);
        let written: Vec<u64> = (0..1_600_000).filter_map(|_| rate.admits(began)).collect();
        assert_eq!(written, [0; LINES_MAX as usize]);
        let later = began + EACH;
        assert_eq!(rate.admits(later), Some(1_600_000 - LINES_MAX));
        assert_eq!(rate.admits(later), Some(0));
    }
}
