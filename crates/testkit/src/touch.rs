//! Touching memory for the first time, in parallel: to warm a machine up, and to measure how fast pages come.
//!
//! On a virtual machine the hypervisor gives memory when it is first touched, so the first touch of a page ever is
//! slower than every later one; a measurement begins by touching (nearly) all free memory once. Owns its mappings and
//! gives them back before it returns. Refuses: a size of nothing.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Distance of the bytes that are written: every page of the smallest size is touched.
const PAGE_BYTES: usize = 4096;

/// Writes a byte into every page of fresh anonymous memory, in huge pages where the system has them, with so many
/// threads; gives the memory back and says how long the touching took.
pub fn anonymous(bytes: u64, threads: usize) -> io::Result<Duration> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    touch(bytes, threads, flags, -1)
}

/// The same for a file that is as long already, such as an empty one on a tmpfs.
pub fn file(file: &File, bytes: u64, threads: usize) -> io::Result<Duration> {
    if file.metadata()?.len() < bytes {
        let shorter = "the file is shorter than what shall be touched";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, shorter));
    }
    touch(bytes, threads, libc::MAP_SHARED, file.as_raw_fd())
}

fn touch(bytes: u64, threads: usize, flags: i32, fd: i32) -> io::Result<Duration> {
    let length = usize::try_from(bytes).map_err(io::Error::other)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses; nothing else knows it, and it is unmapped below.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: advice about the mapping just made; that the system has no huge pages is no error here.
    unsafe { libc::madvise(start, length, libc::MADV_HUGEPAGE) };
    let (began, address) = (Instant::now(), start as usize);
    let share = length.div_ceil(threads.max(1)).next_multiple_of(2 << 20);
    std::thread::scope(|scope| {
        for from in (0..length).step_by(share) {
            let until = length.min(from + share);
            scope.spawn(move || {
                for at in (from..until).step_by(PAGE_BYTES) {
                    // SAFETY: inside the mapping, which outlives this scope; each thread has pages of its own.
                    unsafe { ((address + at) as *mut u8).write_volatile(1) };
                }
            });
        }
    });
    let took = began.elapsed();
    // SAFETY: unmaps exactly what was mapped above; no reference to it is left.
    unsafe { libc::munmap(start, length) };
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn every_page_of_a_file_is_touched_and_a_short_file_is_refused() {
        let whole = tempfile::tempfile().unwrap();
        let bytes = (5 << 20) + PAGE_BYTES as u64;
        assert!(file(&whole, bytes, 2).is_err());
        whole.set_len(bytes).unwrap();
        file(&whole, bytes, 2).unwrap();
        for page in 0..bytes / PAGE_BYTES as u64 {
            let mut byte = [0];
            whole
                .read_exact_at(&mut byte, page * PAGE_BYTES as u64)
                .unwrap();
            assert_eq!(byte, [1], "page {page}");
        }
    }

    #[test]
    fn anonymous_memory_is_touched_and_nothing_is_refused() {
        anonymous(3 << 20, 2).unwrap();
        assert!(anonymous(0, 2).is_err());
    }
}
