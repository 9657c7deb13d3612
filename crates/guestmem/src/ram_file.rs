//! Guest RAM: one file on tmpfs that QEMU and the VM process both map.
//!
//! Who owns the state: the file belongs to whoever created it (it is not deleted on drop); the
//! guest owns its bytes. [`RamFile`] owns our mapping and three bitmaps: pages known to have memory
//! behind them, pages that a thread of ours is writing just now, and pages that devices of ours
//! have written, which the kernel does not tell the tracker.
//!
//! What it refuses: a file that is shorter or longer than the guest's memory, since the file
//! belongs to QEMU's user and its length is no word about the guest; pages outside the file, and
//! touching a page with no memory behind it. On a full tmpfs such a touch, even a read, raises SIGBUS and would end the process; and reading
//! would allocate. So holes are found by asking the file (`SEEK_HOLE`), never by reading.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::claim::Claim;
use crate::mmap::SharedMap;
use crate::page_set::CHUNK_WORDS;
use crate::{
    AtomicPageSet, CHUNK_PAGES, CHUNK_SIZE, ChunkContent, Error, GuestMapping, PAGE_SIZE, PageSet,
};

/// The user and group that QEMU runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Guest RAM as a file, mapped shared into this process.
#[derive(Debug)]
pub struct RamFile {
    path: PathBuf,
    pub(crate) file: File,
    pub(crate) map: SharedMap,
    page_count: u64,
    /// Pages that have memory behind them for certain; others must be asked for.
    pub(crate) present: AtomicPageSet,
    /// Pages that a thread of this process is writing.
    pub(crate) claims: AtomicPageSet,
    /// Pages that devices of this process have written since the last scan, or since tracking began: by this value, so that a
    /// process which has devices has one for each RAM file.
    pub(crate) device_writes: Arc<AtomicPageSet>,
}

impl RamFile {
    /// Creates the file (it must not exist) with mode 0600, gives it to `owner` and maps it.
    /// `bytes` is the size of guest RAM, a multiple of 2 MiB. No memory is allocated yet.
    pub fn create(path: &Path, bytes: u64, owner: Option<Owner>) -> Result<Self, Error> {
        check_size(bytes)?;
        let file = options()
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| file_error("create", path, source))?;
        let created = prepare(&file, bytes, owner)
            .map_err(|source| file_error("prepare", path, source))
            .and_then(|()| Self::map(path, file, bytes));
        if created.is_err() {
            // Ours alone, and useless: leave nothing half-done.
            let _ = fs::remove_file(path);
        }
        created
    }

    /// Opens and maps an existing RAM file of a guest with `bytes` of memory. One of any other
    /// length is refused.
    pub fn open(path: &Path, bytes: u64) -> Result<Self, Error> {
        check_size(bytes)?;
        let file = options()
            .open(path)
            .map_err(|source| file_error("open", path, source))?;
        let metadata = file
            .metadata()
            .map_err(|source| file_error("examine", path, source))?;
        if !metadata.is_file() {
            let source = io::Error::from(Errno::INVAL);
            return Err(file_error(
                "use as guest RAM (not a regular file)",
                path,
                source,
            ));
        }
        same_length(path, metadata.len(), bytes)?;
        Self::map(path, file, bytes)
    }

    fn map(path: &Path, file: File, bytes: u64) -> Result<Self, Error> {
        let len = usize::try_from(bytes).map_err(|_| Error::Size { bytes })?;
        let page_count = bytes / PAGE_SIZE as u64;
        Ok(Self {
            path: path.to_owned(),
            map: SharedMap::new(&file, len)?,
            file,
            page_count,
            present: AtomicPageSet::new(page_count),
            claims: AtomicPageSet::new(page_count),
            device_writes: Arc::new(AtomicPageSet::new(page_count)),
        })
    }

    /// Pages of guest RAM, 4 KiB each; a multiple of 512.
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Size of guest RAM in bytes.
    pub fn byte_count(&self) -> u64 {
        self.page_count * PAGE_SIZE as u64
    }

    /// Refuses a file that is no longer as long as guest RAM: its pages could not be touched, or
    /// would take memory that is not the guest's.
    pub fn check_length(&self) -> Result<(), Error> {
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|source| file_error("examine", &self.path, source))?;
        same_length(&self.path, metadata.len(), self.byte_count())
    }

    /// Has this process keep no page of it mapped, so that its end takes no long time; what is touched later is mapped again.
    pub fn leave_pages(&self) {
        if let Ok(len) = usize::try_from(self.byte_count()) {
            self.map.leave(0..len);
        }
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode numbers, by which a mapping of the file is recognised.
    pub fn identity(&self) -> Result<(u64, u64), Error> {
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|source| file_error("examine", &self.path, source))?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Pages that devices of this process have written and no tracker has taken yet; for whoever looks into what they do.
    pub fn device_writes(&self) -> PageSet {
        let mut pages = PageSet::new(self.page_count());
        self.device_writes.copy_into(&mut pages);
        pages
    }

    /// Where this process maps guest RAM. It is QEMU's mapping that is tracked; this one is for
    /// measurements and tests that play QEMU's part.
    pub fn own_mapping(&self) -> GuestMapping {
        GuestMapping::at(self, self.map.address())
    }

    /// Lends `count` pages of live guest memory from page `first` on to `read`.
    ///
    /// The guest may change the bytes meanwhile: treat them as opaque. They may be copied,
    /// encrypted or tested for zero; nothing that safety depends on may be decided by them. A
    /// page that changed is reported by the tracker and is sent again.
    pub fn with_pages<R>(
        &self,
        first: u64,
        count: u64,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Error> {
        let pages = self.checked(first, count)?;
        self.require_present(&pages)?;
        self.map
            .lend(byte_span(&pages), read)
            .ok_or_else(|| self.out_of_range(&pages))
    }

    /// Lends `count` pages from page `first` on to `write`, at the destination.
    ///
    /// The pages must have been populated. No two calls can hold the same page: the second gets
    /// [`Error::Busy`]. The tracker does not see these writes.
    pub fn with_pages_mut<R>(
        &self,
        first: u64,
        count: u64,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, Error> {
        let pages = self.checked(first, count)?;
        self.require_present(&pages)?;
        let _claim = self.claim(&pages)?;
        self.map
            .lend_mut(byte_span(&pages), write)
            .ok_or_else(|| self.out_of_range(&pages))
    }

    /// Which of the wanted pages of a chunk hold data and which only zeroes. Pages with no memory
    /// behind them count as zero and are not touched. `first` is the chunk's first page, bit `n`
    /// of `wanted` its page `n`.
    pub fn classify_chunk(
        &self,
        first: u64,
        wanted: [u64; CHUNK_WORDS],
    ) -> Result<ChunkContent, Error> {
        let pages = self.checked(first, CHUNK_PAGES)?;
        if self.present.contains_all(pages.clone()) {
            return self.with_pages(first, CHUNK_PAGES, |bytes| {
                ChunkContent::of(first, bytes, wanted)
            });
        }
        let mut content = ChunkContent::all_zero(first, wanted);
        for extent in self.data_extents(pages)? {
            let count = extent.end.saturating_sub(extent.start);
            self.with_pages(extent.start, count, |bytes| {
                content.add_data(extent.start, bytes);
            })?;
        }
        Ok(content)
    }

    /// Runs of pages within `pages` that have memory behind them, ascending. Pages outside of
    /// them are zero and cost nothing.
    pub fn data_extents(&self, pages: Range<u64>) -> Result<Vec<Range<u64>>, Error> {
        let pages = self.checked_range(pages)?;
        let mut extents = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            let Some(start) = self.seek(at, SeekFrom::Data)? else {
                break;
            };
            if start >= pages.end {
                break;
            }
            let end = self.seek(start, SeekFrom::Hole)?.unwrap_or(self.page_count);
            // Always forward, whatever the file system answers.
            let end = end.clamp(start.saturating_add(1), pages.end);
            self.present.insert_range(start..end);
            extents.push(start..end);
            at = end;
        }
        Ok(extents)
    }

    /// All pages that have memory behind them, as a set: what iteration 1 has to look at.
    pub fn data_pages(&self) -> Result<PageSet, Error> {
        let mut set = PageSet::new(self.page_count);
        for extent in self.data_extents(0..self.page_count)? {
            set.insert_range(extent);
        }
        Ok(set)
    }

    /// Makes the pages read as zero and keeps the memory they have; pages without memory stay so.
    pub fn write_zero(&self, pages: Range<u64>) -> Result<(), Error> {
        // Known memory needs no question to the file.
        let known = self.present.contains_all(pages.clone());
        let extents = match known {
            true => vec![pages],
            false => self.data_extents(pages)?,
        };
        for extent in extents {
            let count = extent.end.saturating_sub(extent.start);
            self.with_pages_mut(extent.start, count, |bytes| bytes.fill(0))?;
        }
        Ok(())
    }

    /// Checks a range of page numbers from anywhere, also from a peer.
    pub(crate) fn checked_range(&self, pages: Range<u64>) -> Result<Range<u64>, Error> {
        if pages.start > pages.end || pages.end > self.page_count {
            return Err(self.out_of_range(&pages));
        }
        Ok(pages)
    }

    pub(crate) fn claim(&self, pages: &Range<u64>) -> Result<Claim<'_>, Error> {
        Claim::take(&self.claims, pages.clone()).ok_or(Error::Busy {
            first: pages.start,
            last: pages.end.saturating_sub(1),
        })
    }

    fn checked(&self, first: u64, count: u64) -> Result<Range<u64>, Error> {
        self.checked_range(first..first.saturating_add(count))
    }

    pub(crate) fn out_of_range(&self, pages: &Range<u64>) -> Error {
        Error::OutOfRange {
            first: pages.start,
            last: pages.end.saturating_sub(1),
            page_count: self.page_count,
        }
    }

    /// Makes sure that touching the pages cannot raise SIGBUS. Only QEMU could punch a hole after
    /// this check, and a VM whose devices do that is refused when it is built.
    pub(crate) fn require_present(&self, pages: &Range<u64>) -> Result<(), Error> {
        if pages.is_empty() || self.present.contains_all(pages.clone()) {
            return Ok(());
        }
        let hole = self.seek(pages.start, SeekFrom::Hole)?;
        match hole.filter(|&page| page < pages.end) {
            Some(page) => self.require_known(page, pages),
            None => {
                self.present.insert_range(pages.clone());
                Ok(())
            }
        }
    }

    /// Memory that is allocated but was never touched looks like a hole to the file.
    fn require_known(&self, page: u64, pages: &Range<u64>) -> Result<(), Error> {
        let missing = (page..pages.end).find(|&page| {
            let alone = page..page.saturating_add(1);
            !self.present.contains_all(alone)
                && !matches!(self.seek(page, SeekFrom::Data), Ok(Some(data)) if data == page)
        });
        missing.map_or(Ok(()), |page| Err(Error::Hole { page }))
    }

    /// The next page from `page` on with data or a hole; nothing if there is no more data.
    fn seek(&self, page: u64, whence: fn(u64) -> SeekFrom) -> Result<Option<u64>, Error> {
        let offset = page.saturating_mul(PAGE_SIZE as u64);
        // The file offset is shared and moves; nothing here reads or writes at it.
        match rustix::fs::seek(&self.file, whence(offset)) {
            Ok(found) => Ok(Some(found / PAGE_SIZE as u64)),
            Err(Errno::NXIO) => Ok(None),
            Err(source) => Err(file_error("look for holes in", &self.path, source.into())),
        }
    }
}

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

pub(crate) fn file_error(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Bytes of a range of pages that has been checked against the file's size, which fits a usize.
pub(crate) fn byte_span(pages: &Range<u64>) -> Range<usize> {
    pages.start as usize * PAGE_SIZE..pages.end as usize * PAGE_SIZE
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK);
    options
}

fn check_size(bytes: u64) -> Result<(), Error> {
    if bytes == 0 || !bytes.is_multiple_of(CHUNK_SIZE as u64) {
        return Err(Error::Size { bytes });
    }
    Ok(())
}

fn same_length(path: &Path, found: u64, expected: u64) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Length {
        path: path.to_owned(),
        found,
        expected,
    })
}

fn prepare(file: &File, bytes: u64, owner: Option<Owner>) -> io::Result<()> {
    file.set_len(bytes)?;
    match owner {
        Some(owner) => std::os::unix::fs::fchown(file, Some(owner.uid), Some(owner.gid)),
        None => Ok(()),
    }
}
