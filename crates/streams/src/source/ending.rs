//! The sign that a migration is to end, for those of the driver's threads that no command reaches.
//!
//! Shared by the VM's thread, which raises it, and the driver while it makes channels. Who waits for something looks here
//! meanwhile; who sends says on which channel, and has it closed when it does not come back soon. Refuses nothing.

use godwit_migrate::protocol::ToDestination;
use godwit_transport::{Closer, TransportError};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often who waits for a connection looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long who sends may take to notice, and to tell the destination why; after that the link is what it waits for.
const SENDING_WAIT: Duration = Duration::from_millis(200);

/// Raised once, with what the destination is told.
#[derive(Debug, Clone, Default)]
pub struct Ending(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    raised: OnceLock<Option<ToDestination>>,
    /// The channel on which somebody sends who hears no command.
    sending: Mutex<Option<Closer>>,
    sent: Condvar,
}

/// Somebody sends; over when dropped.
#[derive(Debug)]
pub struct Sending<'a>(&'a Shared);

impl Ending {
    /// Says that it is over. Who sends on a channel that takes nothing any more is not waited for.
    pub fn raise(&self, word: Option<ToDestination>) {
        // Raised twice it is as over as once.
        let _ = self.0.raised.set(word);
        let sending = self.0.lock();
        let waited = self
            .0
            .sent
            .wait_timeout_while(sending, SENDING_WAIT, |sending| sending.is_some());
        if let Some(closer) = &*waited.unwrap_or_else(PoisonError::into_inner).0 {
            closer.close();
        }
    }

    pub fn is_raised(&self) -> bool {
        self.0.raised.get().is_some()
    }

    /// What the destination is told of it, once it is raised.
    pub fn word(&self) -> Option<&ToDestination> {
        self.0.raised.get()?.as_ref()
    }

    /// An error once it is raised.
    pub fn check(&self) -> Result<(), TransportError> {
        if self.is_raised() {
            return Err(TransportError::Cancelled);
        }
        Ok(())
    }

    /// For the time of a send on this channel. Whoever looks here between two messages misses nothing: what is raised
    /// before is seen, what is raised after finds the channel.
    pub fn sending(&self, closer: Closer) -> Sending<'_> {
        *self.0.lock() = Some(closer);
        Sending(&self.0)
    }

    /// Waits for what a thread makes; an error once this is raised.
    pub fn wait<T>(
        &self,
        made: &Receiver<T>,
        until: Instant,
    ) -> Result<Result<T, RecvTimeoutError>, TransportError> {
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            match made.recv_timeout(left.min(LOOK_EVERY)) {
                Err(RecvTimeoutError::Timeout) if left > LOOK_EVERY => {}
                result => return Ok(result),
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Closer>> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        *self.0.lock() = None;
        self.0.sent.notify_all();
    }
}
