//! The description of a VM that is made as a copy of another one: what it shares, and what is its own.
//!
//! Pure, owns nothing. What is derived from a VM's name (UUID, and where nothing else is said cloud-init's instance and the guest's name) is
//! the clone's own by its name; MAC addresses and the user id are allotted anew by whoever enters it. Refuses: disks on block devices, and
//! those that are not made yet.

use super::{DiskSpec, InvalidVm, VmSpec};
use crate::clones::is_attempt_number;
use crate::datastore::is_device_path;
use crate::ids::VmName;
use std::path::Path;

/// What follows the name of an image that is copied for a clone, until the clone is described; it begins with a dot.
const PART: &str = ".godwit-clone";

/// Where the content of an image at this path lies until the clone whose disk it becomes is described: beside it, under a name that only this attempt
/// has ([`crate::clones::attempt_number`]).
pub fn clone_part_of(path: &str, number: &str) -> String {
    let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
    format!("{above}/.{name}.{number}{PART}")
}

/// The attempt that has copied this file for an image at `path`; nothing where it is another file.
pub fn attempt_of<'a>(path: &str, part: &'a str) -> Option<&'a str> {
    let (_, number) = part.strip_suffix(PART)?.rsplit_once('.')?;
    let is_its = is_attempt_number(number) && clone_part_of(path, number) == part;
    is_its.then_some(number)
}

impl DiskSpec {
    /// The attempt that has copied what it begins with, which lies beside it and only needs its name; nothing of any other disk.
    pub fn attempt(&self) -> Option<&str> {
        let part = self.from.as_deref().filter(|_| self.size_gib.is_none());
        attempt_of(&self.path, part?)
    }

    /// Whether what it begins with is copied already, and lies beside it: it only needs its name.
    pub fn is_cloned(&self) -> bool {
        self.attempt().is_some()
    }

    /// The same disk of another VM: one that its guest only reads is shared, any other one lies beside it.
    fn cloned_for(&self, vm: &VmName, number: &str) -> Result<Self, InvalidVm> {
        let (name, path) = (&self.name, &self.path);
        let wrong = |why: String| Err(InvalidVm(format!("disk '{name}' is not cloned: {why}")));
        if self.is_to_be_made() {
            return wrong(format!(
                "{path} is not made yet, which the first start of its VM does: start that once, or create the other VM from a description of its own"
            ));
        }
        if self.read_only {
            return Ok(self.clone());
        }
        if is_device_path(path) {
            return wrong(format!(
                "{path} is a block device, beside which there is no place for another one: move the disk to a datastore that is a directory first ('godwit vm move-disk', while the VM runs)"
            ));
        }
        let above = Path::new(path).parent().and_then(Path::to_str);
        let above = above.unwrap_or_default().trim_end_matches('/');
        let own = format!("{above}/{vm}-{name}.raw");
        Ok(Self {
            from: Some(clone_part_of(&own, number)),
            path: own,
            ..self.clone()
        })
    }
}

impl VmSpec {
    /// The description of a clone of this name, as the attempt of this number makes it. Its cards have no addresses and it has no user id: those are to be
    /// allotted.
    pub fn cloned_as(&self, name: &VmName, number: &str) -> Result<Self, InvalidVm> {
        let mut clone = self.clone();
        clone.name.clone_from(name);
        clone.uid = None;
        clone.nics.iter_mut().for_each(|nic| nic.mac = None);
        if let Some(told) = &mut clone.cloud_init {
            (told.instance_id, told.hostname) = (None, None);
        }
        let disks = self.disks.iter().map(|disk| disk.cloned_for(name, number));
        clone.disks = disks.collect::<Result<_, _>>()?;
        Ok(clone)
    }

    /// Whether what its disks begin with is copied, and they lack their names: whoever made it as a clone died before its end.
    pub fn is_clone_in_part(&self) -> bool {
        self.disks_to_make().any(DiskSpec::is_cloned)
    }

    /// The attempt that has copied what its disks begin with; nothing once they have their names, and of a VM that has none of its own.
    pub fn attempt(&self) -> Option<&str> {
        self.disks_to_make().find_map(DiskSpec::attempt)
    }

    /// The description as another attempt makes it.
    #[must_use]
    pub fn by_attempt(mut self, number: &str) -> Self {
        for disk in self.disks.iter_mut().filter(|disk| disk.is_cloned()) {
            disk.from = Some(clone_part_of(&disk.path, number));
        }
        self
    }

    /// Addresses that its guest gives itself by what cloud-init is told, of which a clone has the same.
    pub fn told_addresses(&self) -> Vec<&str> {
        let told = self.cloud_init.iter().flat_map(|told| &told.network);
        let all = told.flat_map(|card| &card.addresses);
        all.map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::UIDS;

    const WEB: &str = r#"
        name = "web"
        vcpus = 2
        memory_mib = 1024
        hardware = 3
        [[nic]]
        port_group = "vm"
        mac = "52:54:00:00:00:01"
        [[disk]]
        name = "root"
        path = "/srv/vms/web-root.raw"
        limits = { iops = 500 }
        [[disk]]
        name = "data"
        path = "/big.raw"
        [[disk]]
        name = "cd"
        path = "/srv/iso/debian.iso"
        read_only = true
        [cloud_init]
        hostname = "www"
        instance_id = "first"
        network = [{ addresses = ["192.0.2.10/24"] }]
    "#;

    const NUMBER: &str = "0123456789abcdef0123456789abcdef";

    fn web2() -> VmName {
        VmName::new("web2").unwrap()
    }

    #[test]
    fn a_clone_shares_what_is_only_read_and_has_all_that_tells_it_apart_for_itself() {
        let mut web = VmSpec::from_toml(WEB).unwrap();
        web.uid = Some(*UIDS.start());
        let clone = web.cloned_as(&web2(), NUMBER).unwrap();
        assert_eq!(clone.name, web2());
        assert_eq!((clone.uid, clone.nics[0].mac.as_ref()), (None, None));
        assert_ne!(clone.mac(0), web.mac(0));
        assert_eq!(clone.nics[0].port_group, web.nics[0].port_group);
        let paths: Vec<_> = clone.disks.iter().map(|disk| &disk.path).collect();
        assert_eq!(
            paths,
            [
                "/srv/vms/web2-root.raw",
                "/web2-data.raw",
                "/srv/iso/debian.iso"
            ]
        );
        assert_eq!(
            clone.disks[0].from.as_deref(),
            Some("/srv/vms/.web2-root.raw.0123456789abcdef0123456789abcdef.godwit-clone")
        );
        assert_eq!(
            clone.disks[1].from.as_deref(),
            Some("/.web2-data.raw.0123456789abcdef0123456789abcdef.godwit-clone")
        );
        assert_eq!(clone.disks[2], web.disks[2]);
        assert_eq!(clone.disks[0].limits, web.disks[0].limits);
        let told = clone.cloud_init.as_ref().unwrap();
        assert_eq!((&told.hostname, &told.instance_id), (&None, &None));
        assert_eq!(clone.told_addresses(), ["192.0.2.10/24"]);
        let same = (clone.vcpus, clone.memory_mib, clone.hardware());
        assert_eq!(same, (web.vcpus, web.memory_mib, web.hardware()));
        assert!(clone.check_new().is_ok() && clone.is_clone_in_part());
        assert!(!clone.with_disks_made().is_clone_in_part());
    }

    #[test]
    fn each_attempt_copies_under_a_name_of_its_own() {
        let web = VmSpec::from_toml(WEB).unwrap();
        let other = NUMBER.replace('0', "7");
        let clone = web.cloned_as(&web2(), NUMBER).unwrap();
        assert_eq!(clone.attempt(), Some(NUMBER));
        let again = web.cloned_as(&web2(), &other).unwrap();
        assert_eq!(again.attempt(), Some(other.as_str()));
        assert_ne!(again.disks[0].from, clone.disks[0].from);
        assert_eq!(clone.clone().by_attempt(&other), again);
        assert_eq!(clone.with_disks_made().attempt(), None);
        for strange in [
            "/srv/.root.raw.godwit-clone",
            "/srv/.root.raw.7.godwit-clone",
            "/srv/.other.raw.0123456789abcdef0123456789abcdef.godwit-clone",
        ] {
            assert_eq!(attempt_of("/srv/root.raw", strange), None, "{strange}");
        }
    }

    #[test]
    fn what_has_no_place_beside_it_or_is_not_made_is_not_cloned() {
        let mut web = VmSpec::from_toml(WEB).unwrap();
        web.disks[0].path = "/dev/vg0/web".into();
        let refused = web.cloned_as(&web2(), NUMBER).unwrap_err().to_string();
        assert!(refused.contains("block device"), "{refused}");
        web.disks[0].read_only = true;
        assert!(
            web.cloned_as(&web2(), NUMBER).is_ok(),
            "several may read one device"
        );
        web.disks[1].from = Some("/srv/base.raw".into());
        let refused = web.cloned_as(&web2(), NUMBER).unwrap_err().to_string();
        assert!(refused.contains("not made yet"), "{refused}");
        assert!(!web.is_clone_in_part(), "that is a disk from another image");
    }
}
