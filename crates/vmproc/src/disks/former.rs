//! Removal of an image that is no disk any more: of the very one, and of nothing that took its place.
//!
//! Which file it is, is judged by what was noted of it ([`godwit_ownership::NotedImage`]). Owns nothing. Refuses: another file, and, until that is
//! known, one that may be another; and a block device, which is whoever made it's to remove: only its label is told that it holds no disk, if it
//! has one.

use super::entry::{Entry, Found};
use super::labelled::{self, Whose, let_go};
use super::told;
use crate::image::readable_record;
use godwit_blockio::holder;
use godwit_ownership::{Is, NotedImage};
use godwit_types::image::KnownImage;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

/// What the log is told once of: it may be tried for days.
const LOOKED_AT: &str = "looked at";

/// What is noted of such an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Former<'a> {
    /// The disk's name, for people.
    pub disk: &'a str,
    pub path: &'a Path,
    /// The number of its device and its own on that.
    pub image: (u64, u64),
    /// What this host knew of it, if it is the one that it knew.
    pub known: Option<&'a KnownImage>,
    /// The name of the part that a device may hold of it.
    pub part: Option<&'a str>,
}

/// Whether an image of this identity ([`godwit_qemu::disk::identity_of`]) is a block device: no file has number 0.
pub(super) fn is_device((_, inode): (u64, u64)) -> bool {
    inode == 0
}

/// Says that a disk's former image stays where it is, but for what a label says of it.
pub(super) fn tell_left(disk: &str, path: &str) {
    tracing::info!(
        disk,
        path,
        "its former image is a block device, of which nothing is removed; its label, if it has one, calls it free"
    );
}

impl Former<'_> {
    /// Returns whether nothing is left of it that is to be removed.
    pub(super) fn remove(&self) -> bool {
        let (disk, path) = (self.disk, self.path.display());
        if is_device(self.image) {
            tell_left(disk, &path.to_string());
            let (disk, part) = (self.known.map(Whose::Disk), self.part.map(Whose::Part));
            let whose: Vec<_> = disk.into_iter().chain(part).collect();
            return whose.is_empty() || let_go(self.path, &whose);
        }
        let looked = Entry::looked_at(self.path).and_then(|(found, entry)| match found {
            Found::Nothing => Ok(entry.is_on(self.image.0)),
            found => match self.compare(found, &entry)? {
                Is::It => {
                    let is_gone = entry.remove();
                    if is_gone {
                        tracing::info!(disk, %path, "its former image is removed");
                    }
                    Ok(is_gone)
                }
                Is::Another => {
                    tracing::warn!(
                        disk,
                        "{path} is not the file that the guest had: it is left alone"
                    );
                    Ok(true)
                }
                Is::Unknown => {
                    let why = "whether it is its former image is not certain";
                    if told::is_news((LOOKED_AT, self.path), why) {
                        tracing::warn!(disk, %path, "{why}: it is left alone");
                    }
                    Ok(false)
                }
            },
        });
        looked.unwrap_or_else(|error| {
            // The place itself may be away for now.
            let is_away = error.kind() == io::ErrorKind::NotFound;
            if !is_away && told::is_news((LOOKED_AT, self.path), &error.to_string()) {
                tracing::warn!(disk, %path, %error, "its former image cannot be looked at");
            }
            false
        })
    }

    /// What has its name now.
    pub(super) fn look(&self) -> io::Result<Is> {
        if is_device(self.image) {
            return labelled::compare(self.path, self.known);
        }
        let (found, entry) = Entry::looked_at(self.path)?;
        self.compare(found, &entry)
    }

    pub(super) fn compare(&self, found: Found, entry: &Entry<'_>) -> io::Result<Is> {
        let Found::File(found) = found else {
            return Ok(Is::Another);
        };
        let says = match self.known {
            Some(_) => said_by(entry)?,
            None => None,
        };
        Ok(self.noted().compare(found, says.as_ref()))
    }

    /// Whether its file is there, by whomever it was taken since.
    pub(super) fn is_there(&self) -> io::Result<bool> {
        if is_device(self.image) {
            let says =
                labelled::look(self.path)?.and_then(|found| labelled::known_by(&found.label));
            return Ok(says.is_some() && self.noted().is_there((0, 0), says.as_ref()));
        }
        let (found, entry) = Entry::looked_at(self.path)?;
        Ok(match found {
            Found::File(found) => self.noted().is_there(found, said_by(&entry)?.as_ref()),
            Found::Nothing | Found::Other => false,
        })
    }

    pub(super) fn noted(&self) -> NotedImage<'_> {
        NotedImage {
            image: self.image,
            known: self.known,
        }
    }
}

/// What a file says of the disk whose image it is; nothing where it says nothing that can be read.
pub(super) fn said_by(entry: &Entry<'_>) -> io::Result<Option<KnownImage>> {
    let file = entry.open()?;
    let held = match holder::read(file.as_fd()) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => None,
        held => held?,
    };
    let record = readable_record(held.as_ref());
    Ok(record.map(|record| record.known()))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use godwit_ownership::{IMAGE_RECORD_FORMAT, ImageRecord};
    use godwit_qemu::disk::identity_of;
    use godwit_types::image::ImageId;
    use godwit_types::{Generation, HostName, VmName};

    /// Has a file say that it was taken so often.
    pub(in super::super) fn say(path: &Path, taken: u64) -> KnownImage {
        let record = ImageRecord {
            format: IMAGE_RECORD_FORMAT,
            image: ImageId::new(7),
            vm: VmName::new("web").unwrap(),
            disk: "root".to_owned(),
            holder: HostName::new("a").unwrap(),
            generation: Generation(2),
            taken,
        };
        let file = std::fs::File::options().write(true).read(true).open(path);
        let file = file.unwrap();
        let before = holder::read(file.as_fd()).unwrap();
        let text = serde_json::to_vec(&record).unwrap();
        assert!(holder::replace(file.as_fd(), before.as_ref(), &text).unwrap());
        record.known()
    }

    /// What becomes of an image that says this, if anything, where this is noted of it: whether it counts as gone, and whether it is.
    fn removed(
        says: Option<u64>,
        known: bool,
        noted: impl Fn(u64, u64) -> (u64, u64),
    ) -> [bool; 2] {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("root.raw");
        std::fs::write(&path, "image").unwrap();
        let noted_then = say(&path, 3);
        match says {
            Some(taken) => drop(say(&path, taken)),
            None => {
                std::fs::remove_file(&path).unwrap();
                std::fs::write(&path, "image").unwrap();
            }
        }
        let (device, inode) = identity_of(&path).unwrap().unwrap();
        let former = Former {
            disk: "root",
            path: &path,
            image: noted(device, inode),
            known: known.then_some(&noted_then),
            part: None,
        };
        [former.remove(), !path.exists()]
    }

    #[test]
    fn of_a_block_device_nothing_is_removed_whatever_has_its_name_by_now() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        let former = Former {
            disk: "root",
            path: &path,
            image: (0x700, 0),
            known: None,
            part: None,
        };
        assert!(former.remove(), "nothing is to be done where it is gone");
        std::fs::write(&path, "somebody's").unwrap();
        assert!(former.remove() && path.exists());
        std::os::unix::fs::symlink("/dev/none", directory.path().join("link")).unwrap();
        let path = directory.path().join("link");
        assert!(
            Former {
                path: &path,
                ..former
            }
            .remove()
                && path.is_symlink()
        );
    }

    #[test]
    fn an_image_is_removed_for_what_it_says_whatever_number_its_device_has() {
        let (same, moved) = (|d, i| (d, i), |d, i| (d + 1, i));
        assert_eq!(removed(Some(3), true, same), [true, true]);
        assert_eq!(removed(Some(3), true, moved), [true, true]);
        // It came back since, and has the numbers that an earlier one had.
        assert_eq!(removed(Some(4), true, same), [true, false]);
    }

    #[test]
    fn an_image_of_which_nothing_is_said_or_known_is_removed_by_its_numbers() {
        let (same, moved) = (|d, i| (d, i), |d, i| (d + 1, i));
        for (says, known) in [(None, true), (Some(3), false), (None, false)] {
            assert_eq!(removed(says, known, same), [true, true]);
            assert_eq!(removed(says, known, moved), [false, false], "not certain");
            let other = |d, i| (d, i + 1);
            assert_eq!(removed(says, known, other), [true, false]);
        }
    }
}
