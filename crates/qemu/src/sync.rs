//! Small helpers for waiting: locks that outlive a panic elsewhere, condition variables and descriptors with deadlines.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Locks; a panic of another holder does not take the hypervisor's control with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pause between two tries of [`lock_until`].
const LOCK_POLL: Duration = Duration::from_millis(5);

/// As [`lock`], but gives up at `deadline`. For locks that are held for seconds: it looks again and again.
pub(crate) fn lock_until<T>(mutex: &Mutex<T>, deadline: Instant) -> Option<MutexGuard<'_, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_POLL),
        }
    }
}

/// Waits while `waiting` holds, at most until `deadline`.
pub(crate) fn wait_until<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Instant,
    waiting: impl Fn(&T) -> bool,
) -> MutexGuard<'a, T> {
    let result = changed.wait_timeout_while(guard, remaining(deadline), |state| waiting(state));
    result.unwrap_or_else(PoisonError::into_inner).0
}

/// Time left; zero once the deadline has passed.
pub(crate) fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Which of `wanted` are ready, in their order; all false when the deadline passed first.
pub(crate) fn poll_until<const N: usize>(
    wanted: [(BorrowedFd<'_>, PollFlags); N],
    deadline: Instant,
) -> io::Result<[bool; N]> {
    let mut fds = wanted.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags));
    loop {
        let timeout = Timespec::try_from(remaining(deadline)).unwrap_or(Timespec {
            tv_sec: 3600,
            tv_nsec: 0,
        });
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => return Ok(fds.each_ref().map(|fd| !fd.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
