//! Snapshots of a soak's disks: taken and deleted at bad moments, and gone at a round's end.
//!
//! Owns nothing: which snapshots there are the site says. A VM has as many at most as there are names here, also where
//! a command is carried out long after it was given. Nothing goes back to a snapshot, since that gives up writes which a guest
//! was answered: so every disk has all of them, through whatever images. At a round's end all snapshots are deleted, and all must be
//! merged into one image, which is then read as it lies there, without a word of the product's. Judges: a site at rest on which that does not come to pass.

use crate::soak::checks::{Kind, Violation};
use crate::soak::faults::Scene;
use crate::soak::orders::tell;
use crate::soak::plan::{Round, Step};
use crate::soak::site::Site;
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::interrupt;
use serde_json::Value;
use std::time::{Duration, Instant};

/// What snapshots are called.
const NAMES: [&str; 3] = ["one", "two", "three"];
/// Longest time until the snapshots of a site at rest are deleted and merged: what failed once is tried again after 30 s,
/// and a move of a disk that is under way still ends first.
const MERGED: Duration = Duration::from_secs(100);

/// What a disk's VM is told to have: names of its snapshots, and images that are left to be merged.
struct Told {
    names: Vec<String>,
    unneeded: u64,
    why: String,
}

/// Takes those that a round begins with, of a site on which nothing is broken.
pub fn begin(scene: &mut Scene, round: &Round) -> Result<()> {
    let vm = scene.site.vms.get(round.vm).context("no such VM")?.clone();
    if !scene.site.disks.has(&vm) {
        return Ok(());
    }
    for name in NAMES.iter().take(round.snapshots) {
        take_named(scene, &vm, name)?;
    }
    Ok(())
}

/// Takes one of a VM with a disk.
pub fn take(scene: &mut Scene, vm: &str) -> Result<()> {
    let names = told(scene.site, vm)?.names;
    let free = free(&names).context("it has as many snapshots as it may")?;
    take_named(scene, vm, free)
}

fn take_named(scene: &mut Scene, vm: &str, name: &str) -> Result<()> {
    let ran = tell(scene, &["vm", "snapshot", "create", vm, name])?;
    scene.account.snapshots += u32::from(ran.code == Some(0));
    Ok(())
}

/// Deletes one, whichever the step's own numbers say.
pub fn delete(scene: &mut Scene, step: &Step, vm: &str) -> Result<()> {
    let names = told(scene.site, vm)?.names;
    let name = chosen(&names, step.for_ms).context("it has no snapshot")?;
    tell(scene, &["vm", "snapshot", "delete", vm, name]).map(drop)
}

/// The first name that no snapshot has.
fn free(names: &[String]) -> Option<&'static str> {
    let is_free = |name: &&str| !names.iter().any(|one| one == name);
    NAMES.into_iter().find(is_free)
}

fn chosen(names: &[String], number: u64) -> Option<&str> {
    let count = u64::try_from(names.len()).ok()?;
    let index = usize::try_from(number.checked_rem(count)?).ok()?;
    names.get(index).map(String::as_str)
}

fn told(site: &Site, vm: &str) -> Result<Told> {
    ensure!(site.disks.has(vm), "it has no disk");
    read(&site.ask(&["vm", "snapshot", "list", vm])?)
}

fn read(listed: &Value) -> Result<Told> {
    let all = listed["snapshots"].as_array().context("no snapshots")?;
    let name = |one: &Value| Some(one["name"].as_str()?.to_owned());
    let names: Option<Vec<String>> = all.iter().map(name).collect();
    let unneeded = listed["unneeded_images"].as_u64();
    Ok(Told {
        names: names.context("a snapshot without a name")?,
        unneeded: unneeded.context("no number of images")?,
        why: listed["why_unmerged"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
    })
}

/// A person deletes the snapshots of all VMs of a site at rest, and waits until each disk is one image. Gives what did not come
/// to pass, and what was done.
pub fn tidy(site: &Site) -> (Vec<Violation>, Vec<String>) {
    let (mut found, mut log) = (Vec::new(), Vec::new());
    let until = Instant::now() + MERGED;
    for vm in site.vms.iter().filter(|vm| site.disks.has(vm)) {
        while let Some(left) = delete_all(site, vm, &mut log) {
            if Instant::now() > until || interrupt::caught() {
                let what = format!("its snapshots are not deleted and merged: {left}");
                found.push(Violation::new(Kind::Stuck, vm, what));
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    (found, log)
}

/// Deletes what snapshots a VM has; says what is left. A disk that still moves on its host comes first: by redo logs, or with
/// snapshots, it is more than one image until that has ended.
fn delete_all(site: &Site, vm: &str, log: &mut Vec<String>) -> Option<String> {
    match site.ask(&["vm", "move-disk", vm, "--list"]) {
        Ok(moves) if are_over(&moves) => {}
        Ok(_) => return Some("a disk of it still moves".to_owned()),
        Err(error) => return Some(format!("moves of its disks are not listed: {error:#}")),
    }
    let has = match told(site, vm) {
        Ok(has) => has,
        Err(error) => return Some(format!("they are not listed: {error:#}")),
    };
    let mut left = left_of(&has);
    for name in &has.names {
        let command = ["vm", "snapshot", "delete", vm, name];
        let said = match site.person(&command) {
            Ok(ran) => format!("{:?} {}", ran.code, ran.stderr.trim()),
            Err(error) => format!("{error:#}"),
        };
        let at = site.watch.now() as f64 / 1e9;
        let line = format!("{at:9.3} a person tidies: {}: {said}", command.join(" "));
        left = Some(line.clone());
        log.push(line);
    }
    left
}

fn are_over(moves: &Value) -> bool {
    let mut disks = moves["disks"].as_array().into_iter().flatten();
    moves["disks"].is_array()
        && !disks.any(|disk| disk["state"] == "waiting" || disk["state"] == "copying")
}

/// What is left to be done of what the site says.
fn left_of(told: &Told) -> Option<String> {
    let (names, unneeded, why) = (&told.names, told.unneeded, &told.why);
    let is_done = names.is_empty() && unneeded == 0;
    (!is_done).then(|| format!("{names:?} and {unneeded} images are left: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn listed(names: &[&str], unneeded: u64) -> Value {
        let all: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
        json!({ "snapshots": all, "unneeded_images": unneeded })
    }

    #[test]
    fn a_vm_has_as_many_snapshots_as_there_are_names_and_a_number_says_which_one_goes() {
        let names = |all: &[&str]| read(&listed(all, 0)).unwrap().names;
        assert_eq!(free(&names(&[])), Some("one"));
        assert_eq!(free(&names(&["one", "three"])), Some("two"));
        assert_eq!(free(&names(&NAMES)), None);
        assert_eq!(chosen(&names(&["one", "three"]), 7), Some("three"));
        assert_eq!(chosen(&[], 7), None);
    }

    #[test]
    fn moves_of_disks_are_over_once_the_site_names_none_that_waits_or_copies() {
        let moves = |states: &[&str]| {
            let disks: Vec<Value> = states.iter().map(|one| json!({ "state": one })).collect();
            json!({ "disks": disks })
        };
        assert!(are_over(&moves(&[])) && are_over(&moves(&["moved", "failed", "cancelled"])));
        assert!(!are_over(&moves(&["moved", "copying"])) && !are_over(&moves(&["waiting"])));
        assert!(!are_over(&json!({ "error": "it does not answer" })));
    }

    #[test]
    fn a_disk_is_tidy_once_no_snapshot_and_no_image_of_one_is_left() {
        let left = |names: &[&str], unneeded| left_of(&read(&listed(names, unneeded)).unwrap());
        assert_eq!(left(&[], 0), None);
        assert!(left(&["one"], 0).is_some_and(|what| what.contains("one")));
        assert!(left(&[], 2).is_some_and(|what| what.contains("2 images")));
        assert!(read(&json!({ "error": "it does not answer" })).is_err());
    }
}
