//! Pages that arrive, stored where they belong; memory that they need is allocated on the way.
//!
//! Memory that does not exist yet is the dear case. Through the mapping the fault would clear each
//! page first, only for it to be overwritten. Written through the file, a huge page is allocated
//! and filled in one pass, and what is written as a whole is never cleared.
//!
//! The kernel lets one thread at a time write to a file. A thread that finds another one there
//! allocates by faulting, which takes no such lock, so that many threads are never slower than one.
//!
//! Who owns the state: [`RamFile`]. What it refuses: parts of pages, pages outside guest RAM, pages
//! that another thread is writing. A full tmpfs is an error, never SIGBUS.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::ram_file::byte_span;
use crate::{Error, PAGE_SIZE, RamFile};

impl RamFile {
    /// Whether all of the pages are known to have memory behind them.
    pub fn has_memory(&self, pages: Range<u64>) -> bool {
        self.present.contains_all(pages)
    }

    /// Stores whole pages from page `first` on, at the destination. The tracker does not see it.
    pub fn store(&self, first: u64, bytes: &[u8]) -> Result<(), Error> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        let pages = self.checked_range(first..first.saturating_add(count))?;
        if !bytes.len().is_multiple_of(PAGE_SIZE) {
            return Err(self.out_of_range(&pages));
        }
        if !self.has_memory(pages.clone()) {
            if let Some(_turn) = Turn::take(&self.file_is_written) {
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

/// The turn of the one thread that writes through the file; given back when dropped.
struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    fn take(taken: &'a AtomicBool) -> Option<Self> {
        // Built only once the turn is ours: dropping it gives it back.
        (!taken.swap(true, Ordering::Acquire)).then(|| Self(taken))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
