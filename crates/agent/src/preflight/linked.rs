//! The part of preflight that looks at linked disks which come: whether this host has the very image as which each begins.
//!
//! Reads only. Refuses nothing: a disk whose image is not here becomes one image, as far as it may, and the line says why.

use crate::config::HostConfig;
use crate::making::directories;
use crate::users;
use godwit_qemu::parent::must_be_same;
use godwit_qemu::user::User;
use godwit_types::datastore::{datastore_of, is_device_path};
use godwit_types::migration::{DiskToMove, LinkedTo};
use godwit_types::vm::VmSpec;

/// Disks as they come to this host.
pub(super) struct Come {
    pub disks: Vec<DiskToMove>,
    /// The names of those that stay linked.
    pub stay_linked: Vec<String>,
    /// A line for each linked one.
    pub passed: Vec<String>,
}

/// How these disks, as their source says, come here.
pub(super) fn come(config: &HostConfig, spec: &VmSpec, disks: &[DiskToMove]) -> Come {
    let mut come = Come {
        disks: Vec::new(),
        stay_linked: Vec::new(),
        passed: Vec::new(),
    };
    let host = &config.name;
    for disk in disks {
        let Some(linked) = &disk.linked else {
            come.disks.push(disk.clone());
            continue;
        };
        let (name, path) = (&disk.name, &linked.path);
        match stays(config, spec, (disk, linked)) {
            Ok(()) => {
                come.passed.push(format!(
                    "the image {path}, to which disk '{name}' is linked, is on host '{host}', too"
                ));
                come.stay_linked.push(name.clone());
                come.disks.push(disk.clone());
            }
            Err(why) => {
                come.passed.push(format!(
                    "disk '{name}' does not stay linked to the image {path} on host '{host}': {why}"
                ));
                come.disks.push(disk.as_one_image());
            }
        }
    }
    come
}

/// Why not is the end of a sentence.
fn stays(
    config: &HostConfig,
    spec: &VmSpec,
    (disk, linked): (&DiskToMove, &LinkedTo),
) -> Result<(), String> {
    let mut here = spec.disks.iter().filter(|here| here.name == disk.name);
    let is_on_device = here.any(|here| {
        let store = datastore_of(&config.datastores, &here.path);
        store.is_some_and(|(_, store)| store.is_device()) || is_device_path(&here.path)
    });
    if is_on_device {
        return Err("it comes to a block device".to_owned());
    }
    let user = users::qemu_user(config.qemu_user.as_deref()).unwrap_or(users::NOBODY);
    let user = User {
        uid: user.uid,
        gid: user.gid,
    };
    let stores = directories(&config.datastores);
    must_be_same(linked, disk.bytes, &stores, user)
}
