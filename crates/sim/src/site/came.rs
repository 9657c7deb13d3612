//! What came of a disk with a migration that ended elsewhere: it waits for the word of its source, that has the disk or has not.
//!
//! As the product's shell does it (`vmproc`, `came.rs` and `disks/came.rs`): the source is asked at once and then again and again,
//! in messages that may be lost or come late (what it answers is in `along.rs`); a VM that comes anew, or goes on without
//! its source, and a person's word that the source is gone have the copy kept. What becomes of it is judged by `godwit-ownership`. Works on the
//! site. Refuses: a VM that comes anew where what came before cannot be kept.

use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::images::READ_FAILS;
use super::model::{Machine, MachineId, NameId, Packet, Place, VmId};
use super::own_files::{Arrival, Content, File, KeptFile, MoveNote};
use super::own_notes::NOTE_FAILS;
use super::world::Site;
use godwit_ownership::{CameEnd, CameFound, CameImage, CameSource, Event, PeerMessage, Phase};
use godwit_types::{Generation, HostName, MigrationId};

/// How often the source is asked again.
const LOOK_EACH_MS: u64 = 2000;
/// For so long a VM that comes anew from the same source waits for its answer.
const ANSWER_WAIT_MS: u64 = 1000;

/// In the memory of a VM process: what is known of an image that came, as long as it has no end.
#[derive(Debug, Default)]
pub(crate) struct Came {
    /// The source of this migration has the disk.
    has_disks: Option<MigrationId>,
    began: Option<u64>,
    looked: Option<u64>,
}

/// What became of an image that was to be put aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aside {
    /// Nothing of it is left to be done.
    Over,
    Kept,
    /// It stays until something is known, or can be done.
    Waits,
    /// It could not be removed: whoever looks again tries again.
    Unremoved,
}

/// What an event says of disks that came, or went along.
#[derive(Debug)]
pub(crate) enum OfDisks {
    Nothing,
    /// Something is known by it.
    Ends,
    /// That host asks whether this one has the disk of this migration.
    Asks(HostName, MigrationId),
}

impl Site {
    /// Before the core hears it: nothing where a person's word could not be written.
    pub(super) fn hears_of_disks(
        &mut self,
        at: MachineId,
        vm: VmId,
        event: &Event,
    ) -> Option<OfDisks> {
        if !self.goes_along(vm) {
            return Some(OfDisks::Nothing);
        }
        let ends = match event {
            Event::Message {
                from,
                message:
                    PeerMessage::AskGift {
                        migration,
                        generation: Generation(0),
                    },
            } => return Some(OfDisks::Asks(from.clone(), migration.clone())),
            Event::Message { from, message } => self.source_has_disks(at, vm, (from, message)),
            Event::HostRemoved { host } => {
                if !self.source_is_gone(at, vm, host) {
                    return None;
                }
                true
            }
            Event::OperatorResolve {
                run_here: false,
                confirm_fenced,
            } => {
                let process = self.machines[at].slots[vm].process.as_ref();
                let phase = process.map(|process| &process.core.record().phase);
                let is_promised = matches!(phase, Some(Phase::Ready { .. }));
                if is_promised && !self.source_is_gone(at, vm, confirm_fenced) {
                    return None;
                }
                false
            }
            _ => false,
        };
        Some(match ends {
            true => OfDisks::Ends,
            false => OfDisks::Nothing,
        })
    }

    /// With which migration an image came that is not this host's, if one is noted.
    fn what_came(&self, at: MachineId, vm: VmId) -> Option<MigrationId> {
        let arrival = self.machines[at].slots[vm].own.notes.arriving.as_ref()?;
        (!arrival.ours).then(|| arrival.migration.clone())
    }

    /// The VM is not here: what came gets its end, as far as one is known.
    pub(super) fn clean_what_came(&mut self, at: MachineId, vm: VmId) {
        let id = self.what_came(at, vm);
        let process = self.machines[at].slots[vm].process.as_ref();
        let has_disks = process.and_then(|process| process.came.has_disks.clone());
        let source = match id.is_some() && id == has_disks {
            true => CameSource::HasDisks,
            false => CameSource::Unknown,
        };
        let aside = self.put_aside(at, vm, source);
        if aside == Aside::Kept {
            self.disk_case(DiskCase::KeptGivenUp);
        }
        let (now, waits) = (self.now, aside == Aside::Waits);
        let Some(process) = self.process(at, vm) else {
            return;
        };
        let came = &mut process.came;
        let is_first = came.looked.is_none();
        came.looked = waits.then_some(now);
        came.began = came.looked.map(|now| came.began.unwrap_or(now));
        if let Some(id) = id.filter(|_| waits) {
            self.disk_case(match is_first {
                true => DiskCase::CameWaits,
                false => DiskCase::AskedAgain,
            });
            self.ask_for_disks(at, vm, id);
        }
    }

    fn ask_for_disks(&mut self, at: MachineId, vm: VmId, migration: MigrationId) {
        let note = self.own(at, vm).note.as_ref();
        let peer = note.filter(|note| note.migration == migration);
        let peer = peer.map(|note| note.peer.clone());
        if let Some(to) = peer.and_then(|peer| self.id_of(&peer)) {
            let message = PeerMessage::ask_for_disks(migration);
            let packet = Packet::Peer { vm, message };
            self.send(Place::Machine(at), Place::Name(to), packet);
        }
    }

    /// Looks again at an image that has no end yet.
    pub(super) fn clean_what_waits(&mut self, at: MachineId, vm: VmId) {
        let process = self.machines[at].slots[vm].process.as_ref();
        if process.is_none_or(|process| process.came.looked.is_none()) {
            return;
        }
        let lives = self.machines[at].slots[vm].qemu.is_some();
        if !lives && self.what_came(at, vm).is_some() {
            self.clean_disk(at, vm);
        } else if let Some(process) = self.process(at, vm) {
            process.came = Came::default();
        }
    }

    /// Once a second: VM processes that wait for a source ask again now and then.
    pub(super) fn clean_again(&mut self) {
        let now = self.now;
        for (at, vm) in self.slots() {
            let process = self.machines[at].slots[vm].process.as_ref();
            let process = process.filter(|process| process.frozen_until <= now);
            let looked = process.and_then(|process| process.came.looked);
            if looked.is_some_and(|looked| now >= looked + LOOK_EACH_MS) {
                self.clean_what_waits(at, vm);
            }
        }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = (MachineId, VmId)> + use<> {
        let (machines, vms) = (self.machines.len(), self.vms.len());
        (0..machines).flat_map(move |at| (0..vms).map(move |vm| (at, vm)))
    }

    /// Notes whether this says that the source of what came has the disk. Returns that.
    pub(super) fn source_has_disks(
        &mut self,
        at: MachineId,
        vm: VmId,
        (from, message): (&HostName, &PeerMessage),
    ) -> bool {
        let PeerMessage::Abort {
            migration,
            has_disks: true,
            ..
        } = message
        else {
            return false;
        };
        let is_of_source = self.is_from(at, vm, (from, migration));
        if let Some(process) = self.process(at, vm).filter(|_| is_of_source) {
            process.came.has_disks = Some(migration.clone());
        }
        is_of_source
    }

    /// Whether the VM was last to come from that host, with this migration.
    fn is_from(&self, at: MachineId, vm: VmId, (host, id): (&HostName, &MigrationId)) -> bool {
        let note = self.machines[at].slots[vm].own.note.as_ref();
        let note = note.filter(|note| note.is_destination);
        note.is_some_and(|note| note.peer == *host && note.migration == *id)
    }

    /// A person says that a host is gone for good: if the VM was to come from it, that is durable before anything follows. False where it
    /// could not be written.
    pub(super) fn source_is_gone(&mut self, at: MachineId, vm: VmId, host: &HostName) -> bool {
        let process = self.machines[at].slots[vm].process.as_ref();
        let is_elsewhere = process.is_some_and(|process| match &process.core.record().phase {
            Phase::Absent
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. } => true,
            Phase::Holds { .. }
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Moved { .. } => false,
        });
        let came = self.what_came(at, vm).filter(|_| is_elsewhere);
        if !came.is_some_and(|id| self.is_from(at, vm, (host, &id))) {
            return true;
        }
        self.note_down(at, vm, |notes| {
            if let Some(arrival) = &mut notes.arriving {
                arrival.source_gone = true;
            }
        })
    }

    /// The VM comes anew, from this host: what came before is kept. False for a moment where that is the same one, which is asked just now;
    /// where a part of the disk is kept already; and where nothing can be kept.
    pub(super) fn comes_anew(&mut self, at: MachineId, vm: VmId, from: &HostName) -> bool {
        if let Some(id) = self.what_came(at, vm) {
            let now = self.now;
            if self.is_from(at, vm, (from, &id)) {
                let process = self.process(at, vm);
                let began = process.map(|process| *process.came.began.get_or_insert(now));
                if began.is_some_and(|began| now < began + ANSWER_WAIT_MS) {
                    self.disk_case(DiskCase::AnewTooEarly);
                    self.ask_for_disks(at, vm, id);
                    return false;
                }
            }
            if self.has_kept_part(at, vm) {
                self.note(|w| format!("{}: a part is kept already", w.label(at)));
                self.clear_kept(at, vm);
                return false;
            }
        }
        let aside = self.put_aside(at, vm, CameSource::Gone);
        if aside == Aside::Kept {
            self.disk_case(DiskCase::KeptAnew);
        }
        if let Some(process) = self.process(at, vm).filter(|_| aside != Aside::Waits) {
            process.came = Came::default();
        }
        aside != Aside::Waits
    }

    /// A part came, and another copy of that disk is kept: each try would take the room of one more.
    fn has_kept_part(&self, at: MachineId, vm: VmId) -> bool {
        let own = &self.machines[at].slots[vm].own;
        let mut kept = own.files.kept.iter();
        let arrival = own.notes.arriving.as_ref();
        arrival.is_some_and(|arrival| arrival.whole.is_none())
            && kept.any(|kept| kept.place == own.notes.place)
    }

    /// With which migration the VM comes, or goes, is written down; false where it could not be.
    pub(super) fn keep_move_note(&mut self, at: MachineId, vm: VmId, note: MoveNote) -> bool {
        let is_written = !self.strikes(SiteFault::WriteFails, NOTE_FAILS);
        if is_written {
            self.own(at, vm).note = Some(note);
        }
        is_written
    }

    /// What came with an earlier migration gets its end, as far as that is known of its source.
    pub(super) fn put_aside(&mut self, at: MachineId, vm: VmId, source: CameSource) -> Aside {
        let arrival = self.own(at, vm).notes.arriving.clone();
        let aside = match arrival {
            None => Aside::Over,
            // Nothing is forgotten of one that is this host's and has no name yet.
            Some(arrival) if arrival.ours => return Aside::Over,
            Some(arrival) => self.settle_came((at, vm), &arrival, source),
        };
        if matches!(aside, Aside::Over | Aside::Kept) {
            self.forget(at, vm);
        }
        aside
    }

    pub(super) fn settle_came(
        &mut self,
        (at, vm): (MachineId, VmId),
        arrival: &Arrival,
        source: CameSource,
    ) -> Aside {
        let is_whole = arrival.whole.is_some();
        let source = self.planted_word(source.given_up(arrival.source_gone));
        let file = self.own(at, vm).files.beside.get(&arrival.migration);
        let found = match file {
            None => CameFound::Nothing,
            Some(file) if file.content == Content::default() => CameFound::Empty,
            Some(_) => CameFound::Something,
        };
        let is_there = file.is_some();
        if is_there && is_whole && self.plant.uses_failed_copy() {
            return Aside::Unremoved;
        }
        if is_there && self.strikes(SiteFault::ImageUnread, READ_FAILS) {
            return Aside::Waits;
        }
        let came = CameImage { source, is_whole };
        match came.judge(found) {
            CameEnd::Stays => Aside::Waits,
            CameEnd::Removed | CameEnd::Kept if !is_there => Aside::Over,
            CameEnd::Removed => self.remove_came((at, vm), arrival, found),
            CameEnd::Kept => self.keep_came((at, vm), &arrival.migration),
        }
    }

    fn planted_word(&self, source: CameSource) -> CameSource {
        match source {
            CameSource::Unknown if self.plant.removes_unasked() => CameSource::HasDisks,
            CameSource::Gone if self.plant.removes_given_up() => CameSource::HasDisks,
            source => source,
        }
    }

    fn remove_came(
        &mut self,
        (at, vm): (MachineId, VmId),
        arrival: &Arrival,
        found: CameFound,
    ) -> Aside {
        if self.cannot_remove(at, vm) {
            return Aside::Unremoved;
        }
        let file = self.own(at, vm).files.beside.remove(&arrival.migration);
        if let Some(file) = file {
            self.must_not_be_last((at, vm), &file, &arrival.migration);
        }
        self.disk_case(match (arrival.whole, found) {
            (Some(_), _) => DiskCase::WholeRemoved,
            (None, CameFound::Empty) => DiskCase::EmptyRemoved,
            (None, _) => DiskCase::PartRemoved,
        });
        Aside::Over
    }

    /// It is durable, and has a name that nobody removes.
    fn keep_came(&mut self, (at, vm): (MachineId, VmId), migration: &MigrationId) -> Aside {
        if self.cannot_remove(at, vm) {
            return Aside::Waits;
        }
        self.note(|w| {
            let (host, vm) = (w.label(at), &w.vms[vm]);
            format!("{host} {vm}: what came with {migration} is kept")
        });
        let own = self.own(at, vm);
        let place = own.notes.place;
        if let Some(mut file) = own.files.beside.remove(migration) {
            file.durable = file.content;
            file.durable_record.clone_from(&file.record);
            own.files.kept.push(KeptFile { place, file });
        }
        Aside::Kept
    }

    // ---- as an observer, and a person ----

    /// Whether any file but those that wait for a word has all that the VM's guest was told is durable.
    pub(super) fn is_on_some_disk(&self, vm: VmId) -> bool {
        let machines = self.machines.iter().filter(|machine| !machine.is_clone);
        let mut files = machines.flat_map(|machine| machine.slots[vm].own.files.disks());
        files.any(|file| self.is_newest(vm, file.content))
    }

    /// The product has removed what came: something else has all of it that counts, or had when the source said so.
    fn must_not_be_last(&mut self, (at, vm): (MachineId, VmId), file: &File, id: &MigrationId) {
        let image = &self.images[vm];
        let is_true = image.words.get(id).copied().unwrap_or(false);
        let counts = image.acknowledged > 0 && self.is_newest(vm, file.content);
        let is_clone = self.machines[at].is_clone;
        if !counts || is_clone || is_true || self.guests[vm].deleted {
            return;
        }
        let machines = self.machines.iter().filter(|machine| !machine.is_clone);
        let mut beside = machines.flat_map(|machine| machine.slots[vm].own.files.beside.values());
        let is_beside = beside.any(|file| self.is_newest(vm, file.content));
        if !is_beside && !self.is_on_some_disk(vm) {
            let what = format!(
                "{} removes what came of the disk of {} with {id}, the only file with all that its guest was told is durable",
                self.label(at),
                self.vms[vm]
            );
            self.violated_unless_exempt(vm, what);
        }
    }

    /// What came of a disk somewhere: a person looks there last. With that file, if it has all.
    pub(super) fn came_somewhere(&mut self, vm: VmId) -> Option<(bool, u64, Content)> {
        let slots = self
            .machines
            .iter()
            .map(|machine| &machine.slots[vm].own.files);
        let kept = slots.clone().flat_map(|files| files.kept.iter());
        let kept = kept.map(|kept| (DiskCase::KeptUsed, &kept.file));
        let beside = slots.flat_map(|files| files.beside.values());
        let mut all = kept.chain(beside.map(|file| (DiskCase::WaitingUsed, file)));
        let (case, file) = all.find(|(_, file)| self.is_newest(vm, file.content))?;
        let content = file.content;
        self.disk_case(case);
        Some((true, content.written, content))
    }

    /// A host at which something came of a VM's disk before.
    pub(super) fn host_with_copy(&self, vm: VmId) -> Option<NameId> {
        let has = |machine: &&Machine| {
            let own = &machine.slots[vm].own;
            !own.files.kept.is_empty() || !own.files.beside.is_empty()
        };
        self.machines.iter().find(has).map(|machine| machine.name)
    }

    /// A copy that is kept is in the way: a person moves it away, once it is no disk of anybody's.
    fn clear_kept(&mut self, at: MachineId, vm: VmId) {
        let mut others = (0..self.machines.len()).filter(|other| *other != at);
        let is_elsewhere = others.any(|other| self.runs_at(other, vm) && self.is_anywhere(vm));
        if is_elsewhere && self.rng.chance(300) {
            self.note(|w| format!("person: the copy kept at {} is moved away", w.label(at)));
            self.own(at, vm).files.kept.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::SitePlant;

    /// A site at whose first machine something came of the first VM's disk, that is whole or a part.
    fn came(whole: Option<u64>) -> Site {
        let mut site = Site::new(1, SitePlant::default(), false).unwrap();
        let id = MigrationId::new("m1").unwrap();
        site.images[0].acknowledged = 7;
        let content = Content {
            written: 7,
            ..Content::default()
        };
        let own = site.own(0, 0);
        let file = File {
            content,
            ..File::default()
        };
        own.files.beside.insert(id.clone(), file);
        own.notes.arriving = Some(Arrival {
            migration: id,
            whole: whole.map(Generation),
            ours: false,
            source_gone: false,
        });
        site
    }

    #[test]
    fn what_came_stays_without_a_word_and_is_kept_where_its_source_is_gone() {
        let mut site = came(None);
        assert_eq!(site.put_aside(0, 0, CameSource::Unknown), Aside::Waits);
        assert_eq!(site.own(0, 0).files.beside.len(), 1);
        assert_eq!(site.put_aside(0, 0, CameSource::Gone), Aside::Kept);
        let own = site.own(0, 0);
        assert!(own.files.beside.is_empty() && own.notes.arriving.is_none());
        assert_eq!(own.files.kept.len(), 1);
        assert_eq!(site.violation, None);
    }

    #[test]
    fn a_part_comes_beside_no_copy_that_is_kept_and_a_whole_one_does() {
        let from = HostName::new("b").unwrap();
        for (whole, comes) in [(None, false), (Some(2), true)] {
            let mut site = came(whole);
            let (place, file) = (0, File::default());
            site.own(0, 0).files.kept.push(KeptFile { place, file });
            assert_eq!(site.comes_anew(0, 0, &from), comes);
            assert_eq!(site.own(0, 0).files.kept.len(), 1 + usize::from(comes));
        }
    }

    #[test]
    fn the_observer_minds_the_last_copy_unless_the_source_had_the_disk_when_it_said_so() {
        let id = MigrationId::new("m1").unwrap();
        for (word, is_violated) in [(None, true), (Some(false), true), (Some(true), false)] {
            let mut site = came(Some(2));
            site.images[0]
                .words
                .extend(word.map(|word| (id.clone(), word)));
            assert_eq!(site.put_aside(0, 0, CameSource::HasDisks), Aside::Over);
            assert_eq!(site.violation.is_some(), is_violated, "{word:?}");
        }
        // Another file has all of it.
        let mut site = came(Some(2));
        let file = site.own(0, 0).files.beside[&id].clone();
        site.own(1, 0).files.images[0] = Some(file);
        site.put_aside(0, 0, CameSource::HasDisks);
        assert_eq!(site.violation, None);
    }
}
