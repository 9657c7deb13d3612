//! Faults on purpose, which the model test must find; never in a product build.
//!
//! Owns nothing. Refuses nothing.

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A region is read while writes that were begun before touch it.
    NoDrain,
    /// A write to a region that is being copied is not held.
    NotHeld,
    /// Nor is one of zeroes, though others are.
    ZeroesNotHeld,
    /// A write that waited until a region was copied goes to the source alone.
    QueuedToTheSourceAlone,
    /// A write that touches copied and other regions goes to the source alone.
    StraddlingToTheSourceAlone,
    /// A write does not wait for an older one that it overlaps.
    OverlapReordered,
    /// A write is answered once the source has it.
    AnsweredEarly,
    /// What was written while the destination was silent is not copied again.
    SilenceForgotten,
    /// A copy that was begun before the destination fell silent counts when it ends.
    OldCopyCounts,
    /// The regions of a write to both sides that failed at the source are not copied again.
    FailureForgotten,
    /// The mirror does not hear of a discard.
    DiscardPasses,
    /// What is read once both sides are equal is read at the destination.
    ReadAtDestination,
    /// A flush is done at the source alone, though both sides are equal.
    FlushedAtSourceAlone,
    /// A flush of both sides is answered once the source has done it.
    FlushAnsweredAtSource,
    /// Both sides count as equal before what the destination has is durable.
    NoBase,
    /// The base of an earlier time at which both sides were equal counts for a later one.
    OldBaseCounts,
    /// A durable write is not made durable at the destination.
    DurableAtSourceAlone,
}

/// Whether a fault is planted.
#[cfg(feature = "planted-faults")]
macro_rules! planted {
    ($mirror:expr, $plant:ident) => {
        $mirror.plant == Some(crate::Plant::$plant)
    };
}
#[cfg(not(feature = "planted-faults"))]
macro_rules! planted {
    ($mirror:expr, $plant:ident) => {
        false
    };
}
