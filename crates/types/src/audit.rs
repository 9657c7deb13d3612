//! The audit log's entries: who asked the controller for what, and what came of it.
//!
//! Pure data; field names are stable.

use crate::error::ErrorCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One request that changed something, or would have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Rises with every entry.
    pub id: i64,
    /// When it was asked for, seconds since 1970.
    pub unix_s: i64,
    /// Who asked: the local user with the user who logged in, or the name in the certificate.
    pub who: String,
    /// Serial number of the certificate, of somebody who came over the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    /// The command that asks for it, such as `vm start`; method and path of what no command asks for.
    pub what: String,
    /// The VM, host or migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// The request's JSON where it is short, and what stood behind the question mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// What came of it.
    pub result: AuditResult,
    /// Why it was refused or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How often: refused attempts of clients without certificate are counted.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u64,
    /// When the last of them was, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_unix_s: Option<i64>,
}

fn once() -> u64 {
    1
}

fn is_once(times: &u64) -> bool {
    *times == 1
}

/// What came of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AuditResult {
    /// It was carried out, or begun, of what takes long.
    Done,
    /// It may not be asked by this person, or a state, a check or its own form stands against it.
    Refused,
    Failed,
    /// It has not been answered: it is under way, or the controller ended in the middle.
    Open,
}

impl AuditResult {
    /// By the HTTP status that was answered.
    pub fn of_status(status: Option<u16>) -> Self {
        match status {
            None => Self::Open,
            Some(status) if status < 400 => Self::Done,
            Some(status) if status < 500 => Self::Refused,
            Some(_) => Self::Failed,
        }
    }
}

impl std::fmt::Display for AuditResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Open => "open",
        })
    }
}

/// Which entries to show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Entries at most, newest first.
    pub last: Option<u32>,
    /// Only those about this VM, host or migration.
    pub about: Option<String>,
}

impl AuditQuery {
    /// Entries that are shown when nothing else is asked for.
    pub const LAST: u32 = 50;
    /// Entries that one answer has at most.
    pub const LAST_MAX: u32 = 1_000;

    /// What stands behind the question mark; names need no escapes.
    pub fn to_text(&self) -> String {
        let last = format!("last={}", self.last.unwrap_or(Self::LAST));
        match &self.about {
            Some(about) => format!("{last}&about={about}"),
            None => last,
        }
    }

    /// Reads it; the error is a sentence.
    pub fn parse(text: &str) -> Result<Self, crate::ApiError> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("last", number)) => {
                    let number = number.parse().ok();
                    let number = number.filter(|n| (1..=Self::LAST_MAX).contains(n));
                    query.last = Some(number.ok_or_else(refused)?);
                }
                Some(("about", name)) if is_name(name) => query.about = Some(name.to_owned()),
                _ => return Err(refused()),
            }
        }
        Ok(query)
    }
}

fn is_name(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=128).contains(&text.len()) && text.bytes().all(fits)
}

fn refused() -> crate::ApiError {
    let most = AuditQuery::LAST_MAX;
    let message = format!(
        "the query is last=N with N from 1 to {most}, and about=NAME of a VM, host or migration"
    );
    crate::ApiError::new(ErrorCode::InvalidRequest, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_reads_what_it_writes_and_refuses_the_rest() {
        let query = AuditQuery {
            last: Some(3),
            about: Some("web-1".into()),
        };
        assert_eq!(AuditQuery::parse(&query.to_text()).unwrap(), query);
        assert_eq!(AuditQuery::parse("").unwrap(), AuditQuery::default());
        for bad in [
            "last=0",
            "last=1001",
            "last=x",
            "about=",
            "about=a'b",
            "who=a",
            "last",
        ] {
            assert!(AuditQuery::parse(bad).is_err(), "{bad}");
        }
    }
}
