//! Disks whose images have no room left: which, since when, and whether there may be room again.
//!
//! Owns a thread while a guest stands still for that, which alone looks at storage that may hang. Whether there is room the guest's
//! own write shows, once it is tried again; what the file system tells is the sign to try. Where it tells nothing (a quota, a
//! device that grows) it is tried now and then all the same.

use super::Disks;
use super::served::Served;
use crate::adoption::lock;
use crate::faults::planted;
use godwit_delta::Layout;
use godwit_types::host_api::VmProcessConfig;
use rustix::fs::statvfs;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often the file systems are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// So much more is enough to try it.
const ENOUGH: u64 = 1 << 20;
/// What an image without content takes beside its directory: its head, its descriptor, and the description of its disk.
const ONE_IMAGE_MORE: u64 = 256 << 10;
/// When it is tried in any case.
const IN_ANY_CASE: Duration = Duration::from_secs(60);

/// A disk whose guest's writes wait for room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FullDisk {
    pub disk: String,
    pub path: String,
    /// Its storage ends them with an error, and they wait for that.
    pub fails: bool,
}

impl FullDisk {
    /// Why its guest is not moved to another host: what waits for room would stay here.
    pub(crate) fn keeps_its_guest(&self, config: &VmProcessConfig) -> String {
        let (VmProcessConfig { vm, host, .. }, Self { disk, path, .. }) = (config, self);
        if self.fails {
            return format!(
                "VM '{vm}' is not migrated while the storage of its disk '{disk}' fails: see that {path} can be read and written on host '{host}'"
            );
        }
        format!(
            "VM '{vm}' is not migrated while its disk '{disk}' is full: make room for {path} on host '{host}', or move the disk there, unless it has snapshots, with 'godwit vm move-disk {vm} --to DATASTORE'"
        )
    }
}

/// Where an image is, and how many bytes its file system has left.
type Room = (String, u64);

impl Disks {
    /// The one that has been full for longest, and for how long.
    pub(crate) fn full(&self) -> Option<(FullDisk, Duration)> {
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        let all = disks.iter().zip(&what.disks);
        let full = all.filter_map(|(disk, spec)| {
            let status = disk.as_ref()?.glance().ok()?;
            let full = FullDisk {
                disk: spec.name.clone(),
                path: spec.path.clone(),
                fails: status.fails,
            };
            Some((full, status.full_for?))
        });
        full.max_by_key(|(_, waits)| *waits)
    }

    /// Refuses to have the guest leave this host while one of them is full.
    pub(crate) fn must_have_room(&self) -> Result<(), String> {
        match self.full() {
            Some((full, _)) => Err(full.keeps_its_guest(&self.0.config)),
            None => Ok(()),
        }
    }

    /// Has `found` called once it is worth trying whether there is room again, unless `wait` was dropped before. Of storage that `fails`
    /// room tells nothing.
    pub(crate) fn watch_room(
        &self,
        (wait, fails): (Weak<()>, bool),
        found: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let served = Arc::downgrade(&self.0);
        let work = move || {
            let until = Instant::now() + IN_ANY_CASE;
            let mut least = Vec::new();
            while let Some(served) = served.upgrade() {
                let is_over = wait.strong_count() == 0;
                if is_over || served.has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let has_more = !fails && has_more(&mut least, served.rooms());
                let has_more = has_more || planted("room-not-awaited");
                if has_more || Instant::now() >= until {
                    tracing::info!(has_more, "it is tried whether a full disk has room");
                    return found();
                }
                drop(served);
                std::thread::sleep(LOOK_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("disk-room".into());
        thread.spawn(work).map(drop)
    }
}

impl Served {
    fn rooms(&self) -> Vec<Room> {
        let what = self.what();
        let written = what.disks.iter().filter(|spec| !spec.read_only);
        let room = |path: &String| {
            let found = statvfs(path.as_str()).ok();
            let bytes = found.map(|found| found.f_bavail.saturating_mul(found.f_frsize));
            (path.clone(), bytes.unwrap_or(0))
        };
        written.map(|spec| room(&spec.path)).collect()
    }
}

/// Refuses the file system of an image on which not even a delta over it without content has room.
pub(super) fn must_have_room_for_an_image(path: &str) -> Result<(), String> {
    let told = |error: &dyn std::fmt::Display| format!("{path}: {error}");
    let bytes = std::fs::metadata(path).map_err(|error| told(&error))?.len();
    let layout = Layout::of(bytes).map_err(|error| told(&error))?;
    let found = statvfs(path).map_err(|error| told(&error))?;
    let needed = layout.directory().end.saturating_add(ONE_IMAGE_MORE);
    match found.f_bavail.saturating_mul(found.f_frsize) >= needed {
        true => Ok(()),
        false => Err(format!(
            "{path} has no room for one more image beside it, with which a disk that has snapshots begins to move: make room there first"
        )),
    }
}

/// Whether a disk has room that it did not have when it had least, or lies elsewhere by now.
fn has_more(least: &mut Vec<Room>, now: Vec<Room>) -> bool {
    let before = std::mem::take(least);
    let mut has_more = false;
    for (place, (path, bytes)) in now.into_iter().enumerate() {
        let (mut lowest, known) = (bytes, before.get(place));
        if let Some((former, earlier)) = known {
            has_more |= *former != path || bytes >= earlier.saturating_add(ENOUGH);
            lowest = lowest.min(*earlier);
        }
        least.push((path, lowest));
    }
    has_more
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn a_disk_with_snapshots_begins_to_move_only_where_one_more_image_has_room() {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        image.as_file().set_len(1 << 30).unwrap();
        let path = image.path().to_str().unwrap();
        assert_eq!(must_have_room_for_an_image(path), Ok(()));
        // A file of memory is on a file system that tells of no room at all.
        let full = rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&full, 1 << 30).unwrap();
        let path = format!("/proc/self/fd/{}", full.as_raw_fd());
        let refused = must_have_room_for_an_image(&path).unwrap_err();
        assert!(
            refused.contains("has no room for one more image"),
            "{refused}"
        );
    }

    #[test]
    fn room_counts_from_where_there_was_least_and_another_place_is_tried_at_once() {
        let room = |path: &str, bytes: u64| vec![(path.to_owned(), bytes)];
        let mut least = Vec::new();
        assert!(!has_more(&mut least, room("/a", 4 * ENOUGH)));
        // Somebody else takes what is left.
        assert!(!has_more(&mut least, room("/a", 0)));
        assert!(!has_more(&mut least, room("/a", ENOUGH - 1)));
        assert!(has_more(&mut least, room("/a", ENOUGH)));
        assert!(!has_more(&mut least, room("/a", ENOUGH - 1)));
        assert!(has_more(&mut least, room("/b", 0)));
        assert!(!has_more(&mut least, room("/b", 0)));
    }
}
