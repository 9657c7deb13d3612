//! Deltas on storage that fails, or is nearly full: nothing is called durable that may be lost, by nobody, and copying leaves room to guests.

mod common;

use common::deltas::{open_parent, open_top, open_unlocked};
use common::{request_of, write_of};
use godwit_blockio::delta::{
    AT_ONCE_MAX, Delta, NewDelta, Opening, Outliving, Target, create, describe_base, merge,
};
use godwit_blockio::{Access, Buffer, Data, Engine, Error, Image, Outcome, Request, Stack, Work};
use godwit_delta::Id;
use godwit_testkit::file_system::{DEVICE_BYTES, Device, Mount};
use godwit_testkit::testvol::{self, Volume};
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const BYTES: u64 = 4 << 20;
const FAILED: Outcome = Outcome::Failed(Errno::IO);

fn opening() -> Opening<'static> {
    Opening {
        block_bytes: 512,
        name: "this",
        patience: Duration::from_secs(5),
    }
}

/// A base that is one hole, and an empty delta over it.
fn make(at: &Path, bytes: u64) {
    let base = File::create(at.join("base.raw")).unwrap();
    base.set_len(bytes).unwrap();
    let parent = describe_base(&at.join("base.vmdk"), "base.raw", (bytes, 7)).unwrap();
    let new = NewDelta {
        descriptor: &at.join("top.vmdk"),
        bytes,
        id: Id([5; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
}

fn open(at: &Path, run: &TempDir, no_guest_lives: bool) -> Result<Delta, Error> {
    let outliving = Outliving {
        map: &run.path().join("states"),
        boot: Id([1; 16]),
        no_guest_lives,
    };
    open_top(&at.join("top.vmdk"), opening(), outliving)
}

fn stack(at: &Path, top: Delta) -> Stack<Engine> {
    let base = Image::open(&at.join("base.raw"), Access::ReadOnly, 512).unwrap();
    let mut stack = Stack::new(Vec::new(), Engine::new(base).unwrap());
    stack.put_deltas(vec![top]).unwrap();
    stack
}

fn done(stack: &mut Stack<Engine>, request: Request) -> (Request, Outcome) {
    stack.submit(request, Instant::now());
    while stack.under_way() > 0 {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    stack.finished().unwrap()
}

fn write(stack: &mut Stack<Engine>, start: u64, len: u64, value: u8) -> Outcome {
    done(stack, write_of(start, len, value, 1)).1
}

fn flush(stack: &mut Stack<Engine>) -> Outcome {
    done(stack, request_of(Work::Flush, Data::None, 1)).1
}

fn read(stack: &mut Stack<Engine>, start: u64) -> u8 {
    let into = Data::Own(Buffer::zeroed(512));
    let read = request_of(Work::Read(start..start + 512), into, 1);
    let (request, outcome) = done(stack, read);
    assert_eq!(outcome, Outcome::Done);
    match &request.data {
        Data::Own(buffer) => buffer.bytes()[0],
        other => panic!("{other:?}"),
    }
}

fn syncs_fail(volume: &Volume, fail: bool) {
    volume.change(|settings| settings.fails.syncs = fail);
}

fn on_a_volume(work: impl FnOnce(&Volume, &Path, &TempDir) + Send) {
    let directory = tempfile::tempdir().unwrap();
    let run = tempfile::tempdir_in("/dev/shm").unwrap();
    testvol::apart_or_skipped(|inside| {
        let mut volume = Volume::mount_direct(inside.as_fd(), directory.path()).unwrap();
        make(directory.path(), BYTES);
        work(&volume, directory.path(), &run);
        volume.end();
    });
}

#[test]
fn a_sync_that_failed_is_heard_of_from_then_on_and_a_new_guest_begins_with_what_was_kept() {
    on_a_volume(|volume, at, run| {
        let mut first = stack(at, open(at, run, false).unwrap());
        assert_eq!(write(&mut first, 0, 4096, 1), Outcome::Done);
        assert_eq!(flush(&mut first), Outcome::Done);
        assert_eq!(write(&mut first, 4096, 4096, 2), Outcome::Done);
        syncs_fail(volume, true);
        assert_eq!(flush(&mut first), FAILED);
        syncs_fail(volume, false);
        // Now the storage would say that all is well.
        assert_eq!(flush(&mut first), FAILED);
        let mut durable = write_of(0, 512, 3, 1);
        durable.durable = true;
        assert_eq!(done(&mut first, durable).1, FAILED);
        assert_eq!(write(&mut first, 8192, 4096, 4), Outcome::Done);
        let (asked, outcome) = done(&mut first, request_of(Work::Flush, Data::None, 1));
        let unsettled = first.unsettled(&asked, outcome).unwrap();
        let why = unsettled.error.to_string();
        assert!(unsettled.lost && why.contains("stop its VM"), "{why}");
        let top = first.take_deltas().unwrap().pop().unwrap();
        let why = top.close().unwrap_err().to_string();
        assert!(why.contains("stop its VM and start it again"), "{why}");
        drop(first);
        // Another process, and the same guest: it reads what it wrote, and hears of it.
        let top = open(at, run, false).unwrap();
        assert!(top.is_lost() && !top.went_back());
        let mut next = stack(at, top);
        assert_eq!((read(&mut next, 4096), read(&mut next, 8192)), (2, 4));
        assert_eq!(flush(&mut next), FAILED);
        drop(next);
        let top = open(at, run, true).unwrap();
        assert!(!top.is_lost() && top.went_back());
        let mut next = stack(at, top);
        assert_eq!((read(&mut next, 4096), read(&mut next, 8192)), (0, 0));
        assert_eq!(write(&mut next, 4096, 4096, 5), Outcome::Done);
        assert_eq!(flush(&mut next), Outcome::Done);
        drop(next);
        assert!(!open(at, run, false).unwrap().is_lost());
    });
}

#[test]
fn a_process_that_fails_to_open_or_to_close_a_delta_durably_leaves_word_of_it() {
    on_a_volume(|volume, at, run| {
        let mut first = stack(at, open(at, run, false).unwrap());
        assert_eq!(write(&mut first, 0, 4096, 1), Outcome::Done);
        // As after a kill: the kernel tells the first one that asks.
        drop(first);
        syncs_fail(volume, true);
        open(at, run, false).unwrap_err();
        syncs_fail(volume, false);
        let top = open(at, run, false).unwrap();
        assert!(top.is_lost());
        drop(top);
        // Nothing was kept; and from here on all is well until it is closed.
        let mut next = stack(at, open(at, run, true).unwrap());
        assert_eq!(write(&mut next, 0, 4096, 2), Outcome::Done);
        let top = next.take_deltas().unwrap().pop().unwrap();
        syncs_fail(volume, true);
        let why = top.close().unwrap_err().to_string();
        assert!(why.contains("cannot make durable"), "{why}");
        syncs_fail(volume, false);
        assert!(open(at, run, false).unwrap().is_lost());
    });
}

#[test]
fn blocks_of_tables_that_follow_one_another_are_written_at_once() {
    on_a_volume(|volume, at, run| {
        let mut stack = stack(at, open(at, run, false).unwrap());
        // One block of the tables tells of 2 MiB.
        for start in [0, 2 << 20] {
            assert_eq!(write(&mut stack, start, 4096, 1), Outcome::Done);
        }
        let top = stack.take_deltas().unwrap().pop().unwrap();
        let before = volume.counts().writes;
        top.close().unwrap();
        assert_eq!(
            volume.counts().writes - before,
            2,
            "the blocks, and the label"
        );
        drop(stack);
        let parent = open_parent(&at.join("top.vmdk"), opening()).unwrap();
        assert!(parent.states().marked().is_empty());
        let seen = [0, 1, 512].map(|grain| parent.states().get(grain));
        let [there, not, too] = seen;
        assert!(there == too && there != not, "{seen:?}");
    });
}

/// Memory of this process that is no file's, in bytes.
fn own_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() << 10
}

#[test]
fn a_large_delta_that_holds_little_takes_little_memory() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Whose states are 128 MiB.
    make(directory.path(), 2 << 40);
    let before = own_memory();
    let parent = open_parent(&directory.path().join("top.vmdk"), opening()).unwrap();
    let taken = own_memory().saturating_sub(before);
    // Other tests of this process take some.
    assert!(taken < 100 << 20, "{taken} bytes");
    drop(parent);
}

#[test]
fn merging_leaves_room_to_disks_that_are_in_use_and_is_done_once_there_is_some() {
    const BIG: u64 = 24 << 20;
    if !rustix::process::geteuid().is_root() {
        println!("skipped: loop devices and mounts need root");
        return;
    }
    let below = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = tempfile::tempdir().unwrap();
    let run = tempfile::tempdir_in("/dev/shm").unwrap();
    let device = Device::over(&below.path().join("device"), 512);
    let mount = device.and_then(|device| Mount::of("ext4", device, place.path()));
    let Some(mount) = mount else {
        println!("skipped: ext4 cannot be made here");
        return;
    };
    let at = place.path();
    make(at, BIG);
    let mut stack = stack(at, open(at, &run, false).unwrap());
    for start in (0..BIG).step_by(1 << 20) {
        assert_eq!(write(&mut stack, start, 1 << 20, 9), Outcome::Done);
    }
    let top = stack.take_deltas().unwrap().pop().unwrap();
    top.close().unwrap();
    drop(stack);
    let free = || {
        let found = rustix::fs::statvfs(at).unwrap();
        found.f_bavail * found.f_frsize
    };
    let rest = File::create(at.join("rest")).unwrap();
    let len = free().saturating_sub(BIG / 2);
    rustix::fs::fallocate(&rest, rustix::fs::FallocateFlags::empty(), 0, len).unwrap();
    let merge_all = || {
        let from = open_unlocked(&at.join("top.vmdk")).unwrap();
        let base = Image::open(&at.join("base.raw"), Access::ReadWrite, 512).unwrap();
        merge(&from, Target::Raw(base.as_fd(), BIG), false, |_| {
            Some(AT_ONCE_MAX)
        })
    };
    let refused = merge_all().unwrap_err().to_string();
    assert!(refused.contains("disks that are in use"), "{refused}");
    assert!(free() > DEVICE_BYTES / 200, "{} bytes are left", free());
    drop(rest);
    fs::remove_file(at.join("rest")).unwrap();
    assert_eq!(merge_all().unwrap().unwrap().copied, BIG);
    let merged = fs::read(at.join("base.raw")).unwrap();
    assert!(merged.len() as u64 == BIG && merged.iter().all(|byte| *byte == 9));
    drop(mount);
}
