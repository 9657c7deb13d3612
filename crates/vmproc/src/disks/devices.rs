//! Block devices that were a VM's disks on this host, and are no more.
//!
//! Nothing of Godwit removes one, so each has the disk still, as it was when it left, and an older copy of the VM's description names it. They
//! are in a file of the VM's state, which stays when the VM leaves: whoever serves its disks here again knows them
//! ([`super::left`]), until the VM is deleted. Owns that file. Refuses: to stop anything for a list that cannot be read or written, which the log
//! tells.

use super::former::is_device;
use super::left::Left;
use super::served::ServedDisks;
use crate::files::Paths;
use godwit_store::{load_json, save_json};
use serde::{Deserialize, Serialize};

/// How many are kept; the oldest go first.
const KEPT: usize = 64;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormerDevices {
    devices: Vec<Left>,
}

/// Those of which is known here.
pub(super) fn noted(paths: &Paths) -> Vec<Left> {
    let noted = load_json::<FormerDevices>(&paths.former_devices());
    let noted = noted.unwrap_or_else(|error| {
        tracing::error!(%error, "which block devices were disks of the VM is not known");
        None
    });
    noted.unwrap_or_default().devices
}

/// The VM is not here any more: notes those that moves on this host left, and with it those that it had when it left.
pub(super) fn note(paths: &Paths, what: &ServedDisks, went_along: bool) {
    let left = what.left.iter().filter(|left| !left.is_to_go());
    let mut devices: Vec<Left> = left.cloned().collect();
    if went_along {
        devices.extend(what.with_images().map(|(disk, image)| Left {
            parts: Default::default(),
            disk: disk.name.clone(),
            path: disk.path.clone(),
            image,
            known: None,
            part: None,
            followed: true,
        }));
    }
    devices.retain(|left| is_device(left.image));
    // Whatever description comes next is another one.
    devices.iter_mut().for_each(|left| left.followed = true);
    if devices.is_empty() {
        return;
    }
    let before = noted(paths);
    let is_new = |before: &&Left| devices.iter().all(|left| left.path != before.path);
    let others: Vec<_> = before.iter().filter(is_new).cloned().collect();
    devices.extend(others);
    devices.truncate(KEPT);
    // It is noted each time that something of the VM is tried again.
    if devices == before {
        return;
    }
    if let Err(error) = save_json(&paths.former_devices(), &FormerDevices { devices }) {
        tracing::error!(%error, "which block devices were disks of the VM is not written");
    }
}
