//! What can go wrong between us and the hypervisor's control socket.

use super::parser::ParseError;
use std::io;
use std::path::PathBuf;

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// Nobody answers at this path.
    #[error("cannot connect to the hypervisor's control socket {path}: {source}")]
    Connect {
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection ended, as it does when QEMU dies.
    #[error("the hypervisor closed its control socket")]
    Closed,
    /// No answer before the deadline. The command may still take effect later.
    #[error("the hypervisor did not answer '{command}' in time")]
    Deadline { command: String },
    /// QEMU refused the command; nothing was done.
    #[error("the hypervisor refused '{command}': {description} ({class})")]
    Refused {
        command: String,
        /// QEMU's class of error, such as `GenericError`.
        class: String,
        description: String,
    },
    /// The peer does not speak QMP.
    #[error(transparent)]
    Protocol(#[from] ParseError),
    /// The answer has another shape than QEMU documents.
    #[error("the hypervisor's answer to '{command}' lacks {what}")]
    Shape { command: String, what: &'static str },
    /// A system call on the socket failed.
    #[error("cannot talk to the hypervisor: {0}")]
    Io(#[from] io::Error),
}

impl QmpError {
    /// Whether QEMU certainly did not do what it was asked to.
    pub fn certainly_not_done(&self) -> bool {
        matches!(self, QmpError::Refused { .. } | QmpError::Connect { .. })
    }

    pub(crate) fn shape(command: &str, what: &'static str) -> QmpError {
        QmpError::Shape {
            command: command.to_owned(),
            what,
        }
    }
}
