//! Guests of a stack whose disks are linked to one image.
//!
//! Owns nothing. Refuses: nothing.

use super::Stack;
use super::disks::{describe, goes_on_at};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::boot_disk;
use std::fs::File;
use std::time::{Duration, SystemTime};

/// The datastore of the image and of the disks.
pub const STORE: &str = "/var/tmp/fast";
pub const BASE: &str = "/var/tmp/fast/base.raw";
/// How long the image is.
pub const BYTES: usize = 4 << 20;

/// Puts an image that boots into the datastore of host a.
pub fn put_base(stack: &Stack) -> Result<()> {
    let path = stack.inside("a", BASE)?;
    std::fs::write(&path, base()?)?;
    // One that was written just now may still be.
    let image = File::options().write(true).open(&path)?;
    image.set_modified(SystemTime::now() - Duration::from_secs(60))?;
    allow(stack, "644")
}

/// Sets who may do what with the image.
pub fn allow(stack: &Stack, mode: &str) -> Result<()> {
    let mut command = stack.machine("a")?.command("chmod");
    ensure!(command.args([mode, BASE]).status()?.success());
    Ok(())
}

/// What the image holds.
pub fn base() -> Result<Vec<u8>> {
    let mut content = boot_disk::sector()?;
    content.resize(BYTES, 7);
    content
        .get_mut(512..64 << 10)
        .context("a short image")?
        .fill(0);
    Ok(content)
}

/// Lines for a disk of this VM that is linked to the image.
pub fn lines(vm: &str) -> String {
    format!(
        "[[disk]]\nname = \"root\"\npath = \"{STORE}/{vm}.raw\"\nfrom = \"{BASE}\"\nlinked = true\n"
    )
}

/// Makes such a VM and has it run on host a.
pub fn begin(stack: &Stack, vm: &str) -> Result<()> {
    let file = describe(stack, vm, &lines(vm))?;
    stack.ok("controller", &["vm", "create", &file])?;
    stack.ok("controller", &["vm", "start", vm, "--on", "a"])?;
    goes_on_at(stack, vm, "a")
}
