//! Whether this host has the disks that went along with a migration which it ended: the other host removes its own copy for that word.
//!
//! Each such migration is in `disks.json` with the images that its disks had, which follow a disk that moves on this host. Those whose disks went on
//! wholly with a later migration are in a file of their own, since `disks.json` goes with them. Owns that file. Refuses: to count an image
//! as there that may be another one than the disk had, or that could not be read.

use super::entry::Entry;
use super::former::{Former, Is, is_device};
use super::moving::open_disk_image;
use super::served::{Served, ServedDisks};
use super::{Disks, moving};
use crate::files::Paths;
use godwit_ownership::{ImageId, KnownImage};
use godwit_store::{StoreError, load_json, save_json};
use godwit_types::MigrationId;
use godwit_types::vm::DiskSpec;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// So many migrations are remembered, the newest.
const KEPT: usize = 64;
/// From so many places of an image something is read, so much each time, and no longer is waited for it.
const PLACES: u64 = 8;
const PLACE_BYTES: usize = 4096;
const READ_WAIT: Duration = Duration::from_secs(2);

/// The disks that went along with a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WentAlong {
    pub migration: MigrationId,
    pub disks: Vec<DiskAlong>,
}

/// One of them, with the image that it has since, also where it has moved on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiskAlong {
    pub disk: String,
    pub path: String,
    /// What the image says of itself; where it says nothing,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// it is known by device and inode,
    pub identity: (u64, u64),
    /// which mean something in the boot in which they were noted.
    pub boot: String,
}

impl DiskAlong {
    pub(super) fn of(spec: &DiskSpec, identity: (u64, u64), known: Option<&KnownImage>) -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Self {
            disk: spec.name.clone(),
            path: spec.path.clone(),
            image: known.map(|known| known.image.clone()),
            identity,
            boot: boot.unwrap_or_default().trim().to_owned(),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let is_same_image = match (&self.image, &other.image) {
            (Some(image), Some(other)) => image == other,
            (None, None) => {
                let is_one_boot = !self.boot.is_empty() && self.boot == other.boot;
                self.identity == other.identity && is_one_boot
            }
            _ => false,
        };
        is_same_image && (&self.disk, &self.path) == (&other.disk, &other.path)
    }
}

impl ServedDisks {
    /// These go along with a migration.
    pub(super) fn note_along(&mut self, migration: &MigrationId, disks: Vec<DiskAlong>) {
        let migration = migration.clone();
        self.along.retain(|along| along.migration != migration);
        self.along.insert(0, WentAlong { migration, disks });
        self.along.truncate(KEPT);
    }

    /// A disk has another image of this host from now on.
    pub(super) fn follow_along(&mut self, former: &str, now: &DiskAlong) {
        let all = self.along.iter_mut().flat_map(|along| &mut along.disks);
        all.filter(|disk| disk.disk == now.disk && disk.path == former)
            .for_each(|disk| disk.clone_from(now));
    }

    fn went_along(&self, migration: &MigrationId) -> Option<&WentAlong> {
        let mut along = self.along.iter();
        along.find(|along| along.migration == *migration)
    }

    /// The places and images of the disks that went along with a migration, if each is a disk still, with the image that it had.
    fn those_along(
        &self,
        migration: &MigrationId,
        known: impl Fn(&str) -> Option<KnownImage>,
    ) -> Option<Vec<(&DiskSpec, (u64, u64))>> {
        let along = self.went_along(migration)?;
        let now = |then: &DiskAlong| {
            let mut all = self.disks.iter().zip(&self.images);
            let (spec, image) = all.find(|(spec, _)| spec.name == then.disk)?;
            let now = DiskAlong::of(spec, *image, known(&spec.name).as_ref());
            let is_unread = self.unread.contains(&spec.path);
            (now.is_same(then) && !is_unread).then_some((spec, *image))
        };
        along.disks.iter().map(now).collect()
    }

    /// Notes whether a disk's image could be read wholly.
    fn note_read(&mut self, path: &str, is_read: bool) {
        self.unread.retain(|unread| unread != path);
        if !is_read {
            self.unread.push(path.to_owned());
        }
    }
}

/// Of a VM without a QEMU: whether each disk that went along with this migration has the very image that it had.
pub(crate) fn has_disks_of(paths: &Paths, migration: &MigrationId) -> bool {
    let Ok(Some(what)) = load_json::<ServedDisks>(&paths.disks()) else {
        return false;
    };
    let known = |disk: &str| what.known.iter().find(|known| known.disk == disk).cloned();
    let images = what.those_along(migration, known);
    images.is_some_and(|images| {
        let mut are_there = images.iter();
        are_there.all(|(disk, image)| is_there(&what, disk, *image)) && can_read(&images)
    })
}

fn is_there(what: &ServedDisks, disk: &DiskSpec, image: (u64, u64)) -> bool {
    let path = Path::new(&disk.path);
    let former = Former {
        disk: &disk.name,
        path,
        image,
        known: what.known.iter().find(|known| known.disk == disk.name),
    };
    // Which device has a name is looked at when it is read.
    let looked = Entry::looked_at(path).and_then(|(found, entry)| former.compare(found, &entry));
    is_device(image) || looked.is_ok_and(|is| is == Is::It)
}

/// Whether something can be read all over these images, in time.
fn can_read(images: &[(&DiskSpec, (u64, u64))]) -> bool {
    let images: Vec<_> = images
        .iter()
        .map(|(disk, image)| (DiskSpec::clone(disk), *image))
        .collect();
    let read = move || {
        images.iter().try_for_each(|(disk, image)| {
            let file = open_disk_image(disk, *image)?;
            read_places(&file).map_err(|error| format!("disk '{}': {error}", disk.name))
        })
    };
    let until = Instant::now() + READ_WAIT;
    let read = moving::begin("disk-read", read).and_then(|read| moving::wait(&read, until)?);
    if let Err(why) = &read {
        tracing::warn!(
            why,
            "another host that asks is not told that the disks are here"
        );
    }
    read.is_ok()
}

/// What the kernel has of them in memory says nothing of the storage.
fn read_places(image: &std::fs::File) -> io::Result<()> {
    let bytes = rustix::fs::seek(image, rustix::fs::SeekFrom::End(0))?;
    let last = bytes.saturating_sub(PLACE_BYTES as u64);
    let mut buffer = [0; PLACE_BYTES];
    for place in 0..PLACES {
        let at = last / (PLACES - 1) * place;
        fadvise(
            image,
            at,
            NonZeroU64::new(PLACE_BYTES as u64),
            Advice::DontNeed,
        )?;
        // A file of less than a place ends before.
        let _ = image.read_at(&mut buffer, at)?;
    }
    Ok(())
}

impl Disks {
    /// As [`has_disks_of`], of those that QEMU has.
    pub(crate) fn have_those_of(&self, migration: &MigrationId) -> bool {
        let served = &self.0;
        served.note_failures();
        let what = served.what();
        let is_here = what.arriving.as_ref().is_none_or(|arrival| arrival.is_here);
        let images = what.those_along(migration, |disk| served.known_of(&what, disk));
        is_here && served.missing().is_empty() && images.is_some_and(|images| can_read(&images))
    }
}

impl Served {
    /// Notes, durably, whether the image of this path could be read wholly.
    pub(super) fn note_read(&self, path: &str, is_read: bool) {
        if is_read != self.what().unread.iter().any(|unread| unread == path) {
            return;
        }
        if let Err(error) = self.change(|what| what.note_read(path, is_read)) {
            tracing::error!(path, %error, "that the image cannot be read is known to this process alone");
            self.amend(|what| what.note_read(path, is_read));
        }
    }

    /// Storage that has failed a guest since this was called last has not all of the disk.
    fn note_failures(&self) {
        for (gauge, disk) in self.gauges.iter().zip(&self.what().disks) {
            if gauge.has_failed_since() {
                self.note_read(&disk.path, false);
            }
        }
    }
}

/// Migrations whose disks went on wholly with later ones.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WentOn {
    migrations: Vec<MigrationId>,
}

/// Whether all disks that went along with a migration have gone on from here with a later one.
pub(crate) fn went_on(paths: &Paths, migration: &MigrationId) -> bool {
    let went_on = load_json::<WentOn>(&paths.went_on());
    went_on.is_ok_and(|on| on.is_some_and(|on| on.migrations.contains(migration)))
}

/// The VM's disks are elsewhere, with this migration: notes the earlier ones all of whose disks were among them.
pub(super) fn note_went_on(
    paths: &Paths,
    what: &ServedDisks,
    with: &MigrationId,
) -> Result<(), StoreError> {
    let Some(gone) = what.went_along(with) else {
        return Ok(());
    };
    let is_gone = |then: &DiskAlong| gone.disks.iter().any(|gone| gone.is_same(then));
    let earlier = what.along.iter().filter(|along| along.migration != *with);
    let earlier = earlier.filter(|along| along.disks.iter().all(is_gone));
    let mut migrations: Vec<_> = earlier.map(|along| along.migration.clone()).collect();
    if migrations.is_empty() {
        return Ok(());
    }
    let before = load_json::<WentOn>(&paths.went_on())?.unwrap_or_default();
    let is_new = |id: &MigrationId| !migrations.contains(id);
    let before: Vec<_> = before.migrations.into_iter().filter(is_new).collect();
    migrations.extend(before);
    migrations.truncate(KEPT);
    save_json(&paths.went_on(), &WentOn { migrations })
}

#[cfg(test)]
#[path = "there_tests.rs"]
mod tests;
