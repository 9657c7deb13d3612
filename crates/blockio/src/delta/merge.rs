//! Brings what one image of a chain has into another one, so that one of them becomes unnecessary.
//!
//! It may be begun anew at any time, and goes on beside a guest that works with the same chain: whoever reads over the image that gets
//! the content never sees a difference. Only once it has ended, which it does durably, may the other image be left out.
//!
//! Who owns the state: whoever has the lock on all that the chain consists of. Refuses: images of other lengths, and to take the room that is left for
//! disks that are in use.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use godwit_delta::{GRAIN, Grain, Move, moves};
use godwit_types::plant::planted;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Delta, file_of, tables, unusable};
use crate::kept_room::KeptRoom;
use crate::{Buffer, Error};

/// So many bytes are made durable together: whoever waits for the end waits for no more than that.
const SYNC_BYTES: u64 = 64 << 20;

/// How far it is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Merged {
    pub copied: u64,
    pub zeroed: u64,
}

/// What gets the content.
#[derive(Debug)]
pub enum Target<'a> {
    /// A raw image of so many bytes.
    Raw(BorrowedFd<'a>, u64),
    /// A delta of which no process has the states in memory but for reading.
    Delta(&'a mut Delta),
}

/// Copies what `from` has, in order, and makes it durable: all of it, or only where the target has nothing of its own (`lacking`). `goes_on` is asked
/// before each piece of at most 1 MiB. Returns `None` where it said no.
pub fn merge(
    from: &Delta,
    mut into: Target<'_>,
    lacking: bool,
    mut goes_on: impl FnMut(Merged) -> bool,
) -> Result<Option<Merged>, Error> {
    let bytes = match &into {
        Target::Raw(_, bytes) => *bytes,
        Target::Delta(delta) => delta.layout.disk_bytes(),
    };
    if bytes != from.layout.disk_bytes() {
        let why = "the images that are to be merged are of different lengths";
        return Err(unusable(from.image.path(), why));
    }
    let source = file_of(from.image.as_fd()).map_err(|error| from.failed("open", error))?;
    let (mut done, mut unsynced) = (Merged::default(), 0);
    let mut buffer = Buffer::zeroed(godwit_delta::MOVE_MAX as usize);
    let room = KeptRoom::default();
    for one in moves(&from.layout, &from.states) {
        if !goes_on(done) {
            return Ok(None);
        }
        let (range, is_zero) = match one {
            Move::Copy(range) => (range, false),
            Move::Zero(range) => (range, true),
        };
        if range.start / godwit_delta::MOVE_MAX == 1 && planted("merge-forgets-a-piece") {
            continue;
        }
        if !is_zero {
            let piece = buffer
                .bytes_mut()
                .split_at_mut((range.end - range.start) as usize)
                .0;
            let read = source.read_exact_at(piece, from.layout.data_at() + range.start);
            read.map_err(|error| from.failed("read", error))?;
        }
        let bytes = (!is_zero).then(|| buffer.bytes());
        into.take(&range, bytes, (lacking, &room))
            .map_err(|error| from.failed("merge", error))?;
        let bytes = range.end - range.start;
        match is_zero {
            true => done.zeroed += bytes,
            false => done.copied += bytes,
        }
        unsynced += bytes;
        if unsynced >= SYNC_BYTES {
            into.sync().map_err(|error| from.failed("merge", error))?;
            unsynced = 0;
        }
    }
    into.settle().map_err(|error| from.failed("merge", error))?;
    Ok(Some(done))
}

impl Target<'_> {
    /// Takes these bytes of the disk; zeros where there are none.
    fn take(
        &mut self,
        range: &std::ops::Range<u64>,
        bytes: Option<&[u8]>,
        (lacking, room): (bool, &KeptRoom),
    ) -> std::io::Result<()> {
        match self {
            Self::Raw(fd, _) => put((&file_of(*fd)?, room), range.start, range, bytes),
            Self::Delta(delta) => delta.take(range, bytes, (lacking, room)),
        }
    }

    /// Makes what was copied so far durable.
    fn sync(&self) -> std::io::Result<()> {
        match self {
            Self::Raw(fd, _) => file_of(*fd)?.sync_data(),
            Self::Delta(delta) => file_of(delta.image.as_fd())?.sync_data(),
        }
    }

    fn settle(&mut self) -> std::io::Result<()> {
        match self {
            Self::Raw(fd, _) => file_of(*fd)?.sync_data(),
            Self::Delta(delta) => {
                let settled = tables::settle(&delta.image, &delta.layout, &delta.states);
                settled.map_err(|unfinished| unfinished.source)
            }
        }
    }
}

impl Delta {
    fn take(
        &mut self,
        range: &std::ops::Range<u64>,
        bytes: Option<&[u8]>,
        (lacking, room): (bool, &KeptRoom),
    ) -> std::io::Result<()> {
        let file = file_of(self.image.as_fd())?;
        let end = range.end.div_ceil(GRAIN);
        let mut at = range.start / GRAIN;
        while at < end {
            let (state, same) = self.states.run(&(at..end));
            let part = at * GRAIN..(same * GRAIN).min(range.end);
            if !lacking || state == Grain::Absent {
                let inside = (part.start - range.start) as usize..(part.end - range.start) as usize;
                let bytes = bytes.map(|bytes| bytes.get(inside).unwrap_or_default());
                let to = self.layout.data_at() + part.start;
                put((&file, room), to, &part, bytes)?;
                let now = match bytes {
                    Some(_) => Grain::Present,
                    None => Grain::Zero,
                };
                self.states.set(at..same, now);
            }
            at = same;
        }
        Ok(())
    }
}

/// Writes these bytes of the disk at this place of a file, or has none of them there.
fn put(
    (file, room): (&File, &KeptRoom),
    at: u64,
    range: &std::ops::Range<u64>,
    bytes: Option<&[u8]>,
) -> std::io::Result<()> {
    let len = range.end - range.start;
    match bytes {
        Some(bytes) => {
            room.take(file, &(at..at + len))?;
            file.write_all_at(bytes.get(..len as usize).unwrap_or(bytes), at)
        }
        None => Ok(zero(file, &(at..at + len))?),
    }
}

/// As a hole, as zeros that take room, or written, whatever the image can.
fn zero(to: &File, range: &std::ops::Range<u64>) -> Result<(), Errno> {
    let len = range.end - range.start;
    for how in [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE] {
        match rustix::fs::fallocate(to, how | FallocateFlags::KEEP_SIZE, range.start, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            done => return done,
        }
    }
    let zeros = Buffer::zeroed(len.min(godwit_delta::MOVE_MAX) as usize);
    let mut at = range.start;
    while at < range.end {
        let count = (range.end - at).min(zeros.len() as u64);
        let bytes = zeros.bytes().split_at(count as usize).0;
        let written = to.write_all_at(bytes, at);
        written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        at += count;
    }
    Ok(())
}
