//! The destination's driver: one thread from the first connection to the loaded device state.
//!
//! Owns the channels and guest memory while it comes; QEMU waits beside it, stopped. It never lets the guest run: it
//! reports to the VM's thread, whose ownership core does. A lost link is waited for; what was applied stays applied.
//!
//! ```text
//! wait for control -> Begin, extents -> [pages .. barrier]* -> Stopped, pages, barrier -> device state -> loaded
//!        ^                                    |
//!        +------------ link lost -------------+
//! ```
//!
//! QEMU loads once, so that device state is kept here until all of it has come: a switchover that is called off before
//! is made again. A link that is lost while QEMU loads ends the migration here (the guest is at the source). One that is
//! lost after it was loaded changes nothing: the core asks the source through the agents. A source that connects then all
//! the same has withdrawn its gift: it hears that there is nothing to go on with.

use super::arrivals::Arrivals;
use super::channels::Channels;
use super::memory::Memory;
use super::progress::End;
use crate::control::SharedControl;
use crate::control_slot::ControlSlot;
use crate::faults::{planted, reached};
use crate::input::{Farewell, Intake, News, Tell};
use crate::shared_report::SharedReport;
use godwit_migrate::protocol::{
    ToDestination, ToSource, clip_reason, decode_to_destination, encode,
};
use godwit_migrate::rate::WireRate;
use godwit_ownership::{Event, PeerMessage};
use godwit_qemu::device_state::Incoming as DeviceStream;
use godwit_qemu::machine::Machine;
use godwit_transport::{Class, Connection, ControlReceiver, Incoming, TransportError};
use godwit_types::migration::{MoveEventKind, Phase};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the driver looks at everything that may have come.
const TICK: Duration = Duration::from_millis(5);
/// How often it says what was applied.
const APPLIED_EVERY: Duration = Duration::from_millis(20);
/// How long it waits for the source's first word, and for a lost link to be made again.
const SOURCE_WAIT: Duration = Duration::from_secs(75);
/// After so long without a first connection, and again and again, the source is asked whether it comes. A controller on a
/// busy machine may need seconds between telling the two hosts.
const NOBODY_AFTER: Duration = Duration::from_secs(10);
/// A control channel on which the source says nothing for this long is lost; it pings once a second.
const CONTROL_SILENCE: Duration = Duration::from_secs(6);
/// Most bytes kept of what came behind a barrier that is not reached; after that the source has to wait.
pub(super) const HELD_BYTES_MAX: usize = 64 << 20;
/// How often the source hears something while devices are loaded.
pub(super) const LIFE_EVERY: Duration = Duration::from_millis(100);
/// How long a source may take to hear why it comes too late.
const TOO_LATE_WAIT: Duration = Duration::from_millis(100);
/// What a source hears that connects when devices are loaded.
const TOO_LATE: &str = "the device state of a switchover that was called off is loaded there, which can be done once: begin a new migration";
/// How long the source's reason may come after the fact that it ended the migration, which also takes another way.
const LAST_WORD_WAIT: Duration = Duration::from_millis(200);
/// Most messages among which it is looked for.
pub(super) const UNREAD_MAX: usize = 1024;

/// A QEMU that waits for its device state.
#[derive(Debug)]
pub(crate) struct WaitingQemu {
    pub machine: Arc<Machine>,
    pub stream: DeviceStream,
}

/// What the VM's thread tells the driver.
#[derive(Debug)]
pub(crate) enum Command {
    /// The migration is over here; tell the source why, if it is a failure.
    End { reason: Option<String> },
    /// The guest runs here: when the source closes the channels, that is the end and no loss.
    Linger,
}

/// What a driver is made of.
pub(crate) struct DestinationParts {
    pub arrivals: Arrivals,
    pub memory: Arc<Memory>,
    pub qemu: WaitingQemu,
    pub report: SharedReport,
    pub control: ControlSlot,
    /// Allocate all of the guest's memory before anything comes.
    pub prepare: bool,
    pub cores: usize,
    pub news: Tell,
}

/// The running driver, as the VM's thread holds it.
#[derive(Debug)]
pub(crate) struct DestinationHandle {
    commands: Sender<Command>,
    intake: Arc<Intake>,
    farewell: Receiver<Farewell>,
    thread: Option<JoinHandle<()>>,
}

impl DestinationHandle {
    /// Starts the thread.
    pub(crate) fn start(parts: DestinationParts) -> std::io::Result<Self> {
        let (commands, received) = channel();
        let (said, farewell) = channel();
        let intake = Arc::<Intake>::default();
        let driver = DestinationDriver {
            pages: parts.memory.ram.page_count(),
            qemu: Some(parts.qemu),
            arrivals: parts.arrivals,
            memory: parts.memory,
            report: parts.report,
            control: parts.control,
            prepare: parts.prepare,
            cores: parts.cores,
            told_prepared: false,
            news: intake.bound(parts.news),
            said,
            commands: received,
            held_back: Vec::new(),
            next_control: None,
            lingers: false,
            connected: false,
            first_pass: Arc::new(AtomicBool::new(true)),
            carried: 0,
            wire: WireRate::default(),
            began: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name("destination".into())
            .spawn(move || driver.run())?;
        Ok(Self {
            commands,
            intake,
            farewell,
            thread: Some(thread),
        })
    }

    /// What waits of its news.
    pub(crate) fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Why the source ended the migration, if it says so soon.
    pub(crate) fn last_word(&self) -> Option<Farewell> {
        self.farewell.recv_timeout(LAST_WORD_WAIT).ok()
    }

    /// The guest runs here; the driver ends when the source closes the channels.
    pub(crate) fn linger(&self) {
        let _ = self.commands.send(Command::Linger);
    }

    /// Ends the driver and waits until nothing writes guest memory any more.
    pub(crate) fn end(mut self, reason: Option<String>) {
        let _ = self.commands.send(Command::End { reason });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Why an activity of the driver stopped.
#[derive(Debug)]
pub(super) enum Halt {
    /// The VM's thread wants it to be over.
    Ended(Option<String>),
    /// The source ended the migration.
    Cancelled(Farewell),
    /// The link is lost.
    Lost(String),
    /// It cannot go on.
    Failed(String),
}

/// How far the present epoch is; device state is taken only after the last barrier.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) enum Stage {
    Precopy,
    Stopped,
    LastApplied,
    /// Device state comes and is kept.
    StateComes,
    /// QEMU has a part of it.
    Loading,
    Loaded,
}

pub(super) struct Epoch {
    number: u16,
    pub(super) control: Arc<SharedControl>,
    pub(super) receiver: ControlReceiver,
    channels: Channels,
    /// What came behind a barrier that is not reached.
    held: VecDeque<Incoming>,
    pub(super) held_bytes: usize,
    /// Device state that QEMU has not got.
    pub(super) device_state: Vec<u8>,
    /// Pages that will come, and those of them that have no memory here yet.
    announced_pages: u64,
    missing_pages: u64,
    /// Why what will come does not fit here.
    no_room: Option<String>,
    addresses_known: bool,
    pub(super) stage: Stage,
    heard: Instant,
    told: Instant,
}

pub(super) struct DestinationDriver {
    arrivals: Arrivals,
    pub(super) memory: Arc<Memory>,
    pub(super) qemu: Option<WaitingQemu>,
    pub(super) report: SharedReport,
    control: ControlSlot,
    prepare: bool,
    cores: usize,
    told_prepared: bool,
    news: Tell,
    /// Where the source's last word goes.
    said: Sender<Farewell>,
    commands: Receiver<Command>,
    pub(super) pages: u64,
    /// Data channels that arrived before their epoch's first word.
    held_back: Vec<Connection>,
    /// The control channel of the next epoch, which came before the present one was known to be lost.
    next_control: Option<Connection>,
    lingers: bool,
    /// A control channel has come.
    connected: bool,
    /// Page threads give way to vCPUs until a pass is complete.
    first_pass: Arc<AtomicBool>,
    /// Bytes that came on the channels of earlier epochs.
    carried: u64,
    wire: WireRate,
    began: Instant,
}

impl DestinationDriver {
    fn run(mut self) {
        let halt = self.receive();
        self.memory.cancel();
        match halt {
            Halt::Ended(_) => {}
            Halt::Cancelled(farewell) => {
                // The VM's thread may be waiting for nothing else.
                let _ = self.said.send(farewell.clone());
                self.tell(News::SourceEnded(farewell));
            }
            Halt::Lost(reason) | Halt::Failed(reason) => self.tell(News::Failed(reason)),
        }
        self.control.clear();
    }

    pub(super) fn tell(&self, news: News) {
        (self.news)(news);
    }

    fn receive(&mut self) -> Halt {
        loop {
            let mut epoch = match self.wait_for_epoch() {
                Ok(epoch) => epoch,
                Err(halt) => return halt,
            };
            let halt = self.follow(&mut epoch);
            let halt = self.or_farewell(&mut epoch, halt);
            if let Halt::Failed(reason) = &halt {
                reached("destination.giving-up");
                let _ = epoch.control.send(&ToSource::Failed {
                    reason: clip_reason(reason),
                });
            }
            if let Halt::Ended(Some(reason)) = &halt {
                let _ = epoch.control.send(&ToSource::Failed {
                    reason: clip_reason(reason),
                });
            }
            let finished = matches!(halt, Halt::Ended(_) | Halt::Failed(_) | Halt::Cancelled(_));
            let stage = epoch.stage;
            self.close(epoch, finished);
            match (halt, stage) {
                (Halt::Lost(_), _) if self.lingers => return Halt::Ended(None),
                (Halt::Lost(reason), Stage::Loading) => {
                    return Halt::Failed(format!(
                        "the link was lost while device state was loaded: {reason}"
                    ));
                }
                (Halt::Lost(_), Stage::Loaded) => {
                    self.tell(News::Core(Event::LinkLost));
                    self.held_back.clear();
                    return wait_for_end(&self.arrivals, self.next_control.take(), &self.commands);
                }
                (Halt::Lost(reason), _) => {
                    self.report.happened(MoveEventKind::LinkLost, &reason);
                    self.tell(News::Core(Event::LinkLost));
                }
                (halt, _) => return halt,
            }
        }
    }

    /// What ends an epoch here may overtake the source's word on the control channel that it has ended the migration: data
    /// channels are closed behind it, and the agents' message ends QEMU while it still loads.
    fn or_farewell(&self, epoch: &mut Epoch, halt: Halt) -> Halt {
        let wait = match &halt {
            Halt::Lost(_) if !self.lingers => LAST_WORD_WAIT,
            // The source waits for the reason. What it had to say before is there.
            Halt::Failed(_) => Duration::ZERO,
            _ => return halt,
        };
        let tell = |message| self.tell(News::Peer(message));
        match unread_farewell(&mut epoch.receiver, self.pages, wait, tell) {
            Some(farewell) => Halt::Cancelled(farewell),
            None => halt,
        }
    }

    /// Ends a connection set: when this returns nothing of it writes memory any more.
    fn close(&mut self, mut epoch: Epoch, orderly: bool) {
        self.show_received(&epoch);
        self.carried = self.carried.saturating_add(epoch.channels.bytes());
        self.control.clear();
        if orderly {
            epoch.control.finish();
        }
        epoch.control.close();
        epoch.channels.close();
    }

    /// Waits for a control channel.
    fn wait_for_epoch(&mut self) -> Result<Epoch, Halt> {
        if let Some(connection) = self.next_control.take() {
            return self.open(connection);
        }
        let deadline = Instant::now() + SOURCE_WAIT;
        let mut ask_at = Instant::now() + NOBODY_AFTER;
        loop {
            self.commands()?;
            if !self.connected && Instant::now() >= ask_at {
                ask_at = Instant::now() + NOBODY_AFTER;
                self.tell(News::NobodyCame);
            }
            match self.arrivals.connections.recv_timeout(TICK) {
                Ok(connection) if connection.channel().is_control() => {
                    return self.open(connection);
                }
                Ok(connection) => self.hold_back(connection),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(_) => {
                    let strangers = self.arrivals.strangers();
                    return Err(Halt::Lost(format!(
                        "the source did not connect within {} s{strangers}",
                        SOURCE_WAIT.as_secs()
                    )));
                }
            }
        }
    }

    /// Keeps a data channel until its epoch begins. What an earlier epoch left is of no use any more.
    fn hold_back(&mut self, connection: Connection) {
        let epoch = connection.channel().epoch();
        self.held_back
            .retain(|held| held.channel().epoch() >= epoch);
        if self.held_back.len() < godwit_migrate::protocol::STREAMS_MAX as usize {
            self.held_back.push(connection);
        }
    }

    fn open(&mut self, connection: Connection) -> Result<Epoch, Halt> {
        let number = connection.channel().epoch();
        let (sender, receiver) = connection
            .into_control()
            .map_err(|error| Halt::Failed(error.to_string()))?;
        let control = Arc::new(SharedControl::new(sender));
        self.control.set(&control);
        self.connected = true;
        self.report.passed(MoveEventKind::LinkLost);
        self.report.update(|report| report.phase = Phase::Precopy);
        let now = Instant::now();
        Ok(Epoch {
            number,
            control,
            receiver,
            channels: Channels::new(Arc::clone(&self.first_pass)),
            held: VecDeque::new(),
            held_bytes: 0,
            device_state: Vec::new(),
            announced_pages: 0,
            missing_pages: 0,
            no_room: None,
            addresses_known: false,
            stage: Stage::Precopy,
            heard: now,
            told: now,
        })
    }

    fn commands(&mut self) -> Result<(), Halt> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::End { reason }) => return Err(Halt::Ended(reason)),
                Ok(Command::Linger) => self.lingers = true,
                Err(std::sync::mpsc::TryRecvError::Empty) => return Ok(()),
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return Err(Halt::Ended(None)),
            }
        }
    }

    /// Follows one epoch to its end.
    fn follow(&mut self, epoch: &mut Epoch) -> Halt {
        loop {
            if let Err(halt) = self.turn(epoch) {
                return halt;
            }
        }
    }

    fn turn(&mut self, epoch: &mut Epoch) -> Result<(), Halt> {
        self.commands()?;
        self.admit(epoch)?;
        self.look_at_channels(epoch)?;
        self.look_at_memory(epoch)?;
        let Some(incoming) = self.next(epoch)? else {
            return Ok(());
        };
        match incoming {
            Incoming::Message(bytes) => {
                let message = decode_to_destination(&bytes, self.pages);
                let message = message.map_err(|error| Halt::Failed(error.to_string()))?;
                if epoch.channels.is_barred() && !is_urgent(&message) {
                    epoch.hold(Incoming::Message(bytes));
                    return Ok(());
                }
                self.message(epoch, message)
            }
            Incoming::DeviceState(piece) if epoch.channels.is_barred() => {
                epoch.hold(Incoming::DeviceState(piece));
                Ok(())
            }
            Incoming::DeviceState(piece) => self.device_state(epoch, &piece),
            Incoming::End => Err(Halt::Lost("the source closed the control channel".into())),
        }
    }

    /// What is to be looked at next, if anything. Behind a barrier the control channel is heard without waiting for it,
    /// since the barrier is what is waited for.
    fn next(&mut self, epoch: &mut Epoch) -> Result<Option<Incoming>, Halt> {
        let mut wait = TICK;
        if epoch.channels.is_barred() {
            wait = Duration::ZERO;
            let reached = epoch.channels.reach_barrier(TICK);
            match reached.map_err(halt_of_end)? {
                Some(iteration) => return self.barrier_done(epoch, iteration).map(|()| None),
                None if epoch.held_bytes > HELD_BYTES_MAX => return Ok(None),
                None => {}
            }
        } else if let Some(held) = epoch.held.pop_front() {
            epoch.held_bytes -= held_len(&held);
            return Ok(Some(held));
        }
        match epoch.receiver.recv(Instant::now() + wait) {
            Ok(incoming) => {
                epoch.heard = Instant::now();
                self.tell(News::Heard);
                Ok(Some(incoming))
            }
            Err(TransportError::Silent { .. }) if epoch.heard.elapsed() < CONTROL_SILENCE => {
                Ok(None)
            }
            Err(error) => Err(halt_of(&error)),
        }
    }

    /// New connections: data channels of this epoch, or the control channel of the next.
    fn admit(&mut self, epoch: &mut Epoch) -> Result<(), Halt> {
        while let Ok(connection) = self.arrivals.connections.try_recv() {
            if connection.channel().is_control() {
                // The source has given this epoch up before this side noticed.
                let next = connection.channel().epoch();
                self.held_back.retain(|data| data.channel().epoch() == next);
                self.next_control = Some(connection);
                return Err(Halt::Lost("the source makes the channels anew".into()));
            } else {
                self.hold_back(connection);
            }
        }
        for connection in std::mem::take(&mut self.held_back) {
            self.admit_data(epoch, connection)?;
        }
        Ok(())
    }

    fn admit_data(&mut self, epoch: &mut Epoch, connection: Connection) -> Result<(), Halt> {
        let channel = connection.channel();
        if channel.epoch() > epoch.number {
            // Of the next epoch, whose control channel is on its way.
            self.hold_back(connection);
            return Ok(());
        }
        if channel.epoch() != epoch.number {
            connection.closer().close();
            return Ok(());
        }
        let notes = connection.granted().receive_notes();
        let back = epoch.channels.admit(connection, &self.memory);
        match back.map_err(Halt::Failed)? {
            // Its `Begin` has not come yet.
            Some(connection) => self.hold_back(connection),
            None => {
                self.report.note(notes);
                let open = epoch.channels.open();
                self.report.update(|report| report.streams = open);
            }
        }
        Ok(())
    }

    /// Says what was applied; ends the epoch when a channel has failed.
    fn look_at_channels(&mut self, epoch: &mut Epoch) -> Result<(), Halt> {
        if epoch.told.elapsed() < APPLIED_EVERY {
            return Ok(());
        }
        epoch.told = Instant::now();
        self.show_received(epoch);
        if let Some(end) = epoch.channels.failure() {
            return Err(halt_of_end(end));
        }
        let told = epoch.channels.tell_applied(&epoch.control);
        told.map_err(|error| halt_of(&error))
    }

    /// Shows what has come so far, and how fast.
    fn show_received(&mut self, epoch: &Epoch) {
        let bytes = self.carried.saturating_add(epoch.channels.bytes());
        self.wire.sample(self.began.elapsed().as_secs_f64(), bytes);
        let bytes_per_s = self.wire.bytes_per_s().unwrap_or_default();
        self.report.update(|report| {
            report.bytes_on_wire = bytes;
            if report.outcome.is_none() {
                report.wire_bytes_per_s = bytes_per_s;
            }
        });
    }

    /// Says that the memory asked for is there; ends the migration when there is not enough. Not before all channels have
    /// come: a source that still connects would not hear the reason.
    fn look_at_memory(&mut self, epoch: &mut Epoch) -> Result<(), Halt> {
        if !epoch.channels.complete() {
            return Ok(());
        }
        if let Some(reason) = epoch.no_room.take() {
            return Err(Halt::Failed(reason));
        }
        if !self.prepare || self.told_prepared {
            return Ok(());
        }
        let Some(took) = self.memory.preparation().map_err(Halt::Failed)? else {
            return Ok(());
        };
        self.told_prepared = true;
        let seconds = took.as_secs_f64();
        self.report.update(|report| report.prepare_s = seconds);
        let told = epoch.control.send(&ToSource::Prepared { seconds });
        told.map_err(|error| halt_of(&error))
    }

    pub(super) fn message(
        &mut self,
        epoch: &mut Epoch,
        message: ToDestination,
    ) -> Result<(), Halt> {
        match message {
            ToDestination::Begin {
                epoch: number,
                streams,
                ..
            } => self.begin(epoch, number, streams),
            ToDestination::Extents { extents } => {
                for (first, count) in extents {
                    epoch.announced_pages = epoch.announced_pages.saturating_add(count);
                    if epoch.announced_pages > self.pages {
                        let reason = "the source announced more memory than the guest has";
                        return Err(Halt::Failed(reason.into()));
                    }
                    epoch.missing_pages += self.memory.ram.without_memory(first..first + count);
                }
                Ok(())
            }
            ToDestination::ExtentsEnd => {
                // A preparation has looked by itself.
                if !self.prepare {
                    epoch.no_room = self.memory.room_for(epoch.missing_pages).err();
                }
                Ok(())
            }
            ToDestination::Barrier { iteration, sent } => self.barrier(epoch, iteration, sent),
            ToDestination::Stopped => {
                if epoch.stage != Stage::Precopy {
                    return Err(Halt::Failed("the source stopped its guest twice".into()));
                }
                epoch.stage = Stage::Stopped;
                self.report
                    .update(|report| report.phase = Phase::Switchover);
                Ok(())
            }
            ToDestination::Addresses { cards } => {
                // Once is enough: each is written to a file.
                if !std::mem::replace(&mut epoch.addresses_known, true) {
                    self.tell(News::Addresses(cards));
                }
                Ok(())
            }
            ToDestination::DeviceStateWhole => self.state_whole(epoch),
            ToDestination::DeviceStateEnd { attempt, .. } => self.load(epoch, attempt),
            ToDestination::Warm { .. } => Ok(()),
            ToDestination::Cancel { reason, cancelled } => {
                Err(Halt::Cancelled(Farewell { reason, cancelled }))
            }
            ToDestination::Peer { message } => {
                self.tell(News::Peer(message));
                Ok(())
            }
            ToDestination::Ping { nonce } => epoch
                .control
                .send(&ToSource::Pong { nonce })
                .map_err(|error| halt_of(&error)),
        }
    }

    fn begin(&mut self, epoch: &mut Epoch, number: u16, streams: u32) -> Result<(), Halt> {
        if number != epoch.number || !epoch.channels.begin(streams) {
            return Err(Halt::Failed("the source began an epoch twice".into()));
        }
        if self.prepare {
            // Only now, so that the source's total contains it.
            self.memory.prepare(self.cores);
        }
        epoch
            .control
            .send(&ToSource::Begun { epoch: number })
            .map_err(|error| halt_of(&error))
    }

    fn barrier(&mut self, epoch: &mut Epoch, iteration: u32, sent: Vec<u64>) -> Result<(), Halt> {
        if planted("barrier-not-awaited") {
            return self.barrier_done(epoch, iteration);
        }
        epoch.channels.raise_barrier(iteration, sent);
        Ok(())
    }

    fn barrier_done(&mut self, epoch: &mut Epoch, iteration: u32) -> Result<(), Halt> {
        let shares = epoch.channels.take_shares();
        if epoch.stage == Stage::Stopped {
            epoch.stage = Stage::LastApplied;
            if !planted("receivers-outlive-load") {
                epoch.channels.end_receiving();
            }
        }
        let done = ToSource::BarrierDone {
            iteration,
            memory_wait: shares.memory_wait,
            busy: shares.busy,
        };
        epoch.control.send(&done).map_err(|error| halt_of(&error))
    }
}

impl Epoch {
    /// Keeps what came behind a barrier until it is reached.
    pub(super) fn hold(&mut self, incoming: Incoming) {
        self.held_bytes += held_len(&incoming);
        self.held.push_back(incoming);
    }
}

/// What is kept costs memory also when it says nothing.
fn held_len(incoming: &Incoming) -> usize {
    match incoming {
        Incoming::Message(bytes) | Incoming::DeviceState(bytes) => bytes.len() + 64,
        Incoming::End => 64,
    }
}

/// Words that mean the same before and behind a barrier.
pub(super) fn is_urgent(message: &ToDestination) -> bool {
    matches!(
        message,
        ToDestination::Warm { .. }
            | ToDestination::Ping { .. }
            | ToDestination::Peer { .. }
            | ToDestination::Cancel { .. }
    )
}

/// Looks for the source's last word in what is left to read of a control channel; what it says about ownership counts
/// all the same.
fn unread_farewell(
    receiver: &mut ControlReceiver,
    pages: u64,
    wait: Duration,
    tell: impl Fn(PeerMessage),
) -> Option<Farewell> {
    let until = Instant::now() + wait;
    for _ in 0..UNREAD_MAX {
        let Incoming::Message(bytes) = receiver.recv(until).ok()? else {
            continue;
        };
        match decode_to_destination(&bytes, pages).ok()? {
            ToDestination::Cancel { reason, cancelled } => {
                return Some(Farewell { reason, cancelled });
            }
            ToDestination::Peer { message } => tell(message),
            _ => {}
        }
    }
    None
}

/// Everything is loaded: only the VM's thread says how it ends. A channel that comes now is turned away, one at a time.
fn wait_for_end(
    arrivals: &Arrivals,
    mut late: Option<Connection>,
    commands: &Receiver<Command>,
) -> Halt {
    loop {
        let came = late.take().or_else(|| arrivals.connections.try_recv().ok());
        let wait = match came {
            Some(_) => Duration::ZERO,
            None => LIFE_EVERY,
        };
        if let Some(connection) = came {
            turn_away(connection);
        }
        match commands.recv_timeout(wait) {
            Ok(Command::End { reason }) => return Halt::Ended(reason),
            Ok(Command::Linger) | Err(RecvTimeoutError::Disconnected) => return Halt::Ended(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Tells a source that it comes too late, as far as it listens.
fn turn_away(connection: Connection) {
    let closer = connection.closer();
    if let Ok((mut sender, mut receiver)) = connection.into_control() {
        let deadline = Instant::now() + TOO_LATE_WAIT;
        let failed = ToSource::Failed {
            reason: TOO_LATE.into(),
        };
        // What it says is read, since the kernel would throw the answer away with it.
        let _ = sender
            .send(&encode(&failed), deadline)
            .and_then(|()| sender.finish(deadline));
        while Instant::now() < deadline
            && !matches!(receiver.recv(deadline), Ok(Incoming::End) | Err(_))
        {}
    }
    closer.close();
}

pub(super) fn halt_of(error: &TransportError) -> Halt {
    match error.class() {
        Class::Lost | Class::Cancelled => Halt::Lost(error.to_string()),
        _ => Halt::Failed(error.to_string()),
    }
}

fn halt_of_end(end: End) -> Halt {
    match end {
        End::Lost(reason) => Halt::Lost(reason),
        End::Failed(reason) => Halt::Failed(reason),
        End::Finished => Halt::Lost("a data channel has ended".into()),
    }
}

#[cfg(test)]
mod tests;
