//! Faults on purpose, which the model test must find; never in a product build.
//!
//! Owns nothing. Refuses nothing.

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A block's bit is cleared once its copy has ended, and not before it is read.
    ClearedAfterCopy,
    /// A write marks what it touches when it begins, and not when it ends.
    NotMarkedAtEnd,
    /// Blocks that are left out for being hot are never copied.
    HotForgotten,
    /// A block that is being read counts as one that the pass has not reached.
    ReadCountsAsAhead,
    /// Both sides count as equal while a copy is under way,
    EqualBesideCopy,
    /// or while a write is.
    EqualBesideWrite,
    /// What the destination has lost is not copied again.
    LossForgotten,
    /// An iteration begins while copies of the one before are under way.
    NoBarrier,
    /// A write that failed is taken for one that changed nothing.
    FailureForgotten,
    /// A write marks the block in which it begins, and no other.
    FirstBlockAlone,
    /// What was written before the first pass began is not tracked, though it is a hole for that pass.
    HoleWritesForgotten,
    /// One burst of writes gives up a disk whose guest could be held.
    BurstEndsIt,
    /// A disk whose guest bursts again and again is never given up.
    BurstsForgivenForEver,
}

/// Whether a fault is planted.
#[cfg(feature = "planted-faults")]
macro_rules! planted {
    ($tracking:expr, $plant:ident) => {
        $tracking.plant == Some(crate::Plant::$plant)
    };
}
#[cfg(not(feature = "planted-faults"))]
macro_rules! planted {
    ($tracking:expr, $plant:ident) => {
        false
    };
}
