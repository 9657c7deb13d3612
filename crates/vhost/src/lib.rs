//! Disks of a guest as vhost-user-blk devices.
//!
//! What it is for: QEMU keeps the PCI device, and connects to a [`Disk`] of ours, which owns the queues behind it: a thread
//! for each disk takes the guest's requests out of them, lets them go through a stack of `godwit-blockio`, and puts the
//! outcomes back.
//!
//! Who owns the state: a disk's thread owns its connection, its queues and its stack. Which requests are under way stands in
//! a memory that QEMU keeps, too ([`inflight`]), so that a successor of a killed process carries them out again.
//!
//! What it refuses: anything that is not as it should be, from QEMU (the connection ends) and from the guest (the request
//! fails, or the queue stops until the guest resets its device): never more than that guest's own disk.

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    target_endian = "little"
)))]
compile_error!("godwit-vhost needs 64-bit little-endian Linux");

pub mod block;
mod connection;
mod dialogue;
mod disk;
mod error;
mod full;
mod handle;
mod handover;
pub mod inflight;
mod layers;
mod listener;
pub mod message;
mod own_image;
mod queue;
pub mod ring;
mod rouse;
mod session;
mod shared_area;
mod unheard;

pub use disk::Settings;
pub use error::Error;
pub use handle::{Disk, Standing, Status};
pub use handover::{Handover, Told};

/// Most queues of a disk.
pub const QUEUES_MAX: u16 = 16;
/// Largest ring that is served, whatever size was agreed on: QEMU 10 gives a ring of 1024 entries after firmware has used the
/// disk, also if it said 256 before.
pub const RING_MAX: u16 = 1024;
