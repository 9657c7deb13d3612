//! Faults on purpose, which the model test must find; never in a product build.
//!
//! Owns nothing. Refuses nothing.

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// Entries are written before the data that they tell of is durable.
    EntryBeforeData,
    /// What an entry says is looked up when it is written, not when the round began.
    CapturedLate,
    /// Nobody waits for a write that fills a grain.
    FillNotExcluded,
    /// A grain counts as present when its write begins.
    PresentBeforeWritten,
    /// A grain that was absent stays so though it is zeroed.
    ZeroLost,
    /// A flush that comes during a round is answered with it.
    FlushJoinsRound,
    /// A durable change is answered without a round.
    DurableWithoutRound,
    /// What fills a grain is taken from the base, whatever lies between.
    FillFromBase,
    /// Blocks count as written once a round begins.
    UnmarkedEarly,
    /// A block that changed during a round counts as written after it.
    ChangeDuringRoundForgotten,
    /// The blocks of a round that failed count as written.
    FailedRoundForgotten,
    /// A write that failed makes its grains present.
    FailedWriteCounts,
    /// After a sync that failed the next one counts.
    LossForgotten,
    /// The last round is answered before its entries are durable.
    NoSecondSync,
}

/// Whether a fault is planted.
#[cfg(feature = "planted-faults")]
macro_rules! planted {
    ($owner:expr, $plant:ident) => {
        $owner.plant == Some(crate::Plant::$plant)
    };
}
#[cfg(not(feature = "planted-faults"))]
macro_rules! planted {
    ($owner:expr, $plant:ident) => {
        false
    };
}
