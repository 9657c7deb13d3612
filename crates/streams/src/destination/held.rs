//! What came on the control channel behind a barrier that is not reached.
//!
//! Owns it, in order. Refuses nothing: who fills it looks whether it is full, and lets the source wait.

use godwit_transport::Incoming;
use std::collections::VecDeque;

/// Most bytes that are kept.
const BYTES_MAX: usize = 64 << 20;

/// Messages and pieces of device state that wait for a barrier.
#[derive(Debug, Default)]
pub struct Held {
    waiting: VecDeque<Incoming>,
    bytes: usize,
}

impl Held {
    /// Keeps it behind those that came before.
    pub fn put(&mut self, incoming: Incoming) {
        self.bytes += cost(&incoming);
        self.waiting.push_back(incoming);
    }

    /// The one that came first, which is no longer kept.
    pub fn take(&mut self) -> Option<Incoming> {
        let oldest = self.waiting.pop_front()?;
        self.bytes -= cost(&oldest);
        Some(oldest)
    }

    /// Whether the source has to wait.
    pub fn is_full(&self) -> bool {
        self.bytes > BYTES_MAX
    }
}

/// What is kept costs memory also when it says nothing.
fn cost(incoming: &Incoming) -> usize {
    match incoming {
        Incoming::Message(bytes) | Incoming::DeviceState(bytes) => bytes.len() + 64,
        Incoming::End => 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_nothing_fills_it_too_and_leaves_it_in_order() {
        let mut held = Held::default();
        held.put(Incoming::DeviceState(vec![7]));
        while !held.is_full() {
            held.put(Incoming::Message(Vec::new()));
        }
        assert!(held.waiting.len() <= BYTES_MAX / 64 + 1);
        let oldest = held.take();
        assert!(matches!(oldest, Some(Incoming::DeviceState(piece)) if piece == [7]));
        assert!(!held.is_full(), "it is less by what was taken");
        while held.take().is_some() {}
        assert_eq!(held.bytes, 0);
    }
}
