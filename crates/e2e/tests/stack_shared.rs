//! A VM whose image is on storage that its hosts share: what one of them knows of it counts on the other one.

use anyhow::{Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, make_image, make_shared_image};
use godwit_e2e::stack::{CONTROLLER_DATABASE, Plan, SOON, Stack, names};
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

/// A VM with this image, shared or said to be, which runs on host a.
fn runs_on_a(stack: &Stack, image: &str) -> Result<()> {
    let lines = format!("{}shared = true\n", disk(image));
    let made = describe(stack, "one", &lines)?;
    stack.ok("controller", &["vm", "create", &made])?;
    runs_once(stack, "a")
}

/// Whether the controller has written down that an image was taken so often.
fn is_heard(stack: &Stack, taken: u64) -> Result<bool> {
    let wanted = format!("\"taken\":{taken}");
    for suffix in ["", "-wal"] {
        let path = stack.inside("controller", format!("{CONTROLLER_DATABASE}{suffix}"))?;
        let content = std::fs::read(path)?;
        if String::from_utf8_lossy(&content).contains(&wanted) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[test]
fn what_a_host_that_is_gone_said_of_an_image_counts() -> Result<()> {
    let plan = Plan {
        shared: true,
        ..Plan::default()
    };
    let stack = Stack::new("sharedgone", &plan)?;
    let image = make_shared_image(&stack, "root")?;
    runs_on_a(&stack, &image)?;
    let backup = format!("{image}.backup");
    copy(&image, &backup)?;
    stack.ok("controller", &["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    stack.until("the controller has heard of it", SOON, || {
        is_heard(&stack, 2)
    })?;
    stack.power_off("a")?;
    copy(&backup, &image)?;
    stack.until("host a does not answer", SOON, || {
        let fenced = stack.run("controller", &["host", "fenced", "a", "--yes"])?;
        Ok(fenced.code == Some(0))
    })?;
    let start = ["vm", "start", "one", "--on", "b"];
    let sentence = stack.refused("controller", &start, 2, "invalid-request")?;
    names(
        &sentence,
        &[
            "disk 'root'",
            "older copy",
            "taken it 1 times",
            "2 times by now",
        ],
    )
}

#[test]
fn a_vm_does_not_move_onto_a_replica_that_lags() -> Result<()> {
    let stack = Stack::new("sharedlags", &Plan::default())?;
    // Not the same storage on both hosts, but a copy of it.
    let image = make_image(&stack, "root")?;
    runs_on_a(&stack, &image)?;
    let at = |host: &str| {
        Ok::<_, anyhow::Error>(stack.inside(host, &image)?.to_string_lossy().into_owned())
    };
    copy(&at("a")?, &at("b")?)?;
    stack.ok("controller", &["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    let migrated = stack.run("controller", &["vm", "migrate", "one", "--to", "b"])?;
    ensure!(migrated.code != Some(0), "{migrated:?}");
    names(&migrated.stderr, &["is not that one", "older copy", &image])?;
    goes_on_at(&stack, "one", "a")?;
    stack.remove("one")
}
