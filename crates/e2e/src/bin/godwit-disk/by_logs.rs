//! Moves a served disk to a second image by redo logs, as `vmproc` does (`disks/by_logs.rs`): the same steps by the same crates, with the same limits.
//!
//! What it leaves out beside what [`crate::moving`] does: a description of the logs, which a successor would need. Owns the logs and the copy until
//! the disk has it. Refuses a place that is taken.

use anyhow::{Context as _, Error, Result, ensure};
use godwit_blockio::delta::{
    AT_ONCE_MAX, Delta, NewDelta, Opening, Outliving, Target, create, merge,
};
use godwit_blockio::filters::{Beside, Counts, Limits, Pace, SharedLimits, Statistics, Throttle};
use godwit_blockio::{Arriving, Filter, Frozen, Waits};
use godwit_delta::{Id, Parent};
use godwit_redo::{Redo, Step, Work};
use godwit_vhost::Disk;
use serde_json::json;
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::moving::{make_second, sync_directory_of};
use crate::{BLOCK_BYTES, LOCK_WAIT, say};

const STAND_WAIT: Duration = Duration::from_millis(500);
/// By what deltas know the disk's own image.
const OWN_IMAGE: u32 = 0x676f_6477;
/// Maps of what was answered lie here.
const MAPS: &str = "/dev/shm";

/// What slows a guest that writes as fast as its logs are consolidated.
#[derive(Debug, Clone, Default)]
pub struct Brake {
    counts: Arc<Counts>,
    limits: Arc<SharedLimits>,
}

impl Brake {
    pub fn filters(&self, waits: Waits) -> Vec<Box<dyn Filter>> {
        let statistics = Statistics::going_on(Arc::clone(&self.counts), waits);
        let throttle = Throttle::from(Arc::clone(&self.limits));
        vec![Box::new(statistics), Box::new(throttle)]
    }

    /// Requests that have ended.
    fn did(&self) -> u64 {
        let counts = &self.counts;
        let all = [&counts.reads, &counts.writes, &counts.flushes];
        all.iter()
            .map(|count| count.requests.load(Ordering::Relaxed))
            .sum()
    }

    fn slow(&self, requests: u64) {
        self.limits.set(Limits { requests, bytes: 0 });
    }
}

/// A log that lies over the disk.
struct Log {
    id: Id,
    extent: PathBuf,
    descriptor: PathBuf,
}

struct Course<'a> {
    disk: &'a Disk,
    brake: &'a Brake,
    from: &'a Path,
    to: &'a Path,
    bytes: u64,
    /// The file of the copy, into which logs are brought.
    copy: OwnedFd,
    parent: Parent,
    logs: Vec<Log>,
    redo: Redo,
    told: u32,
}

/// Moves it, and says on the way how far it is.
pub fn move_disk(
    (disk, brake): (&Disk, &Brake),
    from: &Path,
    to: &Path,
    record: &Path,
) -> Result<()> {
    ensure!(
        to.symlink_metadata().is_err(),
        "{} is there already",
        to.display()
    );
    godwit_store::save_json(record, &json!({"disk": from, "copying": to}))?;
    let bytes = disk.measure()?;
    let beside = to.with_extension("moving");
    let copy = make_second(&beside, bytes)?;
    let filled = Arriving::of(&copy)?;
    let mut course = Course {
        disk,
        brake,
        from,
        to,
        bytes,
        copy: copy.as_fd().try_clone_to_owned()?,
        parent: Parent {
            cid: OWN_IMAGE,
            hint: "base.vmdk".to_owned(),
        },
        logs: Vec::new(),
        redo: Redo::default(),
        told: 0,
    };
    let why = course.until_held(&filled)?;
    if let Some(why) = why {
        // The logs stay over the disk, which works on; the bench has no more use for it.
        say(&json!({"event": "gave-up", "why": why}));
        return Ok(());
    }
    std::fs::rename(&beside, to)?;
    sync_directory_of(to)?;
    say(&json!({"event": "equal"}));
    let took = course.hold_until_recorded((&filled, record))?;
    let Some((standing, began)) = took else {
        say(&json!({"event": "gave-up", "why": "its guest was held in vain"}));
        return Ok(());
    };
    let logs = std::mem::take(&mut course.logs);
    let count = course.redo.logs();
    drop((filled, course));
    standing.flatten(copy)?;
    drop(standing);
    let switch_ms = began.elapsed().as_secs_f64() * 1e3;
    brake.slow(0);
    say(&json!({"event": "moved", "switch_ms": switch_ms, "logs": count}));
    for log in logs {
        std::fs::remove_file(log.descriptor)?;
        std::fs::remove_file(log.extent)?;
        let _ = std::fs::remove_file(map_of(log.id));
    }
    Ok(())
}

fn map_of(id: Id) -> PathBuf {
    let id = u128::from_be_bytes(id.0);
    Path::new(MAPS).join(format!("godwit-disk-{id:032x}.states"))
}

fn opening() -> Opening<'static> {
    Opening {
        block_bytes: BLOCK_BYTES,
        name: "disk",
        patience: LOCK_WAIT,
    }
}

impl<'a> Course<'a> {
    /// Does one step after the other until the guest is to be held; why not, where it is of no use.
    fn until_held(&mut self, filled: &Arriving) -> Result<Option<String>> {
        loop {
            match self.redo.step() {
                Step::Make(number) => {
                    let log = self.make(number)?;
                    self.logs.push(log);
                    self.redo.done();
                }
                Step::PutOver(_) => {
                    self.put_over()?;
                    self.redo.done();
                }
                Step::CopyBase => self.copy_base(filled)?,
                Step::Consolidate(number) => self.consolidate(number)?,
                Step::Hold | Step::ConsolidateLast(_) | Step::Record => return Ok(None),
                Step::GiveUp(why) => return Ok(Some(why.to_string())),
            }
        }
    }

    fn make(&mut self, number: u32) -> Result<Log> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| Error::msg(error.to_string()))?;
        let (id, stem) = (Id(id), format!("log-{number}"));
        let descriptor = self.to.with_extension(format!("{stem}.vmdk"));
        let new = NewDelta {
            descriptor: &descriptor,
            bytes: self.bytes,
            id,
            parent: &self.parent,
        };
        self.parent = create(&new)?;
        Ok(Log {
            id,
            extent: self.to.with_extension(format!("{stem}-sesparse.vmdk")),
            descriptor,
        })
    }

    /// The log that was made last, over what the disk consists of.
    fn put_over(&self) -> Result<()> {
        let log = self.logs.last().context("no log was made")?;
        let outliving = Outliving {
            map: &map_of(log.id),
            boot: Id([7; 16]),
            no_guest_lives: true,
        };
        let file = File::options().read(true).write(true).open(&log.extent)?;
        let top = Delta::top_of((file, &log.extent), log.id, opening(), outliving)?;
        let standing = self.disk.stand_still(STAND_WAIT)?;
        standing.settle(STAND_WAIT)?;
        standing.change_layers(move |mut had| {
            let frozen = had.last_mut().map_or(Ok(()), Delta::freeze);
            frozen.map_err(|error| error.to_string())?;
            had.push(top);
            Ok(had)
        })?;
        Ok(())
    }

    fn top_bytes(&self) -> Result<u64> {
        let log = self.logs.last().context("no log was made")?;
        Ok(log.extent.metadata()?.blocks() * 512)
    }

    fn copy_base(&mut self, filled: &Arriving) -> Result<()> {
        let (own, did, began) = (self.disk.lend_image()?, self.brake.did(), Instant::now());
        let frozen = Frozen {
            from: own.as_fd(),
            path: self.from,
            into: filled,
            data: std::iter::once(0..self.bytes).collect(),
            pace: &Pace::default(),
        };
        let (bytes, disk) = (self.bytes, self.disk);
        let copied = frozen.copy(|copied| {
            let left = bytes.saturating_sub(copied.bytes);
            let eta_s = (copied.bytes > 0)
                .then(|| began.elapsed().as_secs_f64() * left as f64 / copied.bytes as f64);
            say(
                &json!({"event": "progress", "total": bytes, "left": left, "eta_s": eta_s.map(f64::ceil)}),
            );
            Some(disk.glance().map_or(0, |status| status.under_way))
        })?;
        let copied = copied.context("it was not copied to its end")?.bytes;
        self.ended((began, did), copied, copied)
    }

    fn consolidate(&mut self, number: u32) -> Result<()> {
        let place = (number as usize).checked_sub(1).context("a log")?;
        let (did, began) = (self.brake.did(), Instant::now());
        let taken = self.logs.get(place).context("a log")?.extent.metadata()?;
        let copied = self.merge(place, None)?;
        let copied = copied.context("a log was not consolidated to its end")?;
        self.ended((began, did), taken.blocks() * 512, copied)
    }

    fn merge(&self, place: usize, until: Option<Instant>) -> Result<Option<u64>> {
        let log = self.logs.get(place).context("a log")?;
        let file = File::options().read(true).write(true).open(&log.extent)?;
        let delta = Delta::unlocked((file, &log.extent), log.id, BLOCK_BYTES)?;
        let into = Target::Raw(self.copy.as_fd(), self.bytes);
        let (disk, mut beside) = (self.disk, Beside::default());
        let under_way = || disk.glance().map_or(0, |status| status.under_way);
        let merged = merge(&delta, into, false, |_| match until {
            // Its guest is held.
            Some(until) => (Instant::now() < until).then_some(AT_ONCE_MAX),
            None => Some(beside.pieces(under_way)),
        })?;
        Ok(merged.map(|done| done.moved()))
    }

    fn ended(&mut self, (began, did): (Instant, u64), bytes: u64, copied: u64) -> Result<()> {
        let seconds = began.elapsed().as_secs_f64();
        let top = self.top_bytes()?;
        self.redo.ended(Work { bytes, seconds }, top);
        self.told += 1;
        say(&json!({
            "event": "iteration", "number": self.told, "copied_bytes": copied, "seconds": seconds,
            "dirty_bytes": top, "hot_bytes": 0, "deferred_bytes": 0,
        }));
        if let Some(part) = self.redo.slows_to() {
            let did = self.brake.did().saturating_sub(did) as f64;
            let per_s = did / seconds.max(0.001) * part;
            self.brake.slow((per_s as u64).max(1));
        }
        Ok(())
    }

    /// Holds the guest, brings its last log into the copy and writes down that the copy is the disk; nothing where that is of no use.
    fn hold_until_recorded(
        &mut self,
        (filled, record): (&Arriving, &Path),
    ) -> Result<Option<(godwit_vhost::Standing<'a>, Instant)>> {
        loop {
            let (disk, began) = (self.disk, Instant::now());
            say(&json!({"event": "switching"}));
            let standing = disk.stand_still(STAND_WAIT)?;
            self.redo.done();
            standing.settle(STAND_WAIT)?;
            let until = began + Duration::from_secs_f64(self.redo.limit_s());
            let last = self.logs.len().checked_sub(1).context("no log")?;
            if self.merge(last, Some(until))?.is_some() {
                self.redo.done();
                godwit_store::save_json(record, &json!({"disk": self.to}))?;
                return Ok(Some((standing, began)));
            }
            drop(standing);
            self.redo.let_go(began.elapsed().as_secs_f64());
            if self.until_held(filled)?.is_some() {
                return Ok(None);
            }
        }
    }
}
