//! How others than the disk's thread follow and steer a dirty block tracking: what its iterations came to, and when the guest's requests are
//! held for the last one.
//!
//! Part of [`Course`], which the disk's thread and whoever moves the disk own together. Refuses nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use godwit_tracking::{Decision, Iteration};

use super::course::{Course, lock};

/// No more iterations are kept: those of a disk that waits for something else are many, and all alike.
const KEPT_MAX: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Tracked {
    is_closed: AtomicBool,
    copied_bytes: AtomicU64,
    is_flushed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    iterations: Vec<Iteration>,
    decision: Option<Decision>,
    /// How long the guest would wait for what is left now, s.
    wait_s: f64,
    closed_since: Option<Instant>,
    /// How long it was closed before.
    closed_for: Duration,
}

impl Tracked {
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(super) fn copied(&self, bytes: u64) {
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn flushed(&self, is_flushed: bool) {
        self.is_flushed.store(is_flushed, Ordering::Release);
    }

    pub(super) fn decision(&self) -> Option<Decision> {
        lock(&self.state).decision
    }

    pub(super) fn decide(&self, decision: Decision) {
        lock(&self.state).decision = Some(decision);
    }

    pub(super) fn keep(&self, ended: Iteration) {
        let mut state = lock(&self.state);
        if state.iterations.len() < KEPT_MAX {
            state.iterations.push(ended);
        }
    }

    pub(super) fn would_wait(&self, wait_s: f64) {
        lock(&self.state).wait_s = wait_s;
    }
}

/// Of a disk whose writes are tracked. Of a mirrored one closing and opening change nothing.
impl Course {
    /// Lets no more of the guest's requests in: they stay in its ring. Once what is marked is copied both sides are the same, and
    /// [`Course::is_synchronised`] says so, until the disk is opened.
    pub fn close(&self) {
        let tracked = &self.0.tracked;
        let mut state = lock(&tracked.state);
        state.closed_since.get_or_insert_with(Instant::now);
        tracked.is_closed.store(true, Ordering::Release);
    }

    /// Lets them in again. What comes next is decided anew.
    pub fn open(&self) {
        let tracked = &self.0.tracked;
        let mut state = lock(&tracked.state);
        if let Some(since) = state.closed_since.take() {
            state.closed_for += since.elapsed();
            state.decision = None;
        }
        tracked.is_closed.store(false, Ordering::Release);
    }

    /// How long it was closed in all, until now.
    pub fn closed_for(&self) -> Duration {
        let state = lock(&self.0.tracked.state);
        let now = state
            .closed_since
            .map_or(Duration::ZERO, |since| since.elapsed());
        state.closed_for + now
    }

    /// What its iterations came to, up to the first after which the guest could have been held, and those while it was.
    pub fn iterations(&self) -> Vec<Iteration> {
        lock(&self.0.tracked.state).iterations.clone()
    }

    /// What was decided after the last of them; nothing before, and once it was opened.
    pub fn decision(&self) -> Option<Decision> {
        self.0.tracked.decision()
    }

    /// How long the guest would wait, s, if it were held now.
    pub fn would_wait_s(&self) -> f64 {
        lock(&self.0.tracked.state).wait_s
    }

    /// As if a disk's thread had decided this and foretold such a wait, s.
    #[cfg(test)]
    pub(crate) fn expect(&self, decision: Decision, wait_s: f64) {
        self.0.tracked.decide(decision);
        self.0.tracked.would_wait(wait_s);
    }

    /// As if it had been closed for so long.
    #[cfg(test)]
    pub(crate) fn has_been_closed_for(&self, time: Duration) {
        lock(&self.0.tracked.state).closed_for = time;
    }

    /// Whether a destination that may be the only one that is left one day has made durable what it was given before the guest could be held,
    /// or is waited for no longer. Another one need not. False before the guest could be held.
    pub fn is_flushed(&self) -> bool {
        self.0.tracked.is_flushed.load(Ordering::Acquire)
    }

    /// Bytes that were given to the destination so far, those among them that were given before.
    pub fn copied_bytes(&self) -> u64 {
        self.0.tracked.copied_bytes.load(Ordering::Relaxed)
    }
}
