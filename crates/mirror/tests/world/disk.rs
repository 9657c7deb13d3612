//! A disk with a volatile cache: what is read is what was written last, and a power cut leaves any of what was there since it was made
//! durable last, sector by sector.
//!
//! Owned by the [`World`](super::World). Refuses nothing.

use super::Numbers;
use std::ops::Range;

#[derive(Debug, Clone)]
pub struct Disk {
    now: u64,
    /// By sector: what is durable, and what was written since, each with its time.
    sectors: Vec<Vec<(u64, u64)>>,
}

impl Disk {
    pub fn of(content: &[u64]) -> Self {
        let sectors = content.iter().map(|value| vec![(0, *value)]);
        Self {
            now: 0,
            sectors: sectors.collect(),
        }
    }

    /// How often it was written.
    pub fn now(&self) -> u64 {
        self.now
    }

    pub fn read(&self, range: &Range<u64>) -> Vec<u64> {
        let sectors = &self.sectors[range.start as usize..range.end as usize];
        sectors.iter().map(|all| all[all.len() - 1].1).collect()
    }

    pub fn content(&self) -> Vec<u64> {
        self.read(&(0..self.sectors.len() as u64))
    }

    pub fn write(&mut self, sector: u64, value: u64) {
        self.now += 1;
        self.sectors[sector as usize].push((self.now, value));
    }

    /// A flush begins: what was written before becomes durable by it.
    pub fn begin_flush(&self) -> u64 {
        self.now
    }

    pub fn end_flush(&mut self, began: u64) {
        for all in &mut self.sectors {
            let durable = all.iter().rposition(|(at, _)| *at <= began);
            all.drain(..durable.unwrap_or(0));
        }
    }

    /// A durable write has ended.
    pub fn is_durable(&mut self, range: &Range<u64>, value: u64) {
        for all in &mut self.sectors[range.start as usize..range.end as usize] {
            let durable = all.iter().rposition(|(_, written)| *written == value);
            all.drain(..durable.unwrap_or(0));
        }
    }

    /// Returns how many sectors have lost something.
    pub fn lose_power(&mut self, numbers: &mut Numbers) -> u64 {
        let (kind, mut lost) = (numbers.below(3), 0);
        for all in &mut self.sectors {
            let kept = match kind {
                0 => 0,
                _ => numbers.below(all.len() as u64) as usize,
            };
            lost += u64::from(kept + 1 < all.len());
            *all = vec![(0, all[kept].1)];
        }
        lost
    }
}
