//! The disk that only one host has moves to another place of it while its guest runs: a second image, the record that makes it the disk, and
//! the removal of the former one.
//!
//! As the product's shell does it, a step at a time, so that everything may die in between. The move itself is in the memory of the VM
//! process. Works on the site. Refuses: to begin while the VM moves to another host, and where an earlier move is not settled.

use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::images::WRITE_FAILS;
use super::model::{Caller, Happening, MachineId, Reply, VmId};
use super::own_files::{Copying, File, Left, Notes, STORES, Store};
use super::world::Site;
use godwit_types::Generation;

/// Of a thousand times: what happens to a copy at a look.
const GOES_ON: u64 = 400;
const CANCELLED: u64 = 30;
const LEFT_OUT: u64 = 80;
const CANNOT_STAND: u64 = 80;
/// Of a thousand times: a copy of the host's state directory is made just then.
const BACKED_UP: u64 = 40;

/// A move that is under way.
#[derive(Debug, Clone)]
pub(crate) struct Going {
    pub process: u64,
    pub step: Step,
    pub copying: Copying,
    /// What was written before the switch.
    before: Notes,
    /// What is written with it.
    after: Notes,
}

/// What was done last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Begun,
    /// That an image is being filled is written down, and it is made.
    Made,
    /// A part of the disk is there. Whether the file has its name already.
    Copying {
        is_named: bool,
    },
    /// Both are equal, and what is written goes to both.
    Equal,
    /// It has its name,
    Named,
    /// durably, as all of it is.
    Durable,
    /// The state directory says that it is the disk,
    HalfWritten,
    /// and so does the run directory.
    Written,
    /// The disk goes on with it.
    Switched,
    /// A planted fault: the disk goes on with it before that is written.
    SwitchedUnwritten,
}

impl Step {
    /// Whether what the guest writes goes to both images.
    fn mirrors(self) -> bool {
        use Step::{Durable, Equal, HalfWritten, Named, Written};
        matches!(self, Equal | Named | Durable | HalfWritten | Written)
    }

    /// Whether a flush is durable at both.
    fn flushes_both(self) -> bool {
        matches!(self, Self::Durable | Self::HalfWritten | Self::Written)
    }
}

impl Site {
    pub(super) fn asked_to_move_disk(&mut self, at: MachineId, vm: VmId, caller: Caller) {
        let reply = match self.begin_disk_move(at, vm) {
            true => Reply::Done,
            false => Reply::Refused,
        };
        self.reply(at, caller, reply);
    }

    /// A person has the disk moved. Returns whether that begins.
    fn begin_disk_move(&mut self, at: MachineId, vm: VmId) -> bool {
        let slot = &self.machines[at].slots[vm];
        let Some(process) = slot.process.as_ref() else {
            return false;
        };
        let is_moving = process.outgoing.is_some() || process.receiving.is_some();
        let may_run = process.core.record().may_run().is_some();
        let fits = self.goes_along(vm) && slot.qemu.is_some() && may_run && !is_moving;
        if !fits || slot.own.going.is_some() || slot.own.notes.arriving.is_some() {
            return false;
        }
        let process = process.number;
        self.clean_moves(at, vm);
        let number = self.next_number();
        let notes = &self.machines[at].slots[vm].own.notes;
        let is_clean = notes.copying.is_none() && notes.left.iter().all(|left| left.followed);
        let to = (notes.place + 1) % STORES;
        if !is_clean {
            self.disk_case(DiskCase::MoveNotClean);
            return false;
        }
        let notes = notes.clone();
        self.own(at, vm).going = Some(Going {
            process,
            step: Step::Begun,
            copying: Copying {
                number,
                to,
                image: None,
                known: None,
            },
            before: notes.clone(),
            after: notes,
        });
        self.note(|w| {
            format!(
                "{} {}: its disk moves to place {to}",
                w.label(at),
                w.vms[vm]
            )
        });
        self.disk_case(DiskCase::MoveBegun);
        self.look_soon(at, vm, process);
        true
    }

    fn look_soon(&mut self, at: MachineId, vm: VmId, process: u64) {
        let delay = 5 + self.rng.below(60);
        self.after(delay, Happening::DiskMoves { at, vm, process });
    }

    /// Whether nothing else of the VM may move.
    pub(crate) fn do_disks_move(&self, at: MachineId, vm: VmId) -> bool {
        let own = &self.machines[at].slots[vm].own;
        own.going.is_some() || own.notes.left.iter().any(|left| !left.followed)
    }

    /// The move's next step.
    pub(crate) fn disk_moves(&mut self, at: MachineId, vm: VmId, number: u64) {
        let again = Happening::DiskMoves {
            at,
            vm,
            process: number,
        };
        let Some(process) = self.thawed(at, vm, number, again) else {
            return;
        };
        let may_run = process.core.record().may_run();
        let slot = &self.machines[at].slots[vm];
        let Some(going) = slot
            .own
            .going
            .clone()
            .filter(|going| going.process == number)
        else {
            return;
        };
        if slot.qemu.is_none() {
            return self.end_disk_move(at, vm);
        }
        let next = match may_run {
            Some(generation) => self.next_step((at, vm), &going, generation),
            // Its guest may not run here any more.
            None if going.step == Step::Written => self.goes_back((at, vm), &going),
            None if going.step == Step::HalfWritten => self.is_written(at, vm, &going),
            None => None,
        };
        let Some(step) = next else {
            return self.fails((at, vm), &going);
        };
        if self.is_faulty && self.rng.chance(BACKED_UP) {
            self.back_up(at);
        }
        self.note(|w| {
            let (host, own) = (w.label(at), &w.machines[at].slots[vm].own);
            format!(
                "{host} {}: its disk's move is {step:?}, {}",
                w.vms[vm],
                own.line()
            )
        });
        if step == Step::Switched {
            self.own(at, vm).going = None;
            self.has_switched(at, vm, may_run.unwrap_or_default());
            return;
        }
        if let Some(going) = self.own(at, vm).going.as_mut() {
            going.step = step;
        }
        self.look_soon(at, vm, number);
    }

    fn next_step(
        &mut self,
        (at, vm): (MachineId, VmId),
        going: &Going,
        generation: Generation,
    ) -> Option<Step> {
        match going.step {
            Step::Begun => self.make_second(at, vm, going),
            Step::Made => self.claim_second(at, vm, generation),
            Step::Copying { .. } if self.rng.chance(CANCELLED) => {
                self.disk_case(DiskCase::MoveCancelled);
                None
            }
            Step::Copying { .. } if self.rng.chance(GOES_ON) => Some(going.step),
            Step::Copying { is_named } => {
                self.equals(at, vm);
                Some(match is_named {
                    true => Step::Named,
                    false => Step::Equal,
                })
            }
            Step::Equal | Step::Named | Step::Durable if self.rng.chance(LEFT_OUT) => {
                self.disk_case(DiskCase::SecondLeftOut);
                self.is_part_again(at, vm);
                let is_named = going.step != Step::Equal;
                Some(Step::Copying { is_named })
            }
            Step::Equal => self.name_second(at, vm, &going.copying),
            Step::Named => {
                if let Some(file) = self.second(at, vm) {
                    file.filled_as = None;
                    file.durable = file.content;
                    file.durable_record.clone_from(&file.record);
                }
                Some(Step::Durable)
            }
            Step::Durable => self.write_switch(at, vm),
            Step::HalfWritten => self.is_written(at, vm, going),
            Step::Written if self.rng.chance(CANNOT_STAND) => self.goes_back((at, vm), going),
            Step::Written => Some(Step::Switched),
            Step::SwitchedUnwritten => {
                let after = going.after.clone();
                self.note_down(at, vm, |notes| *notes = after);
                Some(Step::Switched)
            }
            Step::Switched => None,
        }
    }

    /// The second image, under whichever name it has.
    fn second(&mut self, at: MachineId, vm: VmId) -> Option<&mut File> {
        let own = self.own(at, vm);
        let copying = &own.going.as_ref()?.copying;
        let beside = own.files.second.get_mut(&copying.number);
        let named = own.files.images[copying.to].as_mut();
        let named = named.filter(|file| Some(file.id) == copying.image);
        beside.or(named)
    }

    fn make_second(&mut self, at: MachineId, vm: VmId, going: &Going) -> Option<Step> {
        if self.own(at, vm).files.images[going.copying.to].is_some() {
            self.disk_case(DiskCase::PlaceTaken);
            self.clear_place(at, vm, going.copying.to);
            return None;
        }
        let copying = going.copying.clone();
        let number = copying.number;
        if !self.note_down(at, vm, |notes| notes.copying = Some(copying)) {
            return None;
        }
        let id = self.next_number();
        let mut made = File {
            id,
            ..File::default()
        };
        made.content.is_part = true;
        made.never_disk = true;
        made.durable = made.content;
        self.own(at, vm).files.second.insert(number, made);
        Some(Step::Made)
    }

    /// It says whose it is, and what was made is noted.
    fn claim_second(&mut self, at: MachineId, vm: VmId, generation: Generation) -> Option<Step> {
        let judged = self.claim_of_own((at, vm), generation, true, |claim, _| claim.judge(None));
        let record = judged.ok()?;
        let is_written = !self.strikes(SiteFault::ImageUnwritten, WRITE_FAILS);
        let file = self.second(at, vm)?;
        let id = file.id;
        if is_written {
            file.record = Some(record.clone());
        }
        let copying = &mut self.own(at, vm).going.as_mut()?.copying;
        copying.image = Some(id);
        copying.known = is_written.then(|| record.known());
        let copying = copying.clone();
        let is_noted = self.note_down(at, vm, |notes| notes.copying = Some(copying));
        is_noted.then_some(Step::Copying { is_named: false })
    }

    /// All of the disk has been copied, and what is written goes to both.
    fn equals(&mut self, at: MachineId, vm: VmId) {
        let content = self.content_to_send(at, vm);
        if let (Some(file), Some(content)) = (self.second(at, vm), content) {
            file.content = content;
        }
    }

    /// It let a write wait for too long: nobody waits for it, and what it missed is copied again.
    fn is_part_again(&mut self, at: MachineId, vm: VmId) {
        if let Some(file) = self.second(at, vm) {
            file.content.is_part = true;
            file.durable.is_part = true;
        }
    }

    fn name_second(&mut self, at: MachineId, vm: VmId, copying: &Copying) -> Option<Step> {
        let files = &mut self.own(at, vm).files;
        if files.images[copying.to].is_some() {
            self.disk_case(DiskCase::PlaceTaken);
            return None;
        }
        let file = files.second.remove(&copying.number)?;
        files.images[copying.to] = Some(File {
            filled_as: Some(copying.number),
            ..file
        });
        Some(Step::Named)
    }

    /// It is bound and durable: the state directory says that it is the disk from now on.
    fn write_switch(&mut self, at: MachineId, vm: VmId) -> Option<Step> {
        let content = self.content_to_send(at, vm)?;
        let file = self.second(at, vm)?;
        file.content = content;
        file.durable = content;
        file.never_disk = false;
        let own = self.own(at, vm);
        let known = own.due.clone().or_else(|| own.notes.known.clone());
        let copying = own.going.as_ref()?.copying.clone();
        let was_known = known.clone();
        let along = self.followed_along(at, vm, copying.to);
        let after = self.changed(at, vm, |notes| {
            notes.along = along;
            notes.copying = None;
            notes.left.push(Left {
                place: notes.place,
                image: notes.image.unwrap_or_default(),
                known: was_known,
                followed: false,
                of_disk: true,
            });
            notes.place = copying.to;
            notes.image = copying.image;
            if copying.known.is_some() {
                notes.known = copying.known;
            }
        });
        let own = self.own(at, vm);
        own.due = None;
        let mut before = own.notes.clone();
        before.known = known;
        let going = own.going.as_mut()?;
        (going.before, going.after) = (before, after.clone());
        if self.plant.switches_before_record() {
            return Some(Step::SwitchedUnwritten);
        }
        if self.plant.removes_former_early() {
            let place = self.own(at, vm).notes.place;
            self.remove_image(at, vm, place);
        }
        if self.write_state(at, vm, &after) {
            return Some(Step::HalfWritten);
        }
        self.disk_case(DiskCase::SwitchNotWritten);
        let going = self.own(at, vm).going.clone()?;
        // What could not be written ends the move, also where the record says again what it said before.
        self.goes_back((at, vm), &going);
        None
    }

    fn is_written(&mut self, at: MachineId, vm: VmId, going: &Going) -> Option<Step> {
        let after = self.own(at, vm).going.as_ref()?.after.clone();
        debug_assert_eq!(after, going.after);
        self.write_living(at, vm, after);
        Some(Step::Written)
    }

    /// What is written says again that the first image is the disk. Where that fails nobody serves the disk before it is written.
    fn goes_back(&mut self, (at, vm): (MachineId, VmId), going: &Going) -> Option<Step> {
        self.disk_case(DiskCase::WentBack);
        let before = going.before.clone();
        if self.note_down(at, vm, |notes| *notes = before.clone()) {
            return Some(Step::Durable);
        }
        let own = self.own(at, vm);
        own.notes = before;
        own.must_save = true;
        None
    }

    fn fails(&mut self, (at, vm): (MachineId, VmId), going: &Going) {
        self.note(|w| format!("{} {}: its disk is not moved", w.label(at), w.vms[vm]));
        self.disk_case(DiskCase::MoveFailed);
        self.own(at, vm).going = None;
        let copying = going.copying.clone();
        self.remove_copy(at, vm, &copying);
    }

    fn remove_copy(&mut self, at: MachineId, vm: VmId, copying: &Copying) {
        let place = self.own(at, vm).notes.place;
        if self.make_certain(at, vm) && self.remove_second((at, vm), copying, place) {
            self.note_down(at, vm, |notes| notes.copying = None);
        }
    }

    /// Its hypervisor is gone, or another process is there.
    pub(crate) fn end_disk_move(&mut self, at: MachineId, vm: VmId) {
        let process = self.machines[at].slots[vm].process.as_ref();
        let number = process.map(|process| process.number);
        let Some(going) = self.own(at, vm).going.take() else {
            return;
        };
        self.disk_case(match going.step {
            Step::Begun | Step::Made | Step::Copying { .. } => DiskCase::EndedInCopying,
            Step::Equal | Step::Named | Step::Durable => DiskCase::EndedEqual,
            _ => DiskCase::EndedInSwitch,
        });
        if number != Some(going.process) {
            return;
        }
        // What this process was about to write it writes; the state directory is another's after that.
        let own = self.own(at, vm);
        if going.step == Step::HalfWritten {
            own.notes.clone_from(&going.after);
        }
        let place = own.notes.place;
        let noted = (
            own.notes.image.unwrap_or_default(),
            own.due.as_ref().or(own.notes.known.as_ref()),
        );
        let disk = own.files.images[place].as_ref();
        let is_there = disk.is_some_and(|disk| disk.is_there(place, noted));
        // Else it may be the best that is left, and the next start judges it.
        if !own.must_save && own.kept.place == place && is_there {
            self.remove_second((at, vm), &going.copying, place);
        }
    }

    /// What the guest writes, in both images.
    pub(crate) fn works_on_second(&mut self, at: MachineId, vm: VmId, flushes: bool) {
        let content = self.content_to_send(at, vm);
        let Some(step) = self.own(at, vm).going.as_ref().map(|going| going.step) else {
            return;
        };
        if let (true, Some(file), Some(content)) = (step.mirrors(), self.second(at, vm), content) {
            file.content = content;
            if flushes && step.flushes_both() {
                file.durable = content;
            }
        }
    }

    /// Where the guest's requests go to: once the second image is written down as the disk still to the first one.
    pub(crate) fn served_place(&self, at: MachineId, vm: VmId) -> Store {
        let own = &self.machines[at].slots[vm].own;
        match &own.going {
            Some(going) if going.step == Step::Written => going.before.place,
            Some(going) if going.step == Step::SwitchedUnwritten => going.copying.to,
            _ => own.notes.place,
        }
    }

    /// The second image says that it was taken since, the description follows, and the former image goes.
    fn has_switched(&mut self, at: MachineId, vm: VmId, generation: Generation) {
        self.disk_case(DiskCase::Switched);
        let judged = self.claim_of_own((at, vm), generation, true, |claim, file| {
            claim.judge(file.and_then(|file| file.record.as_ref()))
        });
        let is_written = !self.strikes(SiteFault::ImageUnwritten, WRITE_FAILS);
        let own = self.own(at, vm);
        if let (Ok(record), Some(file), true) = (judged, own.image_mut(), is_written) {
            let known = record.known();
            file.record = Some(record);
            own.due = Some(known);
        }
        self.settle_living(at, vm);
    }

    /// Once a second: what an ended move left is settled while the guest runs.
    pub(crate) fn settle_living(&mut self, at: MachineId, vm: VmId) {
        let own = self.own(at, vm);
        if own.going.is_some() {
            return;
        }
        let is_followed = own.notes.left.iter().all(|left| left.followed);
        let has_copy = own.notes.copying.is_some();
        if !is_followed {
            if self.follow_disk(at, vm) {
                self.clean_moves(at, vm);
            }
        } else if has_copy && (!self.is_faulty || self.rng.chance(100)) {
            self.clean_moves(at, vm);
        }
    }

    /// Removes what earlier moves left.
    pub(crate) fn clean_moves(&mut self, at: MachineId, vm: VmId) {
        if let Some(copying) = self.own(at, vm).notes.copying.clone() {
            self.remove_copy(at, vm, &copying);
        }
        let left = &self.own(at, vm).notes.left;
        let is_due = !left.is_empty() && left.iter().all(|left| left.followed);
        if !is_due || !self.make_certain(at, vm) {
            return;
        }
        let mut what = self.own(at, vm).notes.clone();
        self.remove_left((at, vm), &mut what);
        if what.left != self.own(at, vm).notes.left {
            self.note_down(at, vm, |notes| notes.left = what.left);
        }
    }

    /// A file is in the way of a move: a person moves it away, once it is no disk of anybody's.
    fn clear_place(&mut self, at: MachineId, vm: VmId, place: Store) {
        let own = &self.machines[at].slots[vm].own;
        let is_left = own.notes.left.iter().any(|left| left.place == place);
        let has_newest = own
            .image()
            .is_some_and(|file| self.is_newest(vm, file.content));
        if has_newest && !is_left && self.rng.chance(300) {
            self.note(|w| {
                format!(
                    "person: the file in the way at {} is moved away",
                    w.label(at)
                )
            });
            self.own(at, vm).files.images[place] = None;
        }
    }

    /// A disk that moves on its host.
    pub(super) fn any_disk_move(&self) -> Option<(MachineId, VmId)> {
        let machines = self.machines.iter().enumerate();
        let mut slots = machines.flat_map(|(at, machine)| {
            let slots = machine.slots.iter().enumerate();
            slots.map(move |(vm, slot)| ((at, vm), slot))
        });
        slots.find_map(|(at, slot)| slot.own.going.as_ref().map(|_| at))
    }
}
