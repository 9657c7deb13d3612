//! How a disk goes on with its second image: the one step of a move that its guest could notice.
//!
//! Part of a move ([`super::in_place`]). Owns nothing beyond the mirror while it is there. Refuses: to call a second image the
//! disk that is not equal, not durable or not the file that was made for it.

use super::left::{Copying, Left};
use super::served::Served;
use super::told;
use crate::adoption::lock;
use crate::faults::{planted, reached};
use godwit_blockio::{Image, SecondImage};
use godwit_qemu::disk::identity_of;
use godwit_types::disk_move::DiskPlace;
use godwit_types::vm::DiskSpec;
use godwit_vhost::Disk;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a disk stands still at most for what is under way, and then for that to be durable.
const STAND_WAIT: Duration = Duration::from_millis(500);

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
}

/// What fills the second image. The disk is the very one that has the mirror: another one in its place has none.
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

    /// Goes on with the second image if both are equal now; else nothing has changed.
    pub(super) fn switch(
        &self,
        going: &Going<'_>,
        mirror: &Mirror,
        image: &mut Option<Image>,
    ) -> Result<Option<Duration>, Stopped> {
        let began = Instant::now();
        // A disk that ends while what is written changes must not be served as it was.
        let Some(_alone) = self.serve_alone(going.index) else {
            return Ok(None);
        };
        self.must_be_mirrored(going.index, &mirror.disk)?;
        let standing = match mirror.disk.stand_still(STAND_WAIT) {
            Err(godwit_vhost::Error::Busy { .. }) => return Ok(None),
            standing => standing?,
        };
        let path = PathBuf::from(&going.place.path);
        let named = path.clone();
        let settled = mirror
            .second
            .settle(began + STAND_WAIT, STAND_WAIT, move || identity_of(&named));
        let Some(found) = settled?.transpose()? else {
            return Ok(None);
        };
        let may_run = self.held().is_some() && mirror.disk.status()?.has_image;
        if found != going.copying.image || !may_run || !mirror.second.course().is_synchronised() {
            return Err(format!(
                "{} is not to be the disk any more: see the log of the VM process",
                path.display()
            )
            .into());
        }
        let image = image.take().ok_or("its second image is gone")?;
        if planted("switch-before-record") {
            standing.switch(image)?;
            drop(standing);
            std::thread::sleep(STAND_WAIT);
            reached("disk-move.switched");
            self.write_switch(going)?;
            return Ok(Some(began.elapsed()));
        }
        let written = self.write_switch(going);
        let is_written = written.is_ok();
        let switched = written.and_then(|()| {
            reached("disk-move.written");
            let switched = standing.switch(image);
            switched.map_err(|error| told(&going.spec, &error))
        });
        let Err(why) = switched else {
            drop(standing);
            reached("disk-move.switched");
            return Ok(Some(began.elapsed()));
        };
        // It must take nothing more: it is served anew with what is written, once that is certain.
        standing.end();
        self.serve_anew(going.index);
        tracing::error!(
            disk = going.spec.name,
            why,
            "a disk that was to go on with another image is served anew"
        );
        match is_written {
            true => Ok(Some(began.elapsed())),
            false => Err(why.into()),
        }
    }

    /// Whatever serves it ends, and what is written is served soon.
    fn serve_anew(&self, index: usize) {
        let slot = lock(&self.disks).get_mut(index).and_then(Option::take);
        // Not under the lock: its end is waited for.
        if let Some(disk) = slot {
            disk.begin_end();
        }
    }

    /// From here on the second image is the disk.
    fn write_switch(&self, going: &Going<'_>) -> Result<(), String> {
        let (index, place) = (going.index, going.place);
        // What is not written down yet counts, too.
        let known = self.known_of(&self.what(), &place.disk);
        self.keep_no_more(&place.disk);
        let written = self.change(|what| {
            what.copying = None;
            what.left.push(Left {
                disk: place.disk.clone(),
                path: going.spec.path.clone(),
                image: going.image,
                known,
                followed: false,
            });
            if let Some(disk) = what.disks.get_mut(index) {
                disk.path.clone_from(&place.path);
                disk.shared = place.shared;
            }
            if let (Some(now), Some(image)) = (what.images.get_mut(index), going.copying.image) {
                *now = image;
            }
            let known = going.copying.known.iter();
            known.for_each(|known| what.know(known.clone()));
        });
        written.map_err(|error| error.message)
    }
}
