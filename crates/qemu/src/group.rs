//! Where this VM's processes stand among the host's: their control group, their memory limit, who dies first.
//!
//! Owns nothing; the group is the kernel's, the scope around it systemd's. Refuses: nothing: a guest starts also where a
//! host gives it none of this, and the log says what is missing.

use crate::scope::{CGROUPS, JOIN_VARIABLE, Scope, memory_limit};
use std::io;
use std::path::Path;

/// The kernel ends whoever has the highest score first. QEMU, whose score is left at 0, goes before the VM process that
/// cleans up after it; both map the guest's memory and weigh the same by it.
const OOM_SCORE: &str = "-500";

/// Takes this process's place. Must run before capabilities are given up: its own score may have to be lowered.
pub fn settle() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        tracing::debug!(%error, "this process is as likely as others to be ended when memory runs out");
    }
    match scope() {
        Ok(None) => {}
        Ok(Some(scope)) => match scope.enter() {
            Ok(()) => tracing::info!(scope = %scope.path().display(), "in the VM's own scope"),
            Err(error) => {
                let scope = scope.path().display();
                tracing::warn!(%scope, %error, "the VM's control group is not as it should be: its guest may not be slowed nor its memory bounded");
            }
        },
        Err(error) => tracing::warn!(%error, "this process's control group is not known"),
    }
}

/// The scope that systemd made for this process, or the one that its agent says QEMU lives in.
fn scope() -> io::Result<Option<Scope>> {
    let joined = std::env::var(JOIN_VARIABLE).ok();
    match joined.as_deref().and_then(Scope::named) {
        Some(scope) => Ok(Some(scope)),
        None => own_scope(),
    }
}

fn own_scope() -> io::Result<Option<Scope>> {
    Scope::of_process(Path::new(CGROUPS), "self")
}

/// Bounds what this process and QEMU take together, for a guest of this size.
pub fn limit_memory(guest_bytes: u64) {
    let limited = own_scope().and_then(|scope| match scope {
        Some(scope) => scope.limit_memory(memory_limit(guest_bytes)),
        None => Ok(()),
    });
    if let Err(error) = limited {
        tracing::warn!(%error, "the memory of the VM's processes is not bounded");
    }
}

/// Has a QEMU that was started elsewhere, while the host had no scope to give, live where this process does.
pub fn take_in(qemu: i32) {
    let moved = own_scope().and_then(|own| {
        let theirs = Scope::of_process(Path::new(CGROUPS), &qemu.to_string())?;
        match own {
            Some(scope) if theirs.as_ref() != Some(&scope) => scope.take_in(qemu),
            _ => Ok(()),
        }
    });
    if let Err(error) = moved {
        tracing::warn!(qemu, %error, "QEMU stays in the control group that it was started in");
    }
}
