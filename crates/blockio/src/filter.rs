//! What stands between a guest and its image.
//!
//! A filter sees each request on its way down and its outcome on its way up. It may pass it on, hold it, answer it, split it,
//! or make requests of its own. It is called by its disk's thread alone, never twice at a time, and must not wait: what takes
//! time it holds, and asks to be woken.
//!
//! Whoever holds a request holds up its guest's stop, and QEMU with it: a filter does so for as short a time as it can.
//! One that wants fewer requests says when it takes the next one ([`Filter::opens_at`]); they stay in the guest's ring until
//! then, where they are nobody's concern.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::request::Place;
use crate::stack::Step;
use crate::{Data, Outcome, Request, Work};

/// One layer of a disk's stack. What it does not say passes through.
pub trait Filter: Send {
    /// Looks at a request that comes from above: true where it goes on as it is, and [`Self::down`] is not to have it. A request
    /// that is not handed over costs next to nothing.
    fn passes_down(&mut self, _request: &Request, _now: Instant) -> bool {
        false
    }

    /// The same of the outcome of one that came from above, which [`Self::up`] is not to have then.
    fn passes_up(&mut self, _request: &Request, _outcome: Outcome, _now: Instant) -> bool {
        false
    }

    /// A request comes from above.
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        flow.down(request);
    }

    /// The outcome of a request that came from above.
    fn up(&mut self, request: Request, outcome: Outcome, flow: &mut Flow<'_>) {
        flow.up(request, outcome);
    }

    /// The outcome of a request that this filter made.
    fn made(&mut self, _request: Request, _outcome: Outcome, _flow: &mut Flow<'_>) {}

    /// When it takes the next request from above: `None`, or a time that has come: now.
    fn opens_at(&self) -> Option<Instant> {
        None
    }

    /// Nothing more is to be begun that the guest did not ask for, until this is called again: its disk is to stand still.
    fn rest(&mut self, _rests: bool) {}

    /// When [`Self::wake`] is to be called, if ever.
    fn wake_at(&self) -> Option<Instant> {
        None
    }

    /// Becomes readable each time that [`Self::wake`] is to be called, whatever the time.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The time that was asked for has come, or the bell has rung.
    fn wake(&mut self, _flow: &mut Flow<'_>) {}
}

/// Where a filter sends requests to.
#[derive(Debug)]
pub struct Flow<'a> {
    pub(crate) steps: &'a mut VecDeque<Step>,
    /// The filter's place, 0 at the top.
    pub(crate) place: usize,
    pub(crate) now: Instant,
}

impl Flow<'_> {
    /// The time, as the disk's thread last read it.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Passes a request on to the next layer.
    pub fn down(&mut self, request: Request) {
        self.steps.push_back(Step::Down(self.place + 1, request));
    }

    /// Answers a request that came from above.
    pub fn up(&mut self, request: Request, outcome: Outcome) {
        self.steps.push_back(Step::Up(self.place, request, outcome));
    }

    /// Makes a request of the filter's own for the layers below; [`Filter::made`] gets its outcome.
    pub fn make(&mut self, work: Work, data: Data, token: u64) {
        self.down(self.made(work, data, token));
    }

    /// The same in another request's place, durable where that one was to be.
    pub fn make_like(&mut self, other: &Request, data: Data, token: u64) {
        let mut request = self.made(other.work.clone(), data, token);
        request.durable = other.durable;
        self.down(request);
    }

    /// A request for what carries requests out, on another file than the disk's own image.
    pub(crate) fn make_at(&mut self, place: Place, (work, data): (Work, Data), token: u64) {
        let mut request = self.made(work, data, token);
        request.place = place;
        self.down(request);
    }

    fn made(&self, work: Work, data: Data, token: u64) -> Request {
        let mut request = Request::new(work, data, token, self.now);
        request.maker = Some(self.place);
        request
    }
}
