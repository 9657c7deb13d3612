//! The source's side of a migration.
//!
//! `driver` runs it, `precopy` is its iterations, `epoch` a set of channels, `sender` one channel's thread, `pass` the
//! work they share, `tracking` what the guest wrote.

pub(crate) mod driver;
pub(crate) mod epoch;
mod pass;
mod precopy;
mod sender;
pub(crate) mod tracking;
mod unacked;
