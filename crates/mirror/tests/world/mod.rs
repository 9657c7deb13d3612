//! The mirror between two disks of a model, and a guest that reads, writes, discards, writes zeroes and flushes.
//!
//! The core's bytes are the model's sectors: 512 bytes that are never torn. A block, which is what a guest writes at least, has
//! several of them in some worlds. A disk ends what it is told in any order, sector by sector; whatever it is told may fail, and a
//! write that failed or was under way at a power cut has left any of its sectors. Both disks have volatile caches ([`Disk`]).
//!
//! What drives the mirror here does as `Mirroring` in `blockio` does: it asks the same [`Flushes`]. Owned by the test. Whatever is
//! wrong is kept as the first of its kind.

mod counts;
mod disk;
mod guest;
mod numbers;
mod power;
mod torn;

pub use counts::Counts;
use disk::Disk;
use godwit_mirror::{
    Copy, Destination, Flushes, Kind, Mirror, Newest, Phase, Route, Side, Step, WriteId, overlap,
};
pub use guest::Guest;
pub use numbers::{Numbers, Rates};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub const SECTORS: u64 = 64;

/// What kind of destination it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// Changes are carried out in place, in any order, and confirmed.
    InPlace,
    /// They are numbered, and confirmed when they have come; a guest waits for that.
    Near,
    /// They are numbered, and what was given has ended for the guest.
    Far,
}

/// A change that one side carries out in place.
#[derive(Debug, Clone)]
struct Put {
    id: WriteId,
    side: Side,
    kind: Kind,
    value: u64,
    durable: bool,
    range: Range<u64>,
    /// The sectors that are still to be written.
    left: Vec<u64>,
}

/// A numbered change on its way over a link.
#[derive(Debug, Clone)]
struct Change {
    number: u64,
    range: Range<u64>,
    content: Vec<u64>,
    /// Who waits for it.
    write: Option<WriteId>,
}

#[derive(Debug, Clone)]
struct Flush {
    id: u64,
    side: Side,
    /// All that was given up to this number is carried out before.
    after: u64,
    began: Option<u64>,
}

/// Something that a disk does some time.
#[derive(Debug, Clone)]
enum Job {
    Put(Put),
    /// What was read at the source, once it was.
    Copy(Copy, Option<Vec<u64>>),
    Change(Change),
    Flush(Flush),
    Read(Range<u64>, Side),
    /// The destination says that it has done this.
    Told(u64),
    /// The mirror is to be given up.
    End,
}

pub struct World {
    pub mirror: Mirror,
    pub numbers: Numbers,
    pub guest: Guest,
    pub counts: Counts,
    pub to: To,
    flushes: Flushes,
    rates: Rates,
    /// What a mirror is made with.
    made_with: (u64, usize),
    block: u64,
    source: Disk,
    destination: Disk,
    jobs: Vec<Job>,
    /// Flushes that the destination is to tell of.
    awaited: BTreeSet<u64>,
    /// Changes that pass by the mirror.
    passing: BTreeSet<WriteId>,
    /// What became of flushes at the source.
    outcomes: BTreeMap<u64, bool>,
    /// Over a link: the later number wins.
    newest: Option<Newest>,
    given: u64,
    wrong: Option<String>,
    /// Whether something has just become durable, so that a power cut soon tells most.
    was_flushed: bool,
    /// When the source was looked at last.
    looked: (u64, u64),
    #[cfg(feature = "planted-faults")]
    plant: Option<godwit_mirror::Plant>,
}

impl World {
    /// With storage that does what it is asked.
    pub fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let to = [To::InPlace, To::Near, To::Far][(seed % 3) as usize];
        let (region, copies) = (2 + numbers.below(15), 1 + numbers.below(5) as usize);
        let block = 1 << numbers.below(3);
        let mut mirror = Mirror::new(SECTORS, region);
        mirror.allow(copies);
        let (mut source, mut destination) = (vec![7; 64], vec![u64::MAX; 64]);
        if numbers.below(2) == 0 {
            // A hole, which a new image has, too.
            let start = numbers.below(SECTORS);
            let hole = start..(start + 20).min(SECTORS);
            for index in hole.clone() {
                (source[index as usize], destination[index as usize]) = (0, 0);
            }
            mirror.skip(&hole);
        }
        Self {
            mirror,
            numbers,
            guest: Guest::of(&source),
            counts: Counts::default(),
            to,
            flushes: Flushes::default(),
            rates: Rates::default(),
            made_with: (region, copies),
            block,
            source: Disk::of(&source),
            destination: Disk::of(&destination),
            jobs: Vec::new(),
            awaited: BTreeSet::new(),
            passing: BTreeSet::new(),
            outcomes: BTreeMap::new(),
            newest: (to != To::InPlace).then(Newest::default),
            given: 0,
            wrong: None,
            was_flushed: false,
            looked: (0, 0),
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }

    /// Where the storage fails, each seed in its own way.
    pub fn failing(seed: u64) -> Self {
        let mut world = Self::new(seed);
        let mut rate = |worlds: u64, one_in: u64| match world.numbers.below(worlds) {
            0 => one_in,
            _ => 0,
        };
        world.rates = Rates {
            source_writes: rate(2, 8),
            destination_writes: rate(4, 40),
            source_reads: rate(4, 80),
            power_cuts: rate(2, 150),
        };
        world
    }

    #[cfg(feature = "planted-faults")]
    pub fn with(mut self, plant: godwit_mirror::Plant) -> Self {
        self.mirror.plant(plant);
        self.flushes.plant(plant);
        self.plant = Some(plant);
        self
    }

    pub fn is_over_a_link(&self) -> bool {
        self.newest.is_some()
    }

    pub fn is_busy(&self) -> bool {
        !self.jobs.is_empty()
    }

    fn destination(&self) -> Destination {
        let confirms = self.to != To::Far;
        Destination {
            confirms,
            may_be_left_alone: confirms,
            is_bound: false,
        }
    }

    fn is_synchronised(&self) -> bool {
        let (phase, to) = (self.mirror.phase(), self.destination());
        self.flushes.is_synchronised(phase, to)
    }

    fn fails(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.numbers.below(one_in) == 0
    }

    fn judge(&mut self, judged: Result<(), String>) {
        if let Err(wrong) = judged {
            self.wrong.get_or_insert(wrong);
        }
    }

    fn give(&mut self, range: Range<u64>, content: Vec<u64>, write: Option<WriteId>) {
        self.given += 1;
        self.jobs.push(Job::Change(Change {
            number: self.given,
            range,
            content,
            write,
        }));
    }

    pub fn carry_out(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Source(id) => self.begin_at_source(id, false),
                Step::Both(id) => self.begin_at_both(id),
                Step::Copy(copy) => self.jobs.push(Job::Copy(copy, None)),
                Step::Answer { write, done } => {
                    let has_ended = self.mirror.phase() == Phase::Ended;
                    let told = self.guest.is_told(write, done, has_ended);
                    self.judge(told);
                }
            }
        }
        self.flushes.observe(self.mirror.phase());
    }

    fn begin_at_source(&mut self, id: WriteId, mirrored: bool) {
        let open = self.guest.begins(id, mirrored);
        self.jobs.push(Job::Put(Put {
            id,
            side: Side::Source,
            kind: open.kind,
            value: open.value(id),
            durable: open.durable,
            left: open.range.clone().collect(),
            range: open.range,
        }));
    }

    fn begin_at_both(&mut self, id: WriteId) {
        self.begin_at_source(id, true);
        let Some(Job::Put(here)) = self.jobs.last().cloned() else {
            return;
        };
        let content = vec![here.value; here.left.len()];
        match self.to {
            To::InPlace => self.jobs.push(Job::Put(Put {
                side: Side::Destination,
                ..here
            })),
            To::Near => self.give(here.range, content, Some(id)),
            To::Far => {
                self.give(here.range, content, None);
                self.has_ended_there(id);
            }
        }
    }

    /// The guest asks for something.
    pub fn ask(&mut self) {
        let kind = match self.numbers.below(20) {
            0..=3 => Kind::Read,
            4..=6 => Kind::Flush,
            7..=9 => Kind::Zeroes,
            10..=11 => Kind::Discard,
            _ => Kind::Write,
        };
        let blocks = SECTORS / self.block;
        let most = if Self::erases(kind) { 32 } else { 12 };
        let start = self.numbers.below(blocks);
        let end = (start + 1 + self.numbers.below(most / self.block)).min(blocks);
        let range = start * self.block..end * self.block;
        let route = self
            .flushes
            .route(kind, self.mirror.phase(), self.destination());
        match kind {
            Kind::Read => {
                self.counts.reads += 1;
                self.guest.reads();
                let Route::Alone(side) = route else {
                    return self.judge(Err(format!("a read goes {route:?}")));
                };
                self.jobs.push(Job::Read(range, side));
            }
            Kind::Flush => self.flush(route),
            _ => self.change(kind, range, route),
        }
    }

    fn change(&mut self, kind: Kind, range: Range<u64>, route: Route) {
        self.counts.erased += u64::from(Self::erases(kind));
        let durable = self.numbers.below(6) == 0;
        self.counts.durable_writes += u64::from(durable);
        let id = self.guest.changes(kind, range.clone(), durable);
        #[cfg(feature = "planted-faults")]
        if kind == Kind::Zeroes {
            self.mirror.writes_zeroes(id);
        }
        if route != Route::Mirrored {
            self.passing.insert(id);
            return self.begin_at_source(id, false);
        }
        let steps = self.mirror.write(id, range);
        self.carry_out(steps);
    }

    fn flush(&mut self, route: Route) {
        let id = self.guest.flushes();
        self.begin_flush(id, Side::Source);
        if route == Route::Both {
            self.flushes.begin(id, true);
            self.begin_flush(id, Side::Destination);
        }
    }

    fn begin_flush(&mut self, id: u64, side: Side) {
        if side == Side::Destination {
            self.awaited.insert(id);
        }
        self.jobs.push(Job::Flush(Flush {
            id,
            side,
            after: self.given,
            began: None,
        }));
    }

    /// As a driver's look: what the destination has becomes durable now that both sides are equal.
    pub fn make_base(&mut self) {
        if self
            .flushes
            .wants_base(self.mirror.phase(), self.destination())
        {
            let id = self.guest.number();
            self.begin_flush(id, Side::Destination);
            self.flushes.begin_base(id);
        }
    }

    /// Any of the jobs ends, or goes on.
    pub fn work(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let index = self.numbers.below(self.jobs.len() as u64) as usize;
        match self.jobs.swap_remove(index) {
            Job::Put(put) => self.go_on_writing(put),
            Job::Copy(copy, None) => self.read(copy),
            Job::Copy(copy, Some(read)) => self.copy(&copy, read),
            Job::Change(change) => {
                let fails = self.fails(self.rates.destination_writes);
                let is_torn = self.arrive(&change, !fails);
                if fails {
                    self.fail_there(is_torn);
                } else if let Some(id) = change.write {
                    self.hear(id);
                }
            }
            Job::Flush(flush) => self.go_on_flushing(flush),
            Job::Read(range, side) => self.read_for_guest(&range, side),
            Job::Told(id) => self.has_ended_there(id),
            Job::End => self.give_up(),
        }
    }

    /// Whoever drives the core gives it up; what failed is awaited until then.
    fn fail_there(&mut self, is_torn: bool) {
        self.counts.failed_at_destination += 1;
        self.counts.torn_at_destination += u64::from(is_torn);
        self.jobs.push(Job::End);
    }

    fn disk(&mut self, side: Side) -> &mut Disk {
        match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        }
    }

    fn rate(&self, side: Side) -> u64 {
        match side {
            Side::Source => self.rates.source_writes,
            Side::Destination => self.rates.destination_writes,
        }
    }

    fn read_for_guest(&mut self, range: &Range<u64>, side: Side) {
        let fails = self.fails(self.rates.source_reads);
        self.counts.failed_reads_of_guest += u64::from(fails);
        let found = self.disk(side).read(range);
        let judged = self.guest.has_read(range, (!fails).then_some(&found[..]));
        self.judge(judged);
    }

    fn go_on_flushing(&mut self, mut flush: Flush) {
        let is_before = |job: &Job| match job {
            Job::Change(change) => change.number <= flush.after,
            _ => false,
        };
        if flush.side == Side::Destination && self.jobs.iter().any(is_before) {
            return self.jobs.push(Job::Flush(flush));
        }
        let Some(began) = flush.began else {
            flush.began = Some(self.disk(flush.side).begin_flush());
            return self.jobs.push(Job::Flush(flush));
        };
        let fails = self.fails(self.rate(flush.side));
        if !fails {
            self.disk(flush.side).end_flush(began);
        }
        match flush.side {
            Side::Destination if fails => {
                self.counts.failed_flushes_there += 1;
                self.fail_there(false);
            }
            Side::Destination => self.has_ended_there(flush.id),
            Side::Source => {
                self.counts.failed_flushes += u64::from(fails);
                self.outcomes.insert(flush.id, !fails);
                match self.flushes.awaits(flush.id) {
                    true => self.end_flush(flush.id, Side::Source),
                    false => {
                        self.counts.flushed_at_source += 1;
                        self.answer_flush(flush.id);
                    }
                }
            }
        }
    }

    fn end_flush(&mut self, id: u64, side: Side) {
        if self.flushes.ended(id, side) {
            self.counts.flushed_at_both += 1;
            self.answer_flush(id);
        }
    }

    fn answer_flush(&mut self, id: u64) {
        let done = self.outcomes.remove(&id).unwrap();
        let judged = self.guest.is_flushed(id, done);
        self.judge(judged);
        self.was_flushed = true;
    }

    /// The destination has carried out a write.
    fn hear(&mut self, id: WriteId) {
        let (phase, to) = (self.mirror.phase(), self.destination());
        match self.guest.is_durable(id) && self.flushes.is_due_there(phase, to) {
            true => self.begin_flush(id, Side::Destination),
            false => self.has_ended_there(id),
        }
    }

    /// The destination has carried this out, or is not waited for.
    fn has_ended_there(&mut self, id: u64) {
        self.awaited.remove(&id);
        if self.flushes.base_ended(id) {
            self.was_flushed = true;
            return self.carry_out(Vec::new());
        }
        if self.flushes.awaits(id) {
            return self.end_flush(id, Side::Destination);
        }
        self.guest.has_ended_at_destination(id);
        let steps = self.mirror.written(id, Side::Destination, true);
        self.carry_out(steps);
    }

    fn go_on_writing(&mut self, mut put: Put) {
        if self.fails(self.rate(put.side)) {
            return self.fail_to_write(&put);
        }
        if put.left.len() > 1 && self.numbers.below(3) == 0 {
            // A part of it comes first, whichever.
            let at = self.numbers.below(put.left.len() as u64) as usize;
            let sector = put.left.swap_remove(at);
            self.disk(put.side).write(sector, put.value);
            return self.jobs.push(Job::Put(put));
        }
        for sector in &put.left {
            self.disk(put.side).write(*sector, put.value);
        }
        match put.side {
            Side::Source => {
                if put.durable {
                    self.source.is_durable(&put.range, put.value);
                }
                self.has_ended_here(put.id, true);
            }
            Side::Destination => self.hear(put.id),
        }
    }

    /// It leaves any of its sectors.
    fn fail_to_write(&mut self, put: &Put) {
        let is_torn = self.tear(put);
        if put.side == Side::Destination {
            return self.fail_there(is_torn);
        }
        self.counts.failed_at_source += 1;
        self.counts.failed_erasing += u64::from(Self::erases(put.kind));
        self.counts.torn_at_source += u64::from(is_torn);
        self.counts.failed_while_mirrored += u64::from(self.guest.is_mirrored(put.id));
        self.has_ended_here(put.id, false);
    }

    fn has_ended_here(&mut self, id: WriteId, done: bool) {
        self.guest.has_ended_at_source(id, done);
        if self.passing.remove(&id) {
            let told = self.guest.is_told(id, done, true);
            return self.judge(told);
        }
        let steps = self.mirror.written(id, Side::Source, done);
        self.carry_out(steps);
    }

    fn read(&mut self, copy: Copy) {
        if self.fails(self.rates.source_reads) {
            self.counts.failed_reads += 1;
            return self.jobs.push(Job::End);
        }
        let read = self.source.read(&copy.range);
        self.jobs.push(Job::Copy(copy, Some(read)));
    }

    fn copy(&mut self, copy: &Copy, read: Vec<u64>) {
        if !self.mirror.wants(copy) {
            return;
        }
        // There may be no room for it.
        if self.numbers.below(8) == 0 {
            let steps = self.mirror.put_back(copy);
            return self.carry_out(steps);
        }
        if self.newest.is_some() {
            self.give(copy.range.clone(), read, None);
        } else if self.fails(self.rates.destination_writes) {
            let is_torn = self.apply_some(&copy.range, &read);
            return self.fail_there(is_torn);
        } else {
            for (sector, value) in copy.range.clone().zip(read) {
                self.destination.write(sector, value);
            }
        }
        let steps = self.mirror.copied(copy);
        self.carry_out(steps);
    }
}
