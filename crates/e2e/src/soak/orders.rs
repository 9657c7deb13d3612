//! A person's commands at bad moments.
//!
//! What a command was answered decides what the person may rely on afterwards: exit code 0 is a promise, a refusal
//! changes nothing, anything else leaves it open.

use crate::soak::checks::{Ended, Kind, Violation, Whose};
use crate::soak::faults::{Scene, Wish};
use crate::soak::plan::{Order, Role, Step};
use crate::soak::rules;
use crate::soak::snapshots;
use crate::stack::Ran;
use anyhow::{Context as _, Result, ensure};
use std::time::{Duration, Instant};

/// Exit code of a refusal.
pub const REFUSED: i32 = 3;
/// Longest wait for something that a person waits for before the next command.
pub const PATIENCE: Duration = Duration::from_secs(8);
/// Longest wait until a host without power is shown as such.
pub const SILENCE: Duration = Duration::from_secs(15);

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
        Order::Migrate(method) => {
            let to = scene.host(vm, step.role)?;
            scene.migrate(vm, &to, None, method)
        }
        Order::Cancel => cancel_all(scene, vm),
        Order::Recreate => recreate(scene, vm),
        Order::MoveDisk(method) => scene.move_disk(vm, method),
        Order::TakeSnapshot => snapshots::take(scene, vm),
        Order::DeleteSnapshot => snapshots::delete(scene, step, vm),
        Order::FenceHost => fence_host(scene, step, vm),
        Order::ResolveFenced => resolve_fenced(scene, step, vm),
        Order::FalseWord => rules::false_word(scene, step, vm),
        Order::BootAlone => rules::boot_alone(scene, step, vm),
        Order::RemoveHost => remove_host(scene, step, vm),
        Order::StartWhileAway => start_while_away(scene, step, vm),
    }
}

/// Runs a command and writes down how it ended.
pub fn tell(scene: &mut Scene, command: &[&str]) -> Result<Ran> {
    let ran = scene.site.person(command)?;
    let said = ran.stderr.trim();
    scene.say(format!("{}: {:?} {said}", command.join(" "), ran.code));
    scene.account.unanswered |= ran.code.is_none();
    scene.account.in_vain += u32::from(ran.code != Some(0));
    scene.account.refused += u32::from(ran.code == Some(REFUSED));
    Ok(ran)
}

/// The same, of a command that ends a guest: it excuses that, unless it was refused.
pub fn tell_excused(
    scene: &mut Scene,
    whose: &[Whose],
    why: &'static str,
    command: &[&str],
) -> Result<Ran> {
    let at = scene.site.watch.now();
    let ran = tell(scene, command)?;
    let answered = scene.site.watch.now();
    if let Some(until) = excused(ran.code, answered) {
        for whose in whose {
            scene.excuse(at, until, whose.clone(), why);
        }
    }
    Ok(ran)
}

/// Until when a command that was answered so explains an end: not at all after a refusal, at any time while nobody knows
/// whether it was carried out.
fn excused(code: Option<i32>, answered: u64) -> Option<Option<u64>> {
    match code {
        Some(REFUSED) => None,
        Some(0) => Some(Some(answered)),
        _ => Some(None),
    }
}

/// Cancels what is under way of a VM.
pub fn cancel_all(scene: &mut Scene, vm: &str) -> Result<()> {
    for id in scene.migrations(vm)? {
        if tell(scene, &["migration", "cancel", &id])?.code == Some(0) {
            scene.account.cancelled.insert(id);
        }
    }
    Ok(())
}

/// What a command leaves a person to rely on.
fn outcome(ran: &Ran, done: Wish) -> Option<Wish> {
    match ran.code {
        Some(0) => Some(done),
        Some(REFUSED) => None,
        _ => Some(Wish::Unknown),
    }
}

/// `vm start`; whether it was done.
pub fn start(scene: &mut Scene, vm: &str, on: Option<&str>) -> Result<bool> {
    Ok(try_start(scene, vm, on)? == Some(Wish::On))
}

/// `vm start`; what may have come of it, none if it was refused.
pub fn try_start(scene: &mut Scene, vm: &str, on: Option<&str>) -> Result<Option<Wish>> {
    let mut command = vec!["vm", "start", vm];
    command.extend(on.iter().flat_map(|host| ["--on", host]));
    let ran = tell(scene, &command)?;
    let wish = outcome(&ran, Wish::On);
    if let Some(wish) = wish {
        scene.wish(vm, wish);
    }
    Ok(wish)
}

fn force_stop(scene: &mut Scene, vm: &str) -> Result<bool> {
    let asked = scene.site.watch.now();
    let (whose, why) = ([Whose::Vm(vm.to_owned())], "a person forced it off");
    let ran = tell_excused(scene, &whose, why, &["vm", "stop", vm, "--force"])?;
    if let Some(wish) = outcome(&ran, Wish::Off) {
        scene.wish(vm, wish);
    }
    if ran.code == Some(0) {
        scene.account.ended.push(Ended {
            vm: vm.to_owned(),
            asked,
            answered: scene.site.watch.now(),
        });
    }
    Ok(ran.code == Some(0))
}

/// Waits until the controller shows a VM in one of these states.
pub fn wait_state(scene: &Scene, vm: &str, states: &[&str], within: Duration) -> Result<()> {
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

/// A VM that has a disk is described with it where it is, and starts there.
fn recreate(scene: &mut Scene, vm: &str) -> Result<()> {
    let home = match scene.site.disks.has(vm) {
        true => Some(scene.runs_at(vm).context("it runs nowhere")?),
        false => None,
    };
    if !force_stop(scene, vm)? {
        return Ok(());
    }
    wait_state(scene, vm, &["stopped"], PATIENCE)?;
    scene.wish(vm, Wish::Unknown);
    let file = match &home {
        Some(home) => {
            let path = scene.site.image_at(vm, home).context("it has no image")?;
            scene.site.describe_with_disk(vm, &path)?
        }
        None => scene.site.file(vm)?.to_owned(),
    };
    if tell(scene, &["vm", "delete", vm])?.code == Some(0) {
        tell(scene, &["vm", "create", &file])?;
        start(scene, vm, home.as_deref())?;
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
    if tell(scene, &["host", "fenced", &holder, "--yes"])?.code != Some(0) {
        return Ok(());
    }
    if scene.site.disks.has(vm) {
        start_away(scene, vm, Some(&to))
    } else {
        start(scene, vm, Some(&to)).map(drop)
    }
}

/// The host that alone has a VM's disk is off: the VM is started nowhere else, and the site says why. Where a move had gone so far
/// that another host has the whole disk, that one may start it.
fn start_away(scene: &mut Scene, vm: &str, to: Option<&str>) -> Result<()> {
    let on = scene
        .site
        .hosts
        .iter()
        .filter(|host| scene.site.is_on(host));
    let mut may = on.filter(|host| to.is_none_or(|to| to == host.as_str()));
    let may_be_there = may.any(|host| scene.site.image_at(vm, host).is_some());
    let is_settled = scene.migrations(vm)?.is_empty();
    let mut command = vec!["vm", "start", vm];
    command.extend(to.iter().flat_map(|host| ["--on", host]));
    let ran = scene.site.person(&command)?;
    let said = ran.stderr.trim().to_owned();
    scene.say(format!("{}: {:?} {said}", command.join(" "), ran.code));
    scene.account.unanswered |= ran.code.is_none();
    let wrong = match ran.code {
        Some(0) if !may_be_there => (Kind::Undone, "it was started away from its disk"),
        Some(REFUSED) if is_settled && !said.contains("disk") => {
            (Kind::Unsaid, "nothing says that it stays with its disk")
        }
        _ => return Ok(()),
    };
    let violation = Violation::new(wrong.0, vm, format!("{}: {said}", wrong.1));
    scene.account.violations.push(violation);
    Ok(())
}

/// The holder is really off when the person says so.
fn resolve_fenced(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let (holder, to) = holder_off(scene, step, vm)?;
    let (whose, why) = (
        [Whose::Vm(vm.to_owned())],
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
    let ran = tell_excused(scene, &whose, why, &command)?;
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
    remove(scene, &host)
}

/// Takes a host without power out of the site, for good.
pub fn remove(scene: &mut Scene, host: &str) -> Result<()> {
    let until = Instant::now() + SILENCE;
    while scene.site.ask(&["host", "show", host])?["state"] != "unreachable" {
        ensure!(
            Instant::now() < until,
            "host {host} is still shown as connected"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let ran = tell(scene, &["host", "remove", host, "--confirm-unreachable"])?;
    if ran.code == Some(0) {
        scene.site.forget(host);
        for vm in scene.site.vms.clone() {
            if scene.runs_at(&vm).is_none() {
                scene.wish(&vm, Wish::Unknown);
                let was_here = scene.site.watch.last_host(&vm).as_deref() == Some(host);
                if was_here && scene.site.disks.has(&vm) {
                    start_away(scene, &vm, None)?;
                } else {
                    start(scene, &vm, None)?;
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_command_excuses_nothing() {
        assert_eq!(excused(Some(REFUSED), 7), None);
        assert_eq!(excused(Some(0), 7), Some(Some(7)));
        assert_eq!(excused(None, 7), Some(None), "it may be carried out later");
        assert_eq!(excused(Some(1), 7), Some(None));
    }
}
