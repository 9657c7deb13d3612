//! The one error of this crate, and who is to blame for each.
//!
//! Drivers decide by [`WireError::blame`], never by text.

use crate::ChannelId;
use crate::record::RecordKind;

/// What a driver does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Blame {
    /// The peer, or somebody between, broke the protocol: the migration ends.
    Peer,
    /// The peer speaks another version: the migration cannot begin.
    Incompatible,
    /// The stream ended early: the channel may be made again under a new id.
    Lost,
    /// This side misused the crate or ran out of counters: a defect here.
    Local,
}

/// Why bytes were refused. Offsets count from the first byte of the record or message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first bytes are not ours: a port scanner, or another program.
    #[error("the peer does not speak godwit's migration protocol")]
    NotGodwit,
    #[error(
        "the peer speaks version {theirs} of the migration protocol and this host version {ours}: install the same release on both"
    )]
    Version { ours: u16, theirs: u16 },
    /// A handshake message has the wrong kind, length or content.
    #[error("malformed handshake: {what} at byte {offset}")]
    Handshake {
        what: &'static str,
        /// Where, from the start of the message.
        offset: usize,
    },
    /// The client asked for a migration that is not the one expected here.
    #[error("the peer asked for a migration that this host does not expect")]
    WrongMigration,
    /// The proof does not match: another key, nonce, cipher or transcript.
    #[error(
        "the peer could not prove that it holds the migration's key on channel {channel}: key, nonce or encryption differ, or the handshake was altered"
    )]
    Proof {
        /// The channel being set up.
        channel: ChannelId,
    },
    /// A record header that is not valid.
    #[error("malformed record {counter} on channel {channel}: {what} at byte {offset}")]
    Header {
        channel: ChannelId,
        /// The counter that was expected.
        counter: u64,
        what: &'static str,
        /// Where, from the start of the record.
        offset: usize,
    },
    /// A length above the maximum for the record's kind.
    #[error(
        "record {counter} on channel {channel} announces {length} bytes, the most allowed is {max}"
    )]
    Length {
        channel: ChannelId,
        /// The counter that was expected.
        counter: u64,
        /// The announced payload length, bytes.
        length: u32,
        /// The most this kind may have, bytes.
        max: u32,
    },
    /// A record was repeated, lost or reordered.
    #[error("record {got} on channel {channel} where {expected} was due: replayed or lost")]
    Counter {
        channel: ChannelId,
        /// The counter that was due.
        expected: u64,
        /// The counter that came.
        got: u64,
    },
    /// The authentication tag does not match.
    #[error(
        "record {counter} on channel {channel} failed authentication: altered, or sealed for another channel"
    )]
    Tag { channel: ChannelId, counter: u64 },
    /// A kind of record that may not come here.
    #[error("{kind} record {counter} on channel {channel}: {why}")]
    Unexpected {
        channel: ChannelId,
        counter: u64,
        /// The kind that came.
        kind: RecordKind,
        /// Why it may not come now.
        why: &'static str,
    },
    /// The stream ended without a final record.
    #[error("channel {channel} ended at byte {offset} of record {counter} without a final record")]
    Truncated {
        channel: ChannelId,
        /// The record that was due.
        counter: u64,
        /// How many bytes of it had come.
        offset: usize,
    },
    /// A list of pages that is not valid.
    #[error("invalid page list: {what} at byte {offset}")]
    Pages {
        what: &'static str,
        /// Where, from the start of the payload.
        offset: usize,
    },
    /// A change of a disk that is not valid.
    #[error("invalid change of a disk: {what} at byte {offset}")]
    DiskChange {
        what: &'static str,
        /// Where, from the start of the payload.
        offset: usize,
    },
    /// All counters of this key are used.
    #[error("channel {channel} has used all its record counters")]
    CountersUsedUp { channel: ChannelId },
    /// This side asked for something that makes no valid record.
    #[error("cannot make a record on channel {channel}: {what}")]
    Misuse {
        channel: ChannelId,
        what: &'static str,
    },
    /// This side put pages into a list out of order or beyond its size.
    #[error("cannot add to the page list: {0}")]
    PageListMisuse(&'static str),
    /// Key or nonce of the spec have the wrong length.
    #[error("the migration's secret is not a key of 32 bytes and a nonce of 8")]
    SecretLength,
    /// The cryptographic library refused valid input: never seen.
    #[error("the cryptographic library failed")]
    Crypto,
}

impl WireError {
    /// Who is to blame, and so what follows.
    pub fn blame(&self) -> Blame {
        match self {
            Self::NotGodwit
            | Self::Handshake { .. }
            | Self::WrongMigration
            | Self::Proof { .. }
            | Self::Header { .. }
            | Self::Length { .. }
            | Self::Counter { .. }
            | Self::Tag { .. }
            | Self::Unexpected { .. }
            | Self::Pages { .. }
            | Self::DiskChange { .. } => Blame::Peer,
            Self::Version { .. } => Blame::Incompatible,
            Self::Truncated { .. } => Blame::Lost,
            Self::CountersUsedUp { .. }
            | Self::Misuse { .. }
            | Self::PageListMisuse(_)
            | Self::SecretLength
            | Self::Crypto => Blame::Local,
        }
    }
}
