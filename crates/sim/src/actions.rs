//! The shell of the simulated VM process: carries out the core's actions, one at a time.
//!
//! Works on the world. Anything may be killed between two actions.

use crate::faults::Fault;
use crate::model::{HOSTS, Happening, HostId, Outgoing, Packet, Place, QemuProcess, Version};
use crate::world::World;
use godwit_ownership::{Action, Ending, Event, HostRecord, Phase, RunPermit, Status, Timer};
use godwit_types::Generation;

/// Silence during switchover, in simulated milliseconds.
const SWITCHOVER_MS: u64 = 500;
const ASK_MS: u64 = 1000;

impl World {
    pub(crate) fn carry_out(&mut self, host: HostId, action: Action) {
        match action {
            Action::Persist(record) => {
                if let Phase::Incoming { migration, from } = &record.phase {
                    self.begin_receiving(host, migration, from);
                }
                self.persist(host, record);
            }
            Action::Boot(permit) => self.boot(host, &permit),
            Action::Cont(permit) => self.cont(host, &permit),
            Action::StopGuest { attempt } => self.stop_guest(host, attempt),
            Action::SendLastPages { attempt } => self.send_last_pages(host, attempt),
            Action::SendDeviceState { attempt } => self.send_device_state(host, attempt),
            Action::Send { to, message } => {
                if let Some(to) = self.id_of(&to) {
                    self.send(Place::Host(host), Place::Host(to), Packet::Peer(message));
                }
            }
            Action::KillQemu => self.kill_own_qemu(host),
            Action::Arm(timer) => self.arm(host, timer),
            Action::Disarm(timer) => self.disarm(host, timer),
            Action::EndMigration { outcome, .. } => self.end_migration(host, outcome),
            Action::Surveyed { level } => self.answer_survey(host, level),
            Action::Report(status) => self.report(host, &status),
            Action::RestoreDirty
            | Action::ReleaseThrottle
            | Action::Cleanup
            | Action::Refuse { .. }
            | Action::Ignored { .. } => {}
        }
    }

    fn persist(&mut self, host: HostId, record: HostRecord) {
        let known = self.hosts[host].disk.seen.as_ref().map(|r| r.highest);
        if known.is_some_and(|highest| record.highest < highest) || record.check().is_err() {
            self.violated(format!(
                "{} writes a wrong record: {record:?}",
                self.name(host)
            ));
            return;
        }
        if self.strikes(Fault::WriteFails, 20) {
            self.feed_first(host, Event::PersistFailed { unchanged: true });
        } else if self.strikes(Fault::WriteUnknown, 20) {
            self.write_with_unknown_outcome(host, record);
        } else {
            self.hosts[host].disk.seen = Some(record.clone());
            let delay = 1 + self.rng.below(4);
            if let Some(process) = self.hosts[host].process.as_mut() {
                process.writing = Some(record);
                let process = process.number;
                self.after(delay, Happening::Synced { host, process });
            }
        }
    }

    fn write_with_unknown_outcome(&mut self, host: HostId, record: HostRecord) {
        let (renamed, durable) = (self.rng.chance(600), self.rng.chance(500));
        let disk = &mut self.hosts[host].disk;
        if renamed {
            disk.seen = Some(record.clone());
            if durable {
                disk.durable = Some(record);
            }
        }
        self.feed_first(host, Event::PersistFailed { unchanged: false });
    }

    pub(crate) fn synced(&mut self, host: HostId, number: u64) {
        let at = &mut self.hosts[host];
        let Some(process) = at.process.as_mut().filter(|p| p.number == number) else {
            return;
        };
        if let Some(record) = process.writing.take() {
            at.disk.durable = Some(record);
            self.feed_first(host, Event::Persisted);
        }
    }

    fn boot(&mut self, host: HostId, permit: &RunPermit) {
        let kept = self.hosts.iter().filter_map(|h| h.qemu.as_ref());
        let is_alive = kept
            .filter_map(|q| q.version)
            .any(|v| v == self.guest.current);
        if is_alive && !self.guest.died && self.guest.boots > 0 {
            self.violated(format!(
                "{} boots the guest anew although its state is still there",
                self.name(host)
            ));
        }
        self.guest.boots += 1;
        self.guest.current = Version {
            boot: self.guest.boots,
            step: 0,
        };
        self.hosts[host].qemu = Some(QemuProcess {
            version: Some(self.guest.current),
            running: true,
        });
        self.guest.died = false;
        self.ran_under(host, permit.generation());
    }

    fn cont(&mut self, host: HostId, permit: &RunPermit) {
        let current = self.guest.current;
        let Some(qemu) = self.hosts[host].qemu.as_mut() else {
            return;
        };
        let (version, was_running) = (qemu.version, qemu.running);
        qemu.running = true;
        let resolved = self.guest.may_go_back_at.take() == Some(host);
        if let Some(version) = version.filter(|_| resolved) {
            self.guest.current = version;
        } else if version != Some(current) && !was_running {
            self.violated(format!(
                "{} runs the guest at {version:?}, its last state was {current:?}",
                self.name(host)
            ));
        }
        self.guest.died = false;
        self.ran_under(host, permit.generation());
    }

    fn ran_under(&mut self, host: HostId, generation: Generation) {
        if generation < self.ran {
            self.violated(format!(
                "{} runs under generation {generation} after {}",
                self.name(host),
                self.ran
            ));
        }
        self.ran = generation;
    }

    fn stop_guest(&mut self, host: HostId, attempt: Option<Generation>) {
        let Some(qemu) = self.hosts[host].qemu.as_mut() else {
            return;
        };
        qemu.running = false;
        if let Some(attempt) = attempt {
            self.local(host, Event::Stopped { attempt });
        }
    }

    fn outgoing(&self, host: HostId) -> Option<Outgoing> {
        self.hosts[host].process.as_ref()?.outgoing.clone()
    }

    fn version_at(&self, host: HostId) -> Option<Version> {
        self.hosts[host].qemu.as_ref()?.version
    }

    fn send_last_pages(&mut self, host: HostId, attempt: Generation) {
        if let (Some(out), Some(version)) = (self.outgoing(host), self.version_at(host)) {
            let packet = Packet::LastPages {
                migration: out.migration,
                attempt,
                version,
            };
            self.send(Place::Host(host), Place::Host(out.to), packet);
        }
    }

    fn send_device_state(&mut self, host: HostId, attempt: Generation) {
        if let (Some(out), Some(_)) = (self.outgoing(host), self.version_at(host)) {
            let packet = Packet::DeviceState {
                migration: out.migration,
                attempt,
            };
            self.send(Place::Host(host), Place::Host(out.to), packet);
            self.local(host, Event::DeviceStateSent { attempt });
        }
    }

    fn kill_own_qemu(&mut self, host: HostId) {
        let Some(qemu) = self.hosts[host].qemu.take() else {
            return;
        };
        let was_last = qemu.version == Some(self.guest.current) && !self.has_current_copy();
        let process = self.hosts[host].process.as_ref();
        let is_allowed = process.is_some_and(|p| p.may_discard) || self.guest.died;
        if was_last && !is_allowed {
            self.violated(format!(
                "{} destroys the last copy of the guest",
                self.name(host)
            ));
        }
        if self.was_given(host) && !process_may_discard(self, host) {
            self.violated(format!(
                "{} destroys what it promised, after it was given the VM",
                self.name(host)
            ));
        }
    }

    fn has_current_copy(&self) -> bool {
        let copies = self.hosts.iter().filter_map(|h| h.qemu.as_ref());
        copies
            .filter_map(|q| q.version)
            .any(|v| v == self.guest.current)
    }

    /// Whether this host is durably ready for a generation that its source has durably given.
    fn was_given(&self, host: HostId) -> bool {
        let Some(Phase::Ready { generation, .. }) =
            self.hosts[host].disk.durable.as_ref().map(|r| &r.phase)
        else {
            return false;
        };
        let others = (0..HOSTS).filter(|h| *h != host);
        let mut records = others.filter_map(|h| self.hosts[h].disk.durable.as_ref());
        records.any(
            |r| matches!(&r.phase, Phase::Gave { generation: given, .. } if given == generation),
        )
    }

    fn arm(&mut self, host: HostId, timer: Timer) {
        let (stamp, spread) = (self.next_number(), self.rng.below(100));
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let number = process.number;
        let delay = match timer {
            Timer::Switchover => {
                process.switchover = Some(stamp);
                SWITCHOVER_MS
            }
            Timer::Ask => {
                process.ask = Some(stamp);
                ASK_MS
            }
        };
        let happening = Happening::Fires {
            host,
            process: number,
            timer,
            stamp,
        };
        self.after(delay + spread, happening);
    }

    fn disarm(&mut self, host: HostId, timer: Timer) {
        if let Some(process) = self.hosts[host].process.as_mut() {
            match timer {
                Timer::Switchover => process.switchover = None,
                Timer::Ask => process.ask = None,
            }
        }
    }

    /// The peer was heard: the silence begins anew.
    pub(crate) fn heard_peer(&mut self, host: HostId) {
        let process = self.hosts[host].process.as_ref();
        if process.is_some_and(|p| p.switchover.is_some()) {
            self.arm(host, Timer::Switchover);
        }
    }

    fn end_migration(&mut self, host: HostId, outcome: Ending) {
        let Some(process) = self.hosts[host].process.as_mut() else {
            return;
        };
        let was_source = process.outgoing.take().is_some();
        process.receiving = None;
        if was_source {
            let slot = match outcome {
                Ending::Completed => 1,
                Ending::Refused => 2,
                Ending::Cancelled | Ending::Failed => 3,
            };
            self.coverage.migrations[slot] += 1;
        }
    }

    fn report(&mut self, host: HostId, status: &Status) {
        self.note(|w| format!("{}: shows {status:?}", w.name(host)));
        match status {
            Status::Migrating { migration } => self.begin_precopy(host, migration),
            Status::InDoubt { .. } => self.coverage.doubts += 1,
            Status::Down { .. } => {
                let delay = 50 + self.rng.below(500);
                self.after(delay, Happening::OwnerPolicy { host });
            }
            _ => {}
        }
    }
}

fn process_may_discard(world: &World, host: HostId) -> bool {
    let process = world.hosts[host].process.as_ref();
    process.is_some_and(|p| p.may_discard)
}
