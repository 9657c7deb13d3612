//! Whether this host has the disks that went along with a migration which it ended: the other host removes its own copy for that word.
//!
//! Each such migration is in `disks.json` with what its images said of themselves then; that follows a disk that moves on this host. Those whose disks
//! went on wholly with a later migration are in a file of their own, since `disks.json` goes with them. All looks are made by one thread at a time:
//! storage may hang. Owns that file. Refuses: to count an image as there that may be another one than the disk had, that is shorter, or that cannot be read,
//! or a disk with snapshots of which any other part is not there so.

use super::activity::Gauge;
use super::aside;
use super::described::described_beside;
use super::entry::{Entry, Found};
use super::former::said_by;
use super::labelled::known_by;
use super::served::{Served, ServedDisks};
use super::{BLOCK, Disks};
use crate::files::Paths;
use godwit_blockio::delta::is_frozen;
use godwit_blockio::label::{self, End};
use godwit_blockio::next_data;
use godwit_delta::Id;
use godwit_qemu::disk::{identity_of_open, open_to_look};
use godwit_qemu::parent::{Known, known_by as known_parent};
use godwit_snapshots::{Image, Images, Kind};
use godwit_store::{StoreError, load_json, save_json};
use godwit_types::MigrationId;
use godwit_types::datastore::is_device_path;
use godwit_types::image::KnownImage;
use godwit_types::vm::DiskSpec;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So many migrations are remembered, the newest.
const KEPT: usize = 64;
/// From so many places of an image something is read, so much each time, and no longer is waited for it.
const PLACES: u64 = 8;
/// The same of each other part of a disk with snapshots, which may have many.
const PART_PLACES: u64 = 2;
const PLACE_BYTES: usize = 4096;
const LOOK_WAIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Why another host was not told last that the disks are here.
static SAID: Mutex<String> = Mutex::new(String::new());

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
    /// What the image says of itself; where it can say nothing,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub says: Option<KnownImage>,
    /// it is known by device and inode,
    pub identity: (u64, u64),
    /// which mean something in the boot in which they were noted.
    pub boot: String,
    pub bytes: u64,
}

impl DiskAlong {
    /// As the image is now, and that.
    fn seen(disk: &str, path: &str, end: End) -> io::Result<(File, Self)> {
        let (file, says) = open(Path::new(path), end)?;
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let seen = Self {
            disk: disk.to_owned(),
            path: path.to_owned(),
            says,
            identity: identity_of_open(&file)?,
            boot: boot.unwrap_or_default().trim().to_owned(),
            bytes: label::length(file.as_fd(), end)?,
        };
        Ok((file, seen))
    }

    /// The same of a disk whose image QEMU has open; fails where another file has its name.
    fn seen_as(spec: &DiskSpec, image: (u64, u64), end: End) -> Result<Self, String> {
        let told = |why: &dyn Display| format!("disk '{}', {}: {why}", spec.name, spec.path);
        let seen = Self::seen(&spec.name, &spec.path, end);
        let (_, seen) = seen.map_err(|error| told(&error))?;
        match seen.identity == image {
            true => Ok(seen),
            false => Err(told(&"it is another file than the guest's")),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let is_same_image = match (&self.says, &other.says) {
            (Some(says), Some(other)) => says.image == other.image,
            (None, None) => {
                let is_one_boot = !self.boot.is_empty() && self.boot == other.boot;
                self.identity == other.identity && is_one_boot
            }
            _ => false,
        };
        is_same_image && (&self.disk, &self.path) == (&other.disk, &other.path)
    }

    /// Whether this is the disk with that image now, with what this host knows of it, and with the file that QEMU has, if one has it.
    fn is_there(
        &self,
        known: Option<&KnownImage>,
        open: Option<(u64, u64)>,
        end: End,
    ) -> Result<(), String> {
        let seen = Self::seen(&self.disk, &self.path, end);
        let (file, now) = seen.map_err(|error| error.to_string())?;
        if open.is_some_and(|image| image != now.identity) || !now.is_same(self) {
            return Err("it is another image than the one that went along".to_owned());
        }
        // What is known is written down only once the guest runs, and may be from before it was taken last.
        let is_older = |says: &KnownImage| {
            let mut before = known.into_iter().chain(&self.says);
            before.any(|before| before.image == says.image && says.taken < before.taken)
        };
        if now.says.as_ref().is_some_and(is_older) {
            return Err("it is an older copy".to_owned());
        }
        if now.bytes < self.bytes {
            let (bytes, then) = (now.bytes, self.bytes);
            return Err(format!("it has {bytes} bytes, and had {then}"));
        }
        let read = read_places(&file, now.bytes, PLACES);
        read.map_err(|error| error.to_string())?;
        parts_are_there(Path::new(&self.path), &file)
    }
}

/// An image, and what it says of itself: nothing where it can say nothing.
fn open(path: &Path, end: End) -> io::Result<(File, Option<KnownImage>)> {
    if is_device_path(&path.to_string_lossy()) {
        let file = open_to_look(&path.canonicalize()?)?;
        let says = label::read_at(file.as_fd(), end)?.and_then(|found| known_by(&found.label));
        return Ok((file, says));
    }
    let (found, entry) = Entry::looked_at(path)?;
    if !matches!(found, Found::File(_)) {
        return Err(io::Error::other("it is no file"));
    }
    Ok((entry.open()?, said_by(&entry)?))
}

/// What the kernel has of it in memory says nothing of the storage, and neither does a hole.
fn read_places(image: &File, bytes: u64, places: u64) -> io::Result<()> {
    fadvise(image, 0, None, Advice::DontNeed)?;
    fadvise(image, 0, None, Advice::Random)?;
    let mut buffer = [0; PLACE_BYTES];
    for place in 0..places {
        let from = bytes / places * place;
        // Holes up to its end are no places.
        let Some(data) = next_data(image, from..bytes)? else {
            break;
        };
        let at = data.start - data.start % PLACE_BYTES as u64;
        // An image may end before a place does.
        let _ = image.read_at(&mut buffer, at)?;
    }
    Ok(())
}

/// The image at this path is all of its disk, or all else of that is there, too: what its description says, and it can be read.
fn parts_are_there(own: &Path, image: &File) -> Result<(), String> {
    if is_device_path(&own.to_string_lossy()) {
        return Ok(());
    }
    let Some(images) = described_beside(own, image.as_fd())? else {
        return Ok(());
    };
    // What is neither is its own image, which has been looked at.
    let others = images.images.iter();
    let mut others = others.filter(|(_, part)| part.common || part.kind == Kind::Delta);
    others.try_for_each(|(name, part)| {
        let path = path_of(own, &images, (name, part));
        part_is_there(&path, part).map_err(|why| format!("its part {}: {why}", path.display()))
    })
}

/// The file of an image that is not the disk's own.
fn path_of(own: &Path, images: &Images, (name, part): (&String, &Image)) -> PathBuf {
    match part.common {
        true => PathBuf::from(name),
        false => images.extent_at(own, name),
    }
}

fn part_is_there(path: &Path, part: &Image) -> Result<(), String> {
    let told = |error: io::Error| error.to_string();
    let file = match is_device_path(&path.to_string_lossy()) {
        true => path.canonicalize().and_then(|path| open_to_look(&path)),
        false => open_file_at(path),
    };
    let file = file.map_err(told)?;
    // Before anything has it read past the kernel's memory, which takes no buffer of this.
    let bytes = label::length(file.as_fd(), End::OfDevice).map_err(told)?;
    read_places(&file, bytes, PART_PLACES).map_err(told)?;
    let other = "it is another one than is described";
    let id = part.id.as_deref();
    if part.common {
        if known_parent(&file, id.ok_or(other)?).map_err(told)? == Known::Not {
            return Err(other.to_owned());
        }
    } else {
        let id = id.and_then(Id::of_digits).ok_or(other)?;
        let looked = is_frozen((file, path), id, BLOCK);
        looked.map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn open_file_at(path: &Path) -> io::Result<File> {
    match Entry::looked_at(path)? {
        (Found::File(_), entry) => entry.open(),
        (Found::Nothing, _) => Err(io::ErrorKind::NotFound.into()),
        (Found::Other, _) => Err(io::Error::other("it is no file")),
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

    /// A disk has another image of this host from now on. One that had another one already when it went has not: that was not copied.
    pub(super) fn follow_along(&mut self, before: &DiskAlong, now: &DiskAlong) {
        let all = self.along.iter_mut().flat_map(|along| &mut along.disks);
        all.filter(|disk| disk.is_same(before))
            .for_each(|disk| disk.clone_from(now));
    }

    fn went_along(&self, migration: &MigrationId) -> Option<&WentAlong> {
        let mut along = self.along.iter();
        along.find(|along| along.migration == *migration)
    }

    /// The disks that went along with a migration, if each is one still, of which no part is known to be unreadable.
    fn those_along(&self, migration: &MigrationId) -> Option<Vec<DiskAlong>> {
        let along = self.went_along(migration)?;
        let is_disk = |then: &DiskAlong| {
            let mut disks = self.disks.iter();
            disks.any(|disk| (&disk.name, &disk.path) == (&then.disk, &then.path))
        };
        let is_read = |then: &DiskAlong| !self.unread.contains(&then.path);
        let mut all = along.disks.iter();
        let are_here = self.arriving.as_ref().is_none_or(|arrival| arrival.is_here);
        let are_disks = all.all(|then| is_disk(then) && is_read(then));
        (are_here && are_disks).then(|| along.disks.clone())
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
    let disks = what.those_along(migration);
    disks.is_some_and(|disks| {
        let all = disks.into_iter().map(|then| Asked {
            known: what.known_image(&then.disk).cloned(),
            open: None,
            end: what.end_of(&then.path),
            then,
        });
        are_there(all.collect())
    })
}

/// A disk that is asked for.
struct Asked {
    then: DiskAlong,
    known: Option<KnownImage>,
    /// The file that QEMU has.
    open: Option<(u64, u64)>,
    end: End,
}

/// Looks at all of them, on a thread of its own.
fn are_there(disks: Vec<Asked>) -> bool {
    let look = move || {
        disks.iter().try_for_each(|asked| {
            let (name, path) = (&asked.then.disk, &asked.then.path);
            let told = |why| format!("disk '{name}', {path}: {why}");
            let is_there = asked
                .then
                .is_there(asked.known.as_ref(), asked.open, asked.end);
            is_there.map_err(told)
        })
    };
    let looked = looked(look).and_then(|looked| looked);
    let why = looked.err().unwrap_or_default();
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if *said != why && !why.is_empty() {
        tracing::warn!(
            why,
            "another host is not told that the VM's disks are here, and keeps its copy"
        );
    }
    *said = why;
    said.is_empty()
}

/// Looks at images, once no other thread does.
fn looked<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    looked_alone((is_looking(), LOOK_WAIT), look)
}

fn looked_alone<T: Send + 'static>(
    (looks, patience): (&'static AtomicBool, Duration),
    look: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let until = Instant::now() + patience;
    while looks.swap(true, Ordering::SeqCst) {
        if Instant::now() >= until {
            return Err("its storage has not answered yet".to_owned());
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let turn = Turn(looks);
    let begun = aside::begin("disk-look", move || {
        let _turn = turn;
        look()
    });
    aside::wait(&begun?, until)
}

/// No other thread looks at images until this is dropped.
struct Turn(&'static AtomicBool);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Whether a thread of this process looks at images: another one would wait for the same storage.
#[cfg(not(test))]
fn is_looking() -> &'static AtomicBool {
    static LOOKS: AtomicBool = AtomicBool::new(false);
    &LOOKS
}

/// In a test each thread stands for a process.
#[cfg(test)]
fn is_looking() -> &'static AtomicBool {
    thread_local!(static LOOKS: &'static AtomicBool = Box::leak(Box::default()));
    LOOKS.with(|looks| *looks)
}

/// Whether a thread of this process may be in the hands of storage.
pub(crate) fn are_looked_at() -> bool {
    is_looking().load(Ordering::SeqCst)
}

/// How these disks are now, with the files that QEMU has; fails where one cannot be looked at, or storage does not answer.
pub(super) fn seen(disks: Vec<(DiskSpec, (u64, u64), End)>) -> Result<Vec<DiskAlong>, String> {
    looked(move || {
        let seen = disks
            .iter()
            .map(|(disk, image, end)| DiskAlong::seen_as(disk, *image, *end));
        seen.collect()
    })?
}

impl Disks {
    /// As [`has_disks_of`], of those that QEMU has.
    pub(crate) fn have_those_of(&self, migration: &MigrationId) -> bool {
        let served = &self.0;
        served.note_failures();
        let what = served.what();
        let Some(disks) = what.those_along(migration) else {
            return false;
        };
        let missing = served.missing().into_iter();
        let mut missing = missing.filter_map(|place| what.disks.get(place));
        let is_missing = missing.any(|spec| disks.iter().any(|disk| disk.disk == spec.name));
        let asked = |then: DiskAlong| {
            let (_, image) = what.with_image(&then.disk)?;
            Some(Asked {
                known: served.known_of(&what, &then.disk),
                open: Some(image),
                end: what.end_of(&then.path),
                then,
            })
        };
        let asked: Option<Vec<_>> = disks.into_iter().map(asked).collect();
        !is_missing && asked.is_some_and(are_there)
    }
}

impl Served {
    /// A disk of this QEMU with this image, as it is now.
    pub(super) fn seen_along(
        &self,
        spec: &DiskSpec,
        image: (u64, u64),
    ) -> Result<DiskAlong, String> {
        DiskAlong::seen_as(spec, image, self.what().end_of(&spec.path))
    }

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

    /// How often storage has failed the guest on the disk at this place.
    pub(super) fn faults(&self, place: usize) -> u64 {
        self.gauges.get(place).map_or(0, Gauge::faults)
    }

    /// All of an image was read, and storage had failed so often when that began: what failed before has been mended since.
    pub(super) fn note_whole(&self, (place, path): (usize, &str), faults: u64) {
        self.note_failures();
        if self.faults(place) == faults {
            self.note_read(path, true);
        }
    }

    /// Storage that has failed a guest since this was called last has not all of the disk.
    pub(super) fn note_failures(&self) {
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
