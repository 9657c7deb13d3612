//! A rolling upgrade: a host's agent is replaced under a running guest, then the guest's VM process.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, Plan, SOON, Stack};
use serde_json::Value;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

/// What a copy of the program says that its version is; as long as the true one.
const OLD: &[u8] = b"0.0.9";
const TRUE: &[u8] = b"0.1.0";

/// What the log of a VM process says when it becomes another program.
const BECOMES: &str = "this process becomes another program";

/// How often the VM process of a VM on host a has become another program.
fn renewals(stack: &Stack, vm: &str) -> Result<usize> {
    let log = format!("/run/godwit/vms/{vm}/vm-process.log");
    let log = std::fs::read_to_string(stack.inside("a", log)?)?;
    Ok(log.lines().filter(|line| line.contains(BECOMES)).count())
}

/// A copy of the program that calls itself another version.
fn old_program(stack: &Stack) -> Result<PathBuf> {
    let mut bytes = std::fs::read(stack.godwit())?;
    let last = bytes.len().checked_sub(TRUE.len()).context("no program")?;
    for at in 0..=last {
        let word = bytes.get_mut(at..at + TRUE.len()).context("cut")?;
        if word == TRUE {
            word.copy_from_slice(OLD);
        }
    }
    let path = stack.dir().join("godwit-old");
    std::fs::write(&path, bytes)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

/// What `host check` says of VM processes on host a.
fn vm_processes(stack: &Stack) -> Result<Value> {
    let checks = stack.json("controller", &["host", "check", "a"])?;
    let all = checks["checks"].as_array().context("no checks")?;
    let found = all.iter().find(|check| check["name"] == "vm-processes");
    found.cloned().context("no check of VM processes")
}

#[test]
fn a_vm_process_of_an_older_godwit_is_renewed_under_its_guest_which_then_moves() -> Result<()> {
    let stack = Stack::new("upgrade", &Plan::default())?;
    let old = old_program(&stack)?;
    stack.kill_daemon("a")?;
    stack.until("the controller misses the host", SOON, || {
        let host = stack.json("controller", &["host", "show", "a"])?;
        Ok(host["state"] == "unreachable")
    })?;
    stack.start_daemon_of("a", &old)?;
    stack.wait_connected()?;
    stack.start_counter(&Counter::small("web"), "a")?;
    let before = stack.vm_at("web", "a")?;
    ensure!(before["vm_process"]["version"] == "0.0.9", "{before}");
    // The agent is upgraded; the VM process lives on.
    stack.restart_daemon("a")?;
    stack.until("the new agent has found the old VM process", SOON, || {
        Ok(stack.vm_at("web", "a")?["vm_process_pid"] == before["vm_process_pid"])
    })?;
    stack.until("the controller shows its version", SOON, || {
        Ok(stack.vm("web")?["vm_process_version"] == "0.0.9")
    })?;
    let check = vm_processes(&stack)?;
    ensure!(check["status"] == "warning", "{check}");
    let found = check["found"].as_str().unwrap_or_default();
    ensure!(found.starts_with("1 of 1 VM processes"), "{check}");

    ensure!(renewals(&stack, "web")? == 0, "nobody asked for it");
    let said = stack.ok("controller", &["vm", "renew", "web"])?;
    ensure!(said.contains("0.1.0") && said.contains("0.0.9"), "{said}");
    ensure!(renewals(&stack, "web")? == 1, "it is another process");
    let after = stack.vm_at("web", "a")?;
    ensure!(after["vm_process"]["version"] == "0.1.0", "{after}");
    // The same process has become the installed program.
    for same in ["vm_process_pid", "qemu_pid", "generation", "claim", "state"] {
        ensure!(after[same] == before[same], "{same}: {before} then {after}");
    }
    ensure!(vm_processes(&stack)?["status"] == "ok");
    // So has one that is of this version already, and the agent goes on with it.
    stack.ok("controller", &["vm", "renew", "web"])?;
    ensure!(stack.vm_at("web", "a")?["vm_process_pid"] == before["vm_process_pid"]);
    ensure!(renewals(&stack, "web")? == 2, "it was not renewed again");
    stack.wait_passes("web", "a", 2)?;

    stack.migrate("web", "b", &[])?;
    stack.runs_on("web", "b")?;
    let said = stack.ok("controller", &["vm", "renew", "--all"])?;
    ensure!(said.contains("'web'") && said.contains("'b'"), "{said}");
    stack.wait_passes("web", "b", 2)?;
    stack.check_guest("web", "b").map(drop)
}

#[test]
fn a_vm_that_is_on_its_way_keeps_its_vm_process() -> Result<()> {
    let stack = Stack::new("renew", &Plan::default())?;
    stack.start_counter(&Counter::flat("web", 256), "a")?;
    let slow = ["--max-bandwidth", "40"];
    let id = stack.begin("web", "b", &slow)?;
    stack.wait_precopy(&id)?;
    let before = stack.vm_at("web", "a")?;
    let words = ["keeps its VM process", id.as_str()];
    stack.is_refused("controller", &["vm", "renew", "web"], &words)?;
    let after = stack.vm_at("web", "a")?;
    ensure!(
        before["vm_process_pid"] == after["vm_process_pid"],
        "{after}"
    );
    ensure!(renewals(&stack, "web")? == 0, "it was renewed on its way");
    stack.ok("controller", &["migration", "cancel", &id])?;
    stack.ended("a", &id)?;
    stack.ok("controller", &["vm", "renew", "web"])?;
    ensure!(renewals(&stack, "web")? == 1, "it was not renewed");
    stack.wait_passes("web", "a", 2)?;
    stack.check_guest("web", "a").map(drop)
}
