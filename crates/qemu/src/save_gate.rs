//! Whether QEMU may be asked to save its devices now.
//!
//! Shared by the source's driver, which saves, and the VM's thread, which calls an attempt off. QEMU stops the guest at
//! the end of a save, so a guest that is let run again while one goes on would stand still for ever: calling off ends
//! the save first. Refuses: a save for an attempt that was called off.

use godwit_types::Generation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a save that is called off may take to notice; it looks several times as often.
const CLOSE_WAIT: Duration = Duration::from_millis(500);
/// Pause between two looks whether it has.
const CLOSE_PAUSE: Duration = Duration::from_millis(2);

/// Lets a save of device state begin, or calls it off.
#[derive(Debug, Clone, Default)]
pub struct SaveGate(Arc<Gate>);

#[derive(Debug, Default)]
struct Gate {
    /// Held for the time of a save; the attempt that may save.
    attempt: Mutex<Option<Generation>>,
    closing: AtomicBool,
}

/// A save that may go on.
#[derive(Debug)]
pub struct Saving<'a> {
    _held: MutexGuard<'a, Option<Generation>>,
    closing: &'a AtomicBool,
}

impl Saving<'_> {
    /// Whether the attempt is being called off: the save must end at once.
    pub fn is_called_off(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }
}

impl SaveGate {
    /// Lets this attempt save.
    pub fn open(&self, attempt: Generation) {
        *self.lock() = Some(attempt);
        self.0.closing.store(false, Ordering::SeqCst);
    }

    /// Lets nothing save; returns when no save goes on. One that does not end by itself soon waits for the link:
    /// `unblock` is called then.
    pub fn close(&self, unblock: impl FnOnce()) {
        self.0.closing.store(true, Ordering::SeqCst);
        let until = Instant::now() + CLOSE_WAIT;
        while matches!(self.0.attempt.try_lock(), Err(TryLockError::WouldBlock)) {
            if Instant::now() >= until {
                unblock();
                break;
            }
            std::thread::sleep(CLOSE_PAUSE);
        }
        *self.lock() = None;
    }

    /// Begins a save; `None`: the attempt was called off.
    pub fn begin(&self, attempt: Generation) -> Option<Saving<'_>> {
        let held = self.lock();
        (*held == Some(attempt)).then_some(Saving {
            _held: held,
            closing: &self.0.closing,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Generation>> {
        self.0
            .attempt
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_attempt_that_stands_may_save() {
        let gate = SaveGate::default();
        assert!(gate.begin(Generation(2)).is_none());
        gate.open(Generation(2));
        assert!(
            gate.begin(Generation(2))
                .is_some_and(|saving| !saving.is_called_off())
        );
        gate.close(|| panic!("nothing saves"));
        assert!(gate.begin(Generation(2)).is_none());
        gate.open(Generation(3));
        assert!(gate.begin(Generation(2)).is_none());
    }

    #[test]
    fn a_save_that_waits_for_the_link_is_unblocked() {
        let gate = SaveGate::default();
        gate.open(Generation(2));
        let (unblock, unblocked) = std::sync::mpsc::channel();
        let (began, begun) = std::sync::mpsc::channel();
        let saver = gate.clone();
        let saving = std::thread::spawn(move || {
            let saving = saver.begin(Generation(2)).expect("it may save");
            began.send(()).expect("heard");
            unblocked.recv().expect("unblocked");
            saving.is_called_off()
        });
        begun.recv().expect("begun");
        gate.close(move || unblock.send(()).expect("heard"));
        assert!(saving.join().expect("no panic"), "it was called off");
    }
}
