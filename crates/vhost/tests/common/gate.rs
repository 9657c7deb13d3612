//! Filters that hold requests, or what came of them, until a test lets them go, and waiting for what a disk is like then.

use super::LONG;
use godwit_blockio::{Filter, Flow, Outcome, Request, Work};
use godwit_vhost::{Disk, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// When a gate that is closed is looked at again.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Holds what goes through its filter until it is opened.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>, Arc<AtomicUsize>);

impl Gate {
    pub fn set_open(&self, open: bool) {
        self.0.store(open, Ordering::SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub fn filters(&self) -> Vec<Box<dyn Filter>> {
        self.holding(|_| true)
    }

    /// Holds flushes alone: storage makes nothing durable while it is closed, and does all else.
    pub fn of_flushes(&self) -> Vec<Box<dyn Filter>> {
        self.holding(|work| *work == Work::Flush)
    }

    fn holding(&self, holds: fn(&Work) -> bool) -> Vec<Box<dyn Filter>> {
        vec![Box::new(Held {
            gate: self.clone(),
            holds,
            held: Vec::new(),
            next: None,
        })]
    }

    /// Holds outcomes: what was asked for is carried out, and nobody hears of it.
    pub fn of_outcomes(&self) -> Vec<Box<dyn Filter>> {
        let gate = self.clone();
        let (held, next) = (Vec::new(), None);
        vec![Box::new(Untold { gate, held, next })]
    }

    /// How many outcomes it holds.
    pub fn untold(&self) -> usize {
        self.1.load(Ordering::SeqCst)
    }
}

struct Held {
    gate: Gate,
    /// Whether it holds such a request.
    holds: fn(&Work) -> bool,
    held: Vec<Request>,
    /// When the gate is looked at.
    next: Option<Instant>,
}

impl Filter for Held {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        if !(self.holds)(&request.work) {
            return flow.down(request);
        }
        self.held.push(request);
        self.wake(flow);
    }

    fn wake_at(&self) -> Option<Instant> {
        self.next
    }

    fn wake(&mut self, flow: &mut Flow<'_>) {
        if self.gate.is_open() {
            self.held.drain(..).for_each(|request| flow.down(request));
        }
        let later = flow.now() + LOOK_EVERY;
        self.next = (!self.held.is_empty()).then_some(later);
    }
}

struct Untold {
    gate: Gate,
    held: Vec<(Request, Outcome)>,
    /// When the gate is looked at.
    next: Option<Instant>,
}

impl Filter for Untold {
    fn up(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        self.held.push((request, outcome));
        self.wake(flow);
    }

    fn wake_at(&self) -> Option<Instant> {
        self.next
    }

    fn wake(&mut self, flow: &mut Flow<'_>) {
        if self.gate.is_open() {
            let held = self.held.drain(..);
            held.for_each(|(request, outcome)| flow.up(request, outcome));
        }
        self.gate.1.store(self.held.len(), Ordering::SeqCst);
        let later = flow.now() + LOOK_EVERY;
        self.next = (!self.held.is_empty()).then_some(later);
    }
}

/// Waits until the disk is like this.
pub fn wait_until(disk: &Disk, is_so: impl Fn(&Status) -> bool) {
    let until = Instant::now() + LONG;
    while !is_so(&disk.status().unwrap()) {
        assert!(Instant::now() < until, "{:?}", disk.status());
        std::thread::yield_now();
    }
}
