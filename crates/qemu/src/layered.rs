//! Images that are a part of a disk with snapshots, or of a linked one, for whoever makes or copies images.
//!
//! Owns nothing. Refuses: to take a part for the whole, and a place where the snapshots of an image that is gone are described.

use crate::disk::open_looked_at;
use godwit_snapshots::{Images, Kind, files};
use godwit_store::json_from;
use godwit_types::datastore::is_device_path;
use godwit_types::migration::LinkedTo;
use godwit_types::snapshots::{
    LAYERED_BEGUN, LAYERED_MARK, LAYERED_MARK_MAX, becomes_one_image, description_of,
    id_of_states_map,
};
use rustix::fs::{CWD, OFlags, fgetxattr};
use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Bytes that all images of a linked disk take, the one to which it is linked among them; nothing of any other disk, as far as that can be told.
pub fn use_of_linked(image: &Path) -> Option<u64> {
    let images = described(image)?;
    images.common()?;
    let takes = |path: &Path| path.metadata().map_or(0, |found| bytes_of(&found));
    let each = images.images.iter().map(|(name, one)| match one.kind {
        Kind::Delta => takes(&images.extent_at(image, name)),
        // A path, of what is common.
        Kind::Raw => takes(&image.with_file_name(name)),
    });
    Some(each.fold(0, u64::saturating_add))
}

/// What is said beside this image of what its disk consists of. Nothing where that cannot be so, and of what is no file that its owner alone may change:
/// a link leads nowhere.
fn described(image: &Path) -> Option<Images> {
    let at = description_of(image);
    let file = open_looked_at(CWD, &at, OFlags::RDONLY | OFlags::NOFOLLOW).ok()?;
    let found = file.metadata().ok()?;
    if !found.is_file() || found.mode() & 0o022 != 0 {
        return None;
    }
    let images: Images = json_from(&at, file).ok()?;
    images.check().ok().map(|()| images)
}

/// What a linked disk begins as whose own image this is; nothing of any other disk, as far as that can be told.
pub fn linked_to(image: &Path) -> Option<LinkedTo> {
    let images = described(image)?;
    let common = images.common()?;
    let found = Path::new(common.path).metadata();
    Some(LinkedTo {
        path: common.path.to_owned(),
        id: common.id.to_owned(),
        used_bytes: found.map_or(0, |found| bytes_of(&found)),
        has_snapshots: !images.may_become_one(),
    })
}

/// Whether it is said beside this image that it is a part of its disk only.
pub fn is_layered(image: &Path) -> bool {
    let is_device = is_device_path(&image.to_string_lossy());
    !is_device && description_of(image).symlink_metadata().is_ok()
}

/// Bytes that the images take which lie over this one, where it is a part of its disk only.
pub fn bytes_over(image: &Path) -> u64 {
    if !is_layered(image) {
        return 0;
    }
    let own = image.file_name().and_then(|name| name.to_str());
    let (Some(own), Some(names)) = (own, image.parent().and_then(|above| above.read_dir().ok()))
    else {
        return 0;
    };
    let is_over = |file: &str| {
        let delta = files::of_extent(file);
        delta.is_some_and(|delta| files::number_of(own, delta).is_some())
    };
    let taken = names.flatten().filter_map(|entry| {
        let is_over = entry.file_name().to_str().is_some_and(is_over);
        let found = is_over.then(|| entry.metadata().ok()).flatten()?;
        Some(bytes_of(&found))
    });
    taken.fold(0, u64::saturating_add)
}

fn bytes_of(found: &Metadata) -> u64 {
    found.blocks().saturating_mul(512)
}

/// A number for a mark, or by which a delta is known: of 128 bits, in hexadecimal digits.
pub fn random_number() -> Result<String, String> {
    let mut number = [0; 16];
    getrandom::fill(&mut number).map_err(|error| error.to_string())?;
    Ok(format!("{:032x}", u128::from_be_bytes(number)))
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
            "the image {path} is not used: it is a part of a disk with snapshots, and holds what that was before the first of them, or of a linked disk, and holds nothing: delete the snapshots first, and let them be merged ('godwit vm snapshot list'); {}",
            becomes_one_image("a linked disk")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_snapshots::{Common, Fresh};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn what_a_linked_disk_begins_as_is_not_read_through_a_link_nor_from_what_others_may_write() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| directory.path().join(name);
        let fresh = Fresh {
            name: "root.raw.d1".to_owned(),
            id: "7".repeat(32),
            elsewhere: None,
        };
        let common = Common {
            path: "/srv/base.raw",
            id: &"9".repeat(32),
        };
        let images = Images::linked(common, 4096, &"5".repeat(32), &fresh).unwrap();
        let said = serde_json::to_string(&images).unwrap();
        std::fs::write(at("elsewhere"), said).unwrap();
        let (image, description) = (at("root.raw"), at("root.raw.images"));
        let is_linked = || linked_to(&image).is_some() && use_of_linked(&image).is_some();
        symlink(at("elsewhere"), &description).unwrap();
        assert!(!is_linked(), "through a link");
        std::fs::remove_file(&description).unwrap();
        std::fs::rename(at("elsewhere"), &description).unwrap();
        let allow = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&description, mode).unwrap();
        };
        allow(0o600);
        assert!(is_linked());
        allow(0o660);
        assert!(!is_linked(), "others may write it");
    }
}
