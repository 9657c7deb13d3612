//! TCP channels that carry [`godwit_wire`]'s records between the two VM processes of a migration.
//!
//! Owns the sockets: set-up with authentication on both sides, sending and receiving with deadlines, and counting
//! what limits them. Knows nothing of migrations. Refuses: strangers, within a bounded time and number and without
//! disturbing the channels that belong; and any wait without an end.
//!
//! - [`Gate`] is what a destination expects; a [`Listener`] lets in who belongs; [`connect`] is the other side.
//! - A [`Connection`] splits into a [`RecordReader`] and a [`RecordWriter`] for two threads, or into a
//!   [`ControlSender`] and [`ControlReceiver`]. A [`Closer`] unblocks both from a third thread.
//! - A [`Probe`] tells what the kernel measured of the link: round trip, delivery, repetitions, and what it waited for.
//! - [`Meter`]s tell from any thread how many bytes went by and how long each half waited.
#![deny(unsafe_code)]

mod connect;
mod control;
mod error;
#[allow(unsafe_code, reason = "socket options that no safe wrapper knows")]
mod kernel;
mod link;
mod listen;
mod pipe;
mod reader;
mod socket;
mod writer;

pub use connect::{ConnectOptions, Connection, Dialed, connect, dial, interface_of};
pub use control::{ControlReceiver, ControlSender, Incoming};
pub use error::{Class, TransportError};
pub use link::{LinkReading, Probe};
pub use listen::{Gate, Listener, ListenerCloser, PENDING_MAX, Strangers};
pub use pipe::{Closer, Meter, MeterReading, Patience};
pub use reader::{Record, RecordReader};
pub use socket::{Granted, Tuning};
pub use writer::RecordWriter;
