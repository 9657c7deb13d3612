//! A load on a disk's vhost-user socket, without a guest, and a check of what became of its writes.
//!
//! Each block that is written says which block it is and which write it was ([`log`]), so that an image can be held against the
//! log of acknowledged writes, and every read against it at once. [`Running`] keeps so many requests under way on a thread of
//! its own and remembers when each one ended; [`course`] makes figures of that. The rings and the messages are in code of this
//! crate's own ([`ring`], [`front_end`]): what checks a back end shares nothing with it.
//!
//! Who owns the state: a running load owns its connection, its mapping of the shared memory and its log, and gives the log
//! back at its end. Refuses: two requests for one block at a time where one of them writes, so that the log says exactly what
//! each block holds.

pub mod course;
pub mod front_end;
pub mod log;
pub mod ring;
mod run;
mod skew;

pub use run::{Ended, Load, Order, Place, Running};

/// Bytes of a sector, the unit in which a block can be torn.
pub const SECTOR: usize = 512;
/// Bytes of the memory that a load shares with its back end.
pub const MEMORY_BYTES: u64 = 32 << 20;
/// Most requests that are under way at a time.
pub const OUTSTANDING_MAX: usize = 64;
