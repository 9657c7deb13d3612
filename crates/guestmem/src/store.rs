//! Pages that arrive, stored where they belong; memory that they need is allocated on the way.
//!
//! Memory that does not exist yet is the dear case. Through the mapping the fault would clear each
//! page first, only for it to be overwritten. Written through the file, a huge page is allocated
//! and filled in one pass, and what is written as a whole is never cleared.
//!
//! The kernel lets one thread at a time write to a file. A few more may wait for their turn, which
//! costs them less of a core than clearing would; any other allocates by faulting, which takes no
//! such lock, so that many threads on many cores are never held up by one.
//!
//! Who owns the state: [`RamFile`]. What it refuses: parts of pages, pages outside guest RAM, pages
//! that another thread is writing. A full tmpfs is an error, never SIGBUS.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::ram_file::byte_span;
use crate::{Error, PAGE_SIZE, RamFile};

/// Threads that write through the file or wait for it.
const QUEUE_MAX: usize = 3;

impl RamFile {
    /// Whether all of the pages are known to have memory behind them.
    pub fn has_memory(&self, pages: Range<u64>) -> bool {
        self.present.contains_all(pages)
    }

    /// How many of the pages are not known to have memory behind them.
    pub fn without_memory(&self, pages: Range<u64>) -> u64 {
        let count = pages.end.saturating_sub(pages.start);
        count.saturating_sub(self.present.count_in(pages))
    }

    /// Stores whole pages from page `first` on, at the destination. The tracker does not see it.
    pub fn store(&self, first: u64, bytes: &[u8]) -> Result<(), Error> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        let pages = self.checked_range(first..first.saturating_add(count))?;
        if !bytes.len().is_multiple_of(PAGE_SIZE) {
            return Err(self.out_of_range(&pages));
        }
        if !self.has_memory(pages.clone()) {
            if let Some(turn) = self.store_turns.queue() {
                let _alone = turn.wait();
                return self.write_through(&pages, bytes);
            }
            self.populate(pages)?;
        }
        self.with_pages_mut(first, count, |to| to.copy_from_slice(bytes))
    }

    fn write_through(&self, pages: &Range<u64>, bytes: &[u8]) -> Result<(), Error> {
        let _claim = self.claim(pages)?;
        let mut offset = byte_span(pages).start as u64;
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::pwrite(&self.file, rest, offset) {
                Ok(0) => return Err(self.no_room(Errno::NOSPC, pages)),
                Ok(written) => {
                    rest = rest.get(written..).unwrap_or_default();
                    offset += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.no_room(error, pages)),
            }
        }
        self.present.insert_range(pages.clone());
        Ok(())
    }
}

/// The turns of the threads that write through the file.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    queued: AtomicUsize,
    alone: Mutex<()>,
}

/// A place in the queue; given back when dropped.
struct Turn<'a>(&'a Turns);

impl Turns {
    /// A place, unless enough of them wait already.
    fn queue(&self) -> Option<Turn<'_>> {
        // Built in any case: dropping it gives the place back.
        let place = Turn(self);
        (self.queued.fetch_add(1, Ordering::AcqRel) < QUEUE_MAX).then_some(place)
    }
}

impl Turn<'_> {
    fn wait(&self) -> MutexGuard<'_, ()> {
        self.0.alone.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::AcqRel);
    }
}
