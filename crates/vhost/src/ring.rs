//! A split virtqueue in guest memory (virtio 1.2, 2.7), as the device sees it.
//!
//! Who owns the state: the guest's driver owns the descriptors and the available ring, the device the used ring; this value
//! holds where they are and how far the device has come.
//!
//! What it refuses: everything that a driver may not do, with a sentence. The queue is then of no use until it is set up
//! anew. Each descriptor is read once and only the copy is believed.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use godwit_guestmem::DeviceMemory;
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::{Error, RING_MAX};

/// More of the chain follows.
const NEXT: u16 = 1;
/// The device writes this buffer.
const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
const INDIRECT: u16 = 4;
/// The driver wants no interrupts.
const NO_INTERRUPT: u16 = 1;
const DESCRIPTOR: u64 = 16;
const USED_ELEMENT: u64 = 8;
/// Flags and index before the elements of either ring.
const RING_HEADER: u64 = 4;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    pub address: u64,
    pub len: u32,
    /// Whether the device writes it; it reads it else.
    pub writable: bool,
}

/// Where a queue is in guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

/// A queue that runs.
#[derive(Debug)]
pub struct Ring {
    place: Place,
    /// Interrupts and kicks by index (`VIRTIO_F_EVENT_IDX`).
    by_index: bool,
    /// Of the available ring: what is taken next.
    next: u16,
    /// Of the used ring: what is put there next.
    used: u16,
    /// The used index when the driver was last interrupted, or it was decided not to.
    told: u16,
}

impl Ring {
    /// A queue at this place, from which `next` is to be taken.
    pub fn new(
        memory: &DeviceMemory,
        place: Place,
        by_index: bool,
        next: u16,
    ) -> Result<Self, Error> {
        if !place.size.is_power_of_two() || place.size > RING_MAX {
            return Err(Error::guest(format!("a ring of {} entries", place.size)));
        }
        let aligned = place.descriptors.is_multiple_of(16)
            && place.available.is_multiple_of(2)
            && place.used.is_multiple_of(4);
        if !aligned {
            return Err(Error::guest("its rings are not aligned"));
        }
        let mut ring = Self {
            place,
            by_index,
            next,
            used: 0,
            told: 0,
        };
        ring.used = ring.load(memory, place.used.saturating_add(2))?;
        ring.told = ring.used;
        // The last of each must be there.
        ring.load(memory, ring.descriptor(place.size - 1).saturating_add(14))?;
        ring.load(memory, ring.event_of_driver())?;
        ring.load(memory, ring.event_of_device())?;
        Ok(ring)
    }

    /// The index of what is taken next.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// Of a ring that goes on after its device was away.
    pub fn set_next(&mut self, next: u16) {
        self.next = next;
    }

    /// The index of what is answered next.
    pub fn used(&self) -> u16 {
        self.used
    }

    /// The next head that the driver made available, if any.
    pub fn take(&mut self, memory: &DeviceMemory) -> Result<Option<u16>, Error> {
        let index: u16 = load(memory, self.index_of_driver(), Acquire)?;
        let waiting = index.wrapping_sub(self.next);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.place.size {
            return Err(Error::guest(format!(
                "it made {waiting} requests available in a ring of {}",
                self.place.size
            )));
        }
        let slot = u64::from(self.next % self.place.size);
        let head = self.load(
            memory,
            self.place.available.saturating_add(RING_HEADER + 2 * slot),
        )?;
        if head >= self.place.size {
            return Err(Error::guest(format!(
                "a request begins at descriptor {head} of {}",
                self.place.size
            )));
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// The buffers of a chain, into `chain`.
    pub fn chain(
        &self,
        memory: &DeviceMemory,
        head: u16,
        chain: &mut Vec<Descriptor>,
    ) -> Result<(), Error> {
        chain.clear();
        let mut table = (self.place.descriptors, self.place.size);
        let (mut index, mut indirect) = (head, false);
        loop {
            if index >= table.1 {
                return Err(Error::guest(format!("descriptor {index} of {}", table.1)));
            }
            let raw: [u8; DESCRIPTOR as usize] = read(
                memory,
                table.0.saturating_add(DESCRIPTOR * u64::from(index)),
            )?;
            let (address, len, flags, next) = split(&raw);
            if flags & INDIRECT != 0 {
                if indirect || flags & NEXT != 0 {
                    return Err(Error::guest("a table of descriptors inside of another"));
                }
                table = (address, entries(len)?);
                (index, indirect) = (0, true);
                continue;
            }
            if chain.len() >= usize::from(RING_MAX) {
                return Err(Error::guest("a request without end"));
            }
            let writable = flags & WRITE != 0;
            if !writable && chain.last().is_some_and(|before| before.writable) {
                return Err(Error::guest("a buffer to be read after one to be written"));
            }
            chain.push(Descriptor {
                address,
                len,
                writable,
            });
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = next;
        }
    }

    /// Answers a head; so many bytes were written to its buffers. Returns the used index after it.
    pub fn answer(&mut self, memory: &DeviceMemory, head: u16, written: u32) -> Result<u16, Error> {
        let slot = u64::from(self.used % self.place.size);
        let at = self
            .place
            .used
            .saturating_add(RING_HEADER + USED_ELEMENT * slot);
        let mut element = [0; USED_ELEMENT as usize];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&written.to_le_bytes());
        memory
            .write_slice(&element, GuestAddress(at))
            .map_err(outside)?;
        self.used = self.used.wrapping_add(1);
        let index = GuestAddress(self.place.used.saturating_add(2));
        memory.store(self.used, index, Release).map_err(outside)?;
        Ok(self.used)
    }

    /// Whether the driver wants an interrupt for what was answered since it was last asked.
    pub fn wants_interrupt(&mut self, memory: &DeviceMemory) -> Result<bool, Error> {
        let before = std::mem::replace(&mut self.told, self.used);
        if before == self.used {
            return Ok(false);
        }
        // The used index must be there before it is looked at what the driver wants.
        fence(SeqCst);
        if self.by_index {
            let event = self.load(memory, self.event_of_driver())?;
            let since_event = self.used.wrapping_sub(event).wrapping_sub(1);
            return Ok(since_event < self.used.wrapping_sub(before));
        }
        let flags = self.load(memory, self.place.available)?;
        Ok(flags & NO_INTERRUPT == 0)
    }

    /// Asks to be told of the next request. Returns whether one has come already.
    pub fn ask_for_kick(&self, memory: &DeviceMemory) -> Result<bool, Error> {
        if self.by_index {
            let event = GuestAddress(self.event_of_device());
            memory.store(self.next, event, Relaxed).map_err(outside)?;
        }
        fence(SeqCst);
        let index: u16 = load(memory, self.index_of_driver(), Acquire)?;
        Ok(index != self.next)
    }

    fn load(&self, memory: &DeviceMemory, at: u64) -> Result<u16, Error> {
        load(memory, at, Relaxed)
    }

    fn descriptor(&self, index: u16) -> u64 {
        self.place
            .descriptors
            .saturating_add(DESCRIPTOR * u64::from(index))
    }

    /// Where the driver says how far it has come.
    fn index_of_driver(&self) -> u64 {
        self.place.available.saturating_add(2)
    }

    /// Where the driver says from which used index on it wants interrupts.
    fn event_of_driver(&self) -> u64 {
        let elements = 2 * u64::from(self.place.size);
        self.place.available.saturating_add(RING_HEADER + elements)
    }

    /// Where the device says from which available index on it wants kicks.
    fn event_of_device(&self) -> u64 {
        let elements = USED_ELEMENT * u64::from(self.place.size);
        self.place.used.saturating_add(RING_HEADER + elements)
    }
}

fn outside(error: GuestMemoryError) -> Error {
    Error::guest(format!("a ring outside of its memory: {error}"))
}

fn load(memory: &DeviceMemory, at: u64, order: std::sync::atomic::Ordering) -> Result<u16, Error> {
    memory.load(GuestAddress(at), order).map_err(outside)
}

fn read<const N: usize>(memory: &DeviceMemory, at: u64) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    memory
        .read_slice(&mut bytes, GuestAddress(at))
        .map_err(outside)?;
    Ok(bytes)
}

/// Address, length, flags and next.
fn split(raw: &[u8; DESCRIPTOR as usize]) -> (u64, u32, u16, u16) {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *raw;
    (
        u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        u32::from_le_bytes([i, j, k, l]),
        u16::from_le_bytes([m, n]),
        u16::from_le_bytes([o, p]),
    )
}

/// Entries of an indirect table of so many bytes.
fn entries(len: u32) -> Result<u16, Error> {
    let whole = u64::from(len).is_multiple_of(DESCRIPTOR) && len > 0;
    let count = u16::try_from(u64::from(len) / DESCRIPTOR);
    match count {
        Ok(count) if whole && count <= RING_MAX => Ok(count),
        _ => Err(Error::guest(format!(
            "a table of descriptors of {len} bytes"
        ))),
    }
}
