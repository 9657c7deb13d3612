//! The sending end: seals one record after the other under the next counter.
//!
//! Owns the channel's key and its order of records. Refuses: a record out of order, too long, or after the end.

use super::{COUNTER_END, HEADER_LEN, Header, Order, RecordKind, TAG_LEN, payload_due};
use crate::key::RecordKey;
use crate::{ChannelId, Cipher, WireError};
use aws_lc_rs::aead::{Aad, Tag};

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
