//! One process acts for a VM at a host: the exclusive lock.
//!
//! Owns the lock file's descriptor; the lock ends with it, also by kill -9. Refuses: to wait, to be inherited by children,
//! and to outlive its owner in a child that is between fork and exec.

use crate::error::StoreError;
use crate::files::open_regular;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The right to act for a VM, as long as it lives.
#[derive(Debug)]
pub struct VmLock {
    file: File,
}

impl VmLock {
    /// Takes the lock, or says who has it.
    pub fn take(path: &Path) -> Result<Self, StoreError> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        let mut file =
            open_regular(&options, path).map_err(|e| StoreError::io("open", path, true, e))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::Locked {
                    path: path.to_owned(),
                    holder: holder_of(&mut file),
                });
            }
            Err(error) => return Err(StoreError::io("lock", path, true, error.into())),
        }
        // The pid is for people only: that it cannot be written (disk full) must not stop a VM.
        let _ = note_holder(&mut file);
        Ok(Self { file })
    }
}

impl Drop for VmLock {
    fn drop(&mut self) {
        // A child that has not come to its exec yet has this descriptor, too: to close it alone would not end the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

fn holder_of(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn note_holder(file: &mut File) -> std::io::Result<()> {
    file.rewind()?;
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_does_not_outlive_its_owner_in_a_child_before_its_exec() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = VmLock::take(&path).unwrap();
        let in_child = lock.file.try_clone().unwrap();
        assert!(matches!(
            VmLock::take(&path),
            Err(StoreError::Locked { .. })
        ));
        drop(lock);
        VmLock::take(&path).unwrap();
        drop(in_child);
    }
}
