//! What a simulated controller does for people: create, start, stop, delete, migrate, and the surveys behind these.
//!
//! Works on the site. Every word is in the database before a host hears it.

use super::controller::{Change, Purpose};
use super::model::{Ask, NameId, Reply, VmId};
use super::world::Site;
use godwit_ownership::Event;
use godwit_site::{Free, Grant, Refusal, Survey, Surveyed, Whereabouts};
use godwit_types::site::SurveyAnswer;
use godwit_types::{HostName, MigrationId};
use std::collections::{BTreeMap, BTreeSet};

/// How often a start surveys again.
const TRIES: u32 = 4;
/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    Create {
        on: NameId,
    },
    Start {
        on: Option<NameId>,
    },
    Stop,
    Pause,
    Delete,
    Move {
        to: NameId,
    },
    /// Its disk goes to another place of its host.
    MoveDisk,
    /// So that a host that holds nothing any more leaves the set.
    Clean {
        host: NameId,
    },
    /// A person ends the copy at this host.
    End {
        host: NameId,
    },
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum Stage {
    Survey {
        survey: Survey,
        answers: BTreeMap<HostName, SurveyAnswer>,
        waiting: BTreeSet<HostName>,
    },
    Release,
    Put {
        grant: Grant,
    },
    Run,
    Prepare {
        migration: MigrationId,
        event: Event,
        from: NameId,
    },
    Last,
}

#[derive(Debug)]
pub(crate) struct Job {
    pub vm: VmId,
    pub kind: Kind,
    pub stage: Stage,
    pub tries: u32,
}

impl Site {
    /// Begins a job, unless the VM has one.
    pub(crate) fn begin(&mut self, controller: usize, vm: VmId, kind: Kind) -> bool {
        let of = &self.controllers[controller];
        if !of.is_up || of.frozen_until > self.now || of.is_busy(vm) {
            return false;
        }
        let Some(kind) = self.planned(controller, vm, kind) else {
            return false;
        };
        self.note(|w| format!("controller {controller}: {kind:?} {}", w.vms[vm]));
        self.coverage.job(&kind);
        let job = self.next_number();
        let (stage, tries) = (Stage::Last, 0);
        let made = Job {
            vm,
            kind: kind.clone(),
            stage,
            tries,
        };
        self.controllers[controller].jobs.insert(job, made);
        match kind {
            Kind::Create { .. } => {
                self.guests[vm].is_changing = true;
                self.survey_stage(controller, job);
            }
            Kind::Start { .. } | Kind::Delete | Kind::Clean { .. } => {
                self.survey_stage(controller, job);
            }
            // Whether it was done is not known before the answer comes.
            Kind::Stop => {
                let name = self.vms[vm].clone();
                self.controllers[controller].book.order(&name);
                self.commit(controller, &[]);
                self.guests[vm].is_on = false;
                self.tell_holder(controller, job, vm, Event::StopRequested, true);
            }
            Kind::Pause => {
                self.guests[vm].is_on = false;
                self.tell_holder(controller, job, vm, Event::PauseRequested, false);
            }
            Kind::End { host } => {
                let what = Ask::Do {
                    vm,
                    event: Event::StopRequested,
                    discards: true,
                };
                self.ask(controller, host, what, Purpose::Job(job));
            }
            Kind::Move { to } => self.begin_move(controller, job, vm, to),
            Kind::MoveDisk => self.ask_holder(controller, job, vm, Ask::MoveDisk { vm }),
        }
        true
    }

    /// The job is over; what it did is known where it did it.
    pub(super) fn end_job(&mut self, controller: usize, job: u64) {
        if let Some(job) = self.controllers[controller].jobs.remove(&job) {
            self.guests[job.vm].is_changing = false;
        }
    }

    pub(super) fn refused(&mut self, controller: usize, job: u64, refusal: &Refusal) {
        self.note(|_| format!("controller: refused: {refusal}"));
        self.coverage.refusal(refusal);
        self.end_job(controller, job);
    }

    pub(super) fn set_stage(&mut self, controller: usize, job: u64, stage: Stage) {
        if let Some(job) = self.controllers[controller].jobs.get_mut(&job) {
            job.stage = stage;
        }
    }

    fn tell_holder(&mut self, controller: usize, job: u64, vm: VmId, event: Event, discards: bool) {
        let what = Ask::Do {
            vm,
            event,
            discards,
        };
        self.ask_holder(controller, job, vm, what);
    }

    fn ask_holder(&mut self, controller: usize, job: u64, vm: VmId, what: Ask) {
        let book = &self.controllers[controller].book;
        let host = match book.whereabouts(&self.vms[vm]) {
            Whereabouts::Held { host, .. } => self.id_of(&host),
            _ => None,
        };
        let Some(host) = host else {
            return self.end_job(controller, job);
        };
        self.ask(controller, host, what, Purpose::Job(job));
    }

    fn survey_stage(&mut self, controller: usize, id: u64) {
        let Some(job) = self.controllers[controller].jobs.get_mut(&id) else {
            return;
        };
        job.tries += 1;
        let (vm, kind) = (job.vm, job.kind.clone());
        let name = self.vms[vm].clone();
        if self.grant_unasked(controller, id, vm, &kind) {
            return;
        }
        let also: Vec<HostName> = match kind {
            Kind::Create { on } | Kind::Start { on: Some(on) } => vec![self.names[on].clone()],
            _ => Vec::new(),
        };
        let book = &mut self.controllers[controller].book;
        let begun = match kind {
            Kind::Clean { host } => book.survey_of(&name, [self.names[host].clone()].into()),
            _ => book.begin_survey(&name, &also),
        };
        let survey = match begun {
            Ok(begun) => begun,
            Err(refusal) => return self.refused(controller, id, &refusal),
        };
        if !self.commit(controller, &[]) {
            return self.end_job(controller, id);
        }
        self.coverage.surveys += 1;
        let (level, hosts) = (survey.level, survey.hosts.clone());
        let stage = Stage::Survey {
            survey,
            answers: BTreeMap::new(),
            waiting: hosts.clone(),
        };
        self.set_stage(controller, id, stage);
        if hosts.is_empty() {
            return self.finish_survey(controller, id);
        }
        for host in hosts {
            if let Some(to) = self.id_of(&host) {
                let what = Ask::Survey { vm, level };
                self.ask(controller, to, what, Purpose::Job(id));
            }
        }
    }

    /// A host has answered a job's question, or did not in time.
    pub(crate) fn job_hears(
        &mut self,
        controller: usize,
        id: u64,
        from: NameId,
        reply: Option<Reply>,
    ) {
        let host = self.names[from].clone();
        let Some(job) = self.controllers[controller].jobs.get_mut(&id) else {
            return;
        };
        let is_done = matches!(reply, Some(Reply::Done));
        match &mut job.stage {
            Stage::Survey {
                answers, waiting, ..
            } => {
                waiting.remove(&host);
                if let Some(Reply::Surveyed(answer)) = reply {
                    answers.insert(host, answer);
                }
                if waiting.is_empty() {
                    self.finish_survey(controller, id);
                }
            }
            Stage::Release if is_done => self.survey_stage(controller, id),
            Stage::Put { grant } if is_done => {
                let (vm, on) = (job.vm, grant.on.clone());
                self.was_put(controller, id, vm, &on);
            }
            Stage::Run if is_done => {
                let vm = job.vm;
                self.was_started(controller, id, vm);
            }
            Stage::Prepare {
                migration,
                event,
                from,
            } if is_done => {
                let (migration, event, from) = (migration.clone(), event.clone(), *from);
                let vm = job.vm;
                self.set_stage(controller, id, Stage::Last);
                self.note(|_| format!("controller: {migration} is prepared"));
                let what = Ask::Do {
                    vm,
                    event,
                    discards: false,
                };
                self.ask(controller, from, what, Purpose::Job(id));
            }
            Stage::Run if matches!(reply, Some(Reply::Refused)) => {
                // It may be paused: then it is resumed, and that is the whole answer.
                let vm = job.vm;
                self.set_stage(controller, id, Stage::Last);
                let what = Ask::Do {
                    vm,
                    event: Event::ResumeRequested,
                    discards: false,
                };
                self.ask(controller, from, what, Purpose::Job(id));
            }
            Stage::Last if is_done => self.last_done(controller, id),
            _ => self.end_job(controller, id),
        }
    }

    fn last_done(&mut self, controller: usize, id: u64) {
        let Some(job) = self.controllers[controller].jobs.get(&id) else {
            return;
        };
        let (vm, kind) = (job.vm, job.kind.clone());
        match kind {
            Kind::Stop | Kind::Pause => self.guests[vm].is_on = false,
            Kind::Start { .. } => return self.was_started(controller, id, vm),
            Kind::End { host } => {
                // A VM that never ran starts anywhere then, with what is there.
                let image = &mut self.images[vm];
                image.is_lost |= image.acknowledged == 0 && image.openings == 0;
                let what = Ask::Do {
                    vm,
                    event: Event::DeleteRequested,
                    discards: true,
                };
                self.ask(controller, host, what, Purpose::Nothing);
            }
            _ => {}
        }
        self.end_job(controller, id);
    }

    fn finish_survey(&mut self, controller: usize, id: u64) {
        let Some(job) = self.controllers[controller].jobs.get_mut(&id) else {
            return;
        };
        let (vm, kind, tries) = (job.vm, job.kind.clone(), job.tries);
        let stage = std::mem::replace(&mut job.stage, Stage::Last);
        let Stage::Survey {
            survey, answers, ..
        } = stage
        else {
            return;
        };
        let verdict = self.controllers[controller]
            .book
            .take_survey(&survey, &answers);
        for (host, answer) in &answers {
            let said = (&survey.vm, &answer.claim, &answer.images[..]);
            self.heard_of_image(controller, host, said);
        }
        self.note(|_| {
            format!(
                "controller: survey {}: {answers:?} -> {verdict:?}",
                survey.vm
            )
        });
        if !self.commit(controller, &[]) || matches!(kind, Kind::Clean { .. }) {
            return self.end_job(controller, id);
        }
        match verdict {
            Surveyed::Free(free) => match kind {
                Kind::Delete => self.delete(controller, id, vm, free),
                _ => self.grant(controller, id, vm, &kind, free),
            },
            Surveyed::HeldBy { host, on, .. } => {
                self.is_held(controller, id, vm, &kind, &host, on, tries);
            }
            Surveyed::OlderCopy { host, on } if tries < TRIES => {
                let event = match on {
                    true => Event::StopRequested,
                    false => Event::DeleteRequested,
                };
                self.guests[vm].is_on = false;
                self.release(controller, id, vm, &host, event);
            }
            Surveyed::OlderCopy { .. } => self.end_job(controller, id),
            Surveyed::Refused(Refusal::Stale { .. }) if tries < TRIES => {
                self.survey_stage(controller, id);
            }
            Surveyed::Refused(refusal) => self.refused(controller, id, &refusal),
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn is_held(
        &mut self,
        controller: usize,
        id: u64,
        vm: VmId,
        kind: &Kind,
        host: &HostName,
        on: bool,
        tries: u32,
    ) {
        let Some(at) = self.id_of(host) else {
            return self.end_job(controller, id);
        };
        let moves = match kind {
            Kind::Start { on: Some(to) } => *to != at,
            Kind::Delete => true,
            _ => false,
        };
        match kind {
            Kind::Start { .. } | Kind::Delete if moves && !on && tries < TRIES => {
                // Its record says that it is off, whatever was answered meanwhile.
                self.guests[vm].is_on = false;
                self.release(controller, id, vm, host, Event::DeleteRequested);
            }
            Kind::Start { .. } => self.start_at(controller, id, vm, at),
            _ => self.end_job(controller, id),
        }
    }

    /// Has a host let a VM go, then surveys again.
    fn release(&mut self, controller: usize, id: u64, vm: VmId, host: &HostName, event: Event) {
        let Some(at) = self.id_of(host) else {
            return self.end_job(controller, id);
        };
        let what = Ask::Do {
            vm,
            event,
            discards: true,
        };
        // It was seen there, off, with its description.
        let places = self.places_at(self.address[at]);
        self.follow_places(controller, at, &places);
        self.set_stage(controller, id, Stage::Release);
        self.coverage.releases += 1;
        self.ask(controller, at, what, Purpose::Job(id));
    }

    fn start_at(&mut self, controller: usize, id: u64, vm: VmId, at: NameId) {
        self.set_stage(controller, id, Stage::Run);
        self.overrule_place(controller, vm, at);
        let what = Ask::Do {
            vm,
            event: Event::StartRequested,
            discards: false,
        };
        self.ask(controller, at, what, Purpose::Job(id));
    }

    fn grant(&mut self, controller: usize, id: u64, vm: VmId, kind: &Kind, free: Free) {
        let wanted = match kind {
            Kind::Create { on } | Kind::Start { on: Some(on) } => Some(*on),
            _ => None,
        };
        let on = wanted.or_else(|| self.any_answering(controller));
        let Some(on) = on else {
            return self.end_job(controller, id);
        };
        let name = self.names[on].clone();
        match self.controllers[controller].book.grant(free, &name) {
            Ok(grant) => self.put(controller, id, vm, on, grant),
            Err(refusal) => self.refused(controller, id, &refusal),
        }
    }

    pub(super) fn any_answering(&mut self, controller: usize) -> Option<NameId> {
        let book = &self.controllers[controller].book;
        let hosts = 0..self.names.len();
        let able: Vec<NameId> = hosts.filter(|h| book.answers(&self.names[*h])).collect();
        let choice = self.rng.index(able.len().max(1));
        able.get(choice).copied()
    }

    fn put(&mut self, controller: usize, id: u64, vm: VmId, on: NameId, grant: Grant) {
        let is_create = self.is_create(controller, id);
        if is_create {
            self.make_disk(on, vm);
            self.controllers[controller].db.places.insert(vm, 0);
            self.guests[vm].made += 1;
            self.describes_newest(controller, vm);
        }
        self.grants_with_description(controller, vm);
        let changes: &[Change] = match is_create {
            true => &[Change::Exists(vm, true)],
            false => &[],
        };
        if !self.commit(controller, changes) {
            return self.end_job(controller, id);
        }
        self.coverage.grants += 1;
        self.was_named(controller, vm);
        let was_deleted = std::mem::take(&mut self.guests[vm].deleted);
        // A restored database describes it still, and a person starts it: nobody promised anything of its disk.
        self.images[vm].is_lost |= was_deleted && !is_create;
        let of = &self.controllers[controller];
        let what = Ask::Granted {
            vm,
            generation: grant.generation,
            expect: grant.expect,
            images: of.book.images(&grant.vm),
            told: of.heard.get(&vm).copied().unwrap_or_default(),
            place: of.db.places.get(&vm).copied().unwrap_or_default(),
        };
        self.set_stage(controller, id, Stage::Put { grant });
        self.ask(controller, on, what, Purpose::Job(id));
    }

    fn is_create(&self, controller: usize, id: u64) -> bool {
        let job = self.controllers[controller].jobs.get(&id);
        job.is_some_and(|job| matches!(job.kind, Kind::Create { .. }))
    }

    /// Another host was named: what a host must know to be new enough.
    pub(super) fn was_named(&mut self, controller: usize, vm: VmId) {
        let of = &self.controllers[controller];
        let entry = of.book.entry(&self.vms[vm]);
        let stamp = entry.map(|entry| entry.stamp).unwrap_or_default();
        let is_old = of.is_old;
        let guest = &mut self.guests[vm];
        guest.named = guest.named.max(stamp);
        guest.named_by_old |= is_old;
    }

    fn was_put(&mut self, controller: usize, id: u64, vm: VmId, on: &HostName) {
        if self.is_create(controller, id) {
            self.guests[vm].exists = true;
            return self.end_job(controller, id);
        }
        match self.id_of(on) {
            Some(at) => self.start_at(controller, id, vm, at),
            None => self.end_job(controller, id),
        }
    }

    fn was_started(&mut self, controller: usize, id: u64, vm: VmId) {
        if self.guests[vm].exists {
            self.guests[vm].is_on = true;
        }
        self.end_job(controller, id);
    }

    fn delete(&mut self, controller: usize, id: u64, vm: VmId, free: Free) {
        self.guests[vm].exists = false;
        self.guests[vm].is_on = false;
        // Another VM of this name begins with none.
        self.controllers[controller].heard.remove(&vm);
        match self.controllers[controller].book.delete(free) {
            Ok(deletion) => {
                if self.commit(controller, &[Change::Exists(vm, false)]) {
                    self.guests[vm].deleted = true;
                    self.was_named(controller, vm);
                } else {
                    self.controllers[controller].book.not_deleted(deletion);
                }
                self.end_job(controller, id);
            }
            Err(refusal) => self.refused(controller, id, &refusal),
        }
    }

    /// Grants on what was heard last: a fault that must be caught.
    #[cfg(feature = "planted-faults")]
    fn grant_unasked(&mut self, controller: usize, id: u64, vm: VmId, kind: &Kind) -> bool {
        if !matches!(kind, Kind::Start { .. } | Kind::Create { .. }) {
            return false;
        }
        let book = &mut self.controllers[controller].book;
        let nowhere = book.whereabouts(&self.vms[vm]) == Whereabouts::Nowhere;
        let free = nowhere.then(|| book.free_unasked(&self.vms[vm])).flatten();
        match free {
            Some(free) => {
                self.grant(controller, id, vm, kind, free);
                true
            }
            None => false,
        }
    }

    #[cfg(not(feature = "planted-faults"))]
    fn grant_unasked(&mut self, _controller: usize, _id: u64, _vm: VmId, _kind: &Kind) -> bool {
        false
    }
}
