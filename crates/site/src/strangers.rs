//! Hosts that others name and this book does not know.
//!
//! Part of [`Book`]. A controller in charge enrolled every host that its grants name, so that a stranger is a host's
//! mistake or lie: it is shown, with who names it, and stands in nobody's way. One on an old copy of its database may have
//! forgotten a host, and waits for each. Refuses: to take in more strangers of one host than a site has hosts.

use crate::book::Book;
use godwit_types::site::SiteHost;
use godwit_types::{Generation, HostName, VmName};
use std::collections::{BTreeMap, BTreeSet};

/// How many strangers one host may bring up.
const NAMED_AT_MOST: usize = 512;

/// A host that the inventory lacks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stranger {
    /// As a host's table had it.
    pub site: Option<SiteHost>,
    /// The hosts that name it.
    pub told_by: BTreeSet<HostName>,
    /// VMs that it may hold by nothing but their word.
    pub brought: BTreeSet<VmName>,
}

/// A host that names others which were never enrolled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    pub by: HostName,
    pub named: BTreeSet<HostName>,
    /// It names more than can be; what it tells does not count for a takeover.
    pub too_many: bool,
}

impl Book {
    /// A host names a stranger; true when nobody did before. One that names too many is not believed.
    pub(crate) fn note_stranger(&mut self, by: &HostName, host: &HostName) -> bool {
        if let Some(stranger) = self.strangers.get_mut(host) {
            stranger.told_by.insert(by.clone());
            return false;
        }
        if self.crowding.contains(by) {
            return false;
        }
        let mut all = self.strangers.values();
        let brought = all.by_ref().filter(|one| one.told_by.contains(by));
        if brought.count() >= NAMED_AT_MOST {
            self.crowding.insert(by.clone());
            return false;
        }
        let stranger = self.strangers.entry(host.clone()).or_default();
        stranger.told_by.insert(by.clone());
        true
    }

    /// A host's table has a stranger's address.
    pub(crate) fn note_site(&mut self, by: &HostName, site: &SiteHost) {
        self.note_stranger(by, &site.name);
        if let Some(stranger) = self.strangers.get_mut(&site.name) {
            stranger.site = Some(site.clone());
        }
    }

    /// A host says on an old copy of the database that another one may hold a VM: false when it is not believed.
    pub(crate) fn admit(&mut self, by: &HostName, host: &HostName) -> bool {
        if self.hosts.contains_key(host) || self.removed.contains(host) {
            return true;
        }
        self.note_stranger(by, host);
        self.strangers.contains_key(host)
    }

    /// A host may hold a VM, by another one's word.
    pub(crate) fn name_holder(&mut self, vm: &VmName, host: &HostName, generation: Generation) {
        let entry = self.vms.entry(vm.clone()).or_default();
        match entry.may_hold.get_mut(host) {
            Some(named) => *named = (*named).max(generation),
            None => {
                entry.may_hold.insert(host.clone(), generation);
                if let Some(stranger) = self.strangers.get_mut(host) {
                    stranger.brought.insert(vm.clone());
                }
            }
        }
    }

    /// A host was taken out of the site, and whom it alone named: no VM waits for those any more.
    pub(crate) fn forget_strangers_of(&mut self, by: &HostName) {
        self.crowding.remove(by);
        let mut gone = Vec::new();
        self.strangers.retain(|name, stranger| {
            let was_told = stranger.told_by.remove(by);
            let stays = !was_told || !stranger.told_by.is_empty();
            if !stays {
                gone.push((name.clone(), std::mem::take(&mut stranger.brought)));
            }
            stays
        });
        for (name, brought) in gone {
            for vm in brought {
                if let Some(entry) = self.vms.get_mut(&vm) {
                    entry.may_hold.remove(&name);
                    entry.holder.take_if(|holder| *holder == name);
                    entry.forget_ran_on(&name);
                    self.touch(&vm);
                }
            }
        }
    }

    /// Who names a stranger.
    pub fn told_by(&self, stranger: &HostName) -> Vec<HostName> {
        let known = self.strangers.get(stranger);
        let tellers = known.map(|stranger| stranger.told_by.iter().cloned());
        tellers.into_iter().flatten().collect()
    }

    /// Whether a name is one that no inventory had: neither enrolled nor removed nor said to be off.
    fn is_strange(&self, host: &HostName) -> bool {
        let known = self.hosts.contains_key(host) || self.removed.contains(host);
        !known && !self.is_fenced(host)
    }

    /// Hosts whose records name strangers now. A controller on an old copy of its database waits for those instead, but
    /// for what it does not believe.
    pub fn names_strangers(&self) -> Vec<Names> {
        let mut all: BTreeMap<&HostName, BTreeSet<HostName>> = BTreeMap::new();
        for by in &self.crowding {
            all.entry(by).or_default();
        }
        for (by, book) in self.hosts.iter().filter(|_| !self.is_restored()) {
            let others = book.said.values().filter_map(|said| said.claim.other());
            let strange = others.filter(|other| self.is_strange(other)).cloned();
            let named: BTreeSet<HostName> = strange.take(NAMED_AT_MOST).collect();
            if !named.is_empty() {
                all.entry(by).or_default().extend(named);
            }
        }
        // One that asks whether it may boot names itself: it has a certificate and is polled by nobody.
        for (host, stranger) in self.strangers.iter().filter(|_| !self.is_restored()) {
            if stranger.told_by.contains(host) && self.is_strange(host) {
                all.entry(host).or_default().insert(host.clone());
            }
        }
        let names = all.into_iter().map(|(by, named)| Names {
            by: by.clone(),
            named,
            too_many: self.crowding.contains(by),
        });
        names.collect()
    }
}
