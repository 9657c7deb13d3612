//! What carries a migration between two hosts: control and data channels, and the threads on them.
//!
//! At the source a [`source::ConnectionSet`] is a control channel and data channels that are made together and lost
//! together; its threads send a [`source::Pass`] over guest memory and tell events to whoever drives the migration. At
//! the destination [`destination::Arrivals`] takes in connections that prove themselves and [`destination::Channels`]
//! are the receiving threads, which write into [`destination::Memory`].
//!
//! Owns threads and channels, and per channel what was not yet acknowledged as applied. Refuses: to decide what comes
//! next in a migration, which is its drivers' business, and who may run the VM. Knows no QEMU.
#![forbid(unsafe_code)]

#[cfg(test)]
#[path = "../tests/common/alone.rs"]
mod alone;
mod control;
mod control_slot;
pub mod destination;
pub mod faults;
mod priority;
pub mod source;
#[cfg(test)]
mod testing;

pub use control::SharedControl;
pub use control_slot::ControlSlot;
pub use priority::cores;
