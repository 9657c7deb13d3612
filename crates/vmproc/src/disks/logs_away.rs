//! Disks that go to another host by snapshotting, the laboratory's first method: all redo logs lie beside the images that the disks have, and what
//! is frozen is sent into the images that they are to have, log after log.
//!
//! What is done next [`godwit_redo`] decides, for all disks together: each log is put over all of them at one moment. Until the destination holds the
//! VM the source's images with all their logs are the disks, whatever becomes of the link: a broken one puts no part of them out of reach. The
//! destination has raw images that are filled, as with the mirror, and knows of no logs. The last log is sent while the guest stands still.
//!
//! Owns what the driver of the migration sees of that, and wants; the thread that does it is in [`super::sending_logs`]. Refuses: disks that have no
//! place for logs, or consist of more than their images.

use super::sending_logs::{One, Sender};
use super::served::Served;
use crate::adoption::lock;
use godwit_blockio::filters::{Course, Outlet};
use godwit_snapshots::Images;
use godwit_streams::source::Changes;
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::Method;
use godwit_types::migration::DiskToMove;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The log to which the guest writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LastLog {
    /// For how long the guest would stand still for it, s,
    pub wait_s: f64,
    /// and for how long it may, so that memory can follow: the log grows meanwhile.
    pub limit_s: f64,
}

impl LastLog {
    pub fn is_short(self) -> bool {
        self.wait_s <= self.limit_s
    }
}

/// What others see and want.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub left: AtomicU64,
    pub copied: AtomicU64,
    /// Nothing while the guest could not be stopped for it.
    pub last_log: Mutex<Option<LastLog>>,
    /// Another log is wanted, since the last one has grown.
    pub wants_another: AtomicBool,
    /// How often the guest was stopped for its last log, and let go: it stands still where this is odd.
    pub closings: AtomicU64,
    /// For which of these times the destination has all that the guest wrote.
    pub equal: AtomicU64,
    /// Somebody waits for them: the guest, which stood still for its last log, goes on.
    pub is_asked: AtomicBool,
    pub is_over: AtomicBool,
    pub failure: Mutex<Option<String>>,
}

impl Shared {
    /// What was equal the last time says nothing of this one.
    fn is_equal(&self) -> bool {
        let closing = self.closings.load(Ordering::SeqCst);
        closing % 2 == 1 && self.equal.load(Ordering::SeqCst) == closing
    }

    fn is_ready(&self) -> bool {
        self.is_asked.store(true, Ordering::SeqCst);
        match *lock(&self.last_log) {
            Some(last) if last.is_short() => true,
            Some(_) => {
                self.wants_another.store(true, Ordering::SeqCst);
                false
            }
            None => false,
        }
    }

    /// The guest stands still from now on, or goes on; nothing of what it does already.
    fn turn(&self, stands_still: bool) {
        let is_so = self.closings.load(Ordering::SeqCst) % 2 == 1;
        if is_so != stands_still {
            self.is_asked.store(false, Ordering::SeqCst);
            self.closings.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The disks that go along by logs, until a thread sends them, and how far it is.
pub(super) struct LogsAway {
    served: Arc<Served>,
    disks: Mutex<Vec<One>>,
    courses: Vec<Course>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for LogsAway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("LogsAway");
        shown.field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl LogsAway {
    pub(super) fn of(served: &Arc<Served>) -> Self {
        Self {
            served: Arc::clone(served),
            disks: Mutex::default(),
            courses: Vec::new(),
            shared: Arc::default(),
        }
    }

    /// Takes a disk along, of which nothing is changed yet.
    pub(super) fn take(
        &mut self,
        (index, spec): (usize, &DiskSpec),
        (image, named): ((u64, u64), &DiskToMove),
        (outlet, course): (Box<dyn Outlet>, &Course),
    ) -> Result<(), ApiError> {
        let served = &self.served;
        let refused = |why: String| {
            let error = served.refused(spec, &why);
            ApiError::new(ErrorCode::NotMigratable, error.message)
        };
        let one = must_go_by_logs(served, spec, named).and_then(|()| {
            let disk = served.disk(index).map_err(str::to_owned)?;
            let told = |error: godwit_vhost::Error| error.to_string();
            let (bytes, own) = (
                disk.measure().map_err(told)?,
                disk.lend_image().map_err(told)?,
            );
            if bytes != named.bytes {
                return Err(format!(
                    "it has {bytes} bytes, and had {} a moment ago: try again",
                    named.bytes
                ));
            }
            Ok(One {
                index,
                place: served.all().place(spec).owned(),
                image,
                bytes,
                disk,
                own,
                outlet,
                course: course.clone(),
                images: Images::of_one(&spec.name, bytes, ""),
            })
        });
        lock(&self.disks).push(one.map_err(refused)?);
        self.courses.push(course.clone());
        Ok(())
    }

    /// Begins to send them, once. Returns the bytes that are to be copied of their images.
    pub(super) fn begin(&self, changes: &Changes, migration: &MigrationId) -> u64 {
        let disks = std::mem::take(&mut *lock(&self.disks));
        let data = disks.iter().flat_map(One::data);
        let total: u64 = data.map(|range| range.end - range.start).sum();
        self.shared.left.store(total, Ordering::Relaxed);
        let (changes, migration) = (changes.clone(), migration.clone());
        let served = Arc::clone(&self.served);
        let sender = Sender::of(disks, served, (changes, migration), &self.shared);
        let thread = std::thread::Builder::new().name("disk-logs".into());
        if let Err(error) = thread.spawn(move || sender.run()) {
            *lock(&self.shared.failure) = Some(error.to_string());
        }
        total
    }

    pub(super) fn left_bytes(&self) -> u64 {
        self.shared.left.load(Ordering::Relaxed)
    }

    /// What becomes less as long as anything is sent; nothing where nothing is waited for.
    pub(super) fn not_copied(&self) -> Option<u64> {
        let is_waited_for = lock(&self.shared.last_log).is_none();
        is_waited_for.then(|| u64::MAX - self.shared.copied.load(Ordering::Relaxed))
    }

    /// Whether the destination has all that the guest wrote, which stands still.
    pub(super) fn are_equal(&self) -> bool {
        self.shared.is_equal() && !self.courses.iter().any(Course::has_lost)
    }

    /// Whether memory may follow. Where the last log has grown meanwhile another one is put over.
    pub(super) fn are_ready(&self) -> bool {
        self.shared.is_ready()
    }

    /// Whether the guest may be stopped, for at most so long, s.
    pub(super) fn are_close(&self, limit_s: f64) -> bool {
        lock(&self.shared.last_log).is_some_and(|last| last.wait_s <= limit_s)
    }

    /// The guest stands still from now on.
    pub(super) fn close(&self) {
        self.shared.turn(true);
    }

    /// The guest is not held for its last log any more.
    pub(super) fn open(&self) {
        self.shared.turn(false);
    }

    pub(super) fn failure(&self) -> Option<String> {
        let failure = lock(&self.shared.failure).clone()?;
        Some(format!(
            "its disks could not be sent by redo logs: {failure}"
        ))
    }
}

/// Whatever becomes of the migration, its thread ends.
impl Drop for LogsAway {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
    }
}

/// Refuses a disk that consists of more than its own image.
pub(super) fn must_be_one_image(served: &Served, spec: &DiskSpec) -> Result<(), String> {
    match served.must_be_copied_whole(spec, Method::Snapshot)? {
        false => Ok(()),
        true => Err("it is linked to another image, and redo logs take that to no other host: leave out --method, and it stays linked there, or becomes one image".to_owned()),
    }
}

/// Refuses disks that have no place for logs, and those of which logs take not all along.
fn must_go_by_logs(served: &Served, spec: &DiskSpec, named: &DiskToMove) -> Result<(), String> {
    if is_device_path(&spec.path) {
        return Err("redo logs lie beside its image, and beside a block device there is no place for them: leave out --method, and it is mirrored".to_owned());
    }
    if lock(&served.by_logs).contains_key(&spec.name) {
        return Err("what is under way by redo logs for an earlier migration has not ended yet: try again in a moment".to_owned());
    }
    must_be_one_image(served, spec)?;
    match named.layered {
        true => Err("what it consisted of was still being merged when this migration was checked: try again".to_owned()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_equal_when_the_guest_stood_still_before_is_not_when_it_does_again() {
        let shared = Shared::default();
        assert!(!shared.is_equal(), "it runs");
        shared.turn(true);
        assert!(!shared.is_equal());
        shared.equal.store(1, Ordering::SeqCst);
        assert!(shared.is_equal());
        shared.turn(true);
        assert!(shared.is_equal(), "it stands still as before");
        shared.turn(false);
        assert!(!shared.is_equal(), "it runs again");
        shared.turn(false);
        shared.turn(true);
        assert!(!shared.is_equal());
    }

    #[test]
    fn another_log_is_wanted_only_where_somebody_waits_for_one_that_has_grown() {
        let shared = Shared::default();
        let wants = || shared.wants_another.swap(false, Ordering::SeqCst);
        assert!(!shared.is_ready() && !wants(), "its image is being sent");
        let last = |wait_s| {
            Some(LastLog {
                wait_s,
                limit_s: 1.0,
            })
        };
        *lock(&shared.last_log) = last(1.0);
        assert!(shared.is_ready() && !wants());
        *lock(&shared.last_log) = last(2.0);
        assert!(!shared.is_ready() && wants());
        // Who stops the guest does not ask for anything by that.
        shared.turn(true);
        assert!(!shared.is_asked.load(Ordering::SeqCst));
    }
}
