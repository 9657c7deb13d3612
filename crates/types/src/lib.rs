//! The vocabulary that every other crate shares: identifiers, VM and host descriptions, requests, reports and
//! error codes.
//!
//! Pure data: no IO, no clock, no threads. Refuses: anything that is only one crate's business.
#![forbid(unsafe_code)]

pub mod audit;
pub mod base64_bytes;
pub mod certificate;
pub mod clones;
pub mod console;
pub mod control_api;
pub mod cpu;
pub mod datastore;
pub mod disk_activity;
pub mod disk_move;
pub mod disk_resize;
pub mod disk_to_move;
pub mod drain;
pub mod error;
pub mod forecast;
pub mod guest;
pub mod host;
pub mod host_api;
pub mod ids;
pub mod image;
pub mod load;
pub mod migration;
mod named;
pub mod plant;
mod round;
pub mod site;
pub mod snapshots;
mod switchover;
pub mod text;
pub mod version;
pub mod vm;

pub use error::{ApiError, ErrorCode};
pub use ids::{
    DatastoreName, Generation, HostName, InvalidName, MigrationId, PortGroup, SnapshotName, VmName,
};
pub use vm::VmSpec;

/// Bytes of a guest page: what is tracked, sent and counted.
pub const PAGE_BYTES: u64 = 4096;

/// Bytes in a second of a speed in Mb/s, in which people and network cards give it.
pub fn bytes_per_s(mbit_per_s: u64) -> f64 {
    mbit_per_s as f64 * 125_000.0
}
