//! Brings what one image of a chain has into another one, so that one of them becomes unnecessary.
//!
//! It may be begun anew at any time, and goes on beside a guest that works with the same chain: whoever reads over the image that gets
//! the content never sees a difference. Only once it has ended, which it does durably, may the other image be left out.
//!
//! Who owns the state: whoever has the lock on all that the chain consists of. Refuses: images of other lengths.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use godwit_delta::{GRAIN, Grain, Move, moves};

use super::consolidate::zero;
use super::{Delta, file_of, tables, unusable};
use crate::{Buffer, Error};

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
    let mut done = Merged::default();
    let mut buffer = Buffer::zeroed(godwit_delta::MOVE_MAX as usize);
    for one in moves(&from.layout, &from.states) {
        if !goes_on(done) {
            return Ok(None);
        }
        let (range, is_zero) = match one {
            Move::Copy(range) => (range, false),
            Move::Zero(range) => (range, true),
        };
        if !is_zero {
            let piece = buffer
                .bytes_mut()
                .split_at_mut((range.end - range.start) as usize)
                .0;
            let read = source.read_exact_at(piece, from.layout.data_at() + range.start);
            read.map_err(|error| from.failed("read", error))?;
        }
        into.take(&range, (!is_zero).then(|| buffer.bytes()), lacking)
            .map_err(|error| from.failed("merge", error))?;
        match is_zero {
            true => done.zeroed += range.end - range.start,
            false => done.copied += range.end - range.start,
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
        lacking: bool,
    ) -> std::io::Result<()> {
        match self {
            Self::Raw(fd, _) => put(&file_of(*fd)?, range.start, range, bytes),
            Self::Delta(delta) => delta.take(range, bytes, lacking),
        }
    }

    fn settle(&mut self) -> std::io::Result<()> {
        match self {
            Self::Raw(fd, _) => file_of(*fd)?.sync_data(),
            Self::Delta(delta) => tables::settle(&delta.image, &delta.layout, &delta.states),
        }
    }
}

impl Delta {
    fn take(
        &mut self,
        range: &std::ops::Range<u64>,
        bytes: Option<&[u8]>,
        lacking: bool,
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
                put(&file, self.layout.data_at() + part.start, &part, bytes)?;
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
    file: &File,
    at: u64,
    range: &std::ops::Range<u64>,
    bytes: Option<&[u8]>,
) -> std::io::Result<()> {
    let len = range.end - range.start;
    match bytes {
        Some(bytes) => file.write_all_at(bytes.get(..len as usize).unwrap_or(bytes), at),
        None => Ok(zero(file, &(at..at + len))?),
    }
}
