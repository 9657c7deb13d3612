//! Disks that are made larger: while their guest runs, which sees it at once, or while the VM has none.
//!
//! How large a disk is its image alone says, so there is no record that could say something else: a process that dies meanwhile
//! leaves the former length or the new one, and whoever serves the disk next tells the guest which. The guest hears of a length that is
//! durable only. Owns nothing; waits for storage, so it runs on a thread of its own. Refuses: images that this host does not have, by their
//! lock and by what they say of themselves, disks that their guests only read, and what [`godwit_blockio::grow`] refuses.

use super::claim::{as_opener, bears_record, fresh_id, is_device, named};
use super::labelled::device_in;
use super::layers::{has_layers, has_snapshots};
use super::left::of_earlier;
use super::served::{open_file, refused};
use super::{BLOCK, Disks, LOCK_WAIT, lock_name};
use crate::faults::{planted, reached};
use crate::files::Paths;
use crate::hypervisor::{common_user, reserved};
use crate::image::{readable_record, record_of};
use godwit_blockio::grow::{NotGrown, grow, grow_plain, size};
use godwit_blockio::label::End;
use godwit_blockio::{Access, Image, Known, holder};
use godwit_ownership::{ImageClaim, ImageRecord, ImageRefusal, LAYERED_RECORD_FORMAT};
use godwit_qemu::disk::length_and_use;
use godwit_qemu::user;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, ErrorCode, Generation};
use rustix::fs::{fstat, fstatvfs, fsync};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

impl Disks {
    /// Makes a disk of the guest larger and tells it.
    pub(crate) fn resize(&self, wish: &ResizeDisk) -> Result<String, ApiError> {
        let served = &self.0;
        let what = served.what();
        let mut all = what.disks.iter().enumerate();
        let found = all.find(|(_, disk)| disk.name == wish.disk);
        let (index, spec) = found.ok_or_else(|| has_no_disk(&served.config, &wish.disk))?;
        let refused = |why: &dyn Display| served.refused(spec, why);
        must_be_written(spec).map_err(|why| refused(&why))?;
        must_be_one_image(served.may_have_layers(spec)).map_err(|why| refused(&why))?;
        let disk = served.disk(index).map_err(|why| refused(&why))?;
        let status = disk.status().map_err(|error| refused(&error))?;
        if served.held().is_none() || !status.has_image {
            return Err(refused(&"its image is not this host's now"));
        }
        // Opened anew: that the new length did not become durable would else be told here, and not by the guest's next flush.
        let image = served.open_file(spec)?;
        let lent = disk.lend_image().map_err(|error| refused(&error))?;
        if !is_same(&image, &lent).map_err(|error| refused(&error))? {
            let why = format!("another file lies at {} than its image", spec.path);
            return Err(refused(&why));
        }
        let on = OnDevice {
            is_plain: what.is_plain(&spec.path),
            labelled: what.is_labelled(&spec.path).then_some(status.bytes),
        };
        let bytes = on.grow(image.as_fd(), wish.bytes(), spec.shared);
        let bytes = bytes.map_err(|why| refused(&not_grown(spec, &why)))?;
        if bytes < status.bytes {
            let (now, before) = (size(bytes), size(status.bytes));
            return Err(refused(&format!(
                "{} has {now}, and its guest works with {before}: a disk is only made larger",
                spec.path
            )));
        }
        reached("disk-resize.durable");
        let measured = disk.measure();
        measured.map_err(|error| {
            let (path, now) = (&spec.path, size(bytes));
            refused(&format!(
                "{path} has {now} now, and its guest was not told: {error}; give the same command again"
            ))
        })?;
        let hears = match status.running > 0 {
            true => ", and its guest sees it",
            false => ", and its guest sees it once it goes on",
        };
        let what = format!("{} now{hears}", size(bytes));
        Ok(done(&served.config, wish, &what, &image))
    }
}

/// A disk of a VM that this host holds under this generation, and that has no guest.
pub(crate) struct AtRest {
    pub config: VmProcessConfig,
    pub paths: Paths,
    pub spec: VmSpec,
    pub generation: Generation,
}

impl AtRest {
    pub(crate) fn resize(&self, wish: &ResizeDisk) -> Result<String, ApiError> {
        let mut disks = self.spec.disks.iter();
        let spec = disks.find(|disk| disk.name == wish.disk);
        let spec = spec.ok_or_else(|| has_no_disk(&self.config, &wish.disk))?;
        let refused = |why: &dyn Display| refused(&self.config, spec, why);
        must_be_written(spec).map_err(|why| refused(&why))?;
        let has_layers = has_layers(&self.config, self.owner().uid, &spec.path);
        must_be_one_image(has_layers).map_err(|why| refused(&why))?;
        let (image, on) = self.lock(spec)?;
        let bytes = on
            .grow(image.as_fd(), wish.bytes(), spec.shared)
            .map_err(|why| refused(&not_grown(spec, &why)))?;
        let what = format!("{} now", size(bytes));
        Ok(done(&self.config, wish, &what, image.as_fd()))
    }

    /// Opens a disk's image, which nobody else has from here on until it is dropped, and which is this VM's.
    fn lock(&self, spec: &DiskSpec) -> Result<(Image, OnDevice), ApiError> {
        let refused = |why: &dyn Display| refused(&self.config, spec, why);
        let file = open_file(&self.config, spec, self.owner())?;
        let path = Path::new(&spec.path);
        let earlier = of_earlier(&self.paths, &self.spec.disks);
        let known = Known {
            part: None,
            is_plain: earlier.plain.contains(&spec.path),
            device: device_in(&earlier.labelled, &spec.path),
        };
        let image = Image::of_known(file, path, (Access::ReadWrite, BLOCK), known);
        let mut image = image.map_err(|error| refused(&error))?;
        let name = lock_name(&self.config, spec);
        let locked = image.lock(&name, LOCK_WAIT);
        locked.map_err(|error| {
            refused(&named(&self.config, self.owner().uid, image.as_fd(), error))
        })?;
        let on = OnDevice {
            is_plain: known.is_plain,
            labelled: image.label().map(|found| found.label.bytes),
        };
        if !on.is_plain {
            self.must_be_ours(spec, image.as_fd())
                .map_err(|why| refused(&why))?;
        }
        Ok((image, on))
    }

    /// Opens and locks the images of several disks.
    pub(super) fn lock_all(&self, specs: &[DiskSpec]) -> Result<Vec<Image>, ApiError> {
        let lock = |spec| self.lock(spec).map(|(image, _)| image);
        specs.iter().map(lock).collect()
    }

    /// Has a disk's image, which is locked, say that it is a part from now on, to builds that know of no snapshots. What it says else stays, and one
    /// that says nothing yet says so when its VM starts.
    pub(super) fn write_layered_record(
        &self,
        spec: &DiskSpec,
        image: BorrowedFd<'_>,
    ) -> Result<(), ApiError> {
        let noted = as_opener(&self.config, self.owner().uid, || {
            if !bears_record(image)? {
                return Ok(());
            }
            let held = holder::read(image)?;
            let Some(found) = readable_record(held.as_ref()) else {
                return Ok(());
            };
            let part = ImageRecord {
                format: LAYERED_RECORD_FORMAT,
                ..found
            };
            let text = serde_json::to_vec(&part).map_err(io::Error::other)?;
            holder::replace(image, held.as_ref(), &text)?;
            fsync(image).map_err(io::Error::from)
        });
        noted.map_err(|error| refused(&self.config, spec, &error))
    }

    pub(super) fn owner(&self) -> user::User {
        let reserved = reserved(&self.config);
        user::of_disks(common_user(&self.config, &reserved), &self.spec)
    }

    /// As it is judged before it is opened for a guest; but nothing is taken.
    fn must_be_ours(&self, spec: &DiskSpec, image: BorrowedFd<'_>) -> Result<(), String> {
        let path = &spec.path;
        let unread = |error: io::Error| {
            format!(
                "which host has the image {path} cannot be told: {error}; see that its storage answers, and try again"
            )
        };
        if !bears_record(image).map_err(unread)? || planted("larger-unjudged") {
            return Ok(());
        }
        let held = as_opener(&self.config, self.owner().uid, || holder::read(image));
        let found = held.map_err(unread)?.as_ref().map(record_of).transpose()?;
        let known = of_earlier(&self.paths, &self.spec.disks).known;
        let fresh = fresh_id().map_err(unread)?;
        let claim = ImageClaim {
            vm: &self.config.vm,
            disk: &spec.name,
            host: &self.config.host,
            generation: self.generation,
            known: known.iter().find(|known| known.disk == spec.name),
            anew: true,
            fresh: &fresh,
            layered: has_layers(&self.config, self.owner().uid, &spec.path),
        };
        let found = found.flatten();
        let judged = claim.judge(found.as_ref()).map(drop);
        let judged = judged.and_then(|()| match found {
            // Whoever starts the VM takes it; until then it is that disk.
            Some(found) if (&found.vm, &found.disk) != (&self.config.vm, &spec.name) => {
                Err(ImageRefusal::OfAnother {
                    vm: found.vm,
                    disk: found.disk,
                    holder: found.holder,
                })
            }
            _ => Ok(()),
        });
        judged.map_err(|why| {
            format!(
                "the image {path} is not made larger: {why}; 'godwit image show {path}' tells what it says of itself"
            )
        })
    }
}

/// What is known of a disk that may be a device: whatever is on it now.
struct OnDevice {
    is_plain: bool,
    /// Bytes of the disk, if its device bears a label.
    labelled: Option<u64>,
}

impl OnDevice {
    /// Nothing is made longer that a label is behind, however long its device has become.
    fn grow(&self, image: BorrowedFd<'_>, bytes: u64, is_shared: bool) -> Result<u64, NotGrown> {
        match self.labelled {
            Some(has) if has == bytes => Ok(has),
            Some(has) => Err(NotGrown::Labelled { has }),
            None if self.is_plain => grow_plain(image, bytes),
            None => grow(image, bytes, is_shared),
        }
    }
}

/// Says that a VM has no disk of that name.
pub(crate) fn has_no_disk(config: &VmProcessConfig, disk: &str) -> ApiError {
    let message = format!("VM '{}' has no disk '{disk}'", config.vm);
    ApiError::new(ErrorCode::InvalidRequest, message).on_host(&config.host)
}

fn must_be_written(spec: &DiskSpec) -> Result<(), &'static str> {
    match spec.read_only {
        true => Err(
            "its guest only reads it: while the VM is off, make its file longer with 'truncate -s SIZE FILE'",
        ),
        false => Ok(()),
    }
}

fn must_be_one_image(has_layers: bool) -> Result<(), String> {
    match has_layers {
        true => Err(has_snapshots("made larger")),
        false => Ok(()),
    }
}

fn is_same(one: &File, other: impl AsFd) -> io::Result<bool> {
    let (one, other) = (fstat(one)?, fstat(other)?);
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

fn not_grown(spec: &DiskSpec, why: &dyn Display) -> String {
    format!("{} is not made larger: {why}", spec.path)
}

/// What a person hears; also where the guest cannot fill the disk.
fn done(config: &VmProcessConfig, wish: &ResizeDisk, what: &str, image: impl AsFd) -> String {
    let said = format!("disk '{}' of VM '{}' has {what}", wish.disk, config.vm);
    match lacks(image.as_fd()) {
        Ok(Some((wanted, free))) => format!(
            "{said}; its file system has {} free, and a full disk would take {}",
            size(free),
            size(wanted)
        ),
        _ => said,
    }
}

/// What an image may still come to take of its file system, and what that has, where it is less.
fn lacks(image: BorrowedFd<'_>) -> io::Result<Option<(u64, u64)>> {
    if is_device(image)? {
        return Ok(None);
    }
    let (bytes, used) = length_and_use(&File::from(image.try_clone_to_owned()?), End::OfDevice)?;
    let found = fstatvfs(image)?;
    let (wanted, free) = (bytes - used, found.f_bavail.saturating_mul(found.f_frsize));
    Ok((wanted > free).then_some((wanted, free)))
}
