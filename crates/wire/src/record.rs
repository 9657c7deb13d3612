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

use crate::key::RecordKey;
use crate::pages::{RUNS_LEN_MAX, ZERO_LEN_MAX, announced_payload_len};
use crate::{ChannelId, Cipher, PROTOCOL_VERSION, WireError};
use aws_lc_rs::aead::{Aad, Tag};
use std::fmt;

/// Length of a record's header in bytes.
pub const HEADER_LEN: usize = 16;
/// Length of the tag behind a sealed payload, in bytes.
pub const TAG_LEN: usize = 16;
/// Most payload bytes of any record: 1 MiB.
pub const PAYLOAD_LEN_MAX: usize = 1 << 20;
/// Most bytes of a whole record on the wire.
pub const RECORD_LEN_MAX: usize = HEADER_LEN + PAYLOAD_LEN_MAX + TAG_LEN;
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
    /// The bytes of the pages listed before; the only kind that [`Cipher::None`] leaves in clear.
    Payload,
    /// An encoded [`crate::ZeroPages`].
    ZeroPages,
    /// A piece of the device state.
    DeviceState,
    /// The end of this direction, without payload.
    Final,
}

impl RecordKind {
    const ALL: [Self; 6] = [
        Self::Control,
        Self::Pages,
        Self::Payload,
        Self::ZeroPages,
        Self::DeviceState,
        Self::Final,
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
            Self::Final => 0,
        }
    }

    fn is_about_pages(self) -> bool {
        matches!(self, Self::Pages | Self::Payload | Self::ZeroPages)
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
        if self.channel.is_control() && kind.is_about_pages() {
            return Some("guest pages have no place on the control channel");
        }
        match (self.payload_due, kind) {
            (Some(due), RecordKind::Payload) if due == payload_len => None,
            (Some(_), RecordKind::Payload) => Some("its length differs from the page list's"),
            (Some(_), _) => Some("page data must follow its list"),
            (None, RecordKind::Payload) => Some("page data without a list"),
            (None, _) => None,
        }
    }

    fn advance(&mut self, kind: RecordKind, payload_due: Option<usize>) {
        self.next += 1;
        self.payload_due = payload_due;
        self.ended = kind == RecordKind::Final;
    }
}

/// The sending end of one direction of one channel.
pub struct Sealer {
    key: RecordKey,
    order: Order,
}

impl Sealer {
    pub(crate) fn new(key: RecordKey, channel: ChannelId, cipher: Cipher) -> Self {
        Self {
            key,
            order: Order::new(channel, cipher),
        }
    }

    /// The channel it seals for.
    pub fn channel(&self) -> ChannelId {
        self.order.channel
    }

    /// The counter of the next record: how many were made.
    pub fn next_counter(&self) -> u64 {
        self.order.next
    }

    /// Whether payload records travel in clear.
    pub fn payload_is_clear(&self) -> bool {
        !RecordKind::Payload.is_sealed(self.order.cipher)
    }

    /// Bytes on the wire of a record of this kind with `payload_len` bytes.
    pub fn record_len(&self, kind: RecordKind, payload_len: usize) -> usize {
        let tag = if kind.is_sealed(self.order.cipher) {
            TAG_LEN
        } else {
            0
        };
        HEADER_LEN + payload_len + tag
    }

    /// Makes a record at the start of `out`, which has at least [`Self::record_len`] bytes, and returns its length.
    /// `plaintext` may be guest memory that changes meanwhile: the record then holds a torn page and a valid tag.
    pub fn seal_into(
        &mut self,
        kind: RecordKind,
        plaintext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, WireError> {
        let (header, due) = self.prepare(kind, plaintext.len(), plaintext)?;
        let total = self.record_len(kind, plaintext.len());
        let short = self.misuse("the buffer is too short");
        let frame = out.get_mut(..total).ok_or(short.clone())?;
        let (head, body) = frame.split_first_chunk_mut::<HEADER_LEN>().ok_or(short)?;
        let (cipher, tag) = body.split_at_mut(plaintext.len());
        *head = header.encode();
        if header.sealed {
            let (nonce, aad) = (self.key.nonce(header.counter), Aad::from(*head));
            let key = self.key.aead();
            key.seal_out_of_place_scatter(nonce, aad, plaintext, cipher, &[], tag)
                .map_err(|_| WireError::Crypto)?;
        } else {
            cipher.copy_from_slice(plaintext);
        }
        self.order.advance(kind, due);
        Ok(total)
    }

    /// Makes a record of `frame`, whose payload already lies at `HEADER_LEN`; its length is exactly
    /// [`Self::record_len`].
    pub fn seal_in_place(&mut self, kind: RecordKind, frame: &mut [u8]) -> Result<(), WireError> {
        let overhead = self.record_len(kind, 0);
        let short = self.misuse("the buffer is too short");
        let len = frame.len().checked_sub(overhead).ok_or(short.clone())?;
        let (head, body) = frame.split_first_chunk_mut::<HEADER_LEN>().ok_or(short)?;
        let (payload, tag_out) = body.split_at_mut(len);
        let (header, due) = self.prepare(kind, len, payload)?;
        *head = header.encode();
        if header.sealed {
            let (nonce, aad) = (self.key.nonce(header.counter), Aad::from(*head));
            let tag: Tag = (self.key.aead())
                .seal_in_place_separate_tag(nonce, aad, payload)
                .map_err(|_| WireError::Crypto)?;
            tag_out.copy_from_slice(tag.as_ref());
        }
        self.order.advance(kind, due);
        Ok(())
    }

    /// The header of page data that the caller sends by itself, in clear, from where it lies. Only with
    /// [`Cipher::None`].
    pub fn clear_payload_header(
        &mut self,
        payload_len: usize,
    ) -> Result<[u8; HEADER_LEN], WireError> {
        if !self.payload_is_clear() {
            return Err(self.misuse("this migration is encrypted"));
        }
        let (header, due) = self.prepare(RecordKind::Payload, payload_len, &[])?;
        self.order.advance(RecordKind::Payload, due);
        Ok(header.encode())
    }

    /// All checks and the header; and the length of the page data that this record announces.
    fn prepare(
        &self,
        kind: RecordKind,
        len: usize,
        plaintext: &[u8],
    ) -> Result<(Header, Option<usize>), WireError> {
        let channel = self.order.channel;
        if let Some(objection) = self.order.objection(kind, len) {
            return Err(self.misuse(objection));
        }
        if len > kind.payload_len_max() {
            return Err(self.misuse("the payload is longer than its kind allows"));
        }
        if self.order.next >= COUNTER_END {
            return Err(WireError::CountersUsedUp { channel });
        }
        let header = Header {
            kind,
            sealed: kind.is_sealed(self.order.cipher),
            payload_len: u32::try_from(len).map_err(|_| self.misuse("payload length"))?,
            counter: self.order.next,
        };
        Ok((header, payload_due(kind, plaintext)?))
    }

    fn misuse(&self, what: &'static str) -> WireError {
        let channel = self.order.channel;
        WireError::Misuse { channel, what }
    }

    /// What a peer that holds the key and keeps no rule can send.
    #[cfg(test)]
    pub(crate) fn seal_lawless(&mut self, kind: RecordKind, payload: &[u8]) -> Vec<u8> {
        let header = Header {
            kind,
            sealed: true,
            payload_len: payload.len() as u32,
            counter: self.order.next,
        };
        let (head, mut body) = (header.encode(), payload.to_vec());
        let (nonce, aad) = (self.key.nonce(header.counter), Aad::from(head));
        let sealed = self
            .key
            .aead()
            .seal_in_place_append_tag(nonce, aad, &mut body);
        sealed.expect("sealed");
        self.order.next += 1;
        [head.to_vec(), body].concat()
    }
}

/// The page data that must follow a page list.
fn payload_due(kind: RecordKind, plaintext: &[u8]) -> Result<Option<usize>, WireError> {
    if kind != RecordKind::Pages {
        return Ok(None);
    }
    announced_payload_len(plaintext).map(Some)
}

/// The receiving end of one direction of one channel.
pub struct Opener {
    key: RecordKey,
    order: Order,
    /// The first refusal: a stream that broke once is never trusted again.
    broken: Option<WireError>,
}

impl Opener {
    pub(crate) fn new(key: RecordKey, channel: ChannelId, cipher: Cipher) -> Self {
        Self {
            key,
            order: Order::new(channel, cipher),
            broken: None,
        }
    }

    /// The channel it opens for.
    pub fn channel(&self) -> ChannelId {
        self.order.channel
    }

    /// The counter of the next record: how many were accepted.
    pub fn next_counter(&self) -> u64 {
        self.order.next
    }

    /// Checks a header before anything of the record is read or allocated. Nothing is accepted yet.
    pub fn header(&mut self, bytes: &[u8; HEADER_LEN]) -> Result<Header, WireError> {
        self.check_header(bytes).map_err(|error| self.fail(error))
    }

    /// Opens the `header.body_len()` bytes that followed the header where they lie, and gives the payload.
    pub fn open_in_place<'a>(
        &mut self,
        header: &Header,
        body: &'a mut [u8],
    ) -> Result<&'a mut [u8], WireError> {
        self.check_due(header, body.len())?;
        let (payload, tag) = body.split_at_mut(header.payload_len());
        if header.sealed {
            let (nonce, aad) = (self.key.nonce(header.counter), Aad::from(header.encode()));
            let key = self.key.aead();
            if key
                .open_in_place_separate_tag(nonce, aad, tag, payload)
                .is_err()
                && !planted("tag-unchecked")
            {
                return Err(self.fail_tag(header));
            }
        }
        self.accept(header, payload)?;
        Ok(payload)
    }

    /// Opens the `header.body_len()` bytes that followed the header into `out`, of exactly `header.payload_len()`
    /// bytes. On an error `out` holds garbage that must not be used.
    pub fn open_into(
        &mut self,
        header: &Header,
        body: &[u8],
        out: &mut [u8],
    ) -> Result<(), WireError> {
        self.check_due(header, body.len())?;
        if out.len() != header.payload_len() {
            return Err(self.misuse("the buffer has another length than the payload"));
        }
        let (cipher, tag) = body.split_at(header.payload_len());
        if header.sealed {
            let (nonce, aad) = (self.key.nonce(header.counter), Aad::from(header.encode()));
            let key = self.key.aead();
            if key
                .open_separate_gather(nonce, aad, cipher, tag, out)
                .is_err()
                && !planted("tag-unchecked")
            {
                return Err(self.fail_tag(header));
            }
        } else {
            out.copy_from_slice(cipher);
        }
        self.accept(header, out)
    }

    /// Accepts page data in clear that the caller has read, in full, to where it belongs. Only with
    /// [`Cipher::None`].
    pub fn accept_clear_payload(&mut self, header: &Header) -> Result<(), WireError> {
        self.check_due(header, header.body_len())?;
        if header.sealed || header.kind != RecordKind::Payload {
            return Err(self.misuse("a sealed record must be opened"));
        }
        self.accept(header, &[])
    }

    /// What the end of the connection means, `offset` bytes into a record: a truncation, unless the final record
    /// came.
    pub fn end_of_stream(&self, offset: usize) -> Result<(), WireError> {
        if self.order.ended && offset == 0 {
            return Ok(());
        }
        let (channel, counter) = (self.order.channel, self.order.next);
        Err(WireError::Truncated {
            channel,
            counter,
            offset,
        })
    }

    fn check_header(&self, bytes: &[u8; HEADER_LEN]) -> Result<Header, WireError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let [
            magic,
            version,
            kind,
            flags,
            a,
            b,
            c,
            d,
            e,
            f,
            g,
            h,
            i,
            j,
            k,
            l,
        ] = *bytes;
        let (channel, counter) = (self.order.channel, self.order.next);
        let refuse = |what, offset| {
            Err(WireError::Header {
                channel,
                counter,
                what,
                offset,
            })
        };
        if magic != MAGIC {
            return refuse("wrong magic", 0);
        }
        if version != PROTOCOL_VERSION.to_le_bytes()[0] {
            return refuse("wrong version", 1);
        }
        let Some(kind) = RecordKind::from_code(kind) else {
            return refuse("unknown kind", 2);
        };
        // The mode comes from the spec alone: the flag only repeats it.
        let sealed = kind.is_sealed(self.order.cipher);
        if flags != if sealed { FLAG_SEALED } else { 0 } {
            return refuse("flags that this migration's encryption does not allow", 3);
        }
        let header = Header {
            kind,
            sealed,
            payload_len: u32::from_le_bytes([a, b, c, d]),
            counter: u64::from_le_bytes([e, f, g, h, i, j, k, l]),
        };
        self.check_place(&header).map(|()| header)
    }

    /// Length, counter and order.
    fn check_place(&self, header: &Header) -> Result<(), WireError> {
        let (channel, counter, kind) = (self.order.channel, self.order.next, header.kind);
        let max = u32::try_from(kind.payload_len_max()).unwrap_or(u32::MAX);
        if header.payload_len > max && !planted("length-unchecked") {
            return Err(WireError::Length {
                channel,
                counter,
                length: header.payload_len,
                max,
            });
        }
        if header.counter != counter && !planted("counter-unchecked") {
            return Err(WireError::Counter {
                channel,
                expected: counter,
                got: header.counter,
            });
        }
        if counter >= COUNTER_END {
            return Err(WireError::CountersUsedUp { channel });
        }
        match self.order.objection(kind, header.payload_len()) {
            Some(why) => Err(WireError::Unexpected {
                channel,
                counter,
                kind,
                why,
            }),
            None => Ok(()),
        }
    }

    /// A header that was checked may be used once, by the opener that checked it.
    fn check_due(&mut self, header: &Header, body_len: usize) -> Result<(), WireError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if header.sealed != header.kind.is_sealed(self.order.cipher) {
            return Err(self.misuse("the header is of another stream"));
        }
        if body_len != header.body_len() {
            return Err(self.misuse("the body has another length than its header says"));
        }
        self.check_place(header).map_err(|error| self.fail(error))
    }

    fn accept(&mut self, header: &Header, payload: &[u8]) -> Result<(), WireError> {
        let due = payload_due(header.kind, payload).map_err(|error| self.fail(error))?;
        self.order.advance(header.kind, due);
        Ok(())
    }

    fn fail_tag(&mut self, header: &Header) -> WireError {
        let (channel, counter) = (self.order.channel, header.counter);
        self.fail(WireError::Tag { channel, counter })
    }

    fn fail(&mut self, error: WireError) -> WireError {
        self.broken.get_or_insert(error).clone()
    }

    fn misuse(&self, what: &'static str) -> WireError {
        let channel = self.order.channel;
        WireError::Misuse { channel, what }
    }
}

/// Whether this fault is planted: `GODWIT_PLANT` names it, in a build with the feature `planted-faults`.
#[cfg(feature = "planted-faults")]
fn planted(fault: &str) -> bool {
    std::env::var("GODWIT_PLANT").is_ok_and(|name| name == fault)
}

#[cfg(not(feature = "planted-faults"))]
#[inline(always)]
fn planted(_fault: &str) -> bool {
    false
}
