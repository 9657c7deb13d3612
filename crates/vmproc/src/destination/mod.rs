//! The destination's side of a migration.
//!
//! `handle` is what the VM's thread holds, `driver` runs the migration on the channels of crate `streams`, `messages` is
//! what it does at each word of the source, `loading` what becomes of device state, `last_words` what something else may overtake.

mod driver;
mod handle;
mod last_words;
mod loading;
mod messages;

pub(crate) use handle::{DestinationHandle, DestinationParts, WaitingQemu};
