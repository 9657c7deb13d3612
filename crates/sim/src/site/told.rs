//! What holders say of their VMs' images on shared storage, through the controller, to the next holder; and who was told, as an observer
//! knows it.
//!
//! Works on the site. Whether an older copy may be opened is judged ([`Site::open_image`]) by who was told, not by what came of it.

use super::controller::Purpose;
use super::coverage::DiskCase;
use super::model::{Ask, Exempt, MachineId, NameId, VmId};
use super::own_files::Store;
use super::world::Site;
use godwit_ownership::HostRecord;
use godwit_types::image::{KnownImage, take_newest};
use godwit_types::site::{Claim, Standing};
use godwit_types::{HostName, VmName};
use std::collections::BTreeMap;

impl Site {
    /// What a host says of the image of a VM that it holds by this record.
    pub(crate) fn images_of(&self, at: MachineId, record: &HostRecord) -> Vec<KnownImage> {
        let vm = self.vm_of(&record.vm).filter(|vm| self.has_image(*vm));
        let slot = vm.map(|vm| &self.machines[at].slots[vm]);
        let known = slot.and_then(|slot| slot.known.clone());
        let known = known.filter(|_| record.may_run().is_some());
        known.into_iter().collect()
    }

    /// A controller has heard this of a host: whether it is the newest word of the image, and from its holder.
    pub(crate) fn heard_of_image(
        &mut self,
        controller: usize,
        host: &HostName,
        (vm, claim, images): (&VmName, &Claim, &[KnownImage]),
    ) {
        let Some(vm) = self.vm_of(vm) else { return };
        let image = &self.images[vm];
        let of = &mut self.controllers[controller];
        let entry = of.book.entry(&self.vms[vm]);
        let is_holder = entry.is_some_and(|entry| {
            entry.holder.as_ref() == Some(host) && claim.held() == Some(entry.held)
        });
        let writer = image.writer.map(|at| &self.machines[at]);
        let is_newest = writer.is_some_and(|machine| {
            let known = machine.slots[vm].known.as_ref();
            self.names[machine.name] == *host && known.is_some() && known == images.first()
        });
        if is_holder && is_newest && of.book.standing(host) == Standing::Known {
            of.heard.insert(vm, image.openings);
            self.coverage.images[7] += 1;
        }
    }

    /// A host was granted a VM, and told this of its image.
    pub(crate) fn told_of_image(
        &mut self,
        at: MachineId,
        vm: VmId,
        (images, told): (Vec<KnownImage>, u64),
    ) {
        let slot = &mut self.machines[at].slots[vm];
        slot.told = slot.told.max(told);
        let mut known: Vec<KnownImage> = slot.known.take().into_iter().collect();
        take_newest(&mut known, images);
        slot.known = known.pop();
    }

    /// Where the disks are of VMs that a host holds and that only it has, as it says.
    pub(crate) fn places_at(&self, at: MachineId) -> BTreeMap<VmId, Store> {
        let slots = self.machines[at].slots.iter().enumerate();
        let held = slots.filter(|(vm, slot)| {
            let record = slot.journal.seen.as_ref();
            self.goes_along(*vm) && record.is_some_and(|record| record.may_run().is_some())
        });
        held.map(|(vm, slot)| (vm, slot.own.described)).collect()
    }

    /// Where a VM's disk is, is its holder's to say.
    pub(super) fn follow_places(
        &mut self,
        controller: usize,
        host: NameId,
        places: &BTreeMap<VmId, Store>,
    ) {
        for (vm, place) in places {
            let of = &self.controllers[controller];
            let entry = of.book.entry(&self.vms[*vm]);
            let is_holder =
                entry.is_some_and(|entry| entry.holder.as_ref() == Some(&self.names[host]));
            let is_news = of.db.places.get(vm) != Some(place);
            if is_holder {
                self.describes_newest(controller, *vm);
            }
            if is_holder && is_news && !self.plant.overrules_place() {
                self.controllers[controller].db.places.insert(*vm, *place);
                self.disk_case(DiskCase::PlaceCopied);
            }
        }
    }

    pub(super) fn describes_newest(&mut self, controller: usize, vm: VmId) {
        let made = self.guests[vm].made;
        self.controllers[controller].db.described.insert(vm, made);
    }

    /// A database that was restored from before a VM was made describes an earlier one of its name, if it describes any: where its host
    /// has let it go meanwhile nobody knows of the later description, and its images are no more than files.
    pub(super) fn grants_with_description(&mut self, controller: usize, vm: VmId) {
        let described = self.controllers[controller].db.described.get(&vm);
        let is_earlier = described.copied().unwrap_or_default() < self.guests[vm].made;
        if is_earlier && self.goes_along(vm) {
            self.exempt(vm, Exempt::Forgotten);
        }
    }

    /// A planted fault: it is the controller's to say.
    pub(super) fn overrule_place(&mut self, controller: usize, vm: VmId, host: NameId) {
        let place = self.controllers[controller].db.places.get(&vm).copied();
        if let Some(place) = place.filter(|_| self.plant.overrules_place()) {
            self.ask(
                controller,
                host,
                Ask::Describe { vm, place },
                Purpose::Nothing,
            );
        }
    }

    /// A description comes for a VM without a guest.
    pub(crate) fn told_of_place(&mut self, at: MachineId, vm: VmId, place: Store) {
        if self.own(at, vm).is_deleted {
            self.forget(at, vm);
        }
        let slot = &mut self.machines[at].slots[vm];
        let holds = slot
            .process
            .as_ref()
            .is_some_and(|process| process.core.record().may_run().is_some());
        if slot.qemu.is_none() && (!holds || self.plant.overrules_place()) {
            slot.own.described = place;
            slot.own.spec = place;
        }
    }
}
