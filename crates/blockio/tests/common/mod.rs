//! Images, guests and stacks for tests.
#![allow(dead_code)]

use godwit_blockio::{Access, Data, Engine, Finished, Image, Request, Stack, Work};
use godwit_guestmem::device_memory::device_memory;
use godwit_guestmem::{DeviceMemory, RamFile, RegionPlace};
use std::path::PathBuf;
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
