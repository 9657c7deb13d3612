//! Sends records.
//!
//! Owns the sending half, its key and one buffer, which grows to what one call sends. Each call makes its records
//! and hands them to the kernel at once. After a call that failed in the middle of a record the half is unusable:
//! the peer could not make sense of what followed.

use crate::pipe::{Meter, Patience, Pipe};
use crate::{Closer, Probe, TransportError};
use godwit_wire::{
    ChannelId, DiskChange, HEADER_LEN, PageRuns, RecordKind, Sealer, TAG_LEN, WireError, ZeroPages,
};
use std::io::IoSlice;
use std::net::Shutdown;
use std::sync::Arc;

/// The sending half of a channel.
pub struct RecordWriter {
    pipe: Pipe,
    sealer: Sealer,
    /// Records made and not yet sent lie in `frames[..used]`.
    frames: Vec<u8>,
    used: usize,
    list: Vec<u8>,
    unusable: bool,
}

impl RecordWriter {
    pub(crate) fn new(pipe: Pipe, sealer: Sealer) -> Self {
        Self {
            pipe,
            sealer,
            frames: Vec::new(),
            used: 0,
            list: Vec::new(),
            unusable: false,
        }
    }

    pub fn channel(&self) -> ChannelId {
        self.pipe.channel()
    }

    /// What this half has sent and how long it waited.
    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(self.pipe.meter())
    }

    /// Closes the channel from any thread.
    pub fn closer(&self) -> Closer {
        self.pipe.closer().clone()
    }

    /// Looks at the link from any thread.
    pub fn probe(&self) -> Probe {
        Probe::new(self.pipe.closer().shared_stream())
    }

    /// How many records were made; the next record's counter.
    pub fn next_counter(&self) -> u64 {
        self.sealer.next_counter()
    }

    /// Sends one record of any kind but pages.
    pub fn send(
        &mut self,
        kind: RecordKind,
        payload: &[u8],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        self.begin()?;
        self.seal(kind, payload)?;
        self.flush(&[], 1, patience)
    }

    /// Sends a bitmap of zero pages.
    pub fn send_zero_pages(
        &mut self,
        pages: &ZeroPages,
        patience: &Patience,
    ) -> Result<(), TransportError> {
        self.begin()?;
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        pages.encode(&mut list);
        let sealed = self.seal(RecordKind::ZeroPages, &list);
        self.list = list;
        sealed?;
        self.flush(&[], 1, patience)
    }

    /// Sends a page list and the pages' bytes, which lie in `parts` one after the other, in one go. The parts may be
    /// guest memory that changes meanwhile.
    pub fn send_pages(
        &mut self,
        runs: &PageRuns,
        parts: &[&[u8]],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len != runs.payload_len() || len == 0 {
            let (channel, what) = (self.channel(), "the pages' bytes do not match their list");
            return Err(TransportError::Misuse { channel, what });
        }
        self.begin()?;
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        runs.encode(&mut list);
        let sealed = self.seal(RecordKind::Pages, &list);
        self.list = list;
        sealed?;
        self.send_payload(len, parts, patience)
    }

    /// Sends a change of a disk and the bytes that it announces, in one go.
    pub fn send_change(
        &mut self,
        change: &DiskChange,
        bytes: &[u8],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        if bytes.len() != change.payload_len().unwrap_or(0) {
            let (channel, what) = (self.channel(), "a change's bytes do not match it");
            return Err(TransportError::Misuse { channel, what });
        }
        self.begin()?;
        self.seal(RecordKind::DiskChange, &change.encode())?;
        match bytes {
            [] => self.flush(&[], 1, patience),
            bytes => self.send_payload(bytes.len(), &[bytes], patience),
        }
    }

    /// Ends this direction with the final record and closes it for sending.
    pub fn finish(&mut self, patience: &Patience) -> Result<(), TransportError> {
        self.send(RecordKind::Final, &[], patience)?;
        // Fails only when the connection is gone, and the peer has its final record or sees that it has not.
        let _ = self.pipe.closer().stream().shutdown(Shutdown::Write);
        Ok(())
    }

    fn send_payload(
        &mut self,
        len: usize,
        parts: &[&[u8]],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        if self.sealer.payload_is_clear() {
            let header = self.sealer.clear_payload_header(len)?;
            let frame = self.room(header.len());
            frame.copy_from_slice(&header);
            self.used += header.len();
            return self.flush(parts, 2, patience);
        }
        match parts {
            [whole] => self.seal(RecordKind::Payload, whole)?,
            _ => self.seal_gathered(len, parts)?,
        }
        self.flush(&[], 2, patience)
    }

    /// Seals `payload` behind the records made before.
    fn seal(&mut self, kind: RecordKind, payload: &[u8]) -> Result<(), WireError> {
        let total = self.sealer.record_len(kind, payload.len());
        self.grow(total);
        let frame = self.frames.get_mut(self.used..).unwrap_or_default();
        self.used += self.sealer.seal_into(kind, payload, frame)?;
        Ok(())
    }

    /// Copies scattered pages together and seals them where they then lie: authenticated encryption is one pass over
    /// one piece.
    fn seal_gathered(&mut self, len: usize, parts: &[&[u8]]) -> Result<(), WireError> {
        let total = HEADER_LEN + len + TAG_LEN;
        let frame = self.room(total);
        let mut at = HEADER_LEN;
        for part in parts {
            if let Some(to) = frame.get_mut(at..at + part.len()) {
                to.copy_from_slice(part);
            }
            at += part.len();
        }
        let frame = self
            .frames
            .get_mut(self.used..self.used + total)
            .unwrap_or_default();
        self.sealer.seal_in_place(RecordKind::Payload, frame)?;
        self.used += total;
        Ok(())
    }

    /// The `len` bytes behind the records made before.
    fn room(&mut self, len: usize) -> &mut [u8] {
        self.grow(len);
        self.frames
            .get_mut(self.used..self.used + len)
            .unwrap_or_default()
    }

    fn grow(&mut self, len: usize) {
        if self.frames.len() < self.used + len {
            self.frames.resize(self.used + len, 0);
        }
    }

    fn begin(&mut self) -> Result<(), TransportError> {
        if self.unusable {
            let channel = self.channel();
            return Err(TransportError::Unusable { channel });
        }
        self.used = 0;
        Ok(())
    }

    /// Sends what was made and `parts` behind it. Until it has succeeded nothing else may be sent.
    fn flush(
        &mut self,
        parts: &[&[u8]],
        records: u64,
        patience: &Patience,
    ) -> Result<(), TransportError> {
        self.unusable = true;
        let made = self.frames.get(..self.used).unwrap_or_default();
        match parts {
            [] => self.pipe.send(&mut [IoSlice::new(made)], patience)?,
            [whole] => {
                (self.pipe).send(&mut [IoSlice::new(made), IoSlice::new(whole)], patience)?
            }
            _ => {
                let all = std::iter::once(&made).chain(parts);
                let mut all: Vec<_> = all.map(|part| IoSlice::new(part)).collect();
                self.pipe.send(&mut all, patience)?;
            }
        }
        self.unusable = false;
        self.pipe.meter().add_records(records);
        Ok(())
    }
}
