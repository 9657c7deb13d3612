//! Puts redo logs over disks that go to another host, and sends what is frozen below them, until the migration is over.
//!
//! Part of a migration by snapshotting ([`super::logs_away`]). Owns the disks' way there, on a thread of its own. Refuses: to go on with a disk that is
//! served anew, or consists of other logs than those of this migration, and to fill a file system to its end.

use super::STAND_WAIT;
use super::by_logs::{Began, log_of};
use super::last_log::in_time;
use super::layers::OwnedPlace;
use super::logs_away::must_be_one_image;
use super::logs_room::{Lies, LogsRoom};
use super::logs_shared::{Hold, Shared, Stop};
use super::served::Served;
use super::switching::Stopped;
use super::to_copy::{but, holes};
use crate::adoption::lock;
use crate::faults::{is_late, planted, reached};
use godwit_blockio::filters::{Course, Outlet, Sending, flush_early};
use godwit_delta::{Move, moves};
use godwit_redo::{Bounds, Redo, Step, Work};
use godwit_snapshots::Images;
use godwit_streams::source::Changes;
use godwit_types::MigrationId;
use godwit_types::disk_move::DiskIteration;
use godwit_vhost::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it is looked whether the guest stands still, and how large its log is.
const LOOK_EVERY: Duration = Duration::from_millis(5);

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
    room: LogsRoom,
}

impl Context {
    fn must_go_on(&self) -> Result<(), Stopped> {
        match self.shared.is_over() {
            true => Err(Stopped::Cancelled),
            false => Ok(()),
        }
    }

    fn stands_still(&self, stop: Stop) -> bool {
        self.shared.stop() == Some(stop)
    }

    /// Whether it goes on with a disk: not where the guest was to stand still, since this stop, and does no more.
    fn goes_on(
        &self,
        (index, disk): (usize, &Arc<Disk>),
        stop: Option<Stop>,
    ) -> Result<bool, Stopped> {
        self.must_go_on()?;
        if !Arc::ptr_eq(&self.served.disk(index)?, disk) {
            return Err("a disk was served anew meanwhile".into());
        }
        if let Some(stop) = stop {
            return Ok(self.stands_still(stop));
        }
        self.room.must_be_left()?;
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
        let untold = "how much one of its redo logs holds cannot be told";
        Ok(bytes.ok_or_else(|| self.told(untold))?)
    }

    /// Of those of its logs, of which there are so many, that nobody writes to any more; of one whose size cannot be told, nothing.
    fn frozen_bytes(&self, logs: u32) -> u64 {
        let frozen = (1..logs).filter_map(|log| log_of(&self.images, log));
        all(frozen.filter_map(|log| self.bytes_of(&log).ok()))
    }

    fn told(&self, why: &str) -> String {
        format!("disk '{}': {why}", self.name())
    }

    /// Its image and its logs, for whoever looks at room.
    fn lies(&self, logs: u32) -> Result<Lies, Stopped> {
        let (place, logs) = (self.place.get(), 1..=logs);
        let logs = logs.filter_map(|log| log_of(&self.images, log));
        Ok(Lies {
            disk: self.name().to_owned(),
            image: self.own.try_clone()?,
            bytes: self.bytes,
            logs: logs.map(|log| place.extent(&self.images, &log)).collect(),
        })
    }

    /// The frozen image, until the destination has all of it.
    fn send_image(&mut self, context: &Context, data: &[Range<u64>]) -> Result<(), Stopped> {
        let file = File::from(self.own.try_clone()?);
        let path = Path::new(&self.place.spec.path);
        let mut sending = Sending::of_image((file, path), &mut *self.outlet, &self.course);
        let who = (self.index, &self.disk);
        let all = || data.iter().cloned().map(Move::Copy);
        match send(&mut sending, context, all, (who, None))? {
            true => Ok(()),
            false => Err(self.told("its image was not sent to its end").into()),
        }
    }

    /// A log, until the destination has all of it. Returns whether it has: not where the guest was to stand still for that, and does no more.
    fn send_log(
        &mut self,
        context: &Context,
        name: &str,
        stop: Option<Stop>,
    ) -> Result<bool, Stopped> {
        let log = self.place.get().open_unlocked(&self.images, name)?;
        let (outlet, is_capped) = (&mut *self.outlet, stop.is_none());
        let mut sending = Sending::of_log(&log, outlet, &self.course, is_capped)?;
        let who = (self.index, &self.disk);
        let all = || moves(log.layout(), log.states());
        send(&mut sending, context, all, (who, stop))
    }

    /// What the destination has is durable there before its guest stands still, where it can be asked.
    fn flush(&mut self, context: &Context, number: u64) -> Result<(), Stopped> {
        let mut looked = Ok(());
        flush_early(&mut *self.outlet, number, || {
            looked = context
                .must_go_on()
                .and_then(|()| context.room.must_be_left());
            looked.is_ok()
        });
        looked
    }

    /// What its guest wrote last is where it is looked for, and durable. The guest stands still, and so does the disk for a moment. Returns whether it is: not where
    /// a request or its storage takes longer, which goes on with it.
    fn settle(&self) -> Result<bool, Stopped> {
        let Some(standing) = in_time(self.disk.stand_still(STAND_WAIT))? else {
            return Ok(false);
        };
        Ok(in_time(standing.settle(STAND_WAIT))?.is_some())
    }
}

/// So many bytes together, of which file systems tell.
fn all(bytes: impl IntoIterator<Item = u64>) -> u64 {
    bytes.into_iter().fold(0, u64::saturating_add)
}

fn send<I: Iterator<Item = Move>>(
    sending: &mut Sending<'_>,
    context: &Context,
    all: impl Fn() -> I,
    (who, stop): ((usize, &Arc<Disk>), Option<Stop>),
) -> Result<bool, Stopped> {
    let (mut before, mut stopped) = (0, None);
    let under_way = || context.changes.under_way_bytes();
    let ended = sending.run(all, under_way, |given| {
        context.shared.give(given - before);
        before = given;
        let goes_on = context.goes_on(who, stop);
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

/// What was sent of a disk since then.
fn work_of(bytes: u64, began: Instant) -> Work {
    let seconds = began.elapsed().as_secs_f64();
    Work { bytes, seconds }
}

/// Sends all disks together, on a thread of its own.
pub(super) struct Sender {
    disks: Vec<One>,
    redo: Redo,
    /// The number that a flush had last.
    flushes: u64,
    /// What the logs take that nobody writes to any more, as it was looked at last.
    frozen_bytes: u64,
    context: Context,
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
            redo: Redo::within(Bounds::TO_ANOTHER_HOST),
            flushes: 0,
            frozen_bytes: 0,
            context: Context {
                served,
                changes,
                migration,
                shared,
                room: LogsRoom::default(),
            },
        }
    }

    pub(super) fn run(mut self) {
        let specs = self.disks.iter().map(|one| &one.place.spec);
        self.context.served.begin_logs_here(specs);
        if let Err(Stopped::Failed(why)) = self.work() {
            self.context.shared.fail(why);
        }
    }

    fn names(&self) -> Vec<&str> {
        self.disks.iter().map(One::name).collect()
    }

    /// Does one step after the other, until the migration is over.
    fn work(&mut self) -> Result<(), Stopped> {
        for one in &self.disks {
            let is_one = must_be_one_image(&self.context.served, &one.place.spec);
            is_one.map_err(|why| one.told(&why))?;
        }
        self.know_logs()?;
        loop {
            self.context.must_go_on()?;
            match self.redo.step() {
                Step::Make(log) => {
                    self.context.room.must_be_left_now()?;
                    self.context.served.put_logs(&self.names(), log)?;
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
            let images = self.context.served.logged(&place, one.own.as_fd(), logs);
            let images = images.map_err(|why| one.told(&why))?;
            parts.insert(one.place.spec.name.clone(), place.parts_of(&images)?);
            one.images = images;
        }
        self.know_logs()?;
        let (context, mut is_noted) = (&self.context, false);
        let noted = context.served.change(|what| {
            // Whoever ends the migration says so before he has this forgotten.
            let is_over = context.shared.is_over();
            is_noted = what.leaving.as_ref() == Some(&context.migration) && !is_over;
            if is_noted {
                what.leaving_parts = parts;
            }
        });
        noted.map_err(|error| error.message)?;
        reached("source.log-put-over");
        match is_noted {
            true => Ok(()),
            false => Err("this migration is over".into()),
        }
    }

    fn know_logs(&mut self) -> Result<(), Stopped> {
        let logs = self.redo.logs();
        let lie: Result<_, Stopped> = self.disks.iter().map(|one| one.lies(logs)).collect();
        self.context.room = LogsRoom::of(lie?);
        Ok(())
    }

    /// What a step begins with: when, and what the guest has done with each disk.
    fn begin(&self) -> (Instant, Vec<Began>) {
        let served = &self.context.served;
        let disks = self.disks.iter();
        let did = disks.map(|one| Began::of(served, one.index)).collect();
        (Instant::now(), did)
    }

    fn send_images(&mut self) -> Result<(), Stopped> {
        let began = self.begin();
        let data: Vec<_> = self.disks.iter().map(One::data).collect();
        let length =
            |data: &Vec<Range<u64>>| data.iter().map(|range| range.end - range.start).sum();
        let bytes: Vec<u64> = data.iter().map(length).collect();
        self.context.shared.begin(all(bytes.iter().copied()));
        let mut sent = Vec::new();
        for (one, (data, bytes)) in self.disks.iter_mut().zip(data.iter().zip(bytes)) {
            let began = Instant::now();
            one.send_image(&self.context, data)?;
            sent.push(work_of(bytes, began));
        }
        reached("source.base-sent");
        self.ended(began, &sent)
    }

    /// Sends a log that is frozen, of all disks.
    fn send_logs(&mut self, log: u32) -> Result<(), Stopped> {
        let (began, mut logs) = (self.begin(), Vec::new());
        for one in &self.disks {
            let name = log_of(&one.images, log);
            let name =
                name.ok_or_else(|| one.told("one of its redo logs is not described any more"))?;
            let bytes = one.bytes_of(&name)?;
            logs.push((name, bytes));
        }
        self.context
            .shared
            .begin(all(logs.iter().map(|(_, bytes)| *bytes)));
        let mut sent = Vec::new();
        for (one, (name, bytes)) in self.disks.iter_mut().zip(logs) {
            let began = Instant::now();
            if !one.send_log(&self.context, &name, None)? {
                let why = one.told("one of its redo logs was not sent to its end");
                return Err(why.into());
            }
            sent.push(work_of(bytes, began));
        }
        reached("source.log-sent");
        self.ended(began, &sent)
    }

    /// Bytes of each of the logs to which the guest writes.
    fn tops(&self) -> Result<Vec<u64>, Stopped> {
        let top = |one: &One| one.bytes_of(&one.images.top);
        self.disks.iter().map(top).collect()
    }

    /// Of all of them.
    fn top_bytes(&self) -> Result<u64, Stopped> {
        Ok(all(self.tops()?))
    }

    /// Has what follows decided, once this was sent of each disk. That something is made durable early costs the last log nothing; the guest has written to its
    /// log until then.
    fn ended(&mut self, (at, began): (Instant, Vec<Began>), sent: &[Work]) -> Result<(), Stopped> {
        let seconds = at.elapsed().as_secs_f64();
        let bytes = all(sent.iter().map(|work| work.bytes));
        for one in &mut self.disks {
            self.flushes += 1;
            one.flush(&self.context, self.flushes)?;
        }
        let ((_, now), tops) = (self.begin(), self.tops()?);
        let top = all(tops.iter().copied());
        self.redo.ended(Work { bytes, seconds }, top);
        self.context.shared.begin(top);
        self.note_step(sent, &tops);
        if let Some(part) = self.redo.slows_to() {
            self.context.shared.slow(part);
            for (one, (began, now)) in self.disks.iter().zip(began.iter().zip(&now)) {
                self.slow_one(one.index, Some(began.slowed(now, part)));
            }
            tracing::info!(
                part,
                "a guest that writes as fast as its redo logs are sent is slowed until its disks have moved"
            );
        }
        Ok(())
    }

    /// Has it told what was sent of each disk, of which so much is to be sent again, and what its logs took until now.
    fn note_step(&mut self, sent: &[Work], tops: &[u64]) {
        let logs = self.redo.logs();
        self.frozen_bytes = all(self.disks.iter().map(|one| one.frozen_bytes(logs)));
        let frozen = self.disks.iter().map(|one| {
            let known = lock(&self.context.served.by_logs);
            let frozen = known.get(one.name()).map(|logs| logs.frozen);
            frozen.unwrap_or_default()
        });
        // They were put over all disks at one moment.
        let frozen = frozen.max().unwrap_or_default();
        let ended = self.disks.iter().zip(sent.iter().zip(tops));
        let ended = ended.map(|(one, (sent, dirty))| {
            let iteration = DiskIteration {
                copied_bytes: sent.bytes,
                seconds: sent.seconds,
                dirty_bytes: *dirty,
                ..DiskIteration::default()
            };
            (one.name(), iteration)
        });
        let shared = &self.context.shared;
        shared.step_ended(ended.collect(), (logs, frozen));
        self.note_space(all(tops.iter().copied()));
    }

    /// What all logs take, of which those to which the guest writes have so many bytes.
    fn note_space(&self, top: u64) {
        let all = self.frozen_bytes.saturating_add(top);
        self.context.shared.take(all);
    }

    fn slow_one(&self, index: usize, requests_per_s: Option<u64>) {
        if let Some(gauge) = self.context.served.gauges.get(index) {
            gauge.slow(requests_per_s);
        }
    }

    /// Waits for the moment in which the guest stands still, and looks how its log grows until then.
    fn rest(&mut self) -> Result<(), Stopped> {
        let shared = Arc::clone(&self.context.shared);
        if let Some(stop) = shared.stop() {
            let began = Instant::now();
            self.send_last(stop)?;
            self.redo.let_go(began.elapsed().as_secs_f64());
            return self.wait_for_guest();
        }
        for one in &self.disks {
            self.context.goes_on((one.index, &one.disk), None)?;
        }
        let top = self.top_bytes()?;
        let last = Hold {
            wait_s: self.redo.wait_s(top),
            limit_s: self.redo.limit_s(),
        };
        self.context.shared.begin(top);
        self.note_space(top);
        if shared.take_wish(last) {
            self.redo.grown(top);
            return Ok(());
        }
        // What is made durable there still would be waited for beside the last log.
        let is_all_there = self.context.changes.under_way_bytes() == 0;
        shared.set_last_log(is_all_there.then_some(last));
        shared.wait(LOOK_EVERY);
        Ok(())
    }

    /// Nothing of its disks is changed before it is known that the guest goes on here; it may write already.
    fn wait_for_guest(&self) -> Result<(), Stopped> {
        while !self.context.shared.take_driver_waits() {
            self.context.must_go_on()?;
            if self.context.served.held().is_some() {
                self.context.room.must_be_left()?;
            }
            self.context.shared.wait(LOOK_EVERY);
        }
        Ok(())
    }

    /// Until something that was sent is lost.
    fn wait_while_it_stands_still(&self, stop: Stop) -> Result<(), Stopped> {
        let has_lost = || self.disks.iter().any(|one| one.course.has_lost());
        while self.context.stands_still(stop) && !has_lost() {
            self.context.must_go_on()?;
            self.context.shared.wait(LOOK_EVERY);
        }
        Ok(())
    }

    /// Whether all that the guest wrote is where it is looked for.
    fn are_settled(&self) -> Result<bool, Stopped> {
        self.context.must_go_on()?;
        for one in &self.disks {
            if !one.settle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The guest stands still: sends its last log, and again what is lost of it, until the guest goes on or the migration is over.
    fn send_last(&mut self, stop: Stop) -> Result<(), Stopped> {
        reached("source.last-log");
        if is_late("source.last-log") {
            self.wait_while_it_stands_still(stop)?;
        }
        while self.context.stands_still(stop) {
            self.context.shared.begin(self.top_bytes()?);
            if !self.are_settled()? {
                continue;
            }
            let forgotten = planted("last-log-unsent");
            for one in self.disks.iter_mut().filter(|_| !forgotten) {
                let top = one.images.top.clone();
                if !one.send_log(&self.context, &top, Some(stop))? {
                    return Ok(());
                }
            }
            self.context.shared.begin(0);
            self.context.shared.set_equal(stop, true);
            self.wait_while_it_stands_still(stop)?;
            self.context.shared.set_equal(stop, false);
        }
        Ok(())
    }
}

/// However it ended, no guest is slowed any longer, and what is left of the logs is seen to.
impl Drop for Sender {
    fn drop(&mut self) {
        for one in &self.disks {
            self.slow_one(one.index, None);
        }
        self.context.served.end_logs_of(&self.names());
    }
}
