//! Small documents as JSON: VM definitions, migration reports, QEMU's identity.
//!
//! A document without the number `format` has format 1, as all have today. A change after which an older build must not
//! use a document raises it; other changes add fields with defaults. Documents are written with a checksum and read without
//! one, too, so that a flipped letter is told as damage, not as a word of a newer version. Owns nothing. Refuses: documents
//! beyond a bound, damaged ones, those of a later format or with words that this build does not know, and to leave half of
//! one behind.

use crate::checksum::{Seal, seal_of, sealed};
use crate::error::StoreError;
use crate::files::{Files, RealFiles, directory_of, replace_durably, sync_name};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Longest document, in bytes.
pub const DOCUMENT_BYTES_MAX: u64 = 4 << 20;

/// The latest format of a document that this build reads.
pub const DOCUMENT_FORMAT: u64 = 1;

/// The part of a document that every version keeps.
#[derive(Deserialize)]
struct Formatted {
    format: u64,
}

/// The format that a text says it has.
pub(crate) fn format_of(text: &[u8]) -> Option<u64> {
    let read: Option<Formatted> = serde_json::from_slice(text).ok();
    read.map(|read| read.format)
}

/// Whether a whole text was refused for words that this build does not know.
pub(crate) fn is_unknown_word(error: &serde_json::Error) -> bool {
    let text = error.to_string();
    error.is_data() && (text.starts_with("unknown field") || text.starts_with("unknown variant"))
}

/// Replaces the document at `path`, durably. Its directory must exist.
pub fn save_json<T: Serialize>(path: &Path, document: &T) -> Result<(), StoreError> {
    let text = text_of(path, document)?;
    check_size(path, text.len() as u64)?;
    replace_durably(&RealFiles, path, &text)
}

fn text_of<T: Serialize>(path: &Path, document: &T) -> Result<Vec<u8>, StoreError> {
    let mut text = serde_json::to_vec_pretty(document).map_err(|source| StoreError::Encode {
        path: path.to_owned(),
        source,
    })?;
    text.push(b'\n');
    Ok(sealed(text))
}

/// How long the document would be at `path`, in bytes: it is written only up to [`DOCUMENT_BYTES_MAX`].
pub fn json_size<T: Serialize>(path: &Path, document: &T) -> Result<u64, StoreError> {
    text_of(path, document).map(|text| text.len() as u64)
}

/// The document at `path`, `None` if there is none.
pub fn load_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, StoreError> {
    let content = RealFiles
        .read(path, DOCUMENT_BYTES_MAX)
        .map_err(|e| StoreError::unread(path, e))?;
    let Some(content) = content else {
        return Ok(None);
    };
    json_of(path, &content).map(Some)
}

/// The document of a file that is open and has this path. Read is no more than one may be long.
pub fn json_from<T: DeserializeOwned>(path: &Path, file: impl Read) -> Result<T, StoreError> {
    let mut content = Vec::new();
    let read = file.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut content);
    read.map_err(|error| StoreError::unread(path, error))?;
    json_of(path, &content)
}

/// The document that was read at `path`.
pub fn json_of<T: DeserializeOwned>(path: &Path, content: &[u8]) -> Result<T, StoreError> {
    check_size(path, content.len() as u64)?;
    let newer = |why: String| StoreError::Newer {
        path: path.to_owned(),
        why,
    };
    if seal_of(content) == Seal::Wrong {
        return Err(StoreError::Damaged {
            path: path.to_owned(),
            why: "its checksum is wrong; who has edited it by hand takes the last line, of blanks, away".into(),
        });
    }
    if let Some(format) = format_of(content).filter(|format| *format > DOCUMENT_FORMAT) {
        let why = format!("its format is {format}, this build reads {DOCUMENT_FORMAT}");
        return Err(newer(why));
    }
    serde_json::from_slice(content).map_err(|error| {
        if is_unknown_word(&error) {
            return newer(error.to_string());
        }
        StoreError::Damaged {
            path: path.to_owned(),
            why: error.to_string(),
        }
    })
}

/// Removes the document at `path`, durably; no error if there is none.
pub fn remove_document(path: &Path) -> Result<(), StoreError> {
    RealFiles
        .remove(path)
        .map_err(|e| StoreError::io("remove", path, true, e))?;
    let dir = directory_of(path);
    RealFiles
        .sync_dir(dir)
        .map_err(|e| StoreError::io("make durable", dir, false, e))
}

/// Makes the document that is found at `path` durable, or that there is none. Whoever wrote it may have died before it was.
pub fn sync_document(path: &Path) -> Result<(), StoreError> {
    match sync_name(&RealFiles, path) {
        Err((what, error)) if what == path && error.kind() == ErrorKind::NotFound => Ok(()),
        synced => synced.map_err(|(what, error)| StoreError::io("make durable", what, true, error)),
    }
}

fn check_size(path: &Path, size: u64) -> Result<(), StoreError> {
    if size <= DOCUMENT_BYTES_MAX {
        return Ok(());
    }
    Err(StoreError::TooLarge {
        path: path.to_owned(),
        size,
        limit: DOCUMENT_BYTES_MAX,
    })
}
