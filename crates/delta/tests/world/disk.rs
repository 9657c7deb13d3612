//! A file with a volatile cache, in sectors that are never torn: what is read is what was written last, and a power cut leaves of each sector
//! any of what it was since it was made durable last. A sync that fails is told once: what it was to make durable is read as before, and no later
//! sync makes it durable.
//!
//! Owned by the [`World`](super::World). Refuses nothing.

use super::Numbers;
use std::collections::BTreeMap;

#[derive(Debug)]
pub struct File<T> {
    now: u64,
    /// What is durable, and what was written since. A sector that is not here was never written.
    sectors: BTreeMap<u64, Vec<Written<T>>>,
}

#[derive(Debug, Clone, Copy)]
struct Written<T> {
    at: u64,
    value: T,
    /// The storage counts it as durable, and it is not.
    is_lost: bool,
}

impl<T> Written<T> {
    fn at(at: u64, value: T) -> Self {
        Self {
            at,
            value,
            is_lost: false,
        }
    }
}

impl<T: Copy + Default + PartialEq> File<T> {
    pub fn new() -> Self {
        Self {
            now: 0,
            sectors: BTreeMap::new(),
        }
    }

    pub fn read(&self, sector: u64) -> T {
        let all = self.sectors.get(&sector).and_then(|all| all.last());
        all.map_or(T::default(), |last| last.value)
    }

    pub fn write(&mut self, sector: u64, value: T) {
        self.now += 1;
        let nothing = || vec![Written::at(0, T::default())];
        let all = self.sectors.entry(sector).or_insert_with(nothing);
        all.push(Written::at(self.now, value));
    }

    /// What was written before this becomes durable by a sync that begins now.
    pub fn begin_sync(&self) -> u64 {
        self.now
    }

    pub fn end_sync(&mut self, began: u64) {
        for all in self.sectors.values_mut() {
            let durable = all.iter().rposition(|one| one.at <= began && !one.is_lost);
            all.drain(..durable.unwrap_or(0));
        }
    }

    /// A sync that began then fails.
    pub fn fail_sync(&mut self, began: u64) {
        for all in self.sectors.values_mut() {
            for one in all.iter_mut().skip(1).filter(|one| one.at <= began) {
                one.is_lost = true;
            }
        }
    }

    /// What was written with this value is durable.
    pub fn is_durable(&mut self, value: T) {
        for all in self.sectors.values_mut() {
            let durable = all.iter().rposition(|one| one.value == value);
            all.drain(..durable.unwrap_or(0));
        }
    }

    /// Returns how many sectors have lost something.
    pub fn lose_power(&mut self, numbers: &mut Numbers) -> u64 {
        let (kind, mut lost) = (numbers.below(3), 0);
        for all in self.sectors.values_mut() {
            let kept = match kind {
                0 => 0,
                _ => numbers.below(all.len() as u64) as usize,
            };
            lost += u64::from(kept + 1 < all.len());
            *all = vec![Written::at(0, all[kept].value)];
        }
        lost
    }

    pub fn written(&self) -> impl Iterator<Item = u64> {
        self.sectors.keys().copied()
    }
}
