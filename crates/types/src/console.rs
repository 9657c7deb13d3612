//! A guest's serial console, as it goes from one program to the next: pieces of its text, and what is typed to it.
//!
//! Pure data. A text begins with each start of a guest and goes along when it moves; each of its bytes has a number, so that who
//! reads it goes on where it was after a connection, a process or a host was lost. Refuses: more than is ever kept or typed.

use crate::ids::HostName;
use crate::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// So much of a text is kept, in bytes; what is older is forgotten.
pub const CONSOLE_KEPT_MAX: usize = 64 << 10;
/// Most bytes that are typed at once.
pub const CONSOLE_TYPED_MAX: usize = 4 << 10;
/// Longest name of a text, in bytes.
const TEXT_NAME_LEN_MAX: usize = 32;

/// How far a reader of a console is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsolePlace {
    /// Tells this text from those of other machines that had the VM's name.
    pub text: String,
    /// How many of its bytes were read.
    pub after: u64,
}

/// Which text is followed from where on: what stands behind the question mark.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsoleQuery {
    /// Nothing was read yet without it.
    pub place: Option<ConsolePlace>,
    /// The copy on this host, wherever else the VM may be.
    pub host: Option<HostName>,
}

impl ConsoleQuery {
    /// The query as it is read; names need no escapes.
    pub fn to_text(&self) -> String {
        let place = self.place.as_ref();
        let place = place.map(|ConsolePlace { text, after }| format!("text={text}&after={after}"));
        let host = self.host.as_ref().map(|host| format!("host={host}"));
        let parts: Vec<String> = place.into_iter().chain(host).collect();
        parts.join("&")
    }

    /// Reads it; the error is a sentence.
    pub fn parse(query: &str) -> Result<Self, ApiError> {
        let (mut text, mut after, mut host) = (None, None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("text", name)) if is_name(name) => text = Some(name.to_owned()),
                Some(("after", number)) => after = Some(number.parse().map_err(|_| refused())?),
                Some(("host", name)) => host = Some(HostName::new(name).map_err(|_| refused())?),
                _ => return Err(refused()),
            }
        }
        let place = match (text, after) {
            (Some(text), Some(after)) => Some(ConsolePlace { text, after }),
            (None, None) => None,
            _ => return Err(refused()),
        };
        Ok(Self { place, host })
    }
}

fn refused() -> ApiError {
    let message =
        "the query is text=NAME&after=N, as they were told with what was read last, and host=HOST";
    ApiError::new(ErrorCode::InvalidRequest, message)
}

/// Whether a text may have this name.
fn is_name(text: &str) -> bool {
    (1..=TEXT_NAME_LEN_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// What comes next in a console's text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsolePiece {
    /// The name of the text: another one where the guest was started anew, or moved without its text.
    pub text: String,
    /// How many bytes stand before these. More than the reader had read where it missed some.
    pub from: u64,
    /// As the guest wrote them, in base64.
    #[serde(with = "crate::base64_bytes")]
    #[schema(value_type = String)]
    pub bytes: Vec<u8>,
    /// The text came along when the guest was moved to this host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub came_along: bool,
    /// The host where the guest wrote them; none where that is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
}

impl ConsolePiece {
    /// Where a reader is who has read it.
    pub fn place(&self) -> ConsolePlace {
        ConsolePlace {
            text: self.text.clone(),
            after: self.from.saturating_add(self.bytes.len() as u64),
        }
    }
}

/// Keys that somebody pressed at a guest's console.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConsoleTyped {
    /// In base64, at most 4 KiB of them.
    #[serde(with = "crate::base64_bytes")]
    #[schema(value_type = String)]
    pub bytes: Vec<u8>,
}

/// The newest part of a text, as it is kept and goes along with its guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleKept {
    /// Tells this text from those of other machines that had the VM's name.
    pub text: String,
    /// How many bytes the whole text has.
    pub end: u64,
    /// Those that are still kept, up to `end`.
    #[serde(with = "crate::base64_bytes")]
    pub bytes: Vec<u8>,
    /// It came along when the guest was moved to this host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub came_along: bool,
}

impl ConsoleKept {
    /// A text without a byte.
    pub fn named(text: String) -> Self {
        Self {
            text,
            ..Self::default()
        }
    }

    /// Whether another host may say this.
    pub fn is_within_bounds(&self) -> bool {
        is_name(&self.text)
            && self.bytes.len() <= CONSOLE_KEPT_MAX
            && (self.bytes.len() as u64..=u64::MAX / 2).contains(&self.end)
    }

    /// Adds what the guest wrote; the newest [`CONSOLE_KEPT_MAX`] bytes stay.
    pub fn add(&mut self, news: &[u8]) {
        self.end = self.end.saturating_add(news.len() as u64);
        self.bytes.extend_from_slice(news);
        let too_much = self.bytes.len().saturating_sub(CONSOLE_KEPT_MAX);
        self.bytes.drain(..too_much);
    }

    /// What a reader has not read who is at this place: all that is kept for one who reads another text, or whom too much was
    /// written for.
    pub fn after(&self, place: Option<&ConsolePlace>) -> ConsolePiece {
        let begin = self.end.saturating_sub(self.bytes.len() as u64);
        let read = place.filter(|place| place.text == self.text);
        let read = read.map(|place| place.after);
        let from = read.filter(|after| (begin..=self.end).contains(after));
        let from = from.unwrap_or(begin);
        let skipped = usize::try_from(from - begin).unwrap_or(usize::MAX);
        ConsolePiece {
            text: self.text.clone(),
            from,
            bytes: self.bytes.get(skipped..).unwrap_or_default().to_vec(),
            came_along: self.came_along,
            host: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(end: u64, bytes: &[u8]) -> ConsoleKept {
        ConsoleKept {
            text: "a1".into(),
            end,
            bytes: bytes.to_vec(),
            came_along: false,
        }
    }

    /// A guest that writes for ever would else fill the memory of whoever keeps it.
    #[test]
    fn a_console_keeps_its_newest_64_kib() {
        let mut text = kept(7, &vec![b'a'; CONSOLE_KEPT_MAX - 1]);
        text.end = CONSOLE_KEPT_MAX as u64 - 1;
        text.add(b"bcd");
        assert_eq!(text.bytes.len(), CONSOLE_KEPT_MAX);
        assert!(text.bytes.starts_with(b"aa") && text.bytes.ends_with(b"abcd"));
        assert_eq!(text.end, CONSOLE_KEPT_MAX as u64 + 2);
        text.add(&vec![b'e'; CONSOLE_KEPT_MAX + 5]);
        assert_eq!(text.bytes, vec![b'e'; CONSOLE_KEPT_MAX]);
        assert!(text.is_within_bounds());
    }

    #[test]
    fn a_reader_goes_on_where_it_was_and_sees_what_it_missed() {
        let text = kept(10, b"6789");
        let at = |name: &str, after| {
            let place = ConsolePlace {
                text: name.into(),
                after,
            };
            let piece = text.after(Some(&place));
            (piece.from, piece.bytes)
        };
        assert_eq!(at("a1", 8), (8, b"89".to_vec()));
        assert_eq!(at("a1", 10), (10, Vec::new()));
        assert_eq!(at("a1", 3), (6, b"6789".to_vec()), "it missed three");
        assert_eq!(at("a1", 11), (6, b"6789".to_vec()), "no such byte");
        assert_eq!(at("b2", 8), (6, b"6789".to_vec()), "another text");
        assert_eq!(text.after(None).place().after, 10);
    }

    #[test]
    fn a_query_reads_what_it_writes_and_refuses_the_rest() {
        let place = Some(kept(10, b"6789").after(None).place());
        let host = HostName::new("b").ok();
        for (place, host) in [
            (None, None),
            (place.clone(), None),
            (None, host.clone()),
            (place, host),
        ] {
            let query = ConsoleQuery { place, host };
            assert_eq!(ConsoleQuery::parse(&query.to_text()), Ok(query));
        }
        for text in [
            "text=a1",
            "after=3",
            "text=x y&after=3",
            "text=a1&after=-1",
            "host=",
            "all",
        ] {
            assert!(ConsoleQuery::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_another_host_says_is_bounded() {
        assert!(kept(4, b"6789").is_within_bounds());
        assert!(!kept(3, b"6789").is_within_bounds(), "longer than it is");
        assert!(!kept(u64::MAX, b"").is_within_bounds(), "it could not grow");
        let long = vec![b'x'; CONSOLE_KEPT_MAX + 1];
        assert!(!kept(1 << 20, &long).is_within_bounds());
        for name in ["", "a b", "0123456789abcdef0123456789abcdef0"] {
            assert!(
                !ConsoleKept::named(name.into()).is_within_bounds(),
                "{name}"
            );
        }
    }
}
