//! What goes wrong around a move and must not matter: cut links, killed agents, controller and VM processes, Ctrl-C.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, INTERRUPT, KILL, LONG, Link, Plan, SOON, Stack, names};
use serde_json::Value;
use std::cell::RefCell;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One lab for all cases.
static STACK: LazyLock<Mutex<Result<Stack, String>>> = LazyLock::new(|| {
    let stack = Stack::new("faults", &Plan::default());
    Mutex::new(stack.map_err(|error| format!("{error:#}")))
});

fn stack() -> MutexGuard<'static, Result<Stack, String>> {
    STACK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn up(stack: &Result<Stack, String>) -> Result<&Stack> {
    stack.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// A guest whose pages take about five seconds at [`CAP`], and that dirties few of them meanwhile.
fn lasting(name: &str) -> Counter {
    Counter::flat(name, 64).slowed(800_000)
}

/// Cap that makes a move last, Mb/s.
const CAP: [&str; 2] = ["--max-bandwidth", "100"];

/// Reads until that much time has passed that the guest goes on counting: it notices nothing.
fn counts_for(stack: &Stack, vm: &str, host: &str, time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        stack.wait_counts(vm, host)?;
    }
    Ok(())
}

#[test]
fn a_cut_migration_link_is_waited_for() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&lasting("cut"), "a")?;
    for (to, from, silent) in [("b", "a", false), ("a", "b", true)] {
        let id = stack.begin("cut", to, &CAP)?;
        stack.wait_precopy(&id)?;
        match silent {
            true => stack.lab.silence_link(from, Link::Migration)?,
            false => stack.lab.cut_link(from, Link::Migration)?,
        }
        let cut = Instant::now();
        counts_for(stack, "cut", from, Duration::from_secs(5))?;
        let during = stack.migration(&id)?;
        stack.lab.heal_link(from, Link::Migration)?;
        let (cut, healed) = (cut.elapsed(), Instant::now());
        ensure!(during["outcome"].is_null(), "it ended: {during}");
        let report = stack.completed(&id)?;
        println!(
            "  link {} for {:.1} s: done {:.1} s after it healed, {:.1} s in all, switchover {:.0} ms",
            if silent { "silent" } else { "cut" },
            cut.as_secs_f64(),
            healed.elapsed().as_secs_f64(),
            report["total_s"].as_f64().unwrap_or(0.0),
            report["switchover_ms"].as_f64().unwrap_or(0.0)
        );
        stack.runs_on("cut", to)?;
        stack.check_guest("cut", to)?;
    }
    stack.remove("cut")
}

#[test]
fn a_cut_management_network_does_not_stop_a_move() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&lasting("alone"), "a")?;
    let id = stack.begin("alone", "b", &CAP)?;
    stack.wait_precopy(&id)?;
    for host in ["a", "b"] {
        stack.lab.cut_link(host, Link::Management)?;
    }
    let told = stack.ended("b", &id);
    for host in ["a", "b"] {
        stack.lab.heal_link(host, Link::Management)?;
    }
    let told = told?;
    ensure!(told["outcome"] == "completed", "{told}");
    stack.wait_connected()?;
    let report = stack.completed(&id)?;
    ensure!(report["outcome"] == told["outcome"]);
    stack.runs_on("alone", "b")?;
    stack.check_guest("alone", "b")?;
    stack.remove("alone")
}

#[test]
fn killed_daemons_do_not_matter() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&lasting("calm"), "a")?;
    let mut from = "a";
    for daemon in ["a", "b", "controller"] {
        let to = if from == "a" { "b" } else { "a" };
        let id = stack.begin("calm", to, &CAP)?;
        stack.wait_precopy(&id)?;
        stack.kill_daemon(daemon)?;
        stack.wait_counts("calm", from)?;
        if daemon == "controller" {
            let told = stack.ended(to, &id)?;
            ensure!(told["outcome"] == "completed", "{told}");
            let source = stack.ended(from, &id)?;
            ensure!(
                source["id"] == told["id"] && source["side"] == "source",
                "{source}"
            );
            ensure!(told["side"] == "destination", "{told}");
        }
        stack.start_daemon(daemon)?;
        stack.wait_connected()?;
        let report = stack.completed(&id)?;
        println!(
            "  {daemon} killed: {:.1} s in all, switchover {:.0} ms",
            report["total_s"].as_f64().unwrap_or(0.0),
            report["switchover_ms"].as_f64().unwrap_or(0.0)
        );
        stack.runs_on("calm", to)?;
        stack.check_guest("calm", to)?;
        from = to;
    }
    stack.remove("calm")
}

/// The source hears of it only once its agent is back: until then it takes the silence for a broken link.
#[test]
fn a_destination_that_fails_while_the_sources_agent_is_away_leaves_a_vm_that_can_be_moved()
-> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&lasting("left"), "a")?;
    let id = stack.begin("left", "b", &CAP)?;
    stack.wait_precopy(&id)?;
    stack.kill_daemon("a")?;
    let process = stack.vm_at("left", "b")?["vm_process_pid"].as_i64();
    let pid = i32::try_from(process.context("no VM process")?)?;
    stack.machine("b")?.kill(pid, KILL)?;
    stack.ended("b", &id)?;
    stack.wait_state("left", "unreachable", SOON)?;
    stack.start_daemon("a")?;
    stack.wait_connected()?;
    stack.until("the controller knows of no move any more", SOON, || {
        let shown = stack.json("controller", &["vm", "show", "left"])?;
        Ok(shown["migration"].is_null())
    })?;
    stack.ok("controller", &["vm", "pause", "left"])?;
    stack.ok("controller", &["vm", "resume", "left"])?;
    let id = stack.begin("left", "b", &[])?;
    stack.completed(&id)?;
    stack.check_guest("left", "b")?;
    stack.remove("left")
}

#[test]
fn ctrl_c_detaches_and_cancel_cancels() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&lasting("watched"), "a")?;
    let command = ["vm", "migrate", "watched", "--to", "b"];
    let child = stack.spawn("controller", &[&command[..], &CAP].concat())?;
    stack.until("the migration copies", SOON, || {
        let list = stack.json("controller", &["migration", "list"])?;
        let mut list = list.as_array().into_iter().flatten();
        Ok(list.any(|one| one["vm"] == "watched" && one["phase"] == "precopy"))
    })?;
    let pid = i32::try_from(child.id())?;
    let machine = stack.machine("controller")?;
    let process = machine.processes()?;
    let process = process.iter().find(|process| process.pid_outside == pid);
    machine.kill(
        process.context("the command is gone")?.pid_inside,
        INTERRUPT,
    )?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(130), "{output:?}");
    names(
        &said,
        &[
            "the migration continues",
            "godwit migration watch",
            "godwit migration cancel",
        ],
    )?;
    let list = stack.json("controller", &["migration", "list"])?;
    let mut list = list.as_array().into_iter().flatten();
    let id = list
        .find(|one| one["vm"] == "watched")
        .context("no migration")?["id"]
        .clone();
    let id = id.as_str().context("no id")?;
    stack.completed(id)?;
    stack.runs_on("watched", "b")?;

    let id = stack.begin("watched", "a", &CAP)?;
    stack.wait_precopy(&id)?;
    stack.ok("controller", &["migration", "cancel", &id])?;
    let report = stack.ended("controller", &id)?;
    ensure!(report["outcome"] == "cancelled", "{report}");
    stack.runs_on("watched", "b")?;
    stack.check_guest("watched", "b")?;
    let id = stack.begin("watched", "a", &[&CAP[..], &["--deadline", "1"]].concat())?;
    let report = stack.ended("controller", &id)?;
    ensure!(report["outcome"] == "cancelled", "{report}");
    names(report["reason"].as_str().unwrap_or_default(), &["deadline"])?;
    stack.runs_on("watched", "b")?;
    stack.check_guest("watched", "b")?;
    stack.remove("watched")
}

/// The processes of a VM at `a` that runs under another VM process than the old one: QEMU's and the VM process's.
fn processes(stack: &Stack, old: &Value) -> Result<(Value, Value)> {
    let found = RefCell::new((Value::Null, Value::Null));
    stack.until("the VM has a VM process", LONG, || {
        let vm = stack.vm_at("tough", "a")?;
        let fresh = vm["vm_process_pid"].is_i64() && vm["vm_process_pid"] != *old;
        found.replace((vm["qemu_pid"].clone(), vm["vm_process_pid"].clone()));
        Ok(fresh && vm["state"] == "running")
    })?;
    Ok(found.into_inner())
}

#[test]
fn vm_processes_killed_again_and_again() -> Result<()> {
    let stack = stack();
    let stack = up(&stack)?;
    stack.start_counter(&Counter::small("tough"), "a")?;
    let (qemu, mut old) = processes(stack, &Value::Null)?;
    let mut took = Vec::new();
    for round in 1..=5 {
        let pid = i32::try_from(old.as_i64().context("no VM process")?)?;
        stack.machine("a")?.kill(pid, KILL)?;
        let began = Instant::now();
        let (same, fresh) = processes(stack, &old)?;
        took.push(began.elapsed());
        println!("  round {round}: taken over after {:?}", began.elapsed());
        ensure!(same == qemu, "another QEMU");
        stack.wait_passes("tough", "a", 1)?;
        old = fresh;
    }
    // A wait of ours, or one that grows with each death, would be in all of the last ones; a busy machine is not.
    let least = took.iter().skip(2).min().context("five")?;
    ensure!(*least < Duration::from_secs(2), "{took:?}");
    stack.migrate("tough", "b", &[])?;
    stack.runs_on("tough", "b")?;
    stack.check_guest("tough", "b")?;
    stack.remove("tough")
}
