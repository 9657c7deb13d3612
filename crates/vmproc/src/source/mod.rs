//! The source's side of a migration.
//!
//! `driver` runs it on the channels of crate `streams`, `precopy` is its iterations.

pub(crate) mod driver;
mod precopy;
