//! How a disk goes on with its second image: the one step of a move that its guest could notice.
//!
//! The second image is bound first ([`godwit_blockio::Bound`]), then it is written down as the disk while the guest's requests go on, and then
//! the disk stands still for those that are under way and changes its image. A process that dies anywhere in this leaves two images that both
//! have all that the guest was told.
//!
//! Part of a move ([`super::in_place`]). Owns nothing beyond the mirror while it is there. Refuses: to call a second image the
//! disk that is not equal, not durable or not the file that was made for it.

use super::STAND_WAIT;
use super::labelled::{self, Labelled};
use super::left::{Copying, Left};
use super::parts::Parts;
use super::served::{Served, ServedDisks};
use super::there::DiskAlong;
use super::told;
use super::tree::{NewImage, Tree};
use crate::adoption::lock;
use crate::faults::{planted, reached};
use godwit_blockio::{Bound, SecondImage};
use godwit_qemu::disk::identity_of;
use godwit_types::ApiError;
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::DiskPlace;
use godwit_types::image::KnownImage;
use godwit_types::vm::DiskSpec;
use godwit_vhost::{Disk, Standing};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(super) fn length_of(path: &Path) -> io::Result<u64> {
    if is_device_path(&path.to_string_lossy()) {
        return labelled::length_of(path);
    }
    Ok(std::fs::metadata(path)?.len())
}

/// Why a disk is not where it was to go.
pub(super) enum Stopped {
    Cancelled,
    Failed(String),
}

impl<E: std::fmt::Display> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

/// A disk that goes to another place: which one, and both images.
pub(super) struct Going<'a> {
    pub index: usize,
    pub place: &'a DiskPlace,
    pub spec: DiskSpec,
    pub image: (u64, u64),
    pub copying: Copying,
    /// The disk with its former image and with this one; nothing where either could not be looked at.
    pub follows: Option<(DiskAlong, DiskAlong)>,
    /// What it consists of, if it has snapshots,
    pub tree: Option<Tree>,
    /// and bytes of that which lie below its top, once they are copied.
    pub below: u64,
}

impl Going<'_> {
    /// The disk where it comes to.
    pub(super) fn there(&self) -> DiskSpec {
        DiskSpec {
            path: self.place.path.clone(),
            shared: self.place.shared,
            ..self.spec.clone()
        }
    }
}

/// What was written before a switch, and what was known of the disk's image.
pub(super) type Before = (Arc<ServedDisks>, Option<KnownImage>);

/// What fills the second image, by whatever method. The disk is the very one that has the mirror: another one in its place has none.
pub(super) struct Mirror {
    pub disk: Arc<Disk>,
    pub second: SecondImage,
    pub began: Instant,
    /// Bytes that are to be copied.
    pub total: u64,
}

/// Whatever becomes of the move, no guest waits for it any longer.
impl Drop for Mirror {
    fn drop(&mut self) {
        self.second.course().give_up();
    }
}

fn go_on_with(standing: &Standing<'_>, new: NewImage) -> Result<(), godwit_vhost::Error> {
    match new.deltas.is_empty() {
        true => standing.switch(new.image),
        false => standing.switch_over(new.image, new.deltas),
    }
}

impl Served {
    /// Whether the disk is the one that has the mirror, and its image is this host's.
    pub(super) fn must_be_mirrored(&self, index: usize, disk: &Arc<Disk>) -> Result<(), Stopped> {
        if !Arc::ptr_eq(&self.disk(index)?, disk) {
            return Err("the disk was served anew meanwhile".into());
        }
        match self.held().is_some() {
            true => Ok(()),
            false => Err("its guest may not run here any more".into()),
        }
    }

    /// Goes on with the second image if both are equal now; else nothing has changed. Returns how long the disk stood still.
    pub(super) fn switch(
        &self,
        going: &Going<'_>,
        (mirror, mut bound): (&Mirror, Bound<'_>),
        image: &mut Option<NewImage>,
    ) -> Result<Option<Duration>, Stopped> {
        // A disk that ends while what is written changes must not be served as it was.
        let Some(_alone) = self.serve_alone(going.index) else {
            return Ok(None);
        };
        self.must_be_mirrored(going.index, &mirror.disk)?;
        let named = PathBuf::from(&going.place.path);
        let on_device = going.copying.is_on_device();
        let look = move || {
            let label = on_device.then(|| Labelled::seen(&named));
            Ok::<_, io::Error>((identity_of(&named)?, length_of(&named)?, label))
        };
        let found = bound.sync_within(STAND_WAIT, look);
        let Some((found, length, label)) = found?.transpose()? else {
            return Ok(None);
        };
        let path = &going.place.path;
        if found != going.copying.image || !mirror.disk.status()?.has_image {
            let why =
                format!("{path} is not to be the disk any more: see the log of the VM process");
            return Err(why.into());
        }
        if let Some(bytes) = image.as_ref().map(|new| new.image.bytes())
            && bytes != length
        {
            let why = format!(
                "{path} has {length} bytes by now in place of {bytes}: see who may write into that directory"
            );
            return Err(why.into());
        }
        if !bound.is_equal() {
            return Ok(None);
        }
        if planted("switch-before-record") {
            return self.switch_before_record(going, mirror, image);
        }
        // Either image may be the disk from now on, and is as good as the other.
        bound.stay();
        let what = self.what();
        let known = self.known_of(&what, &going.place.disk);
        let before = (what, known);
        self.moves.is_switching.store(true, Ordering::SeqCst);
        let written = self.write_switch(going, label, None);
        // Who has not kept up is tried again; what cannot be written ends the move.
        let tries_again = written.is_ok();
        let went = written.and_then(|()| {
            reached("disk-move.written");
            bound.come_close();
            self.stand(going, mirror, &bound)
        });
        let switched = match went {
            Ok((standing, began)) => {
                // Whoever makes it durable just now must not write over what the disk writes of it afterwards.
                mirror.second.let_go();
                self.change_image(going, standing, image);
                Ok(Some(began.elapsed()))
            }
            Err(why) => match self.goes_back((going, &why), &before, bound) && tries_again {
                true => Ok(None),
                false => Err(why.into()),
            },
        };
        self.moves.is_switching.store(false, Ordering::SeqCst);
        switched
    }

    /// Nothing is under way any more, and both images are equal.
    fn stand<'a>(
        &self,
        going: &Going<'_>,
        mirror: &'a Mirror,
        bound: &Bound<'_>,
    ) -> Result<(Standing<'a>, Instant), String> {
        let began = Instant::now();
        let standing = mirror.disk.stand_still(STAND_WAIT);
        let standing = standing.map_err(|error| told(&going.spec, &error))?;
        match bound.is_equal() && self.held().is_some() {
            true => Ok((standing, began)),
            false => Err("the second image has not kept up".to_owned()),
        }
    }

    /// The disk goes on with the second image, which is written down.
    fn change_image(
        &self,
        going: &Going<'_>,
        standing: Standing<'_>,
        image: &mut Option<NewImage>,
    ) {
        let switched = match image.take() {
            Some(new) => go_on_with(&standing, new).map_err(|error| error.to_string()),
            None => Err("its second image is gone".to_owned()),
        };
        let Err(why) = switched else {
            drop(standing);
            reached("disk-move.switched");
            return;
        };
        // It must take nothing more: it is served anew with what is written.
        standing.end();
        self.serve_anew(going, &why);
    }

    /// What is written says again that the first image is the disk; nothing was answered that one of them has not. Where that
    /// cannot be written the disk is served anew, once what is written is certain. Returns whether it goes on with its first image.
    fn goes_back(
        &self,
        (going, why): (&Going<'_>, &str),
        before: &Before,
        bound: Bound<'_>,
    ) -> bool {
        let disk = &going.spec.name;
        match self.write_back(going, before) {
            Ok(()) => {
                bound.release();
                tracing::warn!(disk, why, "a disk goes on with its first image");
                true
            }
            Err(error) => {
                self.serve_anew(going, &error.message);
                false
            }
        }
    }

    /// For the test that must find it.
    fn switch_before_record(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
        image: &mut Option<NewImage>,
    ) -> Result<Option<Duration>, Stopped> {
        let (began, standing) = (Instant::now(), mirror.disk.stand_still(STAND_WAIT)?);
        let image = image.take().ok_or("its second image is gone")?;
        go_on_with(&standing, image)?;
        drop(standing);
        std::thread::sleep(STAND_WAIT);
        reached("disk-move.switched");
        self.write_switch(going, None, None)?;
        Ok(Some(began.elapsed()))
    }

    /// Whatever serves it ends, and what is written is served soon.
    pub(super) fn serve_anew(&self, going: &Going<'_>, why: &str) {
        tracing::error!(
            disk = going.spec.name,
            why,
            "a disk that was to go on with another image is served anew"
        );
        let slot = lock(&self.disks)
            .get_mut(going.index)
            .and_then(Option::take);
        // Not under the lock: its end is waited for.
        if let Some(disk) = slot {
            disk.begin_end();
        }
    }

    /// From here on the second image is the disk, and these redo logs, which lay over the first, are none of it any more.
    pub(super) fn write_switch(
        &self,
        going: &Going<'_>,
        label: Option<Labelled>,
        logs: Option<Parts>,
    ) -> Result<(), String> {
        let (index, place) = (going.index, going.place);
        self.note_failures();
        // What is not written down yet counts, too.
        let known = self.known_of(&self.what(), &place.disk);
        self.keep_no_more(&place.disk);
        let former = going.tree.as_ref().map(|tree| tree.former.clone());
        let former = logs.clone().or(former).unwrap_or_default();
        let written = self.change(|what| {
            what.copying = None;
            what.left.push(Left {
                disk: place.disk.clone(),
                path: going.spec.path.clone(),
                image: going.image,
                known,
                part: None,
                parts: former,
                followed: false,
            });
            if let Some(logs) = &logs {
                what.logs.retain(|log| !log.goes_with(&place.disk, logs));
            }
            if let Some(disk) = what.disks.get_mut(index) {
                disk.path.clone_from(&place.path);
                disk.shared = place.shared;
            }
            if let Some(label) = label {
                what.note_label(label);
            }
            if let (Some(now), Some(image)) = (what.images.get_mut(index), going.copying.image) {
                *now = image;
            }
            let known = going.copying.known.iter();
            known.for_each(|known| what.know(known.clone()));
            what.unread.retain(|path| *path != place.path);
            if let Some((before, now)) = &going.follows {
                what.follow_along(before, now);
            }
        });
        written.map_err(|error| error.message)
    }

    /// As it was before, for this disk.
    pub(super) fn write_back(
        &self,
        going: &Going<'_>,
        (before, known): &Before,
    ) -> Result<(), ApiError> {
        let index = going.index;
        let as_before = |what: &mut ServedDisks| {
            what.copying.clone_from(&before.copying);
            what.left.clone_from(&before.left);
            what.logs.clone_from(&before.logs);
            what.along.clone_from(&before.along);
            if let (Some(now), Some(before)) = (what.disks.get_mut(index), before.disks.get(index))
            {
                now.clone_from(before);
            }
            if let (Some(now), Some(before)) =
                (what.images.get_mut(index), before.images.get(index))
            {
                *now = *before;
            }
            known.iter().for_each(|known| what.know(known.clone()));
        };
        // What is written next, before anybody serves the disk, is that the first image is it.
        self.go_by(as_before)
    }
}
