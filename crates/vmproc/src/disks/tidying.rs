//! Gives up images that deleted snapshots have left, while the guest works with what lies over them.
//!
//! What is to be done is found in the descriptions alone ([`Images::unneeded`]), so that whoever comes after a kill begins it anew. Contents are copied
//! while nothing is held up; then the description is written, and the disk stands still for as long as it takes to open other files.
//!
//! Owns one thread at a time for all disks of a QEMU, which keeps a disk's image locked for as long as it works on it: a thread that storage holds up may
//! outlive its QEMU, and nobody else has the disk before it has ended. Refuses nothing: what fails is told, and tried again after a pause.

use super::LOCK_WAIT;
use super::layers::OwnedPlace;
use super::served::Served;
use super::snapshots::All;
use super::standing::end_unless;
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::{Merged, Target, merge as merge_images};
use godwit_snapshots::{Images, Tidying};
use godwit_types::vm::DiskSpec;
use godwit_vhost::{Disk, Standing};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A top that holds no more than so many bytes is copied down while its guest waits.
const LAST_BYTES: u64 = 4 << 20;
/// So often a top is frozen for what was written meanwhile; then its guest waits for what there is, or the image stays.
const FREEZES_MAX: u32 = 8;
/// No more than this is copied while a guest waits, bytes.
const LAST_BYTES_MAX: u64 = 64 << 20;
/// How long a disk may take until nothing of it is under way.
const STAND_WAIT: Duration = Duration::from_millis(500);
/// Why nothing of a disk is given up that does not go on.
const NOT_NOW: &str = "its guest has ended, or it is being moved";
/// When what did not come to its end is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Whether there is anything to be given up, and who is at it.
#[derive(Debug, Default)]
pub(super) struct Tidies {
    works: AtomicBool,
    /// Nothing was left when a thread looked last.
    is_done: AtomicBool,
    tried: Mutex<Option<Instant>>,
    /// Why it is not done yet.
    why: Mutex<String>,
}

impl Tidies {
    fn may_begin(&self) -> bool {
        let is_time = lock(&self.tried).is_none_or(|at| at.elapsed() >= AGAIN_AFTER);
        is_time && !self.is_done.load(Ordering::SeqCst) && !self.works.swap(true, Ordering::SeqCst)
    }

    fn end(&self, why: String) {
        self.is_done.store(why.is_empty(), Ordering::SeqCst);
        *lock(&self.why) = why;
        *lock(&self.tried) = Some(Instant::now());
        self.works.store(false, Ordering::SeqCst);
    }

    /// Whether its thread may be in the hands of storage.
    pub(super) fn works(&self) -> bool {
        self.works.load(Ordering::SeqCst)
    }

    /// Why images that nobody needs are there still, as far as that is known.
    pub(super) fn why(&self) -> String {
        lock(&self.why).clone()
    }
}

/// What came of one look.
enum Looked {
    /// One image less, or nearer to that.
    Further,
    /// There is nothing to be done.
    Done,
    /// There is no use in it now.
    Later(&'static str),
}

/// A disk of which images are given up, its image locked.
struct One<'a> {
    index: usize,
    place: OwnedPlace,
    disk: &'a Arc<Disk>,
    own: BorrowedFd<'a>,
}

impl Served {
    /// There is something that nobody needs any more.
    pub(super) fn tidying_is_due(self: &Arc<Self>) {
        self.tidies.is_done.store(false, Ordering::SeqCst);
        *lock(&self.tidies.tried) = None;
        self.begin_tidying();
    }

    /// Begins to give up what nobody needs, unless a thread is at it, or nothing is left, or one has tried it just now.
    pub(super) fn begin_tidying(self: &Arc<Self>) {
        if lock(&self.layered).is_empty() || !self.tidies.may_begin() {
            return;
        }
        let served = Arc::clone(self);
        let work = move || {
            let why = served.tidy_all();
            if !why.is_empty() {
                tracing::warn!(why, "images of deleted snapshots are not merged yet");
            }
            served.tidies.end(why);
        };
        let thread = std::thread::Builder::new().name("tidy-disks".into());
        if let Err(error) = thread.spawn(work) {
            self.tidies.end(error.to_string());
        }
    }

    /// Returns why something is left.
    fn tidy_all(&self) -> String {
        let what = self.what();
        let mut left = Vec::new();
        for (index, spec) in what.disks.iter().enumerate() {
            if !lock(&self.layered).contains(&spec.name) {
                continue;
            }
            let mut freezes = 0;
            let why = loop {
                match self.tidy(index, spec, &mut freezes) {
                    Ok(Looked::Further) => {}
                    Ok(Looked::Done) => break None,
                    Ok(Looked::Later(why)) => break Some(why.to_owned()),
                    Err(why) => break Some(why),
                }
            };
            left.extend(why.map(|why| format!("disk '{}': {why}", spec.name)));
        }
        left.join("; ")
    }

    /// A disk that moves by redo logs needs them as they are.
    fn goes_on(&self, one: &One<'_>) -> bool {
        let has_ended = self.has_ended.load(Ordering::SeqCst) || one.disk.has_ended();
        let moves = lock(&self.by_logs).contains_key(&one.place.spec.name);
        !has_ended && !moves && self.held().is_some()
    }

    fn tidy(&self, index: usize, spec: &DiskSpec, freezes: &mut u32) -> Result<Looked, String> {
        let disk = self.disk(index)?;
        let own = disk.lend_image().map_err(|error| error.to_string())?;
        let one = One {
            index,
            place: self.all().place(spec).owned(),
            disk: &disk,
            own: own.as_fd(),
        };
        if !self.goes_on(&one) {
            return Ok(Looked::Later(NOT_NOW));
        }
        let place = one.place.get();
        let Some(images) = place.load_of(one.own)? else {
            lock(&self.layered).remove(&spec.name);
            return Ok(Looked::Done);
        };
        let bytes = |name: &str| place.bytes_of(&images, name);
        if !images.leaving.is_empty() {
            let _one = lock(&self.descriptions);
            if let Some(images) = place.load_of(one.own)? {
                place.remove_what_leaves(&images)?;
            }
        }
        let Some(tidying) = images.unneeded(bytes) else {
            return Ok(Looked::Done);
        };
        match &tidying {
            Tidying::Drop { .. } => self.commit(&one, &tidying),
            Tidying::Up { image, above } => {
                self.merge_and_commit(&one, (&images, &tidying), (image, above, true))
            }
            Tidying::Down { image, above } => {
                self.merge_and_commit(&one, (&images, &tidying), (above, image, false))
            }
            Tidying::DownTop { image } => {
                let top = bytes(&images.top);
                match (top <= LAST_BYTES, *freezes < FREEZES_MAX) {
                    (true, _) => self.come_down(&one, &tidying, image),
                    (false, true) => {
                        *freezes += 1;
                        self.freeze_one(&one)
                    }
                    (false, false) if top <= LAST_BYTES_MAX => {
                        self.come_down(&one, &tidying, image)
                    }
                    (false, false) => Ok(Looked::Later(
                        "its guest writes faster than what it has written is merged",
                    )),
                }
            }
        }
    }

    fn merge_and_commit(
        &self,
        one: &One<'_>,
        (images, tidying): (&Images, &Tidying),
        pair: (&str, &str, bool),
    ) -> Result<Looked, String> {
        match self.merge(one, images, pair)? {
            true => self.commit(one, tidying),
            false => Ok(Looked::Later(NOT_NOW)),
        }
    }

    /// Copies one image into another, durably. Returns whether it came to its end.
    fn merge(
        &self,
        one: &One<'_>,
        images: &Images,
        (from, into, lacking): (&str, &str, bool),
    ) -> Result<bool, String> {
        let place = one.place.get();
        let from = place.open_unlocked(images, from)?;
        let goes_on = |_: Merged| self.goes_on(one);
        let told = |error: godwit_blockio::Error| error.to_string();
        let merged = match place.is_own(into)? {
            true => {
                let target = Target::Raw(one.own, images.bytes);
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
    fn commit(&self, one: &One<'_>, tidying: &Tidying) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let Some((images, now)) = self.still(one, tidying)? else {
            return Ok(Looked::Further);
        };
        let place = one.place.get();
        if images.chain(&images.top) == now.chain(&now.top) {
            place.save(&now)?;
        } else {
            let Some(_alone) = self.serve_alone(one.index) else {
                return Ok(Looked::Later("it is being served anew"));
            };
            let standing = self.hold_still(one)?;
            let standing = save_or_back(one, (&images, &now), standing)?;
            reached("snapshot.tidied");
            let (its, images) = (one.place.clone(), now.clone());
            let changed = standing.change_layers(move |mut had| {
                let top = had.pop();
                // Their locks are this disk's own.
                drop(had);
                let mut deltas = its.get().open_lower(&images, LOCK_WAIT, false)?;
                deltas.extend(top);
                Ok(deltas)
            });
            end_unless(changed, &one.place.spec, standing);
        }
        clean_up_after(&one.place, &images, &now);
        Ok(Looked::Further)
    }

    /// Brings the top into the image below while the guest waits, which goes on with that one.
    fn come_down(&self, one: &One<'_>, tidying: &Tidying, image: &str) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let Some((images, now)) = self.still(one, tidying)? else {
            return Ok(Looked::Further);
        };
        let Some(_alone) = self.serve_alone(one.index) else {
            return Ok(Looked::Later("it is being served anew"));
        };
        let place = one.place.get();
        let standing = self.hold_still(one)?;
        standing.settle().map_err(|error| error.to_string())?;
        if !self.merge(one, &images, (&images.top, image, false))? {
            return Ok(Looked::Later(NOT_NOW));
        }
        if !place.is_own(image)? {
            let mut below = place.open_unlocked(&images, image)?;
            below.thaw().map_err(|error| error.to_string())?;
        }
        let standing = save_or_back(one, (&images, &now), standing)?;
        reached("snapshot.tidied");
        let (its, after) = (one.place.clone(), now.clone());
        let changed = standing.change_layers(move |had| {
            // Their locks are this disk's own.
            drop(had);
            its.get().open(&after, LOCK_WAIT, true)
        });
        end_unless(changed, &one.place.spec, standing);
        clean_up_after(&one.place, &images, &now);
        Ok(Looked::Further)
    }

    /// Nothing of the disk is under way, and it is still the one that is served.
    fn hold_still<'a>(&self, one: &One<'a>) -> Result<Standing<'a>, String> {
        let standing = one
            .disk
            .stand_still(STAND_WAIT)
            .map_err(|error| error.to_string())?;
        self.must_be_the_disk(&one.place.spec, one.disk)?;
        Ok(standing)
    }

    /// Freezes a top of which nothing is to be kept, so that it can be copied while its guest writes to another one.
    fn freeze_one(&self, one: &One<'_>) -> Result<Looked, String> {
        let _one = lock(&self.descriptions);
        let all = All {
            specs: vec![one.place.spec.clone()],
            ..self.all()
        };
        let changed = all.prepare(Images::freeze, |_| None);
        let changed = changed.map_err(|error| error.message)?;
        self.freeze(&all, &changed).map_err(|error| error.message)?;
        Ok(Looked::Further)
    }

    /// The description, and what it becomes, if that is still to be done.
    fn still(&self, one: &One<'_>, tidying: &Tidying) -> Result<Option<(Images, Images)>, String> {
        let place = one.place.get();
        let Some(images) = place.load_of(one.own)? else {
            return Ok(None);
        };
        let bytes = |name: &str| place.bytes_of(&images, name);
        if images.unneeded(bytes).as_ref() != Some(tidying) || !self.goes_on(one) {
            return Ok(None);
        }
        let now = images.tidied(tidying);
        Ok(Some((images, now)))
    }
}

/// Where it cannot be written nobody knows which of the two is there: the former is, or the disk is served anew with what is found.
fn save_or_back<'a>(
    one: &One<'_>,
    (before, now): (&Images, &Images),
    standing: Standing<'a>,
) -> Result<Standing<'a>, String> {
    let Err(why) = one.place.get().save(now) else {
        return Ok(standing);
    };
    if one.place.get().save(before).is_err() {
        standing.end();
    }
    Err(why)
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
