//! Filters: each in a file of its own, small, and tested alone.
//!
//! [`Statistics`] is the one to copy from. [`Delay`] and [`Fault`] are for tests: they make a disk slow, or broken.

mod delay;
mod fault;
mod statistics;
mod throttle;

pub use delay::Delay;
pub use fault::Fault;
pub use statistics::{Count, Counts, Statistics};
pub use throttle::{Limits, Throttle};
