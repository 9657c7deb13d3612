//! An image whose file system has no room left: the guest's requests wait until it has.
//!
//! Part of [`Device`]. An error would make the guest's file system read-only or worse, and there is no status for 'full' in
//! virtio. Refuses: to keep QEMU waiting for a queue that is to end.

use std::time::Instant;

use godwit_blockio::{Outcome, Request};
use rustix::io::Errno;

use crate::disk::{AGAIN, Device};

impl Device {
    /// A guest whose disk is full waits for it, and gets no error that its file system would not survive.
    pub(crate) fn park(&mut self, request: Request) {
        if !self.is_full() && self.is_time_to_tell() {
            tracing::warn!(
                disk = self.name,
                "the image has no room left: the guest's requests wait until it has"
            );
        }
        self.parked.push_back(request);
        self.is_probing = false;
        self.try_parked_at = Some(Instant::now() + AGAIN);
    }

    /// Tries one of them when it is time, and all others once it was done. A queue that is to end, since its guest is stopped or
    /// reset, gets an error for its own.
    pub(crate) fn try_parked(&mut self) {
        let now = Instant::now();
        for _ in 0..self.parked.len() {
            let Some(request) = self.parked.pop_front() else {
                break;
            };
            let number = (request.token >> 16) as u16;
            if self.is_ending(number) {
                self.answer_request(&request, Outcome::Failed(Errno::NOSPC));
            } else {
                self.parked.push_back(request);
            }
        }
        let is_time = self.stands == 0 && self.try_parked_at.is_some_and(|at| at <= now);
        if is_time && let Some(request) = self.parked.pop_front() {
            (self.is_probing, self.try_parked_at) = (true, None);
            self.stack.submit(request, now);
        }
    }

    /// There is room again: what waits goes on before anything new is taken.
    pub(crate) fn let_parked_go(&mut self) {
        self.is_probing = false;
        let now = Instant::now();
        for request in std::mem::take(&mut self.parked) {
            self.stack.submit(request, now);
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.is_probing || !self.parked.is_empty()
    }

    pub(crate) fn answer_request(&mut self, request: &Request, outcome: Outcome) {
        let (number, head) = ((request.token >> 16) as u16, request.token as u16);
        let queue = self.queues.get_mut(usize::from(number));
        let answered = queue.map(|queue| queue.finished(head, outcome, &self.guest));
        if let Some(Err(error)) = answered {
            self.broke(number.into(), &error);
        }
    }

    pub(crate) fn is_ending(&self, number: u16) -> bool {
        let queue = self.queues.get(usize::from(number));
        queue.is_none_or(|queue| queue.ending)
    }
}

pub(crate) fn has_no_room(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Failed(Errno::NOSPC | Errno::DQUOT))
}
