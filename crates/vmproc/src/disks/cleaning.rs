//! What moves of disks on this host leave is removed: former images, and copies that are not whole.
//!
//! Part of [`Served`]. Owns the threads that do it while the guest runs: storage may hang. Refuses: to remove anything before what is written
//! certainly calls another image the disk. What is out of reach is removed once it is there again, and keeps no disk from moving.

use super::in_place::LOOK_EVERY;
use super::left::{Copying, Left, remove_left};
use super::served::{Served, ServedDisks};
use crate::adoption::lock;
use crate::hypervisor::internal;
use godwit_store::sync_document;
use godwit_types::ApiError;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Served {
    /// Whether nothing of an earlier move is unsettled. A former image that could not be removed stays noted, and is in nobody's
    /// way.
    pub(super) fn is_clean(&self) -> bool {
        let what = self.what();
        what.left.iter().all(|left| left.followed) && what.copying.is_none()
    }

    /// Removes what earlier moves left. Whoever calls this has the turn, so that none is under way.
    pub(super) fn clean(&self) {
        if let Some(copying) = &self.what().copying
            && let Err(error) = self.remove_copy(copying)
        {
            tracing::warn!(%error, "a disk that was not moved is not settled yet");
        }
        self.remove_former();
        self.remove_unnamed_logs();
    }

    /// Writes down again what the disks are, where what is written may be something else. What a predecessor wrote may be readable without being
    /// durable.
    fn make_certain(&self) -> Result<(), ApiError> {
        match self.must_save.load(Ordering::SeqCst) {
            true => self.change(|_| ()),
            false => sync_document(&self.paths.disks()).map_err(internal),
        }
    }

    /// Not before it is certain that what is written does not call it the disk. Where that is certain it goes first: it may be what keeps the
    /// record from having room. Once QEMU is gone nobody has the disk's image open any more: where that has lost its name, this may be the best that is left.
    pub(super) fn remove_copy(&self, copying: &Copying) -> Result<(), ApiError> {
        // Its record may have been settled before the image was made.
        let is_over =
            self.has_ended.load(Ordering::SeqCst) && !self.must_save.load(Ordering::SeqCst);
        if !is_over {
            self.make_certain()?;
            if let Some(left) = copying.out_of_reach() {
                return self.change(|what| {
                    what.copying = None;
                    what.left.extend(left);
                });
            }
        } else if !copying.disk_is_there(&self.what()) {
            // It stays noted, and the next start judges what is there then.
            return Err(internal(copying.why_left_alone()));
        }
        match copying.remove(&self.what()) {
            false => Err(internal(copying.why_not_moved())),
            true if is_over => Ok(()),
            true => self.change(|what| what.copying = None),
        }
    }

    /// Waits until the VM's description says where the disks are, and removes the images that they had before.
    pub(super) fn remove_former(&self) {
        let has_ended = || self.has_ended.load(Ordering::SeqCst);
        while self.what().left.iter().any(|left| !left.followed) {
            if has_ended() {
                // Before the next start.
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        // Nothing is removed before it is certain that what is written does not call it the disk.
        let certain = self.make_certain();
        let mut what = ServedDisks::clone(&self.what());
        let before = what.left.clone();
        let removed = certain.and_then(|()| {
            remove_left(&mut what);
            match what.left == before {
                true => Ok(()),
                false => self.change(|now| now.left = what.left),
            }
        });
        if let Err(error) = removed {
            tracing::warn!(%error, "that former images are removed is not written yet");
        }
    }

    /// Tries again, now and then, to remove a copy that could not be removed: it may take the room, or the device, that others need.
    pub(super) fn clean_up_again(self: &Arc<Self>) {
        // Whoever has the turn may be in the hands of storage: no second one waits behind it.
        let is_free = self.moves.turn.try_lock().is_ok();
        let what = self.what();
        // Of what was out of reach nobody else tells.
        let are_left = what.copying.is_some() || !what.logs.is_empty();
        let is_due = are_left || what.left.iter().any(Left::is_to_go);
        if is_free && is_due && self.moves.may_clean() {
            self.clean_up();
        }
    }

    /// Removes what a predecessor left, on a thread of its own: its storage may hang.
    pub(super) fn clean_up(self: &Arc<Self>) {
        let what = self.what();
        if what.left.is_empty() && what.copying.is_none() && what.logs.is_empty() {
            return;
        }
        let served = Arc::clone(self);
        let work = move || {
            let _turn = lock(&served.moves.turn);
            served.clean();
        };
        let thread = std::thread::Builder::new().name("disk-clean-up".into());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "what a predecessor left of moves of disks is not removed yet");
        }
    }
}
