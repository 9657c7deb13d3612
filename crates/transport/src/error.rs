//! The one error of this crate, and what a driver does about it.
//!
//! Drivers decide by [`TransportError::class`], never by text.

use godwit_wire::{Blame, ChannelId, WireError};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// What follows from an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Class {
    /// The peer, or somebody between, broke the protocol: the migration ends.
    Peer,
    /// The peer speaks another version: the migration cannot begin.
    Incompatible,
    /// The channel is gone, the peer may be well: it may be made again under a new id.
    Lost,
    /// This host lacks something, or this side misused the crate.
    Local,
    /// This side closed the channel itself.
    Cancelled,
}

impl Class {
    /// Whether only the channel is gone, by whoever's hand: what it carried may be sent again on another.
    pub fn is_lost(self) -> bool {
        matches!(self, Self::Lost | Self::Cancelled)
    }
}

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The bytes that came, or were to be sent, make no valid record.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// No port of the range could be bound.
    #[error(
        "cannot listen on {address} at any port from {first} to {last} (at the last: {source}): free one or configure another range"
    )]
    Bind {
        address: IpAddr,
        first: u16,
        last: u16,
        /// What the last one failed with.
        source: io::Error,
    },
    /// The connection was not made.
    #[error(
        "cannot connect to {peer} ({source}): check that the migration networks of both hosts reach each other, and that no firewall is between them"
    )]
    Connect { peer: SocketAddr, source: io::Error },
    /// The peer did not finish the handshake in time.
    #[error(
        "{peer} takes the connection and did not answer the handshake within {ms} ms: check that nothing between the migration networks of both hosts holds packets back, and that its host is not stuck"
    )]
    HandshakeSilent {
        peer: SocketAddr,
        /// How long this side waited.
        ms: u64,
    },
    /// The peer closed during the handshake.
    #[error(
        "{peer} closed the connection during the handshake: it does not expect this migration, or is no godwit host"
    )]
    HandshakeClosed { peer: SocketAddr },
    /// No channel was made by the peer in time.
    #[error("no channel was opened within {ms} ms; strangers turned away: {strangers}{last}")]
    AcceptDeadline {
        /// How long this side waited.
        ms: u64,
        /// How many connections were refused meanwhile.
        strangers: u64,
        /// The last one and why, or nothing.
        last: String,
    },
    /// Nothing came for too long.
    #[error("channel {channel}: nothing came for {ms} ms")]
    Silent {
        channel: ChannelId,
        /// How long this side waited.
        ms: u64,
    },
    /// The peer, or the network, took nothing for too long.
    #[error("channel {channel}: nothing could be sent for {ms} ms")]
    Stalled {
        channel: ChannelId,
        /// How long this side waited.
        ms: u64,
    },
    /// The peer closed without a final record.
    #[error("channel {channel} was closed at byte {offset} of record {counter}, before its end")]
    Closed {
        channel: ChannelId,
        /// The record that was due.
        counter: u64,
        /// How many bytes of it had come.
        offset: usize,
    },
    #[error("channel {channel} failed: {source}")]
    Broken {
        channel: ChannelId,
        source: io::Error,
    },
    /// An earlier send or receive failed halfway: this half cannot be used any more.
    #[error("channel {channel} cannot be used after its earlier error")]
    Unusable { channel: ChannelId },
    /// This side closed it.
    #[error("the channel was closed by this host")]
    Cancelled,
    /// This side's own mistake.
    #[error("channel {channel}: {what}")]
    Misuse {
        channel: ChannelId,
        what: &'static str,
    },
    /// The system refused a socket operation.
    #[error("cannot {doing}: {source}")]
    System {
        doing: &'static str,
        source: io::Error,
    },
}

impl TransportError {
    /// What follows from it.
    pub fn class(&self) -> Class {
        match self {
            Self::Wire(error) => match error.blame() {
                Blame::Peer => Class::Peer,
                Blame::Incompatible => Class::Incompatible,
                Blame::Lost => Class::Lost,
                _ => Class::Local,
            },
            Self::Connect { .. }
            | Self::HandshakeSilent { .. }
            | Self::HandshakeClosed { .. }
            | Self::AcceptDeadline { .. }
            | Self::Silent { .. }
            | Self::Stalled { .. }
            | Self::Closed { .. }
            | Self::Broken { .. }
            // Its first error said more.
            | Self::Unusable { .. } => Class::Lost,
            Self::Bind { .. }
            | Self::Misuse { .. }
            | Self::System { .. } => Class::Local,
            Self::Cancelled => Class::Cancelled,
        }
    }

    pub(crate) fn system(doing: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System {
            doing,
            source: errno.into(),
        }
    }
}
