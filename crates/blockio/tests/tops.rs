//! The top of a disk with deltas is copied over a copy of what lies below it while somebody writes to it: both disks read the same at the end,
//! whatever the way between them does.

mod common;

use common::deltas::{open_parent, open_top};
use common::way::ToTheFile;
use common::{numbers, request, request_of, run, write_of};
use godwit_blockio::delta::{Delta, NewDelta, Opening, Outliving, create, describe_base};
use godwit_blockio::filters::{Course, Mirroring, TopOnly, untouched};
use godwit_blockio::{
    Access, Arriving, Buffer, Data, Engine, Image, Outcome, Request, Stack, Work,
};
use godwit_delta::{GRAIN, Grain, Id, Layout, Parent};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// No multiple of a region, nor of a grain.
const BYTES: u64 = (8 << 20) + 5 * 512;
const WRITES: u64 = 600;

fn opening() -> Opening<'static> {
    Opening {
        block_bytes: 512,
        name: "this",
        patience: Duration::from_secs(5),
    }
}

fn raw(directory: &Path) -> Image {
    Image::open(&directory.join("base.raw"), Access::ReadWrite, 512).unwrap()
}

/// A new delta of this number.
fn make(directory: &Path, number: u8, parent: &Parent) -> (Parent, Delta) {
    let descriptor = directory.join(format!("d{number}.vmdk"));
    let new = NewDelta {
        descriptor: &descriptor,
        bytes: BYTES,
        id: Id([number; 16]),
        parent,
    };
    let made = create(&new).unwrap();
    let outliving = Outliving {
        map: &directory.join(format!("d{number}.states")),
        boot: Id([77; 16]),
        no_guest_lives: true,
    };
    let delta = open_top(&descriptor, opening(), outliving).unwrap();
    (made, delta)
}

fn over(directory: &Path, deltas: Vec<Delta>) -> Stack<Engine> {
    let mut stack = Stack::new(Vec::new(), Engine::new(raw(directory)).unwrap());
    assert!(stack.put_deltas(deltas).is_ok());
    stack
}

/// Anything that changes the disk; what is discarded is whole grains, since nothing is said of the rest.
fn any(token: u64, mut number: impl FnMut(u64) -> u64) -> Request {
    let start = number(BYTES / 512 - 64) * 512;
    let range = start..start + (1 + number(64)) * 512;
    let grains = range.start / GRAIN * GRAIN..range.end / GRAIN * GRAIN;
    match number(8) {
        0 => request_of(Work::Flush, Data::None, token),
        1 if !grains.is_empty() => request_of(Work::Discard(grains), Data::None, token),
        2 => {
            let work = Work::WriteZeroes { range, unmap: true };
            request_of(work, Data::None, token)
        }
        _ => {
            let fill = 1 + number(255) as u8;
            write_of(range.start, range.end - range.start, fill, token)
        }
    }
}

fn all_of(stack: &mut Stack<Engine>) -> Vec<u8> {
    let mut all = Vec::new();
    while (all.len() as u64) < BYTES {
        let start = all.len() as u64;
        let len = (BYTES - start).min(1 << 20);
        let data = Data::Own(Buffer::zeroed(len as usize));
        let read = request(Work::Read(start..start + len), data);
        for (request, outcome) in run(stack, vec![read]) {
            assert_eq!(outcome, Outcome::Done);
            let Data::Own(bytes) = request.data else {
                panic!("no bytes");
            };
            all.extend_from_slice(bytes.bytes());
        }
    }
    all
}

/// A disk of two deltas, the upper one with little of its own, and a copy of all below that.
fn disk_and_copy(from: &Path, to: &Path, seed: u64) -> (Stack<Engine>, Delta, Delta) {
    let mut number = numbers(seed);
    let plain: Vec<u8> = (0..BYTES).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(from.join("base.raw"), plain).unwrap();
    let base = describe_base(&from.join("base.vmdk"), "base.raw", (BYTES, 7)).unwrap();
    let (parent, lower) = make(from, 1, &base);
    let mut stack = over(from, vec![lower]);
    run(
        &mut stack,
        (0..100).map(|token| any(token, &mut number)).collect(),
    );
    let mut lower = stack.take_deltas().unwrap().pop().unwrap();
    lower.freeze().unwrap();
    for name in ["base.raw", "d1.vmdk", "d1-sesparse.vmdk"] {
        fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let (_, top) = make(from, 2, &parent);
    let (_, copy) = make(to, 3, &parent);
    let below = open_parent(&to.join("d1.vmdk"), opening()).unwrap();
    drop(stack);
    let mut stack = over(from, vec![lower, top]);
    run(
        &mut stack,
        (0..10).map(|token| any(token, &mut number)).collect(),
    );
    (stack, below, copy)
}

fn moves(seed: u64) {
    let directories = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    let [from, to] = directories.each_ref().map(|directory| directory.path());
    let (mut stack, below, copy) = disk_and_copy(from, to, seed);
    let (mut number, below) = (numbers(seed ^ 7), vec![below]);
    let layout = Layout::of(BYTES).unwrap();
    let mut deltas = stack.take_deltas().unwrap();
    let top = deltas.last().unwrap().states().clone();
    assert!(stack.put_deltas(std::mem::take(&mut deltas)).is_ok());
    let arriving = Arriving::over(&copy, &below, &raw(to)).unwrap();
    let (way, course) = (ToTheFile::default(), Course::default());
    let outlet = Box::new(TopOnly::new(Box::new(way.clone()), top.clone()));
    let mirroring = Box::new(Mirroring::new(BYTES, outlet, &course));
    assert!(stack.put_lowest(mirroring).is_ok());
    let (mut token, mut cuts, mut has_begun) = (0, 0, false);
    while !course.is_synchronised() || token < WRITES || cuts < 3 || stack.under_way() > 0 {
        while stack.under_way() < 8 && token < WRITES {
            token += 1;
            stack.submit(any(token, &mut number), Instant::now());
        }
        // Not before something was written since the filter was put there.
        if token >= 20 && !std::mem::replace(&mut has_begun, true) {
            course.begin(untouched(&layout, &top));
        }
        stack.turn(Some(Instant::now()), &mut Vec::new()).unwrap();
        while let Some((_, outcome)) = stack.finished() {
            assert_eq!(outcome, Outcome::Done);
        }
        let is_open = !way.0.lock().unwrap().is_cut;
        if cuts < 3 && is_open && token >= 150 * (cuts + 1) {
            way.cut(&arriving, &course);
            cuts += 1;
        }
        match number(100) {
            1..=5 => way.0.lock().unwrap().is_cut = false,
            _ => way.carry_one(&arriving, &mut number),
        }
        if token >= WRITES {
            way.0.lock().unwrap().is_cut = false;
        }
    }
    while !way.0.lock().unwrap().given.is_empty() {
        way.carry_one(&arriving, &mut number);
    }
    arriving.sync().unwrap();
    assert_eq!(course.failure(), None);
    assert!(copy.states().marked().is_empty());
    let has = (0..top.grains()).filter(|grain| top.get(*grain) != Grain::Absent);
    let lacks = has.filter(|grain| copy.states().get(*grain) == Grain::Absent);
    assert_eq!(lacks.count(), 0, "seed {seed}");
    drop(arriving);
    let mut there = over(to, below.into_iter().chain([copy]).collect());
    let same = all_of(&mut stack) == all_of(&mut there);
    assert!(same, "seed {seed}: they differ");
}

#[test]
fn what_is_written_while_a_top_is_copied_is_read_on_both_disks() {
    (0..10).for_each(moves);
}
