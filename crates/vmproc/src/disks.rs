//! The disks that this process serves to its VM's QEMU: from before QEMU starts until it is gone.
//!
//! QEMU waits without end for a back end when it starts, and answers nobody meanwhile; it stops its guest only once nothing is
//! under way. So disks come first, and rest before a stop. Which images a QEMU has is written down before it starts: whoever
//! takes it over serves the same ones, whatever the VM's description says by then.
//!
//! Owns a thread for each disk. Refuses: an image that its user may not open, or that somebody else has open.

mod activity;
mod aside;
mod beside;
mod by_logs;
mod came;
mod claim;
mod cleaning;
mod cloning;
mod coming;
mod described;
mod devices;
mod entry;
mod format;
mod former;
mod gentle;
mod going_along;
#[cfg(test)]
mod hardware_tests;
mod history;
mod images;
mod in_place;
mod keeping;
mod kept;
mod labelled;
mod last_log;
mod layers;
mod leaving;
mod left;
mod linked;
mod logs_away;
mod logs_room;
mod logs_shared;
mod making;
mod maps;
mod moving;
mod note;
mod parent;
mod parts;
mod quiescing;
mod record;
mod redo;
mod resize;
mod room;
mod second;
mod sending_logs;
mod served;
mod setting_out;
mod settling;
mod snapshots;
mod standing;
mod switching;
mod there;
mod tidying;
mod to_copy;
mod together;
mod told;
mod tracked;
mod tree;
mod unnamed;

pub(crate) use came::{Source, may_keep, put_aside, source_is_gone, what_came};
pub(crate) use cloning::CloneJob;
pub(crate) use going_along::SourceDisks;
#[cfg(test)]
pub(crate) use history::History;
pub(crate) use history::past_moves;
pub(crate) use images::{leave, settle};
pub(crate) use left::{follow_moves, settle_moves};
pub(crate) use record::put_back_living;
pub(crate) use resize::{AtRest, has_no_disk};
pub(crate) use room::FullDisk;
pub(crate) use served::ServedDisks;
pub(crate) use there::{are_looked_at, has_disks_of, went_on};
pub(crate) use together::Together;

use crate::adoption::lock;
use crate::faults::reached;
use crate::files::Paths;
use crate::hypervisor::{internal, memory};
use crate::renewal::HandedDisks;
use godwit_guestmem::RamFile;
use godwit_qemu::command_line::BackEnd;
use godwit_qemu::layered::forget_maps;
use godwit_qemu::user::User;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::image::take_newest;
use godwit_types::migration::{DiskToMove, MigrationSpec};
use godwit_types::vm::{DiskSpec, VmSpec};
use godwit_types::{ApiError, ErrorCode, Generation};
use godwit_vhost::{Disk, Handover};
use served::{Arrival, Served};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long all images together are waited for whose last holder may have died just now.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// How long those may take, all disks together, that are under way when another program is to go on with them.
pub(crate) const HAND_OVER_WAIT: Duration = Duration::from_millis(500);
/// How long a disk may take until nothing of it is under way, and how long what its guest was told, or a second image, may take to be durable meanwhile.
const STAND_WAIT: Duration = Duration::from_millis(500);
/// How long requests may take that are under way when a guest is to be stopped, and how long what it was told may take to be durable before it is held.
const REST_WAIT: Duration = Duration::from_secs(3);
/// How long QEMU has to connect again; it tries each second.
const CONNECT_WAIT: Duration = Duration::from_secs(10);
/// How soon a guest may be stopped and let run again once more for a disk.
const REPAIR_EVERY: Duration = Duration::from_secs(60);
/// How often it is looked whether QEMU has connected.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// When it is looked whether a disk to which QEMU says nothing should be in use.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(2);
/// How often a disk that cannot be served is tried again.
const MEND_EVERY: Duration = Duration::from_secs(1);
/// Bytes of a disk's blocks.
const BLOCK: u32 = 512;
/// Most queues of a disk; one thread serves all of them.
const QUEUES_MAX: u32 = 4;

/// A QEMU's disks. Clones are the same ones.
#[derive(Debug, Clone)]
pub(crate) struct Disks(Arc<Served>);

impl Disks {
    /// Serves the disks of a QEMU that is to be started. Those that go along with a VM that comes are made.
    pub(crate) fn begin(
        config: &VmProcessConfig,
        paths: &Paths,
        spec: &VmSpec,
        (user, launch): (User, u64),
        ram: &Arc<RamFile>,
        (held, coming): (Option<Generation>, Option<&MigrationSpec>),
    ) -> Result<Self, ApiError> {
        let disks = match spec.serves_disks() {
            true => spec.disks.clone(),
            false => Vec::new(),
        };
        let mut before = left::of_earlier(paths, &disks);
        let said = coming.into_iter().flat_map(|coming| coming.images.iter());
        take_newest(&mut before.known, left::of_shared(said.cloned(), &disks));
        let come = coming.filter(|_| disks.iter().any(DiskSpec::goes_along));
        let what = ServedDisks {
            leaving_parts: BTreeMap::new(),
            launch,
            ram: ram.identity().map_err(memory)?,
            uid: user.uid,
            gid: user.gid,
            queues: spec.vcpus.clamp(1, QUEUES_MAX) as u16,
            disks,
            images: Vec::new(),
            arriving: come.map(|migration| Arrival::to_come(&migration.id)),
            leaving: None,
            along: before.along,
            unread: before.unread,
            copying: before.copying,
            logs: before.logs,
            left: before.left,
            known: before.known,
            labelled: before.labelled,
            plain: before.plain,
        };
        if coming.is_some() {
            // It has no guest on this host, and what comes begins with what is durable.
            forget_maps(&paths.run, &BTreeSet::new());
        }
        let served = Served::new(config, paths, what, ram, held);
        let made = come.map(|migration| served.make_those_that_come(migration));
        let begun = served.begin(coming, &made.transpose()?.unwrap_or_default());
        if let (Err(_), Some(migration)) = (&begun, come) {
            came::unmake(paths, &migration.id);
        }
        if begun.is_ok() && coming.is_none() {
            served.forget_stray_maps();
        }
        begun.map(|()| Self(Arc::new(served)))
    }

    /// Serves those of a QEMU that a predecessor left. What cannot be served is tried again with [`Self::mend`]. Refused where
    /// the VM is described with such disks and nothing says which images this QEMU has. Where the record does not say that the
    /// guest may run, images on shared storage may be another host's: they are taken with a permit only. Those that were handed
    /// over go on over QEMU's connections.
    pub(crate) fn go_on(
        config: &VmProcessConfig,
        paths: &Paths,
        launch: u64,
        ram: &Arc<RamFile>,
        (described, held): (bool, Option<Generation>),
        handed: Option<HandedDisks>,
    ) -> Result<Self, ApiError> {
        let identity = ram.identity().map_err(memory)?;
        let kept = match record::of_living(paths, (launch, identity)) {
            // Nobody needs it.
            Err(error) if !described => {
                tracing::error!(%error, "what disks the hypervisor has cannot be read");
                None
            }
            kept => kept.map_err(internal)?,
        };
        let what = match kept {
            Some(kept) => kept,
            None if described => {
                let (vm, path) = (&config.vm, paths.disks());
                let path = path.display();
                let message = format!(
                    "which images its hypervisor has is not known: {path} does not tell of it, and its guest waits for its disks; put that file back, or end the guest with 'godwit vm stop {vm} --force'"
                );
                return Err(ApiError::new(ErrorCode::NotMigratable, message));
            }
            None => ServedDisks::none(launch, identity),
        };
        // Nothing is done of it before it is certain what counts once QEMU is gone.
        let is_written = record::is_kept(paths, &what);
        let served = Arc::new(Served::new(config, paths, what, ram, held));
        served.must_save.store(!is_written, Ordering::SeqCst);
        let was_handed = handed.is_some();
        served.put_handed(handed.filter(|handed| handed.launch == launch));
        served.clean_up();
        let (tried, results) = channel();
        for index in 0..served.what().disks.len() {
            served.try_in_thread(index, LOCK_WAIT, Some(tried.clone()));
        }
        drop(tried);
        // Nobody is answered before this has returned.
        let _ = results.recv_timeout(2 * LOCK_WAIT);
        // QEMU is not kept waiting by a disk that cannot be served yet.
        served.put_handed(None);
        if was_handed {
            reached("renewal.taken");
        }
        Ok(Self(served))
    }

    /// Writes again which images QEMU has where the state directory was put back from an older copy.
    pub(crate) fn keep(&self, spec: Option<&mut VmSpec>) -> Result<(), ApiError> {
        self.0.keep_written(spec).map_err(internal)
    }

    /// A disk that consists of several images, and goes along so.
    pub(crate) fn with_snapshots(&self, along: &[DiskToMove]) -> Option<String> {
        let layered = lock(&self.0.layered);
        let becomes_one = |name: &String| {
            let mut named = along.iter().filter(|disk| disk.name == *name);
            named.any(|disk| disk.becomes_one().is_some())
        };
        layered.iter().find(|name| !becomes_one(name)).cloned()
    }

    /// One of them that would change hands.
    pub(crate) fn shared_with_snapshots(&self) -> Option<String> {
        let (what, layered) = (self.0.what(), lock(&self.0.layered));
        let mut disks = what.disks.iter().filter(|disk| disk.changes_hands());
        let found = disks.find(|disk| layered.contains(&disk.name));
        found.map(|disk| disk.name.clone())
    }

    /// One of them that would change hands and is linked to another image, and why it does not.
    pub(crate) fn shared_and_linked(&self) -> Option<(String, String)> {
        let (what, linked) = (self.0.what(), lock(&self.0.linked));
        let mut disks = what.disks.iter().filter(|disk| disk.changes_hands());
        disks.find_map(|disk| {
            let common = linked.get(&disk.name)?;
            Some((disk.name.clone(), linked::stays_over(common)))
        })
    }

    /// Whether QEMU has any that this process serves.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.what().disks.is_empty()
    }

    /// As QEMU's command line has them.
    pub(crate) fn back_ends(&self) -> Vec<BackEnd> {
        let what = self.0.what();
        let back_end = |index| BackEnd::Served {
            socket: self.0.paths.ram_files.disk_socket(what.launch, index),
            queues: what.queues,
        };
        (0..what.disks.len()).map(back_end).collect()
    }

    /// Lets no new request out of its ring and waits until none is under way: a QEMU that is told to stop does so at once then.
    /// One that is not served keeps nobody. Returns QEMU's connections, for [`Self::are_at_rest`].
    pub(crate) fn rest(&self) -> Result<Vec<Option<u16>>, String> {
        let until = Instant::now() + REST_WAIT;
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        let lives = disks.iter().map(|disk| life(disk.as_ref()?, until));
        let lives = lives.collect();
        for (disk, spec) in disks.iter().zip(&what.disks) {
            let left = until.saturating_duration_since(Instant::now());
            match disk {
                Some(disk) if !disk.has_ended() => {
                    disk.hold(left).map_err(|error| told(spec, &error))?;
                }
                _ => {}
            }
        }
        Ok(lives)
    }

    /// Whether they take no requests just now.
    pub(crate) fn do_rest(&self) -> bool {
        let disks = lock(&self.0.disks);
        let mut served = disks.iter().flatten();
        served.any(|disk| disk.glance().is_ok_and(|status| status.held))
    }

    /// Whether a stopped QEMU has all its queues back over the connections that it had before, and nothing is under way: then
    /// its devices can be saved. What is only noted as under way would stay here.
    pub(crate) fn are_at_rest(&self, lives: &[Option<u16>]) -> Result<(), String> {
        let until = Instant::now() + REST_WAIT;
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        for ((disk, before), spec) in disks.iter().zip(lives).zip(&what.disks) {
            let name = &spec.name;
            let disk = disk.as_ref().filter(|disk| life(disk, until) == *before);
            let Some(disk) = disk else {
                return Err(format!(
                    "QEMU was not connected to disk '{name}' all the time"
                ));
            };
            let left = until.saturating_duration_since(Instant::now());
            let status = disk
                .status_within(left)
                .map_err(|error| told(spec, &error))?;
            if status.running > 0 {
                return Err(format!("QEMU has not got all queues of disk '{name}' back"));
            }
            let unanswered = status.unanswered.max(status.under_way);
            if unanswered > 0 {
                return Err(format!(
                    "disk '{name}' has {unanswered} requests unanswered"
                ));
            }
        }
        Ok(())
    }

    /// Has all stand still, for so long at most together, and copies of QEMU's connections made for another program; they go on
    /// once `go_on` has returned. Refused while anything waits for storage: the kernel begins no other program before each
    /// thread of this one has ended, and until then QEMU would hear from no disk.
    pub(crate) fn hand_over<R>(
        &self,
        patience: Duration,
        go_on: impl FnOnce(Vec<(usize, Handover)>) -> R,
    ) -> Result<R, String> {
        // Whoever comes next begins to merge anew.
        let _rests = self.0.tidies.rest(Instant::now() + patience);
        if self.0.waits_for_storage() {
            return Err("the storage of the VM's disks has not answered yet".to_owned());
        }
        let until = Instant::now() + patience;
        let (what, disks) = (self.0.what(), lock(&self.0.disks).clone());
        let (mut standing, mut handed) = (Vec::new(), Vec::new());
        for (place, disk) in disks.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            let (Some(disk), Some(spec)) = (disk, what.disks.get(place)) else {
                continue;
            };
            let stands = disk.stand_still(left).map_err(|error| told(spec, &error))?;
            // Without its map another program could not go on with the disk.
            stands.keep_maps().map_err(|error| told(spec, &error))?;
            match stands.hand_over() {
                Ok(copied) => handed.push((place, copied)),
                Err(error) => {
                    let disk = &spec.name;
                    tracing::warn!(disk, %error, "QEMU has to connect to this disk again");
                }
            }
            standing.push(stands);
        }
        Ok(go_on(handed))
    }

    /// Waits until QEMU is connected to all of them, at most until then. QEMU 7.2 never starts a disk that was away when its
    /// guest was let run.
    pub(crate) fn wait_for_qemu(
        &self,
        deadline: Instant,
        is_alive: impl Fn() -> bool,
    ) -> Result<(), String> {
        let deadline = deadline.min(Instant::now() + CONNECT_WAIT);
        loop {
            match self.not_connected() {
                None => return Ok(()),
                Some(why) if Instant::now() >= deadline || !is_alive() => return Err(why),
                Some(_) => {
                    self.mend();
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
    }

    fn not_connected(&self) -> Option<String> {
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        let mut all = disks.iter().zip(&what.disks);
        all.find_map(|(disk, spec)| match disk.as_deref().map(Disk::glance) {
            Some(Ok(status)) if status.is_settled() => None,
            Some(Ok(_)) => Some(format!("QEMU does not connect to disk '{}'", spec.name)),
            Some(Err(error)) => Some(told(spec, &error)),
            None => Some(format!("disk '{}' is not served", spec.name)),
        })
    }

    /// Whether the guest may be stopped and let run for a disk that was forgotten, now: not where another one would keep it from
    /// either, and not again and again.
    pub(crate) fn may_repair(&self) -> bool {
        if self.not_connected().is_some() || self.full().is_some() {
            return false;
        }
        let (mut repaired, now) = (lock(&self.0.repaired), Instant::now());
        let may = repaired.is_none_or(|at| now >= at + REPAIR_EVERY);
        if may {
            *repaired = Some(now);
        }
        may
    }

    /// Ends all of them, since QEMU is gone: whoever starts the next one needs their images.
    pub(crate) fn end(&self) {
        let disks = {
            let mut disks = lock(&self.0.disks);
            self.0.end();
            std::mem::take(&mut *disks)
        };
        // Together, and not one after the other.
        disks.iter().flatten().for_each(|disk| disk.begin_end());
    }

    /// Those that QEMU has connected to and said nothing to since, by their place: maybe it has forgotten them.
    pub(crate) fn mute(&self) -> Vec<usize> {
        let is_mute = |disk: &Option<Arc<Disk>>| {
            let status = disk.as_ref().and_then(|disk| disk.glance().ok());
            let mute = status.and_then(|status| status.mute_for);
            mute.is_some_and(|mute| mute >= FORGOTTEN_AFTER)
        };
        let disks = lock(&self.0.disks);
        let all = disks.iter().enumerate();
        all.filter(|(_, disk)| is_mute(disk))
            .map(|(index, _)| index)
            .collect()
    }

    pub(crate) fn go(&self) {
        for disk in lock(&self.0.disks).iter().flatten() {
            if let Err(error) = disk.release() {
                tracing::error!(%error, "a disk takes no requests");
            }
        }
    }

    /// Tries again what could not be served, now and then. Returns whether it was time for that.
    pub(crate) fn mend(&self) -> bool {
        let served = &self.0;
        if self.is_empty() || !served.is_time() {
            return false;
        }
        self.watch_storage(Instant::now());
        served.note_failures();
        for index in served.missing() {
            served.try_in_thread(index, Duration::ZERO, None);
        }
        served.clean_up_again();
        served.begin_tidying();
        true
    }
}

impl ServedDisks {
    /// Of a QEMU without disks.
    fn none(launch: u64, ram: (u64, u64)) -> Self {
        Self {
            launch,
            ram,
            uid: 0,
            gid: 0,
            queues: 1,
            disks: Vec::new(),
            images: Vec::new(),
            arriving: None,
            leaving: None,
            along: Vec::new(),
            unread: Vec::new(),
            copying: None,
            logs: Vec::new(),
            left: Vec::new(),
            known: Vec::new(),
            labelled: Vec::new(),
            leaving_parts: BTreeMap::new(),
            plain: Vec::new(),
        }
    }
}

/// The name under which a host has a disk's image.
fn lock_name(config: &VmProcessConfig, spec: &DiskSpec) -> String {
    let (host, vm) = (&config.host, &config.vm);
    format!("{host}/{vm}/{}", spec.name)
}

fn told(spec: &DiskSpec, error: &godwit_vhost::Error) -> String {
    format!("disk '{}': {error}", spec.name)
}

/// The number of QEMU's connection to a disk, once it is done with what it does first; none where it does not answer in time.
fn life(disk: &Disk, until: Instant) -> Option<u16> {
    let left = until.saturating_duration_since(Instant::now());
    let status = disk.status_within(left).ok()?;
    status.is_settled().then_some(status.life)
}

#[cfg(test)]
#[path = "disks_tests.rs"]
mod tests;
