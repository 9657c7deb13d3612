//! Receives records.
//!
//! Owns the receiving half, its key and one buffer, which grows to the longest record seen (1 MiB and a tag at
//! most). A record that has come in part when patience ends is kept: the next call goes on. Refuses everything after
//! the first record that was not valid.

use crate::pipe::{Meter, Patience, Pipe, Read};
use crate::{Closer, TransportError};
use godwit_wire::{ChannelId, HEADER_LEN, Header, Opener, RecordKind, WireError};
use std::sync::Arc;

/// A record that was opened.
#[derive(Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub kind: RecordKind,
    /// Its number in its direction of its channel, from 0.
    pub counter: u64,
    pub payload: &'a [u8],
}

/// The receiving half of a channel.
pub struct RecordReader {
    pipe: Pipe,
    opener: Opener,
    head: [u8; HEADER_LEN],
    head_filled: usize,
    /// The header of the record whose body is coming.
    header: Option<Header>,
    body: Vec<u8>,
    body_filled: usize,
    /// A record was refused, or bytes went to a place that the next call cannot continue.
    unusable: bool,
}

impl RecordReader {
    pub(crate) fn new(pipe: Pipe, opener: Opener) -> Self {
        Self {
            pipe,
            opener,
            head: [0; HEADER_LEN],
            head_filled: 0,
            header: None,
            body: Vec::new(),
            body_filled: 0,
            unusable: false,
        }
    }

    pub fn channel(&self) -> ChannelId {
        self.pipe.channel()
    }

    /// What this half has received and how long it waited.
    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(self.pipe.meter())
    }

    /// Closes the channel from any thread.
    pub fn closer(&self) -> Closer {
        self.pipe.closer().clone()
    }

    /// How many records were accepted.
    pub fn next_counter(&self) -> u64 {
        self.opener.next_counter()
    }

    /// The next record, opened in this reader's buffer.
    pub fn next(&mut self, patience: &Patience) -> Result<Record<'_>, TransportError> {
        let header = self.read_header(patience)?;
        self.read_body(&header, patience)?;
        self.begin_next();
        let body = self.body.get_mut(..header.body_len()).unwrap_or_default();
        // A record that was refused is the last one: set back once it is accepted.
        self.unusable = true;
        let payload = self.opener.open_in_place(&header, body)?;
        self.unusable = false;
        self.pipe.meter().add_records(1);
        Ok(Record {
            kind: header.kind(),
            counter: header.counter(),
            payload,
        })
    }

    /// The page data that follows a page list, opened straight into `out`, which has exactly the length that the
    /// list announced. On an error `out` holds garbage.
    pub fn next_payload_into(
        &mut self,
        out: &mut [u8],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        let header = self.read_header(patience)?;
        if header.kind() != RecordKind::Payload || header.payload_len() != out.len() {
            let (channel, what) = (self.channel(), "no page data of this length is due");
            return Err(TransportError::Misuse { channel, what });
        }
        if header.is_sealed() {
            self.read_body(&header, patience)?;
            self.unusable = true;
            let body = self.body.get(..header.body_len()).unwrap_or_default();
            self.opener.open_into(&header, body, out)?;
        } else {
            self.unusable = true;
            self.read_clear(&header, out, patience)?;
            self.opener.accept_clear_payload(&header)?;
        }
        self.unusable = false;
        self.begin_next();
        self.pipe.meter().add_records(1);
        Ok(())
    }

    fn read_header(&mut self, patience: &Patience) -> Result<Header, TransportError> {
        if self.unusable {
            let channel = self.channel();
            return Err(TransportError::Unusable { channel });
        }
        if let Some(header) = self.header {
            return Ok(header);
        }
        let read = (self.pipe).fill(&mut self.head, &mut self.head_filled, patience)?;
        if read == Read::End {
            return Err(self.end(self.head_filled));
        }
        self.unusable = true;
        let header = self.opener.header(&self.head)?;
        self.unusable = false;
        // Bounded by the kind's maximum, which the opener has just checked.
        if self.body.len() < header.body_len() {
            self.body.resize(header.body_len(), 0);
        }
        self.header = Some(header);
        Ok(header)
    }

    fn read_body(&mut self, header: &Header, patience: &Patience) -> Result<(), TransportError> {
        let body = self.body.get_mut(..header.body_len()).unwrap_or_default();
        match self.pipe.fill(body, &mut self.body_filled, patience)? {
            Read::Bytes(_) => Ok(()),
            Read::End => Err(self.end(HEADER_LEN + self.body_filled)),
        }
    }

    /// Page data in clear goes where it belongs at once; what an interrupted `next` has read already goes first.
    fn read_clear(
        &mut self,
        header: &Header,
        out: &mut [u8],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        let mut filled = self.body_filled.min(header.body_len());
        if let (Some(to), Some(from)) = (out.get_mut(..filled), self.body.get(..filled)) {
            to.copy_from_slice(from);
        }
        match self.pipe.fill(out, &mut filled, patience)? {
            Read::Bytes(_) => Ok(()),
            Read::End => Err(self.end(HEADER_LEN + filled)),
        }
    }

    fn begin_next(&mut self) {
        self.header = None;
        self.head_filled = 0;
        self.body_filled = 0;
    }

    /// The connection ended `offset` bytes into a record.
    fn end(&self, offset: usize) -> TransportError {
        match self.opener.end_of_stream(offset) {
            Err(WireError::Truncated {
                channel,
                counter,
                offset,
            }) => TransportError::Closed {
                channel,
                counter,
                offset,
            },
            Err(error) => error.into(),
            Ok(()) => TransportError::Misuse {
                channel: self.channel(),
                what: "nothing can follow the final record",
            },
        }
    }
}
