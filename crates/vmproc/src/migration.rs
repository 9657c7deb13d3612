//! The migration under way: how it begins on either side, why it ends, and its end.
//!
//! Part of [`Vm`], which has one at most. The ownership core decides whether it begins and how it ended; here are the
//! driver that carries it, and the reason that people are told. Refuses: to begin beside another one, and what was
//! cancelled before it came; what could not begin leaves nothing half-done behind.

use crate::destination::{DestinationHandle, DestinationParts, WaitingQemu};
use crate::faults::reached;
use crate::hypervisor::{Hyper, QMP_WAIT, internal, memory};
use crate::input::{DriverNews, Input, Intake, Tell};
use crate::off::now_unix_s;
use crate::requests::Reply;
use crate::shared_report::SharedReport;
use crate::source::{SourceHandle, SourceParts};
use crate::variables::Arriving;
use crate::vm::{SWITCHOVER_WAIT_MIN, Vm};
use godwit_guestmem::DirtyTracker;
use godwit_migrate::admission::{agreed_protocol, refuse_losing_writes};
use godwit_migrate::protocol::ToDestination;
use godwit_migrate::why::Why;
use godwit_ownership::{Action, Ending, Event, PeerMessage, Phase};
use godwit_qemu::allowance::SharedThrottle;
use godwit_qemu::save_gate::SaveGate;
use godwit_store::save_json;
use godwit_streams::destination::{Arrivals, Memory, empty};
use godwit_streams::source::routes;
use godwit_streams::{ControlSlot, cores};
use godwit_types::host_api::{IncomingReady, PrepareIncoming, VmAnswer};
use godwit_types::migration::{
    COULD_NOT_BEGIN, MigrationReport, MigrationSpec, Outcome, PEER_GAVE_UP, Phase as MovePhase,
    Side,
};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, ErrorCode, HostName, MigrationId, bytes_per_s};
use godwit_wire::Spec;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a source that knows its guest to be elsewhere waits for the figures of its resuming.
const RESUMED_WAIT: Duration = Duration::from_millis(250);

/// The driver of a migration.
#[derive(Debug)]
pub(crate) enum Driver {
    Source(SourceHandle),
    Destination(DestinationHandle),
}

/// A migration that this host takes part in, from its first promise to its end.
#[derive(Debug)]
pub(crate) struct Migration {
    pub id: MigrationId,
    pub side: Side,
    pub peer: HostName,
    pub run: u64,
    pub driver: Option<Driver>,
    /// The driver's messages that the VM has not taken yet.
    pub intake: Arc<Intake>,
    pub control: ControlSlot,
    pub report: SharedReport,
    pub throttle: Option<SharedThrottle>,
    pub save_gate: SaveGate,
    pub deadline: Option<Instant>,
    pub switchover_wait: Duration,
    /// Why it ends, when it is not a success: the first reason that was taken.
    pub why: Option<Why>,
    /// The reason where there is no other: what kept this host's journal from being written.
    pub journal_trouble: Option<String>,
    /// (destination) The source had to be asked where it is.
    pub unheard: bool,
    /// (source) The driver waits to hear whether it goes on.
    pub called_off: bool,
    pub stopped_at: Option<Instant>,
}

impl Migration {
    /// Why it ends, as far as this host knows.
    pub(crate) fn why(&self) -> Option<Why> {
        let journal = || self.journal_trouble.clone().map(Why::failure);
        self.why.clone().or_else(journal)
    }
}

impl Vm {
    // ---- its beginning ----

    pub(crate) fn prepare_incoming(&mut self, request: PrepareIncoming) -> Reply {
        self.refuse_while_closing()?;
        refuse_losing_writes(&request.spec)?;
        self.refuse_cancelled(&request.migration.id)?;
        self.refuse_while_moving()?;
        let migration = &request.migration;
        self.demand(Event::PrepareIncoming {
            migration: migration.id.clone(),
            from: migration.source.host.clone(),
            generation: migration.generation,
        })?;
        match self.receive(&request) {
            Ok(ready) => Ok(VmAnswer::IncomingReady(ready)),
            Err(error) => {
                self.outcome.not_begun = Some(error.message.clone());
                self.feed(Event::IncomingFailed);
                Err(error.on_host(&self.config.host))
            }
        }
    }

    pub(crate) fn refuse_while_moving(&self) -> Result<(), ApiError> {
        if self.migration.is_none() {
            return Ok(());
        }
        let message = format!("VM '{}' is already moving", self.config.vm);
        Err(ApiError::new(ErrorCode::AlreadyMigrating, message))
    }

    fn receive(&mut self, request: &PrepareIncoming) -> Result<IncomingReady, ApiError> {
        let migration = &request.migration;
        self.comes_anew(&migration.source.host)?;
        let mut spec = request.spec.clone();
        spec.accelerator = request.accelerator;
        save_json(&self.paths.spec(), &spec).map_err(internal)?;
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
        self.launch(Some(migration))?;
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
        let (news, intake) = self.news();
        let hyper = self.hyper.as_ref().ok_or_else(|| self.not_running())?;
        let stream = hyper
            .machine
            .prepare_incoming(Instant::now() + QMP_WAIT)
            .map_err(internal)?;
        empty(&hyper.ram).map_err(internal)?;
        let [begun, disks, layered] = std::array::from_fn(|_| hyper.disks.clone());
        let report = self.new_report(spec, Side::Destination)?;
        let control = ControlSlot::default();
        let parts = DestinationParts {
            arrivals,
            memory: Arc::new(Memory::new(Arc::clone(&hyper.ram)).map_err(internal)?),
            disks: hyper.disks.filling(),
            begin_disks: Box::new(move || begun.source_is_connected()),
            keep_disks: Box::new(move |attempt| disks.are_whole(attempt)),
            take_layers: Box::new(move |place, said| layered.take_layers(place, said)),
            qemu: WaitingQemu {
                machine: Arc::clone(&hyper.machine),
                stream,
            },
            report: report.clone(),
            control: control.clone(),
            variables: self.arriving(hyper)?,
            prepare: spec.prepare_memory,
            cores: cores(),
            news,
        };
        let handle = DestinationHandle::start(parts).map_err(internal)?;
        Ok(Prepared {
            driver: Driver::Destination(handle),
            intake,
            report,
            control,
            throttle: None,
            save_gate: SaveGate::default(),
        })
    }

    pub(crate) fn migrate(&mut self, spec: &MigrationSpec) -> Reply {
        self.refuse_while_closing()?;
        self.refuse_cancelled(&spec.id)?;
        self.refuse_while_moving()?;
        self.refuse_while_disks_move()?;
        self.refuse_with_snapshots(spec)?;
        self.refuse_while_full()?;
        self.follow_disks();
        self.spec
            .as_ref()
            .map_or(Ok(()), refuse_losing_writes)
            .map_err(|error| error.on_host(&self.config.host))?;
        let began = Event::MigrationBegan {
            migration: spec.id.clone(),
            to: spec.destination.host.clone(),
            generation: spec.generation,
        };
        // What passes by itself is told apart, so that the controller asks again for a moment.
        let unconfirmed = matches!(
            self.core.record().phase,
            Phase::Holds {
                unconfirmed: Some(_),
                ..
            }
        );
        self.demand(began).map_err(|error| match unconfirmed {
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
                self.outcome.not_begun = Some(error.message.clone());
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
        let (news, intake) = self.news();
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
        let report = self.new_report(spec, Side::Source)?;
        let cap = spec.max_bandwidth_mbit_per_s;
        let cap_bytes_per_s = cap.map(|mbit| bytes_per_s(mbit.max(1)));
        let disks = hyper.disks.mirror(spec, cap_bytes_per_s)?;
        let save_gate = SaveGate::default();
        let (control, throttle) = (
            ControlSlot::default(),
            SharedThrottle::new(
                Arc::clone(&hyper.machine),
                hyper.pid(),
                spec.max_guest_slowdown_percent,
            ),
        );
        let parts = SourceParts {
            spec: secret,
            protocol,
            routes,
            hosts: [spec.source.host.clone(), spec.destination.host.clone()],
            ram: Arc::clone(&hyper.ram),
            machine: Arc::clone(&hyper.machine),
            console: Arc::clone(&hyper.console),
            tracker: DirtyTracker::new(
                Arc::clone(&hyper.ram),
                u32::try_from(hyper.pid()).map_err(internal)?,
                self.paths.handout(hyper.identity.launch),
                Arc::clone(&hyper.huge_pages),
            ),
            throttle: throttle.clone(),
            neighbours: hyper.neighbours.clone(),
            save_gate: save_gate.clone(),
            variables: self.variables(hyper)?,
            report: report.clone(),
            disks,
            prepare: spec.prepare_memory,
            max_downtime_ms: spec.max_downtime_ms,
            deadline_s: spec.deadline_s,
            cap_bytes_per_s,
            control: control.clone(),
            news,
        };
        let handle = SourceHandle::start(parts).map_err(internal)?;
        Ok(Prepared {
            driver: Driver::Source(handle),
            intake,
            report,
            control,
            throttle: Some(throttle),
            save_gate,
        })
    }

    /// The UEFI variables that go with the guest; a guest that has some does not leave without them.
    fn variables(&self, hyper: &Hyper) -> Result<Option<Arc<File>>, ApiError> {
        let has_some = self.spec.as_ref().is_some_and(VmSpec::has_variables);
        match (&hyper.variables, has_some) {
            (Some(variables), true) => Ok(Some(variables.file())),
            (_, false) => Ok(None),
            (None, true) => Err(internal(
                "the guest's UEFI variables cannot be opened, and it does not leave without them",
            )),
        }
    }

    fn arriving(&self, hyper: &Hyper) -> Result<Option<Arriving>, ApiError> {
        let file = self.variables(hyper)?;
        file.map(Arriving::new).transpose().map_err(internal)
    }

    /// What a driver tells goes to this thread, as far as it may wait, marked as this run's. The run begins with
    /// [`Vm::put_migration`].
    fn news(&mut self) -> (Tell, Arc<Intake>) {
        self.runs += 1;
        let (run, inputs) = (self.runs, self.inputs.clone());
        let intake = Arc::<Intake>::default();
        let tell = intake.bound(Box::new(move |news| {
            let _ = inputs.send(Input::Driver(DriverNews { run, news }));
        }));
        (tell, intake)
    }

    /// A report, kept from the first moment, so that a successor has one to close.
    fn new_report(&self, spec: &MigrationSpec, side: Side) -> Result<SharedReport, ApiError> {
        let ram_mib = self.spec.as_ref().map_or(0, |spec| spec.memory_mib);
        let begun = MigrationReport::begun(spec, side, ram_mib, now_unix_s());
        self.write_report(&begun)?;
        Ok(SharedReport::new(begun))
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
            intake: prepared.intake,
            control: prepared.control,
            report: prepared.report,
            throttle: prepared.throttle,
            save_gate: prepared.save_gate,
            deadline: deadline
                .and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds))),
            switchover_wait: SWITCHOVER_WAIT_MIN,
            why: None,
            journal_trouble: None,
            unheard: false,
            called_off: false,
            stopped_at: None,
        });
    }

    // ---- why it ends ----

    pub(crate) fn cancel(&mut self, id: &MigrationId, reason: &str) -> Reply {
        if self
            .migration
            .as_ref()
            .is_none_or(|migration| migration.id != *id)
        {
            return self.cancel_early(id);
        }
        // The controller takes back what could not begin: that was nobody's wish.
        let why = match reason.starts_with(COULD_NOT_BEGIN) {
            true => Why::failure(reason),
            false => Why::wish(reason),
        };
        let asked = self.put(Event::Cancel, Some(why));
        self.verdict(asked)?;
        self.done("stays where it is")
    }

    pub(crate) fn check_deadline(&mut self) {
        let missed = self
            .migration
            .as_mut()
            .filter(|migration| migration.deadline.is_some_and(|at| Instant::now() >= at));
        let Some(migration) = missed else { return };
        migration.deadline = None;
        let why = missed_deadline(&migration.report.read());
        // It may be too late: the destination has the guest.
        self.feed_because(Event::Cancel, Some(Why::wish(why)));
    }

    /// Hands the other host's message to the core. Why that host ended the migration is this side's reason, too.
    pub(crate) fn hear(&mut self, from: HostName, message: PeerMessage) {
        let why = Why::said_by(&from, &message);
        let has_disks = self.source_has_disks(&from, &message);
        self.feed_because(Event::Message { from, message }, why);
        if has_disks {
            self.clean_what_waits();
        }
    }

    /// Hands an event to the core that ends the migration for this reason, if the core takes it; what it does not take leaves
    /// no reason behind.
    pub(crate) fn feed_because(&mut self, event: Event, why: Option<Why>) {
        let asked = event.kind();
        let actions = self.judge(event);
        let declines = |action: &Action| matches!(action, Action::Refuse { event, .. } | Action::Ignored { event, .. } if *event == asked);
        if !actions.iter().any(declines) {
            self.note_why(why);
        }
        self.perform(actions);
    }

    /// Notes why the migration ends, unless that is known already.
    fn note_why(&mut self, why: Option<Why>) {
        let (Some(migration), Some(why)) = (&mut self.migration, why) else {
            return;
        };
        if why.guest_ended && migration.side == Side::Source {
            migration.report.update(|report| report.guest_ended = true);
        }
        migration.why.get_or_insert(why);
    }

    /// Something has failed, which ends the migration.
    pub(crate) fn blame(&mut self, reason: &str) {
        self.note_why(Some(Why::failure(reason)));
    }

    /// The guest is no more, which ends its migration, unless that is past the handover.
    pub(crate) fn guest_ended(&mut self, reason: &str) {
        self.note_why(Some(Why::guest_ended(reason)));
    }

    // ---- its end ----

    pub(crate) fn end_migration(&mut self, id: &MigrationId, ending: Ending) {
        match self.migration.take_if(|migration| migration.id == *id) {
            Some(migration) => self.end_own(migration, ending),
            None => self.end_orphan(id, ending),
        }
        // Its driver has ended, and notes nothing more of its disks.
        if let Some(hyper) = &self.hyper
            && ending != Ending::Completed
        {
            hyper.disks.forget_leaving_parts(id);
        }
    }

    /// Ends a migration that this process drives.
    fn end_own(&mut self, migration: Migration, ending: Ending) {
        let why = migration.why();
        let outcome = match &why {
            _ if ending == Ending::Completed => Outcome::Completed,
            Some(why) if why.cancelled => Outcome::Cancelled,
            _ => Outcome::Failed,
        };
        let reason = match outcome {
            // What was tried against it came too late.
            Outcome::Completed => None,
            _ => why
                .map(|why| why.reason)
                .or_else(|| never_began(&migration))
                .or_else(|| Some(PEER_GAVE_UP.into())),
        };
        if migration.side == Side::Source && outcome == Outcome::Completed {
            migration.report.wait_resumed(RESUMED_WAIT);
        }
        migration.report.update(|report| report.reason = None);
        migration.report.end(outcome, reason.clone());
        let cpu_s = migration.report.cpu_s();
        migration.report.update(|report| match migration.side {
            Side::Source => report.cpu_source_s = cpu_s,
            Side::Destination => report.cpu_destination_s = cpu_s,
        });
        self.say_end(&migration, outcome, reason.as_deref());
        // Kept before the driver's threads are waited for: whoever asks meanwhile finds the end, not the beginning.
        self.keep_report(migration.report.read());
        self.remember(migration.report.clone());
        end_driver(migration, ending);
        if self.hyper.is_none() {
            self.clean_disks();
        }
    }

    /// Tells the migration's end in a sentence.
    fn say_end(&self, migration: &Migration, outcome: Outcome, reason: Option<&str>) {
        let (from, to) = match migration.side {
            Side::Source => (&self.config.host, &migration.peer),
            Side::Destination => (&migration.peer, &self.config.host),
        };
        let end = match outcome {
            Outcome::Completed => "is completed",
            Outcome::Cancelled => "was cancelled",
            Outcome::Failed => "failed",
            Outcome::InDoubt => "is in doubt",
        };
        let (vm, id) = (&self.config.vm, &migration.id);
        match reason {
            None => tracing::info!("migration {id} of VM {vm} from {from} to {to} {end}"),
            Some(why) => {
                tracing::warn!("migration {id} of VM {vm} from {from} to {to} {end}: {why}");
            }
        }
    }
}

/// A driver that runs, and what belongs to it.
struct Prepared {
    driver: Driver,
    intake: Arc<Intake>,
    report: SharedReport,
    control: ControlSlot,
    throttle: Option<SharedThrottle>,
    save_gate: SaveGate,
}

fn wire_spec(spec: &MigrationSpec) -> Result<Spec, ApiError> {
    Spec::new(spec.id.clone(), &spec.secret, spec.cipher)
        .map_err(|error| ApiError::new(ErrorCode::InvalidRequest, error.to_string()))
}

/// Ends the driver. What a source's destination is told goes the way of all messages about ownership, too.
fn end_driver(migration: Migration, ending: Ending) {
    let is_aborted = matches!(ending, Ending::Cancelled | Ending::Failed);
    let why = migration.why();
    let abort = is_aborted.then(|| ToDestination::Peer {
        message: Why::abort(migration.id, why.as_ref()),
    });
    match migration.driver {
        Some(Driver::Source(source)) => source.end(abort),
        Some(Driver::Destination(destination)) if ending == Ending::Completed => {
            destination.linger();
        }
        Some(Driver::Destination(destination)) => destination.end(),
        None => {}
    }
}

/// Why a migration ends that has come to its deadline.
fn missed_deadline(report: &MigrationReport) -> String {
    format!(
        "its deadline passed after {:.0} s, when {:.0} % had gone; the guest stays where it is: allow more time with --deadline, or leave that out",
        report.total_s, report.done_percent
    )
}

/// A source that had to be asked and never connected.
fn never_began(migration: &Migration) -> Option<String> {
    let setup = migration.report.read().phase == MovePhase::Setup;
    (migration.unheard && setup).then(|| "the source did not begin the migration".into())
}
