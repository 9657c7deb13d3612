//! One VM, exactly once, across a whole site: who may start a VM when a host, the controller's database or a host's disk
//! is not what it was. Each case is one that once ran a VM twice, or left it down.

use anyhow::{Result, ensure};
use godwit_e2e::stack::site::{HOST_CONFIG, HOST_STATE};
use godwit_e2e::stack::{CONTROLLER_DATABASE, Counter, HostPlan, KILL, LONG, Plan, SOON, Stack};
use std::path::PathBuf;

/// Cap that makes a move last, Mb/s.
const CAP: [&str; 2] = ["--max-bandwidth", "100"];
/// Signal that ends a program in good order.
const TERMINATE: i32 = 15;

/// A guest whose pages take about five seconds at [`CAP`], and that dirties few of them meanwhile.
fn lasting(name: &str) -> Counter {
    Counter::flat(name, 64).slowed(800_000)
}

#[test]
fn a_vm_whose_new_hosts_agent_is_silent_is_not_started_again() -> Result<()> {
    let stack = Stack::new("site-silent", &Plan::default())?;
    stack.start_counter(&lasting("quiet"), "a")?;
    let id = stack.begin("quiet", "b", &CAP)?;
    stack.wait_precopy(&id)?;
    stack.kill_daemon("b")?;
    let report = stack.ended("controller", &id)?;
    ensure!(report["outcome"] == "completed", "{report}");
    stack.until("the controller says that it does not know", SOON, || {
        let state = stack.vm("quiet")?["state"].clone();
        ensure!(state != "stopped", "a VM that runs is shown as stopped");
        Ok(state == "unreachable")
    })?;
    for command in [["vm", "start", "quiet"], ["vm", "delete", "quiet"]] {
        stack.is_refused("controller", &command, &["b", "godwit host fenced b"])?;
    }
    stack.is_refused("controller", &["host", "remove", "b"], &["b", "quiet"])?;
    ensure!(stack.copies("quiet")? == 1, "not one copy");
    stack.start_daemon("b")?;
    stack.wait_connected()?;
    stack.runs_on("quiet", "b")?;
    stack.check_guest("quiet", "b").map(drop)
}

/// Takes host b out of the site and lets it join anew, empty.
fn join_anew(stack: &Stack) -> Result<()> {
    stack.ok("controller", &["host", "remove", "b"])?;
    stack.kill_daemon("b")?;
    let state = stack.inside("b", HOST_STATE)?;
    for entry in std::fs::read_dir(&state)?.flatten() {
        match entry.file_type()?.is_dir() {
            true => std::fs::remove_dir_all(entry.path())?,
            false => std::fs::remove_file(entry.path())?,
        }
    }
    std::fs::remove_file(stack.inside("b", "/etc/godwit/host.toml")?)?;
    stack.join(1, &HostPlan::default())?;
    stack.wait_connected()
}

#[test]
fn a_controller_with_an_old_database_reads_every_host_before_it_grants() -> Result<()> {
    let stack = Stack::new("site-restored", &Plan::default())?;
    stack.start_counter(&Counter::small("kept"), "a")?;
    let path = stack.inside("controller", CONTROLLER_DATABASE)?;
    let with = |suffix: &str| PathBuf::from(format!("{}{suffix}", path.display()));
    stack.kill_daemon("controller")?;
    let files = ["", "-wal", "-shm"].map(with);
    let kept = ["db", "wal", "shm"].map(|name| stack.dir().join(name));
    for (from, to) in files.iter().zip(&kept) {
        if from.exists() {
            std::fs::copy(from, to)?;
        }
    }
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    join_anew(&stack)?;
    stack.migrate("kept", "b", &[])?;
    stack.runs_on("kept", "b")?;

    stack.kill_daemon("controller")?;
    for (from, to) in kept.iter().zip(&files) {
        if to.exists() {
            std::fs::remove_file(to)?;
        }
        if from.exists() {
            std::fs::copy(from, to)?;
        }
    }
    stack.start_daemon("controller")?;
    stack.until("the controller finds the VM where it runs", LONG, || {
        let vm = stack.vm("kept")?;
        ensure!(
            vm["state"] != "stopped",
            "a VM that runs is shown as stopped"
        );
        ensure!(stack.copies("kept")? == 1, "not one copy");
        Ok(vm["state"] == "running" && vm["host"] == "b")
    })?;
    stack.until("the controller is in charge again", LONG, || {
        let site = stack.json("controller", &["site", "show"])?;
        Ok(site["in_charge"] == true)
    })?;
    stack.migrate("kept", "a", &[])?;
    stack.runs_on("kept", "a")?;
    stack.check_guest("kept", "a").map(drop)
}

#[test]
fn a_host_whose_disk_went_back_boots_nothing() -> Result<()> {
    let stack = Stack::new("site-old-disk", &Plan::default())?;
    stack.start_counter(&Counter::small("gone"), "a")?;
    let copy = stack.dir().join("state-of-a");
    stack.copy_state("a", &copy)?;
    stack.migrate("gone", "b", &[])?;
    stack.runs_on("gone", "b")?;
    stack.power_off("a")?;
    stack.put_state(&copy, "a")?;
    stack.start_daemon("a")?;
    stack.until("host a says that it boots nothing", SOON, || {
        let listed = stack.json("a", &["vm", "list"])?;
        let said = listed.to_string();
        Ok(said.contains("boots nothing") || !said.contains("\"claim\":\"holds\""))
    })?;
    stack.wait_passes("gone", "b", 2)?;
    ensure!(stack.copies("gone")? == 1, "not one copy");
    // Its record still claims the VM until a person ends that, which has an exit code of its own.
    let shown = stack.run("controller", &["vm", "show", "gone", "--json"])?;
    ensure!(matches!(shown.code, Some(0 | 7)), "{shown:?}");
    let view: serde_json::Value = serde_json::from_str(&shown.stdout)?;
    ensure!(
        view["host"] == "b" || view["state"] == "running-twice",
        "{view}"
    );
    Ok(())
}

#[test]
fn a_guest_that_lives_is_not_denied_by_a_state_directory_that_was_put_back() -> Result<()> {
    let stack = Stack::new("site-put-back", &Plan::default())?;
    stack.start_counter(&Counter::small("lives"), "b")?;
    let copy = stack.dir().join("state-of-a");
    stack.copy_state("a", &copy)?;
    stack.migrate("lives", "a", &[])?;
    stack.runs_on("lives", "a")?;
    let start = ["vm", "start", "lives", "--on", "b"];
    // Its VM process lives and knows better than the directory.
    stack.kill_daemon("a")?;
    stack.put_state(&copy, "a")?;
    stack.start_daemon("a")?;
    // The controller may not have missed it: the agent itself is asked until it answers.
    let listed_at_a = || {
        let listed = stack.run("a", &["vm", "list", "--json"])?;
        anyhow::Ok(listed.stdout)
    };
    stack.until("host a says that it holds the VM", SOON, || {
        let listed = listed_at_a()?;
        Ok(listed.contains("\"holds\"") && listed.contains("\"running\""))
    })?;
    stack.wait_connected()?;
    stack.runs_on("lives", "a")?;
    stack.is_refused("controller", &start, &["lives"])?;
    ensure!(stack.copies("lives")? == 1, "not one copy");
    // Only its QEMU lives.
    let process = stack.vm_at("lives", "a")?["vm_process_pid"].as_i64();
    stack.kill_daemon("a")?;
    stack.put_state(&copy, "a")?;
    let machine = stack.machine("a")?;
    machine.kill(i32::try_from(process.unwrap_or(0))?, KILL)?;
    stack.start_daemon("a")?;
    stack.until("host a says what lives there", SOON, || {
        Ok(listed_at_a()?.contains("older copy"))
    })?;
    stack.wait_connected()?;
    stack.is_refused("controller", &start, &["lives"])?;
    ensure!(stack.copies("lives")? == 1, "not one copy");
    // The way out that its note names, also while its VM process has just been started.
    let process = || anyhow::Ok(stack.vm_at("lives", "a")?["vm_process_pid"].as_i64());
    stack.until("its VM process answers", SOON, || Ok(process()?.is_some()))?;
    machine.kill(i32::try_from(process()?.unwrap_or(0))?, KILL)?;
    let stop = ["vm", "stop", "lives", "--force", "--host", "a"];
    stack.ok("controller", &stop)?;
    ensure!(stack.copies("lives")? == 0, "the guest was not ended");
    // Its directory is an older copy, whose no frees no VM: the host goes first.
    stack.power_off("a")?;
    stack.until("host a is missed", SOON, || {
        Ok(stack.site()?["hosts"]["a"] == "unreachable")
    })?;
    let remove = ["host", "remove", "a", "--confirm-unreachable"];
    stack.ok("controller", &remove)?;
    stack.ok("controller", &start)?;
    stack.wait_passes("lives", "b", 2)?;
    ensure!(stack.copies("lives")? == 1, "not one copy");
    Ok(())
}

#[test]
fn a_removed_host_that_comes_back_boots_nothing() -> Result<()> {
    let stack = Stack::new("site-removed", &Plan::default())?;
    stack.start_counter(&Counter::small("moved"), "b")?;
    stack.power_off("b")?;
    stack.until("host b is missed", SOON, || {
        Ok(stack.vm("moved")?["state"] == "unreachable")
    })?;
    stack.is_refused(
        "controller",
        &["vm", "start", "moved"],
        &["b", "godwit host fenced b"],
    )?;
    let remove = ["host", "remove", "b", "--confirm-unreachable"];
    stack.ok("controller", &remove)?;
    stack.ok("controller", &["vm", "start", "moved", "--on", "a"])?;
    stack.wait_counts("moved", "a")?;
    stack.start_daemon("b")?;
    stack.until("host b hears that it was removed", SOON, || {
        let listed = stack.json("b", &["vm", "list"])?.to_string();
        Ok(listed.contains("removed from its site"))
    })?;
    ensure!(stack.copies("moved")? == 1, "not one copy");
    stack.wait_passes("moved", "a", 2)
}

#[test]
fn two_hosts_come_up_by_themselves_after_a_power_cut_without_a_controller() -> Result<()> {
    let stack = Stack::new("site-dark", &Plan::default())?;
    stack.start_counter(&Counter::small("one"), "a")?;
    stack.start_counter(&Counter::small("two"), "b")?;
    stack.kill_daemon("controller")?;
    for host in ["a", "b"] {
        stack.power_off(host)?;
    }
    for host in ["a", "b"] {
        stack.start_daemon(host)?;
    }
    for (vm, host) in [("one", "a"), ("two", "b")] {
        stack.until(&format!("VM {vm} runs again"), LONG, || {
            Ok(stack.vm_at(vm, host)?["state"] == "running")
        })?;
        stack.wait_passes(vm, host, 2)?;
        ensure!(stack.copies(vm)? == 1, "not one copy of {vm}");
    }
    stack.start_daemon("controller")?;
    stack.wait_connected()?;
    stack.runs_on("one", "a")?;
    stack.runs_on("two", "b")
}

/// Ends a host's agent and starts it again; the controller's word of a moment ago does not count.
fn agent_begins_anew(stack: &Stack, host: &str) -> Result<()> {
    stack.kill_daemon(host)?;
    stack.until("the controller misses the agent", SOON, || {
        let hosts = stack.json("controller", &["host", "list"])?;
        let mut hosts = hosts.as_array().into_iter().flatten();
        Ok(hosts.any(|of| of["name"] == host && of["state"] != "connected"))
    })?;
    stack.start_daemon(host)?;
    stack.wait_connected()
}

fn is_told_closed(stack: &Stack) -> Result<bool> {
    let site = stack.json("controller", &["site", "show"])?;
    let mut alarms = site["alarms"].as_array().into_iter().flatten();
    Ok(alarms.any(|alarm| alarm["alarm"] == "host-closed" && alarm["host"] == "a"))
}

#[test]
fn guests_of_a_host_that_shut_down_in_order_run_again_when_it_is_back() -> Result<()> {
    let stack = Stack::new("site-close", &Plan::default())?;
    let config = stack.inside("a", HOST_CONFIG)?;
    // A counter guest does not know its power key: only the end of its time ends it.
    let text = std::fs::read_to_string(&config)?;
    std::fs::write(&config, format!("guest_shutdown_s = 2\n{text}"))?;
    agent_begins_anew(&stack, "a")?;
    stack.start_counter(&Counter::small("runs"), "a")?;
    stack.start_counter(&Counter::small("user-off"), "a")?;
    stack.ok("controller", &["vm", "stop", "user-off", "--force"])?;
    stack.wait_state("user-off", "stopped", SOON)?;

    let closed = stack.ok("a", &["host", "close"])?;
    ensure!(
        closed.contains("VM runs did not power off in time"),
        "{closed}"
    );
    ensure!(stack.copies("runs")? == 0, "its guest runs on");
    stack.is_refused("controller", &["vm", "start", "user-off"], &["shuts down"])?;
    stack.until("an alarm names the closed host", SOON, || {
        is_told_closed(&stack)
    })?;
    // An agent that is started anew before the power goes boots nothing either.
    agent_begins_anew(&stack, "a")?;
    stack.is_refused("controller", &["vm", "start", "runs"], &["shuts down"])?;
    ensure!(
        stack.copies("runs")? == 0,
        "it was booted before the host was back"
    );

    stack.power_off("a")?;
    stack.start_daemon("a")?;
    stack.until("what ran is booted", LONG, || {
        Ok(stack.vm_at("runs", "a")?["state"] == "running")
    })?;
    stack.wait_passes("runs", "a", 2)?;
    ensure!(stack.copies("runs")? == 1, "not one copy");
    stack.until("no alarm is left", SOON, || Ok(!is_told_closed(&stack)?))?;
    let off = stack.vm_at("user-off", "a")?;
    ensure!(off["state"] == "stopped", "{off}");
    ensure!(
        stack.copies("user-off")? == 0,
        "a VM that was off was booted"
    );
    Ok(())
}

#[test]
fn a_start_that_fails_after_a_reboot_is_tried_again() -> Result<()> {
    let stack = Stack::new("site-bridge", &Plan::default())?;
    let guest = Counter::small("wired").with("[[nic]]\nport_group = \"vm\"");
    stack.start_counter(&guest, "b")?;
    stack.power_off("b")?;
    let rename = |from: &str, to: &str| {
        let script =
            format!("ip link set {from} down; ip link set {from} name {to}; ip link set {to} up");
        let done = stack
            .machine("b")?
            .command("sh")
            .args(["-c", &script])
            .status()?;
        ensure!(done.success(), "cannot rename {from}");
        Ok(())
    };
    rename("vmbr0", "vmbr9")?;
    stack.start_daemon("b")?;
    stack.wait_connected()?;
    stack.until("the start fails for want of the bridge", SOON, || {
        let vm = stack.vm("wired")?;
        ensure!(vm["state"] != "stopped", "a failed start turned the VM off");
        Ok(vm["state"] == "crashed" && vm.to_string().contains("vmbr0"))
    })?;
    rename("vmbr9", "vmbr0")?;
    stack.until("the VM comes up", LONG, || {
        Ok(stack.vm("wired")?["state"] == "running")
    })?;
    stack.wait_passes("wired", "b", 1)
}

#[test]
fn a_hypervisor_that_dies_is_started_again_whatever_died_with_it() -> Result<()> {
    let stack = Stack::new("site-crash", &Plan::default())?;
    stack.start_counter(&Counter::small("again"), "a")?;
    stack.start_counter(&Counter::small("stays").with("on_crash = \"stay\""), "a")?;
    for (with_process, signal) in [(false, KILL), (true, KILL), (false, TERMINATE)] {
        let before = stack.hypervisors("again", "a")?;
        let [qemu] = before.as_slice() else {
            anyhow::bail!("not one QEMU: {before:?}");
        };
        let machine = stack.machine("a")?;
        if with_process {
            let at = stack.vm_at("again", "a")?;
            let process = at["vm_process_pid"].as_i64().unwrap_or(0);
            machine.kill(i32::try_from(process)?, KILL)?;
        }
        machine.kill(qemu.pid_inside, signal)?;
        stack.until("another QEMU runs the guest", LONG, || {
            let now = stack.hypervisors("again", "a")?;
            ensure!(
                stack.vm("again")?["state"] != "stopped",
                "it is shown as stopped"
            );
            Ok(now.len() == 1 && now[0].pid_inside != qemu.pid_inside)
        })?;
        stack.wait_passes("again", "a", 1)?;
    }
    let stays = stack.hypervisors("stays", "a")?;
    for qemu in &stays {
        stack.machine("a")?.kill(qemu.pid_inside, KILL)?;
    }
    stack.until("the other one is shown as crashed", SOON, || {
        Ok(stack.vm("stays")?["state"] == "crashed")
    })?;
    stack.ok("controller", &["vm", "start", "stays"])?;
    stack.wait_passes("stays", "a", 1)
}
