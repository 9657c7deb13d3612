//! What of a disk is to be copied, and the beginning of that.
//!
//! Owns nothing: where a copying is stands in its [`Course`]. Refuses: to look at another file than the one that a disk has. What cannot be looked at is
//! copied wholly.

use godwit_blockio::data_in_regions;
use godwit_blockio::filters::Course;
use godwit_qemu::disk::{identity_of_open, open_to_look};
use godwit_types::datastore::is_device_path;
use godwit_types::vm::DiskSpec;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// The image of a disk, to look at.
pub(super) fn open_disk_image(spec: &DiskSpec, image: (u64, u64)) -> Result<File, String> {
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", spec.path);
    // A volume is named by a link to its device.
    let device = is_device_path(&spec.path).then(|| Path::new(&spec.path).canonicalize());
    let device = device.transpose().map_err(|error| told(&error))?;
    let path = device.as_deref().unwrap_or(Path::new(&spec.path));
    let file = open_to_look(path).map_err(|error| told(&error))?;
    let found = identity_of_open(&file).map_err(|error| told(&error))?;
    match found == image {
        true => Ok(file),
        false => Err(told(&"it is another file than the guest's")),
    }
}

/// Where a disk's image certainly holds nothing, in whole regions; nowhere where it cannot be looked at.
pub(super) fn holes(spec: &DiskSpec, image: (u64, u64), bytes: u64) -> Vec<Range<u64>> {
    let opened = open_disk_image(spec, image);
    let told = |error: io::Error| format!("{}: {error}", spec.path);
    known(
        spec,
        opened.and_then(|file| found_holes(&file, bytes).map_err(told)),
    )
}

/// The same of a file that is open, which is so long, and of which the disk is to be copied.
pub(super) fn holes_in(spec: &DiskSpec, file: &File, bytes: u64) -> Vec<Range<u64>> {
    known(
        spec,
        found_holes(file, bytes).map_err(|error| error.to_string()),
    )
}

fn known(spec: &DiskSpec, found: Result<Vec<Range<u64>>, String>) -> Vec<Range<u64>> {
    found.unwrap_or_else(|error| {
        tracing::warn!(
            disk = spec.name,
            error,
            "all of a disk is copied, since its holes are not known"
        );
        Vec::new()
    })
}

/// Where a file holds nothing, in whole regions: what is less is copied all the same.
fn found_holes(file: &File, bytes: u64) -> io::Result<Vec<Range<u64>>> {
    Ok(but(&data_in_regions(file, bytes)?, bytes))
}

/// What of so many bytes is not among these, which are in order: of holes the data, and of data the holes.
pub(super) fn but(these: &[Range<u64>], bytes: u64) -> Vec<Range<u64>> {
    let (mut others, mut at) = (Vec::new(), 0);
    let end = bytes..bytes;
    for one in these.iter().chain([&end]) {
        if one.start > at {
            others.push(at..one.start);
        }
        at = one.end;
    }
    others
}

/// Lets the copying of a disk begin: what is a hole is not copied; all is where that cannot be looked at. Returns the bytes
/// that are to be copied.
pub(super) fn begin_copying(
    (spec, image): (&DiskSpec, (u64, u64)),
    bytes: u64,
    course: &Course,
) -> u64 {
    begin_copying_but(holes(spec, image, bytes), bytes, course)
}

/// The same of all of it.
pub(super) fn begin_copying_all(bytes: u64, course: &Course) -> u64 {
    begin_copying_but(Vec::new(), bytes, course)
}

/// The same of what is in none of these places.
pub(super) fn begin_copying_but(holes: Vec<Range<u64>>, bytes: u64, course: &Course) -> u64 {
    let empty: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
    course.begin(holes);
    bytes.saturating_sub(empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_blockio::filters::REGION;
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
        let found = found_holes(&file, bytes).unwrap();
        assert_eq!(found, [0..2 * REGION, 3 * REGION..bytes]);
    }
}
