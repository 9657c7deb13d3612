//! Gives up images that deleted snapshots have left, while the guest works with what lies over them.
//!
//! What is to be done is found in the descriptions alone ([`Images::unneeded`]), so that whoever comes after a kill begins it anew. Contents are copied
//! while nothing is held up, beside guests that come first ([`super::gentle`]); then the description is written, and the disk stands still until that
//! is durable. What it goes on with is open before.
//!
//! Owns one thread at a time for all disks of a QEMU, which keeps a disk's image locked for as long as it works on it: a thread that storage holds up may
//! outlive its QEMU, and nobody else has the disk before it has ended. Before anything else it settles what a process that died left half done
//! ([`super::settling`]). Refuses nothing: what fails, also for want of room, is told, and tried again
//! after a pause.

use super::gentle::{FEW, Few, Next, rest_after};
use super::layers::OwnedPlace;
use super::served::Served;
use super::standing::end_unless;
use super::{LOCK_WAIT, LOOK_EVERY, REST_WAIT, STAND_WAIT};
use crate::adoption::lock;
use crate::faults::reached;
use godwit_blockio::delta::{AT_ONCE_MAX, Delta, Merged, Target, merge as merge_images};
use godwit_snapshots::{Images, Tidying};
use godwit_types::vm::DiskSpec;
use godwit_vhost::{Disk, Standing};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A top that holds no more than so many bytes is copied down while its guest waits.
const LAST_BYTES: u64 = 4 << 20;
/// So often a top is frozen for what was written meanwhile; then its guest waits for what there is, or the image stays.
const FREEZES_MAX: u32 = 8;
/// No more than this is copied while a guest waits, bytes.
const LAST_BYTES_MAX: u64 = 64 << 20;
/// Pieces that are merged at once beside a guest that was faster.
const AT_ONCE: usize = 8;
/// So many times its guest may have been faster before it is merged without rests.
const FREEZES_GENTLY: u32 = FREEZES_MAX / 2;
/// When what did not come to its end is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Whether there is anything to be given up, and who is at it.
#[derive(Debug, Default)]
pub(super) struct Tidies {
    works: AtomicBool,
    /// For so many disks, or migrations, that move nothing is to be given up: their images stay as they are.
    paused: AtomicU32,
    /// Nothing was left when a thread looked last, or one looks that was not asked again since it began.
    is_done: AtomicBool,
    /// Nothing is left half done of snapshots ([`super::settling`]).
    is_settled: AtomicBool,
    /// When a thread began or ended last; nothing where it was asked for since.
    tried: Mutex<Option<Instant>>,
    /// Why it is not done yet.
    why: Mutex<String>,
    /// Nothing is begun, and what is under way ends, since this process is to become another program.
    rests: AtomicBool,
    /// A copy has failed: what was to become durable then may be read without being so.
    has_failed: AtomicBool,
}

impl Tidies {
    fn may_begin(&self) -> bool {
        let is_time = lock(&self.tried).is_none_or(|at| at.elapsed() >= AGAIN_AFTER);
        let may = is_time && self.why_not().is_none() && !self.is_done.load(Ordering::SeqCst);
        if !may || self.works.swap(true, Ordering::SeqCst) {
            return false;
        }
        // Who wants nothing begun says so, and looks then whether anybody works: one of both sees the other.
        if self.why_not().is_some() {
            self.works.store(false, Ordering::SeqCst);
            return false;
        }
        // Who asks for it from here on has it begin again.
        self.is_done.store(true, Ordering::SeqCst);
        *lock(&self.tried) = Some(Instant::now());
        true
    }

    /// Why nothing is given up just now, if that is so.
    pub(super) fn why_not(&self) -> Option<&'static str> {
        let is = |said: &AtomicBool| said.load(Ordering::SeqCst);
        match (is(&self.rests), self.is_paused()) {
            (true, _) => Some("the VM's process is being renewed"),
            (false, true) => Some("a disk of the VM moves"),
            (false, false) => None,
        }
    }

    fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst) > 0
    }

    /// Nothing is begun, and what is under way ends, until this is taken back by [`Self::go_on`].
    fn pause(&self) {
        self.paused.fetch_add(1, Ordering::SeqCst);
    }

    /// Takes back one [`Self::pause`]: what was left may be tried at once.
    fn go_on(&self) {
        self.is_due();
        self.paused.fetch_sub(1, Ordering::SeqCst);
    }

    /// Until this is dropped nothing is begun; what is under way has until then to end.
    pub(super) fn rest(&self, until: Instant) -> Resting<'_> {
        self.rests.store(true, Ordering::SeqCst);
        while self.works() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        Resting(self)
    }

    /// Returns whether it was asked for since it began: what came then may not have been looked at.
    fn end(&self, why: String) -> bool {
        if !why.is_empty() {
            self.is_done.store(false, Ordering::SeqCst);
        }
        *lock(&self.why) = why;
        let mut tried = lock(&self.tried);
        let was_asked = tried.is_none();
        *tried = (!was_asked).then(Instant::now);
        drop(tried);
        self.works.store(false, Ordering::SeqCst);
        was_asked
    }

    /// There may be something to be given up: whoever looks next begins at once.
    pub(super) fn is_due(&self) {
        self.is_done.store(false, Ordering::SeqCst);
        *lock(&self.tried) = None;
    }

    /// Whether nothing is left half done of snapshots.
    pub(super) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::SeqCst)
    }

    pub(super) fn set_settled(&self, is_so: bool) {
        self.is_settled.store(is_so, Ordering::SeqCst);
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

/// As long as one of these lives nothing is given up.
#[derive(Debug)]
pub(super) struct Paused(Arc<Served>);

impl Drop for Paused {
    fn drop(&mut self) {
        self.0.tidies.go_on();
    }
}

/// For as long as nothing is given up.
pub(super) struct Resting<'a>(&'a Tidies);

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.0.rests.store(false, Ordering::SeqCst);
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
        self.tidies.is_due();
        self.begin_tidying();
    }

    /// Has images stay as they are, for disks that move: waits for whoever is at it, and not for long.
    pub(super) fn hold_tidying(self: &Arc<Self>, limit: Duration) -> Result<Paused, String> {
        self.tidies.pause();
        let paused = Paused(Arc::clone(self));
        let until = Instant::now() + limit;
        while self.tidies.works() {
            if Instant::now() >= until {
                return Err("images of deleted snapshots are being merged just now, and the storage takes long for that: try again".to_owned());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(paused)
    }

    /// Begins to give up what nobody needs, unless a thread is at it, or nothing is left, or one has tried it just now.
    pub(super) fn begin_tidying(self: &Arc<Self>) {
        let has_none = self.tidies.is_settled() && lock(&self.layered).is_empty();
        if has_none || self.still_comes() || !self.tidies.may_begin() {
            return;
        }
        let served = Arc::clone(self);
        let work = move || {
            let why = served.tidy_all();
            // Of disks that left with their VM nothing is to be merged.
            let is_over = served.has_ended.load(Ordering::SeqCst);
            if !why.is_empty() && !is_over {
                tracing::warn!(why, "images of deleted snapshots are not merged yet");
            }
            if served.tidies.end(why) {
                served.begin_tidying();
            }
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
        if let Err(why) = self.settle_halves() {
            tracing::info!(
                why,
                "what a process that died may have left of snapshots is looked at later"
            );
            self.tidies.is_done.store(false, Ordering::SeqCst);
        }
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
        let goes_on = !has_ended && self.held().is_some();
        goes_on && !self.moves_by_logs(one) && self.tidies.why_not().is_none()
    }

    fn moves_by_logs(&self, one: &One<'_>) -> bool {
        lock(&self.by_logs).contains_key(&one.place.spec.name)
    }

    fn broken_off(&self, one: &One<'_>) -> Looked {
        let moves = self.moves_by_logs(one).then_some("it is being moved");
        let why = self.tidies.why_not().or(moves);
        Looked::Later(why.unwrap_or("its guest has ended"))
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
            return Ok(self.broken_off(&one));
        }
        let place = one.place.get();
        let mut found = place.load_of(one.own)?;
        if found
            .as_ref()
            .is_some_and(|images| !images.leaving.is_empty())
        {
            let _one = lock(&self.descriptions);
            if let Some(images) = place.load_of(one.own)? {
                place.confirm(one.own, &images)?;
                place.describe_where_wrong(&images);
                place.remove_what_leaves(&images)?;
            }
            found = place.load_of(one.own)?;
        }
        let Some(images) = found else {
            let noted = self.note_layered(spec, &disk, false);
            return noted.map(|()| Looked::Done).map_err(|error| error.message);
        };
        let bytes = |name: &str| place.bytes_of(&images, name).unwrap_or(u64::MAX);
        let Some(tidying) = images.unneeded(bytes) else {
            return Ok(match images.leaving.is_empty() {
                true => Looked::Done,
                false => Looked::Later(
                    "an image that is no part of it any more is not removed yet: its datastore may not be mounted; see the log of the VM process",
                ),
            });
        };
        match &tidying {
            Tidying::Drop { .. } => self.commit(&one, &tidying, None),
            Tidying::Up { image, above } => {
                let copy = (image.as_str(), above.as_str(), true);
                self.merge_and_commit(&one, (&images, &tidying), copy, *freezes)
            }
            Tidying::Down { image, above } => {
                let copy = (above.as_str(), image.as_str(), false);
                self.merge_and_commit(&one, (&images, &tidying), copy, *freezes)
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
        (from, into, lacking): (&str, &str, bool),
        freezes: u32,
    ) -> Result<Looked, String> {
        let from = one.place.get().open_unlocked(images, from)?;
        let mut target = self.target(one, images, into)?;
        let at_once = match freezes < FREEZES_GENTLY {
            true => FEW,
            false => AT_ONCE,
        };
        let into = (target.as_mut(), images.bytes);
        match self.merge(one, (&from, lacking), into, at_once)? {
            true => self.commit(one, tidying, target),
            false => Ok(self.broken_off(one)),
        }
    }

    /// The delta that is to get content; nothing where that is the disk's own image.
    fn target(&self, one: &One<'_>, images: &Images, name: &str) -> Result<Option<Delta>, String> {
        let place = one.place.get();
        if place.is_own(name)? {
            return Ok(None);
        }
        let target = place.open_unlocked(images, name)?;
        if self.tidies.has_failed.load(Ordering::SeqCst) {
            target.doubt();
        }
        Ok(Some(target))
    }

    /// Copies one image into another, durably: so many pieces at once, and a few with rests. Returns whether it came to its end.
    fn merge(
        &self,
        one: &One<'_>,
        (from, lacking): (&Delta, bool),
        (into, bytes): (Option<&mut Delta>, u64),
        at_once: usize,
    ) -> Result<bool, String> {
        let (mut began, mut few) = (Instant::now(), Few::default());
        let goes_on = |done: Merged| {
            let is_gentle = at_once == FEW && self.goes_on(one);
            let mut at_once = at_once;
            match is_gentle.then(|| few.next(done)) {
                None | Some(Next::Begins) => {}
                Some(Next::Waits) => at_once = 0,
                Some(Next::Rests(bytes)) => {
                    std::thread::sleep(rest_after(began.elapsed(), bytes));
                    began = Instant::now();
                }
            }
            self.goes_on(one).then_some(at_once)
        };
        let target = match into {
            Some(delta) => Target::Delta(delta),
            None => Target::Raw(one.own, bytes),
        };
        let merged = merge_images(from, target, lacking, goes_on).map_err(|error| {
            self.tidies.has_failed.store(true, Ordering::SeqCst);
            error.to_string()
        })?;
        reached("snapshot.merged");
        Ok(merged.is_some())
    }

    /// Writes down what is left once that is done, and has the disk go on with it. `merged`: the delta that has more content now.
    fn commit(
        &self,
        one: &One<'_>,
        tidying: &Tidying,
        merged: Option<Delta>,
    ) -> Result<Looked, String> {
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
                let place = its.get();
                let mut deltas = place.keep_lower(&images, had, merged, LOCK_WAIT)?;
                deltas.extend(top);
                place.over_its_parent(&images, deltas, LOCK_WAIT)
            });
            end_unless(changed, &one.place.spec, standing);
        }
        clean_up_after(&one.place, &now);
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
        let mut below = self.target(one, &images, image)?;
        // Beside the guest first, so that little is left to be made durable while it waits.
        let told = |error: godwit_vhost::Error| error.to_string();
        one.disk.settle(REST_WAIT).map_err(told)?;
        let standing = self.hold_still(one)?;
        standing.settle(STAND_WAIT).map_err(told)?;
        let top = one.place.get().open_unlocked(&images, &images.top)?;
        let into = (below.as_mut(), images.bytes);
        if !self.merge(one, (&top, false), into, AT_ONCE_MAX)? {
            return Ok(self.broken_off(one));
        }
        drop(top);
        if let Some(below) = &mut below {
            below.thaw().map_err(|error| error.to_string())?;
        }
        let standing = save_or_back(one, (&images, &now), standing)?;
        reached("snapshot.tidied");
        let (its, after) = (one.place.clone(), now.clone());
        let changed = standing.change_layers(move |had| match below {
            None => Ok(Vec::new()),
            Some(below) => its.get().keep_under(&after, had, below, LOCK_WAIT),
        });
        end_unless(changed, &one.place.spec, standing);
        clean_up_after(&one.place, &now);
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
        let frozen = self.freeze_alone(&one.place.spec);
        frozen.map_err(|error| error.message)?;
        Ok(Looked::Further)
    }

    /// The description, and what it becomes, if that is still to be done.
    fn still(&self, one: &One<'_>, tidying: &Tidying) -> Result<Option<(Images, Images)>, String> {
        let place = one.place.get();
        let Some(images) = place.load_of(one.own)? else {
            return Ok(None);
        };
        let bytes = |name: &str| place.bytes_of(&images, name).unwrap_or(u64::MAX);
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

/// Has what stays say over what it lies, for others who read it, and removes what leaves: in this order, so that whoever dies in between leaves somebody
/// who does it again.
fn clean_up_after(place: &OwnedPlace, now: &Images) {
    let place = place.get();
    place.describe_where_wrong(now);
    reached("snapshot.described");
    if let Err(why) = place.remove_what_leaves(now) {
        tracing::info!(why, "an image that nobody needs is not removed yet");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_begun_while_the_process_is_about_to_become_another_program() {
        let tidies = Tidies::default();
        let rests = tidies.rest(Instant::now());
        assert!(!tidies.may_begin());
        drop(rests);
        assert!(tidies.may_begin() && tidies.works());
        // Who is at it has no more time than that; what is left is tried again after a pause, and why is told.
        drop(tidies.rest(Instant::now()));
        tidies.end("there is no room".to_owned());
        assert_eq!(tidies.why(), "there is no room");
        assert!(!tidies.works() && !tidies.may_begin());
        *lock(&tidies.tried) = None;
        assert!(tidies.may_begin());
        tidies.end(String::new());
        *lock(&tidies.tried) = None;
        assert!(!tidies.may_begin(), "nothing was left");
    }

    #[test]
    fn what_is_asked_for_while_a_thread_is_at_it_is_not_forgotten_when_that_ends() {
        for why in ["", "there is no room"] {
            let tidies = Tidies::default();
            assert!(tidies.may_begin());
            tidies.is_due();
            assert!(!tidies.may_begin(), "one is at it");
            assert!(tidies.end(why.to_owned()), "{why}");
            assert!(tidies.may_begin() && !tidies.end(String::new()));
            assert!(!tidies.may_begin(), "nothing was left");
        }
    }

    #[test]
    fn it_is_paused_until_the_last_of_those_who_move_has_ended() {
        let tidies = Tidies::default();
        tidies.pause();
        tidies.pause();
        tidies.go_on();
        assert!(!tidies.may_begin() && !tidies.works());
        assert_eq!(tidies.why_not(), Some("a disk of the VM moves"));
        tidies.go_on();
        assert!(tidies.why_not().is_none() && tidies.may_begin());
    }
}
