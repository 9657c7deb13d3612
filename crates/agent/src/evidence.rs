//! Whether a VM's QEMU is there, without asking its VM process.
//!
//! Reads what the VM process wrote of its QEMU, and the kernel. Refuses: to take anything but a clear no for a death:
//! what cannot be read may live.

use serde::Deserialize;
use std::io::ErrorKind;
use std::path::Path;

/// In a VM's run directory: which QEMU is its.
const IDENTITY_FILE: &str = "qemu.json";

#[derive(Deserialize)]
struct Identity {
    pid: i32,
    start_time_ticks: u64,
}

/// Whether the VM with this run directory may have a living QEMU.
pub(crate) fn may_live(run_dir: &Path) -> bool {
    let text = match std::fs::read(run_dir.join(IDENTITY_FILE)) {
        Ok(text) => text,
        Err(error) => return error.kind() != ErrorKind::NotFound,
    };
    let Ok(identity) = serde_json::from_slice::<Identity>(&text) else {
        return true;
    };
    let stat = match std::fs::read_to_string(format!("/proc/{}/stat", identity.pid)) {
        Ok(stat) => stat,
        Err(error) => {
            let is_gone = error.raw_os_error() == Some(libc::ESRCH);
            return !is_gone && error.kind() != ErrorKind::NotFound;
        }
    };
    state_and_start(&stat).is_none_or(|(state, start)| {
        start == identity.start_time_ticks && !matches!(state, "Z" | "X")
    })
}

/// Fields 3 and 22 of `/proc/PID/stat`; the process's name may itself hold spaces and parentheses.
fn state_and_start(stat: &str) -> Option<(&str, u64)> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    let state = fields.next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_no_is_a_death() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!may_live(dir.path()), "none was ever started");
        let file = dir.path().join(IDENTITY_FILE);
        std::fs::write(&file, "{").unwrap();
        assert!(may_live(dir.path()), "what cannot be read may live");
        let pid = std::process::id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let (_, start) = state_and_start(&stat).unwrap();
        let write = |pid: u32, start: u64| {
            let text = format!("{{\"pid\":{pid},\"start_time_ticks\":{start},\"launch\":1}}");
            std::fs::write(&file, text).unwrap();
            may_live(dir.path())
        };
        assert!(write(pid, start));
        assert!(!write(pid, start + 1), "another process has its number");
        assert!(!write(i32::MAX as u32, start));
    }
}
