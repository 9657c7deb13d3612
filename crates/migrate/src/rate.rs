//! A rate over the last second or so, from a counter that is read again and again.
//!
//! Pure: the clock is the caller's, s. Owns the last readings, a few dozen at most. Refuses: a rate over less than
//! [`RATE_MIN_S`].

use std::collections::VecDeque;

/// A rate over less says little.
pub const RATE_MIN_S: f64 = 0.25;
/// How far back it looks.
const WINDOW_S: f64 = 1.5;
/// Readings kept, at most one in this time.
const SAMPLE_EVERY_S: f64 = 0.05;

/// The readings of the last moments.
#[derive(Debug, Default)]
pub struct WireRate {
    samples: VecDeque<(f64, u64)>,
    now: Option<(f64, u64)>,
    moved_s: Option<f64>,
}

impl WireRate {
    /// Takes a reading: so many bytes in all by now.
    pub fn sample(&mut self, now_s: f64, bytes: u64) {
        if self.now.is_none_or(|(_, before)| bytes != before) {
            self.moved_s = Some(now_s);
        }
        self.now = Some((now_s, bytes));
        let due = |last: &(f64, u64)| now_s - last.0 >= SAMPLE_EVERY_S;
        if self.samples.back().is_none_or(due) {
            self.samples.push_back((now_s, bytes));
        }
        // One that is older than the window stays, so that the whole window is looked at.
        while self
            .samples
            .get(1)
            .is_some_and(|(at, _)| now_s - at >= WINDOW_S)
        {
            self.samples.pop_front();
        }
    }

    /// From now on the counter is expected to move: that it stood still before was no silence.
    pub fn awaits(&mut self, now_s: f64) {
        self.moved_s = Some(now_s);
    }

    /// Bytes per second lately; none where too little time was looked at.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let ((then_s, before), (now_s, bytes)) = (*self.samples.front()?, self.now?);
        let seconds = now_s - then_s;
        (seconds >= RATE_MIN_S).then(|| bytes.saturating_sub(before) as f64 / seconds)
    }

    /// For how long the counter has stood still, s.
    pub fn silent_s(&self, now_s: f64) -> f64 {
        self.moved_s
            .map_or(0.0, |moved_s| (now_s - moved_s).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_last_moments_and_not_of_the_whole() {
        let mut rate = WireRate::default();
        assert_eq!(rate.bytes_per_s(), None);
        let mut bytes = 0;
        for tick in 0..100 {
            rate.sample(f64::from(tick) * 0.1, bytes);
            bytes += if tick < 50 { 1_000 } else { 100 };
        }
        let lately = rate.bytes_per_s().unwrap();
        assert!((900.0..1_100.0).contains(&lately), "{lately}");
        assert!(rate.samples.len() < 40);
    }

    #[test]
    fn a_counter_that_stands_still_is_silent_for_so_long() {
        let mut rate = WireRate::default();
        rate.sample(1.0, 500);
        rate.sample(2.0, 500);
        assert_eq!(rate.silent_s(4.5), 3.5);
        rate.sample(5.0, 501);
        assert_eq!(rate.silent_s(5.0), 0.0);
        assert_eq!(WireRate::default().silent_s(9.0), 0.0);
    }
}
