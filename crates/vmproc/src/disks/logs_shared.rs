//! What the driver of a migration and the thread that sends its disks' redo logs tell each other.
//!
//! The driver tells whether the guest runs, asks whether memory may follow, and ends it; the thread tells how far it is, and has the last word on what the
//! destination has. Owns that, behind one lock, and wakes the thread when the driver has told something; bytes are counted beside it. Refuses: to take what was equal
//! at one stop of the guest for what is at the next.

use crate::adoption::lock;
use godwit_types::disk_move::{DiskIteration, DiskIterations, SentLogs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How the guest would stand still for the log to which it writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// For so long, s,
    pub wait_s: f64,
    /// and for so long it may, s, so that memory can follow: the log grows meanwhile.
    pub limit_s: f64,
}

impl Hold {
    pub fn is_short(self) -> bool {
        self.wait_s <= self.limit_s
    }
}

/// One time in which the guest stands still for its last log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stop(u64);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Guest {
    #[default]
    Runs,
    StandsStill {
        stop: Stop,
        /// The destination has all that it wrote.
        is_equal: bool,
    },
}

#[derive(Debug, Default)]
struct State {
    guest: Guest,
    /// How often it was stopped.
    stops: u64,
    /// Nothing while the guest could not be stopped for it.
    last_log: Option<Hold>,
    /// Another log is wanted, since the last one has grown.
    wants_another: bool,
    /// The driver waits for the disks since the guest was stopped or went on last: so one that stood still for its last log goes on here.
    driver_waits: bool,
    /// The driver has told something that the thread has not looked at.
    is_news: bool,
    is_over: bool,
    failure: Option<String>,
    iterations: Vec<DiskIterations>,
    sent: SentLogs,
}

/// The course of disks that go by redo logs, as the driver and the thread tell it one another.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    told: Condvar,
    /// Bytes that the step under way has still to send,
    left: AtomicU64,
    /// and those that all steps have sent.
    copied: AtomicU64,
}

/// What the driver tells and asks.
impl Shared {
    /// The guest stands still from now on, or goes on; nothing of what it does already.
    pub fn turn(&self, stands_still: bool) {
        let mut state = lock(&self.state);
        if stands_still == (state.guest != Guest::Runs) {
            return;
        }
        state.guest = match stands_still {
            true => {
                state.stops += 1;
                let stop = Stop(state.stops);
                Guest::StandsStill {
                    stop,
                    is_equal: false,
                }
            }
            false => Guest::Runs,
        };
        (state.driver_waits, state.wants_another, state.last_log) = (false, false, None);
        self.tell(&mut state);
    }

    /// The driver waits for the disks: its guest goes on, and where the last log has grown meanwhile another one is put over.
    pub fn wait_on(&self) {
        let mut state = lock(&self.state);
        state.driver_waits = true;
        state.wants_another |= state.last_log.is_some_and(|last| !last.is_short());
        self.tell(&mut state);
    }

    /// Whether memory may follow.
    pub fn is_ready(&self) -> bool {
        lock(&self.state).last_log.is_some_and(Hold::is_short)
    }

    /// Whether the guest may be stopped, for at most so long, s.
    pub fn is_close(&self, limit_s: f64) -> bool {
        let last = lock(&self.state).last_log;
        last.is_some_and(|last| last.wait_s <= limit_s)
    }

    /// Whether the destination has all that the guest wrote, which stands still.
    pub fn is_equal(&self) -> bool {
        let guest = lock(&self.state).guest;
        matches!(guest, Guest::StandsStill { is_equal: true, .. })
    }

    /// The migration is over.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        state.is_over = true;
        self.tell(&mut state);
    }

    pub fn left_bytes(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    /// What becomes less as long as anything is sent; nothing where nothing is waited for.
    pub fn not_copied(&self) -> Option<u64> {
        let is_waited_for = lock(&self.state).last_log.is_none();
        is_waited_for.then(|| u64::MAX - self.copied.load(Ordering::Relaxed))
    }

    pub fn failure(&self) -> Option<String> {
        lock(&self.state).failure.clone()
    }

    /// What each step came to of each disk, and what all logs took.
    pub fn came_to(&self) -> (Vec<DiskIterations>, SentLogs) {
        let state = lock(&self.state);
        (state.iterations.clone(), state.sent)
    }

    fn tell(&self, state: &mut State) {
        state.is_news = true;
        self.told.notify_one();
    }
}

/// What the thread tells and asks.
impl Shared {
    /// Waits until the driver tells something, and for so long at the most.
    pub fn wait(&self, limit: Duration) {
        let state = lock(&self.state);
        let waited = self
            .told
            .wait_timeout_while(state, limit, |state| !state.is_news);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_news = false;
    }

    pub fn is_over(&self) -> bool {
        lock(&self.state).is_over
    }

    /// For which time the guest stands still now, if it does.
    pub fn stop(&self) -> Option<Stop> {
        match lock(&self.state).guest {
            Guest::Runs => None,
            Guest::StandsStill { stop, .. } => Some(stop),
        }
    }

    /// Says for this stop whether the destination has all that the guest wrote.
    pub fn set_equal(&self, of: Stop, equal: bool) {
        match &mut lock(&self.state).guest {
            Guest::StandsStill { stop, is_equal } if *stop == of => *is_equal = equal,
            _ => {}
        }
    }

    /// The guest may be stopped for this log, or for none; nothing of one that stands still already.
    pub fn set_last_log(&self, last: Option<Hold>) {
        let mut state = lock(&self.state);
        if state.guest == Guest::Runs {
            state.last_log = last;
        }
    }

    /// Takes the wish for another log, if this one is too large still.
    pub fn take_wish(&self, last: Hold) -> bool {
        let mut state = lock(&self.state);
        let wants = std::mem::take(&mut state.wants_another) && !last.is_short();
        if wants {
            state.last_log = None;
        }
        wants
    }

    /// Takes that the driver waits for the disks.
    pub fn take_driver_waits(&self) -> bool {
        std::mem::take(&mut lock(&self.state).driver_waits)
    }

    pub fn fail(&self, why: String) {
        lock(&self.state).failure = Some(why);
    }

    /// So many bytes are to be sent, of which none is yet.
    pub fn begin(&self, bytes: u64) {
        self.left.store(bytes, Ordering::Relaxed);
    }

    /// So many more bytes were given. The thread alone tells of them.
    pub fn give(&self, bytes: u64) {
        let left = self.left.load(Ordering::Relaxed).saturating_sub(bytes);
        self.left.store(left, Ordering::Relaxed);
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A step has come to this of each of these disks; there are so many logs of each by now, and for so long the guest waited until they were put over.
    pub fn step_ended(&self, ended: Vec<(&str, DiskIteration)>, (logs, frozen): (u32, Duration)) {
        let state = &mut *lock(&self.state);
        (state.sent.logs, state.sent.frozen_ms) = (logs, frozen.as_secs_f64() * 1e3);
        for (disk, iteration) in ended {
            if !state.iterations.iter().any(|of| of.disk == disk) {
                state.iterations.push(DiskIterations {
                    disk: disk.to_owned(),
                    iterations: Vec::new(),
                });
            }
            let mut all = state.iterations.iter_mut();
            if let Some(of) = all.find(|of| of.disk == disk) {
                let number = of.iterations.len() as u32 + 1;
                of.iterations.push(DiskIteration {
                    number,
                    ..iteration
                });
            }
        }
    }

    /// All logs take so many bytes now.
    pub fn take(&self, bytes: u64) {
        let max = &mut lock(&self.state).sent.space_max_bytes;
        *max = bytes.max(*max);
    }

    /// The guest is slowed to this part of what it does now.
    pub fn slow(&self, part: f64) {
        let slowed = &mut lock(&self.state).sent.slowed_to;
        *slowed = Some(slowed.unwrap_or(1.0) * part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    fn last(wait_s: f64) -> Hold {
        Hold {
            wait_s,
            limit_s: 1.0,
        }
    }

    #[test]
    fn what_was_equal_when_the_guest_stood_still_before_is_not_when_it_does_again() {
        let shared = Shared::default();
        assert!(!shared.is_equal() && shared.stop().is_none(), "it runs");
        shared.turn(true);
        let first = shared.stop().unwrap();
        assert!(!shared.is_equal());
        shared.set_equal(first, true);
        assert!(shared.is_equal());
        shared.turn(true);
        assert!(shared.is_equal(), "it stands still as before");
        shared.turn(false);
        assert!(!shared.is_equal() && shared.stop().is_none());
        shared.turn(false);
        shared.turn(true);
        // Whoever was late with the first one says nothing of this one.
        shared.set_equal(first, true);
        assert!(!shared.is_equal() && shared.stop() != Some(first));
    }

    #[test]
    fn another_log_is_wanted_only_where_somebody_waits_for_one_that_has_grown() {
        let shared = Shared::default();
        let ask = || {
            shared.wait_on();
            shared.is_ready()
        };
        assert!(!ask() && !shared.take_wish(last(2.0)));
        shared.set_last_log(Some(last(1.0)));
        assert!(ask() && !shared.take_wish(last(2.0)));
        shared.set_last_log(Some(last(2.0)));
        assert!(
            !shared.is_ready() && !shared.take_wish(last(2.0)),
            "a look asks for nothing"
        );
        assert!(!ask() && shared.not_copied().is_none());
        assert!(shared.take_wish(last(2.0)));
        assert!(shared.not_copied().is_some(), "another log is waited for");
        // Who stops the guest does not ask for anything by that, and its log is not offered once more.
        assert!(shared.take_driver_waits() && !shared.take_driver_waits());
        shared.wait_on();
        shared.turn(true);
        assert!(!shared.take_driver_waits());
        shared.turn(false);
        shared.set_last_log(Some(last(2.0)));
        assert!(!ask());
        shared.turn(true);
        shared.turn(false);
        assert!(!shared.take_wish(last(2.0)), "it was for a log of before");
        shared.turn(true);
        shared.set_last_log(Some(last(1.0)));
        assert!(!shared.is_close(1.0) && !shared.is_ready());
    }

    #[test]
    fn each_step_is_told_of_each_disk_and_of_the_logs_what_was_most() {
        let shared = Shared::default();
        let step = |copied_bytes| DiskIteration {
            copied_bytes,
            ..DiskIteration::default()
        };
        shared.step_ended(
            vec![("root", step(9)), ("data", step(4))],
            (1, Duration::ZERO),
        );
        shared.step_ended(
            vec![("root", step(3)), ("data", step(2))],
            (2, Duration::from_millis(7)),
        );
        for bytes in [5, 8, 6] {
            shared.take(bytes);
        }
        [0.5, 0.5].into_iter().for_each(|part| shared.slow(part));
        let (iterations, sent) = shared.came_to();
        let told = iterations.iter().map(|of| {
            let all = of.iterations.iter();
            let all: Vec<_> = all.map(|one| (one.number, one.copied_bytes)).collect();
            (of.disk.as_str(), all)
        });
        let told: Vec<_> = told.collect();
        assert_eq!(
            told,
            [
                ("root", vec![(1, 9), (2, 3)]),
                ("data", vec![(1, 4), (2, 2)])
            ]
        );
        let all = SentLogs {
            logs: 2,
            space_max_bytes: 8,
            frozen_ms: 7.0,
            slowed_to: Some(0.25),
        };
        assert_eq!(sent, all);
    }

    #[test]
    fn the_thread_is_woken_by_what_was_told_before_it_waited() {
        let shared = Shared::default();
        shared.turn(true);
        let began = Instant::now();
        shared.wait(LONG);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| shared.wait(LONG));
            shared.end();
            assert!(waits.join().is_ok());
        });
        assert!(shared.is_over() && began.elapsed() < LONG);
    }
}
