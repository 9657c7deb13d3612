//! Whether a VM's QEMU or its VM process is there, whatever the VM's record says.
//!
//! Reads what the VM process wrote of its QEMU, its socket, and the kernel. Refuses: to take anything but a clear no for
//! a death: what cannot be read may live.

use crate::records::{VMS_MAX, named};
use godwit_qemu::on_ram::{Users, ram_file_of};
use godwit_qemu::process::stat;
use godwit_store::read_regular;
use godwit_types::host_api::{IDENTITY_FILE, SOCKET_FILE};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// Longest such file, in bytes.
const IDENTITY_MAX: u64 = 4096;

#[derive(Deserialize)]
struct Identity {
    pid: i32,
    start_time_ticks: u64,
}

/// Whether the VM with this run directory may have a living QEMU or a living VM process.
pub(crate) fn may_live(run_dir: &Path) -> bool {
    process_may_live(run_dir) || qemu_may_live(run_dir)
}

/// Whether something listens where the VM's process does; it is not waited for.
pub(crate) fn process_may_live(run_dir: &Path) -> bool {
    let look = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(run_dir.join(SOCKET_FILE))?)
    };
    let nobody = [
        Errno::NOENT,
        Errno::NOTDIR,
        Errno::CONNREFUSED,
        Errno::NAMETOOLONG,
    ];
    !matches!(look(), Err(errno) if nobody.contains(&errno))
}

/// Why nothing is said or done from a VM's record alone: what lives may know better.
pub(crate) fn alive(vm: &VmName, host: &HostName, run_dir: &Path) -> ApiError {
    let message = format!(
        "a VM process or QEMU of VM '{vm}' may live on host '{host}' and does not answer, so its record alone says nothing and is not changed: ask again, or see {} for its processes",
        run_dir.display()
    );
    ApiError::new(ErrorCode::Locked, message).on_host(host)
}

/// The number of the process that may be the VM's QEMU.
pub(crate) fn qemu_pid(run_dir: &Path) -> Option<i32> {
    let text = read_regular(&run_dir.join(IDENTITY_FILE), IDENTITY_MAX).ok()??;
    let identity: Identity = serde_json::from_slice(&text).ok()?;
    qemu_may_live(run_dir).then_some(identity.pid)
}

/// Names of all VMs of which something may live, by their run directories and by what runs on their RAM files.
pub(crate) fn living(
    run_dirs: &Path,
    ram_dir: &Path,
    qemu_uid: u32,
) -> std::io::Result<BTreeSet<VmName>> {
    let mut living = qemus(ram_dir, qemu_uid)?;
    let known = named(run_dirs)?.into_iter();
    living.extend(known.filter(|name| may_live(&run_dirs.join(name.as_str()))));
    Ok(living)
}

/// The VMs on whose RAM files a process lives, whatever became of their run directories. Only what runs as a QEMU of this
/// host may, or maps such a file, counts: others may write what they like on a command line.
pub(crate) fn qemus(ram_dir: &Path, qemu_uid: u32) -> std::io::Result<BTreeSet<VmName>> {
    let mut found = BTreeSet::new();
    let users = Users::of(ram_dir, qemu_uid)?;
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let file = ram_file_of(pid, ram_dir, &users)?;
        found.extend(file.and_then(|file| vm_on(&file)));
        if found.len() > VMS_MAX {
            let message = format!("more than {VMS_MAX} VMs seem to live on this host");
            return Err(std::io::Error::other(message));
        }
    }
    Ok(found)
}

/// Whose RAM file has this name.
fn vm_on(file: &str) -> Option<VmName> {
    let (vm, launch) = file.rsplit_once('.')?;
    launch.parse::<u64>().ok()?;
    VmName::new(vm).ok()
}

/// Whether the VM with this run directory may have a living QEMU.
pub(crate) fn qemu_may_live(run_dir: &Path) -> bool {
    let text = match read_regular(&run_dir.join(IDENTITY_FILE), IDENTITY_MAX) {
        Ok(Some(text)) => text,
        Ok(None) => return false,
        Err(_) => return true,
    };
    let Ok(identity) = serde_json::from_slice::<Identity>(&text) else {
        return true;
    };
    let stat = match stat(identity.pid) {
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
        assert!(!qemu_may_live(dir.path()), "none was ever started");
        let file = dir.path().join(IDENTITY_FILE);
        std::fs::write(&file, "{").unwrap();
        assert!(qemu_may_live(dir.path()), "what cannot be read may live");
        let pid = std::process::id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let (_, start) = state_and_start(&stat).unwrap();
        let write = |pid: u32, start: u64| {
            let text = format!("{{\"pid\":{pid},\"start_time_ticks\":{start},\"launch\":1}}");
            std::fs::write(&file, text).unwrap();
            qemu_may_live(dir.path())
        };
        assert!(write(pid, start));
        assert!(!write(pid, start + 1), "another process has its number");
        assert!(!write(i32::MAX as u32, start));
    }

    #[test]
    fn what_listens_lives_and_a_socket_that_was_left_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("web");
        std::fs::create_dir(&run_dir).unwrap();
        let ram = Path::new("/nonexistent");
        let names = || Vec::from_iter(living(dir.path(), ram, 0).unwrap());
        assert_eq!(names(), []);
        let listener = std::os::unix::net::UnixListener::bind(run_dir.join(SOCKET_FILE)).unwrap();
        assert!(may_live(&run_dir));
        assert_eq!(names(), [VmName::new("web").unwrap()]);
        drop(listener);
        assert!(run_dir.join(SOCKET_FILE).exists());
        assert_eq!(names(), []);
    }

    #[test]
    fn a_pipe_in_place_of_an_identity_is_not_waited_for_and_shows_no_death() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(IDENTITY_FILE);
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        assert!(qemu_may_live(dir.path()));
        assert_eq!(qemu_pid(dir.path()), None);
    }

    #[test]
    fn a_run_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = living(&file, dir.path(), 0).unwrap_err();
        assert!(error.to_string().contains("cannot list"), "{error}");
    }

    #[test]
    fn a_ram_file_s_name_tells_the_vm() {
        let on = |file: &str| vm_on(file).map(|vm| vm.to_string());
        assert_eq!(on("web.3").as_deref(), Some("web"));
        for other in ["web", "web.x", ".3", "3"] {
            assert_eq!(on(other), None, "{other}");
        }
    }
}
