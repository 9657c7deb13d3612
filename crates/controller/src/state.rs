//! The inventory: what was described, what hosts said last, and what follows. Pure: no clock, no IO.
//!
//! Owned by the app behind one mutex; the database is written first. Who may hold a VM, and what may be granted, is decided
//! by crate `site` alone, whose book this holds; here are the descriptions, and what a list shows. Refuses to forget what
//! an unreachable host said: it may still be true.

use godwit_site::{Book, Heard, News, Row, Ticket, Twice, Whereabouts};
use godwit_types::control_api::{HostState, HostView, VmView};
use godwit_types::host::HostInfo;
use godwit_types::host_api::HostVm;
use godwit_types::site::RecordSaid;
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{Generation, HostName, MigrationId, VmName, VmSpec};
use std::collections::BTreeMap;
use std::net::SocketAddr;

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
    pub vms: Vec<HostVm>,
    /// Whether it answers.
    pub state: HostState,
    /// When it answered last, seconds since 1970.
    pub last_seen_unix_s: i64,
}

impl HostEntry {
    /// A host that has not been heard yet.
    pub fn new(address: SocketAddr, serial: String) -> Self {
        Self {
            address,
            serial,
            info: None,
            vms: Vec::new(),
            state: HostState::Unreachable,
            last_seen_unix_s: 0,
        }
    }

    /// Whether it answers.
    pub fn is_connected(&self) -> bool {
        self.state == HostState::Connected
    }

    /// How long it has been silent at `now_unix_s`, seconds; none while it answers, or when it was never heard.
    fn silent_s(&self, now_unix_s: i64) -> Option<u64> {
        let silent = !self.is_connected() && self.last_seen_unix_s > 0;
        silent.then(|| u64::try_from(now_unix_s - self.last_seen_unix_s).unwrap_or(0))
    }

    fn vm(&self, name: &VmName) -> Option<&HostVm> {
        self.vms.iter().find(|vm| vm.spec.name == *name)
    }
}

/// A VM as the controller knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct VmEntry {
    /// As described.
    pub spec: VmSpec,
    /// With CPU model and machine type resolved, since its first start.
    pub resolved: Option<VmSpec>,
}

/// Where a VM is.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    /// The host.
    pub host: HostName,
    /// Whether that host answers.
    pub connected: bool,
    /// What it said of the VM; none if it only is on record.
    pub vm: Option<HostVm>,
}

/// A migration under way.
#[derive(Debug, Clone)]
pub struct Move {
    /// Its id.
    pub id: MigrationId,
    /// Its source.
    pub from: HostName,
    /// Its destination.
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
    /// To be written to the database.
    pub rows: Vec<Row>,
    /// For people and the log.
    pub news: Vec<News>,
    /// What changed in the inventory.
    pub changes: Vec<Change>,
}

/// The inventory.
#[derive(Debug, Default)]
pub struct State {
    /// Hosts by name.
    pub hosts: BTreeMap<HostName, HostEntry>,
    /// VMs by name.
    pub vms: BTreeMap<VmName, VmEntry>,
    /// Who may hold which VM.
    pub book: Book,
    /// Migrations under way, by VM.
    pub active: BTreeMap<VmName, Move>,
    /// How many VMs were deleted: an answer that was asked for before a deletion is stale.
    pub deletions: u64,
}

impl State {
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
        let (rows, news) = self.book.hear(host, ticket, heard);
        let mut changes = Vec::new();
        for vm in &answer {
            self.observe_vm(host, vm, &mut changes);
        }
        if let Some(entry) = self.hosts.get_mut(host) {
            let gone = entry
                .vms
                .iter()
                .filter(|old| !answer.iter().any(|new| new.spec.name == old.spec.name));
            changes.extend(gone.map(|old| Change::State(old.spec.name.clone())));
            entry.vms = answer;
        }
        Observed {
            rows,
            news,
            changes,
        }
    }

    /// A host does not answer.
    pub fn lose(&mut self, host: &HostName) {
        self.book.lose(host);
        if let Some(entry) = self.hosts.get_mut(host) {
            entry.state = HostState::Unreachable;
        }
    }

    fn observe_vm(&mut self, host: &HostName, vm: &HostVm, changes: &mut Vec<Change>) {
        let name = &vm.spec.name;
        let before = self.hosts.get(host).and_then(|entry| entry.vm(name));
        if before != Some(vm) {
            changes.push(Change::State(name.clone()));
        }
        let entry = self.book.entry(name);
        if !vm.holds() || entry.and_then(|entry| entry.holder.as_ref()) != Some(host) {
            return;
        }
        match self.vms.get_mut(name) {
            Some(entry) if entry.resolved.is_some() => {}
            Some(entry) => {
                entry.resolved = Some(vm.spec.clone());
                changes.push(Change::Resolved(Box::new(entry.clone())));
            }
            None => {
                let entry = VmEntry {
                    spec: vm.spec.clone(),
                    resolved: Some(vm.spec.clone()),
                };
                self.vms.insert(name.clone(), entry.clone());
                changes.push(Change::Adopted(Box::new(entry)));
            }
        }
    }

    /// Where a VM is, as far as was heard; none when nobody holds it.
    pub fn place(&self, name: &VmName) -> Option<Place> {
        let holder = self.holder(name);
        let doubt = self.in_doubt(name);
        match (holder, doubt) {
            (Some(holder), Some(doubt)) if doubt_wins(&holder, &doubt) => Some(doubt),
            (Some(holder), _) => Some(holder),
            (None, doubt) => doubt,
        }
    }

    fn seen(&self, name: &VmName) -> impl Iterator<Item = (Place, Generation)> {
        self.hosts.iter().filter_map(|(host, entry)| {
            let vm = entry.vm(name)?;
            let place = Place {
                host: host.clone(),
                connected: entry.is_connected(),
                vm: Some(vm.clone()),
            };
            Some((place, vm.generation))
        })
    }

    fn holder(&self, name: &VmName) -> Option<Place> {
        let (host, connected) = match self.book.whereabouts(name) {
            Whereabouts::Held { host, answers } => (host, answers),
            Whereabouts::Twice(twice) => {
                let host = twice.copies.first()?.host.clone();
                let connected = self.book.answers(&host);
                (host, connected)
            }
            Whereabouts::HandingOver { host } => (host, true),
            Whereabouts::Silent { hosts } => (hosts.first()?.clone(), false),
            Whereabouts::Nowhere => return None,
        };
        let vm = self.hosts.get(&host).and_then(|entry| entry.vm(name));
        Some(Place {
            vm: vm.cloned(),
            connected,
            host,
        })
    }

    fn in_doubt(&self, name: &VmName) -> Option<Place> {
        self.seen(name)
            .filter(|(place, _)| {
                place
                    .vm
                    .as_ref()
                    .is_some_and(|vm| vm.state == VmState::InDoubt)
                    && !self.book.is_fenced(&place.host)
            })
            .max_by_key(|(place, generation)| (place.connected, *generation))
            .map(|(place, _)| place)
    }

    /// Hosts that have not answered since this controller started.
    pub fn unheard(&self) -> impl Iterator<Item = &HostName> {
        self.hosts.keys().filter(|name| !self.book.was_heard(name))
    }

    /// State of a VM in one word.
    pub fn vm_state(&self, name: &VmName) -> VmState {
        let whereabouts = self.book.whereabouts(name);
        if matches!(whereabouts, Whereabouts::Twice(_)) {
            return VmState::RunningTwice;
        }
        let Some(place) = self.place(name) else {
            return VmState::Stopped;
        };
        match place.vm.as_ref().map(|vm| vm.state) {
            Some(VmState::InDoubt) => VmState::InDoubt,
            _ if !place.connected => VmState::Unreachable,
            _ if matches!(whereabouts, Whereabouts::HandingOver { .. }) => VmState::HandingOver,
            Some(state) => state,
            None => VmState::Unreachable,
        }
    }

    /// A VM as people see it at `now_unix_s`.
    pub fn vm_view(&self, name: &VmName, now_unix_s: i64) -> Option<VmView> {
        let entry = self.vms.get(name)?;
        let place = self.place(name);
        let state = self.vm_state(name);
        let accelerator = place
            .as_ref()
            .and_then(|place| place.vm.as_ref()?.accelerator);
        let heard = place.as_ref().and_then(|place| self.hosts.get(&place.host));
        let twice = self.book.twice(name);
        let copies = twice.iter().flat_map(|twice| &twice.copies);
        Some(VmView {
            spec: shown_spec(entry, place.as_ref(), state),
            state,
            note: self.note(name, state, place.as_ref(), now_unix_s),
            host: place.as_ref().map(|place| place.host.clone()),
            generation: place
                .as_ref()
                .and_then(|place| Some(place.vm.as_ref()?.generation))
                .unwrap_or_else(|| self.book.highest(name)),
            heard_s: heard.and_then(|host| host.silent_s(now_unix_s)),
            copies: copies.map(|copy| copy.host.clone()).collect(),
            migration: self.active.get(name).map(|moving| moving.id.to_string()),
            accelerator: accelerator.filter(|kind| *kind != Accelerator::Auto),
        })
    }

    fn note(
        &self,
        name: &VmName,
        state: VmState,
        place: Option<&Place>,
        now_unix_s: i64,
    ) -> Option<String> {
        if let Some(twice) = self.book.twice(name) {
            return Some(twice_note(name, &twice));
        }
        let place = place?;
        match state {
            VmState::InDoubt => self.doubt_note(name, place),
            VmState::Unreachable if !place.connected => {
                let heard = self.hosts.get(&place.host);
                let since = heard.and_then(|host| host.silent_s(now_unix_s));
                let since = since.map_or_else(String::new, |s| format!(" for {s} s"));
                Some(format!(
                    "host {0} may run it and has not answered{since}: bring it back; or, when it is powered off, run 'godwit host fenced {0}' and start {name} again",
                    place.host
                ))
            }
            VmState::HandingOver => Some(format!(
                "it is being handed over, host {} takes part; nobody has said yet that it runs it",
                place.host
            )),
            _ => place.vm.as_ref().and_then(|vm| vm.note.clone()),
        }
    }

    /// The command that ends an in-doubt state; where the other host is not known here, the host's own words.
    fn doubt_note(&self, name: &VmName, place: &Place) -> Option<String> {
        let here = &place.host;
        let own = place.vm.as_ref().and_then(|vm| vm.note.clone());
        if let Some(note) = own.filter(|note| note.contains("godwit vm resolve")) {
            // The host knows which way out its side has.
            return Some(note);
        }
        let Some(other) = self.other_host(name, here) else {
            return place.vm.as_ref().and_then(|vm| vm.note.clone());
        };
        Some(format!(
            "stopped until hosts {here} and {other} reach each other; or, once host {other} is powered off and only then: godwit vm resolve {name} --run-on {here} --confirm-fenced {other}"
        ))
    }

    fn other_host(&self, name: &VmName, here: &HostName) -> Option<HostName> {
        let moving = self.active.get(name).into_iter();
        let moving = moving.flat_map(|moving| [moving.from.clone(), moving.to.clone()]);
        let reported = self.seen(name).map(|(place, _)| place.host);
        let named = self.book.may_hold(name);
        moving
            .chain(reported)
            .chain(named)
            .find(|host| host != here)
    }

    /// All VMs as people see them: held twice first, then in doubt.
    pub fn vm_views(&self, now_unix_s: i64) -> Vec<VmView> {
        let mut views: Vec<VmView> = self
            .vms
            .keys()
            .filter_map(|name| self.vm_view(name, now_unix_s))
            .collect();
        views.sort_by_key(|view| match view.state {
            VmState::RunningTwice => 0,
            VmState::InDoubt => 1,
            _ => 2,
        });
        views
    }

    /// VMs that a host holds or may hold.
    pub fn vms_on(&self, host: &HostName) -> Vec<VmName> {
        let here = |name: &&VmName| self.place(name).is_some_and(|place| place.host == *host);
        self.vms.keys().filter(here).cloned().collect()
    }

    /// A host as people see it.
    pub fn host_view(&self, name: &HostName, now_unix_s: i64) -> Option<HostView> {
        let entry = self.hosts.get(name)?;
        let info = entry
            .info
            .clone()
            .unwrap_or_else(|| unheard_info(name, entry.address));
        Some(HostView {
            info: HostInfo {
                agent_address: entry.address,
                ..info
            },
            state: entry.state,
            vms: self.vms_on(name),
            last_seen_s: u64::try_from(now_unix_s - entry.last_seen_unix_s).unwrap_or(0),
            draining: false,
            fenced: self.book.is_fenced(name),
            standing: self.book.standing(name),
        })
    }
}

/// A VM's record at a host, as it goes into the book.
fn said(vm: &HostVm) -> RecordSaid {
    RecordSaid {
        vm: vm.spec.name.clone(),
        highest: vm.generation,
        claim: vm.claim.clone(),
    }
}

/// Which hosts hold a VM, and the command that ends that.
fn twice_note(name: &VmName, twice: &Twice) -> String {
    let copies = twice.copies.iter();
    let copies: Vec<String> = copies
        .map(|copy| format!("{} (generation {})", copy.host, copy.generation))
        .collect();
    let paused: Vec<&str> = twice.to_pause().map(HostName::as_str).collect();
    let keep = twice
        .copies
        .first()
        .map_or("HOST", |copy| copy.host.as_str());
    format!(
        "hosts {} hold it; if it runs on {}, it is paused there, with its memory. Decide which one goes on, the others are ended: godwit vm resolve {name} --keep {keep}",
        copies.join(" and "),
        paused.join(" and ")
    )
}

/// A host in doubt wins unless a holder has more: one that answers at the same generation, or any at a higher one.
fn doubt_wins(holder: &Place, doubt: &Place) -> bool {
    let generation = |place: &Place| place.vm.as_ref().map(|vm| vm.generation);
    if holder.connected {
        generation(doubt) > generation(holder)
    } else {
        generation(doubt) >= generation(holder)
    }
}

/// A VM that is on is shown as its host runs it, with CPU model and machine type resolved; one that is off as described.
fn shown_spec(entry: &VmEntry, place: Option<&Place>, state: VmState) -> VmSpec {
    let runs = place.and_then(|place| place.vm.as_ref());
    match (runs, state) {
        (_, VmState::Stopped | VmState::Crashed) | (None, _) => entry.spec.clone(),
        (Some(vm), _) => vm.spec.clone(),
    }
}

/// Stands in for a host that joined and was never heard.
fn unheard_info(name: &HostName, agent_address: SocketAddr) -> HostInfo {
    HostInfo {
        name: name.clone(),
        version: String::new(),
        kernel: String::new(),
        qemu: String::new(),
        accelerator: Accelerator::Auto,
        machine_types: Vec::new(),
        machine_aliases: BTreeMap::new(),
        cpu_models: Vec::new(),
        encryption: false,
        port_groups: BTreeMap::new(),
        migration_addresses: Vec::new(),
        agent_address,
        memory_total_mib: 0,
        memory_free_mib: 0,
        cpus: 0,
        boot_id: String::new(),
        instance: Default::default(),
        site: Default::default(),
        boot_alone_ignored: false,
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
