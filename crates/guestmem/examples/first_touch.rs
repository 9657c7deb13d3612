//! How fast this machine gives memory to a guest, and how fast its writes are found.
//!
//! `first_touch [DIRECTORY [MIB]]`: populates guest RAM, and stores pages into guest RAM that has no
//! memory yet, with 1, 2 and 4 threads, three times in turn (on a virtual machine the first time
//! also makes *its* host allocate), looks for zero pages, then writes and scans. DIRECTORY is on a
//! tmpfs (default `/dev/shm`, which mostly has no huge pages), MIB the size of guest RAM (default
//! 512). Measures for 8 seconds at most and leaves nothing behind. Prints GB/s (10^9 bytes).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_guestmem::page_set::CHUNK_WORDS;
use godwit_guestmem::{
    CHUNK_PAGES, CHUNK_SIZE, Error, PAGE_SIZE, PageSet, RamFile, ScanMode, Tracking, Untracked,
    mem_tmpfs, tracker,
};

const LIMIT: Duration = Duration::from_secs(8);
const ROUNDS: usize = 3;
/// Bytes of a record of pages.
const PIECE: usize = 1 << 20;
const MIB: u64 = 1024 * 1024;

/// Guest RAM whose file goes with its value.
struct Scratch {
    ram: RamFile,
}

impl Scratch {
    fn create(directory: &Path, bytes: u64) -> Result<Self, Error> {
        let path: PathBuf = directory.join(format!("first-touch.{}", std::process::id()));
        RamFile::create(&path, bytes, None).map(|ram| Self { ram })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(self.ram.path()) {
            eprintln!("{} is left behind: {error}", self.ram.path().display());
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let directory = arguments
        .next()
        .map_or_else(|| "/dev/shm".into(), PathBuf::from);
    let mib: u64 = match arguments.next() {
        Some(text) => text.to_string_lossy().parse()?,
        None => 512,
    };
    let bytes = mib
        .checked_mul(MIB)
        .ok_or("too large")?
        .next_multiple_of(CHUNK_SIZE as u64);
    let deadline = Instant::now() + LIMIT;
    for threads in [1, 2, 4].repeat(ROUNDS) {
        for how in [How::Populate, How::Store] {
            if Instant::now() < deadline {
                allocate(&directory, bytes, threads, how, deadline)?;
            }
        }
    }
    scan(&directory, bytes, deadline)?;
    Ok(())
}

/// How memory comes to be.
#[derive(Debug, Clone, Copy)]
enum How {
    /// Faulted in and left clear.
    Populate,
    /// Faulted in record by record, each filled at once.
    Store,
}

/// Each thread takes chunks in turn until all are there or the time is over.
fn allocate(
    directory: &Path,
    bytes: u64,
    threads: u64,
    how: How,
    deadline: Instant,
) -> Result<(), Error> {
    let scratch = Scratch::create(directory, bytes)?;
    let ram = &scratch.ram;
    let began = Instant::now();
    let done: Result<Vec<u64>, Error> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || every(ram, thread, threads, how, deadline)))
            .collect();
        let finished = workers.into_iter().map(|worker| worker.join());
        finished.map(|result| result.unwrap_or(Ok(0))).collect()
    });
    let seconds = began.elapsed().as_secs_f64();
    let chunks: u64 = done?.iter().sum();
    let gb = (chunks * CHUNK_SIZE as u64) as f64 / 1e9;
    let huge = mem_tmpfs::own_huge_bytes(ram)?;
    println!(
        "{:>8}, {threads} threads: {:.2} GB/s ({} MiB, {} MiB of it mapped as huge pages)",
        format!("{how:?}").to_lowercase(),
        gb / seconds,
        chunks * CHUNK_SIZE as u64 / MIB,
        huge / MIB
    );
    Ok(())
}

fn every(
    ram: &RamFile,
    thread: u64,
    threads: u64,
    how: How,
    deadline: Instant,
) -> Result<u64, Error> {
    let piece = vec![0x5A_u8; PIECE];
    let mut count = 0;
    let mut first = thread * CHUNK_PAGES;
    while first < ram.page_count() && Instant::now() < deadline {
        match how {
            How::Populate => ram.populate(first..first + 1)?,
            How::Store => {
                for page in (first..first + CHUNK_PAGES).step_by(PIECE / PAGE_SIZE) {
                    ram.store(page, &piece)?;
                }
            }
        }
        count += 1;
        first += threads * CHUNK_PAGES;
    }
    Ok(count)
}

fn scan(directory: &Path, bytes: u64, deadline: Instant) -> Result<(), Error> {
    let scratch = Scratch::create(directory, bytes)?;
    let ram = &scratch.ram;
    ram.populate(0..ram.page_count())?;
    find_zero_pages(ram)?;
    let began = Instant::now();
    let pagemap = tracker::open_pagemap(std::process::id())?;
    let untracked = Untracked::new(tracker::own_uffd()?, pagemap, ram.own_mapping())?;
    let mut tracking = untracked.start()?;
    println!("protect all: {:.2} ms", milliseconds(began));
    for stride in [1_000_000, 64, 8, 1] {
        if Instant::now() >= deadline {
            println!("stopped after {LIMIT:?}");
            break;
        }
        for (name, mode) in [
            ("two-step", ScanMode::default()),
            ("whole", ScanMode::Everything),
        ] {
            scan_once(ram, &mut tracking, stride, name, mode)?;
        }
    }
    Ok(())
}

fn find_zero_pages(ram: &RamFile) -> Result<(), Error> {
    let began = Instant::now();
    let mut zero_pages = 0;
    for first in (0..ram.page_count()).step_by(CHUNK_PAGES as usize) {
        zero_pages += ram
            .classify_chunk(first, [u64::MAX; CHUNK_WORDS])?
            .zero_count();
    }
    let rate = ram.byte_count() as f64 / began.elapsed().as_secs_f64() / 1e9;
    println!("zero test: {rate:.2} GB/s ({zero_pages} zero pages)");
    Ok(())
}

fn scan_once(
    ram: &RamFile,
    tracking: &mut Tracking,
    stride: usize,
    name: &str,
    mode: ScanMode,
) -> Result<(), Error> {
    let began = Instant::now();
    for page in (0..ram.page_count()).step_by(stride) {
        ram.with_pages_mut(page, 1, |bytes| {
            bytes.iter_mut().take(1).for_each(|byte| *byte = 1)
        })?;
    }
    let wrote = milliseconds(began);
    let mut dirty = PageSet::new(ram.page_count());
    let began = Instant::now();
    let stats = tracking.scan(&mut dirty, mode)?;
    let scanned = milliseconds(began);
    println!(
        "{name:>8} scan: {scanned:.2} ms for {} pages in {} calls (writing them took {wrote:.2} ms)",
        stats.written_pages, stats.protect_calls
    );
    Ok(())
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
