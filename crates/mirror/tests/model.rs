//! The mirror over two disks that end what they are told in any order, beside a model of what each block may hold.

mod world;

use godwit_mirror::{COPIES_MAX, Copy, Destination, Flushes, Mirror, Newest, Phase, Side, Step};
use std::ops::Range;
use world::{Counts, Numbers, SECTORS, World};

const SEEDS: u64 = 10_000;

/// Writes of a guest while its disk is copied, all of it; what happened, or what is wrong.
fn whole(mut world: World) -> Result<Counts, String> {
    let over_a_link = world.is_over_a_link();
    let steps = world.mirror.attach();
    world.carry_out(steps);
    for _ in 0..300 {
        world.may_lose_power();
        match world.numbers.below(150) {
            0 if over_a_link => world.lose_the_link(),
            1 => world.detach(),
            2..=8 => {
                let steps = world.mirror.attach();
                world.carry_out(steps);
            }
            9..=10 => {
                let steps = world.mirror.allow(0);
                world.carry_out(steps);
            }
            11..=18 => {
                let copies = 1 + world.numbers.below(4) as usize;
                let steps = world.mirror.allow(copies);
                world.carry_out(steps);
            }
            19..=44 if world.guest.waits() < 8 => world.ask(),
            45..=54 => world.make_base(),
            55 => world.may_switch(),
            _ => world.work(),
        }
        world.check()?;
    }
    for steps in [world.mirror.allow(COPIES_MAX), world.mirror.attach()] {
        world.carry_out(steps);
    }
    while world.is_busy() {
        world.work();
        world.check()?;
    }
    let (mirror, waits) = (&world.mirror, world.guest.waits());
    let is_over = match mirror.phase() {
        Phase::Synchronised => mirror.left_bytes() == 0,
        phase => phase == Phase::Ended && world.counts.ends() > 0,
    };
    match is_over && waits == 0 && mirror.held() == 0 {
        true => Ok(world.counts),
        false => Err(format!(
            "it does not end: {mirror:?}, {waits} requests wait"
        )),
    }
}

/// The same in so many worlds.
fn all_of(world: impl Fn(u64) -> World) -> Counts {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        match whole(world(seed)) {
            Ok(happened) => counts.add(happened),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    counts
}

#[test]
fn both_disks_are_equal_whenever_nothing_is_under_way_after_all_was_copied() {
    let counts = all_of(World::new);
    assert!(counts.equal > SEEDS, "{counts:?}");
}

#[test]
fn nothing_is_lost_and_no_answer_is_wrong_whatever_of_the_storage_fails_or_is_torn() {
    let counts = all_of(World::failing);
    println!("{counts:?}");
    let often = [
        counts.failed_at_source,
        counts.failed_while_mirrored,
        counts.failed_erasing,
        counts.failed_flushes,
        counts.failed_reads_of_guest,
        counts.torn_at_source,
        counts.torn_at_destination,
        counts.torn_by_cut,
        counts.torn_on_link,
        counts.failed_at_destination,
        counts.failed_reads,
        counts.power_cuts,
        counts.cuts_there,
        counts.judged_there,
        counts.left_alone,
        counts.imagined_there,
        counts.lost_sectors,
        counts.unanswered,
        counts.flushed_at_source,
        counts.flushed_at_both,
        counts.switched,
        counts.reads,
        counts.erased,
        counts.durable_writes,
        counts.equal,
    ];
    assert!(often.iter().all(|count| *count > 200), "{counts:?}");
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
        Plant::FailureForgotten,
        Plant::ZeroesNotHeld,
        Plant::DiscardPasses,
        Plant::ReadAtDestination,
        Plant::FlushedAtSourceAlone,
        Plant::FlushAnsweredAtSource,
        Plant::NoBase,
        Plant::DurableAtSourceAlone,
        Plant::OldBaseCounts,
    ] {
        let world = |seed: u64| World::failing(seed).with(plant);
        let found = (0..SEEDS).find(|seed| whole(world(*seed)).is_err());
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
}

#[test]
fn a_mirror_that_is_given_up_holds_no_write() {
    for seed in 0..SEEDS {
        let mut world = World::failing(seed);
        let steps = world.mirror.attach();
        world.carry_out(steps);
        let ends_at = world.numbers.below(200);
        for round in 0..200 {
            if round == ends_at {
                world.give_up();
            }
            match world.guest.waits() < 8 && world.numbers.below(3) == 0 {
                true => world.ask(),
                false => world.work(),
            }
            world
                .check()
                .unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
        while world.is_busy() {
            world.work();
        }
        world
            .check()
            .unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        assert_eq!(world.guest.waits(), 0, "seed {seed}: not answered");
        assert_eq!(world.mirror.phase(), Phase::Ended, "seed {seed}");
    }
}

#[test]
fn a_write_that_fails_at_the_source_is_told_and_its_region_copied_again() {
    let mut mirror = Mirror::new(16, 8);
    mirror.allow(1);
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
fn a_base_from_before_a_region_was_copied_again_does_not_count_when_both_sides_are_equal_again() {
    let to = Destination {
        confirms: true,
        may_be_left_alone: true,
        is_bound: false,
    };
    let equal = Phase::Synchronised;
    let mut flushes = Flushes::default();
    assert!(flushes.wants_base(equal, to));
    flushes.begin_base(1);
    // A write fails at the source, others follow, and their region is copied again.
    flushes.observe(Phase::Copying);
    flushes.observe(equal);
    assert!(flushes.is_base(1), "no guest waits for it");
    assert!(flushes.wants_base(equal, to), "that one is of no use");
    flushes.begin_base(2);
    assert!(flushes.base_ended(1) && !flushes.is_base(1));
    assert!(!flushes.is_synchronised(equal, to));
    assert!(flushes.base_ended(2));
    assert!(flushes.is_synchronised(equal, to));
}

#[test]
fn a_write_over_many_regions_waits_for_those_alone_that_are_being_copied() {
    let mut mirror = Mirror::new(64, 8);
    mirror.allow(2);
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
fn no_more_regions_are_copied_at_once_than_a_mirror_ever_copies() {
    let mut mirror = Mirror::new(SECTORS, 1);
    mirror.allow(usize::MAX);
    assert_eq!(mirror.attach().len(), COPIES_MAX);
}

#[test]
fn what_makes_no_sense_changes_nothing() {
    let mut mirror = Mirror::new(SECTORS, 8);
    mirror.allow(2);
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
                let start = numbers.below(SECTORS);
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
