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

/// Gives up all other capabilities and the right to gain any by running a program; files are private from here on.
pub fn harden() -> std::io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
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
