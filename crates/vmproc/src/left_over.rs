//! Images that could not be removed after the VM had left this host: when they are tried again.
//!
//! Whatever keeps them there (a directory that may not be changed, storage that is away) may be over at any time, and nobody says so. Pure, but
//! for the clock, which is given. Owns when it is tried next. Refuses: to give up, and to try without a pause.

use std::time::{Duration, Instant};

/// How soon it is tried again,
const FIRST: Duration = Duration::from_secs(10);
/// and how soon at last: each try takes twice as long as the one before.
const LONGEST: Duration = Duration::from_secs(60);

/// When what is left of a VM's disks is looked at again.
#[derive(Debug, Default)]
pub(crate) struct LeftOver {
    next: Option<Next>,
}

#[derive(Debug, Clone, Copy)]
struct Next {
    at: Instant,
    wait: Duration,
}

impl LeftOver {
    /// Whether something is left that is tried again.
    pub(crate) fn waits(&self) -> bool {
        self.next.is_some()
    }

    /// It was looked at just now, and is there still or not.
    pub(crate) fn looked(&mut self, is_there: bool, now: Instant) {
        let wait = match self.next {
            // Somebody else had it looked at.
            Some(next) if is_there && now < next.at => return,
            Some(next) => (next.wait * 2).min(LONGEST),
            None => FIRST,
        };
        let at = now + wait;
        self.next = is_there.then_some(Next { at, wait });
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| now >= next.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_tried_more_and_more_slowly_until_it_is_gone() {
        let mut left = LeftOver::default();
        let mut now = Instant::now();
        assert!(!left.waits() && !left.is_due(now));
        for wait in [10, 20, 40, 60, 60] {
            left.looked(true, now);
            let due = now + Duration::from_secs(wait);
            assert!(left.waits() && !left.is_due(due - Duration::from_secs(1)));
            left.looked(true, now);
            assert!(left.is_due(due));
            now = due;
        }
        left.looked(false, now);
        assert!(!left.waits() && !left.is_due(now + LONGEST));
        left.looked(true, now);
        assert!(left.is_due(now + FIRST));
    }
}
