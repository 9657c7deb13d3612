//! Puts huge pages back after tracking: write protection has split them to 4 KiB, and nothing
//! joins them again by itself.
//!
//! Works from outside, in the background, chunk by chunk and at a bounded rate, since each chunk
//! is copied (2 MiB) while the guest runs. Who owns the state: the kernel. What it refuses: chunks
//! with no memory at all, which it would have to allocate.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::mapping::Segment;
use crate::{CHUNK_PAGES, CHUNK_SIZE, Error, GuestMapping, RamFile};

/// What became of the chunks of guest RAM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CollapseCounts {
    /// Chunks that are huge pages now.
    pub collapsed: u64,
    /// Chunks that the kernel could not make huge (busy, or no huge page to be had).
    pub failed: u64,
    /// Chunks without any memory, left alone.
    pub empty: u64,
    /// Whether it was cancelled before the end.
    pub cancelled: bool,
}

/// Where and how fast huge pages are put back.
#[derive(Debug)]
pub struct Collapse<'a> {
    /// QEMU, from [`open_pidfd`].
    pub pidfd: BorrowedFd<'a>,
    /// Where guest RAM is in QEMU.
    pub mapping: &'a GuestMapping,
    /// Guest RAM, to find chunks without memory.
    pub ram: &'a RamFile,
    /// Rest after each chunk: 2 MiB per `pause` is the upper limit of the rate.
    pub pause: Duration,
}

/// Opens a handle to QEMU that stays QEMU's even if its number is given to another process.
pub fn open_pidfd(pid: u32) -> Result<OwnedFd, Error> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Error::system("find QEMU", Errno::SRCH))?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
        .map_err(|source| Error::system("find QEMU", source))
}

impl Collapse<'_> {
    /// Goes through guest RAM once; returns early when `cancel` becomes true or QEMU ends.
    pub fn run(&self, cancel: &AtomicBool) -> Result<CollapseCounts, Error> {
        let mut counts = CollapseCounts::default();
        let mut first = 0;
        while first < self.mapping.page_count() {
            if cancel.load(Ordering::Relaxed) {
                counts.cancelled = true;
                break;
            }
            self.one_chunk(first, &mut counts)?;
            first = first.saturating_add(CHUNK_PAGES);
        }
        Ok(counts)
    }

    fn one_chunk(&self, first: u64, counts: &mut CollapseCounts) -> Result<(), Error> {
        let pages = first
            ..first
                .saturating_add(CHUNK_PAGES)
                .min(self.mapping.page_count());
        if self.ram.data_extents(pages.clone())?.is_empty() {
            counts.empty += 1;
            return Ok(());
        }
        let mut segments = self.mapping.segments().iter();
        let span = segments.find_map(|segment| segment.addresses(&pages));
        let whole = span.filter(|span| {
            span.start.is_multiple_of(CHUNK_SIZE as u64)
                && span.end.saturating_sub(span.start) == CHUNK_SIZE as u64
        });
        match whole.map(|span| collapse(self.pidfd, span.start)) {
            Some(Ok(())) => counts.collapsed += 1,
            Some(Err(Errno::SRCH)) => return Err(Error::TrackingLost),
            Some(Err(Errno::PERM)) => {
                return Err(Error::system("put QEMU's huge pages back", Errno::PERM));
            }
            Some(Err(_)) | None => counts.failed += 1,
        }
        if !self.pause.is_zero() {
            std::thread::sleep(self.pause);
        }
        Ok(())
    }
}

/// Asks the kernel to make one huge page of the chunk at `address` in QEMU.
fn collapse(pidfd: BorrowedFd<'_>, address: u64) -> Result<(), Errno> {
    let part = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: CHUNK_SIZE,
    };
    // SAFETY: the only memory of ours that the kernel reads is `part`; the address in it belongs
    // to the other process and the advice changes none of its bytes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.as_raw_fd(),
            &raw const part,
            1_usize,
            libc::MADV_COLLAPSE,
            0_u32,
        )
    };
    if result >= 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// Bytes of the RAM file that process `pid` maps as huge pages, from `/proc/<pid>/smaps`.
pub fn huge_mapped_bytes(pid: u32, mapping: &GuestMapping) -> Result<u64, Error> {
    let smaps = std::fs::read(format!("/proc/{pid}/smaps"))
        .map_err(|source| Error::system("read QEMU's memory map", source))?;
    Ok(huge_bytes_in(
        &String::from_utf8_lossy(&smaps),
        mapping.segments(),
    ))
}

/// Adds up the `ShmemPmdMapped:` lines of the areas that lie in the mapping.
fn huge_bytes_in(smaps: &str, segments: &[Segment]) -> u64 {
    let mut inside = false;
    let mut kib = 0_u64;
    for line in smaps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let first = fields.next().unwrap_or_default();
        if let Some((start, _)) = first.split_once('-') {
            let start = u64::from_str_radix(start, 16).unwrap_or(0);
            inside = segments.iter().any(|segment| {
                let span = segment.addresses(&segment.pages());
                span.is_some_and(|span| span.contains(&start))
            });
        } else if inside && first == "ShmemPmdMapped:" {
            let value = fields.next().and_then(|text| text.parse().ok());
            kib = kib.saturating_add(value.unwrap_or(0));
        }
    }
    kib.saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_areas_of_the_mapping_count() {
        let smaps = "\
7f0000000000-7f0000400000 rw-s 00000000 00:1a 77 /mem
Size:               4096 kB
ShmemPmdMapped:     2048 kB
VmFlags: rd wr sh
7f0000400000-7f0000600000 rw-s 00400000 00:1a 77 /mem
ShmemPmdMapped:     2048 kB
7f0000600000-7f0000800000 rw-s 00000000 00:1b 78 /other
ShmemPmdMapped:     2048 kB
";
        let mapping = [Segment {
            address: 0x7f00_0000_0000,
            first_page: 0,
            page_count: 1536,
        }];
        assert_eq!(huge_bytes_in(smaps, &mapping), 4 * 1024 * 1024);
        assert_eq!(huge_bytes_in("", &mapping), 0);
    }
}
