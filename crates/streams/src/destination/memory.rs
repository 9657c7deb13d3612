//! Guest memory at the destination: what arrives is stored, what comes as zero is cleared where it must be.
//!
//! Memory is allocated by the thread that fills it, just before it does; nothing is allocated ahead of the stream,
//! which would take the receivers' cores. Only a move that asks for it has all of the guest's memory allocated first,
//! by threads of its own. Running out of memory is an error of the migration, never a signal.

use godwit_guestmem::{AtomicPageSet, CHUNK_PAGES, Error, PAGE_SIZE, RamFile, mem_tmpfs};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What a guest that comes will live in.
#[derive(Debug)]
pub struct Memory {
    pub ram: Arc<RamFile>,
    /// Pages that ever held data here: only these have to be cleared when they come as zero.
    touched: AtomicPageSet,
    preparation: Preparation,
    cancelled: AtomicBool,
}

/// The allocation of all memory before anything arrives.
#[derive(Debug, Default)]
struct Preparation {
    begun: AtomicBool,
    /// Page from which the next thread goes on.
    next: AtomicU64,
    working: AtomicUsize,
    failure: OnceLock<String>,
    took: OnceLock<Duration>,
}

/// Makes sure that a file into which a guest will come reads as zero everywhere: what is a hole at the source is never
/// sent.
pub fn empty(ram: &RamFile) -> Result<(), Error> {
    for extent in ram.data_extents(0..ram.page_count())? {
        let pages = format_args!("{}..{}", extent.start, extent.end);
        tracing::warn!(%pages, "guest memory that was to be empty is cleared");
        ram.write_zero(extent)?;
    }
    Ok(())
}

impl Memory {
    /// Takes the file over; what it holds already counts as touched.
    pub fn new(ram: Arc<RamFile>) -> Result<Self, Error> {
        let pages = ram.page_count();
        let touched = AtomicPageSet::new(pages);
        for extent in ram.data_extents(0..pages)? {
            touched.insert_range(extent);
        }
        Ok(Self {
            touched,
            preparation: Preparation::default(),
            cancelled: AtomicBool::new(false),
            ram,
        })
    }

    /// Begins to allocate all of the guest's memory, with this many threads, in the background. Once: a connection set
    /// that is made anew finds it begun.
    pub fn prepare(self: &Arc<Self>, threads: usize) {
        if self.preparation.begun.swap(true, Ordering::AcqRel) {
            return;
        }
        let began = Instant::now();
        if let Err(reason) = self.room_for(self.ram.without_memory(0..self.ram.page_count())) {
            // Nothing else has set it: this is the beginning.
            let _ = self.preparation.failure.set(reason);
            return;
        }
        let threads = threads.max(1);
        self.preparation.working.store(threads, Ordering::Release);
        for _ in 0..threads {
            let memory = Arc::clone(self);
            let spawned = std::thread::Builder::new()
                .name("prepare".into())
                .spawn(move || memory.prepare_chunks(began));
            if let Err(error) = spawned {
                self.prepared(
                    Err(format!("cannot start a thread to allocate memory: {error}")),
                    began,
                );
            }
        }
    }

    fn prepare_chunks(&self, began: Instant) {
        crate::priority::Manners::default().give_way(true);
        crate::faults::reached("destination.allocating");
        let pages = self.ram.page_count();
        let done = loop {
            let first = self
                .preparation
                .next
                .fetch_add(CHUNK_PAGES, Ordering::Relaxed);
            let over = first >= pages || self.preparation.failure.get().is_some();
            if over || self.cancelled.load(Ordering::Relaxed) {
                break Ok(());
            }
            let end = first.saturating_add(CHUNK_PAGES).min(pages);
            if let Err(error) = self.ram.populate(first..end) {
                break Err(error.to_string());
            }
        };
        self.prepared(done, began);
    }

    /// Books the end of a thread; the last one ends the preparation.
    fn prepared(&self, done: Result<(), String>, began: Instant) {
        if let Err(reason) = done {
            // The first reason is as good as any other.
            let _ = self.preparation.failure.set(reason);
        }
        if self.preparation.working.fetch_sub(1, Ordering::AcqRel) == 1 {
            let _ = self.preparation.took.set(began.elapsed());
        }
    }

    /// Whether there is room for so many pages more; else why not.
    pub fn room_for(&self, pages: u64) -> Result<(), String> {
        let needed = pages.saturating_mul(PAGE_SIZE as u64);
        let directory = self.ram.path().parent().unwrap_or(self.ram.path());
        let available = mem_tmpfs::available_bytes(directory).map_err(|error| error.to_string())?;
        if needed <= available {
            return Ok(());
        }
        Err(format!(
            "destination out of memory: the guest needs {} MiB more, {} has {} MiB; free memory or enlarge its tmpfs",
            needed.div_ceil(1 << 20),
            directory.display(),
            available >> 20
        ))
    }

    /// How long the preparation took, once it is done; its failure as soon as there is one.
    pub fn preparation(&self) -> Result<Option<Duration>, String> {
        match self.preparation.failure.get() {
            Some(reason) => Err(reason.clone()),
            None => Ok(self.preparation.took.get().copied()),
        }
    }

    /// Has the preparation end before its next chunk.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Sees to it that the pages have memory; says how long that took.
    pub fn allocate(&self, pages: Range<u64>) -> Result<Duration, Error> {
        if self.ram.has_memory(pages.clone()) {
            return Ok(Duration::ZERO);
        }
        let began = Instant::now();
        self.ram.allocate(pages)?;
        Ok(began.elapsed())
    }

    /// Lends pages that have memory, to be filled where they are.
    pub fn fill<R>(
        &self,
        pages: Range<u64>,
        fill: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, Error> {
        self.touched.insert_range(pages.clone());
        let count = pages.end.saturating_sub(pages.start);
        self.ram.with_pages_mut(pages.start, count, fill)
    }

    /// Clears pages that come as zero, where they ever held anything.
    pub fn zero(&self, pages: Range<u64>) -> Result<(), Error> {
        if crate::faults::planted("zero-pages-not-cleared") {
            return Ok(());
        }
        let mut page = pages.start;
        while page < pages.end {
            let mut end = page;
            while end < pages.end && self.touched.contains_all(end..end + 1) {
                end += 1;
            }
            if end > page {
                self.ram.write_zero(page..end)?;
            }
            page = end.saturating_add(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    const PAGE: u64 = 4096;

    /// Guest memory of so many MiB, and its file, which has no name any more.
    fn memory(name: &str, mib: u64) -> (Arc<Memory>, File) {
        let path = format!("/dev/shm/godwit-memory-{name}-{}", std::process::id());
        let ram = RamFile::create(path.as_ref(), mib << 20, None).expect("a RAM file");
        let file = File::options().read(true).write(true).open(&path);
        std::fs::remove_file(&path).expect("a name to remove");
        let memory = Memory::new(Arc::new(ram)).expect("extents");
        (Arc::new(memory), file.expect("the RAM file"))
    }

    /// As a receiver does it.
    fn store(memory: &Memory, pages: Range<u64>, byte: u8) {
        memory.allocate(pages.clone()).expect("room");
        memory
            .fill(pages, |bytes| bytes.fill(byte))
            .expect("it has memory");
    }

    fn page(file: &File, number: u64) -> [u8; PAGE as usize] {
        let mut bytes = [1; PAGE as usize];
        file.read_exact_at(&mut bytes, number * PAGE)
            .expect("a page");
        bytes
    }

    #[test]
    fn a_page_that_comes_as_zero_is_cleared() {
        let (memory, file) = memory("zero", 4);
        store(&memory, 3..5, 7);
        store(&memory, 6..7, 8);
        memory.zero(2..6).expect("cleared");
        assert_eq!(page(&file, 3), [0; 4096]);
        assert_eq!(page(&file, 4), [0; 4096]);
        assert_eq!(page(&file, 6), [8; 4096]);
    }

    #[test]
    fn what_the_file_held_before_is_cleared_too() {
        let path = format!("/dev/shm/godwit-memory-held-{}", std::process::id());
        let ram = RamFile::create(path.as_ref(), 4 << 20, None).expect("a RAM file");
        let file = File::options().read(true).write(true).open(&path);
        let file = file.expect("the RAM file");
        std::fs::remove_file(&path).expect("a name to remove");
        file.write_all_at(&[7; 4096], 3 * PAGE).expect("room");
        let memory = Memory::new(Arc::new(ram)).expect("extents");
        memory.zero(2..5).expect("cleared");
        assert_eq!(page(&file, 3), [0; 4096]);
    }

    #[test]
    fn memory_that_a_guest_will_come_into_is_empty() {
        let (memory, file) = memory("fresh", 4);
        store(&memory, 3..5, 7);
        store(&memory, 600..601, 8);
        empty(&memory.ram).expect("cleared");
        for number in [3, 4, 600] {
            assert_eq!(page(&file, number), [0; 4096]);
        }
    }

    #[test]
    fn pages_are_filled_where_they_are_once_they_have_memory() {
        let (memory, file) = memory("fill", 4);
        assert!(!memory.ram.has_memory(8..10));
        store(&memory, 8..10, 5);
        assert!(memory.ram.has_memory(8..10) && !memory.ram.has_memory(8..11));
        assert_eq!(memory.allocate(8..10).expect("room"), Duration::ZERO);
        memory
            .fill(9..10, |bytes| bytes.fill(6))
            .expect("it has memory");
        assert_eq!((page(&file, 8), page(&file, 9)), ([5; 4096], [6; 4096]));
    }

    #[test]
    fn prepared_memory_is_there_and_reads_as_zero() {
        let (memory, file) = memory("prepare", 8);
        store(&memory, 600..601, 9);
        memory.prepare(2);
        while memory.preparation().expect("there is room").is_none() {
            std::thread::yield_now();
        }
        assert!(memory.ram.has_memory(0..2048));
        assert_eq!(page(&file, 600), [9; 4096]);
        assert_eq!(page(&file, 2047), [0; 4096]);
    }

    #[test]
    fn a_preparation_that_is_cancelled_ends() {
        let (memory, _file) = memory("cancel", 4);
        memory.cancel();
        memory.prepare(2);
        while memory.preparation().expect("there is room").is_none() {
            std::thread::yield_now();
        }
        assert!(!memory.ram.has_memory(0..1));
    }
}
