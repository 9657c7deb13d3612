//! Images that go along with their VM: how they are called while they come, when they get their names, and when those of a source go.
//!
//! An image that comes has a name of its own until its VM is here, so that nobody takes half of a disk for a whole one. Owns
//! nothing: the files are the VM's, and `disks.json` says which. What cannot be removed stays noted there, and is tried again
//! ([`crate::left_over`]). All is done in the directory that was looked into ([`super::entry`]).
//! Refuses: to remove a file that is another one than QEMU had.

use super::came::{Arrival, Aside, Source, keep_all, put_aside};
use super::devices;
use super::entry::Entry;
use super::labelled::{arriving_name, finish_at};
use super::left::{Left, moved, settle_moves};
use super::record;
use super::served::ServedDisks;
use super::there::note_went_on;
use super::told;
use crate::faults::planted;
use crate::files::Paths;
use godwit_store::{load_json, remove_document};
use godwit_types::datastore::is_device_path;
use godwit_types::vm::DiskSpec;
use godwit_types::{Generation, MigrationId, VmName};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// The name of an image that comes with this migration.
pub(super) fn arriving_path(path: &str, migration: &MigrationId) -> String {
    format!("{path}.arriving-{migration}")
}

/// The VM is held here under this generation and has no QEMU: images that came with it get their names, if it is the one
/// under which they were whole. What else came may be somebody's only copy, and is kept.
pub(crate) fn settle(paths: &Paths, generation: Generation) -> Result<(), String> {
    let Some((what, arrival)) = arrival(paths) else {
        return Ok(());
    };
    match arrival.whole {
        None => over(put_aside(paths, Source::Gone, None))?,
        Some(_) if arrival.belongs_to(generation) => {
            // For good: also where they cannot be named now, and another generation follows.
            let arriving = Some(Arrival {
                ours: true,
                ..arrival.clone()
            });
            let ours = ServedDisks {
                arriving,
                ..what.clone()
            };
            record::write(paths, &ours).map_err(|error| error.to_string())?;
            give_names(&paths.vm, &what.disks, &arrival.migration)?;
            tracing::info!(migration = %arrival.migration, "the disks that came with the VM are this host's");
            here(paths, what);
        }
        Some(_) => {
            over(keep_all(&what, &arrival))?;
            here(paths, what);
        }
    }
    Ok(())
}

/// Whatever starts the VM next would forget what stays.
fn over(aside: Aside) -> Result<(), String> {
    aside.must_be_over().map_err(|error| error.message)
}

/// Gives images that came their names.
pub(super) fn give_names(
    vm: &VmName,
    disks: &[DiskSpec],
    migration: &MigrationId,
) -> Result<(), String> {
    for disk in along(disks) {
        let came = arriving_path(&disk.path, migration);
        let named = match is_device_path(&disk.path) {
            true => finish_at(&arriving_name(&disk.path, migration), (vm, disk)),
            false => rename(Path::new(&came), Path::new(&disk.path)).map(drop),
        };
        named.map_err(|error| {
            let (name, path) = (&disk.name, &disk.path);
            format!(
                "the image of disk '{name}', which came as {came}, does not get its name {path} ({error}): if another file is there, move that one away, and let the guest go on"
            )
        })?;
    }
    Ok(())
}

/// Gives an image another name beside its own. Nothing is done where a predecessor did it. A file that is there is never replaced.
pub(super) fn rename<'a>(from: &Path, to: &'a Path) -> io::Result<Entry<'a>> {
    let entry = Entry::at(to)?;
    entry.take_from(from.file_name().unwrap_or_default())?;
    Ok(entry)
}

/// Makes the names of images durable, or those that they have while they come with a migration.
pub(super) fn keep_names(disks: &[DiskSpec], coming: Option<&MigrationId>) -> io::Result<()> {
    // What a label says is durable already.
    let files = along(disks).filter(|disk| !is_device_path(&disk.path));
    let path = |disk: &DiskSpec| match coming {
        Some(migration) => arriving_path(&disk.path, migration),
        None => disk.path.clone(),
    };
    let one_of_each: BTreeMap<_, _> = files
        .map(|disk| (Path::new(&disk.path).parent(), path(disk)))
        .collect();
    let mut paths = one_of_each.values().map(Path::new);
    paths.try_for_each(|path| {
        let entry = Entry::at(path)?;
        match planted("ready-before-flush") {
            // The file that becomes durable with its name would hide that nothing else did.
            true => entry.sync_names(),
            false => entry.sync(),
        }
    })
}

/// Another host holds the VM, which went there with this migration, and has said so: the images that went along are no disks
/// of it any more. A record that is an older copy tells of another migration than the one that the disks were mirrored for.
pub(crate) fn leave(paths: &Paths, migration: &MigrationId) {
    let Ok(Some(what)) = load_json::<ServedDisks>(&paths.disks()) else {
        return;
    };
    let record = paths.disks();
    let is_news = |what, why: &str| told::is_news((what, &record), why);
    devices::note(paths, &what, true);
    // What a disk was being copied to is known to be none only while the disk has its image.
    settle_left_moves(paths);
    let what = load_json::<ServedDisks>(&paths.disks());
    // Whoever looks again tries again.
    let Ok(Some(what)) = what.map(|what| what.filter(|what| what.copying.is_none())) else {
        return;
    };
    let noted = note_went_on(paths, &what, migration);
    if let Err(error) = noted
        && is_news("along", &error.to_string())
    {
        tracing::warn!(%error, "copies that earlier migrations left at other hosts may stay there");
    }
    if what.leaving.as_ref() != Some(migration) {
        if along(&what.disks).next().is_some() && is_news("mirrored", migration.as_str()) {
            tracing::warn!(
                "the VM's disks were not mirrored with migration {migration}: they are left alone"
            );
        }
        return forget(paths);
    }
    let own = what.with_images().filter(|(disk, _)| disk.goes_along());
    // Each is tried, and an image after what else belongs to it: as long as that is there it is tried again.
    let gone = own.map(|own| {
        let parts = what.leaving_parts.get(&own.0.name);
        parts.is_none_or(|parts| parts.remove(Path::new(&own.0.path))) && what.noted(own).remove()
    });
    let gone: Vec<bool> = gone.collect();
    // Whoever looks again tries again.
    match gone.iter().all(|gone| *gone) {
        true => forget(paths),
        false if is_news("gone", migration.as_str()) => tracing::warn!(
            "images of the VM, which went to another host with migration {migration}, are not removed yet; this is tried again until they are gone"
        ),
        false => {}
    }
}

/// Removes what moves of a VM that is not here left on this host. What cannot be removed is tried again, and told once.
fn settle_left_moves(paths: &Paths) {
    if let Err(why) = settle_moves(paths, None)
        && told::is_news(("moves", &paths.disks()), &why)
    {
        tracing::warn!(why, "what moves of the VM's disks left is not removed");
    }
}

pub(super) fn arrival(paths: &Paths) -> Option<(ServedDisks, Arrival)> {
    let what: Option<ServedDisks> = load_json(&paths.disks()).unwrap_or_else(|error| {
        tracing::error!(%error, "what came of the VM's disks cannot be read");
        None
    });
    let what = what?;
    let arrival = what.arriving.clone()?;
    Some((what, arrival))
}

pub(super) fn along(disks: &[DiskSpec]) -> impl Iterator<Item = &DiskSpec> {
    disks.iter().filter(|disk| disk.goes_along())
}

/// Nothing is on its way any more.
fn here(paths: &Paths, what: ServedDisks) {
    let what = &ServedDisks {
        arriving: None,
        ..what
    };
    if let Err(error) = keep_names(&what.disks, None) {
        tracing::error!(%error, "the names of the VM's images may not be durable");
        return;
    }
    if let Err(error) = record::write(paths, what) {
        tracing::error!(%error, "that the VM's disks are here cannot be written");
    }
}

pub(super) fn forget(paths: &Paths) {
    if let Ok(Some(what)) = load_json::<ServedDisks>(&paths.disks()) {
        devices::note(paths, &what, false);
    }
    settle_left_moves(paths);
    // What could not be removed stays noted until it is, and tells nothing of a VM of that name that comes.
    let of_none = |left: Left| match left.followed {
        true => Left {
            disk: String::new(),
            ..left
        },
        false => left,
    };
    let forgotten = match moved(paths) {
        Ok(Some(what)) => record::write(
            paths,
            &ServedDisks {
                arriving: None,
                leaving: None,
                leaving_parts: BTreeMap::new(),
                along: Vec::new(),
                left: what.left.into_iter().map(of_none).collect(),
                ..what
            },
        ),
        _ => record::remove(paths),
    };
    if let Err(error) = forgotten.and_then(|()| remove_document(&paths.images())) {
        tracing::warn!(%error, "what disks the VM had is not forgotten");
    }
}

/// Returns whether it is gone.
pub(super) fn remove(path: &Path) -> bool {
    match Entry::at(path) {
        Ok(entry) => entry.remove(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => {
            if told::is_news(("removed", path), &error.to_string()) {
                tracing::warn!(path = %path.display(), %error, "a file is left behind");
            }
            false
        }
    }
}

#[cfg(test)]
#[path = "images_tests.rs"]
pub(super) mod tests;
