//! Where a VM's files are.
//!
//! `state_dir` survives a reboot of the host: journal, description, migrations. `run_dir` does not: sockets, QEMU's
//! identity. The RAM file is on a tmpfs.

use godwit_qemu::strays::RamFiles;
use godwit_store::{UEFI_VARIABLES_FILE, load_json, save_json};
use godwit_types::VmName;
use godwit_types::clones::CLONED_VARIABLES_FILE;
use godwit_types::host_api::{
    DISK_MOVES_FILE, DISKS_FILE, FORMER_DEVICES_FILE, IDENTITY_FILE, IMAGES_FILE, SOCKET_FILE,
    SPEC_FILE, UEFI_SIZES_FILE, VmProcessConfig, WENT_ON_FILE,
};
use godwit_types::vm::Accelerator;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Which QEMU is this VM's: enough to take it over and never to take another process for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QemuIdentity {
    pub pid: i32,
    pub start_time_ticks: u64,
    pub accelerator: Accelerator,
    /// Counts the QEMUs of this VM on this host; part of the names of its sockets and RAM file.
    pub launch: u64,
}

/// Where a QEMU of the VM has its files: kept durably, since a host's configuration may change while QEMU lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Places {
    run_dir: String,
    ram_dir: String,
}

/// The paths of one VM.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    pub vm: VmName,
    pub state: PathBuf,
    /// QEMU's sockets and files stand below it.
    pub run: PathBuf,
    pub ram_files: RamFiles,
    socket: PathBuf,
}

impl Paths {
    pub(crate) fn of(config: &VmProcessConfig) -> Self {
        let (run_dir, ram_dir) = (config.run_dir.clone(), config.ram_dir.clone());
        Self::at(config, &Places { run_dir, ram_dir })
    }

    fn at(config: &VmProcessConfig, places: &Places) -> Self {
        Self {
            vm: config.vm.clone(),
            state: PathBuf::from(&config.state_dir),
            run: PathBuf::from(&places.run_dir),
            ram_files: RamFiles::new(PathBuf::from(&places.ram_dir), config.vm.clone()),
            socket: PathBuf::from(&config.run_dir).join(SOCKET_FILE),
        }
    }

    /// The paths for a VM process that has the VM's lock. While a QEMU lives in other directories than the configuration
    /// names now they stay in use, since another QEMU would not find it there and run the guest twice.
    pub(crate) fn settle(config: &VmProcessConfig) -> anyhow::Result<Self> {
        let paths = Self::of(config);
        let kept = paths.state.join("places.json");
        let now = Places {
            run_dir: config.run_dir.clone(),
            ram_dir: config.ram_dir.clone(),
        };
        let before: Option<Places> = load_json(&kept)?;
        if let Some(before) = before.as_ref().filter(|before| **before != now) {
            let old = Self::at(config, before);
            if !old.ram_files.living(config.qemu_uid)?.is_empty() {
                tracing::warn!(
                    run_dir = before.run_dir,
                    ram_dir = before.ram_dir,
                    "the former directories stay in use until QEMU has ended"
                );
                return Ok(old);
            }
        }
        if before.as_ref() != Some(&now) {
            save_json(&kept, &now)?;
        }
        Ok(paths)
    }

    /// Where this VM process is asked.
    pub(crate) fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    pub(crate) fn identity(&self) -> PathBuf {
        self.run.join(IDENTITY_FILE)
    }

    /// That this host pressed the power key of the guest, since it shuts down.
    pub(crate) fn pressed(&self) -> PathBuf {
        self.run.join("pressed.json")
    }

    /// For which disk the guest stands still until it has room.
    pub(crate) fn waits_for_room(&self) -> PathBuf {
        self.run.join("waits-for-room.json")
    }

    pub(crate) fn monitor(&self, launch: u64, index: u32) -> PathBuf {
        self.run.join("qemu").join(format!("{launch}-{index}.qmp"))
    }

    /// Which images the newest QEMU was started with.
    pub(crate) fn disks(&self) -> PathBuf {
        self.state.join(DISKS_FILE)
    }

    /// The same while that QEMU lives.
    pub(crate) fn living_disks(&self) -> PathBuf {
        self.run.join(DISKS_FILE)
    }

    /// What the controller said of them.
    pub(crate) fn images(&self) -> PathBuf {
        self.state.join(IMAGES_FILE)
    }

    /// Block devices that were the VM's disks here.
    pub(crate) fn former_devices(&self) -> PathBuf {
        self.state.join(FORMER_DEVICES_FILE)
    }

    /// Migrations whose disks went on from here.
    pub(crate) fn went_on(&self) -> PathBuf {
        self.state.join(WENT_ON_FILE)
    }

    pub(crate) fn spec(&self) -> PathBuf {
        self.state.join(SPEC_FILE)
    }

    /// Disks that were moved on this host.
    pub(crate) fn disk_moves(&self) -> PathBuf {
        self.state.join(DISK_MOVES_FILE)
    }

    /// The variables of a VM with UEFI.
    pub(crate) fn variables(&self) -> PathBuf {
        self.state.join(UEFI_VARIABLES_FILE)
    }

    /// Those with which a clone begins.
    pub(crate) fn cloned_variables(&self) -> PathBuf {
        self.state.join(CLONED_VARIABLES_FILE)
    }

    /// How long the flash memory of the newest QEMU is, where its VM has UEFI.
    pub(crate) fn uefi_sizes(&self) -> PathBuf {
        self.state.join(UEFI_SIZES_FILE)
    }

    pub(crate) fn handout(&self, launch: u64) -> PathBuf {
        self.run.join("qemu").join(format!("{launch}.uffd"))
    }

    /// Where the guest's agent is spoken with.
    pub(crate) fn agent(&self, launch: u64) -> PathBuf {
        self.run.join("qemu").join(format!("{launch}.agent"))
    }

    /// That the guest is to be thawed.
    pub(crate) fn frozen(&self, launch: u64) -> PathBuf {
        self.run.join(format!("{launch}.frozen"))
    }

    pub(crate) fn addresses(&self, launch: u64) -> PathBuf {
        self.run.join(format!("{launch}.addresses.json"))
    }

    /// What was read of the guest's serial console.
    pub(crate) fn console(&self, launch: u64) -> PathBuf {
        self.run.join(format!("{launch}.console.json"))
    }

    pub(crate) fn ram_file(&self, launch: u64) -> PathBuf {
        self.ram_files.path(launch)
    }
}

#[cfg(test)]
#[path = "../../store/tests/common/golden.rs"]
mod golden;

#[cfg(test)]
mod tests {
    use super::golden::{again, check};
    use super::*;
    use crate::disks::{History, ServedDisks};
    use crate::renewal::Letter;
    use crate::room::WaitsForRoom;
    use godwit_types::console::ConsoleKept;
    use std::path::Path;

    #[test]
    fn files_are_as_their_golden_file_says() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/files");
        check(
            &file,
            &[
                ("QemuIdentity", again::<QemuIdentity>),
                ("Places", again::<Places>),
                ("ServedDisks", again::<ServedDisks>),
                ("History", again::<History>),
                ("ConsoleKept", again::<ConsoleKept>),
                ("WaitsForRoom", again::<WaitsForRoom>),
                ("Letter", again::<Letter>),
            ],
        );
    }
}
