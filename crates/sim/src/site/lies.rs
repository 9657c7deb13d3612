//! A host that lies: to surveys, polls, other hosts' questions, and in messages about any VM.
//!
//! Works on the site. What it once held itself is not judged; every other VM is.

use super::images::DISK;
use super::model::{Exempt, MachineId, Packet, Place, Reply};
use super::world::Site;
use godwit_ownership::PeerMessage;
use godwit_types::image::{ImageId, KnownImage};
use godwit_types::site::{
    Claim, RecordSaid, SiteAnswer, SiteQuestion, SiteTable, SiteVm, Stamp, Standing,
};
use godwit_types::{Generation, HostName, MigrationId};

impl Site {
    pub(crate) fn begin_to_lie(&mut self, at: MachineId) -> bool {
        if self.machines.iter().any(|m| m.lies) || !self.machines[at].is_up {
            return false;
        }
        self.machines[at].lies = true;
        self.has_liar = true;
        for vm in 0..self.vms.len() {
            if self.guests[vm].held_by.contains(&at) {
                self.exempt(vm, Exempt::Liar);
            }
        }
        true
    }

    fn any_name(&mut self) -> HostName {
        let name = self.rng.index(self.names.len());
        self.names[name].clone()
    }

    fn any_generation(&mut self, near: Generation) -> Generation {
        let step = match self.rng.below(4) {
            0 => 1,
            1 => self.rng.below(20),
            2 => 1 << 20,
            _ => 1 << 34,
        };
        match self.rng.chance(300) {
            true => Generation(near.0.saturating_sub(step)),
            false => Generation(near.0.saturating_add(step)),
        }
    }

    fn false_claim(&mut self, near: Generation) -> Claim {
        let generation = self.any_generation(near);
        let other = self.any_name();
        match self.rng.below(6) {
            0 => Claim::No,
            1 => Claim::Receiving { from: other },
            2 => Claim::Holds {
                generation,
                on: true,
            },
            3 => Claim::Gave {
                generation,
                to: other,
            },
            4 => Claim::Promised {
                generation,
                from: other,
            },
            _ => Claim::Moved {
                generation,
                to: other,
            },
        }
    }

    fn false_record(&mut self, vm: usize) -> RecordSaid {
        let slot = &self.machines.iter().flat_map(|m| m.slots.get(vm));
        let known = slot.clone().filter_map(|s| s.journal.seen.as_ref());
        let near = known.map(|r| r.highest).max().unwrap_or_default();
        let claim = self.false_claim(near);
        RecordSaid {
            vm: self.vms[vm].clone(),
            highest: self.any_generation(near),
            claim,
            may_live: self.rng.chance(500),
            images: self.false_images(near),
        }
    }

    /// An image that nobody has, taken more often than any.
    fn false_images(&mut self, near: Generation) -> Vec<KnownImage> {
        let (generation, is_real) = (self.any_generation(near), self.rng.chance(500));
        let said = KnownImage {
            disk: DISK.to_owned(),
            image: ImageId::new(0),
            generation,
            taken: self.rng.below(1 << 49),
        };
        is_real.then_some(said).into_iter().collect()
    }

    /// A word that no controller has said yet.
    fn false_word(&mut self, heard: Stamp) -> Stamp {
        let step = match self.rng.below(3) {
            0 => 1,
            1 => 1 << 40,
            _ => u64::MAX,
        };
        Stamp {
            epoch: heard.epoch.saturating_add(step),
            number: heard.number.saturating_add(step),
        }
    }

    /// A table that was never told: other holders, other generations, VMs that were deleted, other machines.
    fn falsify(&mut self, table: &mut SiteTable) {
        let holder = self.any_name();
        let near = table.vms.values().map(|row| row.held).max();
        let held = self.any_generation(near.unwrap_or_default());
        for row in table.vms.values_mut() {
            row.stamp.number = u64::MAX;
            row.held = held;
            row.holder = Some(holder.clone());
            row.may_hold = [holder.clone()].into();
            row.deleted = self.rng.chance(200);
        }
        if self.rng.chance(300) {
            let machine = self.rng.index(self.machines.len());
            table.hosts_at.number = self.rng.below(1 << 41);
            for host in &mut table.hosts {
                host.machine_id = format!("machine-{machine}");
                host.counter = self.rng.below(8);
            }
        }
    }

    pub(crate) fn lie(&mut self, reply: Reply) -> Reply {
        if self.rng.chance(400) {
            return reply;
        }
        match reply {
            Reply::Heard(mut heard, reports, places) => {
                let vm = self.rng.index(self.vms.len());
                heard.records.retain(|r| r.vm != self.vms[vm]);
                heard.records.push(self.false_record(vm));
                if self.rng.chance(20) {
                    heard.knows.stamp = self.false_word(heard.knows.stamp);
                }
                Reply::Heard(heard, reports, places)
            }
            Reply::Surveyed(mut answer) => {
                answer.claim = self.false_claim(answer.highest);
                answer.images = self.false_images(answer.highest);
                if self.rng.chance(300) {
                    answer.highest = self.any_generation(answer.highest);
                }
                Reply::Surveyed(answer)
            }
            Reply::Whole(mut whole) => {
                let vm = self.rng.index(self.vms.len());
                whole.records.retain(|r| r.vm != self.vms[vm]);
                whole.records.push(self.false_record(vm));
                self.falsify(&mut whole.table);
                Reply::Whole(whole)
            }
            other => other,
        }
    }

    /// What a host that lies says to one that asks before it boots.
    pub(crate) fn lie_to_host(
        &mut self,
        asker: &HostName,
        question: &SiteQuestion,
        answer: &mut SiteAnswer,
    ) {
        for wish in &question.wishes {
            let holder = match self.rng.chance(500) {
                true => asker.clone(),
                false => self.any_name(),
            };
            let row = SiteVm {
                holder: Some(holder),
                held: self.any_generation(wish.generation),
                may_hold: [asker.clone()].into(),
                deleted: self.rng.chance(100),
                stamp: Stamp {
                    epoch: self.rng.below(3),
                    number: self.rng.below(1000),
                },
            };
            answer.vms.insert(wish.vm.clone(), row);
        }
        if self.rng.chance(100) {
            answer.standing = Standing::Removed;
        }
    }

    /// A word about a VM that is none of this host's business.
    pub(crate) fn lie_to_peers(&mut self, at: MachineId) {
        if !self.machines[at].lies || !self.rng.chance(400) {
            return;
        }
        let (vm, to) = (
            self.rng.index(self.vms.len()),
            self.rng.index(self.names.len()),
        );
        let near = self.false_record(vm).highest;
        let generation = match self.rng.chance(600) {
            true => Generation(near.0 & 0xffff),
            false => near,
        };
        let number = self.rng.below(self.migrations + 1);
        let Ok(migration) = MigrationId::new(format!("m{number}")) else {
            return;
        };
        let message = match self.rng.below(10) {
            0 => PeerMessage::Prepared {
                migration,
                highest: generation,
            },
            1 => PeerMessage::Ready {
                migration,
                generation,
            },
            2 => PeerMessage::Permit {
                migration,
                generation,
            },
            3 => PeerMessage::AskHolding {
                migration,
                generation,
            },
            4 => PeerMessage::Holding {
                migration,
                generation,
            },
            5 => PeerMessage::Confirmed { generation },
            6 => PeerMessage::Superseded {
                generation,
                by: Generation(generation.0.saturating_add(1)),
            },
            7 => PeerMessage::Refused {
                migration,
                generation,
            },
            8 => PeerMessage::abort(migration),
            _ => PeerMessage::Withdrawn {
                migration,
                generation,
            },
        };
        let packet = Packet::Peer { vm, message };
        self.send(Place::Machine(at), Place::Name(to), packet);
    }
}
