//! Brings what one image of a chain has into another one, so that one of them becomes unnecessary.
//!
//! It may be begun anew at any time, and goes on beside a guest that works with the same chain: whoever reads over the image that gets
//! the content never sees a difference. Only once it has ended, which it does durably, may the other image be left out.
//!
//! Many pieces may be on their way at once, in no order of their own: no two of them have a byte in common, each is written only once it was read, and
//! the states of a delta say of a grain what it is only once it is so. Whatever it comes to, nothing is on its way any more at its end.
//!
//! Who owns the state: whoever has the lock on all that the chain consists of. Refuses: images of other lengths, and to take the room that is left for
//! disks that are in use.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use godwit_delta::{GRAIN, Grain, MOVE_MAX, moves};
use godwit_types::plant::planted;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::movers::{Merged, Movers};
use super::pieces::{Piece, pieces};
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

/// Copies what `from` has and makes it durable: all of it, or only where the target has nothing of its own (`lacking`). `goes_on` is asked
/// before each piece of at most 1 MiB, and tells how many pieces may be on their way then, this one among them: at most [`super::AT_ONCE_MAX`]. Where it says one, that is
/// done before it is asked again; where it says zero, it is asked again once none is on its way. Returns `None` where it said nothing.
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
    let to = To {
        file: file_of(into.fd()).map_err(merge_failed)?,
        into,
        lacking,
        room: KeptRoom::default(),
        writing: AtomicU64::new(0),
        scarce: RwLock::new(()),
        states: Mutex::new(()),
    };
    let work = |piece: &Piece| bring((from, &source), piece, &to);
    let movers = Movers::new(&work);
    let whole = movers.lead(|led| {
        let mut unsynced = 0;
        for piece in pieces(moves(&from.layout, &from.states)) {
            let at_once = loop {
                match goes_on(led.done()) {
                    None => return Ok(false),
                    Some(0) if led.is_busy() => led.wait_for_all()?,
                    Some(at_once) => break at_once,
                }
            };
            if piece.span().start / MOVE_MAX == 1 && planted("merge-forgets-a-piece") {
                continue;
            }
            unsynced += piece.bytes();
            led.take(piece, at_once)?;
            if unsynced >= SYNC_BYTES {
                led.wait_for_all()?;
                to.file.sync_data().map_err(merge_failed)?;
                unsynced = 0;
            }
        }
        led.wait_for_all()?;
        to.settle().map_err(merge_failed)?;
        Ok(true)
    })?;
    Ok(whole.then(|| movers.done()))
}

/// Brings a piece of what `from` has, whose file this is.
fn bring((from, source): (&Delta, &File), piece: &Piece, to: &To<'_>) -> Result<(), Error> {
    let merge_failed = |error| from.failed("merge", error);
    let parts = to.wanted(piece);
    let ends = parts.first().zip(parts.last());
    let Some((start, end)) = ends.map(|(first, last)| (first.start, last.end)) else {
        return Ok(());
    };
    if piece.is_zero {
        let mut parts = parts.iter();
        let zeroed = parts.try_for_each(|part| to.take(part, None));
        return zeroed.map_err(merge_failed);
    }
    let mut buffer = Buffer::zeroed((end - start) as usize);
    let read = source.read_exact_at(buffer.bytes_mut(), from.layout.data_at() + start);
    read.map_err(|error| from.failed("read", error))?;
    let taken = parts.iter().try_for_each(|part| {
        let inside = (part.start - start) as usize..(part.end - start) as usize;
        let bytes = buffer.bytes().get(inside);
        to.take(part, Some(bytes.ok_or(io::ErrorKind::UnexpectedEof)?))
    });
    taken.map_err(merge_failed)
}

impl Target<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Raw(fd, _) => *fd,
            Self::Delta(delta) => delta.image.as_fd(),
        }
    }
}

/// What gets the content, from several threads at once.
struct To<'a> {
    into: Target<'a>,
    file: File,
    lacking: bool,
    room: KeptRoom,
    /// Bytes that are being written, or are about to be.
    writing: AtomicU64,
    /// Held by all that write, and by one alone where nobody knows whether there is room for several.
    scarce: RwLock<()>,
    /// Held by whoever changes what the states of a delta say.
    states: Mutex<()>,
}

impl To<'_> {
    /// What of a piece it is to get, in order.
    fn wanted(&self, piece: &Piece) -> Vec<Range<u64>> {
        let Target::Delta(delta) = &self.into else {
            return piece.parts.clone();
        };
        if !self.lacking {
            return piece.parts.clone();
        }
        let mut lacks = Vec::new();
        for part in &piece.parts {
            let (mut at, end) = (part.start / GRAIN, part.end.div_ceil(GRAIN));
            while at < end {
                let (state, same) = delta.states.run(&(at..end));
                if state == Grain::Absent {
                    lacks.push(at * GRAIN..(same * GRAIN).min(part.end));
                }
                at = same;
            }
        }
        lacks
    }

    /// Takes these bytes of the disk; zeros where there are none.
    fn take(&self, part: &Range<u64>, bytes: Option<&[u8]>) -> io::Result<()> {
        let before = match &self.into {
            Target::Raw(..) => 0,
            Target::Delta(delta) => delta.layout.data_at(),
        };
        let place = before + part.start..before + part.end;
        match bytes {
            Some(bytes) => self.put(&place, bytes)?,
            None => zero(&self.file, &place)?,
        }
        if let Target::Delta(delta) = &self.into {
            let now = match bytes {
                Some(_) => Grain::Present,
                None => Grain::Zero,
            };
            let _one = self.states.lock().unwrap_or_else(PoisonError::into_inner);
            let grains = part.start / GRAIN..part.end.div_ceil(GRAIN);
            delta.states.set(grains, now);
        }
        Ok(())
    }

    /// Where there may be no room beside what others are writing, it is looked again once they have written it.
    fn put(&self, place: &Range<u64>, bytes: &[u8]) -> io::Result<()> {
        let many = self.scarce.read().unwrap_or_else(PoisonError::into_inner);
        let len = bytes.len() as u64;
        let others = self.writing.fetch_add(len, Ordering::SeqCst);
        let done = match self.room.take_beside(&self.file, place, others) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => None,
            took => Some(took.and_then(|()| self.file.write_all_at(bytes, place.start))),
        };
        self.writing.fetch_sub(len, Ordering::SeqCst);
        drop(many);
        if let Some(done) = done {
            return done;
        }
        let _alone = self.scarce.write().unwrap_or_else(PoisonError::into_inner);
        self.room.take(&self.file, place)?;
        self.file.write_all_at(bytes, place.start)
    }

    fn settle(&self) -> io::Result<()> {
        match &self.into {
            Target::Raw(..) => self.file.sync_data(),
            Target::Delta(delta) => {
                let settled = tables::settle(&delta.image, &delta.layout, &delta.states);
                settled.map_err(|unfinished| unfinished.source)
            }
        }
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
    let zeros = Buffer::zeroed(len.min(MOVE_MAX) as usize);
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
