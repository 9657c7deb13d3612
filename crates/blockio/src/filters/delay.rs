//! Makes a disk slow, for tests: each request waits so long before it goes on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::{Filter, Flow, Request};

#[derive(Debug)]
pub struct Delay {
    each: Duration,
    held: VecDeque<(Instant, Request)>,
}

impl Delay {
    pub fn new(each: Duration) -> Self {
        let held = VecDeque::new();
        Self { each, held }
    }
}

impl Filter for Delay {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        self.held.push_back((flow.now() + self.each, request));
    }

    fn wake_at(&self) -> Option<Instant> {
        self.held.front().map(|(at, _)| *at)
    }

    fn wake(&mut self, flow: &mut Flow<'_>) {
        while self.wake_at().is_some_and(|at| at <= flow.now()) {
            if let Some((_, request)) = self.held.pop_front() {
                flow.down(request);
            }
        }
    }
}
