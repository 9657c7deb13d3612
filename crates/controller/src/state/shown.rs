//! The inventory as people see it: a VM's state in one word, the note beside it, hosts and VMs in lists.
//!
//! Owns nothing, reads the inventory alone. Refuses: silence shown as `stopped`.

use super::{Place, State, VmEntry};
use godwit_site::{Twice, Whereabouts};
use godwit_types::control_api::{HostView, VmView};
use godwit_types::host::HostInfo;
use godwit_types::site::Claim;
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{HostName, VmName, VmSpec};
use std::collections::BTreeMap;
use std::net::SocketAddr;

impl State {
    /// State of a VM in one word.
    pub fn vm_state(&self, name: &VmName) -> VmState {
        let whereabouts = self.book.whereabouts(name);
        if matches!(whereabouts, Whereabouts::Twice(_)) {
            return VmState::RunningTwice;
        }
        if self.lacking.contains_key(name) {
            return VmState::DamagedRecord;
        }
        let Some(place) = self.place(name) else {
            return VmState::Stopped;
        };
        match place.vm.as_ref().map(|vm| vm.state) {
            Some(VmState::InDoubt) => VmState::InDoubt,
            _ if !place.connected => VmState::Unreachable,
            _ if matches!(
                whereabouts,
                Whereabouts::HandingOver { .. } | Whereabouts::Nowhere
            ) && self.damaged_at(name).is_some() =>
            {
                VmState::DamagedRecord
            }
            _ if matches!(whereabouts, Whereabouts::HandingOver { .. }) => VmState::HandingOver,
            Some(state) => state,
            // It says that it holds the VM, and tells of it in words that nobody here understands.
            None if self
                .damaged_at(name)
                .is_some_and(|(host, _)| *host == place.host) =>
            {
                VmState::DamagedRecord
            }
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
            vm_process_version: place
                .as_ref()
                .and_then(|place| Some(place.vm.as_ref()?.vm_process.as_ref()?.version.clone())),
            accelerator: accelerator.filter(|kind| *kind != Accelerator::Auto),
            guest: place
                .as_ref()
                .filter(|place| place.connected)
                .and_then(|place| place.vm.as_ref()?.guest.clone()),
            disks: place
                .filter(|place| place.connected)
                .and_then(|place| Some(place.vm?.disks.clone()))
                .unwrap_or_default(),
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
            return Some(self.twice_note(name, &twice, now_unix_s));
        }
        if let Some(lack) = self.lacking.get(name) {
            let told = place.and_then(|place| {
                Some(format!(
                    "host {} says that it is {}; ",
                    place.host,
                    place.vm.as_ref()?.state
                ))
            });
            return Some(format!(
                "{}{}",
                told.unwrap_or_default(),
                lack.row().sentence()
            ));
        }
        let place = place?;
        match state {
            VmState::InDoubt => self.doubt_note(name, place),
            VmState::Unreachable if !place.connected => {
                Some(self.silent_note(name, &place.host, now_unix_s))
            }
            VmState::DamagedRecord => self
                .damaged_at(name)
                .map(|(host, sentence)| format!("host {host} says: {sentence}")),
            VmState::HandingOver => Some(self.book.kept_gift(name, &place.host).map_or_else(
                || {
                    format!(
                        "it is being handed over and host {} takes part; no host has said yet that the VM runs there",
                        place.host
                    )
                },
                |kept| kept.to_string(),
            )),
            _ => place.vm.as_ref().and_then(|vm| vm.note.clone()),
        }
    }

    fn silent_note(&self, name: &VmName, host: &HostName, now_unix_s: i64) -> String {
        let heard = self.hosts.get(host);
        let since = heard.and_then(|host| host.silent_s(now_unix_s));
        let since = since.map_or_else(String::new, |s| format!(" for {s} s"));
        let silent = format!("host {host} may run it and has not answered{since}: bring it back");
        let spec = self.vms.get(name).map(|vm| &vm.spec);
        // Elsewhere it could not start.
        match spec.and_then(VmSpec::of_its_host_alone) {
            Some(what) => format!("{silent}, which alone has {what}"),
            None => format!(
                "{silent}; or, when it is powered off, run 'godwit host fenced {host}' and start {name} again"
            ),
        }
    }

    /// Each copy as it is: what a person needs to choose.
    pub fn copies(&self, name: &VmName, twice: &Twice, now_unix_s: i64) -> String {
        let copies = twice.copies.iter().map(|copy| {
            let entry = self.hosts.get(&copy.host);
            let vm = entry.and_then(|entry| entry.vm(name));
            let state = vm.map_or_else(|| "not heard".to_owned(), |vm| vm.state.to_string());
            let since = entry.and_then(|entry| entry.on_since.get(name));
            let on = since.map_or_else(String::new, |since| {
                format!(
                    ", known to be on for {} s",
                    now_unix_s.saturating_sub(*since).max(0)
                )
            });
            let silent = entry.and_then(|entry| entry.silent_s(now_unix_s));
            let silent = silent.map_or_else(String::new, |s| format!(", not heard for {s} s"));
            let granted = match copy.granted {
                true => "",
                false => ", which that host was never granted",
            };
            format!(
                "{} ({state}{on}{silent}, generation {}{granted})",
                copy.host, copy.generation
            )
        });
        copies.collect::<Vec<_>>().join(" and ")
    }

    /// Which hosts hold a VM, and how a person ends that: which copy is worth keeping nobody else knows.
    fn twice_note(&self, name: &VmName, twice: &Twice, now_unix_s: i64) -> String {
        let paused: Vec<&str> = twice.to_pause().map(HostName::as_str).collect();
        format!(
            "hosts {} hold it; if it runs on {}, it is paused there, with its memory. Look at each copy with 'godwit vm console {name} --host HOST', then decide which one to keep; every other one is ended, with its memory: godwit vm resolve {name} --keep HOST",
            self.copies(name, twice, now_unix_s),
            paused.join(" and ")
        )
    }

    /// The command that ends an in-doubt state. No host's own words are shown: a person acts on it.
    fn doubt_note(&self, name: &VmName, place: &Place) -> Option<String> {
        let here = &place.host;
        let claim = place.vm.as_ref().map(|vm| &vm.claim);
        let named = claim.and_then(|claim| self.book.waits_by_permission(name, here, claim));
        let Some(other) = named.or_else(|| self.other_host(name, here)) else {
            return Some(format!(
                "host {here} waits for the end of a handover with a host that is not known here: see the log of host {here}"
            ));
        };
        let ends = match self.book.kept_gift(name, here) {
            Some(kept) => match self.book.may_run_on(name, here, Some(&other)) {
                Ok(()) => format!("; or, to end what is left of it there: {}", kept.way_out()),
                // Something newer can come back.
                Err(_) => return Some(kept.to_string()),
            },
            None if let Some(note) = self.overtaken_note(name, here) => return Some(note),
            None => String::new(),
        };
        // A destination cannot know whether the source ran on.
        let verb = match claim {
            Some(Claim::Promised { .. }) => "--give-up-on",
            _ => "--run-on",
        };
        Some(format!(
            "stopped until hosts {here} and {other} reach each other; or, once host {other} is powered off and only then: godwit vm resolve {name} {verb} {here} --confirm-fenced {other}{ends}"
        ))
    }

    /// Of a gift that is older than what another host was granted since, while nobody knows yet what became of that.
    fn overtaken_note(&self, name: &VmName, here: &HostName) -> Option<String> {
        if !self.book.is_older_gift(name, here) {
            return None;
        }
        let waits = format!("host {here} waits for the end of a handover that is not the newest");
        if let Some(silent) = self.book.silent_members(name).first() {
            return Some(format!(
                "{waits}: host {silent} may hold the VM and does not answer; bring it back, or, when it is powered off, run 'godwit host fenced {silent}'"
            ));
        }
        let holder = self.book.unsure_since(name, here)?;
        Some(format!(
            "{waits}: host {holder} was granted the VM since and does not name it; 'godwit vm resolve {name} --give-up-on {here}' asks that host, then ends what is left on host {here}, which may be the only memory of the VM"
        ))
    }

    fn other_host(&self, name: &VmName, here: &HostName) -> Option<HostName> {
        let moving = self.active.get(name).into_iter();
        let moving = moving.flat_map(|moving| [moving.from.clone(), moving.to.clone()]);
        let reported = self.seen(name).map(|(host, _, _)| host.clone());
        let named = self.book.may_hold(name);
        moving
            .chain(named)
            .chain(reported)
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
            VmState::InDoubt | VmState::DamagedRecord => 1,
            _ => 2,
        });
        views
    }

    /// A host as people see it.
    pub fn host_view(&self, name: &HostName, now_unix_s: i64) -> Option<HostView> {
        self.host_view_with(name, self.vms_on(name), now_unix_s)
    }

    /// Every host as people see it. Each VM is looked for once, however many hosts there are.
    pub fn host_views(&self, now_unix_s: i64) -> Vec<HostView> {
        let mut places: BTreeMap<HostName, Vec<VmName>> = BTreeMap::new();
        for vm in self.vms.keys() {
            if let Some(place) = self.place(vm) {
                places.entry(place.host).or_default().push(vm.clone());
            }
        }
        let views = self.hosts.keys().filter_map(|name| {
            let vms = places.remove(name).unwrap_or_default();
            self.host_view_with(name, vms, now_unix_s)
        });
        views.collect()
    }

    fn host_view_with(
        &self,
        name: &HostName,
        vms: Vec<VmName>,
        now_unix_s: i64,
    ) -> Option<HostView> {
        let entry = self.hosts.get(name)?;
        let info = entry
            .info
            .clone()
            .unwrap_or_else(|| unheard_info(name, entry.address));
        let is_off = |vm: &&VmName| self.vm_state(vm).is_off();
        Some(HostView {
            vms_off: vms.iter().filter(is_off).cloned().collect(),
            info: HostInfo {
                agent_address: entry.address,
                ..info
            },
            state: entry.state,
            vms,
            last_seen_s: u64::try_from(now_unix_s - entry.last_seen_unix_s).unwrap_or(0),
            draining: false,
            fenced: self.book.is_fenced(name),
            standing: self.book.standing(name),
        })
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
pub(crate) fn unheard_info(name: &HostName, agent_address: SocketAddr) -> HostInfo {
    HostInfo {
        name: name.clone(),
        version: String::new(),
        speaks: Default::default(),
        kernel: String::new(),
        qemu: String::new(),
        accelerator: Accelerator::Auto,
        machine_types: Vec::new(),
        machine_aliases: BTreeMap::new(),
        cpu_models: Vec::new(),
        cpu_models_under: Default::default(),
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
        closing: false,
        unread: Default::default(),
        certificate: None,
        datastores: Default::default(),
    }
}
