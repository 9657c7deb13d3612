//! What is written down of the disks of a VM's QEMU, and where.
//!
//! In the VM's state directory, durably: that counts once QEMU is gone. While QEMU lives the same stands in its run directory, which
//! no backup brings back: a state directory that was put back from an older copy names images that the guest left long ago.
//! Owns both files. Refuses: a second one that is older than the first.

use super::served::ServedDisks;
use crate::files::Paths;
use godwit_store::{StoreError, load_json, remove_document, save_json};
use godwit_types::vm::VmSpec;
use std::io;
use std::os::unix::fs::MetadataExt as _;

/// Writes it down, durably.
pub(super) fn write(paths: &Paths, what: &ServedDisks) -> Result<(), StoreError> {
    forget_living(paths)?;
    save_json(&paths.disks(), what)?;
    if let Err(error) = save_json(&paths.living_disks(), what) {
        tracing::warn!(%error, "what the VM's disks are is in its state directory alone");
    }
    Ok(())
}

pub(super) fn remove(paths: &Paths) -> Result<(), StoreError> {
    forget_living(paths)?;
    remove_document(&paths.disks())
}

/// From here on the state directory counts alone.
fn forget_living(paths: &Paths) -> Result<(), StoreError> {
    let path = paths.living_disks();
    match std::fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StoreError::Io {
            what: "remove",
            path,
            unchanged: true,
            source,
        }),
        _ => Ok(()),
    }
}

/// To be called before anything is read of the disks of a QEMU that may live: what was written last for it counts, and the VM's
/// description follows.
pub(crate) fn put_back_living(paths: &Paths, spec: Option<&mut VmSpec>) -> Result<(), StoreError> {
    let Some(what) = load_json::<ServedDisks>(&paths.living_disks())? else {
        return Ok(());
    };
    let ram = std::fs::metadata(paths.ram_file(what.launch));
    match ram.is_ok_and(|ram| (ram.dev(), ram.ino()) == what.ram) {
        true => put_back(paths, &what, spec),
        false => Ok(()),
    }
}

/// Writes down again what the disks are where an older copy of that is in the state directory. The description is that
/// directory's too.
pub(super) fn put_back(
    paths: &Paths,
    what: &ServedDisks,
    spec: Option<&mut VmSpec>,
) -> Result<(), StoreError> {
    let found = load_json::<ServedDisks>(&paths.disks());
    let found = match found {
        Ok(Some(found)) if found == *what => return Ok(()),
        found => found.ok().flatten(),
    };
    tracing::error!(
        "what the state directory says of the disks is not what was written last: it is written again"
    );
    write(paths, what)?;
    if let Some(spec) = spec
        && found.is_none_or(|found| found.disks != what.disks)
        && says_where(spec, what)
    {
        save_json(&paths.spec(), spec)?;
    }
    Ok(())
}

/// Has a description say where the disks are; whether it said something else.
fn says_where(spec: &mut VmSpec, what: &ServedDisks) -> bool {
    let mut is_changed = false;
    for described in &mut spec.disks {
        let now = what.disks.iter().find(|disk| disk.name == described.name);
        if let Some(now) = now.filter(|now| now.path != described.path) {
            described.path.clone_from(&now.path);
            described.shared = now.shared;
            is_changed = true;
        }
    }
    is_changed
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
