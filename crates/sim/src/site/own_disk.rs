//! Disks that only one host has: the files on each machine, what is written down of them, and the copy that goes along.
//!
//! An image for every fourth VM. As the product's shell does it: an image that comes has a name of its own, is whole once it is
//! durable, and gets its name under the generation for which it was whole; the source's goes once the record says that the VM has
//! moved. Works on the site. Who may open an image is judged by `godwit-ownership`; what an observer demands is in `copies.rs`.

use super::came::Aside;
use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::images::{Closed, DISK, READ_FAILS, WRITE_FAILS};
use super::model::{MachineId, VmId};
use super::own_files::{Arrival, Content, File, MoveNote, Notes};
use super::world::Site;
use godwit_ownership::{CameSource, ImageClaim, Is, Phase};
use godwit_types::image::ImageId;
use godwit_types::{Generation, HostName, MigrationId};

/// Of a thousand times.
const REMOVE_FAILS: u64 = 250;

impl Site {
    pub(crate) fn goes_along(&self, vm: VmId) -> bool {
        vm.is_multiple_of(4)
    }

    pub(crate) fn claim_of_own<R>(
        &mut self,
        (at, vm): (MachineId, VmId),
        generation: Generation,
        anew: bool,
        judge: impl FnOnce(&ImageClaim<'_>, Option<&File>) -> R,
    ) -> R {
        let (host, name) = (self.name_of(at), self.vms[vm].clone());
        let fresh = ImageId::new(u128::from(self.next_number()));
        let own = &self.machines[at].slots[vm].own;
        let claim = ImageClaim {
            vm: &name,
            disk: DISK,
            host: &host,
            generation,
            known: own.due.as_ref().or(own.notes.known.as_ref()),
            anew,
            fresh: &fresh,
            layered: false,
        };
        judge(&claim, own.image())
    }

    /// A VM is to come: a file is made for what comes of its disk. False where there is one already.
    pub(crate) fn expect_copy(
        &mut self,
        at: MachineId,
        vm: VmId,
        (migration, from): (&MigrationId, &HostName),
    ) -> bool {
        self.images[vm].remembered.remove(&at);
        self.is_read(at, vm);
        let known = self.own(at, vm).notes.known.clone();
        let note = MoveNote {
            migration: migration.clone(),
            peer: from.clone(),
            is_destination: true,
        };
        if !self.comes_anew(at, vm, from) || !self.keep_move_note(at, vm, note) {
            return false;
        }
        let launch = self.next_launch(at, vm);
        let place = self.specs.get(migration).copied().unwrap_or_default();
        self.own(at, vm).spec = place;
        self.own(at, vm).described = place;
        let left = self.failed_copy(at, vm);
        // Nobody has had it under any generation, and what the disk was here before is something else.
        self.own(at, vm).notes.known = known;
        let none = self.claim_of_own((at, vm), Generation(0), true, |claim, _| claim.judge(None));
        let id = self.next_number();
        let is_noted = self.note_down(at, vm, |notes| {
            notes.left.retain(|left| left.place != place);
            *notes = Notes {
                launch,
                place,
                copying: notes.copying.take(),
                left: std::mem::take(&mut notes.left),
                along: std::mem::take(&mut notes.along),
                arriving: Some(Arrival {
                    migration: migration.clone(),
                    whole: None,
                    ours: false,
                    source_gone: false,
                }),
                leaving: None,
                image: Some(id),
                known: none.ok().map(|none| none.known()),
            };
        });
        let own = self.own(at, vm);
        own.due = None;
        own.is_here = false;
        if !is_noted {
            return false;
        }
        if own.files.images[place].is_some() {
            self.disk_case(DiskCase::NameTaken);
            self.put_aside(at, vm, CameSource::HasDisks);
            self.clear_leftover(at, vm);
            return false;
        }
        let made = File {
            id,
            ..File::default()
        };
        let files = &mut self.own(at, vm).files;
        files.beside.insert(migration.clone(), left.unwrap_or(made));
        true
    }

    /// A planted fault: what came whole with a migration that failed is taken for what comes with the next.
    fn failed_copy(&mut self, at: MachineId, vm: VmId) -> Option<File> {
        let uses = self.plant.uses_failed_copy();
        let own = self.own(at, vm);
        let arrival = own.notes.arriving.as_ref().filter(|_| uses);
        let arrival = arrival.filter(|arrival| arrival.whole.is_some() && !arrival.ours)?;
        let file = own.files.beside.remove(&arrival.migration)?;
        Some(File {
            is_reused: true,
            ..file
        })
    }

    /// Whatever else came, what came last is there before the memory that knows of it.
    pub(crate) fn fill_copy(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
        content: Option<Content>,
    ) {
        let file = self.own(at, vm).files.beside.get_mut(migration);
        let file = file.filter(|file| !file.is_reused);
        if let (Some(file), Some(content)) = (file, content) {
            file.content = content;
        }
    }

    /// All of the copy is there: it is made durable, and noted for this generation, before the source hears `ready`.
    pub(crate) fn copy_is_whole(&mut self, at: MachineId, vm: VmId, attempt: Generation) -> bool {
        if !self.goes_along(vm) {
            return true;
        }
        let skips = self.plant.is_ready_before_flush();
        let own = self.own(at, vm);
        let Some(arrival) = own.notes.arriving.clone() else {
            return false;
        };
        let is_taken = own.image().is_some();
        let file = own.files.beside.get_mut(&arrival.migration);
        let Some(file) = file.filter(|_| !is_taken) else {
            return false;
        };
        if !skips {
            file.durable = file.content;
        }
        let is_noted = self.note_down(at, vm, |notes| {
            if let Some(arrival) = &mut notes.arriving {
                arrival.whole = Some(attempt);
            }
        });
        if is_noted {
            self.disk_case(DiskCase::Whole);
        }
        is_noted
    }

    /// The disk is mirrored for this migration: whoever finds that the VM has moved removes what moved with it, and nothing else.
    pub(crate) fn mirror(&mut self, at: MachineId, vm: VmId, migration: &MigrationId) -> bool {
        if !self.goes_along(vm) {
            return true;
        }
        let along = self.goes_along_with(at, vm, migration);
        let migration = migration.clone();
        self.note_down(at, vm, |notes| {
            notes.leaving = Some(migration);
            along.into_iter().for_each(|along| notes.note_along(along));
        })
    }

    /// What is sent of the disk with the last pages.
    pub(crate) fn content_to_send(&self, at: MachineId, vm: VmId) -> Option<Content> {
        let place = self.served_place(at, vm);
        let image = self.machines[at].slots[vm].own.files.images[place].as_ref();
        image.map(|image| image.content)
    }

    /// The image of a VM that no other host has, for a guest that is let run.
    pub(crate) fn open_own(
        &mut self,
        at: MachineId,
        vm: VmId,
        (generation, anew): (Generation, bool),
    ) -> bool {
        self.close_images_without_qemu(vm);
        let settled = match anew {
            true => self.settle_for_start(at, vm, generation),
            false => self.arrive(at, vm, generation),
        };
        let image = self.own(at, vm).image();
        let bore_record = image.is_some_and(|file| file.record.is_some());
        let opened = settled.and_then(|()| self.claim_own(at, vm, (generation, anew)));
        let Err(why) = opened else {
            self.note(|w| {
                let (host, own) = (w.label(at), &w.machines[at].slots[vm].own);
                format!("{host} {}: its disk is opened, {own:?}", w.vms[vm])
            });
            self.has_all_flushes(at, vm, bore_record);
            match anew {
                true => self.began_with_own(at, vm),
                false => self.knows_its_disk(at, vm),
            }
            self.works(at, vm);
            if self.rng.chance(600) {
                self.keep_what_came(at, vm);
            }
            return true;
        };
        self.note(|w| {
            let (host, own) = (w.label(at), &w.machines[at].slots[vm].own);
            format!(
                "{host} {}: its disk is not opened: {why:?}, {own:?}",
                w.vms[vm]
            )
        });
        match why {
            Closed::Unread => self.coverage.images[5] += 1,
            Closed::MovedSince => self.describe_as_told(at, vm),
            Closed::Missing if !anew => {
                let what = format!(
                    "{} lets the guest of {} go on, whose image was removed or never was its host's",
                    self.label(at),
                    self.vms[vm]
                );
                self.violated_unless_exempt(vm, what);
            }
            Closed::InUse | Closed::Unwritten | Closed::Judged | Closed::Missing => {
                self.disk_case(match why {
                    Closed::Missing => DiskCase::NotThere,
                    _ => DiskCase::Refused,
                });
                match anew {
                    true => self.provide_image(at, vm),
                    false => self.end_guest(at, vm),
                }
            }
        }
        false
    }

    /// A hypervisor was started with it.
    fn began_with_own(&mut self, at: MachineId, vm: VmId) {
        let launch = self.next_launch(at, vm);
        let own = self.own(at, vm);
        own.notes.image = own.image().map(|file| file.id);
        own.notes.leaving = None;
        own.notes.arriving = None;
        own.notes.launch = launch;
        let place = own.notes.place;
        own.notes.left.retain(|left| left.place != place);
        own.kept = own.notes.clone();
        own.living = Some(own.notes.clone());
        own.unsure = None;
    }

    /// What moves of the disk left, and what came of it, before a hypervisor is started with it where it is described.
    fn settle_for_start(
        &mut self,
        at: MachineId,
        vm: VmId,
        generation: Generation,
    ) -> Result<(), Closed> {
        self.is_read(at, vm);
        if !self.settle_moves(at, vm, true) {
            return Err(match self.own(at, vm).notes.copying {
                Some(_) => Closed::MovedSince,
                None => Closed::Unwritten,
            });
        }
        self.settle_copy(at, vm, generation)?;
        let own = self.own(at, vm);
        own.notes.place = own.spec;
        Ok(())
    }

    fn claim_own(
        &mut self,
        at: MachineId,
        vm: VmId,
        (generation, anew): (Generation, bool),
    ) -> Result<(), Closed> {
        let own = &self.machines[at].slots[vm].own;
        if own.image().is_none() {
            return Err(Closed::Missing);
        }
        let known = own.due.as_ref().or(own.notes.known.as_ref());
        if !anew && known.is_some_and(|known| known.generation == generation) {
            return Ok(());
        }
        if self.strikes(SiteFault::ImageUnread, READ_FAILS) {
            return match anew {
                true => Err(Closed::Unread),
                // No other host can have it.
                false => Ok(()),
            };
        }
        let judged = self.claim_of_own((at, vm), generation, anew, |claim, file| match file {
            Some(file) if file.is_let_go => claim.judge_let_go(),
            file => claim.judge(file.and_then(|file| file.record.as_ref())),
        });
        let record = match judged {
            Ok(record) => record,
            Err(_) if self.plant.opens_any_image() => return Ok(()),
            Err(_) => return Err(Closed::Judged),
        };
        let is_written = !self.strikes(SiteFault::ImageUnwritten, WRITE_FAILS);
        let own = self.own(at, vm);
        if let Some(file) = own.image_mut() {
            let is_due = is_written || file.record.is_none();
            let known = record.known();
            if is_written {
                file.record = Some(record);
                file.is_let_go = false;
                file.content.openings += u64::from(anew);
            }
            if is_due {
                own.due = Some(known);
            }
        }
        Ok(())
    }

    /// The VM is held under this generation, and its hypervisor has what came with it.
    fn arrive(&mut self, at: MachineId, vm: VmId, generation: Generation) -> Result<(), Closed> {
        let own = self.own(at, vm);
        match &own.notes.arriving {
            None => Ok(()),
            Some(_) if own.is_here => Ok(()),
            Some(arrival) if arrival.belongs_to(generation) => {
                let migration = arrival.migration.clone();
                let named = self.give_name(at, vm, &migration);
                let own = self.own(at, vm);
                own.is_here = named.is_ok();
                if named.is_ok() {
                    self.disk_case(DiskCase::Arrived);
                } else if let Some(arrival) = &mut own.notes.arriving {
                    arrival.ours = true;
                }
                named
            }
            Some(_) => Err(Closed::Missing),
        }
    }

    /// The VM is held under this generation and has no hypervisor.
    fn settle_copy(
        &mut self,
        at: MachineId,
        vm: VmId,
        generation: Generation,
    ) -> Result<(), Closed> {
        let Some(arrival) = self.own(at, vm).notes.arriving.clone() else {
            return Ok(());
        };
        match arrival.whole {
            None => match self.put_aside(at, vm, CameSource::Gone) {
                Aside::Waits => Err(Closed::Unread),
                Aside::Kept => {
                    self.disk_case(DiskCase::KeptAtStart);
                    Ok(())
                }
                Aside::Over | Aside::Unremoved => Ok(()),
            },
            Some(_) if arrival.belongs_to(generation) => {
                let ours = |notes: &mut Notes| {
                    if let Some(arrival) = &mut notes.arriving {
                        arrival.ours = true;
                    }
                };
                if !self.note_down(at, vm, ours) {
                    return Err(Closed::Unread);
                }
                self.give_name(at, vm, &arrival.migration)?;
                self.disk_case(DiskCase::Settled);
                self.keep_name(at, vm);
                Ok(())
            }
            Some(_) => {
                if self.settle_came((at, vm), &arrival, CameSource::Gone) == Aside::Waits {
                    return Err(Closed::Unread);
                }
                self.disk_case(DiskCase::KeptAtStart);
                self.keep_name(at, vm);
                Ok(())
            }
        }
    }

    /// Nothing is on its way any more, and the image has its name for good.
    fn keep_name(&mut self, at: MachineId, vm: VmId) -> bool {
        if let Some(file) = self.own(at, vm).image_mut() {
            file.came_with = None;
        }
        self.note_down(at, vm, |notes| notes.arriving = None)
    }

    /// A file that is there is never replaced; nothing is done where a predecessor did it.
    fn give_name(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
    ) -> Result<(), Closed> {
        let own = self.own(at, vm);
        let (files, place) = (&mut own.files, own.notes.place);
        match (files.beside.contains_key(migration), &files.images[place]) {
            (false, Some(_)) => Ok(()),
            (false, None) => Err(Closed::Missing),
            (true, Some(_)) => Err(Closed::InUse),
            (true, None) => {
                files.images[place] = files.beside.remove(migration).map(|file| File {
                    came_with: Some(migration.clone()),
                    ..file
                });
                Ok(())
            }
        }
    }

    /// While the guest runs: what came has its name for good, and what is known of the image is written down.
    pub(crate) fn keep_what_came(&mut self, at: MachineId, vm: VmId) {
        if self.own(at, vm).is_here {
            if !self.keep_name(at, vm) {
                return;
            }
            self.own(at, vm).is_here = false;
        }
        let own = self.own(at, vm);
        let Some(known) = own.due.clone() else {
            return;
        };
        if let Some(file) = own.image_mut() {
            file.durable = file.content;
            file.durable_record.clone_from(&file.record);
        }
        if self.note_down(at, vm, |notes| notes.known = Some(known)) {
            self.own(at, vm).due = None;
        }
    }

    /// What a new VM process does with the disks that it finds.
    pub(crate) fn settle_own_disk(&mut self, at: MachineId, vm: VmId) {
        if !self.goes_along(vm) {
            return;
        }
        if self.machines[at].slots[vm].qemu.is_some() {
            self.look_at_living(at, vm);
        } else {
            self.is_read(at, vm);
        }
        let own = self.own(at, vm);
        own.due = None;
        own.is_here = false;
        own.spec = own.described;
        self.note(|w| {
            let own = &w.machines[at].slots[vm].own;
            format!("{} {}: its disk is {}", w.label(at), w.vms[vm], own.line())
        });
        let slot = &self.machines[at].slots[vm];
        let may_run = slot.process.as_ref().map(|p| p.core.record().may_run());
        // What fails is tried again by whoever needs the disk.
        match (slot.qemu.is_some(), may_run.flatten()) {
            (true, Some(generation)) => {
                if self.arrive(at, vm, generation).is_ok() {
                    self.keep_what_came(at, vm);
                }
                self.clean_moves(at, vm);
            }
            (false, Some(generation)) => {
                if self.settle_moves(at, vm, true) {
                    drop(self.settle_copy(at, vm, generation));
                }
            }
            (true, None) => {}
            (false, None) => self.clean_disk(at, vm),
        }
    }

    /// Removes the image of a VM that did not come, and one that went along with a VM that is elsewhere. While a promise or a
    /// gift stands nothing is removed.
    pub(crate) fn clean_disk(&mut self, at: MachineId, vm: VmId) {
        let process = self.machines[at].slots[vm].process.as_ref();
        let Some(record) = process.filter(|_| self.goes_along(vm)) else {
            return;
        };
        let phase = record.core.record().phase.clone();
        if self.machines[at].slots[vm].qemu.is_none() {
            self.is_read(at, vm);
        }
        match &phase {
            Phase::Moved { migration, .. } => {
                let migration = migration.clone();
                self.leave(at, vm, &migration);
            }
            Phase::Absent | Phase::Incoming { .. } | Phase::Refused { .. } => {
                self.clean_what_came(at, vm);
            }
            Phase::Holds { .. }
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Ready { .. } => {}
        }
    }

    pub(crate) fn clean_disk_without_qemu(&mut self, at: MachineId, vm: VmId) {
        if self.machines[at].slots[vm].qemu.is_none() {
            self.clean_disk(at, vm);
        }
    }

    /// A gift is durable: a planted fault removes the source's image now.
    pub(crate) fn gave(&mut self, at: MachineId, vm: VmId) {
        if !self.plant.removes_unconfirmed() || !self.goes_along(vm) {
            return;
        }
        let process = self.machines[at].slots[vm].process.as_ref();
        if let Some(Phase::Gave { migration, .. }) = process.map(|p| &p.core.record().phase) {
            let migration = migration.clone();
            self.leave(at, vm, &migration);
        }
    }

    /// For a while nobody can: whoever looks again tries again.
    pub(crate) fn cannot_remove(&mut self, at: MachineId, vm: VmId) -> bool {
        if self.is_faulty && self.now < self.own(at, vm).stuck_until {
            return true;
        }
        let fails = self.strikes(SiteFault::RemoveFails, REMOVE_FAILS);
        if fails {
            let until = self.now + 1000 + self.rng.below(25_000);
            self.own(at, vm).stuck_until = until;
        }
        fails
    }

    /// Another host holds the VM: the image that went along is no disk of it any more.
    fn leave(&mut self, at: MachineId, vm: VmId, migration: &MigrationId) {
        // While the disk has its image it is certain that a copy of it is none.
        self.settle_moves(at, vm, false);
        let own = self.own(at, vm);
        if own.notes.copying.is_some() {
            return;
        }
        self.note_went_on(at, vm, migration);
        let own = self.own(at, vm);
        let noted = (
            own.notes.image.unwrap_or_default(),
            own.notes.known.as_ref(),
        );
        let place = own.notes.place;
        let file = own
            .image()
            .filter(|_| own.notes.leaving.as_ref() == Some(migration));
        match file.map(|file| file.is(place, noted)) {
            Some(Is::It) => {
                if !self.remove_image(at, vm, place) {
                    return;
                }
                self.disk_case(DiskCase::FormerRemoved);
            }
            Some(Is::Another | Is::Unknown) => self.disk_case(DiskCase::FormerLeft),
            None => {}
        }
        self.forget(at, vm);
    }
}
