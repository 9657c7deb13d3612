//! Disks on block devices that bear a label ([`godwit_blockio::label`]): made, called whole, and let go again.
//!
//! What a file's name tells the label does: while a disk comes its device holds a part of one under the name that a file would have, and
//! a device that the disk has left holds nothing. Owns nothing: the label is the device's, and is written with the device's lock.
//! Refuses, as a place: a device that holds a disk or a part of one, whoever's, and one without a label on which anything is. Lets
//! nothing go but the very part or disk that is noted.

use super::claim::named;
use super::former::is_device;
use super::images::arriving_path;
use super::kept::must_be_nobodys;
use super::left::Copying;
use super::served::{Served, ServedDisks};
use super::{BLOCK, LOCK_WAIT, lock_name};
use crate::faults::planted;
use crate::image::record_in;
use godwit_blockio::label::{self, End, Found, Holds, Label};
use godwit_blockio::{Access, Image, Known, lock_file};
use godwit_ownership::Is;
use godwit_qemu::device::{must_take, open_device, whose_on};
use godwit_qemu::disk::identity_of_open;
use godwit_types::datastore::is_device_path;
use godwit_types::image::KnownImage;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, MigrationId, VmName};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
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

/// What came to the device of a disk under this name is the disk from now on.
pub(super) fn finish_at(name: &str, (vm, disk): (&VmName, &DiskSpec)) -> io::Result<()> {
    let file = open_device(Path::new(&disk.path), OFlags::RDWR)?;
    finish(file.as_fd(), name, (vm, &disk.name))
}

/// Whether no device has this path now: nobody can tell what it holds.
pub(super) fn is_away(path: &Path) -> bool {
    let opened = open_device(path, OFlags::RDONLY);
    opened.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Bytes of the part with this name; nothing where the device holds something else.
pub(super) fn part_at(path: &str, name: &str) -> io::Result<Option<u64>> {
    let found = look(Path::new(path))?;
    let part = found.filter(|found| Whose::Part(name).is(&found.label));
    Ok(part.map(|found| found.label.bytes))
}

/// The part with the first name gets the second one, under which nothing lets it go. A person may be about to let it go.
pub(super) fn keep_part(path: &str, [name, kept]: [&str; 2]) -> io::Result<bool> {
    let file = open_device(Path::new(path), OFlags::RDWR)?;
    let locked = lock_file(
        &file,
        Path::new(path),
        Access::ReadWrite,
        "kept",
        FREED_WITHIN,
    );
    locked.map_err(io::Error::other)?;
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
/// nothing is left to be done: of one that is away that is not known. A device with another name than one below `/dev` is not looked at.
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
            label::let_go(file.as_fd(), found.as_ref())?;
            tracing::info!(path = %path.display(), "a block device holds no disk any more");
        }
        Ok(())
    });
    freed.map_or_else(
        |error| {
            let path = path.display();
            match error.kind() {
                // It is looked at again and again, and may never come back.
                io::ErrorKind::NotFound => {
                    tracing::debug!(%path, %error, "what a block device holds is not let go yet");
                }
                _ => tracing::warn!(%path, %error, "what a block device holds is not let go yet"),
            }
            false
        },
        |()| true,
    )
}

/// The part with this name is the disk from now on. All of it is durable.
fn finish(image: BorrowedFd<'_>, name: &str, (vm, disk): (&VmName, &str)) -> io::Result<()> {
    let is_ours = |label: &Label| label.vm == vm.as_str() && label.disk == disk;
    let found = label::read(image)?.filter(|found| is_ours(&found.label));
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
        // On the very descriptor that is written to, until the image is opened for good, which is a copy of it.
        lock_file(&file, path, Access::ReadWrite, &lock, LOCK_WAIT)
            .map_err(|error| refused(&named(&self.config, self.what().uid, file.as_fd(), error)))?;
        self.must_be_another(spec, &file)
            .map_err(|why| refused(&why))?;
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
        Ok(file)
    }

    /// Refuses the device that a disk of this very VM is on already, under another name.
    fn must_be_another(&self, spec: &DiskSpec, file: &File) -> Result<(), String> {
        let own = identity_of_open(file).map_err(|error| error.to_string())?;
        let what = self.what();
        match what.with_images().find(|(_, image)| *image == own) {
            Some((disk, _)) => Err(format!(
                "{} and {}, where disk '{}' is, are two names of one device: choose another place",
                spec.path, disk.path, disk.name
            )),
            None => Ok(()),
        }
    }

    /// As [`finish`], of what a disk of this VM was copied to.
    pub(super) fn finish_copied(&self, copying: &Copying, image: &Image) -> io::Result<()> {
        let name = name_in(&copying.beside);
        finish(image.as_fd(), &name, (&self.config.vm, &copying.disk))
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
        if self.what().is_plain(&spec.path) {
            return Ok(());
        }
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

    /// An image that was opened, as what is known of its device says.
    pub(super) fn image_of(
        &self,
        file: File,
        (spec, access): (&DiskSpec, Access),
        is_made: bool,
    ) -> Result<Image, ApiError> {
        let (what, part) = (self.what(), self.part_of(spec, is_made));
        let known = Known {
            part: part.as_deref(),
            is_plain: part.is_none() && what.is_plain(&spec.path),
            device: device_in(&what.labelled, &spec.path),
        };
        let image = Image::of_known(file, Path::new(&spec.path), (access, BLOCK), known);
        let image = image.map_err(|error| self.refused(spec, &error))?;
        self.must_have_label(spec, &image)
            .map_err(|why| self.refused(spec, &why))?;
        Ok(image)
    }

    /// Once an image is locked: what its device says is what counts, and is at the end that the device has now.
    pub(super) fn settle_label(&self, spec: &DiskSpec, image: &mut Image) -> Result<(), ApiError> {
        self.must_have_label(spec, image)
            .map_err(|why| self.refused(spec, &why))?;
        if image.access() == Access::ReadOnly {
            return Ok(());
        }
        if let Err(error) = image.move_label_to_end() {
            // It is found where it is for as long as this process knows where that is.
            tracing::warn!(disk = spec.name, %error, "the label of a device that was made longer stays where it is");
        }
        self.note_end(spec, image.label());
        Ok(())
    }

    fn note_end(&self, spec: &DiskSpec, found: Option<&Found>) {
        let labelled = found.map(|found| Labelled::of(&spec.path, found));
        let what = self.what();
        if let Some(labelled) = labelled
            && what.is_labelled(&spec.path)
            && !what.labelled.contains(&labelled)
        {
            self.amend(|what| what.note_label(labelled));
        }
    }

    /// Has the label of a disk whose guest goes on be at the end that its device has now: that may have been made longer meanwhile.
    pub(super) fn bring_label_to_end(&self, spec: &DiskSpec, image: BorrowedFd<'_>) {
        let what = self.what();
        if spec.read_only || !what.is_labelled(&spec.path) {
            return;
        }
        let was = device_in(&what.labelled, &spec.path);
        let moved = label::read_of(image, was).and_then(|found| {
            let found = found.map(|found| label::move_to_end(image, &found));
            found.transpose()
        });
        match moved {
            Ok(found) => self.note_end(spec, found.as_ref()),
            Err(error) => {
                tracing::warn!(disk = spec.name, %error, "the label of its device cannot be read or moved");
            }
        }
    }

    /// Refuses a device that had a label, and has none: its end is another one, or it is another device. And one that was not known
    /// here to have one, and whose label is of another disk: where that ends may be nowhere.
    fn must_have_label(&self, spec: &DiskSpec, image: &Image) -> Result<(), String> {
        let (path, what) = (&spec.path, self.what());
        let had_label = what.is_labelled(path);
        let Some(found) = image.label() else {
            let was = device_in(&what.labelled, path)
                .map_or_else(String::new, |was| format!(", when it had {was} bytes"));
            return match had_label && !planted("label-not-missed") {
                true => Err(format!(
                    "the device {path} has lost the label in its last MiB, which tells where the disk ends{was}: if the device was made larger or smaller, make it as large as it was"
                )),
                false => Ok(()),
            };
        };
        if spec.shared {
            return Err(format!(
                "the disk on the device {path} is of one host at a time, by its label: leave out 'shared = true'"
            ));
        }
        if had_label || image.part().is_some() || self.is_of(spec, &found.label) {
            return Ok(());
        }
        let (whose, bytes, device) = (whose_on(&found.label), image.bytes(), found.device);
        Err(format!(
            "the image {path} is not opened: it is {whose} by its label, and ends after {bytes} of the device's {device} bytes: name another path for this disk; if the label is left from before the device was made anew, or that disk is to be this one's, 'godwit image release {path}' on this host lets it go, and the same once more drops the label"
        ))
    }

    /// Whether a label is of this disk, or of one that a person let go.
    fn is_of(&self, spec: &DiskSpec, label: &Label) -> bool {
        let own = (self.config.vm.as_str(), spec.name.as_str());
        match label.text.as_deref() {
            None => (label.vm.as_str(), label.disk.as_str()) == own,
            Some([]) => true,
            Some(text) => record_in(text)
                .ok()
                .flatten()
                .is_some_and(|record| (record.vm.as_str(), record.disk.as_str()) == own),
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

/// A block device that bears a label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Labelled {
    /// How long the device was is not known: an earlier version noted it, or its label could not be read just then.
    At(String),
    /// The device was so long when it was labelled: there the label is where the device was made longer since.
    Long { path: String, device: u64 },
}

impl Labelled {
    pub(super) fn of(path: &str, found: &Found) -> Self {
        let (path, device) = (path.to_owned(), found.device);
        Self::Long { path, device }
    }

    /// Of a device that a disk goes on with now.
    pub(super) fn seen(path: &Path) -> Self {
        let found = look(path).ok().flatten();
        let path = path.to_string_lossy();
        found.map_or_else(
            || Self::At(path.to_string()),
            |found| Self::of(&path, &found),
        )
    }

    pub(super) fn path(&self) -> &String {
        match self {
            Self::At(path) | Self::Long { path, .. } => path,
        }
    }
}

pub(super) fn is_among(labelled: &[Labelled], path: &str) -> bool {
    labelled.iter().any(|labelled| labelled.path() == path)
}

/// How long the device with this path was when it was labelled, if that is noted.
pub(super) fn device_in(labelled: &[Labelled], path: &str) -> Option<u64> {
    labelled.iter().find_map(|labelled| match labelled {
        Labelled::Long { path: own, device } if own == path => Some(*device),
        _ => None,
    })
}

impl ServedDisks {
    /// A device bears a label.
    pub(super) fn note_label(&mut self, label: Labelled) {
        self.labelled.retain(|noted| noted.path() != label.path());
        self.labelled.push(label);
    }

    /// Whether the device at this path is known to bear one.
    pub(super) fn is_labelled(&self, path: &str) -> bool {
        is_among(&self.labelled, path)
    }

    /// Where the disk on the device with this path ends.
    pub(super) fn end_of(&self, path: &str) -> End {
        let is_filled = |copying: &Copying| copying.path == path;
        match self.is_plain(path) && !self.copying.as_ref().is_some_and(is_filled) {
            true => End::OfDevice,
            false => End::ByLabel(device_in(&self.labelled, path)),
        }
    }

    /// Whether a device is or was a disk here, and bore none: what is at its end is its guest's.
    pub(super) fn is_plain(&self, path: &str) -> bool {
        self.plain_devices().iter().any(|plain| plain == path)
    }

    pub(super) fn plain_devices(&self) -> Vec<String> {
        let own = self.with_images().filter(|(_, image)| is_device(*image));
        let all = own.map(|(disk, _)| &disk.path).chain(&self.plain);
        let plain = all.filter(|path| !self.is_labelled(path));
        plain.cloned().collect()
    }
}

#[cfg(test)]
#[path = "labelled_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "strange_device_tests.rs"]
mod strange_device_tests;
