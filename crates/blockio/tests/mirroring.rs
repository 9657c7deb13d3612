//! A disk that is copied to another file while somebody writes to it: both are the same at the end, whatever the way between
//! them does.

mod common;

use common::way::ToTheFile;
use common::{fill_beside_writes, numbers, read_all, request_of, turn_mirrored, volume, write_of};
use godwit_blockio::filters::{Change, Course, Mirroring, Origin, Outlet};
use godwit_blockio::{
    Access, Arriving, Buffer, Data, Engine, Filter, Flow, Image, Outcome, Request, SecondImage,
    Stack, Work,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

const BYTES: u64 = 8 << 20;
#[test]
fn what_is_written_while_a_disk_is_copied_is_on_both_images() {
    for seed in 0..20 {
        let mut number = numbers(seed);
        let (from, to) = (volume(BYTES), volume(BYTES));
        // The first half holds something, the second nothing.
        let content: Vec<u8> = (0..BYTES / 2).map(|at| (at / 512) as u8 | 1).collect();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&from.path)
            .unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
        let open = |path| Image::open(path, Access::ReadWrite, 512).unwrap();
        let arriving = Arriving::of(&open(&to.path)).unwrap();
        let (way, course) = (ToTheFile::default(), Course::default());
        let mirroring = Mirroring::new(BYTES, Box::new(way.clone()), &course);
        let engine = Engine::new(open(&from.path)).unwrap();
        let mut stack = Stack::new(vec![Box::new(mirroring)], engine);
        let (mut token, mut finished, mut cuts) = (0, 0, 0);
        let mut written = 0;
        while !course.is_synchronised() || token < 1000 || cuts < 5 || stack.under_way() > 0 {
            while stack.under_way() < 8 && token < 1000 {
                let start = number(BYTES / 512 - 64) * 512;
                let len = (1 + number(64)) * 512;
                token += 1;
                let one = match number(8) {
                    0 => request_of(Work::Flush, Data::None, token),
                    1 => request_of(Work::Discard(start..start + len), Data::None, token),
                    _ => write_of(start, len, number(256) as u8, token),
                };
                written += u64::from(one.work.changes());
                stack.submit(one, Instant::now());
            }
            // Not before something was written to what is a hole.
            if token == 20 {
                course.begin(std::iter::once(BYTES / 2..BYTES));
            }
            stack.turn(Some(Instant::now()), &mut Vec::new()).unwrap();
            while let Some((_, outcome)) = stack.finished() {
                assert_eq!(outcome, Outcome::Done);
                finished += 1;
            }
            // By what was written, not by turns: how many of those there are is the storage's affair.
            let is_open = !way.0.lock().unwrap().is_cut;
            if cuts < 5 && is_open && token >= 150 * (cuts + 1) {
                way.cut(&arriving, &course);
                cuts += 1;
            }
            match number(100) {
                1..=5 => way.0.lock().unwrap().is_cut = false,
                _ => way.carry_one(&arriving, &mut number),
            }
            if token >= 20 {
                course.begin(std::iter::empty());
            }
            if token >= 1000 {
                way.0.lock().unwrap().is_cut = false;
            }
        }
        while !way.0.lock().unwrap().given.is_empty() {
            way.carry_one(&arriving, &mut number);
        }
        arriving.sync().unwrap();
        assert_eq!((finished, course.left_bytes()), (token, 0));
        assert_eq!(course.failure(), None);
        assert!(written > 500 && cuts == 5, "{written}, {cuts}");
        assert!(read_all(&from) == read_all(&to), "seed {seed}: they differ");
    }
}

#[test]
fn a_destination_that_is_never_there_holds_no_write() {
    let from = volume(BYTES);
    let (way, course) = (ToTheFile::default(), Course::default());
    way.0.lock().unwrap().is_cut = true;
    let mirroring = Mirroring::new(BYTES, Box::new(way), &course);
    let image = Image::open(&from.path, Access::ReadWrite, 512).unwrap();
    let mut stack = Stack::new(vec![Box::new(mirroring)], Engine::new(image).unwrap());
    course.begin(std::iter::empty());
    for token in 0..20 {
        stack.submit(write_of(token * 4096, 4096, 7, token), Instant::now());
    }
    while stack.under_way() > 0 {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    course.give_up();
    stack.submit(write_of(0, 512, 9, 99), Instant::now());
    while stack.under_way() > 0 {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    assert!(!course.is_synchronised());
    assert_eq!(read_all(&from)[..513], [&[9; 512][..], &[7]].concat());
}

#[test]
fn of_two_changes_of_the_same_bytes_the_later_number_stays_and_none_reaches_beyond_the_end() {
    let to = volume(8192);
    let image = Image::open(&to.path, Access::ReadWrite, 512).unwrap();
    let arriving = Arriving::of(&image).unwrap();
    let filled = |fill: u8, len: usize| {
        let mut buffer = Buffer::zeroed(len);
        buffer.bytes_mut().fill(fill);
        buffer
    };
    arriving
        .apply(2, 1, &(512..1024), Some(filled(2, 512).bytes()))
        .unwrap();
    arriving
        .apply(1, 1, &(0..2048), Some(filled(1, 2048).bytes()))
        .unwrap();
    arriving.apply(3, 1, &(1536..2048), None).unwrap();
    let found = read_all(&to);
    let wanted = [[1; 512], [2; 512], [1; 512], [0; 512]].concat();
    assert_eq!(found[..2048], wanted);
    let buffer = filled(9, 512);
    let whole = Some(buffer.bytes());
    for (range, content) in [(8192..8704, whole), (0..1024, whole), (0..u64::MAX, None)] {
        let refused = arriving.apply(4, 1, &range, content).unwrap_err();
        assert!(refused.to_string().contains("does not have"), "{refused}");
    }
    let backwards = Range { start: 512, end: 0 };
    assert!(arriving.apply(4, 1, &backwards, whole).is_err());
}

#[test]
fn a_second_image_is_filled_while_writes_overlap_each_other_and_what_is_copied() {
    for seed in 0..10 {
        let (from, to) = (volume(BYTES), volume(BYTES));
        fill_beside_writes((&from.path, &to.path), None, (2000, 512), seed);
        assert!(read_all(&from) == read_all(&to), "seed {seed}: they differ");
    }
}

#[test]
fn a_second_image_that_cannot_be_written_ends_the_mirroring_and_no_write() {
    let (from, to) = (volume(BYTES), volume(BYTES));
    let course = Course::default();
    let unwritable = Image::open(&to.path, Access::ReadOnly, 512).unwrap();
    let second = SecondImage::of(&unwritable, None, &course).unwrap();
    let mirroring = Mirroring::new(BYTES, second.outlet().unwrap(), &course);
    let image = Image::open(&from.path, Access::ReadWrite, 512).unwrap();
    let mut stack = Stack::new(vec![Box::new(mirroring)], Engine::new(image).unwrap());
    course.begin(None);
    let mut token = 0;
    while course.failure().is_none() || token < 20 || stack.under_way() > 0 {
        if token < 20 {
            stack.submit(write_of(token * 4096, 4096, 7, token), Instant::now());
            token += 1;
        }
        stack.turn(None, &mut Vec::new()).unwrap();
        while let Some((_, outcome)) = stack.finished() {
            assert_eq!(outcome, Outcome::Done);
        }
    }
    let why = course.failure().unwrap();
    assert!(why.contains(to.path.to_str().unwrap()), "{why}");
    assert!(!course.is_synchronised());
    assert_eq!(read_all(&from)[..20 * 4096], [7; 20 * 4096]);
}

/// Answers, and never has room.
struct Full;

impl Outlet for Full {
    fn is_silent(&mut self) -> bool {
        false
    }

    fn takes(&mut self, _origin: Origin) -> bool {
        false
    }

    fn give(&mut self, _origin: Origin, range: Range<u64>, _change: Change) {
        panic!("{range:?} is given where there is no room");
    }
}

#[test]
fn a_write_does_not_wait_for_ever_for_a_destination_that_answers_and_takes_nothing() {
    let from = volume(BYTES);
    let course = Course::default();
    let mirroring = Mirroring::new(BYTES, Box::new(Full), &course);
    let image = Image::open(&from.path, Access::ReadWrite, 512).unwrap();
    let mut stack = Stack::new(vec![Box::new(mirroring)], Engine::new(image).unwrap());
    // Both sides are equal, so that every write goes to both.
    course.begin(std::iter::once(0..BYTES));
    while !course.is_synchronised() {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    for token in 0..3 {
        stack.submit(write_of(token * 4096, 4096, 7, token), Instant::now());
    }
    while stack.under_way() > 0 {
        stack.turn(None, &mut Vec::new()).unwrap();
        while let Some((_, outcome)) = stack.finished() {
            assert_eq!(outcome, Outcome::Done);
        }
    }
    assert!(!course.is_synchronised());
    assert_eq!(read_all(&from)[..3 * 4096], [7; 3 * 4096]);
}

/// Writes each half of a write by itself, and knows both by tokens that mean something else to others.
#[derive(Default)]
struct Halves(BTreeMap<u64, (Option<Request>, u64)>);

impl Filter for Halves {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        let (Work::Write(range), Data::Own(bytes)) = (&request.work, &request.data) else {
            return flow.down(request);
        };
        let middle = range.start + (range.end - range.start) / 2;
        let half = |range: &Range<u64>, at: usize| {
            let mut half = Buffer::zeroed((range.end - range.start) as usize);
            let len = half.len();
            half.bytes_mut()
                .copy_from_slice(&bytes.bytes()[at..at + len]);
            Data::Own(half)
        };
        // The first is one of the guest's, too, and the second has the highest bits.
        let both = [
            (range.start..middle, request.token),
            (middle..range.end, request.token | 1 << 63),
        ];
        for (part, token) in both {
            let at = (part.start - range.start) as usize;
            flow.make(Work::Write(part.clone()), half(&part, at), token);
        }
        self.0.insert(request.token, (Some(request), 2));
    }

    fn made(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        assert_eq!(outcome, Outcome::Done);
        let (whole, left) = self.0.get_mut(&(request.token & !(1 << 63))).unwrap();
        *left -= 1;
        if *left == 0 {
            flow.up(whole.take().unwrap(), outcome);
        }
    }
}

#[test]
fn writes_that_a_filter_above_makes_are_on_both_images_whatever_it_knows_them_by() {
    let (from, to) = (volume(BYTES), volume(BYTES));
    let course = Course::default();
    let open = |path| Image::open(path, Access::ReadWrite, 512).unwrap();
    let second = SecondImage::of(&open(&to.path), None, &course).unwrap();
    let mirroring = Mirroring::new(BYTES, second.outlet().unwrap(), &course);
    let filters: Vec<Box<dyn Filter>> = vec![Box::new(Halves::default()), Box::new(mirroring)];
    let mut stack = Stack::new(filters, Engine::new(open(&from.path)).unwrap());
    course.begin(None);
    let (mut token, mut finished) = (0, 0);
    let is_equal = || second.under_way_bytes() == 0 && course.is_synchronised();
    while token < 400 || stack.under_way() > 0 || !is_equal() {
        while stack.under_way() < 16 && token < 400 {
            token += 1;
            // Some pass unchanged, each with the token that the next write has.
            let start = token * 7919 % (BYTES / 512 - 8) * 512;
            let one = match token % 4 {
                0 => request_of(
                    Work::Discard(start..start + 4096),
                    Data::None,
                    (token + 1) << 8,
                ),
                _ => write_of(start, 4096, token as u8, token << 8),
            };
            stack.submit(one, Instant::now());
        }
        finished += turn_mirrored(&mut stack, &course);
    }
    assert_eq!(finished, token);
    assert!(read_all(&from) == read_all(&to), "they differ");
}
