//! The control channel: whole messages of up to 1 MiB, always sealed.
//!
//! Owns its two halves. Knows nothing of what the messages say. Refuses messages longer than a record.

use crate::pipe::{Meter, Patience};
use crate::{Closer, Connection, RecordReader, RecordWriter, TransportError};
use godwit_wire::RecordKind;
use std::sync::Arc;
use std::time::Instant;

/// What came on a control channel.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message of the migration's language.
    Message(Vec<u8>),
    /// A piece of the device state.
    DeviceState(Vec<u8>),
    /// The peer has nothing more to say.
    End,
}

/// Sends on a control channel; the receiving half may be on another thread.
pub struct ControlSender(RecordWriter);

impl ControlSender {
    /// Sends one message of at most 1 MiB.
    pub fn send(&mut self, message: &[u8], deadline: Instant) -> Result<(), TransportError> {
        self.0
            .send(RecordKind::Control, message, &Patience::until(deadline))
    }

    /// Sends a piece of the device state, at most 1 MiB.
    pub fn send_device_state(
        &mut self,
        piece: &[u8],
        deadline: Instant,
    ) -> Result<(), TransportError> {
        self.0
            .send(RecordKind::DeviceState, piece, &Patience::until(deadline))
    }

    /// Tells the peer that nothing more follows in this direction.
    pub fn finish(&mut self, deadline: Instant) -> Result<(), TransportError> {
        self.0.finish(&Patience::until(deadline))
    }

    /// What was sent and how long it waited.
    pub fn meter(&self) -> Arc<Meter> {
        self.0.meter()
    }

    /// Closes the channel from any thread.
    pub fn closer(&self) -> Closer {
        self.0.closer()
    }
}

/// Receives from a control channel, in order.
pub struct ControlReceiver(RecordReader);

impl ControlReceiver {
    /// The next message. [`TransportError::Silent`] when none came by then; asking again goes on where it stopped.
    pub fn recv(&mut self, deadline: Instant) -> Result<Incoming, TransportError> {
        let record = self.0.next(&Patience::until(deadline))?;
        Ok(match record.kind {
            RecordKind::DeviceState => Incoming::DeviceState(record.payload.to_vec()),
            RecordKind::Final => Incoming::End,
            // The opener lets no other kind through on a control channel.
            _ => Incoming::Message(record.payload.to_vec()),
        })
    }

    /// What was received and how long it waited.
    pub fn meter(&self) -> Arc<Meter> {
        self.0.meter()
    }

    /// Closes the channel from any thread.
    pub fn closer(&self) -> Closer {
        self.0.closer()
    }
}

impl Connection {
    /// The two halves of a control channel; an error when the channel is for data.
    pub fn into_control(self) -> Result<(ControlSender, ControlReceiver), TransportError> {
        let channel = self.channel();
        if !channel.is_control() {
            let what = "this is a data channel";
            return Err(TransportError::Misuse { channel, what });
        }
        let (reader, writer) = self.split();
        Ok((ControlSender(writer), ControlReceiver(reader)))
    }
}
