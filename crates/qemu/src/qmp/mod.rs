//! QEMU's machine protocol (QMP): a parser for its lines, and a client that owns one connection.
//!
//! [`parser`] is pure; [`Client`] owns a socket and one reader thread; [`Events`] is one listener's bounded queue.

mod client;
mod error;
mod events;
pub mod parser;

pub use client::{Client, Pending};
pub use error::QmpError;
pub use events::{Event, EventKind, Events, EventsError};
