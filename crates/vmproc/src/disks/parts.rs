//! The files beside a disk's own image where that has snapshots: named, looked for and removed with it, wherever they lie.
//!
//! Of each it is noted which file it is, so that nothing else is renamed or removed; one that is being filled has a name that no other file has.
//! The description beside the image is known by its number. Owns nothing: `disks.json` names them. Refuses: to replace a file, and to remove
//! another one than is noted.

use super::BLOCK;
use super::entry::{Entry, Found, holds_nothing};
use super::images::{remove, rename};
use super::redo::may_be_away;
use godwit_blockio::delta::{is_another, is_frozen, read_descriptor};
use godwit_delta::Id;
use godwit_qemu::disk::identity_of;
use godwit_snapshots::{Images, files};
use godwit_store::json_from;
use godwit_types::snapshots::description_of;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// One file of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    /// The name that it has, or is to have,
    pub path: String,
    /// and the one that it has until all of them are there.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub beside: String,
    /// Device and inode, once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<(u64, u64)>,
    /// What it says that it is, once it is whole: by that it is known where its file system has another number by now.
    pub id: String,
}

/// All of them, but for the disk's own image; none of a disk that is one image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Parts {
    /// The number of the description.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mark: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Part>,
}

impl Parts {
    pub(super) fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses a place where there is something under one of their names.
    pub(super) fn must_be_free(&self) -> Result<(), String> {
        let is_there = |path: &Path| !matches!(path.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound);
        for part in &self.files {
            let path = Path::new(&part.path);
            let mut names = std::iter::once(path.to_owned()).chain(descriptor_of(path));
            if let Some(taken) = names.find(|name| is_there(name)) {
                return Err(format!(
                    "there is something at {} already: move it away, or name another place",
                    taken.display()
                ));
            }
        }
        Ok(())
    }

    /// Gives each the name that it is to have, durably, if it is still the file that was filled.
    pub(super) fn give_names(&self) -> Result<(), String> {
        for part in &self.files {
            let (from, to) = (Path::new(&part.beside), Path::new(&part.path));
            let named = rename(from, to).and_then(|entry| entry.sync());
            named.map_err(|error| {
                format!(
                    "the image {} does not get its name {} ({error}): if another file is there, move that one away",
                    part.beside, part.path
                )
            })?;
            part.must_be_it()?;
        }
        Ok(())
    }

    /// Refuses where one has another file's place by now.
    pub(super) fn must_be_there(&self) -> Result<(), String> {
        self.files.iter().try_for_each(Part::must_be_it)
    }

    /// Makes the names durable that they have.
    pub(super) fn keep_names(&self) -> io::Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|part| Entry::at(Path::new(&part.path))?.sync())
    }

    /// Makes the names durable that they have while they are filled.
    pub(super) fn keep_names_beside(&self) -> io::Result<()> {
        let mut files = self.files.iter();
        files.try_for_each(|part| Entry::at(Path::new(&part.beside))?.sync())
    }

    /// Removes what has a name that no disk ever has.
    pub(super) fn remove_beside(&self) {
        for part in self.files.iter().filter(|part| !part.beside.is_empty()) {
            if !remove(Path::new(&part.beside)) {
                tracing::warn!(path = part.beside, "a file is left there: nobody needs it");
            }
        }
    }

    /// Removes all of them, beside this image, and their description, under whichever name. Returns whether nothing is left of them; what has another
    /// file's place is none of them.
    pub(super) fn remove(&self, own: &Path) -> bool {
        if self.is_none() {
            return true;
        }
        // After a boot its file system may have another number. What lies beside an image that is there is not away.
        let mut there = [own.to_owned(), description_of(own)].into_iter();
        let device = there.find_map(|path| identity_of(&path).ok().flatten());
        let device = device.map(|(device, _)| device);
        let files = self.files.iter();
        let gone: Vec<bool> = files.map(|part| part.remove(device)).collect();
        gone.into_iter().all(|gone| gone) && self.remove_description(own)
    }

    fn remove_description(&self, own: &Path) -> bool {
        let path = description_of(own);
        let looked = Entry::looked_at(&path).and_then(|(found, entry)| match found {
            Found::Nothing | Found::Other => Ok(true),
            Found::File(_) => {
                let images = json_from::<Images>(&path, entry.open()?);
                if !images.is_ok_and(|images| images.mark == self.mark) {
                    return Ok(true);
                }
                if let Some(base) = base_descriptor_of(own) {
                    remove_descriptor(&base, own);
                }
                Ok(entry.remove())
            }
        });
        looked.unwrap_or_else(|error| is_away(&path, &error))
    }
}

impl Part {
    fn must_be_it(&self) -> Result<(), String> {
        let found = identity_of(Path::new(&self.path));
        match found {
            Ok(found) if found.is_some() && found == self.image => Ok(()),
            _ => Err(format!(
                "{} is not the image any more that was made there: see who may write into that directory",
                self.path
            )),
        }
    }

    /// Whether the file that was found is this one. Its number is given again by file systems, as to the delta that another VM has put there since, which
    /// says what it is.
    fn is_it(&self, found: (u64, u64), noted: (u64, u64), entry: &Entry<'_>) -> io::Result<bool> {
        if found != noted {
            return self.is_this_part(found, entry);
        }
        let Some(id) = Id::of_digits(&self.id) else {
            return Ok(true);
        };
        let looked = is_another((entry.open()?, Path::new(&self.path)), id, BLOCK);
        Ok(!looked.map_err(io::Error::other)?)
    }

    /// Whether it is this, though its file system may be another one: it says so, or it holds nothing, since a power cut took what it was to say.
    fn is_this_part(&self, (_, number): (u64, u64), entry: &Entry<'_>) -> io::Result<bool> {
        if self.image.is_none_or(|image| image.1 != number) {
            return Ok(false);
        }
        let file = entry.open()?;
        if holds_nothing(&file)? {
            return Ok(true);
        }
        let id = Id::of_digits(&self.id);
        let path = Path::new(&self.path);
        let looked = id.map(|id| is_frozen((file, path), id, BLOCK));
        Ok(looked.is_some_and(|looked| looked.is_ok()))
    }

    /// `device`: on which the disk's own image is now.
    fn remove(&self, device: Option<u64>) -> bool {
        let is_gone_beside = self.beside.is_empty() || remove(Path::new(&self.beside));
        let path = Path::new(&self.path);
        let Some(image) = self.image else {
            return is_gone_beside;
        };
        let looked = Entry::looked_at(path).map(|(found, entry)| match found {
            // Where its file system is not mounted it is not gone.
            Found::Nothing if may_be_away(path) => (false, false),
            Found::Nothing => {
                let mut devices = device.into_iter().chain([image.0]);
                (devices.any(|device| entry.is_on(device)), true)
            }
            Found::File(found) => match self.is_it(found, image, &entry) {
                Ok(true) => (entry.remove(), true),
                Ok(false) => (true, false),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "it is not known whether a file is a part of a disk: it stays");
                    (false, false)
                }
            },
            Found::Other => (true, false),
        });
        let (is_gone, was_it) =
            looked.unwrap_or_else(|error| (!may_be_away(path) && is_away(path, &error), false));
        if is_gone
            && was_it
            && let Some(descriptor) = descriptor_of(path)
        {
            remove_descriptor(&descriptor, path);
        }
        is_gone_beside && is_gone
    }
}

/// Whether there is no such directory; else what is there is tried again.
fn is_away(path: &Path, error: &io::Error) -> bool {
    let is_away = error.kind() == io::ErrorKind::NotFound;
    if !is_away {
        tracing::warn!(path = %path.display(), %error, "a part of a disk with snapshots may be left there");
    }
    is_away
}

/// Removes a descriptor if it is of this file: nobody needs it without that.
fn remove_descriptor(descriptor: &Path, of: &Path) {
    let name = of.file_name().and_then(|name| name.to_str());
    let described = read_descriptor(descriptor);
    if described.is_ok_and(|described| Some(&*described.extent) == name) && !remove(descriptor) {
        tracing::info!(path = %descriptor.display(), "a descriptor is left there: nobody needs it");
    }
}

/// The descriptor of a delta's file.
fn descriptor_of(extent: &Path) -> Option<PathBuf> {
    let name = files::of_extent(extent.file_name()?.to_str()?)?;
    Some(extent.with_file_name(files::descriptor(name)))
}

/// That of a disk's own image.
fn base_descriptor_of(own: &Path) -> Option<PathBuf> {
    let name = own.file_name()?.to_str()?;
    Some(own.with_file_name(files::descriptor(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_blockio::delta::{NewDelta, create, describe_base};
    use godwit_snapshots::Fresh;
    use godwit_store::save_json;
    use std::fs::File;

    const MARK: &str = "0123456789abcdef0123456789abcdef";

    /// A disk with one delta, and what is noted of it.
    fn disk(directory: &Path) -> (PathBuf, Parts) {
        let own = directory.join("root.raw");
        std::fs::write(&own, vec![1; 1 << 20]).unwrap();
        let base = directory.join("root.raw.vmdk");
        let parent = describe_base(&base, "root.raw", (1 << 20, 7)).unwrap();
        let new = NewDelta {
            descriptor: &directory.join("root.raw.d1.vmdk"),
            bytes: 1 << 20,
            id: Id([1; 16]),
            parent: &parent,
        };
        create(&new).unwrap();
        let fresh = Fresh {
            name: "root.raw.d1".to_owned(),
            id: "1".repeat(32),
            elsewhere: None,
        };
        let images = Images::of_one("root.raw", 1 << 20, MARK);
        let images = images.freeze(&fresh).unwrap();
        save_json(&description_of(&own), &images).unwrap();
        let path = directory.join("root.raw.d1-sesparse.vmdk");
        let part = Part {
            image: identity_of(&path).unwrap(),
            path: path.to_string_lossy().into_owned(),
            beside: String::new(),
            id: "01".repeat(16),
        };
        let parts = Parts {
            mark: MARK.to_owned(),
            files: vec![part],
        };
        (own, parts)
    }

    /// The same where its delta's file system has another number than is noted, and the file that it is there.
    fn disk_on_another_device(directory: &Path) -> (PathBuf, Parts, (u64, u64)) {
        let (own, mut parts) = disk(directory);
        let part = &mut parts.files[0];
        let (device, number) = part.image.unwrap();
        part.image = Some((device + 1, number));
        (own, parts, (device, number))
    }

    fn left(directory: &Path) -> Vec<String> {
        let names = std::fs::read_dir(directory).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn all_that_belongs_to_an_image_is_removed_and_the_image_stays() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, parts) = disk(directory.path());
        assert!(parts.remove(&own));
        assert_eq!(left(directory.path()), ["root.raw"]);
        assert!(parts.remove(&own), "it is gone");
    }

    /// A delta of another VM had got the number of one that was gone, and was removed for it.
    #[test]
    fn a_file_that_got_the_number_of_a_part_and_says_that_it_is_another_stays() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, mut parts) = disk(directory.path());
        let extent = parts.files[0].path.clone();
        let id = std::mem::replace(&mut parts.files[0].id, "02".repeat(16));
        let part = &parts.files[0];
        assert!(part.remove(None), "nothing of it is left");
        assert!(Path::new(&extent).exists());
        // What a power cut left of it says nothing.
        File::options()
            .write(true)
            .open(&extent)
            .unwrap()
            .set_len(100)
            .unwrap();
        parts.files[0].id = id;
        assert!(parts.remove(&own));
        assert_eq!(left(directory.path()), ["root.raw"]);
    }

    #[test]
    fn what_is_on_a_file_system_that_has_another_number_now_is_known_by_what_it_says() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, mut parts, found) = disk_on_another_device(directory.path());
        let part = &mut parts.files[0];
        let id = std::mem::replace(&mut part.id, "02".repeat(16));
        let entry = Entry::at(Path::new(&part.path)).unwrap();
        assert!(!part.is_this_part(found, &entry).unwrap());
        part.id = id;
        assert!(parts.remove(&own));
        assert_eq!(left(directory.path()), ["root.raw"]);
    }

    #[test]
    fn what_lost_its_content_with_the_power_and_lies_on_another_device_now_is_removed() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, parts, (device, number)) = disk_on_another_device(directory.path());
        let part = &parts.files[0];
        let file = File::options().write(true).open(&part.path);
        let file = file.unwrap();
        let bytes = file.metadata().unwrap().len();
        file.set_len(0).unwrap();
        file.set_len(bytes).unwrap();
        // One of another number is somebody else's, though nothing is in it.
        let other = Parts {
            files: vec![Part {
                image: Some((device + 1, number + 1)),
                ..part.clone()
            }],
            ..parts.clone()
        };
        let extent = parts.files[0].path.clone();
        other
            .files
            .iter()
            .for_each(|part| assert!(part.remove(None)));
        assert!(Path::new(&extent).exists());
        assert!(parts.remove(&own));
        assert_eq!(left(directory.path()), ["root.raw"]);
    }

    #[test]
    fn what_is_gone_on_a_file_system_that_has_another_number_now_keeps_no_image_for_ever() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, parts, _) = disk_on_another_device(directory.path());
        std::fs::remove_file(&parts.files[0].path).unwrap();
        // Nothing of the disk is there, as where its file system is not mounted.
        let away = tempfile::tempdir_in("/var/tmp").unwrap();
        for path in [own.clone(), description_of(&own)] {
            let name = path.file_name().unwrap();
            std::fs::rename(&path, away.path().join(name)).unwrap();
        }
        assert!(!parts.remove(&own));
        std::fs::rename(away.path().join("root.raw"), &own).unwrap();
        assert!(parts.remove(&own));
    }

    #[test]
    fn another_disk_s_files_under_the_same_names_stay() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (own, parts) = disk(directory.path());
        let before = left(directory.path());
        let other = Parts {
            mark: "f".repeat(32),
            files: vec![Part {
                image: Some((1, 1)),
                ..parts.files[0].clone()
            }],
        };
        assert!(other.remove(&own));
        assert_eq!(left(directory.path()), before);
        let taken = parts.must_be_free().unwrap_err();
        assert!(taken.contains("root.raw.d1"), "{taken}");
    }

    #[test]
    fn names_are_given_to_what_was_filled_and_to_nothing_else() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (_, mut parts) = disk(directory.path());
        let part = &mut parts.files[0];
        part.beside = format!("{}.moving-7", part.path);
        std::fs::rename(&part.path, &part.beside).unwrap();
        parts.keep_names_beside().unwrap();
        for _ in 0..2 {
            parts.give_names().unwrap();
        }
        let part = &mut parts.files[0];
        std::fs::rename(&part.path, &part.beside).unwrap();
        part.image = Some((1, 1));
        let refused = parts.give_names().unwrap_err();
        assert!(refused.contains("is not the image any more"), "{refused}");
    }
}
