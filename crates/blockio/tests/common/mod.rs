//! Images, guests and stacks for tests.
#![allow(dead_code)]

pub mod deltas;
pub mod way;

use godwit_blockio::filters::{Course, Mirroring};
use godwit_blockio::{
    Access, Buffer, Data, Engine, Finished, Image, Outcome, Request, SecondImage, Stack, Work,
};
use godwit_guestmem::device_memory::device_memory;
use godwit_guestmem::{DeviceMemory, RamFile, RegionPlace};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// A file on a file system with direct IO; gone with the value.
pub struct Volume {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

pub fn volume(bytes: u64) -> Volume {
    // Not the default place, which may be a tmpfs.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("disk.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(bytes).unwrap();
    Volume {
        path,
        _directory: directory,
    }
}

pub fn stack(volume: &Volume) -> Stack<Engine> {
    let image = Image::open(&volume.path, Access::ReadWrite, 512).unwrap();
    Stack::new(Vec::new(), Engine::new(image).unwrap())
}

pub fn request(work: Work, data: Data) -> Request {
    Request::new(work, data, 0, Instant::now())
}

/// Carries them out, all at once.
pub fn run(stack: &mut Stack<Engine>, requests: Vec<Request>) -> Vec<Finished> {
    let now = Instant::now();
    for request in requests {
        stack.submit(request, now);
    }
    while stack.under_way() > 0 {
        stack.turn(None, &mut Vec::new()).unwrap();
    }
    std::iter::from_fn(|| stack.finished()).collect()
}

pub fn read_all(volume: &Volume) -> Vec<u8> {
    std::fs::read(&volume.path).unwrap()
}

/// 4 MiB of guest memory from address 0 on.
pub fn guest() -> (Arc<RamFile>, DeviceMemory) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let ram = RamFile::create(&directory.path().join("ram"), 4 << 20, None).unwrap();
    let ram = Arc::new(ram);
    let place = RegionPlace {
        guest: 0,
        offset: 0,
        bytes: 4 << 20,
    };
    let memory = device_memory(&ram, &[place]).unwrap();
    (ram, memory)
}

pub fn numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |limit| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    }
}

pub fn request_of(work: Work, data: Data, token: u64) -> Request {
    Request::new(work, data, token, Instant::now())
}

pub fn write_of(start: u64, len: u64, fill: u8, token: u64) -> Request {
    let mut buffer = Buffer::zeroed(len as usize);
    buffer.bytes_mut().fill(fill);
    request_of(Work::Write(start..start + len), Data::Own(buffer), token)
}

/// Takes one turn, in which nothing fails. Returns how many requests were done in it.
pub fn turn_mirrored(stack: &mut Stack<Engine>, course: &Course) -> u64 {
    stack.turn(None, &mut Vec::new()).unwrap();
    assert_eq!(course.failure(), None);
    let mut finished = 0;
    while let Some((_, outcome)) = stack.finished() {
        assert_eq!(outcome, Outcome::Done);
        finished += 1;
    }
    finished
}

/// Fills a second image while somebody writes so often to the first, in blocks of this size and much of it in one place.
pub fn fill_beside_writes(
    (from, to): (&Path, &Path),
    source: Option<File>,
    (writes, block): (u64, u64),
    seed: u64,
) {
    let mut number = numbers(seed);
    let open = |path| Image::open(path, Access::ReadWrite, 512).unwrap();
    let (image, course) = (open(from), Course::default());
    let blocks = image.bytes() / block;
    let second = SecondImage::of(&open(to), source, &course).unwrap();
    let mirroring = Mirroring::new(image.bytes(), second.outlet().unwrap(), &course);
    let mut stack = Stack::new(vec![Box::new(mirroring)], Engine::new(image).unwrap());
    course.begin(None);
    let (mut token, mut finished) = (0, 0);
    // What the second image was given may still be lost, and is copied again then.
    let is_equal = || second.under_way_bytes() == 0 && course.is_synchronised();
    while token < writes || stack.under_way() > 0 || !is_equal() {
        while stack.under_way() < 16 && token < writes {
            let start = number(if token % 2 == 0 { 64 } else { blocks - 64 }) * block;
            let len = (1 + number(64)) * block;
            token += 1;
            let one = match number(8) {
                0 => request_of(Work::Discard(start..start + len), Data::None, token),
                _ => write_of(start, len, number(256) as u8, token),
            };
            stack.submit(one, Instant::now());
        }
        finished += turn_mirrored(&mut stack, &course);
    }
    second.sync().unwrap();
    assert!(finished == token && is_equal());
}
