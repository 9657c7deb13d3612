//! What this program was started with: descriptors, and what becomes of a signal.
//!
//! Owns nothing. Refuses: the standard ones, and what this program has opened itself.

use rustix::io::FdFlags;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

/// A connection that the other side has closed is an error of a write, and ends nobody. A program is begun without that, and so is
/// this one after it could not become another.
pub fn ignore_broken_pipes() {
    // SAFETY: a plain system call; to ignore a signal needs no handler.
    let _ = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// A descriptor that whoever started this program left open for it, taken once: no program that is started from here gets it.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: it is no more than asked about; a number that is not open is refused by the kernel.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    if rustix::io::fcntl_getfd(fd)?.contains(FdFlags::CLOEXEC) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    // SAFETY: it is open; and nobody here owns it, since all that this program opens closes when another one begins.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};

    #[test]
    fn what_was_left_open_is_taken_once_and_what_is_ours_is_not() {
        let own = File::open("/dev/null").unwrap();
        assert!(inherited(own.as_raw_fd()).is_err());
        rustix::io::fcntl_setfd(&own, FdFlags::empty()).unwrap();
        let number = own.into_raw_fd();
        let taken = inherited(number).unwrap();
        assert!(inherited(number).is_err(), "twice");
        drop(taken);
        for number in [-1, 0, 2, number, RawFd::MAX] {
            assert!(inherited(number).is_err(), "{number}");
        }
    }
}
