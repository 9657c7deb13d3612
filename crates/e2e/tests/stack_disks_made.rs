//! Disks that are made before their VM starts, as a person has it: shown, cut by a kill, made once, refused with a sentence.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Plan, Stack, names};
use godwit_testkit::guest::boot_disk;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(240);
const BASE: &str = "/var/tmp/made/base.raw";
const ROOT: &str = "/var/tmp/made/root.raw";

fn describe(stack: &Stack, lines: &str) -> Result<String> {
    let text = format!(
        "name = \"one\"\nvcpus = 1\nmemory_mib = 32\naccelerator = \"tcg\"\n[[disk]]\nname = \"root\"\npath = \"{ROOT}\"\n{lines}"
    );
    stack.describe("one", &text)
}

/// A directory where the common user makes files, with an image of so many MiB to boot from.
fn prepare(stack: &Stack, mib: u64) -> Result<()> {
    let dir = stack.inside("a", "/var/tmp/made")?;
    std::fs::create_dir_all(&dir)?;
    let base = File::create(stack.inside("a", BASE)?)?;
    let piece = [7; 1 << 20];
    for at in 0..mib {
        base.write_all_at(&piece, at << 20)?;
    }
    base.write_all_at(&boot_disk::sector()?, 0)?;
    for [program, word, path] in [
        ["chgrp", "nogroup", "/var/tmp/made"],
        ["chmod", "775", "/var/tmp/made"],
        ["chmod", "644", BASE],
    ] {
        let mut command = stack.machine("a")?.command(program);
        ensure!(command.args([word, path]).status()?.success());
    }
    Ok(())
}

fn left(stack: &Stack) -> Result<Vec<String>> {
    let all = std::fs::read_dir(stack.inside("a", "/var/tmp/made")?)?;
    let names = all.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

#[test]
fn a_disk_is_made_once_and_its_vm_starts_on_it() -> Result<()> {
    let stack = Stack::new("made", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    prepare(&stack, 8)?;
    let start = ["vm", "start", "one", "--on", "a"];
    let file = describe(&stack, &format!("from = \"{BASE}\"\nsize_gib = 1\n"))?;
    ok(&["vm", "create", &file])?;

    // Somebody's file is there: it is left alone.
    let root = stack.inside("a", ROOT)?;
    std::fs::write(&root, "somebody's")?;
    let sentence = stack.refused("controller", &start, 2, "invalid-request")?;
    names(
        &sentence,
        &[
            "disk 'root'",
            "VM 'one'",
            "host 'a'",
            ROOT,
            "exists already",
        ],
    )?;
    ensure!(std::fs::read(&root)? == b"somebody's");
    std::fs::remove_file(&root)?;
    ensure!(left(&stack)? == ["base.raw"], "{:?}", left(&stack)?);

    ok(&start)?;
    ensure!(
        left(&stack)? == ["base.raw", "root.raw"],
        "{:?}",
        left(&stack)?
    );
    ensure!(File::open(&root)?.metadata()?.len() == 1 << 30);
    let until = Instant::now() + LONG;
    let ram = File::open(stack.ram_file("one", "a")?)?;
    while boot_disk::progress(&ram)?.round < 10 {
        ensure!(Instant::now() < until, "it does not boot");
        std::thread::sleep(Duration::from_millis(10));
    }
    let shown = stack.vm("one")?;
    ensure!(shown["spec"]["disk"][0].get("from").is_none(), "{shown}");

    // Nor is it made again for a controller that was restarted since.
    stack.restart_daemon("controller")?;
    stack.until("the controller knows where the VM is", LONG, || {
        Ok(stack.vm("one").is_ok_and(|shown| shown["host"] == "a"))
    })?;
    let shown = stack.vm("one")?;
    ensure!(
        shown["spec"]["disk"][0].get("size_gib").is_none(),
        "{shown}"
    );
    ok(&["vm", "stop", "one", "--force"])?;
    ok(&start)?;

    // The same description again: it is known that the disk is made.
    ok(&["vm", "stop", "one", "--force"])?;
    let inode = File::open(&root)?.metadata()?.ino();
    ok(&["vm", "edit", "one", &file])?;
    ok(&start)?;
    ensure!(File::open(&root)?.metadata()?.ino() == inode);
    stack.remove("one")
}

#[test]
fn an_agent_that_is_killed_while_it_makes_a_disk_leaves_none() -> Result<()> {
    let stack = Stack::new("madecut", &Plan::default())?;
    prepare(&stack, 1500)?;
    let file = describe(&stack, &format!("from = \"{BASE}\"\n"))?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "one", "--on", "a"];
    let fresh = stack.inside("a", "/var/tmp/made/.root.raw.godwit-new")?;
    std::thread::scope(|scope| -> Result<()> {
        let begun = scope.spawn(|| stack.run("controller", &start));
        let until = Instant::now() + LONG;
        while File::open(&fresh).is_err() {
            ensure!(Instant::now() < until, "nothing is made");
            std::thread::sleep(Duration::from_millis(2));
        }
        stack.restart_daemon("a")?;
        let _ = begun.join().ok().context("the command broke off")??;
        Ok(())
    })?;
    // Whatever became of that start: one that follows ends with the whole image.
    stack.until("the VM runs", LONG, || {
        Ok(stack.run("controller", &start)?.code == Some(0))
    })?;
    ensure!(
        left(&stack)? == ["base.raw", "root.raw"],
        "{:?}",
        left(&stack)?
    );
    stack.remove("one")
}
