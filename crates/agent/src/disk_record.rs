//! What a VM process has written of its VM's disks, as far as the agent needs it where it asks none.
//!
//! The form of that file is the VM process's (`vmproc`, `disks/served.rs`), whose crate the agent does not have; one example binds both. What the agent does
//! not need of it is kept as it is. Owns nothing. Refuses nothing: what cannot be read says nothing.

use godwit_blockio::label::End;
use godwit_store::{StoreError, load_json, save_json};
use godwit_types::datastore::{Datastores, datastore_of, is_device_path};
use godwit_types::host_api::DISKS_FILE;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// The record of one VM's disks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct DiskRecord {
    #[serde(default)]
    disks: Vec<Disk>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    arriving: Option<Arriving>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    copying: Option<Copying>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left: Vec<Left>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    labelled: Vec<Labelled>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// As far as it is needed here: a VM process of another version may write more of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Disk {
    path: String,
    #[serde(default)]
    read_only: bool,
    #[serde(default)]
    shared: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Disks that come with a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Arriving {
    migration: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A disk that is moved on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Copying {
    path: String,
    /// Its name until it is whole.
    beside: String,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// An image that a disk had before it moved on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Left {
    /// Empty where it is no disk's any more.
    disk: String,
    path: String,
    /// Whether the VM's description says where the disk is since.
    #[serde(default)]
    followed: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A block device that bears a label, and how long it was when it got that, if it is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Labelled {
    At(String),
    Long {
        path: String,
        device: u64,
        #[serde(flatten)]
        rest: Map<String, Value>,
    },
    Other(Value),
}

impl DiskRecord {
    /// That of a VM with these directories. What stands in the run directory counts first: no backup brings that back.
    pub(crate) fn load(run_dir: &Path, state_dir: &Path) -> Self {
        let run = Self::in_directory(run_dir);
        let state = || Self::in_directory(state_dir).ok().flatten();
        run.ok().flatten().or_else(state).unwrap_or_default()
    }

    /// What the file in this directory says, if there is one.
    pub(crate) fn in_directory(dir: &Path) -> Result<Option<Self>, StoreError> {
        load_json(&dir.join(DISKS_FILE))
    }

    /// Where the disk on the device with this path ends. What a guest writes at the end of a device that is its disk may look like a label.
    pub(crate) fn end_of(&self, stores: &Datastores, path: &str) -> End {
        if let Some(device) = self.labelled(path) {
            return End::ByLabel(device);
        }
        let is_disk = self.disks.iter().any(|disk| disk.path == path);
        match datastore_of(stores, path) {
            Some((_, store)) if store.is_device() && !is_disk => End::ByLabel(None),
            _ => End::OfDevice,
        }
    }

    fn labelled(&self, path: &str) -> Option<Option<u64>> {
        self.labelled.iter().find_map(|label| match label {
            Labelled::At(own) => (own == path).then_some(None),
            Labelled::Long {
                path: own, device, ..
            } => (own == path).then_some(Some(*device)),
            Labelled::Other(_) => None,
        })
    }

    /// Former images that could not be removed before the VM left are of no disk any more: a description that names one of them follows to no
    /// image of that time. One that no description followed away from is left where it is. Written only where that changes something.
    pub(crate) fn leave_former(dir: &Path) -> Result<(), StoreError> {
        // One that cannot be read is the VM process's to tell of.
        let Ok(Some(before)) = Self::in_directory(dir) else {
            return Ok(());
        };
        let mut now = before.clone();
        now.left.retain(|left| left.followed);
        now.left.iter_mut().for_each(|left| left.disk.clear());
        match now == before {
            true => Ok(()),
            false => save_json(&dir.join(DISKS_FILE), &now),
        }
    }

    /// What nothing of Godwit knows any more once this is forgotten, each a sentence for people. No device is asked.
    pub(crate) fn stays(&self) -> Vec<String> {
        let came = self.came().map(|came| match is_device_path(&came) {
            true => format!("what came with a migration may be on the device that '{came}' names: its label tells"),
            false => format!("an image that came with a migration stays: {came}"),
        });
        let copying = self.copying.iter().map(|copying| {
            let (path, beside) = (&copying.path, &copying.beside);
            format!("an image that is not whole may stay: {beside}, or {path}")
        });
        let left = self.left.iter().map(|left| {
            let path = &left.path;
            format!("an image that no disk has any more may stay: {path}")
        });
        came.chain(copying).chain(left).collect()
    }

    /// Images that came with a VM whose migration ended elsewhere, and that wait for a word of their source. On a device that is the name of
    /// a part which it may hold.
    fn came(&self) -> impl Iterator<Item = String> {
        let migration = self.arriving.iter().map(|arriving| &arriving.migration);
        let paths = migration.flat_map(|migration| {
            let disks = self.disks.iter();
            let along = disks.filter(|disk| !disk.read_only && !disk.shared);
            along.map(move |disk| format!("{}.arriving-{migration}", disk.path))
        });
        paths.filter(|path| is_device_path(path) || Path::new(path).exists())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::DatastoreName;
    use godwit_types::datastore::Datastore;

    #[test]
    fn a_device_is_measured_by_a_label_only_where_it_is_a_datastore_or_known_to_bear_one() {
        let (run, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let lun = DatastoreName::new("lun").unwrap();
        let stores = Datastores::from([(lun, Datastore::new("/dev/vg0/lun", false))]);
        let of = |path: &str| DiskRecord::load(run.path(), state.path()).end_of(&stores, path);
        assert_eq!(of("/dev/vg0/web"), End::OfDevice);
        assert_eq!(of("/dev/vg0/lun"), End::ByLabel(None));
        let write = |dir: &tempfile::TempDir, labelled: &str| {
            let text = format!(
                r#"{{"disks":[{{"name":"root","path":"/dev/vg0/web"}},{{"name":"data","path":"/dev/vg0/lun"}}]{labelled}}}"#
            );
            std::fs::write(dir.path().join(DISKS_FILE), text).unwrap();
        };
        // A guest had it before it became a datastore.
        write(&state, "");
        assert_eq!(of("/dev/vg0/lun"), End::OfDevice);
        write(&state, r#","labelled":["/dev/vg0/web"]"#);
        assert_eq!(of("/dev/vg0/web"), End::ByLabel(None));
        write(
            &run,
            r#","labelled":[{"path":"/dev/vg0/web","device":8388608}]"#,
        );
        assert_eq!(of("/dev/vg0/web"), End::ByLabel(Some(8 << 20)));
        assert_eq!(of("/dev/vg0/lun"), End::OfDevice);
    }

    /// As a VM process writes it: that one's tests read the same example.
    const WRITTEN: &str = include_str!("../../vmproc/testdata/disks.json");

    #[test]
    fn a_record_that_a_vm_process_wrote_is_read_and_loses_nothing_when_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DISKS_FILE);
        std::fs::write(&path, WRITTEN).unwrap();
        let written: Value = serde_json::from_str(WRITTEN).unwrap();
        let record = DiskRecord::in_directory(dir.path()).unwrap().unwrap();
        assert_eq!(serde_json::to_value(&record).unwrap(), written);
        DiskRecord::leave_former(dir.path()).unwrap();
        let mut left = written;
        left["left"].as_array_mut().unwrap().truncate(1);
        left["left"][0]["disk"] = "".into();
        assert_eq!(load_json::<Value>(&path).unwrap(), Some(left));
    }

    #[test]
    fn what_a_later_version_wrote_beside_it_hides_nothing_and_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(DISKS_FILE);
        let mut written: Value = serde_json::from_str(WRITTEN).unwrap();
        written["disks"][0]["on_error"] = "as-never-before".into();
        written["labelled"][1]["since"] = 3.into();
        written["labelled"][0] = serde_json::json!({"by": "serial"});
        std::fs::write(&path, written.to_string()).unwrap();
        let record = DiskRecord::in_directory(dir.path()).unwrap().unwrap();
        assert_eq!(record.labelled("/dev/vg0/web"), Some(Some(1_074_790_400)));
        DiskRecord::leave_former(dir.path()).unwrap();
        written["left"].as_array_mut().unwrap().truncate(1);
        written["left"][0]["disk"] = "".into();
        assert_eq!(load_json::<Value>(&path).unwrap(), Some(written));
    }

    #[test]
    fn whatever_is_left_of_a_vm_that_is_deleted_is_named_and_no_device_is_asked() {
        let record: DiskRecord = serde_json::from_str(WRITTEN).unwrap();
        let stays = record.stays();
        let named = [
            "/dev/vg0/web.arriving-m-2",
            "/fast/.root.raw.moving-1, or /fast/root.raw",
            "no disk has any more may stay: /slow/root.raw",
            "no disk has any more may stay: /slow/data.raw",
        ];
        assert_eq!(stays.len(), named.len(), "{stays:?}");
        let mut both = stays.iter().zip(named);
        assert!(both.all(|(said, named)| said.contains(named)), "{stays:?}");
    }
}
