//! How far a data channel has come, seen by the driver while the channel's thread works.
//!
//! Written by the channel's thread after each record, read and waited on by the driver. One per channel: nothing is
//! shared between channels.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How far one channel has come.
#[derive(Debug, Default)]
pub struct Progress {
    state: Mutex<State>,
    moved: Condvar,
    memory_wait_us: AtomicU64,
    busy_us: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    applied: u64,
    end: Option<End>,
}

/// How a channel's thread ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// In good order, with a final record.
    Finished,
    /// The connection is gone, and may be made again.
    Lost(String),
    /// The peer broke the protocol, or memory ran out: the migration ends.
    Failed(String),
}

impl Progress {
    /// Books that so many records are applied.
    pub fn applied(&self, records: u64) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .applied = records;
        self.moved.notify_all();
    }

    /// Books how the channel's thread ended, and wakes whoever waits for it.
    pub fn ended(&self, end: End) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .end = Some(end);
        self.moved.notify_all();
    }

    /// Records applied and the end, if it has come.
    pub fn read(&self) -> (u64, Option<End>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.applied, state.end.clone())
    }

    /// Waits until so many records are applied. `false`: not by the deadline. `Err`: it cannot come to that.
    pub fn wait_for(&self, records: u64, deadline: Instant) -> Result<bool, End> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.applied < records {
            if let Some(end) = &state.end {
                return Err(match end {
                    End::Finished => {
                        End::Failed("a data channel ended before its last record".into())
                    }
                    end => end.clone(),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let woken = self.moved.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    /// Waits until the channel's thread has ended, and says how. `None`: not by the deadline.
    pub fn wait_for_end(&self, deadline: Instant) -> Option<End> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        let goes_on = |state: &mut State| state.end.is_none();
        let waited = self.moved.wait_timeout_while(state, left, goes_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.end.clone()
    }

    /// Books time spent working on records and, of that, waiting for memory.
    pub fn spent(&self, busy: Duration, memory: Duration) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.busy_us.fetch_add(us(busy), Ordering::Relaxed);
        self.memory_wait_us.fetch_add(us(memory), Ordering::Relaxed);
    }

    /// Takes the times booked since the last call: working, waiting for memory.
    pub fn take_times(&self) -> (Duration, Duration) {
        let take = |time: &AtomicU64| Duration::from_micros(time.swap(0, Ordering::Relaxed));
        (take(&self.busy_us), take(&self.memory_wait_us))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_is_reached_when_the_records_are_applied() {
        let progress = Progress::default();
        progress.applied(7);
        assert_eq!(progress.wait_for(7, Instant::now()), Ok(true));
        assert_eq!(progress.wait_for(8, Instant::now()), Ok(false));
    }

    #[test]
    fn a_channel_that_finished_early_fails_the_barrier() {
        let progress = Progress::default();
        progress.applied(7);
        progress.ended(End::Finished);
        let far = Instant::now() + Duration::from_secs(60);
        assert!(matches!(progress.wait_for(8, far), Err(End::Failed(_))));
    }
}
