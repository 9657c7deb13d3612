//! QEMUs on this VM's RAM files that no identity file tells of: found by their command line.
//!
//! One that a VM process was killed in starting has never run its guest (it waits with `-S`). One whose run directory was
//! emptied may run the only copy of the guest. Which it is, [`crate::adoption`] finds out; here they are found and ended.
//! Refuses: to find none because the system did not let it look.

use crate::files::Paths;
use godwit_qemu::process::{ProcessError, QemuProcess};
use godwit_types::vm::Accelerator;
use rustix::io::Errno;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Instant;

/// A QEMU that lives on a RAM file of this VM.
#[derive(Debug)]
pub(crate) struct Stray {
    pub process: QemuProcess,
    pub launch: u64,
    pub accelerator: Accelerator,
}

/// All of them, the newest first.
pub(crate) fn living(paths: &Paths) -> io::Result<Vec<Stray>> {
    let Some(prefix) = paths.ram_prefix() else {
        return Ok(Vec::new());
    };
    let mut strays = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        strays.extend(stray(pid, &prefix)?);
    }
    strays.sort_by_key(|stray| std::cmp::Reverse(stray.launch));
    Ok(strays)
}

fn stray(pid: i32, prefix: &str) -> io::Result<Option<Stray>> {
    if launch_of(pid, prefix)?.is_none() {
        return Ok(None);
    }
    let process = match QemuProcess::open(pid) {
        Ok(process) => process,
        Err(ProcessError::Gone { .. }) => return Ok(None),
        Err(error) => return Err(io::Error::other(error)),
    };
    // Opened, then looked at again: the number cannot have passed to another process in between.
    let found = launch_of(pid, prefix)?.filter(|_| process.is_alive());
    Ok(found.map(|(launch, accelerator)| Stray {
        process,
        launch,
        accelerator,
    }))
}

/// Which QEMU of this VM a process is, if it is one.
fn launch_of(pid: i32, prefix: &str) -> io::Result<Option<(u64, Accelerator)>> {
    let line = match std::fs::read(format!("/proc/{pid}/cmdline")) {
        Ok(line) => line,
        Err(error) => {
            let errno = Errno::from_io_error(&error);
            let gone = matches!(errno, Some(Errno::NOENT | Errno::SRCH));
            return if gone { Ok(None) } else { Err(error) };
        }
    };
    let wanted = format!("mem-path={prefix}");
    let (mut launch, mut accelerator) = (None, Accelerator::Tcg);
    for argument in line.split(|byte| *byte == 0) {
        let text = String::from_utf8_lossy(argument);
        let mut parts = text.split(',');
        if text.starts_with("memory-backend-file,") {
            let number = parts.find_map(|part| part.strip_prefix(&wanted)?.parse().ok());
            launch = launch.or(number);
        } else if parts.any(|part| part == "accel=kvm") {
            accelerator = Accelerator::Kvm;
        }
    }
    Ok(launch.map(|launch| (launch, accelerator)))
}

/// Whether the process is of a user that QEMU of this host runs as. Others may write what they like on a command line.
pub(crate) fn is_ours(stray: &Stray, qemu_uid: u32) -> bool {
    let owner = std::fs::metadata(format!("/proc/{}", stray.process.pid()));
    match owner {
        Ok(owner) => owner.uid() == 0 || owner.uid() == qemu_uid,
        // One that is there and cannot be looked at may be ours.
        Err(error) => error.kind() != io::ErrorKind::NotFound,
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

/// Removes the RAM files of all launches but this one.
pub(crate) fn remove_ram_files(paths: &Paths, kept: Option<u64>) {
    let Some(prefix) = paths.ram_prefix() else {
        return;
    };
    let kept = kept.map(|launch| paths.ram_file(launch));
    let directory = Path::new(&prefix).parent();
    let files = directory.and_then(|dir| std::fs::read_dir(dir).ok());
    for file in files.into_iter().flatten().flatten() {
        let path = file.path();
        if is_of(&path, &prefix) && kept.as_ref() != Some(&path) {
            tracing::warn!(path = %path.display(), "a RAM file without a hypervisor is removed");
            let _ = std::fs::remove_file(path);
        }
    }
}

fn is_of(path: &Path, prefix: &str) -> bool {
    let number = path.to_str().and_then(|path| path.strip_prefix(prefix));
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}
