//! The destination's side of a migration.
//!
//! `driver` runs it on the channels of crate `streams`, `loading` is what becomes of device state.

pub(crate) mod driver;
mod loading;
