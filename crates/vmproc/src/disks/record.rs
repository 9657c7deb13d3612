//! What is written down of the disks of a VM's QEMU, and where.
//!
//! In the VM's state directory, durably: that counts once QEMU is gone. While QEMU lives the same stands in its run directory, which
//! no backup brings back: a state directory that was put back from an older copy names images that the guest left long ago.
//! The second one is written last. A process that dies in between leaves one that is older by one step, of which nothing was done yet; its successor goes on
//! from that one, once the first says the same again. Owns both files. Refuses: a second one that cannot be read, or is older by more.

use super::left::{save_spec, says_where};
use super::served::{Served, ServedDisks};
use crate::adoption::lock;
use crate::files::Paths;
use godwit_qemu::strays::Stray;
use godwit_store::{StoreError, load_json, remove_document, save_json};
use godwit_types::vm::VmSpec;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Writes it down, durably.
pub(super) fn write(paths: &Paths, what: &ServedDisks) -> Result<(), StoreError> {
    save_json(&paths.disks(), what)?;
    write_living(paths, what)
}

fn write_living(paths: &Paths, what: &ServedDisks) -> Result<(), StoreError> {
    let Err(error) = save_json(&paths.living_disks(), what) else {
        return Ok(());
    };
    tracing::warn!(%error, "what the VM's disks are is in its state directory alone");
    forget_living(paths)
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

/// What was written last for the QEMU of this launch, whose RAM file is this; nothing where it is not known.
pub(super) fn of_living(
    paths: &Paths,
    (launch, ram): (u64, (u64, u64)),
) -> Result<Option<ServedDisks>, StoreError> {
    let is_its = |what: &ServedDisks| (what.launch, what.ram) == (launch, ram);
    let living: Option<ServedDisks> = load_json(&paths.living_disks())?.filter(is_its);
    let found = load_json(&paths.disks());
    match living
        .filter(|living| !is_overtaken(living, found.as_ref().ok().and_then(Option::as_ref)))
    {
        Some(living) => Ok(Some(living)),
        None => Ok(found?.filter(is_its)),
    }
}

/// Whether what is found in the state directory is of the same QEMU, and knows of a later image of one of its disks.
fn is_overtaken(living: &ServedDisks, found: Option<&ServedDisks>) -> bool {
    found.is_some_and(|found| {
        let is_of_it = (found.launch, found.ram) == (living.launch, living.ram);
        is_of_it && godwit_ownership::is_overtaken(&living.known, &found.known)
    })
}

/// To be called before anything is done with the disks of a QEMU that may live, of this common user: what was written last for it is
/// written again where the state directory says something else, and the VM's description follows.
pub(crate) fn put_back_living(
    paths: &Paths,
    common_uid: u32,
    spec: Option<&mut VmSpec>,
) -> Result<(), StoreError> {
    let Some(what) = load_json::<ServedDisks>(&paths.living_disks())? else {
        return Ok(());
    };
    let found: Option<ServedDisks> = load_json(&paths.disks()).ok().flatten();
    let found = found.as_ref();
    if found.is_some_and(|found| is_same(found, &what)) || is_overtaken(&what, found) {
        return Ok(());
    }
    match lives(paths, common_uid, &what) {
        true => put_back(paths, &what, found, spec),
        false => Ok(()),
    }
}

/// Whether its QEMU does; where that cannot be told it counts.
fn lives(paths: &Paths, common_uid: u32, what: &ServedDisks) -> bool {
    let ram = std::fs::metadata(paths.ram_file(what.launch));
    let is_its = ram.is_ok_and(|ram| (ram.dev(), ram.ino()) == what.ram);
    let is_launch = |qemu: &Stray| qemu.launch == what.launch;
    let living = paths.ram_files.living(common_uid);
    is_its && living.map_or(true, |all| all.iter().any(is_launch))
}

/// Writes it again over an older copy, which was found, and has the description follow.
fn put_back(
    paths: &Paths,
    what: &ServedDisks,
    found: Option<&ServedDisks>,
    spec: Option<&mut VmSpec>,
) -> Result<(), StoreError> {
    tracing::warn!(
        "what the state directory says of the VM's disks is not what was written last: it is written again"
    );
    if let Some(spec) = spec
        && found.is_none_or(|found| found.disks != what.disks)
    {
        describe_living(paths, what, spec)?;
    }
    write(paths, what)
}

/// Whether the state directory says this of a QEMU that was taken over; then the run directory says so, too, if it can.
pub(super) fn is_kept(paths: &Paths, what: &ServedDisks) -> bool {
    let is_kept = says(&paths.disks(), what);
    if is_kept
        && !says(&paths.living_disks(), what)
        && let Err(error) = write_living(paths, what)
    {
        tracing::warn!(%error, "an older word of the VM's disks may count");
    }
    is_kept
}

fn says(path: &Path, what: &ServedDisks) -> bool {
    matches!(load_json::<ServedDisks>(path), Ok(Some(found)) if is_same(&found, what))
}

/// As they are written.
fn is_same(one: &ServedDisks, other: &ServedDisks) -> bool {
    let text = |what| serde_json::to_string(what).ok();
    text(one).is_some() && text(one) == text(other)
}

/// Has the description say where the disks of a QEMU that lives are, where the state directory is from when they were elsewhere: the
/// description is that directory's, too.
fn describe_living(paths: &Paths, what: &ServedDisks, spec: &mut VmSpec) -> Result<(), StoreError> {
    let before = spec.clone();
    let mut is_changed = false;
    for described in &mut spec.disks {
        let now = what.disks.iter().find(|disk| disk.name == described.name);
        is_changed |= now.is_some_and(|now| says_where(described, now));
    }
    match is_changed {
        true => save_spec(paths, spec, before),
        false => Ok(()),
    }
}

impl Served {
    /// Writes it again where a state directory was put back from an older copy, and has the description follow.
    pub(super) fn keep_written(&self, spec: Option<&mut VmSpec>) -> Result<(), StoreError> {
        let what = lock(&self.what);
        if is_kept(&self.paths, &what) {
            return Ok(());
        }
        let found: Option<ServedDisks> = load_json(&self.paths.disks()).ok().flatten();
        put_back(&self.paths, &what, found.as_ref(), spec)
    }
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
