//! Disks on storage that all hosts share: an image for every second VM, what it says of who has it, and what was written there.
//! What an observer knows of disks that only one host has is here, too.
//!
//! Works on the site. Judged from outside by who wrote and what was acknowledged, not by the record. In half of the seeds
//! locks on an image reach the other hosts, in the others they do not. At times its record cannot be read, or it is not known
//! whether it was written: then the image is not opened, and whoever tries again finds what is there.

use super::coverage::DiskCase;
use super::faults::SiteFault;
use super::model::{MachineId, VmId};
use super::world::Site;
use godwit_ownership::{Event, ImageClaim, ImageRecord, ImageRefusal};
use godwit_types::image::ImageId;
use godwit_types::{Generation, HostName, MigrationId, VmName};
use std::collections::BTreeMap;

pub(super) const DISK: &str = "root";
/// Of a thousand times.
pub(super) const READ_FAILS: u64 = 120;
pub(super) const WRITE_FAILS: u64 = 120;

/// What is on the storage.
#[derive(Debug, Clone, Default)]
struct Stored {
    /// The number of the last write, and of the last one that a power cut leaves for certain.
    writes: u64,
    durable: u64,
    /// For how many hypervisors it was opened, and for how many hosts.
    openings: u64,
    record: Option<ImageRecord>,
    /// A person has let it go, and nobody has taken it since.
    is_let_go: bool,
}

/// An image, and what an observer knows of it.
#[derive(Debug, Default)]
pub(crate) struct Image {
    stored: Stored,
    copy: Option<Stored>,
    /// The last write that a guest was told is durable.
    pub acknowledged: u64,
    /// How often it had been opened then.
    pub openings: u64,
    /// Which of the disks that this VM had, where only one host has it.
    pub life: u64,
    /// Where only one host has it: it went with a machine, or by a person's word.
    pub is_lost: bool,
    /// A person has put an older copy there, whatever else is there.
    pub put_back_at: Option<MachineId>,
    /// And a person has put it at this host, where nobody has opened it yet.
    pub brought_to: Option<MachineId>,
    /// A copy of it was put back, and was not opened yet.
    is_put_back: bool,
    /// Whose QEMU has it open, and under which generation.
    open: BTreeMap<MachineId, Generation>,
    /// The machine that wrote there last, while it knows that it did.
    pub writer: Option<MachineId>,
    /// The machine that opened it last.
    opener: Option<MachineId>,
    /// The machine that took it last, which it says, whether or not it was opened.
    taker: Option<MachineId>,
    /// Migrations of which a source said that it has the disk, and whether anybody had all of it just then.
    pub words: BTreeMap<MigrationId, bool>,
    /// The last write that the memory of the guest in a machine's QEMU knows of.
    pub remembered: BTreeMap<MachineId, u64>,
}

/// Why an image is not opened.
#[derive(Debug)]
pub(super) enum Closed {
    InUse,
    Judged,
    /// Who has it cannot be read.
    Unread,
    /// That this host has it cannot be written; whether it is there nobody knows.
    Unwritten,
    /// It is not there.
    Missing,
    /// The disk has moved on its host since what is written there.
    MovedSince,
}

impl Site {
    pub(crate) fn has_image(&self, vm: VmId) -> bool {
        vm % 2 == 1
    }

    /// The VM's image is opened at a machine for a guest that is let run under this generation, in a hypervisor that is started
    /// `anew` or has it. Returns whether it may.
    pub(crate) fn open_image(
        &mut self,
        at: MachineId,
        vm: VmId,
        (generation, anew): (Generation, bool),
    ) -> bool {
        if self.goes_along(vm) {
            return self.open_own(at, vm, (generation, anew));
        }
        if !self.has_image(vm) {
            return true;
        }
        self.close_images_without_qemu(vm);
        match self.claim_image(at, vm, (generation, anew)) {
            Ok(()) => {
                self.is_written_by_one(at, vm, generation);
                self.has_all_writes(at, vm);
                if !anew {
                    self.remembers_all_writes(at, vm);
                }
                let image = &mut self.images[vm];
                image.open.insert(at, generation);
                image.opener = Some(at);
                image.is_put_back = false;
                self.counts_opening(at, vm, anew);
                self.works(at, vm);
                true
            }
            Err(why) => {
                let image = format!("{:?}", self.images[vm]);
                self.note(|w| {
                    let (host, vm) = (w.label(at), &w.vms[vm]);
                    format!("{host} {vm}: its image is not opened: {why:?}, {image}")
                });
                match why {
                    Closed::InUse => self.coverage.images[1] += 1,
                    // Whoever tries again reads and writes it.
                    Closed::Unread => self.coverage.images[5] += 1,
                    Closed::Unwritten => self.coverage.images[6] += 1,
                    Closed::Judged | Closed::Missing | Closed::MovedSince => {
                        self.coverage.images[2] += 1;
                        match anew {
                            true => self.release_image(vm),
                            false => self.end_guest(at, vm),
                        }
                    }
                }
                false
            }
        }
    }

    fn claim_image(
        &mut self,
        at: MachineId,
        vm: VmId,
        (generation, anew): (Generation, bool),
    ) -> Result<(), Closed> {
        let host: HostName = self.name_of(at);
        let name: VmName = self.vms[vm].clone();
        let fresh = ImageId::new(u128::from(self.next_number()));
        let known = self.machines[at].slots[vm].known.clone();
        let claim = ImageClaim {
            vm: &name,
            disk: DISK,
            host: &host,
            generation,
            known: known.as_ref(),
            anew,
            fresh: &fresh,
            layered: false,
        };
        if self.strikes(SiteFault::ImageUnread, READ_FAILS) {
            return match self.plant.opens_unread_image() {
                true => Ok(()),
                false => Err(Closed::Unread),
            };
        }
        let image = &mut self.images[vm];
        let judged = match image.stored.is_let_go {
            true => claim.judge_let_go(),
            false => claim.judge(image.stored.record.as_ref()),
        };
        let record = match judged {
            Ok(record) => record,
            Err(_) if self.plant.opens_any_image() => return Ok(()),
            Err(why) => {
                self.is_refused_rightly(at, vm, &why);
                return Err(Closed::Judged);
            }
        };
        if self.strikes(SiteFault::ImageUnwritten, WRITE_FAILS) {
            return self.claim_unwritten(at, vm, (record, anew));
        }
        let image = &mut self.images[vm];
        // The record is taken before the lock is waited for.
        image.stored.record = Some(record.clone());
        image.stored.is_let_go = false;
        if self.locks_reach && image.open.keys().any(|other| *other != at) {
            self.counts_opening(at, vm, anew);
            return Err(Closed::InUse);
        }
        // The guest runs before it is written what is known.
        if !self.strikes(SiteFault::WriteFails, 100) {
            self.machines[at].slots[vm].known = Some(record.known());
        }
        self.coverage.images[0] += 1;
        Ok(())
    }

    /// The record is written, or not, and its host hears of a failure.
    fn claim_unwritten(
        &mut self,
        at: MachineId,
        vm: VmId,
        (record, anew): (ImageRecord, bool),
    ) -> Result<(), Closed> {
        let is_written = self.rng.chance(500);
        if is_written {
            let stored = &mut self.images[vm].stored;
            stored.record = Some(record);
            stored.is_let_go = false;
        }
        if self.plant.opens_unwritten_image() {
            return Ok(());
        }
        if is_written {
            self.counts_opening(at, vm, anew);
        }
        Err(Closed::Unwritten)
    }

    /// No host calls an image an older one that nobody put back, but where somebody told lies.
    fn is_refused_rightly(&mut self, at: MachineId, vm: VmId, why: &ImageRefusal) {
        let is_older = matches!(
            why,
            ImageRefusal::Older { .. } | ImageRefusal::Former { .. }
        );
        if is_older && !self.images[vm].is_put_back && !self.has_liar {
            let (host, name) = (self.label(at), &self.vms[vm]);
            self.violated(format!(
                "{host} does not open the newest image of {name}: {why}"
            ));
        }
    }

    /// It is taken for a hypervisor, and says so from now on: a copy of it from then on is not told from what is written later.
    fn counts_opening(&mut self, at: MachineId, vm: VmId, anew: bool) {
        let image = &mut self.images[vm];
        if image.taker.replace(at) != Some(at) || anew {
            image.stored.openings += 1;
        }
    }

    /// Whoever opens it later holds a later generation, whatever else went wrong. Two machines of one name are not told apart.
    fn is_written_by_one(&mut self, at: MachineId, vm: VmId, generation: Generation) {
        let mut others = self.images[vm].open.iter();
        let later = others.find(|(other, theirs)| {
            self.machines[**other].name != self.machines[at].name && **theirs >= generation
        });
        if let Some((other, _)) = later {
            let what = format!(
                "{} opens the image of {} under {generation}, which {} has open under a later generation",
                self.label(at),
                self.vms[vm],
                self.label(*other)
            );
            self.violated(what);
        }
    }

    /// A machine that wrote there last, and knows it, does not go on with an older copy, nor does one that was told by who did.
    fn has_all_writes(&mut self, at: MachineId, vm: VmId) {
        let image = &self.images[vm];
        if image.stored.writes >= image.acknowledged {
            return;
        }
        let knows = self.machines[at].slots[vm].known.is_some();
        // One from before the first opening bears no record: it is taken as it is.
        let from_before = (1..image.openings).contains(&image.stored.openings);
        let wrote = image.writer == Some(at) && knows;
        let was_told = self.machines[at].slots[vm].told >= image.openings;
        if (wrote || was_told) && from_before && !self.machines[at].is_old {
            let what = format!(
                "{} runs {} on an older copy of its image: write {} of {}",
                self.label(at),
                self.vms[vm],
                image.stored.writes,
                image.acknowledged
            );
            return self.violated(what);
        }
        // Nobody could tell this host, or its last hypervisor had it when it was copied.
        self.coverage.images[3] += 1;
        self.images[vm].acknowledged = self.images[vm].stored.writes;
    }

    /// A guest that goes on knows what is on its disk: nobody else has written there since it stood still.
    fn remembers_all_writes(&mut self, at: MachineId, vm: VmId) {
        let image = &self.images[vm];
        let written = image.stored.writes;
        let remembered = image.remembered.get(&at).copied();
        if let Some(remembered) = remembered.filter(|remembered| *remembered != written) {
            let what = format!(
                "{} lets the guest of {} go on, which knows of write {remembered}, and its image has write {written}",
                self.label(at),
                self.vms[vm],
            );
            self.violated(what);
        }
    }

    /// What the memory of the guest in a machine's QEMU knows of.
    pub(crate) fn remembered(&self, at: MachineId, vm: VmId) -> Option<u64> {
        self.images[vm].remembered.get(&at).copied()
    }

    /// The guest's memory has come from another machine.
    pub(crate) fn remembers(&mut self, at: MachineId, vm: VmId, write: Option<u64>) {
        let remembered = &mut self.images[vm].remembered;
        match write {
            Some(write) => remembered.insert(at, write),
            None => remembered.remove(&at),
        };
    }

    /// A VM is to come from another host: which image it has there is written down, and so is by whom it was taken last.
    pub(crate) fn expect_image(
        &mut self,
        at: MachineId,
        vm: VmId,
        (migration, from): (&MigrationId, &HostName),
    ) -> bool {
        if self.goes_along(vm) {
            return self.expect_copy(at, vm, (migration, from));
        }
        if !self.has_image(vm) {
            return true;
        }
        self.images[vm].remembered.remove(&at);
        let record = self.images[vm].stored.record.as_ref();
        let Some(record) = record.filter(|record| record.holder == *from) else {
            return false;
        };
        self.machines[at].slots[vm].known = Some(record.known());
        true
    }

    fn write(&mut self, at: MachineId, vm: VmId) {
        let known = self.machines[at].slots[vm].known.as_ref();
        let known = known.map(|known| known.taken);
        let flushes = self.rng.chance(500);
        let image = &mut self.images[vm];
        image.stored.writes += 1;
        let newest = image.stored.record.as_ref().map(|record| record.taken);
        image.remembered.insert(at, image.stored.writes);
        if flushes {
            image.stored.durable = image.stored.writes;
            image.acknowledged = image.stored.writes;
            image.openings = image.stored.openings;
            image.writer = (known == newest).then_some(at);
            self.coverage.flushes += 1;
        }
    }

    /// The guest works on its disk.
    pub(crate) fn works(&mut self, at: MachineId, vm: VmId) {
        if self.goes_along(vm) {
            self.works_on_own(at, vm);
        } else if self.has_image(vm) {
            self.write(at, vm);
        }
    }

    /// Once a second: guests that run with a VM process work, and what came with them is kept.
    pub(crate) fn guests_work(&mut self) {
        for vm in 0..self.vms.len() {
            for at in 0..self.machines.len() {
                let serves = self.machines[at].slots[vm].process.is_some();
                let has = self.goes_along(vm) || self.images[vm].open.contains_key(&at);
                if serves && has && self.runs_at(at, vm) {
                    self.works(at, vm);
                    if self.goes_along(vm) {
                        self.keep_what_came(at, vm);
                        self.settle_living(at, vm);
                    }
                }
            }
        }
    }

    /// Power off: what its machine wrote and did not make durable may be gone.
    pub(crate) fn image_loses_power(&mut self, at: MachineId, vm: VmId) {
        let is_last = self.images[vm].opener == Some(at) && self.images[vm].open.contains_key(&at);
        if !self.has_image(vm) || !is_last || self.rng.chance(300) {
            return;
        }
        let stored = &mut self.images[vm].stored;
        let has_lost = stored.writes > stored.durable;
        stored.writes = stored.durable;
        if has_lost {
            self.disk_case(DiskCase::SharedLostUnflushed);
        }
    }

    /// The guest was stopped to leave: the other host may have it. It wrote until then.
    pub(crate) fn give_image_back(&mut self, at: MachineId, vm: VmId) {
        if self.goes_along(vm) && self.runs_at(at, vm) {
            self.works(at, vm);
        }
        if !self.has_image(vm) {
            return;
        }
        let image = &self.images[vm];
        if image.open.contains_key(&at) {
            if self.runs_at(at, vm) {
                self.write(at, vm);
            }
            // What was written is durable before another host has it.
            let stored = &mut self.images[vm].stored;
            stored.durable = stored.writes;
        }
        self.images[vm].open.remove(&at);
    }

    pub(super) fn close_images_without_qemu(&mut self, vm: VmId) {
        let machines = &self.machines;
        let image = &mut self.images[vm];
        let lives = |at: &MachineId| machines[*at].slots[vm].qemu.is_some();
        image.open.retain(|at, _| lives(at));
        image.remembered.retain(|at, _| lives(at));
    }

    /// A person ends a guest that is not let go on with its image, to start it anew.
    pub(super) fn end_guest(&mut self, at: MachineId, vm: VmId) {
        if self.is_faulty && !self.rng.chance(100) {
            return;
        }
        self.note(|w| format!("person: the guest of {} is ended", w.vms[vm]));
        if let Some(process) = self.process(at, vm) {
            process.may_discard = true;
        }
        // Whoever else has a copy of its memory may discard that, too.
        self.guests[vm].died = true;
        self.feed(at, vm, Event::StopRequested);
    }

    /// A person lets an image be used that was refused, once nobody has it open.
    fn release_image(&mut self, vm: VmId) {
        let runs = (0..self.machines.len()).any(|at| self.runs_at(at, vm));
        let is_time = !self.is_faulty || self.rng.chance(100);
        if is_time && !runs && self.images[vm].open.is_empty() {
            self.note(|w| format!("person: the image of {} may be used", w.vms[vm]));
            let image = &mut self.images[vm];
            image.stored.record = None;
            image.stored.is_let_go = true;
            image.acknowledged = image.stored.writes;
            image.writer = None;
            self.coverage.images[4] += 1;
        }
    }

    pub(crate) fn back_up_image(&mut self, vm: VmId) {
        self.back_up_own(vm);
        let image = &mut self.images[vm];
        let stored = image.stored.clone();
        image.copy = Some(Stored {
            durable: stored.writes,
            ..stored
        });
    }

    /// An image is put back from a copy while no QEMU of the VM lives.
    pub(crate) fn restore_image(&mut self, vm: VmId) -> bool {
        let lives = self.machines.iter().any(|m| m.slots[vm].qemu.is_some());
        let Some(copy) = self.images[vm].copy.clone() else {
            return self.restore_own(vm);
        };
        let fits = self.has_image(vm) && !lives && copy.writes < self.images[vm].stored.writes;
        if fits {
            self.note(|w| format!("the image of {} is put back from a copy", w.vms[vm]));
            self.images[vm].stored = copy;
            self.images[vm].is_put_back = true;
        }
        fits || self.restore_own(vm)
    }
}
