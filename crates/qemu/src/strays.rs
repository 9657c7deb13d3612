//! The RAM files of one VM, and the QEMUs on them that no identity file tells of: found by what they map, or by their
//! command line.
//!
//! One that a VM process was killed in starting has never run its guest (it waits with `-S`). One whose run directory was
//! emptied may run the only copy of the guest. Which it is, the VM process finds out; here they are found and ended. Owns
//! the names of RAM files. Refuses: to find none because the system did not let it look.

use crate::on_ram::{Users, accelerator_of, ram_file_of};
use crate::process::{ProcessError, QemuProcess};
use godwit_types::VmName;
use godwit_types::vm::Accelerator;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

/// Where all RAM files of this host are, and whose of them are meant.
#[derive(Debug, Clone)]
pub struct RamFiles {
    dir: PathBuf,
    vm: VmName,
}

/// A QEMU that lives on a RAM file of this VM.
#[derive(Debug)]
pub struct Stray {
    pub process: QemuProcess,
    pub launch: u64,
    pub accelerator: Accelerator,
}

impl RamFiles {
    /// Those of a VM in this directory.
    pub fn new(dir: PathBuf, vm: VmName) -> Self {
        Self { dir, vm }
    }

    /// The RAM of this VM's QEMU with this number.
    pub fn path(&self, launch: u64) -> PathBuf {
        self.dir.join(format!("{}.{launch}", self.vm))
    }

    /// Where this QEMU finds its disk with this number: beside its RAM, where it may look.
    pub fn disk_socket(&self, launch: u64, disk: usize) -> PathBuf {
        self.dir.join(format!("{}.{launch}.d{disk}", self.vm))
    }

    /// Of which QEMU of this VM a file in that directory is the RAM, if of any.
    fn launch_of(&self, file: &str) -> Option<u64> {
        let launch = file.strip_prefix(self.vm.as_str())?.strip_prefix('.')?;
        launch.parse().ok()
    }

    /// All QEMUs that live on one of them, the newest first.
    pub fn living(&self, common_uid: u32) -> io::Result<Vec<Stray>> {
        let users = Users::of(&self.dir, common_uid)?;
        let mut strays = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            strays.extend(self.stray(pid, &users)?);
        }
        strays.sort_by_key(|stray| std::cmp::Reverse(stray.launch));
        Ok(strays)
    }

    fn stray(&self, pid: i32, users: &Users) -> io::Result<Option<Stray>> {
        let launch = || -> io::Result<Option<u64>> {
            let file = ram_file_of(pid, &self.dir, users)?;
            Ok(file.and_then(|file| self.launch_of(&file)))
        };
        if launch()?.is_none() {
            return Ok(None);
        }
        let process = match QemuProcess::open(pid) {
            Ok(process) => process,
            Err(ProcessError::Gone { .. }) => return Ok(None),
            Err(error) => return Err(io::Error::other(error)),
        };
        // Opened, then looked at again: the number cannot have passed to another process in between.
        let found = launch()?.filter(|_| process.is_alive());
        Ok(found.map(|launch| Stray {
            process,
            launch,
            accelerator: accelerator_of(pid),
        }))
    }

    /// Removes those of all QEMUs but these.
    pub fn remove_all_but(&self, kept: &[u64]) {
        let files = std::fs::read_dir(&self.dir);
        for file in files.into_iter().flatten().flatten() {
            let name = file.file_name();
            let launch = name.to_str().and_then(|name| self.launch_of(name));
            if launch.is_some_and(|launch| !kept.contains(&launch)) {
                let path = file.path();
                tracing::warn!(path = %path.display(), "a RAM file without a hypervisor is removed");
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl Stray {
    /// Ends it: one that does not run this VM's guest, or whose guest a person gave up.
    pub fn end(&self, deadline: Instant) -> Result<(), ProcessError> {
        self.process.kill_verified(deadline)?;
        let pid = self.process.pid();
        tracing::warn!(
            pid,
            "a hypervisor that lives on a RAM file of this VM is ended"
        );
        Ok(())
    }
}
