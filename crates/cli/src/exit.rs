//! Errors and the exit codes that scripts see.
//!
//! Owns nothing. Refuses: an error without a sentence.

use godwit_types::migration::Outcome;
use godwit_types::{ApiError, ErrorCode};
use std::process::ExitCode;

/// Exit code: the command was tried and failed.
pub const FAILED: u8 = 1;
/// Exit code: wrong usage or invalid input.
pub const USAGE: u8 = 2;
/// Exit code: refused by a check, a state or a permission.
pub const REFUSED: u8 = 3;
/// Exit code: no such thing.
pub const NOT_FOUND: u8 = 4;
/// Exit code: in doubt.
pub const IN_DOUBT: u8 = 5;
/// Exit code: a target cannot be met.
pub const CANNOT_KEEP: u8 = 6;
/// Exit code: a VM is held by two hosts.
pub const RUNNING_TWICE: u8 = 7;
/// Exit code: watching was interrupted.
pub const DETACHED: u8 = 130;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    /// The error; its message is what people see.
    pub error: ApiError,
    /// Whether the error was shown already.
    pub shown: bool,
}

/// What a command ends with.
pub type CommandResult = Result<(), Failure>;

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        // A host of the site that is silent is a state in the way; whoever was asked did answer.
        let of_a_host = error.code == ErrorCode::HostUnreachable && error.host.is_some();
        Self {
            exit: if of_a_host {
                REFUSED
            } else {
                exit_of(error.code)
            },
            error,
            shown: false,
        }
    }
}

impl Failure {
    /// An error of the command line's own.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        ApiError::new(code, message).into()
    }

    /// An ending that was told already; only the exit code is left.
    pub fn told(exit: u8) -> Self {
        Self {
            exit,
            error: ApiError::new(ErrorCode::Internal, ""),
            shown: true,
        }
    }

    /// Shows the error and makes the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        if !self.shown {
            if json {
                let text = serde_json::json!({ "error": self.error });
                println!("{}", crate::plain::json(&format!("{text:#}")));
            } else {
                crate::plain::tell(&format!("godwit: {}", self.error.message));
            }
        }
        ExitCode::from(self.exit)
    }
}

/// The exit code of an error.
pub fn exit_of(code: ErrorCode) -> u8 {
    use ErrorCode as Code;
    match code {
        Code::InvalidRequest | Code::InvalidVm => USAGE,
        Code::UnknownVm
        | Code::UnknownHost
        | Code::UnknownMigration
        | Code::NotDraining
        | Code::NotFound => NOT_FOUND,
        Code::CannotKeep => CANNOT_KEEP,
        Code::InDoubt => IN_DOUBT,
        Code::RunningTwice => RUNNING_TWICE,
        Code::NotAllowed
        | Code::BadToken
        | Code::AlreadyExists
        | Code::AlreadyMigrating
        | Code::WrongState
        | Code::Unconfirmed
        | Code::StaleController
        | Code::Locked
        | Code::Preflight
        | Code::Incompatible
        | Code::NotMigratable
        | Code::OutOfMemory
        | Code::MissingBridge
        | Code::MissingFile
        | Code::PortInUse
        | Code::Encryption => REFUSED,
        _ => FAILED,
    }
}

/// The exit code of a migration's end.
pub fn exit_of_outcome(outcome: Option<Outcome>) -> u8 {
    match outcome {
        Some(Outcome::Completed) => 0,
        Some(Outcome::InDoubt) => IN_DOUBT,
        Some(Outcome::Cancelled | Outcome::Failed) | None => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_exit() {
        for code in ErrorCode::ALL {
            assert!((1..=7).contains(&exit_of(*code)), "{code}");
        }
        assert_eq!(exit_of(ErrorCode::Preflight), REFUSED);
        assert_eq!(exit_of(ErrorCode::UnknownVm), NOT_FOUND);
        assert_eq!(exit_of(ErrorCode::InvalidVm), USAGE);
        assert_eq!(exit_of(ErrorCode::HostUnreachable), FAILED);
    }

    #[test]
    fn a_silent_host_is_a_state_in_the_way_and_a_silent_controller_a_failure() {
        let silent = || ApiError::new(ErrorCode::HostUnreachable, "it does not answer");
        assert_eq!(Failure::from(silent()).exit, FAILED);
        let host = silent().on_host("b");
        assert_eq!(Failure::from(host).exit, REFUSED);
    }
}
