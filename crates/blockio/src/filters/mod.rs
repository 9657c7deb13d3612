//! Filters: each in a file of its own, small, and tested alone.
//!
//! [`Statistics`] is the one to copy from. [`Mirroring`] copies a disk while its guest works with it, and [`DirtyTracking`] does so in another way, for the laboratory. [`Delay`] and [`Fault`] are for tests: they make a disk slow, or broken.

mod content;
mod copying;
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
mod sending;
mod statistics;
mod still;
mod throttle;
mod top_only;
mod tracked;
mod tracking;
mod unwritten;
mod waits;

pub(crate) use content::runs;
pub use course::{Course, GuestWrites};
pub use delay::Delay;
pub use fault::Fault;
pub use mirroring::Mirroring;
pub(crate) use outlet::COPIES;
pub use outlet::{Change, Origin, Outlet, PATIENCE};
pub(crate) use overlaying::Overlaying;
pub(crate) use pace::LOOK_EVERY;
pub use pace::{Beside, Bottleneck, Pace, WaitTimes};
pub use sending::{Sending, flush_early};
pub use statistics::{Count, Counts, Statistics};
pub use still::Still;
pub use throttle::{Limits, SharedLimits, Throttle};
pub use top_only::{TopOnly, untouched};
pub use tracking::DirtyTracking;

/// Bytes of a disk that are copied under one lock. A write waits for the copy of what it touches, and with larger ones more writes wait for
/// longer.
pub const REGION: u64 = 256 << 10;
