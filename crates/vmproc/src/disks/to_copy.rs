//! What of a disk is to be copied, and the beginning of that.
//!
//! Owns nothing: where a copying is stands in its [`Course`]. Refuses nothing: what cannot be looked at is copied wholly.

use super::moving::open_disk_image;
use godwit_blockio::filters::{Course, REGION};
use godwit_blockio::next_data;
use godwit_types::vm::DiskSpec;
use std::ops::Range;

/// Where a disk's image certainly holds nothing, in whole regions; nowhere where it cannot be looked at.
pub(super) fn holes(spec: &DiskSpec, image: (u64, u64), bytes: u64) -> Vec<Range<u64>> {
    found_holes(spec, image, bytes).unwrap_or_else(|error| {
        tracing::warn!(
            disk = spec.name,
            error,
            "all of a disk is copied, since its holes are not known"
        );
        Vec::new()
    })
}

/// Where a disk's image holds nothing, in whole regions: what is less is copied all the same.
fn found_holes(spec: &DiskSpec, image: (u64, u64), bytes: u64) -> Result<Vec<Range<u64>>, String> {
    let file = open_disk_image(spec, image)?;
    let (mut holes, mut at) = (Vec::new(), 0);
    while at < bytes {
        let data =
            next_data(&file, at..bytes).map_err(|error| format!("{}: {error}", spec.path))?;
        // A region in which there is any data is no hole, so the next look is at the one after the last of them.
        let (end, next) = data.map_or((bytes, bytes), |data| {
            (
                data.start - data.start % REGION,
                data.end.next_multiple_of(REGION),
            )
        });
        if end > at {
            holes.push(at..end);
        }
        at = next;
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
