//! What the controller knows of the site: hosts, VMs, who may hold which, and which word was its last.
//!
//! Owned by the controller behind one lock. Every change is marked, and the controller writes what is marked
//! ([`Book::take_unwritten`]) before it says anything to a host that follows from it. Refuses: to forget that a host may hold a VM for any reason but the rules' own.

use crate::hear::{News, Said};
use crate::plant::Plant;
use crate::strangers::Stranger;
use crate::takeover::Charge;
use crate::unwritten::Unwritten;
use godwit_types::image::KnownImage;
use godwit_types::site::{Instance, SiteHeard, SiteHost, SiteUpdate, SiteVm, Stamp, Standing};
use godwit_types::{Generation, HostName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How many grants of a VM are remembered, to tell which of two copies was never granted.
const GRANTED_KEPT: usize = 16;

/// How many VMs an update of a host's table names: what is more comes with the next ones.
const ROWS_AT_ONCE: usize = 500;

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

impl Granted {
    /// Whether a generation can come from this grant: each attempt at a handover takes the next one.
    pub(crate) fn is_of(&self, generation: Generation) -> bool {
        let step = generation.0.checked_sub(self.generation.0);
        step.is_some_and(|step| step < FENCED_GAP)
    }
}

/// Who held a VM, and under which generation, when its guest may have run last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ran {
    /// Nobody who is still in the site.
    pub holder: Option<HostName>,
    pub held: Generation,
}

/// A grant whose host refused the start before a guest was let run there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotBegun {
    pub generation: Generation,
    pub before: Ran,
}

/// What the controller knows of one VM's right, as the database keeps it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Who held it last.
    pub holder: Option<HostName>,
    pub held: Generation,
    /// The highest generation ever seen, granted or surveyed.
    pub highest: Generation,
    /// Every host that may hold it, with the highest generation under which it was named.
    pub may_hold: BTreeMap<HostName, Generation>,
    /// The last grants, oldest first.
    pub granted: Vec<Granted>,
    /// Whether the VM was deleted; its generations go on if the name is used again.
    pub deleted: bool,
    /// Holder and deletion come from what a host said, not from what this database did.
    #[serde(default)]
    pub hearsay: bool,
    /// The last grant, where nothing began by it. Where it is not the newest any more it says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_begun: Option<NotBegun>,
    /// What its holders knew of its images on shared storage, the last one that was heard of at the end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
    /// The word that wrote this.
    pub stamp: Stamp,
}

impl Entry {
    pub(crate) fn note_grant(&mut self, granted: Granted) {
        // What is held now rests on the newest grant at or below it: older ones are over, this one stays.
        let held = self.held;
        let base = self.granted.iter().rposition(|one| one.generation <= held);
        self.granted.drain(..base.unwrap_or_default());
        if self.granted.len() >= GRANTED_KEPT {
            self.granted.remove(1);
        }
        self.granted.push(granted);
    }

    /// Where the guest may have run last; nowhere where the VM was deleted.
    pub fn ran(&self) -> Ran {
        match &self.not_begun {
            _ if self.deleted => Ran::default(),
            Some(not_begun) if not_begun.generation == self.held => not_begun.before.clone(),
            _ => Ran {
                holder: self.holder.clone(),
                held: self.held,
            },
        }
    }

    /// Where its guest ran before a grant by which nothing began is not to be that host any longer. Returns whether it was.
    pub(crate) fn forget_ran_on(&mut self, host: &HostName) -> bool {
        let not_begun = self.not_begun.as_mut();
        let ran = not_begun.and_then(|not_begun| {
            let holder = &mut not_begun.before.holder;
            holder.take_if(|holder| holder == host)
        });
        ran.is_some()
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

    /// Both hosts of the grant under which the VM was held last; nothing where that one is not on record.
    pub(crate) fn newest_ends(&self) -> Option<impl Iterator<Item = &HostName>> {
        let newest = self.granted.iter().rev().find(|one| one.is_of(self.held))?;
        Some(
            [Some(&newest.to), newest.from.as_ref()]
                .into_iter()
                .flatten(),
        )
    }

    /// Whether the newest grant at or below `generation` let this host give the VM.
    pub(crate) fn was_given_by(&self, host: &HostName, generation: Generation) -> bool {
        let at = self.granted.iter().rev();
        let newest = at.into_iter().find(|one| one.is_of(generation));
        newest.is_some_and(|one| one.from.as_ref() == Some(host))
    }

    /// Whether a grant that is remembered let this host hold the VM, under whichever generation.
    pub(crate) fn was_ever_granted(&self, host: &HostName) -> bool {
        let mut granted = self.granted.iter();
        granted.any(|one| one.to == *host || one.from.as_ref() == Some(host))
    }

    /// Whether a grant that is remembered let this host give the VM, under whichever generation.
    pub(crate) fn may_ever_give(&self, host: &HostName) -> bool {
        let mut granted = self.granted.iter();
        granted.any(|one| one.from.as_ref() == Some(host))
    }

    /// Whether this book itself let another host hold the VM under a later generation than this one, or deleted it.
    pub(crate) fn is_superseded(&self, host: &HostName, generation: Generation) -> bool {
        if self.hearsay || self.held <= generation {
            return false;
        }
        let mut granted = self.granted.iter().rev();
        let newest = granted.find(|one| one.generation <= self.held && one.generation > generation);
        self.deleted
            || newest.is_some_and(|one| one.to != *host && self.holder.as_ref() != Some(host))
    }

    /// Whether the newest grant at or below `generation` let this host hold the VM.
    pub(crate) fn was_granted(&self, host: &HostName, generation: Generation) -> bool {
        let at = self.granted.iter().rev();
        let newest = at.into_iter().find(|one| one.is_of(generation));
        newest.is_some_and(|one| one.to == *host || one.from.as_ref() == Some(host))
    }
}

/// What the database keeps of a host, beside its address and certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRow {
    /// A person said that it is off; holds until it is heard.
    pub fenced: bool,
    pub instance: Instance,
    /// The newest word that it acknowledged.
    #[serde(default)]
    pub heard: Stamp,
    /// It acknowledged a word once and did not know it later: its state directory went back.
    #[serde(default)]
    pub went_back: bool,
    /// It was never off although a person said so; until a person acknowledges it.
    #[serde(default)]
    pub false_fence: bool,
    /// Which machine it is was learned while this controller's database was an old copy: what tables tell as of this word, or an earlier
    /// one, does not count. Over with the takeover.
    #[serde(default, skip_serializing_if = "Stamp::is_before_all")]
    pub machine_as_of: Stamp,
}

/// A change to be made durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Row {
    /// The controller's last word.
    Stamp(Stamp),
    Vm(VmName, Box<Entry>),
    Host(HostName, HostRow),
    /// All hosts that a person said are off and which the inventory does not know.
    FencedStrangers(BTreeSet<HostName>),
}

/// What the controller knows of a host.
#[derive(Debug, Clone)]
pub(crate) struct HostBook {
    pub site: SiteHost,
    pub row: HostRow,
    /// Whether its last answer came.
    pub answers: bool,
    /// When the last question that it answered was asked; none before the first.
    pub heard: Option<u64>,
    /// When its newest acknowledgement of a word was known here.
    pub knew_at: u64,
    pub standing: Standing,
    pub knows: SiteHeard,
    pub said: BTreeMap<VmName, Said>,
    pub told: Option<Standing>,
}

/// The controller's knowledge of the site.
#[derive(Debug, Clone)]
pub struct Book {
    pub(crate) stamp: Stamp,
    pub(crate) charge: Charge,
    /// Hosts that have neither answered nor failed to since this book was opened.
    pub(crate) unasked: BTreeSet<HostName>,
    /// A host has taken a word of this controller's since this book was opened.
    pub(crate) is_proven: bool,
    /// Hosts that say that they have heard what no controller can have said.
    pub(crate) impossible: BTreeSet<HostName>,
    pub(crate) hosts: BTreeMap<HostName, HostBook>,
    pub(crate) vms: BTreeMap<VmName, Entry>,
    /// VMs of which the database has a row that cannot be read: what hosts say of them is shown, and nothing follows.
    pub(crate) unreadable: BTreeSet<VmName>,
    pub(crate) removed: BTreeSet<HostName>,
    /// Hosts that records or tables name and the inventory does not know.
    pub(crate) strangers: BTreeMap<HostName, Stranger>,
    /// Hosts that name too many of them.
    pub(crate) crowding: BTreeSet<HostName>,
    pub(crate) fenced_strangers: BTreeSet<HostName>,
    pub(crate) sequence: u64,
    pub(crate) unwritten: Unwritten,
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
            charge: Charge::Held,
            unasked: BTreeSet::new(),
            is_proven: false,
            impossible: BTreeSet::new(),
            hosts: BTreeMap::new(),
            vms: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            removed: BTreeSet::new(),
            strangers: BTreeMap::new(),
            crowding: BTreeSet::new(),
            fenced_strangers: BTreeSet::new(),
            sequence: 0,
            unwritten: Unwritten::default(),
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

    /// The next word. A controller that is not in charge has none: one on an old copy would count up to what it forgot, and
    /// its next life would take itself for the newest. All rows get a word of the new epoch when it takes over.
    pub(crate) fn word(&mut self) -> Stamp {
        self.unwritten.stamp = true;
        if self.charge == Charge::Held {
            self.stamp.number = self.stamp.number.saturating_add(1);
        }
        self.stamp
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// A host that has just been enrolled, or was enrolled again in a restored database.
    pub fn add_host(&mut self, site: SiteHost, row: HostRow) {
        let name = site.name.clone();
        self.load_host(site, row);
        self.unasked.remove(&name);
        if self.fenced_strangers.remove(&name) {
            self.unwritten.strangers = true;
        }
        self.unwritten.hosts.insert(name);
        self.word();
    }

    /// A host as the database has it.
    pub fn load_host(&mut self, site: SiteHost, row: HostRow) {
        let name = site.name.clone();
        self.strangers.remove(&name);
        self.removed.remove(&name);
        if !row.fenced {
            self.unasked.insert(name.clone());
        }
        let book = HostBook {
            site,
            row,
            answers: false,
            heard: None,
            knew_at: 0,
            standing: Standing::Known,
            knows: SiteHeard::default(),
            said: BTreeMap::new(),
            told: None,
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

    /// A row of the database about who may hold a VM cannot be read: nothing is learned that would be written over it.
    pub fn cannot_read(&mut self, vm: VmName) {
        self.unreadable.insert(vm);
    }

    /// What could not be read of a VM is known again.
    pub fn can_read(&mut self, vm: &VmName) {
        self.unreadable.remove(vm);
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

    /// A silent host that may have given a VM to `other`, or taken it from there, and waits for its word.
    pub fn may_wait_for(&self, vm: &VmName, other: &HostName) -> Option<&HostName> {
        let entry = self.vms.get(vm)?;
        let pairs = entry.granted.iter().filter_map(|one| {
            let from = one.from.as_ref()?;
            match (from == other, one.to == *other) {
                (true, false) => Some(&one.to),
                (false, true) => Some(from),
                _ => None,
            }
        });
        let mut silent =
            pairs.filter(|host| entry.may_hold.contains_key(*host) && !self.answers(host));
        silent.find(|host| !self.is_fenced(host))
    }

    /// Whether a host is one of this site's.
    pub fn is_enrolled(&self, host: &HostName) -> bool {
        self.hosts.contains_key(host)
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

    /// Hosts that a person said are off.
    pub(crate) fn fenced(&self) -> BTreeSet<HostName> {
        let known = self.hosts.iter().filter(|(_, host)| host.row.fenced);
        known.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a host answered that a person had said is off, in the very life that it had before.
    pub fn was_fenced_falsely(&self, host: &HostName) -> bool {
        self.hosts
            .get(host)
            .is_some_and(|host| host.row.false_fence)
    }

    /// A person has seen that hosts answered which were said to be off.
    pub fn acknowledge(&mut self) {
        for (name, host) in &mut self.hosts {
            if std::mem::take(&mut host.row.false_fence) {
                self.unwritten.hosts.insert(name.clone());
            }
        }
    }

    /// Hosts that say that they have heard a word which no controller can have said.
    pub fn impossible(&self) -> &BTreeSet<HostName> {
        &self.impossible
    }

    /// Hosts that were removed and have not joined again.
    pub fn removed(&self) -> &BTreeSet<HostName> {
        &self.removed
    }

    /// What the controller holds of the host's present life.
    pub fn standing(&self, host: &HostName) -> Standing {
        match self.hosts.get(host) {
            Some(host) => host.standing,
            None => Standing::Removed,
        }
    }

    /// An entry has changed: it is due to be written, under a new word.
    pub(crate) fn touch(&mut self, vm: &VmName) {
        let stamp = self.word();
        self.vms.entry(vm.clone()).or_default().stamp = stamp;
        self.unwritten.vms.insert(vm.clone());
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
        let mut changed: Vec<_> = changed.collect();
        changed.sort_by_key(|(_, entry)| entry.stamp);
        let more = changed.len() > ROWS_AT_ONCE;
        changed.truncate(ROWS_AT_ONCE);
        let upto = match changed.last() {
            Some((_, entry)) if more => entry.stamp,
            _ => self.stamp,
        };
        Some(SiteUpdate {
            since,
            stamp: self.stamp,
            upto,
            hosts: self.hosts.values().map(|host| host.site.clone()).collect(),
            removed: self.removed.clone(),
            vms: changed
                .into_iter()
                .map(|(vm, entry)| (vm.clone(), entry.row()))
                .collect(),
            you: book.standing,
        })
    }

    /// What the host answered to an update: up to which word its table is complete now.
    pub fn updated(&mut self, host: &HostName, you: Standing, knows: SiteHeard) {
        let now = self.next();
        self.note_known(host, knows, now);
        self.is_proven |= self.is_in_charge() && knows.stamp.epoch == self.stamp.epoch;
        if let Some(book) = self.hosts.get_mut(host) {
            book.told = Some(you);
        }
    }
}
