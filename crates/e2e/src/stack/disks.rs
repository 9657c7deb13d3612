//! Guests of a stack that boot from a disk, and work with it.
//!
//! Owns nothing. Refuses: a guest that says that its disk is wrong.

use super::{HostPlan, LONG, Plan, SHARED, Stack};
use anyhow::{Result, ensure};
use godwit_testkit::guest::boot_disk::{self, Progress};
use std::fs::File;
use std::time::{Duration, Instant};

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// An image with a guest on it, for the common group of the host's QEMUs.
pub fn make_image(stack: &Stack, name: &str) -> Result<String> {
    make_image_at(stack, format!("/var/tmp/{name}.raw"))
}

/// The same on storage that all hosts share.
pub fn make_shared_image(stack: &Stack, name: &str) -> Result<String> {
    let image = stack.dir().join(SHARED).join(format!("{name}.raw"));
    make_image_at(stack, image.to_string_lossy().into_owned())
}

fn make_image_at(stack: &Stack, image: String) -> Result<String> {
    let mut content = boot_disk::sector()?;
    content.resize(1 << 20, 0);
    std::fs::write(stack.inside("a", &image)?, content)?;
    for [program, word] in [["chgrp", "nogroup"], ["chmod", "660"]] {
        let mut command = stack.machine("a")?.command(program);
        ensure!(command.args([word, &image]).status()?.success());
    }
    Ok(image)
}

/// A file that describes such a VM, with these lines for its disks.
pub fn describe(stack: &Stack, vm: &str, lines: &str) -> Result<String> {
    let text =
        format!("name = \"{vm}\"\nvcpus = 2\nmemory_mib = 32\naccelerator = \"tcg\"\n{lines}");
    stack.describe(vm, &text)
}

/// Lines for a disk at this path.
pub fn disk(image: &str) -> String {
    format!("[[disk]]\nname = \"root\"\npath = \"{image}\"\n")
}

/// Where a host has its datastore `vms`, in a stack of [`with_stores`].
pub fn store(host: &str) -> String {
    format!("/var/tmp/vms-of-{host}")
}

/// Both hosts, each with a datastore of its own: what they have in common is its name.
pub fn with_stores(name: &str) -> Result<Stack> {
    let host = |name: &str| HostPlan {
        config: format!(
            "datastores = {{ vms = {{ path = \"{}\" }} }}\n",
            store(name)
        ),
        ..HostPlan::default()
    };
    let hosts = [host("a"), host("b")];
    let plan = Plan {
        hosts,
        ..Plan::default()
    };
    let stack = Stack::new(name, &plan)?;
    for host in ["a", "b"] {
        stack.make_directory(host, &store(host))?;
    }
    Ok(stack)
}

fn progress(stack: &Stack, vm: &str, host: &str) -> Result<Progress> {
    let progress = boot_disk::progress(&File::open(stack.ram_file(vm, host)?)?)?;
    ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
    Ok(progress)
}

/// The guest comes some rounds further.
pub fn goes_on_at(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    let (from, deadline) = (progress(stack, vm, host)?.round, Instant::now() + LONG);
    while progress(stack, vm, host)?.round < from + 10 {
        ensure!(Instant::now() < deadline, "it stands still at round {from}");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// What the guest wrote last is on the disk, but for the round that may be under way.
pub fn image_has_all_at(stack: &Stack, vm: &str, (image, host): (&str, &str)) -> Result<()> {
    let (round, image) = (
        progress(stack, vm, host)?.round,
        File::open(stack.inside(host, image)?)?,
    );
    let missing = boot_disk::missing(&image, round)?;
    ensure!(
        missing.is_none(),
        "of round {round}, {missing:?} is not on the disk"
    );
    Ok(())
}
