//! What the VM process gives up before it does anything else.
//!
//! Owns nothing. Must run while the process has one thread, since capabilities belong to threads and are inherited by
//! new ones. Refuses: nothing; a kernel that refuses is reported.
//!
//! | Capability | Why it is kept | Without it |
//! |---|---|---|
//! | `CHOWN` | the RAM file is made for QEMU's user | no VM starts |
//! | `DAC_OVERRIDE` | the RAM file, which is QEMU's user's alone, is opened again | no VM starts |
//! | `SETUID`, `SETGID` | QEMU and the opening of disk images run as QEMU's user | no VM starts |
//! | `KILL` | QEMU, another user's process, is ended | a dead migration's QEMU stays |
//! | `SYS_PTRACE` | QEMU's memory map and page map: what the guest writes | no migration |
//! | `SYS_NICE` | huge pages are put back in QEMU (`process_madvise`); page threads stop being nice | guests stay slower after a migration, writing ones on busy hosts are given up |
//! | `NET_ADMIN` | taps and their place on bridges; large socket buffers | no network cards |
//! | `NET_RAW` | the guest's claims are heard on its port; announcements on a bridge | neighbours learn late |
//!
//! Everything else goes, from the bounding set too, with the right to gain any by running a program. The memory of this
//! process holds the keys of a migration: no core dump is written of it and no other user's debugger is let in. QEMU,
//! started from here, has no capability at all.

pub(crate) use privileges::stay_private;

use godwit_qemu::privileges::{self, CapabilitySet};
use std::io;

pub(crate) fn kept() -> CapabilitySet {
    CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::KILL
        | CapabilitySet::SYS_PTRACE
        | CapabilitySet::SYS_NICE
        | CapabilitySet::NET_ADMIN
        | CapabilitySet::NET_RAW
}

/// Gives all of it up.
pub(crate) fn harden() -> io::Result<()> {
    // Private last, too: what is given up sets the process back to what the system does.
    privileges::keep_memory_private()?;
    privileges::keep_only(kept())?;
    stay_private()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{DumpableBehavior, Resource};

    /// In a thread, since most of it cannot be taken back.
    #[test]
    fn only_what_is_listed_is_kept() {
        let hardened = std::thread::spawn(|| {
            harden().expect("hardened");
            std::fs::read_to_string("/proc/thread-self/status").expect("status")
        });
        let status = hardened.join().expect("the thread");
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_whitespace().nth(1))
                .expect(name)
                .to_owned()
        };
        let sets = ["CapEff:", "CapPrm:", "CapBnd:"].map(|name| {
            let bits = u64::from_str_radix(&field(name), 16).expect("hexadecimal");
            (name, bits & !kept().bits())
        });
        assert_eq!(sets, [("CapEff:", 0), ("CapPrm:", 0), ("CapBnd:", 0)]);
        assert_eq!(field("CapInh:"), "0000000000000000");
        assert_eq!(field("NoNewPrivs:"), "1");
        let dumpable = rustix::process::dumpable_behavior().expect("asked");
        assert_eq!(dumpable, DumpableBehavior::NotDumpable);
        assert_eq!(
            rustix::process::getrlimit(Resource::Core).maximum,
            Some(0),
            "no core dumps"
        );
    }
}
