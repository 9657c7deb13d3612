//! What can go wrong with durable files, in words for people.
//!
//! Owns nothing. Refuses: to hide whether the old content is known to be in place.

use godwit_ownership::RecordError;
use godwit_types::VmName;
use std::io;
use std::path::{Path, PathBuf};

/// Why something was not stored or not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another process has the VM.
    #[error("{} is in use by process {}: only one process may act for a VM", path.display(), holder.map_or("unknown".to_owned(), |pid| pid.to_string()))]
    Locked {
        path: PathBuf,
        /// The holder, if it could be read.
        holder: Option<u32>,
    },
    /// An operation on a file failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation, as a verb.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Whether the old content is known to be what a reader finds, now and after a crash.
        unchanged: bool,
        source: io::Error,
    },
    /// The disk is full.
    #[error("no space left to {what} {}: free some space on that file system; the old content is kept", path.display())]
    NoSpace {
        /// The operation, as a verb.
        what: &'static str,
        path: PathBuf,
        /// As in [`StoreError::Io`].
        unchanged: bool,
    },
    /// The file is not what was written, or no file at all.
    #[error("{} is damaged ({why}): it is not used, and an older copy must not take its place", path.display())]
    Damaged {
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The same of a VM's record, which a person may give up.
    #[error("{} is damaged ({why}): it is not used. An older copy must not take its place; where no process of the VM lives on this host, 'godwit vm forget-record {vm}' there puts the file aside", path.display())]
    DamagedRecord {
        path: PathBuf,
        /// Whose record it is.
        vm: VmName,
        /// What is wrong with it.
        why: String,
    },
    /// A later version of the software wrote the file: it is no damage, and nothing may be done as if it were not there.
    #[error("{} was written by a newer Godwit ({why}): this version does not use it and changes nothing that it is about; install that version again on this host", path.display())]
    Newer {
        path: PathBuf,
        /// What this build does not know of it.
        why: String,
    },
    /// More than the limit.
    #[error("{} is {size} bytes long, the limit is {limit}", path.display())]
    TooLarge {
        path: PathBuf,
        /// Its size, in bytes (or one more than the limit if it was not read to its end).
        size: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A value that cannot be written down.
    #[error("cannot encode {}: {source}", path.display())]
    Encode {
        /// The file it was for.
        path: PathBuf,
        source: serde_json::Error,
    },
    /// The record itself is wrong.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl StoreError {
    /// A file that could not be read: what is none is damaged, whatever else it is.
    pub(crate) fn unread(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::InvalidData => Self::Damaged {
                path: path.to_owned(),
                why: source.to_string(),
            },
            _ => Self::io("read", path, true, source),
        }
    }

    pub(crate) fn io(
        what: &'static str,
        path: impl Into<PathBuf>,
        unchanged: bool,
        source: io::Error,
    ) -> Self {
        let path = path.into();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace {
                what,
                path,
                unchanged,
            },
            _ => Self::Io {
                what,
                path,
                unchanged,
                source,
            },
        }
    }

    /// Whether the old content is known to be in place: what [`godwit_ownership::Event::PersistFailed`] asks.
    pub fn unchanged(&self) -> bool {
        match self {
            StoreError::Io { unchanged, .. } | StoreError::NoSpace { unchanged, .. } => *unchanged,
            StoreError::Locked { .. }
            | StoreError::Damaged { .. }
            | StoreError::DamagedRecord { .. }
            | StoreError::Newer { .. }
            | StoreError::TooLarge { .. }
            | StoreError::Encode { .. }
            | StoreError::Record(_) => true,
        }
    }
}
