//! Images that go along with their VM: how they are called while they come, and what becomes of those that are left.
//!
//! An image that comes has a name of its own until its VM is here, so that nobody takes half of a disk for a whole one. Owns
//! nothing: the files are the VM's, and `disks.json` says which. Refuses: to remove a file that is another one than QEMU had.

use super::served::{Arrival, ServedDisks};
use crate::files::Paths;
use godwit_qemu::disk::identity_of;
use godwit_store::{load_json, remove_document, save_json};
use godwit_types::vm::DiskSpec;
use godwit_types::{Generation, MigrationId};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The name of an image that comes with this migration.
pub(super) fn arriving_path(path: &str, migration: &MigrationId) -> String {
    format!("{path}.arriving-{migration}")
}

/// The VM is held here under this generation and has no QEMU: images that came with it get their names, if it is the one
/// under which they were whole; what another migration left of some is removed.
pub(crate) fn settle(paths: &Paths, generation: Generation) {
    let Some((what, arrival)) = arrival(paths) else {
        return;
    };
    if arrival.whole != Some(generation) {
        return put_aside(paths);
    }
    tracing::info!(migration = %arrival.migration, "the disks that came with the VM are this host's");
    give_names(&what.disks, &arrival.migration);
    written(
        paths,
        &ServedDisks {
            arriving: None,
            ..what
        },
    );
}

/// Gives images that came their names. One whose name is taken keeps its own, and its disk is refused when it is opened.
pub(super) fn give_names(disks: &[DiskSpec], migration: &MigrationId) {
    for disk in along(disks) {
        let came = arriving_path(&disk.path, migration);
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        let here = rustix::fs::CWD;
        match rustix::fs::renameat_with(here, &came, here, &disk.path, flags) {
            Ok(()) => {}
            // A predecessor did it.
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => {
                tracing::error!(disk = disk.name, %error, "{came} does not get its name, {}", disk.path);
            }
        }
    }
}

/// Makes the names of images durable.
pub(super) fn keep_names(disks: &[DiskSpec]) -> io::Result<()> {
    let parents = along(disks).filter_map(|disk| Path::new(&disk.path).parent());
    let parents: BTreeSet<&Path> = parents.collect();
    parents
        .into_iter()
        .try_for_each(|parent| File::open(parent)?.sync_all())
}

/// The VM did not come: what came of its disks is removed.
pub(crate) fn put_aside(paths: &Paths) {
    let Some((what, arrival)) = arrival(paths) else {
        return;
    };
    for disk in along(&what.disks) {
        remove(Path::new(&arriving_path(&disk.path, &arrival.migration)));
    }
    forget(paths);
}

/// Another host holds the VM, and has said so: the images that went along are no disks of it any more.
pub(crate) fn leave(paths: &Paths) {
    let Ok(Some(what)) = load_json::<ServedDisks>(&paths.disks()) else {
        return;
    };
    for (disk, image) in what.disks.iter().zip(&what.images) {
        let path = Path::new(&disk.path);
        if !disk.goes_along() || what.arriving.is_some() {
            continue;
        }
        match identity_of(path) {
            Ok(Some(found)) if found == *image => {
                tracing::info!(
                    disk = disk.name,
                    "its image went along with the VM, and is removed here"
                );
                remove(path);
            }
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => {
                let path = path.display();
                tracing::warn!(
                    disk = disk.name,
                    "{path} is not the image that went along: it is left alone"
                );
            }
        }
    }
    forget(paths);
}

fn arrival(paths: &Paths) -> Option<(ServedDisks, Arrival)> {
    let what: Option<ServedDisks> = load_json(&paths.disks()).unwrap_or_else(|error| {
        tracing::error!(%error, "what came of the VM's disks cannot be read");
        None
    });
    let what = what?;
    let arrival = what.arriving.clone()?;
    Some((what, arrival))
}

fn along(disks: &[DiskSpec]) -> impl Iterator<Item = &DiskSpec> {
    disks.iter().filter(|disk| disk.goes_along())
}

fn written(paths: &Paths, what: &ServedDisks) {
    if let Err(error) = keep_names(&what.disks) {
        tracing::error!(%error, "the names of the VM's images may not be durable");
        return;
    }
    if let Err(error) = save_json(&paths.disks(), what) {
        tracing::error!(%error, "that the VM's disks are here cannot be written");
    }
}

fn forget(paths: &Paths) {
    if let Err(error) = remove_document(&paths.disks()) {
        tracing::warn!(%error, "what disks the VM had is not forgotten");
    }
}

fn remove(path: &Path) {
    let removed = std::fs::remove_file(path);
    let parent = path.parent().map(PathBuf::from);
    match removed {
        Ok(()) => {
            let synced = parent.map(|parent| File::open(parent)?.sync_all());
            if let Some(Err(error)) = synced {
                tracing::warn!(path = %path.display(), %error, "that a file is removed may not be durable");
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "a file is left behind");
        }
    }
}
