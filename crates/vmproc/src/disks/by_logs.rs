//! One disk that moves on its host by snapshotting: what lies under its redo logs is copied, the logs are consolidated into the copy one after the
//! other, and the guest is held for the last one.
//!
//! What is done next [`godwit_redo`] decides. Until it is written that the copy is the disk, the former image and all logs over it are, as
//! the disk's description says: nothing of them is changed or given up, so that whatever goes wrong leaves the disk as it is, with logs that
//! are tidied then. From that write on the copy alone is the disk, and all else goes with the former image ([`super::left`]).
//!
//! Part of a move ([`super::in_place`]). Owns nothing beyond the course of one disk. Refuses: to fill a file system to its end, where disks
//! that are in use would have no room, and to hold a guest for longer than its limit as far as that is known beforehand.

mod base;

use super::in_place::limit;
use super::last_log::{LastLog, in_time};
use super::layers::OwnedPlace;
use super::parts::Parts;
use super::served::Served;
use super::switching::{Going, Stopped};
use super::{REST_WAIT, STAND_WAIT};
use crate::adoption::lock;
use crate::faults::{is_late, reached};
use godwit_blockio::delta::{Target, merge as merge_images};
use godwit_blockio::filters::{Beside, Pace, WaitTimes};
use godwit_blockio::{Arriving, Image};
use godwit_redo::{Redo, Step, Work};
use godwit_snapshots::Images;
use godwit_types::bytes_per_s;
use godwit_types::disk_move::{DiskIteration, RedoLogs};
use godwit_types::vm::{DiskSpec, room_for_images};
use godwit_vhost::{Disk, Standing};
use rustix::fs::{fstat, fstatvfs};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often it is looked how much room is left, and how much is taken.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A wait for the cap is broken off so soon where the move is called off.
const SLEEP_MAX: Duration = Duration::from_millis(20);

/// A disk on its way.
struct ByLogs<'a> {
    served: &'a Served,
    index: usize,
    place: OwnedPlace,
    /// The number of its image.
    image: (u64, u64),
    disk: Arc<Disk>,
    /// The descriptors of its image, and of the copy.
    own: OwnedFd,
    copy: OwnedFd,
    bytes: u64,
    /// What it consists of, as it was described last.
    images: Images,
    pace: Pace,
    redo: Redo,
    waits: WaitTimes,
    began: Instant,
    /// How long its guest was held, in all attempts.
    held: Duration,
    /// Bytes of its image that are to be copied,
    total: u64,
    /// and those that this step has still to copy.
    left: u64,
    iterations: Vec<DiskIteration>,
    taken: RedoLogs,
    looked: Option<Instant>,
    beside: Beside,
    has_name: bool,
}

/// What a step began with.
pub(super) struct Began {
    at: Instant,
    /// Requests of the guest that had ended.
    did: u64,
}

impl Began {
    pub(super) fn of(served: &Served, index: usize) -> Self {
        let (at, gauge) = (Instant::now(), served.gauges.get(index));
        let did = gauge.map_or(0, |gauge| gauge.done());
        Self { at, did }
    }

    /// This part of what the guest has done in a second since, to which it is slowed.
    pub(super) fn slowed(&self, now: &Self, part: f64) -> u64 {
        let did = now.did.saturating_sub(self.did) as f64;
        let seconds = now.at.saturating_duration_since(self.at).as_secs_f64();
        (did / seconds.max(0.001) * part) as u64
    }
}

impl Served {
    /// Returns how long the guest's requests waited for its last log, and for the change. The first log lies over the disk already.
    pub(super) fn copy_by_logs(&self, going: &mut Going<'_>) -> Result<Duration, Stopped> {
        let disk = self.disk(going.index)?;
        self.must_be_mirrored(going.index, &disk)?;
        if !disk.status()?.has_image {
            return Err("its image is not this host's now".into());
        }
        let bytes = disk.measure()?;
        let place = self.all().place(&going.spec).owned();
        let own = disk.lend_image()?;
        let images = self.logged(&place.get(), own.as_fd(), 1)?;
        let former = self.seen_along(&going.spec, going.image);
        let image = self.make_second(going, bytes)?;
        let filled = Arriving::of(&image)?;
        let cap = going.place.max_bandwidth_mbit_per_s.map(bytes_per_s);
        let mut by_logs = ByLogs {
            served: self,
            index: going.index,
            place,
            image: going.image,
            disk,
            own,
            copy: image.as_fd().try_clone_to_owned()?,
            bytes,
            images,
            pace: Pace::at_most(cap),
            redo: Redo::default(),
            waits: WaitTimes::default(),
            began: Instant::now(),
            held: Duration::ZERO,
            total: bytes,
            left: bytes,
            iterations: Vec::new(),
            taken: RedoLogs::default(),
            looked: None,
            beside: Beside::default(),
            has_name: false,
        };
        reached("redo.copying");
        let ready = |going: &mut Going<'_>| -> Result<(), Stopped> {
            filled.must_be_whole()?;
            going.copying.give_name()?;
            reached("redo.named");
            let spec = DiskSpec {
                path: going.place.path.clone(),
                ..going.spec.clone()
            };
            let image = going.copying.image;
            let now = image.map(|image| self.seen_along(&spec, image));
            going.follows = former.clone().ok().zip(now.transpose().ok().flatten());
            Ok(())
        };
        let moved = by_logs.work((&mut *going, &filled), ready, &mut Some(image));
        by_logs.tell();
        moved?;
        self.say_taken(going);
        Ok(by_logs.held)
    }
}

/// Whatever becomes of its move, its guest is as fast as it may be.
impl Drop for ByLogs<'_> {
    fn drop(&mut self) {
        if let Some(gauge) = self.served.gauges.get(self.index) {
            gauge.slow(None);
        }
    }
}

impl ByLogs<'_> {
    fn name(&self) -> &str {
        &self.place.spec.name
    }

    fn must_go_on(&self) -> Result<(), Stopped> {
        self.served.must_go_on_with(self.index, &self.disk)
    }

    /// Does one step after the other, until the copy is the disk. `ready` is called once, before the guest is held for the first time.
    fn work(
        &mut self,
        (going, filled): (&mut Going<'_>, &Arriving),
        ready: impl Fn(&mut Going<'_>) -> Result<(), Stopped>,
        copy: &mut Option<Image>,
    ) -> Result<(), Stopped> {
        // The first log was made, and put over it, together with those of others.
        self.redo.done();
        self.redo.done();
        loop {
            self.must_go_on()?;
            match self.redo.step() {
                Step::Make(log) => {
                    self.served.put_logs(&[self.name()], log)?;
                    self.redo.done();
                }
                // It was put over the disk once it was made.
                Step::PutOver(_) => {
                    self.redo.done();
                    self.look_at_images()?;
                }
                Step::CopyBase => self.copy_base(filled)?,
                Step::Consolidate(log) => self.consolidate(log)?,
                Step::Hold | Step::ConsolidateLast(_) | Step::Record => {
                    if !std::mem::replace(&mut self.has_name, true) {
                        ready(going)?;
                    }
                    if self.hold(going, copy)? {
                        return Ok(());
                    }
                }
                Step::GiveUp(why) => return Err(why.into()),
            }
        }
    }

    fn look_at_images(&mut self) -> Result<(), Stopped> {
        let (place, logs) = (self.place.get(), self.redo.logs());
        self.images = self.served.logged(&place, self.own.as_fd(), logs)?;
        Ok(())
    }

    /// Bytes that an image of it takes.
    fn bytes_of(&self, name: &str) -> Result<u64, Stopped> {
        let bytes = self.place.get().bytes_of(&self.images, name);
        bytes.ok_or_else(|| "how much one of its redo logs holds cannot be told".into())
    }

    fn begin(&self) -> Began {
        Began::of(self.served, self.index)
    }

    /// Brings a log that is frozen into the copy.
    fn consolidate(&mut self, log: u32) -> Result<(), Stopped> {
        let name = log_of(&self.images, log);
        let name = name.ok_or("one of its redo logs is not described any more")?;
        let (bytes, began) = (self.bytes_of(&name)?, self.begin());
        let copied = self.merge(&name)?;
        let copied = copied.ok_or("one of its redo logs was not consolidated to its end")?;
        reached("redo.consolidated");
        let work = Work {
            bytes,
            seconds: began.at.elapsed().as_secs_f64(),
        };
        self.ended(&began, work, copied)
    }

    /// Notes what a step came to, and has what follows decided.
    fn ended(&mut self, began: &Began, work: Work, copied: u64) -> Result<(), Stopped> {
        let top = self.bytes_of(&self.images.top)?;
        self.redo.ended(work, top);
        self.iterations.push(DiskIteration {
            number: self.iterations.len() as u32 + 1,
            copied_bytes: copied,
            seconds: work.seconds,
            dirty_bytes: top,
            ..DiskIteration::default()
        });
        self.left = top;
        if let Some(part) = self.redo.slows_to() {
            self.slow(began, part);
        }
        self.tell();
        Ok(())
    }

    /// Its guest writes as fast as its logs are consolidated, and is slowed to this part of what it has done since.
    fn slow(&mut self, began: &Began, part: f64) {
        let requests_per_s = began.slowed(&self.begin(), part);
        if let Some(gauge) = self.served.gauges.get(self.index) {
            gauge.slow(Some(requests_per_s));
        }
        self.taken.slowed_to = Some(self.taken.slowed_to.unwrap_or(1.0) * part);
        let disk = self.name();
        tracing::info!(
            disk,
            requests_per_s,
            "a guest that writes as fast as its redo logs are consolidated is slowed until its disk has moved"
        );
    }

    /// Brings a log that is frozen into the copy, durably. Returns the bytes that were copied.
    fn merge(&mut self, name: &str) -> Result<Option<u64>, Stopped> {
        let from = self.place.get().open_unlocked(&self.images, name)?;
        let (copy, bytes) = (self.copy.try_clone()?, self.bytes_of(name)?);
        let (mut before, mut stopped) = (0, None);
        let into = Target::Raw(copy.as_fd(), self.bytes);
        let merged = merge_images(&from, into, false, |done| {
            let piece = done.begun().saturating_sub(before);
            (before, self.left) = (done.begun(), bytes.saturating_sub(done.moved()));
            stopped = self.goes_on(piece).err();
            let under_way = || self.disk.glance().map_or(0, |status| status.under_way);
            stopped.is_none().then(|| self.beside.pieces(under_way))
        });
        match stopped {
            Some(why) => Err(why),
            None => Ok(merged?.map(|done| done.moved())),
        }
    }

    /// After a piece of so many bytes: waits as long as the cap wants, and refuses to go on where nobody should.
    fn goes_on(&mut self, piece: u64) -> Result<(), Stopped> {
        self.must_go_on()?;
        let now = Instant::now();
        let until = match piece {
            0 => now,
            piece => now + self.pace.delay(now, piece),
        };
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(SLEEP_MAX));
            self.must_go_on()?;
        }
        self.waits.cap += until - now;
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            self.looked = Some(now);
            self.must_leave_room()?;
            self.tell();
        }
        Ok(())
    }

    /// The new image and the logs leave the same room to others as every image that is filled.
    fn must_leave_room(&self) -> Result<(), Stopped> {
        must_have_room(
            (&self.copy, 0),
            "its new image and its redo logs has",
            "make room there",
        )?;
        // What the guest writes goes there, and nothing else of the move.
        match self.images.elsewhere.contains_key(&self.images.top) {
            true => Ok(()),
            false => must_have_room(
                (&self.own, 0),
                "its image and its first redo log has",
                "make room there, or leave out --first-log",
            ),
        }
    }

    /// How far it is, for whoever asks.
    fn tell(&mut self) {
        let logs = (1..=self.redo.logs()).filter_map(|log| log_of(&self.images, log));
        let logs = logs.filter_map(|name| self.bytes_of(&name).ok());
        let copy = fstat(&self.copy).map_or(0, |found| {
            u64::try_from(found.st_blocks)
                .unwrap_or(0)
                .saturating_mul(512)
        });
        let space = logs.fold(copy, u64::saturating_add);
        let taken = &mut self.taken;
        taken.space_max_bytes = taken.space_max_bytes.max(space);
        taken.logs = self.redo.logs();
        if let Some(known) = lock(&self.served.by_logs).get(&self.place.spec.name) {
            taken.frozen_ms = known.frozen.as_secs_f64() * 1e3;
            let spans = known.spans.map(|since| since.elapsed().as_secs_f64());
            taken.spanned_s = spans.unwrap_or(0.0);
        }
        let seconds = self.began.elapsed().as_secs_f64();
        let done = self.total.saturating_sub(self.left);
        let is_base = self.iterations.is_empty() && done > 0;
        let eta_s = is_base.then(|| self.left as f64 * seconds / done as f64);
        self.served.note(self.name(), |disk| {
            (disk.total_bytes, disk.left_bytes) = (self.total, self.left.min(self.total));
            disk.eta_s = eta_s.map(|seconds| seconds.ceil() as u64);
            disk.seconds = Some(seconds);
            disk.limited_by = self.waits.bottleneck().map(limit);
            disk.iterations.clone_from(&self.iterations);
            disk.redo_logs = Some(self.taken);
        });
    }

    /// Holds the guest, and brings its last log into the copy, which is the disk then. Returns whether it is: where that took too long
    /// the guest works on.
    fn hold(&mut self, going: &Going<'_>, copy: &mut Option<Image>) -> Result<bool, Stopped> {
        let served = self.served;
        let _one = lock(&served.descriptions);
        // A disk that ends while what is written changes must not be served as it was.
        let Some(_alone) = served.serve_alone(self.index) else {
            return Ok(self.not_yet(Duration::ZERO));
        };
        self.must_go_on()?;
        // While nobody else may write it: all that the disk consists of is in the copy then.
        self.look_at_images()?;
        self.must_leave_room()?;
        let logs = self.place.get().parts_of_logs(&self.images)?;
        let last = LastLog {
            place: self.place.clone(),
            images: self.images.clone(),
            copy: self.copy.try_clone()?,
            path: PathBuf::from(&going.place.path),
        };
        if in_time(self.disk.settle(REST_WAIT))?.is_none() {
            return Ok(self.not_yet(Duration::ZERO));
        }
        let (disk, began) = (Arc::clone(&self.disk), Instant::now());
        let Ok(standing) = disk.stand_still(STAND_WAIT) else {
            return Ok(self.not_yet(began.elapsed()));
        };
        reached("redo.held");
        self.redo.done();
        let is_durable = in_time(standing.settle(STAND_WAIT))?.is_some();
        let until = began + Duration::from_secs_f64(self.redo.limit_s());
        let is_in_time = is_durable && Instant::now() < until && !is_late("redo.held");
        let found = match is_in_time {
            true => last.consolidate(until, || self.must_go_on())?,
            false => None,
        };
        // Whoever calls it off while the guest is held is heard, too.
        self.must_go_on()?;
        let Some(found) = found else {
            drop(standing);
            return Ok(self.not_yet(began.elapsed()));
        };
        self.redo.done();
        reached("redo.last");
        if found.image != going.copying.image || found.bytes != self.bytes {
            let path = &going.place.path;
            let why = format!(
                "{path} is not the image any more that was made there: see who may write into that directory"
            );
            return Err(why.into());
        }
        served.must_be_mirrored(self.index, &disk)?;
        let recorded = self.record(going, standing, (logs, copy));
        self.held += began.elapsed();
        recorded.map(|()| true)
    }

    fn not_yet(&mut self, held: Duration) -> bool {
        self.held += held;
        self.redo.let_go(held.as_secs_f64());
        let disk = self.name();
        tracing::warn!(
            disk,
            "its last redo log was not consolidated in time: its guest works on, and another one is put over it"
        );
        false
    }

    /// Writes down that the copy is the disk, and has the disk go on with it. Nothing is under way.
    fn record(
        &self,
        going: &Going<'_>,
        standing: Standing<'_>,
        (logs, copy): (Parts, &mut Option<Image>),
    ) -> Result<(), Stopped> {
        let served = self.served;
        let what = served.what();
        let known = served.known_of(&what, self.name());
        let before = (what, known);
        served.moves.is_switching.store(true, Ordering::SeqCst);
        let written = served.write_switch(going, None, Some(logs));
        let recorded = match written {
            Ok(()) => {
                reached("redo.recorded");
                self.change_image(going, standing, copy);
                Ok(())
            }
            Err(why) => {
                match served.write_back(going, &before) {
                    // The guest goes on with the disk as it is.
                    Ok(()) => drop(standing),
                    // What is written may be either: it is served anew once that is certain.
                    Err(error) => {
                        standing.end();
                        served.serve_anew(going, &error.message);
                    }
                }
                Err(why.into())
            }
        };
        served.moves.is_switching.store(false, Ordering::SeqCst);
        recorded
    }

    /// The disk goes on with the copy, which is written down.
    fn change_image(&self, going: &Going<'_>, standing: Standing<'_>, copy: &mut Option<Image>) {
        self.served.note_images(self.name(), None);
        let changed = match copy.take() {
            Some(copy) => standing.flatten(copy).map_err(|error| error.to_string()),
            None => Err("its new image is gone".to_owned()),
        };
        match changed {
            Ok(()) => {
                drop(standing);
                self.place.get().forget_maps(&self.images);
                reached("redo.switched");
            }
            Err(why) => {
                // It must take nothing more: it is served anew with what is written.
                standing.end();
                self.served.serve_anew(going, &why);
            }
        }
    }
}

/// Refuses to take what is for disks that are in use, where so much has still to be written beside what is there.
pub(super) fn must_have_room(
    (file, needed): (&OwnedFd, u64),
    whose: &str,
    way_out: &str,
) -> Result<(), Stopped> {
    let found = fstatvfs(file)?;
    let of = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let free = of(found.f_bavail);
    if room_for_images(of(found.f_blocks), free) > needed {
        return Ok(());
    }
    let mib = free >> 20;
    let why = match needed >> 20 {
        0 => format!(
            "the file system of {whose} {mib} MiB left, which are for disks that are in use: {way_out}"
        ),
        needed => format!(
            "the file system of {whose} {mib} MiB left for disks that are in use, and up to {needed} MiB are needed for what is in its logs: {way_out}"
        ),
    };
    Err(why.into())
}

/// The image that is log `number` of a disk that consists of logs alone and of its own image, or of what it is linked to and what was written over that.
pub(super) fn log_of(images: &Images, number: u32) -> Option<String> {
    let chain = images.chain(&images.top);
    let below = if images.common().is_some() { 2 } else { 1 };
    let place = chain.len().checked_sub(below + number as usize)?;
    chain.get(place).map(|name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_snapshots::{Common, Fresh};

    #[test]
    fn logs_are_found_from_the_lowest_on() {
        let mut images = Images::of_one("root.raw", 4096, &"5".repeat(32));
        assert_eq!(log_of(&images, 1), None);
        for number in 1..=3 {
            let fresh = Fresh {
                name: format!("web-root.raw.moving-1.d{number}"),
                id: format!("{number:032x}"),
                elsewhere: Some("/srv/fast".to_owned()),
            };
            images = images.freeze(&fresh).unwrap();
        }
        let name = |number| format!("web-root.raw.moving-1.d{number}");
        assert_eq!(log_of(&images, 1), Some(name(1)));
        assert_eq!(log_of(&images, 3), Some(name(3)));
        assert_eq!(log_of(&images, 4), None);
    }

    #[test]
    fn what_a_linked_disk_consists_of_is_no_log() {
        let fresh = |name: &str, elsewhere: Option<&str>| Fresh {
            name: name.to_owned(),
            id: "7".repeat(32),
            elsewhere: elsewhere.map(str::to_owned),
        };
        let id = "9".repeat(32);
        let common = Common {
            path: "/srv/base.raw",
            id: &id,
        };
        let own = fresh("root.raw.d1", None);
        let images = Images::linked(common, 4096, &"5".repeat(32), &own).unwrap();
        assert_eq!(log_of(&images, 1), None);
        let log = fresh("web-root.raw.moving-1.d1", Some("/srv/fast"));
        let images = images.freeze(&log).unwrap();
        assert_eq!(log_of(&images, 1), Some(log.name));
        assert_eq!(log_of(&images, 2), None);
    }
}
