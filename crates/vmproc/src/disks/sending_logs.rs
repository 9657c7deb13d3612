//! Puts redo logs over disks that go to another host, and sends what is frozen below them, until the migration is over.
//!
//! Part of a migration by snapshotting ([`super::logs_away`]). Owns the disks' way there, on a thread of its own. Refuses: to go on with a disk that is
//! served anew, or consists of other logs than those of this migration, and to fill a file system to its end.

use super::STAND_WAIT;
use super::by_logs::{log_of, must_have_room};
use super::last_log::in_time;
use super::layers::OwnedPlace;
use super::logs_away::{READY_S, Shared, must_be_one_image};
use super::served::Served;
use super::switching::Stopped;
use super::to_copy::{but, holes};
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::filters::{Course, Outlet, Sending};
use godwit_delta::{Move, moves};
use godwit_redo::{Redo, Step, Work};
use godwit_snapshots::Images;
use godwit_streams::source::Changes;
use godwit_types::MigrationId;
use godwit_vhost::Disk;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often it is looked whether the guest stands still, and how large its log is.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How often it is looked how much room is left.
const ROOM_EVERY: Duration = Duration::from_millis(100);

/// A disk on its way.
pub(super) struct One {
    pub index: usize,
    pub place: OwnedPlace,
    /// The number of its image.
    pub image: (u64, u64),
    pub bytes: u64,
    pub disk: Arc<Disk>,
    /// The descriptor of its image.
    pub own: OwnedFd,
    pub outlet: Box<dyn Outlet>,
    pub course: Course,
    /// What it consists of, as it was described last.
    pub images: Images,
}

/// What is needed beside the disks.
struct Context {
    served: Arc<Served>,
    changes: Changes,
    migration: MigrationId,
    shared: Arc<Shared>,
    /// Bytes that this step has still to send.
    left: Cell<u64>,
    looked: Cell<Option<Instant>>,
}

impl Context {
    fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::SeqCst)
    }

    fn stands_still(&self, closing: u64) -> bool {
        self.shared.closings.load(Ordering::SeqCst) == closing
    }

    fn begins(&self, bytes: u64) {
        self.left.set(bytes);
        self.shared.left.store(bytes, Ordering::Relaxed);
    }

    fn sent(&self, bytes: u64) {
        let left = self.left.get().saturating_sub(bytes);
        self.left.set(left);
        self.shared.left.store(left, Ordering::Relaxed);
        self.shared.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether it goes on with a disk: not where the guest was to stand still, since this closing, and does no more.
    fn goes_on(
        &self,
        (index, disk): (usize, &Arc<Disk>),
        own: &OwnedFd,
        closing: Option<u64>,
    ) -> Result<bool, Stopped> {
        if self.is_over() {
            return Err(Stopped::Cancelled);
        }
        if !Arc::ptr_eq(&self.served.disk(index)?, disk) {
            return Err("a disk was served anew meanwhile".into());
        }
        if let Some(closing) = closing {
            return Ok(self.stands_still(closing));
        }
        let looked = self.looked.get();
        if looked.is_none_or(|at| at.elapsed() >= ROOM_EVERY) {
            self.looked.set(Some(Instant::now()));
            let way_out = "make room there, or leave out --method";
            must_have_room(own, "its image and its redo logs has", way_out)?;
        }
        Ok(true)
    }
}

impl One {
    fn name(&self) -> &str {
        &self.place.spec.name
    }

    /// What of its own image is no hole.
    pub(super) fn data(&self) -> Vec<Range<u64>> {
        let holes = holes(&self.place.spec, self.image, self.bytes);
        but(&holes, self.bytes)
    }

    fn bytes_of(&self, name: &str) -> Result<u64, Stopped> {
        let bytes = self.place.get().bytes_of(&self.images, name);
        Ok(bytes.ok_or("how much one of its redo logs holds cannot be told")?)
    }

    /// The frozen image, until the destination has all of it.
    fn send_image(&mut self, context: &Context, data: &[Range<u64>]) -> Result<(), Stopped> {
        let file = File::from(self.own.try_clone()?);
        let path = Path::new(&self.place.spec.path);
        let mut sending = Sending::of_image((file, path), &mut *self.outlet, &self.course);
        let who = ((self.index, &self.disk), &self.own);
        let all = || data.iter().cloned().map(Move::Copy);
        match send(&mut sending, context, all, (who, None))? {
            true => Ok(()),
            false => Err("its image was not sent to its end".into()),
        }
    }

    /// A log, until the destination has all of it. Returns whether it has: not where the guest was to stand still for that, and does no more.
    fn send_log(
        &mut self,
        context: &Context,
        name: &str,
        closing: Option<u64>,
    ) -> Result<bool, Stopped> {
        let log = self.place.get().open_unlocked(&self.images, name)?;
        let (outlet, is_capped) = (&mut *self.outlet, closing.is_none());
        let mut sending = Sending::of_log(&log, outlet, &self.course, is_capped)?;
        let who = ((self.index, &self.disk), &self.own);
        let all = || moves(log.layout(), log.states());
        send(&mut sending, context, all, (who, closing))
    }

    /// What the destination has is durable there before its guest stands still, where it can be asked.
    fn flush(&mut self, context: &Context, number: u64) -> Result<(), Stopped> {
        let file = File::from(self.own.try_clone()?);
        let path = Path::new(&self.place.spec.path);
        let mut sending = Sending::of_image((file, path), &mut *self.outlet, &self.course);
        sending.flush(number, || !context.is_over());
        Ok(())
    }

    /// What its guest wrote last is where it is looked for, and durable. The guest stands still, and so does the disk for a moment. Returns whether it is: not where
    /// its storage takes longer, which goes on with it.
    fn settle(&self) -> Result<bool, Stopped> {
        let standing = self.disk.stand_still(STAND_WAIT)?;
        in_time(standing.settle(STAND_WAIT))
    }
}

fn send<I: Iterator<Item = Move>>(
    sending: &mut Sending<'_>,
    context: &Context,
    all: impl Fn() -> I,
    ((who, own), closing): (((usize, &Arc<Disk>), &OwnedFd), Option<u64>),
) -> Result<bool, Stopped> {
    let (mut before, mut stopped) = (0, None);
    let under_way = || context.changes.under_way_bytes();
    let ended = sending.run(all, under_way, |given| {
        context.sent(given - before);
        before = given;
        let goes_on = context.goes_on(who, own, closing);
        goes_on.unwrap_or_else(|why| {
            stopped = Some(why);
            false
        })
    });
    match stopped {
        Some(why) => Err(why),
        None => Ok(ended?),
    }
}

/// Sends all disks together, on a thread of its own.
pub(super) struct Sender {
    disks: Vec<One>,
    redo: Redo,
    /// The number that a flush had last.
    flushes: u64,
    context: Context,
}

/// What a step began with.
struct Began {
    at: Instant,
    /// Requests of the guest that had ended, for each disk.
    did: Vec<u64>,
}

impl Sender {
    pub(super) fn of(
        disks: Vec<One>,
        served: Arc<Served>,
        (changes, migration): (Changes, MigrationId),
        shared: &Arc<Shared>,
    ) -> Self {
        let shared = Arc::clone(shared);
        Self {
            disks,
            redo: Redo::default(),
            flushes: 0,
            context: Context {
                served,
                changes,
                migration,
                shared,
                left: Cell::default(),
                looked: Cell::default(),
            },
        }
    }

    pub(super) fn run(mut self) {
        let context = &self.context;
        let names: Vec<String> = self.disks.iter().map(|one| one.name().to_owned()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let specs = self.disks.iter().map(|one| &one.place.spec);
        context.served.begin_logs_here(specs);
        let ended = self.work(&names);
        for one in &self.disks {
            self.slow_one(one.index, None);
        }
        if let Err(Stopped::Failed(why)) = ended {
            *lock(&self.context.shared.failure) = Some(why);
        }
        self.context.served.end_logs_of(&names);
    }

    /// Does one step after the other, until the migration is over.
    fn work(&mut self, names: &[&str]) -> Result<(), Stopped> {
        for one in &self.disks {
            must_be_one_image(&self.context.served, &one.place.spec)?;
        }
        loop {
            if self.context.is_over() {
                return Err(Stopped::Cancelled);
            }
            match self.redo.step() {
                Step::Make(log) => {
                    self.context.served.put_logs(names, log)?;
                    self.redo.done();
                }
                // It was put over the disks once it was made.
                Step::PutOver(_) => {
                    self.redo.done();
                    self.look_at_images()?;
                }
                Step::CopyBase => self.send_images()?,
                Step::Consolidate(log) => self.send_logs(log)?,
                Step::Hold | Step::ConsolidateLast(_) | Step::Record => self.rest()?,
                Step::GiveUp(why) => return Err(why.into()),
            }
        }
    }

    /// What the disks consist of now goes with them once the VM has gone, all of it: that is written down before it can.
    fn look_at_images(&mut self) -> Result<(), Stopped> {
        let (mut parts, logs) = (BTreeMap::new(), self.redo.logs());
        for one in &mut self.disks {
            let place = one.place.get();
            let images = self.context.served.logged(&place, one.own.as_fd(), logs)?;
            parts.insert(one.place.spec.name.clone(), place.parts_of(&images)?);
            one.images = images;
        }
        let migration = &self.context.migration;
        let noted = self.context.served.change(|what| {
            if what.leaving.as_ref() == Some(migration) {
                what.leaving_parts = parts;
            }
        });
        noted.map_err(|error| error.message)?;
        reached("source.log-put-over");
        Ok(())
    }

    fn begin(&self) -> Began {
        let did = self.disks.iter().map(|one| {
            let gauge = self.context.served.gauges.get(one.index);
            gauge.map_or(0, |gauge| gauge.done())
        });
        Began {
            at: Instant::now(),
            did: did.collect(),
        }
    }

    fn send_images(&mut self) -> Result<(), Stopped> {
        let (began, mut total) = (self.begin(), 0);
        let data: Vec<_> = self.disks.iter().map(One::data).collect();
        for range in data.iter().flatten() {
            total += range.end - range.start;
        }
        self.context.begins(total);
        for (one, data) in self.disks.iter_mut().zip(&data) {
            one.send_image(&self.context, data)?;
        }
        reached("source.base-sent");
        self.ended(&began, total)
    }

    /// Sends a log that is frozen, of all disks.
    fn send_logs(&mut self, log: u32) -> Result<(), Stopped> {
        let (began, mut total) = (self.begin(), 0);
        let mut names = Vec::new();
        for one in &self.disks {
            let name = log_of(&one.images, log);
            let name = name.ok_or("one of its redo logs is not described any more")?;
            total += one.bytes_of(&name)?;
            names.push(name);
        }
        self.context.begins(total);
        for (one, name) in self.disks.iter_mut().zip(&names) {
            if !one.send_log(&self.context, name, None)? {
                return Err("one of its redo logs was not sent to its end".into());
            }
        }
        reached("source.log-sent");
        self.ended(&began, total)
    }

    /// Bytes of the logs to which the guest writes.
    fn top_bytes(&self) -> Result<u64, Stopped> {
        let mut bytes = 0;
        for one in &self.disks {
            bytes += one.bytes_of(&one.images.top)?;
        }
        Ok(bytes)
    }

    /// Has what follows decided.
    fn ended(&mut self, began: &Began, bytes: u64) -> Result<(), Stopped> {
        let seconds = began.at.elapsed().as_secs_f64();
        for one in &mut self.disks {
            self.flushes += 1;
            one.flush(&self.context, self.flushes)?;
        }
        let top = self.top_bytes()?;
        self.redo.ended(Work { bytes, seconds }, top);
        self.context.begins(top);
        if let Some(part) = self.redo.slows_to() {
            let now = self.begin();
            for (one, (did, before)) in self.disks.iter().zip(now.did.iter().zip(&began.did)) {
                let did = did.saturating_sub(*before) as f64;
                let requests_per_s = (did / seconds.max(0.001) * part) as u64;
                self.slow_one(one.index, Some(requests_per_s));
            }
            tracing::info!(
                part,
                "a guest that writes as fast as its redo logs are sent is slowed until its disks have moved"
            );
        }
        Ok(())
    }

    fn slow_one(&self, index: usize, requests_per_s: Option<u64>) {
        if let Some(gauge) = self.context.served.gauges.get(index) {
            gauge.slow(requests_per_s);
        }
    }

    /// Waits for the moment in which the guest stands still, and looks how its log grows until then.
    fn rest(&mut self) -> Result<(), Stopped> {
        let shared = Arc::clone(&self.context.shared);
        let closing = shared.closings.load(Ordering::SeqCst);
        if closing % 2 == 1 {
            let began = Instant::now();
            *lock(&shared.wait_s) = None;
            self.send_last(closing)?;
            self.redo.let_go(began.elapsed().as_secs_f64());
            // Nothing of its disks is changed before it is known that the guest goes on here.
            while !shared.is_asked.swap(false, Ordering::SeqCst) {
                if self.context.is_over() {
                    return Err(Stopped::Cancelled);
                }
                std::thread::sleep(LOOK_EVERY);
            }
            return Ok(());
        }
        for one in &self.disks {
            let who = (one.index, &one.disk);
            self.context.goes_on(who, &one.own, None)?;
        }
        let top = self.top_bytes()?;
        let wait_s = self.redo.wait_s(top);
        self.context.begins(top);
        if shared.wants_another.swap(false, Ordering::SeqCst) && wait_s > READY_S {
            *lock(&shared.wait_s) = None;
            self.redo.grown(top);
            return Ok(());
        }
        *lock(&shared.wait_s) = Some(wait_s);
        std::thread::sleep(LOOK_EVERY);
        Ok(())
    }

    fn has_lost(&self) -> bool {
        self.disks.iter().any(|one| one.course.has_lost())
    }

    /// Whether all that the guest wrote is where it is looked for.
    fn are_settled(&self) -> Result<bool, Stopped> {
        if self.context.is_over() {
            return Err(Stopped::Cancelled);
        }
        for one in &self.disks {
            if !one.settle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The guest stands still: sends its last log, and again what is lost of it, until the guest goes on or the migration is over.
    fn send_last(&mut self, closing: u64) -> Result<(), Stopped> {
        reached("source.last-log");
        let shared = Arc::clone(&self.context.shared);
        while self.context.stands_still(closing) {
            self.context.begins(self.top_bytes()?);
            if !self.are_settled()? {
                continue;
            }
            for one in &mut self.disks {
                let top = one.images.top.clone();
                if !one.send_log(&self.context, &top, Some(closing))? {
                    return Ok(());
                }
            }
            self.context.begins(0);
            shared.equal.store(closing, Ordering::SeqCst);
            while self.context.stands_still(closing) && !self.has_lost() {
                if self.context.is_over() {
                    return Err(Stopped::Cancelled);
                }
                std::thread::sleep(LOOK_EVERY);
            }
            shared.equal.store(0, Ordering::SeqCst);
        }
        Ok(())
    }
}
