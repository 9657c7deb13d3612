//! What a disk consists of that has snapshots: a description beside its image, and deltas above that.
//!
//! The disk's own image stays where it is, under its name: it bears the records, the lock is on it, and everybody else knows the disk by it. That of a linked
//! disk holds nothing: in its place the deltas lie over an image that others have, too, which is opened for reading alone ([`super::parent`]).
//! What lies over it says `IMAGE.images` ([`super::described`]), on the disk's own storage: so neither a host whose state was put back from an
//! older copy nor a controller can bring back an older tree over newer images. One durable write of it is each change.
//!
//! Owns nothing: the files are the disk's. Refuses: deltas other than those that are described, and disks on block devices. What no description names is in [`super::unnamed`].

use super::beside::{self, OWN_IMAGE};
use super::claim::as_opener;
use super::described::{NotDone, not_done};
use super::parent::Trust;
use super::served::Served;
use super::{BLOCK, LOCK_WAIT, lock_name};
use crate::adoption::lock;
use crate::files::Paths;
use crate::hypervisor::{common_user, reserved};
use godwit_blockio::Image as DiskImage;
use godwit_blockio::delta::{
    Delta, NewDelta, Opening, Outliving, create, describe_base, describe_over, is_frozen,
    read_descriptor,
};
use godwit_delta::{Id, Parent};
use godwit_qemu::disk::DiskError;
use godwit_qemu::user::{self, User};
use godwit_snapshots::{Fresh, Images, Kind, files};
use godwit_types::ApiError;
use godwit_types::datastore::is_device_path;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::snapshots::{becomes_one_image, description_of, states_map_name};
use godwit_types::vm::DiskSpec;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where the kernel tells which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A disk whose images are looked at, with the rights with which they are opened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub config: &'a VmProcessConfig,
    pub paths: &'a Paths,
    /// Of the VM's QEMU.
    pub owner: User,
    pub spec: &'a DiskSpec,
    /// Device and inode of the disk's own image, where somebody has it open: what lies under its name later may be another one.
    pub image: Option<(u64, u64)>,
}

/// A [`Place`] that is kept by whoever looks at its disk's images later.
#[derive(Debug, Clone)]
pub(super) struct OwnedPlace {
    config: VmProcessConfig,
    paths: Paths,
    owner: User,
    pub spec: DiskSpec,
    image: Option<(u64, u64)>,
}

impl OwnedPlace {
    pub fn get(&self) -> Place<'_> {
        Place {
            config: &self.config,
            paths: &self.paths,
            owner: self.owner,
            spec: &self.spec,
            image: self.image,
        }
    }
}

/// Why a disk with snapshots is not changed as a whole.
pub(super) fn has_snapshots(changed: &str) -> String {
    format!(
        "it has snapshots, or images of deleted ones that are not merged yet, or redo logs of a move that failed, or is linked to another image, and consists of several images, which are not {changed} together yet: delete its snapshots first, if it has any ('godwit vm snapshot list' tells when all is merged, and why it is not: it may need room beside its image); {}",
        becomes_one_image("a linked disk without any")
    )
}

/// Whether there is a description beside this image, or may be one: only who hears that there is none changes the disk as if it were one image.
/// `uid`: of the VM's QEMU.
pub(super) fn has_layers(config: &VmProcessConfig, uid: u32, path: &str) -> bool {
    let at = description_of(Path::new(path));
    let found = || as_opener(config, uid, || at.symlink_metadata().map(drop));
    let is_none = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    !is_device_path(path) && !found().is_err_and(is_none)
}

/// Whether there is a description beside this image, for whoever has the rights of the image's opener already. That nobody may look there counts as none,
/// which is safe: it is asked with the rights of whoever opened the image through that directory; and the answer only decides which format the image's
/// record has, which keeps it from builds that know of no snapshots, and for that what is known of the disk by its description ([`Served::layered`]) counts
/// first.
pub(super) fn has_layers_here(path: &str) -> bool {
    let found = description_of(Path::new(path)).symlink_metadata();
    let is_none = |error: io::Error| {
        let kind = error.kind();
        kind == io::ErrorKind::NotFound || kind == io::ErrorKind::PermissionDenied
    };
    !is_device_path(path) && !found.is_err_and(is_none)
}

impl Place<'_> {
    pub fn owned(&self) -> OwnedPlace {
        OwnedPlace {
            config: self.config.clone(),
            paths: self.paths.clone(),
            owner: self.owner,
            spec: self.spec.clone(),
            image: self.image,
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

    pub(super) fn descriptor(&self, images: &Images, name: &str) -> PathBuf {
        images.descriptor_at(self.path(), name)
    }

    pub(super) fn extent(&self, images: &Images, name: &str) -> PathBuf {
        images.extent_at(self.path(), name)
    }

    /// Makes an empty delta, which is to lie over the top, durably; `images` describes it.
    pub fn make(&self, images: &Images, over: &str, fresh: &Fresh) -> Result<(), String> {
        let id = Id::of_delta(&fresh.id)?;
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
    pub(super) fn parent_of(
        &self,
        images: &Images,
        name: &str,
        from: Option<&String>,
    ) -> Result<Parent, String> {
        let image = images.images.get(name);
        let id = image.and_then(|image| image.id.as_deref());
        let hint = match images.elsewhere.get(name) == from {
            true => files::descriptor(name),
            false => self.descriptor(images, name).to_string_lossy().into_owned(),
        };
        if let Some(id) = id {
            let cid = Id::of_delta(id)?.cid();
            return Ok(Parent { cid, hint });
        }
        let descriptor = self.descriptor(images, name);
        self.as_opener(|| beside::describe(&descriptor, name, images.bytes))?;
        let cid = OWN_IMAGE;
        Ok(Parent { cid, hint })
    }

    /// The disk is one raw image again, which every program reads as it is.
    pub(super) fn forget_own_descriptor(&self) -> Result<(), String> {
        let name = self.file_name()?;
        let descriptor = self.path().with_file_name(files::descriptor(name));
        self.as_opener(|| beside::forget(&descriptor, name))
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
        let trust = match no_guest_lives {
            true => Trust::Asked,
            false => Trust::AsBefore,
        };
        self.over_parent(images, deltas, (patience, trust))
    }

    /// Lays those of a linked disk over the image as which that begins. Its guest lives.
    pub fn over_its_parent(
        &self,
        images: &Images,
        deltas: Vec<Delta>,
        patience: Duration,
    ) -> Result<Vec<Delta>, String> {
        self.over_parent(images, deltas, (patience, Trust::AsBefore))
    }

    fn over_parent(
        &self,
        images: &Images,
        mut deltas: Vec<Delta>,
        (patience, trust): (Duration, Trust),
    ) -> Result<Vec<Delta>, String> {
        let is_due = images.common().is_some() && !deltas.is_empty();
        if is_due && !deltas.first().is_some_and(Delta::is_linked) {
            let lowest = deltas.remove(0);
            deltas.insert(0, self.over_common(images, lowest, (patience, trust))?);
        }
        Ok(deltas)
    }

    /// Opens what lies between the disk's own image and the top, from the lowest to the highest, without those two.
    fn open_lower(
        &self,
        images: &Images,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Vec<Delta>, String> {
        let lower = self.lower(images)?.into_iter();
        lower
            .map(|name| self.open_frozen(images, name, patience, no_guest_lives))
            .collect()
    }

    /// What lies between the disk's own image and the top, taken from what the disk has open by what it consisted of before, so that nothing long is read
    /// while it stands still; only what it lacks is opened. `merged`: one of them with what it has got since, as whoever gave it that has it open.
    pub fn keep_lower(
        &self,
        images: &Images,
        mut had: Vec<Delta>,
        merged: Option<Delta>,
        patience: Duration,
    ) -> Result<Vec<Delta>, String> {
        let mut all = had.iter_mut();
        if let Some(merged) = merged
            && let Some(same) = all.find(|delta| delta.id() == merged.id())
        {
            same.go_by(merged);
        }
        let mut kept = Vec::new();
        for name in self.lower(images)? {
            let image = images.images.get(name);
            let id = image.and_then(|image| Id::of_digits(image.id.as_deref()?));
            let place = had.iter().position(|delta| Some(delta.id()) == id);
            kept.push(match place {
                Some(place) => had.remove(place),
                None => self.open_frozen(images, name, patience, false)?,
            });
        }
        Ok(kept)
    }

    /// All that lies over the disk's own image, taken from what the disk has open ([`Self::keep_lower`]), with this top over it, which is open without a
    /// lock and is not frozen; no guest was told of anything that its tables do not say.
    pub fn keep_under(
        &self,
        images: &Images,
        had: Vec<Delta>,
        top: Delta,
        patience: Duration,
    ) -> Result<Vec<Delta>, String> {
        let mut deltas = self.keep_lower(images, had, None, patience)?;
        let lock = lock_name(self.config, self.spec);
        let outliving = Outliving {
            map: &self.map_of(top.id()),
            boot: boot()?,
            no_guest_lives: true,
        };
        let top = top.into_top(opening(&lock, patience), outliving);
        deltas.push(top.map_err(|error| error.to_string())?);
        self.over_its_parent(images, deltas, patience)
    }

    /// The names of what lies between the disk's own image and the top, from the lowest one on.
    fn lower<'a>(&self, images: &'a Images) -> Result<Vec<&'a str>, String> {
        let chain = images.chain(&images.top);
        let own = chain.last().map_or(Ok(false), |name| self.is_own(name));
        if !own? && images.common().is_none() {
            let (disk, path) = (&self.spec.name, &self.spec.path);
            return Err(format!(
                "the images of disk '{disk}' do not lie over {path}"
            ));
        }
        let between = chain.into_iter().rev().skip(1);
        Ok(between.filter(|name| *name != images.top).collect())
    }

    /// Whether this is the name of the disk's own image.
    pub fn is_own(&self, name: &str) -> Result<bool, String> {
        Ok(self.file_name()? == name)
    }

    /// A process may have died before it froze what lies below the top since.
    pub(super) fn open_frozen(
        &self,
        images: &Images,
        name: &str,
        patience: Duration,
        no_guest_lives: bool,
    ) -> Result<Delta, String> {
        let (file, id) = self.open_extent(images, name, true)?;
        let lock = lock_name(self.config, self.spec);
        let path = self.extent(images, name);
        let wanted = (id, images.bytes);
        let opened = Delta::parent_of((file, &path), wanted, opening(&lock, patience));
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
        let wanted = (id, images.bytes);
        let opened = Delta::top_of((file, &path), wanted, opening(&lock, patience), outliving);
        let opened = opened.map_err(|error| error.to_string())?;
        let disk = &self.spec.name;
        if opened.went_back() {
            tracing::warn!(
                disk,
                "its storage had failed to keep what the guest before this one wrote: the disk begins as after a power cut"
            );
        }
        if opened.is_lost() {
            tracing::error!(
                disk,
                "its storage has failed to keep what its guest wrote: no flush of this guest succeeds any more; stop the VM and start it again"
            );
        }
        Ok(opened)
    }

    /// Whether nothing is written to it any more.
    pub(super) fn is_frozen(&self, images: &Images, name: &str) -> Result<bool, String> {
        let (file, id) = self.open_extent(images, name, true)?;
        let path = self.extent(images, name);
        let looked = is_frozen((file, &path), (id, images.bytes), BLOCK);
        looked.map_err(|error| error.to_string())
    }

    /// Without a lock: the one on the disk's own image is for all that lie over it.
    pub fn open_unlocked(&self, images: &Images, name: &str) -> Result<Delta, String> {
        let (file, id) = self.open_extent(images, name, false)?;
        let path = self.extent(images, name);
        let opened = Delta::unlocked((file, &path), (id, images.bytes), BLOCK);
        opened.map_err(|error| error.to_string())
    }

    /// Has the image to which the disk is linked be described, where nobody has done that: on another host its disk may have come without.
    fn describe_common(&self, images: &Images) -> Result<(), String> {
        let Some(common) = images.common() else {
            return Ok(());
        };
        let name = Path::new(common.path).file_name();
        let name = name.and_then(|name| name.to_str());
        let name = name.ok_or_else(|| format!("{} names no file", common.path))?;
        let id = Id::of_digits(common.id).ok_or("its number is none")?;
        let descriptor = self.descriptor(images, common.path);
        self.as_opener(|| match descriptor.symlink_metadata() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let described = describe_base(&descriptor, name, (images.bytes, id.cid()));
                described.map(drop).map_err(not_done)
            }
            Err(error) => Err(error.into()),
        })
    }

    /// Has all that the disk consists of be described as it is, for others who read the chain.
    pub fn describe_chain(&self, images: &Images) {
        if let Err(why) = self.describe_common(images) {
            let disk = &self.spec.name;
            tracing::info!(
                disk,
                why,
                "the image to which a disk is linked is not described: qemu-img does not read the disk"
            );
        }
        self.describe_where_wrong(images);
    }

    /// Has each delta say over what it lies, where it says something else: whoever changed that may have died before. Nobody here goes by it.
    pub fn describe_where_wrong(&self, images: &Images) {
        for (name, image) in images.deltas() {
            let Some(over) = image.over.as_deref() else {
                continue;
            };
            let descriptor = self.descriptor(images, name);
            let parent = self.parent_of(images, over, images.elsewhere.get(name));
            let described = parent.and_then(|parent| {
                let said = self.as_opener(|| read_descriptor(&descriptor).map_err(not_done))?;
                match said.parent.as_ref() == Some(&parent) {
                    true => Ok(()),
                    false => {
                        self.as_opener(|| describe_over(&descriptor, &parent).map_err(not_done))
                    }
                }
            });
            if let Err(why) = described {
                tracing::info!(
                    name,
                    why,
                    "an image may name another one below it than there is: qemu-img does not find its way"
                );
            }
        }
    }

    pub(super) fn open_extent(
        &self,
        images: &Images,
        name: &str,
        read_only: bool,
    ) -> Result<(File, Id), String> {
        let image = images.images.get(name);
        let id = image.and_then(|image| Id::of_digits(image.id.as_deref()?));
        let id = id.ok_or_else(|| format!("the image {name} is not described"))?;
        Ok((self.open_file_of(images, name, read_only)?, id))
    }

    /// Where the states of a top outlive this process: the run directory is on a tmpfs.
    pub(super) fn map_of(&self, id: Id) -> PathBuf {
        let name = states_map_name(u128::from_be_bytes(id.0));
        self.paths.run.join(name)
    }

    /// Bytes that an image holds; nothing where that cannot be told.
    pub fn bytes_of(&self, images: &Images, name: &str) -> Option<u64> {
        let image = images.images.get(name);
        let is_delta = image.is_some_and(|image| image.kind == Kind::Delta);
        let path = match is_delta {
            true => self.extent(images, name),
            false => images.raw_at(self.path(), name),
        };
        let found = path.symlink_metadata().ok()?;
        Some(found.blocks().saturating_mul(512))
    }

    /// Opens the file of a delta, to be read.
    pub(super) fn open_part(&self, images: &Images, name: &str) -> Result<File, String> {
        self.open_file_of(images, name, true)
    }

    pub(super) fn open_file_of(
        &self,
        images: &Images,
        name: &str,
        read_only: bool,
    ) -> Result<File, String> {
        let path = self.extent(images, name);
        let reserved = reserved(self.config);
        let common = common_user(self.config, &reserved);
        let opened = user::open_file(common, (&path, read_only), self.owner);
        opened
            .map(File::from)
            .map_err(|why| not_opened(&path, &why))
    }
}

impl Served {
    /// Whether a disk is, or may be, more than its image.
    pub(super) fn may_have_layers(&self, spec: &DiskSpec) -> bool {
        lock(&self.layered).contains(&spec.name)
            || has_layers(&self.config, self.what().uid, &spec.path)
    }

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
            self.note_images(&spec.name, None);
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
        place.describe_missing(&images);
        self.note_images(&spec.name, Some(&images));
        let deltas = place.open(&images, LOCK_WAIT, no_guest_lives);
        deltas.map_err(|why| refused(&why))
    }
}

/// Why a part of a disk is not opened, beside its own image.
fn not_opened(part: &Path, why: &DiskError) -> String {
    let path = part.display();
    match why {
        DiskError::Missing { .. } => format!(
            "its part {path} is not there, without which its content is not whole: put it back, or put back an earlier copy of all its files"
        ),
        DiskError::Denied { .. } => format!(
            "its part {path} may be opened by another user alone, as one of a VM that had another name: describe the VM under that name again, and clone it ('godwit vm clone') where it is to have this one"
        ),
        why => why.to_string(),
    }
}

pub(super) fn opening(name: &str, patience: Duration) -> Opening<'_> {
    Opening {
        block_bytes: BLOCK,
        name,
        patience,
    }
}

pub(super) fn boot() -> Result<Id, String> {
    let told = std::fs::read_to_string(BOOT_ID);
    let told = told.map_err(|error| format!("{BOOT_ID}: {error}"))?;
    let digits: String = told.trim().chars().filter(|one| *one != '-').collect();
    Id::of_digits(&digits).ok_or_else(|| format!("{BOOT_ID} is no number"))
}
