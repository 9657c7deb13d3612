//! The record protocol that migration streams speak above TCP, without the TCP: bytes in, bytes out.
//!
//! Owns: key derivation, the handshake, record framing and sealing, and the encoding of page lists. Pure: no
//! sockets, files, threads, clock or randomness; entropy is an argument. Refuses: records out of order, repeated,
//! truncated, altered or longer than their named maximum, and a peer that does not hold the migration's key.
//!
//! # The protocol, version 1
//!
//! All integers are little-endian. Both ends hold the same [`Spec`], made by the controller: migration id, 256-bit
//! key, 64-bit nonce and cipher. Nothing in it is negotiated.
//!
//! 1. **Handshake** ([`handshake`]), once per connection. Client hello, server hello with proof, client proof;
//!    every message is a 10-byte head (`GODWIT`, version `u16`, kind `u8`, body length `u8`) and a body.
//! 2. **Keys** ([`Spec`]): HKDF-SHA256 with the key as input, nonce and both randoms as salt, and protocol version,
//!    cipher, migration id, channel id, direction and purpose as info. A recorded connection cannot be replayed
//!    since the other side's random differs; a disagreement about any of them is a failed proof.
//! 3. **Records** ([`record`]): a 16-byte header, authenticated as a whole, the payload sealed by AES-256-GCM, a
//!    16-byte tag. The nonce is a derived 4-byte prefix and the record's counter. Counters start at 0 per channel
//!    and direction and never skip or repeat. A [`RecordKind::Final`] record ends each direction: the end of the
//!    connection without it is a truncation.
//! 4. **Content** ([`pages`]): a list of page runs followed by exactly one record with their bytes; bitmaps of zero
//!    pages; changes of disks ([`blocks`]), each followed by one record with its bytes unless these are zero; opaque
//!    control messages and device state.
//!
//! With [`Cipher::None`] only the bytes of guest pages and disks ([`RecordKind::Payload`]) travel in clear and
//! unauthenticated, with a header but no tag; all else stays sealed, so that no stranger can feed a VM to a port.
#![forbid(unsafe_code)]

pub mod blocks;
mod channel;
mod error;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod handshake;
mod key;
pub mod pages;
pub mod record;
#[cfg(test)]
mod tests;

pub use blocks::{BELOW, ChangeKind, DiskChange};
pub use channel::{ChannelId, Direction};
pub use error::{Blame, WireError};
pub use godwit_types::migration::Cipher;
pub use handshake::{ClientHandshake, ServerHandshake, Session};
pub use key::{KEY_LEN, MigrationKey, RANDOM_LEN, Spec};
pub use pages::{PAGE_SIZE, PageRun, PageRuns, ZeroPages};
pub use record::{HEADER_LEN, Header, Opener, PAYLOAD_LEN_MAX, RecordKind, Sealer, TAG_LEN};

/// The version of everything described above; two sides that differ refuse each other in the handshake.
pub const PROTOCOL_VERSION: u16 = 1;
