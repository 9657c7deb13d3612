//! QEMUs on this VM's RAM files that no identity file tells of: found by what they map, or by their command line.
//!
//! One that a VM process was killed in starting has never run its guest (it waits with `-S`). One whose run directory was
//! emptied may run the only copy of the guest. Which it is, [`crate::adoption`] finds out; here they are found and ended.
//! Refuses: to find none because the system did not let it look.

use crate::files::Paths;
use godwit_qemu::on_ram::ram_file_of;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_types::vm::Accelerator;
use std::io;
use std::time::Instant;

/// A QEMU that lives on a RAM file of this VM.
#[derive(Debug)]
pub(crate) struct Stray {
    pub process: QemuProcess,
    pub launch: u64,
    pub accelerator: Accelerator,
}

/// All of them, the newest first.
pub(crate) fn living(paths: &Paths, qemu_uid: u32) -> io::Result<Vec<Stray>> {
    let mut strays = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        strays.extend(stray(pid, paths, qemu_uid)?);
    }
    strays.sort_by_key(|stray| std::cmp::Reverse(stray.launch));
    Ok(strays)
}

fn stray(pid: i32, paths: &Paths, qemu_uid: u32) -> io::Result<Option<Stray>> {
    let launch = || -> io::Result<Option<u64>> {
        let file = ram_file_of(pid, paths.ram_dir(), qemu_uid)?;
        Ok(file.and_then(|file| paths.launch_of(&file)))
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

/// What runs the guest of a QEMU, by its command line.
fn accelerator_of(pid: i32) -> Accelerator {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut arguments = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    match arguments.any(|text| text.split(',').any(|part| part == "accel=kvm")) {
        true => Accelerator::Kvm,
        false => Accelerator::Tcg,
    }
}

/// Ends one that does not run this VM's guest.
pub(crate) fn end(stray: &Stray, deadline: Instant) -> Result<(), ProcessError> {
    stray.process.kill_verified(deadline)?;
    let pid = stray.process.pid();
    tracing::warn!(
        pid,
        "a hypervisor that a predecessor did not finish starting is ended"
    );
    Ok(())
}

/// Removes the RAM files of all launches but these.
pub(crate) fn remove_ram_files(paths: &Paths, kept: &[u64]) {
    let files = std::fs::read_dir(paths.ram_dir());
    for file in files.into_iter().flatten().flatten() {
        let name = file.file_name();
        let launch = name.to_str().and_then(|name| paths.launch_of(name));
        if launch.is_some_and(|launch| !kept.contains(&launch)) {
            let path = file.path();
            tracing::warn!(path = %path.display(), "a RAM file without a hypervisor is removed");
            let _ = std::fs::remove_file(path);
        }
    }
}
