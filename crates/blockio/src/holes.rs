//! What of a file is data, and what is a hole, as far as its file system tells.
//!
//! Owns nothing; the descriptor's own position moves, which nobody here goes by. Refuses: to take an error of storage for an answer. Storage that cannot tell
//! (a block device, or a file system without holes) has data everywhere.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::filters::REGION;

/// The next part of a range of a file that is no hole; it is not empty.
pub fn next_data(file: impl AsFd, range: Range<u64>) -> io::Result<Option<Range<u64>>> {
    if range.is_empty() {
        return Ok(None);
    }
    let start = match seek(&file, SeekFrom::Data(range.start)) {
        Ok(start) => start,
        // A hole up to its end.
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Some(range)),
        Err(error) => return Err(error.into()),
    };
    if start >= range.end {
        return Ok(None);
    }
    // What was data may have become a hole in between.
    let end = seek(&file, SeekFrom::Hole(start))?.max(start.saturating_add(1));
    Ok(Some(start..end.min(range.end)))
}

/// What of a file of so many bytes is no hole, in whole regions, in order: a region in which there is any data is all data.
pub fn data_in_regions(file: impl AsFd, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    let (mut found, mut at) = (Vec::<Range<u64>>::new(), 0);
    while let Some(data) = next_data(&file, at..bytes)? {
        let whole = data.start / REGION * REGION..data.end.next_multiple_of(REGION).min(bytes);
        at = whole.end;
        match found.last_mut() {
            Some(last) if last.end >= whole.start => last.end = last.end.max(whole.end),
            _ => found.push(whole),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn data_is_found_between_holes_and_within_the_range_alone() {
        const MIB: u64 = 1 << 20;
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(16 * MIB).unwrap();
        file.write_all_at(&[7; 4096], 4 * MIB).unwrap();
        let next = |range: Range<u64>| next_data(&file, range).unwrap();
        let found = next(0..16 * MIB).unwrap();
        assert!(found.start <= 4 * MIB && found.end >= 4 * MIB + 4096);
        assert!(found.end <= 16 * MIB, "{found:?}");
        let within = 4 * MIB + 512..4 * MIB + 1024;
        assert_eq!(next(within.clone()), Some(within));
        assert_eq!(next(0..MIB), None);
        assert_eq!(next(12 * MIB..16 * MIB), None);
        assert_eq!(next(16 * MIB..32 * MIB), None, "it ends before");
        assert_eq!(next(4 * MIB..4 * MIB), None);
    }

    #[test]
    fn what_cannot_tell_has_data_everywhere() {
        let pages = File::open("/proc/version").unwrap();
        assert_eq!(next_data(&pages, 3..9).unwrap(), Some(3..9));
    }
}
