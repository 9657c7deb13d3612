//! Brings what one image of a chain has into another one, so that one of them becomes unnecessary.
//!
//! It may be begun anew at any time, and goes on beside a guest that works with the same chain: whoever reads over the image that gets
//! the content never sees a difference. Only once it has ended, which it does durably, may the other image be left out.
//!
//! Who owns the state: whoever has the lock on all that the chain consists of. Refuses: images of other lengths, and to take the room that is left for
//! disks that are in use.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use godwit_delta::{GRAIN, Grain, Move, moves};
use godwit_types::plant::planted;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::movers::{Merged, Movers, range_of};
use super::{Delta, file_of, tables, unusable};
use crate::kept_room::KeptRoom;
use crate::{Buffer, Error};

/// So many bytes are made durable together: whoever waits for the end waits for no more than that.
const SYNC_BYTES: u64 = 64 << 20;

/// What gets the content.
#[derive(Debug)]
pub enum Target<'a> {
    /// A raw image of so many bytes.
    Raw(BorrowedFd<'a>, u64),
    /// A delta of which no process has the states in memory but for reading.
    Delta(&'a mut Delta),
}

/// Copies what `from` has, in order, and makes it durable: all of it, or only where the target has nothing of its own (`lacking`). `goes_on` is asked
/// before each piece of at most 1 MiB, and tells how many pieces may be on their way then, this one among them: at most [`super::AT_ONCE_MAX`], and where it says one, it is
/// done before it is asked again. Returns `None` where it said nothing, once nothing is on its way any more.
pub fn merge(
    from: &Delta,
    into: Target<'_>,
    lacking: bool,
    mut goes_on: impl FnMut(Merged) -> Option<usize>,
) -> Result<Option<Merged>, Error> {
    let bytes = match &into {
        Target::Raw(_, bytes) => *bytes,
        Target::Delta(delta) => delta.layout.disk_bytes(),
    };
    if bytes != from.layout.disk_bytes() {
        let why = "the images that are to be merged are of different lengths";
        return Err(unusable(from.image.path(), why));
    }
    let merge_failed = |error| from.failed("merge", error);
    let source = file_of(from.image.as_fd()).map_err(|error| from.failed("open", error))?;
    let to = file_of(into.fd()).map_err(merge_failed)?;
    let (room, states) = (KeptRoom::default(), Mutex::new(()));
    let work = |one: &Move, buffer: &mut Buffer| {
        let (range, is_zero) = range_of(one);
        let mut bytes = None;
        if !is_zero {
            let piece = buffer.bytes_mut().get_mut(..length(range));
            let piece = piece.unwrap_or_default();
            let read = source.read_exact_at(piece, from.layout.data_at() + range.start);
            read.map_err(|error| from.failed("read", error))?;
            bytes = Some(buffer.bytes());
        }
        let taken = into.take(&to, range, bytes, (lacking, &room, &states));
        taken.map_err(merge_failed)
    };
    let movers = Movers::new(&work);
    let whole = movers.lead(|led| {
        let mut unsynced = 0;
        for one in moves(&from.layout, &from.states) {
            let Some(at_once) = goes_on(led.done()) else {
                return Ok(false);
            };
            let (range, _) = range_of(&one);
            if range.start / godwit_delta::MOVE_MAX == 1 && planted("merge-forgets-a-piece") {
                continue;
            }
            unsynced += range.end - range.start;
            led.take(one, at_once)?;
            if unsynced >= SYNC_BYTES {
                led.wait_for_all()?;
                to.sync_data().map_err(merge_failed)?;
                unsynced = 0;
            }
        }
        led.wait_for_all()?;
        into.settle(&to).map_err(merge_failed)?;
        Ok(true)
    })?;
    Ok(whole.then(|| movers.done()))
}

fn length(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

impl Target<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Raw(fd, _) => *fd,
            Self::Delta(delta) => delta.image.as_fd(),
        }
    }

    /// Takes these bytes of the disk; zeros where there are none.
    fn take(
        &self,
        file: &File,
        range: &Range<u64>,
        bytes: Option<&[u8]>,
        (lacking, room, states): (bool, &KeptRoom, &Mutex<()>),
    ) -> std::io::Result<()> {
        match self {
            Self::Raw(..) => put((file, room), range.start, range, bytes),
            Self::Delta(delta) => delta.take((file, room), range, bytes, (lacking, states)),
        }
    }

    fn settle(&self, file: &File) -> std::io::Result<()> {
        match self {
            Self::Raw(..) => file.sync_data(),
            Self::Delta(delta) => {
                let settled = tables::settle(&delta.image, &delta.layout, &delta.states);
                settled.map_err(|unfinished| unfinished.source)
            }
        }
    }
}

impl Delta {
    /// `states` is held by whoever changes what this delta's states say.
    fn take(
        &self,
        (file, room): (&File, &KeptRoom),
        range: &Range<u64>,
        bytes: Option<&[u8]>,
        (lacking, states): (bool, &Mutex<()>),
    ) -> std::io::Result<()> {
        let end = range.end.div_ceil(GRAIN);
        let mut at = range.start / GRAIN;
        while at < end {
            let (state, same) = self.states.run(&(at..end));
            let part = at * GRAIN..(same * GRAIN).min(range.end);
            if !lacking || state == Grain::Absent {
                let inside = (part.start - range.start) as usize..(part.end - range.start) as usize;
                let bytes = bytes.map(|bytes| bytes.get(inside).unwrap_or_default());
                let to = self.layout.data_at() + part.start;
                put((file, room), to, &part, bytes)?;
                let now = match bytes {
                    Some(_) => Grain::Present,
                    None => Grain::Zero,
                };
                let _one = states.lock().unwrap_or_else(PoisonError::into_inner);
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
    range: &Range<u64>,
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
fn zero(to: &File, range: &Range<u64>) -> Result<(), Errno> {
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
