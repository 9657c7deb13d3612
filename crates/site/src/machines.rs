//! Which machine a host is by tables that are newer than a controller's old database.
//!
//! Part of [`Book`], while it is restored. A person may have let another machine be a host since; the former one, powered on again,
//! is a clone of it. The newest table that tells it counts, for as long as its teller is in the site, and the takeover waits while it
//! differs from the database. Refuses: to overwrite what the database says by what a table does (the machine that it names has to come
//! and say so).

use crate::book::Book;
use crate::plant::Plant;
use crate::takeover::Charge;
use godwit_types::HostName;
use godwit_types::site::{Instance, SiteHost, SiteTable, Stamp, Standing};
use std::collections::BTreeMap;

/// The hosts of each table that was read, by who has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Machines {
    by: BTreeMap<HostName, Told>,
}

/// The hosts of one table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    at: Stamp,
    hosts: BTreeMap<HostName, Machine>,
}

/// A host's machine as a table has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Machine {
    id: String,
    counter: u64,
}

/// Another machine than the one that this database knows is the host, by a later word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OtherMachine<'a> {
    by: &'a HostName,
    /// As of this word.
    at: Stamp,
    machine: &'a Machine,
}

impl OtherMachine<'_> {
    /// The last life of the host that is known by it, but for its boot.
    pub(crate) fn life(&self) -> Instance {
        Instance {
            counter: self.machine.counter,
            boot_id: String::new(),
            machine_id: self.machine.id.clone(),
        }
    }
}

impl Machines {
    /// What this host told does not count any more.
    pub(crate) fn forget(&mut self, by: &HostName) {
        self.by.remove(by);
    }

    fn newest(&self, of: &HostName) -> Option<OtherMachine<'_>> {
        let tables = self.by.iter();
        let tellers = tables.filter_map(|(by, told)| {
            Some(OtherMachine {
                by,
                at: told.at,
                machine: told.hosts.get(of)?,
            })
        });
        tellers.max_by_key(|other| other.at)
    }
}

impl Book {
    /// Notes which machines hosts are by a table that was read for the takeover at `candidate`: no word of that epoch was said
    /// yet, so that no table can be as new.
    pub(crate) fn learn_machines(&mut self, by: &HostName, candidate: Stamp, table: &SiteTable) {
        let at = table.hosts_at.max(table.complete);
        let is_itself = self.standing(by) == Standing::Known && !self.crowding.contains(by);
        let can_be = at > self.stamp && at < candidate && !self.impossible.contains(by);
        let counts = is_itself && can_be && !self.planted(Plant::FormerMachineIsHost);
        // One that this database lacks may be enrolled again.
        let is_named = |site: &&SiteHost| {
            self.hosts.contains_key(&site.name) || self.strangers.contains_key(&site.name)
        };
        let named = table.hosts.iter().filter(is_named);
        let known = named.filter(|site| !site.machine_id.is_empty());
        let machine = |site: &SiteHost| Machine {
            id: site.machine_id.clone(),
            counter: site.counter,
        };
        let hosts = known.map(|site| (site.name.clone(), machine(site)));
        let hosts = hosts.collect();
        if let Charge::Restored { machines, .. } = &mut self.charge {
            machines.by.remove(by);
            if counts {
                machines.by.insert(by.clone(), Told { at, hosts });
            }
        }
    }

    /// The machine that a host is by a table that is newer than this database, and than what was learned since, where that is another
    /// one than this database knows.
    pub(crate) fn other_machine(&self, host: &HostName) -> Option<OtherMachine<'_>> {
        let Charge::Restored { machines, .. } = &self.charge else {
            return None;
        };
        let row = &self.hosts.get(host)?.row;
        let newest = machines.newest(host)?;
        let counts = newest.at > row.machine_as_of;
        (counts && newest.machine.id != row.instance.machine_id).then_some(newest)
    }

    /// The host by whose table, which is newer than this database, another machine is a host than this database knows.
    pub fn tells_another_machine(&self, of: &HostName) -> Option<&HostName> {
        self.other_machine(of).map(|other| other.by)
    }

    /// As of which word a host is the machine that speaks, where that was not known on an old copy: of the table that tells it; else it is
    /// so by a person's word, which is later than any table.
    pub(crate) fn machine_is_new_as_of(
        &self,
        host: &HostName,
        instance: &Instance,
    ) -> Option<Stamp> {
        let Charge::Restored { candidate, .. } = &self.charge else {
            return None;
        };
        let known = &self.hosts.get(host)?.row.instance.machine_id;
        let by_person = Stamp {
            epoch: candidate.epoch.saturating_sub(1),
            number: u64::MAX,
        };
        match self.other_machine(host) {
            Some(other) if other.machine.id == instance.machine_id => Some(other.at),
            None if known.is_empty() || *known == instance.machine_id => None,
            Some(_) | None => Some(by_person),
        }
    }

    /// What was read of a host does not count for the takeover any more.
    pub(crate) fn must_be_read_again(&mut self, host: &HostName) {
        if let Charge::Restored { read, .. } = &mut self.charge {
            read.remove(host);
        }
    }

    /// The takeover is done: no table is as new as this database any more.
    pub(crate) fn forget_since_when(&mut self) {
        for (name, host) in &mut self.hosts {
            if !std::mem::take(&mut host.row.machine_as_of).is_before_all() {
                self.unwritten.hosts.insert(name.clone());
            }
        }
    }
}
