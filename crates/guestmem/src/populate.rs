//! Memory for the destination before anything arrives, without SIGBUS.
//!
//! A store into a mapping of a full tmpfs raises SIGBUS. So the kernel is asked to fault the pages
//! in, in steps of one huge page, which answers with an error, and only then are they marked as
//! safe to touch. Several threads may populate at once: faults take no lock on the whole file.
//!
//! Pages that arrive need no populating ahead: [`RamFile::store`] allocates in the pass that fills.

use std::ops::Range;

use rustix::io::Errno;

use crate::ram_file::{byte_span, file_error};
use crate::{CHUNK_PAGES, Error, RamFile};

impl RamFile {
    /// Allocates the memory of all chunks of 2 MiB that `pages` touches and maps it for writing.
    /// Content that is there stays. Ends at the first chunk that finds no room, with
    /// [`Error::OutOfMemory`]; what was populated before it stays populated.
    pub fn populate(&self, pages: Range<u64>) -> Result<(), Error> {
        let pages = self.checked_range(pages)?;
        let mut first = pages.start - pages.start % CHUNK_PAGES;
        while first < pages.end {
            let end = first.saturating_add(CHUNK_PAGES).min(self.page_count());
            self.populate_chunk(first..end)?;
            first = end;
        }
        Ok(())
    }

    fn populate_chunk(&self, chunk: Range<u64>) -> Result<(), Error> {
        if self.present.contains_all(chunk.clone()) {
            return Ok(());
        }
        self.fault_in(&chunk)?;
        self.present.insert_range(chunk);
        Ok(())
    }

    fn fault_in(&self, chunk: &Range<u64>) -> Result<(), Error> {
        loop {
            match self.map.populate_write(byte_span(chunk)) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(self.no_room(error, chunk)),
            }
        }
    }

    pub(crate) fn no_room(&self, error: Errno, chunk: &Range<u64>) -> Error {
        match error {
            // EFAULT is what the kernel answers where a touch would have raised SIGBUS.
            Errno::NOSPC | Errno::NOMEM | Errno::FAULT | Errno::DQUOT => Error::OutOfMemory {
                path: self.path().to_owned(),
                page: chunk.start,
            },
            other => file_error("allocate memory for", self.path(), other.into()),
        }
    }
}
