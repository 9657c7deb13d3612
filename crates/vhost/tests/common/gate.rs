//! A filter that holds requests until a test lets them go, and waiting for what a disk is like then.

use super::LONG;
use godwit_blockio::{Filter, Flow, Request};
use godwit_vhost::{Disk, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Holds what goes through its filter until it is opened.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    pub fn set_open(&self, open: bool) {
        self.0.store(open, Ordering::SeqCst);
    }

    pub fn is_open(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub fn filters(&self) -> Vec<Box<dyn Filter>> {
        let gate = self.clone();
        let (held, next) = (Vec::new(), None);
        vec![Box::new(Held { gate, held, next })]
    }
}

struct Held {
    gate: Gate,
    held: Vec<Request>,
    /// When the gate is looked at.
    next: Option<Instant>,
}

impl Filter for Held {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
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
        let later = flow.now() + Duration::from_millis(1);
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
