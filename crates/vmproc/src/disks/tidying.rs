//! Gives up images that deleted snapshots have left, while the guest works with what lies over them.
//!
//! What is to be done is found in the descriptions alone ([`Images::unneeded`]), so that whoever comes after a kill begins it anew. Contents are copied
//! while nothing is held up; then the description is written, and the disk stands still for as long as it takes to open other files.
//!
//! Owns one thread at a time for all disks of a QEMU. Refuses nothing: what fails is told, and tried again with the next order or start.

use super::LOCK_WAIT;
use super::layers::OwnedPlace;
use super::served::Served;
use super::snapshots::{All, end_unless};
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::{Merged, Target, merge as merge_images};
use godwit_snapshots::{Images, Tidying};
use godwit_types::vm::DiskSpec;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A top that holds no more than so many bytes is copied down while its guest waits.
const LAST_BYTES: u64 = 4 << 20;
/// So often a top is frozen for what was written meanwhile; then its guest waits for what there is, or the image stays.
const FREEZES_MAX: u32 = 8;
/// No more than this is copied while a guest waits, bytes.
const LAST_BYTES_MAX: u64 = 64 << 20;
/// How long a disk may take until nothing of it is under way.
const STAND_WAIT: Duration = Duration::from_millis(500);

/// What came of one look.
enum Looked {
    /// One image less, or nearer to that.
    Further,
    /// There is nothing to be done, or no use in it now.
    Over,
}

impl Served {
    /// Begins to give up what nobody needs, unless a thread does already.
    pub(super) fn begin_tidying(self: &Arc<Self>) {
        if lock(&self.layered).is_empty() || self.tidies.swap(true, Ordering::SeqCst) {
            return;
        }
        let served = Arc::clone(self);
        let work = move || {
            served.tidy_all();
            served.tidies.store(false, Ordering::SeqCst);
        };
        let thread = std::thread::Builder::new().name("tidy-disks".into());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "images of deleted snapshots are not merged yet");
            self.tidies.store(false, Ordering::SeqCst);
        }
    }

    fn tidy_all(&self) {
        let what = self.what();
        for (index, spec) in what.disks.iter().enumerate() {
            if !lock(&self.layered).contains(&spec.name) {
                continue;
            }
            let mut freezes = 0;
            loop {
                match self.tidy(index, spec, &mut freezes) {
                    Ok(Looked::Further) => {}
                    Ok(Looked::Over) => break,
                    Err(why) => {
                        let disk = &spec.name;
                        tracing::warn!(disk, why, "images of deleted snapshots are not merged yet");
                        break;
                    }
                }
            }
        }
    }

    fn goes_on(&self) -> bool {
        !self.has_ended.load(Ordering::SeqCst) && self.held().is_some()
    }

    fn tidy(&self, index: usize, spec: &DiskSpec, freezes: &mut u32) -> Result<Looked, String> {
        if !self.goes_on() {
            return Ok(Looked::Over);
        }
        let all = self.all();
        let place = all.place(spec).owned();
        let Some(images) = place.get().load()? else {
            lock(&self.layered).remove(&spec.name);
            return Ok(Looked::Over);
        };
        let bytes = |name: &str| place.get().bytes_of(&images, name);
        if !images.leaving.is_empty() {
            let _one = lock(&self.descriptions);
            if let Some(images) = place.get().load()? {
                place.get().remove_what_leaves(&images)?;
            }
        }
        let Some(tidying) = images.unneeded(bytes) else {
            return Ok(Looked::Over);
        };
        match &tidying {
            Tidying::Drop { .. } => self.commit(index, &place, &tidying),
            Tidying::Up { image, above } => {
                match self.merge(index, &place, &images, (image, above, true))? {
                    true => self.commit(index, &place, &tidying),
                    false => Ok(Looked::Over),
                }
            }
            Tidying::Down { image, above } => {
                match self.merge(index, &place, &images, (above, image, false))? {
                    true => self.commit(index, &place, &tidying),
                    false => Ok(Looked::Over),
                }
            }
            Tidying::DownTop { image } => {
                let top = bytes(&images.top);
                match (top <= LAST_BYTES, *freezes < FREEZES_MAX) {
                    (true, _) => self.come_down(index, &place, &tidying, image),
                    (false, true) => {
                        *freezes += 1;
                        self.freeze_one(&place)
                    }
                    (false, false) if top <= LAST_BYTES_MAX => {
                        self.come_down(index, &place, &tidying, image)
                    }
                    // Its guest writes faster than that is copied: it is begun again later.
                    (false, false) => Ok(Looked::Over),
                }
            }
        }
    }

    /// Copies one image into another, durably. Returns whether it came to its end.
    fn merge(
        &self,
        index: usize,
        place: &OwnedPlace,
        images: &Images,
        (from, into, lacking): (&str, &str, bool),
    ) -> Result<bool, String> {
        let place = place.get();
        let from = place.open_unlocked(images, from)?;
        let goes_on = |_: Merged| self.goes_on();
        let told = |error: godwit_blockio::Error| error.to_string();
        let merged = match place.is_own(into)? {
            true => {
                let disk = self.disk(index)?;
                let image = disk.lend_image().map_err(|error| error.to_string())?;
                let target = Target::Raw(image.as_fd(), images.bytes);
                merge_images(&from, target, lacking, goes_on).map_err(told)?
            }
            false => {
                let mut into = place.open_unlocked(images, into)?;
                merge_images(&from, Target::Delta(&mut into), lacking, goes_on).map_err(told)?
            }
        };
        reached("snapshot.merged");
        Ok(merged.is_some())
    }

    /// Writes down what is left once that is done, and has the disk go on with it.
    fn commit(
        &self,
        index: usize,
        place: &OwnedPlace,
        tidying: &Tidying,
    ) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let Some((images, now)) = self.still(place, tidying)? else {
            return Ok(Looked::Further);
        };
        let (before, after) = (images.chain(&images.top), now.chain(&now.top));
        if before == after {
            place.get().save(&now)?;
        } else {
            let Some(_alone) = self.serve_alone(index) else {
                return Ok(Looked::Over);
            };
            let disk = self.disk(index)?;
            let standing = disk
                .stand_still(STAND_WAIT)
                .map_err(|error| error.to_string())?;
            place.get().save(&now)?;
            reached("snapshot.tidied");
            let (its, images) = (place.clone(), now.clone());
            let changed = standing.change_layers(move |mut had| {
                let top = had.pop();
                // Their locks are this disk's own.
                drop(had);
                let mut deltas = its.get().open_lower(&images, LOCK_WAIT, false)?;
                deltas.extend(top);
                Ok(deltas)
            });
            end_unless(changed, &place.spec, standing);
        }
        clean_up_after(place, &images, &now);
        Ok(Looked::Further)
    }

    /// Brings the top into the image below while the guest waits, which goes on with that one.
    fn come_down(
        &self,
        index: usize,
        place: &OwnedPlace,
        tidying: &Tidying,
        image: &str,
    ) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let Some((images, now)) = self.still(place, tidying)? else {
            return Ok(Looked::Further);
        };
        let Some(_alone) = self.serve_alone(index) else {
            return Ok(Looked::Over);
        };
        let disk = self.disk(index)?;
        let standing = disk
            .stand_still(STAND_WAIT)
            .map_err(|error| error.to_string())?;
        standing.settle().map_err(|error| error.to_string())?;
        if !self.merge(index, place, &images, (&images.top, image, false))? {
            return Ok(Looked::Over);
        }
        place.get().save(&now)?;
        reached("snapshot.tidied");
        let (its, after) = (place.clone(), now.clone());
        let changed = standing.change_layers(move |had| {
            // Their locks are this disk's own.
            drop(had);
            its.get().open(&after, LOCK_WAIT, true)
        });
        end_unless(changed, &place.spec, standing);
        clean_up_after(place, &images, &now);
        Ok(Looked::Further)
    }

    /// Freezes a top of which nothing is to be kept, so that it can be copied while its guest writes to another one.
    fn freeze_one(&self, place: &OwnedPlace) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let all = All {
            specs: vec![place.spec.clone()],
            ..self.all()
        };
        let changed = all.prepare(Images::freeze, |_| None);
        let changed = changed.map_err(|error| error.message)?;
        self.freeze(&all, &changed).map_err(|error| error.message)?;
        Ok(Looked::Further)
    }

    /// The description, and what it becomes, if that is still to be done.
    fn still(
        &self,
        place: &OwnedPlace,
        tidying: &Tidying,
    ) -> Result<Option<(Images, Images)>, String> {
        let Some(images) = place.get().load()? else {
            return Ok(None);
        };
        let bytes = |name: &str| place.get().bytes_of(&images, name);
        if images.unneeded(bytes).as_ref() != Some(tidying) || !self.goes_on() {
            return Ok(None);
        }
        let now = images.tidied(tidying);
        Ok(Some((images, now)))
    }
}

/// Removes what leaves, and has the rest say over what it lies, for others who read it.
fn clean_up_after(place: &OwnedPlace, before: &Images, now: &Images) {
    let place = place.get();
    if let Err(why) = place.remove_what_leaves(now) {
        tracing::info!(why, "an image that nobody needs is not removed yet");
    }
    for (name, image) in &before.images {
        let after = now.images.get(name);
        if after.is_some_and(|after| after.over != image.over)
            && let Err(why) = place.describe_anew(now, name)
        {
            tracing::info!(
                name,
                why,
                "an image names one below it that is gone: qemu-img does not find its way"
            );
        }
    }
}
