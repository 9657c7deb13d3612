//! How others than the disk's thread follow the copying of a disk, by whatever method: how far it is, at what pace, and what becomes of it.
//!
//! Owned by the disk's thread and by whoever moves the disk, together. Refuses nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pace::{Pace, WaitTimes};
use super::tracked::Tracked;

/// A copying of a disk as others see and steer it. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Course(pub(super) Arc<Shared>);

#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) begun: AtomicBool,
    pub(super) given_up: AtomicBool,
    pub(super) synchronised: AtomicBool,
    is_unreadable: AtomicBool,
    /// [`FREE`], [`WANTED`], [`BOUND`] or [`PARTED`].
    binding: AtomicU8,
    /// What the destination was given and may not have. Whoever looks whether both sides are equal looks here, too.
    pub(super) lost: Mutex<Vec<Range<u64>>>,
    pub(super) left_bytes: AtomicU64,
    /// Bytes that the guest wrote since it was put in place,
    pub(super) guest_bytes: AtomicU64,
    /// and those of them that went to both sides.
    pub(super) mirrored_bytes: AtomicU64,
    /// Bytes that are zero on both sides.
    pub(super) zero: Mutex<Vec<Range<u64>>>,
    pub(super) failure: Mutex<Option<String>>,
    pub(super) pace: Pace,
    pub(super) wait_times: Mutex<WaitTimes>,
    /// Of a disk whose writes are tracked, and not mirrored.
    pub(super) tracked: Tracked,
}

/// Whether the destination may be left out.
const FREE: u8 = 0;
/// Not from the next moment on in which both sides are equal,
const WANTED: u8 = 1;
/// and not before it is released.
const BOUND: u8 = 2;
/// Nor then, though the two sides have become unlike since.
const PARTED: u8 = 3;

/// Bytes that a guest wrote to a disk that is copied.
#[derive(Debug, Clone, Copy, Default)]
pub struct GuestWrites {
    /// To one side or to both,
    pub bytes: u64,
    /// and what the destination got of it, too.
    pub mirrored: u64,
}

impl Course {
    /// Of a copying that is no faster than this.
    pub fn at(pace: &Pace) -> Self {
        Self(Arc::new(Shared {
            pace: pace.clone(),
            ..Shared::default()
        }))
    }

    /// Lets it begin. These bytes, and those of earlier calls, are zero on both sides as long as nobody has written them
    /// since the filter was put in place.
    pub fn begin(&self, zero: impl IntoIterator<Item = Range<u64>>) {
        lock(&self.0.zero).extend(zero);
        self.0.begun.store(true, Ordering::Release);
    }

    /// Ends it: everything goes to the source alone.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
    }

    /// From the next moment on in which both sides are equal nothing is answered that the destination has not, whatever becomes of
    /// it, until [`Self::unbind`]. For a destination that confirms what it has.
    pub(crate) fn bind(&self) {
        self.turn_binding(FREE, WANTED);
    }

    /// Whether it is so.
    pub(crate) fn is_bound(&self) -> bool {
        matches!(self.0.binding.load(Ordering::Acquire), BOUND | PARTED)
    }

    /// Whether it is so, and both sides have been equal since.
    pub(crate) fn is_bound_and_equal(&self) -> bool {
        self.0.binding.load(Ordering::Acquire) == BOUND && self.is_synchronised()
    }

    /// A destination that does not answer, or fails, may be left out again.
    pub(crate) fn unbind(&self) {
        self.0.binding.store(FREE, Ordering::Release);
    }

    /// They are not, be it for a moment.
    pub(super) fn has_parted(&self) {
        self.turn_binding(BOUND, PARTED);
    }

    /// Both sides are equal now.
    pub(super) fn may_bind(&self) {
        self.turn_binding(WANTED, BOUND);
    }

    /// Nothing changes where it was another.
    fn turn_binding(&self, from: u8, to: u8) {
        let (binding, ok) = (&self.0.binding, Ordering::AcqRel);
        let _ = binding.compare_exchange(from, to, ok, Ordering::Acquire);
    }

    /// Whether both sides are equal but for what is under way.
    pub fn is_synchronised(&self) -> bool {
        let lost = lock(&self.0.lost);
        lost.is_empty() && self.0.synchronised.load(Ordering::Acquire) && self.failure().is_none()
    }

    /// What the destination was given of these bytes may not come: from now on the two sides are not equal before they were
    /// copied again.
    pub fn lose(&self, range: Range<u64>) {
        lock(&self.0.lost).push(range);
    }

    /// What was lost, to be copied again.
    pub fn take_lost(&self) -> Vec<Range<u64>> {
        let mut lost = lock(&self.0.lost);
        if !lost.is_empty() {
            // Before the list is empty again for whoever looks.
            self.0.synchronised.store(false, Ordering::Release);
        }
        std::mem::take(&mut *lost)
    }

    /// Whether something was lost and not taken yet.
    pub fn has_lost(&self) -> bool {
        !lock(&self.0.lost).is_empty()
    }

    /// Bytes that are still to be copied.
    pub fn left_bytes(&self) -> u64 {
        self.0.left_bytes.load(Ordering::Relaxed)
    }

    /// What the guest wrote so far.
    pub fn guest_writes(&self) -> GuestWrites {
        GuestWrites {
            bytes: self.0.guest_bytes.load(Ordering::Relaxed),
            mirrored: self.0.mirrored_bytes.load(Ordering::Relaxed),
        }
    }

    /// What the copying has waited for so far.
    pub fn wait_times(&self) -> WaitTimes {
        *lock(&self.0.wait_times)
    }

    /// Ends it, since one side is of no use: for the first reason that is given.
    pub fn fail(&self, reason: String) {
        lock(&self.0.failure).get_or_insert(reason);
        self.give_up();
    }

    /// Ends it, since the source could not be read.
    pub(super) fn fail_to_read(&self, reason: String) {
        self.0.is_unreadable.store(true, Ordering::Release);
        self.fail(reason);
    }

    /// Whether a part of the source could not be read.
    pub fn is_unreadable(&self) -> bool {
        self.0.is_unreadable.load(Ordering::Acquire)
    }

    /// Why it has ended by itself, if it has.
    pub fn failure(&self) -> Option<String> {
        lock(&self.0.failure).clone()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
