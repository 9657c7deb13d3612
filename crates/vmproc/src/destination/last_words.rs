//! Words between the two sides that something else has overtaken: what a lost channel still holds, and that a source comes
//! too late.
//!
//! Owns nothing. Refuses: a source that connects once device state is loaded, which can be done once.

use super::driver::{Halt, LIFE_EVERY};
use super::handle::Command;
use godwit_migrate::protocol::{ToDestination, decode_to_destination};
use godwit_ownership::PeerMessage;
use godwit_streams::destination::{Arrivals, turn_away};
use godwit_transport::{Connection, ControlReceiver, Incoming};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Most messages of a lost channel that are still heard.
pub(super) const UNREAD_MAX: usize = 1024;
/// How long a source may take to hear why it comes too late.
const TOO_LATE_WAIT: Duration = Duration::from_millis(100);
/// What a source hears that connects when devices are loaded.
const TOO_LATE: &str = "the device state of a switchover that was called off is loaded there, which can be done once: begin a new migration";

/// Hears what is left to read of a control channel that is lost: what the source said before about ownership counts all the
/// same. Nothing is waited for: what is still on its way comes through the agents, too.
pub(super) fn hear_rest(receiver: &mut ControlReceiver, pages: u64, tell: impl Fn(PeerMessage)) {
    for _ in 0..UNREAD_MAX {
        let bytes = match receiver.recv(Instant::now()) {
            Ok(Incoming::Message(bytes)) => bytes,
            Ok(Incoming::DeviceState(_)) => continue,
            Ok(Incoming::End) | Err(_) => return,
        };
        match decode_to_destination(&bytes, pages) {
            Ok(ToDestination::Peer { message }) => tell(message),
            Ok(_) => {}
            Err(_) => return,
        }
    }
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
            turn_away(connection, TOO_LATE, TOO_LATE_WAIT);
        }
        match commands.recv_timeout(wait) {
            Ok(Command::End | Command::Linger) | Err(RecvTimeoutError::Disconnected) => {
                return Halt::Ended;
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
