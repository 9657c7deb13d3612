//! Disks that go along with their VM begin to be mirrored, and those with snapshots get new tops for that: on a thread of its own, since their storage may hang
//! while the VM's thread has others to answer.
//!
//! Owns that thread, which may outlive the attempt that began it: what it comes to is given up then, as after a migration that failed. Refuses: a second one
//! while it lives.

use super::going_along::SourceDisks;
use super::{CONNECT_WAIT, Disks};
use crate::hypervisor::internal;
use godwit_types::migration::MigrationSpec;
use godwit_types::{ApiError, ErrorCode};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// How long it may take; a QEMU that has just been taken over has its time beside that.
const SET_OUT_WAIT: Duration = Duration::from_secs(10);

/// Whoever has it is the one that is at it.
struct Turn(Arc<AtomicBool>);

impl Turn {
    fn of(is_taken: &Arc<AtomicBool>) -> Option<Self> {
        let was_taken = is_taken.swap(true, Ordering::SeqCst);
        (!was_taken).then(|| Self(Arc::clone(is_taken)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Disks {
    /// Begins to mirror those that go along with the VM; nothing where none does. They are copied from [`SourceDisks::begin`] on. Nobody waits for their
    /// storage without end.
    pub(crate) fn mirror(
        &self,
        spec: &MigrationSpec,
        cap_bytes_per_s: Option<f64>,
    ) -> Result<Option<SourceDisks>, ApiError> {
        let refused = |why: &str| ApiError::new(ErrorCode::Hypervisor, why);
        let turn = Turn::of(&self.0.sets_out).ok_or_else(|| {
            refused("what an earlier migration began with the VM's disks still waits for their storage: see that it answers, and migrate again")
        })?;
        let (disks, to) = (self.clone(), spec.clone());
        let work = move || disks.mirror_here(&to, cap_bytes_per_s);
        let (disks, id) = (self.clone(), spec.id.clone());
        let give_up = move || disks.forget_leaving_parts(&id);
        match within(CONNECT_WAIT + SET_OUT_WAIT, turn, work, give_up).map_err(internal)? {
            Some(begun) => begun,
            None => Err(refused(
                "the storage of the VM's disks was not ready in time for a migration, which has not begun: the guest works on; see that the storage answers, and migrate again",
            )),
        }
    }
}

/// Does something on a thread of its own. Nothing where it took longer than this limit, or did not end in an orderly way: what comes of it later is dropped
/// and given up, before anybody else has the turn.
fn within<R: Send + 'static>(
    limit: Duration,
    turn: Turn,
    work: impl FnOnce() -> R + Send + 'static,
    give_up: impl Fn() + Clone + Send + 'static,
) -> io::Result<Option<R>> {
    let (done, is_done) = channel();
    let late = give_up.clone();
    let work = move || {
        if let Err(unheard) = done.send(work()) {
            drop(unheard);
            late();
        }
        drop(turn);
    };
    let thread = std::thread::Builder::new().name("disk-set-out".to_owned());
    thread.spawn(work)?;
    let result = is_done.recv_timeout(limit).ok();
    if result.is_none() {
        // It may have ended just now: then nobody else gives it up.
        drop(is_done);
        give_up();
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::LONG;
    use std::sync::Mutex;

    #[test]
    fn disks_whose_storage_hangs_before_a_migration_keep_their_vm_no_longer_than_the_limit() {
        let is_taken = Arc::default();
        let (given_up, is_given_up) = channel();
        let given_up = Arc::new(Mutex::new(given_up));
        let give_up = move || given_up.lock().unwrap().send(()).unwrap();
        let (hold, held) = channel::<()>();
        let hangs = move || held.recv().is_ok();
        let turn = Turn::of(&is_taken).unwrap();
        let result = within(Duration::ZERO, turn, hangs, give_up.clone()).unwrap();
        assert_eq!(result, None);
        is_given_up.recv_timeout(LONG).unwrap();
        // Nobody begins anew beside it.
        assert!(Turn::of(&is_taken).is_none());
        drop(hold);
        is_given_up.recv_timeout(LONG).unwrap();
        let turn = loop {
            if let Some(turn) = Turn::of(&is_taken) {
                break turn;
            }
            std::thread::yield_now();
        };
        let result = within(LONG, turn, || 7, give_up).unwrap();
        assert_eq!(result, Some(7));
        assert!(is_given_up.try_recv().is_err());
    }
}
