//! What the agent may ask of this VM.
//!
//! Part of [`Vm`]. Refuses with a sentence: what the core refuses, what needs a hypervisor that is not there, and a
//! migration that could not begin; then nothing half-done stays behind.

use crate::control_slot::ControlSlot;
use crate::destination::arrivals::Arrivals;
use crate::destination::driver::{DestinationHandle, DestinationParts, WaitingQemu};
use crate::destination::memory::Memory;
use crate::faults::reached;
use crate::hypervisor::{QMP_WAIT, internal, memory};
use crate::input::{DriverNews, Input, News};
use crate::priority::cores;
use crate::save_gate::SaveGate;
use crate::shared_report::SharedReport;
use crate::source::driver::{SourceHandle, SourceParts};
use crate::source::routes::routes;
use crate::source::tracking::DirtyTracker;
use crate::succession::way_out;
use crate::throttle::SharedThrottle;
use crate::vm::{Driver, Migration, Outcome, Vm};
use godwit_ownership::{
    Event, EventKind, HostRecord, PeerMessage, Phase, Power, StateName, Status,
};
use godwit_store::save_json;
use godwit_types::host_api::{
    HostVm, IncomingReady, MigrationNote, NOTE_FILE, PrepareIncoming, SPEC_FILE, VmAnswer,
    VmRequest, VmStatus,
};
use godwit_types::migration::{COULD_NOT_BEGIN, MigrationReport, MigrationSpec, Side};
use godwit_types::site::RecordAnswer;
use godwit_types::version::{Build, MIGRATION, VERSION};
use godwit_types::vm::{Accelerator, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId};
use godwit_wire::Spec;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Why a migration is refused whose destination has asked for it in vain.
const TOO_LATE: &str = "its destination has given it up, since it did not begin in time";

/// The version of the control channel that the controller found both sides to speak.
fn agreed_protocol(spec: &MigrationSpec) -> Result<u32, ApiError> {
    let agreed = spec.control_protocol.unwrap_or(MIGRATION.max);
    if MIGRATION.contains(agreed) {
        return Ok(agreed);
    }
    let message = format!(
        "migration '{}' is to speak migration protocol {agreed}, and the VM process on host {}, Godwit {VERSION}, speaks {MIGRATION}: run 'godwit vm renew {}' there",
        spec.id, spec.source.host, spec.vm
    );
    Err(ApiError::new(ErrorCode::Incompatible, message))
}

/// An answer that is not an error.
pub(crate) struct Answered(pub VmAnswer);

pub(crate) type Reply = Result<Answered, ApiError>;

impl Vm {
    /// Answers one request.
    pub(crate) fn answer(&mut self, request: VmRequest) -> Reply {
        self.outcome = Outcome::default();
        match request {
            VmRequest::Status => Ok(Answered(VmAnswer::Status(Box::new(VmStatus {
                vm: self.host_vm()?,
            })))),
            VmRequest::Start => self.start(),
            VmRequest::Boot => self.boot_again(),
            VmRequest::Stop { force: true } => self.power_off(),
            VmRequest::Stop { force: false } => self.powerdown(),
            VmRequest::PowerOffDead { generation } => self.power_off_dead(generation),
            VmRequest::Reset => self.reset(),
            VmRequest::Pause => {
                self.ask_or(Event::PauseRequested, "is paused", "is paused already")
            }
            VmRequest::Resume => self.ask_or(Event::ResumeRequested, "goes on", "runs already"),
            VmRequest::PrepareIncoming(request) => self.prepare_incoming(*request),
            VmRequest::Migrate(spec) => self.migrate(&spec),
            VmRequest::Cancel { migration, reason } => self.cancel(&migration, &reason),
            VmRequest::Report { migration } => match self.report(&migration)? {
                Some(report) => Ok(Answered(VmAnswer::Report(Box::new(report)))),
                None => Err(unknown_migration(&migration)),
            },
            VmRequest::Peer { from, message } => self.peer(from, message),
            VmRequest::TakeOutbox { .. } => Err(internal("an outbox is taken from its own thread")),
            VmRequest::Resolve {
                run_here,
                confirm_fenced,
            } => self.resolve(run_here, confirm_fenced),
            VmRequest::Survey { level } => self.survey(level),
            VmRequest::KeepRecord => self.keep_record(),
            VmRequest::Console => self.console(),
            VmRequest::Blockers => self.blockers(),
            VmRequest::MeasureDirtyRate { .. } => {
                Err(internal("writes are measured by a thread of their own"))
            }
            VmRequest::HostRemoved { host } => {
                let done = "waits for that host no more";
                self.ask_or(Event::HostRemoved { host }, done, done)
            }
            VmRequest::Close { step } => self.close(step),
            VmRequest::Detach { unless_moving } => {
                if let Some(moving) = self.migration.as_ref().filter(|_| unless_moving) {
                    let message = format!(
                        "VM '{}' keeps its VM process while migration '{}' is under way: wait for its end",
                        self.config.vm, moving.id
                    );
                    return Err(ApiError::new(ErrorCode::AlreadyMigrating, message));
                }
                self.detach = true;
                self.done("is left to its next VM process")
            }
        }
    }

    /// Hands a request to the core; its refusal, a failure on the way, or that it had no effect is the answer.
    fn ask(&mut self, event: Event, done: &str) -> Reply {
        let asked = event.kind();
        self.feed(event);
        self.verdict(asked)?;
        self.done(done)
    }

    /// As [`Vm::ask`], for a request without effect where the VM is as asked already.
    pub(crate) fn ask_or(&mut self, event: Event, done: &str, already: &str) -> Reply {
        let asked = event.kind();
        self.feed(event);
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

    fn verdict(&mut self, asked: EventKind) -> Result<(), ApiError> {
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
        Ok(Answered(VmAnswer::Done(format!(
            "VM '{}' {what}",
            self.config.vm
        ))))
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
        let runs = matches!(
            self.core.record().phase,
            Phase::Holds {
                power: Power::On,
                ..
            }
        );
        if !runs {
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
        hyper
            .machine
            .system_reset(Instant::now() + QMP_WAIT)
            .map_err(qmp)?;
        self.forget_asked_off();
        self.done("is reset")
    }

    fn console(&mut self) -> Reply {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let bytes = hyper
            .machine
            .console(Instant::now() + QMP_WAIT)
            .map_err(qmp)?;
        Ok(Answered(VmAnswer::Console(
            String::from_utf8_lossy(&bytes).into_owned(),
        )))
    }

    fn blockers(&mut self) -> Reply {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let reasons = hyper
            .machine
            .blocked_reasons(Instant::now() + QMP_WAIT)
            .map_err(qmp)?;
        Ok(Answered(VmAnswer::Blockers(reasons)))
    }

    pub(crate) fn not_running(&self) -> ApiError {
        let message = format!(
            "VM '{}' is not running on host '{}'",
            self.config.vm, self.config.host
        );
        ApiError::new(ErrorCode::WrongState, message)
    }

    fn peer(&mut self, from: HostName, message: serde_json::Value) -> Reply {
        let message: PeerMessage = serde_json::from_value(message).map_err(|error| {
            ApiError::new(
                ErrorCode::InvalidRequest,
                format!("the other host's message cannot be read: {error}"),
            )
        })?;
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
        self.hear(from, message);
        let replies = self.outcome.replies.take();
        let mut replies = replies.map(|(_, replies)| replies).unwrap_or_default();
        if let Some(migration) = waited_for.filter(|migration| self.knows_nothing_of(migration)) {
            self.refuse_later(&migration, TOO_LATE);
            replies.push(PeerMessage::Abort { migration });
        }
        let replies = replies
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>();
        Ok(Answered(VmAnswer::Replies(replies.map_err(internal)?)))
    }

    /// What the record says, durably; a no binds from then on.
    fn survey(&mut self, level: Generation) -> Reply {
        let event = Event::SurveyRequested { level };
        let asked = event.kind();
        self.feed(event);
        self.verdict(asked)?;
        let record = self.core.record();
        Ok(Answered(VmAnswer::Surveyed(RecordAnswer {
            highest: record.highest,
            claim: godwit_site::claim_of(record),
        })))
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
                save_json(&self.paths.state.join(SPEC_FILE), spec).map_err(internal)?;
            }
        }
        self.done("has its record")
    }

    /// Whether this host holds the VM and moves it in no such migration: then nothing of it was given, and if it is refused
    /// from now on, nothing will be.
    fn knows_nothing_of(&self, id: &MigrationId) -> bool {
        let current = self.migration.as_ref();
        let holds = matches!(self.core.record().phase, Phase::Holds { .. });
        holds
            && self.core.state_name() != StateName::Recovering
            && current.is_none_or(|migration| migration.id != *id)
    }

    fn resolve(&mut self, run_here: bool, confirm_fenced: Option<HostName>) -> Reply {
        let confirm_fenced = confirm_fenced.ok_or_else(|| {
            let message = "say which host is fenced with --confirm-fenced HOST, once it is powered off and only then";
            ApiError::new(ErrorCode::InvalidRequest, message)
        })?;
        let done = if run_here {
            "is resolved: it runs here"
        } else {
            "is resolved: this host gave it up"
        };
        self.ask(
            Event::OperatorResolve {
                run_here,
                confirm_fenced,
            },
            done,
        )
    }

    pub(crate) fn cancel(&mut self, id: &MigrationId, reason: &str) -> Reply {
        match &mut self.migration {
            Some(migration) if migration.id == *id => {
                // The controller takes back what could not begin: that was nobody's wish.
                migration.cancelled = !reason.starts_with(COULD_NOT_BEGIN);
                migration.reason.get_or_insert_with(|| reason.to_owned());
            }
            _ => return self.cancel_early(id),
        }
        self.feed(Event::Cancel);
        if let Err(refused) = self.verdict(EventKind::Cancel) {
            if let Some(migration) = &mut self.migration {
                (migration.cancelled, migration.reason) = (false, None);
            }
            return Err(refused);
        }
        self.done("stays where it is")
    }

    /// A migration can be seen before its spec comes here, and a cancel holds from then on.
    fn cancel_early(&mut self, id: &MigrationId) -> Reply {
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
        Ok(Answered(VmAnswer::Done(format!(
            "migration '{id}' of VM '{}' will not begin on host '{}'",
            self.config.vm, self.config.host
        ))))
    }

    fn refuse_cancelled(&self, id: &MigrationId) -> Result<(), ApiError> {
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

    // ---- becoming a destination ----

    fn prepare_incoming(&mut self, request: PrepareIncoming) -> Reply {
        self.refuse_while_closing()?;
        refuse_writable_disks(&request.spec)?;
        self.refuse_cancelled(&request.migration.id)?;
        if self.migration.is_some() {
            let message = format!("VM '{}' is already moving", self.config.vm);
            return Err(ApiError::new(ErrorCode::AlreadyMigrating, message));
        }
        let migration = &request.migration;
        let event = Event::PrepareIncoming {
            migration: migration.id.clone(),
            from: migration.source.host.clone(),
            generation: migration.generation,
        };
        let asked = event.kind();
        self.feed(event);
        self.verdict(asked)?;
        match self.receive(&request) {
            Ok(ready) => Ok(Answered(VmAnswer::IncomingReady(ready))),
            Err(error) => {
                self.feed(Event::IncomingFailed);
                Err(error.on_host(&self.config.host))
            }
        }
    }

    fn receive(&mut self, request: &PrepareIncoming) -> Result<IncomingReady, ApiError> {
        let migration = &request.migration;
        let mut spec = request.spec.clone();
        spec.accelerator = request.accelerator;
        save_json(&self.paths.state.join(SPEC_FILE), &spec).map_err(internal)?;
        self.spec = Some(spec);
        self.keep_note(migration, Side::Destination)?;
        let secret = Arc::new(wire_spec(migration)?);
        let arrivals = Arrivals::listen(
            &secret,
            &self.config.migration_addresses,
            self.config.migration_ports,
        )
        .map_err(|error| ApiError::new(ErrorCode::PortInUse, error.to_string()))?;
        let addresses = arrivals.addresses.clone();
        self.launch(true)?;
        let driver = self.start_destination(migration, arrivals)?;
        self.put_migration(migration, Side::Destination, driver);
        reached("destination.prepared");
        Ok(IncomingReady { addresses })
    }

    fn start_destination(
        &mut self,
        spec: &MigrationSpec,
        arrivals: Arrivals,
    ) -> Result<Prepared, ApiError> {
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let stream = hyper
            .machine
            .prepare_incoming(Instant::now() + QMP_WAIT)
            .map_err(internal)?;
        crate::destination::memory::empty(&hyper.ram).map_err(internal)?;
        let report = self.new_report(spec, Side::Destination);
        self.save_begun(&report.read())?;
        let control = ControlSlot::default();
        let parts = DestinationParts {
            arrivals,
            memory: Arc::new(Memory::new(Arc::clone(&hyper.ram)).map_err(internal)?),
            qemu: WaitingQemu {
                machine: Arc::clone(&hyper.machine),
                stream,
            },
            report: report.clone(),
            control: control.clone(),
            prepare: spec.prepare_memory,
            cores: cores(),
            news: self.news(),
        };
        let handle = DestinationHandle::start(parts).map_err(internal)?;
        Ok(Prepared {
            driver: Driver::Destination(handle),
            report,
            control,
            throttle: None,
            save_gate: SaveGate::default(),
        })
    }

    // ---- becoming a source ----

    fn migrate(&mut self, spec: &MigrationSpec) -> Reply {
        self.refuse_while_closing()?;
        self.refuse_cancelled(&spec.id)?;
        if spec.id.as_str().is_empty() || self.migration.is_some() {
            let message = format!("VM '{}' is already moving", self.config.vm);
            return Err(ApiError::new(ErrorCode::AlreadyMigrating, message));
        }
        self.spec
            .as_ref()
            .map_or(Ok(()), refuse_writable_disks)
            .map_err(|error| error.on_host(&self.config.host))?;
        let began = Event::MigrationBegan {
            migration: spec.id.clone(),
            to: spec.destination.host.clone(),
            generation: spec.generation,
        };
        let asked = began.kind();
        // What passes by itself is told apart, so that the controller asks again for a moment.
        let unconfirmed = matches!(
            self.core.record().phase,
            Phase::Holds {
                unconfirmed: Some(_),
                ..
            }
        );
        self.feed(began);
        self.verdict(asked).map_err(|error| match unconfirmed {
            true => ApiError {
                code: ErrorCode::Unconfirmed,
                ..error
            },
            false => error,
        })?;
        match self.start_source(spec) {
            Ok(prepared) => {
                self.put_migration(spec, Side::Source, prepared);
                self.done("is on its way")
            }
            Err(error) => {
                self.feed(Event::Cancel);
                Err(error.on_host(&self.config.host))
            }
        }
    }

    fn start_source(&mut self, spec: &MigrationSpec) -> Result<Prepared, ApiError> {
        // A measuring has the tracking that the migration needs.
        self.measuring = None;
        let protocol = agreed_protocol(spec)?;
        self.keep_note(spec, Side::Source)?;
        let secret = Arc::new(wire_spec(spec)?);
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        hyper.ram.check_length().map_err(memory)?;
        hyper
            .machine
            .prepare_outgoing(Instant::now() + QMP_WAIT)
            .map_err(|error| ApiError::new(ErrorCode::NotMigratable, error.to_string()))?;
        let routes = routes(&spec.source_addresses, &spec.destination_addresses);
        if routes.is_empty() {
            let message = "the two hosts have no migration addresses of the same family (IPv4 or IPv6): add one in host.toml";
            return Err(ApiError::new(ErrorCode::Incompatible, message));
        }
        let report = self.new_report(spec, Side::Source);
        self.save_begun(&report.read())?;
        let save_gate = SaveGate::default();
        let (control, throttle) = (
            ControlSlot::default(),
            SharedThrottle::new(Arc::clone(&hyper.machine), spec.max_guest_slowdown_percent),
        );
        let parts = SourceParts {
            spec: secret,
            protocol,
            routes,
            ram: Arc::clone(&hyper.ram),
            machine: Arc::clone(&hyper.machine),
            tracker: DirtyTracker::new(
                Arc::clone(&hyper.ram),
                u32::try_from(hyper.pid()).map_err(internal)?,
                self.paths.handout(hyper.identity.launch),
                Arc::clone(&hyper.huge_pages),
            ),
            throttle: throttle.clone(),
            neighbours: hyper.neighbours.clone(),
            save_gate: save_gate.clone(),
            report: report.clone(),
            prepare: spec.prepare_memory,
            max_downtime_ms: spec.max_downtime_ms,
            deadline_s: spec.deadline_s,
            cap_bytes_per_s: spec
                .max_bandwidth_mbit_per_s
                .map(|mbit| mbit.max(1) as f64 * 125_000.0),
            control: control.clone(),
            news: self.news(),
        };
        let handle = SourceHandle::start(parts).map_err(internal)?;
        Ok(Prepared {
            driver: Driver::Source(handle),
            report,
            control,
            throttle: Some(throttle),
            save_gate,
        })
    }

    // ---- both ----

    /// What a driver tells goes to this thread, marked as this run's. The run begins with [`Vm::put_migration`].
    fn news(&mut self) -> Box<dyn Fn(News) + Send> {
        self.runs += 1;
        let (run, inputs) = (self.runs, self.inputs.clone());
        Box::new(move |news| {
            let _ = inputs.send(Input::Driver(DriverNews { run, news }));
        })
    }

    fn new_report(&self, spec: &MigrationSpec, side: Side) -> SharedReport {
        let ram_mib = self.spec.as_ref().map_or(0, |spec| spec.memory_mib);
        let now_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        SharedReport::new(MigrationReport::begun(spec, side, ram_mib, now_s))
    }

    fn put_migration(&mut self, spec: &MigrationSpec, side: Side, prepared: Prepared) {
        let peer = match side {
            Side::Source => spec.destination.host.clone(),
            Side::Destination => spec.source.host.clone(),
        };
        let deadline = spec.deadline_s.filter(|_| side == Side::Source);
        self.migration = Some(Migration {
            id: spec.id.clone(),
            side,
            peer,
            run: self.runs,
            driver: Some(prepared.driver),
            control: prepared.control,
            report: prepared.report,
            throttle: prepared.throttle,
            save_gate: prepared.save_gate,
            deadline: deadline
                .and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds))),
            switchover_wait: Duration::from_millis(500),
            reason: None,
            journal_trouble: None,
            unheard: false,
            cancelled: false,
            called_off: false,
            stopped_at: None,
        });
    }

    /// Durable before anything is promised: a successor must be able to ask the peer.
    fn keep_note(&mut self, spec: &MigrationSpec, side: Side) -> Result<(), ApiError> {
        let peer = match side {
            Side::Source => spec.destination.clone(),
            Side::Destination => spec.source.clone(),
        };
        let note = MigrationNote {
            migration: spec.id.clone(),
            side,
            peer,
        };
        save_json(&self.paths.state.join(NOTE_FILE), &note).map_err(internal)?;
        self.note = Some(note);
        Ok(())
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
            qemu_pid: self.hyper.as_ref().map(crate::hypervisor::Hyper::pid),
            note,
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
                plain(VmState::Running)
            }
            Status::Paused => match &self.halted {
                Some(why) => (VmState::Panicked, Some(self.halted_note(why))),
                None => plain(VmState::Paused),
            },
            Status::Incoming { .. } => plain(VmState::Incoming),
            Status::InDoubt { command, peer, .. } => {
                (VmState::InDoubt, Some(way_out(peer, command)))
            }
            Status::Down { reason } => (VmState::Crashed, Some(self.down_note(reason))),
            Status::Moved { to } => (VmState::Stopped, Some(format!("it moved to host '{to}'"))),
            Status::JournalFailed => (
                VmState::Paused,
                Some("the journal of this host cannot be written: free its disk".into()),
            ),
        }
    }
}

/// A driver that runs, and what belongs to it.
struct Prepared {
    driver: Driver,
    report: SharedReport,
    control: ControlSlot,
    throttle: Option<SharedThrottle>,
    save_gate: SaveGate,
}

fn wire_spec(spec: &MigrationSpec) -> Result<Spec, ApiError> {
    Spec::new(spec.id.clone(), &spec.secret, spec.cipher)
        .map_err(|error| ApiError::new(ErrorCode::InvalidRequest, error.to_string()))
}

/// What is written to a disk does not travel: the destination's image would be another one.
fn refuse_writable_disks(spec: &VmSpec) -> Result<(), ApiError> {
    match spec.disks.iter().find(|disk| !disk.read_only) {
        None => Ok(()),
        Some(disk) => {
            let message = format!(
                "VM '{}' has the writable disk '{}', which cannot move yet: make it read_only = true or remove it, with the VM stopped",
                spec.name, disk.name
            );
            Err(ApiError::new(ErrorCode::NotMigratable, message))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writable_disk_is_refused_by_name() {
        let spec = |read_only| {
            let text = format!(
                "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"data\"\npath = \"/d\"\nread_only = {read_only}"
            );
            VmSpec::from_toml(&text).unwrap()
        };
        let refused = refuse_writable_disks(&spec(false)).unwrap_err();
        assert_eq!(refused.code, ErrorCode::NotMigratable);
        let message = "VM 'web' has the writable disk 'data', which cannot move yet: ";
        assert!(refused.message.starts_with(message), "{}", refused.message);
        assert!(refuse_writable_disks(&spec(true)).is_ok());
    }
}
