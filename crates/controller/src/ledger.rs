//! The highest generation of each VM's name that was ever seen or granted. Pure.
//!
//! Owned by the inventory, a copy is in the database. Only ever goes up: what a host reports wins over an older
//! database, and a name that was deleted and is used again goes on where it ended.

use godwit_types::{Generation, VmName};
use std::collections::BTreeMap;

/// How far generations are skipped when a host is given up unheard: it may have tried that many handovers.
const FENCED_GAP: u64 = 1 << 20;

/// Highest generations by name.
#[derive(Debug, Clone, Default)]
pub struct Ledger(BTreeMap<VmName, Generation>);

impl Ledger {
    /// Notes a generation; true when it is news.
    pub fn see(&mut self, vm: &VmName, generation: Generation) -> bool {
        let highest = self.0.entry(vm.clone()).or_default();
        let news = generation > *highest;
        *highest = generation.max(*highest);
        news
    }

    /// The highest one seen; 0 = none yet.
    pub fn highest(&self, vm: &VmName) -> Generation {
        self.0.get(vm).copied().unwrap_or_default()
    }

    /// Skips what a host that was given up may have used without anybody hearing of it; gives the new highest.
    pub fn skip(&mut self, vm: &VmName) -> Generation {
        let highest = self.0.entry(vm.clone()).or_default();
        *highest = Generation(highest.0.saturating_add(FENCED_GAP));
        *highest
    }

    /// The next one that may be granted; none when the counter is exhausted. Noting it is the caller's next step.
    pub fn next(&self, vm: &VmName) -> Option<Generation> {
        self.highest(vm).next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_never_goes_down() {
        let vm = VmName::new("web").unwrap();
        let mut ledger = Ledger::default();
        assert_eq!(ledger.next(&vm), Some(Generation(1)));
        assert!(ledger.see(&vm, Generation(5)));
        assert!(!ledger.see(&vm, Generation(3)));
        assert_eq!(ledger.next(&vm), Some(Generation(6)));
        ledger.see(&vm, Generation(u64::MAX));
        assert_eq!(ledger.next(&vm), None);
    }
}
