//! What the agent and, through it, every VM process give up before they do anything else.
//!
//! Owns nothing; must run on the main thread before any other thread exists, since both are per thread and
//! inherited. Refuses: nothing; a kernel that refuses is reported.
//!
//! Kept, and why: `CHOWN FOWNER DAC_OVERRIDE DAC_READ_SEARCH` (RAM files and sockets for QEMU's user), `SETUID SETGID`
//! (QEMU's own user), `KILL` (QEMU of another user), `NET_ADMIN` (taps and bridges, large socket buffers), `NET_RAW`
//! (probe and announcement frames), `SYS_ADMIN` (mounting the RAM tmpfs), `SYS_PTRACE` (page map and descriptors of
//! QEMU), `SYS_NICE` (huge pages put back by process_madvise, page threads no longer nice), `SYS_RESOURCE` (limits of
//! QEMU), `IPC_LOCK` (for VM processes, whose disks' rings else count as locked memory of root), `SETPCAP` (giving up more).

pub use privileges::keep_memory_private;

use godwit_qemu::privileges::{self, CapabilitySet};

fn kept() -> CapabilitySet {
    CapabilitySet::CHOWN
        | CapabilitySet::FOWNER
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::DAC_READ_SEARCH
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::KILL
        | CapabilitySet::NET_ADMIN
        | CapabilitySet::NET_RAW
        | CapabilitySet::SYS_ADMIN
        | CapabilitySet::SYS_PTRACE
        | CapabilitySet::SYS_NICE
        | CapabilitySet::SYS_RESOURCE
        | CapabilitySet::IPC_LOCK
        | CapabilitySet::SETPCAP
}

/// Gives up all other capabilities and the right to gain any by running a program; files are private from here on.
pub fn harden() -> std::io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    keep_memory_private()?;
    privileges::keep_only(kept())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{DumpableBehavior, Resource};
    use std::collections::BTreeSet;

    #[test]
    fn the_package_s_unit_lets_it_have_what_it_keeps_and_nothing_else() {
        let unit = include_str!("../../../packaging/godwit-agent.service");
        let bounding = unit
            .lines()
            .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
            .expect("a bounding set");
        let granted: BTreeSet<String> = bounding.split_whitespace().map(str::to_owned).collect();
        let names = kept().iter_names().map(|(name, _)| format!("CAP_{name}"));
        assert_eq!(granted, names.collect());
    }

    const CHILD: &str = "GODWIT_TEST_KEEPS_MEMORY";

    /// In a process of its own, since none of it can be taken back.
    #[test]
    fn memory_with_keys_is_in_no_core_dump() {
        if std::env::var_os(CHILD).is_some() {
            harden().expect("hardened");
            let dumpable = rustix::process::dumpable_behavior().expect("asked");
            assert_eq!(dumpable, DumpableBehavior::NotDumpable);
            let core = rustix::process::getrlimit(Resource::Core);
            assert_eq!((core.current, core.maximum), (Some(0), Some(0)));
            return;
        }
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
        child.args([
            "--exact",
            "harden::tests::memory_with_keys_is_in_no_core_dump",
        ]);
        let ended = child.env(CHILD, "1").output().expect("run");
        assert!(ended.status.success(), "{ended:?}");
    }
}
