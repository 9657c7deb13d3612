//! What a host answers another one that asks before it boots, and whose word about who runs a VM it hears at all.
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
        let known = self.knows(asker);
        known.map_or(Standing::Known, |host| self.standing_beside(host, instance))
    }

    /// What a life is beside the one that a table has.
    fn standing_beside(&self, host: &SiteHost, instance: &Instance) -> Standing {
        match instance.counter < host.counter {
            // Only the controller knows whether a person said that the first machine is off.
            _ if self.is_another_machine(host, instance) => Standing::SecondInstance,
            true => Standing::OldCopy,
            false => Standing::Known,
        }
    }

    /// Why a word of host `from` about who runs a VM does not count: another machine or an older life speaks, or is spoken to,
    /// which knows the handover as it was on its copy. `life` is the one that speaks, `meant` whom it speaks to; hosts of
    /// earlier builds say neither.
    pub fn refuses_peer(
        &self,
        from: &HostName,
        life: Option<&Instance>,
        meant: Option<&SiteHost>,
    ) -> Option<String> {
        let standing = life.map_or(Standing::Known, |life| self.standing_of(from, life));
        if let Some(what) = not_the_host(standing) {
            return Some(format!("what speaks for host '{from}' is {what}"));
        }
        let what = not_the_host(self.standing_beside(meant?, &self.instance))?;
        Some(format!("what answers for host '{}' is {what}", self.me))
    }

    /// How this host's table knows another one, which says to it whom a word is meant for.
    pub fn knows(&self, host: &HostName) -> Option<&SiteHost> {
        self.table.hosts.iter().find(|known| known.name == *host)
    }

    pub(super) fn is_another_machine(&self, host: &SiteHost, instance: &Instance) -> bool {
        let differs = !host.machine_id.is_empty() && host.machine_id != instance.machine_id;
        differs && !self.planted(Plant::CloneIsHost)
    }
}

fn not_the_host(standing: Standing) -> Option<&'static str> {
    match standing {
        Standing::Known => None,
        Standing::Removed => Some("a host that was removed from the site"),
        Standing::SecondInstance => Some("another machine with its certificate"),
        Standing::OldCopy => Some("an older copy of it"),
    }
}
