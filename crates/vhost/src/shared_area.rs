//! A small memory that QEMU keeps for us, so that it outlives this process.
//!
//! Who owns the state: this value owns the mapping; QEMU has the descriptor and never looks inside. It is read and written
//! by atomic accesses alone, since a process that was taken for dead may still have it.
//!
//! Refuses: a memory that could be made shorter while it is mapped, and offsets outside of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::Error;

/// A mapping of a memory whose length nobody can change.
#[derive(Debug)]
pub(crate) struct SharedArea {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping stays valid until drop, and every access is atomic.
unsafe impl Send for SharedArea {}

impl SharedArea {
    /// A new one, all zeroes.
    pub(crate) fn create(len: usize) -> Result<Self, Error> {
        let made = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create(c"godwit-inflight", flags)?;
            rustix::fs::ftruncate(&fd, len as u64)?;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&fd, seals)?;
            Ok(fd)
        };
        let fd = made().map_err(|error: Errno| Error::system("make an in-flight area", error))?;
        Self::open(fd, len)
    }

    /// One that was made before, and is at least so long.
    pub(crate) fn open(fd: OwnedFd, len: usize) -> Result<Self, Error> {
        let refused = |error: Errno| Error::system("use the in-flight area that QEMU kept", error);
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(refused)?;
        let there = rustix::fs::fstat(&fd).map_err(refused)?.st_size;
        let long = usize::try_from(there).is_ok_and(|there| there >= len);
        if !seals.contains(SealFlags::SHRINK) || !long || len == 0 {
            return Err(refused(Errno::INVAL));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, of a memory that stays as long.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0) };
        let base = base.map_err(refused)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| refused(Errno::FAULT))?;
        Ok(Self { fd, base, len })
    }

    /// The address of `size` bytes at a multiple of `size`.
    fn at(&self, offset: usize, size: usize) -> Option<*mut u8> {
        let end = offset.checked_add(size)?;
        if end > self.len || !offset.is_multiple_of(size) {
            return None;
        }
        // SAFETY: inside the mapping, as was just checked.
        Some(unsafe { self.base.as_ptr().add(offset) })
    }

    pub(crate) fn byte(&self, offset: usize) -> Option<&AtomicU8> {
        let at = self.at(offset, 1)?;
        // SAFETY: inside the mapping, which lives as long as `self`; all accesses are atomic.
        Some(unsafe { AtomicU8::from_ptr(at) })
    }

    pub(crate) fn half(&self, offset: usize) -> Option<&AtomicU16> {
        let at = self.at(offset, 2)?;
        // SAFETY: as above; aligned, since the mapping begins at a page and the offset is a multiple of 2.
        Some(unsafe { AtomicU16::from_ptr(at.cast()) })
    }

    pub(crate) fn long(&self, offset: usize) -> Option<&AtomicU64> {
        let at = self.at(offset, 8)?;
        // SAFETY: as above; the offset is a multiple of 8.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }
}

impl AsFd for SharedArea {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedArea {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no borrow of it can outlive `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
