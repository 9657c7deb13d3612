//! What the rules of a site are for: a person's false word, a clone, an old copy of a host that a VM has left, a host that
//! boots alone. Each is played to its end, with what the site has to say meanwhile, and the way out that it names.
//!
//! Owns nothing. A site that says nothing where it must is a violation; a step that cannot be done at the moment is none.

use crate::soak::checks::{Kind, Violation, Whose};
use crate::soak::faults::{Scene, Wish};
use crate::soak::orders::{
    PATIENCE, SILENCE, cancel_all, remove, tell, tell_excused, try_start, wait_state,
};
use crate::soak::plan::{Role, Step};
use crate::soak::site::CLONES;
use crate::stack::Link;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};

/// An alarm comes this soon after the host that it is about was heard.
const ALARM: Duration = Duration::from_secs(5);
/// Longest wait until a host that another machine speaks for says so.
const SAYS: Duration = Duration::from_secs(15);
/// CPU time of each of two copies that shows that both run.
const RUNS: Duration = Duration::from_millis(500);

/// Waits until something is so; whether it came to it.
fn comes(within: Duration, is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + within;
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Whether the site has such an alarm that names this host or VM.
fn alarm(scene: &Scene, kind: &str, of: &str) -> bool {
    let site = scene.site.stack.site().unwrap_or_default();
    let mut alarms = site["alarms"].as_array().into_iter().flatten();
    alarms.any(|alarm| alarm["alarm"] == kind && (alarm["vm"] == of || alarm["host"] == of))
}

/// Whether a host's agent shows a VM in a state, with a note that has these words.
fn at_host(scene: &Scene, host: &str, vm: &str, state: &str, words: &str) -> bool {
    let view = scene.site.ask_host(host, &["vm", "show", vm]);
    let view = view.unwrap_or_default();
    let note = view["note"].as_str().unwrap_or_default();
    view["state"] == state && note.contains(words)
}

/// CPU time that a VM's copy on a host used in this round, as seen from outside.
fn ran(scene: &Scene, vm: &str, host: &str) -> u64 {
    let traces = scene.site.watch.traces();
    let here = traces
        .iter()
        .filter(|one| one.vm == vm && one.host == host && one.gone.is_none());
    let windows = here.flat_map(|one| &one.windows);
    windows.map(|window| window.ran_ns).sum()
}

/// A person says that a host is off while only its cable is out, and starts its VM elsewhere; then keeps one copy.
pub fn false_word(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let holder = scene.runs_at(vm).context("it runs nowhere")?;
    let others = scene.site.others(&holder);
    let to = others.first().context("no other host")?.clone();
    for link in [Link::Management, Link::Migration] {
        scene.site.cut(&holder, link)?;
    }
    let doubled = start_falsely(scene, vm, &holder, &to);
    for link in [Link::Management, Link::Migration] {
        scene.site.heal(&holder, link)?;
    }
    if !doubled? {
        return Ok(());
    }
    let silent = || scene.site.stack.site().unwrap_or_default()["hosts"][&holder] != "connected";
    ensure!(comes(SILENCE, || !silent()), "{holder} is not heard again");
    if !comes(ALARM, || alarm(scene, "running-twice", vm)) {
        let what = format!("hosts {holder} and {to} hold it, {holder} is heard, and no alarm came");
        let violation = Violation::new(Kind::Unsaid, vm, what);
        scene.account.violations.push(violation);
    }
    let keep = if step.for_ms.is_multiple_of(2) {
        holder
    } else {
        to
    };
    let others = qemus_elsewhere(scene, vm, &keep);
    let command = ["vm", "resolve", vm, "--keep", &keep];
    tell_excused(scene, &others, "a person kept another copy", &command)?;
    Ok(())
}

/// The QEMUs of a VM's copies on other hosts than this.
fn qemus_elsewhere(scene: &Scene, vm: &str, keep: &str) -> Vec<Whose> {
    let traces = scene.site.watch.traces();
    let alive = traces
        .iter()
        .filter(|one| one.vm == vm && one.gone.is_none());
    let others = alive.filter(|one| one.host != keep);
    others.map(|one| Whose::Qemu(one.pid)).collect()
}

/// Whether the VM was started on another host while it runs on one that is cut off; then it has run on both.
fn start_falsely(scene: &mut Scene, vm: &str, holder: &str, to: &str) -> Result<bool> {
    wait_state(
        scene,
        vm,
        &["unreachable", "in-doubt", "handing-over"],
        SILENCE,
    )?;
    let fenced = tell(scene, &["host", "fenced", holder, "--yes"])?;
    // Of a word that nobody answered it is not known whether it was taken.
    if fenced.code.is_none_or(|code| code == 0) {
        scene.account.falsely_off.insert(holder.to_owned());
    }
    if fenced.code != Some(0) {
        return Ok(false);
    }
    scene.account.false_words.insert(vm.to_owned());
    let at = scene.site.watch.now();
    let started = try_start(scene, vm, Some(to));
    if matches!(started, Ok(None)) {
        // A word on which nothing was started doubles nothing.
        scene.account.false_words.remove(vm);
        return Ok(false);
    }
    let why = "a person started it elsewhere on a false word";
    scene.excuse(at, None, Whose::Vm(vm.to_owned()), why);
    if started? != Some(Wish::On) {
        return Ok(false);
    }
    let from = [holder, to].map(|host| ran(scene, vm, host));
    let both = |host: &str, from: u64| ran(scene, vm, host) > from + RUNS.as_nanos() as u64;
    let ran = comes(SILENCE, || both(holder, from[0]) && both(to, from[1]));
    if ran {
        scene.account.doubled.insert(vm.to_owned());
    }
    Ok(true)
}

/// A copy of a host's disk is started on another machine, while the host runs.
pub fn clone(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let host = scene.host(vm, step.role)?;
    scene.say(format!("a clone of {host} starts"));
    scene.site.start_clone(&host)?;
    let whole = scene.is_whole();
    let list = || scene.site.ask_host(CLONES, &["vm", "list"]);
    if comes(SAYS, || list().is_ok_and(|list| clone_is_tame(&list))) {
        scene.say("the clone boots nothing, and says so");
        return Ok(());
    }
    let last = list();
    let what = format!("a clone of it does not say that it boots nothing: {last:?}");
    if whole && scene.is_whole() {
        let violation = Violation::new(Kind::Unsaid, &host, what);
        scene.account.violations.push(violation);
    } else {
        scene.say(format!(
            "{what}; something else is broken, so nobody may have answered it"
        ));
    }
    Ok(())
}

/// Whether a clone has said all that it has to. It has nothing to say where its copy holds no VM that runs; while it does
/// not answer it has said nothing.
fn clone_is_tame(list: &Value) -> bool {
    let mut all = list.as_array().into_iter().flatten();
    list.is_array()
        && all.all(|vm| {
            let note = vm["note"].as_str().unwrap_or_default();
            // Nobody would boot one that is off.
            let may_boot = vm["claim"]["claim"] == "holds" && vm["claim"]["on"] != false;
            !may_boot || note.contains("it boots nothing")
        })
}

/// A host that a VM has left gets an older copy of its disk, from when it held the VM. A person takes it out of the site.
pub fn old_left_host(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let host = scene.host(vm, Role::Holder)?;
    let to = scene.host(vm, Role::Destination)?;
    if scene.runs_at(vm).as_ref() == Some(&host) {
        cancel_all(scene, vm)?;
        let is_over = || scene.migrations(vm).is_ok_and(|open| open.is_empty());
        ensure!(comes(PATIENCE, is_over), "the move of {vm} does not end");
        tell(scene, &["vm", "migrate", vm, "--to", &to, "--detach"])?;
    }
    let left = comes(SILENCE, || {
        let elsewhere = scene.runs_at(vm).is_some_and(|now| now != host);
        elsewhere && wait_state(scene, vm, &["running"], Duration::ZERO).is_ok()
    });
    ensure!(left, "{vm} does not leave {host}");
    // A copy of the agent's present life shows only once there were two more.
    for _ in 0..2 {
        scene.site.stack.live_again(&host)?;
    }
    scene.power_cut(step, std::slice::from_ref(&host))?;
    scene.recall(&host);
    scene.site.restore_host(&host)?;
    scene.site.power_on(&host)?;
    if !comes(SAYS, || alarm(scene, "old-copy", &host)) {
        let what = "it stands on an old copy of its disk, and no alarm came";
        let violation = Violation::new(Kind::Unsaid, &host, what);
        scene.account.violations.push(violation);
    }
    // The way out that the alarm names.
    scene.power_cut(step, std::slice::from_ref(&host))?;
    remove(scene, &host)
}

/// A person takes the way out that the alarms about old copies name: the host is powered off, removed, and joins anew with
/// the healing. A site that waits for a person and names no such host is a violation.
pub fn take_out_old_copies(scene: &mut Scene) -> Result<()> {
    let site = scene.site.stack.site()?;
    let hosts = old_copies(&site);
    if hosts.is_empty() {
        let what = "it waits for a person, and no alarm names a host with an old copy";
        let violation = Violation::new(Kind::Unsaid, "site", what);
        scene.account.violations.push(violation);
    }
    for host in hosts {
        scene.say(format!("a person takes {host} out"));
        scene.power_off(std::slice::from_ref(&host))?;
        remove(scene, &host)?;
        scene.account.helped += 1;
    }
    Ok(())
}

/// Hosts that stand on an old copy of their disk, as the site's alarms say.
pub fn old_copies(site: &Value) -> Vec<String> {
    let alarms = site["alarms"].as_array().into_iter().flatten();
    let old = alarms.filter(|alarm| alarm["alarm"] == "old-copy");
    old.filter_map(|alarm| alarm["host"].as_str().map(str::to_owned))
        .collect()
}

/// All power is gone, one host alone comes back, and a person who knows that no other one runs lets it boot.
pub fn boot_alone(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let host = scene.runs_at(vm).context("it runs nowhere")?;
    let hosts = scene.site.hosts.clone();
    scene.site.kill_daemon("controller");
    scene.recall("controller");
    scene.power_cut(step, &hosts)?;
    hosts.iter().for_each(|host| scene.recall(host));
    scene.site.power_on(&host)?;
    let waits = comes(SILENCE, || {
        at_host(scene, &host, vm, "crashed", "godwit host boot-alone")
    });
    ensure!(waits, "{vm} does not wait on {host}");
    let command = ["host", "boot-alone", "--yes"];
    let ran = scene.site.stack.run_within(&host, &command, PATIENCE)?;
    scene.say(format!("boot-alone on {host}: {:?}", ran.code));
    if ran.code == Some(0) && !comes(SILENCE, || at_host(scene, &host, vm, "running", "")) {
        let what = format!("a person was told that it boots on {host} alone, and it does not");
        let violation = Violation::new(Kind::Undone, vm, what);
        scene.account.violations.push(violation);
    }
    scene.wish(vm, Wish::On);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hosts_with_old_copies_are_those_that_the_alarms_name() {
        let alarms = json!({"alarms": [
            {"alarm": "old-copy", "host": "b"},
            {"alarm": "running-twice", "vm": "vm0", "hosts": ["a", "b"]},
        ]});
        assert_eq!(old_copies(&alarms), ["b"]);
        assert!(old_copies(&json!({"alarms": []})).is_empty());
    }

    #[test]
    fn a_clone_that_does_not_answer_has_not_said_that_it_boots_nothing() {
        let vm = |claim: &str, note: &str| json!({"claim": {"claim": claim}, "note": note});
        assert!(!clone_is_tame(&Value::Null));
        assert!(!clone_is_tame(&json!({"error": "it does not answer"})));
        assert!(clone_is_tame(&json!([])));
        assert!(clone_is_tame(&json!([vm("moved", "")])));
        assert!(clone_is_tame(&json!([vm(
            "holds",
            "another machine: it boots nothing"
        )])));
        let one_silent = json!([vm("holds", "it boots nothing"), vm("holds", "")]);
        assert!(
            !clone_is_tame(&one_silent),
            "another VM's note says nothing of this one"
        );
        let off = json!({"claim": {"claim": "holds", "on": false}, "note": null});
        assert!(clone_is_tame(&json!([off])), "nobody would boot it");
    }
}
