//! The world: its event queue, its network, and the processes that come and go.
//!
//! Owns everything that is simulated. Refuses: to go on after an invariant was broken.

use crate::control::Controller;
use crate::coverage::Coverage;
use crate::faults::Fault;
use crate::model::{Guest, HOSTS, Happening, Host, HostId, Packet, Place, Process, Version};
use crate::rng::Rng;
use crate::run::PlantName;
use godwit_ownership::{Action, Event, HostRecord, Phase, Qemu, Status, Timer, VmCore};
use godwit_types::{Generation, HostName, MigrationId, VmName};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug)]
pub struct World {
    pub(crate) now: u64,
    pub(crate) rng: Rng,
    queue: BTreeMap<(u64, u64), Happening>,
    number: u64,
    pub(crate) hosts: Vec<Host>,
    pub(crate) names: Vec<HostName>,
    pub(crate) vm: VmName,
    pub(crate) guest: Guest,
    /// Hosts that burned down.
    pub(crate) losses: usize,
    /// Where an operator last decided to run the VM.
    pub(crate) decided: Option<HostId>,
    /// Highest generation that the guest ran under.
    pub(crate) ran: Generation,
    /// Link between host n and the next one.
    pub(crate) is_cut: [bool; HOSTS],
    pub(crate) controller: Controller,
    pub(crate) swarm: BTreeSet<Fault>,
    /// Safety phase: faults strike.
    pub(crate) is_faulty: bool,
    /// A host that may have held the VM is gone for good: perhaps nobody holds it until somebody does under a
    /// generation above this one.
    pub(crate) lost_at: Option<Generation>,
    pub(crate) coverage: Coverage,
    pub(crate) violation: Option<String>,
    trace: Option<Vec<String>>,
    hash: u64,
    plant: PlantName,
}

impl World {
    pub(crate) fn new(seed: u64, plant: PlantName, trace: bool) -> Option<Self> {
        let names = ["a", "b", "c"].map(HostName::new).into_iter();
        let mut world = Self {
            now: 0,
            rng: Rng::new(seed),
            queue: BTreeMap::new(),
            number: 0,
            hosts: (0..HOSTS).map(|_| Host::default()).collect(),
            names: names.collect::<Result<_, _>>().ok()?,
            vm: VmName::new("web").ok()?,
            guest: Guest::default(),
            losses: 0,
            decided: None,
            ran: Generation(0),
            is_cut: [false; HOSTS],
            controller: Controller::default(),
            swarm: BTreeSet::new(),
            is_faulty: false,
            lost_at: Some(Generation(0)),
            coverage: Coverage::default(),
            violation: None,
            trace: trace.then(Vec::new),
            hash: 0xcbf2_9ce4_8422_2325,
            plant,
        };
        world.draw_swarm();
        world.controller.is_up = true;
        for host in 0..HOSTS {
            world.start_host(host);
        }
        Some(world)
    }

    pub(crate) fn name(&self, host: HostId) -> &str {
        self.names[host].as_str()
    }

    pub(crate) fn id_of(&self, name: &HostName) -> Option<HostId> {
        self.names.iter().position(|n| n == name)
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
    pub(crate) fn note(&mut self, line: impl FnOnce(&World) -> String) {
        if self.trace.is_some() {
            let text = format!("{:>7} ms  {}", self.now, line(self));
            if let Some(trace) = self.trace.as_mut() {
                trace.push(text);
            }
        }
    }

    pub(crate) fn take_trace(&mut self) -> Vec<String> {
        self.trace.take().unwrap_or_default()
    }

    pub(crate) fn violated(&mut self, what: String) {
        self.note(|_| format!("VIOLATION: {what}"));
        self.violation.get_or_insert(what);
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0000_0100_0000_01b3);
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.hash
    }

    /// Runs until `end` (simulated milliseconds), a violation, or nothing is left to happen.
    pub(crate) fn run_until(&mut self, end: u64) {
        while self.violation.is_none() {
            let Some(entry) = self.queue.first_entry().filter(|e| e.key().0 <= end) else {
                break;
            };
            let ((time, _), happening) = entry.remove_entry();
            self.now = time;
            self.coverage.steps += 1;
            self.guest_steps();
            self.happen(happening);
            self.perhaps_strike();
            self.check();
        }
        self.now = self.now.max(end);
    }

    /// A running guest changes its memory all the time.
    fn guest_steps(&mut self) {
        for host in &mut self.hosts {
            let running = host.qemu.as_mut().filter(|q| q.running);
            if let Some(version) = running.and_then(|q| q.version.as_mut()) {
                version.step += 1;
                self.guest.current = *version;
            }
        }
    }

    /// A QEMU is gone by a fault; if it had the guest's newest state, that is a death, not a loss.
    pub(crate) fn guest_copy_gone(&mut self, version: Option<Version>) {
        if version == Some(self.guest.current) {
            self.guest.died = true;
        }
    }

    fn happen(&mut self, happening: Happening) {
        self.mix(self.now);
        match happening {
            Happening::Deliver { from, to, packet } => self.deliver(from, to, packet),
            Happening::Run { host, process } => self.go_on(host, process),
            Happening::Synced { host, process } => self.synced(host, process),
            Happening::Fires {
                host,
                process,
                timer,
                stamp,
            } => self.fires(host, process, timer, stamp),
            Happening::Local {
                host,
                process,
                event,
            } => {
                if self.is_process(host, process) {
                    self.feed(host, event);
                }
            }
            Happening::Precopy { host, process } => self.precopy(host, process),
            Happening::ReceiverLooks { host, process } => self.receiver_looks(host, process),
            Happening::AgentLooks { host } => self.agent_looks(host),
            Happening::AgentStarts { host } => self.agent_starts(host),
            Happening::HostStarts { host } => self.start_host(host),
            Happening::LinkHeals { a } => self.is_cut[a] = false,
            Happening::ControllerStarts => self.controller.is_up = true,
            Happening::ControllerTick => self.controller_tick(),
            Happening::OwnerPolicy { host } => self.owner_policy(host),
        }
    }

    pub(crate) fn is_process(&self, host: HostId, number: u64) -> bool {
        let process = self.hosts[host].process.as_ref();
        process.is_some_and(|p| p.number == number)
    }

    /// Queues an event for the host's VM process; false if there is none.
    pub(crate) fn feed(&mut self, host: HostId, event: Event) -> bool {
        let Some(process) = self.hosts[host].process.as_mut() else {
            return false;
        };
        process.inbox.push_back(event);
        self.wake(host);
        true
    }

    pub(crate) fn feed_first(&mut self, host: HostId, event: Event) {
        if let Some(process) = self.hosts[host].process.as_mut() {
            process.inbox.push_front(event);
            self.wake(host);
        }
    }

    /// QEMU answers a little later.
    pub(crate) fn local(&mut self, host: HostId, event: Event) {
        let delay = 1 + self.rng.below(6);
        let Some(process) = self.hosts[host].process.as_ref().map(|p| p.number) else {
            return;
        };
        let happening = Happening::Local {
            host,
            process,
            event,
        };
        self.after(delay, happening);
    }

    fn wake(&mut self, host: HostId) {
        let delay = self.rng.below(2);
        let process = self.hosts[host].process.as_mut();
        if let Some(process) = process.filter(|p| !p.is_scheduled) {
            process.is_scheduled = true;
            let process = process.number;
            self.after(delay, Happening::Run { host, process });
        }
    }

    /// One action or one event.
    fn go_on(&mut self, host: HostId, number: u64) {
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        if process.number != number {
            return;
        }
        process.is_scheduled = false;
        if let Some(action) = process.todo.pop_front() {
            self.mix_action(host, &action);
            self.carry_out(host, action);
        } else if let Some(event) = process.inbox.pop_front() {
            self.hand_over(host, event);
        }
        let process = self.hosts[host].process.as_ref();
        if process.is_some_and(|p| !p.todo.is_empty() || !p.inbox.is_empty()) {
            self.wake(host);
        }
    }

    fn mix_action(&mut self, host: HostId, action: &Action) {
        let kind = match action {
            Action::Persist(record) => 100 + record.highest.0,
            Action::Boot(permit) | Action::Cont(permit) => 2000 + permit.generation().0,
            Action::Send { .. } => 1,
            Action::Refuse { event, .. } | Action::Ignored { event, .. } => 10 + *event as u64,
            _ => 2,
        };
        self.mix(kind * 8 + host as u64);
        if self.trace.is_some() && !matches!(action, Action::Report(_)) {
            let text = format!("{action:?}");
            self.note(|w| format!("{}:     {text}", w.name(host)));
        }
    }

    /// Gives an event to the core.
    fn hand_over(&mut self, host: HostId, event: Event) {
        if event == Event::QemuDied && self.hosts[host].qemu.is_some() {
            return;
        }
        if event == Event::DeleteRequested {
            self.mourn(host);
        }
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let state = process.core.state_name();
        let kind = event.kind();
        if matches!(event, Event::StopRequested | Event::GuestShutdown) {
            process.may_discard = true;
        }
        let copy = self.trace.is_some().then(|| format!("{event:?}"));
        let began = match &event {
            Event::MigrationBegan { migration, to, .. } => Some((migration.clone(), to.clone())),
            _ => None,
        };
        let actions = process.core.handle(event);
        let after = process.core.state_name();
        process.todo.extend(actions);
        self.coverage.pair(state, kind);
        self.mix((kind as u64) << 8 | (state as u64) << 4 | host as u64);
        if let Some(event) = copy {
            self.note(|w| {
                format!(
                    "{}: {} + {event} -> {}",
                    w.name(host),
                    state.name(),
                    after.name()
                )
            });
        }
        if let Some((migration, to)) = began {
            self.remember_destination(host, migration, &to);
        }
    }

    fn remember_destination(&mut self, host: HostId, migration: MigrationId, to: &HostName) {
        let to = self.id_of(to);
        if let (Some(process), Some(to)) = (self.hosts[host].process.as_mut(), to) {
            process.asked.insert(migration, to);
        }
    }

    /// Hands a packet to the network, which may lose, double or delay it.
    pub(crate) fn send(&mut self, from: Place, to: Place, packet: Packet) {
        if self.strikes(Fault::LoseMessage, 60) {
            return;
        }
        let copies = if self.strikes(Fault::DoubleMessage, 60) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let mut delay = 1 + self.rng.below(5);
            if self.strikes(Fault::DelayMessage, 80) {
                let most = if self.rng.chance(300) { 6000 } else { 700 };
                delay += self.rng.below(most);
            }
            let packet = packet.clone();
            self.after(delay, Happening::Deliver { from, to, packet });
        }
    }

    fn is_reachable(&self, from: HostId, to: HostId) -> bool {
        let link = if (from + 1) % HOSTS == to { from } else { to };
        !self.is_cut[link]
    }

    fn deliver(&mut self, from: Place, to: Place, packet: Packet) {
        let to = match (to, packet) {
            (Place::Host(to), packet) => (to, packet),
            (
                Place::Controller,
                Packet::Surveyed {
                    survey,
                    host,
                    record,
                },
            ) => return self.surveyed(survey, host, record),
            (Place::Controller, _) => return,
        };
        let (host, packet) = to;
        match from {
            Place::Host(from) if !self.is_reachable(from, host) => {}
            Place::Host(from) if self.hosts[host].is_up => self.take_packet(host, from, packet),
            Place::Controller if self.hosts[host].has_agent => self.take_command(host, packet),
            Place::Host(_) | Place::Controller => {}
        }
    }

    fn take_command(&mut self, host: HostId, packet: Packet) {
        if self.hosts[host].process.is_none() {
            self.spawn(host);
        }
        match packet {
            Packet::Command(event) => {
                self.feed(host, event);
            }
            Packet::Survey { survey, level } => {
                if let Some(process) = self.hosts[host].process.as_mut() {
                    process.surveys.insert(level, survey);
                }
                self.feed(host, Event::SurveyRequested { level });
            }
            _ => {}
        }
    }

    fn take_packet(&mut self, host: HostId, from: HostId, packet: Packet) {
        self.heard_peer(host);
        match packet {
            Packet::Peer(message) => {
                if self.hosts[host].process.is_none() && self.hosts[host].has_agent {
                    self.spawn(host);
                }
                let from = self.names[from].clone();
                self.feed(host, Event::Message { from, message });
            }
            Packet::PagesApplied { migration } => {
                let process = self.hosts[host].process.as_mut();
                if let Some(out) = process
                    .and_then(|p| p.outgoing.as_mut())
                    .filter(|o| o.migration == migration)
                {
                    out.acknowledged += 1;
                }
            }
            Packet::LastPagesApplied { migration, attempt } => {
                let process = self.hosts[host].process.as_ref();
                let out = process.and_then(|p| p.outgoing.as_ref());
                if out.is_some_and(|o| o.migration == migration) {
                    self.feed(host, Event::LastPagesApplied { attempt });
                }
            }
            Packet::Pages { migration, version } => self.receive_pages(host, &migration, version),
            Packet::LastPages {
                migration,
                attempt,
                version,
            } => self.receive_last_pages(host, &migration, attempt, version),
            Packet::DeviceState { migration, attempt } => {
                self.receive_device_state(host, &migration, attempt);
            }
            Packet::Command(_) | Packet::Survey { .. } | Packet::Surveyed { .. } => {}
        }
    }

    fn fires(&mut self, host: HostId, number: u64, timer: Timer, stamp: u64) {
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let armed = match timer {
            Timer::Switchover => &mut process.switchover,
            Timer::Ask => &mut process.ask,
        };
        if process.number == number && *armed == Some(stamp) {
            *armed = None;
            self.feed(host, Event::Timeout(timer));
        }
    }

    /// A new VM process takes over what it finds.
    pub(crate) fn spawn(&mut self, host: HostId) {
        let number = self.next_number();
        let at = &self.hosts[host];
        let record = at.disk.seen.clone();
        let record = record.unwrap_or_else(|| HostRecord::absent(self.vm.clone()));
        let qemu = match &at.qemu {
            None => Qemu::Dead,
            Some(q) if q.running => Qemu::Running,
            Some(_) => Qemu::Paused,
        };
        let off = matches!(
            record.phase,
            Phase::Holds {
                power: godwit_ownership::Power::Off,
                ..
            }
        );
        let made = crate::run::recover(record, self.names[host].clone(), qemu, self.plant);
        let Ok((core, actions)) = made else {
            self.violated(format!("{} cannot read its journal", self.name(host)));
            return;
        };
        self.hosts[host].process = Some(new_process(number, core, actions.into(), off));
        self.note(|w| format!("{}: VM process starts, QEMU is {qemu:?}", w.name(host)));
        self.wake(host);
    }

    fn agent_looks(&mut self, host: HostId) {
        let at = &self.hosts[host];
        let has_record = at.disk.seen.is_some() || at.qemu.is_some();
        if at.has_agent && at.process.is_none() && has_record {
            self.spawn(host);
        }
    }

    fn agent_starts(&mut self, host: HostId) {
        if self.hosts[host].is_up {
            self.hosts[host].has_agent = true;
            self.agent_looks(host);
        }
    }

    pub(crate) fn start_host(&mut self, host: HostId) {
        if self.hosts[host].is_up {
            return;
        }
        self.note(|w| format!("{}: host starts", w.name(host)));
        self.hosts[host].is_up = true;
        let name = self.names[host].clone();
        self.controller.fenced.remove(&name);
        self.agent_starts(host);
    }

    /// Whoever runs the host starts a VM again that should run.
    fn owner_policy(&mut self, host: HostId) {
        let process = self.hosts[host].process.as_ref();
        let status = process.map(|p| p.core.status());
        match status {
            Some(Status::Down { .. }) => {
                self.feed(host, Event::StartRequested);
            }
            Some(Status::Off) if !self.is_faulty => {
                self.feed(host, Event::StartRequested);
            }
            Some(Status::Paused) if !self.is_faulty => {
                self.feed(host, Event::ResumeRequested);
            }
            _ => {}
        }
        if !self.is_faulty {
            self.after(700, Happening::OwnerPolicy { host });
        }
    }

    /// No more faults; whatever is down comes back.
    pub(crate) fn heal(&mut self) {
        self.note(|_| "everything heals".to_owned());
        self.is_faulty = false;
        self.is_cut = [false; HOSTS];
        self.controller.is_up = true;
        for host in 0..HOSTS {
            self.start_host(host);
            self.agent_starts(host);
            self.after(500, Happening::OwnerPolicy { host });
        }
    }
}

fn new_process(number: u64, core: VmCore, todo: VecDeque<Action>, may_discard: bool) -> Process {
    Process {
        number,
        core,
        todo,
        inbox: VecDeque::new(),
        is_scheduled: false,
        writing: None,
        switchover: None,
        ask: None,
        outgoing: None,
        receiving: None,
        may_discard,
        surveys: BTreeMap::new(),
        asked: BTreeMap::new(),
    }
}
