//! What the programs that start QEMU give up of their own rights: most capabilities, core dumps, debuggers.
//!
//! Owns nothing. Capabilities belong to threads and are inherited by new ones, so this must run while a process has one
//! thread. Refuses: nothing; a kernel that refuses is reported.

pub use rustix::thread::CapabilitySet;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::CapabilitySets;
use std::io;

/// Gives up all capabilities but these, from the bounding set too, and the right to gain any by running a program.
pub fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let now = rustix::thread::capabilities(None)?;
    for capability in CapabilitySet::all().difference(kept).iter() {
        // One that this kernel does not know, or that is gone already, needs no removing.
        let _ = rustix::thread::remove_capability_from_bounding_set(capability);
    }
    let sets = CapabilitySets {
        effective: now.effective.intersection(kept),
        permitted: now.permitted.intersection(kept),
        inheritable: CapabilitySet::empty(),
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Keeps this process's memory, which holds keys, from core dumps and from debuggers of other users.
pub fn keep_memory_private() -> io::Result<()> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    stay_private()
}

/// Keeps memory from debuggers. To be said again after any thread has changed its rights ([`crate::rights`]), which sets the whole process back
/// to what the system does with such programs.
pub fn stay_private() -> io::Result<()> {
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}
