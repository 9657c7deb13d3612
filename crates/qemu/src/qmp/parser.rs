//! The machine protocol (QMP) as bytes: lines in, values out.
//!
//! One line is one JSON object: the greeting, the answer to a command, or an event. The functions here are total: any
//! bytes give a value or an error, memory is bounded by the length of the line, and nesting is bounded too. They own
//! no socket and no thread. They refuse lines above [`MAX_LINE`] bytes, nesting above [`MAX_DEPTH`], and whatever is
//! not one of the three shapes.

use serde_json::{Map, Value};

/// The longest line that is accepted, in bytes, without its end.
pub const MAX_LINE: usize = 4 << 20;
/// The deepest nesting of arrays and objects that is accepted.
pub const MAX_DEPTH: usize = 64;

/// Why a line is no QMP message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The line is longer than [`MAX_LINE`].
    #[error("the hypervisor sent a line of more than {MAX_LINE} bytes on its control socket")]
    TooLong,
    /// Arrays and objects nest deeper than [`MAX_DEPTH`].
    #[error("the hypervisor sent a message nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// The line is not JSON.
    #[error("the hypervisor sent a line that is not JSON (at byte {at})")]
    NotJson {
        /// Where in the line, counted from 1.
        at: usize,
    },
    /// JSON, but neither greeting nor answer nor event.
    #[error("the hypervisor sent a message without a meaning: {what}")]
    NoMessage {
        /// What is missing or of the wrong type.
        what: &'static str,
    },
}

/// What the hypervisor says when a client connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Major, minor and micro version.
    pub version: (u64, u64, u64),
    /// What the distribution calls this build; may be empty.
    pub package: String,
}

/// An event as it stands on the line.
#[derive(Debug, Clone, PartialEq)]
pub struct RawEvent {
    /// The event's name, such as `STOP`.
    pub name: String,
    /// Its data; `Null` where it has none.
    pub data: Value,
    /// The hypervisor's own clock at the event, in microseconds since 1970; `None` where it is unknown.
    pub wall_clock_us: Option<u64>,
}

/// What one line from QEMU says.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Message {
    /// The first line of a connection.
    Greeting(Greeting),
    Return {
        /// The command's id; `None` where it is missing or none of ours.
        id: Option<u64>,
        value: Value,
    },
    /// A command was refused.
    Error {
        /// The command's id; `None` where it is missing or none of ours.
        id: Option<u64>,
        /// QEMU's class of error, such as `GenericError`.
        class: String,
        description: String,
    },
    Event(RawEvent),
}

/// Reads one line, with or without its line end.
pub fn parse_line(line: &[u8]) -> Result<Message, ParseError> {
    if line.len() > MAX_LINE {
        return Err(ParseError::TooLong);
    }
    if deeper_than(line, MAX_DEPTH) {
        return Err(ParseError::TooDeep);
    }
    let value = serde_json::from_slice(line).map_err(|e| ParseError::NotJson { at: e.column() })?;
    match value {
        Value::Object(object) => message(object),
        _ => Err(ParseError::NoMessage {
            what: "it is not an object",
        }),
    }
}

/// Whether brackets outside of strings nest deeper than `limit`. Holds for valid JSON; the rest is refused later anyway.
fn deeper_than(line: &[u8], limit: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for &byte in line {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b'[' | b'{') => depth = depth.saturating_add(1),
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > limit {
            return true;
        }
    }
    false
}

fn message(mut object: Map<String, Value>) -> Result<Message, ParseError> {
    let id = object.get("id").and_then(Value::as_u64);
    if let Some(greeting) = object.get("QMP") {
        return Ok(Message::Greeting(read_greeting(greeting)?));
    }
    if let Some(value) = object.remove("return") {
        return Ok(Message::Return { id, value });
    }
    if let Some(error) = object.get("error") {
        let (class, description) = (text(error, "class"), text(error, "desc"));
        let what = "an error without class and description";
        let (Some(class), Some(description)) = (class, description) else {
            return Err(ParseError::NoMessage { what });
        };
        return Ok(Message::Error {
            id,
            class,
            description,
        });
    }
    read_event(object).map(Message::Event)
}

fn read_event(mut object: Map<String, Value>) -> Result<RawEvent, ParseError> {
    let what = "neither greeting, answer nor event";
    let Some(Value::String(name)) = object.remove("event") else {
        return Err(ParseError::NoMessage { what });
    };
    let wall_clock_us = object.get("timestamp").and_then(microseconds);
    Ok(RawEvent {
        name,
        data: object.remove("data").unwrap_or(Value::Null),
        wall_clock_us,
    })
}

/// QEMU writes -1 for both parts when it does not know the time.
fn microseconds(timestamp: &Value) -> Option<u64> {
    let part = |key| timestamp.get(key).and_then(Value::as_u64);
    part("seconds")?
        .checked_mul(1_000_000)?
        .checked_add(part("microseconds")?)
}

fn read_greeting(greeting: &Value) -> Result<Greeting, ParseError> {
    let version = greeting.get("version");
    let number = |key| {
        version
            .and_then(|v| v.get("qemu"))
            .and_then(|v| v.get(key))
            .and_then(Value::as_u64)
    };
    let (Some(major), Some(minor), Some(micro)) =
        (number("major"), number("minor"), number("micro"))
    else {
        return Err(ParseError::NoMessage {
            what: "a greeting without a version",
        });
    };
    let package = version.and_then(|v| text(v, "package")).unwrap_or_default();
    Ok(Greeting {
        version: (major, minor, micro),
        package,
    })
}

fn text(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_owned)
}

/// Cuts a stream of bytes into lines. Holds at most [`MAX_LINE`] bytes of an unfinished line.
#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    /// Bytes at the front that earlier lines have used up.
    consumed: usize,
    /// Bytes, from the front, known to hold no line end after `consumed`.
    searched: usize,
}

impl LineBuffer {
    /// Adds what arrived. Call [`LineBuffer::next_line`] until it gives `None` before adding more.
    pub fn push(&mut self, arrived: &[u8]) {
        self.bytes.drain(..self.consumed.min(self.bytes.len()));
        self.searched = self.searched.saturating_sub(self.consumed);
        self.consumed = 0;
        self.bytes.extend_from_slice(arrived);
    }

    /// The next whole line without its end, an error once a line has grown too long, or `None` when more is needed.
    pub fn next_line(&mut self) -> Option<Result<&[u8], ParseError>> {
        let unsearched = self.bytes.get(self.searched..)?;
        let Some(found) = unsearched.iter().position(|&b| b == b'\n') else {
            self.searched = self.bytes.len();
            let pending = self.bytes.len().saturating_sub(self.consumed);
            return (pending > MAX_LINE).then_some(Err(ParseError::TooLong));
        };
        let (start, end) = (self.consumed, self.searched.saturating_add(found));
        self.consumed = end.saturating_add(1);
        self.searched = self.consumed;
        let line = self.bytes.get(start..end)?;
        Some(if line.len() > MAX_LINE {
            Err(ParseError::TooLong)
        } else {
            Ok(line)
        })
    }
}

/// The entry for fuzzers.
pub mod fuzz {
    use super::*;

    /// Parses one line, and the same bytes as a stream in two parts. Must return for every input.
    pub fn line(bytes: &[u8]) {
        let _ = parse_line(bytes);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let mut buffer = LineBuffer::default();
        for part in [first, second] {
            buffer.push(part);
            while let Some(Ok(line)) = buffer.next_line() {
                let _ = parse_line(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(line: &[u8]) -> ParseError {
        parse_line(line).expect_err("must be refused")
    }

    #[test]
    fn greeting_of_7_2_is_read() {
        let line = br#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}"#;
        let want = Greeting {
            version: (7, 2, 22),
            package: "Debian".into(),
        };
        assert_eq!(parse_line(line), Ok(Message::Greeting(want)));
    }

    #[test]
    fn answers_are_read_with_their_id() {
        let line = b"{\"return\": {\"a\": [1]}, \"id\": 7}\r\n";
        assert_eq!(
            parse_line(line),
            Ok(Message::Return {
                id: Some(7),
                value: json!({"a": [1]})
            })
        );
        let line = br#"{"id": 8, "error": {"class": "GenericError", "desc": "no"}}"#;
        let want = Message::Error {
            id: Some(8),
            class: "GenericError".into(),
            description: "no".into(),
        };
        assert_eq!(parse_line(line), Ok(want));
        assert_eq!(
            parse_line(br#"{"return": {}, "id": "x"}"#),
            Ok(Message::Return {
                id: None,
                value: json!({})
            })
        );
    }

    #[test]
    fn events_are_read_with_and_without_a_time() {
        let line = br#"{"timestamp": {"seconds": 2, "microseconds": 5}, "event": "STOP"}"#;
        let want = RawEvent {
            name: "STOP".into(),
            data: Value::Null,
            wall_clock_us: Some(2_000_005),
        };
        assert_eq!(parse_line(line), Ok(Message::Event(want)));
        let line = br#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "RESET", "data": {"guest": true}}"#;
        let want = RawEvent {
            name: "RESET".into(),
            data: json!({"guest": true}),
            wall_clock_us: None,
        };
        assert_eq!(parse_line(line), Ok(Message::Event(want)));
    }

    #[test]
    fn hostile_lines_are_refused() {
        assert_eq!(refused(&vec![b' '; MAX_LINE + 1]), ParseError::TooLong);
        assert_eq!(refused(&vec![b'['; 1 << 20]), ParseError::TooDeep);
        assert_eq!(
            refused(format!("{{\"return\":{}1{}}}", "[".repeat(64), "]".repeat(64)).as_bytes()),
            ParseError::TooDeep
        );
        assert!(
            parse_line(format!("{{\"return\":{}1{}}}", "[".repeat(63), "]".repeat(63)).as_bytes())
                .is_ok()
        );
        for line in [
            &b"[]"[..],
            b"7",
            b"{}",
            b"{\"QMP\": 1}",
            b"{\"error\": {}}",
            b"{\"event\": 4}",
        ] {
            assert!(
                matches!(refused(line), ParseError::NoMessage { .. }),
                "{line:?}"
            );
        }
        for line in [
            &b""[..],
            b"{",
            b"\xff\xfe",
            b"{\"a\":}",
            b"{} {}",
            b"{\"return\": \"\\ud800\"}",
        ] {
            assert!(
                matches!(refused(line), ParseError::NotJson { .. }),
                "{line:?}"
            );
        }
    }

    #[test]
    fn brackets_inside_strings_do_not_nest() {
        let line = format!(
            "{{\"return\": \"{}\\\"{}\"}}",
            "[".repeat(500),
            "{".repeat(500)
        );
        assert!(parse_line(line.as_bytes()).is_ok());
    }

    #[test]
    fn a_stream_is_cut_at_any_place_into_the_same_lines() {
        let stream = b"{\"event\":\"A\"}\r\n{\"event\":\"B\"}\n\n{\"event\":\"C\"}\n";
        for size in 1..=stream.len() {
            let (mut buffer, mut lines) = (LineBuffer::default(), Vec::new());
            for part in stream.chunks(size) {
                buffer.push(part);
                while let Some(line) = buffer.next_line() {
                    lines.push(line.expect("short lines").to_vec());
                }
            }
            let want: [&[u8]; 4] = [
                b"{\"event\":\"A\"}\r",
                b"{\"event\":\"B\"}",
                b"",
                b"{\"event\":\"C\"}",
            ];
            assert_eq!(lines, want, "chunks of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused_once_too_long() {
        let mut buffer = LineBuffer::default();
        buffer.push(&vec![b'x'; MAX_LINE]);
        assert_eq!(buffer.next_line(), None);
        buffer.push(b"x");
        assert_eq!(buffer.next_line(), Some(Err(ParseError::TooLong)));
    }

    #[test]
    fn mutated_messages_never_panic() {
        let seed = br#"{"timestamp": {"seconds": 1, "microseconds": 5}, "event": "MIGRATION", "data": {"status": "x\u00e9\n"}}"#;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            let mut line = seed.to_vec();
            for _ in 0..3 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let at = (state >> 33) as usize % line.len();
                line[at] = (state >> 24) as u8;
            }
            fuzz::line(&line);
        }
    }
}
