//! The data path of a simulated migration: one round of pages, the last pages, the device state.
//!
//! Works on the site. A page is nothing but the version of the guest that it belongs to, and its disk's last write.

use super::model::{
    Happening, MachineId, Memory, Outgoing, Packet, Place, QemuProcess, Receiving, VmId,
};
use super::own_files::{Content, MoveNote};
use super::world::Site;
use godwit_ownership::{Event, StateName, Status};
use godwit_types::{Generation, HostName, MigrationId};

const PRECOPY_MS: u64 = 150;
const PRECOPY_MAX_MS: u64 = 3000;
const RECEIVER_MS: u64 = 4000;

impl Site {
    pub(crate) fn begin_receiving(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
        from: &HostName,
    ) {
        let slot = &mut self.machines[at].slots[vm];
        let Some(process) = slot.process.as_mut() else {
            return;
        };
        let known = process.receiving.as_ref();
        if known.is_some_and(|r| r.migration == *migration) {
            return;
        }
        process.receiving = Some(Receiving {
            migration: migration.clone(),
            from: from.clone(),
            pages: None,
            attempt: Generation(0),
            loaded: false,
        });
        slot.qemu = Some(QemuProcess {
            version: None,
            running: false,
        });
        let (process, migration) = (process.number, migration.clone());
        if !self.expect_image(at, vm, (&migration, from)) {
            // Whoever asks again for the same migration begins anew.
            if let Some(process) = self.process(at, vm) {
                process.receiving = None;
            }
            return self.feed(at, vm, Event::IncomingFailed);
        }
        let looks = Happening::ReceiverLooks {
            at,
            vm,
            process,
            migration,
        };
        self.after(RECEIVER_MS, looks);
    }

    /// A destination that has promised nothing gives up after so long a time.
    pub(crate) fn receiver_looks(
        &mut self,
        at: MachineId,
        vm: VmId,
        number: u64,
        migration: &MigrationId,
    ) {
        if !self.is_process(at, vm, number) {
            return;
        }
        let status = self.process(at, vm).map(|p| p.core.status());
        if matches!(status, Some(Status::Incoming { migration: m }) if m == *migration) {
            self.feed(at, vm, Event::IncomingFailed);
        }
    }

    pub(crate) fn begin_precopy(&mut self, at: MachineId, vm: VmId, migration: &MigrationId) {
        let now = self.now;
        let Some(process) = self.process(at, vm) else {
            return;
        };
        let out = process.outgoing.as_ref();
        if out.is_some_and(|out| out.migration == *migration) {
            return;
        }
        let Some(to) = process.asked.get(migration).cloned() else {
            return;
        };
        process.outgoing = Some(Outgoing {
            migration: migration.clone(),
            to,
            began: now,
        });
        let process = process.number;
        if !self.notes_leaving(at, vm, migration) || !self.mirror(at, vm, migration) {
            return self.feed(at, vm, Event::Cancel);
        }
        let delay = 20 + self.rng.below(40);
        self.after(delay, Happening::Precopy { at, vm, process });
    }

    /// With which migration the VM leaves is written down.
    fn notes_leaving(&mut self, at: MachineId, vm: VmId, migration: &MigrationId) -> bool {
        let process = self.machines[at].slots[vm].process.as_ref();
        let outgoing = process.and_then(|process| process.outgoing.as_ref());
        let Some(to) = outgoing.map(|outgoing| outgoing.to.clone()) else {
            return false;
        };
        let note = MoveNote {
            migration: migration.clone(),
            peer: to,
            is_destination: false,
        };
        !self.goes_along(vm) || self.keep_move_note(at, vm, note)
    }

    pub(crate) fn precopy(&mut self, at: MachineId, vm: VmId, number: u64) {
        if !self.is_process(at, vm, number) {
            return;
        }
        let now = self.now;
        let Some(process) = self.process(at, vm) else {
            return;
        };
        let Some(out) = process.outgoing.as_ref() else {
            return;
        };
        if process.core.state_name() == StateName::Precopy {
            if now > out.began + PRECOPY_MAX_MS {
                self.feed(at, vm, Event::Cancel);
            } else if !self.copies_a_part(at, vm) {
                self.feed(at, vm, Event::SwitchoverRequested);
            }
        }
        let process = number;
        self.after(PRECOPY_MS, Happening::Precopy { at, vm, process });
    }

    /// A part of the disk that goes along is there. Whether more is to be copied before the guest stops.
    fn copies_a_part(&mut self, at: MachineId, vm: VmId) -> bool {
        let Some((migration, Place::Name(to))) = self.outgoing(at, vm) else {
            return false;
        };
        let (to, content) = (self.address[to], self.content_to_send(at, vm));
        let is_reached = self.machines[to].is_up && self.connects(at, to);
        let arriving = self.machines[to].slots[vm].own.notes.arriving.as_ref();
        let comes = arriving.is_some_and(|arrival| arrival.whole.is_none());
        let content = content.filter(|_| is_reached && comes && self.goes_along(vm));
        let part = content.map(|content| Content {
            is_part: true,
            ..content
        });
        self.fill_copy(to, vm, &migration, part);
        part.is_some() && self.rng.chance(300)
    }

    fn outgoing(&mut self, at: MachineId, vm: VmId) -> Option<(MigrationId, Place)> {
        let out = self.process(at, vm)?.outgoing.clone()?;
        let to = self.id_of(&out.to)?;
        Some((out.migration, Place::Name(to)))
    }

    pub(crate) fn send_last_pages(&mut self, at: MachineId, vm: VmId, attempt: Generation) {
        let version = self.version_at(at, vm);
        if let (Some((migration, to)), Some(version)) = (self.outgoing(at, vm), version) {
            let packet = Packet::LastPages {
                vm,
                migration,
                attempt,
                memory: Memory {
                    version,
                    remembered: self.remembered(at, vm),
                    disk: self.content_to_send(at, vm),
                },
            };
            self.send(Place::Machine(at), to, packet);
        }
    }

    pub(crate) fn send_device_state(&mut self, at: MachineId, vm: VmId, attempt: Generation) {
        let version = self.version_at(at, vm);
        if let (Some((migration, to)), Some(_)) = (self.outgoing(at, vm), version) {
            let packet = Packet::DeviceState {
                vm,
                migration,
                attempt,
            };
            self.send(Place::Machine(at), to, packet);
            self.local(at, vm, Event::DeviceStateSent { attempt });
        }
    }

    fn receiving(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
    ) -> Option<&mut Receiving> {
        self.heard_peer(at, vm);
        let receiving = self.process(at, vm)?.receiving.as_mut()?;
        (receiving.migration == *migration).then_some(receiving)
    }

    pub(crate) fn receive_last_pages(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
        attempt: Generation,
        memory: Memory,
    ) {
        let Some(receiving) = self.receiving(at, vm, migration) else {
            return;
        };
        if attempt < receiving.attempt || receiving.loaded {
            return;
        }
        receiving.attempt = attempt;
        receiving.pages = Some(memory);
        let from = receiving.from.clone();
        self.fill_copy(at, vm, migration, memory.disk);
        if let Some(from) = self.id_of(&from) {
            let packet = Packet::LastPagesApplied {
                vm,
                migration: migration.clone(),
                attempt,
            };
            self.send(Place::Machine(at), Place::Name(from), packet);
        }
    }

    pub(crate) fn last_pages_applied(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
        attempt: Generation,
    ) {
        self.heard_peer(at, vm);
        let out = self.process(at, vm).and_then(|p| p.outgoing.as_ref());
        if out.is_some_and(|out| out.migration == *migration) {
            self.feed(at, vm, Event::LastPagesApplied { attempt });
        }
    }

    /// Loads what came; that the pages are complete is the source's promise.
    pub(crate) fn receive_device_state(
        &mut self,
        at: MachineId,
        vm: VmId,
        migration: &MigrationId,
        attempt: Generation,
    ) {
        let Some(receiving) = self.receiving(at, vm, migration) else {
            return;
        };
        if attempt < receiving.attempt || receiving.loaded {
            return;
        }
        receiving.loaded = true;
        let pages = receiving.pages;
        let Some(qemu) = self.machines[at].slots[vm].qemu.as_mut() else {
            return;
        };
        let Some(memory) = pages else {
            return self.local(at, vm, Event::IncomingFailed);
        };
        qemu.version = Some(memory.version);
        self.remembers(at, vm, memory.remembered);
        match self.copy_is_whole(at, vm, attempt) {
            true => self.local(at, vm, Event::Loaded { attempt }),
            false => self.local(at, vm, Event::IncomingFailed),
        }
    }
}
