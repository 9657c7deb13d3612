//! Errors that people and scripts meet: a stable code, one clear sentence, and what to do.
//!
//! Codes are part of the REST interface: they are added, never renamed. Refuses: free-form codes.

use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use utoipa::ToSchema;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = ($text:literal, $status:literal),)*) => {
        /// Error codes that scripts rely on: added, never renamed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "kebab-case")]
        #[non_exhaustive]
        pub enum ErrorCode { $($(#[$doc])* $name,)* }

        impl ErrorCode {
            /// The code as written in JSON.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The HTTP status that goes with it.
            pub fn http_status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            /// Every code, for documentation and tests.
            pub const ALL: &'static [ErrorCode] = &[$(Self::$name,)*];
        }
    };
}

codes! {
    /// The request's body or parameters are not valid.
    InvalidRequest = ("invalid-request", 400),
    /// The VM description is not valid.
    InvalidVm = ("invalid-vm", 400),
    /// Who asks is not known or not allowed.
    NotAllowed = ("not-allowed", 403),
    /// The join token is wrong, used or expired.
    BadToken = ("bad-token", 403),
    UnknownVm = ("unknown-vm", 404),
    UnknownHost = ("unknown-host", 404),
    UnknownMigration = ("unknown-migration", 404),
    NotFound = ("not-found", 404),
    /// The path exists, the method does not.
    MethodNotAllowed = ("method-not-allowed", 405),
    /// The request's body is longer than allowed.
    TooLarge = ("too-large", 413),
    /// The name is taken.
    AlreadyExists = ("already-exists", 409),
    /// The VM is already moving.
    AlreadyMigrating = ("already-migrating", 409),
    /// The VM is not in a state that allows this.
    WrongState = ("wrong-state", 409),
    /// The VM is in doubt and must be resolved first.
    InDoubt = ("in-doubt", 409),
    /// The VM's former host has not said yet that it knows where the VM is; it passes.
    Unconfirmed = ("unconfirmed", 409),
    /// Several hosts hold the VM.
    RunningTwice = ("running-twice", 409),
    /// The command comes from a controller whose word is older than one that was heard.
    StaleController = ("stale-controller", 409),
    /// Another process holds this VM's journal.
    Locked = ("locked", 409),
    /// A preflight check failed; the message names host and remedy.
    Preflight = ("preflight", 412),
    /// A host lacks something this VM needs.
    Incompatible = ("incompatible", 412),
    /// The VM has a device or disk that cannot migrate.
    NotMigratable = ("not-migratable", 412),
    /// Not enough memory at the destination.
    OutOfMemory = ("out-of-memory", 507),
    /// A bridge does not exist.
    MissingBridge = ("missing-bridge", 412),
    /// A file does not exist.
    MissingFile = ("missing-file", 412),
    PortInUse = ("port-in-use", 409),
    /// The prediction says that a target which must be met cannot be.
    CannotKeep = ("cannot-keep", 412),
    NotDraining = ("not-draining", 404),
    /// The encryption mode cannot be met.
    Encryption = ("encryption", 412),
    /// A host or its agent does not answer.
    HostUnreachable = ("host-unreachable", 503),
    /// The migration failed; the guest runs at the source.
    MigrationFailed = ("migration-failed", 502),
    DeadlineMissed = ("deadline-missed", 504),
    /// The hypervisor failed or refused.
    Hypervisor = ("hypervisor", 502),
    /// A fault of Godwit's own.
    Internal = ("internal", 500),
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error as REST and the command line show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Stable code for scripts. One that a newer peer has and this build does not is `internal` here.
    #[serde(deserialize_with = "known_code")]
    pub code: ErrorCode,
    /// One sentence: what is wrong, where, and what to do.
    pub message: String,
    /// The host it concerns, when there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Of a start that was refused: its guest was not let run by it, so that it wrote nothing. Said only where that is certain.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_begun: bool,
}

fn known_code<'de, D: Deserializer<'de>>(code: D) -> Result<ErrorCode, D::Error> {
    let text = String::deserialize(code)?;
    let known = ErrorCode::ALL.iter().find(|code| code.as_str() == text);
    Ok(known.copied().unwrap_or(ErrorCode::Internal))
}

impl ApiError {
    /// An error with no particular host.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            host: None,
            not_begun: false,
        }
    }

    /// The same error in one line that fits on a screen: it came from elsewhere.
    pub fn bounded(mut self) -> Self {
        crate::text::sentence(&mut self.message);
        if let Some(host) = &mut self.host {
            crate::text::sentence(host);
            crate::text::cut(host, crate::ids::NAME_LEN_MAX);
        }
        self
    }

    /// The same error of a start by which no guest was let run.
    pub fn not_begun(mut self) -> Self {
        self.not_begun = true;
        self
    }

    /// The same error, said of a host.
    pub fn on_host(mut self, host: impl fmt::Display) -> Self {
        self.host = Some(host.to_string());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_peers_code_leaves_its_sentence() {
        let text = r#"{"code":"frozen-over","message":"the lake is closed"}"#;
        let error: ApiError = serde_json::from_str(text).unwrap();
        let known = ApiError::new(ErrorCode::Internal, "the lake is closed");
        assert_eq!(error, known);
    }

    #[test]
    fn code_text_is_what_json_says() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
            assert!((400..600).contains(&code.http_status()));
        }
    }
}
