//! When a disk is done with what it was asked for: latency, bytes per second and IOs at once.
//!
//! Owns a plan of the future, no time: the caller says what time it is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use super::Settings;

/// What a disk is busy with.
#[derive(Debug, Default)]
pub struct Disk {
    /// When the IOs that are under way or planned end.
    ends: BinaryHeap<Reverse<Instant>>,
    /// When the last byte planned has been transferred.
    transferred: Option<Instant>,
}

impl Disk {
    /// When an IO of so many bytes that comes now is done; `None` if it takes no time.
    pub fn plan(&mut self, settings: &Settings, now: Instant, bytes: u64) -> Option<Instant> {
        if settings.latency.is_zero() && settings.bytes_per_second.is_none() {
            return None;
        }
        while self.ends.peek().is_some_and(|end| end.0 <= now) {
            self.ends.pop();
        }
        let mut start = now;
        while settings
            .ios_at_once
            .is_some_and(|most| self.ends.len() >= most.max(1))
        {
            start = self.ends.pop().map_or(now, |end| end.0);
        }
        let mut end = start + settings.latency;
        if let Some(rate) = settings.bytes_per_second {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
            let takes = Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX));
            let free = self.transferred.map_or(start, |free| free.max(start));
            self.transferred = Some(free + takes);
            end = end.max(free + takes);
        }
        self.ends.push(Reverse(end));
        Some(end)
    }
}
