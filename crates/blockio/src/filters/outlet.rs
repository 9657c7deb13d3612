//! What a mirroring or a dirty block tracking gives a disk's changes to: a second image of the same host, or a link to another one.
//!
//! Owns nothing. Whoever implements it refuses nothing that is given: whoever gives asks first whether there is room.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::Buffer;

/// Regions that are copied at once beside a guest that does nothing, or much.
pub(crate) const COPIES: usize = godwit_mirror::COPIES_MAX;

/// What becomes of bytes at the destination.
#[derive(Debug, Clone)]
pub enum Change {
    /// They are those of the buffer from here on.
    Written(Arc<Buffer>, usize),
    Zeroed,
}

/// Whose change it is. Each kind has room of its own, so that neither keeps the other out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Guest,
    Copy,
}

/// A guest waits for no longer than this for a destination.
pub const PATIENCE: Duration = Duration::from_millis(500);

/// What takes a disk's changes, in the order in which the source began them.
pub trait Outlet: Send {
    /// Whether it does not answer: nobody waits for it then.
    fn is_silent(&mut self) -> bool;

    /// Whether there is room for such a change; never while it is silent.
    fn takes(&mut self, origin: Origin) -> bool;

    /// How many regions may be read for it at once now.
    fn region_limit(&mut self) -> usize {
        match self.takes(Origin::Copy) {
            true => COPIES,
            false => 0,
        }
    }

    /// Whether most of what may be under way to it is: a copying is as fast as it then.
    fn is_behind(&mut self) -> bool {
        !self.takes(Origin::Copy)
    }

    /// Clones these bytes of the source at any time from now on, as they are then: whatever is changed of them later is given, too.
    /// Returns whether it does.
    fn try_clone(&mut self, _range: &Range<u64>) -> bool {
        false
    }

    /// Takes a change. One that is given later is later there, too. What may not come there is told by [`Course::lose`].
    fn give(&mut self, origin: Origin, range: Range<u64>, change: Change);

    /// How long a write may wait for it; after that nobody waits for a while.
    fn patience(&self) -> Duration {
        PATIENCE
    }

    /// Whether it says when it has carried a write out ([`Self::take_ended`]), and the guest waits for that, as it does for a
    /// flush. Where not, what was given counts as carried out.
    fn confirms(&self) -> bool {
        false
    }

    /// Whether it may be the only one that is left one day: then both sides count as equal once what it has is durable.
    fn may_be_left_alone(&self) -> bool {
        false
    }

    /// Somebody has waited for it for too long.
    fn kept_waiting(&mut self) {}

    /// As [`Self::give`], for the guest's write of this number. Returns whether it will tell of it in [`Self::take_ended`].
    fn give_write(&mut self, _number: u64, range: Range<u64>, change: Change) -> bool {
        self.give(Origin::Guest, range, change);
        false
    }

    /// Makes durable what it has confirmed before, and what was given as copied before where it [`Self::may_be_left_alone`], and confirms
    /// that with this number. Returns whether it will.
    fn flush(&mut self, _number: u64) -> bool {
        false
    }

    /// What it has carried out since this was called last, and what it has told [`Course::lose`] of. What has failed is never told of: it ends
    /// the mirroring.
    fn take_ended(&mut self) -> Vec<u64> {
        Vec::new()
    }

    /// Becomes readable each time that there is something to take.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
