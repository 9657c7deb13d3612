//! Linked disks that move: what becomes one image elsewhere, and what lay over the own image of one that is that by now, which goes before that image does.
//!
//! Owns nothing: the files are named by the description beside the image. Whoever dies in between leaves an image that bears its mark, and whoever looks
//! next goes on. Refuses: to move linked disks with snapshots, to remove what a description names that is not this image's, deltas that say that they are
//! others, and anything of a disk with snapshots.

use super::BLOCK;
use super::described::bears_mark_of;
use super::entry::{Entry, Found};
use super::former::{Former, is_device};
use super::served::Served;
use super::told;
use crate::adoption::lock;
use godwit_blockio::delta::is_frozen;
use godwit_delta::Id;
use godwit_ownership::Is;
use godwit_snapshots::{Images, files};
use godwit_store::json_from;
use godwit_types::disk_move::Method;
use godwit_types::snapshots::{becomes_one_image, description_of};
use godwit_types::vm::DiskSpec;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd as _;

/// What the log is told once of: it may be tried for days.
const ABOVE: &str = "above";

/// Why a linked disk that begins as this image stays where it is: on shared storage it does not change hands, and with snapshots it goes to no other place
/// of its host.
pub(super) fn stays_over(common: &str) -> String {
    format!(
        "it is linked to the image {common}, which does not go along, since other disks may be linked to it, too: delete its snapshots first, if it has any, and wait for images of deleted ones that are not merged yet ('godwit vm snapshot list' tells when they are merged); {}",
        becomes_one_image("without any it")
    )
}

/// Why a disk with snapshots that is linked to this image does not go to a host that lacks it.
pub(super) fn stays_with_snapshots(common: &str) -> String {
    format!(
        "it is linked to the image {common}, which the destination does not have as the disk knows it, and has snapshots, with which it does not become one image there: copy that image with its attributes to the same path in a datastore of that host ('rsync -X', 'cp -a'), or delete the disk's snapshots first"
    )
}

/// Why a disk that is linked to this image does not go with a migration that says nothing of that.
pub(super) fn not_told_of(common: &str) -> String {
    format!(
        "it is linked to the image {common}, of which its migration was not told: the controller or this host's agent is of an earlier version, or the disk changed just now; begin the migration again, or install a newer one"
    )
}

/// Refuses to move what does not go along as a whole, or could not be frozen once more for that.
pub(super) fn must_go_along(images: &Images) -> Result<(), String> {
    match images.common() {
        Some(common) => Err(stays_over(common.path)),
        None => images.must_have_room_to_move(),
    }
}

impl Served {
    /// Of a linked disk that moves on its host all that its guest reads is copied: it is one image then. Returns whether it is one; any other disk goes with
    /// all that it consists of.
    pub(super) fn must_be_copied_whole(
        &self,
        spec: &DiskSpec,
        method: Method,
    ) -> Result<bool, String> {
        if !self.may_have_layers(spec) {
            return Ok(false);
        }
        let images = self.all().place(spec).load()?;
        match images.common() {
            None if method == Method::Snapshot && !images.is_one_raw() => {
                Err("it has snapshots, or images of deleted ones or redo logs of a move that failed that are not merged yet, and redo logs take none along: leave out --method, or see to what 'godwit vm snapshot list' tells".to_owned())
            }
            None => Ok(false),
            Some(common) if !images.is_linked_only() => Err(stays_over(common.path)),
            Some(_) if method == Method::DirtyTracking => {
                Err("it is linked to another image, and dirty block tracking does not copy that: leave out --method".to_owned())
            }
            Some(_) => Ok(true),
        }
    }

    /// This is what a disk consists of; nothing of one that is one image.
    pub(super) fn note_images(&self, disk: &str, images: Option<&Images>) {
        match images {
            // Whoever looked for what is to be merged before did not know of it.
            Some(_) if lock(&self.layered).insert(disk.to_owned()) => self.tidies.is_due(),
            Some(_) => {}
            None => {
                lock(&self.layered).remove(disk);
            }
        }
        match images.and_then(Images::common) {
            Some(common) => lock(&self.linked).insert(disk.to_owned(), common.path.to_owned()),
            None => lock(&self.linked).remove(disk),
        };
    }
}

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

/// All of it lies in the directory that is held from the first look on: who may exchange that has nothing removed elsewhere.
fn remove_described(former: &Former<'_>) -> Result<bool, String> {
    let told = |error: io::Error| error.to_string();
    let (found, own) = match Entry::looked_at(former.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        looked => looked.map_err(told)?,
    };
    let at = description_of(former.path);
    let description = own.beside(&at).map_err(told)?;
    if description.look().map_err(told)? == Found::Nothing {
        return Ok(true);
    }
    // What is there in its place is not removed either, nor what belongs to that.
    if former.compare(found, &own).map_err(told)? != Is::It {
        return Ok(true);
    }
    let image = own.open().map_err(told)?;
    let images: Images =
        json_from(&at, description.open().map_err(told)?).map_err(|why| why.to_string())?;
    images.check()?;
    if !bears_mark_of(image.as_fd(), &images)? || !images.is_linked_only() {
        return Err("it is no description of a linked disk which that image was".to_owned());
    }
    for (name, delta) in images.deltas() {
        let at = [files::descriptor(name), files::extent(name)];
        let [descriptor, extent] = at.map(|name| former.path.with_file_name(name));
        let [descriptor, extent] = [&descriptor, &extent].map(|path| own.beside(path));
        let (descriptor, extent) = (descriptor.map_err(told)?, extent.map_err(told)?);
        must_be(&extent, delta.id.as_deref().unwrap_or_default())?;
        if !(descriptor.remove() && extent.remove()) {
            return Ok(false);
        }
    }
    Ok(description.remove())
}

/// Refuses another file than this delta; nothing may be there any more.
fn must_be(extent: &Entry<'_>, id: &str) -> Result<(), String> {
    let told = |why: &dyn std::fmt::Display| format!("{}: {why}", extent.path().display());
    if extent.look().map_err(|error| told(&error))? == Found::Nothing {
        return Ok(());
    }
    let id = Id::of_delta(id)?;
    let file = extent.open().map_err(|error| told(&error))?;
    let looked = is_frozen((file, extent.path()), id, BLOCK);
    looked.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_blockio::delta::{NewDelta, create};
    use godwit_delta::Parent;
    use godwit_qemu::disk::identity_of;
    use godwit_snapshots::{Common, Fresh};
    use godwit_store::save_json;
    use godwit_types::snapshots::LAYERED_MARK;
    use rustix::fs::{XattrFlags, fsetxattr};
    use std::fs::File;

    const BYTES: u64 = 1 << 20;

    struct Disk {
        dir: tempfile::TempDir,
        mark: String,
    }

    impl Disk {
        fn new() -> Self {
            let dir = tempfile::tempdir_in("/var/tmp").unwrap();
            let disk = Self {
                dir,
                mark: "5".repeat(32),
            };
            let own = File::create(disk.own()).unwrap();
            own.set_len(BYTES).unwrap();
            disk.says(&own, &disk.mark);
            let fresh = Fresh {
                name: "root.raw.d1".to_owned(),
                id: format!("{:032x}", 7),
                elsewhere: None,
            };
            let id = "9".repeat(32);
            let common = Common {
                path: "/srv/base.raw",
                id: &id,
            };
            let images = Images::linked(common, BYTES, &disk.mark, &fresh).unwrap();
            save_json(&description_of(&disk.own()), &images).unwrap();
            disk.make_delta(7);
            disk
        }

        fn own(&self) -> std::path::PathBuf {
            self.dir.path().join("root.raw")
        }

        fn says(&self, own: &File, mark: &str) {
            let flags = XattrFlags::empty();
            fsetxattr(own, LAYERED_MARK, mark.as_bytes(), flags).unwrap();
        }

        fn make_delta(&self, id: u128) {
            let parent = Parent {
                cid: 1,
                hint: "base.vmdk".to_owned(),
            };
            let descriptor = self.dir.path().join("root.raw.d1.vmdk");
            let new = NewDelta {
                descriptor: &descriptor,
                bytes: BYTES,
                id: Id(id.to_be_bytes()),
                parent: &parent,
            };
            create(&new).unwrap();
        }

        fn remove_above(&self) -> bool {
            let own = self.own();
            let former = Former {
                disk: "root",
                path: &own,
                image: identity_of(&own).unwrap().unwrap(),
                known: None,
                part: None,
            };
            remove_above(&former)
        }

        fn left(&self) -> usize {
            std::fs::read_dir(self.dir.path()).unwrap().count()
        }
    }

    #[test]
    fn what_lay_over_a_linked_disk_goes_and_its_own_image_is_left_to_others() {
        let disk = Disk::new();
        assert_eq!(disk.left(), 4);
        assert!(disk.remove_above());
        assert!(disk.left() == 1 && disk.own().exists());
        assert!(disk.remove_above(), "there is nothing more");
    }

    /// Whoever owned a directory above put a link in its place, and what is called so elsewhere was removed.
    #[test]
    fn nothing_is_removed_in_a_directory_that_has_taken_the_place_of_the_first() {
        let disk = Disk::new();
        let own = disk.own();
        let (found, entry) = Entry::looked_at(&own).unwrap();
        assert!(matches!(found, Found::File(_)));
        let extent = disk.dir.path().join("root.raw.d1-sesparse.vmdk");
        let elsewhere = tempfile::tempdir_in("/var/tmp").unwrap();
        let foreign = elsewhere.path().join("root.raw.d1-sesparse.vmdk");
        std::fs::write(&foreign, "precious").unwrap();
        // The path leads there by now; what is held does not.
        let beside = entry.beside(&foreign).unwrap();
        must_be(&beside, &format!("{:032x}", 7)).unwrap();
        assert!(beside.remove() && foreign.exists() && !extent.exists());
    }

    #[test]
    fn what_belongs_to_another_image_or_is_another_delta_stays() {
        let disk = Disk::new();
        let own = File::options().write(true).open(disk.own()).unwrap();
        disk.says(&own, &"6".repeat(32));
        assert!(!disk.remove_above() && disk.left() == 4);
        disk.says(&own, &disk.mark);
        for name in ["root.raw.d1.vmdk", "root.raw.d1-sesparse.vmdk"] {
            std::fs::remove_file(disk.dir.path().join(name)).unwrap();
        }
        disk.make_delta(8);
        assert!(!disk.remove_above() && disk.left() == 4);
    }
}
