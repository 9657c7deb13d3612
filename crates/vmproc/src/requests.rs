//! What the agent may ask of this VM.
//!
//! Part of [`Vm`]. Refuses with a sentence: what the core refuses, what needs a hypervisor that is not there, and a
//! migration that could not begin; then nothing half-done stays behind.

use crate::ask::Now;
use crate::disks;
use crate::hypervisor::{Hyper, QMP_WAIT, internal};
use crate::succession::way_out;
use crate::vm::{Outcome, Vm};
use godwit_migrate::why::Why;
use godwit_ownership::{
    Event, EventKind, HostRecord, PeerMessage, Phase, Power, StateName, Status,
};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, VmAnswer, VmStatus};
use godwit_types::site::{GiftOvertaken, RecordAnswer};
use godwit_types::version::Build;
use godwit_types::vm::{Accelerator, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId};
use std::time::Instant;

/// Why a migration is refused whose destination has asked for it in vain.
const TOO_LATE: &str = "its destination has given it up, since it did not begin in time";

/// The answer to a request, or its refusal.
pub(crate) type Reply = Result<VmAnswer, ApiError>;

impl Vm {
    /// Carries a request out; what comes of it is the answer.
    pub(crate) fn answer(&mut self, request: Now) -> Reply {
        self.outcome = Outcome::default();
        match request {
            Now::Status => Ok(VmAnswer::Status(Box::new(VmStatus {
                vm: self.host_vm()?,
            }))),
            Now::Start => self.start(),
            Now::Boot => self.boot_again(),
            Now::Stop { force: true } => self.power_off(),
            Now::Stop { force: false } => self.powerdown(),
            Now::PowerOffDead(generation) => self.power_off_dead(generation),
            Now::Reset => self.reset(),
            Now::Pause => self.ask_or(Event::PauseRequested, "is paused", "is paused already"),
            Now::Resume => self.ask_or(Event::ResumeRequested, "runs again", "runs already"),
            Now::PrepareIncoming(request) => self.prepare_incoming(*request),
            Now::Migrate(spec) => self.migrate(&spec),
            Now::Cancel(migration, reason) => self.cancel(&migration, &reason),
            Now::Report(migration) => match self.report(&migration)? {
                Some(report) => Ok(VmAnswer::Report(Box::new(report))),
                None => Err(unknown_migration(&migration)),
            },
            Now::Peer(from, message) => self.peer(from, message),
            Now::RunHere(fenced) => self.resolve(true, fenced),
            Now::GiveUpHere(fenced) => self.resolve(false, fenced),
            Now::Survey(level) => self.survey(level),
            Now::KeepRecord => self.keep_record(),
            Now::Console => self.console(),
            Now::Blockers => self.blockers(),
            Now::HostRemoved(host) => {
                let done = "waits for that host no more";
                self.source_is_gone(&host)?;
                let told = self.ask_or(Event::HostRemoved { host }, done, done);
                self.clean_what_waits();
                told
            }
            Now::GiftOvertaken(GiftOvertaken { by, with_guest }) => {
                let why = Why::failure("the VM was started elsewhere or deleted since");
                let asked = self.put(Event::GiftOvertaken { by, with_guest }, Some(why));
                let done = "is given up: it was started elsewhere or deleted since";
                self.verdict_or(asked, done, "is not here any more")
            }
            Now::MoveDisks(places) => self.move_disks(places),
            Now::PlanDiskMoves(places) => self.plan_disk_moves(&places),
            Now::DiskMoves => Ok(VmAnswer::DiskMoves(self.disk_moves())),
            Now::CancelDiskMoves => self.cancel_disk_moves(),
            Now::LimitDisk(wish) => self.limit_disk(&wish),
            Now::CloneDisks(wish) => self.clone_disks(*wish),
            Now::Cloning => Ok(VmAnswer::Cloning(Box::new(self.shown_cloning()))),
            Now::CancelClone => self.cancel_clone(),
            Now::Close(step) => self.close(step),
            Now::Renew(program) => {
                self.refuse_renewal()?;
                self.renewal = Some(program);
                self.done("becomes another program")
            }
            Now::Detach { unless_moving } => {
                if unless_moving {
                    self.refuse_renewal()?;
                }
                self.refuse_during_disk_order()?;
                self.disk_work.close()?;
                self.detach = true;
                self.done("is left to its next VM process")
            }
        }
    }

    /// What is under way would end with this program.
    fn refuse_renewal(&mut self) -> Result<(), ApiError> {
        if let Some(moving) = &self.migration {
            let message = format!(
                "VM '{}' keeps its VM process while migration '{}' is under way: wait for its end",
                self.config.vm, moving.id
            );
            return Err(ApiError::new(ErrorCode::AlreadyMigrating, message));
        }
        // The kernel begins no other program before each thread of this one has ended.
        self.disk_work.must_be_over()?;
        if self.hyper.is_none() && disks::are_looked_at() {
            return Err(ApiError::new(
                ErrorCode::WrongState,
                "the storage of the VM's disks has not answered yet: see that it does, and try again",
            ));
        }
        self.refuse_while_disks_move()
    }

    /// Hands a request to the core; its refusal, a failure on the way, or that it had no effect is the error.
    pub(crate) fn demand(&mut self, event: Event) -> Result<(), ApiError> {
        let asked = self.put(event, None);
        self.verdict(asked)
    }

    /// Hands the core what is asked of it, here and now: what came of events before is no answer to that.
    pub(crate) fn put(&mut self, event: Event, why: Option<Why>) -> EventKind {
        let asked = event.kind();
        self.outcome = Outcome::default();
        self.feed_because(event, why);
        asked
    }

    /// The answer to a request, which has no effect where the VM is as asked already.
    pub(crate) fn ask_or(&mut self, event: Event, done: &str, already: &str) -> Reply {
        let asked = self.put(event, None);
        self.verdict_or(asked, done, already)
    }

    /// The answer to what the core was asked, also where it had no effect.
    pub(crate) fn verdict_or(&mut self, asked: EventKind, done: &str, already: &str) -> Reply {
        if self.was_ignored(asked).is_none() {
            self.verdict(asked)?;
            return self.done(done);
        }
        match self.unsure_note() {
            Some(note) => Err(ApiError::new(ErrorCode::WrongState, note)),
            None => self.done(already),
        }
    }

    /// Why an event had no effect, if it had none.
    fn was_ignored(&self, asked: EventKind) -> Option<&'static str> {
        let ignored = self.outcome.ignored;
        ignored
            .filter(|(event, _)| *event == asked)
            .map(|(_, why)| why)
    }

    pub(crate) fn verdict(&mut self, asked: EventKind) -> Result<(), ApiError> {
        if let Some(error) = self.outcome.failed.take() {
            return Err(error);
        }
        let ignored = self.was_ignored(asked);
        match self.outcome.refused.take().or(ignored) {
            Some(why) => {
                let code = if matches!(self.status, Status::InDoubt { .. }) {
                    ErrorCode::InDoubt
                } else {
                    ErrorCode::WrongState
                };
                Err(ApiError::new(
                    code,
                    format!("VM '{}': {why}", self.config.vm),
                ))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn done(&self, what: &str) -> Reply {
        Ok(VmAnswer::Done(format!("VM '{}' {what}", self.config.vm)))
    }

    /// A person's start that fails leaves the VM as it was: off, or down and to be booted again.
    fn start(&mut self) -> Reply {
        self.off_wanted = None;
        self.forget_asked_off();
        let was_off = matches!(self.status, Status::Off);
        let started = self.start_guest();
        if started.is_err() && was_off && matches!(self.status, Status::Down { .. }) {
            self.feed(Event::StopRequested);
        }
        started
    }

    /// A start that nobody asked for: only of a VM that runs by its record, and one that fails turns no VM off, so that it
    /// can be tried again.
    fn boot_again(&mut self) -> Reply {
        self.keep_off_what_was_asked_off();
        if !self.core.record().power().is_some_and(Power::should_run) {
            let message = format!(
                "VM '{}' does not run by the record of host '{}'",
                self.config.vm, self.config.host
            );
            return Err(ApiError::new(ErrorCode::WrongState, message));
        }
        self.refuse_if_off_is_wanted()?;
        self.start_guest()
    }

    /// Starts the guest. One that waits for its former host does not run, though its start is on record.
    fn start_guest(&mut self) -> Reply {
        self.refuse_while_closing()?;
        self.refuse_start_during_disk_order()?;
        let started = self.ask_or(Event::StartRequested, "runs", "runs already");
        let Status::InDoubt { peer, command, .. } = &self.status else {
            return started;
        };
        let message = format!(
            "VM '{}' does not run yet on host '{}': {}",
            self.config.vm,
            self.config.host,
            way_out(peer, command)
        );
        Err(ApiError::new(ErrorCode::InDoubt, message).on_host(&self.config.host))
    }

    fn reset(&mut self) -> Reply {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        hyper.reset()?;
        self.forget_asked_off();
        match self.moves_away() {
            Some(id) => self.done(&format!("is reset; migration '{id}' goes on")),
            None => self.done("is reset"),
        }
    }

    /// The migration under way that takes the guest to another host.
    pub(crate) fn moves_away(&self) -> Option<&MigrationId> {
        match &self.status {
            Status::Migrating { migration } | Status::SwitchingOver { migration } => {
                Some(migration)
            }
            _ => None,
        }
    }

    fn console(&mut self) -> Reply {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let text = hyper
            .console
            .whole(Instant::now() + QMP_WAIT)
            .map_err(qmp)?;
        Ok(VmAnswer::Console(
            String::from_utf8_lossy(&text.bytes).into_owned(),
        ))
    }

    fn blockers(&mut self) -> Reply {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let mut reasons = hyper
            .machine
            .blocked_reasons(Instant::now() + QMP_WAIT)
            .map_err(qmp)?;
        // As a migration is refused that begins.
        self.refuse_while_disks_move()?;
        self.refuse_while_full()?;
        reasons.extend(self.keeps_for_snapshots());
        Ok(VmAnswer::Blockers(reasons))
    }

    pub(crate) fn not_running(&self) -> ApiError {
        let message = format!(
            "VM '{}' is not running on host '{}'",
            self.config.vm, self.config.host
        );
        ApiError::new(ErrorCode::WrongState, message)
    }

    fn peer(&mut self, from: HostName, message: PeerMessage) -> Reply {
        // Only a question is answered in place: the agents carry an answer back, but no answer to that. The rest goes by
        // the outbox.
        let asks = matches!(
            message,
            PeerMessage::AskHolding { .. } | PeerMessage::AskGift { .. }
        );
        self.outcome.replies = asks.then(|| (from.clone(), Vec::new()));
        let waited_for = match &message {
            PeerMessage::AskGift { migration, .. } => Some(migration.clone()),
            _ => None,
        };
        let is_about_disks = message.asks_for_disks();
        self.hear(from, message);
        let replies = self.outcome.replies.take();
        let mut replies = replies.map(|(_, replies)| replies).unwrap_or_default();
        if let Some(migration) = waited_for.filter(|migration| self.knows_nothing_of(migration)) {
            self.refuse_later(&migration, TOO_LATE);
            replies.push(PeerMessage::Abort {
                has_disks: is_about_disks && self.has_disks_of(&migration),
                migration,
                reason: None,
                cancelled: false,
            });
        }
        let replies = replies
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>();
        Ok(VmAnswer::Replies(replies.map_err(internal)?))
    }

    /// What the record says, durably; a no binds from then on.
    fn survey(&mut self, level: Generation) -> Reply {
        self.demand(Event::SurveyRequested { level })?;
        let record = self.core.record();
        Ok(VmAnswer::Surveyed(RecordAnswer {
            highest: record.highest,
            claim: godwit_site::claim_of(record),
        }))
    }

    /// The state directory may have been put back from an older copy while this process lived: what it knows counts.
    fn keep_record(&mut self) -> Reply {
        let record = self.core.record().clone();
        let is_kept = matches!(self.store.load(), Ok(Some(found)) if found == record);
        let is_known = record != HostRecord::absent(self.config.vm.clone());
        if !is_kept && is_known {
            tracing::error!("the record on the disk is not this process's: it is written again");
            std::fs::create_dir_all(&self.paths.state).map_err(internal)?;
            self.store.persist(&record).map_err(internal)?;
            if let Some(spec) = &self.spec {
                save_json(&self.paths.spec(), spec).map_err(internal)?;
            }
        }
        if let Some(hyper) = &self.hyper {
            let mut spec: Option<VmSpec> = load_json(&self.paths.spec()).unwrap_or_default();
            hyper.disks.keep(spec.as_mut())?;
        }
        self.done("has its record")
    }

    /// Whether this host holds the VM and moves it in no such migration, or has had it taken with another: then nothing of it was
    /// given, and if it is refused from now on, nothing will be.
    fn knows_nothing_of(&self, id: &MigrationId) -> bool {
        let current = self.migration.as_ref();
        let record = self.core.record();
        let went_on = matches!(&record.phase, Phase::Moved { migration, .. } if migration != id);
        (record.power().is_some() || went_on)
            && self.core.state_name() != StateName::Recovering
            && current.is_none_or(|migration| migration.id != *id)
    }

    fn resolve(&mut self, run_here: bool, confirm_fenced: HostName) -> Reply {
        let is_promised = matches!(self.core.record().phase, Phase::Ready { .. });
        if !run_here && is_promised {
            self.source_is_gone(&confirm_fenced)?;
        }
        self.came.told.clear();
        self.demand(Event::OperatorResolve {
            run_here,
            confirm_fenced,
        })?;
        if run_here {
            return self.done("is resolved: it runs here");
        }
        let gave_up = "is resolved: this host gave it up".to_owned();
        let told = std::mem::take(&mut self.came.told);
        let all: Vec<String> = std::iter::once(gave_up).chain(told).collect();
        self.done(&all.join("; "))
    }

    /// A migration can be seen before its spec comes here, and a cancel holds from then on.
    pub(crate) fn cancel_early(&mut self, id: &MigrationId) -> Reply {
        if let Some(outcome) = self.report(id)?.map(|report| report.outcome) {
            let end = outcome.map_or(
                "is settled by another VM process",
                |outcome| match outcome {
                    godwit_types::migration::Outcome::InDoubt => "cannot be cancelled any more",
                    _ => "is over",
                },
            );
            let message = format!("migration '{id}' of VM '{}' {end}", self.config.vm);
            return Err(ApiError::new(ErrorCode::WrongState, message));
        }
        self.refuse_later(id, "it was cancelled");
        Ok(VmAnswer::Done(format!(
            "migration '{id}' of VM '{}' will not begin on host '{}'",
            self.config.vm, self.config.host
        )))
    }

    pub(crate) fn refuse_cancelled(&self, id: &MigrationId) -> Result<(), ApiError> {
        let Some(why) = self.refused_because(id) else {
            return Ok(());
        };
        let message = format!("migration '{id}' of VM '{}': {why}", self.config.vm);
        Err(ApiError::new(ErrorCode::WrongState, message).on_host(&self.config.host))
    }

    /// What the host is asked to be: the spec's wish, the host's override, else what the CPU can.
    pub(crate) fn accelerator(&self) -> Accelerator {
        let wish = self
            .spec
            .as_ref()
            .map_or(Accelerator::Auto, |spec| spec.accelerator);
        godwit_qemu::accel::come_to(match self.config.accelerator {
            Accelerator::Auto => wish,
            host => host,
        })
    }

    /// The VM as the host sees it.
    pub(crate) fn host_vm(&self) -> Result<HostVm, ApiError> {
        let record = self.core.record();
        let spec = self.spec.clone().ok_or_else(|| {
            ApiError::new(
                ErrorCode::UnknownVm,
                format!(
                    "host '{}' has no description of VM '{}'",
                    self.config.host, self.config.vm
                ),
            )
        })?;
        let (state, note) = self.shown();
        Ok(HostVm {
            spec,
            state,
            generation: self.core.highest(),
            claim: godwit_site::claim_of(record),
            migration: self
                .migration
                .as_ref()
                .map(|migration| migration.id.clone()),
            accelerator: self.hyper.as_ref().map(|hyper| hyper.identity.accelerator),
            vm_process_pid: i32::try_from(std::process::id()).ok(),
            vm_process: Some(Build::here()),
            qemu_pid: self.hyper.as_ref().map(Hyper::pid),
            note,
            disks: self
                .hyper
                .as_ref()
                .map_or_else(Vec::new, |hyper| hyper.disks.activity()),
            images: Vec::new(),
            guest: self.hyper.as_ref().and_then(Hyper::guest_info),
        })
    }

    /// Why a guest stands still that nobody paused, and what lets it go on.
    fn halted_note(&self, why: &str) -> String {
        let vm = &self.config.vm;
        format!(
            "{why}; 'godwit vm resume {vm}' lets the guest go on if it can, 'godwit vm stop {vm} --force' and then 'godwit vm start {vm}' boot it anew"
        )
    }

    /// Why there is no guest, and what brings it back where this host does not by itself.
    fn down_note(&self, reason: &str) -> String {
        let (vm, here) = (&self.config.vm, &self.config.host);
        match &self.core.record().phase {
            Phase::Holds {
                unconfirmed: Some(with),
                ..
            } => {
                let peer = &with.peer;
                let command =
                    format!("godwit vm resolve {vm} --run-on {here} --confirm-fenced {peer}");
                format!("{reason}; {}", way_out(peer, &command))
            }
            Phase::Holds {
                power: Power::Paused,
                ..
            } => format!("{reason}; 'godwit vm start {vm}' boots it anew"),
            _ => reason.to_owned(),
        }
    }

    fn shown(&self) -> (VmState, Option<String>) {
        let plain = |state| (state, None);
        match &self.status {
            Status::Running { .. } if self.unsure.is_some() => {
                (VmState::Unreachable, self.unsure_note())
            }
            Status::Absent | Status::Off => plain(VmState::Stopped),
            Status::Running { .. } | Status::Migrating { .. } | Status::SwitchingOver { .. } => {
                let note = self.hyper.as_ref().and_then(|hyper| hyper.disks.note());
                (VmState::Running, note)
            }
            Status::Paused => match &self.halted {
                Some(why) => (VmState::Panicked, Some(self.halted_note(why))),
                None => (VmState::Paused, self.waits_for_room_note()),
            },
            Status::Incoming { .. } => plain(VmState::Incoming),
            Status::InDoubt { command, peer, .. } => {
                (VmState::InDoubt, Some(way_out(peer, command)))
            }
            Status::Down { reason } => (VmState::Crashed, Some(self.down_note(reason))),
            Status::Moved { to } => (VmState::Stopped, Some(format!("it moved to host '{to}'"))),
            Status::JournalFailed => {
                let state = match self.runs_on_an_unwritten_record() {
                    true => VmState::Running,
                    false => VmState::Paused,
                };
                let note = "the journal of this host cannot be written: free its disk";
                (state, Some(note.into()))
            }
        }
    }
}

fn unknown_migration(id: &MigrationId) -> ApiError {
    ApiError::new(
        ErrorCode::UnknownMigration,
        format!("no migration '{id}' is known for this VM on this host"),
    )
}

pub(crate) fn qmp(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Hypervisor, error.to_string())
}
