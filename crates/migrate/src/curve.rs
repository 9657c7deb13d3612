//! How much memory a guest dirties within a time: its working set and its rate in one curve.
//!
//! A guest that writes the same pages again and again dirties them once: what is dirty after a time grows ever more
//! slowly and ends at the working set. So a rate says little by itself; what counts is how much was dirty how long after
//! the last look. Owns the few newest of these measurements. Refuses: measurements of no time.

use std::collections::VecDeque;

/// Measurements that are kept; a guest that changes its ways is believed after this many looks.
const SAMPLES_MAX: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    age_s: f64,
    bytes: f64,
}

/// The newest measurements of what a guest dirties within a time.
#[derive(Debug, Clone, Default)]
pub struct DirtyCurve {
    samples: VecDeque<Sample>,
}

impl DirtyCurve {
    /// Books what was dirty `age_s` after it was last asked.
    pub fn learn(&mut self, age_s: f64, bytes: u64) {
        if age_s <= 0.0 || !age_s.is_finite() {
            return;
        }
        // What is known about nearly the same time is older news.
        self.samples
            .retain(|sample| sample.age_s < 0.7 * age_s || sample.age_s > 1.4 * age_s);
        if self.samples.len() >= SAMPLES_MAX {
            self.samples.pop_front();
        }
        let bytes = bytes as f64;
        self.samples.push_back(Sample { age_s, bytes });
    }

    /// Whether nothing has been measured.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Bytes that will be dirty `age_s` after a look: along straight lines between what was measured, from nothing at
    /// no time; beyond the longest time, on at its average rate.
    pub fn bytes_after(&self, age_s: f64) -> f64 {
        let below = self.samples.iter().filter(|sample| sample.age_s <= age_s);
        let above = self.samples.iter().filter(|sample| sample.age_s > age_s);
        let low = below.fold(None, |best: Option<Sample>, next| match best {
            Some(best) if best.bytes >= next.bytes => Some(best),
            _ => Some(*next),
        });
        let high = above.fold(None, |best: Option<Sample>, next| match best {
            Some(best) if best.age_s <= next.age_s => Some(best),
            _ => Some(*next),
        });
        match (low, high) {
            (None, None) => 0.0,
            (Some(low), None) => self.beyond(low, age_s),
            (low, Some(high)) => {
                let from = low.unwrap_or(Sample {
                    age_s: 0.0,
                    bytes: 0.0,
                });
                let share = (age_s - from.age_s) / (high.age_s - from.age_s);
                (from.bytes + share * (high.bytes - from.bytes)).max(from.bytes)
            }
        }
    }

    /// A curve that has grown flat stays flat; one that has not goes on as it was.
    fn beyond(&self, last: Sample, age_s: f64) -> f64 {
        let earlier = self
            .samples
            .iter()
            .filter(|sample| sample.age_s < last.age_s);
        let slope = earlier
            .map(|sample| (last.bytes - sample.bytes) / (last.age_s - sample.age_s))
            .fold(last.bytes / last.age_s, f64::min);
        last.bytes + slope.max(0.0) * (age_s - last.age_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_goes_on() {
        let mut curve = DirtyCurve::default();
        curve.learn(1.0, 100);
        curve.learn(4.0, 400);
        for age_s in [0.5, 1.0, 2.0, 4.0, 8.0] {
            assert!((curve.bytes_after(age_s) - 100.0 * age_s).abs() < 1e-9);
        }
    }

    #[test]
    fn a_working_set_is_dirtied_once() {
        let mut curve = DirtyCurve::default();
        curve.learn(4.0, 1000);
        curve.learn(1.0, 1000);
        assert_eq!(curve.bytes_after(8.0), 1000.0);
        assert_eq!(curve.bytes_after(2.0), 1000.0);
        assert_eq!(curve.bytes_after(0.5), 500.0);
    }

    #[test]
    fn a_guest_that_became_quiet_is_believed() {
        let mut curve = DirtyCurve::default();
        curve.learn(1.0, 1000);
        curve.learn(1.1, 10);
        assert!(curve.bytes_after(1.0) < 10.0);
    }

    #[test]
    fn no_time_says_nothing() {
        let mut curve = DirtyCurve::default();
        curve.learn(0.0, 1000);
        curve.learn(f64::NAN, 1000);
        assert!(curve.is_empty());
        assert_eq!(curve.bytes_after(1.0), 0.0);
    }
}
