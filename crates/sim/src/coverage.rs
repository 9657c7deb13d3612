//! What the seeds have exercised: faults, and pairs of state and event.
//!
//! Owned by a run, summed over runs.

use crate::faults::Fault;
use godwit_ownership::{EventKind, StateName};
use std::collections::BTreeMap;

/// Counts over any number of seeds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage {
    /// How often each fault struck.
    pub faults: BTreeMap<Fault, u64>,
    /// How often each event reached a core in each state.
    pub pairs: BTreeMap<(StateName, EventKind), u64>,
    /// Migrations begun, completed, refused after the gift, failed before it.
    pub migrations: [u64; 4],
    /// Times a VM was in doubt.
    pub doubts: u64,
    pub steps: u64,
}

impl Coverage {
    pub(crate) fn fault(&mut self, fault: Fault) {
        *self.faults.entry(fault).or_default() += 1;
    }

    pub(crate) fn pair(&mut self, state: StateName, event: EventKind) {
        *self.pairs.entry((state, event)).or_default() += 1;
    }

    /// Adds another run's counts.
    pub fn add(&mut self, other: &Coverage) {
        for (fault, n) in &other.faults {
            *self.faults.entry(*fault).or_default() += n;
        }
        for (pair, n) in &other.pairs {
            *self.pairs.entry(*pair).or_default() += n;
        }
        for (mine, theirs) in self.migrations.iter_mut().zip(other.migrations) {
            *mine += theirs;
        }
        self.doubts += other.doubts;
        self.steps += other.steps;
    }

    /// The pairs of state and event that no seed reached.
    pub fn missing(&self) -> Vec<(StateName, EventKind)> {
        let all = StateName::ALL
            .iter()
            .flat_map(|s| EventKind::ALL.iter().map(move |e| (*s, *e)));
        all.filter(|pair| !self.pairs.contains_key(pair)).collect()
    }
}
