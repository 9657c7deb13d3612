//! What both machines find on their second disk: the package, the shell, the guest.
//!
//! Owns files below the given directory. Refuses: a machine without gcc or the guest's kernel.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::person::emulated::SHELL;
use godwit_testkit::guest::cpio::Archive;
use godwit_testkit::guest::linux::{add_power_key, target_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes the tar file.
pub fn pack(dir: &Path, package: &Path) -> Result<PathBuf> {
    let payload = dir.join("payload");
    std::fs::create_dir_all(&payload)?;
    std::fs::copy(package, payload.join("godwit.deb"))?;
    std::fs::write(payload.join("shell.sh"), SHELL)?;
    let kernel = target_dir()?.join("guests/linux/vmlinuz");
    std::fs::copy(kernel, payload.join("vmlinuz"))
        .context("the guest's kernel; 'make guests' fetches it")?;
    std::fs::write(payload.join("initrd"), guest(dir)?)?;
    let tar = dir.join("payload.tar");
    let packed = Command::new("tar")
        .arg("cf")
        .arg(&tar)
        .args(["-b", "2048", "-C"])
        .arg(&payload)
        .arg(".")
        .status()?;
    ensure!(packed.success(), "tar did not pack the payload");
    Ok(tar)
}

/// The guest: a kernel's worth of nothing but the program that checks its memory, and the power key.
fn guest(dir: &Path) -> Result<Vec<u8>> {
    let program = dir.join("checker");
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = source.join("../testkit/src/guest/memory_checker.c");
    let compiled = Command::new("gcc")
        .args(["-O2", "-static", "-pthread", "-o"])
        .arg(&program)
        .arg(source)
        .status()?;
    ensure!(compiled.success(), "gcc did not make the guest's checker");
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, &std::fs::read(program)?);
    add_power_key(&mut archive, &target_dir()?)?;
    Ok(archive.finish())
}
