//! What can be wrong with an image, in sentences for people.

use std::io;
use std::path::PathBuf;

/// What an image, or the kernel, refuses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call on an image failed.
    #[error("cannot {action} the image {path}: {source}")]
    Image {
        /// In words, as 'open'.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The image is no disk.
    #[error("{path} cannot be a disk's image: {reason}")]
    Unusable { path: PathBuf, reason: String },
    /// Somebody else has the image open.
    #[error("the image {path} is in use: {holder}; stop that VM, or end that tool")]
    InUse {
        path: PathBuf,
        /// As far as the kernel tells.
        holder: String,
    },
    /// The kernel gives no thread or descriptor.
    #[error("cannot {action}: {source}")]
    System {
        /// In words, as 'begin a thread'.
        action: &'static str,
        source: io::Error,
    },
    /// The kernel gives no ring.
    #[error(
        "cannot {action} with io_uring: {source}; see that the sysctl kernel.io_uring_disabled is 0 and that the limit of locked memory (ulimit -l) is not used up"
    )]
    Ring {
        action: &'static str,
        source: io::Error,
    },
}

impl Error {
    /// Whether it says nothing of what the image is, which may be heard another time.
    pub fn is_of_storage(&self) -> bool {
        !matches!(self, Self::Unusable { .. })
    }
}
