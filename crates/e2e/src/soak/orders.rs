//! A person's commands at bad moments.
//!
//! What a command was answered decides what the person may rely on afterwards: exit code 0 is a promise, a refusal
//! changes nothing, anything else leaves it open.

use crate::soak::checks::Whose;
use crate::soak::faults::{Scene, Wish};
use crate::soak::plan::{Order, Role, Step};
use crate::stack::Ran;
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// Exit code of a refusal.
const REFUSED: i32 = 3;
/// Longest wait for something that a person waits for before the next command.
const PATIENCE: Duration = Duration::from_secs(8);
/// Longest wait until a host without power is shown as such.
const SILENCE: Duration = Duration::from_secs(15);

/// Gives the order of a step.
pub fn give(scene: &mut Scene, step: &Step, order: Order, vm: &str) -> Result<()> {
    match order {
        Order::Start => start(scene, vm, None).map(drop),
        Order::StartElsewhere => {
            let third = scene.host(vm, Role::Third)?;
            start(scene, vm, Some(&third)).map(drop)
        }
        Order::Stop => {
            scene.wish(vm, Wish::Unknown);
            tell(scene, &["vm", "stop", vm]).map(drop)
        }
        Order::ForceStop => force_stop(scene, vm).map(drop),
        Order::Restart => restart(scene, vm),
        Order::Migrate => {
            let to = scene.host(vm, step.role)?;
            scene.spawn(&["vm", "migrate", vm, "--to", &to, "--detach"])
        }
        Order::Cancel => {
            for id in scene.migrations(vm)? {
                tell(scene, &["migration", "cancel", &id])?;
            }
            Ok(())
        }
        Order::Recreate => recreate(scene, vm),
        Order::FenceHost => fence_host(scene, step, vm),
        Order::ResolveFenced => resolve_fenced(scene, step, vm),
        Order::RemoveHost => remove_host(scene, step, vm),
        Order::StartWhileAway => start_while_away(scene, step, vm),
    }
}

/// Runs a command and writes down how it ended.
fn tell(scene: &mut Scene, command: &[&str]) -> Result<Ran> {
    let ran = scene.site.person(command)?;
    let said = ran.stderr.trim();
    scene.say(format!("{}: {:?} {said}", command.join(" "), ran.code));
    Ok(ran)
}

/// What a command leaves a person to rely on.
fn outcome(ran: &Ran, done: Wish) -> Option<Wish> {
    match ran.code {
        Some(0) => Some(done),
        Some(REFUSED) => None,
        _ => Some(Wish::Unknown),
    }
}

fn start(scene: &mut Scene, vm: &str, on: Option<&str>) -> Result<bool> {
    let mut command = vec!["vm", "start", vm];
    command.extend(on.iter().flat_map(|host| ["--on", host]));
    let ran = tell(scene, &command)?;
    if let Some(wish) = outcome(&ran, Wish::On) {
        scene.wish(vm, wish);
    }
    Ok(ran.code == Some(0))
}

fn force_stop(scene: &mut Scene, vm: &str) -> Result<bool> {
    scene.excuse(Whose::Vm(vm.to_owned()), "a person forced it off");
    scene.wish(vm, Wish::Unknown);
    let ran = tell(scene, &["vm", "stop", vm, "--force"])?;
    if ran.code == Some(0) {
        scene.wish(vm, Wish::Off);
    }
    Ok(ran.code == Some(0))
}

/// Waits until the controller shows a VM in one of these states.
fn wait_state(scene: &Scene, vm: &str, states: &[&str], within: Duration) -> Result<()> {
    let until = Instant::now() + within;
    loop {
        let state = scene
            .site
            .ask(&["vm", "show", vm])
            .map(|view| view["state"].clone());
        if state
            .as_ref()
            .is_ok_and(|state| states.iter().any(|one| state == one))
        {
            return Ok(());
        }
        ensure!(
            Instant::now() < until,
            "{vm} did not become {states:?}: {state:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn restart(scene: &mut Scene, vm: &str) -> Result<()> {
    if force_stop(scene, vm)? {
        wait_state(scene, vm, &["stopped"], PATIENCE)?;
        start(scene, vm, None)?;
    }
    Ok(())
}

fn recreate(scene: &mut Scene, vm: &str) -> Result<()> {
    if !force_stop(scene, vm)? {
        return Ok(());
    }
    wait_state(scene, vm, &["stopped"], PATIENCE)?;
    scene.wish(vm, Wish::Unknown);
    let file = scene.site.file(vm)?.to_owned();
    if tell(scene, &["vm", "delete", vm])?.code == Some(0) {
        tell(scene, &["vm", "create", &file])?;
        start(scene, vm, None)?;
    }
    Ok(())
}

/// Takes the power of a VM's holder and waits until that is seen. Gives the holder and another host.
fn holder_off(scene: &mut Scene, step: &Step, vm: &str) -> Result<(String, String)> {
    let holder = scene
        .runs_at(vm)
        .map_or_else(|| scene.host(vm, Role::Holder), Ok)?;
    let to = scene.site.others(&holder).into_iter().next();
    scene.power_cut(step, std::slice::from_ref(&holder))?;
    // The power comes back with the healing: not while the person still counts on it.
    scene.recall(&holder);
    wait_state(
        scene,
        vm,
        &["unreachable", "in-doubt", "handing-over"],
        SILENCE,
    )?;
    Ok((holder, to.unwrap_or_default()))
}

/// The host is really off when the person says so.
fn fence_host(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let (holder, to) = holder_off(scene, step, vm)?;
    if tell(scene, &["host", "fenced", &holder, "--yes"])?.code == Some(0) {
        scene.excuse(
            Whose::Vm(vm.to_owned()),
            "a person started it while its host was fenced",
        );
        start(scene, vm, Some(&to))?;
    }
    Ok(())
}

/// The holder is really off when the person says so.
fn resolve_fenced(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let (holder, to) = holder_off(scene, step, vm)?;
    scene.excuse(
        Whose::Vm(vm.to_owned()),
        "a person resolved it while its host was off",
    );
    let command = [
        "vm",
        "resolve",
        vm,
        "--run-on",
        &to,
        "--confirm-fenced",
        &holder,
    ];
    let ran = tell(scene, &command)?;
    if let Some(wish) = outcome(&ran, Wish::On) {
        scene.wish(vm, wish);
    }
    Ok(())
}

/// A host that is really off is removed, and joins again later with an empty disk.
fn remove_host(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let host = scene.host(vm, step.role)?;
    scene.power_cut(step, std::slice::from_ref(&host))?;
    scene.recall(&host);
    let until = Instant::now() + SILENCE;
    while scene.site.ask(&["host", "show", &host])?["state"] != "unreachable" {
        ensure!(
            Instant::now() < until,
            "host {host} is still shown as connected"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let ran = tell(scene, &["host", "remove", &host, "--confirm-unreachable"])?;
    if ran.code == Some(0) {
        scene.site.forget(&host);
        for vm in scene.site.vms.clone() {
            if scene.runs_at(&vm).is_none() {
                scene.wish(&vm, Wish::Unknown);
                start(scene, &vm, None)?;
            }
        }
    }
    Ok(())
}

/// The guest has moved, and nobody who may start it can know that from the destination.
fn start_while_away(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let to = scene.host(vm, Role::Destination)?;
    let third = scene.host(vm, Role::Third)?;
    tell(scene, &["vm", "migrate", vm, "--to", &to, "--detach"])?;
    let until = Instant::now() + PATIENCE;
    // From here on the move needs the destination's VM process, and its agent only to tell of it.
    while !scene.copies(vm) && scene.runs_at(vm).as_ref() != Some(&to) {
        ensure!(
            Instant::now() < until,
            "the move of {vm} to {to} does not begin"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    scene.kill_daemon(step, &to);
    scene.recall(&to);
    while scene.runs_at(vm).as_ref() != Some(&to) {
        ensure!(Instant::now() < until, "{vm} did not come to {to}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let until = Instant::now() + PATIENCE;
    while !start(scene, vm, Some(&third))? && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}
