//! What a disk consists of that has snapshots: a description beside its image, and deltas above that.
//!
//! The disk's own image stays where it is, under its name: it bears the records, the lock is on it, and everybody else knows the disk by it.
//! What lies over it says `IMAGE.images` ([`super::described`]), on the disk's own storage: so neither a host whose state was put back from an
//! older copy nor a controller can bring back an older tree over newer images. One durable write of it is each change.
//!
//! Owns nothing: the files are the disk's. Refuses: deltas other than those that are described, and disks on block devices.

use super::claim::as_opener;
use super::described::{NotDone, not_done};
use super::images;
use super::served::{Served, open_file};
use super::{BLOCK, LOCK_WAIT, lock_name};
use crate::adoption::lock;
use crate::files::Paths;
use godwit_blockio::Image as DiskImage;
use godwit_blockio::delta::{
    Delta, NewDelta, Opening, Outliving, create, describe_base, describe_over, is_empty,
};
use godwit_delta::{Id, Parent};
use godwit_qemu::user::User;
use godwit_snapshots::{Fresh, Images};
use godwit_types::ApiError;
use godwit_types::datastore::is_device_path;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::snapshots::description_of;
use godwit_types::vm::DiskSpec;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the kernel tells which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// So many names are tried for a new image.
const NUMBERS_MAX: usize = 64;
/// By what deltas know a disk's own image: whoever reads a chain compares numbers.
const OWN_IMAGE: u32 = 0x676f_6477;

/// A disk whose images are looked at, with the rights with which they are opened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    /// Of the VM's QEMU.
    pub owner: User,
    pub spec: &'a DiskSpec,
}

/// The same for whoever looks later.
#[derive(Debug, Clone)]
pub(super) struct OwnedPlace {
    config: VmProcessConfig,
    paths: Paths,
    owner: User,
    pub spec: DiskSpec,
}

impl OwnedPlace {
    pub fn get(&self) -> Place<'_> {
        Place {
            config: &self.config,
            paths: &self.paths,
            owner: self.owner,
            spec: &self.spec,
        }
    }
}

/// Why a disk with snapshots is not changed as a whole.
pub(super) fn has_snapshots(changed: &str) -> String {
    format!(
        "it has snapshots, or what is left of deleted ones, and consists of several images, which are not {changed} together yet: delete its snapshots first ('godwit vm snapshot list' tells when they are merged)"
    )
}

/// Whether somebody may be told to have a description beside this image: where its own path says nothing of that.
pub(super) fn has_layers(path: &str) -> bool {
    !is_device_path(path) && description_of(Path::new(path)).symlink_metadata().is_ok()
}

impl Place<'_> {
    pub fn owned(&self) -> OwnedPlace {
        OwnedPlace {
            config: self.config.clone(),
            paths: self.paths.clone(),
            owner: self.owner,
            spec: self.spec.clone(),
        }
    }

    pub(super) fn as_opener<R: Send>(
        &self,
        work: impl Fn() -> Result<R, NotDone> + Sync,
    ) -> Result<R, String> {
        as_opener(self.config, self.owner.uid, work).map_err(|error| error.to_string())
    }

    pub(super) fn path(&self) -> &Path {
        Path::new(&self.spec.path)
    }

    /// The name of the disk's own file.
    pub fn file_name(&self) -> Result<&str, String> {
        let name = self.path().file_name().and_then(|name| name.to_str());
        name.ok_or_else(|| format!("{} names no file", self.spec.path))
    }

    pub fn must_take_snapshots(&self) -> Result<(), String> {
        match is_device_path(&self.spec.path) {
            false => Ok(()),
            true => Err(format!(
                "disk '{}' is on the block device {}, beside which there is no place for what is written after a snapshot: move it to a datastore that is a directory first",
                self.spec.name, self.spec.path
            )),
        }
    }

    /// A file of this image of the disk.
    fn file_of(&self, images: &Images, name: &str, file: &str) -> PathBuf {
        match images.elsewhere.get(name) {
            Some(directory) => Path::new(directory).join(file),
            None => self.path().with_file_name(file),
        }
    }

    fn descriptor(&self, images: &Images, name: &str) -> PathBuf {
        self.file_of(images, name, &descriptor_name(name))
    }

    fn extent(&self, images: &Images, name: &str) -> PathBuf {
        self.file_of(images, name, &extent_name(name))
    }

    /// The files of what lies over the disk's own image, and what describes them: they are of no use without it.
    pub fn files(&self, images: &Images) -> Vec<PathBuf> {
        let described = images.images.iter().map(|(name, image)| (name, &image.id));
        let deltas = described
            .chain(&images.leaving)
            .filter_map(|(name, id)| Some((name, id.as_deref()?)));
        let mut files = Vec::new();
        for (name, id) in deltas {
            files.extend([self.descriptor(images, name), self.extent(images, name)]);
            files.extend(id_of(id).map(|id| self.map_of(id)));
        }
        let own = self.path().file_name().and_then(|name| name.to_str());
        files.extend(own.map(|own| self.path().with_file_name(descriptor_name(own))));
        files.push(description_of(self.path()));
        files
    }

    /// Makes an empty delta, which is to lie over the top, durably; `images` describes it.
    pub fn make(&self, images: &Images, over: &str, fresh: &Fresh) -> Result<(), String> {
        let id = id_of(&fresh.id).ok_or("the name of a delta is no number")?;
        let parent = self.parent_of(images, over, fresh.elsewhere.as_ref())?;
        let descriptor = self.descriptor(images, &fresh.name);
        self.as_opener(|| {
            let new = NewDelta {
                descriptor: &descriptor,
                bytes: images.bytes,
                id,
                parent: &parent,
            };
            create(&new).map(drop).map_err(not_done)
        })
    }

    /// As others who read the chain know the image below one that lies in this directory.
    fn parent_of(
        &self,
        images: &Images,
        name: &str,
        from: Option<&String>,
    ) -> Result<Parent, String> {
        let image = images.images.get(name);
        let id = image.and_then(|image| image.id.as_deref());
        let hint = match images.elsewhere.get(name) == from {
            true => descriptor_name(name),
            false => self.descriptor(images, name).to_string_lossy().into_owned(),
        };
        if let Some(id) = id {
            let cid = id_of(id).ok_or("the name of a delta is no number")?.cid();
            return Ok(Parent { cid, hint });
        }
        let (descriptor, told) = (self.descriptor(images, name), (images.bytes, OWN_IMAGE));
        self.as_opener(|| match descriptor.symlink_metadata() {
            Ok(_) => Ok(()),
            Err(_) => describe_base(&descriptor, name, told)
                .map(drop)
                .map_err(not_done),
        })?;
        let cid = OWN_IMAGE;
        Ok(Parent { cid, hint })
    }

    /// Opens what lies over the disk's own image, from the lowest to the top. `no_guest_lives`: nobody goes on who was told of anything that is
    /// not durable.
    pub fn open(
        &self,
        images: &Images,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Vec<Delta>, String> {
        let mut deltas = self.open_lower(images, patience, no_guest_lives)?;
        if !self.is_own(&images.top)? {
            deltas.push(self.open_top(images, &images.top, patience, no_guest_lives)?);
        }
        Ok(deltas)
    }

    /// The same without the top.
    pub fn open_lower(
        &self,
        images: &Images,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Vec<Delta>, String> {
        let chain = images.chain(&images.top);
        let own = chain.last().map_or(Ok(false), |name| self.is_own(name));
        if !own? {
            let (disk, path) = (&self.spec.name, &self.spec.path);
            return Err(format!(
                "the images of disk '{disk}' do not lie over {path}"
            ));
        }
        let between = chain.iter().rev().skip(1);
        let between = between.filter(|name| **name != images.top);
        between
            .map(|name| self.open_frozen(images, name, patience, no_guest_lives))
            .collect()
    }

    /// Whether this is the name of the disk's own image.
    pub fn is_own(&self, name: &str) -> Result<bool, String> {
        Ok(self.file_name()? == name)
    }

    /// A process may have died before it froze what lies below the top since.
    fn open_frozen(
        &self,
        images: &Images,
        name: &str,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Delta, String> {
        let (file, id) = self.open_extent(images, name, true)?;
        let lock = lock_name(self.config, self.spec);
        let path = self.extent(images, name);
        let opened = Delta::parent_of((file, &path), id, opening(&lock, patience));
        let opened = opened.map_err(|error| error.to_string())?;
        if let Some(delta) = opened {
            return Ok(delta);
        }
        // What was answered before it was frozen is in its map.
        let mut delta = self.open_top(images, name, patience, no_guest_lives)?;
        delta.freeze().map_err(|error| error.to_string())?;
        Ok(delta)
    }

    pub fn open_top(
        &self,
        images: &Images,
        name: &str,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Delta, String> {
        let (file, id) = self.open_extent(images, name, false)?;
        let lock = lock_name(self.config, self.spec);
        let outliving = Outliving {
            map: &self.map_of(id),
            boot: boot()?,
            no_guest_lives,
        };
        let path = self.extent(images, name);
        let opened = Delta::top_of((file, &path), id, opening(&lock, patience), outliving);
        opened.map_err(|error| error.to_string())
    }

    /// Without a lock: the one on the disk's own image is for all that lie over it.
    pub fn open_unlocked(&self, images: &Images, name: &str) -> Result<Delta, String> {
        let (file, id) = self.open_extent(images, name, false)?;
        let opened = Delta::unlocked((file, &self.extent(images, name)), id, BLOCK);
        opened.map_err(|error| error.to_string())
    }

    /// Has a delta say over what it lies now.
    pub fn describe_anew(&self, images: &Images, name: &str) -> Result<(), String> {
        let image = images.images.get(name);
        let over = image.and_then(|image| image.over.as_deref());
        let over = over.ok_or_else(|| format!("{name} lies over nothing"))?;
        let parent = self.parent_of(images, over, images.elsewhere.get(name))?;
        let descriptor = self.descriptor(images, name);
        self.as_opener(|| describe_over(&descriptor, &parent).map_err(not_done))
    }

    fn open_extent(
        &self,
        images: &Images,
        name: &str,
        read_only: bool,
    ) -> Result<(File, Id), String> {
        let image = images.images.get(name);
        let id = image.and_then(|image| id_of(image.id.as_deref()?));
        let id = id.ok_or_else(|| format!("the image {name} is not described"))?;
        Ok((self.open_file_of(images, name, read_only)?, id))
    }

    /// Where the states of a top outlive this process: the run directory is on a tmpfs.
    fn map_of(&self, id: Id) -> PathBuf {
        let id = u128::from_be_bytes(id.0);
        self.paths.run.join(format!("delta-{id:032x}.states"))
    }

    /// Bytes that an image holds.
    pub fn bytes_of(&self, images: &Images, name: &str) -> u64 {
        let is_delta = images
            .images
            .get(name)
            .is_some_and(|image| image.id.is_some());
        let path = match is_delta {
            true => self.extent(images, name),
            false => self.file_of(images, name, name),
        };
        path.symlink_metadata()
            .map_or(0, |found| found.blocks().saturating_mul(512))
    }

    /// Removes a delta that is not described as a part of the disk: one that says that it is this, or one that holds nothing. Returns whether there is
    /// nothing more to be done.
    pub fn remove(&self, images: &Images, name: &str, id: Option<&str>) -> bool {
        let id = id.and_then(id_of);
        if let Some(id) = id {
            // It is gone with the next boot of the host.
            let _ = std::fs::remove_file(self.map_of(id));
        }
        let (descriptor, extent) = (self.descriptor(images, name), self.extent(images, name));
        if extent.symlink_metadata().is_ok() && !self.is_to_go(images, name, id) {
            tracing::warn!(
                name,
                "a file has the name of an image that is not needed, and is another one: it stays"
            );
            return true;
        }
        // The descriptor makes it one.
        let gone = self.as_common(|| {
            let gone = images::remove(&descriptor) && images::remove(&extent);
            gone.then_some(())
                .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::PermissionDenied).into())
        });
        gone.is_ok()
    }

    /// Whether an image that is not described holds nothing, or is not there.
    pub fn is_unused(&self, images: &Images, name: &str) -> bool {
        let extent = self.extent(images, name);
        extent.symlink_metadata().is_err() || self.is_to_go(images, name, None)
    }

    fn is_to_go(&self, images: &Images, name: &str, id: Option<Id>) -> bool {
        let path = self.extent(images, name);
        let Ok(file) = self.open_file_of(images, name, false) else {
            return false;
        };
        match id {
            Some(id) => Delta::unlocked((file, &path), id, BLOCK).is_ok(),
            None => is_empty((file, &path), BLOCK),
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

    /// Removes deltas beside the disk that no description names and that hold nothing: a process that died made them for a snapshot.
    pub fn remove_unnamed(&self, images: &Images) {
        for (name, _) in self.unnamed(images) {
            if self.is_to_go(images, &name, None) {
                self.remove(images, &name, None);
            }
        }
    }

    /// Nothing is written to a delta before a description names it: one that has content and is later than all that are described was named by
    /// a later description.
    pub fn must_be_the_latest(&self, images: &Images) -> Result<(), String> {
        let mut later = self.unnamed(images).into_iter();
        let later = later
            .find(|(name, number)| *number >= images.next && !self.is_to_go(images, name, None));
        match later {
            None => Ok(()),
            Some((name, _)) => Err(format!(
                "{} is older than {name}.vmdk beside it, which it does not name: what was written since would be lost; put back what belongs together, or, if that may be lost, move {name}.vmdk and {name}-sesparse.vmdk away",
                description_of(self.path()).display()
            )),
        }
    }

    /// Names of deltas of this disk that are not described, and their numbers.
    fn unnamed(&self, images: &Images) -> Vec<(String, u64)> {
        let Ok(own) = self.file_name() else {
            return Vec::new();
        };
        let beside = self.path().parent().and_then(|above| above.read_dir().ok());
        let number = |name: &str| {
            let name = name.strip_suffix("-sesparse.vmdk")?;
            let number = name.strip_prefix(own)?.strip_prefix(".d")?.parse().ok()?;
            Some((name.to_owned(), number))
        };
        let names = beside.into_iter().flatten().flatten();
        let found = names.filter_map(|entry| number(entry.file_name().to_str()?));
        let is_named =
            |name: &String| images.images.contains_key(name) || images.leaving.contains_key(name);
        found.filter(|(name, _)| !is_named(name)).collect()
    }

    /// A number for the next delta under whose name there is nothing.
    pub fn free_number(&self, images: &Images) -> Result<u64, String> {
        let own = self.file_name()?;
        let is_free = |number: &u64| {
            let name = Images::name_of(own, *number);
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

    fn open_file_of(&self, images: &Images, name: &str, read_only: bool) -> Result<File, String> {
        let path = self.extent(images, name);
        let spec = DiskSpec {
            path: path.to_string_lossy().into_owned(),
            read_only,
            ..self.spec.clone()
        };
        open_file(self.config, &spec, self.owner).map_err(|error| error.message)
    }
}

impl Served {
    /// What lies above a disk's image, where that has snapshots.
    pub(super) fn deltas(
        &self,
        (spec, image): (&DiskSpec, &DiskImage),
        (has_image, no_guest_lives): (bool, bool),
    ) -> Result<Vec<Delta>, ApiError> {
        let refused = |why: &dyn std::fmt::Display| self.refused(spec, why);
        let all = self.all();
        let place = all.place(spec);
        let found = place.load_of(image.as_fd());
        let Some(images) = found.map_err(|why| refused(&why))? else {
            return Ok(Vec::new());
        };
        if spec.read_only || !has_image {
            return Err(refused(&format!(
                "the image {} belongs to a disk with snapshots, and holds a part of it: it is served to that one alone, on the host that has it",
                spec.path
            )));
        }
        if images.bytes != image.bytes() {
            return Err(refused(&format!(
                "the image {} has {} bytes, and what is above it {}: put back what belongs together",
                spec.path,
                image.bytes(),
                images.bytes
            )));
        }
        let is_latest = images
            .must_be_one_moment(&self.config.vm)
            .and_then(|()| place.must_be_the_latest(&images));
        let confirmed = is_latest.and_then(|()| place.confirm(image.as_fd(), &images));
        confirmed.map_err(|why| refused(&why))?;
        lock(&self.layered).insert(spec.name.clone());
        let deltas = place.open(&images, LOCK_WAIT, no_guest_lives);
        deltas.map_err(|why| refused(&why))
    }
}

/// The file that says of what a delta of this name consists,
pub(super) fn descriptor_name(name: &str) -> String {
    format!("{name}.vmdk")
}

/// and the one that holds it.
pub(super) fn extent_name(name: &str) -> String {
    format!("{name}-sesparse.vmdk")
}

fn opening(name: &str, patience: Duration) -> Opening<'_> {
    Opening {
        block_bytes: BLOCK,
        name,
        patience,
    }
}

/// Of 128 bits, in hexadecimal digits.
pub(super) fn random_number() -> Result<String, String> {
    let mut number = [0; 16];
    getrandom::fill(&mut number).map_err(|error| error.to_string())?;
    Ok(format!("{:032x}", u128::from_be_bytes(number)))
}

fn id_of(text: &str) -> Option<Id> {
    let number = u128::from_str_radix(text, 16).ok()?;
    Some(Id(number.to_be_bytes()))
}

fn boot() -> Result<Id, String> {
    let told = std::fs::read_to_string(BOOT_ID);
    let told = told.map_err(|error| format!("{BOOT_ID}: {error}"))?;
    let digits: String = told.trim().chars().filter(|one| *one != '-').collect();
    id_of(&digits).ok_or_else(|| format!("{BOOT_ID} is no number"))
}
