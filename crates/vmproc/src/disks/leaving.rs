//! Disks with snapshots, and linked ones, that go to another host with their VM: their tops are frozen, and what lies below is sent by a thread of its own.
//!
//! The image to which a disk is linked never goes along: where the destination has it, too, the disk stays linked; else all that its guest reads is
//! copied into one image, and nothing is frozen. Which of the two the migration says, and the destination looks for itself.
//!
//! What is sent is written by nobody any more, as long as nothing is given up of deleted snapshots: that is held off until the migration is over. The
//! tops are mirrored afterwards, as a disk without snapshots is ([`super::moving`]).
//!
//! Owns the thread, which ends with the migration. Refuses: what a migration of before did not announce, and images that other VMs have, too.

use super::layers::Place;
use super::linked::{not_told_of, stays_with_snapshots};
use super::parts::Parts;
use super::served::Served;
use super::tidying::Paused;
use super::to_copy::{begin_copying, begin_copying_all, open_disk_image};
use super::tree::begin_copying_top;
use super::{BLOCK, Disks, SourceDisks};
use crate::adoption::lock;
use godwit_blockio::delta::Words;
use godwit_blockio::filters::{Course, Outlet, Pace, Still, TopOnly};
use godwit_blockio::{Access, Image, stride_of};
use godwit_delta::States;
use godwit_migrate::protocol::LAYERS_LEN_MAX;
use godwit_snapshots::Images;
use godwit_streams::source::Changes;
use godwit_types::migration::DiskToMove;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use godwit_wire::BELOW;
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A migration does not begin while something is merged that takes longer to break off.
const HOLD_WAIT: Duration = Duration::from_secs(2);

/// What lies below the tops of all disks with snapshots, and how far it is.
#[derive(Debug)]
pub(super) struct Below {
    /// Their places, and what each consists of.
    said: Vec<(u8, String)>,
    /// What is to be sent, until a thread does.
    files: Mutex<Vec<OneFile>>,
    /// Bytes of all of them.
    pub bytes: u64,
    progress: Arc<Progress>,
    _paused: Paused,
}

#[derive(Debug)]
struct OneFile {
    /// Where among the disks that go along it stands,
    place: u8,
    /// and the path of its own image.
    path: String,
    /// Where its first byte is among the files of its disk.
    begins: u64,
    image: Image,
    /// Bytes that it holds.
    bytes: u64,
}

#[derive(Debug, Default)]
struct Progress {
    left: AtomicU64,
    /// Which of the files is sent, and what of that one is not given yet.
    file: Mutex<Option<(usize, u64)>>,
    is_done: AtomicBool,
    is_over: AtomicBool,
    failure: Mutex<Option<String>>,
    /// The path of the disk of which something could not be read.
    unread: Mutex<Option<String>>,
}

/// What is copied of a disk that leaves, once what lies below is sent.
#[derive(Debug)]
pub(super) enum Taken {
    /// Its image, which is all of it.
    Image,
    /// All that its guest reads, of a linked one that becomes one image.
    AllOfIt,
    /// What its guest has written since all below was frozen.
    Top(States<Words>),
}

impl Taken {
    /// Takes of what is copied what is to go there.
    pub(super) fn outlet(&self, outlet: Box<dyn Outlet>) -> Box<dyn Outlet> {
        match self {
            Self::Image | Self::AllOfIt => outlet,
            Self::Top(top) => Box::new(TopOnly::new(outlet, top.clone())),
        }
    }

    /// Lets the copying begin. Returns the bytes that are to be copied.
    pub(super) fn begin(
        &self,
        (spec, image): (&DiskSpec, (u64, u64)),
        bytes: u64,
        course: &Course,
    ) -> u64 {
        match self {
            Self::Image => begin_copying((spec, image), bytes, course),
            // Its own image is a hole, which says nothing of what its guest reads.
            Self::AllOfIt => begin_copying_all(bytes, course),
            Self::Top(top) => begin_copying_top(top, bytes, course),
        }
    }
}

/// How a disk leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Image,
    AllOfIt,
    /// With all of its own images.
    Layers,
}

/// How a disk leaves that consists of this, or is one image, by what its migration says of it. Why it does not is the end of a sentence.
fn way_of(found: Option<&Images>, named: &DiskToMove) -> Result<Way, String> {
    let Some(common) = found.and_then(Images::common) else {
        return match (found.is_some(), named.layered) {
            (false, false) => Ok(Way::Image),
            (true, false) => Err("it has snapshots, of which its migration was not told: one was taken meanwhile, or the controller is of an earlier version; begin the migration again, or install a newer controller".to_owned()),
            // Its snapshots may have been merged since: what comes there is a disk with an image over its own.
            (_, true) => Ok(Way::Layers),
        };
    };
    if !named.is_linked_to(common.path, common.id) {
        return Err(not_told_of(common.path));
    }
    match (named.layered, found.is_some_and(Images::may_become_one)) {
        (true, _) => Ok(Way::Layers),
        (false, true) => Ok(Way::AllOfIt),
        (false, false) => Err(stays_with_snapshots(common.path)),
    }
}

/// Disks with snapshots that are about to leave.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    paused: Option<Paused>,
    said: Vec<(u8, String)>,
    files: Vec<OneFile>,
    /// What else belongs to each, by its name.
    pub parts: BTreeMap<String, Parts>,
}

impl Leaving {
    /// Freezes the top of a disk that goes with several images, and notes what lies below. Returns what else is to be copied of it.
    pub(super) fn take(
        &mut self,
        served: &Arc<Served>,
        (place, spec): (u8, &DiskSpec),
        (image, named): ((u64, u64), &DiskToMove),
    ) -> Result<Taken, ApiError> {
        let is_said_to_be = named.layered || named.linked.is_some();
        if !is_said_to_be && !lock(&served.layered).contains(&spec.name) {
            return Ok(Taken::Image);
        }
        let refused = |why: String| {
            let error = served.refused(spec, &why);
            ApiError::new(ErrorCode::NotMigratable, error.message)
        };
        let disk = served
            .disk(usize::from(place))
            .map_err(|why| refused(why.to_owned()))?;
        let own = disk
            .lend_image()
            .map_err(|error| refused(error.to_string()))?;
        let all = served.all();
        let here = all.place(spec);
        let found = here.load_of(own.as_fd()).map_err(refused)?;
        let way = way_of(found.as_ref(), named).map_err(refused)?;
        let has_room = match &found {
            Some(images) if way == Way::Layers => images.must_have_room_to_move(),
            _ => Ok(()),
        };
        has_room.map_err(refused)?;
        if way == Way::Image {
            return Ok(Taken::Image);
        }
        if self.paused.is_none() {
            self.paused = Some(served.hold_tidying(HOLD_WAIT).map_err(refused)?);
        }
        let removed = served.remove_what_left(&here, own.as_fd());
        removed.map_err(refused)?;
        if way == Way::AllOfIt {
            return self.note_all_of_it(&here, own.as_fd()).map_err(refused);
        }
        let (images, top) = served.freeze_alone(spec)?;
        let taken = self.note((&here, place), image, &images);
        taken.map_err(refused)?;
        Ok(Taken::Top(top))
    }

    /// Nothing but a copy of all that its guest reads goes there. What it consists of here goes once it has left, but for what it is linked to.
    fn note_all_of_it(&mut self, here: &Place<'_>, own: BorrowedFd<'_>) -> Result<Taken, String> {
        // Nothing is merged or taken from here on.
        let images = here.load_of(own)?;
        let images = images.ok_or("what it consists of is described no more")?;
        let name = here.spec.name.clone();
        self.parts.insert(name, here.parts_of(&images)?);
        Ok(Taken::AllOfIt)
    }

    fn note(
        &mut self,
        (here, place): (&Place<'_>, u8),
        image: (u64, u64),
        images: &Images,
    ) -> Result<(), String> {
        here.must_be_frozen(images)?;
        let said = serde_json::to_string(images).map_err(|error| error.to_string())?;
        if said.len() > LAYERS_LEN_MAX {
            return Err(
                "its snapshots are described with too much text to be sent: delete some".to_owned(),
            );
        }
        // Who has no names for them there refuses them here, before anything is sent.
        images.at_another_place(here.file_name()?, (1, images.mark.as_str()), &images.mark)?;
        let stride = stride_of(images.bytes);
        let own = open_disk_image(here.spec, image)?;
        let path = Path::new(&here.spec.path);
        let told = |error: godwit_blockio::Error| error.to_string();
        let bytes_of = |name: &str| here.bytes_of(images, name).unwrap_or_default();
        self.files.push(OneFile {
            place,
            path: here.spec.path.clone(),
            begins: 0,
            image: Image::of(own, path, Access::ReadOnly, BLOCK).map_err(told)?,
            bytes: bytes_of(here.file_name()?),
        });
        // As the other side has them.
        let frozen = images.deltas().filter(|(name, _)| **name != images.top);
        for (number, (name, _)) in (1..).zip(frozen) {
            let file = here.open_part(images, name)?;
            self.files.push(OneFile {
                place,
                path: here.spec.path.clone(),
                begins: stride.saturating_mul(number),
                image: Image::of(file, Path::new(name), Access::ReadOnly, BLOCK).map_err(told)?,
                bytes: bytes_of(name),
            });
        }
        self.parts
            .insert(here.spec.name.clone(), here.parts_of(images)?);
        self.said.push((place, said));
        Ok(())
    }

    /// All of them are noted; nothing where no disk has snapshots.
    pub(super) fn all(self) -> Option<Below> {
        let paused = self.paused?;
        let bytes = self.files.iter().map(|file| file.bytes).sum();
        let progress = Progress {
            left: AtomicU64::new(bytes),
            // Of disks that become one image nothing lies below.
            is_done: AtomicBool::new(self.files.is_empty()),
            ..Progress::default()
        };
        Some(Below {
            said: self.said,
            files: Mutex::new(self.files),
            bytes,
            progress: Arc::new(progress),
            _paused: paused,
        })
    }
}

impl Below {
    /// Each disk's place, and what it consists of.
    pub(super) fn said(&self) -> &[(u8, String)] {
        &self.said
    }

    /// Begins to send them, once.
    pub(super) fn begin(&self, changes: &Changes, pace: &Pace) -> Result<(), String> {
        let files = std::mem::take(&mut *lock(&self.files));
        if files.is_empty() {
            return Ok(());
        }
        let (changes, pace) = (changes.clone(), pace.clone());
        let progress = Arc::clone(&self.progress);
        let work = move || match progress.send_all(&files, &changes, &pace) {
            Ok(true) => progress.is_done.store(true, Ordering::Release),
            Ok(false) => {}
            Err(why) => *lock(&progress.failure) = Some(why),
        };
        let thread = std::thread::Builder::new().name("disk-files".into());
        thread
            .spawn(work)
            .map(drop)
            .map_err(|error| error.to_string())
    }

    /// Whether the destination has carried out all of it.
    pub(super) fn is_done(&self) -> bool {
        self.progress.is_done.load(Ordering::Acquire)
    }

    /// Bytes that are still to be sent.
    pub(super) fn left_bytes(&self) -> u64 {
        match self.is_done() {
            true => 0,
            false => self.progress.left.load(Ordering::Relaxed),
        }
    }

    /// The path of the disk of which something could not be read, if one could not.
    pub(super) fn unread(&self) -> Option<String> {
        lock(&self.progress.unread).clone()
    }

    /// Why it cannot be sent.
    pub(super) fn failure(&self) -> Option<String> {
        let failure = lock(&self.progress.failure).clone()?;
        Some(format!(
            "what its snapshots hold could not be sent: {failure}"
        ))
    }
}

/// Whatever becomes of the migration, its thread ends.
impl Drop for Below {
    fn drop(&mut self) {
        self.progress.is_over.store(true, Ordering::Release);
    }
}

impl Progress {
    fn send_all(&self, files: &[OneFile], changes: &Changes, pace: &Pace) -> Result<bool, String> {
        let told = |error: godwit_blockio::Error| error.to_string();
        let mut rest: u64 = files.iter().map(|file| file.bytes).sum();
        for (number, file) in files.iter().enumerate() {
            rest = rest.saturating_sub(file.bytes);
            let course = Course::at(pace);
            let outlet = changes.of_disk(file.place | BELOW, &course).map_err(told)?;
            let still = Still::new(&file.image, outlet, &course).map_err(told)?;
            let ended = still.at(file.begins).run(
                || changes.under_way_bytes(),
                |course| {
                    let left = rest.saturating_add(course.left_bytes().min(file.bytes));
                    self.left.store(left, Ordering::Relaxed);
                    *lock(&self.file) = Some((number, course.left_bytes()));
                    !self.is_over.load(Ordering::Acquire)
                },
            );
            if course.is_unreadable() {
                *lock(&self.unread) = Some(file.path.clone());
            }
            if !ended.map_err(told)? {
                return Ok(false);
            }
        }
        self.left.store(0, Ordering::Relaxed);
        Ok(true)
    }
}

impl Disks {
    /// What else belongs to the disks that leave is removed with them, once they have.
    pub(super) fn note_leaving_parts(
        &self,
        parts: BTreeMap<String, Parts>,
    ) -> Result<(), ApiError> {
        self.0.change(|what| what.leaving_parts = parts)
    }

    /// The disks stay after all: a program of the version before does not read what is noted of them for this migration.
    pub(crate) fn forget_leaving_parts(&self, migration: &MigrationId) {
        let what = self.0.what();
        let is_of_it = what.leaving.as_ref() == Some(migration);
        if !is_of_it || what.leaving_parts.is_empty() {
            return;
        }
        if let Err(error) = self.0.change(|what| what.leaving_parts.clear()) {
            tracing::warn!(%error, "what the VM's disks consist of stays noted for a migration that is over");
        }
    }
}

impl SourceDisks {
    /// What each disk with snapshots consists of, by its place.
    pub(crate) fn layers(&self) -> Vec<(u8, String)> {
        let below = self.below.as_ref();
        below.map_or_else(Vec::new, |below| below.said().to_vec())
    }

    /// Begins to send what lies below their tops, once.
    pub(crate) fn begin_below(&self) -> Result<(), String> {
        let below = self.below.as_ref();
        below.map_or(Ok(()), |below| below.begin(&self.changes, &self.pace))
    }

    /// Whether the destination has carried out all of that.
    pub(crate) fn is_below_done(&self) -> bool {
        self.below.as_ref().is_none_or(Below::is_done)
    }

    /// What all files hold together that lie below the top.
    pub(crate) fn below_bytes(&self) -> u64 {
        self.below.as_ref().map_or(0, |below| below.bytes)
    }

    /// Which of its files is sent, and the bytes of that which are not carried out yet: they become ever less. Nothing before the first one.
    pub(crate) fn below_not_there(&self) -> Option<(usize, u64)> {
        let below = self.below.as_ref()?;
        let (file, left) = (*lock(&below.progress.file))?;
        Some((file, left.saturating_add(self.changes.under_way_bytes())))
    }

    /// Those of it that are still to be sent.
    pub(crate) fn below_left_bytes(&self) -> u64 {
        self.below.as_ref().map_or(0, Below::left_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_snapshots::{Common, Fresh, Snapshot};
    use godwit_types::SnapshotName;
    use godwit_types::migration::LinkedTo;

    fn fresh(number: u32) -> Fresh {
        Fresh {
            name: format!("root.raw.d{number}"),
            id: format!("{number:032x}"),
            elsewhere: None,
        }
    }

    fn with_snapshot(images: &Images) -> Images {
        let snapshot = Snapshot {
            name: SnapshotName::new("clean").unwrap(),
            after: None,
            image: String::new(),
            made_unix_s: 0,
            begun: false,
            quiesced: false,
            text: String::new(),
            disks: vec!["root".to_owned()],
        };
        images.take(snapshot, &fresh(2)).unwrap()
    }

    fn linked() -> Images {
        let common = Common {
            path: "/srv/base.raw",
            id: &"9".repeat(32),
        };
        Images::linked(common, 1 << 20, &"5".repeat(32), &fresh(1)).unwrap()
    }

    fn named(layered: bool, id: Option<&str>) -> DiskToMove {
        DiskToMove {
            name: "root".to_owned(),
            bytes: 1 << 20,
            used_bytes: 0,
            layered,
            linked: id.map(|id| LinkedTo {
                path: "/srv/base.raw".to_owned(),
                id: id.repeat(32),
                used_bytes: 0,
                has_snapshots: false,
            }),
        }
    }

    #[test]
    fn a_linked_disk_leaves_as_its_migration_says_and_with_snapshots_only_where_it_stays_linked() {
        let (images, told, untold) = (linked(), Some("9"), None);
        let way = |images: &Images, named: &DiskToMove| way_of(Some(images), named);
        assert_eq!(way(&images, &named(true, told)), Ok(Way::Layers));
        assert_eq!(way(&images, &named(false, told)), Ok(Way::AllOfIt));
        let merging = images.freeze(&fresh(2)).unwrap();
        assert_eq!(way(&merging, &named(false, told)), Ok(Way::AllOfIt));
        let kept = with_snapshot(&images);
        assert_eq!(way(&kept, &named(true, told)), Ok(Way::Layers));
        let why = way(&kept, &named(false, told)).unwrap_err();
        assert!(why.contains("delete the disk's snapshots"), "{why}");
        // A controller of before says that it has snapshots, and another image may have been put in its place.
        for named in [
            named(true, untold),
            named(false, untold),
            named(true, Some("8")),
        ] {
            let why = way(&images, &named).unwrap_err();
            assert!(why.contains("was not told"), "{why}");
        }
    }

    #[test]
    fn other_disks_leave_as_before() {
        let one = Images::of_one("root.raw", 1 << 20, &"5".repeat(32));
        let kept = with_snapshot(&one);
        assert_eq!(way_of(None, &named(false, None)), Ok(Way::Image));
        assert_eq!(way_of(None, &named(true, None)), Ok(Way::Layers));
        assert_eq!(way_of(Some(&kept), &named(true, None)), Ok(Way::Layers));
        assert!(way_of(Some(&kept), &named(false, None)).is_err());
        // It became one image on its host before it left.
        assert_eq!(way_of(None, &named(false, Some("9"))), Ok(Way::Image));
    }
}
