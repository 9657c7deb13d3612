//! What a VM process that was killed in the middle of starting a QEMU leaves behind: a QEMU that nobody knows.
//!
//! Such a QEMU has never run its guest (it waits with `-S`), but it holds memory and the VM's sockets. It is found by
//! its RAM file, which is this VM's alone. Refuses: to touch the QEMU that is known.

use crate::files::Paths;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::path::Path;

/// Ends every QEMU on a RAM file of this VM but the one known, and removes RAM files of no launch that is known.
pub(crate) fn end_strays(paths: &Paths, known: Option<(i32, u64)>) {
    let known_file = known.map(|(_, launch)| paths.ram_file(launch));
    // `ram_file(n)` is PREFIX followed by the number.
    let first = paths.ram_file(0);
    let Some(prefix) = first.to_str().and_then(|path| path.strip_suffix('0')) else {
        return;
    };
    for pid in pids().filter(|pid| known.is_none_or(|(known, _)| *pid != known)) {
        end_stray(pid, prefix);
    }
    let files = first.parent().and_then(|dir| std::fs::read_dir(dir).ok());
    for file in files.into_iter().flatten().flatten() {
        let path = file.path();
        if is_of(&path, prefix) && known_file.as_ref() != Some(&path) {
            tracing::warn!(path = %path.display(), "a RAM file without a hypervisor is removed");
            let _ = std::fs::remove_file(path);
        }
    }
}

fn is_of(path: &Path, prefix: &str) -> bool {
    let number = path.to_str().and_then(|path| path.strip_prefix(prefix));
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn end_stray(pid: i32, prefix: &str) {
    let Some(handle) = Pid::from_raw(pid).filter(|_| uses(pid, prefix)) else {
        return;
    };
    // Opened, then looked at again: the number cannot have passed to another process in between.
    let Ok(pidfd) = pidfd_open(handle, PidfdFlags::empty()) else {
        return;
    };
    if uses(pid, prefix) && pidfd_send_signal(&pidfd, Signal::KILL).is_ok() {
        tracing::warn!(
            pid,
            "a hypervisor that a predecessor did not finish starting is ended"
        );
    }
}

fn uses(pid: i32, prefix: &str) -> bool {
    let Ok(arguments) = std::fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let wanted = format!("mem-path={prefix}");
    arguments.split(|byte| *byte == 0).any(|argument| {
        let text = String::from_utf8_lossy(argument);
        text.starts_with("memory-backend-file,")
            && text.split(',').any(|part| {
                part.strip_prefix(&wanted)
                    .is_some_and(|number| number.parse::<u64>().is_ok())
            })
    })
}
