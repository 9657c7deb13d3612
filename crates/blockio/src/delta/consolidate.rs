//! Brings what a frozen delta has into the image below it.
//!
//! It may be begun anew at any time, and goes on beside a guest that reads the same chain: who reads over the delta never sees what of
//! the image below is already new. Only once it has ended, durably, may the delta be left out.
//!
//! Who owns the state: whoever calls it has the image's lock for writing. Refuses: deltas that are not frozen, images of another length.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use godwit_delta::{Move, Use, moves};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::{Delta, file_of, unusable};
use crate::{Buffer, Error, Image};

/// How far it is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Consolidated {
    pub copied: u64,
    pub zeroed: u64,
}

/// Copies what a frozen delta has into the raw image below it, in order, and makes it durable. `goes_on` is asked before each piece, of at most
/// 1 MiB, with what was done so far; it may wait, and says whether to go on. Returns `None` where it said no.
pub fn consolidate(
    delta: &Delta,
    into: &Image,
    mut goes_on: impl FnMut(Consolidated) -> bool,
) -> Result<Option<Consolidated>, Error> {
    let failed = |action, image: &Image, source| Error::Image {
        action,
        path: image.path().to_owned(),
        source,
    };
    if delta.label.in_use != Use::Frozen || into.bytes() != delta.layout.disk_bytes() {
        let why = "only a frozen delta as long as the image below it is brought into that";
        return Err(unusable(delta.image.path(), why));
    }
    let from =
        file_of(delta.image.as_fd()).map_err(|source| failed("open", &delta.image, source))?;
    let to = file_of(into.as_fd()).map_err(|source| failed("open", into, source))?;
    let mut done = Consolidated::default();
    let mut buffer = Buffer::zeroed(godwit_delta::MOVE_MAX as usize);
    for one in moves(&delta.layout, &delta.states) {
        if !goes_on(done) {
            return Ok(None);
        }
        match one {
            Move::Copy(range) => {
                let bytes = buffer
                    .bytes_mut()
                    .split_at_mut((range.end - range.start) as usize)
                    .0;
                let read = from.read_exact_at(bytes, delta.layout.data_at() + range.start);
                read.map_err(|source| failed("read", &delta.image, source))?;
                let written = to.write_all_at(bytes, range.start);
                written.map_err(|source| failed("write", into, source))?;
                done.copied += range.end - range.start;
            }
            Move::Zero(range) => {
                zero(&to, &range).map_err(|error| failed("write", into, error.into()))?;
                done.zeroed += range.end - range.start;
            }
        }
    }
    let synced = to.sync_data();
    synced.map_err(|source| failed("make durable", into, source))?;
    Ok(Some(done))
}

/// As a hole, as zeros that take room, or written, whatever the image can.
pub(super) fn zero(to: &File, range: &std::ops::Range<u64>) -> Result<(), Errno> {
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
