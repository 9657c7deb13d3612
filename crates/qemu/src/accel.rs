//! What can execute a guest on this host, and why.
//!
//! `/dev/kvm` alone proves nothing: on some virtual machines it exists and runs only firmware. KVM is chosen where the
//! CPU shows `vmx` or `svm` and the device opens; a person's override wins.

use crate::command_line::Accelerator;
use std::fs::{self, OpenOptions};
use std::path::Path;

/// A choice and its reason, one clear sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What executes the guest.
    pub accelerator: Accelerator,
    pub why: String,
}

/// Chooses for this host.
pub fn choose_accel(wanted: Option<Accelerator>) -> Choice {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev/kvm"));
    choose(
        wanted,
        &cpuinfo,
        device.map(drop).map_err(|e| e.to_string()),
    )
}

/// What a wish of `auto`, `kvm` or `tcg` comes to on this host.
pub fn come_to(wish: godwit_types::vm::Accelerator) -> godwit_types::vm::Accelerator {
    use godwit_types::vm::Accelerator as Wish;
    let wanted = match wish {
        Wish::Auto => None,
        Wish::Kvm => Some(Accelerator::Kvm),
        Wish::Tcg => Some(Accelerator::Tcg),
    };
    match choose_accel(wanted).accelerator {
        Accelerator::Kvm => Wish::Kvm,
        Accelerator::Tcg => Wish::Tcg,
    }
}

fn choose(wanted: Option<Accelerator>, cpuinfo: &str, device: Result<(), String>) -> Choice {
    if let Some(accelerator) = wanted {
        return Choice {
            accelerator,
            why: format!("{} was asked for", accelerator.as_str()),
        };
    }
    let (accelerator, why) = match (virtualisation(cpuinfo), device) {
        (None, _) => (
            Accelerator::Tcg,
            "the CPU shows neither vmx nor svm, so QEMU translates the guest (tcg)".into(),
        ),
        (Some(flag), Err(error)) => (
            Accelerator::Tcg,
            format!("the CPU has {flag} but /dev/kvm does not open ({error}), so tcg"),
        ),
        (Some(flag), Ok(())) => (
            Accelerator::Kvm,
            format!("the CPU has {flag} and /dev/kvm opens"),
        ),
    };
    Choice { accelerator, why }
}

fn virtualisation(cpuinfo: &str) -> Option<&str> {
    let flags = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("flags")?.split_once(':'))?
        .1;
    flags
        .split_whitespace()
        .find(|flag| matches!(*flag, "vmx" | "svm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_needs_the_cpu_and_the_device() {
        let with = "processor\t: 0\nflags\t\t: fpu svm sse\n";
        let without = "processor\t: 0\nflags\t\t: fpu svm_lock\n";
        assert_eq!(choose(None, with, Ok(())).accelerator, Accelerator::Kvm);
        assert_eq!(choose(None, without, Ok(())).accelerator, Accelerator::Tcg);
        let refused = choose(None, with, Err("permission denied".into()));
        assert_eq!(refused.accelerator, Accelerator::Tcg);
        assert!(refused.why.contains("permission denied"));
    }

    #[test]
    fn an_override_wins() {
        let choice = choose(Some(Accelerator::Kvm), "", Err("gone".into()));
        assert_eq!(
            choice,
            Choice {
                accelerator: Accelerator::Kvm,
                why: "kvm was asked for".into()
            }
        );
    }
}
