//! An image that is being filled by numbered changes, which come over several channels in any order.
//!
//! Who owns the state: the migration that fills it; several threads carry changes out at the same time. Of two changes of the
//! same bytes the one with the higher number stays, whichever comes first. What it refuses: changes beyond the image's end,
//! a source that has more under way than any has, and to take the last room of a file system.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use godwit_delta::Layout;
use godwit_mirror::{Newest, overlap};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl, opcode};

use crate::delta::{Delta, Filling};
use crate::filters::REGION;
use crate::kept_room::KeptRoom;
use crate::label::{self, Holds, Label};
use crate::{Buffer, Error, Image};

/// Most ranges that are remembered: a source has far fewer changes under way.
const REMEMBERED_MAX: usize = 1 << 18;
/// So many changes are forgotten at a time.
const FORGET_EVERY: u64 = 1024;
/// File systems' blocks are no larger, so that a range can be cloned whose ends are multiples of this, or the image's end.
const BLOCK_MOST: u64 = 64 << 10;
/// Bytes of zero that are written at once where they cannot be punched.
const ZEROS: usize = 1 << 20;

/// An image that fills.
#[derive(Debug)]
pub struct Arriving {
    path: PathBuf,
    /// What its device holds under this name, if it is on one with a label.
    part: Option<String>,
    /// The description that carries the image's lock.
    file: File,
    /// How long the disk is, which a delta that fills is not.
    bytes: u64,
    /// and how long the file is.
    file_bytes: u64,
    how: How,
    memory_alignment: usize,
    kept_room: KeptRoom,
    state: Mutex<State>,
    freed: Condvar,
    syncs: Mutex<Syncs>,
    synced: Condvar,
}

/// How the bytes of a disk lie in files.
#[derive(Debug)]
enum How {
    Raw,
    /// In a delta, which is shorter than its file, over others.
    Over(Filling),
    /// In several files, each of which begins at a multiple of this.
    Files(u64, Vec<(File, u64)>),
}

/// Syncs of the image, one after the other.
#[derive(Debug, Default)]
struct Syncs {
    /// How many have begun,
    begun: u64,
    /// and the number of the last that has ended.
    ended: u64,
    is_running: bool,
    /// Who waits for one that is under way, or for the one behind it.
    waiting: usize,
    /// Why one has failed, once one has.
    failure: Option<String>,
}

/// What came of letting an image have the blocks of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cloned {
    Whole,
    /// Not in parts of a block, as a later change has left them.
    NotThis,
    /// Not at all: the file system cannot, or fails, which copying will tell.
    None,
}

#[derive(Debug, Default)]
struct State {
    newest: Newest,
    below: u64,
    /// Those that are being carried out.
    busy: Vec<Range<u64>>,
}

impl Arriving {
    /// Refuses where the image has another length by now, or lost its name: somebody changed it while it was filled. Why is a
    /// sentence.
    pub fn must_be_whole(&self) -> Result<(), String> {
        let name = self.path.display();
        let own = self.file.metadata();
        let own = own.map_err(|error| format!("{name} cannot be looked at: {error}"))?;
        if own.file_type().is_block_device() {
            return self.device_must_hold_it(own.rdev());
        }
        let named = self.path.symlink_metadata();
        let who = "see who may write into that directory";
        if !named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())) {
            return Err(format!(
                "{name} is not the image any more that was made there: {who}"
            ));
        }
        match own.len() {
            length if length == self.file_bytes => Ok(()),
            length => Err(format!(
                "{name} has {length} bytes by now in place of {}: {who}",
                self.file_bytes
            )),
        }
    }

    /// As [`Self::must_be_whole`], of a device of this number.
    fn device_must_hold_it(&self, number: u64) -> Result<(), String> {
        let name = self.path.display();
        // A device may be named by a link to it.
        let named = self.path.metadata();
        if !named.is_ok_and(|named| named.rdev() == number) {
            return Err(format!(
                "{name} is not the device any more to which the disk came"
            ));
        }
        let told = |error| format!("{name} cannot be looked at: {error}");
        match label::read(self.file.as_fd()).map_err(told)? {
            Some(found) if self.is_it(&found.label) => Ok(()),
            _ => Err(format!(
                "the label of {name} does not say any more what came there: see who may write to that device"
            )),
        }
    }

    fn is_it(&self, label: &Label) -> bool {
        matches!(&label.holds, Holds::Part(name) if self.part.as_ref() == Some(name))
            && label.bytes == self.bytes
    }

    /// Fills this image, whose lock is kept for as long as either lives.
    pub fn of(image: &Image) -> Result<Self, Error> {
        let file = image.as_fd().try_clone_to_owned();
        let file = file.map_err(|source| Error::Image {
            action: "open",
            path: image.path().to_owned(),
            source,
        })?;
        Ok(Self {
            path: image.path().to_owned(),
            part: image.part().map(str::to_owned),
            file: file.into(),
            bytes: image.bytes(),
            file_bytes: image.bytes(),
            how: How::Raw,
            memory_alignment: image.alignment().memory as usize,
            kept_room: KeptRoom::default(),
            state: Mutex::default(),
            freed: Condvar::new(),
            syncs: Mutex::default(),
            synced: Condvar::new(),
        })
    }

    /// Fills this delta, the top of a disk, over deltas, from the lowest to the highest, which lie over a raw image; all of these are whole, and stay
    /// as they are.
    pub fn over(top: &Delta, lower: &[Delta], raw: &Image) -> Result<Self, Error> {
        let over = Filling::of(top, lower, raw)?;
        Ok(Self {
            bytes: over.disk_bytes(),
            file_bytes: over.file_bytes(),
            how: How::Over(over),
            ..Self::of(top.image())?
        })
    }

    /// Fills these files, each of which begins at a multiple of [`stride_of`] the disk: its own image, and what lies over that and below its top.
    pub fn files(own: &Image, over: &[Image]) -> Result<Self, Error> {
        let stride = stride_of(own.bytes());
        let file = |image: &Image| {
            let file = image.as_fd().try_clone_to_owned();
            let file = file.map_err(|source| Error::Image {
                action: "open",
                path: image.path().to_owned(),
                source,
            })?;
            match image.bytes() <= stride {
                true => Ok((File::from(file), image.bytes())),
                false => Err(Error::Unusable {
                    path: image.path().to_owned(),
                    reason: "it is longer than its disk needs".to_owned(),
                }),
            }
        };
        let files = std::iter::once(own).chain(over).map(file);
        let files = files.collect::<Result<Vec<_>, Error>>()?;
        Ok(Self {
            bytes: stride.saturating_mul(files.len() as u64),
            how: How::Files(stride, files),
            ..Self::of(own)?
        })
    }

    /// Nothing comes any more, and it becomes a disk's top, of which the disk alone says what is where.
    pub(crate) fn let_go(&self) {
        if let How::Over(over) = &self.how {
            over.let_go();
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Carries out change `number` of these bytes: with this content, or to zero. Every change before `below` has been
    /// carried out.
    pub fn apply(
        &self,
        number: u64,
        below: u64,
        range: &Range<u64>,
        content: Option<&[u8]>,
    ) -> Result<(), Error> {
        let len = range.end.checked_sub(range.start);
        if content.is_some_and(|content| len != Some(content.len() as u64)) {
            return Err(self.beyond(range));
        }
        let done = self.carry_out(number, below, range, |won| match content {
            Some(content) => {
                let at = (won.start - range.start) as usize;
                let end = at + (won.end - won.start) as usize;
                self.write(won.start, content.get(at..end).unwrap_or_default())
            }
            None => self.zero(won),
        });
        done?.map_err(|source| Error::Image {
            action: "write",
            path: self.path.clone(),
            source,
        })
    }

    /// As [`Self::apply`], with what this file of the same file system has there, whose blocks both have from then on.
    pub(crate) fn clone_from(
        &self,
        number: u64,
        below: u64,
        range: &Range<u64>,
        source: &File,
    ) -> Result<Cloned, Error> {
        let done = self.carry_out(number, below, range, |won| {
            let cloned = clone_range(&self.file, source, won);
            cloned.map_err(|errno| (errno, won.clone()))
        })?;
        let is_part = |won: &Range<u64>| {
            let ends = [won.start, won.end];
            let mut ends = ends.iter().filter(|at| **at != self.bytes);
            ends.any(|at| !at.is_multiple_of(BLOCK_MOST))
        };
        Ok(match done {
            Ok(()) => Cloned::Whole,
            Err((Errno::INVAL, won)) if is_part(&won) => Cloned::NotThis,
            Err(_) => Cloned::None,
        })
    }

    /// Does something with those of the bytes that no later change has changed, one after the other with all that overlap.
    fn carry_out<E>(
        &self,
        number: u64,
        below: u64,
        range: &Range<u64>,
        work: impl FnMut(&Range<u64>) -> Result<(), E>,
    ) -> Result<Result<(), E>, Error> {
        if range.end > self.bytes || range.start > range.end {
            return Err(self.beyond(range));
        }
        // What fills a grain is read and written in one.
        let held = match &self.how {
            How::Over(_) => Filling::grains_of(range),
            How::Raw | How::Files(..) => range.clone(),
        };
        let mut state = self.lock();
        if below >= state.below.saturating_add(FORGET_EVERY) {
            state.below = below;
            state.newest.forget(below);
        }
        while state.busy.iter().any(|busy| overlap(busy, &held)) {
            let waited = self.freed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if state.newest.len() >= REMEMBERED_MAX {
            return Err(self.unusable("the source has too many changes under way".to_owned()));
        }
        let wins = state.newest.admit(number, range.clone());
        state.busy.push(held.clone());
        drop(state);
        let done = wins.iter().try_for_each(work);
        let mut state = self.lock();
        if let Some(at) = state.busy.iter().position(|busy| *busy == held) {
            state.busy.swap_remove(at);
        }
        drop(state);
        self.freed.notify_all();
        Ok(done)
    }

    fn beyond(&self, range: &Range<u64>) -> Error {
        self.unusable(format!(
            "the source changes bytes that it does not have ({range:?})"
        ))
    }

    /// The channels are made anew, and nothing of the old ones comes any more: what is sent again has later numbers.
    pub fn begin_anew(&self) {
        self.lock().newest = Newest::default();
    }

    /// Makes all that was carried out durable. Those who ask while a sync is under way have the next one done for all of them. The
    /// kernel tells of a failure once: every later sync fails, too, whoever has heard of it.
    pub fn sync(&self) -> Result<(), Error> {
        self.sync_by(|file| match &self.how {
            How::Raw => fdatasync(file),
            How::Over(over) => over.settle(),
            How::Files(_, files) => files.iter().try_for_each(|(file, _)| fdatasync(file)),
        })
    }

    fn sync_by(&self, sync: impl FnOnce(&File) -> Result<(), Errno>) -> Result<(), Error> {
        let mut syncs = lock(&self.syncs);
        let wanted = syncs.begun + 1;
        syncs.waiting += 1;
        while syncs.is_running && syncs.ended < wanted {
            let waited = self.synced.wait(syncs);
            syncs = waited.unwrap_or_else(PoisonError::into_inner);
        }
        syncs.waiting -= 1;
        if syncs.failure.is_none() && syncs.ended < wanted {
            syncs.begun += 1;
            let number = syncs.begun;
            syncs.is_running = true;
            drop(syncs);
            let done = sync(&self.file);
            syncs = lock(&self.syncs);
            (syncs.is_running, syncs.ended) = (false, number);
            if let Err(errno) = done {
                let error = self.not_durable(errno);
                syncs.failure = Some(error.to_string());
                self.synced.notify_all();
                return Err(error);
            }
            self.synced.notify_all();
        }
        match &syncs.failure {
            Some(why) => Err(self.unusable(why.clone())),
            None => Ok(()),
        }
    }

    fn not_durable(&self, errno: Errno) -> Error {
        Error::Image {
            action: "make durable",
            path: self.path.clone(),
            source: errno.into(),
        }
    }

    /// Writes these bytes, of which nobody else has a change.
    pub(crate) fn put(&self, at: u64, content: &[u8]) -> Result<(), Error> {
        self.write(at, content).map_err(|source| Error::Image {
            action: "write",
            path: self.path.clone(),
            source,
        })
    }

    /// Has these bytes of a file of the same file system, which both have from then on. Returns whether it could.
    pub(crate) fn share_blocks(&self, range: &Range<u64>, source: &File) -> bool {
        clone_range(&self.file, source, range).is_ok()
    }

    fn write(&self, at: u64, content: &[u8]) -> io::Result<()> {
        if let How::Over(over) = &self.how {
            return over.write(&self.kept_room, at, content);
        }
        let range = at..at.saturating_add(content.len() as u64);
        let (file, range) = self.place_of(&range)?;
        let at = range.start;
        self.kept_room.take(file, &range)?;
        let address = content.as_ptr() as usize;
        if address.is_multiple_of(self.memory_alignment.max(1)) {
            return file.write_all_at(content, at);
        }
        let mut aligned = Buffer::zeroed(content.len());
        aligned.bytes_mut().copy_from_slice(content);
        file.write_all_at(aligned.bytes(), at)
    }

    /// The file in which these bytes are, and where in it. No change goes from one file to another.
    fn place_of(&self, range: &Range<u64>) -> io::Result<(&File, Range<u64>)> {
        let How::Files(stride, files) = &self.how else {
            return Ok((&self.file, range.clone()));
        };
        let index = range.start / *stride;
        let begins = index * *stride;
        let inside = range.start - begins..range.end - begins;
        let found = usize::try_from(index)
            .ok()
            .and_then(|index| files.get(index));
        match found.filter(|(_, bytes)| inside.end <= *bytes) {
            Some((file, _)) => Ok((file, inside)),
            None => Err(io::Error::other("no file of the disk has such bytes")),
        }
    }

    fn zero(&self, range: &Range<u64>) -> io::Result<()> {
        if let How::Over(over) = &self.how {
            return over.zero(&self.kept_room, range);
        }
        let (file, range) = self.place_of(range)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(file, flags, range.start, range.end - range.start) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP) => self.write_zeros(file, &range),
            Err(error) => Err(error.into()),
        }
    }

    fn write_zeros(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        let zeros = Buffer::zeroed(ZEROS);
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ZEROS as u64);
            let piece = zeros.bytes().get(..len as usize).unwrap_or_default();
            self.kept_room.take(file, &(at..at + len))?;
            file.write_all_at(piece, at)?;
            at += len;
        }
        Ok(())
    }

    pub(crate) fn unusable(&self, reason: String) -> Error {
        let path = self.path.clone();
        Error::Unusable { path, reason }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far apart the files begin of which a disk of so many bytes consists.
pub fn stride_of(bytes: u64) -> u64 {
    let longest = Layout::of(bytes).map_or(bytes, |layout| layout.file_bytes());
    longest.max(bytes).max(1).next_multiple_of(REGION)
}

/// As the kernel has it: FICLONERANGE.
#[repr(C)]
struct CloneRange {
    from: i64,
    from_start: u64,
    bytes: u64,
    to_start: u64,
}

/// Lets a file have the same blocks as another one of the same file system, which says whether it can.
fn clone_range(to: &File, from: &File, range: &Range<u64>) -> Result<(), Errno> {
    const CLONE: u32 = opcode::write::<CloneRange>(0x94, 13);
    let cloned = CloneRange {
        from: i64::from(from.as_raw_fd()),
        from_start: range.start,
        bytes: range.end - range.start,
        to_start: range.start,
    };
    // SAFETY: the kernel takes this structure for this number, reads it during the call, and touches no memory of ours.
    unsafe { ioctl(to, Setter::<CLONE, CloneRange>::new(cloned)) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "arriving_tests.rs"]
mod tests;
