//! Client side of server-sent events: lines in, events out.
//!
//! Owns one connection; dropping the stream closes it. Refuses: lines over [`EVENT_LINE_LEN_MAX`].

use crate::client::{ClientError, Driver, chain};
use crate::limits::EVENT_LINE_LEN_MAX;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use std::time::Duration;

/// A server-sent event as it was read from a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    /// Its kind; empty unless the server gave one.
    pub name: String,
    pub data: String,
}

/// Assembles events from bytes as they come.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    event: Event,
    has_data: bool,
}

/// A line was too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a line of the event stream is longer than {EVENT_LINE_LEN_MAX} bytes")]
pub struct LineTooLong;

impl Parser {
    /// Takes bytes; gives the events that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, LineTooLong> {
        let mut events = Vec::new();
        for byte in bytes {
            if *byte == b'\n' {
                events.extend(self.end_line());
            } else if self.line.len() < EVENT_LINE_LEN_MAX {
                self.line.push(*byte);
            } else {
                return Err(LineTooLong);
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<Event> {
        let bytes = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&bytes);
        let line = line.trim_end_matches('\r');
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            return std::mem::take(&mut self.has_data).then_some(event);
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => self.event.name = value.to_owned(),
            "data" => self.add_data(value),
            _ => {}
        }
        None
    }

    fn add_data(&mut self, value: &str) {
        if self.has_data {
            self.event.data.push('\n');
        }
        self.event.data.push_str(value);
        self.has_data = true;
    }
}

/// An open stream of events.
pub struct EventStream {
    peer: String,
    _driver: Driver,
    body: Incoming,
    parser: Parser,
    ready: std::collections::VecDeque<Event>,
}

impl EventStream {
    pub(crate) fn new(peer: String, driver: Driver, body: Incoming) -> Self {
        Self {
            peer,
            _driver: driver,
            body,
            parser: Parser::default(),
            ready: Default::default(),
        }
    }

    /// The next event; `None` when the server has ended the stream. Keep-alive comments count against `deadline`
    /// only as far as no event follows them.
    pub async fn next(&mut self, deadline: Duration) -> Result<Option<Event>, ClientError> {
        let next = async {
            while self.ready.is_empty() && self.hear().await? {}
            Ok(self.ready.pop_front())
        };
        match tokio::time::timeout(deadline, next).await {
            Ok(result) => result,
            Err(_) => Err(self.silent(deadline)),
        }
    }

    /// The same, for as long as the server says anything at all within `silence`: a comment that keeps the stream alive, too.
    pub async fn next_while_heard(
        &mut self,
        silence: Duration,
    ) -> Result<Option<Event>, ClientError> {
        while self.ready.is_empty() {
            let heard = tokio::time::timeout(silence, self.hear()).await;
            if !heard.unwrap_or_else(|_| Err(self.silent(silence)))? {
                break;
            }
        }
        Ok(self.ready.pop_front())
    }

    /// Waits for the server's next words; false when it has ended the stream.
    async fn hear(&mut self) -> Result<bool, ClientError> {
        let Some(frame) = self.body.frame().await else {
            return Ok(false);
        };
        let frame = frame.map_err(|error| self.broken(chain(&error)))?;
        if let Ok(bytes) = frame.into_data() {
            let events = self.parser.push(&bytes);
            self.ready
                .extend(events.map_err(|error| self.broken(error.to_string()))?);
        }
        Ok(true)
    }

    fn silent(&self, deadline: Duration) -> ClientError {
        ClientError::Deadline {
            peer: self.peer.clone(),
            seconds: deadline.as_secs_f64(),
        }
    }

    fn broken(&self, cause: String) -> ClientError {
        ClientError::Broken {
            peer: self.peer.clone(),
            cause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_whole_however_the_bytes_are_cut() {
        let text = b": hello\r\n\r\nevent: report\ndata: {\"a\":\ndata: 1}\n\nid: 7\n\ndata:x\n\n";
        for cut in 0..text.len() {
            let mut parser = Parser::default();
            let mut events = parser.push(&text[..cut]).unwrap();
            events.extend(parser.push(&text[cut..]).unwrap());
            assert_eq!(events.len(), 2, "cut at {cut}");
            assert_eq!(
                (events[0].name.as_str(), events[0].data.as_str()),
                ("report", "{\"a\":\n1}")
            );
            assert_eq!(
                (events[1].name.as_str(), events[1].data.as_str()),
                ("", "x")
            );
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = Parser::default();
        assert_eq!(parser.push(&vec![b'x'; EVENT_LINE_LEN_MAX]), Ok(Vec::new()));
        assert_eq!(parser.push(b"x"), Err(LineTooLong));
    }
}
