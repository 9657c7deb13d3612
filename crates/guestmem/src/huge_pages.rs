//! Huge pages put back after tracking, which has split the guest's memory to 4 KiB; slowly, while the guest runs.
//!
//! Belongs to a QEMU; owns whose turn it is. Not beside tracking: each page that is joined counts as written, so whoever
//! begins to track calls [`HugePages::leave`] first, after which one huge page more at most is joined, and whoever ends
//! puts back. Failing is harmless: the guest is slower.

use crate::collapse::open_pidfd;
use crate::{Collapse, GuestMapping, RamFile};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Rest after each huge page that is put back: at most 1 GiB/s, on one thread, while the guest runs.
const COLLAPSE_PAUSE: Duration = Duration::from_millis(2);

/// The huge pages of one QEMU.
#[derive(Debug)]
pub struct HugePages {
    ram: Arc<RamFile>,
    qemu_pid: Option<u32>,
    turn: Turn,
}

/// Whose turn it is: each ends the one before.
#[derive(Debug, Default)]
struct Turn(Mutex<Arc<AtomicBool>>);

impl Turn {
    /// Ends the present one; the next is ended by what is returned.
    fn next(&self) -> Arc<AtomicBool> {
        let fresh = Arc::default();
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = std::mem::replace(&mut *current, Arc::clone(&fresh));
        ended.store(true, Ordering::Relaxed);
        fresh
    }
}

impl HugePages {
    /// Those of the QEMU with this process id; nothing is put back yet.
    pub fn of(qemu_pid: i32, ram: &Arc<RamFile>) -> Arc<Self> {
        Arc::new(Self {
            ram: Arc::clone(ram),
            qemu_pid: u32::try_from(qemu_pid).ok(),
            turn: Turn::default(),
        })
    }

    /// Goes through guest memory in the background, until done or left.
    pub fn put_back(&self) {
        let Some(qemu_pid) = self.qemu_pid else {
            return;
        };
        let (ram, end) = (Arc::clone(&self.ram), self.turn.next());
        let thread = std::thread::Builder::new().name("collapse".into());
        if let Err(error) = thread.spawn(move || put_back(&ram, qemu_pid, &end)) {
            tracing::warn!(%error, "huge pages are not put back");
        }
    }

    /// Leaves the rest as it is, at once.
    pub fn leave(&self) {
        self.turn.next();
    }
}

fn put_back(ram: &RamFile, qemu_pid: u32, end: &AtomicBool) {
    let Ok(pidfd) = open_pidfd(qemu_pid) else {
        return;
    };
    let Ok(mapping) = GuestMapping::find(qemu_pid, ram) else {
        return;
    };
    let collapse = Collapse {
        pidfd: pidfd.as_fd(),
        mapping: &mapping,
        ram,
        pause: COLLAPSE_PAUSE,
    };
    match collapse.run(end) {
        Ok(counts) => tracing::info!(
            huge = counts.collapsed,
            failed = counts.failed,
            empty = counts.empty,
            cancelled = counts.cancelled,
            "huge pages put back"
        ),
        Err(error) => tracing::warn!(%error, "huge pages were not put back"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_ends_the_one_before_and_no_later_one() {
        let turn = Turn::default();
        let is_over = |end: &Arc<AtomicBool>| end.load(Ordering::Relaxed);
        let first = turn.next();
        assert!(!is_over(&first));
        let second = turn.next();
        assert!(is_over(&first) && !is_over(&second));
        turn.next();
        assert!(is_over(&second));
    }
}
