//! The last redo log of a disk that moves by snapshotting is brought into the copy while the guest waits: on a thread of its own, so that a destination that
//! hangs holds no guest for longer than its limit.
//!
//! Part of a move ([`super::by_logs`]). Owns the thread, which may outlive the move that began it: it reads the log and writes to the copy, of which nothing is
//! written down, and which is removed and never filled again once the move has ended. Refuses: nothing; who waits hears that it took too long.

use super::aside::within;
use super::layers::OwnedPlace;
use super::switching::{Stopped, length_of};
use godwit_blockio::delta::{AT_ONCE_MAX, Target, merge};
use godwit_qemu::disk::identity_of;
use godwit_snapshots::Images;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// For so long beyond its limit the copy may take to become durable: whoever holds a guest has kept as much of its time for what comes after.
const LATE_MAX: Duration = Duration::from_secs(1);

/// The log, and the copy.
pub(super) struct LastLog {
    pub place: OwnedPlace,
    /// The log is their top.
    pub images: Images,
    pub copy: OwnedFd,
    /// The name that the copy has.
    pub path: PathBuf,
}

/// What is under the copy's name once all of the log is in it, durably.
pub(super) struct Found {
    /// By which it is known whether the copy still has its name.
    pub image: Option<(u64, u64)>,
    pub bytes: u64,
}

impl LastLog {
    /// Nothing where it took too long, and has ended: it may be tried again. `may_go_on` refuses where nobody should go on.
    pub(super) fn consolidate(
        self,
        until: Instant,
        may_go_on: impl Fn() -> Result<(), Stopped>,
    ) -> Result<Option<Found>, Stopped> {
        let is_over = Arc::new(AtomicBool::new(false));
        let goes_on = Arc::clone(&is_over);
        let goes_on = move || !goes_on.load(Ordering::SeqCst) && Instant::now() < until;
        let found = within(
            ("redo-last", Some(until + LATE_MAX)),
            may_go_on,
            move || self.work(goes_on),
        );
        // Whoever is not waited for any more does no more than it has begun.
        is_over.store(true, Ordering::SeqCst);
        match found? {
            Some(found) => Ok(found?),
            None => Err(
                "its new image, or its redo log, did not answer in time while its guest waited, which works on with the disk as it is: see to the storage, and try again"
                    .into(),
            ),
        }
    }

    fn work(self, goes_on: impl Fn() -> bool) -> Result<Option<Found>, String> {
        let from = self.place.get();
        let from = from.open_unlocked(&self.images, &self.images.top)?;
        let into = Target::Raw(self.copy.as_fd(), self.images.bytes);
        let merged = merge(&from, into, false, |_| goes_on().then_some(AT_ONCE_MAX));
        if merged.map_err(|error| error.to_string())?.is_none() {
            return Ok(None);
        }
        let told = |error: std::io::Error| format!("{}: {error}", self.path.display());
        Ok(Some(Found {
            image: identity_of(&self.path).map_err(told)?,
            bytes: length_of(&self.path).map_err(told)?,
        }))
    }
}

/// What a disk was asked to do while its guest waits; nothing where a request, or its storage, takes so long that its guest works on first.
pub(super) fn in_time<T>(asked: Result<T, godwit_vhost::Error>) -> Result<Option<T>, Stopped> {
    match asked {
        Ok(done) => Ok(Some(done)),
        Err(godwit_vhost::Error::NotDurable { .. } | godwit_vhost::Error::Busy { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_does_not_rest_or_is_not_durable_in_time_is_left_for_later_and_what_failed_ends_the_move()
     {
        let waited = Duration::from_millis(500);
        assert!(in_time(Ok(7)).is_ok_and(|done| done == Some(7)));
        for slow in [
            godwit_vhost::Error::NotDurable { waited },
            godwit_vhost::Error::Busy {
                under_way: 1,
                waited,
            },
        ] {
            assert!(in_time::<()>(Err(slow)).is_ok_and(|done| done.is_none()));
        }
        let failed = in_time::<()>(Err(godwit_vhost::Error::Ended));
        assert!(matches!(failed, Err(Stopped::Failed(_))));
    }
}
