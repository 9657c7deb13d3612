//! Faults on purpose, which the model test must find; never in a product build.
//!
//! Owns nothing. Refuses nothing.

#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A log is put over the disk before it is durable.
    PutOverBeforeMade,
    /// A log that was frozen is not consolidated.
    LogForgotten,
    /// The guest is held, and what it wrote last is not consolidated.
    LastLogForgotten,
    /// What the guest wrote last is consolidated while it writes on.
    NotHeld,
    /// A guest that writes faster than its logs are consolidated is not slowed.
    NeverSlowed,
    /// The guest may wait for as long as it takes.
    WaitsForEver,
    /// There is no bound on the number of logs.
    LogsForEver,
    /// Logs that shrink are enough, however many it would take.
    LogsNotCounted,
}

/// Whether a fault is planted.
#[cfg(feature = "planted-faults")]
macro_rules! planted {
    ($redo:expr, $plant:ident) => {
        $redo.plant == Some(crate::Plant::$plant)
    };
}
#[cfg(not(feature = "planted-faults"))]
macro_rules! planted {
    ($redo:expr, $plant:ident) => {
        false
    };
}
