//! What a VM process has written of its VM's disks, as far as the agent needs it where it asks none.
//!
//! The form of that file is the VM process's (`vmproc`, `disks/served.rs`), whose crate the agent does not have. Owns nothing. Refuses nothing: what
//! cannot be read says nothing.

use godwit_blockio::label::End;
use godwit_store::load_json;
use godwit_types::datastore::{Datastores, datastore_of};
use godwit_types::host_api::DISKS_FILE;
use serde_json::Value;
use std::path::Path;

/// The record of one VM's disks.
#[derive(Debug, Default)]
pub(crate) struct DiskRecord(Value);

impl DiskRecord {
    /// That of a VM with these directories. What stands in the run directory counts first: no backup brings that back.
    pub(crate) fn load(run_dir: &Path, state_dir: &Path) -> Self {
        let read = |dir: &Path| load_json::<Value>(&dir.join(DISKS_FILE)).ok().flatten();
        let record = read(run_dir).or_else(|| read(state_dir));
        Self(record.unwrap_or_default())
    }

    /// Where the disk on the device with this path ends. What a guest writes at the end of a device that is its disk may look like a label.
    pub(crate) fn end_of(&self, stores: &Datastores, path: &str) -> End {
        if let Some(device) = self.labelled(path) {
            return End::ByLabel(device);
        }
        match datastore_of(stores, path) {
            Some((_, store)) if store.is_device() && !self.has(path) => End::ByLabel(None),
            _ => End::OfDevice,
        }
    }

    fn list(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.0[name].as_array().into_iter().flatten()
    }

    /// Whether a disk has this path.
    fn has(&self, path: &str) -> bool {
        self.list("disks").any(|disk| disk["path"] == path)
    }

    /// Whether the device with this path bears a label, and how long it was when it got that, if it is known.
    fn labelled(&self, path: &str) -> Option<Option<u64>> {
        self.list("labelled").find_map(|label| match label {
            Value::String(own) => (own == path).then_some(None),
            label => (label["path"] == path).then(|| label["device"].as_u64()),
        })
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
                r#"{{"disks":[{{"path":"/dev/vg0/web"}},{{"path":"/dev/vg0/lun"}}]{labelled}}}"#
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
}
