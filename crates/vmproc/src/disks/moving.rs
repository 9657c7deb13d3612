//! Disks of a VM that comes: what came along gets its names, and what both hosts have changes hands.
//!
//! A disk on storage of this host alone goes along ([`super::going_along`]): its image is filled at the destination while the guest runs at the source.
//! One on shared storage is given back by the source once its guest stands still, and taken by the destination with the permit
//! alone. Owns nothing. Refuses: to take an image without the right to run the VM.

use super::aside::{begin, wait};
use super::images::{give_names, keep_names};
use super::parts::Parts;
use super::served::{Arrival, Served, ServedDisks};
use super::{Disks, lock_name, told};
use crate::adoption::lock;
use crate::hypervisor::internal;
use godwit_blockio::Arriving;
use godwit_qemu::disk::{is_taken, must_be_free};
use godwit_types::datastore::is_device_path;
use godwit_types::vm::DiskSpec;
use godwit_types::{ApiError, Generation};
use godwit_wire::BELOW;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What fills the images of a VM that comes, by the disk's place.
pub(super) type Filling = godwit_streams::destination::Disks;

impl Disks {
    /// Lets the other host have what is on shared storage. The guest stands still, and nothing is under way.
    pub(crate) fn give_back(&self) -> Result<(), String> {
        let (what, disks) = (self.0.what(), lock(&self.0.disks));
        *lock(&self.0.held) = None;
        for (disk, spec) in disks.iter().zip(&what.disks) {
            if let Some(disk) = disk.as_ref().filter(|_| spec.changes_hands()) {
                let given = disk.give_image_back(&lock_name(&self.0.config, spec));
                given.map_err(|error| told(spec, &error))?;
            }
        }
        Ok(())
    }

    /// This host holds the VM under this generation: images that came with it get their names, if it is the one under which
    /// they were whole, at the latest until then: storage may hang. They are this host's from then on, whatever generation follows.
    pub(crate) fn arrive(&self, generation: Generation, deadline: Instant) -> Result<(), String> {
        let served = &self.0;
        let what = served.what();
        let migration = match &what.arriving {
            None => return Ok(()),
            Some(arrival) if arrival.is_here => return Ok(()),
            Some(arrival) if arrival.belongs_to(generation) => arrival.migration.clone(),
            Some(_) => return Err("its disks are not whole on this host".to_owned()),
        };
        served.amend_arrival(|arrival| arrival.ours = true);
        let vm = served.config.vm.clone();
        let named = move || give_names(&vm, &what.disks, &migration);
        let arrived = begin("disk-name", named).and_then(|arrived| wait(&arrived, deadline)?);
        let Err(why) = arrived else {
            served.amend_arrival(|arrival| arrival.is_here = true);
            return Ok(());
        };
        if let Err(error) = served.save() {
            tracing::error!(%error, "that the VM's disks are this host's is not written");
        }
        Err(why)
    }

    /// Takes every image for a guest that is let run under this generation, at the latest until then: storage may hang.
    pub(crate) fn take(&self, generation: Generation, deadline: Instant) -> Result<(), String> {
        let served = &self.0;
        *lock(&served.held) = Some(generation);
        let disks = lock(&served.disks).clone();
        let mut taken = Vec::new();
        for (disk, spec) in disks.into_iter().zip(&served.what().disks) {
            let Some(disk) = disk else { continue };
            let status = disk.status().map_err(|error| told(spec, &error))?;
            if status.has_image && !served.must_be_claimed(spec, generation) {
                continue;
            }
            let (served, spec) = (Arc::clone(served), spec.clone());
            taken.push(begin("disk-take", move || {
                served.take_image((&spec, &disk), generation)
            })?);
        }
        for taken in taken {
            wait(&taken, deadline)?.map_err(|error| error.message)?;
        }
        Ok(())
    }

    /// Everything of them is here and durable: who holds the VM under this generation may use them.
    pub(crate) fn are_whole(&self, attempt: Generation) -> Result<(), ApiError> {
        let served = &self.0;
        let what = served.what();
        let Some(arrival) = &what.arriving else {
            return Ok(());
        };
        served.names_are_free()?;
        served.what_came_is_there(&what)?;
        served.put_layers()?;
        keep_names(&what.disks, Some(&arrival.migration)).map_err(internal)?;
        let mut parts = arrival.parts.values();
        parts.try_for_each(Parts::keep_names).map_err(internal)?;
        served.change(|what| {
            if let Some(arrival) = &mut what.arriving {
                arrival.whole = Some(attempt);
            }
        })
    }

    /// What fills those that come with the VM.
    pub(crate) fn filling(&self) -> Filling {
        Arc::clone(&*lock(&self.0.filling))
    }
}

impl Served {
    /// Before anybody counts on it: another file may have come while the disk did.
    fn names_are_free(&self) -> Result<(), ApiError> {
        let what = self.what();
        let along = what.disks.iter().filter(|disk| disk.goes_along());
        // Of a device what it holds tells.
        let mut files = along.filter(|disk| !is_device_path(&disk.path));
        let parts = what.arriving.as_ref().map(|arrival| &arrival.parts);
        files.try_for_each(|disk| {
            let path = Path::new(&disk.path);
            let has_parts = parts.is_some_and(|parts| parts.contains_key(&disk.name));
            let free = match has_parts {
                // Its description lies there already.
                true if path.symlink_metadata().is_err() => Ok(()),
                true => Err(is_taken(path)),
                false => must_be_free(path),
            };
            free.map_err(|why| self.refused(disk, &why))
        })
    }

    /// Nobody has taken away, exchanged or cut what was filled.
    fn what_came_is_there(&self, what: &ServedDisks) -> Result<(), ApiError> {
        let filling = Arc::clone(&*lock(&self.filling));
        // Of what comes in several files that is the disk's own image.
        let below = filling.iter().skip(usize::from(BELOW)).zip(&what.disks);
        let mut all = filling.iter().zip(&what.disks).chain(below);
        all.try_for_each(|(image, disk)| {
            let whole = image.get().map_or(Ok(()), Arriving::must_be_whole);
            whole.map_err(|why| self.refused(disk, &why))
        })?;
        self.parts_are_there().map_err(internal)
    }

    /// Changes what is known of those that arrive; a change that follows writes it.
    fn amend_arrival(&self, change: impl Fn(&mut Arrival)) {
        self.amend(|what| what.arriving.iter_mut().for_each(change));
    }

    /// What fills an image.
    pub(super) fn fills(
        &self,
        spec: &DiskSpec,
        image: &godwit_blockio::Image,
    ) -> Result<Option<Arriving>, ApiError> {
        let is_filled = spec.goes_along() && self.what().arriving.is_some();
        let arriving = is_filled.then(|| Arriving::of(image)).transpose();
        arriving.map_err(|error| self.refused(spec, &error))
    }
}

#[cfg(test)]
#[path = "moving_tests.rs"]
mod tests;
