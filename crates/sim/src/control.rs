//! The controller, the operator and whoever uses the VM.
//!
//! The controller owns a ledger and may be killed, or restored from an old database; it never knows for sure
//! where the VM is. The operator fences before resolving, as the command demands.

use crate::model::{HOSTS, Happening, HostId, Packet, Place};
use crate::world::World;
use godwit_ownership::{Event, GenerationLedger, HostRecord, Phase, StateName, Status};
use godwit_types::{Generation, HostName, MigrationId};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(crate) struct Controller {
    pub is_up: bool,
    pub ledger: GenerationLedger,
    pub backup: GenerationLedger,
    pub survey: u64,
    pub level: Generation,
    pub heard: BTreeMap<HostName, HostRecord>,
    /// Hosts that are fenced for good: their disks are gone.
    pub fenced: BTreeSet<HostName>,
    pub migrations: u64,
}

impl World {
    pub(crate) fn controller_tick(&mut self) {
        if self.is_faulty {
            let delay = 100 + self.rng.below(200);
            self.after(delay, Happening::ControllerTick);
            if self.controller.is_up {
                self.controller_acts();
            }
        }
    }

    fn controller_acts(&mut self) {
        match self.rng.below(100) {
            0..60 => self.begin_somewhere(),
            60..63 => self.command_any(Event::StopRequested),
            63..66 => self.command_any(Event::PauseRequested),
            66..76 => self.command_everywhere(&Event::StartRequested),
            76..86 => self.command_everywhere(&Event::ResumeRequested),
            86..89 => self.command_any(Event::Cancel),
            89..92 => self.command_any(Event::DeleteRequested),
            92..94 => self.command_any(Event::SwitchoverRequested),
            _ => self.survey(),
        }
    }

    fn command_any(&mut self, event: Event) {
        let host = self.rng.index(HOSTS);
        if event == Event::DeleteRequested {
            // Deleting is for good; only hosts that do not hold the VM are asked, and must refuse or ignore.
            let held = self.hosts[host].disk.seen.as_ref();
            if held.is_some_and(HostRecord::may_hold) {
                return;
            }
        }
        self.command(host, event);
    }

    pub(crate) fn command_everywhere(&mut self, event: &Event) {
        for host in 0..HOSTS {
            self.command(host, event.clone());
        }
    }

    pub(crate) fn command(&mut self, host: HostId, event: Event) {
        self.send(Place::Controller, Place::Host(host), Packet::Command(event));
    }

    fn begin_somewhere(&mut self) {
        let from = (0..HOSTS)
            .find(|h| self.runs_at(*h))
            .filter(|_| self.rng.chance(900))
            .unwrap_or_else(|| self.rng.index(HOSTS));
        let to = (from + 1 + self.rng.index(HOSTS - 1)) % HOSTS;
        self.begin(from, to);
    }

    pub(crate) fn begin(&mut self, from: HostId, to: HostId) {
        self.controller.migrations += 1;
        let Ok(migration) = MigrationId::new(format!("m{}", self.controller.migrations)) else {
            return;
        };
        let Some(generation) = self.highest_known().next() else {
            return;
        };
        self.coverage.migrations[0] += 1;
        let prepare = Event::PrepareIncoming {
            migration: migration.clone(),
            from: self.names[from].clone(),
            generation,
        };
        self.command(to, prepare);
        let began = Event::MigrationBegan {
            migration,
            to: self.names[to].clone(),
            generation,
        };
        let delay = 20 + self.rng.below(20);
        let happening = Happening::Deliver {
            from: Place::Controller,
            to: Place::Host(from),
            packet: Packet::Command(began),
        };
        self.after(delay, happening);
    }

    /// What the controller's ledger would have learned by asking every host just now.
    fn highest_known(&self) -> Generation {
        let records = self.hosts.iter().flat_map(|h| &h.disk.seen);
        let written = records.map(|r| r.highest).max().unwrap_or_default();
        let processes = self.hosts.iter().filter_map(|h| h.process.as_ref());
        let known = processes.map(|p| p.core.highest()).max();
        written.max(known.unwrap_or_default())
    }

    pub(crate) fn kill_controller(&mut self) -> bool {
        if !self.controller.is_up {
            return false;
        }
        self.note(|_| "controller killed".to_owned());
        self.controller.is_up = false;
        self.controller.heard.clear();
        let delay = 100 + self.rng.below(2000);
        self.after(delay, Happening::ControllerStarts);
        true
    }

    pub(crate) fn restore_controller(&mut self) -> bool {
        self.note(|_| "controller restored from an old database".to_owned());
        self.controller.ledger = self.controller.backup.clone();
        self.controller.heard.clear();
        true
    }

    /// Asks every host; what they answer may let the VM begin anew elsewhere.
    pub(crate) fn survey(&mut self) {
        let Ok(level) = self.controller.ledger.survey_level(&self.vm) else {
            return;
        };
        let survey = self.next_number();
        self.controller.survey = survey;
        self.controller.level = level;
        self.controller.heard.clear();
        for host in 0..HOSTS {
            let packet = Packet::Survey { survey, level };
            self.send(Place::Controller, Place::Host(host), packet);
        }
    }

    pub(crate) fn answer_survey(&mut self, host: HostId, level: Generation) {
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let Some(survey) = process.surveys.remove(&level) else {
            return;
        };
        let record = process.core.record().clone();
        let packet = Packet::Surveyed {
            survey,
            host,
            record,
        };
        self.send(Place::Host(host), Place::Controller, packet);
    }

    pub(crate) fn surveyed(&mut self, survey: u64, host: HostId, record: HostRecord) {
        if !self.controller.is_up || survey != self.controller.survey {
            return;
        }
        if self.rng.chance(300) {
            self.controller.backup = self.controller.ledger.clone();
        }
        let name = self.names[host].clone();
        self.controller.ledger.learn(&record);
        self.controller.heard.insert(name, record);
        let enrolled: BTreeSet<_> = self.names.iter().cloned().collect();
        let (heard, fenced) = (
            self.controller.heard.clone(),
            self.controller.fenced.clone(),
        );
        let level = self.controller.level;
        let grant = self
            .controller
            .ledger
            .grant(&self.vm, level, &enrolled, &heard, &fenced);
        if let Ok(generation) = grant {
            let candidates: Vec<_> = heard.iter().collect();
            let (name, _) = candidates[self.rng.index(candidates.len())];
            let grantee = self.id_of(name);
            let event = Event::Granted {
                generation,
                expect: level,
            };
            // A survey is good for one grant.
            self.controller.survey = 0;
            if let Some(host) = grantee {
                self.note(|w| format!("controller grants {generation} to {}", w.name(host)));
                self.command(host, event);
            }
        }
    }

    /// An operator sees "in doubt", powers the peer off and decides.
    pub(crate) fn operator_resolves(&mut self, run_here: bool) -> bool {
        let Some((host, peer)) = self.find_doubt(run_here) else {
            return false;
        };
        self.note(|w| {
            format!(
                "operator: {} fenced, resolve at {} (run here: {run_here})",
                w.name(peer),
                w.name(host)
            )
        });
        if self.crash(peer) {
            let delay = 500 + self.rng.below(6000);
            self.after(delay, Happening::HostStarts { host: peer });
        }
        if run_here {
            self.decided = Some(host);
            self.guest.may_go_back_at = Some(host);
        } else if let Some(process) = self.hosts[host].process.as_mut() {
            process.may_discard = true;
        }
        let confirm_fenced = self.names[peer].clone();
        self.feed(
            host,
            Event::OperatorResolve {
                run_here,
                confirm_fenced,
            },
        )
    }

    fn find_doubt(&self, run_here: bool) -> Option<(HostId, HostId)> {
        (0..HOSTS).find_map(|host| {
            let process = self.hosts[host].process.as_ref()?;
            let waits_for_gift = process.core.state_name() == StateName::ReadyInDoubt;
            match process.core.status() {
                Status::InDoubt { peer, .. } if waits_for_gift != run_here => {
                    let peer = self.id_of(&peer)?;
                    (!self.was_decided_for(peer)).then_some((host, peer))
                }
                _ => None,
            }
        })
    }

    /// Whether an operator has told that host to run the VM and the other side has not heard of it yet: nobody
    /// decides against that now. (If somebody does, the higher generation wins once the hosts talk.)
    fn was_decided_for(&self, host: HostId) -> bool {
        let record = self.hosts[host].disk.seen.as_ref();
        let is_open = record.is_some_and(|r| {
            matches!(
                &r.phase,
                Phase::Holds {
                    unconfirmed: Some(_),
                    ..
                }
            )
        });
        is_open && self.decided == Some(host)
    }

    /// A host burns down: fenced for good, its disk gone; it comes back empty.
    pub(crate) fn lose_host(&mut self, host: HostId) -> bool {
        // If every host burns down and the database is old, nobody knows anything any more.
        if self.losses + 1 >= HOSTS || self.hosts[host].is_up && !self.crash(host) {
            return false;
        }
        self.losses += 1;
        // What that host knew about generations may be known to nobody else.
        self.ran = Generation(0);
        self.note(|w| format!("{}: lost for good, its disk gone", w.name(host)));
        self.mourn(host);
        self.hosts[host].disk = Default::default();
        let name = self.names[host].clone();
        self.controller.fenced.insert(name);
        self.survey();
        let delay = 3000 + self.rng.below(3000);
        self.after(delay, Happening::HostStarts { host });
        true
    }

    /// If the host may have held the VM, nobody may hold it for a while: it is lost or deleted here.
    pub(crate) fn mourn(&mut self, host: HostId) {
        let gone = self.names[host].clone();
        let giver = (0..HOSTS).find(|h| {
            let disk = &self.hosts[*h].disk;
            let known = self.hosts[*h].process.as_ref().map(|p| p.core.record());
            let mut records = disk.seen.iter().chain(&disk.durable).chain(known);
            records.any(|r| matches!(&r.phase, Phase::Gave { to, .. } if *to == gone))
        });
        // The host that comes back empty will say that it never took it.
        self.guest.may_go_back_at = giver.or(self.guest.may_go_back_at);
        let disk = &self.hosts[host].disk;
        let mut records = disk.seen.iter().chain(&disk.durable);
        if records.any(HostRecord::may_hold) {
            let disks = self.hosts.iter().map(|h| &h.disk);
            let all = disks.flat_map(|d| d.seen.iter().chain(&d.durable));
            self.lost_at = all.map(|r| r.highest).max().max(self.lost_at);
        }
    }
}
