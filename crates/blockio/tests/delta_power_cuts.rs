//! A delta on a volume that loses its power: what was flushed is read afterwards, what was not is old or new by itself, and what was never
//! written of a grain is its parent's.

mod common;

use common::deltas::open_top;
use common::{numbers, request_of, write_of};
use godwit_blockio::delta::{NewDelta, Opening, Outliving, create, describe_base};
use godwit_blockio::{Access, Buffer, Data, Engine, Image, Outcome, Stack, Waits, Work};
use godwit_delta::{GRAIN, Id, Layout};
use godwit_testkit::testvol::{self, Survives, Volume};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SECTORS: u64 = 4096 + 3;
const BYTES: u64 = SECTORS * 512;

/// By sector: what may be read after a power cut. Each write fills its sectors with a number.
struct MayBe(Vec<BTreeSet<u8>>);

impl MayBe {
    fn changes(&mut self, sectors: std::ops::Range<u64>, value: u8) {
        for sector in sectors {
            self.0[sector as usize].insert(value);
        }
    }
}

struct Case<'a> {
    at: &'a Path,
    map: &'a Path,
    boot: u8,
    /// What is read now,
    now: Vec<u8>,
    /// and after a power cut.
    may_be: MayBe,
}

impl<'a> Case<'a> {
    /// A base and an empty delta, made there, that nobody has written to.
    fn new(at: &'a Path, map: &'a Path) -> Self {
        let base = prepare(at);
        Self {
            at,
            map,
            boot: 1,
            may_be: MayBe(base.iter().map(|value| BTreeSet::from([*value])).collect()),
            now: base,
        }
    }

    fn open(&self) -> Stack<Engine> {
        let base = Image::open(&self.at.join("base.raw"), Access::ReadOnly, 512).unwrap();
        let opening = Opening {
            block_bytes: 512,
            name: "this",
            patience: Duration::from_secs(5),
        };
        let outliving = Outliving {
            map: self.map,
            boot: Id([self.boot; 16]),
            no_guest_lives: false,
        };
        let top = open_top(&self.at.join("top.vmdk"), opening, outliving).unwrap();
        let mut stack = Stack::new(Vec::new(), Engine::new(base).unwrap());
        stack.put_deltas(vec![top]).unwrap();
        stack
    }

    /// Requests, of which the last ones are not waited for; whether all of them had succeeded.
    fn work(&mut self, stack: &mut Stack<Engine>, number: &mut impl FnMut(u64) -> u64) {
        for token in 0..30 {
            let start = number(2) * 2000 + number(40);
            let len = (1 + number(24)).min(SECTORS - start);
            let (sectors, value) = (start..start + len, 1 + number(250) as u8);
            let range = start * 512..(start + len) * 512;
            let one = match number(8) {
                0 => request_of(Work::Flush, Data::None, token),
                1 => request_of(Work::Discard(range), Data::None, token),
                2 => request_of(Work::WriteZeroes { range, unmap: true }, Data::None, token),
                _ => write_of(range.start, len * 512, value, token),
            };
            let (changed, value) = match &one.work {
                Work::Discard(_) => {
                    let first = start.next_multiple_of(8);
                    let end = (start + len) / 8 * 8;
                    (first.min(end)..end, 0)
                }
                Work::WriteZeroes { .. } => (sectors, 0),
                Work::Write(_) => (sectors, value),
                _ => (0..0, 0),
            };
            self.may_be.changes(changed.clone(), value);
            stack.submit(one, Instant::now());
            while stack.under_way() > 0 {
                stack.turn(None, &mut Vec::new()).unwrap();
            }
            let (request, outcome) = stack.finished().unwrap();
            assert_eq!(outcome, Outcome::Done, "{:?}", request.work);
            changed.for_each(|sector| self.now[sector as usize] = value);
            if request.work == Work::Flush {
                let now = self.now.iter().map(|value| BTreeSet::from([*value]));
                self.may_be = MayBe(now.collect());
            }
        }
        // Some are under way when the power goes.
        for token in 100..103 {
            let start = number(60);
            let value = 1 + number(250) as u8;
            self.may_be.changes(start..start + 9, value);
            stack.submit(write_of(start * 512, 9 * 512, value, token), Instant::now());
        }
        if number(2) == 0 {
            stack.submit(request_of(Work::Flush, Data::None, 200), Instant::now());
        }
        for _ in 0..number(4) {
            let soon = Instant::now() + Duration::from_millis(1);
            stack.turn(Some(soon), &mut Vec::new()).unwrap();
        }
    }

    /// What is read: each sector in one value, which may be there.
    fn look(&mut self, stack: &mut Stack<Engine>) {
        let all = Data::Own(Buffer::zeroed(BYTES as usize));
        stack.submit(request_of(Work::Read(0..BYTES), all, 0), Instant::now());
        while stack.under_way() > 0 {
            stack.turn(None, &mut Vec::new()).unwrap();
        }
        let (request, outcome) = stack.finished().unwrap();
        assert_eq!(outcome, Outcome::Done);
        let Data::Own(bytes) = &request.data else {
            panic!("{request:?}");
        };
        for (sector, bytes) in bytes.bytes().chunks(512).enumerate() {
            let value = bytes[0];
            assert!(
                bytes.iter().all(|byte| *byte == value),
                "sector {sector} is torn"
            );
            let may_be = &self.may_be.0[sector];
            assert!(
                may_be.contains(&value),
                "sector {sector}: {value} of {may_be:?}"
            );
            self.now[sector] = value;
        }
        let now = self.now.iter().map(|value| BTreeSet::from([*value]));
        self.may_be = MayBe(now.collect());
    }
}

/// Ends what is under way without power. What comes meanwhile is refused, by another thread: a write may wait for a sync that was held.
fn drain(volume: &Volume, stack: &mut Stack<Engine>) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                volume.refuse_held();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        while stack.under_way() > 0 {
            stack.turn(None, &mut Vec::new()).unwrap();
        }
        is_over.store(true, Ordering::Release);
    });
}

fn prepare(at: &Path) -> Vec<u8> {
    let base: Vec<u8> = (0..SECTORS)
        .map(|sector| (sector % 199 + 1) as u8)
        .collect();
    let bytes: Vec<u8> = base.iter().flat_map(|value| [*value; 512]).collect();
    fs::write(at.join("base.raw"), bytes).unwrap();
    fs::File::open(at.join("base.raw"))
        .unwrap()
        .sync_all()
        .unwrap();
    let parent = describe_base(&at.join("base.vmdk"), "base.raw", (BYTES, 7)).unwrap();
    let new = NewDelta {
        descriptor: &at.join("top.vmdk"),
        bytes: BYTES,
        id: Id([5; 16]),
        parent: &parent,
    };
    create(&new).unwrap();
    base
}

#[test]
fn what_was_flushed_survives_a_power_cut_and_nothing_else_is_made_up() {
    let (directory, run) = (
        tempfile::tempdir().unwrap(),
        tempfile::tempdir_in("/dev/shm").unwrap(),
    );
    testvol::apart_or_skipped(|inside| {
        for seed in 0..40 {
            let mut volume = Volume::mount_direct(inside.as_fd(), directory.path()).unwrap();
            let map = run.path().join("states");
            let mut case = Case::new(directory.path(), &map);
            let mut number = numbers(seed);
            // Made durably: it is there after a cut before anything was written.
            volume.cut(Survives::Nothing);
            for cut in 0..6 {
                let mut stack = case.open();
                case.look(&mut stack);
                case.work(&mut stack, &mut number);
                let survives = [
                    Survives::Nothing,
                    Survives::Some(seed * 10 + cut),
                    Survives::Everything,
                ];
                volume.power_off(survives[number(3) as usize]);
                drain(&volume, &mut stack);
                volume.power_on();
                drop(stack);
                case.boot += 1;
            }
            let mut stack = case.open();
            case.look(&mut stack);
            volume.end();
        }
    });
}

#[test]
fn what_finds_no_room_fails_so_that_it_can_be_tried_again_and_changes_nothing() {
    let (directory, run) = (
        tempfile::tempdir().unwrap(),
        tempfile::tempdir_in("/dev/shm").unwrap(),
    );
    testvol::apart_or_skipped(|inside| {
        let mut volume = Volume::mount_direct(inside.as_fd(), directory.path()).unwrap();
        let map = run.path().join("states");
        let mut case = Case::new(directory.path(), &map);
        let mut stack = case.open();
        let one = |stack: &mut Stack<Engine>, work: Work, fill: u8| {
            let request = match work {
                Work::Write(range) => write_of(range.start, range.end - range.start, fill, 1),
                work => request_of(work, Data::None, 1),
            };
            stack.submit(request, Instant::now());
            while stack.under_way() > 0 {
                stack.turn(None, &mut Vec::new()).unwrap();
            }
            let (request, outcome) = stack.finished().unwrap();
            let waits = Waits {
                for_room: true,
                for_storage: false,
            };
            assert_eq!(waits.keep(&request, outcome), outcome.lacks_room());
            outcome
        };
        let no_room = Outcome::Failed(Errno::NOSPC);
        volume.fill();
        for range in [0..4096, 512..1024, 4096..9216] {
            assert_eq!(one(&mut stack, Work::Write(range), 9), no_room);
        }
        assert!(no_room.lacks_room());
        case.look(&mut stack);
        // Room for the data and none for the entry: the flush says so, and is right later.
        volume.change(|settings| settings.capacity = settings.capacity.map(|bytes| bytes + 4096));
        assert_eq!(one(&mut stack, Work::Write(0..4096), 9), Outcome::Done);
        assert_eq!(one(&mut stack, Work::Flush, 0), no_room);
        volume.change(|settings| settings.capacity = None);
        assert_eq!(one(&mut stack, Work::Flush, 0), Outcome::Done);
        case.may_be = MayBe(
            case.now
                .iter()
                .map(|value| BTreeSet::from([*value]))
                .collect(),
        );
        (0..8).for_each(|sector| case.may_be.0[sector] = BTreeSet::from([9]));
        volume.cut(Survives::Nothing);
        drop(stack);
        case.boot += 1;
        let mut stack = case.open();
        case.look(&mut stack);
        volume.end();
    });
    assert!(
        Layout::of(BYTES).unwrap().grains() * GRAIN > BYTES,
        "the last grain is none"
    );
}
