//! Records: the unit that is sealed, counted and authenticated.
//!
//! A [`Sealer`] and an [`Opener`] each own the key, the counter and the order of one direction of one channel.
//! Refuses: a counter that is not the next one, a length above the kind's maximum (before anything is allocated or
//! read), guest pages without their list or on the control channel, anything after the final record, and, after its
//! first refusal, everything.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | magic `0x47` |
//! | 1 | protocol version, low byte |
//! | 2 | kind |
//! | 3 | flags: bit 0, the payload is sealed and a tag follows |
//! | 4..8 | payload length in bytes, without the tag |
//! | 8..16 | counter |

use crate::blocks::{CHANGE_LEN, DiskChange};
use crate::pages::{RUNS_LEN_MAX, ZERO_LEN_MAX, announced_payload_len};
use crate::{ChannelId, Cipher, PROTOCOL_VERSION, WireError};
use std::fmt;

mod open;
mod seal;

pub use open::Opener;
pub use seal::Sealer;

/// Length of a record's header in bytes.
pub const HEADER_LEN: usize = 16;
/// Length of the tag behind a sealed payload, in bytes.
pub const TAG_LEN: usize = 16;
/// Most payload bytes of any record: 1 MiB.
pub const PAYLOAD_LEN_MAX: usize = 1 << 20;
/// Counters below this may be used with one key: far more than any migration needs, far fewer than GCM allows.
const COUNTER_END: u64 = 1 << 40;
const MAGIC: u8 = b'G';
const FLAG_SEALED: u8 = 1;

/// What a record carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordKind {
    /// A message of the migration's own language, opaque here.
    Control,
    /// An encoded [`crate::PageRuns`]; exactly one payload follows.
    Pages,
    /// The bytes of the pages or the change named before; the only kind that [`Cipher::None`] leaves in clear.
    Payload,
    /// An encoded [`crate::ZeroPages`].
    ZeroPages,
    /// An encoded [`crate::DiskChange`]; the payload that it announces follows.
    DiskChange,
    /// A piece of the device state.
    DeviceState,
    /// The end of this direction, without payload.
    Final,
}

impl RecordKind {
    const ALL: [Self; 7] = [
        Self::Control,
        Self::Pages,
        Self::Payload,
        Self::ZeroPages,
        Self::DeviceState,
        Self::Final,
        Self::DiskChange,
    ];

    /// Its number on the wire.
    fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Pages => 2,
            Self::Payload => 3,
            Self::ZeroPages => 4,
            Self::DeviceState => 5,
            Self::Final => 6,
            Self::DiskChange => 7,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// Most payload bytes of this kind.
    pub fn payload_len_max(self) -> usize {
        match self {
            Self::Control | Self::DeviceState | Self::Payload => PAYLOAD_LEN_MAX,
            Self::Pages => RUNS_LEN_MAX,
            Self::ZeroPages => ZERO_LEN_MAX,
            Self::DiskChange => CHANGE_LEN,
            Self::Final => 0,
        }
    }

    fn is_about_storage(self) -> bool {
        let data = [
            Self::Pages,
            Self::Payload,
            Self::ZeroPages,
            Self::DiskChange,
        ];
        data.contains(&self)
    }

    fn is_sealed(self, cipher: Cipher) -> bool {
        self != Self::Payload || cipher == Cipher::Aes256Gcm
    }
}

impl fmt::Display for RecordKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Pages => "page-list",
            Self::Payload => "page-data",
            Self::ZeroPages => "zero-page",
            Self::DiskChange => "disk-change",
            Self::DeviceState => "device-state",
            Self::Final => "final",
        })
    }
}

/// A record's header after all checks that need no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    kind: RecordKind,
    sealed: bool,
    payload_len: u32,
    counter: u64,
}

impl Header {
    /// What the record carries.
    pub fn kind(&self) -> RecordKind {
        self.kind
    }

    /// Bytes of the payload once opened, at most the kind's maximum.
    pub fn payload_len(&self) -> usize {
        self.payload_len as usize
    }

    /// Bytes that follow the header on the wire: the payload and its tag, if sealed.
    pub fn body_len(&self) -> usize {
        self.payload_len() + if self.sealed { TAG_LEN } else { 0 }
    }

    /// Whether a tag follows the payload.
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// The record's number in its direction of its channel, from 0.
    pub fn counter(&self) -> u64 {
        self.counter
    }

    fn encode(&self) -> [u8; HEADER_LEN] {
        let [version, _] = PROTOCOL_VERSION.to_le_bytes();
        let flags = if self.sealed { FLAG_SEALED } else { 0 };
        let [a, b, c, d] = self.payload_len.to_le_bytes();
        let [e, f, g, h, i, j, k, l] = self.counter.to_le_bytes();
        let kind = self.kind.code();
        [
            MAGIC, version, kind, flags, a, b, c, d, e, f, g, h, i, j, k, l,
        ]
    }
}

/// Where one direction of one channel stands: the same rules for the side that sends and the side that receives.
struct Order {
    channel: ChannelId,
    cipher: Cipher,
    next: u64,
    /// Length of the page data that must come next.
    payload_due: Option<usize>,
    ended: bool,
}

impl Order {
    fn new(channel: ChannelId, cipher: Cipher) -> Self {
        Self {
            channel,
            cipher,
            next: 0,
            payload_due: None,
            ended: false,
        }
    }

    /// Why a record of this kind and length may not come now.
    fn objection(&self, kind: RecordKind, payload_len: usize) -> Option<&'static str> {
        if self.ended {
            return Some("nothing may follow the final record");
        }
        if self.channel.is_control() && kind.is_about_storage() {
            return Some("a guest's data has no place on the control channel");
        }
        match (self.payload_due, kind) {
            (Some(due), RecordKind::Payload) if due == payload_len => None,
            (Some(_), RecordKind::Payload) => Some("its length differs from what was announced"),
            (Some(_), _) => Some("data that was announced must follow"),
            (None, RecordKind::Payload) => Some("data that nothing announced"),
            (None, _) => None,
        }
    }

    fn advance(&mut self, kind: RecordKind, payload_due: Option<usize>) {
        self.next += 1;
        self.payload_due = payload_due;
        self.ended = kind == RecordKind::Final;
    }
}

/// The data that must follow a page list or a change.
fn payload_due(kind: RecordKind, plaintext: &[u8]) -> Result<Option<usize>, WireError> {
    match kind {
        RecordKind::Pages => announced_payload_len(plaintext).map(Some),
        RecordKind::DiskChange => Ok(DiskChange::decode(plaintext)?.payload_len()),
        _ => Ok(None),
    }
}
