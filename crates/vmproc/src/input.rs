//! Everything that reaches the VM's own thread, which alone changes the VM's state.
//!
//! Other threads (socket, QEMU's events, the migration's driver) only send, and never wait for this thread, which may be
//! waiting for them. So what a peer can cause is bounded by an [`Intake`]: what is too much is left out. Ownership
//! messages may be lost anyway, and whoever needs an answer asks again.

use godwit_migrate::protocol::{ToDestination, clip_reason};
use godwit_ownership::{Event, PeerMessage};
use godwit_types::host_api::{VmAnswer, VmRequest};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;

/// Most messages of one peer that wait for the VM's thread; a migration has a handful in all.
const SAID_MAX: usize = 64;

/// A request and where its answer goes.
#[derive(Debug)]
pub(crate) struct Request {
    pub request: VmRequest,
    pub reply: SyncSender<VmAnswer>,
}

/// What QEMU did by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestNews {
    /// The guest powered itself off.
    Shutdown,
    /// The guest panicked, or an internal error stopped it.
    Halted(String),
    /// The guest reset itself.
    Reset,
    /// QEMU is gone.
    Died,
}

/// What the migration's driver reports. `run` tells one driver from the next.
#[derive(Debug)]
pub(crate) struct DriverNews {
    pub run: u64,
    pub news: News,
}

/// The news themselves.
#[derive(Debug)]
pub(crate) enum News {
    /// (source) Channels are up and the copying begins.
    Began {
        switchover_wait: std::time::Duration,
    },
    /// (destination) No connection has come for a while.
    NobodyCame,
    /// (source) What is left fits the promise.
    Converged,
    /// Something for the ownership core.
    Core(Event),
    /// The peer said something about ownership, on the control channel.
    Peer(PeerMessage),
    /// (destination) The guest's addresses, as the source knows them.
    Addresses(Vec<Vec<std::net::IpAddr>>),
    /// Anything arrived from the peer: silence is over.
    Heard,
    /// The driver gives up, with its reason.
    Failed(String),
    /// (destination) The source ended the migration.
    SourceEnded(Farewell),
}

/// Why a side ends a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Farewell {
    pub reason: String,
    /// A person or a deadline wanted it.
    pub cancelled: bool,
}

impl Farewell {
    /// As the other side hears it.
    pub(crate) fn message(&self) -> ToDestination {
        ToDestination::Cancel {
            reason: clip_reason(&self.reason),
            cancelled: self.cancelled,
        }
    }
}

/// Where a driver's news go.
pub(crate) type Tell = Box<dyn Fn(News) + Send>;

/// How much of what one migration's peer causes waits for the VM's thread.
#[derive(Debug, Default)]
pub(crate) struct Intake {
    heard: AtomicBool,
    said: AtomicUsize,
}

impl Intake {
    /// Passes on what may wait.
    pub(crate) fn bound(self: &Arc<Self>, tell: Tell) -> Tell {
        let intake = Arc::clone(self);
        Box::new(move |news| {
            if intake.admits(&news) {
                tell(news);
            }
        })
    }

    fn admits(&self, news: &News) -> bool {
        match news {
            // One that waits says as much as many do.
            News::Heard => !self.heard.swap(true, Ordering::AcqRel),
            News::Peer(_) | News::Addresses(_) => {
                let one_more = |waiting| (waiting < SAID_MAX).then_some(waiting + 1);
                let room = self
                    .said
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
                room.is_ok()
            }
            _ => true,
        }
    }

    /// The VM's thread has taken this.
    pub(crate) fn taken(&self, news: &News) {
        match news {
            News::Heard => self.heard.store(false, Ordering::Release),
            News::Peer(_) | News::Addresses(_) => {
                self.said.fetch_sub(1, Ordering::AcqRel);
            }
            _ => {}
        }
    }
}

/// An input of the VM's thread.
#[derive(Debug)]
pub(crate) enum Input {
    /// From the socket.
    Request(Request),
    /// From QEMU number `launch`.
    Guest { launch: u64, news: GuestNews },
    /// From the migration's driver.
    Driver(DriverNews),
    /// The guest's writes were measured.
    Measured,
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::Generation;
    use std::sync::mpsc::channel;

    fn message() -> News {
        News::Peer(PeerMessage::Confirmed {
            generation: Generation(7),
        })
    }

    #[test]
    fn a_peer_that_floods_makes_no_more_than_so_much_wait() {
        let intake = Arc::<Intake>::default();
        let (sender, queue) = channel();
        let tell = intake.bound(Box::new(move |news| sender.send(news).unwrap()));
        for _ in 0..100_000 {
            tell(News::Heard);
            tell(message());
            tell(News::Addresses(Vec::new()));
        }
        tell(News::Converged);
        let waiting: Vec<News> = queue.try_iter().collect();
        assert_eq!(waiting.len(), SAID_MAX + 2, "and what is no peer's doing");
        assert!(matches!(waiting.last(), Some(News::Converged)));
        waiting.iter().for_each(|news| intake.taken(news));
        tell(News::Heard);
        tell(message());
        assert_eq!(queue.try_iter().count(), 2, "there is room again");
    }
}
