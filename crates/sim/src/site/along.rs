//! What went along with migrations from a host: whether it has the disk of one that failed, for whoever has a copy and asks.
//!
//! As the product's shell does it (`vmproc`, `came.rs` and `disks/there.rs`): it answers by what it sees in its files, of a disk that moved on
//! its host since, too, and of one that went on wholly with a later migration. Also how storage loses such a disk. Works on the site. Refuses: to count
//! another image, or an older copy that can be told from the disk. Not here: storage that fails a guest, devices, and images that became shorter.

use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::images::READ_FAILS;
use super::model::{MachineId, Packet, Place, VmId};
use super::own_files::{Along, File, Notes, Store};
use super::own_notes::NOTE_FAILS;
use super::world::Site;
use godwit_ownership::{PeerMessage, Phase, StateName};
use godwit_types::{HostName, MigrationId};

impl Site {
    /// Another host asks whether this one has the disk that went along with this migration.
    pub(super) fn answer_for_disks(
        &mut self,
        at: MachineId,
        vm: VmId,
        (from, migration): (&HostName, MigrationId),
    ) {
        let Some(to) = self.id_of(from).filter(|_| self.goes_along(vm)) else {
            return;
        };
        if !self.knows_nothing_of(at, vm, &migration) {
            return;
        }
        let has_disks = self.has_disks_of(at, vm, &migration);
        if has_disks {
            self.is_said(at, vm, &migration);
        }
        let message = PeerMessage::Abort {
            migration,
            reason: None,
            cancelled: false,
            has_disks,
        };
        let packet = Packet::Peer { vm, message };
        self.send(Place::Machine(at), Place::Name(to), packet);
    }

    /// Whether this host holds the VM and moves it in no such migration, or has had it taken with another.
    fn knows_nothing_of(&self, at: MachineId, vm: VmId, id: &MigrationId) -> bool {
        let process = self.machines[at].slots[vm].process.as_ref();
        process.is_some_and(|process| {
            let record = process.core.record();
            let went_on =
                matches!(&record.phase, Phase::Moved { migration, .. } if migration != id);
            let current = process.outgoing.as_ref();
            (record.power().is_some() || went_on)
                && process.core.state_name() != StateName::Recovering
                && current.is_none_or(|current| current.migration != *id)
        })
    }

    fn has_disks_of(&mut self, at: MachineId, vm: VmId, id: &MigrationId) -> bool {
        let slot = &self.machines[at].slots[vm];
        if slot.own.went_on.contains(id) {
            self.disk_case(DiskCase::SaidWentOn);
            return true;
        }
        let Some(process) = slot.process.as_ref() else {
            return false;
        };
        let phase = &process.core.record().phase;
        let holds = matches!(phase, Phase::Holds { .. } | Phase::Stopping { .. });
        if !holds || process.outgoing.is_some() {
            return false;
        }
        let looked = match self.strikes(SiteFault::ImageUnread, READ_FAILS) {
            true => DiskCase::LookFailed,
            false => self.look_for_that_of(at, vm, id),
        };
        self.disk_case(looked);
        let is_there = matches!(looked, DiskCase::SaidHasDisk | DiskCase::SaidMoved);
        is_there || self.plant.says_unlooked()
    }

    /// Whether the disk has the image that it had when it went along, as this host sees it.
    fn look_for_that_of(&self, at: MachineId, vm: VmId, id: &MigrationId) -> DiskCase {
        let slot = &self.machines[at].slots[vm];
        let (own, lives) = (&slot.own, slot.qemu.is_some());
        let what = match lives {
            true => &own.notes,
            false => &own.kept,
        };
        let is_here = what.arriving.is_none() || lives && own.is_here;
        let along = what.along.iter().find(|along| along.migration == *id);
        let along = along.filter(|along| is_here && along.place == what.place);
        let Some(along) = along else {
            return DiskCase::NotAlong;
        };
        let Some(file) = own.files.images[along.place].as_ref() else {
            return DiskCase::LookNotThere;
        };
        let is_open = !lives || what.image == Some(file.id);
        let now = self.seen_along(at, along.place, file, id);
        if !is_open || !now.is_same(along) {
            return DiskCase::LookAnother;
        }
        let known = own.due.as_ref().filter(|_| lives);
        let known = known.or(what.known.as_ref());
        let says = now.says.as_ref();
        let mut before = known.into_iter().chain(&along.says);
        let is_older = says.is_some_and(|says| {
            before.any(|before| before.image == says.image && says.taken < before.taken)
        });
        match (is_older, along.has_moved) {
            (true, _) => DiskCase::LookOlder,
            (false, true) => DiskCase::SaidMoved,
            (false, false) => DiskCase::SaidHasDisk,
        }
    }

    fn seen_along(&self, at: MachineId, place: Store, file: &File, id: &MigrationId) -> Along {
        Along {
            migration: id.clone(),
            place,
            says: file.says(),
            image: file.id,
            boot: self.machines[at].boot,
            has_moved: false,
        }
    }

    /// The disk goes along with this migration, as it is now: none where that cannot be seen.
    pub(super) fn goes_along_with(
        &mut self,
        at: MachineId,
        vm: VmId,
        id: &MigrationId,
    ) -> Option<Along> {
        if self.strikes(SiteFault::ImageUnread, READ_FAILS) {
            return None;
        }
        let own = &self.machines[at].slots[vm].own;
        let file = own.image()?;
        Some(self.seen_along(at, own.notes.place, file, id))
    }

    /// The disk has another image of this host from now on: what it is in each migration with which its former one went along.
    pub(super) fn followed_along(&self, at: MachineId, vm: VmId, second: Store) -> Vec<Along> {
        let own = &self.machines[at].slots[vm].own;
        let (former, now) = (own.image(), own.files.images[second].as_ref());
        let all = own.notes.along.iter().map(|along| {
            let (Some(former), Some(now)) = (former, now) else {
                return along.clone();
            };
            let before = self.seen_along(at, own.notes.place, former, &along.migration);
            match along.is_same(&before) {
                true => Along {
                    has_moved: true,
                    ..self.seen_along(at, second, now, &along.migration)
                },
                false => along.clone(),
            }
        });
        all.collect()
    }

    /// The disk is elsewhere, with this migration: notes the earlier ones with which the same image went along.
    pub(super) fn note_went_on(&mut self, at: MachineId, vm: VmId, with: &MigrationId) {
        let along = &self.own(at, vm).notes.along;
        let Some(gone) = along.iter().find(|along| along.migration == *with) else {
            return;
        };
        let earlier = along
            .iter()
            .filter(|along| along.migration != *with && along.is_same(gone));
        let earlier: Vec<_> = earlier.map(|along| along.migration.clone()).collect();
        if !earlier.is_empty() && !self.strikes(SiteFault::WriteFails, NOTE_FAILS) {
            self.own(at, vm).went_on.extend(earlier);
        }
    }

    // ---- as an observer, and what happens to storage ----

    /// A source says that it has the disk: whether anybody has, just then. A copy that a person put back, and that was made since the image was taken
    /// last, is told from it by nobody.
    fn is_said(&mut self, at: MachineId, vm: VmId, migration: &MigrationId) {
        let image = &self.images[vm];
        let file = self.machines[at].slots[vm].own.image();
        let is_of_now = |file: &File| file.content.openings >= image.openings;
        let cannot_tell = image.put_back_at == Some(at) && file.is_some_and(is_of_now);
        let is_true = self.is_on_some_disk(vm);
        if cannot_tell && !is_true {
            self.disk_case(DiskCase::SaidPutBack);
        }
        let words = &mut self.images[vm].words;
        words.insert(migration.clone(), is_true || cannot_tell);
    }

    /// The host from which a copy came that may be the last with all of a disk, and that disk's VM.
    pub(super) fn source_of_copy(&self) -> Option<(MachineId, VmId)> {
        self.slots().find_map(|(at, vm)| {
            let own = &self.machines[at].slots[vm].own;
            let note = own.note.as_ref().filter(|note| note.is_destination)?;
            let file = own.files.beside.get(&note.migration)?;
            let counts = self.images[vm].acknowledged > 0 && self.is_newest(vm, file.content);
            let source = self.id_of(&note.peer).filter(|_| counts)?;
            Some((self.address[source], vm))
        })
    }

    /// A host is off for a while, and an older copy of the image that is a disk there has its place then.
    pub(super) fn put_back_image(&mut self, at: MachineId, vm: VmId) -> bool {
        let slot = &self.machines[at].slots[vm];
        let written = |file: &File| file.content.written;
        let copy = slot.own.copy.as_ref();
        let copy = copy.filter(|(place, _)| *place == slot.own.notes.place);
        let image = slot.own.image().map(written);
        let fits = copy.is_some_and(|(_, copy)| Some(written(copy)) < image);
        let is_idle = slot.qemu.is_none() || fits && self.crash_for_a_while(at);
        fits && is_idle && self.restore_image(vm)
    }

    /// The storage of a host loses the image that is a disk there; where its guest runs the host goes off with it, and comes again.
    pub(super) fn lose_image(&mut self, at: MachineId, vm: VmId) -> bool {
        let slot = &self.machines[at].slots[vm];
        let fits = self.goes_along(vm) && slot.own.image().is_some();
        if !fits || self.machines[at].is_clone {
            return false;
        }
        if slot.qemu.is_some() && !self.crash_for_a_while(at) {
            return false;
        }
        self.note(|w| format!("the image of {} at {} is lost", w.vms[vm], w.label(at)));
        self.losing(at, |w| {
            let own = w.own(at, vm);
            own.files.images[own.notes.place] = None;
        });
        true
    }
}

impl Notes {
    pub(super) fn note_along(&mut self, along: Along) {
        self.along
            .retain(|before| before.migration != along.migration);
        self.along.insert(0, along);
    }
}
