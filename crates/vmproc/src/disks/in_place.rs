//! Disks that move from one place of this host to another while the guest runs.
//!
//! A disk is mirrored to a second image until both are equal. Then it stands still for a moment, what the second image has is
//! made durable, `disks.json` says that it is the disk from now on, and the disk goes on with it: so one image is certainly the
//! right one, whenever this process dies. What a predecessor had begun is removed, what it had changed is followed
//! ([`settle_moves`]).
//!
//! Owns a thread while disks move. Refuses: disks that the guest only reads, and a place that is taken. An image that cannot be
//! written ends the move and nothing else.

use super::images::{remove, remove_own, rename};
use super::moving::{CLOSE_BYTES, begin_copying};
use super::served::{Served, ServedDisks};
use super::{Disks, LOCK_WAIT, REST_WAIT, told};
use crate::adoption::lock;
use crate::faults::{planted, reached};
use crate::files::Paths;
use crate::hypervisor::internal;
use godwit_blockio::filters::{Course, Mirroring};
use godwit_blockio::{Image, SecondImage};
use godwit_qemu::disk::identity_of;
use godwit_store::{load_json, save_json};
use godwit_types::disk_move::{DiskMove, DiskMoveState, DiskMoves, DiskPlace};
use godwit_types::host_api::SPEC_FILE;
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, ErrorCode};
use godwit_vhost::Disk;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often it is looked how far a disk is.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long a disk stands still at most for what is under way.
const STAND_WAIT: Duration = Duration::from_millis(500);

/// An image that a disk is copied to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Copying {
    /// The name that it is to have,
    path: String,
    /// and the one that it has until it is whole.
    beside: String,
    /// Device and inode, once it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<(u64, u64)>,
}

/// An image that was left for another one of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Left {
    disk: String,
    path: String,
    image: (u64, u64),
}

/// Disks that are moved on this host, or were last.
#[derive(Debug, Default)]
pub(super) struct Moves {
    disks: Mutex<Vec<DiskMove>>,
    is_cancelled: AtomicBool,
}

/// Why a disk is not where it was to go.
enum Stopped {
    Cancelled,
    Failed(String),
}

impl<E: std::fmt::Display> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// A disk that goes to another place: which one, and both images.
struct Going<'a> {
    index: usize,
    place: &'a DiskPlace,
    spec: DiskSpec,
    image: (u64, u64),
    copying: Copying,
}

impl Disks {
    /// Begins to move disks to these places, one after the other; `changed` is called after each.
    pub(crate) fn move_in_place(
        &self,
        places: Vec<DiskPlace>,
        changed: impl Fn() + Send + 'static,
    ) -> Result<DiskMoves, ApiError> {
        let served = &self.0;
        let what = served.what();
        let mut disks = lock(&served.moves.disks);
        let moving = DiskMoves {
            disks: disks.clone(),
        };
        if moving.are_under_way() {
            return Err(
                served.not_so("its disks are being moved already: wait for that, or call it off")
            );
        }
        let begun = places.iter().map(|place| served.begun(&what, place));
        *disks = begun.collect::<Result<_, _>>()?;
        served.moves.is_cancelled.store(false, Ordering::SeqCst);
        let begun = DiskMoves {
            disks: disks.clone(),
        };
        drop(disks);
        let served = Arc::clone(served);
        let work = move || served.move_all(&places, &changed);
        let thread = std::thread::Builder::new().name("disk-move".into());
        if let Err(error) = thread.spawn(work) {
            lock(&self.0.moves.disks).clear();
            return Err(internal(error));
        }
        Ok(begun)
    }

    /// How far they are.
    pub(crate) fn moves(&self) -> DiskMoves {
        let disks = lock(&self.0.moves.disks).clone();
        DiskMoves { disks }
    }

    /// Calls it off: a disk whose images are being changed just now is moved all the same.
    pub(crate) fn cancel_moves(&self) {
        self.0.moves.is_cancelled.store(true, Ordering::SeqCst);
    }

    /// What a person is to know of it.
    pub(super) fn moves_note(&self) -> Option<String> {
        let moves = self.moves().disks.into_iter();
        let mut copied = moves.filter(|disk| disk.state == DiskMoveState::Copying);
        copied.next().map(|disk| {
            let (name, to) = (&disk.disk, &disk.to);
            let mib = |bytes: u64| bytes >> 20;
            let (left, total) = (mib(disk.left_bytes), mib(disk.total_bytes));
            format!("disk '{name}' is being moved to {to}: {left} of {total} MiB are left")
        })
    }

    /// Whether the VM's description may not say yet where they are.
    pub(crate) fn are_elsewhere(&self) -> bool {
        !self.0.what().left.is_empty()
    }

    /// Has the VM's description say where its disks are, and removes the images that they had before.
    pub(crate) fn follow_moves(&self, paths: &Paths, spec: &mut VmSpec) -> Result<(), String> {
        let what = self.0.what();
        if what.left.is_empty() {
            return Ok(());
        }
        follow(&what, paths, spec)?;
        let forgotten = self
            .0
            .change(|now| now.left.retain(|left| !what.left.contains(left)));
        forgotten.map_err(|error| error.message)
    }
}

/// What a predecessor's moves came to: an image that is not whole is removed, and the VM's description follows the disks that
/// are elsewhere. To be called before anything is started with that description.
pub(crate) fn settle_moves(paths: &Paths, spec: Option<&mut VmSpec>) -> Result<(), String> {
    let path = paths.disks();
    let what: Option<ServedDisks> = load_json(&path).map_err(|error| error.to_string())?;
    let Some(mut what) = what.filter(|what| what.copying.is_some() || !what.left.is_empty()) else {
        return Ok(());
    };
    if let Some(copying) = what.copying.take() {
        copying.remove();
    }
    match spec {
        Some(spec) if !what.left.is_empty() => {
            follow(&what, paths, spec)?;
            what.left.clear();
        }
        _ => {}
    }
    save_json(&path, &what).map_err(|error| error.to_string())
}

/// The description comes first: until it is durable nobody else knows where the disk is.
fn follow(what: &ServedDisks, paths: &Paths, spec: &mut VmSpec) -> Result<(), String> {
    for left in &what.left {
        let now = what.disks.iter().find(|disk| disk.name == left.disk);
        let described = spec.disks.iter_mut().find(|disk| disk.name == left.disk);
        if let (Some(now), Some(described)) = (now, described)
            && described.path == left.path
        {
            described.path.clone_from(&now.path);
            described.shared = now.shared;
        }
    }
    let file = paths.state.join(SPEC_FILE);
    save_json(&file, spec).map_err(|error| error.to_string())?;
    reached("disk-move.followed");
    for left in &what.left {
        remove_own(&left.disk, Path::new(&left.path), left.image);
    }
    Ok(())
}

impl Copying {
    fn remove(&self) {
        let (beside, path) = (Path::new(&self.beside), Path::new(&self.path));
        remove(beside);
        // It may have its name already; another file that has it is not ours.
        let found = identity_of(path).ok().flatten();
        if found.is_some() && found == self.image {
            remove(path);
        }
    }
}

impl Served {
    fn not_so(&self, why: &str) -> ApiError {
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!("VM '{vm}' on host '{host}': {why}");
        ApiError::new(ErrorCode::WrongState, message).on_host(host)
    }

    fn begun(&self, what: &ServedDisks, place: &DiskPlace) -> Result<DiskMove, ApiError> {
        let name = &place.disk;
        let spec = what.disks.iter().find(|disk| disk.name == *name);
        let spec = spec.ok_or_else(|| {
            self.not_so(&format!(
                "it has no disk '{name}' whose image it works with here"
            ))
        })?;
        if spec.read_only {
            return Err(self.not_so(&format!("its guest only reads disk '{name}', which is not moved: copy the file, and describe the VM anew while it is off")));
        }
        if spec.path == place.path {
            return Err(self.not_so(&format!("its disk '{name}' is {} already", place.path)));
        }
        Ok(DiskMove {
            disk: name.clone(),
            from: spec.path.clone(),
            to: place.path.clone(),
            state: DiskMoveState::Waiting,
            total_bytes: 0,
            left_bytes: 0,
            eta_s: None,
            switch_ms: None,
            why: None,
        })
    }

    fn note(&self, name: &str, change: impl FnOnce(&mut DiskMove)) {
        let mut disks = lock(&self.moves.disks);
        if let Some(disk) = disks.iter_mut().find(|disk| disk.disk == name) {
            change(disk);
        }
    }

    fn move_all(&self, places: &[DiskPlace], changed: &impl Fn()) {
        let mut stopped = None;
        for place in places {
            let ended = match &stopped {
                None => self.move_one(place),
                Some(DiskMoveState::Cancelled) => Err(Stopped::Cancelled),
                Some(_) => Err("the one before it could not be moved".into()),
            };
            self.note(&place.disk, |disk| match &ended {
                Ok(switch) => {
                    (disk.state, disk.left_bytes) = (DiskMoveState::Moved, 0);
                    let switch_ms = switch.as_secs_f64() * 1e3;
                    disk.switch_ms = Some(switch_ms);
                    tracing::info!(disk = disk.disk, to = disk.to, switch_ms, "a disk is moved");
                }
                Err(Stopped::Cancelled) => disk.state = DiskMoveState::Cancelled,
                Err(Stopped::Failed(why)) => {
                    tracing::warn!(disk = disk.disk, to = disk.to, why, "a disk is not moved");
                    (disk.state, disk.why) = (DiskMoveState::Failed, Some(why.clone()));
                }
            });
            stopped = match ended {
                Ok(_) => stopped,
                Err(Stopped::Cancelled) => Some(DiskMoveState::Cancelled),
                Err(Stopped::Failed(_)) => Some(DiskMoveState::Failed),
            };
            changed();
        }
    }

    /// Returns how long the guest's requests waited for the change.
    fn move_one(&self, place: &DiskPlace) -> Result<Duration, Stopped> {
        self.note(&place.disk, |disk| disk.state = DiskMoveState::Copying);
        let what = self.what();
        let mut all = what.disks.iter().zip(&what.images).enumerate();
        let found = all.find(|(_, (disk, _))| disk.name == place.disk);
        let (index, (spec, image)) = found.ok_or("the VM has no such disk")?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let beside = format!(
            "{}.moving-{:x}",
            place.path,
            since.unwrap_or_default().as_nanos()
        );
        let going = Going {
            index,
            place,
            spec: spec.clone(),
            image: *image,
            copying: Copying {
                path: place.path.clone(),
                beside,
                image: None,
            },
        };
        let moved = self.copy(going);
        if moved.is_err() {
            let _ = self.with_disk(index, |disk| disk.take_lowest(REST_WAIT));
            // Whoever comes after this process does it if it cannot be done here.
            if let Err(error) = self.remove_copy() {
                tracing::warn!(%error, "that a disk is not moved is not written yet");
            }
        }
        moved
    }

    /// Not before it is certain that what is written does not call it the disk.
    fn remove_copy(&self) -> Result<(), ApiError> {
        self.change(|_| ())?;
        if let Some(copying) = &self.what().copying {
            copying.remove();
        }
        self.change(|what| what.copying = None)
    }

    fn with_disk<T>(
        &self,
        index: usize,
        with: impl FnOnce(&Disk) -> Result<T, godwit_vhost::Error>,
    ) -> Result<T, String> {
        let disks = lock(&self.disks);
        let disk = disks.get(index).and_then(Option::as_ref);
        let disk = disk.filter(|disk| !disk.has_ended());
        let disk = disk.ok_or("the disk is not served any more")?;
        with(disk).map_err(|error| error.to_string())
    }

    fn copy(&self, mut going: Going<'_>) -> Result<Duration, Stopped> {
        let path = Path::new(&going.place.path);
        let is_taken = || {
            let path = path.display();
            format!("a file is at {path} already: move it away, or remove it if nobody needs it")
        };
        if path.symlink_metadata().is_ok() {
            return Err(is_taken().into());
        }
        let bytes = self.with_disk(going.index, Disk::measure)?;
        self.change(|what| what.copying = Some(going.copying.clone()))?;
        let beside = DiskSpec {
            path: going.copying.beside.clone(),
            ..going.spec.clone()
        };
        self.make(&beside, bytes)?;
        let image = self.open(&beside, LOCK_WAIT, true)?;
        let identity = image.identity()?;
        going.copying.image = Some((identity.device, identity.inode));
        self.change(|what| what.copying = Some(going.copying.clone()))?;
        let course = Course::default();
        let second = SecondImage::of(&image, &course)?;
        let filter = Mirroring::new(bytes, second.outlet()?, &course);
        self.with_disk(going.index, |disk| {
            disk.put_lowest(Box::new(filter), REST_WAIT)
        })?;
        let total = begin_copying((&going.spec, going.image), bytes, &course);
        reached("disk-move.copying");
        let progress = (Instant::now(), total);
        self.wait_until_equal(&going, (&second, &course), progress)?;
        // What takes long comes before the disk stands still.
        let named = rename(Path::new(&going.copying.beside), path);
        named.map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => is_taken(),
            _ => format!(
                "its image does not get its name {}: {error}",
                path.display()
            ),
        })?;
        if let Some(parent) = path.parent() {
            File::open(parent)?.sync_all()?;
        }
        second.sync()?;
        reached("disk-move.equal");
        let mut image = Some(image);
        loop {
            self.wait_until_equal(&going, (&second, &course), progress)?;
            if let Some(took) = self.switch(&going, (&second, &course), &mut image)? {
                return Ok(took);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until so little is under way that the disk can stand still for it.
    fn wait_until_equal(
        &self,
        going: &Going<'_>,
        (second, course): (&SecondImage, &Course),
        (began, total): (Instant, u64),
    ) -> Result<(), Stopped> {
        loop {
            if self.moves.is_cancelled.load(Ordering::SeqCst) {
                return Err(Stopped::Cancelled);
            }
            if let Some(why) = course.failure() {
                return Err(why.into());
            }
            self.with_disk(going.index, |_| Ok(()))?;
            let left = course.left_bytes().min(total);
            self.note(&going.place.disk, |disk| {
                let copied = total - left;
                let (taken, left_of) = (
                    began.elapsed().as_secs_f64(),
                    left as f64 / copied.max(1) as f64,
                );
                (disk.total_bytes, disk.left_bytes) = (total, left);
                disk.eta_s = (copied > 0).then(|| (taken * left_of).ceil() as u64);
            });
            if course.is_synchronised() && second.under_way_bytes() <= CLOSE_BYTES {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Goes on with the second image if both are equal now; else nothing has changed.
    fn switch(
        &self,
        going: &Going<'_>,
        mirror: (&SecondImage, &Course),
        image: &mut Option<Image>,
    ) -> Result<Option<Duration>, Stopped> {
        let mut disks = lock(&self.disks);
        let slot = disks
            .get_mut(going.index)
            .ok_or("the VM has no such disk")?;
        let disk = slot.as_ref().ok_or("the disk is not served any more")?;
        let began = Instant::now();
        let standing = disk.stand_still(STAND_WAIT);
        let standing = standing.map_err(|error| told(&going.spec, &error))?;
        if !are_equal(mirror, began + STAND_WAIT) {
            return Ok(None);
        }
        let Some(image) = image.take() else {
            return Err("its second image is gone".into());
        };
        mirror.0.sync()?;
        if planted("switch-before-record") {
            let switched = standing.switch(image);
            drop(standing);
            switched.map_err(|error| told(&going.spec, &error))?;
            std::thread::sleep(STAND_WAIT);
            reached("disk-move.switched");
            self.write_switch(going)?;
            return Ok(Some(began.elapsed()));
        }
        let written = self.write_switch(going);
        let is_written = written.is_ok();
        let switched = written.and_then(|()| {
            reached("disk-move.written");
            standing
                .switch(image)
                .map_err(|error| told(&going.spec, &error))
        });
        drop(standing);
        reached("disk-move.switched");
        match switched {
            Ok(()) => Ok(Some(began.elapsed())),
            // It goes on with what is written once it is served again, which is soon.
            Err(why) => {
                *slot = None;
                tracing::error!(
                    disk = going.spec.name,
                    why,
                    "a disk that was to go on with another image is served anew"
                );
                is_written
                    .then(|| Some(began.elapsed()))
                    .ok_or(Stopped::Failed(why))
            }
        }
    }

    /// From here on the second image is the disk.
    fn write_switch(&self, going: &Going<'_>) -> Result<(), String> {
        let (index, place) = (going.index, going.place);
        let written = self.change(|what| {
            what.copying = None;
            what.left.push(Left {
                disk: place.disk.clone(),
                path: going.spec.path.clone(),
                image: going.image,
            });
            if let Some(disk) = what.disks.get_mut(index) {
                disk.path.clone_from(&place.path);
                disk.shared = place.shared;
            }
            if let (Some(now), Some(image)) = (what.images.get_mut(index), going.copying.image) {
                *now = image;
            }
        });
        written.map_err(|error| error.message)
    }
}

/// Whether both images are equal, once nothing is under way: the disk stands still.
fn are_equal((second, course): (&SecondImage, &Course), until: Instant) -> bool {
    while second.under_way_bytes() > 0 {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    course.is_synchronised() && course.failure().is_none()
}

#[cfg(test)]
#[path = "in_place_tests.rs"]
mod tests;
