//! What comes in part: of a write that failed, at a power cut, or on a link that is lost.

use super::{Change, Put, World};
use std::collections::BTreeSet;
use std::ops::Range;

impl World {
    /// Writes any of the sectors that are left. Returns whether a part of the whole is there then.
    pub(super) fn tear(&mut self, put: &Put) -> bool {
        let some = self.numbers.some_of(put.range.clone());
        let some: BTreeSet<u64> = some.into_iter().collect();
        for sector in put.left.iter().filter(|sector| some.contains(sector)) {
            self.disk(put.side).write(*sector, put.value);
        }
        let missing = put.left.iter().filter(|sector| !some.contains(sector));
        let missing = missing.count() as u64;
        missing > 0 && missing < put.range.end - put.range.start
    }

    /// A copy comes in part. Returns whether a part of it came.
    pub(super) fn apply_some(&mut self, range: &Range<u64>, content: &[u64]) -> bool {
        let some = self.numbers.some_of(range.clone());
        for sector in &some {
            let value = content[(sector - range.start) as usize];
            self.destination.write(*sector, value);
        }
        !some.is_empty() && (some.len() as u64) < range.end - range.start
    }

    /// A change that was under way over a link comes, as a whole or in part. Returns whether a part of it came.
    pub(super) fn arrive(&mut self, change: &Change, is_whole: bool) -> bool {
        let range = &change.range;
        let some: Vec<u64> = match is_whole {
            true => range.clone().collect(),
            false => self.numbers.some_of(range.clone()),
        };
        let newest = self.newest.as_mut().unwrap();
        let won = newest.admit(change.number, range.clone());
        for sector in won.into_iter().flatten() {
            if some.contains(&sector) {
                let value = change.content[(sector - range.start) as usize];
                self.destination.write(sector, value);
            }
        }
        !some.is_empty() && (some.len() as u64) < range.end - range.start
    }
}
