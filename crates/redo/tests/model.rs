//! The logs of a disk beside a model of what each holds: wherever the power fails the disk is whole, and the copy is when it is written down that it
//! is the disk. And how it ends at every load.

use godwit_redo::{Bounds, DOWNTIME_MAX_S, LAST_LOG_MAX_S, LOGS_MAX, Redo, Step, Work};
use std::collections::BTreeMap;

const SEEDS: u64 = 5_000;
/// Blocks of a disk.
const BLOCKS: u64 = 16;
/// As bytes, so that logs are not small before anything was consolidated.
const BLOCK: u64 = 1 << 20;
const MIB: f64 = 1048576.0;

/// Small numbers that a seed decides.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

#[derive(Default)]
struct Log {
    is_durable: bool,
    holds: BTreeMap<u64, u64>,
}

/// A disk that moves, and its guest, of whose writes each was told to be durable.
struct World {
    numbers: Numbers,
    redo: Redo,
    base: Vec<u64>,
    logs: BTreeMap<u32, Log>,
    /// The log that the guest writes to.
    top: Option<u32>,
    is_held: bool,
    copy: Vec<u64>,
    /// What the guest was told.
    now: Vec<u64>,
    written: u64,
}

impl World {
    fn new(seed: u64, redo: Redo) -> Self {
        let base: Vec<u64> = (0..BLOCKS).map(|block| 1000 + block).collect();
        Self {
            numbers: Numbers(seed),
            redo,
            now: base.clone(),
            base,
            logs: BTreeMap::new(),
            top: None,
            is_held: false,
            copy: vec![0; BLOCKS as usize],
            written: 5000,
        }
    }

    /// The guest writes now and then, unless it is held.
    fn guest(&mut self) {
        for _ in 0..self.numbers.below(4) {
            if self.is_held {
                return;
            }
            self.written += 1;
            let block = self.numbers.below(BLOCKS);
            self.now[block as usize] = self.written;
            match self.top.and_then(|top| self.logs.get_mut(&top)) {
                Some(log) => drop(log.holds.insert(block, self.written)),
                None => self.base[block as usize] = self.written,
            }
        }
    }

    /// What is found after the power failed.
    fn must_be_whole(&self) -> Result<(), String> {
        let mut found = self.base.clone();
        let described = self.logs.range(..=self.top.unwrap_or(0));
        for (_, log) in described.filter(|(_, log)| log.is_durable) {
            for (block, value) in &log.holds {
                found[*block as usize] = *value;
            }
        }
        match found == self.now {
            true => Ok(()),
            false => Err(format!("the power failed at {:?}: {found:?}", self.redo)),
        }
    }

    fn consolidate(&mut self, number: u32) -> u64 {
        let blocks: Vec<u64> = self.logs[&number].holds.keys().copied().collect();
        for block in &blocks {
            self.guest();
            // A log that nobody else writes to has the same all the while.
            self.copy[*block as usize] = self.logs[&number].holds[block];
        }
        self.guest();
        blocks.len() as u64 * BLOCK
    }

    fn top_bytes(&self) -> u64 {
        let top = self.top.and_then(|top| self.logs.get(&top));
        top.map_or(0, |log| log.holds.len() as u64 * BLOCK)
    }

    /// Returns whether it has come to an end.
    fn step(&mut self) -> Result<bool, String> {
        self.guest();
        self.must_be_whole()?;
        let seconds = 0.1 + self.numbers.below(100) as f64 / 10.0;
        match self.redo.step() {
            Step::Make(log) => {
                let made = Log {
                    is_durable: true,
                    ..Log::default()
                };
                self.logs.insert(log, made);
                self.redo.done();
            }
            Step::PutOver(log) => {
                self.logs.entry(log).or_default();
                self.top = Some(log);
                self.redo.done();
            }
            Step::CopyBase => {
                for block in 0..BLOCKS as usize {
                    self.guest();
                    self.copy[block] = self.base[block];
                }
                let bytes = BLOCKS * BLOCK;
                self.redo.ended(Work { bytes, seconds }, self.top_bytes());
            }
            Step::Consolidate(log) => {
                let bytes = self.consolidate(log);
                self.redo.ended(Work { bytes, seconds }, self.top_bytes());
            }
            Step::Hold => {
                self.is_held = true;
                self.redo.done();
            }
            Step::ConsolidateLast(log) => {
                self.consolidate(log);
                match self.numbers.below(4) {
                    0 => {
                        self.is_held = false;
                        self.redo.let_go(seconds / 10.0);
                    }
                    _ => self.redo.done(),
                }
            }
            Step::Record => {
                return match self.copy == self.now {
                    true => Ok(true),
                    false => Err(format!("the copy is not the disk: {:?}", self.copy)),
                };
            }
            Step::GiveUp(_) => return Ok(true),
        }
        Ok(false)
    }
}

fn whole(seed: u64, redo: Redo) -> Result<u32, String> {
    let mut world = World::new(seed, redo);
    for _ in 0..10 * LOGS_MAX {
        if world.step()? {
            return Ok(world.redo.logs());
        }
    }
    Err("it does not end".to_owned())
}

#[test]
fn the_disk_is_whole_wherever_the_power_fails_and_the_copy_is_when_it_becomes_the_disk() {
    let mut logs = 0;
    for seed in 0..SEEDS {
        match whole(seed, Redo::default()) {
            Ok(count) => logs += u64::from(count),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    assert!(logs > 2 * SEEDS, "{logs} logs");
}

/// A guest that writes so many bytes in a second to a disk of so many, whose logs are consolidated at such a speed beside it; at most for how long it
/// was held.
fn ends((writes, bytes, speed): (f64, f64, f64), mut redo: Redo) -> Result<f64, String> {
    let (mut part, mut log, mut top) = (1.0, 0.0, 0.0_f64);
    let grows = |seconds: f64, part: f64| (writes * part * seconds).min(bytes);
    for _ in 0..20 * LOGS_MAX {
        match redo.step() {
            Step::Make(_) => redo.done(),
            Step::PutOver(_) => {
                (log, top) = (top, 0.0);
                redo.done();
            }
            Step::CopyBase => {
                let seconds = bytes / speed;
                top = grows(seconds, part);
                let bytes = bytes as u64;
                redo.ended(Work { bytes, seconds }, top as u64);
            }
            Step::Consolidate(_) => {
                let seconds = log / speed;
                top = grows(seconds, part);
                let bytes = log as u64;
                redo.ended(Work { bytes, seconds }, top as u64);
                part *= redo.slows_to().unwrap_or(1.0);
            }
            Step::Hold => redo.done(),
            Step::ConsolidateLast(_) => return Ok(top / speed),
            Step::Record => return Err("it was not held".to_owned()),
            Step::GiveUp(why) => return Err(why.to_string()),
        }
    }
    Err("it does not end".to_owned())
}

/// From a tenth of what is consolidated to a hundred times as much.
fn loads() -> Vec<(f64, f64, f64)> {
    let mut loads = Vec::new();
    for gib in [1.0, 32.0, 512.0] {
        for speed in [2.0, 20.0, 200.0, 2000.0] {
            for part in [0.1, 0.5, 0.6, 0.7, 0.74, 0.9, 1.0, 2.0, 10.0, 100.0] {
                loads.push((speed * part * MIB, gib * 1024.0 * MIB, speed * MIB));
            }
        }
    }
    loads
}

#[test]
fn it_ends_at_every_load_and_nobody_waits_for_longer_than_he_may() {
    for load in loads() {
        let waited = ends(load, Redo::default());
        assert!(
            waited
                .as_ref()
                .is_ok_and(|waited| *waited <= DOWNTIME_MAX_S),
            "{load:?}: {waited:?}"
        );
    }
}

/// A guest whom nothing slows, and whose logs are as large as they come.
fn never_nearer(mut redo: Redo) -> Result<u32, String> {
    let work = Work {
        bytes: 64 << 30,
        seconds: 300.0,
    };
    for _ in 0..10 * LOGS_MAX {
        match redo.step() {
            Step::CopyBase | Step::Consolidate(_) => redo.ended(work, work.bytes),
            Step::GiveUp(_) => return Ok(redo.logs()),
            _ => redo.done(),
        }
    }
    Err("it does not end".to_owned())
}

#[test]
fn there_are_no_more_logs_than_there_may_be_whatever_the_guest_does() {
    assert_eq!(never_nearer(Redo::default()), Ok(LOGS_MAX));
}

/// A guest whom nothing slows and whose logs always take so long, s; it is held once that is within what it may. Returns for how long.
fn held_for_the_same(wait_s: f64, bounds: Bounds) -> Result<f64, String> {
    let mut redo = Redo::within(bounds);
    let work = Work {
        bytes: (wait_s * 100.0 * MIB) as u64,
        seconds: wait_s,
    };
    for _ in 0..10 * LOGS_MAX {
        match redo.step() {
            Step::CopyBase | Step::Consolidate(_) => redo.ended(work, work.bytes),
            Step::Hold if redo.wait_s(work.bytes) > redo.limit_s() => redo.grown(work.bytes),
            Step::Hold => return Ok(redo.wait_s(work.bytes)),
            Step::GiveUp(why) => return Err(why.to_string()),
            _ => redo.done(),
        }
    }
    Err("it does not end".to_owned())
}

#[test]
fn a_guest_whose_logs_are_never_shorter_is_held_or_given_up_and_not_waited_for_without_end() {
    for bounds in [Bounds::ON_ITS_HOST, Bounds::TO_ANOTHER_HOST] {
        for wait_s in [0.1, 0.9, 1.1, 2.0, 2.9] {
            let held = held_for_the_same(wait_s, bounds);
            assert!(
                held.as_ref().is_ok_and(|held_s| *held_s <= LAST_LOG_MAX_S),
                "{bounds:?}, {wait_s} s: {held:?}"
            );
        }
        let why = held_for_the_same(6.0, bounds).unwrap_err();
        assert!(
            why.contains("redo logs the guest would still wait"),
            "{why}"
        );
    }
    let longer = held_for_the_same(4.0, Bounds::TO_ANOTHER_HOST);
    assert!(longer.is_err(), "{longer:?}");
}

/// A guest whose log grows for as long as its memory follows, s, before it could be held.
fn migrates(load: (f64, f64, f64), memory_s: f64) -> Result<f64, String> {
    let (writes, bytes, speed) = load;
    let mut redo = Redo::within(Bounds::TO_ANOTHER_HOST);
    let (mut part, mut log, mut top) = (1.0, 0.0, 0.0_f64);
    let (mut memory_s, grows) = (memory_s, |seconds: f64, part: f64| {
        (writes * part * seconds).min(bytes)
    });
    for _ in 0..20 * LOGS_MAX {
        match redo.step() {
            Step::PutOver(_) => {
                (log, top) = (top, 0.0);
                redo.done();
            }
            Step::CopyBase | Step::Consolidate(_) => {
                let amount = if redo.step() == Step::CopyBase {
                    bytes
                } else {
                    log
                };
                let (bytes, seconds) = (amount as u64, amount / speed);
                top = grows(seconds, part);
                redo.ended(Work { bytes, seconds }, top as u64);
                part *= redo.slows_to().unwrap_or(1.0);
            }
            Step::Hold => {
                top += grows(std::mem::take(&mut memory_s), part);
                match redo.wait_s(top as u64) <= redo.limit_s() {
                    true => return Ok(top / speed),
                    false => redo.grown(top as u64),
                }
            }
            Step::GiveUp(why) => return Err(why.to_string()),
            _ => redo.done(),
        }
    }
    Err("it does not end".to_owned())
}

#[test]
fn a_vm_whose_memory_follows_comes_to_an_end_at_every_load() {
    for load in loads() {
        for memory_s in [0.0, 3.0, 60.0] {
            let waited = migrates(load, memory_s);
            assert!(
                waited
                    .as_ref()
                    .is_ok_and(|waited| *waited <= LAST_LOG_MAX_S),
                "{load:?}, {memory_s} s: {waited:?}"
            );
        }
    }
}

#[cfg(feature = "planted-faults")]
#[test]
fn each_planted_fault_is_found() {
    use godwit_redo::Plant;
    for plant in [
        Plant::PutOverBeforeMade,
        Plant::LogForgotten,
        Plant::LastLogForgotten,
        Plant::NotHeld,
    ] {
        let found = (0..SEEDS).find(|seed| whole(*seed, Redo::default().with(plant)).is_err());
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
    for plant in [
        Plant::NeverSlowed,
        Plant::WaitsForEver,
        Plant::LogsForEver,
        Plant::LogsNotCounted,
    ] {
        let planted = || Redo::default().with(plant);
        let waits = |load: &(f64, f64, f64)| {
            let ended = ends(*load, planted());
            !ended.is_ok_and(|waited| waited <= DOWNTIME_MAX_S)
        };
        let load = loads().iter().position(waits);
        let is_endless = never_nearer(planted()).is_err();
        let found = load.or(is_endless.then_some(0));
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
}
