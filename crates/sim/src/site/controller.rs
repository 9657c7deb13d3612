//! The shell of a simulated controller: its database, its polls, its tables for the hosts, its start from an old copy.
//!
//! Works on the site. Nothing is said to a host while rows are still to be written.

use super::faults::SiteFault;
use super::jobs::Job;
use super::model::{Ask, Caller, Happening, MachineId, NameId, Packet, Place, Reply, Report, VmId};
use super::own_files::Store;
use super::run::SitePlant;
use super::world::Site;
use godwit_ownership::Event;
use godwit_site::{Book, Entry, Heard, HostRow, News, Row, Ticket};
use godwit_types::site::{SiteHost, SiteQuestion, Stamp, Standing};
use godwit_types::{HostName, MigrationId, VmName};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

const TICK_MS: u64 = 500;
const ASK_MS: u64 = 1500;

/// A migration as the database keeps it.
#[derive(Debug, Clone)]
pub(crate) struct Move {
    pub vm: VmId,
    pub from: HostName,
    pub to: HostName,
    pub began: u64,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Database {
    pub stamp: Stamp,
    pub entries: BTreeMap<VmName, Entry>,
    pub hosts: BTreeMap<HostName, HostRow>,
    pub removed: BTreeSet<HostName>,
    pub fenced_strangers: BTreeSet<HostName>,
    pub exists: BTreeSet<VmId>,
    pub moves: BTreeMap<MigrationId, Move>,
    /// Where disks are that only their VMs' hosts have, copied from these.
    pub places: BTreeMap<VmId, Store>,
    /// Of how many VMs that were made under that name it describes the last one, as an observer counts them.
    pub described: BTreeMap<VmId, u64>,
}

/// A change of the database that is not the book's.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Exists(VmId, bool),
    Removed(HostName),
    Begun(MigrationId, Move),
    Over(MigrationId),
}

/// Why a host was asked something.
#[derive(Debug, Clone)]
pub(crate) enum Purpose {
    Poll(Ticket),
    Update,
    Whole(Stamp, Ticket),
    Job(u64),
    Nothing,
}

#[derive(Debug)]
pub(crate) struct Controller {
    pub is_up: bool,
    pub stays_off: bool,
    pub life: u64,
    pub frozen_until: u64,
    pub book: Book,
    pub db: Database,
    pub backup: Option<Database>,
    pub jobs: BTreeMap<u64, Job>,
    pub asks: BTreeMap<u64, (NameId, Purpose)>,
    pub polled: BTreeSet<NameId>,
    /// As of how many openings of its VM's image this life was told of it, as an observer knows.
    pub heard: BTreeMap<VmId, u64>,
    /// Its database went back, and it has not taken over since.
    pub is_old: bool,
}

impl Controller {
    pub(crate) fn new(plant: SitePlant) -> Self {
        Self {
            is_up: false,
            stays_off: false,
            life: 0,
            frozen_until: 0,
            book: empty_book(Stamp::default(), plant),
            db: Database::default(),
            backup: None,
            jobs: BTreeMap::new(),
            asks: BTreeMap::new(),
            polled: BTreeSet::new(),
            heard: BTreeMap::new(),
            is_old: false,
        }
    }

    /// A VM that a job works on.
    pub(crate) fn is_busy(&self, vm: VmId) -> bool {
        self.jobs.values().any(|job| job.vm == vm)
    }
}

fn empty_book(stamp: Stamp, plant: SitePlant) -> Book {
    let mut book = Book::new(stamp);
    book.plant = plant.site;
    book
}

/// A host's entry in the site's table.
pub(crate) fn site_host(name: &HostName, row: &HostRow) -> SiteHost {
    SiteHost {
        name: name.clone(),
        address: SocketAddr::from(([10, 0, 0, 1], 7000)),
        serial: String::new(),
        counter: row.instance.counter,
        machine_id: row.instance.machine_id.clone(),
    }
}

impl Database {
    fn write(&mut self, row: Row) {
        match row {
            Row::Stamp(stamp) => self.stamp = stamp,
            Row::Vm(vm, entry) => {
                self.entries.insert(vm, *entry);
            }
            Row::Host(host, row) => {
                self.removed.remove(&host);
                self.hosts.insert(host, row);
            }
            Row::FencedStrangers(hosts) => self.fenced_strangers = hosts,
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Exists(vm, true) => {
                self.exists.insert(vm);
            }
            Change::Exists(vm, false) => {
                self.exists.remove(&vm);
            }
            Change::Removed(host) => {
                self.hosts.remove(&host);
                self.removed.insert(host);
            }
            Change::Begun(id, begun) => {
                self.moves.insert(id, begun);
            }
            Change::Over(id) => {
                self.moves.remove(&id);
            }
        }
    }

    fn book(&self, plant: SitePlant) -> Book {
        let mut book = empty_book(self.stamp, plant);
        for (name, row) in &self.hosts {
            book.load_host(site_host(name, row), row.clone());
        }
        for host in &self.removed {
            book.add_removed(host.clone());
        }
        for host in &self.fenced_strangers {
            book.add_fenced_stranger(host.clone());
        }
        for (vm, entry) in &self.entries {
            book.add_entry(vm.clone(), entry.clone());
        }
        book
    }
}

impl Site {
    /// It starts again from a copy of its database.
    pub(super) fn restore_database(&mut self) -> bool {
        let of = &mut self.controllers[0];
        let Some(backup) = of.backup.clone() else {
            return false;
        };
        of.is_up = false;
        of.is_old = true;
        of.db = backup;
        for guest in &mut self.guests {
            guest.is_changing = false;
        }
        let delay = 100 + self.rng.below(3000);
        let controller = 0;
        self.after(delay, Happening::ControllerStarts { controller });
        true
    }

    /// A controller is made from an old copy while the old one still runs.
    pub(super) fn second_controller(&mut self) -> bool {
        let Some(backup) = self.controllers[0].backup.clone() else {
            return false;
        };
        if self.controllers.len() > 1 {
            return false;
        }
        let mut second = Controller::new(self.plant);
        second.db = backup;
        second.is_old = true;
        self.controllers.push(second);
        let delay = 10 + self.rng.below(2000);
        let controller = 1;
        self.after(delay, Happening::ControllerStarts { controller });
        true
    }

    pub(crate) fn controller_starts(&mut self, controller: usize) {
        let (life, plant) = (self.next_number(), self.plant);
        let of = &mut self.controllers[controller];
        if of.is_up || of.stays_off {
            return;
        }
        of.is_up = true;
        of.life = life;
        of.heard.clear();
        of.frozen_until = 0;
        of.book = of.db.book(plant);
        of.jobs.clear();
        of.asks.clear();
        of.polled.clear();
        self.note(|w| format!("controller {controller} starts at {}", w.stamp(controller)));
        self.after(1, Happening::ControllerTick { controller, life });
    }

    pub(crate) fn stamp(&self, controller: usize) -> Stamp {
        self.controllers[controller].book.stamp()
    }

    /// Writes what the book has changed, and `changes`, in one transaction. False: they may or may not have been written,
    /// and the book's are due again.
    pub(crate) fn commit(&mut self, controller: usize, changes: &[Change]) -> bool {
        let batch = self.controllers[controller].book.take_unwritten();
        if batch.is_empty() && changes.is_empty() {
            return true;
        }
        let fails = self.strikes(SiteFault::CommitFails, 15);
        let unknown = !fails && self.strikes(SiteFault::CommitUnknown, 15);
        let writes = !(fails || unknown && self.rng.chance(500));
        let of = &mut self.controllers[controller];
        if writes {
            for row in batch.rows() {
                of.db.write(row.clone());
            }
            for change in changes {
                of.db.change(change.clone());
            }
        }
        if fails || unknown {
            of.book.not_written(batch);
            self.note(|_| "controller: a commit failed".to_owned());
            return false;
        }
        true
    }

    pub(crate) fn ask(&mut self, controller: usize, to: NameId, what: Ask, purpose: Purpose) {
        let is_poll = matches!(what, Ask::Poll);
        if !is_poll && !self.commit(controller, &[]) {
            if let Purpose::Job(job) = purpose {
                self.job_hears(controller, job, to, None);
            }
            return;
        }
        let ask = self.next_number();
        let of = &mut self.controllers[controller];
        let stamp = match purpose {
            Purpose::Whole(stamp, _) => stamp,
            _ => of.book.stamp(),
        };
        of.asks.insert(ask, (to, purpose));
        let caller = Caller {
            controller,
            life: of.life,
            ask,
        };
        let what = Box::new(what);
        let packet = Packet::Ask {
            caller,
            stamp,
            what,
        };
        self.send(Place::Controller(controller), Place::Name(to), packet);
        self.after(ASK_MS, Happening::AskTimesOut(caller));
    }

    /// Whom a caller asked and why, once; nothing once it was answered or is another life.
    fn take_asked(&mut self, caller: Caller) -> Option<(NameId, Purpose)> {
        let of = &mut self.controllers[caller.controller];
        (of.is_up && of.life == caller.life).then_some(())?;
        of.asks.remove(&caller.ask)
    }

    pub(crate) fn ask_times_out(&mut self, caller: Caller) {
        let controller = caller.controller;
        let Some((name, purpose)) = self.take_asked(caller) else {
            return;
        };
        let of = &mut self.controllers[controller];
        match purpose {
            Purpose::Poll(_) => {
                of.polled.remove(&name);
                of.book.lose(&self.names[name]);
            }
            Purpose::Job(job) => self.job_hears(controller, job, name, None),
            Purpose::Update | Purpose::Whole(..) | Purpose::Nothing => {}
        }
    }

    pub(crate) fn controller_tick(&mut self, controller: usize, life: u64) {
        let of = &self.controllers[controller];
        if !of.is_up || of.life != life {
            return;
        }
        let pause = of.frozen_until.saturating_sub(self.now);
        let tick = Happening::ControllerTick { controller, life };
        if pause > 0 {
            return self.after(pause, tick);
        }
        self.after(TICK_MS, tick);
        if self.is_faulty && self.rng.chance(60) {
            let of = &mut self.controllers[controller];
            of.backup = Some(of.db.clone());
        }
        self.poll_all(controller);
        self.take_over(controller);
        self.update_all(controller);
        self.pause_copies(controller);
        self.settle_overtaken(controller);
        self.follow_moves(controller);
    }

    fn poll_all(&mut self, controller: usize) {
        for name in 0..self.names.len() {
            let of = &mut self.controllers[controller];
            let known = of.db.hosts.contains_key(&self.names[name]);
            if known && of.polled.insert(name) {
                let ticket = of.book.ask();
                self.ask(controller, name, Ask::Poll, Purpose::Poll(ticket));
            }
        }
    }

    fn update_all(&mut self, controller: usize) {
        for name in 0..self.names.len() {
            let book = &self.controllers[controller].book;
            let host = &self.names[name];
            let update = book.update_for(host).filter(|_| book.answers(host));
            if let Some(update) = update {
                self.ask(controller, name, Ask::Update(update), Purpose::Update);
            }
        }
    }

    /// A controller on an old copy of its database reads every host, then takes over.
    fn take_over(&mut self, controller: usize) {
        // Also a host that was off while this controller took over, and has asked since.
        for site in self.controllers[controller].book.to_enrol() {
            let row = HostRow::default();
            let site = SiteHost {
                counter: 0,
                machine_id: String::new(),
                ..site
            };
            self.controllers[controller].book.add_host(site, row);
            self.commit(controller, &[]);
        }
        let Some(takeover) = self.controllers[controller].book.takeover() else {
            return;
        };
        self.coverage.restored += 1;
        for host in takeover.hosts {
            if let Some(name) = self.id_of(&host) {
                let ticket = self.controllers[controller].book.ask();
                let purpose = Purpose::Whole(takeover.stamp, ticket);
                self.ask(controller, name, Ask::Whole, purpose);
            }
        }
        self.finish_takeover(controller);
    }

    fn finish_takeover(&mut self, controller: usize) {
        let of = &mut self.controllers[controller];
        if of.book.is_in_charge() {
            return;
        }
        if of.book.finish_takeover() == Ok(true) {
            of.is_old = false;
            self.coverage.takeovers += 1;
            self.note(|w| {
                format!(
                    "controller {controller} takes over: {}",
                    w.stamp(controller)
                )
            });
            // VMs that only records know are taken into the inventory. One that was deleted since is described there still.
            let found: Vec<Change> = self.vms_found(controller);
            self.commit(controller, &found);
        }
    }

    fn vms_found(&self, controller: usize) -> Vec<Change> {
        let book = &self.controllers[controller].book;
        let vms = self.vms.iter().enumerate();
        vms.filter_map(|(vm, name)| {
            let is_there = book.entry(name).is_some_and(|entry| !entry.deleted);
            is_there.then_some(Change::Exists(vm, true))
        })
        .collect()
    }

    /// Of several copies all but one are paused, with their memory kept.
    fn pause_copies(&mut self, controller: usize) {
        let of = &self.controllers[controller];
        if !of.book.is_in_charge() {
            return;
        }
        for (name, twice) in of.book.all_twice() {
            self.coverage.twice += 1;
            let Some(vm) = self.vm_of(&name) else {
                continue;
            };
            let ends = self.plant.ends_lower_copy();
            let event = if ends {
                Event::StopRequested
            } else {
                Event::PauseRequested
            };
            let hosts: Vec<HostName> = twice.to_pause().cloned().collect();
            for host in hosts {
                if let Some(to) = self.id_of(&host) {
                    let what = Ask::Do {
                        vm,
                        event: event.clone(),
                        discards: false,
                    };
                    self.ask(controller, to, what, Purpose::Nothing);
                }
            }
        }
    }

    /// What a host gave away before the VM went on without it, it gives up.
    fn settle_overtaken(&mut self, controller: usize) {
        for to in 0..self.names.len() {
            let book = &self.controllers[controller].book;
            for (name, by) in book.overtaken_gifts(&self.names[to]) {
                let Some(vm) = self.vm_of(&name) else {
                    continue;
                };
                let what = Ask::Do {
                    vm,
                    event: Event::GiftOvertaken {
                        by,
                        with_guest: false,
                    },
                    discards: false,
                };
                self.coverage.overtaken += 1;
                self.ask(controller, to, what, Purpose::Nothing);
            }
        }
    }

    pub(crate) fn controller_hears(&mut self, caller: Caller, from: NameId, reply: Reply) {
        let controller = caller.controller;
        let asked = self.take_asked(caller);
        let Some((name, purpose)) = asked.filter(|(name, _)| *name == from) else {
            return;
        };
        let of = &mut self.controllers[controller];
        match (purpose, reply) {
            (Purpose::Poll(ticket), Reply::Heard(heard, reports, places)) => {
                of.polled.remove(&name);
                self.hear_host(controller, name, ticket, heard, reports);
                self.follow_places(controller, name, &places);
            }
            (Purpose::Update, Reply::Updated(you, knows)) => {
                let host = self.names[name].clone();
                of.book.updated(&host, you, knows);
            }
            (Purpose::Whole(at, ticket), Reply::Whole(whole)) => {
                let host = self.names[name].clone();
                of.book.take_whole(&host, at, ticket, whole);
                self.commit(controller, &[]);
            }
            (Purpose::Job(job), reply) => self.job_hears(controller, job, name, Some(reply)),
            _ => {}
        }
    }

    fn hear_host(
        &mut self,
        controller: usize,
        name: NameId,
        ticket: Ticket,
        heard: Heard,
        reports: Vec<Report>,
    ) {
        let host = self.names[name].clone();
        let of = &mut self.controllers[controller];
        let was_fenced = of.book.is_fenced(&host);
        // What was said of a host stands until it is certain that this database is the newest, and goes with the copy if it is none.
        let (was_starting, was_restored) = (of.book.is_starting(), of.book.is_restored());
        let records = heard.records.clone();
        let news = of.book.hear(&host, ticket, heard);
        let counts = !was_starting && of.book.is_restored() == was_restored;
        for said in &records {
            let said = (&said.vm, &said.claim, &said.images[..]);
            self.heard_of_image(controller, &host, said);
        }
        self.commit(controller, &[]);
        for one in &news {
            self.coverage.news(one);
            self.note(|_| format!("controller {controller}: {one:?}"));
        }
        for one in &news {
            if let News::FencedAnswered { host, .. } = one {
                self.alarm_shown(host);
            }
        }
        if was_fenced && counts && self.machines[self.address[name]].falsely_fenced {
            let is_due = self.alarms_due.iter().any(|(_, due)| *due == name);
            if !is_due {
                self.alarms_due.push((self.now + 5000, name));
            }
        }
        self.take_reports(controller, &host, &reports);
    }

    fn alarm_shown(&mut self, host: &HostName) {
        let Some(name) = self.id_of(host) else {
            return;
        };
        self.alarms_due.retain(|(_, due)| *due != name);
        for machine in self.machines.iter_mut().filter(|m| m.name == name) {
            machine.falsely_fenced = false;
        }
    }

    /// A host asks before it boots.
    pub(crate) fn controller_answers(
        &mut self,
        controller: usize,
        asker: MachineId,
        agent: u64,
        round: u64,
        question: &SiteQuestion,
    ) {
        let name = self.name_of(asker);
        let is_new_life = self.controllers[controller]
            .book
            .is_new_life(&name, question);
        let other = self.address[self.machines[asker].name];
        let other_answers = is_new_life
            && other != asker
            && self.machines[other].agent.is_some()
            && self.machines[other].agent_frozen_until <= self.now
            && self.reaches(controller, other);
        let of = &mut self.controllers[controller];
        let answer = of.book.answer(&name, question, other_answers);
        if !self.commit(controller, &[]) {
            return;
        }
        if answer.standing == Standing::Removed {
            self.coverage.removed_answers += 1;
        }
        if answer.in_charge && self.controllers[controller].is_old {
            self.machines[asker].heard_old_controller = true;
        }
        let packet = Packet::Answered {
            agent,
            round,
            answer: Box::new(answer),
        };
        self.send(Place::Controller(controller), Place::Machine(asker), packet);
    }
}
