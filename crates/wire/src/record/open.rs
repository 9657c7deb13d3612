//! The receiving end: checks a header before anything is read behind it, then opens the record.
//!
//! Owns the channel's key and its order of records. Refuses: lengths beyond the bound before a byte is allocated, records that
//! are repeated, left out, out of order or not sealed by the peer; after one refusal everything.

use super::{COUNTER_END, FLAG_SEALED, HEADER_LEN, Header, MAGIC, Order, RecordKind, payload_due};
use crate::key::RecordKey;
use crate::{ChannelId, Cipher, PROTOCOL_VERSION, WireError};
use aws_lc_rs::aead::Aad;
use godwit_types::plant::planted;

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
