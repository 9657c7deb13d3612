//! The source's driver: one thread that runs a migration from connecting to the last byte of device state.
//!
//! Owns the channels, the dirty set and the write tracking. It never decides who may run the VM: it reports to the VM's
//! thread, whose ownership core says when to stop the guest and what to send, and obeys. Whatever goes wrong before the
//! permit, the guest keeps running at the source; a lost link is made again for up to a minute while it does.
//!
//! ```text
//! connect -> track -> [pass -> barrier -> scan -> decide]* -> converged
//!    ^                                                            | core: guest stopped
//!    |  link lost, guest resumed                                  v
//!    +------------------------------------------  last pages -> device state -> core hands over
//! ```

use crate::faults::{planted, reached};
use crate::input::{Intake, News, Tell};
use crate::save_gate::SaveGate;
use crate::shared_report::SharedReport;
use godwit_guestmem::{DirtyTracker, PageSet, RamFile};
use godwit_migrate::account::PAGE_BYTES;
use godwit_migrate::convergence::{Convergence, Goal};
use godwit_migrate::ledger::{Counters, Ledger};
use godwit_migrate::protocol::ToSource;
use godwit_qemu::allowance::SharedThrottle;
use godwit_qemu::machine::Machine;
use godwit_qemu::neighbours::Neighbours;
use godwit_streams::source::{
    ConnectionSet, Ending, FromPeer, Happened, Pass, PassEnd, Route, SetEvent, SetPlan, TellDriver,
    extents,
};
use godwit_streams::{ControlSlot, Farewell};
use godwit_transport::{Class, TransportError};
use godwit_types::Generation;
use godwit_types::migration::{MoveEventKind, PEER_GAVE_UP};
use godwit_wire::Spec;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// For how long a lost link is tried again.
const RECONNECT_FOR: Duration = Duration::from_secs(60);
/// Pause between two tries.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);
/// How often the destination is asked for a sign of life.
pub(super) const PING_EVERY: Duration = Duration::from_secs(1);
/// Longest wait for the answer to a barrier while the guest runs.
pub(super) const BARRIER_WAIT: Duration = Duration::from_secs(30);
/// How long a destination's reason may come after its closed channel.
const LAST_WORD_WAIT: Duration = Duration::from_millis(200);
/// Part of a switchover that does not depend on memory, as first estimate, s.
const FIXED_SWITCHOVER_S: f64 = 0.012;
/// QEMU's time to save its devices.
pub(super) const SAVE_WAIT: Duration = Duration::from_secs(10);

/// What reaches the driver.
#[derive(Debug)]
pub(crate) enum DriverInput {
    /// From a set of connections.
    Set(SetEvent),
    /// From the VM's thread.
    Command(Command),
}

/// What the VM's thread tells the driver.
#[derive(Debug)]
pub(crate) enum Command {
    /// The guest is stopped: send what is left.
    LastPages { attempt: Generation },
    /// Send the device state.
    DeviceState { attempt: Generation },
    /// The switchover is called off: leave the guest alone and wait for `GoOn` or `End`.
    CalledOff,
    /// After a switchover that was called off the guest runs again: go on, with new channels.
    GoOn,
    /// The destination's agent says that it gave up: its own words may be on their way.
    PeerGaveUp,
    /// The migration is over here; tell the peer why, if it is no success.
    End { reason: Option<Farewell> },
}

/// What the driver goes on with. That the migration is over, called off or given up is no step but a [`Halt`].
#[derive(Debug)]
pub(super) enum Step {
    /// The guest is stopped: send what is left.
    LastPages(Generation),
    /// Send the device state.
    DeviceState(Generation),
    /// The guest runs again: new channels.
    GoOn,
    /// The destination said something, which came at this time.
    Peer(ToSource, Instant),
    /// A sender finished a pass.
    PassEnd(Box<PassEnd>),
    /// The time is up, or what came needs nothing more.
    Nothing,
}

/// A wait that only something to do or a halt ends.
pub(super) const FOR_EVER: Duration = Duration::MAX;

/// What a driver is made of.
pub(crate) struct SourceParts {
    pub spec: Arc<Spec>,
    /// The version of the control channel.
    pub protocol: u32,
    pub routes: Vec<Route>,
    pub ram: Arc<RamFile>,
    pub machine: Arc<Machine>,
    pub tracker: DirtyTracker,
    pub throttle: SharedThrottle,
    /// Whom the destination tells where the guest is.
    pub neighbours: Neighbours,
    pub save_gate: SaveGate,
    pub report: SharedReport,
    /// Wait until the destination has allocated all of the guest's memory.
    pub prepare: bool,
    pub max_downtime_ms: u64,
    pub deadline_s: Option<u64>,
    pub cap_bytes_per_s: Option<f64>,
    /// Where a new set's control channel is put, so that the VM's thread can send on it.
    pub control: ControlSlot,
    pub news: Tell,
}

/// The running driver, as the VM's thread holds it.
#[derive(Debug)]
pub(crate) struct SourceHandle {
    inputs: Sender<DriverInput>,
    ending: Ending,
    intake: Arc<Intake>,
    /// Gives the reason why it failed, if it did.
    thread: Option<std::thread::JoinHandle<Option<String>>>,
}

impl SourceHandle {
    /// Starts the thread.
    pub(crate) fn start(mut parts: SourceParts) -> std::io::Result<Self> {
        let (inputs, received) = channel();
        let (intake, ending) = (Arc::<Intake>::default(), Ending::default());
        parts.news = intake.bound(parts.news);
        let (own, ended) = (inputs.clone(), ending.clone());
        let own: TellDriver = Arc::new(move |event| own.send(DriverInput::Set(event)).is_ok());
        let run = move || SourceDriver::new(parts, own, received, ended).run();
        let thread = std::thread::Builder::new()
            .name("source".into())
            .spawn(run)?;
        Ok(Self {
            inputs,
            ending,
            intake,
            thread: Some(thread),
        })
    }

    /// What waits of its news.
    pub(crate) fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Gives a command; one that comes too late is nobody's loss.
    pub(crate) fn command(&self, command: Command) {
        let _ = self.inputs.send(DriverInput::Command(command));
    }

    /// Ends the driver and waits until tracking is off. Gives the reason for which it had failed already.
    pub(crate) fn end(mut self, reason: Option<Farewell>) -> Option<String> {
        self.command(Command::End {
            reason: reason.clone(),
        });
        // Whoever sees this finds the command.
        self.ending.raise(reason);
        self.thread.take().and_then(|thread| thread.join().ok())?
    }

    /// As [`SourceHandle::end`], for a destination that gave up: hears out why.
    pub(crate) fn end_after_last_word(self, reason: Option<Farewell>) -> Option<String> {
        self.command(Command::PeerGaveUp);
        self.end(reason)
    }
}

/// Why an activity of the driver stopped.
#[derive(Debug)]
pub(super) enum Halt {
    /// The VM's thread wants the migration to be over.
    Ended(Option<Farewell>),
    /// The link is lost.
    Lost(String),
    /// The core called the switchover off: it goes on with new channels, or is over.
    CalledOff,
    /// It cannot go on.
    Failed(String),
}

pub(super) struct SourceDriver {
    pub(super) parts: SourceParts,
    own: TellDriver,
    inputs: Receiver<DriverInput>,
    ending: Ending,
    pub(super) dirty: PageSet,
    pub(super) next_set: u16,
    pub(super) iteration: u32,
    /// Whether a pass is complete: from then on each races with what the guest writes.
    pub(super) passed: bool,
    pub(super) pass: Option<Arc<Pass>>,
    pub(super) convergence: Convergence,
    pub(super) ledger: Ledger,
    /// What the channels of earlier sets had carried.
    pub(super) carried: Counters,
    pub(super) began: Instant,
    /// When it was last asked what the guest has written.
    pub(super) scanned: Instant,
    /// Looks taken in the middle of the first iteration.
    pub(super) looks: u32,
    pub(super) rtt_s: f64,
    pub(super) pinged: Instant,
    /// When the destination said something last.
    pub(super) heard: Instant,
    /// Whether the VM's thread has said that it is over; it says so once.
    end_heard: bool,
}

impl SourceDriver {
    fn new(
        parts: SourceParts,
        own: TellDriver,
        inputs: Receiver<DriverInput>,
        ending: Ending,
    ) -> Self {
        let goal = Goal {
            max_downtime_s: parts.max_downtime_ms as f64 / 1e3,
            fixed_s: FIXED_SWITCHOVER_S,
            deadline_s: parts.deadline_s.map(|seconds| seconds as f64),
        };
        Self {
            dirty: PageSet::new(parts.ram.page_count()),
            convergence: Convergence::new(goal),
            ledger: Ledger::default(),
            carried: Counters::default(),
            began: Instant::now(),
            scanned: Instant::now(),
            looks: 0,
            parts,
            own,
            inputs,
            ending,
            next_set: 0,
            iteration: 0,
            passed: false,
            pass: None,
            rtt_s: 0.0005,
            pinged: Instant::now(),
            heard: Instant::now(),
            end_heard: false,
        }
    }

    fn run(mut self) -> Option<String> {
        let halt = self.migrate();
        // Tracking off first: the guest must not pay for a migration that is over.
        self.parts.throttle.release();
        self.parts.tracker.stop();
        let failure = match halt {
            Halt::Failed(reason) => Some(reason),
            Halt::Lost(reason) => Some(format!(
                "the link to the destination was lost and could not be made again: {reason}"
            )),
            Halt::Ended(_) | Halt::CalledOff => None,
        };
        if let Some(reason) = &failure {
            self.tell(News::Failed(reason.clone()));
            self.wait_for_end();
        }
        self.parts.control.clear();
        failure
    }

    pub(super) fn tell(&self, news: News) {
        (self.parts.news)(news);
    }

    fn wait_for_end(&mut self) {
        while !self.end_heard {
            // Whatever else is wanted comes too late.
            drop(self.next(None, FOR_EVER));
        }
    }

    fn migrate(&mut self) -> Halt {
        reached("source.setup");
        match self.parts.ram.data_pages() {
            Ok(pages) => self.dirty = pages,
            Err(error) => return Halt::Failed(error.to_string()),
        }
        self.show_content();
        let mut set = match self.connect(true) {
            Ok(set) => set,
            Err(halt) => return halt,
        };
        self.parts.report.trouble(None);
        reached("source.connected");
        if self.parts.prepare
            && let Err(halt) = self.wait_prepared(&set)
        {
            let halt = match halt {
                Halt::Lost(reason) => self.last_word(&set).unwrap_or(Halt::Lost(reason)),
                halt => halt,
            };
            return self.give_up(&mut set, halt);
        }
        if !planted("tracking-after-first-read")
            && let Err(error) = self.begin_tracking()
        {
            return self.give_up(&mut set, Halt::Failed(error));
        }
        reached("source.tracking");
        let switchover_wait = Duration::from_secs_f64(4.0 * self.rtt_s);
        self.tell(News::Began { switchover_wait });
        loop {
            let halt = match self.precopy(&mut set) {
                Ok(()) => self.switchover(&mut set),
                Err(halt) => halt,
            };
            let halt = match halt {
                Halt::CalledOff => self.hear_verdict(&set),
                halt => halt,
            };
            match halt {
                Halt::Lost(reason) => match self.last_word(&set) {
                    Some(halt) => return self.give_up(&mut set, halt),
                    None => self.note_lost(&reason),
                },
                Halt::CalledOff => {
                    let why = "the switchover was called off: the channels are made anew";
                    tracing::warn!("{why}");
                    self.parts.report.trouble(Some(why.into()));
                }
                halt => return self.give_up(&mut set, halt),
            }
            self.full_speed();
            self.abandon(&mut set);
            set = match self.connect(false) {
                Ok(set) => set,
                Err(halt) => return halt,
            };
            self.note_remade();
        }
    }

    /// Says that the link is lost, for as long as it is.
    fn note_lost(&self, reason: &str) {
        tracing::warn!(reason, "the link is lost; the channels are made anew");
        let report = &self.parts.report;
        report.happened(MoveEventKind::LinkLost, reason);
        report.trouble(Some(format!("link lost, connecting again: {reason}")));
    }

    fn note_remade(&self) {
        let report = &self.parts.report;
        report.trouble(None);
        if let Some(seconds) = report.passed(MoveEventKind::LinkLost) {
            tracing::info!(seconds, "the link is made again");
        }
    }

    /// A destination that fails closes its channels after it has said why, but the two may come in another order.
    fn last_word(&mut self, set: &ConnectionSet) -> Option<Halt> {
        let until = Instant::now() + LAST_WORD_WAIT + Duration::from_secs_f64(2.0 * self.rtt_s);
        let mut ended = None;
        while Instant::now() < until {
            match self.peer(set, until) {
                Ok(_) | Err(Halt::CalledOff) => {}
                Err(Halt::Ended(reason)) => ended = Some(Halt::Ended(reason)),
                // The agents' message overtakes the reason, which is still to come.
                Err(Halt::Lost(reason)) if reason == PEER_GAVE_UP => {}
                // The control channel has nothing more to say.
                Err(Halt::Lost(_)) => break,
                Err(halt) => return Some(halt),
            }
        }
        ended
    }

    /// Closes a connection set; what may not have been applied is dirty again.
    fn abandon(&mut self, set: &mut ConnectionSet) {
        self.parts.control.clear();
        if let Some(pass) = &self.pass {
            // A sender that a cap holds back would sleep on.
            pass.stop();
        }
        let mut lost = PageSet::new(self.dirty.page_count());
        self.show_sent(set);
        self.carried = self.carried.and(set.counters());
        self.ledger.abandon_pass();
        set.abandon(&mut lost);
        if let Some(pass) = self.pass.take() {
            pass.put_back_untaken(&mut lost);
        }
        if !planted("lost-channel-not-put-back") {
            self.dirty.merge(&lost);
        }
    }

    /// Tells the peer, if it can be told, and closes.
    fn give_up(&mut self, set: &mut ConnectionSet, halt: Halt) -> Halt {
        let reason = match &halt {
            Halt::Ended(reason) => reason.clone(),
            Halt::Lost(reason) | Halt::Failed(reason) => Some(Farewell {
                reason: reason.clone(),
                cancelled: false,
            }),
            Halt::CalledOff => None,
        };
        // The guest first: saying farewell to a peer may take long.
        self.full_speed();
        if !matches!(halt, Halt::Lost(_)) {
            self.parts.tracker.stop();
        }
        match reason {
            None => set.finish(),
            Some(farewell) => {
                let _ = set.control.send(&farewell.message());
                set.control.finish();
                self.abandon(set);
            }
        }
        halt
    }

    /// Protects everything, and only then looks at what memory holds: what is written in between is dirty.
    pub(super) fn begin_tracking(&mut self) -> Result<(), String> {
        self.parts
            .tracker
            .start()
            .map_err(|error| error.to_string())?;
        self.scanned = Instant::now();
        let pages = self
            .parts
            .ram
            .data_pages()
            .map_err(|error| error.to_string())?;
        if !planted("tracking-after-first-read") {
            self.dirty.merge(&pages);
        }
        self.show_content();
        Ok(())
    }

    /// Says what has to go at least: memory without content does not.
    fn show_content(&self) {
        let bytes = self.dirty.count() * PAGE_BYTES;
        self.parts.report.update(|report| {
            report.content_bytes = bytes;
            report.remaining_bytes = bytes;
        });
    }

    /// Makes a connection set. A link that is away is waited for, at the start as later; a destination that refuses this
    /// migration at the start is not.
    fn connect(&mut self, first: bool) -> Result<ConnectionSet, Halt> {
        let give_up_at = Instant::now() + RECONNECT_FOR;
        loop {
            // A command that came meanwhile goes first.
            self.pause(Duration::ZERO)?;
            let reason = match self.connect_once(first) {
                Ok(set) => return Ok(set),
                Err(Halt::Lost(reason)) => reason,
                Err(halt) => return Err(halt),
            };
            self.pause(Duration::ZERO)?;
            if Instant::now() >= give_up_at {
                return Err(if first {
                    Halt::Failed(reason)
                } else {
                    Halt::Lost(reason)
                });
            }
            if first {
                let trouble = format!("not connected yet, trying again: {reason}");
                self.parts.report.trouble(Some(trouble));
            }
            self.pause(RECONNECT_PAUSE)?;
        }
    }

    fn connect_once(&mut self, first: bool) -> Result<ConnectionSet, Halt> {
        let number = self.next_set;
        self.next_set = number
            .checked_add(1)
            .ok_or(Halt::Failed("too many lost links".into()))?;
        let plan = SetPlan {
            number,
            protocol: self.parts.protocol,
            spec: &self.parts.spec,
            routes: &self.parts.routes,
            ram: &self.parts.ram,
            tell: &self.own,
            ending: &self.ending,
        };
        // A card without its address or a host without a core for a moment is a link that can be made again.
        let lost = |error| match error {
            TransportError::System { .. } => Halt::Lost(error.to_string()),
            // So ends who does not prove the migration's key.
            TransportError::HandshakeClosed { .. } if first => Halt::Failed(error.to_string()),
            error => halt_of(error),
        };
        let mut set = ConnectionSet::open(&plan, &extents(&self.dirty)).map_err(lost)?;
        if let Err(halt) = self.wait_begun(&set) {
            if let Halt::Ended(Some(farewell)) = &halt {
                // Whoever does not hear it learns it from the agents.
                let _ = set.control.send(&farewell.message());
            }
            set.abandon(&mut self.dirty);
            return Err(halt);
        }
        if let Err(error) = set.warm(&self.ending) {
            set.abandon(&mut self.dirty);
            return Err(halt_of(error));
        }
        self.parts.control.set(&set.control);
        let notes = set.take_notes();
        self.parts.report.update(|report| {
            report.streams = set.streams() as u32;
        });
        self.parts.report.note(notes);
        Ok(set)
    }

    fn wait_begun(&mut self, set: &ConnectionSet) -> Result<(), Halt> {
        let until = Instant::now() + BARRIER_WAIT;
        loop {
            match self.peer(set, until)? {
                ToSource::Begun { set: begun } if begun == set.number => break,
                _ => {}
            }
        }
        self.rtt_s = set.rtt_s().min(1.0);
        Ok(())
    }

    /// Sleeps without going deaf.
    fn pause(&mut self, time: Duration) -> Result<(), Halt> {
        let until = Instant::now() + time;
        loop {
            match self.next(None, until.saturating_duration_since(Instant::now())) {
                Ok(Step::Nothing) => return Ok(()),
                Err(Halt::Ended(reason)) => return Err(Halt::Ended(reason)),
                // Of channels that are gone.
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Waits for what comes next: from the VM's thread and, with a set of connections, from that. Everything that ends
    /// what the driver does comes from here as a halt; events of earlier sets are passed over.
    pub(super) fn next(
        &mut self,
        set: Option<&ConnectionSet>,
        wait: Duration,
    ) -> Result<Step, Halt> {
        // Too late to be told in time is for ever.
        let until = Instant::now().checked_add(wait);
        let left = || {
            until.map_or(FOR_EVER, |until| {
                until.saturating_duration_since(Instant::now())
            })
        };
        let happened = loop {
            match self.inputs.recv_timeout(left()) {
                Ok(DriverInput::Command(command)) => return self.obey(command),
                Ok(DriverInput::Set(event)) => {
                    if set.is_some_and(|set| set.number == event.set) {
                        break event.what;
                    }
                }
                Err(RecvTimeoutError::Timeout) => return Ok(Step::Nothing),
                // The VM's thread is gone.
                Err(RecvTimeoutError::Disconnected) => {
                    return self.obey(Command::End { reason: None });
                }
            }
        };
        match happened {
            Happened::PassEnd(end) => Ok(Step::PassEnd(end)),
            Happened::Peer { from, at } => {
                let message = self.hear_peer(from)?;
                Ok(message.map_or(Step::Nothing, |message| Step::Peer(message, at)))
            }
        }
    }

    fn obey(&mut self, command: Command) -> Result<Step, Halt> {
        match command {
            Command::LastPages { attempt } => Ok(Step::LastPages(attempt)),
            Command::DeviceState { attempt } => Ok(Step::DeviceState(attempt)),
            Command::GoOn => Ok(Step::GoOn),
            Command::CalledOff => Err(Halt::CalledOff),
            Command::PeerGaveUp => Err(Halt::Lost(PEER_GAVE_UP.into())),
            Command::End { reason } => {
                self.end_heard = true;
                Err(Halt::Ended(reason))
            }
        }
    }

    /// The next message of this set, if it comes by the deadline.
    fn peer(&mut self, set: &ConnectionSet, deadline: Instant) -> Result<ToSource, Halt> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next(Some(set), left)? {
                Step::Peer(message, _) => return Ok(message),
                _ if left.is_zero() => return Err(unanswered()),
                _ => {}
            }
        }
    }

    fn hear_peer(&mut self, from: FromPeer) -> Result<Option<ToSource>, Halt> {
        self.tell(News::Heard);
        self.heard = Instant::now();
        match from {
            FromPeer::Said(message, _seat) => match *message {
                ToSource::Peer { message } => {
                    self.tell(News::Peer(message));
                    Ok(None)
                }
                ToSource::Failed { reason } => {
                    Err(Halt::Failed(format!("the destination gave up: {reason}")))
                }
                message => Ok(Some(message)),
            },
            FromPeer::Lost(reason) => Err(Halt::Lost(reason)),
            FromPeer::Broken(reason) => Err(Halt::Failed(reason)),
        }
    }
}

/// A destination that is silent when it should speak.
pub(super) fn unanswered() -> Halt {
    Halt::Lost("the destination did not answer in time".into())
}

/// A transport error as the driver sees it.
pub(super) fn halt_of(error: TransportError) -> Halt {
    match error.class() {
        Class::Lost | Class::Cancelled => Halt::Lost(error.to_string()),
        _ => Halt::Failed(error.to_string()),
    }
}
