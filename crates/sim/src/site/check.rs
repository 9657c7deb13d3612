//! The invariants of a site: when something begins to run, once a second, and at the end.
//!
//! Uses nothing of the code under test but what it shows to people and what is on the disks.

use super::controller::Controller;
use super::model::{Exempt, Ground, Happening, MachineId, VmId};
use super::world::Site;
use godwit_ownership::HostRecord;
use godwit_types::HostName;
use godwit_types::site::SiteVm;

impl Site {
    /// A guest begins to run at a machine.
    pub(crate) fn began_to_run(&mut self, at: MachineId, vm: VmId) {
        self.mix(0xb007 + (at * 64 + vm) as u64);
        self.guests[vm].ran_last = Some(at);
        self.guests[vm].ran_last_is_gone = false;
        if self.guests[vm].deleted && !self.is_exempt(vm) {
            self.two_or_ghost(at, at, vm, "runs after it was deleted");
        }
        let others = 0..self.machines.len();
        let running: Vec<_> = others
            .filter(|m| *m != at && self.runs_at(*m, vm))
            .collect();
        for other in running {
            if !self.is_exempt(vm) {
                let what = format!("runs at {}, too", self.label(other));
                self.two_or_ghost(at, other, vm, &what);
            }
        }
    }

    pub(crate) fn runs_at(&self, at: MachineId, vm: VmId) -> bool {
        let qemu = self.machines[at].slots[vm].qemu.as_ref();
        qemu.is_some_and(|q| q.running)
    }

    fn two_or_ghost(&mut self, at: MachineId, other: MachineId, vm: VmId, what: &str) {
        let why = [at, other]
            .into_iter()
            .find_map(|machine| self.exemption(machine, vm));
        match why {
            Some(why) => self.exempt(vm, why),
            None => {
                let what = format!(
                    "{} runs at {} and {what} (booted on {:?} and {:?}, named at {})",
                    self.vms[vm],
                    self.label(at),
                    self.machines[at].booted.get(&vm),
                    self.machines[other].booted.get(&vm),
                    self.guests[vm].named,
                );
                self.violated(what);
            }
        }
    }

    /// Which of the documented exceptions let a machine run a VM.
    pub(super) fn exemption(&self, at: MachineId, vm: VmId) -> Option<Exempt> {
        let (machine, guest) = (&self.machines[at], &self.guests[vm]);
        if guest.named_by_old {
            return Some(Exempt::Forgotten);
        }
        if guest.deleted && self.has_forgotten_deletion(vm) {
            return Some(Exempt::Forgotten);
        }
        let ground: &Ground = machine.booted.get(&vm)?;
        if ground.by_controller {
            return machine.heard_old_controller.then_some(Exempt::Forgotten);
        }
        if !ground.is_missed_by_all(guest.named) {
            return None;
        }
        match (machine.is_old, machine.was_dismissed) {
            (true, _) => Some(Exempt::OldCopyAndNeighbours),
            (false, true) => Some(Exempt::DismissedAndNeighbours),
            (false, false) => None,
        }
    }

    /// Whether a database was restored since the VM was deleted, before any host had heard of that.
    fn has_forgotten_deletion(&self, vm: VmId) -> bool {
        let knows = |row: Option<&SiteVm>| row.is_some_and(|row| row.deleted);
        let mut tables = self.machines.iter().map(|machine| &machine.table);
        let mut controllers = self.controllers.iter();
        let database = controllers.any(|controller| {
            let entry = controller.db.entries.get(&self.vms[vm]);
            // One that was stopped for good tells nobody, and of two copies the later one does not hear of it.
            let tells = !controller.stays_off && !self.is_outdone(controller);
            tells && entry.is_some_and(|entry| entry.deleted)
        });
        !database && !tables.any(|table| knows(table.vms.get(&self.vms[vm])))
    }

    /// Whether another controller that works on a copy of the database has a later epoch: no host hears this one.
    fn is_outdone(&self, controller: &Controller) -> bool {
        let epoch = |controller: &Controller| controller.db.stamp.epoch;
        let mut others = self.controllers.iter();
        others.any(|other| epoch(other) > epoch(controller))
    }

    /// Once a second: alarms that are due, and VMs that nobody holds any more.
    pub(crate) fn look(&mut self) {
        self.after(1000, Happening::Look);
        self.guests_work();
        self.clean_again();
        if self.is_faulty && self.rng.chance(250) {
            let at = self.rng.index(self.machines.len());
            self.back_up(at);
        }
        if self.is_faulty && self.rng.chance(250) {
            let vm = self.rng.index(self.vms.len());
            self.back_up_image(vm);
        }
        let overdue = self.alarms_due.iter().find(|(at, _)| *at < self.now);
        if let Some((_, name)) = overdue {
            let what = format!(
                "host {} was falsely said to be off, was heard, and no alarm shows",
                self.names[*name]
            );
            self.violated(what);
        }
        for vm in 0..self.vms.len() {
            let guest = &self.guests[vm];
            let is_busy = self.controllers.iter().any(|c| c.is_busy(vm));
            let judged = guest.is_on && !guest.is_changing && !guest.may_be_lost && !is_busy;
            if !judged || self.is_exempt(vm) || self.is_on_record(vm) {
                continue;
            }
            if self.is_claimed_by_a_liar(vm) {
                // Also once the liar is gone, and the move with it.
                self.guests[vm].is_on = false;
            } else {
                let what = format!("nobody holds {} any more, which was started", self.vms[vm]);
                self.violated(what);
            }
        }
    }

    /// Whether a host that lies, or did, takes part in a move of the VM: where it says that it took it, the source's record gives
    /// way. A person starts the VM anew then.
    fn is_claimed_by_a_liar(&self, vm: VmId) -> bool {
        let lies = |host: &HostName| {
            let at = self.id_of(host).map(|name| self.address[name]);
            at.is_some_and(|at| self.machines[at].lies || self.machines[at].has_lied)
        };
        self.controllers.iter().any(|controller| {
            let entry = controller.db.entries.get(&self.vms[vm]);
            let mut permitted = entry.iter().flat_map(|entry| &entry.granted);
            permitted.any(|one| one.from.is_some() && lies(&one.to))
        })
    }

    /// Whether a journal anywhere says that its host may hold the VM.
    fn is_on_record(&self, vm: VmId) -> bool {
        let journals = self.machines.iter().map(|m| &m.slots[vm].journal);
        let mut records = journals.flat_map(|j| j.seen.iter().chain(&j.durable));
        records.any(HostRecord::may_hold)
    }

    /// After everything has healed: each VM that exists runs exactly once, no other one runs.
    pub(crate) fn settled(&self) -> Result<(), String> {
        for vm in 0..self.vms.len() {
            if self.is_exempt(vm) {
                continue;
            }
            let machines = 0..self.machines.len();
            let hosts: Vec<_> = machines.filter(|m| self.runs_at(*m, vm)).collect();
            let running = hosts.len();
            let guest = &self.guests[vm];
            let wanted = if guest.exists { 1 } else { running.min(1) };
            let is_documented = matches!(hosts[..], [at] if self.exemption(at, vm).is_some());
            if running != wanted || guest.deleted && running > 0 && !is_documented {
                return Err(format!(
                    "healed, but {} runs {running} times: {}",
                    self.vms[vm],
                    self.shown(vm)
                ));
            }
            if let Some(at) = hosts.into_iter().find(|at| self.keeps_half_made(*at, vm)) {
                let (host, name) = (self.label(at), &self.vms[vm]);
                return Err(format!(
                    "healed, but half an image of {name} stays at {host}"
                ));
            }
        }
        Ok(())
    }

    /// What people are shown of a VM.
    fn shown(&self, vm: VmId) -> String {
        let machines = self.machines.iter().enumerate();
        let states: Vec<String> = machines
            .map(|(at, machine)| {
                let slot = &machine.slots[vm];
                let status = slot.process.as_ref().map(|p| p.core.status());
                let agent = machine.agent.as_ref();
                let judged = agent.and_then(|a| a.judged.get(&vm));
                let phase = slot.journal.seen.as_ref().map(|r| &r.phase);
                format!("{}: {phase:?} {status:?} {judged:?}", self.label(at))
            })
            .collect();
        let views = self.controllers.iter().filter(|c| c.is_up);
        let views: Vec<String> = views
            .map(|c| format!("{:?}", c.book.whereabouts(&self.vms[vm])))
            .collect();
        format!("{}; controllers: {}", states.join("; "), views.join("; "))
    }
}
