//! A virtqueue in memory that is shared with a back end, as a driver has it, and the buffers of its requests.
//!
//! Who owns the state: a mapping belongs to the value, what is in it to both sides. Each request has a place of its own, with
//! three descriptors and buffers that never move. Refuses: answers to what was never asked, and indices outside of the ring.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::{MEMORY_BYTES, OUTSTANDING_MAX};

/// Where the shared memory begins for the guest that there is not.
pub const GUEST: u64 = 1 << 32;
/// Entries of the ring.
pub const SIZE: u16 = 256;
pub const DESCRIPTORS: u64 = 0;
pub const AVAILABLE: u64 = 0x2000;
pub const USED: u64 = 0x4000;
const PLACES: u64 = 0x10000;
const PLACE_BYTES: u64 = (MEMORY_BYTES - PLACES) / OUTSTANDING_MAX as u64 / 4096 * 4096;
/// Most bytes of one request.
pub const IO_MAX: usize = 128 << 10;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read = 0,
    Write = 1,
    Flush = 4,
}

/// A driver's side of one queue.
pub struct Ring {
    base: *mut u8,
    made_available: u16,
    told: u16,
    seen: u16,
}

// SAFETY: the mapping is the value's own for as long as it lives, and nothing in it belongs to a thread.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the shared memory, with an empty ring in it.
    pub fn map(memory: &File) -> io::Result<Self> {
        const { assert!(PLACE_BYTES as usize >= 4096 + 2 * IO_MAX) };
        // SAFETY: a new mapping at a place of the kernel's choice; its length is that of the file, which the caller made.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY_BYTES as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                memory.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut ring = Self {
            base: base.cast(),
            made_available: 0,
            told: 0,
            seen: 0,
        };
        ring.bytes(0, PLACES as usize).fill(0);
        Ok(ring)
    }

    /// Memory at an offset. Whoever uses it knows that the back end does not at this moment.
    fn bytes(&mut self, at: u64, len: usize) -> &mut [u8] {
        assert!(at + len as u64 <= MEMORY_BYTES);
        // SAFETY: inside of the mapping, which lives as long as the borrow. The back end is another process: what it changes
        // against the rules of a virtqueue changes bytes, which have no invalid values.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at as usize), len) }
    }

    fn index(&self, at: u64) -> &AtomicU16 {
        assert!(at < PLACES && at.is_multiple_of(2));
        // SAFETY: inside of the mapping and aligned; both sides use it as an atomic number.
        unsafe { &*self.base.add(at as usize).cast::<AtomicU16>() }
    }

    fn place(number: usize) -> u64 {
        PLACES + number as u64 * PLACE_BYTES
    }

    /// Where the content of a write is put before [`Ring::put`].
    pub fn content(&mut self, place: usize, len: usize) -> &mut [u8] {
        self.bytes(Self::place(place) + 4096, len)
    }

    /// What a read brought.
    pub fn was_read(&mut self, place: usize, len: usize) -> &[u8] {
        self.bytes(Self::place(place) + 4096 + IO_MAX as u64, len)
    }

    /// Whether the request of this place was done.
    pub fn is_done(&mut self, place: usize) -> bool {
        self.bytes(Self::place(place) + 16, 1) == [0]
    }

    /// Makes a request available, for `len` bytes from this byte of the disk on.
    pub fn put(&mut self, place: usize, kind: Kind, at: u64, len: usize) {
        let (head, base) = (3 * place as u16, Self::place(place));
        let mut header = [0; 17];
        header[..4].copy_from_slice(&(kind as u32).to_le_bytes());
        header[8..16].copy_from_slice(&(at / 512).to_le_bytes());
        header[16] = 0xff;
        self.bytes(base, 17).copy_from_slice(&header);
        let data = match kind {
            Kind::Read => Some((base + 4096 + IO_MAX as u64, WRITE)),
            Kind::Write => Some((base + 4096, 0)),
            Kind::Flush => None,
        };
        self.describe(head, base, 16, NEXT, head + 1);
        match data {
            Some((data, flags)) => {
                self.describe(head + 1, data, len as u32, flags | NEXT, head + 2);
                self.describe(head + 2, base + 16, 1, WRITE, 0);
            }
            None => self.describe(head + 1, base + 16, 1, WRITE, 0),
        }
        let slot = u64::from(self.made_available % SIZE);
        self.bytes(AVAILABLE + 4 + 2 * slot, 2)
            .copy_from_slice(&head.to_le_bytes());
        self.made_available = self.made_available.wrapping_add(1);
        self.index(AVAILABLE + 2)
            .store(self.made_available, Ordering::Release);
    }

    fn describe(&mut self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&(GUEST + at).to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&next.to_le_bytes());
        self.bytes(DESCRIPTORS + 16 * u64::from(index), 16)
            .copy_from_slice(&descriptor);
    }

    /// Whether the back end wants to be told of what was made available since it was told last.
    pub fn must_tell(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let (now, before) = (self.made_available, self.told);
        self.told = now;
        let event = self
            .index(USED + 4 + 8 * u64::from(SIZE))
            .load(Ordering::Relaxed);
        now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before)
    }

    /// Whether a request was answered that was not taken by [`Ring::answered`].
    pub fn has_answer(&self) -> bool {
        self.index(USED + 2).load(Ordering::Acquire) != self.seen
    }

    /// The place whose request was answered next; an error if nobody asked for what was answered.
    pub fn answered(&mut self) -> io::Result<Option<usize>> {
        if !self.has_answer() {
            return Ok(None);
        }
        let slot = u64::from(self.seen % SIZE);
        let element = self.bytes(USED + 4 + 8 * slot, 4);
        let head = element
            .first_chunk()
            .map_or(u32::MAX, |head| u32::from_le_bytes(*head));
        self.seen = self.seen.wrapping_add(1);
        let place = (head / 3) as usize;
        match head.is_multiple_of(3) && place < OUTSTANDING_MAX {
            true => Ok(Some(place)),
            false => Err(io::Error::other(format!(
                "head {head} was answered, which nobody made available"
            ))),
        }
    }

    /// Wants an interrupt for the next answer. Whoever waits for it looks once more before.
    pub fn want_interrupt(&mut self) {
        let seen = self.seen;
        self.index(AVAILABLE + 4 + 2 * u64::from(SIZE))
            .store(seen, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is the value's own, and nothing refers to it any longer.
        unsafe { libc::munmap(self.base.cast(), MEMORY_BYTES as usize) };
    }
}
