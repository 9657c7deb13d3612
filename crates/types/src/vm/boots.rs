//! What a VM boots: a kernel that QEMU loads, or its first disk.
//!
//! Pure, owns nothing. Refuses: a VM with neither, and what goes with a kernel without one.

use super::{BOOTS_FROM_DISK, InvalidVm, VmSpec};

impl VmSpec {
    /// The kernel that QEMU loads, if it does; else the firmware boots from the first disk.
    pub fn kernel(&self) -> Option<&str> {
        Some(self.kernel.as_str()).filter(|kernel| !kernel.is_empty())
    }

    /// Whether its VM process serves its disks, and not QEMU.
    pub fn serves_disks(&self) -> bool {
        self.hardware() >= BOOTS_FROM_DISK
    }

    /// Paths of the files that QEMU itself loads.
    pub fn boot_files(&self) -> impl Iterator<Item = &str> {
        self.kernel().into_iter().chain(self.initramfs.as_deref())
    }

    /// Refuses a VM without a kernel on hardware that boots from no disk.
    pub fn check_boots(&self) -> Result<(), InvalidVm> {
        match self.kernel().is_some() || self.hardware() >= BOOTS_FROM_DISK {
            true => Ok(()),
            false => Err(InvalidVm(format!(
                "VM '{}' has no `kernel`, and boots from its disk from hardware version {BOOTS_FROM_DISK} on: update Godwit on every host, then set hardware = {BOOTS_FROM_DISK}",
                self.name
            ))),
        }
    }

    pub(super) fn check_boots_from_disk(&self) -> Result<(), InvalidVm> {
        let wrong = match (
            &self.initramfs,
            self.cmdline.is_empty(),
            self.disks.is_empty(),
        ) {
            (Some(_), ..) => "an `initramfs` goes with a `kernel`, and there is none",
            (_, false, _) => "a `cmdline` goes with a `kernel`, and there is none",
            (.., true) => "it has neither a `kernel` nor a [[disk]] to boot from",
            _ => return Ok(()),
        };
        let name = &self.name;
        Err(InvalidVm(format!("VM '{name}' is not valid: {wrong}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "[[disk]]\nname = \"root\"\npath = \"/d.raw\"\n";

    fn described(lines: &str) -> Result<VmSpec, InvalidVm> {
        VmSpec::from_toml(&format!(
            "name = \"web\"\nvcpus = 1\nmemory_mib = 16\n{lines}"
        ))
    }

    #[test]
    fn a_vm_boots_a_kernel_or_its_first_disk() {
        let mut kernel = described("kernel = \"/k\"\ninitramfs = \"/i\"\n").unwrap();
        assert_eq!(kernel.boot_files().collect::<Vec<_>>(), ["/k", "/i"]);
        assert!(kernel.check_boots().is_ok() && !kernel.serves_disks());
        kernel.set_hardware(Some(2));
        assert!(kernel.check_boots().is_ok() && kernel.serves_disks());
        let mut disk = described(ROOT).unwrap();
        assert_eq!((disk.kernel(), disk.boot_files().count()), (None, 0));
        let refusal = disk.check_boots().unwrap_err().to_string();
        assert!(
            refusal.contains("no `kernel`") && refusal.contains("hardware = 2"),
            "{refusal}"
        );
        disk.set_hardware(Some(2));
        assert!(disk.check_boots().is_ok());
        let written = serde_json::to_string(&disk).unwrap();
        assert!(!written.contains("kernel"), "{written}");
    }

    #[test]
    fn what_goes_with_a_kernel_is_refused_without_one() {
        for (lines, told) in [
            (String::new(), "neither a `kernel` nor a [[disk]]"),
            (
                format!("initramfs = \"/i\"\n{ROOT}"),
                "an `initramfs` goes with",
            ),
            (
                format!("cmdline = \"quiet\"\n{ROOT}"),
                "a `cmdline` goes with",
            ),
            (format!("kernel = \"k\"\n{ROOT}"), "kernel"),
        ] {
            let refusal = described(&lines).unwrap_err().to_string();
            assert!(refusal.contains(told), "{refusal}");
        }
    }
}
