//! The inventory: what was described, what hosts said last, and what follows. Pure: no clock, no IO.
//!
//! Owned by the app behind one mutex; the database is written first. The rule for where a VM is: the highest
//! generation that a host durably holds wins; a host in doubt wins over a holder that does not answer. Refuses to
//! forget what an unreachable host said: it may still be true.

use crate::ledger::Ledger;
use godwit_types::control_api::{HostState, HostView, VmView};
use godwit_types::host::HostInfo;
use godwit_types::host_api::HostVm;
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
    /// Whether it has answered since this controller started.
    pub heard: bool,
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
            heard: false,
            last_seen_unix_s: 0,
        }
    }

    /// Whether it answers.
    pub fn is_connected(&self) -> bool {
        self.state == HostState::Connected
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
    /// Who holds it, as last known.
    pub host: Option<HostName>,
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

/// What an answer of a host changed; to be written to the database.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// A higher generation was seen.
    Generation(VmName, Generation),
    /// A VM is held elsewhere than was known.
    Moved(VmName, HostName),
    /// A host holds a VM that was not known (an old database was restored).
    Adopted(Box<VmEntry>),
    /// A VM's state on a host is another.
    State(VmName),
}

/// The inventory.
#[derive(Debug, Default)]
pub struct State {
    /// Hosts by name.
    pub hosts: BTreeMap<HostName, HostEntry>,
    /// VMs by name.
    pub vms: BTreeMap<VmName, VmEntry>,
    /// Highest generations.
    pub ledger: Ledger,
    /// Migrations under way, by VM.
    pub active: BTreeMap<VmName, Move>,
    /// How many VMs were deleted: an answer that was asked for before a deletion is stale.
    pub deletions: u64,
}

impl State {
    /// Takes in what a host said of its VMs.
    pub fn observe(&mut self, host: &HostName, answer: Vec<HostVm>) -> Vec<Change> {
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
        changes
    }

    fn observe_vm(&mut self, host: &HostName, vm: &HostVm, changes: &mut Vec<Change>) {
        let name = &vm.spec.name;
        let before = self.hosts.get(host).and_then(|entry| entry.vm(name));
        if before != Some(vm) {
            changes.push(Change::State(name.clone()));
        }
        if self.ledger.see(name, vm.generation) {
            changes.push(Change::Generation(name.clone(), vm.generation));
        }
        if !vm.holds()
            || vm.generation < self.ledger.highest(name) && self.is_held_above(name, vm.generation)
        {
            return;
        }
        match self.vms.get_mut(name) {
            Some(entry) if entry.host.as_ref() == Some(host) => {}
            Some(entry) => {
                entry.host = Some(host.clone());
                entry.resolved.get_or_insert_with(|| vm.spec.clone());
                changes.push(Change::Moved(name.clone(), host.clone()));
            }
            None => {
                let entry = VmEntry {
                    spec: vm.spec.clone(),
                    resolved: Some(vm.spec.clone()),
                    host: Some(host.clone()),
                };
                self.vms.insert(name.clone(), entry.clone());
                changes.push(Change::Adopted(Box::new(entry)));
            }
        }
    }

    fn is_held_above(&self, name: &VmName, generation: Generation) -> bool {
        let mut seen = self.hosts.values().filter_map(|host| host.vm(name));
        seen.any(|vm| vm.holds() && vm.generation > generation)
    }

    /// Where a VM is; none when nobody holds it.
    pub fn place(&self, name: &VmName) -> Option<Place> {
        let holder = self.holder(name);
        let doubt = self.in_doubt(name);
        match (holder, doubt) {
            (Some(holder), Some(doubt)) if doubt_wins(&holder, &doubt) => Some(doubt),
            (Some(holder), _) => Some(holder),
            (None, Some(doubt)) => Some(doubt),
            (None, None) => self.on_record(name),
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
        self.seen(name)
            .filter(|(place, _)| {
                place
                    .vm
                    .as_ref()
                    .is_some_and(|vm| vm.holds() && vm.state != VmState::InDoubt)
            })
            .max_by_key(|(place, generation)| (*generation, place.connected))
            .map(|(place, _)| place)
    }

    fn in_doubt(&self, name: &VmName) -> Option<Place> {
        self.seen(name)
            .filter(|(place, _)| {
                place
                    .vm
                    .as_ref()
                    .is_some_and(|vm| vm.state == VmState::InDoubt)
            })
            .max_by_key(|(place, generation)| (place.connected, *generation))
            .map(|(place, _)| place)
    }

    fn on_record(&self, name: &VmName) -> Option<Place> {
        let host = self.vms.get(name)?.host.clone()?;
        let entry = self.hosts.get(&host)?;
        // A host that answers and does not know the VM does not hold it.
        (!entry.is_connected()).then_some(Place {
            host,
            connected: false,
            vm: None,
        })
    }

    /// Hosts that have not answered since this controller started: they may hold anything.
    pub fn unheard(&self) -> impl Iterator<Item = &HostName> {
        self.hosts
            .iter()
            .filter(|(_, entry)| !entry.heard)
            .map(|(name, _)| name)
    }

    /// State of a VM in one word.
    pub fn vm_state(&self, name: &VmName) -> VmState {
        match self.place(name) {
            None => VmState::Stopped,
            Some(place) => match place.vm {
                Some(vm) if vm.state == VmState::InDoubt => VmState::InDoubt,
                Some(vm) if place.connected => vm.state,
                _ => VmState::Unreachable,
            },
        }
    }

    /// A VM as people see it.
    pub fn vm_view(&self, name: &VmName) -> Option<VmView> {
        let entry = self.vms.get(name)?;
        let place = self.place(name);
        let state = self.vm_state(name);
        let accelerator = place
            .as_ref()
            .and_then(|place| place.vm.as_ref()?.accelerator);
        Some(VmView {
            spec: shown_spec(entry, place.as_ref(), state),
            state,
            note: self.note(name, state, place.as_ref()),
            host: place.as_ref().map(|place| place.host.clone()),
            generation: place
                .as_ref()
                .and_then(|place| Some(place.vm.as_ref()?.generation))
                .unwrap_or_else(|| self.ledger.highest(name)),
            heard_s: None,
            copies: Vec::new(),
            migration: self.active.get(name).map(|moving| moving.id.to_string()),
            accelerator: accelerator.filter(|kind| *kind != Accelerator::Auto),
        })
    }

    fn note(&self, name: &VmName, state: VmState, place: Option<&Place>) -> Option<String> {
        let place = place?;
        match state {
            VmState::InDoubt => self.doubt_note(name, place),
            VmState::Unreachable if !place.connected => Some(format!(
                "host {0} does not answer: bring it back, or, if it is powered off for good, run 'godwit host remove {0} --confirm-unreachable' and start {name} again",
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
            "stopped until hosts {here} and {other} reach each other, or until you power one off and run: godwit vm resolve {name} --run-on {here} --confirm-fenced {other}"
        ))
    }

    fn other_host(&self, name: &VmName, here: &HostName) -> Option<HostName> {
        let moving = self.active.get(name).into_iter();
        let moving = moving.flat_map(|moving| [moving.from.clone(), moving.to.clone()]);
        let reported = self.seen(name).map(|(place, _)| place.host);
        let recorded = self.vms.get(name).and_then(|vm| vm.host.clone());
        moving
            .chain(reported)
            .chain(recorded)
            .find(|host| host != here)
    }

    /// All VMs as people see them: in doubt first.
    pub fn vm_views(&self) -> Vec<VmView> {
        let mut views: Vec<VmView> = self
            .vms
            .keys()
            .filter_map(|name| self.vm_view(name))
            .collect();
        views.sort_by_key(|view| view.state != VmState::InDoubt);
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
            fenced: false,
            standing: Default::default(),
        })
    }
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
