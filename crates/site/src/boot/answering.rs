//! What a host answers another one that asks before it boots.
//!
//! Part of [`HostSite`]. Refuses: to take another machine, or an older life, for the host whose certificate it has.

use super::HostSite;
use crate::plant::Plant;
use godwit_types::site::{Instance, RecordSaid, SiteAnswer, SiteHost, SiteQuestion, Standing};
use godwit_types::{HostName, VmName};
use std::collections::BTreeSet;

impl HostSite {
    /// Answers another host's question, from the table and from this host's records, also while this host waits itself.
    pub fn answer(
        &self,
        asker: &HostName,
        question: &SiteQuestion,
        records: Vec<RecordSaid>,
    ) -> SiteAnswer {
        let asked: BTreeSet<&VmName> = question.wishes.iter().map(|wish| &wish.vm).collect();
        let rows = self.table.vms.iter().filter(|(vm, _)| asked.contains(vm));
        SiteAnswer {
            from: Some(self.me.clone()),
            standing: self.standing_of(asker, &question.instance),
            in_charge: false,
            stamp: self.table.stamp,
            vms: rows.map(|(vm, row)| (vm.clone(), row.clone())).collect(),
            records: records
                .into_iter()
                .filter(|record| asked.contains(&record.vm))
                .collect(),
            unread: BTreeSet::new(),
            given_on: BTreeSet::new(),
            off: BTreeSet::new(),
            replaced: false,
        }
    }

    /// What a life of another host is, as far as this host's table knows.
    pub fn standing_of(&self, asker: &HostName, instance: &Instance) -> Standing {
        if self.table.removed.contains(asker) {
            return Standing::Removed;
        }
        let known = self.table.hosts.iter().find(|host| host.name == *asker);
        match known {
            // Only the controller knows whether a person said that the first machine is off.
            Some(host) if self.is_another_machine(host, instance) => Standing::SecondInstance,
            Some(host) if instance.counter < host.counter => Standing::OldCopy,
            _ => Standing::Known,
        }
    }

    pub(super) fn is_another_machine(&self, host: &SiteHost, instance: &Instance) -> bool {
        let differs = !host.machine_id.is_empty() && host.machine_id != instance.machine_id;
        differs && !self.planted(Plant::CloneIsHost)
    }
}
