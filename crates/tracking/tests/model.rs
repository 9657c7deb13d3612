//! The tracking over two disks that end what they are told in any order: whenever it says that both are equal, they are.

mod world;

use godwit_tracking::{BLOCK, Convergence, Decision, Iteration, Options, Tracking};
use world::{Counts, Numbers, World};

const SEEDS: u64 = 10_000;

/// A guest that works with its disk while that is copied, closed, opened and closed again; what happened, or what is wrong.
fn whole(mut world: World) -> Result<Counts, String> {
    for round in 0..1000 {
        if round == 15 {
            world.begin();
        }
        match world.numbers.below(200) {
            0 => world.close(),
            1..=3 => world.open(),
            4..=5 => world.lose(),
            6 => world.guest_turns(),
            7..=40 => world.guest_asks(),
            41..=60 => world.copy(),
            61..=80 => world.next_iteration(),
            _ => world.work(),
        }
        world.check()?;
    }
    world.close();
    for _ in 0..20_000 {
        world.copy();
        world.next_iteration();
        world.work();
        world.check()?;
        if world.is_over() {
            return Ok(world.counts);
        }
    }
    Err("it does not end".to_owned())
}

fn all_of(world: impl Fn(u64) -> World) -> Counts {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        match whole(world(seed)) {
            Ok(happened) => counts.add(&happened),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    counts
}

#[test]
fn both_disks_are_equal_whenever_it_says_so_whatever_fails_and_whatever_is_lost() {
    let counts = all_of(World::new);
    println!("{counts:?}");
    let often = [
        counts.equal,
        counts.equal_before_the_end,
        counts.writes,
        counts.erased,
        counts.failed_writes,
        counts.left_over,
        counts.copies,
        counts.lost,
        counts.deferred,
        counts.opened,
        counts.iterations,
        counts.beside_a_write,
    ];
    assert!(often.iter().all(|count| *count > 500), "{counts:?}");
}

#[cfg(feature = "planted-faults")]
#[test]
fn each_planted_fault_is_found() {
    use godwit_tracking::Plant;
    for plant in [
        Plant::ClearedAfterCopy,
        Plant::NotMarkedAtEnd,
        Plant::HotForgotten,
        Plant::ReadCountsAsAhead,
        Plant::EqualBesideCopy,
        Plant::EqualBesideWrite,
        Plant::LossForgotten,
        Plant::NoBarrier,
        Plant::FailureForgotten,
        Plant::FirstBlockAlone,
        Plant::HoleWritesForgotten,
    ] {
        let found = (0..SEEDS).find(|seed| whole(World::new(*seed).with(plant)).is_err());
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
}

/// After how many bursts a disk is given up, if it is within so many, whose guest could be held and is not, since it waits for something else:
/// for single iterations it writes what would take too long to be copied.
fn given_up_after(mut convergence: Convergence, seed: u64, most: u32) -> Option<u32> {
    let (mut numbers, mut bursts, mut was_burst) = (Numbers(seed), 0, false);
    let mut copied = 10_000;
    for number in 1.. {
        was_burst = number > 3 && !was_burst && numbers.below(3) == 0;
        bursts += u32::from(was_burst);
        let mib = match was_burst {
            _ if number <= 3 => 100,
            true => 400 + numbers.below(2000),
            false => 1 + numbers.below(250),
        };
        let decision = convergence.decide(Iteration {
            number,
            copied: copied << 20,
            seconds: copied as f64 / 100.0,
            dirty: mib << 20,
            ..Iteration::default()
        });
        if matches!(decision, Decision::Abort(_)) {
            return Some(bursts);
        }
        if bursts > most {
            break;
        }
        copied = mib;
    }
    None
}

#[test]
fn bursts_of_a_guest_that_waits_for_something_else_give_its_disk_up_only_if_they_never_end() {
    for seed in 0..1000 {
        let after = given_up_after(Convergence::default(), seed, 10_000);
        assert!(
            after.is_some_and(|bursts| bursts > 100),
            "seed {seed}: {after:?}"
        );
    }
}

#[cfg(feature = "planted-faults")]
#[test]
fn each_planted_fault_of_what_is_decided_is_found() {
    use godwit_tracking::Plant;
    let with = |plant, seed| {
        let mut convergence = Convergence::default();
        convergence.plant(plant);
        given_up_after(convergence, seed, 10_000)
    };
    let found = |plant| (0..1000).any(|seed| with(plant, seed).is_none_or(|bursts| bursts <= 100));
    assert!(found(Plant::BurstEndsIt));
    assert!(found(Plant::BurstsForgivenForEver));
}

/// Bytes that the second iteration copies after a first pass beside which each of 1,024 blocks was written once, in no order.
fn second_iteration(incremental: bool) -> u64 {
    let options = Options {
        incremental,
        hot_blocks: false,
    };
    let mut tracking = Tracking::new(1024 * BLOCK, BLOCK, options);
    tracking.begin(&[]);
    for round in 0..256 {
        let copy = tracking.next_copy().expect("there is more");
        for write in 0..4 {
            let block = (round * 4 + write) * 389 % 1024;
            tracking.write(write, block * BLOCK..block * BLOCK + 512);
            tracking.written(write, true);
        }
        tracking.copied(copy.number);
    }
    tracking.ended().expect("the first pass is over").dirty
}

#[test]
fn what_the_first_pass_has_not_reached_is_not_tracked_which_halves_what_comes_next() {
    assert_eq!(second_iteration(false), 1024 * BLOCK);
    let blocks = second_iteration(true) / BLOCK;
    assert!((490..540).contains(&blocks), "{blocks}");
}

#[test]
fn neighbouring_blocks_are_read_together_and_holes_are_not_read() {
    let mut tracking = Tracking::new(10 * BLOCK + 512, BLOCK, Options::default());
    assert!(tracking.next_copy().is_none() && tracking.ended().is_none());
    assert_eq!(tracking.left_bytes(), 10 * BLOCK + 512);
    // Half of the sixth block is none.
    tracking.begin(&[BLOCK..2 * BLOCK, 5 * BLOCK + 512..7 * BLOCK]);
    let copies = std::iter::from_fn(|| tracking.next_copy());
    let ranges: Vec<_> = copies.map(|copy| copy.range).collect();
    let end = 10 * BLOCK + 512;
    assert_eq!(ranges, [0..BLOCK, 2 * BLOCK..6 * BLOCK, 7 * BLOCK..end]);
    assert!(tracking.ended().is_none() && !tracking.iterate(true));
    (1..=3).for_each(|number| tracking.copied(number));
    let ended = tracking.ended().expect("it is over");
    assert_eq!((ended.copied, ended.dirty), (9 * BLOCK, 0));
    assert!(tracking.ended().is_none() && tracking.is_equal());
}

#[test]
fn what_is_hot_is_left_out_until_it_is_asked_for() {
    let mut tracking = Tracking::new(256 * BLOCK, BLOCK, Options::default());
    tracking.begin(&[]);
    while let Some(copy) = tracking.next_copy() {
        tracking.copied(copy.number);
        for (id, block) in [(1, 7), (2, 100), (3, copy.range.start / BLOCK)] {
            tracking.write(id, block * BLOCK..block * BLOCK + 1);
            tracking.written(id, true);
        }
    }
    let ended = tracking.ended().expect("the first pass is over");
    assert_eq!(ended.hot, 2 * BLOCK, "{ended:?}");
    assert!(tracking.iterate(false));
    while let Some(copy) = tracking.next_copy() {
        assert!(!copy.range.contains(&(100 * BLOCK)));
        tracking.copied(copy.number);
    }
    let ended = tracking.ended().expect("it is over");
    assert_eq!((ended.deferred, ended.dirty), (2 * BLOCK, 2 * BLOCK));
    assert!(!tracking.is_equal());
    assert!(tracking.iterate(true));
    while let Some(copy) = tracking.next_copy() {
        tracking.copied(copy.number);
    }
    assert!(tracking.is_equal());
}

#[test]
fn bits_and_counters_take_a_mebibyte_for_64_gib() {
    let tracking = Tracking::new(64 << 30, BLOCK, Options::default());
    assert_eq!(tracking.memory(), 1 << 20);
}

#[test]
fn what_makes_no_sense_changes_nothing() {
    let mut tracking = Tracking::new(4 * BLOCK, BLOCK, Options::default());
    tracking.begin(std::slice::from_ref(&(0..u64::MAX)));
    assert!(tracking.is_equal());
    let end = 4 * BLOCK;
    let backwards = std::ops::Range { start: 9, end: 5 };
    for range in [
        0..0,
        5..5,
        end - 1..end + 1,
        u64::MAX - 1..u64::MAX,
        backwards,
    ] {
        tracking.write(1, range);
        tracking.written(1, true);
    }
    tracking.written(9, true);
    tracking.copied(77);
    tracking.lost(&(end..u64::MAX));
    assert!(tracking.is_equal());
    tracking.write(2, 0..1);
    tracking.write(2, BLOCK..BLOCK + 1);
    tracking.written(2, false);
    assert_eq!(tracking.dirty_bytes(), BLOCK, "the first of that number");
}
