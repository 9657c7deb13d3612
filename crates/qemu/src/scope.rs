//! The control group of one VM below systemd: a transient scope of its own, in which its VM process and QEMU live.
//!
//! The agent asks systemd for the scope, with everything in it delegated to us. The VM process goes into the one group
//! that it makes there, [`GROUP`], since a group that passes controllers on may hold no processes itself; QEMU inherits
//! it. One group for both, so that their threads compete by their niceness, and so that the guest's memory, which is
//! charged to whichever of them touches it first, counts once. Attributes of the scope itself are systemd's.
//!
//! Owns nothing but the group's files. Refuses: a place that is no scope of this product.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The slice of all VMs.
pub const SLICE: &str = "godwit.slice";
/// Where the control groups are mounted.
pub const CGROUPS: &str = "/sys/fs/cgroup";
/// The variable that names the scope that a VM process is to join, because its QEMU lives there.
pub const JOIN_VARIABLE: &str = "GODWIT_JOIN_SCOPE";
/// The group inside the scope.
pub const GROUP: &str = "vm";
const PREFIX: &str = "godwit-vm-";
const SUFFIX: &str = ".scope";
/// What QEMU, its VM process and the kernel need beside the guest's memory: page cache of the disks, code translated
/// by QEMU (up to 1 GiB), streams of a migration, page tables. A bound for what goes wrong, far from daily use.
const OVERHEAD_BYTES: u64 = 2 << 30;

/// The control group of one VM's QEMU and VM process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    path: PathBuf,
}

/// The scope's name as a unit. A VM's name has no character that systemd would not take as it is.
pub fn unit_name(vm: &str) -> String {
    format!("{PREFIX}{vm}{SUFFIX}")
}

/// Bytes that a VM's processes may take together.
pub fn memory_limit(guest_bytes: u64) -> u64 {
    guest_bytes
        .saturating_add(guest_bytes / 8)
        .saturating_add(OVERHEAD_BYTES)
}

impl Scope {
    /// Where the VM's scope is, if systemd has made it.
    pub fn of_vm(cgroups: &Path, vm: &str) -> Self {
        let path = cgroups.join(SLICE).join(unit_name(vm));
        Self { path }
    }

    /// The scope that a variable names.
    pub fn named(path: &str) -> Option<Self> {
        let scope = scope_in(path)?;
        (scope == path && Path::new(path).starts_with(CGROUPS)).then(|| Self { path: path.into() })
    }

    /// The scope in which a process lives, given as a number or `self`; none for one that lives elsewhere.
    pub fn of_process(cgroups: &Path, process: &str) -> io::Result<Option<Self>> {
        let table = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
        let group = table.lines().find_map(|line| line.strip_prefix("0::"));
        let scope = group.and_then(scope_in);
        Ok(scope.map(|scope| Self {
            path: cgroups.join(scope.trim_start_matches('/')),
        }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a process lives in it.
    pub fn is_populated(&self) -> io::Result<bool> {
        match fs::read_to_string(self.path.join("cgroup.events")) {
            Ok(text) => Ok(text.lines().any(|line| line == "populated 1")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            // Taken away while it was read.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The controllers that the VM's group has.
    pub fn controllers(&self) -> io::Result<Vec<String>> {
        let text = fs::read_to_string(self.group().join("cgroup.controllers"))?;
        Ok(text.split_whitespace().map(str::to_owned).collect())
    }

    /// Moves this process into the VM's group and has the group given its controllers. What limits memory goes first:
    /// whoever follows a VM that met its limit must be able to clear up.
    pub fn enter(&self) -> io::Result<()> {
        let group = self.group();
        match fs::create_dir(&group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // It is there only once the controller is.
        let _ = write(&group.join("memory.max"), "max");
        write(&group.join("cgroup.procs"), "0")?;
        let passed_on = self.path.join("cgroup.subtree_control");
        let cpu = write(&passed_on, "+cpu");
        let memory = write(&passed_on, "+memory");
        cpu.and(memory)
    }

    /// Moves another process, with all its threads, into the VM's group.
    pub fn take_in(&self, process: i32) -> io::Result<()> {
        write(&self.group().join("cgroup.procs"), &process.to_string())
    }

    /// Bounds what the VM's processes take together; a host without the controller bounds nothing.
    pub fn limit_memory(&self, bytes: u64) -> io::Result<()> {
        match write(&self.group().join("memory.max"), &bytes.to_string()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        }
    }

    fn group(&self) -> PathBuf {
        self.path.join(GROUP)
    }
}

/// The part of a group's path that ends with one of our scopes.
fn scope_in(path: &str) -> Option<&str> {
    let mut end = 0;
    for part in path.split('/') {
        end += part.len();
        if part
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.strip_suffix(SUFFIX))
            .is_some_and(|vm| !vm.is_empty())
        {
            return path.get(..end);
        }
        end += 1;
    }
    None
}

/// An existing file only: what a controller would offer is never made as a plain file.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::File::options().write(true).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_found_in_the_path_of_any_group_below_it() {
        for (path, scope) in [
            (
                "/godwit.slice/godwit-vm-web.scope",
                Some("/godwit.slice/godwit-vm-web.scope"),
            ),
            (
                "/godwit.slice/godwit-vm-a-b.c_1.scope/vm/godwit-throttle-1-2",
                Some("/godwit.slice/godwit-vm-a-b.c_1.scope"),
            ),
            (
                "/x/godwit.slice/godwit-vm-web.scope/vm",
                Some("/x/godwit.slice/godwit-vm-web.scope"),
            ),
            ("/system.slice/godwit-agent.service", None),
            ("/godwit.slice/godwit-vm-.scope", None),
            ("/user.slice/session-1.scope", None),
            ("/", None),
        ] {
            assert_eq!(scope_in(path), scope, "{path}");
        }
    }

    #[test]
    fn only_a_scope_s_own_path_is_joined() {
        let path = "/sys/fs/cgroup/godwit.slice/godwit-vm-web.scope";
        let scope = Scope::named(path).expect("a scope");
        assert_eq!(scope, Scope::of_vm(Path::new(CGROUPS), "web"));
        for other in [
            "/sys/fs/cgroup/godwit.slice/godwit-vm-web.scope/vm",
            "/tmp/godwit-vm-web.scope",
            "/sys/fs/cgroup/system.slice",
            "",
        ] {
            assert_eq!(Scope::named(other), None, "{other}");
        }
    }

    #[test]
    fn a_vm_has_room_beside_its_memory_and_no_sum_overflows() {
        assert_eq!(memory_limit(8 << 30), 11 << 30);
        assert_eq!(memory_limit(u64::MAX), u64::MAX);
    }

    /// A directory in place of the control groups: what is written, and where.
    #[test]
    fn entering_lifts_the_limit_first_and_asks_for_both_controllers() {
        let dir = tempfile::tempdir().expect("a directory");
        let scope = Scope::of_vm(dir.path(), "web");
        assert!(!scope.is_populated().expect("absent is empty"));
        let group = scope.path().join(GROUP);
        fs::create_dir_all(&group).expect("made");
        for name in ["vm/cgroup.procs", "vm/memory.max", "cgroup.subtree_control"] {
            fs::write(scope.path().join(name), "").expect("made");
        }
        fs::write(
            scope.path().join("cgroup.events"),
            "populated 1\nfrozen 0\n",
        )
        .expect("made");
        assert!(scope.is_populated().expect("read"));
        scope.enter().expect("entered");
        let read = |name: &str| fs::read_to_string(scope.path().join(name)).expect("read");
        assert_eq!(read("vm/memory.max"), "max");
        assert_eq!(read("vm/cgroup.procs"), "0");
        assert_eq!(read("cgroup.subtree_control"), "+memory");
        scope.limit_memory(4096).expect("limited");
        assert_eq!(read("vm/memory.max"), "4096");
        fs::remove_file(group.join("memory.max")).expect("removed");
        scope
            .limit_memory(4096)
            .expect("no controller, nothing to bound");
    }
}
