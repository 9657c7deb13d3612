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
//! | `IPC_LOCK` | a disk's ring counts as locked memory of its user, 0.5 MiB of 8 for all VM processes together, for who has it not (Linux 6.18) | the sixteenth disk of a host is not served |
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
        | CapabilitySet::IPC_LOCK
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
    use godwit_blockio::{Access, Engine, Image};
    use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
    use rustix::thread::CapabilitySets;
    use std::process::Command;

    /// What a child of this test program gives up before it begins rings.
    const CHILD: &str = "GODWIT_TEST_BEGINS_RINGS";
    const RINGS: usize = 20;
    const LOCKED_MAX: u64 = 64 << 10;

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

    /// A VM process has no more than its agent, whose unit bounds it.
    #[test]
    fn the_package_s_unit_lets_a_vm_process_have_all_that_it_keeps() {
        let unit = include_str!("../../../packaging/godwit-agent.service");
        let bounding = unit
            .lines()
            .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
            .expect("a bounding set");
        let granted: Vec<&str> = bounding.split_whitespace().collect();
        for (name, _) in kept().iter_names() {
            assert!(granted.contains(&format!("CAP_{name}").as_str()), "{name}");
        }
    }

    /// In processes of their own, which alone have the limit.
    #[test]
    fn a_vm_process_begins_more_rings_than_a_small_limit_of_locked_memory_has_room_for() {
        if let Ok(gives_up) = std::env::var(CHILD) {
            return begin_rings(&gives_up);
        }
        let has = rustix::thread::capabilities(None).expect("asked").effective;
        if !has.contains(CapabilitySet::IPC_LOCK) {
            println!("skipped: a VM process keeps CAP_IPC_LOCK where its agent has it");
            return;
        }
        if begun("nothing") < RINGS {
            println!("skipped: CAP_IPC_LOCK counts in the first user namespace alone");
            return;
        }
        assert_eq!(begun("what a VM process does"), RINGS);
        match begun("the capability, too") {
            RINGS => println!("skipped: this kernel counts no ring as locked memory"),
            some => assert!(some < RINGS, "{some}"),
        }
    }

    fn begin_rings(gives_up: &str) {
        let small = Rlimit {
            current: Some(LOCKED_MAX),
            maximum: Some(LOCKED_MAX),
        };
        setrlimit(Resource::Memlock, small).expect("a limit");
        if gives_up != "nothing" {
            harden().expect("hardened");
        }
        if gives_up == "the capability, too" {
            let has = rustix::thread::capabilities(None).expect("asked");
            let without = |set: CapabilitySet| set.difference(CapabilitySet::IPC_LOCK);
            let sets = CapabilitySets {
                effective: without(has.effective),
                permitted: without(has.permitted),
                ..has
            };
            rustix::thread::set_capabilities(None, sets).expect("given up");
        }
        let file = tempfile::NamedTempFile::new_in("/var/tmp").expect("a file");
        file.as_file().set_len(4096).expect("a length");
        let image = || Image::open(file.path(), Access::ReadOnly, 512).expect("an image");
        let rings = (0..RINGS).map_while(|_| Engine::new(image()).ok());
        println!("begun: {}.", rings.collect::<Vec<_>>().len());
    }

    /// How many of the rings a child begins that gives that up.
    fn begun(gives_up: &str) -> usize {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        child.args([
            "--exact",
            "--nocapture",
            "harden::tests::a_vm_process_begins_more_rings_than_a_small_limit_of_locked_memory_has_room_for",
        ]);
        let ended = child.env(CHILD, gives_up).output().expect("run");
        let said = String::from_utf8_lossy(&ended.stdout);
        let count = said
            .split_once("begun: ")
            .and_then(|(_, rest)| rest.split('.').next()?.parse().ok());
        count.unwrap_or_else(|| panic!("{ended:?}"))
    }
}
