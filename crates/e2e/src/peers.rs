//! Another QEMU than the distribution's, where it is at hand.

use anyhow::Result;
use godwit_testkit::guest::linux::target_dir;
use std::path::PathBuf;

/// The directory of QEMU 10, with its program and its `/usr`. Nothing, which counts as a skipped test, where it was not fetched.
pub fn qemu_10() -> Result<Option<PathBuf>> {
    let at = target_dir()?.join("peers/qemu-10.0");
    let is_there = at.join("qemu-system-x86_64").exists() && at.join("tree/usr").exists();
    if !is_there {
        println!("skipped: QEMU 10 is not in target/peers (scripts/fetch-qemu10.sh fetches it)");
    }
    Ok(is_there.then_some(at))
}
