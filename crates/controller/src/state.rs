//! The inventory: what was described, what hosts said last, and what follows. Pure: no clock, no IO.
//!
//! Owned by the app behind one mutex; the database is written first. Who may hold a VM, and what may be granted, is decided
//! by crate `site` alone, whose book this holds; here are the descriptions, and what a list shows. Refuses to forget what
//! an unreachable host said: it may still be true.

use crate::bounds::{self, NotTaken};
use crate::placement::place;
use crate::removed::Removed;
use crate::unread::{Lack, UnreadRow};
use godwit_site::{Book, Heard, News, Ticket, Whereabouts};
use godwit_types::control_api::HostState;
use godwit_types::datastore::Datastores;
use godwit_types::host::HostInfo;
use godwit_types::host_api::HostVm;
use godwit_types::site::{Claim, RecordSaid, Standing, WholeSurvey};
use godwit_types::vm::{Accelerator, UIDS, VmState};
use godwit_types::{Generation, HostName, MigrationId, VmName, VmSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

mod disk_places;
pub(crate) mod shown;

/// A host as the controller knows it.
#[derive(Debug, Clone)]
pub struct HostEntry {
    /// Where its agent listens, as enrolled.
    pub address: SocketAddr,
    /// Serial number of its certificate.
    pub serial: String,
    /// What it said of itself last.
    pub info: Option<HostInfo>,
    /// Its VMs as it said last.
    pub vms: BTreeMap<VmName, HostVm>,
    /// Since when each VM has been heard to be on there without a break, seconds since 1970.
    pub on_since: BTreeMap<VmName, i64>,
    /// The names that it has brought and nobody had used here; bounded, since each is kept for ever.
    pub brought: BTreeSet<VmName>,
    /// The same, of its table and records when it was read for a takeover.
    pub brought_whole: BTreeSet<VmName>,
    /// What is wrong with its answers, while they cannot be taken.
    pub fault: Option<String>,
    /// Why it does not take the site's table, while it refuses that.
    pub refuses_table: Option<String>,
    pub state: HostState,
    /// When it answered last, seconds since 1970.
    pub last_seen_unix_s: i64,
    /// Why it does not answer: its clock, or the dates of a certificate.
    pub is_out_of_date: bool,
    /// When another machine with its certificate asked whether it may boot, seconds since 1970; 0 if none did.
    pub second_asked_unix_s: i64,
}

impl HostEntry {
    /// A host that has not been heard yet.
    pub fn new(address: SocketAddr, serial: String) -> Self {
        Self {
            address,
            serial,
            info: None,
            vms: BTreeMap::new(),
            on_since: BTreeMap::new(),
            brought: BTreeSet::new(),
            brought_whole: BTreeSet::new(),
            fault: None,
            refuses_table: None,
            state: HostState::Unreachable,
            last_seen_unix_s: 0,
            is_out_of_date: false,
            second_asked_unix_s: 0,
        }
    }

    pub fn is_connected(&self) -> bool {
        self.state == HostState::Connected
    }

    /// How long it has been silent at `now_unix_s`, seconds; none while it answers, or when it was never heard.
    pub fn silent_s(&self, now_unix_s: i64) -> Option<u64> {
        let silent = !self.is_connected() && self.last_seen_unix_s > 0;
        silent.then(|| u64::try_from(now_unix_s - self.last_seen_unix_s).unwrap_or(0))
    }

    fn vm(&self, name: &VmName) -> Option<&HostVm> {
        self.vms.get(name)
    }
}

/// A VM as the controller knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct VmEntry {
    pub spec: VmSpec,
    /// With CPU model and machine type resolved, since its first start.
    pub resolved: Option<VmSpec>,
}

impl VmEntry {
    /// How a host describes the VM. One that it has moved to keeps what ran it, also where the person left the choice open.
    pub fn as_told(&self, told: &VmSpec) -> VmSpec {
        let mut told = told.clone();
        if self.spec.accelerator == Accelerator::Auto {
            told.accelerator = Accelerator::Auto;
        }
        told
    }
}

/// Where a VM is.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    pub host: HostName,
    /// Whether that host answers.
    pub connected: bool,
    /// What it said of the VM; none if it only is on record.
    pub vm: Option<HostVm>,
}

/// A migration under way.
#[derive(Debug, Clone)]
pub struct Move {
    pub id: MigrationId,
    pub from: HostName,
    pub to: HostName,
}

/// What an answer of a host changed; people and the database are to hear of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A host holds a VM that was not known (an old database was restored).
    Adopted(Box<VmEntry>),
    /// The hardware of a VM is known from the host that runs it.
    Resolved(Box<VmEntry>),
    /// A VM's state on a host is another.
    State(VmName),
}

/// What an answer of a host came to.
#[derive(Debug, Default)]
pub struct Observed {
    /// For people and the log.
    pub news: Vec<News>,
    /// What changed in the inventory.
    pub changes: Vec<Change>,
}

/// The inventory: every enrolled host and every VM that the site knows.
#[derive(Debug, Default)]
pub struct State {
    pub hosts: BTreeMap<HostName, HostEntry>,
    pub vms: BTreeMap<VmName, VmEntry>,
    /// Who may hold which VM.
    pub book: Book,
    /// Migrations under way, by VM.
    pub active: BTreeMap<VmName, Move>,
    /// Hosts that were removed while they did not answer, with the VMs that each was heard to run since.
    pub removed: BTreeMap<HostName, Removed>,
    /// VMs of which a row of the database cannot be read.
    pub lacking: BTreeMap<VmName, Lack>,
    /// Other rows that cannot be read, as sentences.
    pub unread: Vec<UnreadRow>,
    /// How many VMs were deleted: an answer that was asked for before a deletion is stale.
    pub deletions: u64,
    /// What is learned of descriptions while the database is an old copy.
    pub relearned: Relearned,
}

/// Descriptions that an old copy of the database takes from the VMs' holders. They are written when it takes over, all
/// hosts having been read: one that was written earlier could be an older record's, and would be believed after a restart.
#[derive(Debug, Default)]
pub struct Relearned {
    /// VMs that it lacked, with the generation of the record by which each is described: a later holder knows better, since
    /// an older record may be of a deleted VM of that name.
    adopted: BTreeMap<VmName, Generation>,
    /// VMs whose descriptions are to be written.
    due: BTreeSet<VmName>,
    /// Hosts whose VMs were seen since.
    seen: BTreeSet<HostName>,
}

impl State {
    /// A row of a VM cannot be read. The VM is shown all the same; what is worse counts.
    pub fn lacks(&mut self, vm: VmName, lack: Lack) {
        tracing::error!(%vm, "{}", lack.row().sentence());
        self.vms.entry(vm.clone()).or_insert_with(|| VmEntry {
            spec: VmSpec::placeholder(&vm),
            resolved: None,
        });
        match (self.lacking.get(&vm), &lack) {
            (Some(Lack::Right(_)), Lack::Description(_)) => {}
            _ => {
                if let Lack::Right(_) = lack {
                    self.book.cannot_read(vm.clone());
                }
                self.lacking.insert(vm, lack);
            }
        }
    }

    /// A takeover read every host: who may hold which VM is known, and was written anew.
    pub fn took_over(&mut self) {
        self.relearned = Relearned::default();
        let known = self.lacking.extract_if(.., |_, lack| lack.is_right_row());
        for (vm, _) in known {
            self.book.can_read(&vm);
        }
    }

    fn lacks_right(&self, vm: &VmName) -> bool {
        matches!(self.lacking.get(vm), Some(Lack::Right(_)))
    }

    /// Takes in what a host said of itself and of its VMs, when it was asked with `ticket`.
    pub fn observe(
        &mut self,
        host: &HostName,
        ticket: Ticket,
        info: &HostInfo,
        answer: Vec<HostVm>,
    ) -> Observed {
        let heard = Heard {
            instance: info.instance.clone(),
            knows: info.site,
            records: answer.iter().map(said).collect(),
        };
        let news = self.book.hear(host, ticket, heard);
        let mut changes = Vec::new();
        for vm in &answer {
            self.observe_vm(host, vm, &info.datastores, &mut changes);
        }
        if self.book.is_restored() {
            self.relearned.seen.insert(host.clone());
        }
        if let Some(entry) = self.hosts.get_mut(host) {
            let named = answer.into_iter().map(|vm| (vm.spec.name.clone(), vm));
            let named = named.collect::<BTreeMap<_, _>>();
            let gone = entry.vms.keys().filter(|old| !named.contains_key(*old));
            changes.extend(gone.map(|old| Change::State(old.clone())));
            let seen = entry.last_seen_unix_s;
            entry
                .on_since
                .retain(|vm, _| named.get(vm).is_some_and(is_on));
            for (vm, _) in named.iter().filter(|(_, vm)| is_on(vm)) {
                entry.on_since.entry(vm.clone()).or_insert(seen);
            }
            entry.vms = named;
        }
        Observed { news, changes }
    }

    /// Whether a name was used before. One whose row cannot be read was, and is never learned.
    fn is_used(&self, name: &VmName) -> bool {
        self.book.entry(name).is_some() || self.lacks_right(name)
    }

    /// The names that a host has brought, with those of this answer that nobody used before: at most `most`, those that
    /// it may hold first. The others that it does not hold are left out of the answer, and none is learned of a name that
    /// is in no use; with more that it may hold there are more than `most`.
    pub fn brought_with(
        &self,
        host: &HostName,
        answer: &mut Vec<HostVm>,
        most: usize,
    ) -> BTreeSet<VmName> {
        let known = self.hosts.get(host).map(|entry| entry.brought.clone());
        let mut brought = known.unwrap_or_default();
        let is_kept = |vm: &&HostVm| vm.claim != Claim::No || vm.generation > Generation(0);
        let fresh = answer.iter().filter(is_kept);
        let fresh = fresh.filter(|vm| !self.is_used(&vm.spec.name));
        let (held, past): (Vec<_>, Vec<_>) = fresh.partition(|vm| vm.claim.may_hold());
        brought.extend(held.into_iter().map(|vm| vm.spec.name.clone()));
        let mut left_out = BTreeSet::new();
        for vm in past {
            let name = &vm.spec.name;
            match brought.len() < most || brought.contains(name) {
                true => drop(brought.insert(name.clone())),
                false => drop(left_out.insert(name.clone())),
            }
        }
        answer.retain(|vm| !left_out.contains(&vm.spec.name));
        brought
    }

    /// Notes the names that nobody used here and that a host brings by all that it has on record.
    pub fn bring_whole(&mut self, host: &HostName, whole: &WholeSurvey) -> Result<(), NotTaken> {
        let known = self.hosts.get(host).map(|entry| &entry.brought_whole);
        let records = whole.records.iter().map(|record| &record.vm);
        let named = records.chain(whole.table.vms.keys()).chain(&whole.unread);
        let fresh = named.filter(|name| !self.is_used(name));
        let brought: BTreeSet<VmName> = known.into_iter().flatten().chain(fresh).cloned().collect();
        bounds::names_of_a_takeover(host, brought.len())?;
        if let Some(entry) = self.hosts.get_mut(host) {
            entry.brought_whole = brought;
        }
        Ok(())
    }

    /// A host does not answer.
    pub fn lose(&mut self, host: &HostName) {
        self.book.lose(host);
        if let Some(entry) = self.hosts.get_mut(host) {
            entry.state = HostState::Unreachable;
        }
    }

    fn observe_vm(
        &mut self,
        host: &HostName,
        vm: &HostVm,
        datastores: &Datastores,
        changes: &mut Vec<Change>,
    ) {
        let name = &vm.spec.name;
        let before = self.hosts.get(host).and_then(|entry| entry.vm(name));
        if !before.is_some_and(|before| before.says_as(vm)) {
            changes.push(Change::State(name.clone()));
        }
        let entry = self.book.entry(name);
        if !vm.holds() || entry.and_then(|entry| entry.holder.as_ref()) != Some(host) {
            return;
        }
        if let Some(Lack::Description(_)) = self.lacking.get(name) {
            // The host that holds it knows how it is described.
            self.lacking.remove(name);
            self.vms.remove(name);
        }
        if self.book.is_restored() {
            return self.describe_by_holder(host, vm);
        }
        match self.vms.get_mut(name) {
            Some(entry) if entry.resolved.is_some() => {
                if disk_places::follow(entry, &vm.spec, datastores) {
                    changes.push(Change::Resolved(Box::new(entry.clone())));
                }
            }
            // A host decides no more of a description than what resolving leaves open.
            Some(entry) if !place::may_resolve_to(&entry.spec, &vm.spec) => {}
            Some(entry) => {
                entry.resolved = Some(vm.spec.clone());
                changes.push(Change::Resolved(Box::new(entry.clone())));
            }
            None => {
                let entry = described_by(vm);
                self.vms.insert(name.clone(), entry.clone());
                changes.push(Change::Adopted(Box::new(entry)));
            }
        }
    }

    /// An old copy of the database may lack the VM, be from before it was started or given its user id, or describe a
    /// deleted VM of this name. Of one that it lacks counts what the newest holder says; of others the id that the guest has,
    /// if no other VM has it, and what a description leaves open.
    fn describe_by_holder(&mut self, host: &HostName, vm: &HostVm) {
        if self.book.standing(host) != Standing::Known {
            return;
        }
        let name = &vm.spec.name;
        let held = vm.claim.held().unwrap_or(vm.generation);
        let others = self.uids_of_others(name);
        let adopted = self.relearned.adopted.get(name);
        let is_lacking = !self.vms.contains_key(name);
        if is_lacking || adopted.is_some_and(|older| *older < held) {
            self.relearned.adopted.insert(name.clone(), held);
            self.relearned.due.insert(name.clone());
            self.vms.insert(name.clone(), described_by(vm));
            return;
        }
        let Some(entry) = self.vms.get_mut(name) else {
            return;
        };
        let before = entry.clone();
        let uid = vm.spec.uid.filter(|uid| UIDS.contains(uid));
        if let Some(uid) = uid.filter(|uid| !others.contains(uid)) {
            let described = [Some(&mut entry.spec), entry.resolved.as_mut()];
            let described = described.into_iter().flatten();
            described.for_each(|spec| spec.uid = Some(uid));
        }
        // What was made since is not made again; one that is elsewhere by now is refused at the start.
        if let Ok(known) = entry.spec.clone().with_disks_known(&vm.spec) {
            entry.spec = known;
        }
        let told = entry.as_told(&vm.spec);
        if place::may_resolve_to(&entry.spec, &told) {
            entry.resolved = Some(told);
        }
        if *entry != before {
            self.relearned.due.insert(name.clone());
        }
    }

    /// Whether a host's VMs were seen since the database was found to be an old copy.
    pub fn has_seen(&self, host: &HostName) -> bool {
        self.relearned.seen.contains(host)
    }

    /// Descriptions that are to be written before this controller takes over; none while a host is still to be read.
    pub fn due_descriptions(&mut self) -> Vec<VmEntry> {
        if !self.book.waits_for().is_empty() {
            return Vec::new();
        }
        let due = std::mem::take(&mut self.relearned.due);
        due.iter()
            .filter_map(|name| self.vms.get(name).cloned())
            .collect()
    }

    /// They could not be written.
    pub fn still_due(&mut self, entries: &[VmEntry]) {
        let names = entries.iter().map(|entry| entry.spec.name.clone());
        self.relearned.due.extend(names);
    }

    /// The user ids of all other VMs, as described here and as hosts have them.
    pub fn uids_of_others(&self, name: &VmName) -> BTreeSet<u32> {
        let here = self.vms.values();
        let here = here.flat_map(|vm| [Some(&vm.spec), vm.resolved.as_ref()]);
        let hosts = self.hosts.values();
        let there = hosts.flat_map(|host| host.vms.values().map(|vm| &vm.spec));
        let all = here.flatten().chain(there);
        let others = all.filter(|spec| spec.name != *name);
        others.filter_map(|spec| spec.uid).collect()
    }

    /// Where a VM is, as far as was heard; none when nobody holds it.
    pub fn place(&self, name: &VmName) -> Option<Place> {
        let holder = self.holder(name);
        let is_shown = |doubt: &Place| self.may_be_in_doubt(name, doubt, holder.as_ref());
        let doubt = self.in_doubt(name).filter(is_shown);
        match (holder, doubt) {
            (Some(holder), Some(doubt)) if doubt_wins(&holder, &doubt) => Some(doubt),
            (Some(holder), _) => Some(holder),
            (None, doubt) => doubt,
        }
    }

    /// What each host said of a VM last, if it said anything.
    fn seen(&self, name: &VmName) -> impl Iterator<Item = (&HostName, &HostEntry, &HostVm)> {
        let hosts = self.hosts.iter();
        hosts.filter_map(|(host, entry)| Some((host, entry, entry.vm(name)?)))
    }

    fn holder(&self, name: &VmName) -> Option<Place> {
        if self.lacks_right(name) {
            // As far as hosts tell; a guest that runs comes first.
            let seen = self.seen(name).filter(|(_, _, vm)| vm.holds());
            return seen
                .max_by_key(|(_, entry, vm)| (entry.is_connected(), vm.generation))
                .map(|(host, entry, vm)| said_place(host, entry, vm));
        }
        let (host, connected) = match self.book.whereabouts(name) {
            Whereabouts::Held { host, answers } => (host, answers),
            Whereabouts::Twice(twice) => {
                let host = twice.copies.first()?.host.clone();
                let connected = self.book.answers(&host);
                (host, connected)
            }
            Whereabouts::HandingOver { host } => {
                let damaged = self.damaged_at(name).map(|(host, _)| host.clone());
                (damaged.unwrap_or(host), true)
            }
            Whereabouts::Silent { hosts } => (hosts.first()?.clone(), false),
            Whereabouts::Nowhere => (self.damaged_at(name)?.0.clone(), true),
        };
        let vm = self.hosts.get(&host).and_then(|entry| entry.vm(name));
        Some(Place {
            vm: vm.cloned(),
            connected,
            host,
        })
    }

    /// Where a host waits for the end of a handover that was permitted: no other one's word counts.
    fn in_doubt(&self, name: &VmName) -> Option<Place> {
        let doubted = self.seen(name).filter(|(host, _, vm)| {
            vm.state == VmState::InDoubt
                && !self.book.is_fenced(host)
                && self
                    .book
                    .waits_by_permission(name, host, &vm.claim)
                    .is_some()
        });
        doubted
            .max_by_key(|(_, entry, vm)| (entry.is_connected(), waiting(vm)))
            .map(|(host, entry, vm)| said_place(host, entry, vm))
    }

    /// Where this book permitted nothing (an old database was restored), a holder that answers is believed.
    fn may_be_in_doubt(&self, name: &VmName, doubt: &Place, holder: Option<&Place>) -> bool {
        let is_alone = holder.is_none_or(|holder| !holder.connected || holder.host == doubt.host);
        let entry = self.book.entry(name);
        is_alone || entry.is_some_and(|entry| !entry.granted.is_empty())
    }

    /// Hosts that have not answered since this controller started.
    pub fn unheard(&self) -> impl Iterator<Item = &HostName> {
        self.hosts.keys().filter(|name| !self.book.was_heard(name))
    }

    /// A host that answers, may hold the VM, and cannot read its record of it; with its own sentence.
    pub fn damaged_at(&self, name: &VmName) -> Option<(&HostName, &str)> {
        let may_hold = self.book.may_hold(name);
        let mut hosts = self.hosts.iter().filter(|(_, entry)| entry.is_connected());
        hosts.find_map(|(host, entry)| {
            let sentence = entry.info.as_ref()?.unread.get(name)?;
            may_hold.contains(host).then_some((host, sentence.as_str()))
        })
    }

    /// Every damaged record of a host that answers.
    pub fn damaged_records(&self) -> Vec<(HostName, VmName)> {
        let hosts = self.hosts.iter().filter(|(_, entry)| entry.is_connected());
        let unread = hosts.flat_map(|(host, entry)| {
            let info = entry.info.iter();
            info.flat_map(move |info| {
                let unread = info.unread.keys();
                unread.map(move |vm| (host.clone(), vm.clone()))
            })
        });
        unread.collect()
    }

    /// VMs that a host holds or may hold.
    pub fn vms_on(&self, host: &HostName) -> Vec<VmName> {
        let here = |name: &&VmName| self.place(name).is_some_and(|place| place.host == *host);
        self.vms.keys().filter(here).cloned().collect()
    }

    /// VMs that a host says it runs and that are not in the inventory.
    pub fn undescribed_on<'a>(&'a self, host: &'a HostEntry) -> impl Iterator<Item = &'a VmName> {
        let runs = |vm: &HostVm| vm.state == VmState::Unreachable || vm.holds() && is_on(vm);
        let vms = host.vms.iter().filter(move |(_, vm)| runs(vm));
        vms.map(|(name, _)| name)
            .filter(|name| !self.vms.contains_key(*name))
    }
}

/// A VM as the host that holds it describes it.
fn described_by(vm: &HostVm) -> VmEntry {
    VmEntry {
        spec: vm.spec.clone(),
        resolved: Some(vm.spec.clone()),
    }
}

/// Where a VM is by what a host said of it.
fn said_place(host: &HostName, entry: &HostEntry, vm: &HostVm) -> Place {
    Place {
        host: host.clone(),
        connected: entry.is_connected(),
        vm: Some(vm.clone()),
    }
}

/// A VM's record at a host, as it goes into the book.
fn said(vm: &HostVm) -> RecordSaid {
    RecordSaid {
        vm: vm.spec.name.clone(),
        highest: vm.generation,
        claim: vm.claim.clone(),
        may_live: is_on(vm),
        images: vm.images.clone(),
    }
}

/// Whether there is a guest.
fn is_on(vm: &HostVm) -> bool {
    !vm.state.is_off()
}

/// The generation for which a host waits: no more than it has seen, and no more than its claim says.
fn waiting(vm: &HostVm) -> Generation {
    match &vm.claim {
        Claim::Gave { generation, .. } | Claim::Promised { generation, .. } => {
            vm.generation.min(*generation)
        }
        _ => vm.generation,
    }
}

/// A host in doubt wins unless a holder has more: one that answers at the same generation, or any at a higher one.
fn doubt_wins(holder: &Place, doubt: &Place) -> bool {
    let held = holder.vm.as_ref().map(|vm| vm.generation);
    let waits = doubt.vm.as_ref().map(waiting);
    if holder.connected {
        waits > held
    } else {
        waits >= held
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
