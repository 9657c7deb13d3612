//! The destination's side of a migration.
//!
//! `driver` runs it, `receiver` is one data channel's thread, `memory` allocates guest RAM ahead of the stream,
//! `arrivals` are the channels that prove themselves, `channels` those of one connection set, `loading` is what becomes
//! of device state.

pub(crate) mod arrivals;
mod channels;
pub(crate) mod driver;
mod loading;
pub(crate) mod memory;
mod progress;
mod receiver;
