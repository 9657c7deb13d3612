//! VMs with linked disks that go to another host: linked where that has the same image, as one image elsewhere, and never to a wrong disk.

use anyhow::{Result, ensure};
use godwit_e2e::stack::disks::{goes_on_at, image_has_all_at};
use godwit_e2e::stack::linked::{BASE, BYTES, STORE, base, begin, put_base};
use godwit_e2e::stack::{Link, Plan, SOON, Stack};
use godwit_types::snapshots::PARENT_MARK;
use rustix::fs::{XattrFlags, setxattr};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

/// What the VM has to move takes some seconds so, Mb/s, and a test that is late still finds it on its way.
const SLOW: [&str; 2] = ["--max-bandwidth", "1"];

/// Both hosts have a datastore of the same path, and host a an image in it that boots.
fn with_base(name: &str) -> Result<Stack> {
    let mut plan = Plan::default();
    for host in &mut plan.hosts {
        host.config = format!("datastores = {{ fast = {{ path = \"{STORE}\" }} }}\n");
    }
    let stack = Stack::new(name, &plan)?;
    for host in ["a", "b"] {
        stack.make_directory(host, STORE)?;
    }
    put_base(&stack)?;
    Ok(stack)
}

/// Copies the image to host b, with its attributes or without.
fn copy_base(stack: &Stack, with_attributes: bool) -> Result<()> {
    let (from, to) = (stack.inside("a", BASE)?, stack.inside("b", BASE)?);
    let kept = match with_attributes {
        true => "--preserve=all",
        false => "--preserve=mode,ownership",
    };
    let copied = Command::new("cp").arg(kept).args([from, to]).status()?;
    ensure!(copied.success());
    Ok(())
}

/// The files of a VM's disk on a host, and the bytes that they take.
fn files(stack: &Stack, vm: &str, host: &str) -> Result<(Vec<String>, u64)> {
    let (mut names, mut bytes) = (Vec::new(), 0);
    for entry in std::fs::read_dir(stack.inside(host, STORE)?)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(vm) {
            bytes += entry.metadata()?.blocks() * 512;
            names.push(name);
        }
    }
    Ok((names, bytes))
}

fn is_gone(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    let what = format!("nothing of the disk of {vm} is left on host {host}");
    stack.until(&what, SOON, || Ok(files(stack, vm, host)?.0.is_empty()))
}

fn is_linked(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    let described = stack.inside(host, format!("{STORE}/{vm}.raw.images"))?;
    ensure!(std::fs::read_to_string(described)?.contains(BASE));
    let (names, bytes) = files(stack, vm, host)?;
    ensure!(bytes < BYTES as u64 / 2, "{names:?} take {bytes} bytes");
    let own = File::open(stack.inside(host, format!("{STORE}/{vm}.raw"))?)?;
    ensure!(own.metadata()?.blocks() == 0, "its own image is no hole");
    Ok(())
}

/// All that the guest wrote and all that it never has.
fn is_one_image(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    let path = format!("{STORE}/{vm}.raw");
    stack.ok("controller", &["vm", "pause", vm])?;
    image_has_all_at(stack, vm, (&path, host))?;
    let (image, of_base) = (std::fs::read(stack.inside(host, &path)?)?, base()?);
    ensure!(image.len() == BYTES);
    ensure!(image.get(64 << 10..) == of_base.get(64 << 10..));
    ensure!(files(stack, vm, host)?.0 == [format!("{vm}.raw")]);
    stack.ok("controller", &["vm", "resume", vm])?;
    goes_on_at(stack, vm, host)
}

fn base_is_unchanged(stack: &Stack, host: &str) -> Result<()> {
    ensure!(std::fs::read(stack.inside(host, BASE)?)? == base()?);
    Ok(())
}

fn starts_anew(stack: &Stack, vm: &str, host: &str) -> Result<()> {
    stack.ok("controller", &["vm", "stop", vm, "--force"])?;
    stack.until("the VM is off", SOON, || {
        Ok(stack.vm(vm)?["state"] == "stopped")
    })?;
    stack.ok("controller", &["vm", "start", vm])?;
    goes_on_at(stack, vm, host)
}

#[test]
fn a_linked_disk_stays_linked_on_a_host_that_has_its_image_and_on_its_way_back() -> Result<()> {
    let stack = with_base("linkedgoes")?;
    begin(&stack, "one")?;
    copy_base(&stack, true)?;
    let methods: [&[&str]; 2] = [&[], &["--method", "dirty-tracking"]];
    for (method, (from, to)) in methods.into_iter().zip([("a", "b"), ("b", "a")]) {
        let checked = stack.could_migrate("one", to)?;
        ensure!(checked["stay_linked"][0] == "root", "{checked}");
        stack.migrate("one", to, method)?;
        goes_on_at(&stack, "one", to)?;
        is_linked(&stack, "one", to)?;
        is_gone(&stack, "one", from)?;
        stack.kill_vm_process("one", to)?;
        goes_on_at(&stack, "one", to)?;
        starts_anew(&stack, "one", to)?;
        base_is_unchanged(&stack, from)?;
        base_is_unchanged(&stack, to)?;
    }
    // With a snapshot, too.
    stack.ok("controller", &["vm", "snapshot", "create", "one", "clean"])?;
    stack.migrate("one", "b", &[])?;
    goes_on_at(&stack, "one", "b")?;
    is_linked(&stack, "one", "b")?;
    is_gone(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack, "b")
}

/// No such image there, one without its mark, one that is longer, and one with another mark.
#[test]
fn a_linked_disk_becomes_one_image_on_a_host_that_has_no_such_image() -> Result<()> {
    let stack = with_base("linkedone")?;
    let there = stack.inside("b", BASE)?;
    for (number, vm) in ["one", "two", "three", "four"].into_iter().enumerate() {
        begin(&stack, vm)?;
        match number {
            0 => {}
            1 => copy_base(&stack, false)?,
            2 => {
                copy_base(&stack, true)?;
                let image = File::options().write(true).open(&there)?;
                image.set_len(2 * BYTES as u64)?;
            }
            _ => {
                copy_base(&stack, true)?;
                let (another, flags) = ("7".repeat(32), XattrFlags::empty());
                setxattr(&there, PARENT_MARK, another.as_bytes(), flags)?;
            }
        }
        let method: &[&str] = match number % 2 {
            0 => &[],
            _ => &["--method", "dirty-tracking"],
        };
        let report = stack.migrate(vm, "b", method)?;
        let told = report["notes"].to_string();
        ensure!(told.contains("one image with all its content"), "{report}");
        goes_on_at(&stack, vm, "b")?;
        is_one_image(&stack, vm, "b")?;
        is_gone(&stack, vm, "a")?;
        starts_anew(&stack, vm, "b")?;
        // It is one image from then on, though host a has what it was linked to.
        stack.migrate(vm, "a", &[])?;
        is_one_image(&stack, vm, "a")?;
        is_gone(&stack, vm, "b")?;
        base_is_unchanged(&stack, "a")?;
        stack.remove(vm)?;
    }
    Ok(())
}

#[test]
fn a_linked_disk_with_snapshots_stays_where_no_other_host_has_its_image() -> Result<()> {
    let stack = with_base("linkedstays")?;
    begin(&stack, "one")?;
    stack.ok("controller", &["vm", "snapshot", "create", "one", "clean"])?;
    let ran = stack.run("controller", &["vm", "migrate", "one", "--to", "b"])?;
    let said = format!("{}{}", ran.stdout, ran.stderr);
    ensure!(ran.code != Some(0) && said.contains("has snapshots, with which"));
    goes_on_at(&stack, "one", "a")?;
    is_linked(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack, "a")
}

#[test]
fn a_link_that_is_lost_and_a_source_that_dies_leave_one_disk() -> Result<()> {
    let stack = with_base("linkedlost")?;
    begin(&stack, "one")?;
    for has_image in [false, true] {
        if has_image {
            copy_base(&stack, true)?;
        }
        let id = stack.begin("one", "b", &SLOW)?;
        stack.wait_precopy(&id)?;
        stack.kill_vm_process("one", "a")?;
        let report = stack.ended("controller", &id)?;
        ensure!(report["outcome"] != "completed", "{report}");
        goes_on_at(&stack, "one", "a")?;
        is_gone(&stack, "one", "b")?;
        is_linked(&stack, "one", "a")?;
    }
    let id = stack.begin("one", "b", &SLOW)?;
    stack.wait_precopy(&id)?;
    stack.lab.cut_link("a", Link::Migration)?;
    goes_on_at(&stack, "one", "a")?;
    stack.lab.heal_link("a", Link::Migration)?;
    stack.completed(&id)?;
    goes_on_at(&stack, "one", "b")?;
    is_linked(&stack, "one", "b")?;
    is_gone(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack, "a")?;
    base_is_unchanged(&stack, "b")
}
