//! A virtio block device (virtio 1.2, 5.2): its features, its configuration, and what a chain of buffers asks for.
//!
//! Pure but for reading the guest's memory. Refuses chains that no driver makes; a request that a driver may make and this
//! disk cannot carry out is told to the driver in its status.

use std::ops::Range;

use godwit_blockio::{Data, SECTOR, Work};
use godwit_guestmem::{DeviceMemory, DeviceReadable, DeviceWritable, RamFile};
use std::sync::Arc;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError};

use crate::Error;
use crate::ring::Descriptor;

/// Bits of virtio's features.
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLOCK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const QUEUES: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Of vhost: without it QEMU saves no device. The log is for QEMU's own copy of memory, which this product never asks for.
    pub const LOG_ALL: u64 = 1 << 26;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_INDEX: u64 = 1 << 29;
    /// Of vhost-user: there are features of the protocol.
    pub const PROTOCOL: u64 = 1 << 30;
    pub const VERSION_1: u64 = 1 << 32;
}

/// Most buffers of one request beside its header and its status.
pub const SEGMENTS_MAX: u32 = 126;
/// Most buffers of one request with these, which a driver may cut in two.
const CHAIN_MAX: usize = SEGMENTS_MAX as usize + 4;
/// Most sectors that are discarded or made zero by one request: 1 GiB.
pub const ERASE_MAX: u32 = 1 << 21;
/// Longest read or write, bytes. No driver asks for nearly as much, and of what a guest writes there is a copy while its disk moves.
pub const DATA_MAX: u32 = 64 << 20;
/// Bytes of a serial number.
pub const SERIAL_MAX: usize = 20;
/// Bytes of the configuration.
pub const CONFIG: usize = 60;

const HEADER: usize = 16;
const ERASE_SEGMENT: usize = 16;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// What a driver is told of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    Failed = 1,
    Unsupported = 2,
}

/// What a guest sees of a disk. Part of a VM's hardware: it stays the same for as long as the VM lives, but for the size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Bytes of its blocks: 512 or 4096.
    pub block: u32,
    pub queues: u16,
    pub read_only: bool,
    /// Whether the image takes discards and zeroes.
    pub erases: bool,
    /// At most [`SERIAL_MAX`] bytes.
    pub serial: String,
}

impl Geometry {
    /// What is offered to a driver.
    pub fn features(&self) -> u64 {
        use feature::*;
        let mut features = SEG_MAX | BLOCK_SIZE | FLUSH | TOPOLOGY | LOG_ALL;
        features |= INDIRECT | EVENT_INDEX | PROTOCOL | VERSION_1;
        if self.queues > 1 {
            features |= QUEUES;
        }
        if self.read_only {
            features |= READ_ONLY;
        } else if self.erases {
            features |= DISCARD | WRITE_ZEROES;
        }
        features
    }

    /// `struct virtio_blk_config`.
    pub fn config(&self) -> [u8; CONFIG] {
        let mut config = [0; CONFIG];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.bytes / SECTOR).to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &self.block.to_le_bytes());
        // Write-back: what is not flushed may be lost.
        put(32, &[1]);
        put(34, &self.queues.to_le_bytes());
        // Discards: sectors, segments, alignment. Zeroes: sectors, segments, whether they may give back.
        let alignment = self.block / SECTOR as u32;
        for (at, number) in [
            (36, ERASE_MAX),
            (40, 1),
            (44, alignment),
            (48, ERASE_MAX),
            (52, 1),
        ] {
            put(at, &u32::to_le_bytes(number));
        }
        put(56, &[1]);
        config
    }

    /// Whether an image of so many bytes can be this disk.
    pub(crate) fn check(&self, image_bytes: u64) -> Result<(), String> {
        if self.block != SECTOR as u32 && self.block != 4096 {
            return Err(format!(
                "blocks of {} bytes are neither 512 nor 4096",
                self.block
            ));
        }
        if self.bytes == 0 || !self.bytes.is_multiple_of(self.block.into()) {
            let (bytes, block) = (self.bytes, self.block);
            return Err(format!("its {bytes} bytes are not whole blocks of {block}"));
        }
        if self.bytes > image_bytes {
            let bytes = self.bytes;
            return Err(format!(
                "it has {bytes} bytes, its image only {image_bytes}"
            ));
        }
        if self.queues == 0 || self.queues > crate::QUEUES_MAX {
            return Err(format!(
                "{} queues are not from 1 to {}",
                self.queues,
                crate::QUEUES_MAX
            ));
        }
        if self.serial.len() > SERIAL_MAX {
            return Err(format!(
                "its serial number is longer than {SERIAL_MAX} bytes"
            ));
        }
        Ok(())
    }

    /// Whether the disk has these bytes, in whole blocks.
    fn holds(&self, range: &Range<u64>) -> bool {
        let block = u64::from(self.block);
        range.start <= range.end
            && range.end <= self.bytes
            && range.start.is_multiple_of(block)
            && range.end.is_multiple_of(block)
    }
}

/// A request of a driver's.
#[derive(Debug)]
pub struct Asked {
    /// Where its status goes: the guest-physical address of a byte.
    pub status: u64,
    /// Bytes of its buffers that are written if it ends well.
    pub reads: u32,
    /// What is to be done, or its answer, if there is nothing to be done.
    pub work: Result<(Work, Data), Status>,
}

/// Understands a chain. An error means that there is nowhere to put an answer.
pub fn understand(
    chain: &[Descriptor],
    memory: &DeviceMemory,
    ram: &Arc<RamFile>,
    geometry: &Geometry,
) -> Result<Asked, Error> {
    let split = chain.iter().position(|descriptor| descriptor.writable);
    let (readable, writable) = chain.split_at(split.unwrap_or(chain.len()));
    let mut from = Pieces::new(readable)?;
    let mut to = Pieces::new(writable)?;
    let status = to
        .cut_last_byte()
        .ok_or_else(|| Error::guest("a request without a status"))?;
    let failed = Asked {
        status,
        reads: 0,
        work: Err(Status::Failed),
    };
    let header = match from.cut_first::<HEADER>(memory)? {
        Some(header) if chain.len() <= CHAIN_MAX => header,
        _ => return Ok(failed),
    };
    let request = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let mut sector = [0; 8];
    sector.copy_from_slice(&header[8..]);
    let asks = Asks {
        sector: u64::from_le_bytes(sector),
        from,
        to,
        memory,
        ram,
        geometry,
    };
    let writable = asks.to.bytes;
    let work = match request {
        READ => asks.read(),
        WRITE => asks.write(),
        FLUSH => Ok((Work::Flush, Data::None)),
        GET_ID => asks.serial(),
        DISCARD | WRITE_ZEROES => asks.erase(request),
        _ => Err(Status::Unsupported),
    };
    Ok(Asked {
        status,
        reads: match request {
            READ => writable,
            GET_ID => writable.min(SERIAL_MAX as u32),
            _ => 0,
        },
        work,
    })
}

/// A request with its parts.
struct Asks<'a> {
    sector: u64,
    from: Pieces,
    to: Pieces,
    memory: &'a DeviceMemory,
    ram: &'a Arc<RamFile>,
    geometry: &'a Geometry,
}

impl Asks<'_> {
    /// Where data are read or written.
    fn data_range(&self, bytes: u32) -> Result<Range<u64>, Status> {
        match bytes > DATA_MAX {
            true => Err(Status::Failed),
            false => self.range(bytes),
        }
    }

    fn range(&self, bytes: u32) -> Result<Range<u64>, Status> {
        let start = self.sector.checked_mul(SECTOR).ok_or(Status::Failed)?;
        let end = start.checked_add(bytes.into()).ok_or(Status::Failed)?;
        let range = start..end;
        match bytes > 0 && self.geometry.holds(&range) {
            true => Ok(range),
            false => Err(Status::Failed),
        }
    }

    fn read(self) -> Result<(Work, Data), Status> {
        let range = self.data_range(self.to.bytes)?;
        let mut data = DeviceWritable::new(self.ram);
        for (address, len) in self.to.all() {
            let pushed = data.push(self.memory, address, len);
            pushed.map_err(|_| Status::Failed)?;
        }
        Ok((Work::Read(range), Data::ToGuest(data)))
    }

    fn write(self) -> Result<(Work, Data), Status> {
        let range = self.data_range(self.from.bytes)?;
        if self.geometry.read_only {
            return Err(Status::Failed);
        }
        let mut data = DeviceReadable::new(self.ram);
        for (address, len) in self.from.all() {
            let pushed = data.push(self.memory, address, len);
            pushed.map_err(|_| Status::Failed)?;
        }
        Ok((Work::Write(range), Data::FromGuest(data)))
    }

    /// The serial number, ended by a zero where there is room.
    fn serial(self) -> Result<(Work, Data), Status> {
        let mut serial = [0; SERIAL_MAX];
        let text = self.geometry.serial.as_bytes();
        let len = text.len().min(SERIAL_MAX);
        serial[..len].copy_from_slice(&text[..len]);
        let mut left = &serial[..];
        for (address, len) in self.to.all() {
            let (now, later) = left.split_at(len.min(left.len()));
            let written = self.memory.write_slice(now, GuestAddress(address));
            written.map_err(|_| Status::Failed)?;
            left = later;
        }
        Err(Status::Ok)
    }

    /// One segment: sector, count of sectors, flags.
    fn erase(mut self, request: u32) -> Result<(Work, Data), Status> {
        let geometry = self.geometry;
        if geometry.read_only || !geometry.erases {
            return Err(Status::Unsupported);
        }
        if self.from.bytes as usize != ERASE_SEGMENT {
            return Err(Status::Failed);
        }
        let segment = self.from.cut_first::<ERASE_SEGMENT>(self.memory);
        let segment = segment.ok().flatten().ok_or(Status::Failed)?;
        let word = |at: usize| {
            u32::from_le_bytes([
                segment[at],
                segment[at + 1],
                segment[at + 2],
                segment[at + 3],
            ])
        };
        self.sector = u64::from(word(0)) | u64::from(word(4)) << 32;
        let (count, flags) = (word(8), word(12));
        if count > ERASE_MAX {
            return Err(Status::Failed);
        }
        let range = self.range(count.saturating_mul(SECTOR as u32))?;
        match (request, flags) {
            (DISCARD, 0) => Ok((Work::Discard(range), Data::None)),
            (WRITE_ZEROES, 0 | 1) => {
                let unmap = flags == 1;
                Ok((Work::WriteZeroes { range, unmap }, Data::None))
            }
            _ => Err(Status::Unsupported),
        }
    }
}

/// Buffers one after the other, as if they were one; a driver may cut them where it likes.
struct Pieces {
    pieces: Vec<(u64, u32)>,
    bytes: u32,
}

impl Pieces {
    fn new(descriptors: &[Descriptor]) -> Result<Self, Error> {
        let mut bytes = 0u32;
        for descriptor in descriptors {
            let sum = bytes.checked_add(descriptor.len);
            bytes = sum.ok_or_else(|| Error::guest("a request of more than 4 GiB"))?;
        }
        let pieces = descriptors.iter().map(|one| (one.address, one.len));
        Ok(Self {
            pieces: pieces.collect(),
            bytes,
        })
    }

    /// The address of the last byte, which is taken away.
    fn cut_last_byte(&mut self) -> Option<u64> {
        let last = self.pieces.iter_mut().rev().find(|piece| piece.1 > 0)?;
        last.1 -= 1;
        self.bytes -= 1;
        last.0.checked_add(last.1.into())
    }

    /// Reads the first bytes, which are taken away; nothing where the host has no memory left for them.
    fn cut_first<const N: usize>(
        &mut self,
        memory: &DeviceMemory,
    ) -> Result<Option<[u8; N]>, Error> {
        let mut first = [0; N];
        let mut done = 0;
        for piece in &mut self.pieces {
            let count = (piece.1 as usize).min(N - done);
            let part = &mut first[done..done + count];
            match memory.read_slice(part, GuestAddress(piece.0)) {
                Ok(()) => {}
                Err(GuestMemoryError::IOError(_)) => return Ok(None),
                Err(error) => {
                    let reason = format!("a header outside of its memory: {error}");
                    return Err(Error::guest(reason));
                }
            }
            piece.0 = piece.0.saturating_add(count as u64);
            piece.1 -= count as u32;
            done += count;
        }
        self.bytes = self.bytes.saturating_sub(done as u32);
        match done == N {
            true => Ok(Some(first)),
            false => Err(Error::guest("a request without a header")),
        }
    }

    fn all(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let filled = self.pieces.iter().filter(|piece| piece.1 > 0);
        filled.map(|&(address, len)| (address, len as usize))
    }
}
