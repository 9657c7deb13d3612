//! TCP channels that carry [`godwit_wire`]'s records between the two VM processes of a migration.
//!
//! Owns the sockets: set-up with authentication on both sides, sending and receiving with deadlines, and counting
//! what limits them. Knows nothing of migrations. Refuses: strangers, within a bounded time and number and without
//! disturbing the channels that belong; and any wait without an end.
//!
//! - [`Gate`] is what a destination expects; a [`Listener`] lets in who belongs; [`connect`] is the other side.
//! - A [`Connection`] splits into a [`RecordReader`] and a [`RecordWriter`] for two threads, or into a
//!   [`ControlSender`] and [`ControlReceiver`]. A [`Closer`] unblocks both from a third thread.
//! - [`Meter`]s tell from any thread how many bytes went by and how long each half waited.
#![forbid(unsafe_code)]

mod connect;
mod control;
mod error;
mod listen;
mod pipe;
mod reader;
mod socket;
mod writer;

pub use connect::{ConnectOptions, Connection, connect};
pub use control::{ControlReceiver, ControlSender, Incoming};
pub use error::{Class, TransportError};
pub use listen::{Gate, Listener, ListenerCloser, PENDING_MAX, Strangers};
pub use pipe::{Closer, Meter, MeterReading, Patience};
pub use reader::{Record, RecordReader};
pub use socket::{Granted, Tuning};
pub use writer::RecordWriter;
