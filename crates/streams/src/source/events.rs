//! What a connection set tells the driver that owns it.
//!
//! Owns nothing. The set's threads send and never wait; a driver that is gone is noticed by [`TellDriver`].

use super::hearing::Seat;
use super::sender::PassEnd;
use godwit_migrate::protocol::ToSource;
use godwit_transport::TransportError;
use std::sync::Arc;
use std::time::Instant;

/// Something that happened on the channels of one set.
#[derive(Debug)]
pub struct SetEvent {
    /// Its number: events of a set that is gone may still be on their way.
    pub set: u16,
    pub what: Happened,
}

/// What it was that happened.
#[derive(Debug)]
pub enum Happened {
    /// A sender finished a pass.
    PassEnd(Box<PassEnd>),
    /// Something came on the control channel, at this time.
    Peer { from: FromPeer, at: Instant },
}

/// What the control channel's reader passes on.
#[derive(Debug)]
pub enum FromPeer {
    /// A message, and its place among those that wait.
    Said(Box<ToSource>, Seat),
    /// The channel is gone; it may be made again.
    Lost(String),
    /// The peer broke the protocol: the migration ends.
    Broken(String),
}

impl FromPeer {
    /// How a channel's error counts.
    pub fn of(error: &TransportError) -> Self {
        match error.class().is_lost() {
            true => Self::Lost(error.to_string()),
            false => Self::Broken(error.to_string()),
        }
    }
}

/// Where a set's events go; `false`: the driver is gone.
pub type TellDriver = Arc<dyn Fn(SetEvent) -> bool + Send + Sync>;
