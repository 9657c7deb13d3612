//! A chain of deltas over a plain image, and what a guest should read from it, for tests.
#![allow(dead_code)]

use super::deltas::{open_parent, open_top};
use super::{numbers, request, run};
use godwit_blockio::delta::{Delta, NewDelta, Opening, Outliving, create, describe_base};
use godwit_blockio::{
    Access, Buffer, Data, Engine, Error, Finished, Image, Outcome, Request, Stack, Work,
};
use godwit_delta::{GRAIN, Id, Parent};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

pub const BOOT: Id = Id([77; 16]);
/// No multiple of a table's reach, nor of a grain.
pub const BYTES: u64 = (18 << 20) + 5 * 512;
/// A program that another test begins has our files for a moment, and their locks with them.
pub const PATIENCE: Duration = Duration::from_secs(5);

pub fn opening(name: &str) -> Opening<'_> {
    Opening {
        block_bytes: 512,
        name,
        patience: PATIENCE,
    }
}

/// A base and deltas above it in a directory, and what a guest should read.
pub struct Chain {
    directory: tempfile::TempDir,
    pub plain: Vec<u8>,
    pub names: Vec<PathBuf>,
    pub parent: Parent,
}

impl Chain {
    pub fn new(bytes: u64) -> Self {
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

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn base(&self, access: Access) -> Image {
        let mut image = Image::open(&self.at("base.raw"), access, 512).unwrap();
        image.lock("this", PATIENCE).unwrap();
        image
    }

    /// A new delta, on top of the others.
    pub fn add(&mut self) {
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

    pub fn open_top(&self, boot: Id, no_guest_lives: bool) -> Result<Delta, Error> {
        self.open_top_within(boot, no_guest_lives, PATIENCE)
    }

    pub fn open_top_within(
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

    pub fn stack(&self) -> Stack<Engine> {
        let engine = Engine::new(self.base(Access::ReadOnly)).unwrap();
        let mut stack = Stack::new(Vec::new(), engine);
        let mut deltas = self.lower();
        deltas.push(self.open_top(BOOT, false).unwrap());
        stack.put_deltas(deltas).unwrap();
        stack
    }

    /// Requests of a guest, some of them at once, and what it should read then.
    pub fn work(&mut self, stack: &mut Stack<Engine>, rounds: u64, seed: u64) {
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

    pub fn must_be_plain(&self, stack: &mut Stack<Engine>) {
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
    pub fn must_be_so_to_qemu(&self, number: usize) {
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

pub fn freeze(stack: &mut Stack<Engine>) -> Vec<Delta> {
    let mut deltas = stack.take_deltas().unwrap();
    deltas.last_mut().unwrap().freeze().unwrap();
    deltas
}
