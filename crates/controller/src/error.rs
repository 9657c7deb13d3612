//! Errors of starting and running the controller, and the short cuts to what people read.

use crate::unread::UnreadRow;
use godwit_rpc::pki::PkiError;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};

/// Why the controller could not be made or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The directory holds no controller, or one already.
    #[error("{0}")]
    Setup(String),
    /// A file or socket.
    #[error("cannot {doing} {what}: {source}")]
    Io {
        doing: &'static str,
        what: String,
        source: std::io::Error,
    },
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error("the controller's database failed: {0}; see that its disk has room and is writable")]
    Database(#[from] sqlx::Error),
    #[error("the controller's database cannot be brought up to date: {0}")]
    Format(#[from] sqlx::migrate::MigrateError),
    /// A later version of the software has changed the database's format.
    #[error("the controller's database was written by a newer Godwit (its format is {format}, this version reads {}): nothing is changed; install that version again here", newest.unwrap_or_default())]
    Newer {
        format: i64,
        /// The latest that this build reads.
        newest: Option<i64>,
    },
    /// A row without which the controller does not start.
    #[error("{}", .0.sentence())]
    Row(UnreadRow),
    /// Something in the database that this version cannot read.
    #[error("the controller's database holds a {what} that cannot be read: {cause}")]
    Unreadable { what: &'static str, cause: String },
}

impl From<ControllerError> for ApiError {
    fn from(error: ControllerError) -> Self {
        tracing::error!(%error, "internal error");
        ApiError::new(ErrorCode::Internal, error.to_string())
    }
}

/// The result of an operation: a value, or an error that people can read.
pub type Outcome<T> = Result<T, ApiError>;

/// A host does not answer: names it, and the command for one that is off.
pub fn silent(host: &HostName) -> ApiError {
    let message = format!(
        "host {host} does not answer: see that it is on and its agent runs; or, when it is powered off, say so with 'godwit host fenced {host}'"
    );
    ApiError::new(ErrorCode::HostUnreachable, message).on_host(host)
}

/// The same of an error that a silent host is the cause of; any other error as it is.
pub fn way_out(error: ApiError) -> ApiError {
    let named = error
        .host
        .as_deref()
        .and_then(|host| HostName::new(host).ok());
    match named {
        Some(host)
            if error.code == ErrorCode::HostUnreachable && !error.message.contains("fenced") =>
        {
            silent(&host)
        }
        _ => error,
    }
}

/// An error in one sentence.
pub fn refuse<T>(code: ErrorCode, message: impl Into<String>) -> Outcome<T> {
    Err(ApiError::new(code, message))
}

/// The answer to a request that names an unknown VM.
pub fn unknown_vm(vm: &VmName) -> ApiError {
    ApiError::new(
        ErrorCode::UnknownVm,
        format!("there is no VM {vm}: see 'godwit vm list'"),
    )
}

/// The answer to a request about the disks of a VM that was never started. `instead`: what else a person may do.
pub fn on_no_host(vm: &VmName, instead: Option<&str>) -> ApiError {
    let instead = instead.map(|instead| format!(", or {instead}"));
    let message = format!(
        "no host has VM {vm} yet, and its disks hold nothing: start it first{}",
        instead.unwrap_or_default()
    );
    ApiError::new(ErrorCode::WrongState, message)
}

/// A host does not answer.
pub fn unreachable_host(host: &HostName) -> ApiError {
    ApiError::new(
        ErrorCode::HostUnreachable,
        format!("host {host} does not answer: see that it is on and its agent runs"),
    )
    .on_host(host)
}

/// A host answers but its VM process, or that one's QEMU, does not yet. `note` says which, and what to do, where that is known.
pub fn being_taken_over(vm: &VmName, host: &HostName, note: Option<String>) -> ApiError {
    let text = match note {
        Some(note) => format!("VM {vm} on host {host} takes no commands now: {note}"),
        None => format!(
            "the process of VM {vm} on host {host} is being started: try again in a few seconds"
        ),
    };
    ApiError::new(ErrorCode::WrongState, text).on_host(host)
}

/// A VM is in doubt; `note` has the way out.
pub fn in_doubt(vm: &VmName, note: Option<String>) -> ApiError {
    let note = note.unwrap_or_default();
    ApiError::new(ErrorCode::InDoubt, format!("VM {vm} is in doubt: {note}"))
}

/// What is known of a VM cannot be read, at a host or here; `note` has the way out.
pub fn damaged(vm: &VmName, note: Option<String>) -> ApiError {
    let note = note.unwrap_or_default();
    ApiError::new(
        ErrorCode::WrongState,
        format!("what is on record of VM {vm} cannot be read: {note}"),
    )
}

/// Several hosts hold a VM; `note` has the way out.
pub fn held_twice(vm: &VmName, note: Option<String>) -> ApiError {
    let note = note.unwrap_or_default();
    ApiError::new(
        ErrorCode::RunningTwice,
        format!("VM {vm} is held twice: {note}"),
    )
}
