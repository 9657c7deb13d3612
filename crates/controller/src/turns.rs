//! Turns: of all that is asked of one VM, or of one host, one thing is done at a time.
//!
//! Owns the locks, one per name that somebody has, or waits for, the turn of; the last of them takes it along. Refuses: to
//! forget a lock that somebody holds or waits for, beside which the next one would have the same turn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::OwnedMutexGuard;

type Lock = Arc<tokio::sync::Mutex<()>>;

/// The turns of all VMs, or of all hosts.
#[derive(Debug)]
pub struct Turns<Name: Ord>(Arc<Mutex<BTreeMap<Name, Lock>>>);

impl<Name: Ord> Default for Turns<Name> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// Somebody's place in the line for one name: what keeps its lock from being forgotten.
#[derive(Debug)]
struct Place<Name: Ord> {
    lock: Lock,
    name: Name,
    turns: Turns<Name>,
}

/// Somebody's turn; over when it is dropped.
#[derive(Debug)]
pub struct Turn<Name: Ord> {
    // Before the place, so that the turn is over before its lock may be forgotten.
    _held: OwnedMutexGuard<()>,
    _place: Place<Name>,
}

impl<Name: Ord + Clone> Turns<Name> {
    fn place(&self, name: &Name) -> Place<Name> {
        let lock = self.locks().entry(name.clone()).or_default().clone();
        Place {
            lock,
            name: name.clone(),
            turns: Self(self.0.clone()),
        }
    }

    /// Waits for this one's turn.
    pub async fn take(&self, name: &Name) -> Turn<Name> {
        let place = self.place(name);
        Turn {
            _held: place.lock.clone().lock_owned().await,
            _place: place,
        }
    }

    /// This one's turn, if nobody has it.
    pub fn try_take(&self, name: &Name) -> Option<Turn<Name>> {
        let place = self.place(name);
        Some(Turn {
            _held: place.lock.clone().try_lock_owned().ok()?,
            _place: place,
        })
    }
}

impl<Name: Ord> Turns<Name> {
    fn locks(&self) -> MutexGuard<'_, BTreeMap<Name, Lock>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<Name: Ord> Drop for Place<Name> {
    fn drop(&mut self) {
        let mut locks = self.turns.locks();
        // The map's and this one: nobody else has a place, and nobody gets one while the map is locked.
        if Arc::strong_count(&self.lock) == 2 {
            locks.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_never_have_one_turn_and_the_last_one_takes_its_lock_along() {
        let turns = Arc::new(Turns::default());
        let first = turns.take(&"web").await;
        let waiting = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take(&"web").await }
        });
        // The map's, the first one's place and guard, the waiting one's place and its future.
        while Arc::strong_count(&turns.locks()["web"]) < 5 {
            tokio::task::yield_now().await;
        }
        assert!(turns.try_take(&"web").is_none(), "two have one turn");
        drop(first);
        let waited = waiting.await.unwrap();
        assert!(turns.try_take(&"web").is_none(), "two have one turn");
        drop(waited);
        assert!(turns.locks().is_empty());
    }

    #[tokio::test]
    async fn one_who_gives_up_waiting_leaves_the_turn_where_it_is() {
        let turns = Turns::default();
        let first = turns.take(&"web").await;
        drop(tokio::time::timeout(std::time::Duration::ZERO, turns.take(&"web")).await);
        assert!(turns.try_take(&"web").is_none(), "two have one turn");
        drop(first);
        assert!(turns.locks().is_empty());
    }
}
