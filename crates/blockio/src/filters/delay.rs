//! Makes a disk slow, for tests: each request waits so long before it goes on.
//!
//! Owns the requests that wait. Refuses nothing.

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::keeps::Keeps;
    use crate::{Data, Outcome, Stack, Work};

    #[test]
    fn each_request_goes_on_after_its_delay_and_its_outcome_comes_back_at_once() {
        let delay = Delay::new(Duration::from_millis(5));
        let mut stack = Stack::new(vec![Box::new(delay)], Keeps::default());
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        for (token, now) in [(1, began), (2, after(2))] {
            stack.submit(Request::new(Work::Flush, Data::None, token, now), now);
        }
        let tokens = |stack: &Stack<Keeps>| -> Vec<u64> {
            let kept = stack.bottom.0.iter();
            kept.map(|request| request.token).collect()
        };
        for (ms, there, next) in [
            (4, &[][..], Some(after(5))),
            (5, &[1], Some(after(7))),
            (6, &[1], Some(after(7))),
            (7, &[1, 2], None),
        ] {
            stack.wake(after(ms));
            assert_eq!((&*tokens(&stack), stack.wake_at()), (there, next), "{ms}");
        }
        let request = stack.bottom.0.remove(0);
        stack.completed(request, Outcome::Done, after(8));
        let (request, outcome) = stack.finished().unwrap();
        assert_eq!((request.token, outcome), (1, Outcome::Done));
    }
}
