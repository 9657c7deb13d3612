//! The kernel's two interfaces for tracking writes: userfaultfd and the `PAGEMAP_SCAN` ioctl.
//!
//! Thin, checked wrappers; no state. What they refuse: any page category but "written" in a scan.
//! With another category, a mask inverted or "any of", the kernel takes a path that skips empty
//! page table entries, and pages that were written and then reclaimed would be lost.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general::{
    _UFFDIO_WRITEPROTECT, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC, PM_SCAN_WP_MATCHING, UFFD_API,
    UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED,
    UFFDIO_REGISTER_MODE_WP, page_region, pm_scan_arg, uffdio_api, uffdio_range, uffdio_register,
    uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};

/// `USERFAULTFD_IOC_NEW`, which linux-raw-sys lacks.
const USERFAULTFD_NEW: Opcode = opcode::none(0xAA, 0x00);
/// `PAGEMAP_SCAN`, which linux-raw-sys lacks.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const WRITEPROTECT_MODE_WP: u64 = 1;
/// What a context must offer: tmpfs, pages not there yet, and no fault handler.
const FEATURES: u64 =
    (UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC) as u64;

const _: () = assert!(
    _UFFDIO_WRITEPROTECT == 6,
    "the ioctl numbers are those of Linux"
);

/// A range of addresses in the tracked process.
pub(crate) type Span = std::ops::Range<u64>;

/// Whether a scan only looks, or also protects what it reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protect {
    No,
    Written,
}

/// Makes a userfaultfd for this process from an open `/dev/userfaultfd`.
pub(crate) fn new_uffd(device: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: this ioctl takes an integer; no memory of ours is involved.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_NEW as _, flags) };
    if fd < 0 {
        return Err(last_error());
    }
    // SAFETY: the kernel has just made this descriptor for us and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Tells a fresh userfaultfd what it is for. Once per descriptor.
pub(crate) fn enable(uffd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut api = uffdio_api {
        api: u64::from(UFFD_API),
        features: FEATURES,
        ioctls: 0,
    };
    call(uffd, UFFDIO_API, &mut api)?;
    // A kernel that does not know a feature refuses the call; this is for one that lies.
    if api.features & FEATURES == FEATURES {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}

/// Registers a range for write protection. Does nothing to a range that is registered already,
/// and then proves that the process and the mapping still exist (ESRCH or EINVAL otherwise).
pub(crate) fn register(uffd: BorrowedFd<'_>, span: &Span) -> Result<(), Errno> {
    let mut register = uffdio_register {
        range: range_of(span),
        mode: u64::from(UFFDIO_REGISTER_MODE_WP),
        ioctls: 0,
    };
    call(uffd, UFFDIO_REGISTER, &mut register).map(drop)
}

/// Ends the registration and all protection of a range.
pub(crate) fn unregister(uffd: BorrowedFd<'_>, span: &Span) -> Result<(), Errno> {
    call(uffd, UFFDIO_UNREGISTER, &mut range_of(span)).map(drop)
}

/// Write-protects every page of a range, also those that do not exist yet.
pub(crate) fn protect(uffd: BorrowedFd<'_>, span: &Span) -> Result<(), Errno> {
    let mut protect = uffdio_writeprotect {
        range: range_of(span),
        mode: WRITEPROTECT_MODE_WP,
    };
    call(uffd, UFFDIO_WRITEPROTECT, &mut protect).map(drop)
}

/// Where a scan stopped and how many entries of the output it filled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scanned {
    pub(crate) regions: usize,
    pub(crate) walk_end: u64,
}

/// One `PAGEMAP_SCAN` for written pages of `span`; stops early when `output` is full.
pub(crate) fn scan(
    pagemap: BorrowedFd<'_>,
    span: &Span,
    protect: Protect,
    output: &mut [page_region],
) -> Result<Scanned, Errno> {
    let mut arg = scan_argument(span, protect, output);
    let written = u64::from(PAGE_IS_WRITTEN);
    assert!(
        arg.category_mask == written
            && arg.return_mask == written
            && arg.category_anyof_mask == 0
            && arg.category_inverted == 0,
        "with any other masks the kernel loses pages"
    );
    let regions = call(pagemap, PAGEMAP_SCAN, &mut arg)?;
    Ok(Scanned {
        regions: usize::try_from(regions).unwrap_or(0).min(output.len()),
        walk_end: arg.walk_end,
    })
}

fn scan_argument(span: &Span, protect: Protect, output: &mut [page_region]) -> pm_scan_arg {
    let flags = match protect {
        Protect::No => PM_SCAN_CHECK_WPASYNC,
        Protect::Written => PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC,
    };
    pm_scan_arg {
        size: size_of::<pm_scan_arg>() as u64,
        flags: u64::from(flags),
        start: span.start,
        end: span.end,
        walk_end: span.start,
        vec: output.as_mut_ptr() as u64,
        vec_len: output.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: u64::from(PAGE_IS_WRITTEN),
        category_anyof_mask: 0,
        return_mask: u64::from(PAGE_IS_WRITTEN),
    }
}

/// An empty output entry.
pub(crate) const EMPTY_REGION: page_region = page_region {
    start: 0,
    end: 0,
    categories: 0,
};

fn range_of(span: &Span) -> uffdio_range {
    uffdio_range {
        start: span.start,
        len: span.end.saturating_sub(span.start),
    }
}

/// Calls an ioctl whose argument is a structure of ours.
fn call<T>(fd: BorrowedFd<'_>, request: u32, argument: &mut T) -> Result<i32, Errno> {
    // SAFETY: every caller pairs the request with the structure the kernel defines for it, so the
    // kernel reads and writes within `argument`. `pm_scan_arg` also carries the address and
    // length of an output slice that its caller has borrowed mutably until this call returns.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    if result < 0 {
        return Err(last_error());
    }
    Ok(result)
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
