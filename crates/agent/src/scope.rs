//! Where a VM process is started: below systemd in a transient scope of the VM's own, elsewhere beside its agent.
//!
//! A scope outlives the agent, has controllers of its own that nobody else rewrites, and is stopped after the guests
//! were powered off. Owns nothing: systemd makes the scope and takes it away when its last process has gone. Refuses:
//! nothing; a systemd that is missing, fails or hangs never keeps a guest from starting.

use crate::manager::GUESTS_UNIT;
use godwit_qemu::scope::{CGROUPS, SLICE, Scope, unit_name};
use godwit_types::VmName;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// What systemd-run ends with when it has started nothing. The VM process never ends with it.
const RUNNER_FAILED: i32 = 1;

/// How scopes are made on this host.
#[derive(Debug, Clone)]
pub struct Scopes {
    /// Exists where systemd runs the host.
    pub systemd: PathBuf,
    /// Where the control groups are mounted.
    pub cgroups: PathBuf,
    /// The program that asks systemd and then becomes the VM process, with the same process id.
    pub runner: PathBuf,
    /// Longest time that it may take.
    pub patience: Duration,
}

impl Default for Scopes {
    fn default() -> Self {
        Self {
            systemd: "/run/systemd/system".into(),
            cgroups: CGROUPS.into(),
            runner: "systemd-run".into(),
            patience: Duration::from_secs(5),
        }
    }
}

/// Where one VM process is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In the agent's own group.
    Beside,
    /// In a scope that is made for it.
    New,
    /// In the scope that a predecessor left with QEMU in it.
    Join(Scope),
}

impl Scopes {
    /// Whether this host has a systemd that can give scopes, with the control groups that we know.
    pub fn are_there(&self) -> bool {
        self.systemd.is_dir() && self.cgroups.join("cgroup.controllers").exists()
    }

    /// Where the VM's next process goes.
    pub fn place(&self, vm: &VmName) -> Place {
        let scope = Scope::of_vm(&self.cgroups, vm.as_str());
        if !self.are_there() {
            return Place::Beside;
        }
        // One that cannot be read is systemd's to judge.
        if scope.is_populated().unwrap_or(false) {
            return Place::Join(scope);
        }
        Place::New
    }

    /// Words for the runner, which is followed by the program to become.
    pub fn words(&self, vm: &VmName) -> Vec<OsString> {
        let words = [
            "--scope".to_owned(),
            "--quiet".to_owned(),
            "--collect".to_owned(),
            "--no-ask-password".to_owned(),
            format!("--slice={SLICE}"),
            format!("--unit={}", unit_name(vm.as_str())),
            format!("--description=Godwit VM {vm}"),
            "--property=Delegate=yes".to_owned(),
            // It powers guests down when the host goes down, and so is stopped before any scope is.
            format!("--property=Before={GUESTS_UNIT}"),
            "--property=TasksMax=infinity".to_owned(),
            "--".to_owned(),
        ];
        words.map(OsString::from).to_vec()
    }

    /// Whether the process is still the runner, which waits for systemd.
    pub fn is_waiting(&self, pid: u32) -> bool {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let runner = self.runner.file_name().and_then(|name| name.to_str());
        // The kernel keeps 15 bytes of a name.
        runner.is_some_and(|name| name.get(..15).unwrap_or(name) == comm.trim_end())
    }
}

/// Whether a process that was started for a new scope ended because there is none.
pub fn was_refused(place: &Place, status: std::process::ExitStatus) -> bool {
    *place == Place::New && status.code() == Some(RUNNER_FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    #[test]
    fn a_vm_process_goes_where_its_qemu_lives_else_into_a_new_scope_else_beside_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let scopes = Scopes {
            systemd: dir.path().join("systemd"),
            cgroups: dir.path().join("cgroup"),
            ..Scopes::default()
        };
        let vm = VmName::new("web").unwrap();
        assert_eq!(scopes.place(&vm), Place::Beside, "no systemd");
        std::fs::create_dir_all(&scopes.systemd).unwrap();
        let scope = Scope::of_vm(&scopes.cgroups, "web");
        std::fs::create_dir_all(scope.path()).unwrap();
        assert_eq!(scopes.place(&vm), Place::Beside, "no groups that we know");
        std::fs::write(scopes.cgroups.join("cgroup.controllers"), "cpu").unwrap();
        assert_eq!(scopes.place(&vm), Place::New);
        let events = scope.path().join("cgroup.events");
        std::fs::write(&events, "populated 0\nfrozen 0\n").unwrap();
        assert_eq!(scopes.place(&vm), Place::New, "systemd takes it away");
        std::fs::write(&events, "populated 1\nfrozen 0\n").unwrap();
        assert_eq!(scopes.place(&vm), Place::Join(scope));
    }

    #[test]
    fn only_the_runner_s_own_failure_counts_as_a_scope_refused() {
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        assert!(was_refused(&Place::New, exit(1)));
        assert!(!was_refused(&Place::Beside, exit(1)));
        let own = i32::from(crate::launch::VM_PROCESS_FAILED);
        assert!(!was_refused(&Place::New, exit(own)));
        assert!(!was_refused(&Place::New, exit(0)));
        assert!(!was_refused(&Place::New, ExitStatus::from_raw(9)));
    }

    #[test]
    fn a_scope_is_stopped_after_the_guests_were_powered_off() {
        let words = Scopes::default().words(&VmName::new("web").unwrap());
        for word in [
            "--unit=godwit-vm-web.scope",
            "--slice=godwit.slice",
            "--property=Before=godwit-guests.service",
            "--property=Delegate=yes",
        ] {
            assert!(words.contains(&word.into()), "{words:?}");
        }
        assert_eq!(words.last(), Some(&"--".into()));
    }
}
