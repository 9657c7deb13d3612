//! A controller on an old copy of its database: how it learns what it forgot, and takes over.
//!
//! Part of [`Book`]. Refuses: to grant anything before every host that it knows, or that any record or table names, was
//! read whole at the new epoch, or was fenced. A host that was read so refuses the words of every controller of an
//! earlier epoch from then on.

use crate::book::Book;
use crate::hear::{News, PLAUSIBLE_EPOCHS, PLAUSIBLE_NUMBER, Ticket, is_plausible};
use crate::machines::Machines;
use crate::plant::Plant;
use crate::refusal::Refusal;
use godwit_types::site::{SiteHost, SiteTable, SiteVm, Stamp, Standing, WholeSurvey};
use godwit_types::{HostName, VmName};
use std::collections::BTreeSet;

/// Whether the controller may grant anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Charge {
    /// Its word is the highest that anybody has heard.
    Held,
    /// Its database is an old copy.
    Restored {
        /// The highest word that a host has heard.
        heard: Stamp,
        /// Hosts that say so.
        said_by: BTreeSet<HostName>,
        /// The first word of the epoch that it would take.
        candidate: Stamp,
        /// Hosts that were read whole at that word.
        read: BTreeSet<HostName>,
        /// Which machines hosts are by tables that are newer than this database.
        machines: Machines,
    },
    /// Hosts took its words, and then heard one of a later epoch: another controller has taken over from this one. It does
    /// not take that back, or two controllers would do so in turns.
    Replaced {
        /// Hosts that say so.
        said_by: BTreeSet<HostName>,
    },
}

impl Charge {
    fn restored(heard: Stamp, host: &HostName, machines: Machines) -> Self {
        let candidate = Stamp {
            epoch: heard.epoch.saturating_add(1),
            number: 0,
        };
        Self::Restored {
            heard,
            said_by: BTreeSet::from([host.clone()]),
            candidate,
            read: BTreeSet::new(),
            machines,
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
    /// Whether this controller grants anything: it knows no later word than its own, and since it was started every host
    /// has answered or failed to.
    pub fn is_in_charge(&self) -> bool {
        self.must_be_in_charge().is_ok()
    }

    /// Whether it was started just now, and hosts have neither answered nor failed to.
    pub fn has_unasked(&self) -> bool {
        !self.unasked.is_empty()
    }

    /// The same of a controller that knows no later word than its own.
    pub fn is_starting(&self) -> bool {
        self.charge == Charge::Held && self.has_unasked()
    }

    /// Whether its database is an old copy.
    pub fn is_restored(&self) -> bool {
        matches!(self.charge, Charge::Restored { .. })
    }

    /// Whether another controller has taken over from this one.
    pub fn is_replaced(&self) -> bool {
        matches!(self.charge, Charge::Replaced { .. })
    }

    pub(crate) fn must_be_in_charge(&self) -> Result<(), Refusal> {
        match &self.charge {
            Charge::Restored { .. } => Err(Refusal::Restored {
                waits_for: self.waits_for(),
            }),
            Charge::Replaced { said_by } => Err(Refusal::Replaced {
                said_by: said_by.iter().cloned().collect(),
            }),
            Charge::Held if !self.unasked.is_empty() && !self.planted(Plant::GrantsUnheard) => {
                Err(Refusal::Starting {
                    waits_for: self.unasked.iter().cloned().collect(),
                })
            }
            Charge::Held => Ok(()),
        }
    }

    /// Hosts that say that another controller has spoken later than this one.
    pub fn said_by(&self) -> Vec<HostName> {
        match &self.charge {
            Charge::Held => Vec::new(),
            Charge::Restored { said_by, .. } | Charge::Replaced { said_by } => {
                said_by.iter().cloned().collect()
            }
        }
    }

    /// What a host has heard of the controllers' words: a later one than this controller ever said shows that its database
    /// is an old copy, or that it was replaced.
    pub(crate) fn note_word(&mut self, host: &HostName, heard: Stamp, news: &mut Vec<News>) {
        if self.planted(Plant::RestoredGoesOn) {
            return;
        }
        let far = self.stamp.epoch.saturating_add(PLAUSIBLE_EPOCHS);
        if heard.epoch > far || heard.number > PLAUSIBLE_NUMBER {
            if self.impossible.insert(host.clone()) {
                news.push(News::Impossible { host: host.clone() });
            }
            return;
        }
        match &mut self.charge {
            Charge::Held if heard <= self.stamp => {}
            Charge::Held if self.is_proven && heard.epoch > self.stamp.epoch => {
                let said_by = BTreeSet::from([host.clone()]);
                self.charge = Charge::Replaced { said_by };
                let host = host.clone();
                news.push(News::Replaced { heard, host });
            }
            Charge::Held => self.found_restored(host, heard, news),
            Charge::Restored {
                heard: known,
                candidate,
                said_by,
                ..
            } => {
                if heard > self.stamp && heard.epoch < candidate.epoch {
                    said_by.insert(host.clone());
                }
                if heard > (*known).max(*candidate) {
                    self.found_restored(host, heard, news);
                }
            }
            Charge::Replaced { said_by } => {
                if heard.epoch > self.stamp.epoch {
                    said_by.insert(host.clone());
                }
            }
        }
    }

    /// Whatever this database says was said before it was put back. That a host is off may have ended since.
    fn found_restored(&mut self, host: &HostName, heard: Stamp, news: &mut Vec<News>) {
        if self.charge == Charge::Held && !self.planted(Plant::OldFenceCounts) {
            self.forget_fences();
        }
        // What a table told that cannot be read again, since its host is off by now, counts on.
        let machines = match &mut self.charge {
            Charge::Restored { machines, .. } => std::mem::take(machines),
            Charge::Held | Charge::Replaced { .. } => Machines::default(),
        };
        self.charge = Charge::restored(heard, host, machines);
        let host = host.clone();
        news.push(News::RestoredCopy { heard, host });
    }

    fn forget_fences(&mut self) {
        for (name, host) in &mut self.hosts {
            if std::mem::take(&mut host.row.fenced) {
                self.unwritten.hosts.insert(name.clone());
            }
        }
        if !self.fenced_strangers.is_empty() {
            self.fenced_strangers.clear();
            self.unwritten.strangers = true;
        }
    }

    /// A host was taken out of the site: what it alone said of other hosts and of another controller's words does not
    /// count any more.
    pub(crate) fn forget_word_of(&mut self, host: &HostName) {
        self.impossible.remove(host);
        self.forget_strangers_of(host);
        let nobody_else = match &mut self.charge {
            Charge::Held => false,
            Charge::Restored {
                said_by,
                read,
                machines,
                ..
            } => {
                machines.forget(host);
                said_by.remove(host);
                said_by.is_empty() && read.iter().all(|one| one == host)
            }
            Charge::Replaced { said_by } => {
                said_by.remove(host);
                said_by.is_empty()
            }
        };
        if nobody_else {
            self.charge = Charge::Held;
        }
    }

    /// Hosts that must be read or fenced before this controller takes over.
    pub fn waits_for(&self) -> Vec<HostName> {
        let Charge::Restored { read, .. } = &self.charge else {
            return Vec::new();
        };
        let known = self.hosts.keys();
        let missing = known.filter(|host| {
            let is_over = read.contains(*host) || self.is_fenced(host);
            !is_over || self.other_machine(host).is_some()
        });
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
        let unread = hosts.filter(|host| {
            let is_read = read.contains(*host) && self.other_machine(host).is_none();
            !is_read && !self.is_fenced(host)
        });
        Some(Takeover {
            stamp: *candidate,
            hosts: unread.cloned().collect(),
            enrol: self.to_enrol(),
        })
    }

    /// Hosts that tables name and this database forgot, but for those that are off: to be enrolled again once they show
    /// their certificate. One that was off while this controller took over comes back later.
    pub fn to_enrol(&self) -> Vec<SiteHost> {
        match self.is_replaced() {
            true => Vec::new(),
            false => self.strangers_on().cloned().collect(),
        }
    }

    /// Strangers with an address that nobody said are off.
    fn strangers_on(&self) -> impl Iterator<Item = &SiteHost> {
        let known = self.strangers.values();
        let sites = known.filter_map(|stranger| stranger.site.as_ref());
        sites.filter(|site| !self.is_fenced(&site.name) && !self.removed.contains(&site.name))
    }

    /// A host was read whole at the word of [`Takeover::stamp`]: it was asked at `ticket`. One that is not itself is not
    /// read by what it says.
    pub fn take_whole(
        &mut self,
        host: &HostName,
        at: Stamp,
        ticket: Ticket,
        whole: WholeSurvey,
    ) -> Vec<News> {
        let mut news = Vec::new();
        if !self.hosts.contains_key(host) {
            // It was removed while it was read: nobody would take back what it tells.
            return news;
        }
        let now = self.next();
        self.meet_asked(
            host,
            &whole.instance,
            whole.table.stamp,
            ticket.0,
            &mut news,
        );
        for record in &whole.records {
            self.take_in(host, record, ticket.0, now, &mut news);
            if self.unreadable.contains(&record.vm) {
                // What this database cannot read is learned anew, from everybody.
                self.take_up(host, record, &mut news);
            }
        }
        self.learn_table(host, &whole.table);
        self.learn_machines(host, at, &whole.table);
        // Its own table, too, may tell that another machine is the host.
        self.meet(host, &whole.instance, &mut news);
        for vm in &whole.unread {
            // It may hold what it cannot read: nobody else gets the VM before it has said no.
            let entry = self.vms.entry(vm.clone()).or_default();
            let highest = entry.highest;
            entry.may_hold.entry(host.clone()).or_insert(highest);
            self.touch(vm);
        }
        let is_itself = self.standing(host) == Standing::Known && !self.crowding.contains(host);
        if let Charge::Restored {
            candidate, read, ..
        } = &mut self.charge
            && *candidate == at
            && is_itself
        {
            read.insert(host.clone());
        }
        news
    }

    /// What a host's table has that this database lacks: hosts, and who may hold what.
    fn learn_table(&mut self, by: &HostName, table: &SiteTable) {
        let is_newer = table.complete > self.stamp;
        for site in &table.hosts {
            if self.hosts.contains_key(&site.name) {
                continue;
            }
            // A host that this database has as removed may have joined again since.
            if is_newer || !self.removed.contains(&site.name) {
                self.removed.remove(&site.name);
                self.note_site(by, site);
            }
        }
        for (vm, told) in &table.vms {
            self.learn_row(by, vm, told);
        }
    }

    /// What a host's table has of a VM that this database has not, or an older row of.
    fn learn_row(&mut self, by: &HostName, vm: &VmName, told: &SiteVm) {
        let entry = self.vms.entry(vm.clone()).or_default();
        // A host that lies is not to use up the generations of others' VMs.
        if told.stamp <= entry.stamp || !is_plausible(entry.highest, told.held) {
            return;
        }
        entry.highest = entry.highest.max(told.held);
        let is_later = told.held > entry.held;
        for host in &told.may_hold {
            if self.admit(by, host) {
                self.name_holder(vm, host, told.held);
            }
        }
        let holder = told.holder.clone().filter(|host| self.admit(by, host));
        if let Some(entry) = self.vms.get_mut(vm).filter(|_| is_later) {
            entry.held = told.held;
            entry.holder = holder;
            entry.deleted = told.deleted;
            entry.hearsay = true;
        }
        self.touch(vm);
    }

    /// Takes over, once everybody was read or fenced; false when it is in charge already. Every entry is written anew, so
    /// that every table is.
    pub fn finish_takeover(&mut self) -> Result<bool, Refusal> {
        let Charge::Restored { candidate, .. } = self.charge else {
            return Ok(false);
        };
        let waits_for = self.waits_for();
        if !waits_for.is_empty() {
            return Err(Refusal::Restored { waits_for });
        }
        self.stamp = candidate;
        self.charge = Charge::Held;
        self.forget_since_when();
        let vms: Vec<_> = self.vms.keys().cloned().collect();
        self.word();
        for vm in vms {
            self.touch(&vm);
        }
        Ok(true)
    }
}
