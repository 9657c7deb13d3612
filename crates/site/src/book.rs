//! What the controller knows of the site: hosts, VMs, who may hold which, and which word was its last.
//!
//! Owned by the controller behind one lock; every change comes out as [`Row`]s, which the controller writes before it says
//! anything to a host that follows from them. A write that failed leaves the book with more than the database, never with
//! less. Refuses: to forget that a host may hold a VM for any reason but the rules' own.

use crate::hear::{News, Said};
use crate::plant::Plant;
use crate::takeover::Charge;
use godwit_types::site::{Instance, SiteHeard, SiteHost, SiteUpdate, SiteVm, Stamp, Standing};
use godwit_types::{Generation, HostName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How many grants of a VM are remembered, to tell which of two copies was never granted.
const GRANTED_KEPT: usize = 16;

/// How far generations are skipped when a host was fenced unheard: it may have tried that many handovers.
pub(crate) const FENCED_GAP: u64 = 1 << 20;

/// A right that the controller gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Granted {
    /// From this generation on.
    pub generation: Generation,
    /// The host that may take it.
    pub to: HostName,
    /// The host that may give it, for a migration: an attempt that fails leaves the VM there.
    pub from: Option<HostName>,
}

/// What the controller knows of one VM's right, as the database keeps it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Who held it last.
    pub holder: Option<HostName>,
    /// Under which generation.
    pub held: Generation,
    /// The highest generation ever seen, granted or surveyed.
    pub highest: Generation,
    /// Every host that may hold it, with the highest generation under which it was named.
    pub may_hold: BTreeMap<HostName, Generation>,
    /// The last grants, oldest first.
    pub granted: Vec<Granted>,
    /// Whether the VM was deleted; its generations go on if the name is used again.
    pub deleted: bool,
    /// The word that wrote this.
    pub stamp: Stamp,
}

impl Entry {
    pub(crate) fn note_grant(&mut self, granted: Granted) {
        if self.granted.len() >= GRANTED_KEPT {
            self.granted.remove(0);
        }
        self.granted.push(granted);
    }

    pub(crate) fn row(&self) -> SiteVm {
        SiteVm {
            holder: self.holder.clone(),
            held: self.held,
            may_hold: self.may_hold.keys().cloned().collect(),
            deleted: self.deleted,
            stamp: self.stamp,
        }
    }

    /// Whether the newest grant at or below `generation` let this host give the VM.
    pub(crate) fn was_given_by(&self, host: &HostName, generation: Generation) -> bool {
        let at = self.granted.iter().rev();
        let newest = at.into_iter().find(|one| one.generation <= generation);
        newest.is_some_and(|one| one.from.as_ref() == Some(host))
    }

    /// Whether the newest grant at or below `generation` let this host hold the VM.
    pub(crate) fn was_granted(&self, host: &HostName, generation: Generation) -> bool {
        let at = self.granted.iter().rev();
        let newest = at.into_iter().find(|one| one.generation <= generation);
        newest.is_some_and(|one| one.to == *host || one.from.as_ref() == Some(host))
    }
}

/// What the database keeps of a host, beside its address and certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRow {
    /// A person said that it is off; holds until it is heard.
    pub fenced: bool,
    /// Its newest life.
    pub instance: Instance,
}

/// A change to be made durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row {
    /// The controller's last word.
    Stamp(Stamp),
    /// A VM's entry.
    Vm(VmName, Box<Entry>),
    /// A host's row.
    Host(HostName, HostRow),
    /// A person said that a host is off which the inventory does not know.
    FencedStranger(HostName),
}

/// What the controller knows of a host.
#[derive(Debug, Clone)]
pub(crate) struct HostBook {
    pub site: SiteHost,
    pub row: HostRow,
    /// Whether its last answer came, and how many were lost since.
    pub answers: bool,
    /// When the last question that it answered was asked; none before the first.
    pub heard: Option<u64>,
    pub standing: Standing,
    pub knows: SiteHeard,
    pub said: BTreeMap<VmName, Said>,
    pub told: Option<Standing>,
    /// It was never off although a person said so.
    pub false_fence: bool,
}

/// The controller's knowledge of the site.
#[derive(Debug, Clone)]
pub struct Book {
    pub(crate) stamp: Stamp,
    pub(crate) charge: Charge,
    pub(crate) hosts: BTreeMap<HostName, HostBook>,
    pub(crate) vms: BTreeMap<VmName, Entry>,
    pub(crate) removed: BTreeSet<HostName>,
    /// Hosts that records name and the inventory does not know; with their address where a host's table had it.
    pub(crate) strangers: BTreeMap<HostName, Option<SiteHost>>,
    pub(crate) fenced_strangers: BTreeSet<HostName>,
    pub(crate) sequence: u64,
    /// News of a host that was met by its question, told with the next answer to a poll.
    pub(crate) unsaid: Vec<News>,
    /// A planted fault; only in builds that can plant one.
    pub plant: Option<Plant>,
}

impl Default for Book {
    fn default() -> Self {
        Self::new(Stamp::default())
    }
}

impl Book {
    /// A book whose last word was `stamp`, without hosts and VMs.
    pub fn new(stamp: Stamp) -> Self {
        Self {
            stamp,
            charge: Charge::InCharge,
            hosts: BTreeMap::new(),
            vms: BTreeMap::new(),
            removed: BTreeSet::new(),
            strangers: BTreeMap::new(),
            fenced_strangers: BTreeSet::new(),
            sequence: 0,
            unsaid: Vec::new(),
            plant: None,
        }
    }

    pub(crate) fn planted(&self, plant: Plant) -> bool {
        crate::plant::is(self.plant, plant)
    }

    /// The controller's last word.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// The next word; its row is to be written before the word is said.
    pub(crate) fn word(&mut self) -> Stamp {
        self.stamp.number = self.stamp.number.saturating_add(1);
        self.stamp
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// A host that has just been enrolled, or was enrolled again in a restored database.
    pub fn add_host(&mut self, site: SiteHost, row: HostRow) -> Vec<Row> {
        let name = site.name.clone();
        self.load_host(site, row.clone());
        self.word();
        vec![Row::Stamp(self.stamp), Row::Host(name, row)]
    }

    /// A host as the database has it.
    pub fn load_host(&mut self, site: SiteHost, row: HostRow) {
        let name = site.name.clone();
        self.strangers.remove(&name);
        self.removed.remove(&name);
        let book = HostBook {
            site,
            row,
            answers: false,
            heard: None,
            standing: Standing::Known,
            knows: SiteHeard::default(),
            said: BTreeMap::new(),
            told: None,
            false_fence: false,
        };
        self.hosts.insert(name, book);
    }

    /// A host that was removed before, as the database knows it.
    pub fn add_removed(&mut self, host: HostName) {
        self.removed.insert(host);
    }

    /// A stranger that a person said is off, as the database knows it.
    pub fn add_fenced_stranger(&mut self, host: HostName) {
        self.fenced_strangers.insert(host);
    }

    /// A VM's entry as the database has it.
    pub fn add_entry(&mut self, vm: VmName, entry: Entry) {
        self.vms.insert(vm, entry);
    }

    /// A VM's entry; none for a name that was never used.
    pub fn entry(&self, vm: &VmName) -> Option<&Entry> {
        self.vms.get(vm)
    }

    /// The highest generation ever seen, granted or surveyed of a VM.
    pub fn highest(&self, vm: &VmName) -> Generation {
        self.vms
            .get(vm)
            .map(|entry| entry.highest)
            .unwrap_or_default()
    }

    /// Every host that may hold a VM.
    pub fn may_hold(&self, vm: &VmName) -> BTreeSet<HostName> {
        let entry = self.vms.get(vm);
        entry
            .map(|entry| entry.may_hold.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// The VMs that a host may hold.
    pub fn may_be_on(&self, host: &HostName) -> Vec<VmName> {
        let named = self.vms.iter();
        named
            .filter(|(_, entry)| entry.may_hold.contains_key(host))
            .map(|(vm, _)| vm.clone())
            .collect()
    }

    /// Whether a host's last answer came.
    pub fn answers(&self, host: &HostName) -> bool {
        self.hosts.get(host).is_some_and(|host| host.answers)
    }

    /// Whether a host has answered since this book was opened.
    pub fn was_heard(&self, host: &HostName) -> bool {
        self.hosts
            .get(host)
            .is_some_and(|host| host.heard.is_some())
    }

    /// Whether a person said that a host is off, and it was not heard since.
    pub fn is_fenced(&self, host: &HostName) -> bool {
        // A stranger that was enrolled since is judged as what it is now.
        match self.hosts.get(host) {
            Some(host) => host.row.fenced,
            None => self.fenced_strangers.contains(host),
        }
    }

    /// Whether a host answered that a person had said is off, in the very life that it had before.
    pub fn was_fenced_falsely(&self, host: &HostName) -> bool {
        self.hosts.get(host).is_some_and(|host| host.false_fence)
    }

    /// What the controller holds of the host's present life.
    pub fn standing(&self, host: &HostName) -> Standing {
        match self.hosts.get(host) {
            Some(host) => host.standing,
            None => Standing::Removed,
        }
    }

    /// Writes an entry anew, under a new word.
    pub(crate) fn touch(&mut self, vm: &VmName) -> Vec<Row> {
        let stamp = self.word();
        let entry = self.vms.entry(vm.clone()).or_default();
        entry.stamp = stamp;
        vec![
            Row::Stamp(stamp),
            Row::Vm(vm.clone(), Box::new(entry.clone())),
        ]
    }

    /// What a host lacks of the table; none when it has all, or when this controller is not in charge.
    pub fn update_for(&self, host: &HostName) -> Option<SiteUpdate> {
        let book = self.hosts.get(host)?;
        let is_new = book.knows.complete < self.stamp || book.told != Some(book.standing);
        if !is_new || !self.is_in_charge() {
            return None;
        }
        let since = book.knows.complete;
        let changed = self.vms.iter().filter(|(_, entry)| entry.stamp > since);
        Some(SiteUpdate {
            since,
            stamp: self.stamp,
            hosts: self.hosts.values().map(|host| host.site.clone()).collect(),
            removed: self.removed.clone(),
            vms: changed
                .map(|(vm, entry)| (vm.clone(), entry.row()))
                .collect(),
            you: book.standing,
        })
    }

    /// What the host answered to an update: up to which word its table is complete now.
    pub fn updated(&mut self, host: &HostName, you: Standing, knows: SiteHeard) {
        if let Some(book) = self.hosts.get_mut(host) {
            book.knows = knows;
            book.told = Some(you);
        }
    }
}
