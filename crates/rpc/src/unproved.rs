//! Connections whose peers have not proved who they are: a small pool of their own, in which the oldest makes room.
//!
//! Owns nothing but their places. A stranger with many connections so keeps out neither a peer with a certificate, which
//! leaves the pool with its handshake, nor another stranger for longer than it takes to try again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// The pool of one listener.
pub(crate) struct Unproved {
    most: usize,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    next: u64,
    /// Oldest first. To drop a sender is to send its connection away.
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// A place in the pool; given back when dropped.
pub(crate) struct Turn {
    pool: Arc<Unproved>,
    number: u64,
    sent_away: oneshot::Receiver<()>,
}

impl Unproved {
    /// A pool of this many.
    pub(crate) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1),
            inside: Mutex::default(),
        })
    }

    /// Takes a place. Where there is none, the oldest one's is taken.
    pub(crate) fn enter(self: &Arc<Self>) -> Turn {
        let (sender, sent_away) = oneshot::channel();
        let mut inside = self.inside();
        if inside.waiting.len() >= self.most {
            inside.waiting.pop_front();
        }
        let number = inside.next;
        inside.next += 1;
        inside.waiting.push_back((number, sender));
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
        inside.waiting.retain(|(number, _)| *number != self.number);
    }
}
