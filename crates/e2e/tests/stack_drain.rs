//! Emptying a host, predictions and the live view through the whole product: every guest that can move does, with its
//! memory as it was, also when the controller is killed in the middle; the one that cannot runs on and is told why.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::disks::{describe, disk, goes_on_at, image_has_all_at, make_image};
use godwit_e2e::stack::{Counter, HostPlan, LONG, Plan, SOON, Stack};
use serde_json::Value;

/// Guests that can move.
const MOVERS: [&str; 3] = ["one", "two", "three"];
/// The guest whose port group only host b has.
const PINNED: &str = "pinned";

#[test]
fn a_host_is_emptied_although_the_controller_is_killed_in_the_middle() -> Result<()> {
    let only_b = HostPlan {
        join: vec!["--port-group".into(), "odd=vmbr0".into()],
        ..HostPlan::default()
    };
    let plan = Plan {
        hosts: [HostPlan::default(), only_b],
        ..Plan::default()
    };
    let stack = Stack::new("drain", &plan)?;
    for name in MOVERS {
        stack.start_counter(&Counter::small(name).slowed(2000), "b")?;
    }
    let pinned = Counter::small(PINNED).with("[[nic]]\nport_group = \"odd\"");
    stack.start_counter(&pinned.slowed(2000), "b")?;
    a_prediction_says_what_cannot_be_kept(&stack)?;
    a_dry_run_moves_nothing(&stack)?;
    the_drain_survives_the_controller(&stack)?;
    the_live_view_answers_everywhere(&stack)?;
    the_host_takes_vms_again(&stack)
}

#[test]
fn a_host_is_emptied_of_a_vm_whose_disk_only_it_has() -> Result<()> {
    let stack = Stack::new("draindisks", &Plan::default())?;
    let ok = |words: &[&str]| stack.ok("controller", words).map(drop);
    let image = make_image(&stack, "root")?;
    let there = stack.inside("b", &image)?;
    ensure!(!there.exists(), "both hosts have it");
    ok(&["vm", "create", &describe(&stack, "one", &disk(&image))?])?;
    ok(&["vm", "start", "one", "--on", "a"])?;
    goes_on_at(&stack, "one", "a")?;
    ok(&["host", "drain", "a"])?;
    let view = stack.json("controller", &["host", "drain", "a", "--status"])?;
    let vm = step_of(&view, "one")?;
    ensure!(vm["step"] == "moved" && vm["to"] == "b", "{view}");
    stack.runs_on("one", "b")?;
    stack.is_clean("one", "a")?;
    stack.until("the image is gone where the VM was", SOON, || {
        Ok(!stack.inside("a", &image)?.exists())
    })?;
    goes_on_at(&stack, "one", "b")?;
    ok(&["vm", "pause", "one"])?;
    image_has_all_at(&stack, "one", (&image, "b"))?;
    ok(&["vm", "resume", "one"])?;
    goes_on_at(&stack, "one", "b")?;
    stack.remove("one")
}

fn a_prediction_says_what_cannot_be_kept(stack: &Stack) -> Result<()> {
    let dry = ["vm", "migrate", "one", "--to", "a", "--dry-run"];
    let report = stack.could_migrate("one", "a")?;
    let prediction = &report["prediction"];
    let total_s = prediction["total_s"].as_f64().context("no prediction")?;
    ensure!(total_s > 0.0 && total_s < 120.0, "{prediction}");
    let basis = prediction["basis"].as_str().context("no basis")?;
    ensure!(basis.contains("writes measured for"), "{basis}");
    println!("  {basis}");
    // 32 MiB at 8 Mb/s take half a minute.
    let slow = [&dry[..], &["--max-bandwidth", "8", "--deadline", "2"]].concat();
    let ran = stack.run("controller", &[&slow[..], &["--json"]].concat())?;
    ensure!(ran.code == Some(6), "{ran:?}");
    let report: Value = serde_json::from_str(&ran.stdout)?;
    let broken = report["cannot_keep"].as_array().context("nothing broken")?;
    let deadline = broken.iter().any(|one| one["promise"] == "deadline");
    ensure!(deadline, "{report}");
    let must = ["vm", "migrate", "one", "--to", "a", "--max-bandwidth", "8"];
    let must = [&must[..], &["--deadline", "2", "--must-keep"]].concat();
    stack.refused("controller", &must, 6, "cannot-keep")?;
    // The guest goes on as if nobody had looked.
    stack.check_guest("one", "b").map(drop)
}

fn step_of<'a>(view: &'a Value, vm: &str) -> Result<&'a Value> {
    let vms = view["vms"].as_array().context("no VMs")?;
    let found = vms.iter().find(|one| one["vm"] == vm);
    found.with_context(|| format!("VM {vm} is not in {view}"))
}

fn a_dry_run_moves_nothing(stack: &Stack) -> Result<()> {
    let ran = stack.run("controller", &["host", "drain", "b", "--dry-run", "--json"])?;
    ensure!(ran.code == Some(3), "{ran:?}");
    let view: Value = serde_json::from_str(&ran.stdout)?;
    ensure!(view["state"] == "planned", "{view}");
    for name in MOVERS {
        let vm = step_of(&view, name)?;
        ensure!(vm["step"] == "waiting" && vm["to"] == "a", "{vm}");
        stack.vm(name)?;
    }
    is_told_why(&view)?;
    stack.refused(
        "controller",
        &["host", "drain", "b", "--status"],
        4,
        "not-draining",
    )?;
    Ok(())
}

fn is_told_why(view: &Value) -> Result<()> {
    let vm = step_of(view, PINNED)?;
    ensure!(vm["step"] == "cannot-move", "{vm}");
    ensure!(vm["reasons"][0]["code"] == "missing-bridge", "{vm}");
    let why = vm["reasons"][0]["message"].as_str().unwrap_or_default();
    ensure!(why.contains("host a has no port group odd"), "{why}");
    Ok(())
}

fn status(stack: &Stack) -> Result<Value> {
    stack.json("controller", &["host", "drain", "b", "--status"])
}

fn the_drain_survives_the_controller(stack: &Stack) -> Result<()> {
    let begin = ["host", "drain", "b", "--at-once", "1", "--detach"];
    stack.ok("controller", &begin)?;
    stack.until("a VM is on its way", LONG, || {
        let view = status(stack)?;
        let moving = |name| Ok(step_of(&view, name)?["step"] != "waiting");
        let moving: Result<Vec<bool>> = MOVERS.into_iter().map(moving).collect();
        Ok(moving?.contains(&true))
    })?;
    let before = status(stack)?;
    stack.restart_daemon("controller")?;
    ensure!(before["state"] == "draining", "too late to kill: {before}");
    stack.until("nothing is left to move", LONG, || {
        Ok(status(stack)?["state"] == "done")
    })?;
    let view = status(stack)?;
    for name in MOVERS {
        ensure!(step_of(&view, name)?["step"] == "moved", "{view}");
        stack.runs_on(name, "a")?;
        stack.check_guest(name, "a")?;
    }
    is_told_why(&view)?;
    stack.check_guest(PINNED, "b")?;
    let refused = ["vm", "migrate", "one", "--to", "b"];
    stack
        .refused("controller", &refused, 3, "wrong-state")
        .map(drop)
}

fn the_live_view_answers_everywhere(stack: &Stack) -> Result<()> {
    let top = stack.json("controller", &["host", "top", "--once"])?;
    let hosts = top.as_array().context("no hosts")?;
    ensure!(hosts.len() == 2 && hosts[1]["draining"] == true, "{top}");
    for host in hosts {
        let load = &host["load"];
        ensure!(load["cpus"].as_u64().is_some_and(|cpus| cpus > 0), "{host}");
        let links = load["interfaces"].as_array().context("no interfaces")?;
        ensure!(!links.is_empty(), "{host}");
    }
    let text = stack.ok("a", &["host", "top", "--once"])?;
    ensure!(text.contains("No migration is under way"), "{text}");
    Ok(())
}

fn the_host_takes_vms_again(stack: &Stack) -> Result<()> {
    stack.ok("controller", &["host", "undrain", "b"])?;
    let report = stack.migrate("one", "b", &["--deadline", "100"])?;
    ensure!(
        report["prediction"]["total_s"].as_f64().is_some(),
        "{report}"
    );
    let id = report["id"].as_str().context("no id")?;
    let text = stack.ok("controller", &["migration", "show", id])?;
    ensure!(text.contains("s, predicted "), "{text}");
    println!("{text}");
    stack.until("host b is as every other", SOON, || {
        let view = stack.json("controller", &["host", "show", "b"])?;
        Ok(view["draining"] == false)
    })?;
    stack.runs_on("one", "b")?;
    stack.check_guest("one", "b").map(drop)
}
