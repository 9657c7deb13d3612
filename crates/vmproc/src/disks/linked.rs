//! What lay over the own image of a linked disk that is one image elsewhere by now: it goes before that image does.
//!
//! Owns nothing: the files are named by the description beside the image. Whoever dies in between leaves an image that bears its mark, and whoever looks
//! next goes on. Refuses: to remove what a description names that is not this image's, deltas that say that they are others, and anything of a disk with
//! snapshots.

use super::BLOCK;
use super::described::bears_mark_of;
use super::entry::Entry;
use super::former::{Former, is_device};
use super::images::remove;
use super::layers::id_of;
use super::told;
use godwit_blockio::delta::Delta;
use godwit_ownership::Is;
use godwit_qemu::disk::open_looked_at;
use godwit_snapshots::{Images, Kind};
use godwit_store::load_json;
use godwit_types::snapshots::description_of;
use rustix::fs::{CWD, OFlags};
use std::os::fd::AsFd as _;
use std::path::Path;

/// What the log is told once of: it may be tried for days.
const ABOVE: &str = "above";

/// Removes it all, with the description. Returns whether there is nothing more of it, as of an image that was all of its disk.
pub(super) fn remove_above(former: &Former<'_>) -> bool {
    if is_device(former.image) {
        return true;
    }
    match remove_described(former) {
        Ok(is_gone) => is_gone,
        Err(why) => {
            if told::is_news((ABOVE, former.path), &why) {
                let (disk, path) = (former.disk, former.path.display());
                tracing::warn!(disk, %path, why, "what lies over a disk's former image is left alone");
            }
            false
        }
    }
}

fn remove_described(former: &Former<'_>) -> Result<bool, String> {
    let at = description_of(former.path);
    if at.symlink_metadata().is_err() {
        return Ok(true);
    }
    let looked = Entry::looked_at(former.path).and_then(|(found, entry)| {
        let is_it = former.compare(found, &entry)? == Is::It;
        is_it.then(|| entry.open()).transpose()
    });
    // What is there in its place is not removed either, nor what belongs to that.
    let Some(image) = looked.map_err(|error| error.to_string())? else {
        return Ok(true);
    };
    let images: Option<Images> = load_json(&at).map_err(|error| error.to_string())?;
    let images = images.ok_or("its description is gone")?;
    images.check()?;
    if !bears_mark_of(image.as_fd(), &images)? || !images.is_linked_only() {
        return Err("it is no description of a linked disk which that image was".to_owned());
    }
    let deltas = images.images.iter();
    let deltas = deltas.filter(|(_, image)| image.kind == Kind::Delta);
    for (name, delta) in deltas {
        let beside = |end: &str| former.path.with_file_name(format!("{name}{end}"));
        let (descriptor, extent) = (beside(".vmdk"), beside("-sesparse.vmdk"));
        must_be(&extent, delta.id.as_deref().unwrap_or_default())?;
        if !(remove(&descriptor) && remove(&extent)) {
            return Ok(false);
        }
    }
    Ok(remove(&at))
}

/// Refuses another file than this delta; nothing may be there any more.
fn must_be(extent: &Path, id: &str) -> Result<(), String> {
    if extent.symlink_metadata().is_err() {
        return Ok(());
    }
    let id = id_of(id).ok_or("the name of a delta is no number")?;
    let file = open_looked_at(CWD, extent, OFlags::RDWR | OFlags::NOFOLLOW);
    let file = file.map_err(|why| format!("{}: {why}", extent.display()))?;
    let opened = Delta::unlocked((file, extent), id, BLOCK);
    opened.map(drop).map_err(|error| error.to_string())
}
