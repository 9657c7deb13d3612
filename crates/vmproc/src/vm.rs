//! The VM's own thread: takes inputs one at a time, hands events to the ownership core, carries out what it says.
//!
//! Owns everything about this VM on this host. Blocks only on QEMU's control socket and the journal, each with a
//! deadline; page data never passes here. Refuses: to act on anything that the core did not say.

use crate::actions::CONT_WAIT;
use crate::adoption::{self, Adopted};
use crate::faults::{cont_without_permit, patience, planted, reached};
use crate::files::Paths;
use crate::hypervisor::{Hyper, QMP_WAIT, internal, news_of};
use crate::input::{DriverNews, Farewell, GuestNews, Input, Intake, News};
use crate::measure::Measuring;
use crate::outbox::Outbox;
use crate::rate::Rate;
use crate::requests::Answered;
use crate::save_gate::SaveGate;
use crate::server;
use crate::shared_report::SharedReport;
use crate::throttle::SharedThrottle;
use crate::timers::Timers;
use crate::unsaved::Unsaved;
use crate::unsure::Unsure;
use crate::{control_slot::ControlSlot, destination, source};
use godwit_ownership::{
    Action, Event, EventKind, HostRecord, PeerMessage, Qemu, RecordError, StateName, Status, Timer,
    VmCore,
};
use godwit_qemu::machine::{RunState, Running};
use godwit_store::{VmStore, load_json};
use godwit_types::host_api::{
    MigrationNote, NOTE_FILE, REPORTS_DIR, SPEC_FILE, VmProcessConfig, VmRequest,
};
use godwit_types::migration::{MigrationReport, Side};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, HostName, MigrationId};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// A VM process with nothing to do ends after this long; the agent starts one when it is needed.
const IDLE_MAX: Duration = Duration::from_secs(20);
/// Longest sleep of the loop.
const NAP_MAX: Duration = Duration::from_secs(1);
/// Shortest wait for a peer's word during a switchover.
const SWITCHOVER_WAIT_MIN: Duration = Duration::from_millis(500);
/// A switchover that is not done by then is called off, however lively the destination is.
const SWITCHOVER_MAX: Duration = Duration::from_secs(10);
/// Pause between two questions.
const ASK_WAIT: Duration = Duration::from_secs(1);
/// Finished migrations whose reports are kept in memory.
const REPORTS_KEPT: usize = 8;
/// So many migrations that were over before this process heard of them are remembered.
const REFUSED_KEPT: usize = 64;

/// The driver of a migration.
#[derive(Debug)]
pub(crate) enum Driver {
    Source(source::driver::SourceHandle),
    Destination(destination::driver::DestinationHandle),
}

impl Driver {
    /// What waits of its news.
    fn intake(&self) -> &Intake {
        match self {
            Self::Source(source) => source.intake(),
            Self::Destination(destination) => destination.intake(),
        }
    }
}

/// The migration in progress.
#[derive(Debug)]
pub(crate) struct Migration {
    pub id: MigrationId,
    pub side: Side,
    pub peer: HostName,
    pub run: u64,
    pub driver: Option<Driver>,
    pub control: ControlSlot,
    pub report: SharedReport,
    pub throttle: Option<SharedThrottle>,
    pub save_gate: SaveGate,
    pub deadline: Option<Instant>,
    pub switchover_wait: Duration,
    /// Why it ends, when it is not a success.
    pub reason: Option<String>,
    /// The reason where there is no other: what kept this host's journal from being written.
    pub journal_trouble: Option<String>,
    /// (destination) The source had to be asked where it is.
    pub unheard: bool,
    /// A person or a deadline ended it.
    pub cancelled: bool,
    /// (source) The driver waits to hear whether it goes on.
    pub called_off: bool,
    pub stopped_at: Option<Instant>,
}

impl Migration {
    /// Why it ends, as far as this host knows.
    pub(crate) fn why(&self) -> Option<String> {
        self.reason.clone().or_else(|| self.journal_trouble.clone())
    }

    /// (source) Why it ends, as the destination is told.
    pub(crate) fn farewell(&self) -> Option<Farewell> {
        self.why().map(|reason| Farewell {
            reason,
            cancelled: self.cancelled,
        })
    }

    /// (destination) Notes the source's reason, unless this side had one.
    pub(crate) fn heard_farewell(&mut self, farewell: Farewell) {
        if self.reason.is_some() {
            return;
        }
        self.cancelled = farewell.cancelled;
        self.reason = Some(match farewell {
            Farewell {
                reason,
                cancelled: true,
            } => reason,
            Farewell { reason, .. } => format!("the source ended the migration: {reason}"),
        });
    }
}

/// The VM.
pub(crate) struct Vm {
    pub config: VmProcessConfig,
    pub paths: Paths,
    pub store: VmStore,
    pub core: VmCore,
    pub spec: Option<VmSpec>,
    pub hyper: Option<Hyper>,
    pub launches: u64,
    pub running: Option<Running>,
    pub status: Status,
    pub timers: Timers,
    pub outbox: Arc<Outbox>,
    pub inputs: Sender<Input>,
    received: Receiver<Input>,
    pub migration: Option<Migration>,
    pub measuring: Option<Measuring>,
    pub note: Option<MigrationNote>,
    pub reports: VecDeque<SharedReport>,
    /// Reports that could not be written yet.
    pub unsaved: Unsaved,
    /// A predecessor's migration whose end is not known yet.
    pub orphan: Option<MigrationId>,
    /// Migrations that were over before they were heard of, and why.
    pub refused: VecDeque<(MigrationId, &'static str)>,
    pub runs: u64,
    /// Why the guest stands still, when it stopped by itself.
    pub halted: Option<String>,
    /// What the guest of a QEMU that was taken over did while nobody listened.
    pub found: Option<GuestNews>,
    /// How long a hypervisor is asked to let its guest run.
    pub cont_wait: Duration,
    /// Whether the guest goes on is not known.
    pub unsure: Option<Unsure>,
    /// What the event being handled came to, for whoever asked.
    pub outcome: Outcome,
    /// What is written of what the guest does.
    pub said: Rate,
    pub detach: bool,
    /// The VM is to be off, which is not written yet: when that was tried last.
    pub off_wanted: Option<crate::off::OffWish>,
    busy_at: Instant,
}

/// What an event came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub refused: Option<&'static str>,
    /// The first event that had no effect, and why.
    pub ignored: Option<(EventKind, &'static str)>,
    pub failed: Option<ApiError>,
    /// Messages for the peer that asked; `Some` while its request is handled.
    pub replies: Option<(HostName, Vec<PeerMessage>)>,
}

impl Vm {
    /// Takes the VM's lock, reads its journal, takes its QEMU over if one is there, and serves its socket.
    /// Nothing when it was told to leave before QEMU answered.
    pub(crate) fn open(config: VmProcessConfig) -> anyhow::Result<Option<Self>> {
        let state_root = state_root(Path::new(&config.state_dir))?;
        let store = VmStore::open(&state_root, &config.vm)?;
        let paths = Paths::settle(&config)?;
        std::fs::create_dir_all(&paths.run)?;
        std::fs::create_dir_all(&config.run_dir)?;
        let record = store
            .load()?
            .unwrap_or_else(|| HostRecord::absent(config.vm.clone()));
        let spec = load_json(&paths.state.join(SPEC_FILE))?;
        let (inputs, received) = channel();
        let outbox = Arc::new(Outbox::default());
        server::serve(
            server::bind(&paths.socket())?,
            inputs.clone(),
            Arc::clone(&outbox),
        );
        let seat = adoption::Seat {
            config: &config,
            paths: &paths,
            record: &record,
            spec: spec.as_ref(),
        };
        let (hyper, qemu, found) = match adoption::adopt(&seat, &inputs, &received)? {
            Adopted::None => (None, Qemu::Dead, None),
            Adopted::Taken(hyper, RunState::Running) => (Some(*hyper), Qemu::Running, None),
            Adopted::Taken(hyper, state) => (Some(*hyper), Qemu::Paused, news_of(&state)),
            Adopted::Detached => return Ok(None),
        };
        let (core, actions) = recover(record, &config, qemu)?;
        let note = load_json(&paths.state.join(NOTE_FILE))?;
        let mut vm = Self {
            status: core.status(),
            launches: hyper.as_ref().map_or(0, |hyper| hyper.identity.launch),
            paths,
            store,
            core,
            spec,
            hyper,
            running: None,
            timers: Timers::default(),
            outbox,
            inputs,
            received,
            migration: None,
            measuring: None,
            note,
            reports: VecDeque::new(),
            unsaved: Unsaved::default(),
            orphan: None,
            refused: VecDeque::new(),
            runs: 0,
            halted: None,
            found,
            cont_wait: CONT_WAIT,
            unsure: None,
            outcome: Outcome::default(),
            said: Rate::new(Instant::now()),
            detach: false,
            off_wanted: None,
            busy_at: Instant::now(),
            config,
        };
        vm.take_up(actions)?;
        Ok(Some(vm))
    }

    /// What a successor does first: watch the QEMU that is there, lift what its predecessor put on it, settle.
    fn take_up(&mut self, actions: Vec<Action>) -> anyhow::Result<()> {
        if let Some(hyper) = &self.hyper {
            tracing::info!(pid = hyper.pid(), "QEMU is taken over");
            hyper.watch(self.inputs.clone())?;
            // What happened between the first look and the subscription to events is seen here.
            match hyper.machine.query_status(Instant::now() + QMP_WAIT) {
                Ok(state) => self.found = news_of(&state),
                Err(error) => tracing::warn!(%error, "QEMU was not looked at a second time"),
            }
            if let Some(spec) = &self.spec {
                hyper.neighbours.listen(spec);
            }
            // Without asking QEMU, which a limit that was left may keep from answering.
            if let Err(error) = godwit_qemu::throttle::release_leftovers_of(hyper.pid()) {
                tracing::warn!(%error, "a predecessor's throttle may be left");
            }
            crate::group::take_in(hyper.pid());
            // Of the guest that runs: its description may be of another size by now.
            let mapped = hyper.ram.page_count();
            crate::group::limit_memory(mapped.saturating_mul(godwit_guestmem::PAGE_SIZE as u64));
        }
        let orphan = self.find_orphan();
        let was_off = self.found == Some(GuestNews::Shutdown) && !self.goes_with_its_host();
        self.perform(actions);
        self.close_orphan(orphan);
        self.close_old_reports();
        // Unless the core wanted the guest to go on and found it so.
        if let Some(news) = self.found.take() {
            self.happened(news);
        }
        if was_off {
            self.stay_off();
        }
        self.keep_off_what_was_asked_off();
        Ok(())
    }

    /// Runs until detached, or idle for long.
    pub(crate) fn run(mut self) -> anyhow::Result<()> {
        while !self.detach && !self.is_idle() {
            match self.received.recv_timeout(self.timers.next_in(self.nap())) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Some(timer) = self.timers.fired() {
                self.feed(Event::Timeout(timer));
            }
            self.check_deadline();
            self.look_again();
            self.save_again();
            self.off_again();
            self.keep_listening();
        }
        let _ = std::fs::remove_file(self.paths.socket());
        Ok(())
    }

    /// A run directory that was emptied takes the socket and QEMU's identity with it: both are made again.
    fn keep_listening(&mut self) {
        if self.paths.socket().exists() {
            return;
        }
        tracing::warn!("this process's socket is gone: it is made again");
        let made = std::fs::create_dir_all(&self.config.run_dir)
            .and_then(|()| server::bind(&self.paths.socket()));
        match made {
            Ok(listener) => server::serve(listener, self.inputs.clone(), Arc::clone(&self.outbox)),
            Err(error) => tracing::error!(%error, "this process cannot be asked"),
        }
        let kept = self
            .hyper
            .as_ref()
            .map(|hyper| hyper.keep_identity(&self.paths));
        if let Some(Err(error)) = kept {
            tracing::error!(%error, "QEMU's identity is not kept");
        }
    }

    fn nap(&self) -> Duration {
        let migration = self.migration.as_ref();
        let deadline = migration.and_then(|migration| migration.deadline);
        deadline.map_or(NAP_MAX, |at| {
            at.saturating_duration_since(Instant::now()).min(NAP_MAX)
        })
    }

    fn is_idle(&mut self) -> bool {
        let busy = self.hyper.is_some()
            || self.migration.is_some()
            || !self.unsaved.is_empty()
            || self.off_wanted.is_some()
            || self.timers.is_armed(Timer::Ask)
            || self.timers.is_armed(Timer::Switchover);
        if busy {
            self.busy_at = Instant::now();
        }
        self.busy_at.elapsed() > IDLE_MAX
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Request(request) => {
                self.busy_at = Instant::now();
                if let VmRequest::MeasureDirtyRate { millis } = request.request {
                    // Answered by a thread of its own, when it is done.
                    return self.measure(millis, request.reply);
                }
                let answer = match self.answer(request.request) {
                    Ok(Answered(answer)) => answer,
                    Err(error) => godwit_types::host_api::VmAnswer::Error(error),
                };
                // Nobody waits any more: the request is carried out all the same.
                let _ = request.reply.send(answer);
            }
            Input::Guest {
                launch,
                news,
                place,
            } => {
                // What happens from here on is told anew.
                drop(place);
                self.guest_news(launch, news);
            }
            Input::Measured => self.measuring = None,
            Input::Driver(DriverNews { run, news }) => {
                let migration = self.migration.as_ref();
                let Some(migration) = migration.filter(|migration| migration.run == run) else {
                    return;
                };
                if let Some(driver) = &migration.driver {
                    driver.intake().taken(&news);
                }
                self.driver_news(news);
            }
        }
    }

    fn guest_news(&mut self, launch: u64, news: GuestNews) {
        if self
            .hyper
            .as_ref()
            .is_none_or(|hyper| hyper.identity.launch != launch)
        {
            return;
        }
        self.say(&news);
        self.happened(news);
    }

    /// A guest may do the same for ever.
    fn say(&mut self, news: &GuestNews) {
        let Some(left_out) = self.said.admits(Instant::now()) else {
            return;
        };
        if left_out > 0 {
            tracing::warn!("{left_out} more lines about what the guest did were left out");
        }
        match news {
            GuestNews::Shutdown => tracing::info!("the guest powered itself off"),
            GuestNews::Reset => tracing::info!("the guest was reset"),
            GuestNews::Halted(why) => tracing::warn!("the guest stands still: {why}"),
            GuestNews::Died => tracing::warn!("the guest's QEMU is gone"),
        }
        if self.said.is_spent() {
            tracing::warn!("that is too much: what the guest does is not written for a minute");
        }
    }

    pub(crate) fn happened(&mut self, news: GuestNews) {
        let event = self.event_of(news);
        let is_off = event == Event::GuestShutdown;
        self.feed(event);
        if is_off {
            self.stay_off();
        }
    }

    /// What the core hears of it.
    pub(crate) fn event_of(&mut self, news: GuestNews) -> Event {
        match news {
            GuestNews::Reset => Event::GuestReset,
            GuestNews::Shutdown if self.goes_with_its_host() => {
                tracing::info!("the guest powered off, since its host shuts down");
                self.blame("the guest powered itself off during the migration");
                self.kill_qemu();
                Event::QemuDied
            }
            GuestNews::Shutdown => {
                self.guest_ended("the guest powered itself off during the migration");
                Event::GuestShutdown
            }
            GuestNews::Halted(why) => {
                self.guest_ended(&format!("{why} during the migration"));
                self.halted = Some(why);
                Event::GuestHalted
            }
            GuestNews::Died => {
                self.guest_ended("the hypervisor of the guest died during the migration");
                self.forget_qemu();
                Event::QemuDied
            }
        }
    }

    /// QEMU is gone; what it left is removed once nothing needs it.
    fn forget_qemu(&mut self) {
        self.running = None;
        self.unsure = None;
        if self.hyper.take().is_some() {
            crate::hypervisor::remove_leftovers(&self.paths);
        }
    }

    fn driver_news(&mut self, news: News) {
        match news {
            News::Began { switchover_wait } => {
                if let Some(migration) = &mut self.migration {
                    migration.switchover_wait = switchover_wait.max(patience(SWITCHOVER_WAIT_MIN));
                }
            }
            News::NobodyCame => self.ask_for_source(),
            News::Converged => {
                self.feed(Event::SwitchoverRequested);
                if self.core.state_name() == StateName::Precopy {
                    self.blame("the journal of this host cannot be written: free its disk");
                    self.feed(Event::Cancel);
                }
            }
            News::Core(event) => {
                self.plant_on(&event);
                self.feed(event);
            }
            News::Peer(message) => {
                if let Some(from) = self
                    .migration
                    .as_ref()
                    .map(|migration| migration.peer.clone())
                {
                    self.hear(from, message);
                }
            }
            News::Addresses(cards) => {
                if let Some(hyper) = &self.hyper {
                    hyper.neighbours.merge(&cards);
                }
            }
            News::Heard => {
                if self.timers.is_armed(Timer::Switchover) && !self.pause_is_too_long() {
                    self.arm(Timer::Switchover);
                }
            }
            News::SourceEnded(farewell) => {
                if let Some(migration) = &mut self.migration {
                    migration.heard_farewell(farewell);
                }
                self.feed(Event::IncomingFailed);
            }
            News::Failed(reason) => {
                self.blame(&reason);
                let source = self
                    .migration
                    .as_ref()
                    .is_some_and(|migration| migration.side == Side::Source);
                self.feed(if source {
                    Event::Cancel
                } else {
                    Event::IncomingFailed
                });
            }
        }
    }

    /// A source that was never told of the migration will not come, and says so through the agents.
    fn ask_for_source(&mut self) {
        let generation = self.core.record().highest;
        let Some(migration) = &mut self.migration else {
            return;
        };
        migration.unheard = true;
        let (peer, migration) = (migration.peer.clone(), migration.id.clone());
        let question = PeerMessage::AskGift {
            migration,
            generation,
        };
        self.post(&peer, &question);
    }

    /// A destination that lives but does not get ready must not hold the guest for ever.
    fn pause_is_too_long(&self) -> bool {
        let stopped_at = self
            .migration
            .as_ref()
            .and_then(|migration| migration.stopped_at);
        stopped_at.is_some_and(|at| at.elapsed() > SWITCHOVER_MAX)
    }

    /// Nothing, unless a fault is planted.
    fn plant_on(&mut self, event: &Event) {
        if matches!(event, Event::Loaded { .. })
            && planted("permit-ignored")
            && let Some(hyper) = &self.hyper
        {
            cont_without_permit(&self.paths.monitor(hyper.identity.launch, 1));
        }
        let destination = self
            .migration
            .as_ref()
            .is_some_and(|migration| migration.side == Side::Destination);
        if matches!(event, Event::LinkLost) && destination && planted("cleanup-ready-on-link-loss")
        {
            self.kill_qemu();
            self.feed(Event::QemuDied);
        }
    }

    /// Notes why the migration ends, unless that is known already.
    pub(crate) fn blame(&mut self, reason: &str) {
        if let Some(migration) = &mut self.migration {
            migration.reason.get_or_insert_with(|| reason.to_owned());
        }
    }

    /// The guest is no more, which ends its migration, unless that is past the handover.
    pub(crate) fn guest_ended(&mut self, reason: &str) {
        self.blame(reason);
        if let Some(migration) = &self.migration
            && migration.side == Side::Source
        {
            migration.report.update(|report| report.guest_ended = true);
        }
    }

    fn check_deadline(&mut self) {
        let missed = self
            .migration
            .as_mut()
            .filter(|migration| migration.deadline.is_some_and(|at| Instant::now() >= at));
        let Some(migration) = missed else { return };
        migration.deadline = None;
        let before = (migration.cancelled, migration.reason.clone());
        migration.cancelled = true;
        self.blame(
            "the deadline passed before the migration was done; the guest stays where it is",
        );
        self.outcome.refused = None;
        self.feed(Event::Cancel);
        // Too late: the destination has the guest.
        if let (Some(migration), Some(_)) = (&mut self.migration, self.outcome.refused.take()) {
            (migration.cancelled, migration.reason) = before;
        }
    }

    /// A guest must not be taken into a QEMU that is gone: refused in time, it runs on at the source.
    fn notice_a_dead_qemu(&mut self) {
        if self.hyper.as_ref().is_some_and(|hyper| !hyper.is_alive()) {
            self.guest_ended("the hypervisor of the guest died during the migration");
            self.forget_qemu();
            self.feed(Event::QemuDied);
        }
    }

    /// Hands an event to the core and does what it says, until nothing follows.
    pub(crate) fn feed(&mut self, event: Event) {
        if let Event::Message {
            message: PeerMessage::Permit { .. },
            ..
        } = &event
        {
            reached("destination.permit");
            self.notice_a_dead_qemu();
        }
        tracing::debug!(
            event = event.kind().name(),
            state = self.core.state_name().name(),
            "event"
        );
        let actions = self.core.handle(event);
        self.perform(actions);
    }

    /// Carries out a batch strictly in order, then what follows from it.
    fn perform(&mut self, actions: Vec<Action>) {
        let mut batches = VecDeque::from([actions]);
        while let Some(batch) = batches.pop_front() {
            let mut follow = Vec::new();
            for action in batch {
                follow.extend(self.act(action));
            }
            for event in follow {
                batches.push_back(self.core.handle(event));
            }
        }
        self.go_on();
    }

    pub(crate) fn arm(&mut self, timer: Timer) {
        let wait = match timer {
            Timer::Switchover => self
                .migration
                .as_ref()
                .map_or(SWITCHOVER_WAIT_MIN, |migration| migration.switchover_wait),
            Timer::Ask => ASK_WAIT,
        };
        self.timers.arm(timer, wait);
    }

    /// The report of a migration, running or remembered.
    pub(crate) fn report(&self, id: &MigrationId) -> Result<Option<MigrationReport>, ApiError> {
        let running = self.migration.iter().map(|migration| &migration.report);
        let found = running
            .chain(&self.reports)
            .map(SharedReport::read)
            .find(|report| report.id == *id)
            .or_else(|| self.unsaved.find(id));
        match found {
            Some(report) => Ok(Some(report)),
            None => load_json(&self.report_path(id)).map_err(internal),
        }
    }

    /// Why a migration is refused, if it is.
    pub(crate) fn refused_because(&self, id: &MigrationId) -> Option<&'static str> {
        let mut refused = self.refused.iter();
        refused.find(|(other, _)| other == id).map(|(_, why)| *why)
    }

    /// Refuses a migration from now on, should it still come.
    pub(crate) fn refuse_later(&mut self, id: &MigrationId, why: &'static str) {
        if self.refused_because(id).is_none() {
            self.refused.push_front((id.clone(), why));
            self.refused.truncate(REFUSED_KEPT);
        }
    }

    pub(crate) fn report_path(&self, id: &MigrationId) -> PathBuf {
        self.paths
            .state
            .join(REPORTS_DIR)
            .join(format!("{id}.json"))
    }

    /// Keeps a report in memory.
    pub(crate) fn remember(&mut self, report: SharedReport) {
        self.reports.push_front(report);
        self.reports.truncate(REPORTS_KEPT);
    }
}

/// `<state>/vms/<name>` belongs to the store of `<state>`.
fn state_root(dir: &Path) -> anyhow::Result<PathBuf> {
    let root = dir.parent().and_then(Path::parent);
    root.map(Path::to_owned).ok_or_else(|| {
        anyhow::anyhow!(
            "state_dir {} is not of the form STATE/vms/NAME",
            dir.display()
        )
    })
}

/// The core for a process that has just taken the VM's lock.
fn recover(
    record: HostRecord,
    config: &VmProcessConfig,
    qemu: Qemu,
) -> Result<(VmCore, Vec<Action>), RecordError> {
    #[cfg(feature = "faults")]
    if let Ok(name) = std::env::var("GODWIT_PLANT") {
        let plant = godwit_ownership::plant::Plant::from_name(&name);
        return VmCore::recover_planted(record, config.host.clone(), qemu, plant);
    }
    VmCore::recover(record, config.host.clone(), qemu)
}
