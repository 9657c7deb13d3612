//! Linked disks as a person has them: VMs over one image, which none of them changes and nobody may write any more.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{describe, goes_on_at, image_has_all_at};
use godwit_e2e::stack::linked::{BASE, BYTES, STORE, allow, base, begin, lines, put_base};
use godwit_e2e::stack::{Plan, SOON, Stack};
use godwit_testkit::guest::boot_disk;
use godwit_types::snapshots::PARENT_MARK;
use rustix::fs::{XattrFlags, getxattr, setxattr};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, SystemTime};

const SLOW: &str = "/var/tmp/slow";
/// Where host a has images that nobody can write.
const GOLDEN: &str = "/var/tmp/golden";

/// Host a has a datastore with an image that boots.
fn with_base(name: &str) -> Result<Stack> {
    let mut plan = Plan::default();
    plan.hosts[0].config = format!(
        "datastores = {{ fast = {{ path = \"{STORE}\" }}, slow = {{ path = \"{SLOW}\" }} }}\n"
    );
    let stack = Stack::new(name, &plan)?;
    stack.make_directory("a", STORE)?;
    stack.make_directory("a", SLOW)?;
    put_base(&stack)?;
    Ok(stack)
}

fn round(stack: &Stack, vm: &str) -> Result<u32> {
    let ram = File::open(stack.ram_file(vm, "a")?)?;
    Ok(boot_disk::progress(&ram)?.round)
}

/// Has a VM stand still, and then go off; returns the round that it was in.
fn stop(stack: &Stack, vm: &str) -> Result<u32> {
    stack.ok("controller", &["vm", "pause", vm])?;
    let round = round(stack, vm)?;
    stack.ok("controller", &["vm", "stop", vm, "--force"])?;
    stack.until("the VM is off", SOON, || {
        Ok(stack.vm(vm)?["state"] == "stopped")
    })?;
    Ok(round)
}

/// What a VM that is off has on its disk, as qemu-img reads it.
fn disk_of(stack: &Stack, vm: &str) -> Result<File> {
    let (top, read) = (
        format!("{STORE}/{vm}.raw.d1.vmdk"),
        format!("{STORE}/{vm}.read"),
    );
    let mut command = stack.machine("a")?.command("qemu-img");
    let converted = command
        .args(["convert", "-f", "vmdk", "-O", "raw", &top, &read])
        .output()?;
    ensure!(converted.status.success(), "{converted:?}");
    Ok(File::open(stack.inside("a", &read)?)?)
}

fn base_is_unchanged(stack: &Stack) -> Result<()> {
    ensure!(std::fs::read(stack.inside("a", BASE)?)? == base()?);
    Ok(())
}

/// What a VM's disk consists of.
fn images_of(stack: &Stack, vm: &str) -> Result<serde_json::Value> {
    let described = stack.inside("a", format!("{STORE}/{vm}.raw.images"))?;
    Ok(serde_json::from_slice(&std::fs::read(described)?)?)
}

/// The images of a VM's disk, by its description.
fn images(stack: &Stack, vm: &str) -> Result<Vec<String>> {
    let described = images_of(stack, vm)?;
    let images = described["images"].as_object().context("no images")?;
    Ok(images.keys().cloned().collect())
}

fn is_refused(stack: &Stack, words: &[&str], told: &str) -> Result<()> {
    let ran = stack.run("controller", words)?;
    let said = format!("{}{}", ran.stdout, ran.stderr);
    ensure!(ran.code != Some(0) && said.contains(told), "{ran:?}");
    Ok(())
}

#[test]
fn two_vms_over_one_image_write_each_its_own_and_neither_the_image() -> Result<()> {
    let stack = with_base("linked")?;
    for vm in ["one", "two"] {
        begin(&stack, vm)?;
        let shown = stack.vm(vm)?;
        let disk = &shown["spec"]["disk"][0];
        let begins = disk.get("linked").or(disk.get("from"));
        ensure!(begins.is_none(), "it is made: {shown}");
    }
    // A successor goes on with all that was answered.
    stack.kill_vm_process("one", "a")?;
    goes_on_at(&stack, "one", "a")?;
    let one = stop(&stack, "one")?;
    while round(&stack, "two")? < one + 20 {
        goes_on_at(&stack, "two", "a")?;
    }
    let two = stop(&stack, "two")?;
    for (vm, own, other) in [("one", one, two), ("two", two, one)] {
        let disk = disk_of(&stack, vm)?;
        ensure!(boot_disk::missing(&disk, own)?.is_none(), "{vm}: {own}");
        ensure!(boot_disk::missing(&disk, other)?.is_some(), "{vm}: {other}");
        ensure!(disk.metadata()?.len() == BYTES as u64);
        let file = stack.inside("a", format!("{STORE}/{vm}.raw"))?;
        let own = std::fs::read(file)?;
        ensure!(own.iter().all(|byte| *byte == 0), "it is read by nobody");
    }
    base_is_unchanged(&stack)?;
    for vm in ["one", "two"] {
        stack.ok("controller", &["vm", "start", vm])?;
        goes_on_at(&stack, vm, "a")?;
        stack.remove(vm)?;
    }
    base_is_unchanged(&stack)
}

#[test]
fn an_image_that_disks_are_linked_to_is_neither_written_nor_exchanged() -> Result<()> {
    let stack = with_base("linkedto")?;
    begin(&stack, "one")?;
    // By its rights any guest's hypervisor could.
    allow(&stack, "666")?;
    let other = format!("[[disk]]\nname = \"root\"\npath = \"{BASE}\"\n");
    let file = describe(&stack, "three", &other)?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "three", "--on", "a"];
    is_refused(&stack, &start, "linked disks begin as")?;
    stop(&stack, "one")?;
    is_refused(&stack, &start, "linked disks begin as")?;

    let path = stack.inside("a", BASE)?;
    let aside = path.with_extension("aside");
    std::fs::rename(&path, &aside)?;
    let start = ["vm", "start", "one"];
    is_refused(&stack, &start, "is linked to the image")?;
    // Content alone: what a copy has that keeps no attributes.
    std::fs::write(&path, std::fs::read(&aside)?)?;
    is_refused(&stack, &start, "what is there now is another one")?;
    std::fs::rename(&aside, &path)?;
    is_refused(&stack, &start, "everybody can change it")?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o644))?;
    stack.ok("controller", &start)?;
    goes_on_at(&stack, "one", "a")?;
    base_is_unchanged(&stack)
}

/// Off, and of a snapshot while its guest works and starts anew.
#[test]
fn a_vm_with_a_linked_disk_is_cloned_and_the_clone_is_one_image() -> Result<()> {
    let stack = with_base("linkedclone")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    begin(&stack, "one")?;
    let round = stop(&stack, "one")?;
    ok(&["vm", "clone", "one", "two"])?;
    let of = |vm: &str| stack.inside("a", format!("{STORE}/{vm}-root.raw"));
    let missing = boot_disk::missing(&File::open(of("two")?)?, round)?;
    ensure!(missing.is_none(), "of round {round}: {missing:?}");
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["vm", "snapshot", "create", "one", "clean"])?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["vm", "clone", "one", "three", "--snapshot", "clean"])?;
    goes_on_at(&stack, "one", "a")?;
    stop(&stack, "one")?;
    ok(&["vm", "clone", "one", "four", "--snapshot", "clean"])?;
    for vm in ["two", "three", "four"] {
        // What no guest has written came along, and nothing belongs to it.
        let (image, of_base) = (std::fs::read(of(vm)?)?, base()?);
        ensure!(image.get(64 << 10..) == of_base.get(64 << 10..), "{vm}");
        let described = of(vm)?.with_extension("raw.images");
        ensure!(!described.exists(), "{vm} is described");
        ok(&["vm", "start", vm])?;
        goes_on_at(&stack, vm, "a")?;
    }
    ok(&["vm", "start", "one"])?;
    for vm in ["one", "two", "three", "four"] {
        goes_on_at(&stack, vm, "a")?;
        stack.remove(vm)?;
    }
    base_is_unchanged(&stack)
}

#[test]
fn a_linked_disk_that_was_copied_by_hand_under_another_name_is_nobodys() -> Result<()> {
    let stack = with_base("linkedcopy")?;
    begin(&stack, "one")?;
    stop(&stack, "one")?;
    for end in ["", ".images"] {
        let at = |vm: &str| format!("{STORE}/{vm}.raw{end}");
        let mut command = stack.machine("a")?.command("cp");
        let copied = command.args(["-a", &at("one"), &at("two")]).status()?;
        ensure!(copied.success());
    }
    let disk = format!("[[disk]]\nname = \"root\"\npath = \"{STORE}/two.raw\"\n");
    let file = describe(&stack, "two", &disk)?;
    stack.ok("controller", &["vm", "create", &file])?;
    let start = ["vm", "start", "two", "--on", "a"];
    is_refused(&stack, &start, "is called after another image")?;
    stack.ok("controller", &["vm", "delete", "two"])?;
    stack.ok("controller", &["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack)
}

#[test]
fn a_linked_disk_has_snapshots_and_stays_linked_when_they_are_deleted() -> Result<()> {
    let stack = with_base("linkedsnap")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    begin(&stack, "one")?;
    ok(&["vm", "snapshot", "create", "one", "clean"])?;
    goes_on_at(&stack, "one", "a")?;
    stop(&stack, "one")?;
    ok(&["vm", "snapshot", "revert", "one", "clean"])?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["vm", "snapshot", "delete", "one", "clean"])?;
    stack.until("it is merged", SOON, || {
        Ok(images(&stack, "one")?.len() == 2)
    })?;
    goes_on_at(&stack, "one", "a")?;
    ensure!(images(&stack, "one")?.contains(&BASE.to_owned()));
    base_is_unchanged(&stack)?;
    // What is over it now is read by its own name.
    stop(&stack, "one")?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack)
}

#[test]
fn a_linked_disk_that_moves_to_another_datastore_is_one_image_there() -> Result<()> {
    let stack = with_base("linkedmoved")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    begin(&stack, "one")?;
    let by = ["vm", "move-disk", "one", "--to", "slow", "--method"];
    let by = [&by[..], &["dirty-tracking"]].concat();
    is_refused(&stack, &by, "does not copy that")?;
    ok(&["vm", "snapshot", "create", "one", "clean"])?;
    let to_slow = ["vm", "move-disk", "one", "--to", "slow"];
    is_refused(&stack, &to_slow, "delete its snapshots first")?;
    ok(&["vm", "snapshot", "delete", "one", "clean"])?;
    stack.until("it is merged", SOON, || {
        Ok(images(&stack, "one")?.len() == 2)
    })?;
    ok(&to_slow)?;
    goes_on_at(&stack, "one", "a")?;
    let moved = format!("{SLOW}/one-root.raw");
    ensure!(stack.vm("one")?["spec"]["disk"][0]["path"] == moved);
    let left = stack.inside("a", STORE)?;
    stack.until("what it was before is gone", SOON, || {
        let mut names = std::fs::read_dir(&left)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<String>>>()?;
        names.retain(|name| name.starts_with("one"));
        Ok(names.is_empty())
    })?;
    stack.kill_vm_process("one", "a")?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["vm", "pause", "one"])?;
    image_has_all_at(&stack, "one", (&moved, "a"))?;
    // What the guest has never written came along.
    let tail = std::fs::read(stack.inside("a", &moved)?)?;
    let (tail, of_base) = (tail.get(64 << 10..), base()?);
    ensure!(tail == of_base.get(64 << 10..), "it is another content");
    ok(&["vm", "resume", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    stack.remove("one")?;
    base_is_unchanged(&stack)
}

/// A file system of its own in host a, with such an image.
fn with_golden(name: &str) -> Result<Stack> {
    let mut plan = Plan::default();
    plan.hosts[0].config = format!(
        "datastores = {{ fast = {{ path = \"{STORE}\" }}, slow = {{ path = \"{SLOW}\" }}, golden = {{ path = \"{GOLDEN}\" }} }}\n"
    );
    let stack = Stack::new(name, &plan)?;
    for directory in [STORE, SLOW, GOLDEN] {
        stack.make_directory("a", directory)?;
    }
    mount(&stack, &["-t", "tmpfs", "-o", "mode=0755", "golden"])?;
    write_golden(&stack)?;
    mount(&stack, &["-o", "remount,ro"])?;
    Ok(stack)
}

fn mount(stack: &Stack, words: &[&str]) -> Result<()> {
    let mut command = stack.machine("a")?.command("mount");
    ensure!(command.args(words).arg(GOLDEN).status()?.success());
    Ok(())
}

fn golden() -> String {
    format!("{GOLDEN}/base.raw")
}

/// Puts the image there, in the place of any that is there.
fn write_golden(stack: &Stack) -> Result<()> {
    let path = stack.inside("a", golden())?;
    std::fs::write(&path, base()?)?;
    let image = File::options().write(true).open(&path)?;
    image.set_permissions(Permissions::from_mode(0o644))?;
    image.set_modified(SystemTime::now() - Duration::from_secs(60))?;
    Ok(())
}

fn over_golden(vm: &str) -> String {
    lines(vm).replace(BASE, &golden())
}

#[test]
fn disks_over_storage_that_nobody_can_write_know_their_image_and_leave_it_by_redo_logs()
-> Result<()> {
    let stack = with_golden("linkedro")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    for vm in ["one", "two"] {
        let file = describe(&stack, vm, &over_golden(vm))?;
        ok(&["vm", "create", &file])?;
        ok(&["vm", "start", vm, "--on", "a"])?;
        goes_on_at(&stack, vm, "a")?;
    }
    ok(&[
        "vm",
        "move-disk",
        "one",
        "--to",
        "slow",
        "--method",
        "snapshot",
    ])?;
    goes_on_at(&stack, "one", "a")?;
    let moved = format!("{SLOW}/one-root.raw");
    ensure!(stack.vm("one")?["spec"]["disk"][0]["path"] == moved);
    // Nothing of it needs the image any more: it may be exchanged for another one.
    let number = images_of(&stack, "two")?["images"][golden()]["id"]
        .as_str()
        .context("the image has no number")?
        .to_owned();
    stop(&stack, "two")?;
    ok(&["vm", "start", "two"])?;
    goes_on_at(&stack, "two", "a")?;
    stop(&stack, "two")?;
    mount(&stack, &["-o", "remount,rw"])?;
    write_golden(&stack)?;
    mount(&stack, &["-o", "remount,ro"])?;
    // The same content, and another image by all that can be known of it.
    let start = ["vm", "start", "two"];
    is_refused(&stack, &start, "what is there now is another one")?;
    is_refused(&stack, &start, "setfattr -n user.godwit.parent")?;
    // A person knows better.
    mount(&stack, &["-o", "remount,rw"])?;
    let path = stack.inside("a", golden())?;
    let flags = XattrFlags::empty();
    setxattr(&path, PARENT_MARK, number.as_bytes(), flags)?;
    mount(&stack, &["-o", "remount,ro"])?;
    ok(&start)?;
    goes_on_at(&stack, "two", "a")?;
    goes_on_at(&stack, "one", "a")?;
    for vm in ["one", "two"] {
        stack.remove(vm)?;
    }
    ensure!(std::fs::read(&path)? == base()?, "the image was written");
    Ok(())
}

#[test]
fn an_image_that_can_be_written_again_bears_its_mark_before_a_guest_reads_it() -> Result<()> {
    let stack = with_golden("linkedrw")?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let file = describe(&stack, "one", &over_golden("one"))?;
    ok(&["vm", "create", &file])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    stop(&stack, "one")?;
    let path = stack.inside("a", golden())?;
    let borne = || {
        let mut value = [0; 64];
        let length = getxattr(&path, PARENT_MARK, &mut value[..]).ok()?;
        Some(String::from_utf8_lossy(value.get(..length)?).into_owned())
    };
    ensure!(borne().is_none());
    mount(&stack, &["-o", "remount,rw"])?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "a")?;
    let described = images_of(&stack, "one")?;
    ensure!(borne().as_deref() == described["images"][golden()]["id"].as_str());
    // From then on it is as any other that disks are linked to.
    std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    let other = format!("[[disk]]\nname = \"root\"\npath = \"{}\"\n", golden());
    let file = describe(&stack, "three", &other)?;
    ok(&["vm", "create", &file])?;
    let start = ["vm", "start", "three", "--on", "a"];
    is_refused(&stack, &start, "linked disks begin as")?;
    stack.remove("one")?;
    ensure!(std::fs::read(&path)? == base()?, "the image was written");
    Ok(())
}
