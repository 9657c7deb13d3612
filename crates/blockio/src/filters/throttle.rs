//! Limits what one disk may do in a second, so that one guest does not take a datastore from the others.
//!
//! Each request takes the longer one of the times that it would take at both limits ([`Due`]). What comes earlier stays in the
//! guest's ring. Discards and zeroes are requests, too, since storage works for them; only a flush, which writes nothing that was not counted
//! before, is free.
//!
//! Who owns the state: the disk's thread, but for the limits, which anybody may change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::pace::Due;
use crate::{Filter, Outcome, Request, Work};

/// What a disk may do in a second; 0: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    pub requests: u64,
    pub bytes: u64,
}

impl Limits {
    fn are_none(self) -> bool {
        self == Self::default()
    }

    /// What a request takes at the limit.
    fn cost(self, work: &Work) -> Duration {
        let each = |limit: u64, count: u64| match limit {
            0 => Duration::ZERO,
            limit => Duration::from_secs_f64(count as f64 / limit as f64),
        };
        let bytes = work.burdens();
        each(self.requests, 1).max(each(self.bytes, bytes))
    }
}

/// Limits that are changed while the disk works: anybody sets them, its thread reads each by itself.
#[derive(Debug, Default)]
pub struct SharedLimits {
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl SharedLimits {
    pub fn set(&self, limits: Limits) {
        self.requests.store(limits.requests, Ordering::Relaxed);
        self.bytes.store(limits.bytes, Ordering::Relaxed);
    }

    fn get(&self) -> Limits {
        Limits {
            requests: self.requests.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }
}

#[derive(Debug)]
pub struct Throttle {
    limits: Arc<SharedLimits>,
    due: Due,
}

impl Throttle {
    pub fn new(limits: Limits) -> Self {
        let shared = SharedLimits::default();
        shared.set(limits);
        Self::from(Arc::new(shared))
    }
}

impl From<Arc<SharedLimits>> for Throttle {
    fn from(limits: Arc<SharedLimits>) -> Self {
        Self {
            limits,
            due: Due::default(),
        }
    }
}

impl Filter for Throttle {
    fn passes_down(&mut self, request: &Request, now: Instant) -> bool {
        let limits = self.limits.get();
        if request.work != Work::Flush && !request.again && !limits.are_none() {
            self.due.take(now, limits.cost(&request.work));
        }
        true
    }

    fn passes_up(&mut self, _request: &Request, _outcome: Outcome, _now: Instant) -> bool {
        true
    }

    fn opens_at(&self) -> Option<Instant> {
        // What was let through before a limit was lifted keeps nobody waiting.
        match self.limits.get().are_none() {
            true => None,
            false => self.due.opens_at(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bottom, Data, Stack};

    #[derive(Default)]
    struct Took(Vec<u64>);

    impl Bottom for Took {
        fn start(&mut self, request: Request) -> Option<(Request, Outcome)> {
            self.0.push(request.token);
            Some((request, Outcome::Done))
        }
    }

    /// How many of 1,000 waiting requests of 4 KiB went through in each of `seconds` seconds.
    fn seconds(limits: Limits, seconds: u32) -> Vec<usize> {
        let mut stack = Stack::new(vec![Box::new(Throttle::new(limits))], Took::default());
        let began = Instant::now();
        let (mut now, mut waiting) = (began, (0..1000).peekable());
        let counts = (1..=seconds).map(|second| {
            let end = began + Duration::from_secs(second.into());
            let before = stack.bottom.0.len();
            while now < end && waiting.peek().is_some() {
                match stack.opens_at(now) {
                    Some(at) => now = at,
                    None => {
                        let work = Work::Write(0..4096);
                        let token = waiting.next().unwrap();
                        stack.submit(Request::new(work, Data::None, token, now), now);
                    }
                }
            }
            stack.bottom.0.len() - before
        });
        counts.collect()
    }

    #[test]
    fn a_disk_does_what_its_limit_says_after_a_tenth_of_a_second_at_once() {
        let limits = |requests, bytes| Limits { requests, bytes };
        let near = |seen: Vec<usize>, expected: &[usize]| {
            let all = seen.iter().zip(expected);
            assert!(
                all.clone()
                    .all(|(seen, expected)| seen.abs_diff(*expected) <= 1),
                "{seen:?}"
            );
        };
        near(seconds(limits(100, 0), 3), &[110, 100, 100]);
        near(seconds(limits(0, 4096 * 50), 3), &[55, 50, 50]);
        // The stricter of both.
        near(seconds(limits(100, 4096 * 50), 2), &[55, 50]);
        near(seconds(Limits::default(), 1), &[1000]);
    }

    #[test]
    fn nothing_that_was_let_in_is_held_and_a_flush_or_what_comes_once_more_costs_nothing() {
        let limits = Limits {
            requests: 1,
            bytes: 0,
        };
        let mut stack = Stack::new(vec![Box::new(Throttle::new(limits))], Took::default());
        let now = Instant::now();
        for work in [Work::Flush, Work::Write(0..512)] {
            assert_eq!(stack.opens_at(now), None);
            stack.submit(Request::new(work, Data::None, 0, now), now);
        }
        let again = Request::new(Work::Write(0..512), Data::None, 0, now).once_more();
        stack.submit(again, now);
        assert_eq!((stack.under_way(), stack.wake_at()), (0, None));
        assert_eq!(stack.opens_at(now), Some(now + Duration::from_millis(900)));
    }

    #[test]
    fn what_erases_counts_as_a_request_and_zeroes_that_keep_their_room_count_as_bytes_too() {
        const MIB: u64 = 1 << 20;
        let zeroes = |unmap| Work::WriteZeroes {
            range: 0..MIB,
            unmap,
        };
        let opens_after = |limits, work| {
            let mut stack = Stack::new(vec![Box::new(Throttle::new(limits))], Took::default());
            let now = Instant::now();
            stack.submit(Request::new(work, Data::None, 0, now), now);
            stack.opens_at(now).map(|at| (at - now).as_millis())
        };
        let requests = Limits {
            requests: 1,
            bytes: 0,
        };
        let bytes = Limits {
            requests: 0,
            bytes: MIB,
        };
        for work in [Work::Discard(0..MIB), zeroes(true), zeroes(false)] {
            assert_eq!(opens_after(requests, work.clone()), Some(900), "{work:?}");
        }
        assert_eq!(opens_after(bytes, Work::Discard(0..MIB)), None);
        assert_eq!(opens_after(bytes, zeroes(true)), None);
        assert_eq!(opens_after(bytes, zeroes(false)), Some(900));
    }

    #[test]
    fn limits_count_from_when_they_are_set_and_no_longer_than_until_they_are_lifted() {
        let limits = Arc::new(SharedLimits::default());
        let throttle = Throttle::from(Arc::clone(&limits));
        let mut stack = Stack::new(vec![Box::new(throttle)], Took::default());
        let now = Instant::now();
        let writes = |stack: &mut Stack<Took>| {
            let request = Request::new(Work::Write(0..512), Data::None, 0, now);
            stack.submit(request, now);
            stack.opens_at(now)
        };
        assert_eq!(writes(&mut stack), None);
        limits.set(Limits {
            requests: 2,
            bytes: 0,
        });
        assert_eq!(writes(&mut stack), Some(now + Duration::from_millis(400)));
        limits.set(Limits::default());
        assert_eq!(stack.opens_at(now), None);
        assert_eq!(writes(&mut stack), None);
    }
}
