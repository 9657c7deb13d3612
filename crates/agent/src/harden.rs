//! What the agent and, through it, every VM process give up before they do anything else.
//!
//! Owns nothing; must run on the main thread before any other thread exists, since both are per thread and
//! inherited. Refuses: nothing; a kernel that refuses is reported.
//!
//! Kept, and why: `CHOWN FOWNER DAC_OVERRIDE DAC_READ_SEARCH` (RAM files and sockets for QEMU's user), `SETUID SETGID`
//! (QEMU's own user), `KILL` (QEMU of another user), `NET_ADMIN` (taps and bridges, large socket buffers), `NET_RAW`
//! (probe and announcement frames), `SYS_ADMIN` (mounting the RAM tmpfs), `SYS_PTRACE` (page map and descriptors of
//! QEMU), `SYS_NICE` (huge pages put back by process_madvise, page threads no longer nice), `SYS_RESOURCE` (limits of
//! QEMU), `IPC_LOCK` (locked memory), `SETPCAP` (giving up more).

pub use privileges::keep_memory_private;

use godwit_qemu::privileges::{self, CapabilitySet};
use rustix::process::{Resource, Rlimit, setrlimit};

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
    lock_as_much_as_disks_need();
    privileges::keep_only(kept())
}

/// The rings of io_uring count as locked memory of new kernels (seen on Linux 6.18), those of all VM processes together: the usual limit of 8 MiB is used up
/// by some fifteen disks. Where it cannot be raised, a disk that is too many says so.
fn lock_as_much_as_disks_need() {
    let all = Rlimit {
        current: None,
        maximum: None,
    };
    let _ = setrlimit(Resource::Memlock, all);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::DumpableBehavior;

    const CHILD: &str = "GODWIT_TEST_KEEPS_MEMORY";

    fn may_raise_limits() -> bool {
        let has = rustix::thread::capabilities(None).expect("asked").effective;
        has.contains(CapabilitySet::SYS_RESOURCE)
    }

    /// In a process of its own, since none of it can be taken back.
    #[test]
    fn memory_with_keys_is_in_no_core_dump() {
        if std::env::var_os(CHILD).is_some() {
            harden().expect("hardened");
            let dumpable = rustix::process::dumpable_behavior().expect("asked");
            assert_eq!(dumpable, DumpableBehavior::NotDumpable);
            let core = rustix::process::getrlimit(Resource::Core);
            assert_eq!((core.current, core.maximum), (Some(0), Some(0)));
            if may_raise_limits() {
                let locked = rustix::process::getrlimit(Resource::Memlock);
                assert_eq!((locked.current, locked.maximum), (None, None));
            }
            return;
        }
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
        child.args([
            "--exact",
            "harden::tests::memory_with_keys_is_in_no_core_dump",
        ]);
        let ended = child.env(CHILD, "1").output().expect("run");
        assert!(ended.status.success(), "{ended:?}");
        if !may_raise_limits() {
            println!("skipped: a limit of locked memory is raised with CAP_SYS_RESOURCE alone");
        }
    }
}
