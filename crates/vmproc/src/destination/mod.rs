//! The destination's side of a migration.
//!
//! `driver` runs it, `receiver` is one data channel's thread, `memory` allocates guest RAM ahead of the stream,
//! `arrivals` are the channels that prove themselves.

pub(crate) mod arrivals;
pub(crate) mod driver;
pub(crate) mod memory;
mod progress;
mod receiver;
