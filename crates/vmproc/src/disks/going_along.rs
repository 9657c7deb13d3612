//! Disks that go along with a VM that leaves: each is mirrored to the other host, or its writes are marked, or lie in redo logs.
//!
//! Owns, for one migration, what each of them has under way and the sender of redo logs; both end with it. Refuses: a disk that has not the size for which
//! the other host has made a place, and a memory that follows before the disks are as far.

use super::leaving::{Below, Leaving, Taken};
use super::logs_away::LogsAway;
use super::together::LastOfAll;
use super::tracked::filter_for;
use super::{CONNECT_WAIT, Disks, REST_WAIT, there, told};
use crate::adoption::lock;
use crate::hypervisor::internal;
use godwit_blockio::filters::{Bottleneck, Course, Outlet, Pace, WaitTimes};
use godwit_blockio::{Filter, NO_NEARER};
use godwit_streams::source::Changes;
use godwit_tracking::{Decision, last_copy_limit_s};
use godwit_types::disk_move::Method;
use godwit_types::migration::{DiskToMove, MigrationSpec};
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use godwit_vhost::Disk;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A guest that writes all the while has as much under way as the link takes: after so long it is stopped all the same.
const PATIENCE: Duration = Duration::from_secs(5);
/// More changes may be under way than are worth a stop of the guest, bytes.
const CLOSE_BYTES: u64 = 8 << 20;

/// A disk that goes along.
#[derive(Debug)]
struct Along {
    /// Its place among the VM's disks.
    place: u8,
    spec: DiskSpec,
    image: (u64, u64),
    bytes: u64,
    course: Course,
    taken: Taken,
    /// How often storage had failed its guest when this began.
    faults: u64,
}

/// How they go along.
#[derive(Debug)]
pub(super) enum Way {
    /// What the guest writes goes to both hosts.
    Mirrored,
    /// What the guest writes is marked and copied again.
    Tracked,
    /// What the guest writes lies in redo logs, which are sent one after the other.
    ByLogs(LogsAway),
}

/// The disks that go along with a VM that leaves.
#[derive(Debug)]
pub(crate) struct SourceDisks {
    pub changes: Changes,
    disks: Vec<Along>,
    migration: MigrationId,
    pub(super) way: Way,
    /// What lies below the tops of those with snapshots.
    pub(super) below: Option<Below>,
    pub(super) pace: Pace,
    /// All of the VM's.
    all: Disks,
    /// Since when both hosts' images are equal but for what is under way.
    synchronised: Mutex<Option<Instant>>,
}

impl Disks {
    /// What [`Self::mirror`] does, for as long as storage takes for it.
    pub(super) fn mirror_here(
        &self,
        spec: &MigrationSpec,
        cap_bytes_per_s: Option<f64>,
    ) -> Result<Option<SourceDisks>, ApiError> {
        let what = self.0.what();
        let all = what.with_images().enumerate();
        let along: Vec<_> = all.filter(|(_, (disk, _))| disk.goes_along()).collect();
        if along.is_empty() {
            return Ok(None);
        }
        // A process that has just taken QEMU over is connected to in a moment.
        self.wait_for_qemu(Instant::now() + CONNECT_WAIT, || true)
            .map_err(|why| ApiError::new(ErrorCode::Hypervisor, why))?;
        let mut source = SourceDisks {
            changes: Changes::default(),
            disks: Vec::new(),
            migration: spec.id.clone(),
            way: match spec.method {
                Method::Mirror => Way::Mirrored,
                Method::DirtyTracking => Way::Tracked,
                Method::Snapshot => Way::ByLogs(LogsAway::of(&self.0)),
            },
            below: None,
            pace: Pace::at_most(cap_bytes_per_s),
            all: self.clone(),
            synchronised: Mutex::default(),
        };
        // Whoever finds that the VM has moved removes what moved with this migration, and nothing else.
        let of = |(_, (disk, image)): &(usize, (&DiskSpec, (u64, u64)))| {
            (DiskSpec::clone(disk), *image, what.end_of(&disk.path))
        };
        let with = there::seen(along.iter().map(of).collect());
        if let Err(why) = &with {
            tracing::warn!(
                why,
                "should this migration fail, its destination is not told that the disks are here, and keeps what came"
            );
        }
        self.0.change(|what| {
            what.leaving = Some(spec.id.clone());
            if let Ok(with) = with {
                what.note_along(&spec.id, with);
            }
        })?;
        let (pace, mut leaving) = (source.pace.clone(), Leaving::default());
        for (index, (disk, image)) in along {
            let named = named(spec, disk)?;
            let (place, course) = (u8::try_from(index).map_err(internal)?, Course::at(&pace));
            let outlet = source.changes.of_disk(place, &course).map_err(internal)?;
            let (ways, one) = ((&mut source.way, &mut leaving), (image, named));
            let taken = self.take_along(spec, ways, (place, disk), one, (outlet, &course))?;
            source.disks.push(Along {
                place,
                spec: disk.clone(),
                image,
                bytes: named.bytes,
                course,
                taken,
                faults: self.0.faults(index),
            });
        }
        if leaving.parts != what.leaving_parts {
            self.note_leaving_parts(std::mem::take(&mut leaving.parts))?;
        }
        source.below = leaving.all();
        Ok(Some(source))
    }

    /// Has what the guest writes to a disk go to the other host, too. Returns what else is to be copied of it.
    fn take_along(
        &self,
        spec: &MigrationSpec,
        (way, leaving): (&mut Way, &mut Leaving),
        (place, disk): (u8, &DiskSpec),
        (image, named): ((u64, u64), &DiskToMove),
        (outlet, course): (Box<dyn Outlet>, &Course),
    ) -> Result<Taken, ApiError> {
        let index = usize::from(place);
        if let Way::ByLogs(logs) = way {
            logs.take((index, disk), (image, named), (outlet, course))?;
            return Ok(Taken::Image);
        }
        let taken = leaving.take(&self.0, (place, disk), (image, named))?;
        let outlet = taken.outlet(outlet);
        let filter = filter_for((spec.method, &spec.without), named.bytes, outlet, course);
        let served = self.0.disk(index).ok();
        put((served.as_deref(), named.bytes), disk, filter)?;
        Ok(taken)
    }
}

/// What a migration's description says of a disk.
fn named<'a>(spec: &'a MigrationSpec, disk: &DiskSpec) -> Result<&'a DiskToMove, ApiError> {
    let name = &disk.name;
    let named = spec.disks.iter().find(|named| named.name == *name);
    named.ok_or_else(|| {
        internal(format!(
            "the migration's description does not name disk '{name}'"
        ))
    })
}

/// Only on a disk of the size for which the other host has made a place.
fn put(
    (served, bytes): (Option<&Disk>, u64),
    spec: &DiskSpec,
    filter: Box<dyn Filter>,
) -> Result<(), ApiError> {
    let name = &spec.name;
    let refused = |why: String| ApiError::new(ErrorCode::Hypervisor, why);
    let Some(disk) = served else {
        return Err(refused(format!("disk '{name}' is not served")));
    };
    let measured = disk
        .measure()
        .map_err(|error| refused(told(spec, &error)))?;
    if measured != bytes {
        return Err(refused(format!(
            "disk '{name}' has {measured} bytes, and had {bytes} a moment ago: try again"
        )));
    }
    let put = disk.put_lowest(filter, REST_WAIT);
    put.map_err(|error| refused(told(spec, &error)))
}

impl SourceDisks {
    /// Lets the copying begin. Returns the bytes that are to be copied.
    pub(crate) fn begin(&self) -> u64 {
        if let Way::ByLogs(logs) = &self.way {
            return logs.begin(&self.changes, &self.migration);
        }
        let begin = |disk: &Along| {
            let of = (&disk.spec, disk.image);
            disk.taken.begin(of, disk.bytes, &disk.course)
        };
        self.disks.iter().map(begin).sum()
    }

    /// Bytes that are still to be copied.
    pub(crate) fn left_bytes(&self) -> u64 {
        if let Way::ByLogs(logs) = &self.way {
            return logs.left_bytes();
        }
        let left = self.disks.iter().map(|disk| disk.course.left_bytes());
        left.sum()
    }

    /// What the copying has waited for most.
    pub(crate) fn bottleneck(&self) -> Option<Bottleneck> {
        let times = self.disks.iter().map(|disk| disk.course.wait_times());
        times
            .fold(WaitTimes::default(), std::ops::Add::add)
            .bottleneck()
    }

    /// Places in the VM and sizes of all, for the destination.
    pub(crate) fn sizes(&self) -> Vec<(u8, u64)> {
        let sizes = self.disks.iter().map(|disk| (disk.place, disk.bytes));
        sizes.collect()
    }

    /// Whether both hosts' images are equal but for what is under way.
    pub(crate) fn are_synchronised(&self) -> bool {
        if let Way::ByLogs(logs) = &self.way {
            return logs.are_equal();
        }
        let mut disks = self.disks.iter();
        let are = disks.all(|disk| disk.course.is_synchronised());
        let mut since = lock(&self.synchronised);
        *since = are.then(|| since.unwrap_or_else(Instant::now));
        are
    }

    /// Whether both hosts' images are equal only once the guest was stopped: what it writes is marked and copied again, or sent log after log.
    pub(crate) fn need_a_stop(&self) -> bool {
        match self.way {
            Way::Mirrored => false,
            Way::Tracked | Way::ByLogs(_) => true,
        }
    }

    /// What its guest stands still for.
    pub(crate) fn what_is_last(&self) -> &'static str {
        match self.way {
            Way::Mirrored | Way::Tracked => "the last blocks of its disks",
            Way::ByLogs(_) => "the last redo logs of its disks",
        }
    }

    /// Somebody waits for the disks from now on, or again, while the guest runs.
    pub(crate) fn wait_on(&self) {
        if let Way::ByLogs(logs) = &self.way {
            logs.wait_on();
        }
    }

    /// Whether memory may follow: both hosts' images are equal, or so few blocks are marked that a guest may stand still for them.
    pub(crate) fn are_ready(&self) -> bool {
        match &self.way {
            Way::Mirrored => self.are_synchronised(),
            Way::Tracked => {
                // What a disk had before is not to be made durable while the guest stands still.
                let are_flushed = self.disks.iter().all(|disk| disk.course.is_flushed());
                are_flushed && self.last_blocks().is_some_and(|last| last.are_few())
            }
            Way::ByLogs(logs) => logs.are_ready(),
        }
    }

    /// The last blocks of all disks whose writes are tracked; nothing before the guest could be held for each of them.
    pub(super) fn last_blocks(&self) -> Option<LastOfAll> {
        let mut disks = self.disks.iter();
        let may_end = disks.all(|disk| disk.course.decision() == Some(Decision::Finish));
        // They share the link.
        let waits = self.disks.iter().map(|disk| disk.course.would_wait_s());
        let are_tracked = matches!(self.way, Way::Tracked);
        (are_tracked && may_end).then(|| LastOfAll {
            wait_s: waits.sum(),
            limit_s: self.last_copy_limit_s(),
            is_silent: self.changes.is_silent(),
        })
    }

    /// For how long the guest may stand still for the last blocks when it is stopped next, s.
    pub(crate) fn last_copy_limit_s(&self) -> f64 {
        let held = self.disks.iter().map(|disk| disk.course.closed_for());
        last_copy_limit_s(held.max().unwrap_or_default().as_secs_f64())
    }

    /// The guest stands still: all that is marked is copied, or its last logs are sent, and nothing more is let in until they are opened.
    pub(crate) fn close(&self) {
        self.disks.iter().for_each(|disk| disk.course.close());
        if let Way::ByLogs(logs) = &self.way {
            logs.close();
        }
    }

    /// A guest that goes on here finds them so.
    pub(crate) fn open(&self) {
        self.disks.iter().for_each(|disk| disk.course.open());
        if let Way::ByLogs(logs) = &self.way {
            logs.open();
        }
    }

    /// What becomes less as long as anything is copied: of each disk whose writes are tracked, nothing where nothing is waited for; of
    /// mirrored ones, and of those that go by redo logs, together.
    pub(super) fn not_copied(&self) -> Vec<Option<u64>> {
        let of = |disk: &Along| {
            let course = &disk.course;
            let is_waited_for = course.left_bytes() > 0 || !course.is_flushed();
            is_waited_for.then(|| u64::MAX - course.copied_bytes())
        };
        match &self.way {
            Way::Mirrored => vec![Some(self.left_bytes())],
            Way::Tracked => self.disks.iter().map(of).collect(),
            Way::ByLogs(logs) => vec![logs.not_copied()],
        }
    }

    /// Why what is at this place of [`Self::not_copied`] is given up.
    pub(super) fn stalled(&self, place: usize) -> String {
        let is_alone = matches!(self.way, Way::Tracked);
        let one = self.disks.get(place).filter(|_| is_alone);
        let (what, left) = match one {
            Some(disk) => (
                format!("disk '{}' gets", disk.spec.name),
                disk.course.left_bytes(),
            ),
            None => ("its disks get".to_owned(), self.left_bytes()),
        };
        format!(
            "{what} no nearer to being copied: {} MiB are left since {} s; see whether the destination's storage answers",
            left >> 20,
            NO_NEARER.as_secs()
        )
    }

    /// Whether so little is under way that the guest can be stopped for it.
    pub(crate) fn are_close(&self) -> bool {
        match &self.way {
            Way::Mirrored => {
                let are = self.are_synchronised();
                let since = *lock(&self.synchronised);
                let waited = since.is_some_and(|since| since.elapsed() >= PATIENCE);
                are && (waited || self.changes.under_way_bytes() <= CLOSE_BYTES)
            }
            Way::Tracked => self.are_ready(),
            Way::ByLogs(logs) => logs.are_close(self.last_copy_limit_s()),
        }
    }

    /// The name of each, and how its copying goes.
    pub(super) fn courses(&self) -> impl Iterator<Item = (&str, &Course)> {
        let disks = self.disks.iter();
        disks.map(|disk| (&*disk.spec.name, &disk.course))
    }

    /// Why one cannot be copied.
    pub(crate) fn failure(&self) -> Option<String> {
        if let Way::ByLogs(logs) = &self.way
            && let Some(why) = logs.failure()
        {
            return Some(why);
        }
        if let Some(why) = self.below.as_ref().and_then(Below::failure) {
            return Some(why);
        }
        let failed = |disk: &Along| {
            let given_up = match disk.course.decision() {
                Some(Decision::Abort(why)) => Some(why.to_string()),
                _ => None,
            };
            let why = disk.course.failure().or(given_up)?;
            Some(format!(
                "disk '{}' could not be copied: {why}",
                disk.spec.name
            ))
        };
        self.disks.iter().find_map(failed)
    }

    /// Notes, durably, which of them could be read wholly, and which could not.
    pub(crate) fn note_read(&self) {
        for disk in &self.disks {
            let (served, course) = (&self.all.0, &disk.course);
            if course.is_unreadable() {
                served.note_read(&disk.spec.path, false);
            } else if course.is_synchronised() || course.decision() == Some(Decision::Finish) {
                let place = (usize::from(disk.place), &*disk.spec.path);
                served.note_whole(place, disk.faults);
            }
        }
        if let Some(path) = self.unread_below() {
            self.all.0.note_read(&path, false);
        }
    }

    fn unread_below(&self) -> Option<String> {
        self.below.as_ref().and_then(Below::unread)
    }
}

/// Whatever becomes of the migration, no guest waits for it any longer.
impl Drop for SourceDisks {
    fn drop(&mut self) {
        self.disks.iter().for_each(|disk| disk.course.give_up());
        // Whatever ended it first.
        let mut disks = self.disks.iter();
        if disks.any(|disk| disk.course.is_unreadable()) || self.unread_below().is_some() {
            self.note_read();
        }
    }
}
