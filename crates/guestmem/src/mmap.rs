//! A shared mapping of the RAM file at huge-page alignment. Its pointer is held here, and by the buffers that
//! [`crate::device_memory`] lends to the kernel.
//!
//! Who owns the state: [`SharedMap`] owns the address range and unmaps it when dropped; the bytes
//! belong to the guest, which changes them at any time.
//!
//! What it refuses: spans outside the mapping. What it cannot refuse, and its caller must: spans
//! with no memory behind them, since touching those on a full tmpfs raises SIGBUS.

use std::fs::File;
use std::ops::Range;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{CHUNK_SIZE, Error};

/// A mapping of a whole file, readable and writable, shared, aligned to 2 MiB.
#[derive(Debug)]
pub(crate) struct SharedMap {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that stays valid until drop; every access goes through
// methods whose own comments say why concurrent use is bearable.
unsafe impl Send for SharedMap {}
// SAFETY: as above.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Maps the first `len` bytes (a multiple of 2 MiB, not 0) of `file`.
    pub(crate) fn new(file: &File, len: usize) -> Result<Self, Error> {
        let base =
            map_aligned(file, len).map_err(|source| Error::system("map guest RAM", source))?;
        Ok(Self { base, len })
    }

    /// Lends the bytes of a span of live guest memory.
    pub(crate) fn lend<R>(&self, span: Range<usize>, read: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (start, len) = self.locate(&span)?;
        // SAFETY: the span is inside the mapping, which lives as long as `self`; u8 has no
        // alignment and no invalid value. The formal problem: QEMU, and our own writers, may
        // change these bytes while the slice exists, which the language calls a data race on a
        // shared reference. Why it is bearable: the stores of another process, of the kernel, and
        // those of our devices, which are made through raw pointers elsewhere, are outside of what
        // the compiler can see or exploit here, and hardware loads of changing bytes give old or new
        // bytes, nothing else. What could still go wrong is code that reads a byte twice and
        // relies on both being equal. So the rule for every caller: the bytes are opaque data.
        // They are copied, encrypted, or tested for zero; no length, index, or branch that memory
        // safety depends on may come from them. A torn result is sound because the page is then
        // dirty and is sent again. The slice cannot leave the closure.
        Some(read(unsafe { std::slice::from_raw_parts(start, len) }))
    }

    /// Lends the bytes of a span for writing. The caller holds the claim on the span's pages, so
    /// no two threads of this process have a mutable slice of the same byte.
    pub(crate) fn lend_mut<R>(
        &self,
        span: Range<usize>,
        write: impl FnOnce(&mut [u8]) -> R,
    ) -> Option<R> {
        let (start, len) = self.locate(&span)?;
        // SAFETY: inside the mapping, alive, any byte valid, as in `lend`; exclusive within this
        // process by the claim (see `RamFile::with_pages_mut`), as long as no device of ours
        // writes guest memory: at the destination, where this is used, none runs and QEMU is
        // paused until the last page has been written. Against QEMU the same formal problem as in
        // `lend` remains.
        Some(write(unsafe { std::slice::from_raw_parts_mut(start, len) }))
    }

    /// Allocates and maps the memory of a span now; an error instead of SIGBUS.
    pub(crate) fn populate_write(&self, span: Range<usize>) -> Result<(), Errno> {
        let (start, len) = self.locate(&span).ok_or(Errno::INVAL)?;
        // SAFETY: the span is inside our mapping; the advice faults pages in and changes no byte.
        unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) }
    }

    /// Takes this process's entries for the span away; the file keeps its bytes, and they are found again when touched.
    pub(crate) fn leave(&self, span: Range<usize>) {
        let Some((start, len)) = self.locate(&span) else {
            return;
        };
        // SAFETY: the span is inside our mapping, which is shared: the advice changes no byte of the file behind it.
        let _ = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxDontNeed) };
    }

    /// Address of the mapping in this process.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Where a span is, and how long; nothing if it is not inside. Whoever touches it does so as in `lend`.
    pub(crate) fn locate(&self, span: &Range<usize>) -> Option<(*mut u8, usize)> {
        let len = span.end.checked_sub(span.start)?;
        if span.end > self.len {
            return None;
        }
        // SAFETY: `span.start <= span.end <= self.len`, so the result is inside the mapping or
        // one past its end.
        Some((unsafe { self.base.as_ptr().add(span.start) }, len))
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and no borrow of it can outlive `self`.
        // An error would mean that the range is not ours: nothing to be done about it here.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Reserves more address space than needed, maps the file at the aligned address inside, and
/// gives the rest back.
fn map_aligned(file: &File, len: usize) -> Result<NonNull<u8>, Errno> {
    let reserved_len = len.checked_add(CHUNK_SIZE).ok_or(Errno::OVERFLOW)?;
    // SAFETY: a new private mapping at an address that the kernel chooses.
    let reserved = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::null_mut(),
            reserved_len,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )?
    };
    let padding = reserved.cast::<u8>().align_offset(CHUNK_SIZE);
    // SAFETY: `padding < CHUNK_SIZE`, so `padding + len` is within the reservation, which is ours
    // to replace.
    let mapped = unsafe {
        let base = reserved.cast::<u8>().add(padding);
        rustix::mm::mmap(
            base.cast(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            file,
            0,
        )
    };
    if mapped.is_err() {
        // SAFETY: the whole reservation is still ours.
        let _ = unsafe { rustix::mm::munmap(reserved, reserved_len) };
    }
    let base = mapped?.cast::<u8>();
    let tail_len = reserved_len - padding - len;
    // SAFETY: head and tail are parts of the reservation outside the file mapping.
    unsafe {
        if padding > 0 {
            rustix::mm::munmap(reserved, padding)?;
        }
        if tail_len > 0 {
            rustix::mm::munmap(base.add(len).cast(), tail_len)?;
        }
        // Huge pages where the mount allows them by advice only.
        let _ = rustix::mm::madvise(base.cast(), len, Advice::LinuxHugepage);
    }
    NonNull::new(base).ok_or(Errno::FAULT)
}
