//! Which VM of this host has a block device for a disk, on or off: by the VMs' own files.
//!
//! Such a device may bear no label, and both its ends may be zero, so that nothing on it tells. Owns nothing. Refuses: a device of which it
//! cannot be told; in doubt it is somebody's.

use crate::device::{open_device, unseen};
use crate::disk::{identity_of, identity_of_open};
use godwit_store::{VmStore, load_json};
use godwit_types::VmName;
use godwit_types::datastore::is_device_path;
use godwit_types::host_api::SPEC_FILE;
use godwit_types::vm::{DiskSpec, VmSpec};
use rustix::fs::OFlags;
use std::fmt::Display;
use std::fs::File;
use std::path::Path;

/// Refuses a device that another VM than this one has, of those whose files are below this state directory. Why is a part of a sentence. Waits
/// for the storage of all their disks.
pub fn must_be_nobodys(state: &Path, own: Option<&VmName>, device: &File) -> Result<(), String> {
    must_not_be_among(state, own, device, |_| true)
}

fn must_not_be_among(
    state: &Path,
    own: Option<&VmName>,
    device: &File,
    counts: impl Fn(&DiskSpec) -> bool,
) -> Result<(), String> {
    let told = |error: &dyn Display| format!("may be a disk of another VM of this host: {error}");
    let identity = identity_of_open(device).map_err(|error| told(&error))?;
    let all = match std::fs::read_dir(VmStore::all(state)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        all => all.map_err(|error| told(&error))?,
    };
    for entry in all {
        let name = entry.map_err(|error| told(&error))?.file_name();
        let Some(Ok(vm)) = name.to_str().map(VmName::new) else {
            continue;
        };
        let record = VmStore::peek(state, &vm).map_err(|error| told(&error))?;
        if own == Some(&vm) || !record.is_some_and(|held| held.may_hold()) {
            continue;
        }
        let spec = VmStore::directory(state, &vm).join(SPEC_FILE);
        let spec: Option<VmSpec> = load_json(&spec).map_err(|error| told(&error))?;
        let disks = spec.iter().flat_map(|spec| &spec.disks);
        let mut disks = disks.filter(|disk| counts(disk));
        // One that is not there is no device that is.
        let is_it = |disk: &&DiskSpec| matches!(identity_of(Path::new(&disk.path)), Ok(Some(found)) if found == identity);
        if let Some(disk) = disks.find(is_it) {
            return Err(format!(
                "is disk '{}' of VM '{vm}', which this host has, too: choose another place",
                disk.name
            ));
        }
    }
    Ok(())
}

/// The same of a device that is not open, among the disks whose paths are below `/dev`: whoever asks must not wait for others' file systems, and
/// who opens the device looks at all. Why is a part of a sentence that names it.
pub fn device_must_be_nobodys(
    state: &Path,
    own: Option<&VmName>,
    path: &str,
) -> Result<(), String> {
    let device = open_device(Path::new(path), OFlags::RDONLY);
    let device = device.map_err(|error| unseen(path, &error))?;
    let of_devices = |disk: &DiskSpec| is_device_path(&disk.path);
    must_not_be_among(state, own, &device, of_devices)
        .map_err(|why| format!("the device {path} {why}"))
}
