//! Deltas on real files beside a plain image: a guest reads from a chain what it would read from one image, whatever was frozen, closed or killed
//! between, and QEMU reads the same.

mod common;

use common::deltas::{open_parent, open_top, open_unlocked};
use common::{guest, numbers, request, run};
use godwit_blockio::delta::{
    Delta, Merged, NewDelta, Opening, Outliving, Target, create, describe_base, merge,
};
use godwit_blockio::{
    Access, Buffer, Data, Engine, Error, Finished, Image, Outcome, Request, Stack, Work,
};
use godwit_delta::{GRAIN, Id, Parent};
use godwit_guestmem::{DeviceReadable, DeviceWritable};
use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vm_memory::{Bytes as _, GuestAddress};

const BOOT: Id = Id([77; 16]);
/// No multiple of a table's reach, nor of a grain.
const BYTES: u64 = (18 << 20) + 5 * 512;
/// A program that another test begins has our files for a moment, and their locks with them.
const PATIENCE: Duration = Duration::from_secs(5);

fn opening(name: &str) -> Opening<'_> {
    Opening {
        block_bytes: 512,
        name,
        patience: PATIENCE,
    }
}

/// A base and deltas above it in a directory, and what a guest should read.
struct Chain {
    directory: tempfile::TempDir,
    plain: Vec<u8>,
    names: Vec<PathBuf>,
    parent: Parent,
}

impl Chain {
    fn new(bytes: u64) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let plain: Vec<u8> = (0..bytes).map(|at| (at / 512 % 251) as u8).collect();
        fs::write(directory.path().join("base.raw"), &plain).unwrap();
        let descriptor = directory.path().join("base.vmdk");
        let parent = describe_base(&descriptor, "base.raw", (bytes, 7)).unwrap();
        Self {
            directory,
            plain,
            names: Vec::new(),
            parent,
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn base(&self, access: Access) -> Image {
        let mut image = Image::open(&self.at("base.raw"), access, 512).unwrap();
        image.lock("this", PATIENCE).unwrap();
        image
    }

    /// A new delta, on top of the others.
    fn add(&mut self) {
        let number = self.names.len() as u8;
        let descriptor = self.at(&format!("d{number}.vmdk"));
        let new = NewDelta {
            descriptor: &descriptor,
            bytes: self.plain.len() as u64,
            id: Id([number + 1; 16]),
            parent: &self.parent,
        };
        self.parent = create(&new).unwrap();
        self.names.push(descriptor);
    }

    fn open_top(&self, boot: Id, no_guest_lives: bool) -> Result<Delta, Error> {
        self.open_top_within(boot, no_guest_lives, PATIENCE)
    }

    fn open_top_within(
        &self,
        boot: Id,
        no_guest_lives: bool,
        patience: Duration,
    ) -> Result<Delta, Error> {
        let descriptor = self.names.last().unwrap();
        let map = descriptor.with_extension("states");
        let outliving = Outliving {
            map: &map,
            boot,
            no_guest_lives,
        };
        let opening = Opening {
            patience,
            ..opening("this")
        };
        open_top(descriptor, opening, outliving)
    }

    fn lower(&self) -> Vec<Delta> {
        let (_, lower) = self.names.split_last().unwrap();
        let open = |descriptor: &PathBuf| open_parent(descriptor, opening("this"));
        lower.iter().map(|one| open(one).unwrap()).collect()
    }

    fn stack(&self) -> Stack<Engine> {
        let engine = Engine::new(self.base(Access::ReadOnly)).unwrap();
        let mut stack = Stack::new(Vec::new(), engine);
        let mut deltas = self.lower();
        deltas.push(self.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
        stack
    }

    /// Requests of a guest, some of them at once, and what it should read then.
    fn work(&mut self, stack: &mut Stack<Engine>, rounds: u64, seed: u64) {
        let mut number = numbers(seed);
        let sectors = self.plain.len() as u64 / 512;
        for _ in 0..rounds {
            // At once only what does not overlap: each has a part of the disk of its own.
            let width = sectors / 8;
            let mut requests = Vec::new();
            for part in 0..8 {
                let near = part * width + number(2) * 4000 % (width - 80);
                let start = near + number(40);
                let len = (1 + number(40)).min(sectors - start);
                let range = start * 512..(start + len) * 512;
                let mut one = self.one(number(10), range, number(255) as u8);
                one.token = part;
                requests.push(one);
            }
            let done = run(stack, requests);
            assert!(done.iter().all(|one| one.1 == Outcome::Done), "{done:?}");
            self.must_read(&done);
        }
    }

    fn one(&mut self, kind: u64, range: std::ops::Range<u64>, fill: u8) -> Request {
        let inside = range.start as usize..range.end as usize;
        let len = inside.len();
        match kind {
            0 => {
                let end = match range.end == self.plain.len() as u64 {
                    true => range.end,
                    false => range.end / GRAIN * GRAIN,
                };
                let start = range.start.next_multiple_of(GRAIN).min(end);
                self.plain[start as usize..end as usize].fill(0);
                request(Work::Discard(range), Data::None)
            }
            1 => {
                self.plain[inside].fill(0);
                request(Work::WriteZeroes { range, unmap: true }, Data::None)
            }
            2 => request(Work::Flush, Data::None),
            3..6 => request(Work::Read(range), Data::Own(Buffer::zeroed(len))),
            _ => {
                let mut buffer = Buffer::zeroed(len);
                buffer.bytes_mut().fill(fill);
                self.plain[inside].fill(fill);
                let mut request = request(Work::Write(range), Data::Own(buffer));
                request.durable = fill < 20;
                request
            }
        }
    }

    fn must_read(&self, done: &[Finished]) {
        for (request, _) in done {
            let (Work::Read(range), Data::Own(seen)) = (&request.work, &request.data) else {
                continue;
            };
            let expected = &self.plain[range.start as usize..range.end as usize];
            assert!(seen.bytes() == expected, "{range:?}");
        }
    }

    fn must_be_plain(&self, stack: &mut Stack<Engine>) {
        let bytes = self.plain.len() as u64;
        for start in (0..bytes).step_by(3 << 20) {
            let end = (start + (3 << 20)).min(bytes);
            let buffer = Buffer::zeroed((end - start) as usize);
            let done = run(
                stack,
                vec![request(Work::Read(start..end), Data::Own(buffer))],
            );
            assert_eq!(done[0].1, Outcome::Done);
            self.must_read(&done);
        }
    }

    /// QEMU reads the same from the delta of this number.
    fn must_be_so_to_qemu(&self, number: usize) {
        fs::write(self.at("expected"), &self.plain).unwrap();
        let name = self.names[number].file_name().unwrap();
        let compared = Command::new("qemu-img")
            .args(["compare", "-f", "vmdk", "-F", "raw"])
            .args([name, "expected".as_ref()])
            .current_dir(self.directory.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&compared.stdout);
        assert!(compared.status.success(), "{said}{compared:?}");
        let converted = Command::new("qemu-img")
            .args(["convert", "-f", "vmdk", "-O", "raw"])
            .args([name, "out".as_ref()])
            .current_dir(self.directory.path())
            .status();
        assert!(converted.unwrap().success());
        assert!(fs::read(self.at("out")).unwrap() == self.plain);
    }
}

fn freeze(stack: &mut Stack<Engine>) -> Vec<Delta> {
    let mut deltas = stack.take_deltas().unwrap();
    deltas.last_mut().unwrap().freeze().unwrap();
    deltas
}

fn merge_down(
    delta: &Delta,
    into: &Image,
    goes_on: impl FnMut(Merged) -> bool,
) -> Result<Option<Merged>, godwit_blockio::Error> {
    merge(
        delta,
        Target::Raw(into.as_fd(), into.bytes()),
        false,
        goes_on,
    )
}

#[test]
fn a_chain_of_three_is_read_as_one_image_by_us_and_by_qemu_and_merged_into_its_base() {
    for bytes in [BYTES, 16 << 20, (17 << 20) + 4096] {
        let mut chain = Chain::new(bytes);
        for number in 0..3 {
            chain.add();
            let mut stack = chain.stack();
            chain.work(&mut stack, 150, number);
            chain.must_be_plain(&mut stack);
            drop(freeze(&mut stack));
            drop(stack);
            chain.must_be_so_to_qemu(number as usize);
        }
        for number in 0..3 {
            let open = || open_parent(&chain.names[number], opening("this")).unwrap();
            let into = chain.base(Access::ReadWrite);
            let mut pieces = 0;
            let half = merge_down(&open(), &into, |_| {
                pieces += 1;
                pieces < 20
            });
            assert_eq!(half.unwrap(), None, "it was to end early");
            let whole = merge_down(&open(), &into, |_| true).unwrap().unwrap();
            assert!(whole.copied > 0 && whole.zeroed > 0);
        }
        assert!(fs::read(chain.at("base.raw")).unwrap() == chain.plain);
    }
}

#[test]
fn a_delta_is_frozen_and_another_put_above_it_beside_a_guest_that_goes_on() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    for number in 0..3 {
        chain.work(&mut stack, 60, number);
        let mut deltas = freeze(&mut stack);
        chain.add();
        deltas.push(chain.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
        chain.must_be_plain(&mut stack);
    }
    // The lowest is brought into the base, beside the guest, and left out.
    drop(stack);
    let lowest = open_parent(&chain.names[0], opening("this")).unwrap();
    let engine = Engine::new(chain.base(Access::ReadWrite)).unwrap();
    let mut stack = Stack::new(Vec::new(), engine);
    let mut deltas = vec![lowest];
    deltas.extend(
        chain.names[1..3]
            .iter()
            .map(|one| open_parent(one, opening("this")).unwrap()),
    );
    deltas.push(chain.open_top(BOOT, false).unwrap());
    stack.put_deltas(deltas).unwrap();
    let source = open_parent(&chain.names[0], opening("other")).unwrap();
    let lent = stack.bottom.lend().unwrap();
    let base = Image::of(lent.into(), &chain.at("base.raw"), Access::ReadWrite, 512).unwrap();
    let mut seed = 10;
    let done = merge_down(&source, &base, |_| {
        seed += 1;
        chain.work(&mut stack, 1, seed);
        true
    });
    assert!(done.unwrap().is_some());
    let mut deltas = stack.take_deltas().unwrap();
    deltas.remove(0);
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 20, 1000);
    chain.must_be_plain(&mut stack);
}

#[test]
fn what_was_answered_is_there_after_a_kill_and_what_no_map_tells_of_is_not_guessed() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    for number in 0..4 {
        let mut stack = chain.stack();
        chain.work(&mut stack, 40, number);
        // As after a kill: nobody closes anything.
        drop(stack);
    }
    chain.must_be_plain(&mut chain.stack());
    let map = chain.names[0].with_extension("states");
    let kept = fs::read(&map).unwrap();
    fs::remove_file(&map).unwrap();
    let refused = chain.open_top(BOOT, false).unwrap_err().to_string();
    assert!(
        refused.contains("end what still runs on it first"),
        "{refused}"
    );
    // A map of another delta, or of another boot, is as none.
    for at in [8, 24, 40] {
        let mut other = kept.clone();
        other[at] ^= 1;
        fs::write(&map, &other).unwrap();
        assert!(chain.open_top(BOOT, false).is_err(), "byte {at}");
    }
    fs::write(&map, &kept).unwrap();
    let mut stack = chain.stack();
    chain.must_be_plain(&mut stack);
    let done = run(&mut stack, vec![request(Work::Flush, Data::None)]);
    assert_eq!(done[0].1, Outcome::Done);
    drop(stack);
    // Everything was flushed: after another boot, or by a person's word, the tables say all.
    fs::remove_file(&map).unwrap();
    chain.open_top(Id([1; 16]), false).unwrap();
    drop(chain.open_top(Id([1; 16]), true).unwrap());
    let engine = Engine::new(chain.base(Access::ReadOnly)).unwrap();
    let mut stack = Stack::new(Vec::new(), engine);
    let top = chain.open_top(Id([1; 16]), false).unwrap();
    stack.put_deltas(vec![top]).unwrap();
    chain.must_be_plain(&mut stack);
}

#[test]
fn a_top_comes_down_into_the_delta_below_which_is_the_top_from_then_on() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    let mut deltas = freeze(&mut stack);
    chain.add();
    deltas.push(chain.open_top(BOOT, false).unwrap());
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 40, 2);
    let mut below = open_unlocked(&chain.names[0]).unwrap();
    stack.settle().unwrap().unwrap();
    let top = open_unlocked(&chain.names[1]).unwrap();
    let merged = merge(&top, Target::Delta(&mut below), false, |_| true);
    assert!(merged.unwrap().is_some());
    let map = chain.names[0].with_extension("states");
    let outliving = Outliving {
        map: &map,
        boot: BOOT,
        no_guest_lives: true,
    };
    let frozen = open_unlocked(&chain.names[0]).unwrap();
    let refused = frozen.into_top(opening("this"), outliving).unwrap_err();
    assert!(refused.to_string().contains("it is frozen"), "{refused}");
    below.thaw().unwrap();
    drop(stack.take_deltas().unwrap());
    let below = below.into_top(opening("this"), outliving).unwrap();
    stack.put_deltas(vec![below]).unwrap();
    chain.work(&mut stack, 40, 3);
    chain.must_be_plain(&mut stack);
    // As after a kill.
    drop(stack);
    chain.names.pop();
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn an_open_delta_goes_by_what_another_one_of_it_has_got() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    for number in 0..2 {
        chain.work(&mut stack, 40, number);
        let mut deltas = freeze(&mut stack);
        chain.add();
        deltas.push(chain.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
    }
    let lowest = open_unlocked(&chain.names[0]).unwrap();
    let mut above = open_unlocked(&chain.names[1]).unwrap();
    let merged = merge(&lowest, Target::Delta(&mut above), true, |_| true);
    assert!(merged.unwrap().is_some());
    let mut deltas = stack.take_deltas().unwrap();
    deltas
        .remove(0)
        .go_by(open_unlocked(&chain.names[1]).unwrap());
    deltas[0].go_by(above);
    stack.put_deltas(deltas).unwrap();
    chain.must_be_plain(&mut stack);
    chain.work(&mut stack, 20, 7);
    chain.must_be_plain(&mut stack);
}

#[test]
fn a_map_that_somebody_removed_is_there_again_before_another_program_looks_for_it() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    chain.work(&mut stack, 40, 1);
    let map = chain.names[0].with_extension("states");
    fs::remove_file(&map).unwrap();
    stack.keep_maps().unwrap();
    let number = || fs::metadata(&map).unwrap().ino();
    let kept = number();
    chain.work(&mut stack, 40, 2);
    stack.keep_maps().unwrap();
    assert_eq!(number(), kept, "it was there");
    drop(stack);
    chain.must_be_plain(&mut chain.stack());
}

#[test]
fn many_share_a_parent_that_nobody_writes_and_a_top_is_one_disks_alone() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let top = chain.open_top(BOOT, false).unwrap();
    assert!(matches!(
        chain.open_top_within(BOOT, false, Duration::ZERO),
        Err(Error::InUse { .. })
    ));
    top.close().unwrap();
    let parent = |name| open_parent(&chain.names[0], opening(name)).unwrap();
    let both = (parent("a"), parent("b"));
    assert!(matches!(
        chain.open_top_within(BOOT, false, Duration::ZERO),
        Err(Error::InUse { .. })
    ));
    drop(both);
    let mut top = chain.open_top(BOOT, false).unwrap();
    top.freeze().unwrap();
    let both = (parent("a"), parent("b"));
    drop((top, both));
    let refused = chain.open_top(BOOT, false).unwrap_err().to_string();
    assert!(refused.contains("it is frozen"), "{refused}");
}

#[test]
fn a_guests_own_buffers_are_read_in_pieces_and_written_in_part() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    let (ram, memory) = guest();
    for (start, len, at) in [
        (1024u64, 512usize, 4096u64),
        (8192, 4096, 8192),
        (20 << 10, 9216, 65536),
        (BYTES - 512, 512, 512),
    ] {
        memory
            .write_slice(&vec![0xee; len], GuestAddress(at))
            .unwrap();
        let mut from = DeviceReadable::new(&ram);
        from.push(&memory, at, len).unwrap();
        let range = start..start + len as u64;
        chain.plain[start as usize..range.end as usize].fill(0xee);
        let done = run(
            &mut stack,
            vec![request(Work::Write(range), Data::FromGuest(from))],
        );
        assert_eq!(done[0].1, Outcome::Done);
    }
    let zeroes = Work::WriteZeroes {
        range: 2048..16384,
        unmap: false,
    };
    chain.plain[2048..16384].fill(0);
    assert_eq!(
        run(&mut stack, vec![request(zeroes, Data::None)])[0].1,
        Outcome::Done
    );
    let mut to = DeviceWritable::new(&ram);
    // Buffers that direct IO takes, and some that it does not.
    for (at, len) in [
        (1_000_448u64, 512usize),
        (1_100_001, 60_000),
        (1_200_003, 5024),
    ] {
        to.push(&memory, at, len).unwrap();
    }
    let done = run(
        &mut stack,
        vec![request(Work::Read(0..65_536), Data::ToGuest(to))],
    );
    assert_eq!(done[0].1, Outcome::Done);
    let mut seen = Vec::new();
    for (at, len) in [
        (1_000_448u64, 512usize),
        (1_100_001, 60_000),
        (1_200_003, 5024),
    ] {
        let mut part = vec![0; len];
        memory.read_slice(&mut part, GuestAddress(at)).unwrap();
        seen.extend(part);
    }
    assert!(seen == chain.plain[..65_536]);
    chain.must_be_plain(&mut stack);
}

#[test]
fn what_is_outside_of_the_disk_is_refused() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let mut stack = chain.stack();
    let wrong = [
        Work::Read(BYTES - 512..BYTES + 512),
        Work::Read(0..0),
        Work::Discard(BYTES..BYTES + 512),
    ];
    for work in wrong {
        let len = work.transfers() as usize;
        let done = run(
            &mut stack,
            vec![request(work, Data::Own(Buffer::zeroed(len)))],
        );
        assert!(matches!(done[0].1, Outcome::Failed(_)));
    }
}

#[test]
fn what_anybody_else_wrote_is_refused() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    chain.open_top(BOOT, false).unwrap().close().unwrap();
    let extent = chain.at("d0-sesparse.vmdk");
    let good = fs::read(&extent).unwrap();
    let tables = 3 << 20;
    // The header, the label, the directory and an entry.
    for (at, byte) in [
        (40, 1u8),
        (4100, 1),
        (2 << 20, 9),
        (tables + 7, 0x30),
        (tables, 1),
    ] {
        let mut wrong = good.clone();
        wrong[at] ^= byte;
        // Present at its own place is right only for the first grain.
        let is_right = (at, byte) == (tables + 7, 0x30);
        fs::write(&extent, &wrong).unwrap();
        let opened = open_parent(&chain.names[0], opening("this"));
        assert_eq!(opened.is_ok(), is_right, "byte {at}");
    }
    fs::write(&extent, &good[..good.len() - 4096]).unwrap();
    let cut = open_parent(&chain.names[0], opening("this")).unwrap_err();
    assert!(cut.to_string().contains("cut short"), "{cut}");
    fs::write(&extent, &good).unwrap();
    let taken = NewDelta {
        descriptor: &chain.names[0],
        bytes: BYTES,
        id: Id([9; 16]),
        parent: &chain.parent,
    };
    assert!(create(&taken).is_err(), "its name is taken");
    must_be_unchanged(&extent, &good);
}

fn must_be_unchanged(path: &Path, content: &[u8]) {
    assert!(fs::read(path).unwrap() == content);
}

/// The disk's own file bears locks and records alone.
#[test]
fn a_linked_disk_begins_as_an_image_that_it_never_writes() {
    let mut chain = Chain::new(BYTES);
    chain.add();
    let (own, base) = (chain.at("own.raw"), chain.plain.clone());
    fs::File::create(&own).unwrap().set_len(BYTES).unwrap();
    let top = |chain: &Chain| chain.open_top(BOOT, false).unwrap();
    let written = top(&chain).over(chain.base(Access::ReadWrite));
    assert!(written.is_err(), "it may be written");
    let image = Image::open(&own, Access::ReadWrite, 512).unwrap();
    let mut stack = Stack::new(Vec::new(), Engine::new(image).unwrap());
    let lowest = top(&chain).over(chain.base(Access::ReadOnly)).unwrap();
    stack.put_deltas(vec![lowest]).unwrap();
    chain.must_be_plain(&mut stack);
    chain.work(&mut stack, 60, 5);
    chain.must_be_plain(&mut stack);
    // It stays where it is when something is put above.
    let mut deltas = freeze(&mut stack);
    chain.add();
    deltas.push(top(&chain));
    stack.put_deltas(deltas).unwrap();
    chain.work(&mut stack, 60, 6);
    chain.must_be_plain(&mut stack);
    drop(stack);
    assert!(fs::read(chain.at("base.raw")).unwrap() == base);
    let own = fs::read(own).unwrap();
    assert!(own.iter().all(|byte| *byte == 0), "something is written");
    let other = Chain::new(BYTES + 512);
    let over_longer = top(&chain).over(other.base(Access::ReadOnly));
    assert!(over_longer.is_err(), "it is longer");
}
