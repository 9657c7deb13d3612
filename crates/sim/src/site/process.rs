//! The shell of a simulated VM process: hands events to the core and carries out its actions, one at a time.
//!
//! Works on the site. Anything may be killed between two actions.

use super::came::{Came, OfDisks};
use super::faults::SiteFault;
use super::model::{
    Exempt, Happening, MachineId, Packet, Place, Process, QemuProcess, Reply, Report, VmId, Waits,
};
use super::world::Site;
use crate::model::Version;
use godwit_ownership::{
    Action, Ending, Event, HostRecord, Phase, Power, Qemu, RunPermit, Status, Timer,
};
use std::collections::{BTreeMap, VecDeque};

const SWITCHOVER_MS: u64 = 500;
const ASK_MS: u64 = 1000;

impl Site {
    /// A new VM process, or the agent in its place, takes over what it finds.
    pub(crate) fn spawn(&mut self, at: MachineId, vm: VmId) {
        let number = self.next_number();
        let slot = &self.machines[at].slots[vm];
        let record = slot.journal.seen.clone();
        let record = record.unwrap_or_else(|| HostRecord::absent(self.vms[vm].clone()));
        let qemu = match &slot.qemu {
            None => Qemu::Dead,
            Some(qemu) if qemu.running => Qemu::Running,
            Some(_) => Qemu::Paused,
        };
        let is_off = matches!(
            record.phase,
            Phase::Holds {
                power: Power::Off,
                ..
            }
        );
        let name = self.name_of(at);
        let Ok((core, actions)) = super::run::recover(record, name, qemu, self.plant) else {
            self.violated(format!("{} cannot read its journal", self.label(at)));
            return;
        };
        self.machines[at].slots[vm].process = Some(Process {
            number,
            core,
            todo: actions.into(),
            inbox: VecDeque::new(),
            is_scheduled: false,
            writing: None,
            current: None,
            switchover: None,
            ask: None,
            outgoing: None,
            receiving: None,
            asked: BTreeMap::new(),
            may_discard: is_off,
            frozen_until: 0,
            came: Came::default(),
        });
        self.note(|w| format!("{} {}: process starts, {qemu:?}", w.label(at), w.vms[vm]));
        self.settle_own_disk(at, vm);
        self.wake(at, vm);
    }

    pub(crate) fn process(&mut self, at: MachineId, vm: VmId) -> Option<&mut Process> {
        self.machines[at].slots[vm].process.as_mut()
    }

    pub(crate) fn is_process(&self, at: MachineId, vm: VmId, number: u64) -> bool {
        let process = self.machines[at].slots[vm].process.as_ref();
        process.is_some_and(|p| p.number == number)
    }

    /// Queues an event for the VM's process.
    pub(crate) fn feed(&mut self, at: MachineId, vm: VmId, event: Event) {
        self.feed_for(at, vm, event, None);
    }

    pub(crate) fn feed_for(
        &mut self,
        at: MachineId,
        vm: VmId,
        event: Event,
        waits: Option<Waits>,
    ) -> bool {
        let Some(process) = self.process(at, vm) else {
            return false;
        };
        process.inbox.push_back((event, waits));
        self.wake(at, vm);
        true
    }

    fn wake(&mut self, at: MachineId, vm: VmId) {
        let delay = self.rng.below(2);
        let process = self.process(at, vm).filter(|p| !p.is_scheduled);
        if let Some(process) = process {
            process.is_scheduled = true;
            let process = process.number;
            self.after(delay, Happening::Run { at, vm, process });
        }
    }

    /// This very process; where it is frozen, `again` happens once it goes on.
    pub(crate) fn thawed(
        &mut self,
        at: MachineId,
        vm: VmId,
        number: u64,
        again: Happening,
    ) -> Option<&mut Process> {
        let now = self.now;
        let process = self.process(at, vm).filter(|p| p.number == number)?;
        if process.frozen_until > now {
            let delay = process.frozen_until - now;
            self.after(delay, again);
            return None;
        }
        self.process(at, vm)
    }

    /// One action or one event.
    pub(crate) fn go_on(&mut self, at: MachineId, vm: VmId, number: u64) {
        let again = Happening::Run {
            at,
            vm,
            process: number,
        };
        let Some(process) = self.thawed(at, vm, number, again) else {
            return;
        };
        process.is_scheduled = false;
        if let Some(action) = process.todo.pop_front() {
            self.carry_out(at, vm, action);
        } else if process.writing.is_none() && !process.core.is_writing() {
            self.answer_waiting(at, vm);
            let next = self.process(at, vm).and_then(|p| p.inbox.pop_front());
            if let Some((event, waits)) = next {
                self.hand_over(at, vm, event, waits);
            }
        }
        let more = self.process(at, vm).is_some_and(|p| {
            let idle = p.todo.is_empty() && !p.core.is_writing();
            !p.todo.is_empty() || idle && (!p.inbox.is_empty() || p.current.is_some())
        });
        if more {
            self.wake(at, vm);
        }
    }

    /// The last event is dealt with, its record is durable: whoever asked hears.
    fn answer_waiting(&mut self, at: MachineId, vm: VmId) {
        let Some(waits) = self.process(at, vm).and_then(|p| p.current.take()) else {
            return;
        };
        let reply = match (waits.refused, waits.surveyed) {
            (true, _) => Reply::Refused,
            (false, Some(answer)) => Reply::Surveyed(answer),
            (false, None) => Reply::Done,
        };
        self.reply(at, waits.caller, reply);
    }

    /// Gives an event to the core.
    pub(crate) fn hand_over(
        &mut self,
        at: MachineId,
        vm: VmId,
        event: Event,
        waits: Option<Waits>,
    ) {
        if event == Event::QemuDied && self.machines[at].slots[vm].qemu.is_some() {
            return;
        }
        let Some(heard) = self.hears_of_disks(at, vm, &event) else {
            // What a person said of a host that is gone could not be written: it is said again.
            if matches!(event, Event::HostRemoved { .. }) {
                self.local(at, vm, event);
            }
            return;
        };
        // A VM whose disk is about to be another image goes nowhere.
        let is_held_up =
            matches!(event, Event::MigrationBegan { .. }) && self.do_disks_move(at, vm);
        let text = self.trace.is_some().then(|| format!("{event:?}"));
        let Some(process) = self.process(at, vm) else {
            return;
        };
        let (before, kind) = (process.core.state_name(), event.kind());
        if is_held_up {
            process.current = waits.map(|waits| Waits {
                refused: true,
                ..waits
            });
            return;
        }
        if event == Event::GuestShutdown {
            process.may_discard = true;
        }
        if let Event::MigrationBegan { migration, to, .. } = &event {
            process.asked.insert(migration.clone(), to.clone());
        }
        if waits.is_some() {
            process.current = waits;
        }
        let actions = process.core.handle(event);
        process.todo.extend(actions);
        let after = process.core.state_name();
        self.coverage.pair(before, kind);
        self.mix((kind as u64) << 16 | (before as u64) << 8 | (at * 64 + vm) as u64);
        if let Some(event) = text {
            let (before, after) = (before.name(), after.name());
            self.note(|w| {
                let (host, vm) = (w.label(at), &w.vms[vm]);
                format!("{host} {vm}: {before} + {event} -> {after}")
            });
        }
        match heard {
            OfDisks::Nothing => {}
            OfDisks::Ends => self.clean_what_waits(at, vm),
            OfDisks::Asks(from, migration) => self.answer_for_disks(at, vm, (&from, migration)),
        }
    }

    fn carry_out(&mut self, at: MachineId, vm: VmId, action: Action) {
        if self.trace.is_some() && !matches!(action, Action::Report(_)) {
            let text = format!("{action:?}");
            self.note(|w| format!("{} {}:     {text}", w.label(at), w.vms[vm]));
        }
        match action {
            Action::Persist(record) => self.persist(at, vm, record),
            Action::Boot(permit) => self.boot(at, vm, &permit),
            Action::Cont(permit) => self.cont(at, vm, &permit),
            Action::StopGuest { attempt } => {
                self.version_at(at, vm);
                if attempt.is_some() {
                    self.give_image_back(at, vm);
                }
                if let Some(qemu) = self.machines[at].slots[vm].qemu.as_mut() {
                    qemu.running = false;
                    if let Some(attempt) = attempt {
                        self.local(at, vm, Event::Stopped { attempt });
                    }
                }
            }
            Action::SendLastPages { attempt } => self.send_last_pages(at, vm, attempt),
            Action::SendDeviceState { attempt } => self.send_device_state(at, vm, attempt),
            Action::Send { to, message } => {
                if let Some(to) = self.id_of(&to) {
                    let packet = Packet::Peer { vm, message };
                    self.send(Place::Machine(at), Place::Name(to), packet);
                }
            }
            Action::KillQemu => self.kill_own_qemu(at, vm),
            Action::Cleanup => self.clean_disk(at, vm),
            Action::Arm(timer) => self.arm(at, vm, timer),
            Action::Disarm(timer) => {
                if let Some(process) = self.process(at, vm) {
                    *armed(process, timer) = None;
                }
            }
            Action::EndMigration { migration, outcome } => {
                let completed = outcome == Ending::Completed;
                let process = self.process(at, vm);
                let was_source = process.is_some_and(|p| p.outgoing.take().is_some());
                self.coverage.ended(was_source, outcome);
                let report = Report {
                    migration,
                    completed,
                };
                self.machines[at].reports.push(report);
                self.clean_disk_without_qemu(at, vm);
            }
            Action::Surveyed { .. } => self.surveyed(at, vm),
            Action::Report(status) => self.shows(at, vm, &status),
            Action::Refuse { event, .. } => {
                let waiting = self.process(at, vm).and_then(|p| p.current.as_mut());
                if let Some(waits) = waiting.filter(|w| w.kind == event) {
                    waits.refused = true;
                }
            }
            Action::RestoreDirty | Action::ReleaseThrottle | Action::Ignored { .. } => {}
        }
    }

    fn surveyed(&mut self, at: MachineId, vm: VmId) {
        let may_live = self.machines[at].slots[vm].qemu.is_some();
        let agent = self.machines[at].agent.as_ref();
        let Some((instance, knows)) = agent.map(|a| (a.site.instance().clone(), a.site.heard()))
        else {
            return;
        };
        let record = self.process(at, vm).map(|process| process.core.record());
        let record = record.cloned();
        let images = record.as_ref().map(|record| self.images_of(at, record));
        if let Some(process) = self.process(at, vm) {
            let record = process.core.record();
            let answer = godwit_types::site::SurveyAnswer {
                highest: record.highest,
                claim: godwit_site::claim_of(record),
                may_live,
                instance,
                knows,
                images: images.unwrap_or_default(),
            };
            if let Some(waits) = process.current.as_mut() {
                waits.surveyed = Some(answer);
            }
        }
    }

    fn shows(&mut self, at: MachineId, vm: VmId, status: &Status) {
        self.note(|w| format!("{} {}: shows {status:?}", w.label(at), w.vms[vm]));
        match status {
            Status::Migrating { migration } => self.begin_precopy(at, vm, migration),
            Status::InDoubt { command, .. } => {
                self.coverage.doubts += 1;
                if !command.starts_with("godwit vm resolve ") {
                    self.violated(format!("{} is in doubt without a command", self.label(at)));
                }
            }
            _ => {}
        }
    }

    fn persist(&mut self, at: MachineId, vm: VmId, record: HostRecord) {
        if let Phase::Incoming { migration, from } = &record.phase {
            self.begin_receiving(at, vm, migration, from);
        }
        if record.may_hold() {
            self.guests[vm].held_by.insert(at);
            if self.machines[at].lies {
                self.exempt(vm, Exempt::Liar);
            }
        }
        let old = self.machines[at].slots[vm].journal.seen.as_ref();
        // Its agent removes what is written of the disks.
        let is_deleted = record.phase == Phase::Absent;
        let is_deleted = is_deleted && old.is_some_and(|old| old.may_run().is_some());
        self.machines[at].slots[vm].own.is_deleted |= is_deleted;
        let old = self.machines[at].slots[vm].journal.seen.as_ref();
        if old.is_some_and(|old| record.check_follows(old).is_err()) || record.check().is_err() {
            return self.violated(format!("{} writes a wrong record", self.label(at)));
        }
        if self.strikes(SiteFault::WriteFails, 12) {
            self.persist_failed(at, vm, true);
        } else if self.strikes(SiteFault::WriteUnknown, 12) {
            let (renamed, durable) = (self.rng.chance(600), self.rng.chance(500));
            let journal = &mut self.machines[at].slots[vm].journal;
            if renamed {
                journal.seen = Some(record.clone());
                if durable {
                    journal.durable = Some(record);
                }
            }
            self.persist_failed(at, vm, false);
        } else {
            self.machines[at].slots[vm].journal.seen = Some(record.clone());
            let delay = 1 + self.rng.below(4);
            if let Some(process) = self.process(at, vm) {
                process.writing = Some(record);
                let process = process.number;
                self.after(delay, Happening::Synced { at, vm, process });
            }
        }
    }

    fn persist_failed(&mut self, at: MachineId, vm: VmId, unchanged: bool) {
        if let Some(waits) = self.process(at, vm).and_then(|p| p.current.as_mut()) {
            waits.refused = true;
        }
        self.hand_over(at, vm, Event::PersistFailed { unchanged }, None);
    }

    pub(crate) fn synced(&mut self, at: MachineId, vm: VmId, number: u64) {
        let now = self.now;
        let Some(process) = self.process(at, vm).filter(|p| p.number == number) else {
            return;
        };
        if process.frozen_until > now {
            let delay = process.frozen_until - now;
            let process = number;
            return self.after(delay, Happening::Synced { at, vm, process });
        }
        if let Some(record) = process.writing.take() {
            self.machines[at].slots[vm].journal.durable = Some(record);
            self.hand_over(at, vm, Event::Persisted, None);
            self.gave(at, vm);
            self.wake(at, vm);
        }
    }

    fn boot(&mut self, at: MachineId, vm: VmId, permit: &RunPermit) {
        if !self.open_image(at, vm, (permit.generation(), true)) {
            // One that was left of a migration would have been replaced.
            self.machines[at].slots[vm].qemu = None;
            return self.hand_over(at, vm, Event::QemuDied, None);
        }
        let now = self.now;
        let guest = &mut self.guests[vm];
        guest.boots += 1;
        guest.died = false;
        guest.current = Version {
            boot: guest.boots,
            step: now,
        };
        let version = Some(guest.current);
        self.machines[at].slots[vm].qemu = Some(QemuProcess {
            version,
            running: true,
        });
        self.began_to_run(at, vm);
    }

    fn cont(&mut self, at: MachineId, vm: VmId, permit: &RunPermit) {
        if self.machines[at].slots[vm].qemu.is_none() {
            return;
        }
        if !self.open_image(at, vm, (permit.generation(), false)) {
            return self.hand_over(at, vm, Event::GuestHalted, None);
        }
        let current = self.guests[vm].current;
        let Some(qemu) = self.machines[at].slots[vm].qemu.as_mut() else {
            return;
        };
        let (version, was_running) = (qemu.version, qemu.running);
        qemu.running = true;
        let resolved = self.guests[vm].may_go_back_at.take() == Some(at);
        if let Some(version) = version.filter(|_| resolved) {
            self.guests[vm].current = version;
        } else if version != Some(current) && !was_running && !self.is_exempt(vm) {
            self.went_back(at, vm, version);
        }
        self.guests[vm].died = false;
        self.began_to_run(at, vm);
    }

    /// A guest goes on from another state than its last one.
    fn went_back(&mut self, at: MachineId, vm: VmId, version: Option<Version>) {
        let took = &self.guests[vm].held_by;
        let denied = took.iter().any(|host| self.machines[*host].is_old);
        if denied {
            return self.exempt(vm, Exempt::OldCopyDenied);
        }
        if self.guests[vm].ran_last_is_gone {
            return self.exempt(vm, Exempt::WentWithItsHost);
        }
        let what = format!(
            "{} runs {} at {version:?}, its last state was {:?}",
            self.label(at),
            self.vms[vm],
            self.guests[vm].current
        );
        self.violated(what);
    }

    fn kill_own_qemu(&mut self, at: MachineId, vm: VmId) {
        let version = self.version_at(at, vm);
        let Some(qemu) = self.machines[at].slots[vm].qemu.take() else {
            return;
        };
        let was_last = version.is_some() && version == Some(self.guests[vm].current);
        let copies = self
            .machines
            .iter()
            .filter_map(|m| m.slots[vm].qemu.as_ref());
        let has_copy = copies.filter_map(|q| q.version).any(|v| Some(v) == version);
        let process = self.process(at, vm);
        let may = process.is_some_and(|p| p.may_discard);
        if was_last && may {
            // A person has it ended: whoever else has a copy of its memory may discard that, too.
            self.guests[vm].died = true;
        }
        if was_last && !has_copy {
            if !may && !self.guests[vm].died && !self.is_exempt(vm) && !self.machines[at].is_old {
                let what = format!(
                    "{} destroys the last copy of {} (it was {})",
                    self.label(at),
                    self.vms[vm],
                    if qemu.running { "running" } else { "paused" }
                );
                self.violated(what);
            }
            self.guests[vm].died = true;
        }
    }

    pub(crate) fn local(&mut self, at: MachineId, vm: VmId, event: Event) {
        let frozen = self.machines[at].slots[vm].qemu_frozen_until;
        let delay = 1 + self.rng.below(6) + frozen.saturating_sub(self.now);
        let Some(process) = self.process(at, vm).map(|p| p.number) else {
            return;
        };
        let happening = Happening::Local {
            at,
            vm,
            process,
            event,
        };
        self.after(delay, happening);
    }

    pub(crate) fn local_event(&mut self, at: MachineId, vm: VmId, process: u64, event: Event) {
        if self.is_process(at, vm, process) {
            self.feed(at, vm, event);
        }
    }

    fn arm(&mut self, at: MachineId, vm: VmId, timer: Timer) {
        let (stamp, spread) = (self.next_number(), self.rng.below(100));
        let Some(process) = self.process(at, vm) else {
            return;
        };
        *armed(process, timer) = Some(stamp);
        let process = process.number;
        let delay = match timer {
            Timer::Switchover => SWITCHOVER_MS,
            Timer::Ask => ASK_MS,
        };
        let happening = Happening::Fires {
            at,
            vm,
            process,
            timer,
            stamp,
        };
        self.after(delay + spread, happening);
    }

    pub(crate) fn fires(&mut self, at: MachineId, vm: VmId, number: u64, timer: Timer, stamp: u64) {
        let Some(process) = self.process(at, vm).filter(|p| p.number == number) else {
            return;
        };
        let slot = armed(process, timer);
        if *slot == Some(stamp) {
            *slot = None;
            self.feed(at, vm, Event::Timeout(timer));
        }
    }

    /// The peer was heard: the silence begins anew.
    pub(crate) fn heard_peer(&mut self, at: MachineId, vm: VmId) {
        let process = self.process(at, vm);
        if process.is_some_and(|p| p.switchover.is_some()) {
            self.arm(at, vm, Timer::Switchover);
        }
    }
}

fn armed(process: &mut Process, timer: Timer) -> &mut Option<u64> {
    match timer {
        Timer::Switchover => &mut process.switchover,
        Timer::Ask => &mut process.ask,
    }
}
