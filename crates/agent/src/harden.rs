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

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

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

/// Keeps this process's memory, which holds keys, from core dumps and from debuggers of other users.
pub fn keep_memory_private() -> std::io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Gives up all other capabilities and the right to gain any by running a program; files are private from here on.
pub fn harden() -> std::io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    keep_memory_private()?;
    rustix::thread::set_no_new_privs(true)?;
    let now = rustix::thread::capabilities(None)?;
    for capability in CapabilitySet::all().difference(kept()).iter() {
        // One that this kernel does not know, or that is gone already, needs no removing.
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    let sets = CapabilitySets {
        effective: now.effective.intersection(kept()),
        permitted: now.permitted.intersection(kept()),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, sets)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
