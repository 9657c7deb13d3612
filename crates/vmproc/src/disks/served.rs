//! One QEMU's disks: the images, the threads that serve them, and what is written down of both.
//!
//! Owns a thread for each disk. Refuses: an image that its user may not open, that somebody else has open, or that is another
//! one than QEMU was started with.

use super::activity::{Gauge, waits_of};
pub(super) use super::came::Arrival;
use super::claim::{Taking, named};
use super::coming::{Coming, is_layered, places_for};
use super::format::must_be_raw;
use super::images::arriving_path;
use super::in_place::Moves;
use super::keeping::Keeping;
use super::labelled::Labelled;
use super::left::{Copying, Left};
use super::moving::Filling;
use super::parts::Parts;
use super::redo::{Logs, RedoLog};
use super::there::{WentAlong, are_looked_at};
use super::tidying::Tidies;
use super::{BLOCK, LOCK_WAIT, MEND_EVERY, lock_name, record};
use crate::adoption::lock;
use crate::faults::planted;
use crate::files::Paths;
use crate::hypervisor::{common_user, internal, reserved};
use crate::renewal::HandedDisks;
use godwit_blockio::{Access, Arriving, Image};
use godwit_guestmem::RamFile;
use godwit_qemu::make_disk::forget_mark;
use godwit_qemu::user::{self, User};
use godwit_types::datastore::is_device_path;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::image::KnownImage;
use godwit_types::migration::{DiskToMove, MigrationSpec};
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, Generation, MigrationId};
use godwit_vhost::block::Geometry;
use godwit_vhost::{Disk, Handover, Settings};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Images that were made just now, by the names of their disks.
pub(super) type Made = BTreeMap<String, File>;

/// What a QEMU was started with: durable before it starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServedDisks {
    /// Of which QEMU of this VM: its number, which is used again,
    pub(super) launch: u64,
    /// and the file system and inode of its RAM file, which are not while it lives.
    pub(super) ram: (u64, u64),
    /// Whom the sockets belong to.
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) queues: u16,
    pub(super) disks: Vec<DiskSpec>,
    /// The image of each: device and inode.
    pub(super) images: Vec<(u64, u64)>,
    /// That those which go along with their VM are not this host's yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) arriving: Option<Arrival>,
    /// What else belongs to those with snapshots that were mirrored last, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) leaving_parts: BTreeMap<String, Parts>,
    /// The migration for which they were mirrored last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) leaving: Option<MigrationId>,
    /// What went along with migrations from here, the newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) along: Vec<WentAlong>,
    /// Paths of images that could not be read wholly when they were mirrored last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) unread: Vec<String>,
    /// An image of this host that one of them is copied to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) copying: Option<Copying>,
    /// Redo logs that were made, which no description may name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) logs: Vec<RedoLog>,
    /// Images that were left for others of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) left: Vec<Left>,
    /// What this host knows of the images that its VM's disks had.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) known: Vec<KnownImage>,
    /// Block devices that bear labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) labelled: Vec<Labelled>,
    /// Paths of those that were disks of an earlier QEMU, and bore none.
    #[serde(skip)]
    pub(super) plain: Vec<String>,
}

/// A QEMU's disks, as all handles share them.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) config: VmProcessConfig,
    pub(super) paths: Paths,
    /// As it is written down, or will be with the next change ([`Self::amend`]).
    pub(super) what: Mutex<Arc<ServedDisks>>,
    ram: Arc<RamFile>,
    /// One for each of its disks; `None`: it cannot be served, and is tried again.
    pub(super) disks: Mutex<Vec<Option<Arc<Disk>>>>,
    /// For each of its disks.
    pub(super) gauges: Vec<Gauge>,
    tried: Mutex<Option<Instant>>,
    /// Which of them a thread tries to serve just now.
    is_tried: Vec<AtomicBool>,
    /// Why one could not be served, as it was said last.
    said: Mutex<String>,
    /// When the guest was last stopped and let run for one that was forgotten.
    pub(super) repaired: Mutex<Option<Instant>>,
    pub(super) has_ended: AtomicBool,
    /// What is written down may not be what the disks are: it must be written before any is served again.
    pub(super) must_save: AtomicBool,
    /// Disks that are moved on this host.
    pub(super) moves: Moves,
    /// Writes what comes into the images that arrive.
    pub(super) filling: Mutex<Filling>,
    /// The same once they are this host's, for as long as the migration's channels have them.
    pub(super) filled: Mutex<Weak<Vec<OnceLock<Arriving>>>>,
    /// The generation under which the guest may be running: its images are taken as soon as they are served then, and not only
    /// with a permit.
    pub(super) held: Mutex<Option<Generation>>,
    pub(super) keeping: Keeping,
    /// Held by whoever writes down what disks with snapshots consist of.
    pub(super) descriptions: Mutex<()>,
    /// Disks that consist of more than their own image, by name.
    pub(super) layered: Mutex<BTreeSet<String>>,
    /// Those of them that are linked to an image which others may have, too, with its path.
    pub(super) linked: Mutex<BTreeMap<String, String>>,
    /// Images that nobody needs any more.
    pub(super) tidies: Tidies,
    /// Whether a thread begins to mirror them for a migration.
    pub(super) sets_out: Arc<AtomicBool>,
    /// What the migration with which the VM comes says of its disks.
    pub(super) announced: Mutex<Vec<DiskToMove>>,
    /// Those with snapshots that come with the VM, by their places.
    pub(super) coming: Mutex<BTreeMap<u8, Coming>>,
    /// Disks that are being moved by redo logs, by name: nothing of them is tidied.
    pub(super) by_logs: Mutex<BTreeMap<String, Logs>>,
    /// QEMU's connections to them, by their places, that the program before this one had.
    handed: Mutex<BTreeMap<usize, Handover>>,
}

/// A disk that no thread begins to serve.
pub(super) struct Alone<'a>(&'a AtomicBool);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Served {
    pub(super) fn new(
        config: &VmProcessConfig,
        paths: &Paths,
        what: ServedDisks,
        ram: &Arc<RamFile>,
        held: Option<Generation>,
    ) -> Self {
        Self {
            config: config.clone(),
            paths: paths.clone(),
            disks: Mutex::new(what.disks.iter().map(|_| None).collect()),
            ram: Arc::clone(ram),
            gauges: what.disks.iter().map(Gauge::of).collect(),
            tried: Mutex::new(None),
            is_tried: what.disks.iter().map(|_| AtomicBool::new(false)).collect(),
            what: Mutex::new(Arc::new(what)),
            said: Mutex::default(),
            repaired: Mutex::default(),
            has_ended: AtomicBool::new(false),
            must_save: AtomicBool::new(false),
            moves: Moves::of(paths),
            filling: Mutex::default(),
            filled: Mutex::default(),
            held: Mutex::new(held),
            keeping: Keeping::default(),
            descriptions: Mutex::default(),
            layered: Mutex::default(),
            linked: Mutex::default(),
            tidies: Tidies::default(),
            sets_out: Arc::default(),
            announced: Mutex::default(),
            coming: Mutex::default(),
            by_logs: Mutex::default(),
            handed: Mutex::default(),
        }
    }

    /// What the program before this one had of them, until they are served; the rest is given up.
    pub(super) fn put_handed(&self, handed: Option<HandedDisks>) {
        let disks = handed.into_iter().flat_map(|handed| handed.disks);
        *lock(&self.handed) = disks.collect();
    }

    /// What this QEMU has.
    pub(super) fn what(&self) -> Arc<ServedDisks> {
        Arc::clone(&lock(&self.what))
    }

    /// Changes it, durably. Refused once QEMU is gone: what is written then is its successor's. Where writing fails what was
    /// written before counts, and must be written again.
    pub(super) fn change(&self, change: impl FnOnce(&mut ServedDisks)) -> Result<(), ApiError> {
        self.change_or_keep(change, false)
    }

    /// The same, but where writing fails this process goes by the change all the same, and what is written next has it.
    pub(super) fn go_by(&self, change: impl FnOnce(&mut ServedDisks)) -> Result<(), ApiError> {
        self.change_or_keep(change, true)
    }

    fn change_or_keep(
        &self,
        change: impl FnOnce(&mut ServedDisks),
        stays: bool,
    ) -> Result<(), ApiError> {
        let mut what = lock(&self.what);
        if self.has_ended.load(Ordering::SeqCst) {
            return Err(internal("the VM's hypervisor has ended"));
        }
        let mut changed = ServedDisks::clone(&what);
        change(&mut changed);
        let written = self.write(&changed);
        if stays || written.is_ok() {
            *what = Arc::new(changed);
        }
        written
    }

    /// Changes it for this process alone until the next change writes it, too: only what a successor finds out by itself.
    pub(super) fn amend(&self, change: impl FnOnce(&mut ServedDisks)) {
        change(Arc::make_mut(&mut lock(&self.what)));
    }

    /// Nothing is written from here on: QEMU is gone.
    pub(super) fn end(&self) {
        let _what = lock(&self.what);
        self.has_ended.store(true, Ordering::SeqCst);
    }

    /// Opens all images and serves them; those that were made for this must be the very ones.
    pub(super) fn begin(
        &self,
        coming: Option<&MigrationSpec>,
        made: &Made,
    ) -> Result<(), ApiError> {
        let (mut images, until) = (Vec::new(), Instant::now() + LOCK_WAIT);
        let (what, mut expected) = (self.what(), Vec::new());
        for disk in &what.disks {
            let left = until.saturating_duration_since(Instant::now());
            let taking = self.takes(disk).then_some(Taking::Anew);
            let (image, known) = self.open(disk, left, taking, made.get(&disk.name))?;
            known.into_iter().for_each(|known| self.keep_later(known));
            if let Some(migration) = coming {
                expected.extend(self.expect(disk, &image, &migration.source.host)?);
            }
            images.push(image);
        }
        let (filling, mut identities) = (places_for(what.disks.len()), Vec::new());
        let mut labelled = Vec::new();
        for ((image, disk), slot) in images.iter().zip(&what.disks).zip(&filling) {
            labelled.extend(image.label().map(|found| Labelled::of(&disk.path, found)));
            let identity = image.identity();
            let identity = identity.map_err(|error| self.refused(disk, &error))?;
            // What fills one with snapshots is known once its source has said what it consists of.
            let is_one = coming.is_none_or(|coming| !is_layered(coming, disk));
            if let Some(fills) = self.fills(disk, image)?.filter(|_| is_one) {
                let _ = slot.set(fills);
            }
            identities.push((identity.device, identity.inode));
        }
        *lock(&self.filling) = Arc::new(filling);
        // Also one without disks: whoever takes it over must not find those of an earlier one.
        self.change(|what| {
            what.images = identities;
            expected.into_iter().for_each(|known| what.know(known));
            labelled
                .into_iter()
                .for_each(|label| what.note_label(label));
        })?;
        for (index, image) in images.into_iter().enumerate() {
            let disk = what.disks.get(index);
            let takes = disk.is_some_and(|disk| self.takes(disk));
            self.start(index, image, (takes, true))?;
        }
        Ok(())
    }

    /// The generation under which the guest may be running.
    pub(super) fn held(&self) -> Option<Generation> {
        *lock(&self.held)
    }

    /// Whether a disk's image is taken at once: no other host can have it, or this one may run the guest.
    fn takes(&self, spec: &DiskSpec) -> bool {
        self.held().is_some() || !spec.changes_hands() || planted("image-opened-before-permit")
    }

    /// Once for each reason: it may be tried for days.
    fn say(&self, error: &ApiError) {
        let mut said = lock(&self.said);
        if *said != error.message {
            tracing::warn!(%error, "a disk of the guest is not served; this is tried again");
            said.clone_from(&error.message);
        }
    }

    pub(super) fn is_time(&self) -> bool {
        let mut tried = lock(&self.tried);
        let now = Instant::now();
        let is_time = tried.is_none_or(|at| now >= at + MEND_EVERY);
        if is_time {
            *tried = Some(now);
        }
        is_time
    }

    /// Those that no thread serves. One that has ended, since the kernel failed it, is not kept.
    pub(super) fn missing(&self) -> Vec<usize> {
        let mut disks = lock(&self.disks);
        for slot in disks.iter_mut() {
            if slot.as_deref().is_some_and(Disk::has_ended) {
                *slot = None;
            }
        }
        let all = disks.iter().enumerate();
        all.filter(|(_, disk)| disk.is_none())
            .map(|(index, _)| index)
            .collect()
    }

    /// Serves one, on a thread of its own: its image may lie on storage that hangs. `tried` is dropped once that is over.
    pub(super) fn try_in_thread(
        self: &Arc<Self>,
        index: usize,
        patience: Duration,
        tried: Option<Sender<()>>,
    ) {
        let is_tried = self.is_tried.get(index);
        if is_tried.is_none_or(|is_tried| is_tried.swap(true, Ordering::SeqCst)) {
            return;
        }
        let served = Arc::clone(self);
        let work = move || {
            served.try_to_serve(index, patience);
            served.set_tried(index);
            drop(tried);
        };
        let thread = std::thread::Builder::new()
            .name("disk-begin".into())
            .spawn(work);
        if let Err(error) = thread {
            tracing::warn!(%error, "a disk cannot be served yet");
            self.set_tried(index);
        }
    }

    /// Whether a thread is about to serve it.
    pub(super) fn is_tried(&self, index: usize) -> bool {
        let is_tried = self.is_tried.get(index);
        is_tried.is_some_and(|is_tried| is_tried.load(Ordering::SeqCst))
    }

    /// Whether a thread of this process may be in the hands of storage.
    pub(super) fn waits_for_storage(&self) -> bool {
        let mut tried = self.is_tried.iter();
        tried.any(|is_tried| is_tried.load(Ordering::SeqCst))
            || self.keeping.is_busy()
            || self.tidies.works()
            || are_looked_at()
    }

    fn set_tried(&self, index: usize) {
        if let Some(is_tried) = self.is_tried.get(index) {
            is_tried.store(false, Ordering::SeqCst);
        }
    }

    /// Until this is dropped no thread begins to serve the disk; nothing where one does just now.
    pub(super) fn serve_alone(&self, index: usize) -> Option<Alone<'_>> {
        let is_tried = self.is_tried.get(index)?;
        let is_free = !is_tried.swap(true, Ordering::SeqCst);
        is_free.then_some(Alone(is_tried))
    }

    fn try_to_serve(&self, index: usize, patience: Duration) {
        match self.serve(index, patience) {
            Ok(()) => {
                let what = self.what();
                let disk = what.disks.get(index).map(|disk| disk.name.as_str());
                tracing::info!(disk, "a disk of the guest is served again");
            }
            Err(error) => self.say(&error),
        }
    }

    /// The image that it had, and no other in its place.
    fn serve(&self, index: usize, patience: Duration) -> Result<(), ApiError> {
        if self.must_save.load(Ordering::SeqCst) {
            self.save()?;
        }
        let what = self.what();
        let (Some(spec), Some(before)) = (what.disks.get(index), what.images.get(index)) else {
            return Ok(());
        };
        let taken = self.takes(spec);
        let taking = taken.then_some(Taking::Again);
        let (image, known) = self.open(spec, patience, taking, None)?;
        let now = image
            .identity()
            .map_err(|error| self.refused(spec, &error))?;
        if (now.device, now.inode) != *before && !planted("image-swapped") {
            let path = &spec.path;
            return Err(self.refused(spec, &format!(
                "{path} is another file than the one that the guest works with: put that one back, or end the guest"
            )));
        }
        known.into_iter().for_each(|known| self.keep_later(known));
        self.start(index, image, (taken, false))?;
        // A permit may have come meanwhile, and found no disk here.
        let disk = lock(&self.disks).get(index).and_then(Option::clone);
        match (disk, self.held()) {
            (Some(disk), Some(generation)) if !taken => self.take_image((spec, &disk), generation),
            _ => Ok(()),
        }
    }

    pub(super) fn start(
        &self,
        index: usize,
        image: Image,
        (has_image, no_guest_lives): (bool, bool),
    ) -> Result<(), ApiError> {
        let what = self.what();
        let Some(spec) = what.disks.get(index) else {
            return Ok(());
        };
        let deltas = self.deltas((spec, &image), (has_image, no_guest_lives))?;
        let disk = Disk::start(Settings {
            name: spec.name.clone(),
            socket: self.paths.ram_files.disk_socket(what.launch, index),
            owner: Some((what.uid, what.gid)),
            geometry: self.geometry((spec, what.queues), &image),
            image,
            filters: self.gauges.get(index).map_or_else(Vec::new, Gauge::filters),
            ram: Arc::clone(&self.ram),
            has_image,
            waits: waits_of(spec),
            handed: lock(&self.handed).remove(&index),
            deltas,
        });
        let disk = disk.map_err(|error| self.refused(spec, &error))?;
        let mut disks = lock(&self.disks);
        let has_ended = self.has_ended.load(Ordering::SeqCst);
        if let Some(slot) = disks.get_mut(index).filter(|_| !has_ended) {
            *slot = Some(Arc::new(disk));
        }
        Ok(())
    }

    pub(super) fn refused(&self, spec: &DiskSpec, error: &dyn std::fmt::Display) -> ApiError {
        refused(&self.config, spec, error)
    }

    pub(super) fn geometry(&self, (spec, queues): (&DiskSpec, u16), image: &Image) -> Geometry {
        Geometry {
            bytes: image.bytes() - image.bytes() % u64::from(BLOCK),
            block: BLOCK,
            queues,
            read_only: spec.read_only,
            erases: !spec.read_only,
            serial: spec.name.clone(),
        }
    }

    /// With the rights of QEMU's user; locked, and claimed if the guest may be running, where it is taken.
    pub(super) fn open(
        &self,
        spec: &DiskSpec,
        patience: Duration,
        taking: Option<Taking>,
        made: Option<&File>,
    ) -> Result<(Image, Option<KnownImage>), ApiError> {
        let spec = &DiskSpec {
            path: self.path_of(spec),
            ..spec.clone()
        };
        let refused = |error: &dyn std::fmt::Display| self.refused(spec, error);
        let file = match made.filter(|_| is_device_path(&spec.path)) {
            // Its lock is on this very descriptor, and there is no moment without it.
            Some(made) => made.try_clone().map_err(|error| refused(&error))?,
            None => self.open_file(spec)?,
        };
        if let Some(made) = made.filter(|_| !planted("made-not-compared")) {
            self.must_be(made, spec, &file)?;
        }
        let access = match spec.read_only {
            true => Access::ReadOnly,
            false => Access::ReadWrite,
        };
        let is_new = made.is_none() && self.known_of(&self.what(), &spec.name).is_none();
        if is_new && taking == Some(Taking::Anew) {
            must_be_raw(&file, &spec.path).map_err(|why| refused(&why))?;
        }
        if !spec.read_only {
            forget_mark(&file);
        }
        let mut image = self.image_of(file, (spec, access), made.is_some())?;
        let Some(taking) = taking else {
            return Ok((image, None));
        };
        let locked = image.lock(&lock_name(&self.config, spec), patience);
        locked.map_err(|error| {
            refused(&named(&self.config, self.what().uid, image.as_fd(), error))
        })?;
        self.must_not_be_parent(spec, &image)?;
        self.settle_label(spec, &mut image)?;
        let known = match self.held() {
            Some(generation) => self.claim(spec, image.as_fd(), generation, taking)?,
            None => None,
        };
        Ok((image, known))
    }

    /// Opens where a disk is now, with the rights of QEMU's user.
    pub(super) fn open_file(&self, spec: &DiskSpec) -> Result<File, ApiError> {
        let what = self.what();
        let owner = User {
            uid: what.uid,
            gid: what.gid,
        };
        open_file(&self.config, spec, owner)
    }

    /// Where a disk's image lies now: one that arrives has a name of its own until its VM is here.
    fn path_of(&self, spec: &DiskSpec) -> String {
        let what = self.what();
        let arrival = what.arriving.as_ref().filter(|_| spec.goes_along());
        let beside = arrival.map(|arrival| arriving_path(&spec.path, &arrival.migration));
        match beside {
            Some(beside) if Path::new(&beside).exists() => beside,
            _ => spec.path.clone(),
        }
    }

    /// Writes down which images QEMU has.
    pub(super) fn save(&self) -> Result<(), ApiError> {
        let what = lock(&self.what);
        if self.has_ended.load(Ordering::SeqCst) {
            return Err(internal("the VM's hypervisor has ended"));
        }
        self.write(&what)
    }

    /// Whoever calls this has locked what is written, so that who sees that nothing must be written finds the last of it written.
    fn write(&self, what: &ServedDisks) -> Result<(), ApiError> {
        let written = record::write(&self.paths, what);
        self.must_save.store(written.is_err(), Ordering::SeqCst);
        written.map_err(internal)
    }
}

/// Why something is not done with a disk.
pub(super) fn refused(
    config: &VmProcessConfig,
    spec: &DiskSpec,
    error: &dyn std::fmt::Display,
) -> ApiError {
    let (vm, host, disk) = (&config.vm, &config.host, &spec.name);
    let message = format!("disk '{disk}' of VM '{vm}' on host '{host}': {error}");
    ApiError::new(ErrorCode::InvalidRequest, message).on_host(host)
}

/// Opens a disk's image with the rights of QEMU's user.
pub(super) fn open_file(
    config: &VmProcessConfig,
    spec: &DiskSpec,
    owner: User,
) -> Result<File, ApiError> {
    let reserved = reserved(config);
    let common = common_user(config, &reserved);
    let files = user::open_disks(common, &config.vm, std::slice::from_ref(spec), owner)?;
    let file = files.into_iter().next().map(File::from);
    file.ok_or_else(|| refused(config, spec, &"its image was not opened"))
}

#[cfg(test)]
#[path = "served_tests.rs"]
mod tests;
