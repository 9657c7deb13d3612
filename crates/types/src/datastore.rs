//! Datastores: named places for disks on a host, and which file in one is a disk's.
//!
//! Pure. Refuses nothing.

use crate::ids::{DatastoreName, VmName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use utoipa::ToSchema;

/// What a host has of them.
pub type Datastores = BTreeMap<DatastoreName, Datastore>;

/// A named place for disks on a host: a directory, or a block device, which holds one disk at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Datastore {
    /// The directory, or the device below `/dev`, as the host has it.
    pub path: String,
    /// Whether other hosts that have a datastore of this name have the same storage behind it.
    #[serde(default)]
    pub shared: bool,
    /// How much room it has, where its host says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<DatastoreRoom>,
}

/// How much room there is in a datastore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatastoreRoom {
    /// Free for disks that come; a little is left to disks that are in use.
    pub free_mib: u64,
    /// Of its whole file system.
    pub total_mib: u64,
}

impl Datastore {
    /// One whose room nobody has looked at.
    pub fn new(path: impl Into<String>, shared: bool) -> Self {
        Self {
            path: path.into(),
            shared,
            room: None,
        }
    }

    /// Whether it is a block device.
    pub fn is_device(&self) -> bool {
        is_device_path(&self.path)
    }

    /// The path of a disk's image that comes to it, by the names of VM and disk.
    pub fn image_of(&self, vm: &VmName, disk: &str) -> String {
        self.path_of(&format!("{vm}-{disk}.raw"))
    }

    /// The path of a file in it; a device is its disk.
    pub fn path_of(&self, file: &str) -> String {
        if self.is_device() {
            return self.path.clone();
        }
        let path = Path::new(&self.path).join(file);
        path.to_string_lossy().into_owned()
    }

    /// Whether a path is that of a file in it; what is in a directory below is not.
    pub fn holds(&self, path: &str) -> bool {
        if self.is_device() {
            return Path::new(path) == Path::new(&self.path);
        }
        Path::new(path).parent() == Some(Path::new(&self.path))
    }
}

/// The datastore that holds this path.
pub fn datastore_of<'a>(
    stores: &'a Datastores,
    path: &str,
) -> Option<(&'a DatastoreName, &'a Datastore)> {
    stores.iter().find(|(_, store)| store.holds(path))
}

/// Whether a path is one by which a host has its devices, as `/dev/vg0/web`; memory that is mounted there (`/dev/shm`) has files.
pub fn is_device_path(path: &str) -> bool {
    let path = Path::new(path);
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_held_by_the_datastore_that_it_comes_to_and_by_no_other() {
        let store = |name: &str, path: &str| {
            (
                DatastoreName::new(name).unwrap(),
                Datastore::new(path, false),
            )
        };
        let stores = Datastores::from([store("fast", "/srv/fast/"), store("all", "/srv")]);
        let fast = &stores[&DatastoreName::new("fast").unwrap()];
        let image = fast.image_of(&VmName::new("web").unwrap(), "root");
        assert_eq!(image, "/srv/fast/web-root.raw");
        let name = |path: &str| Some(datastore_of(&stores, path)?.0.as_str());
        assert_eq!(name(&image), Some("fast"));
        assert_eq!(name("/srv/web-root.raw"), Some("all"));
        assert_eq!(name("/srv/slow/web-root.raw"), None);
        assert_eq!(name("/"), None);
    }

    #[test]
    fn a_device_holds_the_disk_that_is_it() {
        let store = Datastore::new("/dev/vg0/lun", false);
        assert!(store.is_device() && !Datastore::new("/srv/fast", false).is_device());
        let image = store.image_of(&VmName::new("web").unwrap(), "root");
        assert_eq!(image, "/dev/vg0/lun");
        assert!(store.holds(&image) && store.holds("/dev/vg0//lun"));
        assert!(!store.holds("/dev/vg0/lun/web-root.raw") && !store.holds("/dev/vg0"));
    }

    #[test]
    fn a_device_is_named_by_its_path_below_dev_and_a_file_is_not() {
        for path in ["/dev/vg0/web", "/dev/mapper/vg0-web", "/dev/loop7"] {
            assert!(is_device_path(path), "{path}");
        }
        for path in ["/srv/web.raw", "/devices/web.raw", "/dev/shm/web.raw"] {
            assert!(!is_device_path(path), "{path}");
        }
    }
}
