//! What an observer demands of the disks that only one host has, and what people do about them.
//!
//! Works on the site. What a guest was told is durable is on the file with which it runs, always; no file goes while it is the
//! only one with all of that. A disk is lost with a machine that is lost for good, or by a person's word, and with nothing else.

use super::coverage::DiskCase;
use super::jobs::Kind;
use super::model::{Backup, Exempt, Machine, MachineId, NameId, Slot, VmId};
use super::own_files::{Content, File, Files, Store};
use super::world::Site;
use godwit_ownership::HostRecord;
use godwit_site::Whereabouts;
use godwit_types::Generation;

impl Site {
    pub(crate) fn disk_case(&mut self, case: DiskCase) {
        *self.coverage.disks.entry(case).or_default() += 1;
    }

    /// Whether all is there that the VM's guest was told is durable.
    pub(crate) fn is_newest(&self, vm: VmId, content: Content) -> bool {
        let image = &self.images[vm];
        !content.is_part && content.life == image.life && content.written >= image.acknowledged
    }

    /// What is on the newest file that is a host's own, under whichever name, and where that is.
    fn found_at(&self, at: MachineId, vm: VmId) -> Option<(Option<Store>, Content)> {
        let slot = &self.machines[at].slots[vm];
        let all = slot.own.theirs(self.may_run(at, vm));
        let whole = all.filter(|(_, file)| !file.content.is_part);
        let newest = whole.max_by_key(|(_, file)| {
            let content = file.content;
            (self.is_newest(vm, content), content.life, content.written)
        });
        newest.map(|(place, file)| (place, file.content))
    }

    fn content_at(&self, at: MachineId, vm: VmId) -> Option<Content> {
        self.found_at(at, vm).map(|(_, content)| content)
    }

    fn may_run(&self, at: MachineId, vm: VmId) -> Option<Generation> {
        let record = self.machines[at].slots[vm].journal.durable.as_ref();
        record.and_then(HostRecord::may_run)
    }

    pub(super) fn has_newest(&self, at: MachineId, vm: VmId) -> bool {
        let content = self.content_at(at, vm);
        content.is_some_and(|content| self.is_newest(vm, content))
    }

    /// Whether any host has all that the guest was told is durable, as its own.
    pub(crate) fn is_anywhere(&self, vm: VmId) -> bool {
        let mut machines = 0..self.machines.len();
        machines.any(|at| !self.machines[at].is_clone && self.has_newest(at, vm))
    }

    /// The product has removed a file.
    pub(crate) fn must_be_anywhere(&mut self, vm: VmId, had: bool, at: MachineId) {
        let is_excused = self.images[vm].is_lost || self.guests[vm].deleted;
        if had && !self.is_anywhere(vm) && !is_excused {
            let what = format!(
                "{} removes the only image of {} with all that its guest was told is durable",
                self.label(at),
                self.vms[vm]
            );
            self.violated_unless_exempt(vm, what);
        }
    }

    pub(crate) fn violated_unless_exempt(&mut self, vm: VmId, what: String) {
        if !self.is_exempt(vm) && !self.was_denied(vm) {
            self.violated(what);
        }
    }

    /// A host that held it may deny that, since its disk is an old copy.
    fn was_denied(&self, vm: VmId) -> bool {
        let took = &self.guests[vm].held_by;
        took.iter().any(|host| self.machines[*host].is_old)
    }

    /// Something happens to a machine or its files that nobody can do anything about: a disk that its holder loses by it, or that
    /// nobody has any more, is no fault of the product's.
    pub(crate) fn losing(&mut self, at: MachineId, happens: impl FnOnce(&mut Self)) {
        let vms = (0..self.vms.len()).filter(|vm| self.goes_along(*vm) && self.has_newest(at, *vm));
        let is_theirs =
            |vm: VmId| self.may_run(at, vm).is_some() || self.images[vm].brought_to == Some(at);
        let had = vms.map(|vm| (vm, is_theirs(vm)));
        let had: Vec<(VmId, bool)> = had.collect();
        happens(self);
        for (vm, held) in had {
            if held && !self.has_newest(at, vm) || !self.is_anywhere(vm) {
                self.images[vm].is_lost = true;
            }
        }
    }

    /// A guest is about to run on the image that its host has.
    pub(crate) fn has_all_flushes(&mut self, at: MachineId, vm: VmId, bore_record: bool) {
        let Some(found) = self.content_to_send(at, vm) else {
            return;
        };
        self.images[vm].brought_to = None;
        if self.is_old_word_of_second(at, vm) {
            self.disk_case(DiskCase::SecondTakenByOldState);
            return self.goes_on_from(at, vm);
        }
        if found.is_part {
            let (host, name) = (self.label(at), &self.vms[vm]);
            return self.violated(format!(
                "{host} runs {name} on a half-made image: {found:?}"
            ));
        }
        if self.is_newest(vm, found) {
            self.images[vm].is_lost = false;
            self.images[vm].put_back_at = None;
            return;
        }
        let resolved = self.guests[vm].may_go_back_at == Some(at);
        // One that bears no record is taken as it is.
        let knew = bore_record && self.knew_of_newer(at, vm, found);
        let image = &self.images[vm];
        let is_lost = image.is_lost || image.put_back_at == Some(at);
        let excused = resolved || is_lost && !knew || self.is_exempt(vm);
        if !excused {
            if let Some(why) = self.exemption(at, vm) {
                self.exempt(vm, why);
            } else if self.was_denied(vm) && !knew {
                self.exempt(vm, Exempt::OldCopyDenied);
            } else {
                let wanted = (self.images[vm].life, self.images[vm].acknowledged);
                let what = format!(
                    "{} runs {} on an image that has not all that was acknowledged: {found:?}, acknowledged {wanted:?}",
                    self.label(at),
                    self.vms[vm],
                );
                return self.violated(what);
            }
        }
        if self.images[vm].is_lost {
            self.disk_case(DiskCase::LostForGood);
        }
        self.goes_on_from(at, vm);
    }

    /// A state directory from before a move does not know that what has the disk's name there by now is a second image that was being filled.
    fn is_old_word_of_second(&self, at: MachineId, vm: VmId) -> bool {
        let machine = &self.machines[at];
        let file = machine.slots[vm].own.image();
        machine.is_old && file.is_some_and(|file| file.never_disk)
    }

    /// A machine that wrote there last, and has written down that it did, does not go on with an older copy.
    fn knew_of_newer(&self, at: MachineId, vm: VmId, found: Content) -> bool {
        let image = &self.images[vm];
        let knows = self.machines[at].slots[vm].own.notes.known.is_some();
        let from_before = (1..image.openings).contains(&found.openings);
        let same = found.life == image.life;
        image.writer == Some(at) && knows && same && from_before && !self.machines[at].is_old
    }

    /// What the file has is the disk from now on, and no other file is, whatever was written there later.
    fn goes_on_from(&mut self, at: MachineId, vm: VmId) {
        let life = self.next_number();
        let Some(file) = self.own(at, vm).image_mut() else {
            return;
        };
        file.never_disk = false;
        for content in [&mut file.content, &mut file.durable] {
            content.life = life;
            content.is_part = false;
        }
        let (written, openings) = (file.content.written, file.content.openings);
        let image = &mut self.images[vm];
        image.life = life;
        image.acknowledged = written;
        image.openings = openings;
        image.is_lost = false;
        image.put_back_at = None;
        image.writer = None;
    }

    /// A guest that goes on knows what is on its disk.
    pub(crate) fn knows_its_disk(&mut self, at: MachineId, vm: VmId) {
        let written = self.content_to_send(at, vm).map(|found| found.written);
        let remembered = self.remembered(at, vm);
        if remembered.is_some() && remembered != written {
            let what = format!(
                "{} lets the guest of {} go on, which knows of write {remembered:?}, and its image has write {written:?}",
                self.label(at),
                self.vms[vm],
            );
            self.violated(what);
        }
    }

    /// The guest writes, and has it made durable at times.
    pub(crate) fn works_on_own(&mut self, at: MachineId, vm: VmId) {
        let (number, flushes) = (self.next_number(), self.rng.chance(500));
        // Nobody serves it before what it is is written.
        if !self.make_certain(at, vm) {
            return;
        }
        let place = self.served_place(at, vm);
        let own = self.own(at, vm);
        let known = own.notes.known.as_ref().map(|known| known.taken);
        let Some(file) = own.files.images[place].as_mut() else {
            return;
        };
        file.content.written = number;
        if flushes {
            file.durable = file.content;
        }
        let (content, record) = (file.content, file.record.as_ref());
        let is_known = known.is_some() && known == record.map(|record| record.taken);
        let image = &mut self.images[vm];
        image.remembered.insert(at, number);
        if flushes {
            image.acknowledged = number;
            image.openings = content.openings;
            image.writer = is_known.then_some(at);
            self.coverage.flushes += 1;
        }
        self.works_on_second(at, vm, flushes);
    }

    /// A start was refused for the image: a person looks, at some time.
    pub(crate) fn provide_image(&mut self, at: MachineId, vm: VmId) {
        let mut machines = 0..self.machines.len();
        let runs = machines.any(|machine| self.runs_at(machine, vm));
        if !runs && (!self.is_faulty || self.rng.chance(100)) {
            self.put_best_image(at, vm);
        }
    }

    /// A person puts the right image there, or what is left of it, and lets it be used.
    fn put_best_image(&mut self, at: MachineId, vm: VmId) {
        let found = |w: &Self, at: MachineId| {
            let content = w.content_at(at, vm)?;
            Some((w.is_newest(vm, content), content.written, content))
        };
        let here = found(self, at);
        let is_here = here.is_some_and(|(is_newest, ..)| is_newest);
        let all = (0..self.machines.len()).filter(|m| !self.machines[*m].is_clone);
        let best = all.filter_map(|machine| found(self, machine));
        let best = best.max_by_key(|(is_newest, written, _)| (*is_newest, *written));
        let best = best
            .filter(|(is_newest, ..)| *is_newest)
            .or_else(|| self.came_somewhere(vm))
            .or(best);
        let is_there = best.is_some_and(|(is_newest, ..)| is_newest);
        let image = &self.images[vm];
        if !is_there && image.acknowledged > 0 && !image.is_lost {
            let what = format!(
                "no host has all that the guest of {} was told is durable",
                self.vms[vm]
            );
            self.violated_unless_exempt(vm, what);
        }
        self.note(|w| {
            let (host, vm) = (w.label(at), &w.vms[vm]);
            format!(
                "person: {host} gets an image for {vm}, its own {is_here}, all of it {is_there}"
            )
        });
        let own = self.found_at(at, vm).filter(|_| is_here);
        if let Some(place) = own.and_then(|(place, _)| place) {
            self.describe_at(at, vm, place);
        }
        let life = self.images[vm].life;
        let empty = Content {
            life,
            ..Content::default()
        };
        let content = here.filter(|_| is_here).or(best);
        let content = content.map_or(empty, |(_, _, content)| content);
        self.disk_case(match is_here {
            true => DiskCase::LetGo,
            false => DiskCase::Provided,
        });
        self.put_image(at, vm, content, is_here);
        self.images[vm].is_lost |= !self.is_newest(vm, content);
        self.images[vm].writer = None;
        self.images[vm].brought_to = Some(at);
    }

    /// A start was refused, since the disk is elsewhere by now: the person who reads it describes it there.
    pub(super) fn describe_as_told(&mut self, at: MachineId, vm: VmId) {
        let copying = self.own(at, vm).notes.copying.as_ref();
        if let Some(place) = copying.map(|copying| copying.to)
            && (!self.is_faulty || self.rng.chance(100))
        {
            self.describe_at(at, vm, place);
        }
    }

    /// A person describes the VM with its disk in this place.
    fn describe_at(&mut self, at: MachineId, vm: VmId, place: Store) {
        let own = self.own(at, vm);
        if own.described != place {
            self.disk_case(DiskCase::DescribedAnew);
        }
        let own = self.own(at, vm);
        own.described = place;
        own.spec = place;
    }

    /// A file that bears no record, where the disk is described.
    fn put_image(&mut self, at: MachineId, vm: VmId, content: Content, is_let_go: bool) {
        let id = self.next_number();
        let own = self.own(at, vm);
        own.files.images[own.described] = Some(File {
            id,
            content,
            durable: content,
            is_let_go,
            ..File::default()
        });
    }

    /// A file is where an image was to come: a person moves it away, once it is no disk of anybody's.
    pub(crate) fn clear_leftover(&mut self, at: MachineId, vm: VmId) {
        let is_held = self.machines[at].slots[vm].journal.seen.as_ref();
        let is_held = is_held.is_some_and(|record| record.may_run().is_some());
        let mut others = (0..self.machines.len()).filter(|other| *other != at);
        let is_elsewhere =
            others.any(|other| self.has_newest(other, vm) && self.runs_at(other, vm));
        if !is_held && is_elsewhere && self.rng.chance(300) {
            self.note(|w| format!("person: the file at {} is moved away", w.label(at)));
            let own = self.own(at, vm);
            own.files.images[own.described] = None;
        }
    }

    /// A VM is made: so is its disk, and nothing that an earlier one of its name left is it.
    pub(crate) fn make_disk(&mut self, on: NameId, vm: VmId) {
        let at = self.address[on];
        if !self.goes_along(vm) || self.runs_at(at, vm) {
            return;
        }
        let life = self.next_number();
        let image = &mut self.images[vm];
        image.life = life;
        image.acknowledged = 0;
        image.openings = 0;
        image.writer = None;
        image.is_lost = false;
        let content = Content {
            life,
            ..Content::default()
        };
        self.own(at, vm).is_deleted = true;
        self.describe_at(at, vm, 0);
        self.put_image(at, vm, content, false);
    }

    /// An image is put back from a copy while no QEMU of the VM lives there.
    pub(crate) fn restore_own(&mut self, vm: VmId) -> bool {
        let older = |slot: &Slot| {
            let own = Some(&slot.own).filter(|_| slot.qemu.is_none())?;
            let (place, copy) = own.copy.as_ref()?;
            let image = own.files.images[*place].as_ref()?;
            Some(copy.content.written < image.content.written)
        };
        let mut machines = 0..self.machines.len();
        let found = machines.find(|at| older(&self.machines[*at].slots[vm]) == Some(true));
        let Some(at) = found.filter(|_| self.goes_along(vm)) else {
            return false;
        };
        self.note(|w| {
            let (host, own) = (w.label(at), &w.machines[at].slots[vm].own);
            format!(
                "the image of {} at {host} is put back from a copy, {}",
                w.vms[vm],
                own.line()
            )
        });
        let id = self.next_number();
        self.images[vm].put_back_at = Some(at);
        self.losing(at, |w| {
            let own = w.own(at, vm);
            if let Some((place, copy)) = own.copy.clone() {
                own.files.images[place] = Some(File { id, ..copy });
            }
        });
        true
    }

    pub(crate) fn back_up_own(&mut self, vm: VmId) {
        self.note(|w| format!("copies of the images of {} are kept", w.vms[vm]));
        for machine in &mut self.machines {
            let own = &mut machine.slots[vm].own;
            // An earlier one is kept at times.
            if own.copy.is_some() && self.rng.chance(700) {
                continue;
            }
            own.copy = own.image().cloned().map(|file| (own.notes.place, file));
            if let Some((_, copy)) = &mut own.copy {
                copy.durable = copy.content;
                copy.durable_record.clone_from(&copy.record);
                copy.came_with = None;
                copy.filled_as = None;
            }
        }
    }

    /// A machine is lost with all that it has, and nobody powers it on again.
    pub(crate) fn lose_machine(&mut self, at: MachineId) -> bool {
        let machine = &self.machines[at];
        let is_one = self.machines.iter().any(|machine| machine.is_leaving);
        if machine.is_clone || is_one || machine.counter == 0 {
            return false;
        }
        let (name, vms) = (machine.name, self.vms.len());
        let (boots, is_old, lies) = (machine.boots, machine.is_old, machine.lies);
        self.crash(at);
        self.lost_records(at);
        self.losing(at, |w| {
            w.machines[at] = Machine {
                boots,
                is_old,
                lies,
                stays_off: true,
                is_leaving: true,
                ..Machine::new(name, vms)
            };
        });
        self.forgets_what_it_wrote(at);
        self.is_gone(at);
        true
    }

    pub(crate) fn put_files_back(&mut self, at: MachineId, files: Vec<Files>) {
        for (slot, files) in self.machines[at].slots.iter_mut().zip(files) {
            slot.own.files = files;
            slot.own.has_stray = true;
        }
    }

    /// A start as the controller plans it: at a host, where the disk is one's alone. Nothing where it refuses.
    pub(super) fn planned(&mut self, controller: usize, vm: VmId, kind: Kind) -> Option<Kind> {
        let Kind::Start { on } = kind else {
            return Some(kind);
        };
        if !self.goes_along(vm) {
            return Some(kind);
        }
        let host = self.host_for_start(controller, vm, on);
        if host.is_none() {
            self.note(|w| {
                let book = &w.controllers[controller].book;
                let name = &w.vms[vm];
                let (entry, at) = (book.entry(name), book.whereabouts(name));
                format!("controller: no start of {name} elsewhere: {at:?}, {entry:?}")
            });
            self.disk_case(DiskCase::ElsewhereRefused);
        }
        host.map(|host| Kind::Start { on: Some(host) })
    }

    /// Where a VM may be started whose disk only its host has; nowhere where what its guest wrote is elsewhere. What the
    /// controller does: it takes the host where the guest ran last, and only where that one was removed a person names one.
    pub(crate) fn host_for_start(
        &mut self,
        controller: usize,
        vm: VmId,
        named: Option<NameId>,
    ) -> Option<NameId> {
        let book = &self.controllers[controller].book;
        let name = &self.vms[vm];
        let held = match book.whereabouts(name) {
            Whereabouts::Held { host, .. } => self.id_of(&host),
            _ => None,
        };
        let ran = book.ran(name);
        let wanted = named.or(held);
        match ran.holder {
            Some(host) if book.is_enrolled(&host) => {
                let last = self.id_of(&host);
                let fits = wanted.is_none() || wanted == last;
                last.filter(|_| fits)
            }
            None if ran.held == Generation(0) => wanted.or_else(|| self.any_answering(controller)),
            _ => self.named_by_a_person(controller, vm, named),
        }
    }

    /// The host where the guest ran last was removed: a person looks which one has the right image, or brings it there.
    fn named_by_a_person(
        &mut self,
        controller: usize,
        vm: VmId,
        named: Option<NameId>,
    ) -> Option<NameId> {
        let book = &self.controllers[controller].book;
        let names = 0..self.names.len();
        let mut names = names.filter(|name| book.is_enrolled(&self.names[*name]));
        let has_it = names.find(|name| self.has_newest(self.address[*name], vm));
        if let Some(name) = has_it {
            let found = self.found_at(self.address[name], vm);
            // With the description that fits.
            if let Some(place) = found.and_then(|(place, _)| place) {
                let places = &mut self.controllers[controller].db.places;
                places.insert(vm, place);
                self.describes_newest(controller, vm);
            }
            return has_it.filter(|name| named.is_none_or(|named| named == *name));
        }
        let name = named.or_else(|| self.any_answering(controller))?;
        let at = self.address[name];
        if self.machines[at].slots[vm].qemu.is_some() {
            return None;
        }
        self.put_best_image(at, vm);
        // With the description that fits.
        let place = self.own(at, vm).described;
        let places = &mut self.controllers[controller].db.places;
        places.insert(vm, place);
        self.describes_newest(controller, vm);
        Some(name)
    }

    /// What joins anew under its name is another host, which says truly that it never had any VM.
    fn is_gone(&mut self, at: MachineId) {
        for guest in &mut self.guests {
            guest.ran_last_is_gone |= guest.ran_last == Some(at);
        }
    }

    /// Its state is empty: it cannot know an older copy of an image.
    fn forgets_what_it_wrote(&mut self, at: MachineId) {
        for image in &mut self.images {
            image.writer.take_if(|writer| *writer == at);
        }
    }

    /// A machine joins anew: the files of disks that it had may be there still, or be gone.
    pub(crate) fn join_with_files(&mut self, at: MachineId, joins: Machine) {
        let slots = &self.machines[at].slots;
        let mut images = slots.iter().flat_map(|slot| &slot.own.files.images);
        let has_any = images.any(Option::is_some);
        let mut files: Vec<Files> = Vec::new();
        if has_any && self.rng.chance(500) {
            let slots = &self.machines[at].slots;
            files.extend(slots.iter().map(|slot| slot.own.files.clone()));
        }
        self.losing(at, |w| {
            w.machines[at] = joins;
            w.put_files_back(at, files);
        });
        self.forgets_what_it_wrote(at);
        self.is_gone(at);
    }

    /// Keeps a copy of a machine's state directory.
    pub(crate) fn back_up(&mut self, at: MachineId) {
        let machine = &mut self.machines[at];
        let records = machine.slots.iter().map(|s| s.journal.durable.clone());
        machine.backup = Some(Backup {
            records: records.collect(),
            known: machine.slots.iter().map(|s| s.known.clone()).collect(),
            notes: machine.slots.iter().map(|s| s.own.kept.clone()).collect(),
            moves: machine
                .slots
                .iter()
                .map(|s| (s.own.went_on.clone(), s.own.note.clone()))
                .collect(),
            described: machine.slots.iter().map(|s| s.own.described).collect(),
            files: machine.slots.iter().map(|s| s.own.files.clone()).collect(),
            table: machine.table.clone(),
            counter: machine.counter,
        });
    }
}
