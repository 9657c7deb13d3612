//! A VM with UEFI, as a person has it: made, moved, reset, stopped, and kept from a start where its variables are not.

use anyhow::{Result, ensure};
use godwit_e2e::stack::{Plan, Stack, names};
use godwit_testkit::guest::uefi_program;
use std::fs::File;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(240);
const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";

/// Waits until the guest runs there and its variable is this.
fn shows(stack: &Stack, host: &str, number: u32) -> Result<()> {
    let until = Instant::now() + LONG;
    let mut from = None;
    loop {
        let ram = stack
            .ram_file("one", host)
            .and_then(|path| Ok(File::open(path)?));
        let now = ram.and_then(|ram| Ok(uefi_program::progress(&ram)?));
        match (&now, from) {
            (Ok(now), Some(round)) if now.number == number && round != now.round => return Ok(()),
            (Ok(now), _) if now.number == number => from = Some(now.round),
            _ => from = None,
        }
        ensure!(Instant::now() < until, "{host} shows {now:?}, not {number}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_vm_with_uefi_keeps_its_variables_wherever_it_goes() -> Result<()> {
    if !std::path::Path::new(FIRMWARE).exists() {
        println!("skipped: {FIRMWARE} is not there (package ovmf)");
        return Ok(());
    }
    let stack = Stack::new("uefi", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = "/var/tmp/uefi-root.raw";
    for host in ["a", "b"] {
        std::fs::write(stack.inside(host, image)?, uefi_program::disk()?)?;
        let mut chmod = stack.machine(host)?.command("chmod");
        ensure!(chmod.args(["644", image]).status()?.success());
    }
    let text = format!(
        "name = \"one\"\nvcpus = 1\nmemory_mib = 128\naccelerator = \"tcg\"\nfirmware = \"uefi\"\n[[disk]]\nname = \"root\"\npath = \"{image}\"\nread_only = true\n"
    );
    ok(&["vm", "create", &stack.describe("one", &text)?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    shows(&stack, "a", 1)?;
    let shown = ok(&["vm", "show", "one"])?;
    ensure!(
        shown.contains("firmware") && shown.contains("uefi"),
        "{shown}"
    );

    ok(&["vm", "migrate", "one", "--to", "b"])?;
    shows(&stack, "b", 1)?;
    ok(&["vm", "reset", "one"])?;
    shows(&stack, "b", 2)?;
    ok(&["vm", "stop", "one", "--force"])?;
    let start = ["vm", "start", "one", "--on", "a"];
    let sentence = stack.refused("controller", &start, 3, "wrong-state")?;
    names(&sentence, &["UEFI variables", "on host b"])?;
    ok(&["vm", "start", "one"])?;
    shows(&stack, "b", 3)?;
    stack.remove("one")
}
