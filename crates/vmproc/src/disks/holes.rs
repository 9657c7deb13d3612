//! Where an image holds nothing, so that nothing is copied of it there.
//!
//! Owns nothing. Refuses: to look at another file than the one that a disk has, and to call a hole what cannot be looked at.

use super::moving::open_disk_image;
use godwit_blockio::filters::REGION;
use godwit_types::vm::DiskSpec;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;

/// Where a disk's image holds nothing, in whole regions: what is less is copied all the same.
pub(super) fn holes(
    spec: &DiskSpec,
    image: (u64, u64),
    bytes: u64,
) -> Result<Vec<Range<u64>>, String> {
    let file = open_disk_image(spec, image)?;
    holes_in(&file, bytes).map_err(|error| format!("{}: {error}", spec.path))
}

/// The same of a file that is open, which is so long.
pub(super) fn holes_in(file: &File, bytes: u64) -> Result<Vec<Range<u64>>, Errno> {
    let (mut holes, mut at) = (Vec::new(), 0);
    while at < bytes {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(bytes),
            Err(Errno::NXIO) => bytes,
            Err(error) => return Err(error),
        };
        // A region in which there is any data is no hole, so the next look is at the one after it.
        let end = if data < bytes {
            data - data % REGION
        } else {
            bytes
        };
        if end > at {
            holes.push(at..end);
        }
        at = end.saturating_add(REGION);
    }
    Ok(holes)
}

/// What of so many bytes is not among these, which are in order.
pub(super) fn but(holes: &[Range<u64>], bytes: u64) -> Vec<Range<u64>> {
    let (mut data, mut at) = (Vec::new(), 0);
    let end = bytes..bytes;
    for hole in holes.iter().chain([&end]) {
        if hole.start > at {
            data.push(at..hole.start);
        }
        at = hole.end;
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn what_is_no_hole_is_copied() {
        assert_eq!(but(&[], 9), std::iter::once(0..9).collect::<Vec<_>>());
        assert_eq!(but(&[0..3, 5..6], 9), [3..5, 6..9]);
        assert_eq!(but(&[2..4, 7..9], 9), [0..2, 4..7]);
        assert!(but(&[0..4, 4..9], 9).is_empty());
    }

    #[test]
    fn a_hole_is_whole_regions_without_data() {
        let bytes = 4 * REGION + 4096;
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(&[7; 4096], 2 * REGION + 8192).unwrap();
        let found = holes_in(&file, bytes).unwrap();
        assert_eq!(found, [0..2 * REGION, 3 * REGION..bytes]);
    }
}
