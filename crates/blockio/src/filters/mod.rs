//! Filters: each in a file of its own, small, and tested alone.
//!
//! [`Statistics`] is the one to copy from. [`Mirroring`] copies a disk while its guest works with it. [`Delay`] and [`Fault`] are for tests: they make a disk slow, or broken.

mod content;
mod course;
mod delay;
mod fault;
#[cfg(test)]
mod keeps;
mod mirroring;
mod outlet;
mod overlaying;
mod pace;
mod pieces;
mod statistics;
mod throttle;
mod waits;

pub use course::{Course, GuestWrites};
pub use delay::Delay;
pub use fault::Fault;
pub use mirroring::Mirroring;
pub use outlet::{Change, Origin, Outlet, PATIENCE};
pub(crate) use overlaying::Overlaying;
pub use pace::{Bottleneck, Pace, WaitTimes};
pub use statistics::{Count, Counts, Statistics};
pub use throttle::{Limits, SharedLimits, Throttle};

/// Bytes of a disk that are copied under one lock. A write waits for the copy of what it touches, and with larger ones more writes wait for
/// longer.
pub const REGION: u64 = 256 << 10;
