//! Counter guests as VMs: every page is stepped for ever, so that a lost or stale page shows.

use anyhow::Context as _;
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{self, CounterSpec, Mode};
use godwit_types::VmName;
use godwit_types::vm::{Accelerator, EncryptionMode, VmSpec};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A VM that runs a counter guest; its kernel file is written to `dir`.
pub fn counter_vm(dir: &Path, counter: &CounterSpec, memory_mib: u64) -> anyhow::Result<VmSpec> {
    let kernel = dir.join(
        format!(
            "counter-{memory_mib}-{:?}-{:?}",
            counter.mode, counter.action
        )
        .replace(' ', ""),
    );
    std::fs::write(&kernel, counter::build(counter)?)?;
    make_readable(&kernel)?;
    Ok(VmSpec {
        name: VmName::new("vm")?,
        vcpus: 1,
        memory_mib,
        cpu: "qemu64".into(),
        machine: "q35".into(),
        kernel: kernel.to_string_lossy().into_owned(),
        initramfs: None,
        cmdline: String::new(),
        accelerator: if counter.mode == Mode::Real {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        },
        encryption: EncryptionMode::Opportunistic,
        nics: Vec::new(),
        disks: Vec::new(),
    })
}

/// Waits until the guest has made so many passes over its memory.
pub fn wait_passes(ram: &Path, passes: u32, within: Duration) -> anyhow::Result<u32> {
    let deadline = Instant::now() + within;
    loop {
        let file = File::open(ram)?;
        match checker::control(&file) {
            Ok(control) if control.state != 0 && control.passes >= passes => {
                return Ok(control.passes);
            }
            other if Instant::now() > deadline => {
                anyhow::bail!("the guest has not made {passes} passes: {other:?}")
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Checks all counted pages of a stopped guest.
pub fn check(ram: &Path) -> anyhow::Result<Checked> {
    checker::check(&File::open(ram)?).context("guest memory is not what the guest wrote")
}

fn make_readable(path: &PathBuf) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}
