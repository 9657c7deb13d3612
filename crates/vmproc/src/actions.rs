//! What the ownership core says, done.
//!
//! Each action is finished before the next; what it brings about comes back as an event. Part of [`Vm`].

use crate::disks;
use crate::faults::{after_journal, before_journal, reached};
use crate::hypervisor::{Hyper, QMP_WAIT, Start, internal, remove_leftovers};
use crate::migration::{Driver, Migration};
use crate::source::Command;
use crate::succession::way_out;
use crate::unsure::Unsure;
use crate::vm::Vm;
use godwit_migrate::protocol::{ToDestination, ToSource};
use godwit_migrate::why::Why;
use godwit_ownership::Phase as HostPhase;
use godwit_ownership::{Action, Event, HostRecord, PeerMessage, RunPermit, Status};
use godwit_qemu::layered::forget_maps;
use godwit_store::StoreError;
use godwit_types::host_api::OutboxMessage;
use godwit_types::migration::{MigrationSpec, Outcome, Phase, Side};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode, Generation, HostName};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a hypervisor is asked to let its guest run before its state is called unknown.
pub(crate) const CONT_WAIT: Duration = Duration::from_secs(30);
/// Why a migration ends whose end a process tells that did not begin it.
const PREDECESSOR_DIED: &str = "its VM process ended during the migration";

impl Vm {
    /// Carries out one action; returns the events that follow from it.
    pub(crate) fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Persist(record) => return Some(self.persist(&record)),
            Action::Boot(permit) => return self.boot(permit),
            Action::Cont(permit) => return self.cont(permit),
            Action::StopGuest { attempt } => return self.stop_guest(attempt),
            Action::SendLastPages { attempt } => self.command(Command::LastPages { attempt }),
            Action::SendDeviceState { attempt } => {
                if let Some(migration) = &self.migration {
                    migration.save_gate.open(attempt);
                }
                self.command(Command::DeviceState { attempt });
            }
            Action::RestoreDirty => self.call_off(),
            Action::ReleaseThrottle => self.lift_throttle(),
            Action::Send { to, message } => self.send(&to, message),
            Action::KillQemu => self.kill_qemu(),
            Action::Cleanup => {
                remove_leftovers(&self.paths);
                self.clean_disks();
            }
            Action::Arm(timer) => self.arm(timer),
            Action::Disarm(timer) => self.timers.disarm(timer),
            Action::EndMigration { migration, outcome } => self.end_migration(&migration, outcome),
            Action::Report(status) => self.show(status),
            // The answer to a survey is the record, which is durable by now.
            Action::Surveyed { .. } => {}
            Action::Refuse { why, .. } => self.outcome.refused = Some(why),
            Action::Ignored { event, why } => {
                tracing::debug!(event = event.name(), why, "ignored");
                self.outcome.ignored.get_or_insert((event, why));
            }
        }
        None
    }

    fn persist(&mut self, record: &HostRecord) -> Event {
        let began = Instant::now();
        before_journal(record);
        match self.store.persist(record) {
            Ok(()) => {
                after_journal(record);
                tracing::info!(phase = %record.phase, ms = began.elapsed().as_millis() as u64, "journal written");
                Event::Persisted
            }
            Err(error) => {
                tracing::error!(%error, "the journal cannot be written");
                let unchanged = StoreError::unchanged(&error);
                if let Some(migration) = &mut self.migration {
                    let why = format!("the journal of this host cannot be written: {error}");
                    migration.journal_trouble.get_or_insert(why);
                }
                self.outcome.failed = Some(internal(error));
                Event::PersistFailed { unchanged }
            }
        }
    }

    /// Starts QEMU and the guest in it. A failure leaves no QEMU.
    fn boot(&mut self, permit: RunPermit) -> Option<Event> {
        self.halted = None;
        let settled = self.settle_images(permit.generation()).map_err(internal);
        if let Err(error) = settled.and_then(|()| self.launch(None)) {
            tracing::error!(%error, "the guest cannot be started");
            self.outcome.failed = Some(error);
            return Some(Event::QemuDied);
        }
        let event = self.cont(permit);
        if event != Some(Event::GuestHalted) {
            return event;
        }
        // A guest that has not begun is no loss.
        self.kill_qemu();
        Some(Event::QemuDied)
    }

    /// Starts a QEMU for this VM.
    pub(crate) fn launch(&mut self, coming: Option<&MigrationSpec>) -> Result<(), ApiError> {
        let spec = self
            .spec
            .clone()
            .ok_or_else(|| internal("the VM has no description on this host"))?;
        self.refuse_beside_another()?;
        remove_leftovers(&self.paths);
        self.launches += 1;
        let hyper = Hyper::start(&Start {
            config: &self.config,
            paths: &self.paths,
            spec: &spec,
            accelerator: self.accelerator(),
            launch: self.launches,
            held: self.core.record().may_run().filter(|_| coming.is_none()),
            coming,
        })?;
        self.keep(hyper, &spec)
    }

    /// Refuses to start a QEMU while one lives on a RAM file of this VM: one that was left alone beside the one that was
    /// taken over may run the guest.
    fn refuse_beside_another(&self) -> Result<(), ApiError> {
        let living = self.paths.ram_files.living(self.config.qemu_uid);
        let Some(other) = living.map_err(internal)?.into_iter().next() else {
            return Ok(());
        };
        let pid = other.process.pid();
        let (vm, host) = (&self.config.vm, &self.config.host);
        let message = format!(
            "another hypervisor of VM '{vm}' lives on host '{host}', process {pid}, and may run its guest: nothing is started beside it; if that guest is not wanted, end it there with 'kill {pid}'"
        );
        Err(ApiError::new(ErrorCode::Hypervisor, message).on_host(host))
    }

    /// Takes a QEMU that was just started for this VM's, unless its host shuts down since: whoever powers the host's guests
    /// down sees one only once its identity is written, and may have looked before.
    pub(crate) fn keep(&mut self, hyper: Hyper, spec: &VmSpec) -> Result<(), ApiError> {
        hyper.watch(self.inputs.clone()).map_err(internal)?;
        hyper.neighbours.listen(spec);
        self.at_hand.desk.put(Some(&hyper.console));
        self.hyper = Some(hyper);
        self.refuse_while_closing()
            .inspect_err(|_| self.kill_qemu())
    }

    fn cont(&mut self, permit: RunPermit) -> Option<Event> {
        if let Some(news) = self.found.take() {
            // It has nothing to go on with.
            return Some(self.event_of(news));
        }
        let Some(hyper) = &self.hyper else {
            return Some(Event::QemuDied);
        };
        let began = Instant::now();
        self.unsure = None;
        let deadline = began + self.cont_wait;
        let generation = permit.generation();
        let disks = hyper.disks.arrive(generation, deadline);
        let disks = disks.and_then(|()| hyper.wait_for_disks(deadline));
        if let Err(why) = disks.and_then(|()| hyper.disks.take(generation, deadline)) {
            tracing::error!(
                why,
                "the guest is not let run without its disks; it is left paused"
            );
            self.failed(&why);
            return Some(self.halts(why));
        }
        match hyper.machine.cont_patiently(permit, QMP_WAIT, deadline) {
            Ok(generation) => {
                hyper.disks.go();
                tracing::info!(generation = generation.0, "the guest runs");
                reached("running");
                self.runs_on(began);
                None
            }
            Err(error) if error.maybe_running => {
                // Ending it could be the end of the only copy of a guest that runs.
                hyper.disks.go();
                tracing::error!(%error, "it is not known whether the guest runs; its hypervisor is left alone");
                self.failed(&error);
                self.unsure = Some(Unsure::begun());
                None
            }
            Err(error) if hyper.machine.is_closed() => {
                tracing::error!(%error, "the guest cannot be let run; its hypervisor is ended");
                self.failed(&error);
                self.kill_qemu();
                Some(Event::QemuDied)
            }
            Err(error) => {
                // It may be the only copy of the guest: it stands still until somebody resumes it.
                tracing::error!(%error, "the guest cannot be let run; it is left paused");
                self.failed(&error);
                Some(self.halts(error.to_string()))
            }
        }
    }

    /// The guest was let run at `began`, and runs.
    pub(crate) fn runs_on(&mut self, began: Instant) {
        self.halted = None;
        self.has_gone_on();
        self.went_on();
        self.arrived(began);
        if let Some(hyper) = &self.hyper {
            hyper.disks.keep_what_came();
        }
    }

    /// What the hypervisor would not do is the answer to whoever asked.
    fn failed(&mut self, error: &impl std::fmt::Display) {
        self.outcome.failed = Some(ApiError::new(ErrorCode::Hypervisor, error.to_string()));
    }

    /// The guest runs again at its source after a switchover that was called off.
    fn went_on(&mut self) {
        if let Some(migration) = &mut self.migration
            && migration.side == Side::Source
            && migration.stopped_at.take().is_some()
        {
            migration.report.went_on();
        }
    }

    /// The guest runs at its destination: the network hears it, the source gets the figures.
    fn arrived(&mut self, began: Instant) {
        let Some(migration) = self
            .migration
            .as_ref()
            .filter(|migration| migration.side == Side::Destination)
        else {
            return;
        };
        let resume_ms = began.elapsed().as_secs_f64() * 1e3;
        let cpu_s = migration.report.cpu_s();
        migration.report.update(|report| {
            report.switchover_parts_ms.resume_ms = resume_ms;
            report.cpu_destination_s = cpu_s;
        });
        // The network first: the source only waits for figures.
        if let (Some(hyper), Some(spec)) = (&self.hyper, &self.spec) {
            hyper.announce(spec, &self.config.port_groups);
            hyper.huge_pages.put_back();
        }
        migration
            .control
            .send(&ToSource::Resumed { resume_ms, cpu_s });
    }

    /// Everything that could hold QEMU back is released first.
    fn stop_guest(&mut self, attempt: Option<Generation>) -> Option<Event> {
        self.lift_throttle();
        let Some(hyper) = &self.hyper else {
            return Some(Event::QemuDied);
        };
        hyper.voice.silence();
        match hyper.stop(attempt.is_some()) {
            Ok(stopped) => {
                self.unsure = None;
                reached("source.stopped");
                if let Some(migration) = &mut self.migration {
                    migration.stopped_at = Some(stopped.at);
                    migration.report.stopped(stopped.at);
                    // From the moment that no vCPU ran: what QEMU needed before is no pause.
                    let stop_ms = stopped.at.elapsed().as_secs_f64() * 1e3;
                    migration.report.update(|report| {
                        report.phase = Phase::Switchover;
                        report.switchover_parts_ms.stop_ms = stop_ms;
                    });
                }
                attempt.map(|attempt| Event::Stopped { attempt })
            }
            Err(error) => {
                tracing::error!(%error, "the guest cannot be stopped");
                self.blame(&format!(
                    "the guest could not be stopped for the switchover: {error}"
                ));
                if attempt.is_some() {
                    return Some(Event::Cancel);
                }
                // A pause that did not happen must not be on record as one.
                self.failed(&error);
                Some(Event::ResumeRequested)
            }
        }
    }

    fn command(&mut self, command: Command) {
        if let Some(Driver::Source(source)) = self
            .migration
            .as_ref()
            .and_then(|migration| migration.driver.as_ref())
        {
            source.command(command);
        }
    }

    /// Nothing of the attempt may touch QEMU any more when the guest is let run again.
    fn call_off(&mut self) {
        if let Some(migration) = &mut self.migration {
            migration.save_gate.close(|| migration.control.close());
            migration.called_off = true;
        }
        self.command(Command::CalledOff);
    }

    /// A migration whose switchover was called off, and which is not over by that, goes on. Said when all else is: the
    /// driver then closes the channels, on which the other side hears how it stands.
    pub(crate) fn go_on(&mut self) {
        let called_off = |migration: &mut Migration| std::mem::take(&mut migration.called_off);
        if self.migration.as_mut().is_some_and(called_off) {
            self.command(Command::GoOn);
        }
    }

    fn lift_throttle(&self) {
        if let Some(throttle) = self
            .migration
            .as_ref()
            .and_then(|migration| migration.throttle.as_ref())
        {
            throttle.lift();
        }
    }

    /// On the control channel while there is one, and through the agents; doubles are harmless.
    fn send(&mut self, to: &HostName, message: PeerMessage) {
        reached(match &message {
            PeerMessage::Permit { .. } => "source.permit.before",
            PeerMessage::Holding { .. } => "destination.holding.before",
            _ => "",
        });
        let permit = matches!(message, PeerMessage::Permit { .. });
        self.send_both_ways(to, message);
        if permit {
            reached("source.permit.after");
        }
    }

    fn send_both_ways(&mut self, to: &HostName, mut message: PeerMessage) {
        self.give_reason(&mut message);
        if let Some(migration) = self
            .migration
            .as_mut()
            .filter(|migration| migration.peer == *to)
        {
            if matches!(message, PeerMessage::Permit { .. }) {
                migration
                    .report
                    .update(|report| report.phase = Phase::Handover);
            }
            let message = message.clone();
            match migration.side {
                Side::Source => migration.control.send(&ToDestination::Peer { message }),
                Side::Destination => migration.control.send(&ToSource::Peer { message }),
            }
        }
        if let Some((asker, replies)) = &mut self.outcome.replies
            && asker == to
        {
            replies.push(message);
            return;
        }
        self.post(to, &message);
    }

    /// A message that this side has ended the migration says why, whichever way it goes.
    fn give_reason(&self, message: &mut PeerMessage) {
        let (PeerMessage::Failed { migration: id, .. } | PeerMessage::Abort { migration: id, .. }) =
            message
        else {
            return;
        };
        let why = match self.migration.as_ref().filter(|mine| mine.id == *id) {
            Some(mine) => mine.why(),
            None => {
                let failed = self.outcome.failed.as_ref().map(|error| &error.message);
                let here = self.outcome.not_begun.as_ref().or(failed);
                Some(Why::failure(here.map_or(PREDECESSOR_DIED, |why| why)))
            }
        };
        Why::tell(why.as_ref(), message);
    }

    pub(crate) fn post(&self, to: &HostName, message: &PeerMessage) {
        let Some(peer) = self
            .note
            .as_ref()
            .map(|note| note.peer.clone())
            .filter(|peer| peer.host == *to)
        else {
            tracing::warn!(%to, "a message is not sent through the agents: that host's address is not known");
            return;
        };
        match serde_json::to_value(message) {
            Ok(message) => self.at_hand.outbox.put(OutboxMessage { peer, message }),
            Err(error) => tracing::error!(%error, "a message cannot be written"),
        }
    }

    pub(crate) fn kill_qemu(&mut self) {
        self.unsure = None;
        self.forget_what_was_not_obeyed();
        if let Some(hyper) = self.hyper.take() {
            hyper.kill().unwrap_or_else(|error| {
                // Nothing that follows may happen while it lives; the next VM process tries again.
                tracing::error!(%error, "QEMU does not end; this process gives up so that a successor can try");
                std::process::exit(75)
            });
            hyper.disks.end();
        }
        remove_leftovers(&self.paths);
    }

    /// Removes images that are no disks of this host's VM: those of a VM that did not come, once its source has said so, and those
    /// that went along with one whose new host has said that it holds it. While a promise or a gift stands nothing is removed.
    pub(crate) fn clean_disks(&mut self) {
        let is_elsewhere = matches!(
            &self.core.record().phase,
            HostPhase::Moved { .. } | HostPhase::Absent | HostPhase::Refused { .. }
        );
        if is_elsewhere && self.hyper.is_none() {
            forget_maps(&self.paths.run, &BTreeSet::new());
        }
        match &self.core.record().phase {
            HostPhase::Moved { migration, .. } => {
                let (paths, migration) = (self.paths.clone(), migration.clone());
                self.disk_work.run(move || disks::leave(&paths, &migration));
            }
            HostPhase::Absent | HostPhase::Incoming { .. } | HostPhase::Refused { .. } => {
                self.clean_what_came();
            }
            HostPhase::Holds { .. }
            | HostPhase::Stopping { .. }
            | HostPhase::Gave { .. }
            | HostPhase::Ready { .. } => {}
        }
        let is_left = !self.came.waits() && self.leaves_disks();
        self.left_over.looked(is_left, Instant::now());
    }

    fn show(&mut self, status: Status) {
        tracing::info!(%status, "status");
        if let Status::InDoubt { command, peer, .. } = &status
            && let Some(migration) = &self.migration
        {
            let reason = way_out(peer, command);
            migration.report.end(Outcome::InDoubt, Some(reason));
        }
        self.status = status;
        self.settle_orphan();
    }
}
