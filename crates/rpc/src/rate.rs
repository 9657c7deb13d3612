//! How often one source may ask for something that costs: a bucket of tries per source address.
//!
//! Pure: time comes in as a value. Owns its buckets, a bounded number of them. Refuses: a source whose bucket is empty;
//! where there are more sources than buckets, the one that asked longest ago is forgotten.

use crate::unproved::source;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Most sources that are remembered.
const SOURCES_MAX: usize = 4096;

/// One bucket of tries for each source address, 4,096 at most.
#[derive(Debug)]
pub struct Rate {
    burst: u32,
    each: Duration,
    buckets: BTreeMap<IpAddr, Bucket>,
}

#[derive(Debug)]
struct Bucket {
    left: u32,
    /// Up to when what was earned is counted in.
    since: Instant,
}

impl Rate {
    /// At most so many at once, and one more after each such time.
    pub fn new(burst: u32, each: Duration) -> Self {
        Self {
            burst,
            each,
            buckets: BTreeMap::new(),
        }
    }

    /// Whether this source may ask now; if so, one of its tries is used up.
    pub fn admits(&mut self, from: IpAddr, now: Instant) -> bool {
        let from = source(from);
        if !self.buckets.contains_key(&from) && self.buckets.len() >= SOURCES_MAX {
            let oldest = self.buckets.iter().min_by_key(|(_, bucket)| bucket.since);
            oldest
                .map(|(from, _)| *from)
                .map(|from| self.buckets.remove(&from));
        }
        let (burst, each) = (self.burst, self.each);
        let bucket = self.buckets.entry(from).or_insert(Bucket {
            left: burst,
            since: now,
        });
        let waited = now.saturating_duration_since(bucket.since);
        let earned = waited.as_nanos() / each.as_nanos().max(1);
        let earned = u32::try_from(earned).unwrap_or(u32::MAX).min(burst);
        if earned > 0 {
            bucket.left = bucket.left.saturating_add(earned).min(burst);
            bucket.since = now;
        }
        let admitted = bucket.left > 0;
        bucket.left = bucket.left.saturating_sub(1);
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_asks_too_often_waits_and_keeps_nobody_else_waiting() {
        let [a, b]: [IpAddr; 2] = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
        let (second, began) = (Duration::from_secs(1), Instant::now());
        let mut rate = Rate::new(3, second);
        let admitted: Vec<bool> = (0..5).map(|_| rate.admits(a, began)).collect();
        assert_eq!(admitted, [true, true, true, false, false]);
        assert!(rate.admits(b, began));
        assert!(!rate.admits(a, began + second / 2));
        assert!(rate.admits(a, began + second));
        assert!(!rate.admits(a, began + second));
        let later = began + second * 100;
        let admitted: Vec<bool> = (0..4).map(|_| rate.admits(a, later)).collect();
        assert_eq!(admitted, [true, true, true, false], "no more than a burst");
    }

    #[test]
    fn what_is_remembered_of_sources_is_bounded() {
        let mut rate = Rate::new(1, Duration::from_secs(1));
        let now = Instant::now();
        for number in 0..5000_u32 {
            assert!(rate.admits(IpAddr::V4(number.into()), now));
        }
        assert!(rate.buckets.len() <= SOURCES_MAX);
    }
}
