//! Both halves of a migration's data path: precopy, the last pages, the device state, and who gives up when.
//!
//! Works on the world. A page is nothing but the version of the guest that it belongs to.

use crate::model::{Happening, HostId, Outgoing, Packet, Place, QemuProcess, Receiving, Version};
use crate::world::World;
use godwit_ownership::{Event, StateName, Status};
use godwit_types::{Generation, HostName, MigrationId};

/// Between two rounds of precopy.
const PRECOPY_MS: u64 = 20;
/// A source gives up precopy after this.
const PRECOPY_MAX_MS: u64 = 2000;
/// A destination that promised nothing gives up after so much silence.
const RECEIVER_MS: u64 = 3000;

impl World {
    /// The core has agreed to receive: a QEMU is started for it.
    pub(crate) fn begin_receiving(
        &mut self,
        host: HostId,
        migration: &MigrationId,
        from: &HostName,
    ) {
        let (now, from) = (self.now, self.id_of(from));
        let at = &mut self.hosts[host];
        let (Some(process), Some(from)) = (at.process.as_mut(), from) else {
            return;
        };
        if process
            .receiving
            .as_ref()
            .is_some_and(|r| r.migration == *migration)
        {
            return;
        }
        process.receiving = Some(Receiving {
            migration: migration.clone(),
            from,
            pages: None,
            attempt: Generation(0),
            loaded: false,
            heard: now,
        });
        at.qemu = Some(QemuProcess {
            version: None,
            running: false,
        });
        let process = process.number;
        self.after(RECEIVER_MS, Happening::ReceiverLooks { host, process });
    }

    pub(crate) fn receiver_looks(&mut self, host: HostId, number: u64) {
        if !self.is_process(host, number) {
            return;
        }
        let now = self.now;
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        // A receiver whose migration the core does not know (any more) ends by itself and says nothing.
        let known = match process.core.status() {
            Status::Incoming { migration } => Some(migration),
            _ => None,
        };
        let idle = !process.core.is_writing();
        process
            .receiving
            .take_if(|r| idle && known.as_ref() != Some(&r.migration));
        let Some(heard) = process.receiving.as_ref().map(|r| r.heard) else {
            return;
        };
        if now >= heard + RECEIVER_MS {
            self.feed(host, Event::IncomingFailed);
        }
        let process = number;
        self.after(RECEIVER_MS, Happening::ReceiverLooks { host, process });
    }

    /// The core has begun to migrate (or goes on after an attempt that was rolled back).
    pub(crate) fn begin_precopy(&mut self, host: HostId, migration: &MigrationId) {
        let now = self.now;
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let known = process
            .outgoing
            .as_ref()
            .is_some_and(|o| o.migration == *migration);
        let Some(to) = process.asked.get(migration).copied().filter(|_| !known) else {
            return;
        };
        process.outgoing = Some(Outgoing {
            migration: migration.clone(),
            to,
            began: now,
            acknowledged: 0,
        });
        let process = process.number;
        self.after(1, Happening::Precopy { host, process });
    }

    pub(crate) fn precopy(&mut self, host: HostId, number: u64) {
        if !self.is_process(host, number) {
            return;
        }
        let (now, hasty) = (self.now, self.rng.chance(500));
        let Some(process) = self.hosts[host].process.as_ref() else {
            return;
        };
        let (Some(out), state) = (process.outgoing.clone(), process.core.state_name()) else {
            return;
        };
        if state == StateName::Precopy {
            if now > out.began + PRECOPY_MAX_MS {
                self.feed(host, Event::Cancel);
            } else if out.acknowledged >= 2 && hasty {
                self.feed(host, Event::SwitchoverRequested);
            } else if let Some(version) = self.hosts[host].qemu.as_ref().and_then(|q| q.version) {
                let packet = Packet::Pages {
                    migration: out.migration,
                    version,
                };
                self.send(Place::Host(host), Place::Host(out.to), packet);
            }
        }
        let process = number;
        self.after(PRECOPY_MS, Happening::Precopy { host, process });
    }

    fn receiving(&mut self, host: HostId, migration: &MigrationId) -> Option<&mut Receiving> {
        let now = self.now;
        let process = self.hosts[host].process.as_mut()?;
        let receiving = process.receiving.as_mut()?;
        if receiving.migration != *migration {
            return None;
        }
        receiving.heard = now;
        Some(receiving)
    }

    pub(crate) fn receive_pages(
        &mut self,
        host: HostId,
        migration: &MigrationId,
        version: Version,
    ) {
        let Some(receiving) = self.receiving(host, migration) else {
            return;
        };
        // Within a channel the stream keeps its order: an older state does not overwrite a newer one.
        if receiving.pages.is_none_or(|have| have.step <= version.step) {
            receiving.pages = Some(version);
        }
        let from = receiving.from;
        let packet = Packet::PagesApplied {
            migration: migration.clone(),
        };
        self.send(Place::Host(host), Place::Host(from), packet);
    }

    pub(crate) fn receive_last_pages(
        &mut self,
        host: HostId,
        migration: &MigrationId,
        attempt: Generation,
        version: Version,
    ) {
        let Some(receiving) = self.receiving(host, migration) else {
            return;
        };
        if attempt < receiving.attempt || receiving.loaded {
            return;
        }
        receiving.attempt = attempt;
        receiving.pages = Some(version);
        let from = receiving.from;
        let packet = Packet::LastPagesApplied {
            migration: migration.clone(),
            attempt,
        };
        self.send(Place::Host(host), Place::Host(from), packet);
    }

    /// Loads what came; that the pages are complete is the source's promise.
    pub(crate) fn receive_device_state(
        &mut self,
        host: HostId,
        migration: &MigrationId,
        attempt: Generation,
    ) {
        let Some(receiving) = self.receiving(host, migration) else {
            return;
        };
        if attempt < receiving.attempt || receiving.loaded {
            return;
        }
        receiving.loaded = true;
        let pages = receiving.pages;
        let Some(qemu) = self.hosts[host].qemu.as_mut() else {
            return;
        };
        match pages {
            Some(version) => {
                qemu.version = Some(version);
                self.local(host, Event::Loaded { attempt });
            }
            None => self.local(host, Event::IncomingFailed),
        }
    }
}
