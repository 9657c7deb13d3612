//! The overlay over a file that ends what it is told in any order, beside a model of what each sector may hold.

mod world;

use godwit_delta::{Change, GRAIN, GRAINS_PER_BLOCK, Layout, Overlay, States, Step, words_for};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use world::{Counts, World};

const SEEDS: u64 = 4_000;

fn whole(mut world: World) -> Result<Counts, String> {
    for _ in 0..250 {
        match world.numbers.below(120) {
            0 => world.kill()?,
            1 => world.lose_power()?,
            2..=34 if world.guest.waits() < 8 => world.ask()?,
            _ => world.work()?,
        }
        world.check()?;
    }
    world.end()
}

#[test]
fn nothing_answered_is_lost_by_a_kill_nor_anything_flushed_by_a_power_cut() {
    let mut counts = Counts::default();
    for seed in 0..SEEDS {
        match whole(World::new(seed)) {
            Ok(happened) => counts.add(happened),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    println!("{counts:?}");
    for (name, count) in counts.all() {
        assert!(count > 200, "{name} came {count} times");
    }
}

#[cfg(feature = "planted-faults")]
#[test]
fn each_planted_fault_is_found() {
    use godwit_delta::Plant;
    for plant in [
        Plant::EntryBeforeData,
        Plant::CapturedLate,
        Plant::FillNotExcluded,
        Plant::PresentBeforeWritten,
        Plant::ZeroLost,
        Plant::FlushJoinsRound,
        Plant::DurableWithoutRound,
        Plant::FillFromBase,
        Plant::UnmarkedEarly,
        Plant::ChangeDuringRoundForgotten,
        Plant::FailedRoundForgotten,
        Plant::FailedWriteCounts,
        Plant::LossForgotten,
        Plant::NoSecondSync,
    ] {
        let found = (0..SEEDS).find(|seed| whole(World::new(*seed).with(plant)).is_err());
        println!("{plant:?}: seed {found:?}");
        assert!(found.is_some(), "{plant:?} is not found");
    }
}

/// An overlay without anything below it but a base.
fn overlay(grains: u64) -> Overlay<Arc<[AtomicU64]>> {
    let layout = Layout::of(grains * GRAIN).unwrap();
    let words = (0..words_for(&layout)).map(|_| AtomicU64::new(0));
    let states = States::over(words.collect(), &layout).unwrap();
    Overlay::new(&layout, states, Vec::new())
}

#[test]
fn what_makes_no_sense_changes_nothing() {
    let mut overlay = overlay(4);
    let refused = |id| Step::Answer { id, done: false };
    for range in [0..0, 5..5, 3 * GRAIN..5 * GRAIN, u64::MAX - 1..u64::MAX] {
        let steps = overlay.change(1, Change::Write(range), false);
        assert_eq!(steps, [refused(1)]);
    }
    assert_eq!(overlay.ended(7, true), []);
    assert_eq!(overlay.synced(true), []);
    assert_eq!(overlay.tables_written(true), []);
    assert_eq!(overlay.change(2, Change::Write(0..512), false).len(), 1);
    let again = overlay.change(2, Change::Write(GRAIN..2 * GRAIN), false);
    assert_eq!(again, [refused(2)]);
    assert!(!overlay.rests());
}

#[test]
fn a_flush_is_one_sync_where_nothing_is_new_and_many_share_a_round() {
    let mut overlay = overlay(4);
    let answer = |id| Step::Answer { id, done: true };
    assert_eq!(overlay.flush(1), [Step::Sync]);
    assert_eq!((overlay.flush(2), overlay.flush(3)), (vec![], vec![]));
    assert_eq!(overlay.synced(true), [answer(1), Step::Sync]);
    assert_eq!(overlay.synced(true), [answer(2), answer(3)]);
    overlay.change(4, Change::Write(0..GRAIN), false);
    assert_eq!(overlay.ended(4, true), [answer(4)]);
    assert_eq!(overlay.flush(5), [Step::Sync]);
    let [Step::Tables(blocks)] = &overlay.synced(true)[..] else {
        panic!("no table is written");
    };
    assert_eq!(blocks.len(), 1);
    assert_eq!(overlay.tables_written(true), [Step::Sync]);
    assert_eq!(overlay.synced(true), [answer(5)]);
    assert!(overlay.rests());
}

#[test]
fn a_discard_of_a_large_disk_is_remembered_by_the_marks_and_written_some_at_a_time() {
    const BLOCKS: u64 = 5;
    const ROOM: usize = 2;
    let all = BLOCKS * GRAINS_PER_BLOCK;
    let mut overlay = overlay(all).in_room_of(ROOM);
    let answer = |id| Step::Answer { id, done: true };
    let erased = overlay.change(1, Change::Discard(0..all * GRAIN), false);
    assert!(matches!(&erased[..], [Step::Erase { .. }]), "{erased:?}");
    assert_eq!(overlay.ended(1, true), [answer(1)]);
    let written = |steps: Vec<Step>| match &steps[..] {
        [Step::Tables(blocks)] => blocks.iter().map(|(block, _)| *block).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(overlay.flush(2), [Step::Sync]);
    assert_eq!(written(overlay.synced(true)), [0, 1]);
    // What changes meanwhile is not forgotten, whether it was written in this round or is to be.
    overlay.change(3, Change::Write(0..GRAIN), false);
    assert_eq!(overlay.ended(3, true), [answer(3)]);
    assert_eq!(overlay.tables_written(true), [Step::Sync]);
    assert_eq!(written(overlay.synced(true)), [2, 3]);
    assert_eq!(overlay.tables_written(true), [Step::Sync]);
    assert_eq!(written(overlay.synced(true)), [4]);
    assert_eq!(overlay.tables_written(true), [Step::Sync]);
    assert_eq!(overlay.synced(true), [answer(2)]);
    assert_eq!(overlay.flush(4), [Step::Sync]);
    assert_eq!(written(overlay.synced(true)), [0]);
    assert_eq!(overlay.tables_written(true), [Step::Sync]);
    assert_eq!(overlay.synced(true), [answer(4)]);
    assert_eq!(overlay.flush(5), [Step::Sync]);
    assert_eq!(overlay.synced(true), [answer(5)]);
    assert!(overlay.rests());
}

#[test]
fn nothing_is_durable_any_more_after_a_sync_that_failed_also_for_whoever_comes_next() {
    let answer = |id, done| Step::Answer { id, done };
    let mut one = overlay(4);
    one.change(1, Change::Write(0..GRAIN), false);
    one.ended(1, true);
    assert_eq!(one.flush(2), [Step::Sync]);
    assert_eq!(one.flush(3), []);
    assert_eq!(one.synced(false), [answer(2, false), answer(3, false)]);
    // The kernel would say now that all is well.
    assert_eq!(one.flush(4), [answer(4, false)]);
    let straight = one.change(5, Change::Write(0..512), true);
    assert!(
        matches!(&straight[..], [Step::Write { .. }]),
        "{straight:?}"
    );
    assert_eq!(one.ended(5, true), [answer(5, false)]);
    one.change(6, Change::Write(0..512), false);
    assert_eq!(one.ended(6, true), [answer(6, true)]);
    assert!(one.rests());
    // A successor is told of it; and what tells of it in the middle of a round ends that.
    let mut next = overlay(4);
    next.change(1, Change::Write(0..GRAIN), false);
    next.ended(1, true);
    assert_eq!(next.flush(2), [Step::Sync]);
    next.lose();
    assert_eq!(next.synced(true), [answer(2, false)]);
    assert_eq!(next.flush(3), [answer(3, false)]);
}

#[test]
fn many_that_wait_for_one_grain_go_in_order_and_others_go_past_them() {
    let mut overlay = overlay(8);
    let steps = overlay.change(0, Change::Write(512..1024), false);
    assert_eq!(steps.len(), 1, "it fills");
    for id in 1..4 {
        assert_eq!(overlay.change(id, Change::Write(512..1024), false), []);
    }
    // One of another grain is neither kept nor lets anybody go.
    assert_eq!(
        overlay
            .change(9, Change::Write(GRAIN..2 * GRAIN), false)
            .len(),
        1
    );
    let done = |id| Step::Answer { id, done: true };
    assert_eq!(overlay.ended(9, true), [done(9)]);
    let steps = overlay.ended(0, true);
    assert_eq!(steps.len(), 4, "all write what is present now: {steps:?}");
    assert_eq!(steps[0], done(0));
    assert!(!overlay.rests());
}

#[test]
fn a_write_of_what_is_present_goes_straight_on_beside_one_that_fills() {
    let mut overlay = overlay(4);
    overlay.change(1, Change::Write(0..GRAIN), false);
    overlay.ended(1, true);
    let fills = overlay.change(2, Change::Write(GRAIN + 512..GRAIN + 1024), false);
    let [Step::Write { write, .. }] = &fills[..] else {
        panic!("{fills:?}");
    };
    assert_eq!(
        (write.range.clone(), write.fill.len()),
        (GRAIN..2 * GRAIN, 2)
    );
    assert_eq!(overlay.change(3, Change::Write(512..1024), false).len(), 1);
    assert_eq!(
        overlay.change(4, Change::Write(GRAIN..GRAIN + 512), false),
        []
    );
    let steps = overlay.ended(2, true);
    assert_eq!(
        steps.len(),
        2,
        "it is answered, and lets the other go: {steps:?}"
    );
}
