//! Merging with many pieces at once: what comes of it, how much is under way, and what is left when it ends early.

mod common;

use common::deltas::open_unlocked;
use common::numbers;
use godwit_blockio::delta::{
    AT_ONCE_MAX, Delta, Merged, NewDelta, Target, create, describe_base, merge,
};
use godwit_blockio::{Access, Error, Image};
use godwit_delta::{GRAIN, Grain, Id};
use godwit_testkit::testvol::{self, Survives, Volume};
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// No multiple of a table's reach, nor of a grain.
const BYTES: u64 = (9 << 20) + 5 * 512;
const LONG: Duration = Duration::from_secs(60);

/// What each grain of an image is, and the byte that fills it.
type Has = Vec<(Grain, u8)>;

fn grains() -> usize {
    BYTES.div_ceil(GRAIN) as usize
}

/// Runs of grains as a guest leaves them, most of them short.
fn some(seed: u64) -> Has {
    let mut number = numbers(seed);
    let mut has = Vec::new();
    while has.len() < grains() {
        let state = match number(10) {
            0 => Grain::Zero,
            1..5 => Grain::Present,
            _ => Grain::Absent,
        };
        let count = match number(40) {
            0 => 1 + number(300),
            _ => 1 + number(6),
        };
        let fill = 1 + number(255) as u8;
        has.extend((0..count).map(|_| (state, fill)));
    }
    has.truncate(grains());
    has
}

/// One grain of every so many.
fn each(nth: usize) -> Has {
    let state = |grain: usize| match grain.is_multiple_of(nth) {
        true => Grain::Present,
        false => Grain::Absent,
    };
    (0..grains())
        .map(|grain| (state(grain), 1 + (grain % 250) as u8))
        .collect()
}

/// An empty delta of this number.
fn empty(at: &Path, number: u8) -> Delta {
    let parent = describe_base(&at.join("base.vmdk"), "base.raw", (BYTES, 7));
    let parent = parent.unwrap_or(godwit_delta::Parent {
        cid: 7,
        hint: "base.vmdk".to_owned(),
    });
    let descriptor = at.join(format!("d{number}.vmdk"));
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: BYTES,
        id: Id([number; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
    open_unlocked(&descriptor).unwrap()
}

/// A delta of this number that has this.
fn delta(at: &Path, number: u8, has: &Has) -> Delta {
    let delta = empty(at, number);
    let extent = at.join(format!("d{number}-sesparse.vmdk"));
    let file = File::options().write(true).open(extent).unwrap();
    for ((state, fill), grain) in has.iter().zip(0u64..) {
        if *state == Grain::Present {
            let at = delta.layout().data_at() + grain * GRAIN;
            file.write_all_at(&[*fill; GRAIN as usize], at).unwrap();
        }
        if *state != Grain::Absent {
            delta.states().set(grain..grain + 1, *state);
        }
    }
    delta
}

/// A raw image of zeros.
fn raw(at: &Path) -> Image {
    let path = at.join("base.raw");
    File::create(&path).unwrap().set_len(BYTES).unwrap();
    Image::open(&path, Access::ReadWrite, 512).unwrap()
}

fn into(image: &Image) -> Target<'_> {
    Target::Raw(image.as_fd(), BYTES)
}

/// Of an image that was one hole.
fn must_have(at: &Path, has: &Has) {
    let found = fs::read(at.join("base.raw")).unwrap();
    assert_eq!(found.len() as u64, BYTES);
    for (grain, (bytes, (state, fill))) in found.chunks(GRAIN as usize).zip(has).enumerate() {
        let expected = match state {
            Grain::Present => *fill,
            Grain::Zero | Grain::Absent => 0,
        };
        assert!(
            bytes.iter().all(|byte| *byte == expected),
            "grain {grain} is {}, and was to be {expected}",
            bytes[0]
        );
    }
}

/// What the tables of the delta of this number say, and what is there; torn grains are nothing.
fn found(at: &Path, number: u8) -> Vec<(Grain, Option<u8>)> {
    let delta = open_unlocked(&at.join(format!("d{number}.vmdk"))).unwrap();
    let file = File::open(at.join(format!("d{number}-sesparse.vmdk"))).unwrap();
    let one = |grain: u64| {
        // Nobody reads what is beyond the disk's end.
        let mut bytes = vec![0; GRAIN.min(BYTES - grain * GRAIN) as usize];
        let place = delta.layout().data_at() + grain * GRAIN;
        file.read_exact_at(&mut bytes, place).unwrap();
        let whole = bytes.iter().all(|byte| *byte == bytes[0]);
        (delta.states().get(grain), whole.then_some(bytes[0]))
    };
    (0..grains() as u64).map(one).collect()
}

#[test]
fn all_that_a_delta_has_comes_into_an_image_with_many_pieces_at_once() {
    for (seed, at_once) in [(1, AT_ONCE_MAX), (2, 5), (3, 1)] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = directory.path();
        let has = some(seed);
        let (from, image) = (delta(at, 1, &has), raw(at));
        let mut before = 0;
        let merged = merge(&from, into(&image), false, |done: Merged| {
            assert!(done.begun() >= before && done.begun() <= before + (1 << 20));
            before = done.begun();
            Some(at_once)
        });
        let merged = merged.unwrap().unwrap();
        let count = |state: Grain| has.iter().filter(|one| one.0 == state).count() as u64 * GRAIN;
        let short = grains() as u64 * GRAIN - BYTES;
        let whole = count(Grain::Present) + count(Grain::Zero);
        assert!(merged.moved() == whole || merged.moved() == whole - short);
        assert_eq!(merged.under_way, 0);
        must_have(at, &has);
    }
}

#[test]
fn all_of_it_or_only_what_it_lacks_comes_into_another_delta_whose_tables_say_so() {
    for (seed, lacking) in [(1, false), (2, true), (3, false), (4, true)] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = directory.path();
        let (own, other) = (some(seed), some(seed + 100));
        let (mut to, from) = (delta(at, 1, &own), delta(at, 2, &other));
        let merged = merge(&from, Target::Delta(&mut to), lacking, |_| {
            Some(AT_ONCE_MAX)
        });
        assert!(merged.unwrap().is_some());
        assert!(to.states().marked().is_empty());
        let all = found(at, 1).into_iter().zip(own.iter().zip(&other));
        for (grain, (found, (own, other))) in all.enumerate() {
            let stays = match lacking {
                true => own.0 != Grain::Absent,
                false => other.0 == Grain::Absent,
            };
            let expected = if stays { own } else { other };
            assert_eq!(found.0, expected.0, "grain {grain}");
            if found.0 == Grain::Present {
                assert_eq!(found.1, Some(expected.1), "grain {grain}");
            }
        }
    }
}

/// A delta on one volume, and a raw image on another one.
fn on_volumes(has: &Has, work: impl FnOnce([&Volume; 2], &Path, &Delta, &Image) + Send) {
    let places = [(); 2].map(|()| tempfile::tempdir().unwrap());
    testvol::apart_or_skipped(|inside| {
        let mut volumes = places
            .each_ref()
            .map(|place| Volume::mount_direct(inside.as_fd(), place.path()).unwrap());
        let [source, target] = places.each_ref().map(|place| place.path());
        let (from, image) = (delta(source, 1, has), raw(target));
        let [first, second] = &volumes;
        work([first, second], target, &from, &image);
        drop((from, image));
        volumes.iter_mut().for_each(Volume::end);
    });
}

fn hangs(volume: &Volume, hangs: bool) {
    volume.change(|settings| settings.hangs = hangs);
}

/// Merges one piece, and then with both volumes hanging; `meanwhile` is done once as many reads are under way as may be, and then as many writes.
fn merge_held(
    [source, target]: [&Volume; 2],
    (from, image): (&Delta, &Image),
    meanwhile: impl FnOnce(&AtomicBool),
) -> Result<Option<Merged>, Error> {
    let stops = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let merged = scope.spawn(|| {
            let mut asked = 0;
            merge(from, into(image), false, |_| {
                asked += 1;
                if asked == 2 {
                    hangs(source, true);
                    hangs(target, true);
                }
                let at_once = if asked == 1 { 1 } else { AT_ONCE_MAX };
                (!stops.load(Ordering::SeqCst)).then_some(at_once)
            })
        });
        // Whatever came is let go, so that a test that fails ends.
        let reads = source.wait_held(AT_ONCE_MAX, LONG);
        hangs(source, false);
        let writes = target.wait_held(AT_ONCE_MAX, LONG);
        let held = target.counts().held;
        meanwhile(&stops);
        hangs(target, false);
        let merged = merged.join().unwrap();
        reads.and(writes).unwrap();
        assert_eq!(held, AT_ONCE_MAX, "no more than may be");
        merged
    })
}

#[test]
fn as_many_reads_and_then_writes_are_under_way_at_once_as_may_be() {
    // So far from each other that none is read along.
    let has = each(16);
    on_volumes(&has, |volumes, at, from, image| {
        let merged = merge_held(volumes, (from, image), |_| {}).unwrap();
        let whole = (grains() as u64).div_ceil(16) * GRAIN;
        // The last one is cut short by the disk's end.
        let short = grains() as u64 * GRAIN - BYTES;
        assert_eq!(merged.map(|done| done.copied), Some(whole - short));
        must_have(at, &has);
    });
}

#[test]
fn whoever_stops_it_finds_nothing_under_way_and_it_can_be_begun_anew() {
    let has = each(16);
    on_volumes(&has, |volumes, at, from, image| {
        let target = volumes[1];
        let before = target.counts().writes;
        let stopped = merge_held(volumes, (from, image), |stops| {
            stops.store(true, Ordering::SeqCst);
        });
        assert_eq!(stopped.unwrap(), None);
        let written = target.counts().writes - before;
        assert_eq!(target.counts().held, 0);
        // The first one, those that were under way, and one that had been asked for.
        assert!(
            (AT_ONCE_MAX as u64 + 1..=AT_ONCE_MAX as u64 + 2).contains(&written),
            "{written} writes"
        );
        let whole = merge(from, into(image), false, |_| Some(AT_ONCE_MAX));
        assert!(whole.unwrap().is_some());
        must_have(at, &has);
    });
}

#[test]
fn a_write_that_fails_is_told_once_nothing_is_under_way() {
    let has = each(16);
    on_volumes(&has, |volumes, at, from, image| {
        let target = volumes[1];
        let before = target.counts().writes;
        let failed = merge_held(volumes, (from, image), |_| {
            target.change(|settings| settings.fails.writes = true);
        });
        let why = failed.unwrap_err().to_string();
        assert!(why.contains("cannot merge"), "{why}");
        assert_eq!(target.counts().held, 0);
        assert_eq!(target.counts().writes - before, 1);
        target.change(|settings| settings.fails.writes = false);
        let whole = merge(from, into(image), false, |_| Some(AT_ONCE_MAX));
        assert!(whole.unwrap().is_some());
        must_have(at, &has);
    });
}

#[test]
fn near_neighbours_take_one_read_and_a_write_each() {
    let has = each(2);
    on_volumes(&has, |[source, target], at, from, image| {
        let (reads, writes) = (source.counts().reads, target.counts().writes);
        let merged = merge(from, into(image), false, |_| Some(AT_ONCE_MAX));
        assert!(merged.unwrap().is_some());
        let (reads, writes) = (
            source.counts().reads - reads,
            target.counts().writes - writes,
        );
        // Those within 256 KiB are read together.
        assert_eq!(reads, (grains() as u64).div_ceil(64));
        assert_eq!(writes, (grains() as u64).div_ceil(2));
        must_have(at, &has);
    });
}

/// Ends what is under way without power, until it is over.
fn refuse(volume: &Volume, is_over: &AtomicBool) {
    while !is_over.load(Ordering::SeqCst) {
        volume.refuse_held();
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn tables_tell_of_nothing_that_was_not_written_wherever_the_power_fails() {
    let (own, other) = (some(7), some(8));
    for (cut, survives) in [Survives::Nothing, Survives::Some(5), Survives::Everything]
        .into_iter()
        .enumerate()
    {
        let places = [(); 2].map(|()| tempfile::tempdir().unwrap());
        testvol::apart_or_skipped(|inside| {
            let [source, at] = places.each_ref().map(|place| place.path());
            let mut volume = Volume::mount_direct(inside.as_fd(), at).unwrap();
            drop(empty(at, 1));
            let open = || open_unlocked(&at.join("d1.vmdk")).unwrap();
            let first = delta(source, 2, &own);
            let all = |_: Merged| Some(AT_ONCE_MAX);
            let done = merge(&first, Target::Delta(&mut open()), false, all);
            assert!(done.unwrap().is_some());
            let (from, is_over) = (delta(source, 3, &other), AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| refuse(&volume, &is_over));
                let mut asked = 0;
                let failed = merge(&from, Target::Delta(&mut open()), false, |_| {
                    asked += 1;
                    if asked == 15 + 20 * cut {
                        volume.power_off(survives);
                    }
                    Some(AT_ONCE_MAX)
                });
                is_over.store(true, Ordering::SeqCst);
                assert!(failed.is_err(), "the power failed after {asked} pieces");
            });
            volume.power_on();
            // All that the tables say was so before, and each grain has what it had or what it was to get.
            let whole = found(at, 1).into_iter().zip(own.iter().zip(&other));
            for (grain, (found, (own, other))) in whole.enumerate() {
                assert_eq!(found.0, own.0, "grain {grain}");
                let mut may_be = vec![own.1];
                match other.0 {
                    Grain::Present => may_be.push(other.1),
                    Grain::Zero => may_be.push(0),
                    Grain::Absent => {}
                }
                let is_one = found.1.is_some_and(|byte| may_be.contains(&byte));
                assert!(found.0 != Grain::Present || is_one, "grain {grain}");
            }
            let done = merge(&from, Target::Delta(&mut open()), false, all);
            assert!(done.unwrap().is_some());
            for (grain, (found, other)) in found(at, 1).into_iter().zip(&other).enumerate() {
                let is_so = other.0 == Grain::Absent || found.0 == other.0;
                let is_filled = other.0 != Grain::Present || found.1 == Some(other.1);
                assert!(is_so && is_filled, "grain {grain}");
            }
            volume.end();
        });
    }
}
