//! Events of a running hypervisor, as one listener sees them.
//!
//! Every listener owns a bounded queue. A listener that does not keep up loses the oldest events and can see how many:
//! the reader thread never waits for anyone.

use super::parser::RawEvent;
use crate::sync::{lock, wait_until};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Events that one listener may leave unread.
pub(crate) const QUEUE_LIMIT: usize = 1024;
/// Longest word of QEMU's that is kept, bytes: a queue takes no more memory than that many of them.
const WORD_LEN_MAX: usize = 128;

/// The events of QEMU that the product acts on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// No vCPU runs any more.
    Stop,
    Resume,
    /// The machine was reset; `guest` tells whether the guest asked for it.
    Reset {
        /// Whether the guest asked for it.
        guest: bool,
    },
    /// The machine powers off: because the guest wanted it, or because somebody ends QEMU.
    Shutdown {
        /// Whether the guest did something that led to it.
        guest: bool,
        /// QEMU's word for the cause, such as `guest-shutdown` or `host-signal`; empty where it gave none.
        reason: String,
    },
    /// The guest reported a panic.
    GuestPanicked,
    /// The guest suspended itself.
    Suspend,
    /// A disk request failed.
    BlockIoError,
    /// QEMU's migration machinery changed its state, such as `completed` or `failed`.
    Migration {
        /// QEMU's word for the state.
        status: String,
    },
    /// Anything else, by QEMU's name.
    Other(String),
}

/// One event and when we saw it.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub kind: EventKind,
    /// When our reader thread saw it.
    pub seen_at: Instant,
    /// QEMU's own clock, in microseconds since 1970; not comparable with another host's.
    pub wall_clock_us: Option<u64>,
}

impl Event {
    pub(crate) fn new(raw: RawEvent, seen_at: Instant) -> Event {
        Event {
            kind: kind(&raw.name, &raw.data),
            seen_at,
            wall_clock_us: raw.wall_clock_us,
        }
    }
}

/// A word of QEMU's, which a guest may have taken over: of bounded length.
fn word(text: &str) -> String {
    let mut end = text.len().min(WORD_LEN_MAX);
    while !text.is_char_boundary(end) {
        end = end.saturating_sub(1);
    }
    text.get(..end).unwrap_or_default().to_owned()
}

fn kind(name: &str, data: &Value) -> EventKind {
    let guest = || data.get("guest").and_then(Value::as_bool).unwrap_or(false);
    let told = |field: &str| word(data.get(field).and_then(Value::as_str).unwrap_or_default());
    match name {
        "STOP" => EventKind::Stop,
        "RESUME" => EventKind::Resume,
        "RESET" => EventKind::Reset { guest: guest() },
        "SHUTDOWN" => EventKind::Shutdown {
            guest: guest(),
            reason: told("reason"),
        },
        "GUEST_PANICKED" => EventKind::GuestPanicked,
        "SUSPEND" => EventKind::Suspend,
        // Reported to the guest and nothing else: it runs on.
        "BLOCK_IO_ERROR" if data.get("action").and_then(Value::as_str) != Some("stop") => {
            EventKind::Other(word(name))
        }
        "BLOCK_IO_ERROR" => EventKind::BlockIoError,
        "MIGRATION" => EventKind::Migration {
            status: told("status"),
        },
        other => EventKind::Other(word(other)),
    }
}

/// Why there is no next event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// Nothing happened before the deadline.
    #[error("no event came in time")]
    Deadline,
    /// The connection ended; no event will come any more.
    #[error("the hypervisor closed its control socket")]
    Closed,
}

/// One listener's queue. Events that come after it was made are in it, oldest first.
#[derive(Debug)]
pub struct Events {
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    events: VecDeque<Event>,
    missed: u64,
    closed: bool,
}

impl Events {
    pub(crate) fn new(queue: Arc<Queue>) -> Events {
        Events { queue }
    }

    /// The next event; waits until `deadline` at most.
    pub fn next(&self, deadline: Instant) -> Result<Event, EventsError> {
        let state = lock(&self.queue.state);
        let waiting = |state: &QueueState| state.events.is_empty() && !state.closed;
        let mut state = wait_until(&self.queue.changed, state, deadline, waiting);
        match state.events.pop_front() {
            Some(event) => Ok(event),
            None if state.closed => Err(EventsError::Closed),
            None => Err(EventsError::Deadline),
        }
    }

    /// The next event if it is there already.
    pub fn try_next(&self) -> Option<Event> {
        lock(&self.queue.state).events.pop_front()
    }

    /// How many events this listener has lost because it did not keep up.
    pub fn missed(&self) -> u64 {
        lock(&self.queue.state).missed
    }
}

impl Queue {
    pub(crate) fn push(&self, event: Event) {
        let mut state = lock(&self.state);
        if state.events.len() >= QUEUE_LIMIT {
            state.events.pop_front();
            state.missed = state.missed.saturating_add(1);
        }
        state.events.push_back(event);
        self.changed.notify_all();
    }

    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(name: &str, data: Value) -> Event {
        Event::new(
            RawEvent {
                name: name.into(),
                data,
                wall_clock_us: None,
            },
            Instant::now(),
        )
    }

    #[test]
    fn kinds_carry_what_matters() {
        assert_eq!(
            event("RESET", json!({"guest": true})).kind,
            EventKind::Reset { guest: true }
        );
        assert_eq!(
            event("SHUTDOWN", Value::Null).kind,
            EventKind::Shutdown {
                guest: false,
                reason: String::new()
            }
        );
        assert_eq!(
            event(
                "SHUTDOWN",
                json!({"guest": true, "reason": "guest-shutdown"})
            )
            .kind,
            EventKind::Shutdown {
                guest: true,
                reason: "guest-shutdown".into()
            }
        );
        assert_eq!(
            event("MIGRATION", json!({"status": "failed"})).kind,
            EventKind::Migration {
                status: "failed".into()
            }
        );
        assert_eq!(
            event("WAKEUP", Value::Null).kind,
            EventKind::Other("WAKEUP".into())
        );
    }

    #[test]
    fn a_listener_that_does_not_keep_up_loses_the_oldest_and_knows() {
        let queue = Arc::new(Queue::default());
        let events = Events::new(queue.clone());
        for n in 0..QUEUE_LIMIT + 3 {
            queue.push(event(&n.to_string(), Value::Null));
        }
        assert_eq!(events.missed(), 3);
        let first = events.try_next().expect("full queue").kind;
        assert_eq!(first, EventKind::Other("3".into()));
    }

    #[test]
    fn a_hypervisors_long_words_fill_no_memory() {
        let long = "\u{e4}".repeat(1 << 20);
        let kept = "\u{e4}".repeat(WORD_LEN_MAX / 2);
        assert_eq!(
            event(&long, Value::Null).kind,
            EventKind::Other(kept.clone())
        );
        let data = json!({"guest": true, "reason": long, "status": long});
        let shutdown = EventKind::Shutdown {
            guest: true,
            reason: kept.clone(),
        };
        assert_eq!(event("SHUTDOWN", data.clone()).kind, shutdown);
        assert_eq!(
            event("MIGRATION", data).kind,
            EventKind::Migration { status: kept }
        );
    }

    #[test]
    fn an_empty_queue_ends_by_deadline_or_close() {
        let queue = Arc::new(Queue::default());
        let events = Events::new(queue.clone());
        assert_eq!(events.next(Instant::now()), Err(EventsError::Deadline));
        queue.push(event("STOP", Value::Null));
        queue.close();
        assert!(
            events.next(Instant::now()).is_ok(),
            "what came before the end is still delivered"
        );
        assert_eq!(events.next(Instant::now()), Err(EventsError::Closed));
    }
}
