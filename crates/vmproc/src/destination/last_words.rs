//! Words between the two sides that something else has overtaken: the source's last one, and that it comes too late.
//!
//! Owns nothing. Refuses: a source that connects once device state is loaded, which can be done once.

use super::driver::{ConnectionSet, DestinationDriver, Halt, LIFE_EVERY};
use super::handle::Command;
use crate::input::News;
use godwit_migrate::protocol::{ToDestination, ToSource, decode_to_destination, encode};
use godwit_ownership::PeerMessage;
use godwit_streams::Farewell;
use godwit_streams::destination::Arrivals;
use godwit_transport::{Connection, ControlReceiver, Incoming};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long the source's reason may come after the fact that it ended the migration, which also takes another way.
pub(super) const LAST_WORD_WAIT: Duration = Duration::from_millis(200);
/// Most messages among which it is looked for.
pub(super) const UNREAD_MAX: usize = 1024;
/// How long a source may take to hear why it comes too late.
const TOO_LATE_WAIT: Duration = Duration::from_millis(100);
/// What a source hears that connects when devices are loaded.
const TOO_LATE: &str = "the device state of a switchover that was called off is loaded there, which can be done once: begin a new migration";

impl DestinationDriver {
    /// What ends a connection set here may overtake the source's word on the control channel that it has ended the
    /// migration: data channels are closed behind it, and the agents' message ends QEMU while it still loads.
    pub(super) fn or_farewell(&self, set: &mut ConnectionSet, halt: Halt) -> Halt {
        let wait = match &halt {
            Halt::Lost(_) if !self.lingers => LAST_WORD_WAIT,
            // The source waits for the reason. What it had to say before is there.
            Halt::Failed(_) => Duration::ZERO,
            _ => return halt,
        };
        let tell = |message| self.tell(News::Peer(message));
        match unread_farewell(&mut set.receiver, self.pages, wait, tell) {
            Some(farewell) => Halt::Cancelled(farewell),
            None => halt,
        }
    }
}

/// Looks for the source's last word in what is left to read of a control channel; what it says about ownership counts
/// all the same.
pub(super) fn unread_farewell(
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
pub(super) fn wait_for_end(
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
