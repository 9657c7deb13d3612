//! Breaks a disk, for tests: so many writes to come fail.

use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use crate::{Filter, Flow, Outcome, Request, Work};

/// The filter; a clone steers the same one.
#[derive(Debug, Clone, Default)]
pub struct Fault {
    to_fail: Arc<Mutex<(u64, Option<Errno>)>>,
}

impl Fault {
    /// The next so many writes fail with this error; 0 ends it.
    pub fn fail_writes(&self, count: u64, error: Errno) {
        *self.to_fail.lock().unwrap_or_else(PoisonError::into_inner) = (count, Some(error));
    }

    fn next(&self) -> Option<Errno> {
        let mut to_fail = self.to_fail.lock().unwrap_or_else(PoisonError::into_inner);
        to_fail.0 = to_fail.0.checked_sub(1)?;
        to_fail.1
    }
}

impl Filter for Fault {
    fn down(&mut self, request: Request, flow: &mut Flow<'_>) {
        let fails = match request.work {
            Work::Write(_) => self.next(),
            _ => None,
        };
        match fails {
            Some(error) => flow.up(request, Outcome::Failed(error)),
            None => flow.down(request),
        }
    }
}
