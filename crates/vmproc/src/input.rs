//! Everything that reaches the VM's own thread, which alone changes the VM's state.
//!
//! Owns nothing. Other threads (socket, QEMU's events, the migration's driver) only send.

use godwit_ownership::{Event, PeerMessage};
use godwit_types::host_api::{VmAnswer, VmRequest};
use std::sync::mpsc::SyncSender;

/// A request and where its answer goes.
#[derive(Debug)]
pub(crate) struct Request {
    pub request: VmRequest,
    pub reply: SyncSender<VmAnswer>,
}

/// What QEMU did by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GuestNews {
    /// The guest powered itself off.
    Shutdown,
    /// The guest panicked, or an internal error stopped it.
    Halted(String),
    /// The guest reset itself.
    Reset,
    /// QEMU is gone.
    Died,
}

/// What the migration's driver reports. `run` tells one driver from the next.
#[derive(Debug)]
pub(crate) struct DriverNews {
    pub run: u64,
    pub news: News,
}

/// The news themselves.
#[derive(Debug)]
pub(crate) enum News {
    /// (source) Channels are up and the copying begins.
    Began {
        switchover_wait: std::time::Duration,
    },
    /// (source) What is left fits the promise.
    Converged,
    /// Something for the ownership core.
    Core(Event),
    /// The peer said something about ownership, on the control channel.
    Peer(PeerMessage),
    /// (destination) The guest's addresses, as the source knows them.
    Addresses(Vec<Vec<std::net::IpAddr>>),
    /// Anything arrived from the peer: silence is over.
    Heard,
    /// The driver gives up, with its reason.
    Failed(String),
}

/// An input of the VM's thread.
#[derive(Debug)]
pub(crate) enum Input {
    /// From the socket.
    Request(Request),
    /// From QEMU number `launch`.
    Guest { launch: u64, news: GuestNews },
    /// From the migration's driver.
    Driver(DriverNews),
    /// The guest's writes were measured.
    Measured,
}
