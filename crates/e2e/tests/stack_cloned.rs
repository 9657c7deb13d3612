//! A VM that is made as a copy of another one, as a person has it: told apart by all that tells VMs apart, started beside the other one, refused with a sentence.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, make_image};
use godwit_e2e::stack::{Plan, SOON, Stack, names};
use godwit_testkit::guest::uefi_program;
use serde_json::Value;
use std::fs::File;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(240);
const DIR: &str = "/var/tmp/clones";
const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";

fn is_off(stack: &Stack, vm: &str) -> Result<()> {
    stack.ok("controller", &["vm", "stop", vm, "--force"])?;
    stack.until(
        "it is off",
        SOON,
        || Ok(stack.vm(vm)?["state"] == "stopped"),
    )
}

fn left(stack: &Stack) -> Result<Vec<String>> {
    let all = std::fs::read_dir(stack.inside("a", DIR)?)?;
    let names = all.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// What a VM's QEMU is told that its machine is called.
fn uuid(stack: &Stack, vm: &str) -> Result<String> {
    let processes = stack.hypervisors(vm, "a")?;
    let line = &processes.first().context("no QEMU")?.command_line;
    let told = line.split(' ').skip_while(|word| *word != "-uuid").nth(1);
    Ok(told.context("no UUID")?.to_owned())
}

/// Two is as one, and told apart by all that tells VMs apart.
fn is_its_own(stack: &Stack) -> Result<()> {
    let (one, two) = (stack.vm("one")?, stack.vm("two")?);
    ensure!(two["host"] == "a" && two["state"] == "stopped", "{two}");
    let spec = &two["spec"];
    ensure!(spec["disk"][0]["path"] == format!("{DIR}/two-root.raw"));
    ensure!(spec["disk"][0].get("from").is_none(), "{two}");
    for key in ["vcpus", "memory_mib", "hardware", "accelerator"] {
        ensure!(spec[key] == one["spec"][key], "{key}: {two}");
    }
    let mac = |vm: &Value| vm["spec"]["nic"][0]["mac"].clone();
    ensure!(mac(&one) != mac(&two) && !mac(&two).is_null(), "{two}");
    ensure!(one["spec"]["uid"] != spec["uid"], "{two}");
    Ok(())
}

#[test]
fn a_clone_is_a_vm_of_its_own_and_leaves_the_other_one_as_it_is() -> Result<()> {
    let stack = Stack::new("cloned", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    stack.make_directory("a", DIR)?;
    let image = make_image(&stack, "clones/one-root")?;
    let lines = format!("{}[[nic]]\nport_group = \"vm\"\n", disk(&image));
    ok(&["vm", "create", &describe(&stack, "one", &lines)?])?;
    let clone = ["vm", "clone", "one", "two"];
    let sentence = stack.refused("controller", &clone, 3, "wrong-state")?;
    names(&sentence, &["no host has VM one yet", "start it first"])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    let sentence = stack.refused("controller", &clone, 3, "wrong-state")?;
    names(&sentence, &["VM 'one' is on", "vm stop one --wait"])?;
    is_off(&stack, "one")?;

    // Somebody's file is there: it is left alone.
    let own = stack.inside("a", format!("{DIR}/two-root.raw"))?;
    std::fs::write(&own, "somebody's")?;
    let sentence = stack.refused("controller", &clone, 2, "invalid-request")?;
    names(
        &sentence,
        &["cloned as 'two'", "two-root.raw exists already"],
    )?;
    ensure!(std::fs::read(&own)? == b"somebody's");
    std::fs::remove_file(&own)?;
    ensure!(left(&stack)? == ["one-root.raw"], "{:?}", left(&stack)?);

    let before = std::fs::read(stack.inside("a", &image)?)?;
    let answer = stack.json("controller", &clone)?;
    let said = answer["message"].as_str().context("no sentence")?;
    names(said, &["VM 'two' is a clone of VM 'one' on host a"])?;
    let all = left(&stack)?;
    ensure!(all == ["one-root.raw", "two-root.raw"], "{all:?}");
    ensure!(std::fs::read(stack.inside("a", &image)?)? == before);
    ensure!(std::fs::read(&own)? == before);
    is_its_own(&stack)?;
    let sentence = stack.refused("controller", &clone, 3, "already-exists")?;
    names(&sentence, &["there is a VM two already"])?;

    // Both work, each with its own.
    for vm in ["two", "one"] {
        ok(&["vm", "start", vm])?;
        goes_on_at(&stack, vm, "a")?;
    }
    ensure!(uuid(&stack, "one")? != uuid(&stack, "two")?);
    of_a_snapshot(&stack)
}

/// Of a snapshot one is made while the guest works.
fn of_a_snapshot(stack: &Stack) -> Result<()> {
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    ok(&["vm", "snapshot", "create", "one", "clean"])?;
    goes_on_at(stack, "one", "a")?;
    let clone = ["vm", "clone", "one", "three", "--snapshot", "clean"];
    ok(&[&clone[..], &["--start"]].concat())?;
    for vm in ["one", "two", "three"] {
        goes_on_at(stack, vm, "a")?;
    }
    // They are known to a controller that was restarted since.
    stack.restart_daemon("controller")?;
    stack.until("the controller knows where the clones are", LONG, || {
        Ok(stack.vm("three").is_ok_and(|shown| shown["host"] == "a"))
    })?;
    ["one", "two", "three"]
        .iter()
        .try_for_each(|vm| stack.remove(vm))
}

/// Waits until the guest runs and its variable is this.
fn shows(stack: &Stack, vm: &str, number: u32) -> Result<()> {
    let until = Instant::now() + LONG;
    loop {
        let ram = stack.ram_file(vm, "a");
        let ram = ram.and_then(|path| Ok(File::open(path)?));
        let now = ram.and_then(|ram| Ok(uefi_program::progress(&ram)?));
        if now.as_ref().is_ok_and(|now| now.number == number) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{vm} shows {now:?}, not {number}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_clone_begins_with_the_uefi_variables_of_the_other_one_and_has_its_own() -> Result<()> {
    if !std::path::Path::new(FIRMWARE).exists() {
        println!("skipped: {FIRMWARE} is not there (package ovmf)");
        return Ok(());
    }
    let stack = Stack::new("cloneduefi", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    let image = "/var/tmp/uefi-root.raw";
    std::fs::write(stack.inside("a", image)?, uefi_program::disk()?)?;
    let mut chmod = stack.machine("a")?.command("chmod");
    ensure!(chmod.args(["644", image]).status()?.success());
    let text = format!(
        "name = \"one\"\nvcpus = 1\nmemory_mib = 128\naccelerator = \"tcg\"\nfirmware = \"uefi\"\n[[disk]]\nname = \"root\"\npath = \"{image}\"\nread_only = true\n"
    );
    ok(&["vm", "create", &stack.describe("one", &text)?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    shows(&stack, "one", 1)?;
    ok(&["vm", "reset", "one"])?;
    shows(&stack, "one", 2)?;
    is_off(&stack, "one")?;
    ok(&["vm", "clone", "one", "two"])?;
    // What its guest only reads is shared, and each start counts in a VM's own variables.
    ensure!(stack.vm("two")?["spec"]["disk"][0]["path"] == image);
    // A clone that never started has them for its own clones, too.
    ok(&["vm", "clone", "two", "three"])?;
    for (vm, number) in [("two", 3), ("three", 3), ("one", 3)] {
        ok(&["vm", "start", vm])?;
        shows(&stack, vm, number)?;
        is_off(&stack, vm)?;
    }
    ok(&["vm", "start", "two"])?;
    shows(&stack, "two", 4)?;
    ok(&["vm", "delete", "one"])?;
    ok(&["vm", "delete", "three"])?;
    stack.remove("two")
}
