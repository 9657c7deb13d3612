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

use super::handle::{BeginDisks, Command, DestinationParts, KeepDisks, TakeLayers, WaitingQemu};
use super::last_words::{hear_rest, wait_for_end};
use crate::faults::reached;
use crate::input::{News, Tell};
use crate::shared_report::SharedReport;
use crate::variables::Arriving;
use godwit_migrate::protocol::{ToSource, decode_to_destination};
use godwit_migrate::rate::WireRate;
use godwit_ownership::Event;
use godwit_streams::destination::{Arrivals, Channels, Disks, End, Held, Memory, tell_on};
use godwit_streams::{ControlSlot, SharedControl};
use godwit_transport::{Connection, ControlReceiver, Incoming, TransportError};
use godwit_types::migration::{MoveEventKind, Phase};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
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
/// How often the source hears something while devices are loaded.
pub(super) const LIFE_EVERY: Duration = Duration::from_millis(100);

/// Why an activity of the driver stopped.
#[derive(Debug)]
pub(super) enum Halt {
    /// The VM's thread wants it to be over.
    Ended,
    /// The link is lost.
    Lost(String),
    /// It cannot go on.
    Failed(String),
}

impl Halt {
    /// It cannot go on, because of this.
    pub(super) fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

/// How far the present connection set is; device state is taken only after the last barrier.
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

/// The channels of the present set, and how far the migration is on them.
pub(super) struct ConnectionSet {
    pub(super) number: u16,
    pub(super) control: Arc<SharedControl>,
    pub(super) receiver: ControlReceiver,
    pub(super) channels: Channels,
    pub(super) held: Held,
    /// Device state that QEMU has not got.
    pub(super) device_state: Vec<u8>,
    /// Pages that will come, and those of them that have no memory here yet.
    pub(super) announced_pages: u64,
    pub(super) missing_pages: u64,
    /// Why what will come does not fit here.
    pub(super) no_room: Option<String>,
    pub(super) addresses_known: bool,
    /// Places and sizes of the disks that the source has mirrored.
    pub(super) mirrored: Vec<(u8, u64)>,
    pub(super) stage: Stage,
    heard: Instant,
    told: Instant,
}

pub(super) struct DestinationDriver {
    arrivals: Arrivals,
    pub(super) memory: Arc<Memory>,
    pub(super) disks: Disks,
    begin_disks: BeginDisks,
    pub(super) keep_disks: KeepDisks,
    pub(super) take_layers: TakeLayers,
    pub(super) qemu: Option<WaitingQemu>,
    pub(super) report: SharedReport,
    control: ControlSlot,
    pub(super) variables: Option<Arriving>,
    pub(super) prepare: bool,
    pub(super) cores: usize,
    told_prepared: bool,
    news: Tell,
    commands: Receiver<Command>,
    pub(super) pages: u64,
    /// Data channels that arrived before their set's first word.
    held_back: Vec<Connection>,
    /// The control channel of the next set, which came before the present one was known to be lost.
    next_control: Option<Connection>,
    pub(super) lingers: bool,
    /// A control channel has come.
    connected: bool,
    /// Page threads give way to vCPUs until a pass is complete.
    first_pass: Arc<AtomicBool>,
    /// Bytes that came on the channels of earlier sets.
    carried: u64,
    wire: WireRate,
    began: Instant,
}

impl DestinationDriver {
    /// One that has heard nothing yet.
    pub(super) fn new(parts: DestinationParts, commands: Receiver<Command>) -> Self {
        Self {
            pages: parts.memory.ram.page_count(),
            qemu: Some(parts.qemu),
            arrivals: parts.arrivals,
            memory: parts.memory,
            disks: parts.disks,
            begin_disks: parts.begin_disks,
            keep_disks: parts.keep_disks,
            take_layers: parts.take_layers,
            report: parts.report,
            control: parts.control,
            variables: parts.variables,
            prepare: parts.prepare,
            cores: parts.cores,
            told_prepared: false,
            news: parts.news,
            commands,
            held_back: Vec::new(),
            next_control: None,
            lingers: false,
            connected: false,
            first_pass: Arc::new(AtomicBool::new(true)),
            carried: 0,
            wire: WireRate::default(),
            began: Instant::now(),
        }
    }

    pub(super) fn run(mut self) {
        let halt = self.receive();
        self.memory.cancel();
        match halt {
            Halt::Ended => {}
            Halt::Lost(reason) | Halt::Failed(reason) => self.tell(News::Failed(reason)),
        }
        self.control.clear();
    }

    pub(super) fn tell(&self, news: News) {
        (self.news)(news);
    }

    fn receive(&mut self) -> Halt {
        loop {
            let mut set = match self.wait_for_set() {
                Ok(set) => set,
                Err(halt) => return halt,
            };
            let halt = self.follow(&mut set);
            if !matches!(halt, Halt::Ended) && !self.lingers {
                hear_rest(&mut set.receiver, self.pages, |message| {
                    self.tell(News::Peer(message));
                });
            }
            let halt = match halt {
                Halt::Failed(reason) => self.confess(reason),
                halt => halt,
            };
            let stage = set.stage;
            self.close(set, matches!(halt, Halt::Ended));
            match (halt, stage) {
                (Halt::Lost(_), _) if self.lingers => return Halt::Ended,
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

    /// Says why it cannot go on. The VM's thread finds the channel open, tells the source on it, and ends this.
    fn confess(&mut self, reason: String) -> Halt {
        reached("destination.giving-up");
        self.tell(News::Failed(reason));
        wait_for_end(&self.arrivals, self.next_control.take(), &self.commands)
    }

    /// Ends a connection set: when this returns nothing of it writes memory any more.
    fn close(&mut self, mut set: ConnectionSet, orderly: bool) {
        self.show_received(&set);
        self.carried = self.carried.saturating_add(set.channels.bytes());
        self.control.clear();
        if orderly {
            set.control.finish();
        }
        set.control.close();
        set.channels.close();
    }

    /// Waits for a control channel.
    fn wait_for_set(&mut self) -> Result<ConnectionSet, Halt> {
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

    /// Keeps a data channel until its set begins. What an earlier set left is of no use any more.
    fn hold_back(&mut self, connection: Connection) {
        let set = connection.channel().set();
        self.held_back.retain(|held| held.channel().set() >= set);
        if self.held_back.len() < godwit_migrate::protocol::STREAMS_MAX as usize {
            self.held_back.push(connection);
        }
    }

    fn open(&mut self, connection: Connection) -> Result<ConnectionSet, Halt> {
        let number = connection.channel().set();
        let (sender, receiver) = connection.into_control().map_err(Halt::failed)?;
        let control = Arc::new(SharedControl::new(sender));
        self.control.set(&control);
        (self.begin_disks)().map_err(Halt::failed)?;
        self.connected = true;
        self.report.passed(MoveEventKind::LinkLost);
        self.report.update(|report| report.phase = Phase::Precopy);
        let now = Instant::now();
        let (first_pass, disks) = (Arc::clone(&self.first_pass), Arc::clone(&self.disks));
        Ok(ConnectionSet {
            number,
            channels: Channels::new(first_pass, disks, tell_on(&control)),
            control,
            receiver,
            held: Held::default(),
            device_state: Vec::new(),
            announced_pages: 0,
            missing_pages: 0,
            no_room: None,
            addresses_known: false,
            mirrored: Vec::new(),
            stage: Stage::Precopy,
            heard: now,
            told: now,
        })
    }

    fn commands(&mut self) -> Result<(), Halt> {
        loop {
            match self.commands.try_recv() {
                Ok(Command::End) => return Err(Halt::Ended),
                Ok(Command::Linger) => self.lingers = true,
                Err(std::sync::mpsc::TryRecvError::Empty) => return Ok(()),
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return Err(Halt::Ended),
            }
        }
    }

    /// Follows one connection set to its end.
    fn follow(&mut self, set: &mut ConnectionSet) -> Halt {
        loop {
            if let Err(halt) = self.turn(set) {
                return halt;
            }
        }
    }

    fn turn(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        self.commands()?;
        if self.lingers && !self.disks.is_empty() {
            // Who else has them open keeps their locks.
            self.disks = Disks::default();
            set.channels.let_go_of_disks();
        }
        self.admit(set)?;
        self.look_at_channels(set)?;
        self.look_at_memory(set)?;
        let Some(incoming) = self.next(set)? else {
            return Ok(());
        };
        match incoming {
            Incoming::Message(bytes) => {
                let message = decode_to_destination(&bytes, self.pages);
                let message = message.map_err(Halt::failed)?;
                if set.channels.is_barred() && !message.is_urgent() {
                    set.held.put(Incoming::Message(bytes));
                    return Ok(());
                }
                self.message(set, message)
            }
            Incoming::DeviceState(piece) if set.channels.is_barred() => {
                set.held.put(Incoming::DeviceState(piece));
                Ok(())
            }
            Incoming::DeviceState(piece) => self.device_state(set, &piece),
            Incoming::End => Err(Halt::Lost("the source closed the control channel".into())),
        }
    }

    /// What is to be looked at next, if anything. Behind a barrier the control channel is heard without waiting for it,
    /// since the barrier is what is waited for.
    fn next(&mut self, set: &mut ConnectionSet) -> Result<Option<Incoming>, Halt> {
        let mut wait = TICK;
        if set.channels.is_barred() {
            wait = Duration::ZERO;
            let reached = set.channels.reach_barrier(TICK);
            match reached.map_err(halt_of_end)? {
                Some(iteration) => return self.barrier_done(set, iteration).map(|()| None),
                None if set.held.is_full() => return Ok(None),
                None => {}
            }
        } else if let Some(held) = set.held.take() {
            return Ok(Some(held));
        }
        match set.receiver.recv(Instant::now() + wait) {
            Ok(incoming) => {
                set.heard = Instant::now();
                self.tell(News::Heard);
                Ok(Some(incoming))
            }
            Err(TransportError::Silent { .. }) if set.heard.elapsed() < CONTROL_SILENCE => Ok(None),
            Err(error) => Err(halt_of(error)),
        }
    }

    /// New connections: data channels of this set, or the control channel of the next.
    fn admit(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        while let Ok(connection) = self.arrivals.connections.try_recv() {
            if connection.channel().is_control() {
                // The source has given this set up before this side noticed.
                let next = connection.channel().set();
                self.held_back.retain(|data| data.channel().set() == next);
                self.next_control = Some(connection);
                return Err(Halt::Lost("the source makes the channels anew".into()));
            } else {
                self.hold_back(connection);
            }
        }
        for connection in std::mem::take(&mut self.held_back) {
            self.admit_data(set, connection)?;
        }
        Ok(())
    }

    fn admit_data(&mut self, set: &mut ConnectionSet, connection: Connection) -> Result<(), Halt> {
        let channel = connection.channel();
        if channel.set() > set.number {
            // Of the next set, whose control channel is on its way.
            self.hold_back(connection);
            return Ok(());
        }
        if channel.set() != set.number {
            connection.closer().close();
            return Ok(());
        }
        let notes = connection.granted().receive_notes();
        let back = set.channels.admit(connection, &self.memory);
        match back.map_err(Halt::Failed)? {
            // Its `Begin` has not come yet.
            Some(connection) => self.hold_back(connection),
            None => {
                self.report.note(notes);
                let open = set.channels.open();
                self.report.update(|report| report.streams = open);
            }
        }
        Ok(())
    }

    /// Says what was applied; ends the set when a channel has failed.
    fn look_at_channels(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        if set.told.elapsed() < APPLIED_EVERY {
            return Ok(());
        }
        set.told = Instant::now();
        self.show_received(set);
        if let Some(end) = set.channels.failure() {
            return Err(halt_of_end(end));
        }
        let told = set.channels.tell_applied(&set.control);
        told.map_err(halt_of)
    }

    /// Shows what has come so far, and how fast.
    fn show_received(&mut self, set: &ConnectionSet) {
        let bytes = self.carried.saturating_add(set.channels.bytes());
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
    fn look_at_memory(&mut self, set: &mut ConnectionSet) -> Result<(), Halt> {
        if !set.channels.complete() {
            return Ok(());
        }
        if let Some(reason) = set.no_room.take() {
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
        let told = set.control.send(&ToSource::Prepared { seconds });
        told.map_err(halt_of)
    }
}

pub(super) fn halt_of(error: TransportError) -> Halt {
    match error.class().is_lost() {
        true => Halt::Lost(error.to_string()),
        false => Halt::failed(error),
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
