//! Where a VM's files are.
//!
//! `state_dir` survives a reboot of the host: journal, description, migrations. `run_dir` does not: sockets, QEMU's
//! identity. The RAM file is on a tmpfs.

use godwit_types::MigrationId;
use godwit_types::host_api::VmProcessConfig;
use godwit_types::migration::{AgentAddress, Side};
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

/// What a successor must know of a migration: everything but the secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MigrationNote {
    pub migration: MigrationId,
    pub side: Side,
    pub peer: AgentAddress,
}

/// The paths of one VM.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    pub state: PathBuf,
    pub run: PathBuf,
    ram: PathBuf,
    vm: String,
}

impl Paths {
    pub(crate) fn of(config: &VmProcessConfig) -> Self {
        Self {
            state: PathBuf::from(&config.state_dir),
            run: PathBuf::from(&config.run_dir),
            ram: PathBuf::from(&config.ram_dir),
            vm: config.vm.to_string(),
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run.join("vm.sock")
    }

    pub(crate) fn identity(&self) -> PathBuf {
        self.run.join("qemu.json")
    }

    pub(crate) fn monitor(&self, launch: u64, index: u32) -> PathBuf {
        self.run.join("qemu").join(format!("{launch}-{index}.qmp"))
    }

    pub(crate) fn handout(&self, launch: u64) -> PathBuf {
        self.run.join("qemu").join(format!("{launch}.uffd"))
    }

    pub(crate) fn addresses(&self, launch: u64) -> PathBuf {
        self.run.join(format!("{launch}.addresses.json"))
    }

    pub(crate) fn ram_file(&self, launch: u64) -> PathBuf {
        self.ram.join(format!("{}.{launch}", self.vm))
    }
}
