//! People: they start, move and delete VMs at the worst moments, say that hosts are off, and do what they are shown.
//!
//! Works on the site. Their word is true (they look first), but for the seeds in which it may be false.

use super::controller::Change;
use super::faults::SiteFault;
use super::jobs::Kind;
use super::model::{Exempt, Happening, Machine, MachineId, NameId, VmId};
use super::world::Site;
use godwit_ownership::{Event, HostRecord, StateName, Status};
use godwit_site::{HostRow, Judged, Whereabouts};
use godwit_types::HostName;
use godwit_types::site::{Claim, Standing};

impl Site {
    pub(crate) fn people_act(&mut self) {
        if !self.is_faulty {
            return;
        }
        let delay = 150 + self.rng.below(500);
        self.after(delay, Happening::PeopleAct);
        let controller = self.rng.index(self.controllers.len());
        if self.rng.chance(100) {
            return self.let_boot_alone();
        }
        if !self.controllers[controller].is_up {
            return;
        }
        let vm = self.rng.index(self.vms.len());
        let name = self.rng.index(self.names.len());
        if self.goes_along(vm) && self.rng.chance(400) {
            return self.ask_for(controller, vm, Kind::MoveDisk);
        }
        match self.rng.below(100) {
            0..30 => {
                // Again and again to one host.
                let found = self.host_with_copy(vm).filter(|_| self.rng.chance(400));
                let to = found.unwrap_or(name);
                self.ask_for(controller, vm, Kind::Move { to });
            }
            30..48 => {
                let on = self.rng.chance(600).then_some(name);
                self.ask_for(controller, vm, Kind::Start { on });
            }
            48..54 => self.ask_for(controller, vm, Kind::Stop),
            54..57 => self.ask_for(controller, vm, Kind::Pause),
            57..63 => self.ask_for(controller, vm, Kind::Delete),
            63..70 => self.ask_for(controller, vm, Kind::Create { on: name }),
            70..80 => self.say_off(controller, name),
            80..85 => self.remove_host(controller, name),
            85..88 => self.enrol_later(controller, name),
            88..92 => self.let_boot_alone(),
            92..96 => self.resolve_doubt(),
            _ => self.resolve_twice(controller),
        }
    }

    fn ask_for(&mut self, controller: usize, vm: VmId, kind: Kind) {
        let exists = self.controllers[controller].db.exists.contains(&vm);
        let fits = match kind {
            Kind::Create { .. } => !exists && !self.guests[vm].exists,
            Kind::Delete => exists && !self.guests[vm].is_on,
            _ => exists,
        };
        if fits {
            self.begin(controller, vm, kind);
        }
    }

    /// The machines that have a host's name.
    fn machines_of(&self, name: NameId) -> Vec<MachineId> {
        let machines = self.machines.iter().enumerate();
        let named = machines.filter(|(_, m)| m.name == name);
        named.map(|(at, _)| at).collect()
    }

    /// A person powers a host off and says so, or says so falsely.
    fn say_off(&mut self, controller: usize, name: NameId) {
        let host = self.names[name].clone();
        let machines = self.machines_of(name);
        let is_off = machines.iter().all(|at| !self.machines[*at].is_up);
        let answers = self.controllers[controller].book.answers(&host);
        if is_off && self.allows(SiteFault::Fence) {
            if !answers && self.fence(controller, &host) {
                self.count(SiteFault::Fence);
                self.dismiss(&machines);
            }
        } else if !answers && self.allows(SiteFault::FalseWord) {
            if self.fence(controller, &host) {
                self.count(SiteFault::FalseWord);
                let address = self.address[name];
                self.machines[address].falsely_fenced = true;
                self.word_was_false(&machines);
                self.dismiss(&machines);
            }
        } else if self.allows(SiteFault::Fence) && self.rng.chance(300) {
            // The power goes first, the word follows at another time.
            for at in machines {
                if self.crash(at) {
                    let delay = 3000 + self.rng.below(9000);
                    self.after(delay, Happening::MachineStarts { at });
                    self.count(SiteFault::PowerOn);
                }
            }
        }
    }

    fn fence(&mut self, controller: usize, host: &HostName) -> bool {
        let Ok(()) = self.controllers[controller].book.fence(host) else {
            return false;
        };
        self.note(|_| format!("person: host {host} is off"));
        let written = self.commit(controller, &[]);
        if !written {
            self.controllers[controller].book.not_fenced(host);
        }
        written
    }

    fn dismiss(&mut self, machines: &[MachineId]) {
        for at in machines {
            self.machines[*at].was_dismissed = true;
            self.lost_records(*at);
        }
    }

    fn word_was_false(&mut self, machines: &[MachineId]) {
        for vm in 0..self.vms.len() {
            let held = &self.guests[vm].held_by;
            if machines.iter().any(|at| held.contains(at)) {
                self.exempt(vm, Exempt::FalseWord);
            }
        }
    }

    /// A host that is off, or holds nothing, is taken out of the site; its machine may be powered on again.
    fn remove_host(&mut self, controller: usize, name: NameId) {
        let host = self.names[name].clone();
        let machines = self.machines_of(name);
        let is_off = machines.iter().all(|at| !self.machines[*at].is_up);
        if !self.allows(SiteFault::Remove) || self.controllers[controller].db.hosts.len() < 3 {
            return;
        }
        let answers = self.controllers[controller].book.answers(&host);
        if (is_off || answers) && self.take_out(controller, &host, is_off) {
            self.count(SiteFault::Remove);
            self.dismiss(&machines);
        }
    }

    fn take_out(&mut self, controller: usize, host: &HostName, confirmed: bool) -> bool {
        match self.controllers[controller].book.remove(host, confirmed) {
            Ok(removal) => {
                self.note(|_| format!("person: host {host} is removed"));
                let written = self.commit(controller, &[Change::Removed(host.clone())]);
                if !written {
                    self.controllers[controller].book.not_removed(removal);
                }
                written
            }
            Err(refusal) => {
                self.coverage.refusal(&refusal);
                false
            }
        }
    }

    fn enrol_later(&mut self, controller: usize, name: NameId) {
        let host = self.names[name].clone();
        let db = &self.controllers[controller].db;
        if self.allows(SiteFault::Enrol)
            && !db.hosts.contains_key(&host)
            && self.join_anew(controller, name)
        {
            self.count(SiteFault::Enrol);
        }
    }

    /// As the controller refuses it: a new host under an old name would answer for what the old one had.
    fn is_waited_for(&self, controller: usize, name: NameId) -> bool {
        let (book, host) = (&self.controllers[controller].book, &self.names[name]);
        self.vms.iter().any(|vm| {
            let waits = |claim: &Claim| match claim {
                Claim::Gave { to, .. } => to == host,
                Claim::Promised { from, .. } => from == host,
                _ => false,
            };
            book.claims(vm).values().any(waits) || book.may_wait_for(vm, host).is_some()
        })
    }

    /// A machine with an empty disk joins, under a name that may have been used before.
    pub(crate) fn join_anew(&mut self, controller: usize, name: NameId) -> bool {
        let of = &self.controllers[controller];
        if !of.is_up || !of.book.is_in_charge() || self.is_waited_for(controller, name) {
            return false;
        }
        for at in self.machines_of(name) {
            self.crash(at);
            self.lost_records(at);
            let (boots, held_off) = (self.machines[at].boots, self.machines[at].is_clone);
            let is_old = self.machines[at].is_old;
            let fresh = Machine::new(name, self.vms.len());
            let joins = Machine {
                boots,
                is_clone: held_off,
                is_old,
                stays_off: held_off,
                ..fresh
            };
            self.join_with_files(at, joins);
            self.after(5, Happening::MachineStarts { at });
        }
        let host = self.names[name].clone();
        let site = super::controller::site_host(&host, &HostRow::default());
        let of = &mut self.controllers[controller];
        of.book.add_host(site, HostRow::default());
        self.note(|_| format!("person: host {host} joins"));
        self.commit(controller, &[])
    }

    /// A person lets a host boot what it holds: when no other host does, or (a false word) not knowing that.
    fn let_boot_alone(&mut self) {
        let waits = |judged: &Judged| matches!(judged, Judged::Wait(_));
        let mut machines = self.address.iter().copied();
        let waiting = machines.find(|at| {
            let agent = self.machines[*at].agent.as_ref();
            agent.is_some_and(|agent| agent.judged.values().any(waits))
        });
        let Some(at) = waiting else {
            return;
        };
        let Some(agent) = self.machines[at].agent.as_ref() else {
            return;
        };
        if !self.allows(SiteFault::BootAlone) || agent.site.is_alone() {
            return;
        }
        let vms: Vec<VmId> = (0..self.vms.len())
            .filter(|vm| self.holds(at, *vm))
            // Who took this host out of the site, or said that it is off, contradicts himself.
            // So does who deleted the VM.
            .filter(|vm| {
                let contradicts = self.machines[at].was_dismissed || self.guests[*vm].deleted;
                contradicts || self.held_elsewhere(at, *vm)
            })
            .collect();
        if !vms.is_empty() && !self.allows(SiteFault::FalseWord) {
            return;
        }
        for vm in vms {
            self.exempt(vm, Exempt::FalseWord);
        }
        self.note(|w| format!("person: {} boots alone", w.label(at)));
        if let Some(agent) = self.machines[at].agent.as_mut() {
            agent.site.boot_alone();
        }
        self.count(SiteFault::BootAlone);
    }

    fn holds(&self, at: MachineId, vm: VmId) -> bool {
        let journal = &self.machines[at].slots[vm].journal;
        let mut records = journal.seen.iter().chain(&journal.durable);
        records.any(HostRecord::may_hold)
    }

    fn held_elsewhere(&self, at: MachineId, vm: VmId) -> bool {
        let others = 0..self.machines.len();
        let mut others = others.filter(|other| *other != at);
        others.any(|other| self.holds(other, vm))
    }

    /// A VM is in doubt: the other host is powered off, then the command that is shown is given.
    fn resolve_doubt(&mut self) {
        if !self.allows(SiteFault::Resolve) {
            return;
        }
        // At a host that was taken out of the site nobody decides anything who remembers that.
        let lies = self.allows(SiteFault::FalseWord);
        // Nor is a VM run on by who deleted it.
        let found =
            self.find_doubt(|w, at, vm, _| lies || !w.was_removed(at) && !w.guests[vm].deleted);
        let Some((at, vm, peer)) = found else {
            return;
        };
        if self.was_removed(at) || self.guests[vm].deleted {
            self.exempt(vm, Exempt::FalseWord);
        }
        if self.resolve_at(at, vm, &peer) {
            self.count(SiteFault::Resolve);
        }
    }

    fn was_removed(&self, at: MachineId) -> bool {
        let host = self.name_of(at);
        let mut controllers = self.controllers.iter();
        controllers.any(|controller| controller.db.removed.contains(&host))
    }

    fn find_doubt(
        &self,
        fits: impl Fn(&Self, MachineId, VmId, &HostName) -> bool,
    ) -> Option<(MachineId, VmId, HostName)> {
        // People reach a host under its address only.
        let reached = self.address.iter().map(|at| (*at, &self.machines[*at]));
        for (at, machine) in reached {
            for (vm, slot) in machine.slots.iter().enumerate() {
                let status = slot.process.as_ref().map(|p| p.core.status());
                if let Some(Status::InDoubt { peer, .. }) = status
                    && fits(self, at, vm, &peer)
                {
                    return Some((at, vm, peer));
                }
            }
        }
        None
    }

    fn resolve_at(&mut self, at: MachineId, vm: VmId, peer: &HostName) -> bool {
        let Some(name) = self.id_of(peer) else {
            return false;
        };
        let Some(state) = self.process(at, vm).map(|p| p.core.state_name()) else {
            return false;
        };
        for other in self.machines_of(name) {
            if self.crash(other) {
                let delay = 500 + self.rng.below(6000);
                self.after(delay, Happening::MachineStarts { at: other });
            }
        }
        let run_here = state != StateName::ReadyInDoubt;
        if run_here && !self.lets_word_count(at, vm, peer) {
            return false;
        }
        if run_here {
            self.guests[vm].may_go_back_at = Some(at);
        } else if let Some(process) = self.process(at, vm) {
            process.may_discard = true;
        }
        self.guests[vm].may_be_lost = true;
        self.note(|w| format!("person: resolves {} at {}", w.vms[vm], w.label(at)));
        let confirm_fenced = peer.clone();
        self.feed(
            at,
            vm,
            Event::OperatorResolve {
                run_here,
                confirm_fenced,
            },
        );
        true
    }

    /// A host's agent hears out whoever answers it, before a person's word counts. People turn to it where no controller
    /// answers.
    fn lets_word_count(&mut self, at: MachineId, vm: VmId, off: &HostName) -> bool {
        let held = self.process(at, vm).map(|p| p.core.record().held);
        let (Some(held), Some(agent)) = (held, self.machines[at].agent.as_ref()) else {
            return false;
        };
        let mut asking = agent.site.asking_about(&self.vms[vm], held);
        asking.no_controller();
        let Some(question) = asking.question() else {
            return false;
        };
        let others: Vec<_> = asking.neighbours().map(|host| host.name.clone()).collect();
        for to in others.iter().filter_map(|host| self.id_of(host)) {
            let to = self.address[to];
            let answers = self.machines[to].agent.as_ref().filter(|_| {
                let is_frozen = self.machines[to].agent_frozen_until > self.now;
                to != at && !is_frozen && self.connects(at, to)
            });
            if let Some(other) = answers {
                let records = self.records_of(to, None);
                asking.hear(other.site.answer(&self.name_of(at), &question, records));
            }
        }
        let refused = asking.refuses_word(&self.vms[vm], Some(off), false);
        if let Some(why) = &refused {
            self.coverage.refused_words += 1;
            self.note(|w| format!("{}: takes no person's word: {why}", w.label(at)));
        }
        refused.is_none()
    }

    /// Of several copies one is kept, the others are ended.
    fn resolve_twice(&mut self, controller: usize) {
        let twice = self.controllers[controller].book.all_twice();
        for (name, twice) in twice {
            let Some(vm) = self.vm_of(&name) else {
                continue;
            };
            for copy in twice.copies.iter().rev() {
                // A person looks first which of the copies are real.
                let Some(host) = self.id_of(&copy.host) else {
                    continue;
                };
                if self.held_elsewhere(self.address[host], vm) {
                    self.begin(controller, vm, Kind::End { host });
                    return;
                }
            }
        }
    }

    /// After the faults: people do what they are shown, until everything runs.
    pub(crate) fn mend(&mut self, controller: usize, is_late: bool) {
        for at in 0..self.machines.len() {
            let machine = &self.machines[at];
            // One that is to leave has no certificate any more, or is not to be believed: it is not powered on before it joins anew.
            let stays = machine.is_clone || machine.is_retired || machine.is_leaving;
            if !machine.is_up && !stays {
                self.machines[at].stays_off = false;
                self.machine_starts(at);
            }
        }
        if self.controllers[controller].book.is_replaced() {
            // The other one is stopped by now, and this one is to be kept.
            self.controllers[controller].is_up = false;
        }
        if !self.controllers[controller].is_up {
            return self.controller_starts(controller);
        }
        self.mend_hosts(controller);
        self.resolve_twice(controller);
        let is_gone = |w: &Self, at: MachineId, _: VmId, peer: &HostName| {
            // A controller has nothing resolved at a host that is not in its inventory.
            let hosts = &w.controllers[controller].db.hosts;
            hosts.contains_key(&w.name_of(at)) && (is_late || !hosts.contains_key(peer))
        };
        if let Some((at, vm, peer)) = self.find_doubt(is_gone) {
            self.resolve_at(at, vm, &peer);
        }
        for vm in 0..self.vms.len() {
            let machines = 0..self.machines.len();
            let running = machines.filter(|m| self.runs_at(*m, vm)).count();
            if !self.guests[vm].exists || running > 0 {
                continue;
            }
            let book = &self.controllers[controller].book;
            let ends = is_late && self.now.is_multiple_of(10_000);
            if let (true, Whereabouts::Held { host, .. }) = (ends, book.whereabouts(&self.vms[vm]))
                && let Some(host) = self.id_of(&host)
            {
                // As the refusals say: what is left is an older copy, and is ended first. Then nobody holds the VM.
                self.guests[vm].is_on = false;
                // A host that lies has said so, and the person goes on with what is elsewhere.
                self.images[vm].is_lost |= self.is_invented(controller, vm, host);
                self.begin(controller, vm, Kind::End { host });
            }
            self.begin(controller, vm, Kind::Start { on: None });
        }
    }

    /// Whether the book was told that another host holds the VM, under a generation that none ever held.
    fn is_invented(&self, controller: usize, vm: VmId, host: NameId) -> bool {
        let entry = self.controllers[controller].book.entry(&self.vms[vm]);
        let journals = self.machines.iter().map(|m| &m.slots[vm].journal);
        let records = journals.flat_map(|journal| journal.seen.iter().chain(&journal.durable));
        let held = records.map(|record| record.held).max();
        entry.is_some_and(|entry| {
            let is_elsewhere = entry.holder.as_ref() != Some(&self.names[host]);
            self.has_liar && entry.hearsay && is_elsewhere && Some(entry.held) > held
        })
    }

    /// Hosts that are not themselves, or lie, are removed and join anew; unknown ones are enrolled.
    fn mend_hosts(&mut self, controller: usize) {
        for name in 0..self.names.len() {
            let host = self.names[name].clone();
            let book = &self.controllers[controller].book;
            let is_known = self.controllers[controller].db.hosts.contains_key(&host);
            let at = self.address[name];
            let lies = self.machines[at].lies;
            let is_itself = book.standing(&host) == Standing::Known;
            let awaited = book.waits_for().contains(&host);
            let named = !book.may_be_on(&host).is_empty();
            if is_known && (lies || !is_itself) {
                self.machines[at].has_lied |= lies;
                self.machines[at].lies = false;
                self.machines[at].is_leaving = true;
            }
            if self.machines[at].is_leaving {
                self.machines[at].stays_off = true;
                self.crash(at);
                let off = !self.controllers[controller].book.answers(&host);
                if awaited && off {
                    // As the list says: it is powered off, and a person says so.
                    self.fence(controller, &host);
                }
                if off && (!is_known || self.take_out(controller, &host, true)) {
                    self.dismiss(&[at]);
                    self.join_anew(controller, name);
                }
            } else if !is_known && self.controllers[controller].db.removed.contains(&host) {
                self.mend_removed(controller, name);
            } else if !is_known && (awaited || named) {
                let site = super::controller::site_host(&host, &HostRow::default());
                let of = &mut self.controllers[controller];
                of.book.add_host(site, HostRow::default());
                self.commit(controller, &[]);
            }
        }
    }

    /// A removed host that a record names: it is powered off, and a person says so.
    fn mend_removed(&mut self, controller: usize, name: NameId) {
        let host = self.names[name].clone();
        let book = &self.controllers[controller].book;
        let is_awaited = book.waits_for().contains(&host) || !book.may_be_on(&host).is_empty();
        if !is_awaited || book.is_fenced(&host) {
            return;
        }
        for at in self.machines_of(name) {
            self.machines[at].stays_off = true;
            self.machines[at].is_retired = true;
            self.crash(at);
            self.dismiss(&[at]);
        }
        self.fence(controller, &host);
    }
}
