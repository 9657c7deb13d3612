//! Images that are a part of a disk with snapshots, or of a linked one, for whoever makes or copies images.
//!
//! Owns nothing. Refuses: to take a part for the whole, and a place where the snapshots of an image that is gone are described.

use godwit_types::snapshots::{LAYERED_BEGUN, LAYERED_MARK, LAYERED_MARK_MAX, description_of};
use rustix::fs::fgetxattr;
use std::fs::File;
use std::path::Path;

/// Where the snapshots are described of an image that is not there.
pub(crate) fn is_described(path: &Path) -> String {
    let described = description_of(path);
    format!(
        "{} describes the snapshots of an image that is not there: put {} back, or move that file away if nobody needs them",
        described.display(),
        path.display()
    )
}

/// What lies over the image of a disk with snapshots would be missing.
pub fn must_be_whole(file: &File, path: &str) -> Result<(), String> {
    let mut mark = [0; LAYERED_MARK_MAX];
    let length = fgetxattr(file, LAYERED_MARK, &mut mark[..]).unwrap_or(0);
    let mark = mark.get(..length).unwrap_or_default();
    let is_part = length > 0 && !mark.ends_with(LAYERED_BEGUN.as_bytes());
    match is_part || description_of(Path::new(path)).symlink_metadata().is_ok() {
        false => Ok(()),
        true => Err(format!(
            "the image {path} is not used: it is a part of a disk with snapshots, and holds what that was before the first of them, or of a linked disk, and holds nothing: delete the snapshots first, and let them be merged ('godwit vm snapshot list'); of a linked disk make a copy while its VM is off (docs/snapshots.md)"
        )),
    }
}
