//! A VM whose image is on storage that its hosts share: what one of them knows of it counts on the other one.

use anyhow::{Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, make_shared_image};
use godwit_e2e::stack::{Plan, Stack, names};
use std::process::Command;

/// Copies an image with what it says of itself, as a backup does, in the place of what has that name.
fn copy(from: &str, to: &str) -> Result<()> {
    let mut copy = Command::new("cp");
    let copied = copy
        .args(["--preserve=all", "--remove-destination", from, to])
        .status()?;
    ensure!(copied.success());
    Ok(())
}

fn runs_once(stack: &Stack, host: &str) -> Result<()> {
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    ok(&["vm", "start", "one", "--on", host])?;
    goes_on_at(stack, "one", host)?;
    ok(&["vm", "stop", "one", "--force"])
}

#[test]
fn an_image_that_was_put_back_from_an_old_copy_is_not_opened_on_another_host() -> Result<()> {
    let plan = Plan {
        shared: true,
        more: 1,
        ..Plan::default()
    };
    let stack = Stack::new("sharedimage", &plan)?;
    let image = make_shared_image(&stack, "root")?;
    let lines = format!("{}shared = true\n", disk(&image));
    let made = describe(&stack, "one", &lines)?;
    stack.ok("controller", &["vm", "create", &made])?;
    runs_once(&stack, "a")?;
    let (kept, backup) = (format!("{image}.kept"), format!("{image}.backup"));
    copy(&image, &backup)?;
    // It runs on both hosts since then.
    runs_once(&stack, "a")?;
    runs_once(&stack, "b")?;
    copy(&image, &kept)?;
    copy(&backup, &image)?;
    // Host c has never had it.
    for host in ["b", "c", "a"] {
        let start = ["vm", "start", "one", "--on", host];
        let sentence = stack.refused("controller", &start, 2, "invalid-request")?;
        names(
            &sentence,
            &["disk 'root'", "older copy", "godwit image release", &image],
        )?;
    }
    // With the newest image it starts anywhere, and so does the backup by a person's word.
    copy(&kept, &image)?;
    runs_once(&stack, "c")?;
    copy(&backup, &image)?;
    stack.ok("a", &["image", "release", &image])?;
    runs_once(&stack, "b")?;
    stack.ok("controller", &["vm", "delete", "one"]).map(drop)
}
