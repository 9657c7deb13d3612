//! The control channel as several threads use it: one reads, any may send.
//!
//! Owns the sending half behind a lock (control messages are few). A send that fails closes the channel, so that the
//! reader notices too.

use godwit_migrate::protocol::{ToSource, encode};
use godwit_transport::{Closer, ControlSender, TransportError};
use serde::Serialize;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a control message may take to leave.
const SEND_WAIT: Duration = Duration::from_secs(10);

/// The sending half as several threads hold it.
pub struct SharedControl {
    sender: Mutex<ControlSender>,
    closer: Closer,
}

impl std::fmt::Debug for SharedControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedControl")
    }
}

impl SharedControl {
    /// Takes the half over.
    pub fn new(sender: ControlSender) -> Self {
        Self {
            closer: sender.closer(),
            sender: Mutex::new(sender),
        }
    }

    /// Sends a message after those of other threads; one that fails closes the channel.
    pub fn send<M: Serialize>(&self, message: &M) -> Result<(), TransportError> {
        self.with(|sender| sender.send(&encode(message), Instant::now() + SEND_WAIT))
    }

    /// Sends a piece of device state.
    pub fn send_device_state(&self, piece: &[u8]) -> Result<(), TransportError> {
        self.with(|sender| sender.send_device_state(piece, Instant::now() + SEND_WAIT))
    }

    /// Does what may take longer than the source waits for a silent peer, while it hears something each such time.
    pub fn alive_while<R>(&self, each: Duration, work: impl FnOnce() -> R) -> R {
        let (done, waiting) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while waiting.recv_timeout(each) == Err(RecvTimeoutError::Timeout) {
                    if self.send(&ToSource::Pong { nonce: u64::MAX }).is_err() {
                        return;
                    }
                }
            });
            let result = work();
            drop(done);
            result
        })
    }

    /// Says that nothing more will come.
    pub fn finish(&self) {
        // A peer that is gone does not need to hear it.
        let _ = self.with(|sender| sender.finish(Instant::now() + Duration::from_secs(1)));
    }

    /// What closes both directions at once, also for one who waits in a send.
    pub fn closer(&self) -> Closer {
        self.closer.clone()
    }

    /// Closes both directions at once.
    pub fn close(&self) {
        self.closer.close();
    }

    fn with(
        &self,
        send: impl FnOnce(&mut ControlSender) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        send(&mut sender).inspect_err(|_| self.closer.close())
    }
}
