//! A counter guest's memory in a system whose files can be reached from outside.
//!
//! Reads only. Refuses: a VM without exactly one RAM file; a guest that booted again.

use super::{Host, Machine};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{CounterSpec, build};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Where the RAM files are in a system.
const RAM: &str = "run/godwit/ram";

/// Writes a counter guest of 32 MiB, slow enough to converge, and gives its description.
pub fn describe(name: &str, kernel_outside: &Path, kernel: &str) -> Result<String> {
    std::fs::write(kernel_outside, build(&CounterSpec::flat(32).slowed(2000))?)?;
    Ok(format!(
        "name = \"{name}\"\nvcpus = 1\nmemory_mib = 32\naccelerator = \"tcg\"\nkernel = \"{kernel}\"\n"
    ))
}

fn ram_file(root: &Path, vm: &str) -> Result<PathBuf> {
    let prefix = format!("{vm}.");
    let entries = std::fs::read_dir(root.join(RAM))?.flatten();
    let mut files =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let one = files
        .next()
        .with_context(|| format!("{vm} has no RAM file here"))?;
    ensure!(files.next().is_none(), "{vm} has several RAM files here");
    Ok(one.path())
}

/// Passes that the guest has made; an error while it prepares.
pub fn passes(root: &Path, vm: &str) -> Result<u32> {
    let control = checker::control(&File::open(ram_file(root, vm)?)?)?;
    ensure!(control.state != 0, "{vm} is still preparing its pages");
    Ok(control.passes)
}

/// Waits until the guest has made a whole pass more.
pub fn counts<M: Machine>(host: &Host<M>, root: &Path, vm: &str) -> Result<()> {
    let first = std::cell::Cell::new(None);
    host.until(&format!("guest {vm} counts"), "true", |_| {
        let Ok(now) = passes(root, vm) else {
            return false;
        };
        let from = first.get().unwrap_or(now);
        first.set(Some(from));
        now.wrapping_sub(from) >= 2
    })?;
    Ok(())
}

/// Pauses the guest, checks every page that it counts, lets it go on. It must never have booted again.
pub fn check<M: Machine>(
    host: &Host<M>,
    controller: &Host<M>,
    root: &Path,
    vm: &str,
) -> Result<Checked> {
    counts(host, root, vm)?;
    controller.value(&format!("godwit vm pause {vm}"))?;
    let checked = ram_file(root, vm).and_then(|path| Ok(checker::check(&File::open(path)?)?));
    controller.value(&format!("godwit vm resume {vm}"))?;
    let checked = checked.with_context(|| format!("memory of {vm} on {}", host.name))?;
    let boots = checked.control.boots;
    ensure!(boots == 1, "{vm} has booted {boots} times");
    Ok(checked)
}
