//! What this host wrote of a VM that it holds no longer: no disk of it is taken for one of a VM that comes by a grant, be it another of that name.
//!
//! Of a VM that is deleted nothing stays, also where the host dies in between: the generation under which it is held is noted before its record
//! lets it go, and forgotten once all else is. Owns nothing. Refuses: to change anything of a VM that this host may hold.

use crate::disk_record::DiskRecord;
use crate::making::attempted_variables;
use crate::records::{Records, stored};
use godwit_ownership::HostRecord;
use godwit_store::{load_json, remove_document, save_json};
use godwit_types::clones::CLONED_VARIABLES_FILE;
use godwit_types::host_api::{
    DISK_MOVES_FILE, DISKS_FILE, FORMER_DEVICES_FILE, IMAGES_FILE, SPEC_FILE, WENT_ON_FILE,
};
use godwit_types::{ApiError, Generation, VmName};
use std::path::PathBuf;

/// In a VM's state directory while it is deleted: the generation under which it was held.
const DELETING_FILE: &str = "deleting.json";

impl Records {
    fn deleting(&self, vm: &VmName) -> PathBuf {
        self.dir(vm).join(DELETING_FILE)
    }

    /// To be called before the record lets it go.
    pub(crate) fn begin_deletion(&self, vm: &VmName, record: &HostRecord) -> Result<(), ApiError> {
        save_json(&self.deleting(vm), &record.held).map_err(stored)
    }

    /// To be called before a VM of that name is taken by a grant: whoever deleted the last one may have died before nothing was left of it.
    pub(crate) fn settle_earlier(&self, vm: &VmName, record: &HostRecord) -> Result<(), ApiError> {
        let noted: Option<Generation> = load_json(&self.deleting(vm)).map_err(stored)?;
        match noted {
            Some(held) if held == record.held && !record.may_hold() => {
                return self.end_deletion(vm);
            }
            // Nothing came of it.
            Some(_) => remove_document(&self.deleting(vm)).map_err(stored)?,
            None => {}
        }
        match record.may_hold() {
            true => Ok(()),
            false => DiskRecord::leave_former(&self.dir(vm)).map_err(stored),
        }
    }

    /// Another VM of this name begins with none, and no VM process begins for this one.
    pub(crate) fn end_deletion(&self, vm: &VmName) -> Result<(), ApiError> {
        let stays = match DiskRecord::in_directory(&self.dir(vm)) {
            Ok(record) => record.unwrap_or_default().stays(),
            Err(error) => vec![format!("what its disks had cannot be read ({error})")],
        };
        for what in stays {
            tracing::warn!(%vm, "the VM is deleted, and nothing of Godwit knows any more of what it leaves: {what}");
        }
        for name in [
            DISK_MOVES_FILE,
            FORMER_DEVICES_FILE,
            WENT_ON_FILE,
            DISKS_FILE,
            IMAGES_FILE,
            CLONED_VARIABLES_FILE,
            SPEC_FILE,
            DELETING_FILE,
        ] {
            remove_document(&self.dir(vm).join(name)).map_err(stored)?;
        }
        for left in attempted_variables(&self.dir(vm)) {
            remove_document(&left).map_err(stored)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::put;
    use godwit_ownership::Event;
    use godwit_types::HostName;
    use godwit_types::vm::DiskSpec;
    use serde_json::json;

    /// A record of a VM whose disk has moved and whose description does not say so yet: the next one's would follow to the old image.
    fn held() -> (tempfile::TempDir, Records, VmName) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("vms")).unwrap();
        let records = Records::new(dir.path(), HostName::new("a").unwrap());
        let web = VmName::new("web").unwrap();
        records.survey(&web, Generation(1)).unwrap();
        records.put(&put("web", 2)).unwrap();
        let written = json!({
            "disks": [{"name": "root", "path": "/new"}],
            "left": [{"disk": "root", "path": "/old", "image": [1, 2]}],
        });
        save_json(&records.dir(&web).join(DISKS_FILE), &written).unwrap();
        (dir, records, web)
    }

    /// The host dies once the record has let the VM go.
    fn dies_in_deletion(records: &Records, web: &VmName) {
        let mut journal = records.lock(web).unwrap();
        let record = journal.load().unwrap().unwrap();
        records.begin_deletion(web, &record).unwrap();
        let asked = Event::DeleteRequested;
        let gone = records.drive_collecting(&mut journal, record, asked, &mut |_| ());
        assert!(!gone.unwrap().may_hold());
    }

    #[test]
    fn another_vm_of_the_name_begins_with_nothing_where_the_host_died_while_the_last_was_deleted() {
        let (_dir, records, web) = held();
        dies_in_deletion(&records, &web);
        let disks = records.dir(&web).join(DISKS_FILE);
        assert!(disks.exists());
        records.survey(&web, Generation(8)).unwrap();
        records.put(&put("web", 9)).unwrap();
        assert!(!disks.exists() && !records.deleting(&web).exists());
        assert!(records.spec(&web).unwrap().is_some());
    }

    #[test]
    fn a_vm_that_comes_by_a_grant_has_no_former_image_of_an_earlier_time() {
        let (_dir, records, web) = held();
        records.delete(&web, Some(Generation(2))).unwrap();
        let disks = records.dir(&web).join(DISKS_FILE);
        let of = |disk: &str, followed: bool| json!({"disk": disk, "path": "/old", "image": [1, 2], "followed": followed});
        let now = [DiskSpec::new("root", "/new")];
        let written = |left: serde_json::Value| json!({"launch": 1, "disks": now, "left": left});
        // Its images could not be removed when it left.
        save_json(
            &disks,
            &written(json!([of("root", true), of("data", false)])),
        )
        .unwrap();
        records.survey(&web, Generation(8)).unwrap();
        records.put(&put("web", 9)).unwrap();
        let found = load_json(&disks).unwrap();
        assert_eq!(found, Some(written(json!([of("", true)]))));
        // What its holder has left since is its own.
        let now = written(json!([of("root", true)]));
        save_json(&disks, &now).unwrap();
        records.put(&put("web", 9)).unwrap();
        assert_eq!(load_json(&disks).unwrap(), Some(now));
    }

    #[test]
    fn a_deletion_that_the_record_never_heard_of_takes_nothing() {
        let (_dir, records, web) = held();
        let record = records.record(&web).unwrap();
        records.begin_deletion(&web, &record).unwrap();
        records.put(&put("web", 2)).unwrap();
        assert!(records.dir(&web).join(DISKS_FILE).exists());
        assert!(!records.deleting(&web).exists());
        records.delete(&web, Some(Generation(2))).unwrap();
        assert!(!records.dir(&web).join(DISKS_FILE).exists());
    }
}
