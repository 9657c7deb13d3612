//! Disks with snapshots that go to another host with their VM: their tops are frozen, and what lies below is sent by a thread of its own.
//!
//! What is sent is written by nobody any more, as long as nothing is given up of deleted snapshots: that is held off until the migration is over. The
//! tops are mirrored afterwards, as a disk without snapshots is ([`super::moving`]).
//!
//! Owns the thread, which ends with the migration. Refuses: what a migration of before did not announce, and images that other VMs have, too.

use super::layers::Place;
use super::linked::must_go_along;
use super::moving::open_disk_image;
use super::parts::Parts;
use super::served::Served;
use super::tidying::Paused;
use super::{BLOCK, Disks, SourceDisks};
use crate::adoption::lock;
use godwit_blockio::delta::Words;
use godwit_blockio::filters::{Course, Pace, Still};
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
use std::os::fd::AsFd as _;
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
    /// Freezes the top of a disk that has snapshots, and notes what lies below. Returns the states of its top; nothing of a disk that is one image.
    pub(super) fn take(
        &mut self,
        served: &Arc<Served>,
        (place, spec): (u8, &DiskSpec),
        (image, named): ((u64, u64), &DiskToMove),
    ) -> Result<Option<States<Words>>, ApiError> {
        if !named.layered && !lock(&served.layered).contains(&spec.name) {
            return Ok(None);
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
        match (found.is_some(), named.layered) {
            (false, false) => return Ok(None),
            (true, false) => {
                let why = "it has snapshots, of which its migration was not told: one was taken meanwhile, or the controller is of an earlier version; begin the migration again, or install a newer controller";
                return Err(refused(why.to_owned()));
            }
            // Its snapshots may have been merged since: what comes there is a disk with an image over its own.
            (_, true) => {}
        }
        let goes_along = found.as_ref().map_or(Ok(()), must_go_along);
        goes_along.map_err(refused)?;
        if self.paused.is_none() {
            self.paused = Some(served.hold_tidying(HOLD_WAIT).map_err(refused)?);
        }
        let removed = served.remove_what_left(&here, own.as_fd());
        removed.map_err(refused)?;
        let (images, top) = served.freeze_alone(spec)?;
        let taken = self.note((&here, place), image, &images);
        taken.map_err(refused)?;
        Ok(Some(top))
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
