//! An image whose file system has no room left, or whose storage fails where its disk is told to wait for that: the guest's requests wait.
//!
//! Part of [`Device`]. An error would make the guest's file system read-only or worse, and there is no status for 'full' in
//! virtio; a disk may be told to give one all the same. A queue that is to end meanwhile, since its guest is stopped, leaves what
//! waits in the in-flight area: it is carried out when the queue begins again, by whoever has the disk then. A guest that is reset
//! begins with another area. Refuses: to keep QEMU waiting for a queue that is to end, and to let a flush wait that was told
//! of data that is lost: tried again it would seem to succeed. (One over a delta that has no room for a table's block was told of none, and waits.)

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use godwit_blockio::{Outcome, Request};
use godwit_types::plant::planted;
use rustix::io::Errno;

use crate::disk::{AGAIN, Device};

/// What a disk knows of requests for which its image had no room.
#[derive(Default)]
pub(crate) struct Full {
    /// They are tried again, and nothing new is taken meanwhile.
    parked: VecDeque<Request>,
    /// Whether the last one that failed did since its storage fails, and not for want of room.
    fails: bool,
    /// The one of them that is being tried.
    probe: Option<u64>,
    try_at: Option<Instant>,
    /// Since when each waits that is not answered, also one that is under way again.
    since: BTreeMap<u64, Instant>,
}

impl Full {
    /// How long the one that has waited for longest does.
    pub(crate) fn longest(&self) -> Option<Duration> {
        self.since.values().min().map(Instant::elapsed)
    }

    /// Whether they wait for storage that fails.
    pub(crate) fn fails(&self) -> bool {
        self.fails && self.longest().is_some()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.probe.is_some() || !self.parked.is_empty()
    }

    fn of_queue(&self, number: usize) -> usize {
        let all = self.parked.iter();
        all.filter(|request| usize::from(queue_of(request.token)) == number)
            .count()
    }

    /// Where none waits nothing is to be tried.
    fn settle(&mut self) {
        if !self.is_full() {
            self.try_at = None;
        }
    }
}

impl Device {
    /// Whether a request is to wait for room, and not to fail. Its queue may end, so it has to be somewhere then: nowhere but in
    /// the in-flight area.
    pub(crate) fn parks(&self, request: &Request, outcome: Outcome) -> bool {
        self.waits.keep(request, outcome) && self.may_park(queue_of(request.token))
    }

    fn may_park(&self, number: u16) -> bool {
        self.guest.inflight.is_some() || !self.is_ending(number)
    }

    /// A guest whose disk is full waits for it, and gets no error that its file system would not survive.
    pub(crate) fn park(&mut self, request: Request, outcome: Outcome) {
        let now = Instant::now();
        let fails = !outcome.lacks_room();
        if self.session.full.since.is_empty() && self.is_time_to_tell() {
            let why = match fails {
                true => "its storage fails",
                false => "the image has no room left",
            };
            let disk = &self.name;
            tracing::warn!(
                disk,
                why,
                "the guest's requests wait until they can be done"
            );
        }
        let full = &mut self.session.full;
        full.fails = fails;
        // Since the guest asked for it: an error may take its time.
        full.since
            .entry(request.token)
            .or_insert(request.began.min(now));
        if full.probe == Some(request.token) {
            full.probe = None;
        }
        full.try_at = Some(now + AGAIN);
        full.parked.push_back(request.once_more());
    }

    /// Tries one of them when it is time, and all others once it was done.
    pub(crate) fn try_parked(&mut self) {
        if self.session.ending.is_some() && self.guest.inflight.is_none() {
            self.fail_parked();
        }
        let now = Instant::now();
        let is_time = self.tries_parked_at().is_some_and(|at| at <= now);
        if is_time && let Some(request) = self.session.full.parked.pop_front() {
            (self.session.full.probe, self.session.full.try_at) = (Some(request.token), None);
            self.stack.submit(request, now);
        }
    }

    /// Those get an error that cannot be left anywhere when their queue ends.
    fn fail_parked(&mut self) {
        let all = std::mem::take(&mut self.session.full.parked);
        let (kept, failed): (VecDeque<_>, VecDeque<_>) = all
            .into_iter()
            .partition(|request| self.may_park(queue_of(request.token)));
        self.session.full.parked = kept;
        let errno = match self.session.full.fails {
            true => Errno::IO,
            false => Errno::NOSPC,
        };
        for request in failed {
            self.answer_request(&request, Outcome::Failed(errno));
        }
        self.session.full.settle();
    }

    /// When one of them is tried; not while the disk is to rest, or its image is not its own.
    pub(crate) fn tries_parked_at(&self) -> Option<Instant> {
        let rests =
            self.stands > 0 || self.held || self.session.ending.is_some() || !self.has_image;
        self.session.full.try_at.filter(|_| !rests)
    }

    /// A request has ended otherwise than for want of room. Where it is the one that was tried there is room again: what waits goes
    /// on before anything new is taken.
    pub(crate) fn let_parked_go(&mut self, ended: u64) {
        if self.session.full.probe != Some(ended) {
            return;
        }
        (self.session.full.probe, self.session.full.try_at) = (None, None);
        let now = Instant::now();
        for request in std::mem::take(&mut self.session.full.parked) {
            self.stack.submit(request, now);
        }
    }

    /// Whether all that is unanswered of a queue stands in the in-flight area and is not carried out: it waits for room, or for
    /// the image.
    pub(crate) fn only_waits(&self, number: usize) -> bool {
        let Some(queue) = self.queues.get(number) else {
            return false;
        };
        let left_over = match self.has_image {
            true => 0,
            false => queue.left_over(),
        };
        let waiting = self.session.full.of_queue(number) + left_over;
        self.guest.inflight.is_some() && queue.unanswered() == waiting
    }

    /// A queue ends: what waits for room is left in the in-flight area.
    pub(crate) fn leave_parked(&mut self, number: usize) {
        let stays = |token: u64| usize::from(queue_of(token)) != number;
        if planted("parked-request-lost")
            && let (Some(inflight), Some(queue)) = (&self.guest.inflight, self.queues.get(number))
        {
            let left = self.session.full.parked.iter().map(|request| request.token);
            for token in left.filter(|token| !stays(*token)) {
                inflight.answered(queue.number(), token as u16, queue.next());
            }
        }
        self.session
            .full
            .parked
            .retain(|request| stays(request.token));
        self.session.full.since.retain(|token, _| stays(*token));
        self.session.full.settle();
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
        let (number, head) = (queue_of(request.token), request.token as u16);
        self.session.full.since.remove(&request.token);
        let queue = self.queues.get_mut(usize::from(number));
        let answered = queue.map(|queue| queue.finished(head, outcome, &self.guest));
        if let Some(Err(error)) = answered {
            self.broke(number.into(), &error);
        }
    }

    fn is_ending(&self, number: u16) -> bool {
        let queue = self.queues.get(usize::from(number));
        queue.is_none_or(|queue| queue.ending)
    }
}

fn queue_of(token: u64) -> u16 {
    (token >> 16) as u16
}
