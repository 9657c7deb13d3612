//! What a VM's disks have in common, and what a disk does that is full.
//!
//! Pure, owns nothing. Refuses: too many disks, two of one name, and what only disks do that the VM process serves where QEMU does.

use super::{BOOTS_FROM_DISK, DISKS_MAX, InvalidVm, VmSpec, check_path};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What becomes of a guest's writes for which the image has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(rename_all = "kebab-case")]
pub enum OnFull {
    /// They wait until there is room; the guest is paused before it gives its disk up.
    #[default]
    Wait,
    /// The guest gets an IO error at once, and runs on.
    Error,
}

impl OnFull {
    pub fn waits(&self) -> bool {
        *self == Self::Wait
    }
}

impl VmSpec {
    pub(super) fn check_disks(&self) -> Result<(), InvalidVm> {
        if self.disks.len() > DISKS_MAX {
            return Err(InvalidVm(format!(
                "{} disks are too many: use at most {DISKS_MAX}",
                self.disks.len()
            )));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            check_path("disk path", &disk.path)?;
            disk.check_making()?;
            if !crate::ids::is_valid_name(&disk.name)
                || self.disks.iter().take(index).any(|d| d.name == disk.name)
            {
                return Err(InvalidVm(format!(
                    "disk name '{}' is not valid or not unique in this VM",
                    disk.name.escape_debug()
                )));
            }
        }
        Ok(())
    }

    /// A disk that QEMU itself serves does what QEMU does.
    pub(super) fn check_on_full(&self) -> Result<(), InvalidVm> {
        let chosen = self.disks.iter().find(|disk| !disk.on_full.waits());
        match chosen.filter(|_| !self.serves_disks()) {
            None => Ok(()),
            Some(disk) => Err(InvalidVm(format!(
                "disk '{}' of VM '{}' has on_full = \"error\", which there is from hardware version {BOOTS_FROM_DISK} on: update Godwit on every host, then set hardware = {BOOTS_FROM_DISK}",
                disk.name, self.name
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_full_disk_does_is_written_where_it_is_not_the_usual_and_needs_a_disk_of_ours() {
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"d\"\npath = \"/d\"\n";
        let usual = VmSpec::from_toml(text).unwrap();
        assert!(usual.disks[0].on_full.waits() && usual.check_boots().is_ok());
        let json = serde_json::to_string(&usual).unwrap();
        assert!(!json.contains("on_full"), "older hosts do not know it");
        let mut chosen = VmSpec::from_toml(&format!("{text}on_full = \"error\"\n")).unwrap();
        assert_eq!(chosen.disks[0].on_full, OnFull::Error);
        let refused = chosen.check_boots().unwrap_err().to_string();
        assert!(refused.contains("hardware = 2"), "{refused}");
        chosen.set_hardware(Some(2));
        assert!(chosen.check_boots().is_ok());
        let json = serde_json::to_string(&chosen).unwrap();
        assert!(json.contains("\"on_full\":\"error\""), "{json}");
        assert!(VmSpec::from_toml(&format!("{text}on_full = \"stop\"\n")).is_err());
    }
}
