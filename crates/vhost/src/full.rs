//! An image whose file system has no room left: the guest's requests wait until it has.
//!
//! Part of [`Device`]. An error would make the guest's file system read-only or worse, and there is no status for 'full' in
//! virtio. A queue that is to end meanwhile, since its guest is stopped, leaves what waits in the in-flight area: it is carried out
//! when the queue begins again, by whoever has the disk then. A guest that is reset begins with another area. Refuses: to
//! keep QEMU waiting for a queue that is to end.

use std::time::Instant;

use godwit_blockio::{Outcome, Request};
use rustix::io::Errno;

use crate::disk::{AGAIN, Device};

impl Device {
    /// A guest whose disk is full waits for it, and gets no error that its file system would not survive.
    pub(crate) fn park(&mut self, request: Request) {
        let now = Instant::now();
        if self.full_since.is_none() {
            self.full_since = Some(now);
            if self.is_time_to_tell() {
                tracing::warn!(
                    disk = self.name,
                    "the image has no room left: the guest's requests wait until it has"
                );
            }
        }
        self.parked.push_back(request);
        self.is_probing = false;
        self.try_parked_at = Some(now + AGAIN);
    }

    /// Whether a request waits for room, which has to be somewhere if its queue ends: nowhere but in the in-flight area.
    pub(crate) fn may_park(&self, number: u16) -> bool {
        self.guest.inflight.is_some() || !self.is_ending(number)
    }

    /// Tries one of them when it is time, and all others once it was done. One that cannot be left anywhere gets an error when its
    /// queue is to end.
    pub(crate) fn try_parked(&mut self) {
        let now = Instant::now();
        for _ in 0..self.parked.len() {
            let Some(request) = self.parked.pop_front() else {
                break;
            };
            if self.may_park(queue_of(&request)) {
                self.parked.push_back(request);
            } else {
                self.answer_request(&request, Outcome::Failed(Errno::NOSPC));
            }
        }
        let is_time = self.tries_parked_at().is_some_and(|at| at <= now);
        if is_time && let Some(request) = self.parked.pop_front() {
            (self.is_probing, self.try_parked_at) = (true, None);
            self.stack.submit(request, now);
        }
        self.look_whether_full();
    }

    /// When one of them is tried; not while the disk is to rest.
    pub(crate) fn tries_parked_at(&self) -> Option<Instant> {
        let rests = self.stands > 0 || self.held || self.ending.is_some();
        self.try_parked_at.filter(|_| !rests)
    }

    /// There is room again: what waits goes on before anything new is taken.
    pub(crate) fn let_parked_go(&mut self) {
        (self.is_probing, self.full_since) = (false, None);
        let now = Instant::now();
        for request in std::mem::take(&mut self.parked) {
            self.stack.submit(request, now);
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.is_probing || !self.parked.is_empty()
    }

    /// What waited may have been answered or left.
    fn look_whether_full(&mut self) {
        if !self.is_full() {
            (self.full_since, self.try_parked_at) = (None, None);
        }
    }

    /// Whether all that is unanswered of a queue waits for room, and stands in the in-flight area.
    pub(crate) fn only_waits_for_room(&self, number: usize) -> bool {
        let waits = |request: &&Request| usize::from(queue_of(request)) == number;
        let waiting = self.parked.iter().filter(waits).count();
        let queue = self.queues.get(number);
        self.guest.inflight.is_some() && queue.is_some_and(|queue| queue.unanswered() == waiting)
    }

    /// A queue ends: what waits for room is left in the in-flight area.
    pub(crate) fn leave_parked(&mut self, number: usize) {
        self.parked
            .retain(|request| usize::from(queue_of(request)) != number);
        self.look_whether_full();
    }

    /// Requests that were left in the in-flight area when their queue ended.
    pub(crate) fn left_in_area(&self) -> usize {
        let Some(inflight) = &self.guest.inflight else {
            return 0;
        };
        let ended = self.queues.iter().filter(|queue| !queue.runs());
        ended.map(|queue| inflight.under_way(queue.number())).sum()
    }

    pub(crate) fn answer_request(&mut self, request: &Request, outcome: Outcome) {
        let (number, head) = (queue_of(request), request.token as u16);
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

fn queue_of(request: &Request) -> u16 {
    (request.token >> 16) as u16
}

pub(crate) fn has_no_room(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Failed(Errno::NOSPC | Errno::DQUOT))
}
