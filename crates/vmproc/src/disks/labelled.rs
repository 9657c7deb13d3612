//! Disks on block devices that bear a label ([`godwit_blockio::label`]): made, called whole, and let go again.
//!
//! What a file's name tells the label does: while a disk comes its device holds a part of one under the name that a file would have, and
//! a device that the disk has left holds nothing. Owns nothing: the label is the device's, and is written with the device's lock.
//! Refuses, as a place: a device that holds a disk or a part of one, whoever's, and one without a label on which anything is. Lets
//! nothing go but the very part or disk that is noted.

use super::claim::named;
use super::images::arriving_path;
use super::kept::must_be_nobodys;
use super::served::{Served, ServedDisks};
use super::{LOCK_WAIT, lock_name};
use crate::faults::planted;
use crate::image::record_in;
use godwit_blockio::label::{self, Found, Holds, Label};
use godwit_blockio::{Access, Image, lock_file, unlock_file};
use godwit_ownership::Is;
use godwit_qemu::device::{must_take, open_device, whose_on};
use godwit_types::datastore::is_device_path;
use godwit_types::image::KnownImage;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, MigrationId};
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long whoever had a device until just now may have it still.
const FREED_WITHIN: Duration = Duration::from_millis(500);

/// How long a source waits at most for a device to be zeroed.
const ZEROED_WITHIN: Duration = Duration::from_secs(20);

/// What is to be let go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Whose<'a> {
    /// The part with the name that a file would have had.
    Part(&'a str),
    /// The disk of which this is known.
    Disk(&'a KnownImage),
}

/// The name that a label bears in the place of a file with this path.
pub(super) fn name_in(beside: &str) -> String {
    let name = Path::new(beside).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// What the device at a path says, if it bears a label.
pub(super) fn look(path: &Path) -> io::Result<Option<Found>> {
    label::read(open_device(path, OFlags::RDONLY)?.as_fd())
}

/// Whether a device holds the disk of which this is known; nothing of a device that says nothing.
pub(super) fn compare(path: &Path, known: Option<&KnownImage>) -> io::Result<Is> {
    Ok(match (look(path)?, known) {
        (Some(found), Some(known)) if Whose::Disk(known).is(&found.label) => Is::It,
        (Some(_), _) => Is::Another,
        (None, _) => Is::Unknown,
    })
}

/// What a label says of the disk, where somebody has had it.
pub(super) fn known_by(label: &Label) -> Option<KnownImage> {
    let text = label.text.as_deref()?;
    let record = record_in(text).ok().flatten();
    record.map(|record| record.known())
}

impl Whose<'_> {
    fn is(&self, label: &Label) -> bool {
        match (self, &label.holds) {
            (Self::Part(name), Holds::Part(found)) => name == found,
            // Under which generation counts for nothing.
            (Self::Disk(known), Holds::Disk) => known_by(label)
                .is_some_and(|says| (&says.image, says.taken) == (&known.image, known.taken)),
            _ => false,
        }
    }
}

/// What comes with a migration has this name there.
pub(super) fn arriving_name(path: &str, migration: &MigrationId) -> String {
    name_in(&arriving_path(path, migration))
}

/// What came to the device at a path under this name is the disk from now on.
pub(super) fn finish_at(path: &str, name: &str) -> io::Result<()> {
    let file = open_device(Path::new(path), OFlags::RDWR)?;
    finish(file.as_fd(), name)
}

/// Bytes of the part with this name; nothing where the device holds something else.
pub(super) fn part_at(path: &str, name: &str) -> io::Result<Option<u64>> {
    let found = look(Path::new(path))?;
    let part = found.filter(|found| Whose::Part(name).is(&found.label));
    Ok(part.map(|found| found.label.bytes))
}

/// The part with the first name gets the second one, under which nothing lets it go.
pub(super) fn keep_part(path: &str, [name, kept]: [&str; 2]) -> io::Result<bool> {
    let file = open_device(Path::new(path), OFlags::RDWR)?;
    match label::read(file.as_fd())? {
        Some(found) if Whose::Part(name).is(&found.label) => {
            let label = Label {
                holds: Holds::Part(kept.to_owned()),
                ..found.label.clone()
            };
            label::write(file.as_fd(), Some(&found), label).map(|_| true)
        }
        Some(found) => Ok(Whose::Part(kept).is(&found.label)),
        None => Ok(false),
    }
}

/// Has a device say that it holds nothing, if it holds one of these, durably. What it holds else is not ours. Returns whether
/// nothing is left to be done. A device with another name than one below `/dev` is not looked at.
pub(super) fn let_go(path: &Path, whose: &[Whose<'_>]) -> bool {
    if !is_device_path(&path.to_string_lossy()) {
        return true;
    }
    let is_one = |label: &Label| whose.iter().any(|whose| whose.is(label));
    let freed = open_device(path, OFlags::RDWR).and_then(|file| {
        let is_ours = |found: &Option<Found>| {
            let label = found.as_ref().map(|found| &found.label);
            label.is_some_and(|label| is_one(label) || planted("any-device-freed"))
        };
        if !is_ours(&label::read(file.as_fd())?) {
            return Ok(());
        }
        let locked = lock_file(&file, path, Access::ReadWrite, "left", FREED_WITHIN);
        locked.map_err(io::Error::other)?;
        let found = label::read(file.as_fd())?;
        if is_ours(&found) {
            label::write(file.as_fd(), found.as_ref(), Label::free())?;
            tracing::info!(path = %path.display(), "a block device holds no disk any more");
        }
        Ok(())
    });
    freed.map_or_else(
        |error| {
            let path = path.display();
            tracing::warn!(%path, %error, "what a block device holds is not let go");
            // One that is away says, once it is back, what it said: no disk that its VM knows of.
            error.kind() == io::ErrorKind::NotFound
        },
        |()| true,
    )
}

/// The part with this name is the disk from now on. All of it is durable.
pub(super) fn finish(image: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let found = label::read(image)?;
    match found {
        Some(found) if found.label.holds == Holds::Disk => Ok(()),
        Some(found) if found.label.holds == Holds::Part(name.to_owned()) => {
            let whole = Label {
                holds: Holds::Disk,
                ..found.label.clone()
            };
            label::write(image, Some(&found), whole).map(drop)
        }
        _ => Err(io::Error::other(
            "its label does not say any more what was begun there: see who may write to that device",
        )),
    }
}

/// Bytes of the whole disk that is on a device.
pub(super) fn length_of(path: &Path) -> io::Result<u64> {
    match look(path)? {
        Some(found) if found.label.holds == Holds::Disk => Ok(found.label.bytes),
        _ => Err(io::Error::other(
            "by its label the device holds no whole disk",
        )),
    }
}

impl Served {
    /// Has a device of this host hold a part of the disk, under this name, durably and before anything comes. It must be free.
    pub(super) fn make_on_device(
        &self,
        spec: &DiskSpec,
        (name, bytes): (&str, u64),
    ) -> Result<File, ApiError> {
        let refused = |why: &dyn std::fmt::Display| self.refused(spec, why);
        let (file, path) = (self.open_file(spec)?, Path::new(&spec.path));
        let kind = file
            .metadata()
            .map_err(|error| refused(&error))?
            .file_type();
        if !kind.is_block_device() {
            return Err(refused(&format!("{} is no block device", spec.path)));
        }
        let lock = lock_name(&self.config, spec);
        lock_file(&file, path, Access::ReadWrite, &lock, LOCK_WAIT)
            .map_err(|error| refused(&named(&self.config, self.what().uid, file.as_fd(), error)))?;
        must_be_nobodys(&self.config, &file)
            .map_err(|why| refused(&format!("the device {} {why}", spec.path)))?;
        let found = must_take(file.as_fd(), &spec.path, bytes).map_err(|why| refused(&why))?;
        let part = Label {
            holds: Holds::Part(name.to_owned()),
            bytes,
            vm: self.config.vm.to_string(),
            disk: spec.name.clone(),
            text: None,
        };
        let failed = |error: io::Error| refused(&format!("{}: {error}", spec.path));
        label::write(file.as_fd(), found.as_ref(), part).map_err(failed)?;
        // Whoever opens it for good takes it on a descriptor of its own.
        unlock_file(&file, &lock).map_err(failed)?;
        Ok(file)
    }

    /// As [`Self::make_on_device`] for a disk that comes from another host, which sends no holes: all of it is zero.
    pub(super) fn make_arriving(
        &self,
        spec: &DiskSpec,
        (migration, bytes): (&MigrationId, u64),
    ) -> Result<File, ApiError> {
        let name = arriving_name(&spec.path, migration);
        let made = self.make_on_device(spec, (&name, bytes))?;
        let until = Instant::now() + ZEROED_WITHIN;
        let zeroed = match planted("device-not-zeroed") {
            true => Ok(()),
            false => label::zero(made.as_fd(), bytes, || Instant::now() < until),
        };
        zeroed.map_err(|error| {
            let path = &spec.path;
            let why = match error.kind() {
                io::ErrorKind::TimedOut => format!(
                    "the device {path} is not zeroed within {} s, and no disk comes from another host before that: let it come to a datastore that is a directory, and move it to the device then, with 'godwit vm move-disk'",
                    ZEROED_WITHIN.as_secs()
                ),
                _ => format!("the device {path} cannot be zeroed: {error}"),
            };
            self.refused(spec, &why)
        })?;
        Ok(made)
    }

    /// Refuses a device that was made for another disk, and that nobody has had yet, which would tell whose it is.
    pub(super) fn must_be_made_for(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
    ) -> Result<(), String> {
        let found = label::read(image).map_err(|error| format!("{}: {error}", spec.path))?;
        let label = found.map(|found| found.label);
        let of = |label: &Label| {
            (label.vm.as_str() == self.config.vm.as_str()) && label.disk == spec.name
        };
        match label {
            Some(label) if label.text.is_none() && !of(&label) => Err(whose_on(&label)),
            _ => Ok(()),
        }
    }

    /// Refuses a device that had a label, and has none: its end is another one, or it is another device.
    pub(super) fn must_have_label(&self, spec: &DiskSpec, image: &Image) -> Result<(), String> {
        let path = &spec.path;
        if image.is_labelled() && spec.shared {
            return Err(format!(
                "the disk on the device {path} is of one host at a time, by its label: leave out 'shared = true'"
            ));
        }
        let had_label = self.what().labelled.contains(path);
        match had_label && !image.is_labelled() && !planted("label-not-missed") {
            true => Err(format!(
                "the device {path} has lost the label in its last MiB, which tells where the disk ends: if the device was made larger, make it as large as it was"
            )),
            false => Ok(()),
        }
    }

    /// The name of what this process fills on the device of this disk, if it fills it.
    pub(super) fn part_of(&self, spec: &DiskSpec, is_made: bool) -> Option<String> {
        if !is_device_path(&spec.path) {
            return None;
        }
        let what = self.what();
        let arrival = what.arriving.as_ref().filter(|_| spec.goes_along());
        if let Some(arrival) = arrival {
            return Some(arriving_name(&spec.path, &arrival.migration));
        }
        let copying = what.copying.as_ref();
        let copying = copying.filter(|copying| is_made && copying.path == spec.path);
        copying.map(|copying| name_in(&copying.beside))
    }
}

impl ServedDisks {
    /// The device at this path bears a label.
    pub(super) fn note_label(&mut self, path: String) {
        self.labelled.retain(|noted| *noted != path);
        self.labelled.push(path);
    }
}

#[cfg(test)]
#[path = "labelled_tests.rs"]
mod tests;
