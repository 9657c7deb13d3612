//! A controller on an old copy of its database: how it learns what it forgot, and takes over.
//!
//! Part of [`Book`]. Refuses: to grant anything before every host that it knows, or that any record or table names, was
//! read whole at the new epoch, or was fenced. A host that was read so refuses the words of every controller of an
//! earlier epoch from then on.

use crate::book::{Book, Row};
use crate::hear::News;
use crate::refusal::Refusal;
use godwit_types::HostName;
use godwit_types::site::{SiteHost, SiteTable, Stamp, WholeSurvey};
use std::collections::BTreeSet;

/// Whether the controller may grant anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Charge {
    /// Its word is the highest that anybody has heard.
    InCharge,
    /// Its database is an old copy.
    Restored {
        /// The highest word that a host has heard.
        heard: Stamp,
        /// The first word of the epoch that it would take.
        candidate: Stamp,
        /// Hosts that were read whole at that word.
        read: BTreeSet<HostName>,
    },
}

impl Charge {
    pub(crate) fn restored(heard: Stamp) -> Self {
        let candidate = Stamp {
            epoch: heard.epoch.saturating_add(1),
            number: 0,
        };
        Self::Restored {
            heard,
            candidate,
            read: BTreeSet::new(),
        }
    }
}

/// Whom a restored controller must read, and at which word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Takeover {
    /// The first word of the new epoch; hosts that hear it refuse lower ones.
    pub stamp: Stamp,
    /// Hosts to read whole.
    pub hosts: Vec<HostName>,
    /// Hosts that records name, with addresses from other hosts' tables: to be enrolled again.
    pub enrol: Vec<SiteHost>,
}

impl Book {
    /// Whether this controller grants anything.
    pub fn is_in_charge(&self) -> bool {
        self.charge == Charge::InCharge
    }

    pub(crate) fn must_be_in_charge(&self) -> Result<(), Refusal> {
        match self.is_in_charge() {
            true => Ok(()),
            false => Err(Refusal::Restored {
                waits_for: self.waits_for(),
            }),
        }
    }

    /// Hosts that must be read or fenced before this controller takes over.
    pub fn waits_for(&self) -> Vec<HostName> {
        let Charge::Restored { read, .. } = &self.charge else {
            return Vec::new();
        };
        let known = self.hosts.keys();
        let missing = known.filter(|host| !read.contains(*host) && !self.is_fenced(host));
        let strangers = self.strangers.keys();
        let unknown =
            strangers.filter(|host| !self.is_fenced(host) && !self.removed.contains(*host));
        missing.chain(unknown).cloned().collect()
    }

    /// What a restored controller is to do next; none while it is in charge.
    pub fn takeover(&self) -> Option<Takeover> {
        let Charge::Restored {
            candidate, read, ..
        } = &self.charge
        else {
            return None;
        };
        let hosts = self.hosts.keys();
        let unread = hosts.filter(|host| !read.contains(*host) && !self.is_fenced(host));
        Some(Takeover {
            stamp: *candidate,
            hosts: unread.cloned().collect(),
            enrol: self.strangers_on().cloned().collect(),
        })
    }

    /// Strangers with an address that nobody said are off.
    fn strangers_on(&self) -> impl Iterator<Item = &SiteHost> {
        let known = self.strangers.values().flatten();
        known.filter(|site| !self.is_fenced(&site.name) && !self.removed.contains(&site.name))
    }

    /// A host was read whole at the word of [`Takeover::stamp`].
    pub fn take_whole(
        &mut self,
        host: &HostName,
        at: Stamp,
        whole: WholeSurvey,
    ) -> (Vec<Row>, Vec<News>) {
        let mut news = Vec::new();
        let mut rows = self.meet(host, &whole.instance, &mut news);
        let (ticket, now) = (self.next(), self.next());
        for record in &whole.records {
            rows.extend(self.take_in(host, record, ticket, now, &mut news));
        }
        rows.extend(self.learn_table(&whole.table));
        if let Charge::Restored {
            candidate, read, ..
        } = &mut self.charge
            && *candidate == at
        {
            read.insert(host.clone());
        }
        (rows, news)
    }

    /// What a host's table has that this database lacks: hosts, and who may hold what.
    fn learn_table(&mut self, table: &SiteTable) -> Vec<Row> {
        let is_newer = table.complete > self.stamp;
        for site in &table.hosts {
            if self.hosts.contains_key(&site.name) {
                continue;
            }
            // A host that this database has as removed may have joined again since.
            if is_newer || !self.removed.contains(&site.name) {
                self.removed.remove(&site.name);
                self.strangers.insert(site.name.clone(), Some(site.clone()));
            }
        }
        let mut rows = Vec::new();
        for (vm, told) in &table.vms {
            let entry = self.vms.entry(vm.clone()).or_default();
            if told.stamp <= entry.stamp {
                continue;
            }
            entry.highest = entry.highest.max(told.held);
            for host in &told.may_hold {
                let named = entry.may_hold.entry(host.clone()).or_default();
                *named = (*named).max(told.held);
            }
            if told.held > entry.held {
                entry.held = told.held;
                entry.holder.clone_from(&told.holder);
                entry.deleted = told.deleted;
            }
            rows.extend(self.touch(vm));
        }
        rows
    }

    /// Takes over, once everybody was read or fenced. Every entry is written anew, so that every table is.
    pub fn finish_takeover(&mut self) -> Result<Vec<Row>, Refusal> {
        let Charge::Restored { candidate, .. } = self.charge else {
            return Ok(Vec::new());
        };
        let waits_for = self.waits_for();
        if !waits_for.is_empty() {
            return Err(Refusal::Restored { waits_for });
        }
        self.stamp = candidate;
        self.charge = Charge::InCharge;
        let vms: Vec<_> = self.vms.keys().cloned().collect();
        let mut rows = vec![Row::Stamp(self.word())];
        for vm in vms {
            rows.extend(self.touch(&vm));
        }
        Ok(rows)
    }
}
