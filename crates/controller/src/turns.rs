//! Turns: of all that is asked of one VM, or of one host, one thing is done at a time.
//!
//! Owns the locks, one per name that somebody has asked for. Refuses: to forget a lock that somebody holds or waits for,
//! beside which the next one would have the same turn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OwnedMutexGuard;

/// Somebody's turn; over when it is dropped.
pub type Turn = OwnedMutexGuard<()>;

/// The turns of all VMs, or of all hosts.
#[derive(Debug)]
pub struct Turns<Name>(Mutex<BTreeMap<Name, Arc<tokio::sync::Mutex<()>>>>);

impl<Name> Default for Turns<Name> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<Name: Ord + Clone> Turns<Name> {
    fn of(&self, name: &Name) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(name.clone()).or_default().clone()
    }

    /// Waits for this one's turn.
    pub async fn take(&self, name: &Name) -> Turn {
        self.of(name).lock_owned().await
    }

    /// This one's turn, if nobody has it.
    pub fn try_take(&self, name: &Name) -> Option<Turn> {
        self.of(name).try_lock_owned().ok()
    }

    /// Forgets one that is gone, unless somebody has its turn or waits for it.
    pub fn forget(&self, name: &Name) {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if locks
            .get(name)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            locks.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_never_have_the_turn_of_a_vm_that_was_deleted_while_one_waited() {
        let turns = Arc::new(Turns::default());
        let deleting = turns.take(&"web").await;
        let waiting = tokio::spawn({
            let turns = turns.clone();
            async move { turns.take(&"web").await }
        });
        while Arc::strong_count(&turns.of(&"web")) < 4 {
            tokio::task::yield_now().await;
        }
        drop(deleting);
        turns.forget(&"web");
        let waited = waiting.await.unwrap();
        assert!(turns.try_take(&"web").is_none(), "two have one turn");
        drop(waited);
        turns.forget(&"web");
        assert!(turns.0.lock().unwrap().is_empty());
    }
}
