//! A QEMU that was taken over by its guest reaches nothing of its neighbours: every VM has a user of its own.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, Plan, Stack};
use godwit_types::vm::UIDS;

/// A disk that a person gave to the common group of all QEMUs, as the documentation says.
fn make_disk(stack: &Stack, host: &str, vm: &str) -> Result<String> {
    let image = format!("/var/tmp/{vm}.img");
    std::fs::File::create(stack.inside(host, &image)?)?.set_len(1 << 20)?;
    for command in [["chgrp", "nogroup"], ["chmod", "640"]] {
        let [program, word] = command;
        let mut command = stack.machine(host)?.command(program);
        ensure!(command.args([word, &image]).status()?.success());
    }
    Ok(image)
}

/// User, group and number, inside its host, of a VM's one QEMU.
fn qemu(stack: &Stack, vm: &str, host: &str) -> Result<(u32, u32, String)> {
    let found = stack.hypervisors(vm, host)?;
    let [one] = found.as_slice() else {
        anyhow::bail!("VM {vm} has {} QEMUs on host {host}", found.len());
    };
    let pid = one.pid_inside.to_string();
    let status = std::fs::read_to_string(stack.inside(host, format!("/proc/{pid}/status"))?)?;
    let id = |key: &str| -> Result<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        let ids: Vec<&str> = line.context(key.to_owned())?.split_whitespace().collect();
        ensure!(ids.iter().all(|id| Some(id) == ids.first()), "{ids:?}");
        Ok(ids.first().context("no id")?.parse()?)
    };
    Ok((id("Uid:")?, id("Gid:")?, pid))
}

/// What a command says that runs as this user, with no more rights than a QEMU has.
fn as_user(stack: &Stack, host: &str, (uid, gid): (u32, u32), words: &[&str]) -> Result<String> {
    let mut command = stack.machine(host)?.command("setpriv");
    command.args([format!("--reuid={uid}"), format!("--regid={gid}")]);
    command.args(["--clear-groups", "--no-new-privs", "--bounding-set=-all"]);
    let ran = command.args(words).output()?;
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    Ok(format!("{}: {said}", ran.status.success()))
}

/// Tries, as one VM's user, whatever would reach another VM.
fn reaches_nothing(
    stack: &Stack,
    user: (u32, u32),
    (vm, ram, pid): (&str, &str, &str),
) -> Result<()> {
    let number = ram.rsplit('.').next().context("no number")?;
    let monitor = format!("/run/godwit/vms/{vm}/qemu/{number}-0.qmp");
    let (memory, files) = (format!("/proc/{pid}/mem"), format!("/proc/{pid}/fd"));
    let attempts: [&[&str]; 7] = [
        &["head", "-c", "1", ram],
        &["truncate", "-s", "0", "-c", ram],
        &["head", "-c", "1", &monitor],
        &["head", "-c", "1", &format!("/var/tmp/{vm}.img")],
        &["head", "-c", "1", &memory],
        &["ls", &files],
        &["kill", "-STOP", pid],
    ];
    for words in attempts {
        let said = as_user(stack, "a", user, words)?;
        let is_denied = ["Permission denied", "not permitted"];
        ensure!(
            is_denied.iter().any(|no| said.contains(no)),
            "{words:?}: {said}"
        );
    }
    Ok(())
}

#[test]
fn a_qemu_reaches_nothing_of_its_neighbour() -> Result<()> {
    let stack = Stack::new("users", &Plan::default())?;
    let mut users = Vec::new();
    for vm in ["one", "two"] {
        let image = make_disk(&stack, "a", vm)?;
        make_disk(&stack, "b", vm)?;
        let disk = format!("[[disk]]\nname = \"d\"\nread_only = true\npath = \"{image}\"");
        stack.start_counter(&Counter::small(vm).with(&disk), "a")?;
        users.push(qemu(&stack, vm, "a")?);
    }
    let [(one, group, _), (two, two_group, two_pid)] = users.as_slice() else {
        anyhow::bail!("two VMs were started");
    };
    ensure!(
        one != two && UIDS.contains(one) && UIDS.contains(two),
        "{users:?}"
    );
    ensure!(
        stack.vm("one")?["spec"]["uid"] == *one,
        "as the controller allotted it"
    );

    let ram = stack.ram_file("two", "a")?;
    let ram = ram.file_name().context("no name")?.to_string_lossy();
    let ram = format!("/run/godwit/ram/{ram}");
    reaches_nothing(&stack, (*one, *group), ("two", &ram, two_pid))?;
    let own = as_user(&stack, "a", (*two, *two_group), &["head", "-c", "1", &ram])?;
    ensure!(
        own.starts_with("true"),
        "a VM's own user may read its RAM: {own}"
    );
    let own = as_user(
        &stack,
        "a",
        (*two, *two_group),
        &["head", "-c", "1", "/var/tmp/two.img"],
    )?;
    ensure!(
        own.contains("Permission denied"),
        "QEMU has its disk as an open file: {own}"
    );

    // Whoever holds keys leaves no image of them.
    for machine in ["controller", "a", "b"] {
        let pid = stack.daemon_pid(machine).context("no daemon")?;
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits"))?;
        let core = limits.lines().find(|line| line.starts_with("Max core"));
        let words: Vec<&str> = core.unwrap_or_default().split_whitespace().collect();
        ensure!(
            words.ends_with(&["0", "0", "bytes"]),
            "{machine}: {words:?}"
        );
    }

    stack.migrate("one", "b", &[])?;
    // That it goes on is asked, not what its pages hold: the firmware leaves its disk's ring in the page below its tables, which this
    // guest counts in, and QEMU clears a flag of that ring, the counter's lowest bit, whenever the guest is paused.
    stack.wait_counts("one", "b")?;
    let (there, _, _) = qemu(&stack, "one", "b")?;
    ensure!(there == *one, "user {there} instead of {one}");
    stack.remove("one")?;
    stack.remove("two")
}
