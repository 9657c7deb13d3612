//! Two disks of a model with a tracking between them, and a guest that writes, erases and lets storage fail.
//!
//! Bytes of the core are sectors here. Each thing takes time: a write lands sector by sector, a copy reads sector by sector and is given later,
//! and what was given lands at the destination in any order, where the later number wins. Owned by the test.

use godwit_tracking::{Copy, Options, Tracking};
use std::ops::Range;

pub const SECTORS: u64 = 60;

#[derive(Debug, Clone)]
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }

    fn one_in(&mut self, count: u64) -> bool {
        count > 0 && self.below(count) == 0
    }
}

/// How often a world saw what.
#[derive(Debug, Default, Clone)]
pub struct Counts {
    pub equal: u64,
    pub equal_before_the_end: u64,
    pub writes: u64,
    pub erased: u64,
    pub failed_writes: u64,
    pub left_over: u64,
    pub copies: u64,
    pub lost: u64,
    pub deferred: u64,
    pub opened: u64,
    pub iterations: u64,
    pub beside_a_write: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        let mine = [
            (&mut self.equal, other.equal),
            (&mut self.equal_before_the_end, other.equal_before_the_end),
            (&mut self.writes, other.writes),
            (&mut self.erased, other.erased),
            (&mut self.failed_writes, other.failed_writes),
            (&mut self.left_over, other.left_over),
            (&mut self.copies, other.copies),
            (&mut self.lost, other.lost),
            (&mut self.deferred, other.deferred),
            (&mut self.opened, other.opened),
            (&mut self.iterations, other.iterations),
            (&mut self.beside_a_write, other.beside_a_write),
        ];
        mine.into_iter().for_each(|(mine, other)| *mine += other);
    }
}

/// A write of the guest's: sectors that have not landed.
struct Write {
    id: u64,
    value: u64,
    left: Vec<u64>,
    fails: bool,
}

/// A copy: what was read of it, sector by sector.
struct Reading {
    copy: Copy,
    left: Vec<u64>,
    read: Vec<(u64, u64)>,
}

/// Sectors on their way to the destination.
struct Given {
    number: u64,
    sectors: Vec<(u64, u64)>,
}

pub struct World {
    pub numbers: Numbers,
    pub counts: Counts,
    tracking: Tracking,
    source: Vec<u64>,
    /// Value, and number of what brought it.
    destination: Vec<(u64, u64)>,
    hole: Range<u64>,
    writes: Vec<Write>,
    copies: Vec<Reading>,
    given: Vec<Given>,
    last_write: u64,
    last_given: u64,
    closed: bool,
    /// How many copies may be under way.
    most: usize,
    /// Some worlds fail, each in its own way: one in so many.
    fails: u64,
    /// Where the guest writes most.
    favourite: u64,
    /// Most sectors that it writes at once.
    longest: u64,
    /// Whether it does nothing.
    rests: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let options = Options {
            incremental: !numbers.one_in(3),
            hot_blocks: !numbers.one_in(3),
        };
        let block = 1 + numbers.below(6) * numbers.below(2);
        let (mut source, mut destination) = (vec![7; 60], vec![(9, 0); 60]);
        let start = numbers.below(SECTORS);
        let hole = match numbers.one_in(2) {
            true => start..(start + 25).min(SECTORS),
            false => 0..0,
        };
        for index in hole.clone() {
            (source[index as usize], destination[index as usize]) = (0, (0, 0));
        }
        Self {
            tracking: Tracking::new(SECTORS, block, options),
            source,
            destination,
            hole,
            writes: Vec::new(),
            copies: Vec::new(),
            given: Vec::new(),
            last_write: 100,
            last_given: 0,
            closed: false,
            most: 1 + numbers.below(4) as usize,
            fails: [0, 6][numbers.below(2) as usize],
            favourite: numbers.below(SECTORS - 2),
            longest: [1, 9][numbers.below(2) as usize],
            rests: false,
            counts: Counts::default(),
            numbers,
        }
    }

    #[cfg(feature = "planted-faults")]
    pub fn with(mut self, plant: godwit_tracking::Plant) -> Self {
        self.tracking.plant(plant);
        self
    }

    pub fn begin(&mut self) {
        let hole = self.hole.clone();
        self.tracking.begin(std::slice::from_ref(&hole));
    }

    pub fn close(&mut self) {
        self.closed = true;
    }

    pub fn open(&mut self) {
        self.counts.opened += u64::from(self.closed);
        self.closed = false;
    }

    /// It does nothing for a while, or works again.
    pub fn guest_turns(&mut self) {
        self.rests = !self.rests;
    }

    /// While the disk is closed hardly anything comes: what was left over.
    pub fn guest_asks(&mut self) {
        if self.rests || self.writes.len() >= 5 || self.closed && !self.numbers.one_in(10) {
            return;
        }
        self.counts.left_over += u64::from(self.closed);
        let start = match self.numbers.one_in(4) {
            true => self.numbers.below(SECTORS),
            false => self.favourite,
        };
        let range = start..(start + 1 + self.numbers.below(self.longest)).min(SECTORS);
        // What is under way already is not written once more: no guest does that, and either order would be right.
        let is_free = |sector: &u64| self.writes.iter().all(|write| !write.left.contains(sector));
        if !range.clone().all(|sector| is_free(&sector)) {
            return;
        }
        self.last_write += 1;
        let erases = self.numbers.one_in(5);
        self.counts.writes += 1;
        self.counts.erased += u64::from(erases);
        self.tracking.write(self.last_write, range.clone());
        self.writes.push(Write {
            id: self.last_write,
            value: if erases { 0 } else { self.last_write },
            left: range.collect(),
            fails: self.numbers.one_in(self.fails),
        });
    }

    pub fn copy(&mut self) {
        while self.copies.len() < self.most {
            let Some(copy) = self.tracking.next_copy() else {
                return;
            };
            self.counts.copies += 1;
            let left = copy.range.clone().collect();
            let beside = |write: &Write| write.left.iter().any(|at| copy.range.contains(at));
            self.counts.beside_a_write += u64::from(self.writes.iter().any(beside));
            self.copies.push(Reading {
                copy,
                left,
                read: Vec::new(),
            });
        }
    }

    pub fn next_iteration(&mut self) {
        if let Some(ended) = self.tracking.ended() {
            self.counts.deferred += u64::from(ended.deferred > 0);
        }
        let with_hot = self.closed || self.numbers.one_in(4);
        if self.closed && self.tracking.is_equal() {
            return;
        }
        self.counts.iterations += u64::from(self.tracking.iterate(with_hot));
    }

    /// Some of what was given does not come, and that is told.
    pub fn lose(&mut self) {
        if self.given.is_empty() {
            return;
        }
        let index = self.numbers.below(self.given.len() as u64) as usize;
        let lost = self.given.swap_remove(index);
        let sectors = lost.sectors.iter().map(|(sector, _)| *sector);
        let (first, last) = (sectors.clone().min(), sectors.max());
        if let (Some(first), Some(last)) = (first, last) {
            self.counts.lost += 1;
            self.tracking.lost(&(first..last + 1));
        }
    }

    /// One thing goes a step further.
    pub fn work(&mut self) {
        match self.numbers.below(3) {
            0 => self.write_some(),
            1 => self.read_some(),
            _ => self.land_one(),
        }
    }

    fn write_some(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let index = self.numbers.below(self.writes.len() as u64) as usize;
        let write = &mut self.writes[index];
        // One that fails leaves some of its sectors as they were.
        let stops = write.left.is_empty() || write.fails && self.numbers.one_in(3);
        if !stops {
            let at = self.numbers.below(write.left.len() as u64) as usize;
            self.source[write.left.swap_remove(at) as usize] = write.value;
            return;
        }
        let write = self.writes.swap_remove(index);
        self.counts.failed_writes += u64::from(write.fails);
        self.tracking.written(write.id, !write.fails);
    }

    fn read_some(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let index = self.numbers.below(self.copies.len() as u64) as usize;
        let reading = &mut self.copies[index];
        if !reading.left.is_empty() {
            let at = self.numbers.below(reading.left.len() as u64) as usize;
            let sector = reading.left.swap_remove(at);
            reading.read.push((sector, self.source[sector as usize]));
            return;
        }
        let reading = self.copies.swap_remove(index);
        self.last_given += 1;
        self.given.push(Given {
            number: self.last_given,
            sectors: reading.read,
        });
        self.tracking.copied(reading.copy.number);
    }

    fn land_one(&mut self) {
        if self.given.is_empty() {
            return;
        }
        let index = self.numbers.below(self.given.len() as u64) as usize;
        let given = self.given.swap_remove(index);
        for (sector, value) in given.sectors {
            let there = &mut self.destination[sector as usize];
            if there.1 < given.number {
                *there = (value, given.number);
            }
        }
    }

    /// Where it says that both are equal they are, once all that was given has come.
    pub fn check(&mut self) -> Result<(), String> {
        if !self.tracking.is_equal() {
            return Ok(());
        }
        let mut landed = self.destination.clone();
        for given in &self.given {
            for (sector, value) in &given.sectors {
                let there = &mut landed[*sector as usize];
                if there.1 < given.number {
                    *there = (*value, given.number);
                }
            }
        }
        let wrong = landed
            .iter()
            .zip(&self.source)
            .position(|(there, here)| there.0 != *here);
        // A write that is under way may land any moment.
        match wrong.is_none() && self.writes.is_empty() {
            true => {
                self.counts.equal += 1;
                self.counts.equal_before_the_end += u64::from(!self.closed);
                Ok(())
            }
            false => Err(format!("sector {wrong:?} differs: {:?}", self.tracking)),
        }
    }

    pub fn is_over(&self) -> bool {
        self.tracking.is_equal()
    }
}
