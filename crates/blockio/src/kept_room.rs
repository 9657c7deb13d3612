//! The room that an image which is being filled leaves to disks that are in use on the same file system.
//!
//! A disk that has no room pauses its guest in the end; an image that arrives can come another time. Several may arrive together, each of which would
//! have had room alone. Owns how much was written since the last look. Refuses to fill a file system to its end.

use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_types::vm::room_for_images;
use rustix::fs::{SeekFrom, fstatvfs, seek};

/// It is looked at again once this part of the room has been written,
const LOOK_PART: u64 = 4;
/// and so many bytes, which is neither too often nor too late where others write as much.
const LOOK_BYTES: RangeInclusive<u64> = 1 << 20..=64 << 20;

/// How much may be written before the file system is looked at again.
#[derive(Debug, Default)]
pub(crate) struct KeptRoom(AtomicU64);

impl KeptRoom {
    /// These bytes of this file are to be written.
    pub(crate) fn take(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        self.take_beside(file, range, 0)
    }

    /// The same beside so many bytes that are being written, of which nobody knows whether they have their room yet.
    pub(crate) fn take_beside(
        &self,
        file: &File,
        range: &Range<u64>,
        under_way: u64,
    ) -> io::Result<()> {
        let bytes = range.end - range.start;
        let took = |left: u64| left.checked_sub(bytes);
        let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
        if self.0.fetch_update(set, get, took).is_ok() {
            return Ok(());
        }
        // A device has no room but its own.
        if !file.metadata()?.is_file() {
            self.0.store(u64::MAX, set);
            return Ok(());
        }
        let found = fstatvfs(file)?;
        let of = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        let free = of(found.f_bavail);
        let room = room_for_images(of(found.f_blocks), free).saturating_sub(under_way);
        if room < bytes && !is_there(file, range) {
            let why = format!(
                "its file system has {} MiB left, which are for disks that are in use: make room there",
                free >> 20
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        // Where there is no room each write is looked at.
        let next = match room < bytes {
            true => 0,
            false => (room / LOOK_PART).clamp(*LOOK_BYTES.start(), *LOOK_BYTES.end()),
        };
        self.0.store(next, set);
        Ok(())
    }
}

/// Whether these bytes have their place in the file system, so that writing them takes none.
fn is_there(file: &File, range: &Range<u64>) -> bool {
    let is_data = seek(file, SeekFrom::Data(range.start)).is_ok_and(|at| at == range.start);
    is_data && seek(file, SeekFrom::Hole(range.start)).is_ok_and(|at| at >= range.end)
}
