//! What a restart from older or less state may not break: a controller restored from an old copy, a host that rebooted.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, image_has_all_at, make_image};
use godwit_e2e::stack::{CONTROLLER_DATABASE, Counter, LONG, Plan, SOON, Stack, Survives};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
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

/// The database is put back while a VM moves with its disk to a datastore, so that it knows nothing of that.
#[test]
fn a_move_that_ends_under_a_controller_that_forgot_it_is_known_to_it() -> Result<()> {
    let mut plan = Plan::default();
    for host in &mut plan.hosts {
        host.config = "datastores = { fast = { path = \"/var/tmp/fast\" } }\n".into();
    }
    let stack = Stack::new("forgotten", &plan)?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    let root = stack.inside("a", &image)?;
    // Enough for some seconds at the cap; zeroes would not be copied.
    let file = File::options().write(true).open(root)?;
    file.write_all_at(&vec![7; 24 << 20], 1 << 20)?;
    for host in ["a", "b"] {
        stack.make_directory(host, "/var/tmp/fast")?;
    }
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;

    let files = database(&stack)?;
    let kept = ["db", "wal", "shm"].map(|name| stack.dir().join(name));
    stack.kill_daemon("controller")?;
    copy_all(&files, &kept)?;
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    let slowly = ["--disk", "root=fast", "--max-bandwidth", "20"];
    stack.begin("one", "b", &slowly)?;
    stack.until("it is copied", SOON, || {
        Ok(stack
            .vm_at("one", "b")
            .is_ok_and(|vm| vm["state"] == "incoming"))
    })?;
    stack.kill_daemon("controller")?;
    copy_all(&kept, &files)?;
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    stack.runs_on("one", "b")?;
    goes_on_at(&stack, "one", "b")?;
    let now = "/var/tmp/fast/one-root.raw";
    stack.until("its disk is known", SOON, || {
        Ok(stack.vm("one")?["spec"]["disk"][0]["path"] == now)
    })?;
    ok(&["vm", "pause", "one"])?;
    image_has_all_at(&stack, "one", (now, "b"))?;
    ok(&["vm", "stop", "one", "--force"])?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "b")?;
    stack.migrate("one", "a", &[])?;
    goes_on_at(&stack, "one", "a")?;
    stack.remove("one")
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
