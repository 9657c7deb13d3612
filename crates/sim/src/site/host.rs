//! The shell of a simulated host and its agent: the site's table on its disk, its questions before it boots anything,
//! its answers to controllers and to other hosts.
//!
//! Works on the site. The table is on the disk before an answer leaves.

use super::faults::SiteFault;
use super::model::{
    Agent, Ask, Caller, Ground, Happening, MachineId, Packet, Place, Reply, VmId, Waits,
};
use super::world::Site;
use godwit_ownership::{Event, HostRecord, PeerMessage, Phase, StateName, Status};
use godwit_site::{Heard, HostSite, Judged, claim_of};
use godwit_types::Generation;
use godwit_types::site::{
    BootWish, Instance, RecordSaid, SiteAnswer, SiteQuestion, SiteUpdate, Stamp, WholeSurvey,
};
use std::collections::BTreeMap;

const TICK_MS: u64 = 300;
/// A controller that has not answered after so long does not answer this round.
const CONTROLLER_MS: u64 = 800;
/// Between two rounds of questions.
const ROUND_MS: u64 = 1500;

impl Site {
    pub(crate) fn machine_starts(&mut self, at: MachineId) {
        let machine = &self.machines[at];
        if machine.is_up || machine.stays_off {
            return;
        }
        let boot = self.next_number();
        let machine = &mut self.machines[at];
        machine.boot = boot;
        machine.is_up = true;
        machine.boots += 1;
        machine.agent_frozen_until = 0;
        self.note(|w| format!("{}: machine starts", w.label(at)));
        self.agent_starts(at);
    }

    pub(crate) fn agent_starts(&mut self, at: MachineId) {
        let (number, plant) = (self.next_number(), super::run::site_plant(self.plant));
        let name = self.name_of(at);
        let machine = &mut self.machines[at];
        if !machine.is_up || machine.agent.is_some() {
            return;
        }
        machine.counter += 1;
        let instance = Instance {
            counter: machine.counter,
            boot_id: format!("boot-{at}-{}", machine.boots),
            machine_id: format!("machine-{at}"),
        };
        machine.instance = Some(instance.clone());
        let mut site = HostSite::new(name, instance, machine.table.clone());
        site.plant = plant;
        machine.agent = Some(Agent {
            number,
            site,
            round: 0,
            asked_at: 0,
            waits_since: None,
            judged: BTreeMap::new(),
        });
        self.note(|w| {
            let counter = w.machines[at].counter;
            format!("{}: agent starts, life {counter}", w.label(at))
        });
        self.keep_again(at);
        self.after(5, Happening::AgentTick { at, agent: number });
    }

    /// Writes the table; false when that failed.
    fn keep_table(&mut self, at: MachineId) -> bool {
        if self.strikes(SiteFault::TableFails, 12) {
            return false;
        }
        let machine = &mut self.machines[at];
        if let Some(agent) = machine.agent.as_ref() {
            machine.table.clone_from(agent.site.table());
        }
        true
    }

    /// The records of a host that it tells others, all or of one VM.
    pub(crate) fn records_of(&self, at: MachineId, of: Option<VmId>) -> Vec<RecordSaid> {
        let slots = self.machines[at].slots.iter().enumerate();
        let slots = slots.filter(|(vm, _)| of.is_none_or(|of| of == *vm));
        let records = slots.filter_map(|(_, slot)| match &slot.process {
            Some(process) => Some((process.core.record(), slot.qemu.is_some())),
            None => Some((slot.journal.seen.as_ref()?, slot.qemu.is_some())),
        });
        let said = |(record, may_live): (&HostRecord, bool)| RecordSaid {
            vm: record.vm.clone(),
            highest: record.highest,
            claim: claim_of(record),
            may_live,
            images: self.images_of(at, record),
        };
        records.map(said).collect()
    }

    /// A controller asks or commands something. A poll is a question of any controller, also of an old one.
    pub(crate) fn agent_hears(&mut self, at: MachineId, caller: Caller, stamp: Stamp, what: Ask) {
        if matches!(what, Ask::Poll) {
            return self.agent_polled(at, caller);
        }
        let Some(agent) = self.machines[at].agent.as_mut() else {
            return;
        };
        let kept = match agent.site.accept(stamp) {
            Err(_) => {
                self.coverage.stale += 1;
                self.note(|w| format!("{}: refuses a stale word {stamp}", w.label(at)));
                false
            }
            Ok(true) => self.keep_table(at),
            Ok(false) => true,
        };
        if !kept {
            return self.reply(at, caller, Reply::Refused);
        }
        match what {
            Ask::Poll => {}
            Ask::Update(update) => self.agent_updates(at, caller, update),
            Ask::Whole => self.agent_surveyed(at, caller),
            Ask::Survey { vm, level } => {
                self.act_for(at, vm, Event::SurveyRequested { level }, caller);
            }
            Ask::Granted {
                vm,
                generation,
                expect,
                images,
                told,
                place,
            } => {
                let name = self.vms[vm].clone();
                if let Some(agent) = self.machines[at].agent.as_mut() {
                    agent.site.granted(&name, generation);
                }
                if !self.keep_table(at) {
                    return self.reply(at, caller, Reply::Refused);
                }
                self.told_of_image(at, vm, (images, told));
                self.told_of_place(at, vm, place);
                self.act_for(at, vm, Event::Granted { generation, expect }, caller);
            }
            Ask::Do {
                vm,
                event,
                discards,
            } => {
                if self.machines[at].slots[vm].process.is_none() {
                    self.spawn(at, vm);
                }
                if event == Event::StartRequested {
                    self.machines[at].booted.remove(&vm);
                }
                if discards && let Some(process) = self.process(at, vm) {
                    process.may_discard = true;
                }
                self.act_for(at, vm, event, caller);
            }
            Ask::MoveDisk { vm } => self.asked_to_move_disk(at, vm, caller),
            Ask::Describe { vm, place } => self.told_of_place(at, vm, place),
        }
    }

    fn agent_polled(&mut self, at: MachineId, caller: Caller) {
        let records = self.records_of(at, None);
        let machine = &self.machines[at];
        if let Some(agent) = machine.agent.as_ref() {
            let heard = Heard {
                instance: agent.site.instance().clone(),
                knows: agent.site.heard(),
                records,
            };
            let reports = machine.reports.clone();
            let places = self.places_at(at);
            self.reply(at, caller, Reply::Heard(heard, reports, places));
        }
    }

    fn agent_surveyed(&mut self, at: MachineId, caller: Caller) {
        let records = self.records_of(at, None);
        if let Some(agent) = self.machines[at].agent.as_ref() {
            let whole = WholeSurvey {
                instance: agent.site.instance().clone(),
                records,
                unread: Default::default(),
                table: agent.site.table().clone(),
            };
            self.reply(at, caller, Reply::Whole(whole));
        }
    }

    fn act_for(&mut self, at: MachineId, vm: VmId, event: Event, caller: Caller) {
        let waits = Waits {
            caller,
            kind: event.kind(),
            refused: false,
            surveyed: None,
        };
        if self.machines[at].slots[vm].process.is_none() {
            self.spawn(at, vm);
        }
        self.feed_for(at, vm, event, Some(waits));
    }

    fn agent_updates(&mut self, at: MachineId, caller: Caller, update: SiteUpdate) {
        let Some(agent) = self.machines[at].agent.as_mut() else {
            return;
        };
        let before = agent.site.table().removed.clone();
        let result = agent.site.update(update);
        let removed: Vec<_> = agent
            .site
            .table()
            .removed
            .difference(&before)
            .cloned()
            .collect();
        let answer = Reply::Updated(agent.site.standing(), agent.site.heard());
        if result.is_err() || !self.keep_table(at) {
            return self.reply(at, caller, Reply::Refused);
        }
        for host in removed {
            for vm in 0..self.vms.len() {
                let event = Event::HostRemoved { host: host.clone() };
                self.feed(at, vm, event);
            }
        }
        self.reply(at, caller, answer);
    }

    pub(crate) fn reply(&mut self, at: MachineId, caller: Caller, reply: Reply) {
        let reply = if self.machines[at].lies {
            self.lie(reply)
        } else {
            reply
        };
        let packet = Packet::Reply {
            caller,
            from: self.machines[at].name,
            reply: Box::new(reply),
        };
        let to = Place::Controller(caller.controller);
        self.send(Place::Machine(at), to, packet);
    }

    /// Another host's word about a VM, brought by its agent or its VM process.
    pub(crate) fn peer_says(
        &mut self,
        at: MachineId,
        sender: MachineId,
        vm: VmId,
        message: PeerMessage,
    ) {
        // Agents carry what VM processes say to each other.
        let Some(agent) = self.machines[at].agent.as_ref() else {
            return;
        };
        let from = self.name_of(sender);
        let life = self.machines[sender].instance.as_ref();
        if let Some(why) = agent.site.refuses_peer(&from, life, None) {
            let of = self.label(at);
            return self.note(|_| format!("{of}: {why}"));
        }
        self.heard_peer(at, vm);
        if self.machines[at].slots[vm].process.is_none() {
            self.spawn(at, vm);
        }
        self.feed(at, vm, Event::Message { from, message });
    }

    /// Looks whether every VM has its process, and what should run and does not.
    pub(crate) fn agent_tick(&mut self, at: MachineId, number: u64) {
        let (now, machine) = (self.now, &self.machines[at]);
        let is_this = machine.agent.as_ref().is_some_and(|a| a.number == number);
        if !machine.is_up || !is_this {
            return;
        }
        let pause = machine.agent_frozen_until.saturating_sub(now);
        let tick = Happening::AgentTick { at, agent: number };
        if pause > 0 {
            return self.after(pause, tick);
        }
        let spread = self.rng.below(50);
        self.after(TICK_MS + spread, tick);
        self.lie_to_peers(at);
        for vm in 0..self.vms.len() {
            let slot = &self.machines[at].slots[vm];
            let is_known = slot.journal.seen.is_some() || slot.qemu.is_some();
            if slot.process.is_none() && is_known {
                self.spawn(at, vm);
            }
            self.wish_for(at, vm);
        }
        self.ask_site(at);
        self.judge_wishes(at);
    }

    fn wish_for(&mut self, at: MachineId, vm: VmId) {
        let process = self.machines[at].slots[vm].process.as_ref();
        let wish = process.and_then(|p| wishes(&p.core));
        let name = self.vms[vm].clone();
        let Some(agent) = self.machines[at].agent.as_mut() else {
            return;
        };
        match wish {
            Some(generation) => {
                let wish = BootWish {
                    vm: name.clone(),
                    generation,
                };
                let question = agent.site.question();
                if question.is_none_or(|asked| !asked.wishes.contains(&wish)) {
                    // What was answered so far, or comes yet, is no answer about it.
                    agent.site.forget_answers();
                    agent.round += 1;
                    self.machines[at].grounds.clear();
                }
                if let Some(agent) = self.machines[at].agent.as_mut() {
                    agent.site.wish(name, generation);
                }
            }
            None => {
                agent.site.no_wish(&name);
                agent.judged.remove(&vm);
            }
        }
    }

    /// Asks the controller and every other host, once for all VMs.
    fn ask_site(&mut self, at: MachineId) {
        let now = self.now;
        let Some(agent) = self.machines[at].agent.as_mut() else {
            return;
        };
        let is_due = agent.waits_since.is_none() || now >= agent.asked_at + ROUND_MS;
        if !is_due {
            if now >= agent.asked_at + CONTROLLER_MS {
                agent.site.no_controller();
                agent.site.round_is_over();
            }
            return;
        }
        agent.site.forget_answers();
        let Some(question) = agent.site.question() else {
            agent.waits_since = None;
            return;
        };
        agent.waits_since.get_or_insert(now);
        agent.asked_at = now;
        agent.round += 1;
        let (number, round) = (agent.number, agent.round);
        let others: Vec<_> = agent.site.neighbours().map(|h| h.name.clone()).collect();
        self.machines[at].grounds.clear();
        self.coverage.questions += 1;
        let packet = Packet::Question {
            agent: number,
            round,
            question: Box::new(question),
        };
        let controller = self.rng.index(self.controllers.len());
        self.send(
            Place::Machine(at),
            Place::Controller(controller),
            packet.clone(),
        );
        // Its port refuses at once, before any host can answer.
        if !self.controllers[controller].is_up
            && let Some(agent) = self.machines[at].agent.as_mut()
        {
            agent.site.no_controller();
        }
        for name in others {
            if let Some(to) = self.id_of(&name) {
                self.send(Place::Machine(at), Place::Name(to), packet.clone());
            }
        }
    }

    /// Answers another host's question, also while this one waits itself.
    pub(crate) fn agent_answers(
        &mut self,
        at: MachineId,
        asker: MachineId,
        agent: u64,
        round: u64,
        question: &SiteQuestion,
    ) {
        let name = self.name_of(asker);
        let records = self.records_of(at, None);
        let Some(mine) = self.machines[at].agent.as_ref() else {
            return;
        };
        let mut answer = mine.site.answer(&name, question, records);
        let lies = self.machines[at].lies;
        if lies {
            self.lie_to_host(&name, question, &mut answer);
        }
        let packet = Packet::Answered {
            agent,
            round,
            answer: Box::new(answer),
        };
        self.send(Place::Machine(at), Place::Machine(asker), packet);
    }

    pub(crate) fn agent_takes(
        &mut self,
        at: MachineId,
        number: u64,
        round: u64,
        answer: SiteAnswer,
    ) {
        let machine = &mut self.machines[at];
        let Some(agent) = machine.agent.as_mut() else {
            return;
        };
        if agent.number != number || agent.round != round {
            return;
        }
        self.coverage.answers += 1;
        for vm in 0..self.vms.len() {
            let row = answer.vms.get(&self.vms[vm]);
            let ground = machine.grounds.entry(vm).or_default();
            ground.by_controller |= answer.from.is_none() && answer.in_charge;
            if let Some(row) = row.filter(|_| answer.from.is_some()) {
                ground.newest = ground.newest.max(row.stamp);
            }
        }
        agent.site.hear(answer);
        self.judge_wishes(at);
    }

    fn judge_wishes(&mut self, at: MachineId) {
        let now = self.now;
        for vm in 0..self.vms.len() {
            let process = self.machines[at].slots[vm].process.as_ref();
            let wish = process.and_then(|p| wishes(&p.core));
            let Some(agent) = self.machines[at].agent.as_mut() else {
                return;
            };
            if wish.is_none() {
                continue;
            }
            let waited = agent.waits_since.map_or(0, |since| (now - since) / 1000);
            let judged = agent.site.judge(&self.vms[vm], waited, false);
            let by_person = agent.site.is_alone();
            let own = agent.site.table().vms.get(&self.vms[vm]);
            let own = own.map(|row| row.stamp).unwrap_or_default();
            let is_lone = agent.site.may_be_configured_alone();
            let is_news = agent.judged.get(&vm) != Some(&judged);
            agent.judged.insert(vm, judged.clone());
            if is_news {
                self.note(|w| format!("{} {}: {judged:?}", w.label(at), w.vms[vm]));
                self.coverage.judged(&judged);
            }
            match judged {
                Judged::Boot => {
                    let ground = self.machines[at].grounds.entry(vm).or_default();
                    ground.newest = ground.newest.max(own);
                    ground.by_person |= by_person;
                    ground.is_lone |= is_lone;
                    let ground = ground.clone();
                    self.machines[at].booted.insert(vm, ground);
                    self.feed_start(at, vm);
                }
                Judged::Yield(_) => self.give_way(at, vm),
                Judged::Wait(_) | Judged::Never(_) => {}
            }
        }
    }

    fn feed_start(&mut self, at: MachineId, vm: VmId) {
        let process = self.process(at, vm);
        let already = process.is_some_and(|p| {
            let mut waiting = p.inbox.iter().map(|(event, _)| event);
            waiting.any(|event| *event == Event::StartRequested)
        });
        if !already {
            self.feed(at, vm, Event::StartRequested);
        }
    }

    /// A controller in charge knows of another holder: this record goes.
    fn give_way(&mut self, at: MachineId, vm: VmId) {
        if let Some(process) = self.process(at, vm) {
            process.may_discard = true;
        }
        self.feed(at, vm, Event::StopRequested);
        self.feed(at, vm, Event::DeleteRequested);
    }
}

/// The generation of a VM that should run here and has no QEMU.
fn wishes(core: &godwit_ownership::VmCore) -> Option<Generation> {
    let record = core.record();
    let is_on = match &record.phase {
        Phase::Holds { power, .. } => power.should_run(),
        Phase::Stopping { .. } => true,
        _ => false,
    };
    let is_down = core.state_name() == StateName::Down;
    let shown = is_down && matches!(core.status(), Status::Down { .. });
    (shown && is_on && !core.is_writing()).then_some(record.held)
}

impl Ground {
    /// Whether nothing but neighbours' words let the VM boot, and all of them had missed `since`.
    pub(crate) fn is_missed_by_all(&self, since: Stamp) -> bool {
        !self.by_controller && !self.by_person && !self.is_lone && self.newest < since
    }
}
