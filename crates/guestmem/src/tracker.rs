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
//! The kernel knows of writes through QEMU's mapping. What devices of this process wrote comes from
//! the RAM file, with which every [`GuestMapping`] is tied together, so that each answer has both.
//!
//! What it refuses: to answer "nothing was written" about a process that has ended. What it does
//! not see is listed at the top of this crate.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use linux_raw_sys::general::page_region;
use rustix::io::Errno;

use crate::kernel::{self, Protect, Scanned};
use crate::mapping::Segment;
use crate::page_set::Part;
use crate::{CHUNK_PAGES, Error, GuestMapping, PageSet};

/// Pages protected by one call at most (64 MiB): each call makes KVM drop its own page tables for
/// the whole range, and vCPUs that fault there wait until it ends.
const PROTECT_PAGES_MAX: u64 = 64 * 256;
/// Runs that one call can report: every second page of `PROTECT_PAGES_MAX`.
const OUTPUT_RUNS: usize = (PROTECT_PAGES_MAX / 2) as usize;

/// Pages that are worth a thread of their own (1 GiB).
const PART_PAGES_MIN: u64 = 1 << 18;
const THREADS_MAX: u64 = 8;

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
    /// Pages that QEMU has written, reported and protected again; those that only a device of ours
    /// has written are not among them.
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

/// What the kernel answers with, for one thread.
type Output = Vec<page_region>;

/// Guest RAM is tracked. Dropping it ends the tracking.
#[derive(Debug)]
pub struct Tracking {
    link: Arc<Link>,
    hint: PageSet,
    /// One for each thread.
    outputs: Vec<Output>,
    /// Whether all of guest RAM is registered with our userfaultfd.
    registered: bool,
}

impl Tracking {
    fn begin(link: Arc<Link>, output_runs: usize) -> Result<Self, Error> {
        let output = vec![kernel::EMPTY_REGION; output_runs.max(1)];
        let mut tracking = Self {
            hint: PageSet::new(link.mapping.page_count()),
            outputs: vec![output; threads(link.mapping.page_count())],
            registered: false,
            link,
        };
        // If this fails, nothing may be unregistered: before Linux 6.18 that would end the
        // tracking of whoever made it fail. Closing the descriptor cleans up what is ours.
        tracking.link.register()?;
        tracking.registered = true;
        // Every page counts as dirty now, whoever wrote it.
        tracking.link.mapping.device_writes().clear();
        tracking.link.protect_all()?;
        Ok(tracking)
    }

    /// Adds to `dirty` every page written since it was last reported (or since the start) and
    /// protects these pages again. Large memory is looked at by several threads.
    ///
    /// On an error every page is put into `dirty`: some may have been protected again without
    /// being reported, and the answer about memory that vanished would be "nothing written".
    pub fn scan(&mut self, dirty: &mut PageSet, mode: ScanMode) -> Result<ScanStats, Error> {
        self.check_size(dirty)?;
        let scanned = match mode {
            ScanMode::TwoStep { granule_pages } => self.scan_granules(granule_pages, dirty),
            ScanMode::Everything => self.scan_everything(dirty),
        };
        let alive = scanned.and_then(|stats| self.link.confirm_alive().map(|()| stats));
        let stats = alive.inspect_err(|_| dirty.insert_range(0..dirty.page_count()))?;
        self.link.mapping.device_writes().drain_into(dirty);
        Ok(stats)
    }

    /// Adds to `written` the pages written since they were last reported, says how many they are,
    /// and changes nothing: for estimates of the dirty rate, and exact for a guest that is stopped
    /// and whose devices rest. Large memory is looked at by several threads, since that guest waits.
    pub fn peek(&mut self, written: &mut PageSet) -> Result<u64, Error> {
        self.check_size(written)?;
        self.look()?;
        self.link.confirm_alive()?;
        self.link.mapping.device_writes().copy_into(&mut self.hint);
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

    /// Looks by several threads and protects by this one: KVM lets vCPUs wait that fault anywhere between two ranges which are
    /// protected at once.
    fn scan_granules(
        &mut self,
        granule_pages: u64,
        dirty: &mut PageSet,
    ) -> Result<ScanStats, Error> {
        self.look()?;
        let mut stats = ScanStats {
            hinted_pages: self.hint.count(),
            ..ScanStats::default()
        };
        let Some(output) = self.outputs.first_mut() else {
            return Err(Error::TrackingLost);
        };
        let mut all = dirty.whole();
        for pages in self.hint.granule_runs(granule_pages).flat_map(steps) {
            stats = stats.and(take(&self.link, &pages, output, &mut all)?);
        }
        Ok(stats)
    }

    fn scan_everything(&mut self, dirty: &mut PageSet) -> Result<ScanStats, Error> {
        let link = &self.link;
        in_parts(&mut self.outputs, dirty, |part, output| {
            take(link, &part.pages(), output, part)
        })
    }

    /// Fills the hint with the pages that are written now, without protecting any.
    fn look(&mut self) -> Result<(), Error> {
        self.hint.clear();
        let link = &self.link;
        in_parts(&mut self.outputs, &mut self.hint, |part, output| {
            look_at(link, output, part).map(|()| ScanStats::default())
        })?;
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

impl ScanStats {
    fn and(self, other: Self) -> Self {
        Self {
            hinted_pages: self.hinted_pages + other.hinted_pages,
            written_pages: self.written_pages + other.written_pages,
            protect_calls: self.protect_calls + other.protect_calls,
        }
    }
}

/// Threads for so many pages: one for each GiB, as far as there are cores.
fn threads(pages: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    (pages / PART_PAGES_MIN).clamp(1, cores.min(THREADS_MAX)) as usize
}

/// Does the work on each part of a set, with a thread and an output for each, and adds up what they did. A part for which no
/// thread could begin is done by this one.
fn in_parts(
    outputs: &mut [Output],
    set: &mut PageSet,
    work: impl Fn(&mut Part<'_>, &mut Output) -> Result<ScanStats, Error> + Sync,
) -> Result<ScanStats, Error> {
    let part_pages = set.page_count().div_ceil(outputs.len().max(1) as u64);
    let parts: Vec<Part<'_>> = set.parts(part_pages).collect();
    if parts.len() > outputs.len() {
        // Pages that nobody looks at would count as not written.
        return Err(Error::TrackingLost);
    }
    let helpers = parts.len().saturating_sub(1);
    let left = Mutex::new(parts.into_iter().zip(outputs).collect::<Vec<_>>());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let some = || {
        let mut sum = ScanStats::default();
        while let Some((mut part, output)) = next() {
            sum = sum.and(work(&mut part, output)?);
        }
        Ok(sum)
    };
    std::thread::scope(|scope| {
        let begin = |_| {
            let thread = std::thread::Builder::new().name("scan".into());
            thread.spawn_scoped(scope, some).ok()
        };
        let begun: Vec<_> = (0..helpers).filter_map(begin).collect();
        let own = some();
        let ended: Vec<Result<ScanStats, Error>> = begun
            .into_iter()
            // What a thread that died has done is not known.
            .map(|thread| thread.join().unwrap_or(Err(Error::TrackingLost)))
            .collect();
        let mut all = std::iter::once(own).chain(ended);
        all.try_fold(ScanStats::default(), |sum, one| Ok(sum.and(one?)))
    })
}

/// Adds those pages of a part that are written now, without protecting any.
fn look_at(link: &Link, output: &mut Output, part: &mut Part<'_>) -> Result<(), Error> {
    for segment in link.mapping.segments() {
        let mut left = segment.addresses(&part.pages()).unwrap_or(0..0);
        while !left.is_empty() {
            let scanned = scan_some(link, &left, Protect::No, output)?;
            record(output, scanned, segment, part);
            left.start = scanned.walk_end;
        }
    }
    Ok(())
}

/// Reports the written ones of `pages`, which are of this part, and protects them.
fn take(
    link: &Link,
    pages: &Range<u64>,
    output: &mut Output,
    part: &mut Part<'_>,
) -> Result<ScanStats, Error> {
    let mut stats = ScanStats::default();
    for segment in link.mapping.segments() {
        let mut left = segment.addresses(pages).unwrap_or(0..0);
        while !left.is_empty() {
            let scanned = scan_some(link, &left, Protect::Written, output)?;
            stats.written_pages += record(output, scanned, segment, part);
            stats.protect_calls += 1;
            left.start = scanned.walk_end;
        }
    }
    Ok(stats)
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

/// Puts the reported pages into a part and counts them.
fn record(output: &[page_region], scanned: Scanned, segment: &Segment, part: &mut Part<'_>) -> u64 {
    let mut count = 0;
    for region in output.iter().take(scanned.regions) {
        let pages = segment.pages_at(&(region.start..region.end));
        count += pages.end.saturating_sub(pages.start);
        part.insert_range(pages);
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
