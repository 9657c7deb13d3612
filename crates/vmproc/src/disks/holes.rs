//! Where a disk's image holds nothing, and how the copying of a disk begins, which leaves that out.
//!
//! Owns nothing. Refuses: to look at another file than the one that the guest has.

use godwit_blockio::filters::{Course, REGION};
use godwit_qemu::disk::{identity_of_open, open_to_look};
use godwit_types::datastore::is_device_path;
use godwit_types::vm::DiskSpec;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
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

/// Where a disk's image holds nothing, in whole regions: what is less is copied all the same.
pub(super) fn holes(
    spec: &DiskSpec,
    image: (u64, u64),
    bytes: u64,
) -> Result<Vec<Range<u64>>, String> {
    let file = open_disk_image(spec, image)?;
    let told = |error: Errno| format!("{}: {error}", spec.path);
    let (mut holes, mut at) = (Vec::new(), 0);
    while at < bytes {
        let data = match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(bytes),
            Err(Errno::NXIO) => bytes,
            Err(error) => return Err(told(error)),
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

/// Lets the copying of a disk begin: what is a hole is not copied; all is where that cannot be looked at. Returns the bytes
/// that are to be copied.
pub(super) fn begin_copying(
    (spec, image): (&DiskSpec, (u64, u64)),
    bytes: u64,
    course: &Course,
) -> u64 {
    let holes = holes(spec, image, bytes).unwrap_or_else(|error| {
        tracing::warn!(
            disk = spec.name,
            error,
            "all of a disk is copied, since its holes are not known"
        );
        Vec::new()
    });
    begin_copying_but(holes, bytes, course)
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
