//! A disk whose writes are marked while it is copied to another file: both are the same once it is closed and says so, whatever the
//! way between them does.

mod common;

use common::way::ToTheFile;
use common::{Volume, numbers, read_all, request_of, turn_mirrored, volume, write_of};
use godwit_blockio::filters::{Course, DirtyTracking, Pace};
use godwit_blockio::{
    Access, Arriving, Bound, Data, Engine, Image, Outcome, Request, SecondImage, Stack, Work,
    switch_over,
};
use godwit_tracking::{BLOCK, Decision, Options, Why};
use std::time::{Duration, Instant};

const BYTES: u64 = 16 << 20;

fn open(volume: &Volume) -> Image {
    Image::open(&volume.path, Access::ReadWrite, 512).unwrap()
}

fn options(seed: u64) -> Options {
    Options {
        incremental: seed.is_multiple_of(2),
        hot_blocks: !seed.is_multiple_of(3),
    }
}

/// One request of a guest that writes much of what it writes in one place.
fn any(token: u64, mut number: impl FnMut(u64) -> u64) -> Request {
    let start = match number(2) {
        0 => number(64),
        _ => number(BYTES / 512 - 64),
    } * 512;
    let len = (1 + number(64)) * 512;
    match number(8) {
        0 => request_of(Work::Flush, Data::None, token),
        1 => request_of(Work::Discard(start..start + len), Data::None, token),
        _ => write_of(start, len, number(256) as u8, token),
    }
}

/// The first half of the image holds something, the second nothing.
fn half_full() -> Volume {
    let from = volume(BYTES);
    let content: Vec<u8> = (0..BYTES / 2).map(|at| (at / 512) as u8 | 1).collect();
    let file = std::fs::OpenOptions::new().write(true).open(&from.path);
    std::os::unix::fs::FileExt::write_all_at(&file.unwrap(), &content, 0).unwrap();
    from
}

#[test]
fn what_is_written_while_a_disk_is_copied_is_on_both_images_once_it_is_closed() {
    for seed in 0..20 {
        let mut number = numbers(seed);
        let (from, to) = (half_full(), volume(BYTES));
        let arriving = Arriving::of(&open(&to)).unwrap();
        let (way, course) = (ToTheFile::default(), Course::default());
        let outlet = Box::new(way.clone());
        let filter = DirtyTracking::new(BYTES, outlet, &course, options(seed));
        let engine = Engine::new(open(&from)).unwrap();
        let mut stack = Stack::new(vec![Box::new(filter)], engine);
        let (mut token, mut finished, mut cuts, mut closed) = (0, 0, 0, 0);
        while !course.is_synchronised() || token < 1000 || cuts < 5 || stack.under_way() > 0 {
            // What it has in its ring stays there while the disk is closed.
            while stack.under_way() < 8 && token < 1000 && stack.opens_at(Instant::now()).is_none()
            {
                token += 1;
                stack.submit(any(token, &mut number), Instant::now());
            }
            // Not before something was written to what is a hole.
            if token >= 20 {
                course.begin(std::iter::once(BYTES / 2..BYTES));
            }
            stack.turn(Some(Instant::now()), &mut Vec::new()).unwrap();
            while let Some((_, outcome)) = stack.finished() {
                assert_eq!(outcome, Outcome::Done);
                finished += 1;
            }
            let is_open = !way.0.lock().unwrap().is_cut;
            if cuts < 5 && is_open && token >= 150 * (cuts + 1) {
                way.cut(&arriving, &course);
                cuts += 1;
            }
            match number(400) {
                1..=20 => way.0.lock().unwrap().is_cut = false,
                21 => {
                    course.close();
                    closed += 1;
                }
                22..=24 if token < 1000 => course.open(),
                _ => way.carry_one(&arriving, &mut number),
            }
            if token >= 1000 {
                way.0.lock().unwrap().is_cut = false;
                course.close();
            }
        }
        while !way.0.lock().unwrap().given.is_empty() {
            way.carry_one(&arriving, &mut number);
        }
        arriving.sync().unwrap();
        assert_eq!((finished, course.left_bytes()), (token, 0));
        assert_eq!(course.failure(), None);
        assert!(cuts == 5 && closed > 0, "{cuts}, {closed}");
        assert!(read_all(&from) == read_all(&to), "seed {seed}: they differ");
    }
}

/// Everything as whoever moves a disk does it, on a thread of its own.
#[test]
fn a_second_image_is_the_same_once_a_guest_that_writes_all_the_while_is_held_for_it() {
    for seed in 0..6 {
        let mut number = numbers(seed);
        let (from, to, course) = (half_full(), volume(BYTES), Course::default());
        let second = SecondImage::of(&open(&to), None, &course).unwrap();
        let outlet = second.outlet().unwrap();
        let filter = DirtyTracking::new(BYTES, outlet, &course, options(seed));
        let mut stack = Stack::new(vec![Box::new(filter)], Engine::new(open(&from)).unwrap());
        course.begin(None);
        let mover = std::thread::spawn(move || {
            let (course, began) = (second.course().clone(), Instant::now());
            let until_close = || {
                while course.decision() != Some(Decision::Finish) {
                    assert!(
                        began.elapsed() < Duration::from_secs(120),
                        "{:?}",
                        course.iterations()
                    );
                    std::thread::sleep(Duration::from_millis(1));
                }
                course.close();
                while !course.is_synchronised() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok::<(), ()>(())
            };
            let switch = |bound: Bound<'_>| {
                let durable = bound.sync_within(Duration::from_secs(20), || ()).unwrap();
                assert!(durable.is_some() && bound.is_equal());
                Ok(Some(()))
            };
            let switched = switch_over(&second, until_close, switch);
            assert_eq!(switched, Ok(Some(())));
            (course.iterations(), course.closed_for())
        });
        let (mut token, mut finished) = (0, 0);
        while !mover.is_finished() || stack.under_way() > 0 {
            while stack.under_way() < 4
                && !mover.is_finished()
                && stack.opens_at(Instant::now()).is_none()
            {
                token += 1;
                stack.submit(any(token, &mut number), Instant::now());
            }
            finished += turn_mirrored(&mut stack, &course);
        }
        let (iterations, closed) = mover.join().unwrap();
        println!("seed {seed}: {token} requests, closed for {closed:?}, {iterations:?}");
        assert_eq!(finished, token);
        assert!(
            iterations
                .first()
                .is_some_and(|first| first.number == 1 && first.copied == BYTES)
        );
        assert!(closed > Duration::ZERO && closed < Duration::from_secs(5));
        assert!(read_all(&from) == read_all(&to), "seed {seed}: they differ");
    }
}

#[test]
fn a_second_image_that_cannot_be_written_ends_the_tracking_and_no_write() {
    let (from, to) = (volume(BYTES), volume(BYTES));
    let course = Course::default();
    let unwritable = Image::open(&to.path, Access::ReadOnly, 512).unwrap();
    let second = SecondImage::of(&unwritable, None, &course).unwrap();
    let outlet = second.outlet().unwrap();
    let filter = DirtyTracking::new(BYTES, outlet, &course, Options::default());
    let mut stack = Stack::new(vec![Box::new(filter)], Engine::new(open(&from)).unwrap());
    course.begin(None);
    course.close();
    while course.failure().is_none() {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    assert!(
        stack.opens_at(Instant::now()).is_none(),
        "it holds nothing any more"
    );
    for token in 0..20 {
        stack.submit(write_of(token * 4096, 4096, 7, token), Instant::now());
    }
    while stack.under_way() > 0 {
        stack.turn(Some(Instant::now()), &mut Vec::new()).unwrap();
        while let Some((_, outcome)) = stack.finished() {
            assert_eq!(outcome, Outcome::Done);
        }
    }
    assert!(!course.is_synchronised());
    assert_eq!(read_all(&from)[..20 * 4096], [7; 20 * 4096]);
}

/// As much as the guest writes again before an iteration ends.
#[test]
fn a_guest_that_writes_all_of_its_disk_faster_than_that_is_copied_ends_it_and_not_by_being_held() {
    let (from, to) = (half_full(), volume(BYTES));
    let course = Course::at(&Pace::at_most(Some(4e6)));
    let second = SecondImage::of(&open(&to), None, &course).unwrap();
    let outlet = second.outlet().unwrap();
    let filter = DirtyTracking::new(BYTES, outlet, &course, Options::default());
    let mut stack = Stack::new(vec![Box::new(filter)], Engine::new(open(&from)).unwrap());
    course.begin(std::iter::once(BYTES / 2..BYTES));
    let (mut token, began) = (0, Instant::now());
    let why = loop {
        // Every block of it once in a second or so.
        if token < began.elapsed().as_millis() as u64 / 4 {
            token += 1;
            let start = token % (BYTES / BLOCK) * BLOCK;
            stack.submit(write_of(start, 4096, token as u8, token), Instant::now());
        }
        turn_mirrored(&mut stack, &course);
        if let Some(Decision::Abort(why)) = course.decision() {
            break why;
        }
        assert_ne!(
            course.decision(),
            Some(Decision::Finish),
            "{:?}",
            course.iterations()
        );
        assert!(
            began.elapsed() < Duration::from_secs(100),
            "{:?}",
            course.iterations()
        );
    };
    println!("{why}: {:?}", course.iterations());
    assert!(
        matches!(why, Why::NoNearer { wait_s } if wait_s > 3.0),
        "{why}"
    );
    assert!(stack.opens_at(Instant::now()).is_none() && course.closed_for() == Duration::ZERO);
}
