//! What a host must not forget: the ownership record of each VM, and small documents beside it.
//!
//! Edge crate: owns the files under a host's state directory. Refuses: two writers for one VM, a record that
//! goes back in generations, and to guess at a torn or foreign file.
//!
//! `<state>/vms/<name>/` holds `lock` (flock, with the holder's pid as text) and `ownership` (see
//! [`frame`] for the format). A record is replaced by writing `ownership.new`, fsync, rename, fsync of the
//! directory; after a crash at any of these steps the old or the new record is there, never a third. A record
//! that a dead process wrote may be readable before it is durable: whoever opens the store writes it again
//! before acting on it (the ownership core's first action is exactly that).
#![forbid(unsafe_code)]

mod checksum;
mod error;
mod files;
pub mod frame;
mod json;
mod lock;
mod vm;

pub use error::StoreError;
pub use files::{Files, RealFiles, make_directory, read_regular, read_text, replace_durably};
pub use json::{
    DOCUMENT_BYTES_MAX, json_from, json_of, json_size, load_json, remove_document, save_json,
    sync_document,
};
pub use lock::VmLock;
pub use vm::{RECORD_BYTES_MAX, UEFI_VARIABLES_FILE, VmStore};
