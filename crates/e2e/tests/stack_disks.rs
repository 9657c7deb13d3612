//! A VM that boots from its disk, as a person has it: made, paused, reset, kept from a second user of its image, moved with it.

use anyhow::{Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, image_has_all_at, make_image};
use godwit_e2e::stack::{Plan, SOON, Stack, names};
use godwit_types::version::HARDWARE;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

fn goes_on(stack: &Stack, vm: &str) -> Result<()> {
    goes_on_at(stack, vm, "a")
}

/// What the guest wrote last is on the disk, but for the round that may be under way.
fn image_has_all(stack: &Stack, vm: &str, image: &str) -> Result<()> {
    image_has_all_at(stack, vm, (image, "a"))
}

/// VM one, which is on, is turned off and deleted; until then nobody starts another with its image.
fn keeps_its_disk_until_it_is_deleted(stack: &Stack, start_another: &[&str]) -> Result<()> {
    stack.ok("controller", &["vm", "stop", "one", "--force"])?;
    stack.until("VM one is off", SOON, || {
        Ok(stack.vm("one")?["state"] == "stopped")
    })?;
    let sentence = stack.refused("controller", start_another, 2, "invalid-request")?;
    names(&sentence, &["disk 'root' of VM 'one'", "delete that VM"])?;
    stack.ok("controller", &["vm", "delete", "one"]).map(drop)
}

#[test]
fn a_vm_boots_from_its_disk_and_keeps_it_for_itself() -> Result<()> {
    let stack = Stack::new("disks", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    let image = make_image(&stack, "root")?;
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on(&stack, "one")?;
    let shown = stack.vm("one")?;
    ensure!(shown["spec"]["hardware"] == HARDWARE.max, "{shown}");

    ok(&["vm", "pause", "one"])?;
    image_has_all(&stack, "one", &image)?;
    ok(&["vm", "resume", "one"])?;
    goes_on(&stack, "one")?;
    ok(&["vm", "reset", "one"])?;
    goes_on(&stack, "one")?;
    stack.restart_daemon("a")?;
    stack.until("the agent answers again", SOON, || {
        Ok(stack.vm_at("one", "a").is_ok())
    })?;
    goes_on(&stack, "one")?;
    stack.kill_vm_process("one", "a")?;
    goes_on(&stack, "one")?;
    ok(&["vm", "limit-disk", "one", "root", "--iops", "5000"])?;
    let shown = stack.ok("controller", &["vm", "show", "one"])?;
    let line = format!("root {image}, 1.0 MiB, at most 5000 requests a second, ");
    let has_line = |shown: &str| {
        shown
            .lines()
            .any(|said| said.contains(&line) && said.contains(" writes/s ("))
    };
    ensure!(has_line(&shown), "{shown}");
    ok(&["vm", "limit-disk", "one", "root", "--none"])?;
    let shown = stack.vm("one")?;
    ensure!(shown["spec"]["disk"][0]["limits"].is_null(), "{shown}");
    ensure!(
        shown["disks"][0]["writes"]["requests"].as_u64() > Some(0),
        "{shown}"
    );

    ok(&["vm", "create", &describe(&stack, "two", &disk(&image))?])?;
    let start = ["vm", "start", "two", "--on", "a"];
    let sentence = stack.refused("controller", &start, 2, "invalid-request")?;
    let whose = "is in use: disk 'root' of VM 'one' has it open";
    names(&sentence, &["disk 'root' of VM 'two'", &image, whose])?;
    goes_on(&stack, "one")?;
    ok(&["vm", "pause", "one"])?;
    image_has_all(&stack, "one", &image)?;
    keeps_its_disk_until_it_is_deleted(&stack, &start)?;
    ok(&["vm", "start", "two", "--on", "a"])?;
    goes_on(&stack, "two")?;
    stack.remove("two")?;

    // A VM that is deleted leaves nothing behind that would keep its name from another one, also once its host has begun anew.
    stack.restart_daemon("a")?;
    let create = describe(&stack, "two", &disk(&image))?;
    ok(&["vm", "create", &create])?;
    // Once the controller has found that the host answers again.
    stack.until("it starts again", SOON, || {
        Ok(stack.run("controller", &start)?.code == Some(0))
    })?;
    for _ in 0..3 {
        goes_on(&stack, "two")?;
        stack.remove("two")?;
        ok(&["vm", "create", &create])?;
        ok(&start)?;
    }
    stack.remove("two")
}

#[test]
fn what_cannot_be_a_disk_or_boot_is_refused_and_nothing_is_left() -> Result<()> {
    let stack = Stack::new("nodisks", &Plan::default())?;
    let create = |vm: &str, lines: &str| -> Result<()> {
        let file = describe(&stack, vm, lines)?;
        stack.ok("controller", &["vm", "create", &file]).map(drop)
    };
    let file = describe(&stack, "none", "")?;
    let ran = stack.run("controller", &["vm", "create", &file])?;
    let is_told = ran.stderr.contains("neither a `kernel` nor a [[disk]]");
    ensure!(ran.code == Some(2) && is_told, "{ran:?}");

    let odd = make_image(&stack, "odd")?;
    File::options()
        .write(true)
        .open(stack.inside("a", &odd)?)?
        .set_len(1000)?;
    let qcow2 = make_image(&stack, "qcow2")?;
    let mut make = stack.machine("a")?.command("qemu-img");
    let made = make.args(["create", "-q", "-f", "qcow2", &qcow2, "1M"]);
    ensure!(made.status()?.success());
    create("odd", &disk(&odd))?;
    create("qcow2", &disk(&qcow2))?;
    create("missing", &disk("/var/tmp/missing.raw"))?;
    create("dir", &disk("/var/tmp"))?;
    for (vm, exit, code, words) in [
        (
            "odd",
            2,
            "invalid-request",
            ["disk 'root'", "1000 bytes", "no whole blocks"],
        ),
        (
            "qcow2",
            2,
            "invalid-request",
            ["disk 'root'", &qcow2, "no raw image but a qcow2 one"],
        ),
        (
            "missing",
            3,
            "missing-file",
            ["disk 'root'", "/var/tmp/missing.raw", "does not exist"],
        ),
        (
            "dir",
            2,
            "invalid-request",
            ["disk 'root'", "/var/tmp", "regular file"],
        ),
    ] {
        let start = ["vm", "start", vm, "--on", "a"];
        names(&stack.refused("controller", &start, exit, code)?, &words)?;
        ensure!(stack.hypervisors(vm, "a")?.is_empty(), "a QEMU is left");
        let left = std::fs::read_dir(stack.inside("a", "/run/godwit/ram")?)?.count();
        ensure!(left == 0, "{left} files are left beside guests' memory");
    }
    // Whoever tries again and again hears the reason, and starts it once that is gone.
    let start = ["vm", "start", "missing", "--on", "a"];
    for _ in 0..10 {
        stack.refused("controller", &start, 3, "missing-file")?;
    }
    make_image(&stack, "missing")?;
    stack.ok("controller", &start)?;
    goes_on(&stack, "missing")?;
    stack.remove("missing")
}

#[test]
fn a_vm_moves_with_its_disk_to_another_host_and_back() -> Result<()> {
    let (near, far) = (
        "rtt=0.2ms,rate=1gbit,queue=20ms",
        "rtt=40ms,rate=1gbit,queue=50ms",
    );
    let plan = Plan {
        link: Some(near.parse()?),
        ..Plan::default()
    };
    let stack = Stack::new("alongdisks", &plan)?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    File::options()
        .write(true)
        .open(stack.inside("a", &image)?)?
        .set_len(16 << 20)?;
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on(&stack, "one")?;

    let foreign = stack.inside("b", &image)?;
    std::fs::write(&foreign, "somebody's")?;
    let sentence = stack.refused(
        "controller",
        &["vm", "migrate", "one", "--to", "b"],
        3,
        "preflight",
    )?;
    names(&sentence, &["disk 'root'", &image, "host 'b'", "already"])?;
    ensure!(std::fs::read(&foreign)? == b"somebody's");
    std::fs::remove_file(&foreign)?;
    goes_on(&stack, "one")?;

    let checked = stack.could_migrate("one", "b")?;
    ensure!(
        checked["passed"].to_string().contains("disk 'root': "),
        "{checked}"
    );
    ensure!(!foreign.exists(), "a dry run made an image");
    // Writes of its guest wait for the other host over a near link, and do not over a far one.
    for (from, to, link) in [("a", "b", near), ("b", "a", far)] {
        stack.lab.link(0)?.set(link.parse()?)?;
        ok(&["vm", "migrate", "one", "--to", to])?;
        goes_on_at(&stack, "one", to)?;
        stack.until("the image is gone where the VM was", SOON, || {
            Ok(!stack.inside(from, &image)?.exists())
        })?;
        ok(&["vm", "pause", "one"])?;
        image_has_all_at(&stack, "one", (&image, to))?;
        ok(&["vm", "resume", "one"])?;
        goes_on_at(&stack, "one", to)?;
    }
    // It starts where its disk is, and nowhere else.
    ok(&["vm", "stop", "one", "--force"])?;
    let start = ["vm", "start", "one", "--on", "b"];
    let refused = stack.run("controller", &start)?;
    ensure!(refused.code != Some(0), "{refused:?}");
    ok(&["vm", "start", "one"])?;
    goes_on(&stack, "one")?;
    stack.remove("one")
}

/// A dry run says what would be moved where, and makes nothing.
fn is_planned(stack: &Stack, image: &str, moved: &str) -> Result<()> {
    let dry = ["vm", "move-disk", "one", "--to", "fast", "--dry-run"];
    let shown = stack.ok("controller", &dry)?;
    names(&shown, &["would move from", image, moved, "no estimate"])?;
    let there = stack.inside("a", moved)?;
    ensure!(!there.exists(), "a dry run made an image");
    std::fs::write(&there, "somebody's")?;
    let refused = stack.run("controller", &dry)?;
    ensure!(
        refused.code != Some(0) && refused.stdout.contains("refused: disk 'root'"),
        "{refused:?}"
    );
    Ok(std::fs::remove_file(there)?)
}

/// The command says where the disk is, and the list how it came there.
fn moves(stack: &Stack, to_fast: &[&str], (image, moved): (&str, &str)) -> Result<()> {
    let said = stack.ok("controller", to_fast)?;
    names(&said, &[&format!("disk 'root' of VM 'one' is {moved} now")])?;
    let listed = stack.ok("controller", &["vm", "move-disk", "one", "--list"])?;
    let way = format!("disk 'root' from {image} to {moved}: 1.0 MiB in ");
    names(&listed, &[&way])
}

/// Targets that no machine is too busy for count the disk in, and the report says that the pause met its own.
fn goes_along_within_its_targets(stack: &Stack) -> Result<()> {
    let targets = ["--deadline", "600", "--max-downtime", "60000"];
    let report = stack.migrate("one", "b", &targets)?;
    let (promise, basis) = (&report["promise"], &report["prediction"]["basis"]);
    let counts_disks = basis.as_str().is_some_and(|it| it.contains("MiB of disks"));
    ensure!(promise["kept"] == true && counts_disks, "{report}");
    let id = report["id"].as_str().unwrap_or_default();
    let shown = stack.ok("controller", &["migration", "show", id])?;
    names(&shown, &["(target 60000 ms: met)", " MiB copied"])
}

#[test]
fn a_disk_moves_to_a_datastore_of_its_host_while_its_guest_runs() -> Result<()> {
    let lines = "datastores = { fast = { path = \"/var/tmp/fast\" }, gone = { path = \"/var/tmp/gone\" } }\n";
    let mut plan = Plan::default();
    plan.hosts[0].config = lines.into();
    let stack = Stack::new("movedisks", &plan)?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    stack.make_directory("a", "/var/tmp/fast")?;
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    let refused = |words: &[&str], exit, code, said: &[&str]| {
        names(&stack.refused("controller", words, exit, code)?, said)
    };
    let to_fast = ["vm", "move-disk", "one", "--to", "fast"];
    let off = stack.run("controller", &to_fast)?;
    ensure!(off.code != Some(0), "a VM that is off: {off:?}");
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on(&stack, "one")?;
    refused(
        &["vm", "move-disk", "one", "--to", "tape"],
        2,
        "invalid-request",
        &["no datastore 'tape'", "it has fast, gone", "tape = { path"],
    )?;
    refused(
        &["vm", "move-disk", "one", "swap", "--to", "fast"],
        2,
        "invalid-request",
        &["no disk 'swap'"],
    )?;
    let gone = ["vm", "move-disk", "one", "--to", "gone"];
    let said = stack.run("controller", &gone)?;
    ensure!(
        said.stderr.contains("is not there: /var/tmp/gone"),
        "{said:?}"
    );

    let moved = "/var/tmp/fast/one-root.raw";
    is_planned(&stack, &image, moved)?;
    moves(&stack, &to_fast, (&image, moved))?;
    goes_on(&stack, "one")?;
    ensure!(stack.vm("one")?["spec"]["disk"][0]["path"] == moved);
    stack.until("the former image is gone", SOON, || {
        Ok(!stack.inside("a", &image)?.exists())
    })?;
    refused(
        &to_fast,
        3,
        "preflight",
        &["is in datastore 'fast'", "already"],
    )?;
    ok(&["vm", "pause", "one"])?;
    image_has_all(&stack, "one", moved)?;
    ok(&["vm", "resume", "one"])?;
    stack.kill_vm_process("one", "a")?;
    goes_on(&stack, "one")?;
    // Its own image is what it starts with from now on, and takes along.
    ok(&["vm", "stop", "one", "--force"])?;
    ok(&["vm", "start", "one"])?;
    goes_on(&stack, "one")?;
    stack.make_directory("b", "/var/tmp/fast")?;
    goes_along_within_its_targets(&stack)?;
    goes_on_at(&stack, "one", "b")?;
    ok(&["vm", "pause", "one"])?;
    image_has_all_at(&stack, "one", (moved, "b"))?;
    stack.remove("one")
}

#[test]
fn whoever_follows_a_disk_s_move_hears_of_its_end_though_agent_and_controller_begin_anew()
-> Result<()> {
    let mut plan = Plan::default();
    plan.hosts[0].config = "datastores = { fast = { path = \"/var/tmp/fast\" } }\n".into();
    let stack = Stack::new("movefollowed", &plan)?;
    let image = make_image(&stack, "root")?;
    // Enough for some seconds at the cap; zeroes would not be copied.
    let file = File::options()
        .write(true)
        .open(stack.inside("a", &image)?)?;
    file.write_all_at(&vec![7; 3 << 20], 1 << 20)?;
    stack.make_directory("a", "/var/tmp/fast")?;
    let file = describe(&stack, "one", &disk(&image))?;
    stack.ok("controller", &["vm", "create", &file])?;
    stack.ok("controller", &["vm", "start", "one", "--on", "a"])?;
    goes_on(&stack, "one")?;
    let slowly = [
        "vm",
        "move-disk",
        "one",
        "--to",
        "fast",
        "--max-bandwidth",
        "3",
    ];
    let followed = std::thread::scope(|scope| {
        let followed = scope.spawn(|| stack.run("controller", &slowly));
        stack.until("it is copied", SOON, || {
            let listed = stack.ok("controller", &["vm", "move-disk", "one", "--list"])?;
            Ok(listed.contains("under way"))
        })?;
        is_refused_beforehand(&stack)?;
        stack.restart_daemon("a")?;
        stack.restart_daemon("controller")?;
        followed
            .join()
            .map_err(|_| anyhow::anyhow!("the command broke off"))?
    })?;
    let is_told = "is /var/tmp/fast/one-root.raw now";
    ensure!(
        followed.code == Some(0) && followed.stdout.contains(is_told),
        "{followed:?}"
    );
    goes_on(&stack, "one")?;
    stack.remove("one")
}

/// A dry run of a migration tells what the migration is refused for, where the disk is still on its way after it.
fn is_refused_beforehand(stack: &Stack) -> Result<()> {
    let dry = ["vm", "migrate", "one", "--to", "b", "--dry-run"];
    let told = stack.run("controller", &dry)?;
    let listed = stack.ok("controller", &["vm", "move-disk", "one", "--list"])?;
    let said = format!("{}{}", told.stdout, told.stderr);
    let is_told = told.code == Some(3) && said.contains("disks of VM 'one' are being moved");
    ensure!(is_told || !listed.contains("under way"), "{told:?}");
    Ok(())
}

#[test]
fn a_disk_comes_to_the_datastore_that_is_named_on_another_host_and_back() -> Result<()> {
    let mut plan = Plan::default();
    let stores = |fast: &str| {
        format!(
            "datastores = {{ fast = {{ path = \"{fast}\" }}, slow = {{ path = \"/var/tmp/slow\" }} }}\n"
        )
    };
    plan.hosts[0].config = stores("/var/tmp/fast");
    plan.hosts[1].config = stores("/var/tmp/quick");
    let stack = Stack::new("storedisks", &plan)?;
    let ok = |words: &[&str]| stack.ok("controller", words);
    let image = make_image(&stack, "root")?;
    for (host, path) in [
        ("a", "/var/tmp/fast"),
        ("b", "/var/tmp/quick"),
        ("b", "/var/tmp/slow"),
    ] {
        stack.make_directory(host, path)?;
    }
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on(&stack, "one")?;
    let migrate = |to, disk| ["vm", "migrate", "one", "--to", to, "--disk", disk];
    let sentence = stack.refused(
        "controller",
        &migrate("b", "root=tape"),
        2,
        "invalid-request",
    )?;
    names(&sentence, &["no datastore 'tape'", "it has fast, slow"])?;

    // From where no datastore is to one that is named, to the one of that name on a, and to b's of the same name by itself.
    let name_alone = ["vm", "migrate", "one", "--to", "b"];
    for (words, at) in [
        (
            &migrate("b", "root=slow")[..],
            ("/var/tmp/slow/one-root.raw", "b"),
        ),
        (
            &migrate("a", "root=fast")[..],
            ("/var/tmp/fast/one-root.raw", "a"),
        ),
        (&name_alone[..], ("/var/tmp/quick/one-root.raw", "b")),
    ] {
        ok(words)?;
        goes_on_at(&stack, "one", at.1)?;
        ok(&["vm", "pause", "one"])?;
        image_has_all_at(&stack, "one", at)?;
        ok(&["vm", "resume", "one"])?;
        stack.until("the description says where the disk is", SOON, || {
            Ok(stack.vm("one")?["spec"]["disk"][0]["path"] == at.0)
        })?;
        for left in [
            "/var/tmp/slow/one-root.raw",
            "/var/tmp/fast/one-root.raw",
            &image,
        ] {
            stack.until("its former image is gone", SOON, || {
                let other = if at.1 == "a" { "b" } else { "a" };
                Ok(!stack.inside(other, left)?.exists())
            })?;
        }
    }
    ok(&["vm", "stop", "one", "--force"])?;
    ok(&["vm", "start", "one"])?;
    goes_on_at(&stack, "one", "b")?;
    stack.remove("one")
}
