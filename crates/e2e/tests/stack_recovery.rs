//! What a restart from older or less state may not break: a controller restored from an old copy, a host that rebooted.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{CONTROLLER_DATABASE, Counter, LONG, Plan, SOON, Stack, Survives};
use std::path::PathBuf;

fn generation(stack: &Stack, vm: &str) -> Result<u64> {
    let view = stack.vm(vm)?;
    view["generation"].as_u64().context("no generation")
}

/// The files of the controller's database.
fn database(stack: &Stack) -> Result<Vec<PathBuf>> {
    let path = stack.inside("controller", CONTROLLER_DATABASE)?;
    let with = |suffix: &str| PathBuf::from(format!("{}{suffix}", path.display()));
    Ok(["", "-wal", "-shm"].map(with).to_vec())
}

/// Copies what is there and removes what is not.
fn copy_all(from: &[PathBuf], to: &[PathBuf]) -> Result<()> {
    for (from, to) in from.iter().zip(to) {
        if to.exists() {
            std::fs::remove_file(to)?;
        }
        if from.exists() {
            std::fs::copy(from, to)?;
        }
    }
    Ok(())
}

/// Takes a host's power: what it had not made durable is gone, and so is all that runs there and what a reboot empties.
fn crash(stack: &Stack, host: &str) -> Result<()> {
    stack.machine(host)?.power_cut(Survives::Nothing)?;
    stack.kill_daemon(host)
}

#[test]
fn generations_never_go_back_and_a_host_restarts_its_vms() -> Result<()> {
    let stack = Stack::new("recovery", &Plan::default())?;
    stack.start_counter(&Counter::small("old"), "a")?;
    an_old_database(&stack)?;
    a_reboot_without_controller(&stack)
}

/// Leaves the VM on host b.
fn an_old_database(stack: &Stack) -> Result<()> {
    let files = database(stack)?;
    let kept = ["db", "wal", "shm"].map(|name| stack.dir().join(name));
    stack.kill_daemon("controller")?;
    copy_all(&files, &kept)?;
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    let first = generation(stack, "old")?;
    stack.migrate("old", "b", &[])?;
    stack.migrate("old", "a", &[])?;
    let later = generation(stack, "old")?;
    ensure!(later >= first + 2, "{first} then {later}");

    stack.kill_daemon("controller")?;
    copy_all(&kept, &files)?;
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    stack.until("the controller learns the generation", SOON, || {
        Ok(generation(stack, "old")? == later)
    })?;
    stack.runs_on("old", "a")?;
    stack.migrate("old", "b", &[])?;
    stack.runs_on("old", "b")?;
    let last = generation(stack, "old")?;
    println!("  generations: {first} in the copy, {later} before it was restored, {last} after");
    ensure!(last > later, "{later} then {last}");
    stack.check_guest("old", "b").map(drop)
}

fn a_reboot_without_controller(stack: &Stack) -> Result<()> {
    let before = generation(stack, "old")?;
    stack.kill_daemon("controller")?;
    crash(stack, "b")?;
    stack.start_daemon("b")?;
    stack.until("the host starts its VM by itself", LONG, || {
        Ok(stack.vm_at("old", "b")?["state"] == "running")
    })?;
    stack.wait_passes("old", "b", 2)?;
    let vm = stack.vm_at("old", "b")?;
    ensure!(vm["claim"]["claim"] == "holds", "{vm}");
    ensure!(vm["generation"] == before, "{vm}");
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    stack.runs_on("old", "b")?;
    stack.migrate("old", "a", &[])?;
    stack.runs_on("old", "a")?;
    stack.check_guest("old", "a").map(drop)
}
