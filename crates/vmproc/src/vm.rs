//! The VM's own thread: takes inputs one at a time, hands events to the ownership core, carries out what it says.
//!
//! Owns everything about this VM on this host. Blocks only on QEMU's control socket and the journal, and where the VM is not on also on storage of its
//! disks, which is waited for in [`DiskWork`] unless the VM starts; page data never passes here. Refuses: to act on anything that the core did not say.

use crate::ask::{Later, Now};
use crate::came::Came;
use crate::disk_orders::DiskOrder;
use crate::disk_work::DiskWork;
use crate::disks::{self, CloneJob};
use crate::faults::{cont_without_permit, patience, planted, reached};
use crate::files::Paths;
use crate::hypervisor::{Hyper, internal};
use crate::input::{DriverNews, GuestNews, Input, News};
use crate::left_over::LeftOver;
use crate::measure::Measuring;
use crate::migration::Migration;
use crate::room::Room;
use crate::server::{self, AtHand};
use crate::shared_report::SharedReport;
use crate::snapshotting::Lists;
use crate::timers::Timers;
use crate::unsaved::Unsaved;
use crate::unsure::Unsure;
use godwit_ownership::{
    Action, Event, EventKind, PeerMessage, Phase, StateName, Status, Timer, VmCore,
};
use godwit_qemu::rate::Rate;
use godwit_store::{VmStore, load_json};
use godwit_types::host_api::{MigrationNote, REPORTS_DIR, VmAnswer, VmProcessConfig};
use godwit_types::migration::{MigrationReport, Side};
use godwit_types::vm::VmSpec;
use godwit_types::{ApiError, HostName, MigrationId};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// A VM process with nothing to do ends after this long; the agent starts one when it is needed.
const IDLE_MAX: Duration = Duration::from_secs(20);
/// Longest sleep of the loop.
const NAP_MAX: Duration = Duration::from_secs(1);
/// Shortest wait for a peer's word during a switchover.
pub(crate) const SWITCHOVER_WAIT_MIN: Duration = Duration::from_millis(500);
/// A switchover that is not done by then is called off, however lively the destination is.
const SWITCHOVER_MAX: Duration = Duration::from_secs(10);
/// Pause between two questions.
const ASK_WAIT: Duration = Duration::from_secs(1);
/// Finished migrations whose reports are kept in memory.
const REPORTS_KEPT: usize = 8;
/// So many migrations that were over before this process heard of them are remembered.
const REFUSED_KEPT: usize = 64;

/// One VM on this host: all that its thread owns.
pub(crate) struct Vm {
    pub config: VmProcessConfig,
    pub paths: Paths,
    pub store: VmStore,
    pub core: VmCore,
    pub spec: Option<VmSpec>,
    pub hyper: Option<Hyper>,
    pub launches: u64,
    pub status: Status,
    pub timers: Timers,
    /// What this thread shares with those that answer by themselves.
    pub at_hand: AtHand,
    pub inputs: Sender<Input>,
    pub received: Receiver<Input>,
    pub migration: Option<Migration>,
    pub measuring: Option<Measuring>,
    /// Work on what is left of disks without a QEMU.
    pub disk_work: DiskWork,
    /// What a thread does with the VM's disks.
    pub disk_order: Option<DiskOrder>,
    /// Threads that list its snapshots.
    pub lists: Lists,
    /// The last clone that was asked for.
    pub cloning: Option<Arc<CloneJob>>,
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
    /// What the events since something was asked came to, for whoever asked.
    pub outcome: Outcome,
    /// What is written of what the guest does.
    pub said: Rate,
    pub detach: bool,
    /// The program that this process is to become.
    pub renewal: Option<PathBuf>,
    /// What is known of a disk that is full.
    pub room: Room,
    /// The VM is to be off, which is not written yet: when that was tried last.
    pub off_wanted: Option<crate::off::OffWish>,
    /// When it was last looked whether a soft stop was obeyed.
    pub obeyed_looked: Option<Instant>,
    /// What is known of disks that came with a migration that is over here.
    pub came: Came,
    /// When images are looked at again that could not be removed.
    pub left_over: LeftOver,
    pub busy_at: Instant,
}

/// What an event came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub refused: Option<&'static str>,
    /// The first event that had no effect, and why.
    pub ignored: Option<(EventKind, &'static str)>,
    pub failed: Option<ApiError>,
    /// Why a migration that was asked for could not begin here.
    pub not_begun: Option<String>,
    /// Messages for the peer that asked; `Some` while its request is handled.
    pub replies: Option<(HostName, Vec<PeerMessage>)>,
}

impl Vm {
    /// Runs until detached, or idle for long.
    pub(crate) fn run(mut self) -> anyhow::Result<()> {
        while !self.detach && !self.is_idle() {
            match self.received.recv_timeout(self.timers.next_in(self.nap())) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.renew();
            while let Some(timer) = self.timers.fired() {
                self.feed(Event::Timeout(timer));
            }
            self.check_deadline();
            self.look_again();
            self.save_again();
            self.off_again();
            self.look_whether_obeyed();
            self.keep_listening();
            self.look_after_disks();
            self.look_for_room();
            self.follow_disks_again();
            self.clean_again(Instant::now());
        }
        if let Some(hyper) = &self.hyper {
            hyper.console.rest();
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
        let (inputs, at_hand) = (self.inputs.clone(), self.at_hand.clone());
        let made = std::fs::create_dir_all(&self.config.run_dir)
            .and_then(|()| server::serve(&self.paths.socket(), inputs, at_hand));
        if let Err(error) = made {
            tracing::error!(%error, "this process cannot be asked");
        }
        let kept = self
            .hyper
            .as_ref()
            .map(|hyper| hyper.keep_identity(&self.paths));
        if let Some(Err(error)) = kept {
            tracing::error!(%error, "QEMU's identity is not kept");
        }
    }

    /// A guest whose QEMU has forgotten its disk is stopped and let run once more; it notices nothing but the time.
    fn look_after_disks(&mut self) {
        let forgotten = self.hyper.as_ref().is_some_and(Hyper::has_forgotten_a_disk);
        let runs = matches!(self.status, Status::Running { .. }) && self.migration.is_none();
        if forgotten && runs && !planted("forgotten-disk-left") {
            tracing::warn!(
                "QEMU has forgotten a disk that was away for a moment: the guest is stopped and let run once more"
            );
            self.feed(Event::PauseRequested);
            self.feed(Event::ResumeRequested);
        }
    }

    /// Tries again what could not be written of the disks.
    fn follow_disks_again(&mut self) {
        let hyper = self.hyper.as_ref();
        if let Some(hyper) = hyper {
            hyper.disks.keep_what_came();
        }
        if hyper.is_some_and(|hyper| hyper.disks.are_elsewhere()) {
            self.follow_disks();
        }
    }

    /// Has the description say where the disks are. What fails is tried again before anybody needs it.
    pub(crate) fn follow_disks(&mut self) {
        let followed = match (&self.hyper, &mut self.spec) {
            (Some(hyper), Some(spec)) => hyper.disks.follow_moves(&self.paths, spec),
            (None, spec) => self
                .disk_work
                .must_be_over()
                .map_err(|error| error.message)
                .and_then(|()| disks::settle_moves(&self.paths, spec.as_mut())),
            (Some(_), None) => Ok(()),
        };
        if let Err(why) = followed {
            tracing::warn!(
                why,
                "the VM's description does not say yet where its disks are"
            );
        }
    }

    fn nap(&self) -> Duration {
        let migration = self.migration.as_ref();
        let deadline = migration.and_then(|migration| migration.deadline);
        deadline.map_or(NAP_MAX, |at| {
            at.saturating_duration_since(Instant::now()).min(NAP_MAX)
        })
    }

    pub(crate) fn is_idle(&mut self) -> bool {
        let busy = self.hyper.is_some()
            || self.migration.is_some()
            || self.disk_order.is_some()
            || self.disk_work.is_under_way()
            || !self.unsaved.is_empty()
            || self.off_wanted.is_some()
            || self.came.waits()
            || self.left_over.waits()
            || self.at_hand.outbox.is_waited_for(Instant::now())
            || self.timers.is_armed(Timer::Ask)
            || self.timers.is_armed(Timer::Switchover);
        if busy {
            self.busy_at = Instant::now();
        }
        self.busy_at.elapsed() > IDLE_MAX
    }

    /// Whether nothing of the VM is or may be on this host: where something is, the agent begins another process at once.
    fn is_needless(&self) -> bool {
        self.core.record().phase == Phase::Absent && !self.paths.disks().exists()
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Now(request) => {
                // Whoever only looks, again and again, keeps no process of a VM that is not here and left nothing.
                if !(matches!(request.ask, Now::Status) && self.is_needless()) {
                    self.busy_at = Instant::now();
                }
                let answer = self.answer(request.ask).unwrap_or_else(VmAnswer::Error);
                // The caller may have gone: the request is carried out all the same.
                let _ = request.reply.send(answer);
            }
            Input::Later(request) => {
                self.busy_at = Instant::now();
                match request.ask {
                    Later::MeasureDirtyRate { millis } => self.measure(millis, request.reply),
                    Later::ResizeDisk(wish) => self.resize_disk(wish, request.reply),
                    Later::ListSnapshots => self.list_snapshots(request.reply),
                    Later::Snapshots(ask) => self.snapshots(ask, request.reply),
                }
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
            Input::DiskMoved => self.follow_disks(),
            Input::DiskOrderEnded => self.disk_order = None,
            Input::DiskMayHaveRoom { wait } => self.may_have_room(wait),
            Input::Driver(DriverNews { run, news }) => {
                let migration = self.migration.as_ref();
                let Some(migration) = migration.filter(|migration| migration.run == run) else {
                    return;
                };
                migration.intake.taken(&news);
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
                self.halts(why)
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
        self.unsure = None;
        self.forget_what_was_not_obeyed();
        if let Some(hyper) = self.hyper.take() {
            hyper.disks.end();
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
            News::Console(text) => {
                if let Some(hyper) = &self.hyper {
                    hyper.console.came_along(text);
                }
            }
            News::Heard => {
                if self.timers.is_armed(Timer::Switchover) && !self.pause_is_too_long() {
                    self.arm(Timer::Switchover);
                }
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
        let actions = self.judge(event);
        self.perform(actions);
    }

    /// What the core says to an event; nothing of it is done yet.
    pub(crate) fn judge(&mut self, event: Event) -> Vec<Action> {
        if let Event::Message { message, .. } = &event {
            // A source that asks gave the guest as well: its permit may have been lost.
            match message {
                PeerMessage::Permit { .. } => reached("destination.permit"),
                PeerMessage::AskHolding { .. } => {}
                _ => return self.core_handles(event),
            }
            self.notice_a_dead_qemu();
        }
        self.core_handles(event)
    }

    fn core_handles(&mut self, event: Event) -> Vec<Action> {
        tracing::debug!(
            event = event.kind().name(),
            state = self.core.state_name().name(),
            "event"
        );
        self.core.handle(event)
    }

    /// Carries out a batch strictly in order, then what follows from it.
    pub(crate) fn perform(&mut self, actions: Vec<Action>) {
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
