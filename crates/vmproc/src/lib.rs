//! The VM process: one per VM, beside its QEMU.
//!
//! Owns the VM's journal (by its lock), QEMU's control socket, the mapping of guest RAM, the write tracking and the
//! migration in progress. May be killed at any time: the next one takes QEMU over and does what this one would have done.
//! Refuses: to run a guest without a permit, to keep a key anywhere but in memory.
//!
//! One thread, [`vm`], changes the VM's state; it takes inputs one at a time and hands events to the ownership core.
//! Around it: `server` answers the agent, a watcher per QEMU passes its events on, `source` or `destination` drive a
//! migration with threads of their own.
#![forbid(unsafe_code)]

mod actions;
mod adoption;
#[cfg(test)]
#[path = "../../streams/tests/common/alone.rs"]
mod alone;
mod ask;
mod came;
mod cloning;
mod closing;
#[cfg(test)]
mod closing_tests;
mod console;
mod destination;
mod disk_moves;
mod disk_orders;
mod disk_work;
mod disks;
mod faults;
mod files;
mod guest;
#[cfg(test)]
mod guest_tests;
mod harden;
mod hypervisor;
pub mod image;
mod input;
mod left;
mod left_over;
mod limiting;
mod measure;
mod migration;
#[cfg(test)]
mod migration_tests;
mod off;
#[cfg(test)]
mod off_tests;
mod opening;
mod outbox;
mod renewal;
mod requests;
mod resizing;
mod room;
mod server;
mod shared_report;
mod snapshotting;
mod source;
mod succession;
#[cfg(test)]
mod testing;
mod timers;
mod unsaved;
mod unsure;
mod variables;
mod vm;
#[cfg(test)]
mod vm_tests;

use anyhow::Context as _;
use godwit_qemu::group;
use godwit_store::load_json;
use godwit_types::host_api::VmProcessConfig;
use renewal::Handed;
use std::os::fd::RawFd;
use std::path::Path;

/// Runs the VM process described by the file at `config_path` until it is told to detach or the VM is gone. A program that this
/// one takes the place of has left what it handed over behind that descriptor.
pub fn run(config_path: &Path, handed: Option<RawFd>) -> anyhow::Result<()> {
    let handed = Handed::received(handed)?;
    group::settle();
    harden::harden()?;
    end_with_any_thread();
    let config: Option<VmProcessConfig> = load_json(config_path)?;
    let config = config.with_context(|| format!("there is no {}", config_path.display()))?;
    match vm::Vm::open(config, handed)? {
        Some(vm) => vm.run(),
        None => Ok(()),
    }
}

/// A thread that panics ends the process: gone silently it would leave the others waiting for it, a successor of the whole
/// process does not.
fn end_with_any_thread() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    const CHILD: &str = "GODWIT_TEST_PANICS";

    #[test]
    fn a_thread_that_panics_leaves_nobody_waiting() {
        if std::env::var_os(CHILD).is_some() {
            super::end_with_any_thread();
            let _ = std::thread::spawn(|| panic!("on purpose")).join();
            return;
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "tests::a_thread_that_panics_leaves_nobody_waiting",
        ]);
        let ended = child.env(CHILD, "1").output().unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{ended:?}");
    }
}
