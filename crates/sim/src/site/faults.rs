//! The faults of a whole site, and when they strike.
//!
//! Each seed allows its own subset, so that rare combinations are not drowned. Works on the site.

use super::model::{Backup, Cut, Happening, Machine, MachineId, Slot, VmId};
use super::world::Site;
use godwit_ownership::{Event, Power, StateName};

macro_rules! faults {
    ($($fault:ident => $often:literal, $name:literal),+ $(,)?) => {
        /// A kind of fault of a site.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum SiteFault {
            $(
                #[doc = $name]
                $fault
            ),+
        }

        impl SiteFault {
            pub const ALL: &'static [SiteFault] = &[$(SiteFault::$fault),+];

            /// Its name in the printed table.
            pub fn name(self) -> &'static str {
                match self { $(SiteFault::$fault => $name),+ }
            }

            /// In how many of a thousand seeds it may strike.
            pub(crate) fn often(self) -> u64 {
                match self { $(SiteFault::$fault => $often),+ }
            }
        }
    };
}

faults! {
    KillAgent => 500, "agent killed",
    KillProcess => 500, "VM process killed",
    KillQemu => 500, "QEMU killed",
    KillController => 500, "controller killed",
    StopAgent => 300, "agent stopped for a while",
    StopProcess => 300, "VM process stopped for a while",
    StopQemu => 300, "QEMU stopped for a while",
    StopController => 300, "controller stopped for a while",
    CutAgent => 300, "agent cut off alone",
    CutHost => 400, "host cut off from everybody",
    CutLink => 400, "two hosts cut off from each other",
    CutController => 400, "host cut off from the controller",
    SlowHost => 300, "host answers slowly",
    CrashHost => 500, "host crashed",
    PowerCut => 200, "power cut of the whole site",
    WipeRun => 300, "run directory wiped",
    GuestShutdown => 300, "guest shut down",
    GuestHalts => 300, "guest halted",
    DiskFull => 300, "disk full, or not any more",
    Cancel => 300, "migration cancelled",
    RestoreDatabase => 250, "controller's database restored from an old copy",
    SecondController => 150, "restored controller beside the old one",
    RestoreState => 250, "host's state directory restored from an old copy",
    RestoreUnderGuests => 200, "host's state directory put back under its guests",
    RestoreHost => 200, "whole host restored from an old copy",
    RestoreImage => 250, "VM's image put back from an old copy",
    LoseImage => 250, "VM's image lost on its host",
    ImageUnread => 300, "image's record could not be read",
    ImageUnwritten => 300, "image's record could not be written, or nobody knows",
    RemoveFails => 300, "image could not be removed",
    LoseHost => 200, "host lost for good",
    CloneHost => 150, "host's disk cloned to a second machine",
    Liar => 120, "a host lies",
    LoseMessage => 400, "message lost",
    DoubleMessage => 400, "message doubled",
    DelayMessage => 400, "message delayed",
    WriteFails => 400, "journal write failed, old record kept",
    WriteUnknown => 400, "journal write failed, outcome unknown",
    TableFails => 400, "table could not be written",
    CommitFails => 400, "commit failed",
    CommitUnknown => 400, "commit failed, outcome unknown",
    Enrol => 600, "host enrolled later",
    Remove => 350, "host removed",
    Fence => 400, "host said to be off",
    FalseWord => 80, "host falsely said to be off",
    BootAlone => 300, "host let boot alone",
    Resolve => 400, "VM resolved",
    PowerOn => 1000, "dismissed host powered on again with its disk",
}

/// Faults that strike something at a moment; people and messages have the others.
const STRIKES: &[SiteFault] = &[
    SiteFault::KillAgent,
    SiteFault::KillAgent,
    SiteFault::KillProcess,
    SiteFault::KillProcess,
    SiteFault::KillQemu,
    SiteFault::KillController,
    SiteFault::StopAgent,
    SiteFault::StopProcess,
    SiteFault::StopQemu,
    SiteFault::StopController,
    SiteFault::CutAgent,
    SiteFault::CutHost,
    SiteFault::CutLink,
    SiteFault::CutController,
    SiteFault::SlowHost,
    SiteFault::CrashHost,
    SiteFault::CrashHost,
    SiteFault::PowerCut,
    SiteFault::WipeRun,
    SiteFault::GuestShutdown,
    SiteFault::GuestHalts,
    SiteFault::DiskFull,
    SiteFault::Cancel,
    SiteFault::RestoreDatabase,
    SiteFault::SecondController,
    SiteFault::RestoreState,
    SiteFault::RestoreUnderGuests,
    SiteFault::RestoreHost,
    SiteFault::RestoreImage,
    SiteFault::RestoreImage,
    SiteFault::LoseImage,
    SiteFault::LoseHost,
    SiteFault::CloneHost,
    SiteFault::Liar,
];

/// Those that take a disk from the host from which a copy came, where that may be the last one.
const AT_SOURCES: &[SiteFault] = &[
    SiteFault::CrashHost,
    SiteFault::RestoreImage,
    SiteFault::RestoreImage,
    SiteFault::LoseImage,
    SiteFault::LoseHost,
];

impl Site {
    pub(crate) fn draw_swarm(&mut self) {
        for fault in SiteFault::ALL {
            if self.rng.chance(fault.often()) {
                self.swarm.insert(*fault);
            }
        }
    }

    pub(crate) fn allows(&self, fault: SiteFault) -> bool {
        self.is_faulty && self.swarm.contains(&fault)
    }

    /// Whether a fault of messages or writes strikes now.
    pub(crate) fn strikes(&mut self, fault: SiteFault, in_thousand: u64) -> bool {
        let hit = self.allows(fault) && self.rng.chance(in_thousand);
        if hit {
            self.count(fault);
        }
        hit
    }

    /// Counts a fault, with what the VMs were in when it struck.
    pub(crate) fn count(&mut self, fault: SiteFault) {
        *self.coverage.faults.entry(fault).or_default() += 1;
        for machine in &self.machines {
            let cores = machine.slots.iter().filter_map(|s| s.process.as_ref());
            for process in cores {
                let state = process.core.state_name();
                *self.coverage.struck.entry((state, fault)).or_default() += 1;
            }
        }
    }

    pub(crate) fn perhaps_strike(&mut self) {
        if !self.is_faulty || !self.rng.chance(24) {
            return;
        }
        let source = self.source_of_copy();
        if source.is_none() && !self.is_handing_over() && !self.rng.chance(500) {
            return;
        }
        let source = source.filter(|_| self.rng.chance(500));
        let all = match source {
            Some(_) => AT_SOURCES,
            None => STRIKES,
        };
        let fault = all[self.rng.index(all.len())];
        if self.allows(fault) && self.strike(fault, source) {
            self.note(|_| format!("fault: {}", fault.name()));
            self.count(fault);
        }
    }

    fn is_handing_over(&self) -> bool {
        let slots = self.machines.iter().flat_map(|m| &m.slots);
        let mut cores = slots.filter_map(|s| s.process.as_ref());
        let mut moving = self.machines.iter().flat_map(|m| &m.slots);
        moving.any(|slot| slot.own.going.is_some())
            || cores.any(|p| {
                matches!(
                    p.core.state_name(),
                    StateName::Stopping
                        | StateName::LastPages
                        | StateName::Devices
                        | StateName::AwaitingReady
                        | StateName::Gave
                        | StateName::InDoubt
                        | StateName::Ready
                        | StateName::ReadyInDoubt
                )
            })
    }

    fn strike(&mut self, fault: SiteFault, source: Option<(MachineId, VmId)>) -> bool {
        let at = self.rng.index(self.machines.len());
        let vm = self.rng.index(self.vms.len());
        let (at, vm) = source.unwrap_or_else(|| self.fitting(fault, at, vm));
        let until = self.now + 200 + self.rng.below(6000);
        match fault {
            SiteFault::KillAgent => self.kill_agent(at),
            SiteFault::KillProcess => self.machines[at].slots[vm].process.take().is_some(),
            SiteFault::KillQemu => self.kill_qemu(at, vm),
            SiteFault::KillController => self.kill_controller(),
            SiteFault::StopAgent => {
                self.machines[at].agent_frozen_until = until;
                self.machines[at].agent.is_some()
            }
            SiteFault::StopProcess => match self.process(at, vm) {
                Some(process) => {
                    process.frozen_until = until;
                    true
                }
                None => false,
            },
            SiteFault::StopQemu => {
                self.machines[at].slots[vm].qemu_frozen_until = until;
                self.machines[at].slots[vm].qemu.is_some()
            }
            SiteFault::StopController => {
                let controller = self.rng.index(self.controllers.len());
                self.controllers[controller].frozen_until = until;
                self.controllers[controller].is_up
            }
            SiteFault::CutAgent => {
                self.machines[at].agent_cut_until = until;
                true
            }
            SiteFault::SlowHost => {
                self.machines[at].slow_until = until;
                true
            }
            SiteFault::CutHost | SiteFault::CutLink | SiteFault::CutController => {
                self.cut(fault, at)
            }
            SiteFault::CrashHost => self.crash_for_a_while(at),
            SiteFault::PowerCut => self.power_cut(),
            SiteFault::WipeRun => self.wipe_run(at),
            SiteFault::GuestShutdown => self.guest_does(at, vm, Event::GuestShutdown),
            SiteFault::GuestHalts => self.guest_does(at, vm, Event::GuestHalted),
            SiteFault::DiskFull => self.room_changes(at, vm),
            SiteFault::Cancel => {
                self.feed(at, vm, Event::Cancel);
                self.machines[at].slots[vm].process.is_some()
            }
            SiteFault::RestoreDatabase => self.restore_database(),
            SiteFault::SecondController => self.second_controller(),
            SiteFault::RestoreState => self.restore_machine(at, false),
            SiteFault::RestoreUnderGuests => self.restore_under_guests(at),
            SiteFault::RestoreHost => self.restore_machine(at, true),
            SiteFault::RestoreImage => {
                let is_put_back = source.is_some() && self.put_back_image(at, vm);
                is_put_back || (0..self.vms.len()).any(|vm| self.restore_image(vm))
            }
            SiteFault::LoseImage => self.lose_image(at, vm),
            SiteFault::LoseHost => self.lose_machine(at),
            SiteFault::CloneHost => self.clone_machine(at),
            SiteFault::Liar => self.begin_to_lie(at),
            _ => false,
        }
    }

    /// Faults of a QEMU and its guest strike where there is one.
    fn fitting(&mut self, fault: SiteFault, at: MachineId, vm: VmId) -> (MachineId, VmId) {
        if let Some(found) = self.any_disk_move().filter(|_| self.rng.chance(500)) {
            return found;
        }
        let needs_guest = matches!(
            fault,
            SiteFault::KillQemu
                | SiteFault::StopQemu
                | SiteFault::StopProcess
                | SiteFault::GuestShutdown
                | SiteFault::GuestHalts
                | SiteFault::DiskFull
                | SiteFault::Cancel
        );
        let mut machines = 0..self.machines.len();
        let found = machines.find(|m| self.machines[*m].slots[vm].qemu.is_some());
        (found.filter(|_| needs_guest).unwrap_or(at), vm)
    }

    pub(crate) fn kill_agent(&mut self, at: MachineId) -> bool {
        if self.machines[at].agent.take().is_none() {
            return false;
        }
        // What the agent itself drove goes with it; a VM process with a QEMU lives on.
        for slot in &mut self.machines[at].slots {
            if slot.qemu.is_none() {
                slot.process = None;
            }
        }
        let delay = 10 + self.rng.below(1500);
        self.after(delay, Happening::AgentStarts { at });
        true
    }

    fn kill_qemu(&mut self, at: MachineId, vm: usize) -> bool {
        if self.machines[at].slots[vm].qemu.is_none() {
            return false;
        }
        self.lose_qemu(at, vm);
        self.feed(at, vm, Event::QemuDied);
        true
    }

    /// A QEMU is gone by a fault; if it had the guest's newest state, the guest has died.
    fn lose_qemu(&mut self, at: MachineId, vm: usize) {
        let version = self.version_at(at, vm);
        self.machines[at].slots[vm].qemu = None;
        if version == Some(self.guests[vm].current) {
            self.guests[vm].died = true;
        }
    }

    fn kill_controller(&mut self) -> bool {
        let controller = self.rng.index(self.controllers.len());
        let of = &mut self.controllers[controller];
        if !of.is_up {
            return false;
        }
        of.is_up = false;
        for guest in &mut self.guests {
            guest.is_changing = false;
        }
        let delay = 100 + self.rng.below(5000);
        self.after(delay, Happening::ControllerStarts { controller });
        true
    }

    fn cut(&mut self, fault: SiteFault, at: MachineId) -> bool {
        let other = self.rng.index(self.machines.len());
        let mut cuts = Vec::new();
        let machines = 0..self.machines.len();
        match fault {
            SiteFault::CutLink if other != at => {
                cuts.push(Cut::Machines(at.min(other), at.max(other)));
            }
            SiteFault::CutHost => {
                let others = machines.filter(|other| *other != at);
                cuts.extend(others.map(|o| Cut::Machines(at.min(o), at.max(o))));
                cuts.extend((0..self.controllers.len()).map(|c| Cut::Controller(c, at)));
            }
            SiteFault::CutController => {
                cuts.extend((0..self.controllers.len()).map(|c| Cut::Controller(c, at)));
            }
            _ => return false,
        }
        let delay = 200 + self.rng.below(9000);
        for what in cuts {
            if self.cuts.insert(what) {
                self.after(delay, Happening::Heal { what });
            }
        }
        if self.rng.chance(500) {
            for vm in 0..self.vms.len() {
                self.feed(at, vm, Event::LinkLost);
            }
        }
        true
    }

    pub(crate) fn crash_for_a_while(&mut self, at: MachineId) -> bool {
        if !self.crash(at) {
            return false;
        }
        let delay = 100 + self.rng.below(6000);
        self.after(delay, Happening::MachineStarts { at });
        true
    }

    /// Power off: all that was not durable may or may not be.
    pub(crate) fn crash(&mut self, at: MachineId) -> bool {
        if !self.machines[at].is_up {
            return false;
        }
        self.note(|w| format!("{}: machine off", w.label(at)));
        let reached_disk = self.rng.chance(500);
        for vm in 0..self.vms.len() {
            self.lose_qemu(at, vm);
            self.disk_loses_power(at, vm);
            self.image_loses_power(at, vm);
            let slot = &mut self.machines[at].slots[vm];
            slot.process = None;
            slot.qemu_frozen_until = 0;
            let journal = &mut slot.journal;
            if reached_disk {
                journal.durable.clone_from(&journal.seen);
            } else {
                journal.seen.clone_from(&journal.durable);
            }
        }
        let machine = &mut self.machines[at];
        machine.is_up = false;
        machine.agent = None;
        machine.reports.clear();
        true
    }

    fn power_cut(&mut self) -> bool {
        for at in 0..self.machines.len() {
            self.crash_for_a_while(at);
        }
        for controller in 0..self.controllers.len() {
            self.controllers[controller].is_up = false;
            let delay = 100 + self.rng.below(9000);
            self.after(delay, Happening::ControllerStarts { controller });
        }
        true
    }

    fn wipe_run(&mut self, at: MachineId) -> bool {
        // Not both directories at once: nothing would tell of what a guest has.
        self.keep_again(at);
        for slot in &mut self.machines[at].slots {
            slot.process = None;
            slot.own.living = None;
        }
        self.kill_agent(at)
    }

    fn guest_does(&mut self, at: MachineId, vm: usize, event: Event) -> bool {
        self.version_at(at, vm);
        let slot = &mut self.machines[at].slots[vm];
        let Some(qemu) = slot.qemu.as_mut() else {
            return false;
        };
        if !qemu.running || slot.process.is_none() {
            return false;
        }
        qemu.running = false;
        if event == Event::GuestShutdown {
            self.guests[vm].died = true;
        }
        self.guests[vm].is_on = false;
        self.feed(at, vm, event);
        true
    }

    /// A guest's disk is full, or it waited for room and there is some.
    fn room_changes(&mut self, at: MachineId, vm: usize) -> bool {
        let Some(process) = self.process(at, vm) else {
            return false;
        };
        let event = match process.core.record().power() {
            Some(Power::WaitsForRoom) => Event::ResumeRequested,
            _ => Event::OutOfRoom,
        };
        self.feed(at, vm, event);
        true
    }

    fn put_back(&mut self, at: MachineId, backup: Backup) {
        let machine = &mut self.machines[at];
        for (slot, record) in machine.slots.iter_mut().zip(backup.records) {
            slot.journal.seen.clone_from(&record);
            slot.journal.durable = record;
        }
        for (slot, known) in machine.slots.iter_mut().zip(backup.known) {
            slot.known = known;
        }
        for (slot, notes) in machine.slots.iter_mut().zip(backup.notes) {
            let serves = slot.process.is_some() && slot.qemu.is_some();
            if !serves {
                slot.own.notes.clone_from(&notes);
            }
            slot.own.kept = notes;
            slot.own.unsure = None;
        }
        for (slot, (went_on, note)) in machine.slots.iter_mut().zip(backup.moves) {
            slot.own.went_on = went_on;
            slot.own.note = note;
        }
        for (slot, described) in machine.slots.iter_mut().zip(backup.described) {
            slot.own.described = described;
        }
        machine.table = backup.table;
        machine.counter = backup.counter;
        machine.is_old = true;
    }

    /// A host is off, its state directory is put back, it starts again.
    fn restore_machine(&mut self, at: MachineId, whole: bool) -> bool {
        let Some(backup) = self.machines[at].backup.clone() else {
            return false;
        };
        if self.machines[at].is_clone {
            return false;
        }
        self.crash(at);
        if whole {
            self.machines[at].boots = 0;
            self.losing(at, |w| w.put_files_back(at, backup.files.clone()));
        }
        self.put_back(at, backup);
        self.lost_records(at);
        let delay = 100 + self.rng.below(3000);
        self.after(delay, Happening::MachineStarts { at });
        true
    }

    /// The state directory is put back while guests run, and the agent begins anew. A VM process that lives writes its
    /// record again; the other records are old ones.
    fn restore_under_guests(&mut self, at: MachineId) -> bool {
        let machine = &self.machines[at];
        let Some(backup) = machine.backup.clone() else {
            return false;
        };
        let lives = |slot: &Slot| slot.qemu.is_some() && slot.process.is_some();
        let alone = |slot: &Slot| slot.qemu.is_some() && slot.process.is_none();
        let fits = machine.slots.iter().any(lives) && !machine.slots.iter().any(alone);
        if machine.is_clone || !fits || !self.kill_agent(at) {
            return false;
        }
        self.put_back(at, backup);
        // What is written of disks is written again once the agent asks for it.
        for slot in &mut self.machines[at].slots {
            if let Some(process) = &slot.process {
                let record = Some(process.core.record().clone());
                slot.journal.seen.clone_from(&record);
                slot.journal.durable = record;
            }
        }
        if self.rng.chance(500) {
            // Their processes die before the agent comes.
            for slot in &mut self.machines[at].slots {
                slot.process = None;
            }
        }
        self.lost_records(at);
        true
    }

    /// Records of that machine are gone: VMs that it may have held may be nowhere.
    pub(crate) fn lost_records(&mut self, at: MachineId) {
        for guest in &mut self.guests {
            guest.may_be_lost |= guest.held_by.contains(&at);
        }
    }

    /// A second machine starts with a copy of this one's disk, as it is or as it was.
    fn clone_machine(&mut self, at: MachineId) -> bool {
        let has_clone = self.machines.iter().any(|m| m.is_clone);
        if has_clone || self.machines[at].counter == 0 {
            return false;
        }
        if self.rng.chance(600) || self.machines[at].backup.is_none() {
            self.back_up(at);
        }
        let Some(backup) = self.machines[at].backup.clone() else {
            return false;
        };
        let name = self.machines[at].name;
        let clone = self.machines.len();
        self.machines.push(Machine::new(name, self.vms.len()));
        self.put_files_back(clone, backup.files.clone());
        self.put_back(clone, backup);
        self.machines[clone].is_clone = true;
        for guest in &mut self.guests {
            if guest.held_by.contains(&at) {
                guest.held_by.insert(clone);
            }
        }
        let delay = 10 + self.rng.below(2000);
        self.after(delay, Happening::MachineStarts { at: clone });
        true
    }
}
