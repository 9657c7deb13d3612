//! The source's side of a migration.
//!
//! `handle` is what the VM's thread holds, `driver` runs the migration on the channels of crate `streams`, `steps` is what
//! it hears, `connect` makes its channels, `layers` sends what lies below the tops of disks with snapshots, `precopy` is its iterations, `switchover` the last of them and the device state.

mod connect;
mod disks;
mod driver;
mod handle;
mod layers;
mod precopy;
mod steps;
mod switchover;
mod variables;

pub(crate) use handle::{Command, SourceHandle, SourceParts};
