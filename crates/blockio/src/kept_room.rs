//! The room that an image which is being filled leaves to disks that are in use on the same file system.
//!
//! A disk that has no room pauses its guest in the end; an image that arrives can come another time. Several may arrive together, each of which would
//! have had room alone. Owns how much was written since the last look. Refuses to fill a file system to its end.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

use godwit_types::vm::room_for_images;
use rustix::fs::fstatvfs;

/// It is looked at again once this part of the room has been written,
const LOOK_PART: u64 = 4;
/// and so many bytes, which is neither too often nor too late where others write as much.
const LOOK_BYTES: RangeInclusive<u64> = 1 << 20..=64 << 20;

/// How much may be written before the file system is looked at again.
#[derive(Debug, Default)]
pub(crate) struct KeptRoom(AtomicU64);

impl KeptRoom {
    /// So many bytes are to be written to this file.
    pub(crate) fn take(&self, file: &File, bytes: u64) -> io::Result<()> {
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
        let room = room_for_images(of(found.f_blocks), free);
        if room < bytes {
            let why = format!(
                "its file system has {} MiB left, which are for disks that are in use: make room there",
                free >> 20
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, why));
        }
        let next = (room / LOOK_PART).clamp(*LOOK_BYTES.start(), *LOOK_BYTES.end());
        self.0.store(next, set);
        Ok(())
    }
}
