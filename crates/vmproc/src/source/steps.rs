//! What the source's driver hears, and what it goes on with: the one place that receives.
//!
//! Works on the driver's state. That the migration is over or called off, that the link is lost or the peer
//! breaks the protocol is told as a halt here and nowhere else. Refuses: what earlier sets of connections still tell.

use super::driver::{Halt, SourceDriver};
use super::handle::Command;
use crate::input::News;
use godwit_migrate::protocol::ToSource;
use godwit_streams::source::{ConnectionSet, FromPeer, Happened, PassEnd, SetEvent};
use godwit_types::Generation;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// What reaches the driver.
#[derive(Debug)]
pub(crate) enum DriverInput {
    /// From a set of connections.
    Set(SetEvent),
    /// From the VM's thread.
    Command(Command),
}

/// What the driver goes on with. That the migration is over or called off is no step but a [`Halt`].
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

impl SourceDriver {
    /// Sleeps without going deaf.
    pub(super) fn pause(&mut self, time: Duration) -> Result<(), Halt> {
        let until = Instant::now() + time;
        loop {
            match self.next(None, until.saturating_duration_since(Instant::now())) {
                Ok(Step::Nothing) => return Ok(()),
                Err(Halt::Ended(abort)) => return Err(Halt::Ended(abort)),
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
                    return self.obey(Command::End { abort: None });
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
            Command::End { abort } => {
                self.end_heard = true;
                Err(Halt::Ended(abort))
            }
        }
    }

    /// The next message of this set, if it comes by the deadline.
    pub(super) fn peer(
        &mut self,
        set: &ConnectionSet,
        deadline: Instant,
    ) -> Result<ToSource, Halt> {
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
