//! Counts what a guest does with its disk, and how long that takes.
//!
//! Who owns the state: the disk's thread writes the counts, anybody reads them, each of them by itself: two that are read
//! one after the other may be one request apart.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::{Filter, Outcome, Request, Waits, Work};

/// What was done of one kind.
#[derive(Debug, Default)]
pub struct Count {
    /// Those whose outcome came, whatever it was,
    pub requests: AtomicU64,
    /// and those of them that were not done.
    pub failed: AtomicU64,
    /// What all of them covered of the disk.
    pub bytes: AtomicU64,
    /// From when a request was made until its outcome came here, all together,
    pub nanoseconds: AtomicU64,
    /// and of the one that took longest.
    pub most_nanoseconds: AtomicU64,
}

/// What was done since the disk began.
#[derive(Debug, Default)]
pub struct Counts {
    pub reads: Count,
    pub writes: Count,
    pub flushes: Count,
    /// Discards and writes of zeroes.
    pub erasures: Count,
    /// Requests of all kinds that failed, and neither for want of room nor since the image cannot do such a thing.
    pub faults: AtomicU64,
}

impl Counts {
    fn of(&self, work: &Work) -> &Count {
        match work {
            Work::Read(_) => &self.reads,
            Work::Write(_) => &self.writes,
            Work::Flush => &self.flushes,
            Work::Discard(_) | Work::WriteZeroes { .. } => &self.erasures,
        }
    }
}

#[derive(Debug, Default)]
pub struct Statistics {
    counts: Arc<Counts>,
    waits: Waits,
}

impl Statistics {
    /// Where the counts are read.
    pub fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }

    /// Goes on with the counts of a disk whose thread has ended. Where requests wait for room, one that finds none is counted once
    /// it is done, with all the time that it has waited.
    pub fn going_on(counts: Arc<Counts>, waits: Waits) -> Self {
        Self { counts, waits }
    }
}

/// Nobody but the disk's thread adds, so that no locked instruction is needed.
fn add(counter: &AtomicU64, more: u64) {
    let sum = counter.load(Ordering::Relaxed).saturating_add(more);
    counter.store(sum, Ordering::Relaxed);
}

impl Filter for Statistics {
    fn passes_down(&mut self, _request: &Request, _now: Instant) -> bool {
        true
    }

    fn passes_up(&mut self, request: &Request, outcome: Outcome, now: Instant) -> bool {
        if self.waits.keep(request, outcome) {
            // What storage failed counts, also where it does it later: another host may have the better copy.
            if !outcome.lacks_room() && !request.again {
                add(&self.counts.faults, 1);
            }
            return true;
        }
        let took = now.saturating_duration_since(request.began);
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let count = self.counts.of(&request.work);
        add(&count.requests, 1);
        let range = request.work.range();
        add(
            &count.bytes,
            range.map_or(0, |range| range.end - range.start),
        );
        add(&count.nanoseconds, took);
        let most = count.most_nanoseconds.load(Ordering::Relaxed).max(took);
        count.most_nanoseconds.store(most, Ordering::Relaxed);
        if outcome != Outcome::Done {
            add(&count.failed, 1);
        }
        if matches!(outcome, Outcome::Failed(_)) && !outcome.lacks_room() {
            add(&self.counts.faults, 1);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::Fault;
    use crate::filters::keeps::Keeps;
    use crate::{Data, Stack};
    use rustix::io::Errno;
    use std::time::Duration;

    #[test]
    fn each_kind_is_counted_with_its_bytes_its_time_and_its_failures() {
        let statistics = Statistics::default();
        let counts = statistics.counts();
        let faults = Fault::default();
        faults.fail_writes(1, Errno::IO);
        let mut stack = Stack::new(
            vec![Box::new(statistics), Box::new(faults)],
            Keeps::default(),
        );
        let began = Instant::now();
        for work in [
            Work::Write(0..512),
            Work::Write(0..4096),
            Work::Read(512..1024),
            Work::Flush,
            Work::Discard(0..8192),
        ] {
            stack.submit(Request::new(work, Data::None, 0, began), began);
        }
        let later = began + Duration::from_millis(3);
        while let Some(request) = stack.bottom.0.pop() {
            stack.completed(request, Outcome::Done, later);
        }
        let told = |count: &Count| {
            let all = [
                &count.requests,
                &count.bytes,
                &count.nanoseconds,
                &count.failed,
            ];
            all.map(|counter| counter.load(Ordering::Relaxed))
        };
        assert_eq!(told(&counts.writes), [2, 4608, 3_000_000, 1]);
        assert_eq!(told(&counts.reads), [1, 512, 3_000_000, 0]);
        assert_eq!(told(&counts.flushes), [1, 0, 3_000_000, 0]);
        assert_eq!(told(&counts.erasures), [1, 8192, 3_000_000, 0]);
        assert_eq!(
            counts.writes.most_nanoseconds.load(Ordering::Relaxed),
            3_000_000
        );
    }

    #[test]
    fn only_what_storage_fails_counts_as_its_fault() {
        let statistics = Statistics::default();
        let counts = statistics.counts();
        let mut stack = Stack::new(vec![Box::new(statistics)], Keeps::default());
        let now = Instant::now();
        for (outcome, faults) in [
            (Outcome::Done, 0),
            (Outcome::Unsupported, 0),
            (Outcome::Failed(Errno::NOSPC), 0),
            (Outcome::Failed(Errno::IO), 1),
        ] {
            stack.submit(Request::new(Work::Discard(0..512), Data::None, 0, now), now);
            let request = stack.bottom.0.pop().unwrap();
            stack.completed(request, outcome, now);
            assert_eq!(counts.faults.load(Ordering::Relaxed), faults, "{outcome:?}");
        }
    }

    #[test]
    fn what_waits_for_room_is_counted_once_and_is_no_failure() {
        for (for_room, expected) in [
            (true, [1, 512, 5_000_000, 0]),
            (false, [2, 1024, 8_000_000, 1]),
        ] {
            let waits = Waits {
                for_room,
                for_storage: false,
            };
            let statistics = Statistics::going_on(Arc::default(), waits);
            let counts = statistics.counts();
            let mut stack = Stack::new(vec![Box::new(statistics)], Keeps::default());
            let began = Instant::now();
            let after = |ms| began + Duration::from_millis(ms);
            stack.submit(
                Request::new(Work::Write(0..512), Data::None, 0, began),
                began,
            );
            let request = stack.bottom.0.pop().unwrap();
            stack.completed(request, Outcome::Failed(Errno::NOSPC), after(3));
            let (request, _) = stack.finished().unwrap();
            stack.submit(request.once_more(), after(4));
            let request = stack.bottom.0.pop().unwrap();
            stack.completed(request, Outcome::Done, after(5));
            let writes = &counts.writes;
            let told = [
                &writes.requests,
                &writes.bytes,
                &writes.nanoseconds,
                &writes.failed,
            ];
            assert_eq!(
                told.map(|counter| counter.load(Ordering::Relaxed)),
                expected
            );
        }
    }

    #[test]
    fn what_waits_for_storage_that_failed_it_is_counted_as_a_fault_once() {
        let waits = Waits {
            for_room: true,
            for_storage: true,
        };
        let statistics = Statistics::going_on(Arc::default(), waits);
        let counts = statistics.counts();
        let mut stack = Stack::new(vec![Box::new(statistics)], Keeps::default());
        let now = Instant::now();
        let mut request = Request::new(Work::Write(0..512), Data::None, 0, now);
        for outcome in [Errno::IO, Errno::IO].map(Outcome::Failed) {
            stack.submit(request, now);
            let submitted = stack.bottom.0.pop().unwrap();
            stack.completed(submitted, outcome, now);
            request = stack.finished().unwrap().0.once_more();
            let told = [
                &counts.faults,
                &counts.writes.requests,
                &counts.writes.failed,
            ];
            let told = told.map(|counter| counter.load(Ordering::Relaxed));
            assert_eq!(told, [1, 0, 0]);
        }
    }
}
