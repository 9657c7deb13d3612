//! A delta that is being filled by several threads, over layers that stay as they are.
//!
//! It is what a disk's top becomes elsewhere while its guest writes to the first one. A write that covers a grain in part which it does not
//! have is filled from below, so that what lies below has to be whole before the first write comes.
//!
//! Who owns the state: [`Arriving`](crate::Arriving), which lets no two threads have one grain at a time. Refuses: layers of another length.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use godwit_delta::{GRAIN, GRAINS_PER_BLOCK, Grain, Layout, States};
use godwit_types::plant::planted;
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::{Errno, retry_on_intr};

use super::{Delta, Words, file_of, tables, unusable};
use crate::kept_room::KeptRoom;
use crate::{Buffer, Error, Image};

/// Most bytes that are written at once.
const AT_ONCE: u64 = 1 << 20;

/// A delta that fills, and what it lies over.
#[derive(Debug)]
pub(crate) struct Filling {
    file: File,
    layout: Layout,
    states: States<Words>,
    /// The next one first.
    lower: Vec<(File, Layout, States<Words>)>,
    /// Below all of them.
    raw: File,
    /// Held by whoever changes states: words are shared by many grains.
    changes: Mutex<()>,
    /// Held by whoever writes tables: whether others do so from now on.
    is_let_go: Mutex<bool>,
}

impl Filling {
    /// Fills this top over deltas, from the lowest to the highest, which lie over a raw image, or over the one to which their disk is linked.
    pub(crate) fn of(top: &Delta, lower: &[Delta], raw: &Image) -> Result<Self, Error> {
        let lowest = lower.first().unwrap_or(top);
        let raw = lowest.begins_as().unwrap_or(raw);
        let bytes = top.layout.disk_bytes();
        let fit = lower.iter().all(|delta| delta.layout.disk_bytes() == bytes);
        if !fit || raw.bytes() != bytes {
            let why = "what lies below it is of another length";
            return Err(unusable(top.image.path(), why));
        }
        let failed = |error| top.failed("open", error);
        let below = lower.iter().rev().map(|delta| {
            let file = file_of(delta.image.as_fd())?;
            Ok((file, delta.layout, delta.states.clone()))
        });
        let below: io::Result<Vec<_>> = below.collect();
        Ok(Self {
            file: file_of(top.image.as_fd()).map_err(failed)?,
            layout: top.layout,
            states: top.states.clone(),
            lower: below.map_err(failed)?,
            raw: file_of(raw.as_fd()).map_err(failed)?,
            changes: Mutex::default(),
            is_let_go: Mutex::default(),
        })
    }

    /// How long the disk is that it becomes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.layout.disk_bytes()
    }

    /// How long its extent is, with all tables.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.layout.file_bytes()
    }

    /// All of the grains that these bytes touch: one thread at a time may have them.
    pub(crate) fn grains_of(range: &Range<u64>) -> Range<u64> {
        range.start / GRAIN * GRAIN..range.end.next_multiple_of(GRAIN)
    }

    /// Writes these bytes of the disk.
    pub(crate) fn write(&self, room: &KeptRoom, at: u64, content: &[u8]) -> io::Result<()> {
        let end = at + content.len() as u64;
        let mut start = at;
        while start < end {
            let stop = end.min((start / AT_ONCE + 1) * AT_ONCE);
            let inside = (start - at) as usize..(stop - at) as usize;
            let piece = content.get(inside).unwrap_or_default();
            self.write_piece(room, start, piece)?;
            start = stop;
        }
        Ok(())
    }

    /// In a buffer of whole grains, where those at both ends have what they had elsewhere.
    fn write_piece(&self, room: &KeptRoom, at: u64, content: &[u8]) -> io::Result<()> {
        let end = at + content.len() as u64;
        let whole = Self::grains_of(&(at..end));
        let mut buffer = Buffer::zeroed((whole.end - whole.start) as usize);
        let last = whole.end - GRAIN;
        let fills = !planted("grain-not-filled");
        if at > whole.start && fills {
            self.read_grain(whole.start, part_of(&mut buffer, 0))?;
        }
        let is_cut = end < whole.end && end < self.disk_bytes();
        if is_cut && fills && (last > whole.start || at == whole.start) {
            self.read_grain(last, part_of(&mut buffer, last - whole.start))?;
        }
        let skip = (at - whole.start) as usize;
        if let Some(to) = buffer.bytes_mut().get_mut(skip..skip + content.len()) {
            to.copy_from_slice(content);
        }
        let place = self.layout.data_at() + whole.start;
        room.take(&self.file, &(place..place + buffer.len() as u64))?;
        room.take(&self.file, &self.tables_of(&whole))?;
        self.file.write_all_at(buffer.bytes(), place)?;
        self.say(&whole, Grain::Present);
        Ok(())
    }

    /// Has these bytes of the disk be zero.
    pub(crate) fn zero(&self, room: &KeptRoom, range: &Range<u64>) -> io::Result<()> {
        let bytes = self.disk_bytes();
        let start = range.start.next_multiple_of(GRAIN);
        let end = match range.end >= bytes {
            true => range.end.next_multiple_of(GRAIN),
            false => range.end / GRAIN * GRAIN,
        };
        if start >= end {
            return self.write_zeros(room, range);
        }
        self.write_zeros(room, &(range.start..start))?;
        self.write_zeros(room, &(end.min(range.end)..range.end))?;
        room.take(&self.file, &self.tables_of(&(start..end)))?;
        // What is there then counts no more: it is no matter whether it can be given back.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let place = self.layout.data_at() + start;
        match fallocate(&self.file, flags, place, end - start) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(error) => return Err(error.into()),
        }
        self.say(&(start..end), Grain::Zero);
        Ok(())
    }

    /// Where it stands that these bytes of the disk are here, or zero, once that is settled.
    fn tables_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let grains = bytes.start / GRAIN..bytes.end.div_ceil(GRAIN);
        let blocks = grains.start / GRAINS_PER_BLOCK..grains.end.div_ceil(GRAINS_PER_BLOCK);
        self.layout.block_at(blocks.start)..self.layout.block_at(blocks.end)
    }

    fn write_zeros(&self, room: &KeptRoom, range: &Range<u64>) -> io::Result<()> {
        match range.end.saturating_sub(range.start) {
            0 => Ok(()),
            len => self.write(room, range.start, &vec![0; len as usize]),
        }
    }

    /// What a grain has now, wherever that is.
    fn read_grain(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let grain = at / GRAIN;
        let own = std::iter::once((&self.file, &self.layout, &self.states));
        let lower = self.lower.iter();
        let lower = lower.map(|(file, layout, states)| (file, layout, states));
        for (file, layout, states) in own.chain(lower) {
            match states.get(grain) {
                Grain::Absent => {}
                Grain::Zero => {
                    to.fill(0);
                    return Ok(());
                }
                Grain::Present => return file.read_exact_at(to, layout.data_at() + at),
            }
        }
        // The last one may be longer than the rest of the disk.
        let left = self.disk_bytes().saturating_sub(at).min(GRAIN) as usize;
        match to.get_mut(..left) {
            Some(to) => self.raw.read_exact_at(to, at),
            None => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn say(&self, bytes: &Range<u64>, state: Grain) {
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let grains = bytes.start / GRAIN..bytes.end.div_ceil(GRAIN);
        // What is said already need not be written again.
        if self.states.run(&grains) != (state, grains.end) {
            self.states.set(grains, state);
        }
    }

    /// Makes durable what was written, and then what says where it is, while others go on writing: what they say after this has begun is not
    /// written, since what it tells of may not be durable.
    pub(crate) fn settle(&self) -> Result<(), Errno> {
        let is_let_go = self.is_let_go.lock();
        let is_let_go = is_let_go.unwrap_or_else(PoisonError::into_inner);
        // The kernel tells once of what it lost: whoever has the states next, or already, calls nothing durable either.
        let lose = |_: &Errno| self.states.words().lose();
        if *is_let_go {
            return retry_on_intr(|| fdatasync(&self.file)).inspect_err(lose);
        }
        // Some at a time: all may be marked of a large disk.
        let mut at = 0;
        loop {
            let said: Vec<_> = {
                let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
                let marked = self.states.marked_from(at, tables::MARKED).into_iter();
                marked
                    .map(|block| (block, self.states.block(block)))
                    .collect()
            };
            let written = tables::settle_said(&self.file, &self.layout, &said);
            let written =
                written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
            written.inspect_err(lose)?;
            let last = said.last().map(|(block, _)| *block);
            let is_all = said.len() < tables::MARKED;
            let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
            for (block, words) in said {
                if self.states.block(block) == words {
                    self.states.unmark(block);
                }
            }
            match last.filter(|_| !is_all) {
                Some(last) => at = last + 1,
                None => return Ok(()),
            }
        }
    }
}

impl Filling {
    /// It becomes a disk's top, which has its states and its tables from now on: nothing of them is written here any more once this has returned.
    pub(crate) fn let_go(&self) {
        let is_let_go = self.is_let_go.lock();
        *is_let_go.unwrap_or_else(PoisonError::into_inner) = true;
    }
}

fn part_of(buffer: &mut Buffer, at: u64) -> &mut [u8] {
    let at = at as usize;
    let part = buffer.bytes_mut().get_mut(at..at + GRAIN as usize);
    part.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::{NewDelta, Opening, Outliving, create};
    use crate::{Access, Arriving};
    use godwit_delta::{Id, Parent};
    use std::path::Path;
    use std::time::Duration;

    const BYTES: u64 = (1 << 20) + 512;

    /// A raw image full of ones, and a directory for what lies over it.
    fn below_all() -> (tempfile::TempDir, Image) {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = directory.path().join("raw");
        std::fs::write(&at, vec![1; BYTES as usize]).unwrap();
        let raw = Image::open(&at, Access::ReadOnly, 512).unwrap();
        (directory, raw)
    }

    fn opening(name: &str) -> Opening<'_> {
        Opening {
            block_bytes: 512,
            name,
            patience: Duration::ZERO,
        }
    }

    fn delta(directory: &Path, name: &str, number: u8) -> Delta {
        let descriptor = directory.join(format!("{name}.vmdk"));
        let parent = Parent {
            cid: 7,
            hint: "below.vmdk".to_owned(),
        };
        let new = NewDelta {
            descriptor: &descriptor,
            bytes: BYTES,
            id: Id([number; 16]),
            parent: &parent,
        };
        create(&new).unwrap();
        let map = directory.join(format!("{name}.states"));
        open_top(directory, name, number, (&map, Id([9; 16])))
    }

    fn open_top(directory: &Path, name: &str, number: u8, (map, boot): (&Path, Id)) -> Delta {
        let path = directory.join(format!("{name}-sesparse.vmdk"));
        let mut options = File::options();
        let file = options.read(true).write(true).open(&path).unwrap();
        let outliving = Outliving {
            map,
            boot,
            no_guest_lives: true,
        };
        let id = Id([number; 16]);
        Delta::top_of((file, &path), id, opening(name), outliving).unwrap()
    }

    fn read(filling: &Filling, at: u64) -> Vec<u8> {
        let mut buffer = Buffer::zeroed(GRAIN as usize);
        filling
            .read_grain(at / GRAIN * GRAIN, buffer.bytes_mut())
            .unwrap();
        buffer.bytes()[(at % GRAIN) as usize..].to_vec()
    }

    #[test]
    fn what_covers_a_grain_in_part_is_filled_from_below_and_zeros_hide_what_is_there() {
        let (directory, raw) = below_all();
        let (lower, top) = (
            delta(directory.path(), "lower", 1),
            delta(directory.path(), "top", 2),
        );
        let none = KeptRoom::default();
        let below = Filling::of(&lower, &[], &raw).unwrap();
        below.write(&none, GRAIN, &[2; GRAIN as usize]).unwrap();
        below.zero(&none, &(2 * GRAIN..3 * GRAIN)).unwrap();
        let filling = Filling::of(&top, std::slice::from_ref(&lower), &raw).unwrap();
        for (grain, was) in [(0, 1), (1, 2), (2, 0)] {
            let start = grain * GRAIN;
            filling.write(&none, start + 512, &[5; 512]).unwrap();
            let found = read(&filling, start);
            assert_eq!(
                (found[0], found[512], found[1024]),
                (was, 5, was),
                "{grain}"
            );
        }
        // The disk ends within a grain.
        filling.write(&none, BYTES - 512, &[6; 512]).unwrap();
        assert_eq!(read(&filling, BYTES - 512)[0], 6);
        filling.zero(&none, &(512..BYTES)).unwrap();
        assert_eq!((read(&filling, 0)[0], read(&filling, 512)[0]), (1, 0));
        assert_eq!(read(&filling, BYTES - 512)[0], 0);
        assert_eq!(top.states().get(0), Grain::Present);
        assert_eq!(top.states().get(1), Grain::Zero);
    }

    #[test]
    fn what_was_let_go_has_its_tables_written_by_nobody_else() {
        let (directory, raw) = below_all();
        let top = delta(directory.path(), "top", 2);
        let arriving = Arriving::over(&top, &[], &raw).unwrap();
        let content = [3; GRAIN as usize];
        arriving.apply(1, 1, &(0..GRAIN), Some(&content)).unwrap();
        arriving.let_go();
        arriving.sync().unwrap();
        assert_eq!(top.states().marked(), [0_u64]);
    }

    #[test]
    fn what_is_made_durable_is_said_by_the_tables_alone() {
        let (directory, raw) = below_all();
        let top = delta(directory.path(), "top", 2);
        let arriving = Arriving::over(&top, &[], &raw).unwrap();
        assert_eq!(arriving.bytes(), BYTES);
        arriving.apply(1, 1, &(512..1024), Some(&[3; 512])).unwrap();
        arriving.sync().unwrap();
        arriving.apply(2, 1, &(0..512), Some(&[4; 512])).unwrap();
        arriving.must_be_whole().unwrap();
        assert!(top.states().marked().is_empty());
        drop((arriving, top));
        std::fs::remove_file(directory.path().join("top.states")).unwrap();
        let map = directory.path().join("again.states");
        let top = open_top(directory.path(), "top", 2, (&map, Id([8; 16])));
        let again = Filling::of(&top, &[], &raw).unwrap();
        let found = read(&again, 0);
        assert_eq!((found[0], found[512], found[1024]), (4, 3, 1));
    }
}
