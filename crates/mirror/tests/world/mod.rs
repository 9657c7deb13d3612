//! The mirror between two disks of a model, and a guest that writes.
//!
//! The core's bytes are the model's sectors: 512 bytes that are never torn. A block, which is what a guest writes at least, has
//! several of them in some worlds. A disk ends what it is told in any order, sector by sector; a read or a write may fail, and a
//! write that failed or was under way at a power cut has left any of its sectors. There is no cache: what a disk has told to be
//! done survives a cut.
//!
//! Owned by the test. Whatever is wrong is kept as the first of its kind in [`World::wrong`].

mod guest;

use godwit_mirror::{Copy, Mirror, Newest, Phase, Side, Step, WriteId, overlap};
pub use guest::Guest;
use std::collections::BTreeSet;
use std::ops::Range;

/// The same numbers in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// Of a part: all, none, the first ones, or any.
    fn some_of(&mut self, all: Range<u64>) -> Vec<u64> {
        let len = all.end - all.start;
        match self.below(4) {
            0 => Vec::new(),
            1 => all.collect(),
            2 => all.take(self.below(len + 1) as usize).collect(),
            _ => all.filter(|_| self.below(2) == 0).collect(),
        }
    }
}

pub const SECTORS: u64 = 64;

/// One in so many fails; none where it is 0.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rates {
    pub source_writes: u64,
    pub destination_writes: u64,
    pub source_reads: u64,
    pub power_cuts: u64,
}

/// How often each kind of failure came, over all seeds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub failed_at_source: u64,
    /// Of them, those to both sides: both may be unlike then.
    pub failed_while_mirrored: u64,
    /// Writes of which a part came: at the source that failed,
    pub torn_at_source: u64,
    /// at the destination that failed,
    pub torn_at_destination: u64,
    /// and at either by a power cut,
    pub torn_by_cut: u64,
    /// or on a link that was lost.
    pub torn_on_link: u64,
    pub failed_at_destination: u64,
    pub failed_reads: u64,
    pub power_cuts: u64,
    /// Writes that nobody answered, for a power cut.
    pub unanswered: u64,
    /// How often both disks were found equal with nothing under way.
    pub equal: u64,
}

impl Counts {
    /// What ends a mirror.
    pub fn ends(&self) -> u64 {
        self.failed_at_destination + self.failed_reads
    }

    pub fn add(&mut self, other: Self) {
        self.failed_at_source += other.failed_at_source;
        self.failed_while_mirrored += other.failed_while_mirrored;
        self.torn_at_source += other.torn_at_source;
        self.torn_at_destination += other.torn_at_destination;
        self.torn_by_cut += other.torn_by_cut;
        self.torn_on_link += other.torn_on_link;
        self.failed_at_destination += other.failed_at_destination;
        self.failed_reads += other.failed_reads;
        self.power_cuts += other.power_cuts;
        self.unanswered += other.unanswered;
        self.equal += other.equal;
    }
}

/// Something that a disk does some time.
#[derive(Debug, Clone)]
enum Job {
    /// Of a write of this range, the sectors that are still to be written.
    Write(WriteId, Side, Range<u64>, Vec<u64>),
    /// What was read at the source, once it was.
    Copy(Copy, Option<Vec<u64>>),
    /// A numbered change on its way over a link.
    Change(u64, Range<u64>, Vec<u64>),
    /// The mirror is to be given up.
    End,
}

pub struct World {
    pub mirror: Mirror,
    pub numbers: Numbers,
    pub guest: Guest,
    pub counts: Counts,
    rates: Rates,
    /// What a mirror is made with.
    made_with: (u64, usize),
    block: u64,
    source: Vec<u64>,
    destination: Vec<u64>,
    jobs: Vec<Job>,
    /// Over a link: what is given a number has ended there, and the later number wins.
    newest: Option<Newest>,
    given: u64,
    wrong: Option<String>,
}

impl World {
    /// With storage that does what it is asked.
    pub fn new(seed: u64, over_a_link: bool) -> Self {
        let mut numbers = Numbers(seed);
        let (region, copies) = (1 + numbers.below(9), 1 + numbers.below(5) as usize);
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
            rates: Rates::default(),
            made_with: (region, copies),
            block,
            source,
            destination,
            jobs: Vec::new(),
            newest: over_a_link.then(Newest::default),
            given: 0,
            wrong: None,
        }
    }

    /// Where the storage fails, each seed in its own way.
    pub fn failing(seed: u64, over_a_link: bool) -> Self {
        let mut world = Self::new(seed, over_a_link);
        let mut rate = |worlds: u64, one_in: u64| match world.numbers.below(worlds) {
            0 => one_in,
            _ => 0,
        };
        world.rates = Rates {
            source_writes: rate(2, 6),
            destination_writes: rate(3, 25),
            source_reads: rate(4, 80),
            power_cuts: rate(4, 100),
        };
        world
    }

    #[cfg(feature = "planted-faults")]
    pub fn with(mut self, plant: godwit_mirror::Plant) -> Self {
        self.mirror.plant(plant);
        self
    }

    pub fn is_over_a_link(&self) -> bool {
        self.newest.is_some()
    }

    pub fn is_busy(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Whether both sides are to be equal now.
    pub fn is_at_rest(&self) -> bool {
        self.mirror.phase() == Phase::Synchronised && self.jobs.is_empty()
    }

    /// What must hold now.
    pub fn check(&mut self) -> Result<(), String> {
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        self.guest.check(&self.source)?;
        if self.mirror.phase() == Phase::Ended {
            self.guest.is_held_by_writes_alone()?;
        }
        if !self.is_at_rest() {
            return Ok(());
        }
        self.counts.equal += 1;
        match self.source == self.destination {
            true => Ok(()),
            false => Err(format!("{:?} is not {:?}", self.destination, self.source)),
        }
    }

    fn fails(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.numbers.below(one_in) == 0
    }

    fn is_wrong(&mut self, wrong: String) {
        self.wrong.get_or_insert(wrong);
    }

    fn give(&mut self, range: Range<u64>, content: Vec<u64>) {
        self.given += 1;
        self.jobs.push(Job::Change(self.given, range, content));
    }

    pub fn carry_out(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Source(id) => {
                    let range = self.guest.begins(id, false);
                    self.begin_at(id, Side::Source, range);
                }
                Step::Both(id) => {
                    let range = self.guest.begins(id, true);
                    self.begin_at(id, Side::Source, range.clone());
                    if self.newest.is_none() {
                        self.begin_at(id, Side::Destination, range);
                        continue;
                    }
                    let content = vec![id; (range.end - range.start) as usize];
                    self.give(range, content);
                    self.guest.has_ended_at_destination(id);
                    let steps = self.mirror.written(id, Side::Destination, true);
                    self.carry_out(steps);
                }
                Step::Copy(copy) => self.jobs.push(Job::Copy(copy, None)),
                Step::Answer { write, done } => {
                    let has_ended = self.mirror.phase() == Phase::Ended;
                    if let Err(wrong) = self.guest.is_told(write, done, has_ended) {
                        self.is_wrong(wrong);
                    }
                }
            }
        }
    }

    fn begin_at(&mut self, id: WriteId, side: Side, range: Range<u64>) {
        let left = range.clone().collect();
        self.jobs.push(Job::Write(id, side, range, left));
    }

    pub fn write(&mut self) {
        let blocks = SECTORS / self.block;
        let start = self.numbers.below(blocks);
        let end = (start + 1 + self.numbers.below(12 / self.block)).min(blocks);
        let range = start * self.block..end * self.block;
        let id = self.guest.writes(range.clone());
        let steps = self.mirror.write(id, range);
        self.carry_out(steps);
    }

    /// Any of the jobs ends, or goes on.
    pub fn work(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let index = self.numbers.below(self.jobs.len() as u64) as usize;
        match self.jobs.swap_remove(index) {
            Job::Write(id, side, range, left) => self.go_on_writing(id, side, range, left),
            Job::Copy(copy, None) => self.read(copy),
            Job::Copy(copy, Some(read)) => self.copy(&copy, read),
            Job::Change(number, range, content) => {
                let fails = self.fails(self.rates.destination_writes);
                let is_torn = self.arrive(number, &range, &content, !fails);
                if fails {
                    self.counts.failed_at_destination += 1;
                    self.counts.torn_at_destination += u64::from(is_torn);
                    self.jobs.push(Job::End);
                }
            }
            Job::End => self.give_up(),
        }
    }

    fn disk(&mut self, side: Side) -> &mut Vec<u64> {
        match side {
            Side::Source => &mut self.source,
            Side::Destination => &mut self.destination,
        }
    }

    fn go_on_writing(&mut self, id: WriteId, side: Side, range: Range<u64>, mut left: Vec<u64>) {
        let one_in = match side {
            Side::Source => self.rates.source_writes,
            Side::Destination => self.rates.destination_writes,
        };
        if self.fails(one_in) {
            return self.fail_to_write(id, side, range, left);
        }
        if left.len() > 1 && self.numbers.below(3) == 0 {
            // A part of it comes first, whichever.
            let at = self.numbers.below(left.len() as u64) as usize;
            let sector = left.swap_remove(at);
            self.disk(side)[sector as usize] = id;
            return self.jobs.push(Job::Write(id, side, range, left));
        }
        for sector in left {
            self.disk(side)[sector as usize] = id;
        }
        self.has_ended(id, side, true);
    }

    /// It leaves any of its sectors.
    fn fail_to_write(&mut self, id: WriteId, side: Side, range: Range<u64>, left: Vec<u64>) {
        let is_torn = self.tear(id, side, &range, left);
        match side {
            Side::Source => {
                self.counts.failed_at_source += 1;
                self.counts.torn_at_source += u64::from(is_torn);
                self.counts.failed_while_mirrored += u64::from(self.guest.is_mirrored(id));
                self.has_ended(id, side, false);
            }
            // Whoever drives the core gives it up; the write is awaited until then.
            Side::Destination => {
                self.counts.failed_at_destination += 1;
                self.counts.torn_at_destination += u64::from(is_torn);
                self.jobs.push(Job::End);
            }
        }
    }

    /// Writes any of the sectors that are left. Returns whether a part of the whole is there then.
    fn tear(&mut self, id: WriteId, side: Side, range: &Range<u64>, left: Vec<u64>) -> bool {
        let some: BTreeSet<u64> = self.numbers.some_of(range.clone()).into_iter().collect();
        for sector in left.iter().filter(|sector| some.contains(sector)) {
            self.disk(side)[*sector as usize] = id;
        }
        let missing = left.iter().filter(|sector| !some.contains(sector)).count() as u64;
        missing > 0 && missing < range.end - range.start
    }

    fn has_ended(&mut self, id: WriteId, side: Side, done: bool) {
        match side {
            Side::Source => self.guest.has_ended_at_source(id, done),
            Side::Destination => self.guest.has_ended_at_destination(id),
        }
        let steps = self.mirror.written(id, side, done);
        self.carry_out(steps);
    }

    fn read(&mut self, copy: Copy) {
        if self.fails(self.rates.source_reads) {
            self.counts.failed_reads += 1;
            return self.jobs.push(Job::End);
        }
        let read = self.source[copy.range.start as usize..copy.range.end as usize].to_vec();
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
            self.give(copy.range.clone(), read);
        } else if self.fails(self.rates.destination_writes) {
            self.counts.failed_at_destination += 1;
            let is_torn = self.apply_some(&copy.range, &read);
            self.counts.torn_at_destination += u64::from(is_torn);
            return self.jobs.push(Job::End);
        } else {
            self.apply(copy.range.clone(), &read);
        }
        let steps = self.mirror.copied(copy);
        self.carry_out(steps);
    }

    fn apply(&mut self, range: Range<u64>, content: &[u64]) {
        self.destination[range.start as usize..range.end as usize].copy_from_slice(content);
    }

    /// A copy comes in part. Returns whether a part of it came.
    fn apply_some(&mut self, range: &Range<u64>, content: &[u64]) -> bool {
        let some = self.numbers.some_of(range.clone());
        for sector in &some {
            self.destination[*sector as usize] = content[(sector - range.start) as usize];
        }
        !some.is_empty() && (some.len() as u64) < range.end - range.start
    }

    /// A change that was under way over a link comes, as a whole or in part. Returns whether a part of it came.
    fn arrive(&mut self, number: u64, range: &Range<u64>, content: &[u64], is_whole: bool) -> bool {
        let some: Vec<u64> = match is_whole {
            true => range.clone().collect(),
            false => self.numbers.some_of(range.clone()),
        };
        let newest = self.newest.as_mut().unwrap();
        let won = newest.admit(number, range.clone());
        for sector in won.into_iter().flatten() {
            if some.contains(&sector) {
                self.destination[sector as usize] = content[(sector - range.start) as usize];
            }
        }
        !some.is_empty() && (some.len() as u64) < range.end - range.start
    }

    /// The link is lost, with what was on it: it is made anew later.
    pub fn lose_the_link(&mut self) {
        let steps = self.mirror.detach();
        self.carry_out(steps);
        let (lost, kept) = std::mem::take(&mut self.jobs)
            .into_iter()
            .partition(|job| matches!(job, Job::Change(..)));
        self.jobs = kept;
        for job in lost {
            let Job::Change(number, range, content) = job else {
                continue;
            };
            let is_torn = self.arrive(number, &range, &content, false);
            self.counts.torn_on_link += u64::from(is_torn);
            let steps = self.mirror.lost(&range);
            self.carry_out(steps);
        }
        self.newest = Some(Newest::default());
    }

    /// One side is of no use any more.
    pub fn give_up(&mut self) {
        if self.numbers.below(2) == 0 {
            let steps = self.mirror.detach();
            self.carry_out(steps);
        }
        let steps = self.mirror.give_up();
        self.carry_out(steps);
    }

    pub fn may_lose_power(&mut self) {
        if self.fails(self.rates.power_cuts) {
            self.lose_power();
        }
    }

    /// What was under way is torn, and answered by nobody; the disk is mirrored anew, from the beginning.
    fn lose_power(&mut self) {
        self.counts.power_cuts += 1;
        for job in std::mem::take(&mut self.jobs) {
            let is_torn = match job {
                Job::Write(id, side, range, left) => self.tear(id, side, &range, left),
                Job::Change(number, range, content) => self.arrive(number, &range, &content, false),
                Job::Copy(copy, Some(read)) => self.apply_some(&copy.range, &read),
                _ => false,
            };
            self.counts.torn_by_cut += u64::from(is_torn);
        }
        self.counts.unanswered += self.guest.is_told_nothing();
        let (region, copies) = self.made_with;
        self.mirror = Mirror::new(SECTORS, region);
        self.mirror.allow(copies);
        self.newest = self.newest.take().map(|_| Newest::default());
    }
}
