//! The mirror over two disks that end what they are told in any order, beside a model of what each block may hold.

use godwit_mirror::{COPIES_MAX, Copy, Mirror, Newest, Phase, Side, Step, WriteId};
use std::collections::BTreeMap;
use std::ops::Range;

/// The same numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

const BLOCKS: u64 = 64;

/// Something that a disk does some time.
#[derive(Debug, Clone)]
enum Job {
    Write(WriteId, Side),
    /// What was read at the source, once it was.
    Copy(Copy, Option<Vec<u64>>),
    /// A numbered change on its way over a link.
    Change(u64, Range<u64>, Vec<u64>),
}

struct World {
    mirror: Mirror,
    numbers: Numbers,
    source: Vec<u64>,
    destination: Vec<u64>,
    jobs: Vec<Job>,
    /// Range of each write that is not answered; its number is what it writes.
    writes: BTreeMap<WriteId, Range<u64>>,
    /// Over a link: what is given a number has ended there, and the later number wins.
    newest: Option<Newest>,
    given: u64,
}

impl World {
    fn new(seed: u64, over_a_link: bool) -> Self {
        let mut numbers = Numbers(seed);
        let (region, copies) = (1 + numbers.below(9), 1 + numbers.below(5) as usize);
        let mut mirror = Mirror::new(BLOCKS, region, copies);
        let (mut source, mut destination) = (vec![7; 64], vec![u64::MAX; 64]);
        if numbers.below(2) == 0 {
            // A hole, which a new image has, too.
            let start = numbers.below(BLOCKS);
            let hole = start..(start + 20).min(BLOCKS);
            for index in hole.clone() {
                (source[index as usize], destination[index as usize]) = (0, 0);
            }
            mirror.skip(&hole);
        }
        Self {
            mirror,
            numbers,
            source,
            destination,
            jobs: Vec::new(),
            writes: BTreeMap::new(),
            newest: over_a_link.then(Newest::default),
            given: 0,
        }
    }

    #[cfg(feature = "planted-faults")]
    fn planted(seed: u64, over_a_link: bool, plant: godwit_mirror::Plant) -> Self {
        let mut world = Self::new(seed, over_a_link);
        world.mirror.plant(plant);
        world
    }

    fn give(&mut self, range: Range<u64>, content: Vec<u64>) {
        self.given += 1;
        self.jobs.push(Job::Change(self.given, range, content));
    }

    fn carry_out(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Source(id) => self.jobs.push(Job::Write(id, Side::Source)),
                Step::Both(id) if self.newest.is_some() => {
                    self.jobs.push(Job::Write(id, Side::Source));
                    let range = self.writes[&id].clone();
                    let content = vec![id; (range.end - range.start) as usize];
                    self.give(range, content);
                    let steps = self.mirror.written(id, Side::Destination, true);
                    self.carry_out(steps);
                }
                Step::Both(id) => {
                    self.jobs.push(Job::Write(id, Side::Source));
                    self.jobs.push(Job::Write(id, Side::Destination));
                }
                Step::Copy(copy) => self.jobs.push(Job::Copy(copy, None)),
                Step::Answer { write, done } => {
                    assert!(done, "nothing fails here");
                    let known = self.writes.remove(&write);
                    assert!(known.is_some(), "write {write} is answered twice");
                }
            }
        }
    }

    fn write(&mut self, id: WriteId) {
        let start = self.numbers.below(BLOCKS);
        let end = (start + 1 + self.numbers.below(12)).min(BLOCKS);
        self.writes.insert(id, start..end);
        let steps = self.mirror.write(id, start..end);
        self.carry_out(steps);
    }

    /// Any of the jobs ends, or a copy has read.
    fn work(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let index = self.numbers.below(self.jobs.len() as u64) as usize;
        let steps = match self.jobs.swap_remove(index) {
            Job::Write(id, side) => {
                if let Some(range) = self.writes.get(&id).cloned() {
                    let disk = match side {
                        Side::Source => &mut self.source,
                        Side::Destination => &mut self.destination,
                    };
                    disk[range.start as usize..range.end as usize].fill(id);
                }
                self.mirror.written(id, side, true)
            }
            Job::Copy(copy, None) => {
                let read = &self.source[copy.range.start as usize..copy.range.end as usize];
                let read = read.to_vec();
                self.jobs.push(Job::Copy(copy, Some(read)));
                return;
            }
            Job::Copy(copy, Some(_)) if !self.mirror.wants(&copy) => return,
            // There may be no room for it.
            Job::Copy(copy, Some(_)) if self.numbers.below(8) == 0 => self.mirror.put_back(&copy),
            Job::Copy(copy, Some(read)) => {
                match self.newest {
                    Some(_) => self.give(copy.range.clone(), read),
                    None => self.apply(copy.range.clone(), &read),
                }
                self.mirror.copied(&copy)
            }
            Job::Change(number, range, content) => {
                let newest = self.newest.as_mut().unwrap();
                for won in newest.admit(number, range.clone()) {
                    let at = (won.start - range.start) as usize;
                    let len = (won.end - won.start) as usize;
                    self.apply(won, &content[at..at + len]);
                }
                return;
            }
        };
        self.carry_out(steps);
    }

    fn apply(&mut self, range: Range<u64>, content: &[u64]) {
        self.destination[range.start as usize..range.end as usize].copy_from_slice(content);
    }

    /// The link is lost, with what was on it: it is made anew later.
    fn lose_the_link(&mut self) {
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
            // Some of it may have come.
            if self.numbers.below(2) == 0 {
                self.jobs.push(Job::Change(number, range.clone(), content));
                let index = self.jobs.len() - 1;
                self.jobs.swap(0, index);
                self.apply_first();
            }
            let steps = self.mirror.lost(&range);
            self.carry_out(steps);
        }
        self.newest = Some(Newest::default());
    }

    fn apply_first(&mut self) {
        let Job::Change(number, range, content) = self.jobs.swap_remove(0) else {
            return;
        };
        let newest = self.newest.as_mut().unwrap();
        for won in newest.admit(number, range.clone()) {
            let at = (won.start - range.start) as usize;
            let len = (won.end - won.start) as usize;
            self.apply(won, &content[at..at + len]);
        }
    }

    fn is_equal_and_synchronised(&self) -> bool {
        self.mirror.phase() == Phase::Synchronised && self.jobs.is_empty()
    }
}

/// Writes of a guest while its disk is copied, all of it; what is wrong then.
fn whole(mut world: World) -> Result<(), String> {
    let over_a_link = world.newest.is_some();
    let mut next = 1;
    let steps = world.mirror.attach();
    world.carry_out(steps);
    for _ in 0..200 {
        match world.numbers.below(60) {
            0 if over_a_link => world.lose_the_link(),
            1..=4 => {
                let steps = world.mirror.attach();
                world.carry_out(steps);
            }
            5 if !over_a_link => {
                let steps = world.mirror.detach();
                world.carry_out(steps);
            }
            6..=8 => {
                let steps = world.mirror.allow(0);
                world.carry_out(steps);
            }
            9..=14 => {
                let copies = 1 + world.numbers.below(4) as usize;
                let steps = world.mirror.allow(copies);
                world.carry_out(steps);
            }
            15..=34 if world.writes.len() < 8 => {
                world.write(next);
                next += 1;
            }
            _ => world.work(),
        }
        if world.is_equal_and_synchronised() && world.source != world.destination {
            return Err(format!("{:?} is not {:?}", world.destination, world.source));
        }
    }
    for steps in [world.mirror.allow(COPIES_MAX), world.mirror.attach()] {
        world.carry_out(steps);
    }
    while !world.jobs.is_empty() {
        world.work();
    }
    let (mirror, writes) = (&world.mirror, &world.writes);
    let is_done = writes.is_empty() && mirror.held() == 0 && mirror.left_bytes() == 0;
    match is_done && mirror.phase() == Phase::Synchronised {
        true if world.source == world.destination => Ok(()),
        true => Err(format!("{:?} is not {:?}", world.destination, world.source)),
        false => Err(format!("it does not end: {mirror:?}, {writes:?}")),
    }
}

#[test]
fn both_disks_are_equal_whenever_nothing_is_under_way_after_all_was_copied() {
    for seed in 0..20_000 {
        if let Err(wrong) = whole(World::new(seed, seed % 2 == 0)) {
            panic!("seed {seed}: {wrong}");
        }
    }
}

#[cfg(feature = "planted-faults")]
#[test]
fn each_planted_fault_is_found() {
    use godwit_mirror::Plant;
    for plant in [
        Plant::NoDrain,
        Plant::NotHeld,
        Plant::QueuedToTheSourceAlone,
        Plant::StraddlingToTheSourceAlone,
        Plant::OverlapReordered,
        Plant::AnsweredEarly,
        Plant::SilenceForgotten,
        Plant::OldCopyCounts,
    ] {
        let world = |seed: u64| World::planted(seed, seed.is_multiple_of(2), plant);
        let found = (0..10_000).find(|seed| whole(world(*seed)).is_err());
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
}

#[test]
fn a_mirror_that_is_given_up_holds_no_write() {
    for seed in 0..10_000 {
        let mut world = World::new(seed, seed % 2 == 0);
        let steps = world.mirror.attach();
        world.carry_out(steps);
        let ends_at = world.numbers.below(200);
        let mut next = 1;
        for round in 0..200 {
            if round == ends_at {
                let steps = world.mirror.give_up();
                world.carry_out(steps);
            }
            if world.writes.len() < 8 && world.numbers.below(3) == 0 {
                world.write(next);
                next += 1;
            } else {
                world.work();
            }
        }
        while !world.jobs.is_empty() {
            world.work();
        }
        let left = &world.writes;
        assert!(left.is_empty(), "seed {seed}: {left:?} are not answered");
        assert_eq!(world.mirror.phase(), Phase::Ended, "seed {seed}");
    }
}

#[test]
fn a_write_that_fails_at_the_source_is_told_and_its_region_copied_again() {
    let mut mirror = Mirror::new(16, 8, 1);
    let [Step::Copy(first)] = &mirror.attach()[..] else {
        panic!("no copy began");
    };
    let [Step::Copy(second)] = &mirror.copied(first)[..] else {
        panic!("the next one did not begin");
    };
    assert_eq!(mirror.copied(second), []);
    assert_eq!(mirror.phase(), Phase::Synchronised);
    assert_eq!(mirror.write(1, 2..3), [Step::Both(1)]);
    assert_eq!(mirror.written(1, Side::Destination, true), []);
    let steps = mirror.written(1, Side::Source, false);
    let [answer, Step::Copy(again)] = &steps[..] else {
        panic!("{steps:?}");
    };
    let failed = Step::Answer {
        write: 1,
        done: false,
    };
    assert_eq!((answer, &again.range), (&failed, &(0..8)));
    assert_eq!(mirror.phase(), Phase::Copying);
    assert!(!mirror.wants(first), "it was copied under another number");
}

#[test]
fn a_write_over_many_regions_waits_for_those_alone_that_are_being_copied() {
    let mut mirror = Mirror::new(64, 8, 2);
    let copies = mirror.attach();
    assert_eq!(copies.len(), 2);
    assert_eq!(mirror.write(1, 8..64), []);
    let [Step::Copy(_), Step::Copy(second)] = &copies[..] else {
        panic!("{copies:?}");
    };
    let steps = mirror.copied(second);
    assert_eq!(steps[0], Step::Both(1), "it goes before further regions");
}

#[test]
fn what_makes_no_sense_changes_nothing() {
    let mut mirror = Mirror::new(BLOCKS, 8, 2);
    mirror.attach();
    let refused = |write| Step::Answer { write, done: false };
    for range in [0..0, 5..5, 60..65, u64::MAX - 1..u64::MAX] {
        assert_eq!(mirror.write(1, range), [refused(1)]);
    }
    assert_eq!(mirror.written(9, Side::Source, true), []);
    let unknown = Copy {
        range: u64::MAX - 8..u64::MAX,
        number: 1,
    };
    assert_eq!(mirror.copied(&unknown), []);
    assert_eq!(mirror.write(1, 40..41), [Step::Source(1)]);
    assert_eq!(mirror.written(1, Side::Destination, true), []);
    assert_eq!(mirror.write(1, 50..51), [refused(1)]);
    mirror.skip(&(0..u64::MAX));
    assert!(mirror.left_bytes() > 0, "what was written is copied");
}

#[test]
fn the_later_number_wins_in_any_order() {
    for seed in 0..5_000 {
        let mut numbers = Numbers(seed);
        let changes: Vec<(u64, Range<u64>)> = (1..30)
            .map(|number| {
                let start = numbers.below(BLOCKS);
                (number, start..start + 1 + numbers.below(10))
            })
            .collect();
        let mut right = vec![0; 80];
        for (number, range) in &changes {
            right[range.start as usize..range.end as usize].fill(*number);
        }
        let (mut newest, mut disk) = (Newest::default(), vec![0; 80]);
        let mut left = changes;
        while !left.is_empty() {
            let index = numbers.below(left.len() as u64) as usize;
            let (number, range) = left.swap_remove(index);
            for won in newest.admit(number, range) {
                disk[won.start as usize..won.end as usize].fill(number);
            }
            let came = left.iter().map(|(number, _)| *number).min();
            newest.forget(came.unwrap_or(u64::MAX));
        }
        assert_eq!(disk, right, "seed {seed}");
        assert!(newest.is_empty());
    }
}
