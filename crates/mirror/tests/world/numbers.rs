//! Numbers that a seed gives, and how often what fails.
//!
//! Owned by the [`World`](super::World). Refuses nothing.

use std::ops::Range;

/// The same numbers in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Of a part: all, none, the first ones, or any.
    pub fn some_of(&mut self, all: Range<u64>) -> Vec<u64> {
        let len = all.end - all.start;
        match self.below(4) {
            0 => Vec::new(),
            1 => all.collect(),
            2 => all.take(self.below(len + 1) as usize).collect(),
            _ => all.filter(|_| self.below(2) == 0).collect(),
        }
    }
}

/// One in so many fails; none where it is 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rates {
    pub source_writes: u64,
    pub destination_writes: u64,
    pub source_reads: u64,
    pub power_cuts: u64,
}
