//! How long a copying takes yet, from how fast it was so far.
//!
//! Who owns the state: whoever looks how much is left. Refuses to guess before anything came. Pure: the caller says what time
//! it is.

use std::time::Instant;

/// What is known of a copying's speed.
#[derive(Debug, Default)]
pub struct Estimate {
    /// The most that was left yet,
    most: u64,
    /// and when there was less of it first, and how much. From there on the speed counts: before, what is on its way has not
    /// come yet, and takes time that it does not take again.
    first: Option<(Instant, u64)>,
}

impl Estimate {
    /// Seconds until nothing is left, now that so much is.
    pub fn seconds(&mut self, now: Instant, left: u64) -> Option<f64> {
        self.most = self.most.max(left);
        match self.first {
            // More is left than then: what was copied has been lost.
            Some((_, then)) if left > then => (self.most, self.first) = (left, None),
            None if left < self.most => self.first = Some((now, left)),
            _ => {}
        }
        let (since, then) = self.first?;
        let came = then.checked_sub(left).filter(|came| *came > 0)?;
        let took = now.saturating_duration_since(since).as_secs_f64();
        Some(took * left as f64 / came as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_time_until_the_first_bytes_came_does_not_count_and_a_loss_begins_anew() {
        let mut estimate = Estimate::default();
        let began = Instant::now();
        let mut at = |ms, left| estimate.seconds(began + Duration::from_millis(ms), left);
        assert_eq!((at(0, 1000), at(900, 1000)), (None, None));
        assert_eq!(at(1000, 990), None);
        assert_eq!(at(1100, 980), Some(9.8));
        assert_eq!(at(2000, 490), Some(0.98));
        assert_eq!((at(2100, 1000), at(7000, 1000)), (None, None));
        assert_eq!((at(7100, 900), at(7200, 800)), (None, Some(0.8)));
        assert_eq!(at(8000, 0), Some(0.0));
    }
}
