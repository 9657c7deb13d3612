//! Disks that go to another host by snapshotting, the laboratory's first method: all redo logs lie beside the images that the disks have, and what
//! is frozen is sent into the images that they are to have, log after log.
//!
//! What is done next [`godwit_redo`] decides, for all disks together: each log is put over all of them at one moment. Until the destination holds the
//! VM the source's images with all their logs are the disks, whatever becomes of the link: a broken one puts no part of them out of reach. The
//! destination has raw images that are filled, as with the mirror, and knows of no logs. The last log is sent while the guest stands still.
//!
//! Owns the disks until the thread that does it has them ([`super::sending_logs`]); what both tell each other is in [`super::logs_shared`]. Refuses: disks that have no
//! place for logs, or consist of more than their images.

use super::logs_shared::Shared;
use super::redo::must_have_place_for_logs;
use super::sending_logs::{One, Sender};
use super::served::Served;
use crate::adoption::lock;
use godwit_blockio::filters::{Course, Outlet};
use godwit_snapshots::Images;
use godwit_streams::source::Changes;
use godwit_types::disk_move::{DiskIterations, Method, SentLogs};
use godwit_types::migration::DiskToMove;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use std::sync::{Arc, Mutex};

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
        self.shared.begin(total);
        let (changes, migration) = (changes.clone(), migration.clone());
        let served = Arc::clone(&self.served);
        let sender = Sender::of(disks, served, (changes, migration), &self.shared);
        let thread = std::thread::Builder::new().name("disk-logs".into());
        if let Err(error) = thread.spawn(move || sender.run()) {
            self.shared.fail(error.to_string());
        }
        total
    }

    pub(super) fn left_bytes(&self) -> u64 {
        self.shared.left_bytes()
    }

    /// What becomes less as long as anything is sent; nothing where nothing is waited for.
    pub(super) fn not_copied(&self) -> Option<u64> {
        self.shared.not_copied()
    }

    /// Whether the destination has all that the guest wrote, which stands still.
    pub(super) fn are_equal(&self) -> bool {
        self.shared.is_equal() && !self.courses.iter().any(Course::has_lost)
    }

    /// Somebody waits for them, and the guest goes on: where the last log has grown meanwhile another one is put over.
    pub(super) fn wait_on(&self) {
        self.shared.wait_on();
    }

    /// Whether memory may follow.
    pub(super) fn are_ready(&self) -> bool {
        self.shared.is_ready()
    }

    /// Whether the guest may be stopped, for at most so long, s.
    pub(super) fn are_close(&self, limit_s: f64) -> bool {
        self.shared.is_close(limit_s)
    }

    /// The guest stands still from now on.
    pub(super) fn close(&self) {
        self.shared.turn(true);
    }

    /// The guest is not held for its last log any more.
    pub(super) fn open(&self) {
        self.shared.turn(false);
    }

    /// What each step came to of each disk, and what all logs took.
    pub(super) fn came_to(&self) -> (Vec<DiskIterations>, SentLogs) {
        self.shared.came_to()
    }

    pub(super) fn failure(&self) -> Option<String> {
        let failure = self.shared.failure()?;
        Some(format!(
            "its disks could not be sent by redo logs: {failure}"
        ))
    }
}

/// Whatever becomes of the migration, its thread ends.
impl Drop for LogsAway {
    fn drop(&mut self) {
        self.shared.end();
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
    must_have_place_for_logs(&spec.path)?;
    if lock(&served.by_logs).contains_key(&spec.name) {
        return Err("what is under way by redo logs for an earlier migration has not ended yet: try again in a moment".to_owned());
    }
    must_be_one_image(served, spec)?;
    match named.layered {
        true => Err("what it consisted of was still being merged when this migration was checked: try again".to_owned()),
        false => Ok(()),
    }
}
