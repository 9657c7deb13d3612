//! Guest memory at the destination, allocated ahead of the stream.
//!
//! Threads of its own walk the extents that the source announced, in its order, and allocate them in huge-page steps.
//! A channel that is faster allocates its own chunk. Running out of memory is an error of the migration, never a signal.

use godwit_guestmem::{AtomicPageSet, CHUNK_PAGES, Error, RamFile};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory of the guest that is coming.
#[derive(Debug)]
pub(crate) struct Memory {
    pub ram: Arc<RamFile>,
    /// Chunks that are allocated, by their first page.
    ready: AtomicPageSet,
    /// Pages that ever held data here: only these have to be cleared when they come as zero.
    touched: AtomicPageSet,
    cancelled: AtomicBool,
}

impl Memory {
    /// Takes the file over; what it holds already counts as touched.
    pub(crate) fn new(ram: Arc<RamFile>) -> Result<Self, Error> {
        let pages = ram.page_count();
        let touched = AtomicPageSet::new(pages);
        for extent in ram.data_extents(0..pages)? {
            touched.insert_range(extent);
        }
        Ok(Self {
            ready: AtomicPageSet::new(pages),
            touched,
            cancelled: AtomicBool::new(false),
            ram,
        })
    }

    /// Allocates the extents ahead, with this many threads, in the background.
    pub(crate) fn populate_ahead(self: &Arc<Self>, extents: Vec<Range<u64>>, threads: usize) {
        let chunks: Arc<Vec<u64>> = Arc::new(chunks_of(&extents));
        let next = Arc::new(AtomicUsize::new(0));
        for _ in 0..threads {
            let (memory, chunks, next) = (Arc::clone(self), Arc::clone(&chunks), Arc::clone(&next));
            let work = move || {
                crate::priority::give_way_to_the_guest();
                while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // Without room the channel that needs it finds out and says so.
                    if memory.cancelled.load(Ordering::Relaxed) || memory.allocate(*chunk).is_err()
                    {
                        return;
                    }
                }
            };
            // Without the thread the channels allocate by themselves.
            let _ = std::thread::Builder::new()
                .name("populate".into())
                .spawn(work);
        }
    }

    /// Stops allocating ahead.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Makes sure that the pages have memory, and counts them as touched. Says how long that took.
    pub(crate) fn provide(&self, pages: Range<u64>) -> Result<Duration, Error> {
        let mut chunk = pages.start - pages.start % CHUNK_PAGES;
        let mut waited = Duration::ZERO;
        while chunk < pages.end {
            if !self.ready.contains_all(chunk..chunk + 1) {
                let began = Instant::now();
                self.allocate(chunk)?;
                waited += began.elapsed();
            }
            chunk += CHUNK_PAGES;
        }
        self.touched.insert_range(pages);
        Ok(waited)
    }

    /// Clears pages that come as zero, where they ever held anything.
    pub(crate) fn zero(&self, pages: Range<u64>) -> Result<(), Error> {
        if crate::faults::planted("zero-pages-not-cleared") {
            return Ok(());
        }
        let mut page = pages.start;
        while page < pages.end {
            if self.touched.contains_all(page..page + 1) {
                self.ram.write_zero(page..page + 1)?;
            }
            page += 1;
        }
        Ok(())
    }

    fn allocate(&self, chunk: u64) -> Result<(), Error> {
        let end = chunk.saturating_add(CHUNK_PAGES).min(self.ram.page_count());
        self.ram.populate(chunk..end)?;
        self.ready.insert_range(chunk..chunk + 1);
        Ok(())
    }
}

/// First pages of the chunks that the extents touch, each once, in order.
fn chunks_of(extents: &[Range<u64>]) -> Vec<u64> {
    let mut chunks = Vec::new();
    for extent in extents {
        let mut chunk = extent.start - extent.start % CHUNK_PAGES;
        while chunk < extent.end {
            if chunks.last() != Some(&chunk) {
                chunks.push(chunk);
            }
            chunk += CHUNK_PAGES;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_comes_as_zero_is_cleared() {
        use std::os::unix::fs::FileExt as _;
        let path = format!("/dev/shm/godwit-memory-{}", std::process::id());
        let ram = RamFile::create(path.as_ref(), 4 << 20, None).expect("a RAM file");
        let file = std::fs::File::options().read(true).write(true).open(&path);
        let file = file.expect("the RAM file");
        std::fs::remove_file(&path).expect("a name to remove");
        let at = 3 * 4096;
        file.write_all_at(&[7; 4096], at).expect("room");
        let memory = Memory::new(Arc::new(ram)).expect("extents");
        memory.zero(2..5).expect("cleared");
        let mut page = [1; 4096];
        file.read_exact_at(&mut page, at).expect("a page");
        assert_eq!(page, [0; 4096]);
    }

    #[test]
    fn extents_become_chunks_in_order() {
        assert_eq!(chunks_of(&[3..5, 100..600, 5000..5001]), [0, 512, 4608]);
    }
}
