//! What a host writes down of the disk that only it has: in the state directory, and in the run directory while a hypervisor lives; and what
//! whoever finds it makes of moves on its host.
//!
//! Works on the site. What is removed, and which of the two counts, is judged by `godwit-ownership`, as in the product. Either may be from
//! before the last step, and the state directory from long before.

use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::model::{MachineId, VmId};
use super::own_files::{Copying, Left, Notes, OwnDisk, Store};
use super::world::Site;
use godwit_ownership::{CopyEnd, Described, FormerEnd, FormerImage, Is, is_overtaken};

/// Of a thousand times.
pub(super) const NOTE_FAILS: u64 = 20;
const NOTE_UNKNOWN: u64 = 20;

impl Site {
    pub(crate) fn own(&mut self, at: MachineId, vm: VmId) -> &mut OwnDisk {
        &mut self.machines[at].slots[vm].own
    }

    /// Changes what is written down; false when that failed. Then what was there counts, or nobody knows.
    pub(crate) fn note_down(
        &mut self,
        at: MachineId,
        vm: VmId,
        change: impl FnOnce(&mut Notes),
    ) -> bool {
        let changed = self.changed(at, vm, change);
        let is_written = self.write_state(at, vm, &changed);
        if is_written {
            self.write_living(at, vm, changed);
        }
        is_written
    }

    /// What is noted, with this change.
    pub(crate) fn changed(
        &mut self,
        at: MachineId,
        vm: VmId,
        change: impl FnOnce(&mut Notes),
    ) -> Notes {
        let own = self.own(at, vm);
        let mut changed = own.notes.clone();
        // Known since it got its name, and written with what is written next.
        if let Some(arrival) = changed.arriving.as_mut().filter(|_| own.is_here) {
            arrival.ours = true;
        }
        change(&mut changed);
        changed
    }

    /// The first of the two writes.
    pub(crate) fn write_state(&mut self, at: MachineId, vm: VmId, what: &Notes) -> bool {
        if self.strikes(SiteFault::WriteFails, NOTE_FAILS) {
            self.own(at, vm).must_save = true;
            return false;
        }
        let is_unknown = self.strikes(SiteFault::WriteUnknown, NOTE_UNKNOWN);
        if is_unknown {
            self.own(at, vm).must_save = true;
            if self.rng.chance(500) {
                return false;
            }
        }
        let own = self.own(at, vm);
        let before = std::mem::replace(&mut own.kept, what.clone());
        own.unsure = is_unknown.then_some(before);
        !is_unknown
    }

    /// The second one, after which the change is made.
    pub(crate) fn write_living(&mut self, at: MachineId, vm: VmId, what: Notes) {
        let lives = self.machines[at].slots[vm].qemu.is_some();
        let own = self.own(at, vm);
        // It may be about to begin.
        own.living = (lives || own.living.is_some()).then(|| what.clone());
        own.notes = what;
        own.must_save = false;
    }

    /// Writes down again what is known, where what is written may be something else.
    pub(crate) fn make_certain(&mut self, at: MachineId, vm: VmId) -> bool {
        match self.own(at, vm).must_save {
            true => self.note_down(at, vm, |_| ()),
            false => self.sync_notes(at, vm),
        }
    }

    /// What was read is durable from here on, whoever wrote it.
    fn sync_notes(&mut self, at: MachineId, vm: VmId) -> bool {
        let is_synced = !self.strikes(SiteFault::WriteFails, NOTE_FAILS);
        if is_synced {
            self.own(at, vm).unsure = None;
        }
        is_synced
    }

    /// The description says from now on that the disk is here; false where that could not be written.
    pub(crate) fn describe(&mut self, at: MachineId, vm: VmId, place: Store) -> bool {
        let is_written = !self.strikes(SiteFault::WriteFails, NOTE_FAILS);
        if is_written {
            let own = self.own(at, vm);
            own.described = place;
            own.spec = place;
        }
        is_written
    }

    /// The hypervisor is gone, and with it what its VM process had in memory: the state directory counts alone.
    pub(crate) fn is_read(&mut self, at: MachineId, vm: VmId) {
        self.end_disk_move(at, vm);
        let own = self.own(at, vm);
        own.notes.clone_from(&own.kept);
        own.living = None;
        own.must_save = false;
        own.due = None;
        own.is_here = false;
    }

    /// A hypervisor begins; returns its number, which is written down of it.
    pub(crate) fn next_launch(&mut self, at: MachineId, vm: VmId) -> u64 {
        let own = self.own(at, vm);
        own.launch += 1;
        own.launch
    }

    /// A new VM process finds a hypervisor that lives.
    pub(crate) fn look_at_living(&mut self, at: MachineId, vm: VmId) {
        let own = self.own(at, vm);
        own.going = None;
        own.spec = own.described;
        // A version that writes the state directory alone does not take part.
        let counts = |own: &OwnDisk| {
            let living = own.living.as_ref()?;
            let is_of_it = own.kept.launch == living.launch;
            let known = |notes: &Notes| Vec::from_iter(notes.known.clone());
            let overtaken = is_of_it && is_overtaken(&known(living), &known(&own.kept));
            (!overtaken).then(|| living.clone())
        };
        let Some(living) = counts(own) else {
            own.notes.clone_from(&own.kept);
            own.must_save = false;
            return;
        };
        own.notes = living.clone();
        own.must_save = own.kept != living;
        if own.must_save {
            self.put_back_living(at, vm);
        }
        self.follow_disk(at, vm);
    }

    /// The state directory says something else than was written last: what is known counts, and the description follows.
    pub(crate) fn put_back_living(&mut self, at: MachineId, vm: VmId) {
        self.disk_case(DiskCase::OlderStateOverruled);
        let own = self.own(at, vm);
        let place = own.notes.place;
        let is_moved = own.kept.place != place && own.described != place;
        if !is_moved || self.describe(at, vm, place) {
            self.note_down(at, vm, |_| ());
        }
    }

    /// The description follows the disk if it says that it is where it was before; false where that could not be written.
    pub(crate) fn follow_disk(&mut self, at: MachineId, vm: VmId) -> bool {
        let own = self.own(at, vm);
        let left = own.notes.left.iter();
        let mut left = left.filter(|left| left.of_disk && left.place == own.spec);
        if left.next().is_some() {
            let place = own.notes.place;
            if !self.describe(at, vm, place) {
                return false;
            }
            self.disk_case(DiskCase::Followed);
        }
        let own = self.own(at, vm);
        own.notes.left.iter().all(|left| left.followed)
            || self.note_down(at, vm, |notes| {
                notes.left.iter_mut().for_each(|left| left.followed = true);
            })
    }

    /// Without a hypervisor: what moves of the disk left is settled, before anything is started. False where nothing is to be.
    pub(crate) fn settle_moves(&mut self, at: MachineId, vm: VmId, is_here: bool) -> bool {
        if is_here && !self.follow_disk(at, vm) {
            return false;
        }
        let own = self.own(at, vm);
        let mut what = own.notes.clone();
        if what.copying.is_none() && what.left.is_empty() {
            return true;
        }
        let described = is_here.then_some(own.spec);
        if !self.sync_notes(at, vm) {
            return false;
        }
        what.left.retain(|left| described != Some(left.place));
        let is_settled = self.settle_copying((at, vm), &mut what, described);
        self.remove_left((at, vm), &mut what);
        self.note_down(at, vm, |notes| *notes = what) && is_settled
    }

    fn settle_copying(
        &mut self,
        (at, vm): (MachineId, VmId),
        what: &mut Notes,
        described: Option<Store>,
    ) -> bool {
        let Some(copying) = what.copying.take() else {
            return true;
        };
        if self.plant.takes_half_made() && described.is_some() {
            self.take_half_made(at, vm, &copying);
            return true;
        }
        let described = match described {
            Some(place) if place == copying.to => Described::AsDisk,
            Some(_) => Described::Otherwise,
            None => Described::Nowhere,
        };
        let files = &self.own(at, vm).files;
        let disk = files.images[what.place].as_ref();
        let copy = files.images[copying.to].as_ref();
        let noted = (what.image.unwrap_or_default(), what.known.as_ref());
        let has_its_image = || disk.is_some_and(|disk| disk.is_there(what.place, noted));
        let was_taken = || copy.is_some_and(|copy| copy.was_taken_since(&copying));
        match CopyEnd::judge(described, has_its_image, was_taken) {
            CopyEnd::Refused => {
                self.disk_case(DiskCase::MovedSinceRefused);
                what.copying = Some(copying);
                return false;
            }
            CopyEnd::Forgotten => {
                self.disk_case(DiskCase::CopyForgotten);
                let named = self.own(at, vm).files.images[copying.to].as_mut();
                if let Some(file) = named.filter(|file| Some(file.id) == copying.image) {
                    file.is_told = true;
                }
                if self.cannot_remove(at, vm) {
                    self.own(at, vm).has_stray = true;
                } else {
                    self.own(at, vm).files.second.remove(&copying.number);
                }
            }
            CopyEnd::Removed => {
                if !self.remove_second((at, vm), &copying, what.place) {
                    what.copying = Some(copying);
                }
            }
        }
        true
    }

    /// A planted fault: what a disk was being copied to is its disk.
    fn take_half_made(&mut self, at: MachineId, vm: VmId, copying: &Copying) {
        let own = self.own(at, vm);
        if let Some(file) = own.files.second.remove(&copying.number) {
            own.files.images[copying.to] = Some(file);
        }
        own.spec = copying.to;
        own.described = copying.to;
    }

    /// Removes what a disk was copied to, under either name. Returns whether nothing of it is left.
    pub(crate) fn remove_second(
        &mut self,
        (at, vm): (MachineId, VmId),
        copying: &Copying,
        disk: Store,
    ) -> bool {
        let files = &self.own(at, vm).files;
        let is_beside = files.second.contains_key(&copying.number);
        let noted = copying.image.map(|image| (image, copying.known.as_ref()));
        let named = files.images[copying.to].as_ref().zip(noted);
        // What has the name by now may be a disk.
        let named = named.filter(|_| disk != copying.to);
        let named = named.map(|(file, noted)| file.is(copying.to, noted));
        if is_beside {
            if self.cannot_remove(at, vm) {
                return false;
            }
            self.own(at, vm).files.second.remove(&copying.number);
        }
        let is_gone = match named {
            Some(Is::It) => self.remove_image(at, vm, copying.to),
            Some(Is::Another) | None => true,
            Some(Is::Unknown) => false,
        };
        if is_gone {
            self.disk_case(DiskCase::CopyRemoved);
        }
        is_gone
    }

    /// Whether there is half an image at a host that is whole, and nothing there tells of it.
    pub(crate) fn keeps_half_made(&self, at: MachineId, vm: VmId) -> bool {
        let machine = &self.machines[at];
        let own = &machine.slots[vm].own;
        if machine.is_old || own.has_stray || own.going.is_some() {
            return false;
        }
        let noted = own.notes.copying.as_ref();
        let number = noted.map(|copying| copying.number);
        let image = noted.and_then(|copying| copying.image);
        let mut second = own.files.second.keys();
        let mut named = own.files.images.iter().flatten();
        second.any(|second| Some(*second) != number)
            || named.any(|file| file.never_disk && !file.is_told && Some(file.id) != image)
    }

    /// Removes former images that nothing needs any more; those that could not be removed stay noted.
    pub(crate) fn remove_left(&mut self, (at, vm): (MachineId, VmId), what: &mut Notes) {
        let left = std::mem::take(&mut what.left);
        let noted = (what.image.unwrap_or_default(), what.known.as_ref());
        let disk = self.own(at, vm).files.images[what.place].as_ref();
        let is_there = disk.is_some_and(|disk| disk.is_there(what.place, noted));
        for left in left {
            let former = FormerImage {
                followed: left.followed,
                is_disk: left.place == what.place,
                is_guarded: false,
            };
            let disk_is_there = || !left.of_disk || is_there;
            let stays = match former.judge(disk_is_there) {
                FormerEnd::Stays => true,
                FormerEnd::Forgotten => false,
                FormerEnd::Removed => !self.remove_former(at, vm, &left),
            };
            if stays {
                what.left.push(left);
            }
        }
    }

    fn remove_former(&mut self, at: MachineId, vm: VmId, left: &Left) -> bool {
        let file = self.own(at, vm).files.images[left.place].as_ref();
        let is = file.map(|file| file.is(left.place, (left.image, left.known.as_ref())));
        match is {
            Some(Is::It) => {
                let is_gone = self.remove_image(at, vm, left.place);
                if is_gone {
                    self.disk_case(DiskCase::LeftRemoved);
                }
                is_gone
            }
            Some(Is::Another) => {
                self.disk_case(DiskCase::LeftIsAnother);
                true
            }
            Some(Is::Unknown) => false,
            None => true,
        }
    }

    /// Removes the file with the disk's name in this place, unless that fails. It must not be the one that a record names.
    pub(crate) fn remove_image(&mut self, at: MachineId, vm: VmId, place: Store) -> bool {
        if self.cannot_remove(at, vm) {
            return false;
        }
        let had = self.is_anywhere(vm);
        let own = self.own(at, vm);
        let file = own.files.images[place].take();
        let names =
            |notes: &Notes| notes.place == place && notes.image == file.as_ref().map(|f| f.id);
        let is_named = names(&own.kept) || own.unsure.as_ref().is_some_and(names);
        let is_held = self.machines[at].slots[vm].process.as_ref();
        let is_held = is_held.is_some_and(|process| process.core.record().may_run().is_some());
        if is_named && is_held && !self.machines[at].is_old {
            let (host, name) = (self.label(at), &self.vms[vm]);
            self.violated(format!(
                "{host} removes an image of {name} that its record may name as the disk"
            ));
        }
        self.must_be_anywhere(vm, had, at);
        true
    }

    /// The VM is not here any more: nothing is known of its disk but what could not be removed.
    pub(crate) fn forget(&mut self, at: MachineId, vm: VmId) {
        self.settle_moves(at, vm, false);
        let own = self.own(at, vm);
        let mut notes = Notes::default();
        own.has_stray |= own.is_deleted && own.notes.copying.is_some();
        if !own.is_deleted && (own.notes.copying.is_some() || !own.notes.left.is_empty()) {
            notes = Notes {
                arriving: None,
                leaving: None,
                along: Vec::new(),
                ..own.notes.clone()
            };
            for left in notes.left.iter_mut().filter(|left| left.followed) {
                left.of_disk = false;
            }
        }
        own.kept = notes.clone();
        own.notes = notes;
        own.unsure = None;
        if std::mem::take(&mut own.is_deleted) {
            own.went_on.clear();
            own.note = None;
        }
    }

    /// An agent begins: VM processes that live write again what they have, where the state directory was put back.
    pub(crate) fn keep_again(&mut self, at: MachineId) {
        for vm in 0..self.vms.len() {
            let slot = &self.machines[at].slots[vm];
            let serves = slot.process.is_some() && slot.qemu.is_some();
            if !serves || !self.goes_along(vm) {
                continue;
            }
            let own = self.own(at, vm);
            own.described = own.spec;
            if own.kept != own.notes {
                self.put_back_living(at, vm);
            }
        }
    }

    /// Power off: what was not durable may or may not be.
    pub(crate) fn disk_loses_power(&mut self, at: MachineId, vm: VmId) {
        if !self.goes_along(vm) {
            return;
        }
        let (reached_disk, loses_name) = (self.rng.chance(300), self.rng.chance(500));
        let takes_back = self.rng.chance(500);
        let own = self.own(at, vm);
        own.due = None;
        own.is_here = false;
        own.going = None;
        own.living = None;
        if let Some(before) = own.unsure.take().filter(|_| takes_back) {
            own.kept = before;
        }
        own.notes = own.kept.clone();
        let mut has_lost = false;
        let files = &mut own.files;
        let named = files.images.iter_mut().flatten();
        let beside = files.beside.values_mut().chain(files.second.values_mut());
        for file in named.chain(beside) {
            if reached_disk {
                file.durable = file.content;
                file.durable_record.clone_from(&file.record);
            } else {
                has_lost |= file.content != file.durable;
                file.content = file.durable;
                file.record.clone_from(&file.durable_record);
            }
        }
        let mut is_undone = false;
        for place in &mut files.images {
            let loses = loses_name && !reached_disk;
            let came_with = place.as_mut().and_then(|file| file.came_with.take());
            let filled_as = place.as_mut().and_then(|file| file.filled_as.take());
            if let Some(migration) = came_with.filter(|_| loses) {
                files
                    .beside
                    .extend(place.take().map(|file| (migration, file)));
                is_undone = true;
            } else if let Some(number) = filled_as.filter(|_| loses) {
                files.second.extend(place.take().map(|file| (number, file)));
            }
        }
        if has_lost {
            self.disk_case(DiskCase::LostUnflushed);
        }
        if is_undone {
            self.disk_case(DiskCase::NameLost);
        }
    }
}
