//! Images that are a part of a disk with snapshots, or of a linked one, for whoever makes or copies images.
//!
//! Owns nothing. Refuses: to take a part for the whole, and a place where the snapshots of an image that is gone are described.

use godwit_snapshots::{Images, Kind};
use godwit_store::load_json;
use godwit_types::migration::LinkedTo;
use godwit_types::snapshots::{
    LAYERED_BEGUN, LAYERED_MARK, LAYERED_MARK_MAX, description_of, id_of_states_map,
};
use rustix::fs::fgetxattr;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Bytes that all images of a linked disk take, the one to which it is linked among them; nothing of any other disk, as far as that can be told.
pub fn use_of_linked(image: &Path) -> Option<u64> {
    let images: Images = load_json(&description_of(image)).ok()??;
    images.check().ok()?;
    images.common()?;
    let takes = |path: &Path| {
        let found = path.metadata();
        found.map_or(0, |found| found.blocks().saturating_mul(512))
    };
    let each = images.images.iter().map(|(name, one)| match one.kind {
        Kind::Delta => {
            let extent = format!("{name}-sesparse.vmdk");
            let elsewhere = images.elsewhere.get(name).map(Path::new);
            takes(&elsewhere.map_or_else(|| image.with_file_name(&extent), |at| at.join(&extent)))
        }
        // A path, of what is common.
        Kind::Raw => takes(&image.with_file_name(name)),
    });
    Some(each.fold(0, u64::saturating_add))
}

/// What a linked disk begins as whose own image this is; nothing of any other disk, as far as that can be told.
pub fn linked_to(image: &Path) -> Option<LinkedTo> {
    let images: Images = load_json(&description_of(image)).ok()??;
    images.check().ok()?;
    let common = images.common()?;
    let found = Path::new(common.path).metadata();
    Some(LinkedTo {
        path: common.path.to_owned(),
        id: common.id.to_owned(),
        used_bytes: found.map_or(0, |found| found.blocks().saturating_mul(512)),
        has_snapshots: !images.may_become_one(),
    })
}

/// Removes the maps in this run directory, but those of deltas of these numbers. Nobody may be about to make one.
pub fn forget_maps(run: &Path, needed: &BTreeSet<u128>) {
    let Ok(entries) = run.read_dir() else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let id = name.to_str().and_then(id_of_states_map);
        if id.is_none_or(|id| needed.contains(&id)) {
            continue;
        }
        let path = entry.path();
        match std::fs::remove_file(&path) {
            Ok(()) => {
                tracing::info!(path = %path.display(), "a map of states that nobody needs is removed");
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "a map of states that nobody needs is left behind");
            }
        }
    }
}

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
            "the image {path} is not used: it is a part of a disk with snapshots, and holds what that was before the first of them, or of a linked disk, and holds nothing: delete the snapshots first, and let them be merged ('godwit vm snapshot list'); a linked disk becomes one image when it moves ('godwit vm move-disk')"
        )),
    }
}
