//! Memory for pages that arrive at the destination, without SIGBUS.
//!
//! A store into a mapping of a full tmpfs raises SIGBUS. So the kernel is asked to fault the pages
//! in, which answers with an error, and only then are they marked as safe to touch. Several threads
//! may do so at once: faults take no lock on the whole file, as writing through the file would.
//!
//! Who owns the state: [`RamFile`]. What it refuses: parts of pages, pages outside guest RAM, pages
//! that another thread is writing.

use std::ops::Range;

use rustix::io::Errno;

use crate::ram_file::{byte_span, file_error};
use crate::{CHUNK_PAGES, Error, PAGE_SIZE, RamFile};

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

    /// Allocates the memory of all chunks of 2 MiB that `pages` touches and maps it for writing.
    /// Content that is there stays. Ends at the first chunk that finds no room, with
    /// [`Error::OutOfMemory`]; what was populated before it stays populated.
    pub fn populate(&self, pages: Range<u64>) -> Result<(), Error> {
        let pages = self.checked_range(pages)?;
        let mut first = pages.start - pages.start % CHUNK_PAGES;
        while first < pages.end {
            let end = first.saturating_add(CHUNK_PAGES).min(self.page_count());
            self.allocate(first..end)?;
            first = end;
        }
        Ok(())
    }

    /// Allocates the memory of these pages, and no more than the file system's own page size makes
    /// it: with huge pages the first record of a chunk brings all of it, without them a guest of
    /// scattered pages takes no more than its pages.
    pub fn allocate(&self, pages: Range<u64>) -> Result<(), Error> {
        let pages = self.checked_range(pages)?;
        if pages.is_empty() || self.has_memory(pages.clone()) {
            return Ok(());
        }
        self.fault_in(&pages)?;
        self.present.insert_range(pages);
        Ok(())
    }

    /// Stores whole pages from page `first` on, at the destination, and allocates what they need.
    /// The tracker does not see it.
    pub fn store(&self, first: u64, bytes: &[u8]) -> Result<(), Error> {
        let count = (bytes.len() / PAGE_SIZE) as u64;
        let pages = self.checked_range(first..first.saturating_add(count))?;
        if !bytes.len().is_multiple_of(PAGE_SIZE) {
            return Err(self.out_of_range(&pages));
        }
        self.allocate(pages)?;
        self.with_pages_mut(first, count, |to| to.copy_from_slice(bytes))
    }

    fn fault_in(&self, pages: &Range<u64>) -> Result<(), Error> {
        loop {
            match self.map.populate_write(byte_span(pages)) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(self.no_room(error, pages)),
            }
        }
    }

    fn no_room(&self, error: Errno, pages: &Range<u64>) -> Error {
        match error {
            // EFAULT is what the kernel answers where a touch would have raised SIGBUS.
            Errno::NOSPC | Errno::NOMEM | Errno::FAULT | Errno::DQUOT => Error::OutOfMemory {
                path: self.path().to_owned(),
                page: pages.start,
            },
            other => file_error("allocate memory for", self.path(), other.into()),
        }
    }
}
