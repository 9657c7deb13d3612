//! Messages about ownership that wait to be carried to the other host by the agent.
//!
//! Shared by the VM's own thread (which puts) and the connection of the agent (which takes). At most one copy of a
//! message waits; the core asks again by itself, and a migration's last word waits for an agent that is away, which says
//! it again until it is heard: what is lost on the way does no harm.

use godwit_types::host_api::OutboxMessage;
use godwit_types::migration::GIVEN_UP_WITHIN;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most messages that wait; older ones give way, since the newest question is the one that counts.
const WAITING_MAX: usize = 64;

#[derive(Debug, Default)]
struct Waiting {
    messages: Vec<OutboxMessage>,
    /// When the newest was put.
    put_at: Option<Instant>,
}

/// Messages for other hosts that no agent has taken yet.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

impl Outbox {
    /// Adds a message unless the same one waits already.
    pub(crate) fn put(&self, message: OutboxMessage) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.messages.contains(&message) {
            return;
        }
        if waiting.messages.len() >= WAITING_MAX {
            waiting.messages.remove(0);
        }
        waiting.messages.push(message);
        waiting.put_at = Some(Instant::now());
        self.arrived.notify_all();
    }

    /// Takes all messages, waiting up to `wait` for the first one.
    pub(crate) fn take(&self, wait: Duration) -> Vec<OutboxMessage> {
        let deadline = Instant::now() + wait;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        while waiting.messages.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let woken = self.arrived.wait_timeout(waiting, left);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        std::mem::take(&mut waiting.messages)
    }

    /// Whether something waits for an agent that is worth its process's life at `now`.
    pub(crate) fn is_waited_for(&self, now: Instant) -> bool {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = |at: Instant| now.saturating_duration_since(at) < GIVEN_UP_WITHIN;
        !waiting.messages.is_empty() && waiting.put_at.is_some_and(is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::HostName;
    use godwit_types::migration::AgentAddress;

    fn message(number: u64) -> OutboxMessage {
        let host = HostName::new("b").unwrap();
        let peer = AgentAddress {
            host,
            address: "127.0.0.1:1".parse().unwrap(),
        };
        OutboxMessage {
            peer,
            message: number.into(),
        }
    }

    #[test]
    fn the_same_message_waits_once_and_is_taken_once() {
        let outbox = Outbox::default();
        outbox.put(message(1));
        outbox.put(message(1));
        outbox.put(message(2));
        assert_eq!(outbox.take(Duration::ZERO), [message(1), message(2)]);
        assert_eq!(outbox.take(Duration::ZERO), []);
    }

    #[test]
    fn a_message_that_no_agent_takes_keeps_its_process_for_as_long_as_somebody_waits_for_it() {
        let outbox = Outbox::default();
        let now = Instant::now();
        assert!(!outbox.is_waited_for(now));
        outbox.put(message(1));
        assert!(outbox.is_waited_for(now));
        assert!(!outbox.is_waited_for(Instant::now() + GIVEN_UP_WITHIN));
        outbox.take(Duration::ZERO);
        assert!(!outbox.is_waited_for(now));
    }

    #[test]
    fn the_newest_messages_are_kept() {
        let outbox = Outbox::default();
        (0..100).for_each(|number| outbox.put(message(number)));
        let taken = outbox.take(Duration::ZERO);
        assert_eq!(taken.len(), WAITING_MAX);
        assert_eq!(taken.last(), Some(&message(99)));
    }
}
