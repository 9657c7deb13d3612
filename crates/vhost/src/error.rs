//! What can go wrong with a disk, in sentences for people.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What a disk, its queues or its front end did.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// In words, as 'make an in-flight area'.
        action: &'static str,
        source: io::Error,
    },
    /// The disk's socket cannot be made.
    #[error("cannot listen at {path}: {source}")]
    Listen { path: PathBuf, source: io::Error },
    /// QEMU said something that no QEMU says.
    #[error("QEMU's message {request} is refused: {reason}")]
    Message { request: u32, reason: String },
    /// QEMU ended the connection.
    #[error("QEMU has closed the connection")]
    Closed,
    /// The guest's driver did something that no driver does.
    #[error("the guest's driver broke its queue: {reason}")]
    Guest { reason: String },
    /// Requests are still under way.
    #[error("{under_way} requests were still under way after {waited:?}")]
    Busy { under_way: usize, waited: Duration },
    /// The disk's thread does not answer.
    #[error("the disk's thread has not answered for {waited:?}")]
    Silent { waited: Duration },
    /// Storage is slow, or hangs.
    #[error(
        "what its guest wrote was not durable after {waited:?}, since its storage is slow or does not answer: its guest works on with the disk as it is; see to the storage, and try again"
    )]
    NotDurable { waited: Duration },
    /// What is to be served cannot be.
    #[error("this cannot be a disk: {reason}")]
    Settings { reason: String },
    /// A disk does not go on in another program over the connection that it has.
    #[error("the disk is not handed over: {reason}")]
    Handover { reason: String },
    /// The disk's thread has ended.
    #[error("the disk's thread has ended; the log says why")]
    Ended,
    #[error(transparent)]
    Image(#[from] godwit_blockio::Error),
    /// The guest's memory is not where QEMU says.
    #[error(transparent)]
    Memory(#[from] godwit_guestmem::Error),
}

impl Error {
    pub(crate) fn guest(reason: impl Into<String>) -> Self {
        Self::Guest {
            reason: reason.into(),
        }
    }

    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System {
            action,
            source: source.into(),
        }
    }
}
