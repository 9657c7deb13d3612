//! The site's world: its event queue, its network and its dispatch.
//!
//! Owns everything that is simulated. Refuses: to go on after an invariant was broken.

use super::controller::Controller;
use super::coverage::SiteCoverage;
use super::faults::SiteFault;
use super::images::Image;
use super::model::{
    Cut, Exempt, Guest, Happening, Machine, MachineId, NameId, Packet, Place, VmId,
};
use super::own_files::Store;
use super::run::SitePlant;
use crate::model::Version;
use crate::rng::Rng;
use godwit_types::{HostName, MigrationId, VmName};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
pub(crate) struct Site {
    pub now: u64,
    pub rng: Rng,
    queue: BTreeMap<(u64, u64), Happening>,
    number: u64,
    pub names: Vec<HostName>,
    pub vms: Vec<VmName>,
    pub machines: Vec<Machine>,
    /// Which machine has a host's address.
    pub address: Vec<MachineId>,
    pub guests: Vec<Guest>,
    pub controllers: Vec<Controller>,
    pub cuts: BTreeSet<Cut>,
    pub swarm: BTreeSet<SiteFault>,
    /// A host lies, or did: what was believed of it may last.
    pub has_liar: bool,
    pub is_faulty: bool,
    pub coverage: SiteCoverage,
    pub violation: Option<String>,
    pub trace: Option<Vec<String>>,
    hash: u64,
    pub plant: SitePlant,
    pub migrations: u64,
    /// Falsely fenced hosts that were heard: until when an alarm must show.
    pub alarms_due: Vec<(u64, NameId)>,
    pub images: Vec<Image>,
    /// Where a disk that goes along is to be at its destination, as the migration's description says.
    pub specs: BTreeMap<MigrationId, Store>,
    /// Whether a lock on an image reaches the other hosts.
    pub locks_reach: bool,
}

impl Site {
    pub(crate) fn new(seed: u64, plant: SitePlant, trace: bool) -> Option<Self> {
        let mut rng = Rng::new(seed ^ 0x5eed_0000_0000);
        let hosts = 3 + rng.index(3);
        let vms = if rng.chance(10) { 40 } else { 1 + rng.index(4) };
        let names = ["a", "b", "c", "d", "e"].iter().take(hosts);
        let names = names.map(|name| HostName::new(*name));
        let vm_names = (0..vms).map(|vm| VmName::new(format!("v{vm}")));
        Some(Self {
            now: 0,
            rng,
            queue: BTreeMap::new(),
            number: 0,
            names: names.collect::<Result<_, _>>().ok()?,
            vms: vm_names.collect::<Result<_, _>>().ok()?,
            machines: (0..hosts).map(|name| Machine::new(name, vms)).collect(),
            address: (0..hosts).collect(),
            guests: (0..vms).map(|_| Guest::default()).collect(),
            controllers: vec![Controller::new(plant)],
            cuts: BTreeSet::new(),
            swarm: BTreeSet::new(),
            has_liar: false,
            is_faulty: false,
            coverage: SiteCoverage::default(),
            violation: None,
            trace: trace.then(Vec::new),
            hash: 0xcbf2_9ce4_8422_2325,
            plant,
            migrations: 0,
            alarms_due: Vec::new(),
            images: (0..vms).map(|_| Image::default()).collect(),
            specs: BTreeMap::new(),
            locks_reach: seed.is_multiple_of(2),
        })
    }

    pub(crate) fn id_of(&self, name: &HostName) -> Option<NameId> {
        self.names.iter().position(|n| n == name)
    }

    pub(crate) fn vm_of(&self, name: &VmName) -> Option<VmId> {
        self.vms.iter().position(|n| n == name)
    }

    pub(crate) fn name_of(&self, at: MachineId) -> HostName {
        self.names[self.machines[at].name].clone()
    }

    /// A machine, for the trace: a clone is marked.
    pub(crate) fn label(&self, at: MachineId) -> String {
        let machine = &self.machines[at];
        let mark = if machine.is_clone { "'" } else { "" };
        format!("{}{mark}", self.names[machine.name])
    }

    pub(crate) fn next_number(&mut self) -> u64 {
        self.number += 1;
        self.number
    }

    pub(crate) fn after(&mut self, delay: u64, happening: Happening) {
        let number = self.next_number();
        self.queue.insert((self.now + delay, number), happening);
    }

    /// A line of the trace; made only if somebody reads it.
    pub(crate) fn note(&mut self, line: impl FnOnce(&Self) -> String) {
        if self.trace.is_some() {
            let text = format!("{:>7} ms  {}", self.now, line(self));
            if let Some(trace) = self.trace.as_mut() {
                trace.push(text);
            }
        }
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.note(|_| format!("VIOLATION: {what}"));
        self.violation.get_or_insert(what);
    }

    pub(crate) fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0000_0100_0000_01b3);
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.hash
    }

    pub(crate) fn exempt(&mut self, vm: VmId, why: Exempt) {
        if self.guests[vm].exempt.insert(why) {
            self.note(|w| format!("{} is not judged any more: {}", w.vms[vm], why.name()));
            *self.coverage.exempt.entry(why).or_default() += 1;
        }
    }

    pub(crate) fn is_exempt(&self, vm: VmId) -> bool {
        !self.guests[vm].exempt.is_empty()
    }

    /// Runs until `end` (simulated milliseconds) or a violation.
    pub(crate) fn run_until(&mut self, end: u64) {
        while self.violation.is_none() {
            let Some(entry) = self.queue.first_entry().filter(|e| e.key().0 <= end) else {
                break;
            };
            let ((time, _), happening) = entry.remove_entry();
            self.now = time;
            self.coverage.steps += 1;
            self.mix(time);
            self.happen(happening);
            self.perhaps_strike();
        }
        self.now = self.now.max(end);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Deliver { from, to, packet } => self.deliver(from, to, packet),
            Happening::Run { at, vm, process } => self.go_on(at, vm, process),
            Happening::Synced { at, vm, process } => self.synced(at, vm, process),
            Happening::Fires {
                at,
                vm,
                process,
                timer,
                stamp,
            } => self.fires(at, vm, process, timer, stamp),
            Happening::Local {
                at,
                vm,
                process,
                event,
            } => self.local_event(at, vm, process, event),
            Happening::DiskMoves { at, vm, process } => self.disk_moves(at, vm, process),
            Happening::Precopy { at, vm, process } => self.precopy(at, vm, process),
            Happening::ReceiverLooks {
                at,
                vm,
                process,
                migration,
            } => self.receiver_looks(at, vm, process, &migration),
            Happening::AgentTick { at, agent } => self.agent_tick(at, agent),
            Happening::AgentStarts { at } => self.agent_starts(at),
            Happening::MachineStarts { at } => self.machine_starts(at),
            Happening::ControllerTick { controller, life } => {
                self.controller_tick(controller, life);
            }
            Happening::ControllerStarts { controller } => self.controller_starts(controller),
            Happening::AskTimesOut(caller) => self.ask_times_out(caller),
            Happening::PeopleAct => self.people_act(),
            Happening::Heal { what } => {
                self.cuts.remove(&what);
            }
            Happening::Look => self.look(),
        }
    }

    /// Hands a packet to the network, which may lose, double or delay it.
    pub(crate) fn send(&mut self, from: Place, to: Place, packet: Packet) {
        if self.strikes(SiteFault::LoseMessage, 30) {
            return;
        }
        let doubled = self.strikes(SiteFault::DoubleMessage, 30);
        let copies = if doubled { 2 } else { 1 };
        let slow = match from {
            Place::Machine(at) => self.machines[at].slow_until > self.now,
            Place::Name(_) | Place::Controller(_) => false,
        };
        for _ in 0..copies {
            let mut delay = 1 + self.rng.below(5);
            if slow {
                delay += self.rng.below(2500);
            }
            if self.strikes(SiteFault::DelayMessage, 30) {
                let most = if self.rng.chance(300) { 6000 } else { 700 };
                delay += self.rng.below(most);
            }
            let packet = packet.clone();
            self.after(delay, Happening::Deliver { from, to, packet });
        }
    }

    /// Whether packets pass between two machines.
    pub(crate) fn connects(&self, a: MachineId, b: MachineId) -> bool {
        !self.cuts.contains(&Cut::Machines(a.min(b), a.max(b)))
    }

    /// Whether packets pass between a controller and a machine.
    pub(crate) fn reaches(&self, controller: usize, at: MachineId) -> bool {
        !self.cuts.contains(&Cut::Controller(controller, at))
    }

    fn deliver(&mut self, from: Place, to: Place, packet: Packet) {
        let to = match to {
            Place::Name(name) => Place::Machine(self.address[name]),
            other => other,
        };
        let cut = match (from, to) {
            (Place::Machine(a), Place::Machine(b)) => !self.connects(a, b),
            (Place::Machine(at), Place::Controller(c))
            | (Place::Controller(c), Place::Machine(at)) => !self.reaches(c, at),
            _ => false,
        };
        let is_data = matches!(
            packet,
            Packet::LastPages { .. } | Packet::LastPagesApplied { .. } | Packet::DeviceState { .. }
        );
        let agents = [from, to].into_iter();
        let agent_cut = agents
            .filter_map(|place| match place {
                Place::Machine(at) => Some(at),
                Place::Name(_) | Place::Controller(_) => None,
            })
            .any(|at| self.machines[at].agent_cut_until > self.now);
        if cut || agent_cut && !is_data {
            return;
        }
        match to {
            Place::Machine(at) => self.at_machine(at, from, to, packet),
            Place::Controller(controller) => self.at_controller(controller, from, to, packet),
            Place::Name(_) => {}
        }
    }

    fn at_machine(&mut self, at: MachineId, from: Place, to: Place, packet: Packet) {
        if !self.machines[at].is_up {
            return;
        }
        let frozen = self.machines[at].agent_frozen_until;
        let is_data = matches!(
            packet,
            Packet::LastPages { .. } | Packet::LastPagesApplied { .. } | Packet::DeviceState { .. }
        );
        if frozen > self.now && !is_data {
            let delay = frozen - self.now;
            return self.after(delay, Happening::Deliver { from, to, packet });
        }
        match packet {
            Packet::Ask {
                caller,
                stamp,
                what,
            } => self.agent_hears(at, caller, stamp, *what),
            Packet::Question {
                agent,
                round,
                question,
            } => {
                if let Place::Machine(asker) = from {
                    self.agent_answers(at, asker, agent, round, &question);
                }
            }
            Packet::Answered {
                agent,
                round,
                answer,
            } => self.agent_takes(at, agent, round, *answer),
            Packet::Peer { vm, message } => {
                if let Place::Machine(sender) = from {
                    self.peer_says(at, sender, vm, message);
                }
            }
            Packet::LastPages {
                vm,
                migration,
                attempt,
                memory,
            } => self.receive_last_pages(at, vm, &migration, attempt, memory),
            Packet::LastPagesApplied {
                vm,
                migration,
                attempt,
            } => self.last_pages_applied(at, vm, &migration, attempt),
            Packet::DeviceState {
                vm,
                migration,
                attempt,
            } => self.receive_device_state(at, vm, &migration, attempt),
            Packet::Reply { .. } => {}
        }
    }

    fn at_controller(&mut self, controller: usize, from: Place, to: Place, packet: Packet) {
        let of = &self.controllers[controller];
        if !of.is_up {
            return;
        }
        let frozen = of.frozen_until;
        if frozen > self.now {
            let delay = frozen - self.now;
            return self.after(delay, Happening::Deliver { from, to, packet });
        }
        match packet {
            Packet::Reply {
                caller,
                from,
                reply,
            } => self.controller_hears(caller, from, *reply),
            Packet::Question {
                agent,
                round,
                question,
            } => {
                if let Place::Machine(asker) = from {
                    self.controller_answers(controller, asker, agent, round, &question);
                }
            }
            _ => {}
        }
    }

    /// The guest's state in a QEMU, which goes on as long as it runs.
    pub(crate) fn version_at(&mut self, at: MachineId, vm: VmId) -> Option<Version> {
        let now = self.now;
        let qemu = self.machines[at].slots[vm].qemu.as_mut()?;
        let version = qemu.version.as_mut()?;
        if qemu.running {
            version.step = now;
            self.guests[vm].current = *version;
        }
        Some(*version)
    }
}
