//! What a VM boots: by which firmware, and from a kernel that QEMU loads or from its first disk.
//!
//! Pure, owns nothing. Refuses: a VM with neither, what goes with a kernel without one, and UEFI where the hardware has none.

use super::{BOOTS_FROM_DISK, InvalidVm, VmSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// What a machine runs first. Either loads the kernel, where there is one; UEFI wants one that is an EFI program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Firmware {
    #[default]
    Bios,
    /// OVMF of the host's distribution, without secure boot. Its variables are a file of the VM on the host that holds it.
    Uefi,
}

impl Firmware {
    pub(super) fn is_bios(&self) -> bool {
        *self == Self::Bios
    }
}

impl fmt::Display for Firmware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bios => "bios",
            Self::Uefi => "uefi",
        })
    }
}

impl VmSpec {
    /// The kernel that QEMU loads, if it does; else the firmware boots from the first disk.
    pub fn kernel(&self) -> Option<&str> {
        Some(self.kernel.as_str()).filter(|kernel| !kernel.is_empty())
    }

    /// Whether its VM process serves its disks, and not QEMU.
    pub fn serves_disks(&self) -> bool {
        self.hardware() >= BOOTS_FROM_DISK
    }

    /// Whether it has UEFI variables, which are only on the host that holds it.
    pub fn has_variables(&self) -> bool {
        self.firmware == Firmware::Uefi
    }

    /// Paths of the files that QEMU itself loads.
    pub fn boot_files(&self) -> impl Iterator<Item = &str> {
        self.kernel().into_iter().chain(self.initramfs.as_deref())
    }

    /// Refuses what its hardware does not have: boot without a kernel, UEFI, disks with limits, `on_full = "error"` or `on_error = "wait"`, and a seed.
    pub fn check_boots(&self) -> Result<(), InvalidVm> {
        self.check_served()?;
        self.check_seed()?;
        let what = match (self.firmware, self.kernel()) {
            _ if self.hardware() >= BOOTS_FROM_DISK => return Ok(()),
            (Firmware::Uefi, _) => "firmware = \"uefi\", which there is",
            (_, None) => "no `kernel`, and boots from its disk",
            (_, Some(_)) => return Ok(()),
        };
        Err(InvalidVm(format!(
            "VM '{}' has {what} from hardware version {BOOTS_FROM_DISK} on: update Godwit on every host, then set hardware = {BOOTS_FROM_DISK}",
            self.name
        )))
    }

    /// UEFI is for the machine types that QEMU gives flash memory at the place where OVMF looks for it.
    pub(super) fn check_firmware(&self) -> Result<(), InvalidVm> {
        let fits =
            |name: &str| self.machine == name || self.machine.starts_with(&format!("pc-{name}"));
        if self.firmware == Firmware::Bios || fits("q35") {
            return Ok(());
        }
        Err(InvalidVm(format!(
            "machine = \"{}\" goes with firmware = \"bios\" alone: UEFI is for machine = \"q35\"",
            self.machine
        )))
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
    fn uefi_is_written_only_where_it_is_asked_for_and_wants_its_hardware() {
        let mut vm = described(&format!("firmware = \"uefi\"\n{ROOT}")).unwrap();
        assert!(vm.has_variables());
        let refusal = vm.check_boots().unwrap_err().to_string();
        assert!(
            refusal.contains("uefi") && refusal.contains("hardware = 2"),
            "{refusal}"
        );
        vm.set_hardware(Some(2));
        assert!(vm.check_boots().is_ok());
        assert!(
            serde_json::to_string(&vm)
                .unwrap()
                .contains("\"firmware\":\"uefi\"")
        );
        let bios = described(&format!("firmware = \"bios\"\n{ROOT}")).unwrap();
        assert!(!serde_json::to_string(&bios).unwrap().contains("firmware"));
        for (lines, told) in [
            ("firmware = \"UEFI\"\n", "unknown variant"),
            ("firmware = \"uefi\"\nmachine = \"pc\"\n", "q35"),
        ] {
            let refusal = described(&format!("{lines}{ROOT}"))
                .unwrap_err()
                .to_string();
            assert!(refusal.contains(told), "{refusal}");
        }
        described(&format!(
            "firmware = \"uefi\"\nmachine = \"pc-q35-7.2\"\n{ROOT}"
        ))
        .unwrap();
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
