//! The journal of one VM at one host.
//!
//! Owns the VM's directory while it lives, and removes from it what is of no use once the VM is elsewhere. Refuses: a second writer, a record of another VM, a generation that
//! goes back, a damaged file, and one that a newer build wrote.

use crate::error::StoreError;
use crate::files::{Files, RealFiles, directory_of, fresh_name, make_directory, replace_durably};
use crate::frame::{self, Unread};
use crate::json::{format_of, is_unknown_word};
use crate::lock::VmLock;
use godwit_ownership::{HostRecord, Phase, RECORD_FORMAT};
use godwit_types::VmName;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Longest record file, in bytes: far above what a record needs.
pub const RECORD_BYTES_MAX: u64 = 64 << 10;

/// Beside the record: the variables of a VM with UEFI. They are its holder's alone: an older copy on a host where the VM once was
/// must never take their place.
pub const UEFI_VARIABLES_FILE: &str = "uefi-variables";

/// The journal of one VM, open for writing.
#[derive(Debug)]
pub struct VmStore<F: Files = RealFiles> {
    vm: VmName,
    path: PathBuf,
    files: F,
    /// The last record read or tried, with the highest generation that may be on the disk.
    known: Option<HostRecord>,
    _lock: Option<VmLock>,
}

impl VmStore<RealFiles> {
    /// Opens (making it if need be) `<state>/vms/<vm>/` and takes its lock.
    pub fn open(state: &Path, vm: &VmName) -> Result<Self, StoreError> {
        let dir = Self::directory(state, vm);
        make_directory(&dir, 0o700)?;
        let lock = VmLock::take(&dir.join("lock"))?;
        let mut store = Self::with_files(&dir, vm, RealFiles)?;
        store._lock = Some(lock);
        Ok(store)
    }

    /// Where a VM's files are.
    pub fn directory(state: &Path, vm: &VmName) -> PathBuf {
        Self::all(state).join(vm.as_str())
    }

    /// Where all of them have theirs.
    pub fn all(state: &Path) -> PathBuf {
        state.join("vms")
    }

    /// The state directory whose VM has its files in this one, if it is one of those.
    pub fn state_of(directory: &Path) -> Option<&Path> {
        directory.parent()?.parent()
    }

    /// A VM's record without taking its lock: for lists and reports, and for who only refuses by it: it may be old at once.
    pub fn peek(state: &Path, vm: &VmName) -> Result<Option<HostRecord>, StoreError> {
        let path = Self::directory(state, vm).join("ownership");
        read_record(&RealFiles, &path, vm)
    }
}

impl<F: Files> VmStore<F> {
    /// A journal on other files than the operating system's, without a lock: for tests that crash it.
    pub fn with_files(dir: &Path, vm: &VmName, files: F) -> Result<Self, StoreError> {
        let path = dir.join("ownership");
        let known = read_record(&files, &path, vm)?;
        Ok(Self {
            vm: vm.clone(),
            path,
            files,
            known,
            _lock: None,
        })
    }

    /// The record on the disk, `None` if this host never heard of the VM.
    pub fn load(&self) -> Result<Option<HostRecord>, StoreError> {
        read_record(&self.files, &self.path, &self.vm)
    }

    /// Replaces the record. On an error [`StoreError::unchanged`] says whether the old one is known to be
    /// in place. What a host has of the VM itself goes with the record: a host that begins to have the VM finds nothing of an
    /// earlier time, and one that has it no more keeps nothing.
    pub fn persist(&mut self, record: &HostRecord) -> Result<(), StoreError> {
        let absent = HostRecord::absent(self.vm.clone());
        let before = self.known.as_ref().unwrap_or(&absent);
        record.check_follows(before)?;
        let (had_it, has_it) = (may_have(before), may_have(record));
        if !had_it && has_it {
            self.remove_variables()?;
        }
        self.replace(record)?;
        if !has_it {
            // It is written that the VM is not here: what could not be removed is when the VM comes again.
            let _ = self.remove_variables();
        }
        Ok(())
    }

    /// Durably, if there are any.
    fn remove_variables(&self) -> Result<(), StoreError> {
        let dir = directory_of(&self.path);
        let path = dir.join(UEFI_VARIABLES_FILE);
        let mut removed = false;
        for path in [fresh_name(&path), path] {
            let failed = |error| StoreError::io("remove", &path, true, error);
            if self.files.read(&path, 0).map_err(failed)?.is_some() {
                self.files.remove(&path).map_err(failed)?;
                removed = true;
            }
        }
        match removed {
            true => (self.files.sync_dir(dir))
                .map_err(|error| StoreError::io("make durable", dir, true, error)),
            false => Ok(()),
        }
    }

    fn replace(&mut self, record: &HostRecord) -> Result<(), StoreError> {
        let payload = serde_json::to_vec(record).map_err(|source| StoreError::Encode {
            path: self.path.clone(),
            source,
        })?;
        let file = frame::encode(&payload)
            .filter(|file| file.len() as u64 <= RECORD_BYTES_MAX)
            .ok_or_else(|| self.too_large(payload.len() as u64))?;
        let done = replace_durably(&self.files, &self.path, &file);
        if done.as_ref().err().is_none_or(|e| !e.unchanged()) {
            self.known = Some(record.clone());
        }
        done
    }

    fn too_large(&self, size: u64) -> StoreError {
        StoreError::TooLarge {
            path: self.path.clone(),
            size,
            limit: RECORD_BYTES_MAX,
        }
    }
}

/// Whether what is here of the VM itself is of use: it is here, or comes.
fn may_have(record: &HostRecord) -> bool {
    record.may_hold() || matches!(record.phase, Phase::Incoming { .. })
}

fn read_record<F: Files>(
    files: &F,
    path: &Path,
    vm: &VmName,
) -> Result<Option<HostRecord>, StoreError> {
    let damaged = |why: String| StoreError::DamagedRecord {
        path: path.to_owned(),
        vm: vm.clone(),
        why,
    };
    let content = match files.read(path, RECORD_BYTES_MAX) {
        Ok(Some(content)) => content,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            return Err(damaged(error.to_string()));
        }
        Err(error) => return Err(StoreError::io("read", path, true, error)),
    };
    if content.len() as u64 > RECORD_BYTES_MAX {
        return Err(damaged(format!(
            "it is longer than {RECORD_BYTES_MAX} bytes"
        )));
    }
    let newer = |why: String| StoreError::Newer {
        path: path.to_owned(),
        why,
    };
    let payload = frame::decode(&content).map_err(|unread| match unread {
        Unread::Damaged(why) => damaged(why),
        Unread::Newer(why) => newer(why),
    })?;
    if let Some(format) = format_of(payload).filter(|format| *format > RECORD_FORMAT.into()) {
        let why = format!("its format is {format}, this build reads {RECORD_FORMAT}");
        return Err(newer(why));
    }
    // The checksum says that every byte is as it was written.
    let record: HostRecord =
        serde_json::from_slice(payload).map_err(|error| match is_unknown_word(&error) {
            true => newer(error.to_string()),
            false => damaged(error.to_string()),
        })?;
    record.check().map_err(|error| damaged(error.to_string()))?;
    if record.vm != *vm {
        return Err(damaged(format!("it is the record of '{}'", record.vm)));
    }
    Ok(Some(record))
}
