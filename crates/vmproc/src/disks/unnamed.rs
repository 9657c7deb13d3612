//! Images that no description names as a part of their disk, beside it or where redo logs of it lay: found, told from others, and removed.
//!
//! A delta is made before a description names it, and removed after one has ceased to: whoever dies in between leaves one that holds nothing, or that is noted as
//! leaving. One that has content and that no description names says that the description is an older copy.
//!
//! Owns nothing. Refuses: to take an error of storage for an answer, and to remove a delta of another number.

use super::BLOCK;
use super::described::{NotDone, read_description};
use super::images;
use super::layers::Place;
use super::redo::may_be_away;
use godwit_blockio::delta::{Delta, forget_map, is_empty};
use godwit_delta::{Id, Layout};
use godwit_snapshots::files::UNFINISHED;
use godwit_snapshots::{Images, files};
use godwit_types::snapshots::{DESCRIPTION_END, description_of};
use std::collections::BTreeSet;
use std::fs::{DirEntry, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// More descriptions of what is kept beside a disk are not read: each may be some MiB long.
const KEPT_MAX: u32 = 1024;
/// Numbers beyond this are nobody's: what counts on from them would come to an end.
const NUMBER_MAX: u64 = 1 << 32;
/// So much may a file system count for a file beside its content, bytes.
const UNFINISHED_MORE: u64 = 64 << 10;
/// So many names are tried for a new image.
const NUMBERS_MAX: usize = 64;

impl Place<'_> {
    /// Removes a delta that is not described as a part of the disk: one that says that it is this, or one that holds nothing. Returns whether there is
    /// nothing more to be done.
    pub fn remove(&self, images: &Images, name: &str, id: Option<&str>) -> bool {
        let id = id.and_then(Id::of_digits);
        if let Some(id) = id {
            // It is gone with the next boot of the host.
            let _ = forget_map(&self.map_of(id));
        }
        match self.is_to_go(images, name, id) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(
                    name,
                    "a file has the name of an image that is not needed, and is another one: it stays"
                );
                return true;
            }
            Err(why) => {
                tracing::warn!(name, why, "an image that is not needed is not removed yet");
                return false;
            }
        }
        let (descriptor, extent) = (self.descriptor(images, name), self.extent(images, name));
        // The descriptor makes it one.
        let gone = self.as_opener(|| {
            let gone = images::remove(&descriptor) && images::remove(&extent);
            gone.then_some(())
                .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::PermissionDenied).into())
        });
        gone.is_ok()
    }

    /// Whether an image that is not described holds nothing, or is not there.
    pub fn is_unused(&self, images: &Images, name: &str) -> bool {
        self.is_to_go(images, name, None) == Ok(true)
    }

    /// Whether under this name is the delta of this number, or an empty one where there is none, or nothing.
    fn is_to_go(&self, images: &Images, name: &str, id: Option<Id>) -> Result<bool, String> {
        let path = self.extent(images, name);
        let found = self.as_opener(|| match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => match may_be_away(&path) {
                false => Ok(false),
                true => Err(NotDone::Why(format!(
                    "{} is not the directory in which it was made: it is removed once its datastore is mounted there again; where that is gone for good, make the directory, and in it an empty file of that name",
                    path.parent().unwrap_or(&path).display()
                ))),
            },
            found => Ok(found.map(|_| true)?),
        });
        if !found? {
            return Ok(true);
        }
        let file = self.open_file_of(images, name, false)?;
        let Some(id) = id else {
            let empty = is_empty((file, &path), images.bytes, BLOCK);
            return empty.map_err(|error| error.to_string());
        };
        match Delta::unlocked((file, &path), id, BLOCK) {
            Ok(_) => Ok(true),
            Err(error) if error.is_of_storage() => Err(error.to_string()),
            Err(_) => Ok(false),
        }
    }

    /// Removes what is part of the disk no more, and has the description forget it.
    pub fn remove_what_leaves(&self, images: &Images) -> Result<(), String> {
        let leaving = images.leaving.iter();
        let gone = leaving.filter(|(name, id)| self.remove(images, name, id.as_deref()));
        let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
        match gone.is_empty() {
            true => Ok(()),
            false => self.save(&images.without(&gone)),
        }
    }

    /// Removes deltas beside the disk that no description names and that hold nothing, and what was to be one: a process that died made them for a snapshot.
    pub fn remove_unnamed(&self, images: &Images) {
        let kept = match self.kept_names() {
            Ok(kept) => kept,
            Err(why) => {
                tracing::warn!(
                    disk = self.spec.name,
                    why,
                    "empty images beside the disk stay, since it is not known which of them belong to what is kept there"
                );
                return;
            }
        };
        self.remove_unfinished(images);
        let mut unnamed = self.unnamed(images).unwrap_or_default();
        unnamed.retain(|(name, _)| !kept.contains(name));
        for (name, _) in unnamed {
            if self.is_unused(images, &name) {
                self.remove(images, &name, None);
            }
        }
        // It was made before the first of them, and says nothing of a disk that is one raw image.
        if images.is_one_raw()
            && let Err(why) = self.forget_own_descriptor()
        {
            let disk = &self.spec.name;
            tracing::info!(disk, why, "a descriptor that is not needed stays");
        }
    }

    /// Removes files that were to get the names of images, or of their descriptors, and did not: those that nobody but their owner may read, as they are made, and that
    /// have no more than a delta without content.
    fn remove_unfinished(&self, images: &Images) {
        let (Ok(own), Ok(layout)) = (self.file_name(), Layout::of(images.bytes)) else {
            return;
        };
        let is_of_own = |name: &str| {
            let stem = files::of_extent(name).or_else(|| files::of_descriptor(name));
            stem.is_some_and(|stem| stem == own || files::number_of(own, stem).is_some())
        };
        let is_unfinished = |entry: &DirEntry| {
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(UNFINISHED));
            let is_small = |found: Metadata| {
                let taken = found.blocks().saturating_mul(512);
                let is_ours = found.is_file() && found.mode() & 0o777 == 0o600;
                is_ours && taken <= layout.directory().end + UNFINISHED_MORE
            };
            name.is_some_and(is_of_own) && entry.metadata().is_ok_and(is_small)
        };
        let above = self.path().parent().unwrap_or(Path::new("/"));
        let removed = self.as_opener(|| {
            let mut all_gone = true;
            for entry in above.read_dir()? {
                let entry = entry?;
                all_gone &= !is_unfinished(&entry) || images::remove(&entry.path());
            }
            // Whoever else made one of them may remove it.
            match all_gone {
                true => Ok(()),
                false => Err(io::Error::from(io::ErrorKind::PermissionDenied).into()),
            }
        });
        if let Err(why) = removed {
            let disk = &self.spec.name;
            tracing::info!(
                disk,
                why,
                "images that were not made to their end may be left beside it"
            );
        }
    }

    /// Nothing is written to a delta before a description names it: one that has content and is later than all that are described was named by
    /// a later description.
    pub fn must_be_the_latest(&self, images: &Images) -> Result<(), String> {
        let kept = self.kept_names();
        let later = self.unnamed(images)?.into_iter();
        let mut later = later.filter(|(name, number)| {
            let is_kept = kept.as_ref().is_ok_and(|kept| kept.contains(name));
            *number >= images.next && !is_kept
        });
        let is_older = later.find_map(|(name, _)| match self.is_to_go(images, &name, None) {
            Ok(true) => None,
            Ok(false) => Some(Ok(name)),
            Err(why) => Some(Err(why)),
        });
        match (is_older.transpose()?, kept) {
            (None, _) => Ok(()),
            (Some(name), Err(why)) => Err(format!(
                "whether {} belongs to the disk, or to what is kept beside it, cannot be told: {why}",
                files::extent(&name)
            )),
            (Some(name), Ok(_)) => {
                let (descriptor, extent) = (files::descriptor(&name), files::extent(&name));
                Err(format!(
                    "{} is older than {descriptor} beside it, which it does not name: what was written since would be lost; put back what belongs together, or, if that may be lost, move {descriptor} and {extent} away",
                    description_of(self.path()).display()
                ))
            }
        }
    }

    /// Deltas of what came of this disk with a migration and is kept beside it: their files have the names that they had.
    pub(super) fn kept_names(&self) -> Result<BTreeSet<String>, String> {
        let kept = format!("{}.kept-", self.file_name()?);
        let above = self.path().parent().unwrap_or(Path::new("/"));
        let is_description =
            |name: &str| name.starts_with(&kept) && name.ends_with(DESCRIPTION_END);
        self.as_opener(|| {
            let (mut names, mut known) = (BTreeSet::new(), 0);
            for entry in above.read_dir()? {
                let entry = entry?;
                if !entry.file_name().to_str().is_some_and(is_description) {
                    continue;
                }
                known += 1;
                if known > KEPT_MAX {
                    return Err(NotDone::Why(format!(
                        "more than {KEPT_MAX} files are called {kept}*{DESCRIPTION_END}: move those away that nobody needs"
                    )));
                }
                if let Some(images) = read_description(&entry.path())? {
                    images.check().map_err(NotDone::Why)?;
                    names.extend(images.images.into_keys());
                }
            }
            Ok(names)
        })
    }

    /// A number from which on no file beside the disk's has one in its name.
    pub(super) fn first_number(&self) -> Result<u64, String> {
        let numbered = self.numbered();
        let numbered = numbered.map_err(|why| format!("beside {}: {why}", self.spec.path))?;
        let numbers = numbered.into_iter().map(|(_, number)| number);
        Ok(numbers.max().map_or(1, |last| last.saturating_add(1)))
    }

    /// Names of deltas of this disk that are not described, and their numbers.
    fn unnamed(&self, images: &Images) -> Result<Vec<(String, u64)>, String> {
        let is_named =
            |name: &String| images.images.contains_key(name) || images.leaving.contains_key(name);
        let mut found = self.numbered()?;
        found.retain(|(name, _)| !is_named(name));
        Ok(found)
    }

    /// Names of deltas beside this disk, described or not, and their numbers.
    fn numbered(&self) -> Result<Vec<(String, u64)>, String> {
        let own = self.file_name()?;
        let number = |name: &str| {
            let name = files::of_extent(name)?;
            let number = files::number_of(own, name)?;
            (number <= NUMBER_MAX).then(|| (name.to_owned(), number))
        };
        let above = self.path().parent().unwrap_or(Path::new("/"));
        self.as_opener(|| {
            let mut found = Vec::new();
            for entry in above.read_dir()? {
                found.extend(entry?.file_name().to_str().and_then(number));
            }
            Ok(found)
        })
    }

    /// A number for the next delta under whose name there is nothing.
    pub fn free_number(&self, images: &Images) -> Result<u64, String> {
        let own = self.file_name()?;
        let is_free = |number: &u64| {
            let name = files::delta(own, *number);
            let files = [self.descriptor(images, &name), self.extent(images, &name)];
            files.iter().all(|file| file.symlink_metadata().is_err())
        };
        let mut numbers = (images.next..).take(NUMBERS_MAX);
        numbers.find(is_free).ok_or_else(|| {
            format!(
                "there are files under the next {NUMBERS_MAX} names for images of disk '{}': see whose they are",
                self.spec.name
            )
        })
    }
}
