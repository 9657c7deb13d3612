//! Room that redo logs leave to others, on the file systems on which disks have them that go to another host.
//!
//! A log grows as its guest writes. Where the migration fails one after the other comes down into the disk's image, on the same file system, which takes room
//! once more where that image holds nothing yet. Owns what it knows of each disk's logs. Refuses: to take what is for disks that are in use.

use super::by_logs::must_have_room;
use super::switching::Stopped;
use rustix::fs::fstat;
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often it is looked.
const EVERY: Duration = Duration::from_millis(100);

/// A disk's image and its logs.
pub(super) struct Lies {
    pub disk: String,
    pub image: OwnedFd,
    pub bytes: u64,
    pub logs: Vec<PathBuf>,
}

impl Lies {
    /// What its logs need once more to come down, at most.
    fn comes_down(&self) -> Result<u64, Stopped> {
        let blocks = u64::try_from(fstat(&self.image)?.st_blocks).unwrap_or(0);
        let empty = self.bytes.saturating_sub(blocks.saturating_mul(512));
        // Each is removed before the next comes down.
        let logs = self.logs.iter().filter_map(|log| log.metadata().ok());
        let largest = logs.map(|log| log.blocks().saturating_mul(512)).max();
        Ok(largest.unwrap_or(0).min(empty))
    }

    fn must_leave_room(&self) -> Result<(), Stopped> {
        let whose = format!("disk '{}', its image and its redo logs, has", self.disk);
        let way_out = "make room there, or leave out --method";
        must_have_room((&self.image, self.comes_down()?), &whose, way_out)
    }
}

/// All disks that go together.
#[derive(Default)]
pub(super) struct LogsRoom {
    pub disks: Vec<Lies>,
    looked: Cell<Option<Instant>>,
}

impl LogsRoom {
    pub fn of(disks: Vec<Lies>) -> Self {
        Self {
            disks,
            ..Self::default()
        }
    }

    /// Looks at the file systems of all of them, now and then.
    pub fn must_be_left(&self) -> Result<(), Stopped> {
        match self.looked.get() {
            Some(at) if at.elapsed() < EVERY => Ok(()),
            _ => self.must_be_left_now(),
        }
    }

    pub fn must_be_left_now(&self) -> Result<(), Stopped> {
        let looked = self.disks.iter().try_for_each(Lies::must_leave_room);
        self.looked.set(Some(Instant::now()));
        looked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    /// A file of memory is on a file system that tells of no room at all.
    #[test]
    fn the_second_of_two_disks_has_no_room_left() {
        let image = tempfile::tempfile_in("/var/tmp").unwrap();
        let none = rustix::fs::memfd_create("data", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let lies = |disk: &str, image| Lies {
            disk: disk.to_owned(),
            image,
            bytes: 0,
            logs: Vec::new(),
        };
        let mut room = LogsRoom::of(vec![lies("root", image.into())]);
        assert!(room.must_be_left().is_ok());
        room.disks.push(lies("data", none));
        assert!(room.must_be_left().is_ok(), "it was looked at just now");
        let Err(Stopped::Failed(why)) = room.must_be_left_now() else {
            panic!("it is full");
        };
        let told = "the file system of disk 'data', its image and its redo logs, has 0 MiB left";
        assert!(why.contains(told), "{why}");
    }

    #[test]
    fn what_comes_down_is_the_largest_log_and_no_more_than_the_image_lacks() {
        const MIB: u64 = 1 << 20;
        let here = tempfile::tempdir_in("/var/tmp").unwrap();
        let holds = |name: &str, mib: u64| {
            let path = here.path().join(name);
            let file = File::create_new(&path).unwrap();
            let content = vec![7; (mib * MIB) as usize];
            file.write_all_at(&content, 0).unwrap();
            file.sync_all().unwrap();
            (path, file)
        };
        let (_, image) = holds("root.raw", 3);
        let mut lies = Lies {
            disk: "root".to_owned(),
            image: image.into(),
            bytes: 6 * MIB,
            logs: Vec::new(),
        };
        let comes_down = |lies: &Lies| lies.comes_down().ok().unwrap();
        assert_eq!(comes_down(&lies), 0);
        // A file system may take more for a file than it is long, or less.
        let takes = |path: &PathBuf| path.metadata().unwrap().blocks() * 512;
        for (name, mib) in [("one", 1), ("two", 4), ("three", 2)] {
            lies.logs.push(holds(name, mib).0);
            let largest = lies.logs.iter().map(takes).max().unwrap();
            let empty = lies
                .bytes
                .saturating_sub(takes(&here.path().join("root.raw")));
            assert_eq!(comes_down(&lies), largest.min(empty));
        }
        lies.bytes = 0;
        assert_eq!(comes_down(&lies), 0, "it has a place for all of it");
    }
}
