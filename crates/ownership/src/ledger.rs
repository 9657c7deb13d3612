//! The controller's memory of generations, and when it may let a VM begin anew elsewhere.
//!
//! Owned by the controller, kept in its database. Refuses: a new holder while any enrolled host might be one.
//! It is no authority: the hosts' records are. A ledger restored from an old backup knows too little, never
//! something wrong, and learns the rest from the hosts before it says anything.

use crate::record::HostRecord;
use godwit_types::{Generation, HostName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How far a new generation is put above the highest one heard when a host could not be heard: a fenced host
/// may have tried that many switchovers that nobody knows of.
pub const FENCED_GAP: u64 = 1 << 20;

/// The highest generation known of each VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GenerationLedger {
    highest: BTreeMap<VmName, Generation>,
}

/// Why a VM must not begin anew.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// These hosts were neither heard nor fenced.
    #[error(
        "{} may hold the VM and did not answer: bring it back, or fence it and confirm that",
        list(hosts)
    )]
    Unheard { hosts: Vec<HostName> },
    /// This host holds it, or waits for an answer about it.
    #[error(
        "'{host}' holds the VM or waits for the end of a handover: it is there that it starts or is resolved"
    )]
    Held { host: HostName },
    /// The answers do not belong together.
    #[error(
        "the hosts' answers were overtaken by something that happened meanwhile: survey them again"
    )]
    Stale,
    /// The counter is used up.
    #[error("the generation counter of the VM is exhausted")]
    Exhausted,
}

fn list(hosts: &[HostName]) -> String {
    let names: Vec<_> = hosts.iter().map(|h| format!("'{h}'")).collect();
    names.join(", ")
}

impl GenerationLedger {
    /// Learns from a host's record. Never goes down.
    pub fn learn(&mut self, record: &HostRecord) {
        let known = self.highest.entry(record.vm.clone()).or_default();
        *known = (*known).max(record.highest);
    }

    /// Learns what another ledger (a backup, a peer) knows.
    pub fn merge(&mut self, other: &GenerationLedger) {
        for (vm, generation) in &other.highest {
            let known = self.highest.entry(vm.clone()).or_default();
            *known = (*known).max(*generation);
        }
    }

    /// The highest generation known; 0 for a VM never heard of.
    pub fn highest(&self, vm: &VmName) -> Generation {
        self.highest.get(vm).copied().unwrap_or_default()
    }

    /// The level of the next survey of a VM: above everything known. An answer with a higher `highest` shows
    /// that it was too low; learn from it and survey again.
    pub fn survey_level(&self, vm: &VmName) -> Result<Generation, GrantError> {
        self.highest(vm).next().ok_or(GrantError::Exhausted)
    }

    /// The generation to grant, after a survey at `level`, to a host so that the VM begins there, from its
    /// boot. `enrolled` are all hosts that ever could hold it, `heard` their answers to this very survey,
    /// `fenced` those that an operator swears are off and will not come back with what they know.
    ///
    /// The answers were not given at one instant. That all of them are at the same level makes them one
    /// picture: a host that answered can since have taken only a generation above the level, and for that its
    /// giver would have had to answer with one, too.
    pub fn grant(
        &mut self,
        vm: &VmName,
        level: Generation,
        enrolled: &BTreeSet<HostName>,
        heard: &BTreeMap<HostName, HostRecord>,
        fenced: &BTreeSet<HostName>,
    ) -> Result<Generation, GrantError> {
        for record in heard.values().filter(|r| r.vm == *vm) {
            self.learn(record);
        }
        let silent = enrolled.iter().filter(|host| !heard.contains_key(*host));
        let unheard: Vec<_> = silent
            .clone()
            .filter(|host| !fenced.contains(*host))
            .cloned()
            .collect();
        if !unheard.is_empty() {
            return Err(GrantError::Unheard { hosts: unheard });
        }
        if let Some((host, _)) = heard.iter().find(|(_, r)| r.may_hold()) {
            return Err(GrantError::Held { host: host.clone() });
        }
        if heard.values().any(|r| r.vm != *vm || r.highest != level) {
            return Err(GrantError::Stale);
        }
        let step = if silent.count() == 0 { 1 } else { FENCED_GAP };
        let next = level.0.checked_add(step);
        let next = Generation(next.ok_or(GrantError::Exhausted)?);
        let known = self.highest.entry(vm.clone()).or_default();
        *known = (*known).max(next);
        Ok(next)
    }
}
