//! Which pages QEMU has written since we last asked.
//!
//! ```text
//!   userfaultfd from QEMU ---> Untracked --start()--> Tracking --stop()--> Untracked
//!                                                       |  ^
//!                                                       scan()
//! ```
//!
//! [`Untracked`] has the descriptors and nothing is protected. [`Tracking`] exists only while all
//! of guest RAM is registered and was write-protected once: its first write to a page lifts the
//! page's protection, and a scan reports such pages and protects them again. Dropping either
//! leaves the guest's memory as if it had never been tracked (but for split huge pages, see
//! [`crate::collapse`]).
//!
//! Who owns the state: the kernel. One process may hold the tracker; a second one on the same
//! memory is refused by the kernel (EBUSY).
//!
//! What it refuses: to answer "nothing was written" about a process that has ended. What it does
//! not see is listed at the top of this crate.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

use crate::kernel::{self, Protect, Scanned};
use crate::mapping::Segment;
use crate::{CHUNK_PAGES, Error, GuestMapping, PageSet};

/// Pages protected by one call at most (64 MiB): each call makes KVM drop its own page tables for
/// the whole range, and vCPUs that fault there wait until it ends.
const PROTECT_PAGES_MAX: u64 = 64 * 256;
/// Runs that one call can report: every second page of `PROTECT_PAGES_MAX`.
const OUTPUT_RUNS: usize = (PROTECT_PAGES_MAX / 2) as usize;

/// Pages that are worth a thread of their own in a look (1 GiB).
const LOOK_PAGES_MIN: u64 = 1 << 18;
const LOOK_THREADS_MAX: u64 = 8;

/// How a scan goes about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanMode {
    /// For a running guest: look without protecting, then protect and read only the granules of
    /// this many pages that have written pages. Clean memory is left alone.
    TwoStep {
        /// Pages in a granule; 0 counts as 1.
        granule_pages: u64,
    },
    /// For a stopped guest: all of guest RAM at once, the fewest calls.
    Everything,
}

impl Default for ScanMode {
    fn default() -> Self {
        Self::TwoStep {
            granule_pages: CHUNK_PAGES,
        }
    }
}

/// What a scan did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScanStats {
    /// Pages that the first, read-only step saw as written; 0 in a scan without that step.
    pub hinted_pages: u64,
    /// Pages reported as written and protected again.
    pub written_pages: u64,
    pub protect_calls: u64,
}

/// Opens `/proc/<pid>/pagemap`, by which scans are made. It needs the right to trace QEMU, so it
/// is opened while that is certain and kept.
pub fn open_pagemap(pid: u32) -> Result<OwnedFd, Error> {
    std::fs::File::open(format!("/proc/{pid}/pagemap"))
        .map(OwnedFd::from)
        .map_err(|source| Error::system("open QEMU's page map", source))
}

/// Whether this kernel can track writes and `/dev/userfaultfd` may be used; for host checks.
pub fn check_kernel() -> Result<(), Error> {
    let uffd = own_uffd()?;
    kernel::enable(uffd.as_fd()).map_err(too_old)
}

/// A userfaultfd for this process itself, from `/dev/userfaultfd`.
pub fn own_uffd() -> Result<OwnedFd, Error> {
    let device = crate::handout::open_device()?;
    kernel::new_uffd(device.as_fd()).map_err(|source| Error::system("make a userfaultfd", source))
}

/// What a tracker needs, tied together; nothing is registered by itself.
#[derive(Debug)]
struct Link {
    uffd: OwnedFd,
    pagemap: OwnedFd,
    mapping: GuestMapping,
}

impl Link {
    fn register(&self) -> Result<(), Error> {
        for segment in self.mapping.segments() {
            if let Some(span) = segment.addresses(&segment.pages()) {
                kernel::register(self.uffd.as_fd(), &span).map_err(|error| match error {
                    Errno::SRCH => Error::TrackingLost,
                    other => Error::system("register guest RAM for tracking", other),
                })?;
            }
        }
        Ok(())
    }

    /// In steps, so that the guest's faults do not queue behind one long call.
    fn protect_all(&self) -> Result<(), Error> {
        for segment in self.mapping.segments() {
            for step in steps(segment.pages()) {
                if let Some(span) = segment.addresses(&step) {
                    kernel::protect(self.uffd.as_fd(), &span)
                        .map_err(|error| Error::system("write-protect guest RAM", error))?;
                }
            }
        }
        Ok(())
    }

    fn unregister(&self) -> Result<(), Error> {
        let mut result = Ok(());
        for segment in self.mapping.segments() {
            if let Some(span) = segment.addresses(&segment.pages()) {
                match kernel::unregister(self.uffd.as_fd(), &span) {
                    // A process that has ended has nothing left to unregister.
                    Ok(()) | Err(Errno::SRCH) => {}
                    Err(error) => result = Err(Error::system("end tracking of guest RAM", error)),
                }
            }
        }
        result
    }

    /// Registering what is registered changes nothing and fails once the memory is gone.
    fn confirm_alive(&self) -> Result<(), Error> {
        self.register().map_err(|_| Error::TrackingLost)
    }
}

/// Everything needed to track, with nothing protected yet.
#[derive(Debug)]
pub struct Untracked {
    link: Arc<Link>,
}

impl Untracked {
    /// Ties together a fresh userfaultfd made in QEMU, QEMU's page map and where its RAM is.
    pub fn new(uffd: OwnedFd, pagemap: OwnedFd, mapping: GuestMapping) -> Result<Self, Error> {
        kernel::enable(uffd.as_fd()).map_err(too_old)?;
        Ok(Self {
            link: Arc::new(Link {
                uffd,
                pagemap,
                mapping,
            }),
        })
    }

    /// Registers and write-protects all of guest RAM while the guest runs. Every page counts as
    /// dirty at this moment: whoever starts tracking then sends all of them once.
    pub fn start(self) -> Result<Tracking, Error> {
        Tracking::begin(self.link, OUTPUT_RUNS)
    }
}

/// Guest RAM is tracked. Dropping it ends the tracking.
#[derive(Debug)]
pub struct Tracking {
    link: Arc<Link>,
    hint: PageSet,
    output: Vec<page_region>,
    /// Whether all of guest RAM is registered with our userfaultfd.
    registered: bool,
}

impl Tracking {
    fn begin(link: Arc<Link>, output_runs: usize) -> Result<Self, Error> {
        let mut tracking = Self {
            hint: PageSet::new(link.mapping.page_count()),
            output: vec![kernel::EMPTY_REGION; output_runs.max(1)],
            registered: false,
            link,
        };
        // If this fails, nothing may be unregistered: before Linux 6.18 that would end the
        // tracking of whoever made it fail. Closing the descriptor cleans up what is ours.
        tracking.link.register()?;
        tracking.registered = true;
        tracking.link.protect_all()?;
        Ok(tracking)
    }

    /// Adds to `dirty` every page written since it was last reported (or since the start) and
    /// protects these pages again.
    ///
    /// On an error every page is put into `dirty`: some may have been protected again without
    /// being reported, and the answer about memory that vanished would be "nothing written".
    pub fn scan(&mut self, dirty: &mut PageSet, mode: ScanMode) -> Result<ScanStats, Error> {
        self.check_size(dirty)?;
        let mut stats = ScanStats::default();
        let scanned = match mode {
            ScanMode::TwoStep { granule_pages } => {
                self.scan_granules(granule_pages, dirty, &mut stats)
            }
            ScanMode::Everything => self.scan_everything(dirty, &mut stats),
        };
        scanned
            .and_then(|()| self.link.confirm_alive())
            .inspect_err(|_| dirty.insert_range(0..dirty.page_count()))?;
        Ok(stats)
    }

    /// Adds to `written` the pages written since they were last reported, and changes nothing:
    /// for estimates of the dirty rate, and exact for a guest that is stopped. Large memory is
    /// looked at by several threads, since that guest waits.
    pub fn peek(&mut self, written: &mut PageSet) -> Result<u64, Error> {
        self.check_size(written)?;
        let pages = self.link.mapping.page_count();
        match look_threads(pages) {
            1 => self.look()?,
            threads => self.look_by(pages.div_ceil(threads))?,
        }
        self.link.confirm_alive()?;
        written.merge(&self.hint);
        Ok(self.hint.count())
    }

    /// Ends the tracking and lifts all protection.
    pub fn stop(mut self) -> Result<Untracked, Error> {
        self.registered = false;
        self.link.unregister()?;
        Ok(Untracked {
            link: Arc::clone(&self.link),
        })
    }

    fn check_size(&self, set: &PageSet) -> Result<(), Error> {
        let page_count = self.link.mapping.page_count();
        if set.page_count() != page_count {
            return Err(Error::SetSize {
                set_pages: set.page_count(),
                page_count,
            });
        }
        Ok(())
    }

    fn scan_granules(
        &mut self,
        granule_pages: u64,
        dirty: &mut PageSet,
        stats: &mut ScanStats,
    ) -> Result<(), Error> {
        self.look()?;
        stats.hinted_pages = self.hint.count();
        let hint = std::mem::replace(&mut self.hint, PageSet::new(0));
        let result = hint
            .granule_runs(granule_pages)
            .flat_map(steps)
            .try_for_each(|pages| self.take(&pages, dirty, stats));
        self.hint = hint;
        result
    }

    fn scan_everything(&mut self, dirty: &mut PageSet, stats: &mut ScanStats) -> Result<(), Error> {
        let all = 0..self.link.mapping.page_count();
        self.take(&all, dirty, stats)
    }

    /// Fills the hint with the pages that are written now, without protecting any.
    fn look(&mut self) -> Result<(), Error> {
        self.hint.clear();
        let all = 0..self.link.mapping.page_count();
        look_at(&self.link, &all, &mut self.output, &mut self.hint)
    }

    /// As `look`, with a thread for each `part` of so many pages.
    fn look_by(&mut self, part: u64) -> Result<(), Error> {
        self.hint.clear();
        let count = self.link.mapping.page_count();
        let link = &self.link;
        let one = |pages: Range<u64>| {
            let mut output = vec![kernel::EMPTY_REGION; OUTPUT_RUNS];
            let mut found = PageSet::new(count);
            look_at(link, &pages, &mut output, &mut found).map(|()| found)
        };
        let found: Vec<Result<PageSet, Error>> = std::thread::scope(|scope| {
            let starts = (0..count).step_by(usize::try_from(part).unwrap_or(usize::MAX));
            let threads: Vec<_> = starts
                .map(|start| scope.spawn(move || one(start..(start + part).min(count))))
                .collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                // A thread that died has looked at nothing.
                thread.join().unwrap_or(Err(Error::TrackingLost))
            };
            threads.into_iter().map(join).collect()
        });
        for part in found {
            self.hint.merge(&part?);
        }
        Ok(())
    }

    /// Reports the written ones of `pages` and protects them.
    fn take(
        &mut self,
        pages: &Range<u64>,
        dirty: &mut PageSet,
        stats: &mut ScanStats,
    ) -> Result<(), Error> {
        for segment in self.link.mapping.segments() {
            let mut left = segment.addresses(pages).unwrap_or(0..0);
            while !left.is_empty() {
                let scanned = scan_some(&self.link, &left, Protect::Written, &mut self.output)?;
                stats.written_pages += record(&self.output, scanned, segment, dirty);
                stats.protect_calls += 1;
                left.start = scanned.walk_end;
            }
        }
        Ok(())
    }
}

impl Drop for Tracking {
    fn drop(&mut self) {
        if self.registered {
            // Closing the descriptor does the same, unless a copy of it exists elsewhere.
            let _ = self.link.unregister();
        }
    }
}

/// Threads for one look: one for each GiB, as far as there are cores.
fn look_threads(pages: u64) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    (pages / LOOK_PAGES_MIN).clamp(1, cores.min(LOOK_THREADS_MAX))
}

/// Adds those of `pages` that are written now, without protecting any.
fn look_at(
    link: &Link,
    pages: &Range<u64>,
    output: &mut [page_region],
    found: &mut PageSet,
) -> Result<(), Error> {
    for segment in link.mapping.segments() {
        let mut left = segment.addresses(pages).unwrap_or(0..0);
        while !left.is_empty() {
            let scanned = scan_some(link, &left, Protect::No, output)?;
            record(output, scanned, segment, found);
            left.start = scanned.walk_end;
        }
    }
    Ok(())
}

/// One scan call; always gets further, or fails.
fn scan_some(
    link: &Link,
    span: &Range<u64>,
    protect: Protect,
    output: &mut [page_region],
) -> Result<Scanned, Error> {
    let scanned =
        kernel::scan(link.pagemap.as_fd(), span, protect, output).map_err(|error| match error {
            // No such process, or a part of the range is not registered with us.
            Errno::SRCH | Errno::PERM => Error::TrackingLost,
            other => Error::system("ask which guest pages were written", other),
        })?;
    if scanned.walk_end <= span.start || scanned.walk_end > span.end {
        return Err(Error::TrackingLost);
    }
    Ok(scanned)
}

/// Puts the reported pages into `set` and counts them.
fn record(output: &[page_region], scanned: Scanned, segment: &Segment, set: &mut PageSet) -> u64 {
    let mut count = 0;
    for region in output.iter().take(scanned.regions) {
        let pages = segment.pages_at(&(region.start..region.end));
        count += pages.end.saturating_sub(pages.start);
        set.insert_range(pages);
    }
    count
}

/// Cuts a range of pages into steps that one protecting call may cover.
fn steps(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = pages.start;
    std::iter::from_fn(move || {
        let start = at;
        at = at.saturating_add(PROTECT_PAGES_MAX).min(pages.end);
        (start < at).then_some(start..at)
    })
}

fn too_old(error: Errno) -> Error {
    match error {
        Errno::INVAL => Error::KernelTooOld {
            missing: "asynchronous write protection of shared memory by userfaultfd",
        },
        other => Error::system("set up a userfaultfd", other),
    }
}
