//! Disks that move from one place of this host to another while the guest runs.
//!
//! A disk is mirrored to a second image until both are equal. Then the second image is made durable, `disks.json` says that it is the disk from
//! now on, and the disk goes on with it ([`super::switching`]): so one image is certainly the
//! right one, whenever this process dies. Then the VM's description follows, and the former image is removed.
//!
//! Owns the threads that move disks. Refuses: disks that the guest only reads, images
//! that this host does not hold, and a place that is taken. An image that cannot be written ends the move and nothing else.

use super::claim::Taking;
use super::history;
use super::left::{Copying, follow};
use super::parts::Parts;
use super::redo::must_take_logs;
use super::room::must_have_room_for_an_image;
use super::served::{Served, ServedDisks};
use super::switching::{Going, Mirror, Stopped};
use super::tree::NewImage;
use super::{Disks, REST_WAIT};
use crate::adoption::lock;
use crate::faults::reached;
use crate::files::Paths;
use crate::hypervisor::internal;
use godwit_blockio::filters::Bottleneck;
use godwit_blockio::{Approach, NOT_KEPT_UP, switch_over};
use godwit_qemu::disk::identity_of_open;
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::{
    DiskMove, DiskMoveLimit, DiskMoveState, DiskMoves, DiskPlace, Method,
};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode};
use godwit_vhost::Disk;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often it is looked how far a disk is.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long it is waited for whoever gives up images of deleted snapshots.
const HOLD_WAIT: Duration = Duration::from_secs(30);
/// How often it is tried again to remove a copy that is not whole.
const CLEAN_EVERY: Duration = Duration::from_secs(30);

/// Disks that are moved on this host, or were last.
#[derive(Debug)]
pub(super) struct Moves {
    disks: Mutex<Vec<DiskMove>>,
    /// Those that have ended, newest first.
    past: Mutex<Vec<DiskMove>>,
    is_cancelled: AtomicBool,
    /// Whether what is written of where a disk is may still be taken back: nothing follows it before that is over.
    pub(super) is_switching: AtomicBool,
    /// Held by whoever writes them.
    writing: Mutex<()>,
    /// Held by whoever moves a disk, or removes what earlier moves left: neither meets what the other has under way.
    pub(super) turn: Mutex<()>,
    /// When it was last tried to remove a copy that is not whole.
    cleaned: Mutex<Option<Instant>>,
}

impl Moves {
    pub(super) fn of(paths: &Paths) -> Self {
        Self {
            disks: Mutex::default(),
            past: Mutex::new(history::settled(paths)),
            is_cancelled: AtomicBool::new(false),
            is_switching: AtomicBool::new(false),
            writing: Mutex::default(),
            turn: Mutex::default(),
            cleaned: Mutex::default(),
        }
    }

    /// Whether a person has called them off.
    pub(super) fn are_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    /// Whether it is time to try again to remove a copy that is not whole, which no move is making.
    pub(super) fn may_clean(&self) -> bool {
        let (mut cleaned, now) = (lock(&self.cleaned), Instant::now());
        let is_time = cleaned.is_none_or(|at| now >= at + CLEAN_EVERY);
        let may = is_time && !lock(&self.disks).iter().any(DiskMove::is_under_way);
        if may {
            *cleaned = Some(now);
        }
        may
    }
}

impl Disks {
    /// Begins to move disks to these places, one after the other; `changed` is called after each that was, and once QEMU is gone.
    pub(crate) fn move_in_place(
        &self,
        places: Vec<DiskPlace>,
        changed: impl Fn() + Send + 'static,
    ) -> Result<DiskMoves, ApiError> {
        let served = &self.0;
        let what = served.what();
        let mut disks = lock(&served.moves.disks);
        served.may_begin(&disks)?;
        let begun = places.iter().map(|place| {
            Ok(DiskMove {
                state: DiskMoveState::Waiting,
                ..served.planned(&what, place)?
            })
        });
        let begun: Vec<DiskMove> = begun.collect::<Result<_, ApiError>>()?;
        disks.clone_from(&begun);
        drop(disks);
        served.moves.is_cancelled.store(false, Ordering::SeqCst);
        let begun = DiskMoves {
            disks: begun,
            ..DiskMoves::default()
        };
        let served = Arc::clone(served);
        let work = move || served.move_all(&places, &changed);
        let thread = std::thread::Builder::new().name("disk-move".into());
        if let Err(error) = thread.spawn(work) {
            lock(&self.0.moves.disks).clear();
            return Err(internal(error));
        }
        Ok(begun)
    }

    /// What [`Self::move_in_place`] would begin, or why it would not.
    pub(crate) fn plan_in_place(&self, places: &[DiskPlace]) -> Result<DiskMoves, ApiError> {
        let served = &self.0;
        served.may_begin(&lock(&served.moves.disks))?;
        let what = served.what();
        let planned = places.iter().map(|place| served.planned(&what, place));
        Ok(DiskMoves {
            disks: planned.collect::<Result<_, _>>()?,
            past: lock(&served.moves.past).clone(),
            ..DiskMoves::default()
        })
    }

    /// How far they are, and those that have ended.
    pub(crate) fn moves(&self) -> DiskMoves {
        let disks = lock(&self.0.moves.disks).clone();
        DiskMoves {
            disks,
            past: lock(&self.0.moves.past).clone(),
            ..DiskMoves::default()
        }
    }

    /// Whether some of them are under way.
    pub(crate) fn are_moving(&self) -> bool {
        lock(&self.0.moves.disks).iter().any(DiskMove::is_under_way)
    }

    /// Calls it off: a disk whose images are being changed just now is moved all the same.
    pub(crate) fn cancel_moves(&self) {
        self.0.moves.is_cancelled.store(true, Ordering::SeqCst);
    }

    /// What a person is to know of it.
    pub(super) fn moves_note(&self) -> Option<String> {
        let moves = lock(&self.0.moves.disks);
        let mut moves = moves.iter();
        let copied = moves.find(|disk| disk.state == DiskMoveState::Copying);
        copied.map(|disk| {
            let (name, to) = (&disk.disk, &disk.to);
            let mib = |bytes: u64| bytes >> 20;
            let (left, total) = (mib(disk.left_bytes), mib(disk.total_bytes));
            format!("disk '{name}' is being moved to {to}: {left} of {total} MiB are left")
        })
    }

    /// Whether the VM's description does not say yet where they are.
    pub(crate) fn are_elsewhere(&self) -> bool {
        let is_certain = !self.0.moves.is_switching.load(Ordering::SeqCst);
        is_certain && self.0.what().left.iter().any(|left| !left.followed)
    }

    /// Has the VM's description say where its disks are.
    pub(crate) fn follow_moves(&self, paths: &Paths, spec: &mut VmSpec) -> Result<(), String> {
        let what = self.0.what();
        if !self.are_elsewhere() {
            return Ok(());
        }
        follow(&what, paths, spec)?;
        let followed = self.0.change(|now| {
            let known = now.left.iter_mut();
            let known = known.filter(|left| what.left.contains(left));
            known.for_each(|left| left.followed = true);
        });
        followed.map_err(|error| error.message)
    }
}

impl Served {
    fn not_so(&self, why: &str) -> ApiError {
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!("VM '{vm}' on host '{host}': {why}");
        ApiError::new(ErrorCode::WrongState, message).on_host(host)
    }

    fn planned(&self, what: &ServedDisks, place: &DiskPlace) -> Result<DiskMove, ApiError> {
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
        match self.must_be_copied_whole(spec, place.method) {
            Err(why) => {
                return Err(self.not_so(&format!("its disk '{name}' is not moved: {why}")));
            }
            Ok(false) if is_device_path(&place.path) && self.may_have_layers(spec) => {
                let why = format!(
                    "its disk '{name}' has snapshots, or images of deleted ones that are not merged yet, and there is no place for them beside the block device {}: name a place in a directory, or delete its snapshots first",
                    place.path
                );
                return Err(self.not_so(&why));
            }
            Ok(false) if self.may_have_layers(spec) => {
                must_have_room_for_an_image(&spec.path).map_err(|why| {
                    self.not_so(&format!("its disk '{name}' is not moved: {why}"))
                })?;
            }
            Ok(_) => {}
        }
        if spec.path == place.path {
            return Err(self.not_so(&format!("its disk '{name}' is {} already", place.path)));
        }
        if place.method == Method::Snapshot {
            must_take_logs(spec, place)
                .map_err(|why| self.not_so(&format!("its disk '{name}' is not moved: {why}")))?;
        }
        Ok(DiskMove {
            method: place.method,
            ..DiskMove::planned(name, &spec.path, &place.path)
        })
    }

    /// Refuses while some of these are under way, and where the guest may not run.
    fn may_begin(&self, moves: &[DiskMove]) -> Result<(), ApiError> {
        if moves.iter().any(DiskMove::is_under_way) {
            let vm = &self.config.vm;
            return Err(self.not_so(&format!("its disks are being moved already: wait for that, or call it off with 'godwit vm move-disk {vm} --cancel'")));
        }
        match self.held() {
            Some(_) => Ok(()),
            None => Err(self.not_so("its guest may not run here now, so its disks are not moved")),
        }
    }

    pub(super) fn note(&self, name: &str, change: impl FnOnce(&mut DiskMove)) {
        let mut disks = lock(&self.moves.disks);
        if let Some(disk) = disks.iter_mut().find(|disk| disk.disk == name) {
            change(disk);
        }
    }

    fn move_all(self: &Arc<Self>, places: &[DiskPlace], changed: &impl Fn()) {
        self.keep_moves();
        let mut stopped = None;
        let mut begun = self.begin_logs(places);
        for (number, place) in (1..).zip(places) {
            let ended = match &stopped {
                None => match std::mem::replace(&mut begun, Ok(())) {
                    Ok(()) => self.move_one(place, changed),
                    Err(why) => Err(why),
                },
                Some(DiskMoveState::Cancelled) => Err(Stopped::Cancelled),
                Some(_) => Err("the one before it could not be moved".into()),
            };
            // Whoever hears that the last one has ended may order others to move, whose logs are theirs.
            if number == places.len() {
                self.end_logs(places);
            }
            self.ends(&place.disk, &ended);
            stopped = match ended {
                Ok(_) => stopped,
                Err(Stopped::Cancelled) => Some(DiskMoveState::Cancelled),
                Err(Stopped::Failed(_)) => Some(DiskMoveState::Failed),
            };
        }
        let _ = self.has_ended.load(Ordering::SeqCst).then(changed);
    }

    /// Whoever hears that it has ended finds it among those that have.
    fn ends(&self, name: &str, ended: &Result<Duration, Stopped>) {
        let disks = lock(&self.moves.disks).clone();
        let Some(mut disk) = disks.into_iter().find(|disk| disk.disk == name) else {
            return;
        };
        match ended {
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
        }
        let mut past = lock(&self.moves.past);
        *past = history::with_one_more(&past, disk.clone());
        drop(past);
        self.note(name, |now| *now = disk);
        self.keep_moves();
    }

    /// Nobody who asks waits for the file, and what is written last is what is so last.
    fn keep_moves(&self) {
        let _one = lock(&self.moves.writing);
        let disks = lock(&self.moves.disks).clone();
        let past = lock(&self.moves.past).clone();
        history::keep(&self.paths, &disks, &past);
    }

    /// Whoever calls this has the turn.
    pub(super) fn must_be_clean(&self) -> Result<(), Stopped> {
        self.clean();
        match self.is_clean() {
            true => Ok(()),
            false => Err(
                "what an earlier move left is not removed yet: see the log of the VM process"
                    .into(),
            ),
        }
    }

    /// Returns how long the guest's requests waited for the change.
    fn move_one(
        self: &Arc<Self>,
        place: &DiskPlace,
        changed: &impl Fn(),
    ) -> Result<Duration, Stopped> {
        let _turn = lock(&self.moves.turn);
        self.must_be_clean()?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.unwrap_or_default();
        self.note(&place.disk, |disk| {
            disk.state = DiskMoveState::Copying;
            disk.began_unix_s = Some(since.as_secs());
        });
        self.keep_moves();
        let what = self.what();
        let mut all = what.with_images().enumerate();
        let found = all.find(|(_, (disk, _))| disk.name == place.disk);
        let (index, (spec, image)) = found.ok_or("the VM has no such disk")?;
        let since = since.as_nanos();
        let mut going = Going {
            index,
            place,
            spec: spec.clone(),
            image,
            copying: Copying {
                parts: Parts::default(),
                disk: place.disk.clone(),
                path: place.path.clone(),
                beside: format!("{}.moving-{since:x}", place.path),
                image: None,
                known: None,
            },
            follows: None,
            tree: None,
            below: 0,
        };
        let moved = self.copy(&mut going);
        if moved.is_ok() {
            self.forget_top(&going, true);
            changed();
            self.remove_former();
            return moved;
        }
        if place.method != Method::Snapshot
            && let Ok(disk) = self.disk(index)
            && let Err(error) = disk.take_lowest(REST_WAIT)
        {
            tracing::info!(disk = spec.name, %error, "the disk keeps a mirror that has ended");
        }
        // Whoever comes after this process does it if it cannot be done here.
        match self.remove_copy(&going.copying) {
            Ok(()) => self.forget_top(&going, false),
            Err(error) => tracing::warn!(%error, "a disk that is not moved is not settled yet"),
        }
        moved
    }

    pub(super) fn disk(&self, index: usize) -> Result<Arc<Disk>, &'static str> {
        let disks = lock(&self.disks);
        let disk = disks.get(index).and_then(Option::as_ref);
        let disk = disk.filter(|disk| !disk.has_ended());
        disk.map(Arc::clone)
            .ok_or("the disk is not served any more")
    }

    fn copy(self: &Arc<Self>, going: &mut Going<'_>) -> Result<Duration, Stopped> {
        if going.place.method == Method::Snapshot {
            return self.copy_by_logs(going);
        }
        let held = self.may_have_layers(&going.spec);
        let held = held.then(|| self.hold_tidying(HOLD_WAIT));
        let _held = held.transpose()?;
        let (mirror, image) = self.make_equal(going)?;
        reached("disk-move.equal");
        self.go_over(going, &mirror, image)
    }

    /// The disk goes on with its second image. Returns how long it stood still for that.
    fn go_over(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
        image: NewImage,
    ) -> Result<Duration, Stopped> {
        let mut image = Some(image);
        let switched = switch_over(
            &mirror.second,
            || match going.place.method {
                Method::DirtyTracking => self.wait_until_closed(going, mirror),
                Method::Mirror | Method::Snapshot => self.wait_until_equal(going, mirror),
            },
            |bound| self.switch(going, (mirror, bound), &mut image),
        );
        self.note_iterations(going, mirror);
        let switched = switched?.ok_or(NOT_KEPT_UP)?;
        if going.tree.is_none() {
            self.note_images(&going.spec.name, None);
        }
        // A disk that was held for its last blocks was so before it stood still, too.
        let switched = switched.max(mirror.second.course().closed_for());
        self.say_taken(going);
        Ok(switched)
    }

    /// What is said of the new image, once it is the disk, is not what was said while it was filled.
    pub(super) fn say_taken(&self, going: &Going<'_>) {
        if let Err(why) = self.take_once_more(going.index) {
            let disk = &going.spec.name;
            tracing::warn!(
                disk,
                why,
                "the disk's new image says the same of itself as while it was filled"
            );
        }
    }

    /// Has the image say that it was taken since: an older copy of what is written, which calls it one that is not whole, knows it no
    /// more.
    fn take_once_more(&self, index: usize) -> Result<(), String> {
        let what = self.what();
        let spec = what.disks.get(index).ok_or("the VM has no such disk")?;
        let held = self.held();
        let generation = held.ok_or("its guest may not run here any more")?;
        // Not on the disk's own descriptor: a flush of the guest's must hear itself of what the storage lost.
        let image = self.open_file(spec).map_err(|error| error.message)?;
        let found = identity_of_open(&image).map_err(|error| error.to_string())?;
        if what.images.get(index) != Some(&found) {
            return Err(format!("{} is another file", spec.path));
        }
        let known = self.claim(spec, image.as_fd(), generation, Taking::Anew);
        let known = known.map_err(|error| error.message)?;
        known.into_iter().for_each(|known| self.keep_later(known));
        Ok(())
    }

    /// Nobody has called it off, and the disk is the one that is copied.
    pub(super) fn must_go_on(&self, going: &Going<'_>, mirror: &Mirror) -> Result<(), Stopped> {
        self.must_go_on_with(going.index, &mirror.disk)
    }

    /// The same of a disk that is not copied by a mirror.
    pub(super) fn must_go_on_with(&self, index: usize, disk: &Arc<Disk>) -> Result<(), Stopped> {
        match self.moves.are_cancelled() {
            true => Err(Stopped::Cancelled),
            false => self.must_be_mirrored(index, disk),
        }
    }

    /// Waits until it is worth binding the second image.
    pub(super) fn wait_until_equal(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
    ) -> Result<(), Stopped> {
        let mut approach = Approach::of(&mirror.second, mirror.total);
        loop {
            self.must_go_on(going, mirror)?;
            let progress = approach.look(Instant::now())?;
            self.note_left(going, mirror, progress.left, progress.eta_s);
            if progress.is_close {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// So many bytes are left of a disk, for so many seconds if that can be told.
    pub(super) fn note_left(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
        left: u64,
        eta_s: Option<f64>,
    ) {
        self.note(&going.place.disk, |disk| {
            (disk.total_bytes, disk.left_bytes) = (mirror.total + going.below, left);
            disk.eta_s = eta_s.map(|seconds| seconds.ceil() as u64);
            disk.seconds = Some(mirror.began.elapsed().as_secs_f64());
            disk.limited_by = mirror.second.course().wait_times().bottleneck().map(limit);
        });
    }
}

pub(super) fn limit(bottleneck: Bottleneck) -> DiskMoveLimit {
    match bottleneck {
        Bottleneck::Reads => DiskMoveLimit::SourceDisk,
        Bottleneck::Writes => DiskMoveLimit::DestinationDisk,
        Bottleneck::Cap => DiskMoveLimit::Cap,
    }
}

#[cfg(test)]
#[path = "in_place_tests.rs"]
mod tests;
