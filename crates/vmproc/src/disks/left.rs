//! What moves of disks on this host leave: an image that is not whole, and images that are no disk any more.
//!
//! Owns nothing: `disks.json` names them. The VM's description follows its disks before anything is removed. Refuses: to remove
//! what is a disk, or may be one where `disks.json` is an older copy, a block device, or another file than the one that was left.
//!
//! The label of a block device is told that there is no disk any more ([`super::labelled`]). One without a label that was left has nothing to be done with it, and is looked at no more. But it is still there, with the disk as it was then: so it
//! stays noted, also when the VM has left ([`super::devices`]), and a description that names it while the VM has its disk elsewhere on this host, as an older copy
//! does, is not obeyed.

use super::devices;
use super::entry::{Entry, Found};
use super::former::{Former, is_device, said_by, tell_left};
use super::images::{remove, rename};
use super::labelled::{self, Labelled, is_among};
use super::linked::remove_above;
use super::parts::Parts;
use super::record;
use super::redo::RedoLog;
use super::served::ServedDisks;
use super::there::WentAlong;
use super::told;
use crate::faults::reached;
use crate::files::Paths;
use godwit_ownership::{CopyEnd, Described, FormerEnd, FormerImage, Is, NotedImage};
use godwit_qemu::disk::is_taken;
use godwit_store::{StoreError, load_json, save_json, sync_document};
use godwit_types::datastore::is_device_path;
use godwit_types::image::{KnownImage, take_newest};
use godwit_types::vm::{DiskSpec, VmSpec};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// An image that a disk is copied to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Copying {
    /// Which disk, if that is noted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub disk: String,
    /// The name that it is to have,
    pub path: String,
    /// and the one that it has until it is whole.
    pub beside: String,
    /// Device and inode, once it is there,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<(u64, u64)>,
    /// and what it says of itself then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<KnownImage>,
    /// What else is copied with it.
    #[serde(default, skip_serializing_if = "Parts::is_none")]
    pub parts: Parts,
}

/// An image that was left for another one of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Left {
    /// Its name; empty where the VM is not here any more: then it is to be removed, and is no disk's before.
    pub disk: String,
    pub path: String,
    pub image: (u64, u64),
    /// What this host knew of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<KnownImage>,
    /// The name of the part that a device may hold of it still: it was out of reach when it was to be let go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// What else belongs to it.
    #[serde(default, skip_serializing_if = "Parts::is_none")]
    pub parts: Parts,
    /// Whether the VM's description says where the disk is now.
    #[serde(default)]
    pub followed: bool,
}

/// Without a QEMU: an image that is not whole is removed, the VM's description follows the disks that are elsewhere, and their
/// former images are removed. To be called before anything is started with that description.
pub(crate) fn settle_moves(paths: &Paths, mut spec: Option<&mut VmSpec>) -> Result<(), String> {
    follow_moves(paths, spec.as_deref_mut())?;
    let Some(mut what) = moved(paths)? else {
        return Ok(());
    };
    let described = spec.as_deref().map(|spec| &spec.disks[..]);
    let is_described = |path: &str| {
        described
            .into_iter()
            .flatten()
            .any(|disk| disk.path == path)
    };
    // It is a disk that somebody described since.
    what.left.retain(|left| !is_described(&left.path));
    if described.is_none() {
        // Nobody starts anything with a description that could name it.
        let labelled = what.labelled.clone();
        what.left.retain(|left| {
            let is_told = left.part.is_some() || is_among(&labelled, &left.path);
            !(left.followed && is_device(left.image)) || is_told
        });
    }
    // What is read of it may be gone after a power cut, and another image be the disk then.
    sync_document(&paths.disks()).map_err(|error| error.to_string())?;
    let settled = settle_copying(&mut what, described);
    remove_left(&mut what);
    save(paths, &what)?;
    settled
}

/// Removes an image that is not whole. Where it may be a disk by now only its other name is, and where it says that it is one nothing is
/// started before a person has described it so.
fn settle_copying(what: &mut ServedDisks, described: Option<&[DiskSpec]>) -> Result<(), String> {
    let Some(copying) = what.copying.take() else {
        return Ok(());
    };
    let path = &copying.path;
    let is_it = |disk: &DiskSpec| disk.path == *path;
    let described = match described {
        Some(disks) if disks.iter().any(is_it) => Described::AsDisk,
        Some(_) => Described::Otherwise,
        None => Described::Nowhere,
    };
    let end = CopyEnd::judge(
        described,
        || copying.is_surely_none(what),
        || copying.was_taken_since(),
    );
    match end {
        CopyEnd::Refused => {
            let why = format!(
                "disk '{}' was moved to {path} after the state directory of this VM was copied, which was put back since: name {path} as the disk's 'path' in the VM's description, and start it then",
                copying.disk
            );
            what.copying = Some(copying);
            return Err(why);
        }
        CopyEnd::Forgotten => copying.forget(described),
        CopyEnd::Removed => match copying.out_of_reach() {
            Some(left) => what.left.extend(left),
            None if copying.remove(what) => {}
            // It stays noted, and until it can be removed no other disk of the VM moves.
            None => what.copying = Some(copying),
        },
    }
    Ok(())
}

/// The VM's description follows the disks that are elsewhere. Touches none of their images, which may be out of reach.
pub(crate) fn follow_moves(paths: &Paths, spec: Option<&mut VmSpec>) -> Result<(), String> {
    let (Some(mut what), Some(spec)) = (moved(paths)?, spec) else {
        return Ok(());
    };
    follow(&what, paths, spec)?;
    if what.left.iter().all(|left| left.followed) {
        return Ok(());
    }
    what.left.iter_mut().for_each(|left| left.followed = true);
    save(paths, &what)
}

/// What the record of an earlier QEMU says that counts for the next one's, too.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    /// Former images that could not be removed.
    pub left: Vec<Left>,
    /// An image that is not whole and could not be removed.
    pub copying: Option<Copying>,
    /// Redo logs that were made, of which nothing may be described.
    pub logs: Vec<RedoLog>,
    pub known: Vec<KnownImage>,
    pub along: Vec<WentAlong>,
    pub unread: Vec<String>,
    /// Of devices that are disks or were left.
    pub labelled: Vec<Labelled>,
    /// Paths of those that were served without a label.
    pub plain: Vec<String>,
}

/// For a QEMU that is started with these disks.
pub(super) fn of_earlier(paths: &Paths, disks: &[DiskSpec]) -> Earlier {
    let what: Option<ServedDisks> = load_json(&paths.disks()).unwrap_or_else(|error| {
        tracing::error!(%error, "what the VM's disks were before is not known");
        None
    });
    let mut earlier = what.map_or_else(Earlier::default, |what| Earlier {
        plain: what.plain_devices(),
        left: what.left,
        copying: what.copying,
        logs: what.logs,
        known: what.known,
        along: what.along,
        unread: what.unread,
        labelled: what.labelled,
    });
    let is_disk = |path: &String| disks.iter().any(|disk| disk.path == *path);
    let noted = devices::noted(paths).into_iter();
    let is_new = |device: &Left, left: &[Left]| left.iter().all(|left| left.path != device.path);
    let noted: Vec<_> = noted
        .filter(|device| is_new(device, &earlier.left))
        .collect();
    earlier.left.extend(noted);
    earlier.left.retain(|left| !is_disk(&left.path));
    earlier
        .known
        .retain(|known| disks.iter().any(|disk| disk.name == known.disk));
    earlier.unread.retain(is_disk);
    let is_left = |path: &String| earlier.left.iter().any(|left| left.path == *path);
    earlier
        .labelled
        .retain(|labelled| is_disk(labelled.path()) || is_left(labelled.path()));
    earlier.plain.retain(is_disk);
    take_newest(
        &mut earlier.known,
        of_shared(said_by_controller(paths), disks),
    );
    earlier
}

/// What holders before this host knew of the VM's images.
fn said_by_controller(paths: &Paths) -> Vec<KnownImage> {
    let said: Option<Vec<KnownImage>> = load_json(&paths.images()).unwrap_or_else(|error| {
        tracing::error!(%error, "what other hosts knew of the VM's images is not known");
        None
    });
    said.unwrap_or_default()
}

/// What is said of images on shared storage; of others only the host knows that has them.
pub(super) fn of_shared<'a>(
    said: impl IntoIterator<Item = KnownImage> + 'a,
    disks: &'a [DiskSpec],
) -> impl Iterator<Item = KnownImage> + 'a {
    let shared = |name: &str| {
        let mut disks = disks.iter();
        disks.any(|disk| disk.name == name && disk.changes_hands())
    };
    said.into_iter().filter(move |said| shared(&said.disk))
}

/// What is written of a VM with something left of moves.
pub(super) fn moved(paths: &Paths) -> Result<Option<ServedDisks>, String> {
    let what: Option<ServedDisks> = load_json(&paths.disks()).map_err(|error| error.to_string())?;
    Ok(what.filter(|what| what.copying.is_some() || !what.left.is_empty()))
}

fn save(paths: &Paths, what: &ServedDisks) -> Result<(), String> {
    record::write(paths, what).map_err(|error| error.to_string())
}

/// Has the description say where the disks are, durably. What says a former image, for whatever reason, is from before.
pub(super) fn follow(what: &ServedDisks, paths: &Paths, spec: &mut VmSpec) -> Result<(), String> {
    let before = spec.clone();
    for left in &what.left {
        let now = what.disks.iter().find(|disk| disk.name == left.disk);
        let described = spec.disks.iter_mut().find(|disk| disk.name == left.disk);
        if let (Some(now), Some(described)) = (now, described)
            && described.path == left.path
        {
            says_where(described, now);
            if is_device(left.image) {
                tell_left(&left.disk, &left.path);
            }
        }
    }
    if *spec != before {
        save_spec(paths, spec, before).map_err(|error| error.to_string())?;
        reached("disk-move.followed");
    }
    Ok(())
}

/// Writes a description that was changed. Where that fails it is what it was before, so that whoever looks again changes and writes it again.
pub(super) fn save_spec(
    paths: &Paths,
    spec: &mut VmSpec,
    before: VmSpec,
) -> Result<(), StoreError> {
    let saved = save_json(&paths.spec(), spec);
    if saved.is_err() {
        *spec = before;
    }
    saved
}

/// Has a description say where its disk is now; whether it said something else.
pub(super) fn says_where(described: &mut DiskSpec, now: &DiskSpec) -> bool {
    let is_elsewhere = described.path != now.path;
    if is_elsewhere {
        described.path.clone_from(&now.path);
        described.shared = now.shared;
    }
    is_elsewhere
}

/// Removes what nothing needs any more; what could not be removed stays noted, and so do a block device whose label cannot say that it holds no disk
/// any more and what may be the best that is left of a disk.
pub(super) fn remove_left(what: &mut ServedDisks) {
    let now = what.clone();
    what.left.retain(|left| {
        let is_disk = now.disks.iter().any(|disk| disk.path == left.path);
        let is_told = now.is_labelled(&left.path);
        let former = FormerImage {
            followed: left.followed,
            is_disk,
            is_guarded: is_device(left.image) && !left.is_to_go() && !is_told,
        };
        match former.judge(|| left.disk_is_there(&now)) {
            FormerEnd::Stays => true,
            FormerEnd::Forgotten => false,
            FormerEnd::Removed => !left.remove(),
        }
    });
}

/// Whether another file has its place: one that is gone has none.
fn is_another(former: &Former<'_>) -> bool {
    let looked = Entry::looked_at(former.path).and_then(|(found, entry)| match found {
        Found::Nothing => Ok(false),
        found => Ok(former.compare(found, &entry)? == Is::Another),
    });
    looked.unwrap_or(false)
}

/// Whether a disk has the image that is noted as its own; what has no label is not compared.
fn has_image(what: &ServedDisks, (disk, image): (&DiskSpec, (u64, u64))) -> bool {
    let is_silent = is_device(image) && !what.is_labelled(&disk.path);
    is_silent || what.noted((disk, image)).is_there().unwrap_or(false)
}

impl Left {
    /// Whether the disk that had this image has the one that is noted as its own; so that nothing is removed beside an older copy of that. A VM that is
    /// not here has none.
    fn disk_is_there(&self, what: &ServedDisks) -> bool {
        let Some((disk, image)) = what.with_image(&self.disk) else {
            return true;
        };
        let is_there = has_image(what, (disk, image));
        let (path, why) = (Path::new(&self.path), "the disk is not there");
        if !is_there && told::is_news(("left alone", path), why) {
            let (disk, path, now) = (&self.disk, &self.path, &disk.path);
            tracing::error!(
                disk,
                "its former image {path} is left alone: {now} is not the image that the disk had last, or an older copy of it"
            );
        }
        is_there
    }

    /// What lay over it goes first, so that nothing of it is left where it is gone. Returns whether nothing is left that is to be removed.
    fn remove(&self) -> bool {
        let former = self.former();
        // What lay over that of a linked disk says its description; what is noted is described no more, or is known by what it says.
        let is_bare = match self.parts.is_none() {
            true => remove_above(&former),
            // What is noted may be an older copy, and be of use to whoever put another image there.
            false => is_another(&former) || self.parts.remove(former.path),
        };
        is_bare && former.remove()
    }

    fn former(&self) -> Former<'_> {
        Former {
            disk: &self.disk,
            path: Path::new(&self.path),
            image: self.image,
            known: self.known.as_ref(),
            part: self.part.as_deref(),
        }
    }
}

impl Left {
    /// Whether it is a copy that is no disk, and is removed once it is in reach.
    pub(super) fn is_to_go(&self) -> bool {
        self.disk.is_empty()
    }
}

impl Copying {
    /// Whether the disk that was being moved has its image still, and so is not this one. What is noted may be an older copy, from before
    /// the move ended; a block device is there after that, too.
    fn is_surely_none(&self, what: &ServedDisks) -> bool {
        // A device without a label is not compared; what was taken since that is not written down yet is it all the same.
        let is_there = |own: &(&DiskSpec, (u64, u64))| what.noted(*own).is_there().unwrap_or(false);
        let meant = self.meant(what);
        !meant.is_empty() && meant.iter().all(is_there)
    }

    /// Whether the disk that was being moved has its image, as far as that can be compared: where that was lost, or another one was put in its place,
    /// this may be the best that is left.
    pub(super) fn disk_is_there(&self, what: &ServedDisks) -> bool {
        self.meant(what).into_iter().all(|own| has_image(what, own))
    }

    /// The disks that it may be a copy of.
    fn meant<'a>(&self, what: &'a ServedDisks) -> Vec<(&'a DiskSpec, (u64, u64))> {
        let is_meant = |name: &str| self.disk.is_empty() || self.disk == name;
        let meant = what
            .with_images()
            .filter(|(disk, _)| is_meant(&disk.name) && !disk.read_only);
        meant.collect()
    }

    /// Where its file system is not there now: what is to be removed once it is, and keeps nothing from moving until then.
    pub(super) fn out_of_reach(&self) -> Option<Vec<Left>> {
        if self.is_on_device() {
            let is_away = labelled::is_away(Path::new(&self.path));
            return is_away.then(|| vec![self.left_on_device()]);
        }
        let image = self.image.filter(|image| !is_device(*image))?;
        let beside = Entry::looked_at(Path::new(&self.beside));
        // No other file has that name, whatever number its device has now.
        let is_there = |(found, entry): (Found, Entry<'_>)| {
            entry.is_on(image.0) || matches!(found, Found::File(_))
        };
        if beside.is_ok_and(is_there) || self.has_its_name() == Some(Is::It) {
            return None;
        }
        let left = [&self.beside, &self.path].map(|path| Left {
            parts: match *path == self.path {
                true => self.parts.clone(),
                false => Parts::default(),
            },
            disk: String::new(),
            path: path.clone(),
            image,
            known: self.known.clone(),
            part: None,
            followed: true,
        });
        Some(left.into())
    }

    /// What is to be let go of a device once that is there again.
    fn left_on_device(&self) -> Left {
        Left {
            parts: Default::default(),
            disk: String::new(),
            path: self.path.clone(),
            // Whatever number it has then.
            image: (self.image.map_or(0, |(device, _)| device), 0),
            known: self.known.clone(),
            part: Some(labelled::name_in(&self.beside)),
            followed: true,
        }
    }

    /// As what has the name that it was to have.
    fn former(&self) -> Option<Former<'_>> {
        let image = self.image?;
        Some(Former {
            disk: "",
            path: Path::new(&self.path),
            image,
            known: self.known.as_ref(),
            part: None,
        })
    }

    /// Whether what has its name says that it was taken for a disk since.
    fn was_taken_since(&self) -> bool {
        let path = Path::new(&self.path);
        let says = match self.is_on_device() {
            true => labelled::look(path).map(|found| labelled::known_by(&found?.label)),
            false => Entry::at(path).and_then(|entry| said_by(&entry)),
        };
        let noted = NotedImage {
            image: self.image.unwrap_or_default(),
            known: self.known.as_ref(),
        };
        noted.was_taken_since(says.ok().flatten().as_ref())
    }

    /// It may be a disk by now: only the name is removed that no disk ever has.
    fn forget(&self, described: Described) {
        let (path, beside) = (&self.path, &self.beside);
        if described != Described::AsDisk && self.has_its_name() != Some(Is::Another) {
            tracing::error!(
                "{path} is left alone: a disk was being moved there, and may be there since, where what is written of that is an older copy. If the VM has its disk elsewhere, remove that file; if not, name it as the disk's 'path' in the VM's description"
            );
        }
        self.parts.remove_beside();
        if !self.is_on_device() && !remove(Path::new(beside)) {
            tracing::warn!("{beside} is left there: nobody needs it");
        }
    }

    /// Whether that is it; nothing where it cannot be told now.
    fn has_its_name(&self) -> Option<Is> {
        self.former()?.look().ok()
    }

    /// Whether the disk comes to a block device.
    pub(super) fn is_on_device(&self) -> bool {
        is_device_path(&self.path)
    }

    /// What was copied gets the name that its disk is to have, durably.
    pub(super) fn give_name(&self) -> Result<(), String> {
        let path = Path::new(&self.path);
        let named = rename(Path::new(&self.beside), path).and_then(|entry| entry.sync());
        named.map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => is_taken(path),
            _ => format!("its image does not get its name {}: {error}", self.path),
        })
    }

    /// Has the device say that it holds nothing, unless it holds something else. Returns whether nothing is left to be done.
    fn let_go(&self) -> bool {
        let part = labelled::name_in(&self.beside);
        let part = labelled::Whose::Part(&part);
        let disk = self.known.as_ref().map(labelled::Whose::Disk);
        let path = Path::new(&self.path);
        let whose: Vec<_> = std::iter::once(part).chain(disk).collect();
        labelled::let_go(path, &whose)
    }

    pub(super) fn why_not_moved(&self) -> String {
        format!(
            "an image that is not whole is left at {} or {}: it is removed before the next move or start",
            self.beside, self.path
        )
    }

    pub(super) fn why_left_alone(&self) -> String {
        format!(
            "what disk '{}' was copied to is left at {} or {}: the disk has not the image that it had last, or an older copy of it",
            self.disk, self.beside, self.path
        )
    }

    /// Removes it under either of its names; another file that has the one that it is to have is not ours. Returns whether
    /// nothing of it is left.
    pub(super) fn remove(&self, what: &ServedDisks) -> bool {
        let is_disk = |path: &String| what.disks.iter().any(|disk| disk.path == *path);
        if is_disk(&self.beside) {
            return true;
        }
        // The VM may have come back to where its disk was being moved before it left.
        let is_named_disk = is_disk(&self.path);
        if self.is_on_device() {
            return is_named_disk || self.let_go();
        }
        let are_gone = is_named_disk || self.parts.remove(Path::new(&self.path));
        let is_gone = remove(Path::new(&self.beside)) && are_gone;
        let Some(former) = self.former().filter(|_| !is_named_disk) else {
            return is_gone;
        };
        let looked = Entry::looked_at(former.path).and_then(|(found, entry)| {
            Ok(match former.compare(found, &entry)? {
                Is::It => entry.remove(),
                Is::Another => true,
                Is::Unknown => false,
            })
        });
        let is_gone_there = looked.unwrap_or_else(|error| {
            let path = &self.path;
            let is_away = error.kind() == std::io::ErrorKind::NotFound;
            if !is_away {
                tracing::warn!(path, %error, "an image that is not whole may be left there");
            }
            is_away
        });
        is_gone && is_gone_there
    }
}

#[cfg(test)]
#[path = "left_tests.rs"]
mod tests;
