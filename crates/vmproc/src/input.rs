//! Everything that reaches the VM's own thread, which alone changes the VM's state.
//!
//! Other threads (socket, QEMU's events, the migration's driver) only send, and never wait for this thread, which may be
//! waiting for them. So what a peer can cause is bounded by an [`Intake`]: what is too much is left out. Ownership
//! messages may be lost anyway, and whoever needs an answer asks again.

use crate::ask::{Later, Now};
use godwit_ownership::{Event, PeerMessage};
use godwit_types::console::ConsoleKept;
use godwit_types::host_api::VmAnswer;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Most messages of one peer that wait for the VM's thread; a migration has a handful in all.
const SAID_MAX: usize = 64;

/// A request and where its answer goes.
#[derive(Debug)]
pub(crate) struct Request<A> {
    pub ask: A,
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
    /// The process is gone, by whoever's hand.
    Died,
}

/// Most news of one hypervisor that wait for the VM's thread.
const GUEST_NEWS_MAX: usize = 64;

/// How much of what one hypervisor does waits for the VM's thread. A guest that resets in a loop is told of once; one that
/// thinks of more makes its own events wait, of which the oldest are lost.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    /// How many, and the last of them.
    news: Mutex<(usize, Option<GuestNews>)>,
    fewer: Condvar,
}

/// The place of one of them, free again once it is dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<Waiting>);

impl Waiting {
    /// A place for the news; none where the last that waits says the same. Waits where too much does.
    pub(crate) fn place(self: &Arc<Self>, news: &GuestNews) -> Option<Place> {
        let waiting = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.0 > 0 && waiting.1.as_ref() == Some(news) {
            return None;
        }
        let full = |waiting: &mut (usize, Option<GuestNews>)| waiting.0 >= GUEST_NEWS_MAX;
        let waiting = self.fewer.wait_while(waiting, full);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        *waiting = (waiting.0 + 1, Some(news.clone()));
        Some(Place(Arc::clone(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.0.news.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.0 = waiting.0.saturating_sub(1);
        self.0.fewer.notify_one();
    }
}

/// What the migration's driver reports. `run` tells one driver from the next.
#[derive(Debug)]
pub(crate) struct DriverNews {
    pub run: u64,
    pub news: News,
}

/// What a driver has to tell.
#[derive(Debug)]
pub(crate) enum News {
    /// (source) Channels are up and the copying begins.
    Began {
        switchover_wait: std::time::Duration,
    },
    /// (destination) No connection has come for a while.
    NobodyCame,
    /// (source) What is left fits the target.
    Converged,
    /// Something for the ownership core.
    Core(Event),
    /// The peer said something about ownership, on the control channel.
    Peer(PeerMessage),
    /// (destination) The guest's addresses, as the source knows them.
    Addresses(Vec<Vec<std::net::IpAddr>>),
    /// (destination) What the guest wrote to its serial console before it came.
    Console(ConsoleKept),
    /// Anything arrived from the peer: silence is over.
    Heard,
    /// The driver gives up, with its reason.
    Failed(String),
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
            News::Peer(_) | News::Addresses(_) | News::Console(_) => {
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
            News::Peer(_) | News::Addresses(_) | News::Console(_) => {
                self.said.fetch_sub(1, Ordering::AcqRel);
            }
            _ => {}
        }
    }
}

/// An input of the VM's thread.
#[derive(Debug)]
pub(crate) enum Input {
    /// From the socket, to be answered before anything else is taken.
    Now(Request<Now>),
    /// From the socket, to be begun: it is answered when it is done.
    Later(Request<Later>),
    /// From QEMU number `launch`.
    Guest {
        launch: u64,
        news: GuestNews,
        place: Place,
    },
    /// From the migration's driver.
    Driver(DriverNews),
    /// The guest's writes were measured.
    Measured,
    /// A disk is moved on this host.
    DiskMoved,
    /// What was asked of a disk's size is done, or refused.
    DiskOrderEnded,
    /// The guest may go on which stands still until its disk has room, if it is still that wait.
    DiskMayHaveRoom { wait: u64 },
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
    fn a_guest_that_resets_in_a_loop_makes_one_reset_wait() {
        let waiting = Arc::<Waiting>::default();
        let mut places: Vec<Place> = (0..1_600_000)
            .filter_map(|_| waiting.place(&GuestNews::Reset))
            .collect();
        assert_eq!(places.len(), 1);
        // What happens after it is told, in order.
        places.extend(waiting.place(&GuestNews::Shutdown));
        places.extend(waiting.place(&GuestNews::Reset));
        assert_eq!(places.len(), 3);
        places.clear();
        assert!(
            waiting.place(&GuestNews::Reset).is_some(),
            "none waits any more"
        );
    }

    #[test]
    fn a_hypervisor_that_floods_waits_for_the_vm_s_thread() {
        let waiting = Arc::<Waiting>::default();
        let (sender, queue) = channel();
        let floods = std::thread::spawn(move || {
            for halt in 0..10 * GUEST_NEWS_MAX {
                let place = waiting.place(&GuestNews::Halted(halt.to_string()));
                sender.send(place.expect("each is another")).unwrap();
            }
        });
        let mut most = 0;
        let mut held = std::collections::VecDeque::new();
        for place in &queue {
            held.push_back(place);
            held.extend(queue.try_iter());
            most = most.max(held.len());
            held.pop_front();
        }
        floods.join().unwrap();
        assert!(most <= GUEST_NEWS_MAX, "{most} wait");
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
