//! The pinned-page experiment: why QEMU must not open disks with `cache.direct=on`.
//!
//! A direct read takes its write fault when it pins the page; a scan protects the page again
//! while the device is still writing; the device takes no fault. So the page was reported too
//! early, and its last content is lost. The same reads through the page cache lose nothing.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Copy, GuestView, Memory, Numbers, track};
use godwit_guestmem::{CHUNK_SIZE, PAGE_SIZE, PageSet, ScanMode};

const MIB: u64 = 1024 * 1024;
const CHUNKS: u64 = 4;
/// Different contents that are read into the same guest memory one after the other.
const SLICES: u64 = 6;
const BUFFERED_ROUNDS: u64 = 8;
/// Direct rounds at most; it ends as soon as a few of them have lost pages.
const DIRECT_ROUNDS: usize = 100;
const ROUNDS_WITH_LOSS: usize = 3;
const READ_PAGES: u64 = 256;

/// A file whose every page differs from every other, deleted with its value.
struct Disk {
    path: PathBuf,
}

impl Disk {
    /// In the build directory, since that is on a disk while temporary directories may not be.
    fn create(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}.{}", std::process::id()));
        let mut file = File::create(&path).expect("a file can be created");
        let mut numbers = Numbers(0x5eed);
        let mut page = vec![0_u8; PAGE_SIZE];
        for _ in 0..SLICES * CHUNKS * (CHUNK_SIZE / PAGE_SIZE) as u64 {
            for word in page.chunks_exact_mut(8) {
                word.copy_from_slice(&numbers.below(u64::MAX).to_ne_bytes());
            }
            file.write_all(&page).expect("the file can be written");
        }
        file.sync_all().expect("the file reaches the disk");
        Self { path }
    }

    fn open_buffered(&self) -> File {
        File::open(&self.path).expect("the file can be opened")
    }

    fn open_direct(&self) -> Option<File> {
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&self.path);
        // Some file systems take the flag and refuse the read.
        let memory = Memory::mount(4 * MIB)?;
        let ram = memory.ram(1);
        ram.populate(0..1).expect("there is room");
        let read = file.and_then(|file| {
            ram.with_pages_mut(0, 1, |page| file.read_at(page, 0))
                .expect("populated")
                .map(|_| file)
        });
        match read {
            Ok(file) => Some(file),
            Err(error) => {
                println!("skipped: {} has no direct IO: {error}", self.path.display());
                None
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reads all slices into guest memory while it is scanned and copied without pause; after the
/// last read and a last scan, how many pages of the copy differ? Nothing if it cannot be tried.
fn lost_pages(file: &File) -> Option<usize> {
    let memory = Memory::mount(32 * MIB)?;
    let ram = memory.ram(CHUNKS);
    ram.populate(0..ram.page_count()).expect("there is room");
    let view = GuestView::of(&ram);
    let mut tracking = track(&view)?;
    let mut copy = Copy::of(&ram);
    let mut dirty = PageSet::new(ram.page_count());
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for slice in 0..SLICES {
                for first in (0..ram.page_count()).step_by(READ_PAGES as usize) {
                    let offset = slice * ram.byte_count() + first * PAGE_SIZE as u64;
                    view.read_from(file, first..first + READ_PAGES, offset);
                }
            }
            finished.store(true, Ordering::Release);
        });
        while !finished.load(Ordering::Acquire) {
            dirty.clear();
            tracking
                .scan(&mut dirty, ScanMode::default())
                .expect("a scan");
            copy.update(&ram, &dirty);
        }
    });
    dirty.clear();
    tracking
        .scan(&mut dirty, ScanMode::Everything)
        .expect("the last scan");
    copy.update(&ram, &dirty);
    Some(copy.differing(&ram).len())
}

#[test]
fn buffered_reads_into_tracked_memory_lose_nothing() {
    let disk = Disk::create("buffered");
    let file = disk.open_buffered();
    for round in 0..BUFFERED_ROUNDS {
        match lost_pages(&file) {
            Some(lost) => assert_eq!(lost, 0, "round {round}"),
            None => return,
        }
    }
}

/// Should this ever fail, the kernel has learnt to report pinned pages: look again at what may
/// be allowed.
#[test]
fn direct_reads_into_tracked_memory_are_lost_by_the_tracker() {
    let disk = Disk::create("direct");
    let Some(file) = disk.open_direct() else {
        return;
    };
    let mut lost_in = Vec::new();
    let with_loss = |rounds: &[usize]| rounds.iter().filter(|lost| **lost > 0).count();
    while with_loss(&lost_in) < ROUNDS_WITH_LOSS && lost_in.len() < DIRECT_ROUNDS {
        match lost_pages(&file) {
            Some(lost) => lost_in.push(lost),
            None => return,
        }
    }
    println!("pages lost, by round: {lost_in:?}");
    assert!(with_loss(&lost_in) > 0, "no page was lost: {lost_in:?}");
}
