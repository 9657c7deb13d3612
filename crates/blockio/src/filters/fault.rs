//! Breaks a disk, for tests: so many writes to come fail, or all to one place.
//!
//! What is to fail is owned by the disk's thread and the test that steers it, together. Refuses nothing: what is no write goes on.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use crate::{Filter, Flow, Outcome, Request, Work};

/// The filter; a clone steers the same one.
#[derive(Debug, Clone, Default)]
pub struct Fault {
    to_fail: Arc<Mutex<ToFail>>,
}

#[derive(Debug, Default)]
struct ToFail {
    writes: u64,
    /// Only those that begin there.
    at: Option<u64>,
    error: Option<Errno>,
}

impl Fault {
    /// The next so many writes fail with this error; 0 ends it.
    pub fn fail_writes(&self, count: u64, error: Errno) {
        *self.to_fail.lock().unwrap_or_else(PoisonError::into_inner) = ToFail {
            writes: count,
            at: None,
            error: Some(error),
        };
    }

    /// From here on only writes fail that begin at this place.
    pub fn fail_only_at(&self, place: u64) {
        let mut to_fail = self.to_fail.lock().unwrap_or_else(PoisonError::into_inner);
        to_fail.at = Some(place);
    }

    fn next(&self, place: u64) -> Option<Errno> {
        let mut to_fail = self.to_fail.lock().unwrap_or_else(PoisonError::into_inner);
        if to_fail.at.is_some_and(|at| at != place) {
            return None;
        }
        to_fail.writes = to_fail.writes.checked_sub(1)?;
        to_fail.error
    }
}

impl Filter for Fault {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        let fails = match &request.work {
            Work::Write(range) => self.next(range.start),
            _ => None,
        };
        match fails {
            Some(error) => flow.up(request, Outcome::Failed(error)),
            None => flow.down(request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filters::keeps::Keeps;
    use crate::{Data, Stack};
    use std::time::Instant;

    #[test]
    fn so_many_writes_fail_or_those_to_one_place_and_nothing_of_them_goes_further() {
        let faults = Fault::default();
        let mut stack = Stack::new(vec![Box::new(faults.clone())], Keeps::default());
        let now = Instant::now();
        // What came of it at once, if it did not go on.
        let mut submit = |work| {
            stack.submit(Request::new(work, Data::None, 0, now), now);
            let outcome = stack.finished().map(|(_, outcome)| outcome);
            assert_eq!(stack.bottom.0.pop().is_none(), outcome.is_some());
            outcome
        };
        let (first, second) = (Work::Write(0..512), Work::Write(4096..4608));
        let failed = |error| Some(Outcome::Failed(error));
        faults.fail_writes(2, Errno::IO);
        assert_eq!(submit(Work::Read(0..512)), None);
        assert_eq!(submit(first.clone()), failed(Errno::IO));
        assert_eq!(submit(Work::Flush), None);
        assert_eq!(submit(second.clone()), failed(Errno::IO));
        assert_eq!(submit(second.clone()), None);
        faults.fail_writes(1, Errno::NOSPC);
        faults.fail_only_at(4096);
        assert_eq!(submit(first.clone()), None);
        assert_eq!(submit(second.clone()), failed(Errno::NOSPC));
        assert_eq!(submit(second), None);
        // This ends it, for all places.
        faults.fail_writes(1, Errno::IO);
        faults.fail_writes(0, Errno::IO);
        assert_eq!(submit(first), None);
    }
}
