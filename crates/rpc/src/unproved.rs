//! Connections whose peers have not proved who they are: a small pool of their own, in which the oldest makes room.
//!
//! Owns nothing but their places. A stranger with many connections so keeps out neither a peer with a certificate, which
//! leaves the pool with its handshake, nor a stranger from elsewhere: a source address has a bounded share, and where
//! the pool is full the source with most places gives one back. Refuses nobody: who comes last has a place.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// The pool of one listener.
pub(crate) struct Unproved {
    most: usize,
    most_of_one: usize,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    next: u64,
    /// Oldest first. To drop a sender is to send its connection away.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    number: u64,
    from: IpAddr,
    _stay: oneshot::Sender<()>,
}

/// A place in the pool; given back when dropped.
pub(crate) struct Turn {
    pool: Arc<Unproved>,
    number: u64,
    sent_away: oneshot::Receiver<()>,
}

impl Unproved {
    /// A pool of this many, of which one source address has so many at most.
    pub(crate) fn new(most: usize, most_of_one: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1),
            most_of_one: most_of_one.max(1),
            inside: Mutex::default(),
        })
    }

    /// Takes a place. Where there is none, the oldest one's is taken: of the same source if that has its share, else of
    /// the source that has most.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr) -> Turn {
        let from = source(from);
        let (stay, sent_away) = oneshot::channel();
        let mut inside = self.inside();
        if let Some(gives) = inside.who_gives(from, self.most, self.most_of_one) {
            inside.send_oldest_away(gives);
        }
        let number = inside.next;
        inside.next += 1;
        inside.waiting.push_back(Waiting {
            number,
            from,
            _stay: stay,
        });
        drop(inside);
        Turn {
            pool: self.clone(),
            number,
            sent_away,
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    /// The source that has to give a place back before `from` gets one.
    fn who_gives(&self, from: IpAddr, most: usize, most_of_one: usize) -> Option<IpAddr> {
        let mut places: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for waiting in &self.waiting {
            *places.entry(waiting.from).or_default() += 1;
        }
        if places.get(&from).is_some_and(|own| *own >= most_of_one) {
            return Some(from);
        }
        let largest = || places.iter().max_by_key(|(_, places)| **places);
        (self.waiting.len() >= most)
            .then(largest)?
            .map(|(from, _)| *from)
    }

    fn send_oldest_away(&mut self, from: IpAddr) {
        let oldest = self.waiting.iter().position(|one| one.from == from);
        oldest.map(|oldest| self.waiting.remove(oldest));
    }
}

/// What counts as one source: who has an IPv6 address has its whole /64.
pub(crate) fn source(from: IpAddr) -> IpAddr {
    match from {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

impl Turn {
    /// Does this unless a newer connection takes the place before it is done.
    pub(crate) async fn unless_sent_away<T>(&mut self, what: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            _ = &mut self.sent_away => None,
            done = what => Some(done),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut inside = self.pool.inside();
        inside.waiting.retain(|one| one.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_inside(turn: &mut Turn) -> bool {
        turn.sent_away.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn a_source_that_floods_the_pool_sends_away_its_own_oldest_only() {
        let pool = Unproved::new(8, 4);
        let mut other = pool.enter(from(2));
        let mut flood: Vec<Turn> = (0..100).map(|_| pool.enter(from(1))).collect();
        assert!(is_inside(&mut other));
        let inside: Vec<bool> = flood.iter_mut().map(is_inside).collect();
        assert!(inside[96..].iter().all(|inside| *inside), "the newest stay");
        assert!(inside[..96].iter().all(|inside| !*inside));
    }

    #[test]
    fn a_full_pool_takes_a_place_of_the_source_that_has_most() {
        let pool = Unproved::new(4, 4);
        let mut alone = pool.enter(from(1));
        let mut many: Vec<Turn> = (0..3).map(|_| pool.enter(from(2))).collect();
        let mut newest = pool.enter(from(3));
        assert!(is_inside(&mut alone) && is_inside(&mut newest));
        let inside: Vec<bool> = many.iter_mut().map(is_inside).collect();
        assert_eq!(inside, [false, true, true], "its oldest made room");
        drop(many);
        assert_eq!(pool.inside().waiting.len(), 2, "places are given back");
    }

    #[test]
    fn addresses_of_one_network_are_one_source() {
        let [a, b, c]: [IpAddr; 3] =
            ["2001:db8::1", "2001:db8::2:3", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        assert_eq!(source(a), source(b));
        assert_ne!(source(a), source(c));
    }
}
