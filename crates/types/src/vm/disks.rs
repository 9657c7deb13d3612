//! A disk of a VM, what all of them have in common, what one does that is full, and how much a guest may have of one.
//!
//! Pure, owns nothing. Refuses: too many disks, two of one name, limits that let nothing through, and what only disks do that the VM process serves where QEMU does.

use super::{BOOTS_FROM_DISK, DISKS_MAX, InvalidVm, VmSpec, check_path};
use crate::text::listed;
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// More than storage does, so that a limit above is a typing error.
pub const DISK_IOPS_MAX: u64 = 10_000_000;
pub const DISK_MIB_PER_S_MAX: u64 = 1_000_000;

/// A disk over a raw image. QEMU opens it itself, buffered, for a VM of hardware version 1; its VM process serves it for later
/// ones. With a writable one a VM of hardware version 1 does not migrate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Name within the VM.
    pub name: String,
    /// Raw image on the host, a file or a block device.
    pub path: String,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub read_only: bool,
    /// Whether `path` is the same storage on every host where the VM may start. A VM with a writable disk that is not
    /// shared starts only where it was last, since an image of the same name elsewhere lacks what was written.
    #[serde(default)]
    pub shared: bool,
    /// Raw or qcow2 image on the host that `path` is made from before the VM starts, unless it is there already. Gone once it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Whether it begins as `from`, which is never copied: `path` has what its guest writes, and what it has not written is read there. Gone once it is
    /// made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub linked: bool,
    /// How long `path` is made, GiB: as long as `from` is, unless given; without `from` it is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_gib: Option<u64>,
    /// What becomes of the guest's writes when the image has no room left.
    #[serde(default, skip_serializing_if = "OnFull::waits")]
    pub on_full: OnFull,
    /// What becomes of the guest's reads and writes that its storage fails.
    #[serde(default, skip_serializing_if = "OnError::fails")]
    pub on_error: OnError,
    /// What the guest may have of it in a second.
    #[serde(default, skip_serializing_if = "DiskLimits::are_none")]
    pub limits: DiskLimits,
}

impl DiskSpec {
    /// One that the guest may write, over an image that only its host has.
    pub fn new(name: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            path: path.into(),
            read_only: false,
            shared: false,
            from: None,
            linked: false,
            size_gib: None,
            on_full: OnFull::default(),
            on_error: OnError::default(),
            limits: DiskLimits::default(),
        }
    }

    /// Whether its image is copied to the host to which its VM moves, since only this host has it.
    pub fn goes_along(&self) -> bool {
        !self.read_only && !self.shared
    }

    /// Whether several hosts have its image, and the one that runs the VM may write it.
    pub fn changes_hands(&self) -> bool {
        !self.read_only && self.shared
    }
}

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

/// What becomes of a guest's reads and writes that end with an IO error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// The guest gets the error at once, and runs on.
    #[default]
    Error,
    /// They wait until the storage does them; the guest is paused before it gives its disk up. A flush fails all the same: what it
    /// was told to make durable may be lost.
    Wait,
}

impl OnError {
    pub fn fails(&self) -> bool {
        *self == Self::Error
    }
}

impl OnFull {
    pub fn waits(&self) -> bool {
        *self == Self::Wait
    }
}

/// What a guest may have of its disk in a second. A host's datastore serves several guests; this keeps one from taking all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(deny_unknown_fields)]
pub struct DiskLimits {
    /// Reads, writes, discards and zeroes; none: as many as its storage can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// MiB read and written; none: as many as its storage can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mib_per_s: Option<u64>,
}

impl DiskLimits {
    pub fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses a limit of nothing, and what no storage reaches.
    pub fn check(&self) -> Result<(), InvalidVm> {
        let both = [
            ("iops", self.iops, DISK_IOPS_MAX),
            ("mib_per_s", self.mib_per_s, DISK_MIB_PER_S_MAX),
        ];
        let wrong = |(_, limit, most): &(_, Option<u64>, u64)| {
            limit.is_some_and(|limit| !(1..=*most).contains(&limit))
        };
        match both.into_iter().find(wrong) {
            Some((what, limit, most)) => Err(InvalidVm(format!(
                "a limit of {} {what} is out of range: use 1 to {most}, or leave it out",
                limit.unwrap_or_default()
            ))),
            None => Ok(()),
        }
    }
}

impl fmt::Display for DiskLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.iops, self.mib_per_s) {
            (None, None) => f.write_str("no limit"),
            (Some(iops), None) => write!(f, "at most {iops} requests a second"),
            (None, Some(mib)) => write!(f, "at most {mib} MiB a second"),
            (Some(iops), Some(mib)) => {
                write!(f, "at most {iops} requests and {mib} MiB a second")
            }
        }
    }
}

impl VmSpec {
    /// Says that it has no disk of this name, and which it has.
    pub fn no_disk(&self, name: &str) -> String {
        let known = listed(self.disks.iter().map(|disk| &disk.name));
        format!("VM '{}' has no disk '{name}' (it has {known})", self.name)
    }

    /// What only the host has that held the VM last, if there is anything; a part of a sentence.
    pub fn of_its_host_alone(&self) -> Option<String> {
        let disk = self.disks.iter().find(|disk| disk.goes_along());
        let variables = || {
            self.has_variables()
                .then(|| "its UEFI variables".to_owned())
        };
        disk.map(|disk| format!("its disk '{}'", disk.name))
            .or_else(variables)
    }

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
            let of = |why| InvalidVm(format!("disk '{}': {why}", disk.name.escape_debug()));
            disk.limits.check().map_err(of)?;
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
    pub(super) fn check_served(&self) -> Result<(), InvalidVm> {
        let chosen = self.disks.iter().find_map(|disk| match disk {
            _ if self.serves_disks() => None,
            disk if !disk.on_full.waits() => Some((disk, "on_full = \"error\"")),
            disk if !disk.on_error.fails() => Some((disk, "on_error = \"wait\"")),
            disk if !disk.limits.are_none() => Some((disk, "limits")),
            disk if disk.linked => Some((disk, "linked = true")),
            _ => None,
        });
        match chosen {
            None => Ok(()),
            Some((disk, what)) => Err(InvalidVm(format!(
                "disk '{}' of VM '{}' has {what}, which there is from hardware version {BOOTS_FROM_DISK} on: update Godwit on every host, then set hardware = {BOOTS_FROM_DISK}",
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

    #[test]
    fn a_disk_that_waits_for_storage_is_told_so_and_needs_a_disk_of_ours() {
        let text = "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"d\"\npath = \"/d\"\n";
        let usual = VmSpec::from_toml(text).unwrap();
        assert!(usual.disks[0].on_error.fails());
        let json = serde_json::to_string(&usual).unwrap();
        assert!(!json.contains("on_error"), "older hosts do not know it");
        let mut chosen = VmSpec::from_toml(&format!("{text}on_error = \"wait\"\n")).unwrap();
        let refused = chosen.check_boots().unwrap_err().to_string();
        assert!(refused.contains("on_error = \"wait\""), "{refused}");
        chosen.set_hardware(Some(2));
        assert!(chosen.check_boots().is_ok());
    }

    #[test]
    fn limits_are_written_where_there_are_some_and_none_lets_nothing_through() {
        let of = |limits: &str| {
            VmSpec::from_toml(&format!(
                "name = \"web\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"d\"\npath = \"/d\"\n{limits}"
            ))
        };
        let json = serde_json::to_string(&of("").unwrap()).unwrap();
        assert!(!json.contains("limits"), "older hosts do not know it");
        let mut limited = of("limits = { iops = 500, mib_per_s = 20 }\n").unwrap();
        let limits = limited.disks[0].limits;
        assert_eq!((limits.iops, limits.mib_per_s), (Some(500), Some(20)));
        let refused = limited.check_boots().unwrap_err().to_string();
        assert!(refused.contains("hardware = 2"), "{refused}");
        limited.set_hardware(Some(2));
        assert!(limited.check_boots().is_ok() && limited.check().is_ok());
        let json = serde_json::to_string(&limited).unwrap();
        assert!(json.contains("\"limits\":{\"iops\":500,\"mib_per_s\":20}"));
        for wrong in ["iops = 0", "mib_per_s = 0", "iops = 10000001", "speed = 1"] {
            let refused = of(&format!("limits = {{ {wrong} }}\n"));
            let refused = refused.and_then(|spec| spec.check()).unwrap_err();
            assert!(refused.to_string().contains("disk 'd'") || wrong == "speed = 1");
        }
        let told = |iops, mib_per_s| DiskLimits { iops, mib_per_s }.to_string();
        assert_eq!(told(None, None), "no limit");
        assert_eq!(
            told(Some(5), Some(2)),
            "at most 5 requests and 2 MiB a second"
        );
    }
}
