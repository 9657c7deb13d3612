//! Waits until a healed site has come to rest, helps as a person would, and checks what it came to.
//!
//! Rest means: each VM runs in exactly one QEMU, seen from outside, on the host that the controller's list names, and no
//! migration is under way. The checks use the guests' memory, the processes that the system lists and the agents' records.

use crate::soak::checks::{Kind, Violation, doublings, unexplained};
use crate::soak::disks::{self, path_in};
use crate::soak::faults::{Account, Wish};
use crate::soak::site::{CLONES, Site};
use anyhow::{Context as _, Result};
use godwit_testkit::guest::checker;
use godwit_testkit::interrupt;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::time::{Duration, Instant};

/// Longest time until a healed site is at rest; a source that is lost is given up after 75 s.
const REST: Duration = Duration::from_secs(100);
/// The same where a person is needed anyway.
const REST_WITHOUT: Duration = Duration::from_secs(25);
/// How long a VM that runs twice is left to do so.
const TWICE: Duration = Duration::from_secs(12);
/// How long a VM is seen in a state before a person helps.
const HELP_AFTER: Duration = Duration::from_secs(4);
/// How long rest must last.
const STANDS: Duration = Duration::from_millis(300);
/// The same where a command may still be carried out that nobody answered: it reaches its host when that is reached again, and a
/// move asks both hosts before it begins.
const STANDS_UNANSWERED: Duration = Duration::from_secs(15);
/// Longest wait for what follows from rest: traces of a move that are cleaned up, a record that is written, an older record
/// whose host was refused a boot and asks again at the latest after 20 s.
const SOON: Duration = Duration::from_secs(30);
/// Longest time of a move on a healed site.
const MOVE: Duration = Duration::from_secs(40);

/// How a round's site came to rest.
pub enum Rest {
    /// With each VM on this host.
    At(BTreeMap<String, String>),
    /// It did not, for the reason given.
    Not(String),
}

/// A VM on the way to rest.
#[derive(Default)]
struct Seen {
    state: String,
    since: Option<Instant>,
    helped: Option<Instant>,
}

/// A site that comes to rest.
pub struct Settling<'a> {
    site: &'a Site,
    account: &'a mut Account,
    seen: BTreeMap<String, Seen>,
    /// What was found on the way.
    pub violations: Vec<Violation>,
}

impl<'a> Settling<'a> {
    pub fn new(site: &'a Site, account: &'a mut Account) -> Self {
        Self {
            site,
            account,
            seen: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    fn say(&mut self, what: impl AsRef<str>) {
        let at = self.site.watch.now() as f64 / 1e9;
        self.account.log.push(format!("{at:9.3} {}", what.as_ref()));
    }

    pub fn rest(&mut self) -> Result<Rest> {
        let began = Instant::now();
        let within = if self.account.needs_person {
            REST_WITHOUT
        } else {
            REST
        };
        let stands = stands(self.account.unanswered);
        let mut since: Option<Instant> = None;
        let mut last = String::new();
        loop {
            let homes = self.look(began, &mut last);
            since = homes.as_ref().and(since.or_else(|| Some(Instant::now())));
            if let (Some(homes), Some(since)) = (homes, since)
                && since.elapsed() > stands
            {
                return Ok(Rest::At(homes));
            }
            // Two that run do not become one by waiting; what the lists then say is worth a while.
            let found = doublings(&self.site.watch.traces());
            let unexplained = unexplained(found, &self.account.false_words, &BTreeSet::new());
            let twice = began.elapsed() > TWICE && !unexplained.is_empty();
            let never = began.elapsed() > within || interrupt::caught();
            if never || (twice && last.contains("QEMUs")) {
                return Ok(Rest::Not(last));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Where each VM runs, if all do and every host has answered since `healed`; `why` says what is missing.
    fn look(&mut self, healed: Instant, why: &mut String) -> Option<BTreeMap<String, String>> {
        let (hosts, list) = match (
            self.site.ask(&["host", "list"]),
            self.site.ask(&["vm", "list"]),
        ) {
            (Ok(hosts), Ok(list)) => (hosts, list),
            (Err(error), _) | (_, Err(error)) => {
                *why = format!("the controller does not answer: {error:#}");
                return None;
            }
        };
        let connected = hosts
            .as_array()
            .into_iter()
            .flatten()
            .filter(|host| host["state"] == "connected" && heard_since(host, healed.elapsed()));
        if connected.count() < self.site.hosts.len() {
            *why = "a host is not connected, or has not answered since the healing".to_owned();
            return None;
        }
        // One that reads its hosts first grants nothing, and says so.
        match self.site.ask(&["site", "show"]) {
            Ok(site) if site["in_charge"] == true => {}
            said => {
                *why = format!("the controller is not in charge: {said:?}");
                return None;
            }
        }
        let mut homes = BTreeMap::new();
        for vm in self.site.vms.clone() {
            let mut all = list.as_array().into_iter().flatten();
            let view = all
                .find(|view| view["spec"]["name"] == vm.as_str())
                .unwrap_or(&Value::Null);
            match self.at_rest(&vm, view) {
                Ok(host) => drop(homes.insert(vm, host)),
                Err(what) => {
                    *why = format!(
                        "{vm}: {what}; shown as {} with note {}",
                        view["state"], view["note"]
                    )
                }
            }
        }
        (homes.len() == self.site.vms.len()).then_some(homes)
    }

    fn at_rest(&mut self, vm: &str, view: &Value) -> Result<String, String> {
        let state = view["state"].as_str().unwrap_or("deleted");
        let traces = self.site.watch.traces();
        let alive: Vec<_> = traces
            .iter()
            .filter(|one| one.vm == vm && one.gone.is_none())
            .collect();
        self.help(vm, state, alive.is_empty());
        if state != "running" {
            return Err("it does not run".to_owned());
        }
        let [one] = alive.as_slice() else {
            return Err(format!("{} QEMUs", alive.len()));
        };
        if view["host"] != one.host.as_str() || !view["migration"].is_null() {
            return Err(format!(
                "shown on {} with migration {}, runs on {}",
                view["host"], view["migration"], one.host
            ));
        }
        if one.runs(self.site.watch.now()) {
            Ok(one.host.clone())
        } else {
            Err("its vCPU does not run".to_owned())
        }
    }

    /// Does what a person does about a VM that stays as it is.
    fn help(&mut self, vm: &str, state: &str, nothing_runs: bool) {
        let seen = self.seen.entry(vm.to_owned()).or_default();
        if seen.state != state {
            seen.state = state.to_owned();
            seen.since = Some(Instant::now());
        }
        let long = seen.since.is_some_and(|since| since.elapsed() > HELP_AFTER);
        let again = seen
            .helped
            .is_none_or(|helped| helped.elapsed() > HELP_AFTER);
        if !long || !again {
            return;
        }
        seen.helped = Some(Instant::now());
        let wish = self.account.wishes.get(vm).copied().unwrap_or(Wish::On);
        match (state, wish) {
            ("running", Wish::Off) => {
                let what = "a person was told that it is off, and it runs";
                self.violations.push(Violation::new(Kind::Undone, vm, what));
                self.account.wishes.insert(vm.to_owned(), Wish::On);
            }
            ("stopped" | "deleted", Wish::On) if self.account.wishes.contains_key(vm) => {
                let what = format!("a person was told that it is on, and it is {state}");
                self.violations.push(Violation::new(Kind::Undone, vm, what));
                self.start(vm, state, "undone");
            }
            ("stopped" | "deleted", Wish::Off | Wish::Unknown) => {
                self.start(vm, state, "wanted off")
            }
            ("stopped" | "deleted" | "crashed", _) => {
                self.account.helped += 1;
                self.start(
                    vm,
                    state,
                    if nothing_runs {
                        "down"
                    } else {
                        "shown as down"
                    },
                );
            }
            ("running-twice", _) if self.account.false_words.contains(vm) => {
                self.account.helped += 1;
                self.keep_running(vm);
            }
            ("paused" | "panicked", _) => {
                self.account.helped += 1;
                self.tell(&["vm", "resume", vm]);
            }
            _ => {}
        }
    }

    /// Of a VM that is held twice a person keeps the copy that runs.
    fn keep_running(&mut self, vm: &str) {
        let traces = self.site.watch.traces();
        let alive = traces
            .iter()
            .filter(|one| one.vm == vm && one.gone.is_none());
        let last = alive.max_by_key(|one| one.windows.last().map(|window| window.to));
        if let Some(one) = last {
            self.tell(&["vm", "resolve", vm, "--keep", &one.host]);
        }
    }

    fn start(&mut self, vm: &str, state: &str, why: &str) {
        self.say(format!("{vm} is {state} ({why})"));
        if self.site.disks.has(vm) {
            self.start_with_disk(vm, state);
        } else {
            if state == "deleted" {
                let file = self.site.file(vm).map(str::to_owned).unwrap_or_default();
                self.tell(&["vm", "create", &file]);
            }
            self.tell(&["vm", "start", vm]);
        }
        self.account.wishes.remove(vm);
    }

    /// Where a disk is that its host alone has, a person knows who has read the lists: on the host where the VM ran last.
    fn start_with_disk(&mut self, vm: &str, state: &str) {
        if state != "deleted" && self.tell(&["vm", "start", vm]) {
            return;
        }
        let at = self.site.watch.last_host(vm);
        let at = at.and_then(|host| Some((self.site.image_at(vm, &host)?, host)));
        let Some((path, host)) = at else {
            return self.say(format!("nobody has an image of {vm}"));
        };
        let view = self.site.ask(&["vm", "show", vm]).unwrap_or_default();
        if path_in(&view) != path.to_str() {
            let file = self.site.describe_with_disk(vm, &path);
            let file = file.unwrap_or_default();
            match state {
                "deleted" => self.tell(&["vm", "create", &file]),
                _ => self.tell(&["vm", "edit", vm, &file]),
            };
        }
        self.tell(&["vm", "start", vm, "--on", &host]);
    }

    /// Whether it was done.
    fn tell(&mut self, command: &[&str]) -> bool {
        let (said, is_done) = match self.site.person(command) {
            Ok(ran) => (
                format!("{:?} {}", ran.code, ran.stderr.trim()),
                ran.code == Some(0),
            ),
            Err(error) => (format!("{error:#}"), false),
        };
        self.say(format!("a person helps: {}: {said}", command.join(" ")));
        is_done
    }
}

/// Whether a host has answered within this time, by a list that tells whole seconds: a question that was on its way when its
/// link was cut may fail seconds after that was healed.
fn heard_since(host: &Value, within: Duration) -> bool {
    let ago = host["last_seen_s"].as_i64().unwrap_or(i64::MAX);
    u64::try_from(ago.saturating_add(1)).is_ok_and(|ago| Duration::from_secs(ago) <= within)
}

/// How long rest must last.
fn stands(unanswered: bool) -> Duration {
    if unanswered {
        STANDS_UNANSWERED
    } else {
        STANDS
    }
}

/// Checks a site at rest; each VM is where `homes` says.
pub fn inspect(site: &Site, homes: &BTreeMap<String, String>) -> Vec<Violation> {
    let mut found = Vec::new();
    for (vm, home) in homes {
        found.extend(
            soon(|| holders(site, vm, home)).map(|what| Violation::new(Kind::Holders, vm, what)),
        );
        let inspected = memory_and_disk(site, vm, home, &mut found);
        found.extend(inspected.err().map(|error| {
            // What follows the first line are logs, which are kept anyway.
            let error = format!("{error:#}");
            let error = error.lines().next().unwrap_or_default();
            Violation::new(Kind::Lost, vm, format!("its memory on {home}: {error}"))
        }));
    }
    for host in &site.hosts {
        found.extend(
            soon(|| disks::left_over(site, host, homes))
                .map(|what| Violation::new(Kind::LeftOver, host, what)),
        );
    }
    for host in site.hosts.iter().chain([&CLONES.to_owned()]) {
        found.extend(
            soon(|| left_over(site, host, homes))
                .map(|what| Violation::new(Kind::LeftOver, host, what)),
        );
    }
    found
}

/// What a person was told of moves, on a site at rest: what began has ended, what was cancelled was not done.
pub fn moves(site: &Site, account: &Account) -> Vec<Violation> {
    if account.forgot {
        return Vec::new();
    }
    let told = account.begun.union(&account.cancelled);
    let broken = |id: &String| {
        let what = soon(|| {
            let report = site.ask(&["migration", "show", id]).ok()?;
            broken_word(&report, account.cancelled.contains(id))
        })?;
        Some(Violation::new(Kind::Undone, id, what))
    };
    told.filter_map(broken).collect()
}

/// What is wrong with the report of a move that a person began, or cancelled.
fn broken_word(report: &Value, cancelled: bool) -> Option<String> {
    let outcome = &report["outcome"];
    if outcome.is_null() || outcome == "in-doubt" {
        return Some(format!("all VMs are at rest, and its outcome is {outcome}"));
    }
    let done = cancelled && outcome == "completed";
    done.then(|| "a person was told that it is cancelled, and it is completed".to_owned())
}

/// A site that waits for a person says of no VM that it runs while nothing runs it.
pub fn down_and_shown(site: &Site) -> Vec<Violation> {
    let wrong = || {
        let list = match site.ask(&["vm", "list"]) {
            Ok(list) => list,
            Err(error) => {
                return Some(("site".into(), format!("no list of what waits: {error:#}")));
            }
        };
        let traces = site.watch.traces();
        let runs = traces.iter().filter(|one| one.gone.is_none());
        shown_as_running(&list, &runs.map(|one| one.vm.as_str()).collect())
    };
    // A list is a few seconds behind.
    let still = soon(|| wrong().map(|_| String::new())).and_then(|_| wrong());
    let violation = |(vm, what): (String, String)| Violation::new(Kind::WrongList, &vm, what);
    still.map(violation).into_iter().collect()
}

/// A VM that is shown as running while no QEMU of it lives.
fn shown_as_running(list: &Value, live: &BTreeSet<&str>) -> Option<(String, String)> {
    let mut all = list.as_array().into_iter().flatten();
    let name = |view: &Value| view["spec"]["name"].as_str().unwrap_or_default().to_owned();
    let wrong = all.find(|view| view["state"] == "running" && !live.contains(name(view).as_str()));
    wrong.map(|view| {
        (
            name(view),
            "shown as running, and nothing runs it".to_owned(),
        )
    })
}

/// What is still wrong when time is up.
fn soon(wrong: impl Fn() -> Option<String>) -> Option<String> {
    let until = Instant::now() + SOON;
    loop {
        let what = wrong()?;
        if Instant::now() > until || interrupt::caught() {
            return Some(what);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn holders(site: &Site, vm: &str, home: &str) -> Option<String> {
    let mut holders = Vec::new();
    for host in &site.hosts {
        let known = match site.ask_host(host, &["vm", "list"]) {
            Ok(known) => known,
            Err(error) => return Some(format!("the agent of {host} does not say: {error:#}")),
        };
        let mut known = known.as_array().into_iter().flatten();
        let Some(one) = known.find(|one| one["spec"]["name"] == vm) else {
            continue;
        };
        if !one["migration"].is_null() {
            let id = &one["migration"];
            return Some(format!(
                "{host} moves it in {id}, and the controller does not say so"
            ));
        }
        if one["claim"]["claim"] == "holds" {
            holders.push(host.as_str());
        }
    }
    (holders != [home]).then(|| format!("it runs on {home} and is held by {holders:?}"))
}

/// Pauses a guest, checks all its pages and its disk, and lets it go on. What is wrong with the disk is `found`.
fn memory_and_disk(site: &Site, vm: &str, home: &str, found: &mut Vec<Violation>) -> Result<()> {
    site.stack.wait_counts(vm, home)?;
    site.stack.ok("controller", &["vm", "pause", vm])?;
    let file = site.stack.ram_file(vm, home);
    let checked = file.and_then(|file| Ok(checker::check(&File::open(file)?)?));
    if site.disks.has(vm) {
        found.extend(disks::writes(site, vm, home));
    }
    site.stack.ok("controller", &["vm", "resume", vm])?;
    let checked = checked?;
    anyhow::ensure!(
        checked.control.boots == 1,
        "it booted {} times in it",
        checked.control.boots
    );
    Ok(())
}

/// QEMUs, memory and taps on a host beside those of the VMs that run there.
fn left_over(site: &Site, host: &str, homes: &BTreeMap<String, String>) -> Option<String> {
    let here: Vec<&String> = homes
        .iter()
        .filter(|(_, home)| *home == host)
        .map(|(vm, _)| vm)
        .collect();
    let count = || -> Result<(usize, usize, usize)> {
        let processes = site.stack.machine(host)?.processes()?;
        let qemus = processes
            .iter()
            .filter(|one| one.command_line.contains("qemu-system"));
        let mut files = 0;
        for vm in &site.vms {
            files += site.stack.ram_files(vm, host)?.len();
        }
        Ok((qemus.count(), files, taps(site, host)?))
    };
    // The first VM is the one with a network card.
    let nics = here
        .iter()
        .filter(|vm| Some(**vm) == site.vms.first())
        .count();
    let want = (here.len(), here.len(), nics);
    match count() {
        Ok(seen) if seen == want => None,
        Ok(seen) => Some(format!(
            "(QEMUs, RAM files, taps) are {seen:?} instead of {want:?} on {host}"
        )),
        Err(error) => Some(format!("{error:#}")),
    }
}

fn taps(site: &Site, host: &str) -> Result<usize> {
    let mut command = site.stack.machine(host)?.command("ls");
    let output = command.arg("/sys/class/net").output()?;
    let names = String::from_utf8_lossy(&output.stdout);
    Ok(names
        .split_whitespace()
        .filter(|name| name.starts_with("gw"))
        .count())
}

/// Moves a VM of a healthy site, and says where it is afterwards.
pub fn move_once(site: &Site, vm: &str, home: &str) -> Result<String> {
    let to = site
        .others(home)
        .into_iter()
        .next()
        .context("no other host")?;
    let begun = site.stack.json_within(
        "controller",
        &["vm", "migrate", vm, "--to", &to, "--detach"],
        MOVE,
    )?;
    let id = begun["id"].as_str().context("no id")?;
    let until = Instant::now() + MOVE;
    loop {
        let report = site.ask(&["migration", "show", id])?;
        if report["outcome"] == "completed" {
            return Ok(to);
        }
        let open = report["outcome"].is_null() || report["outcome"] == "in-doubt";
        anyhow::ensure!(
            open,
            "move of {vm} to {to}: {}: {}",
            report["outcome"],
            report["reason"]
        );
        anyhow::ensure!(
            Instant::now() < until,
            "move of {vm} to {to} does not end: {report}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_move_that_was_called_cancelled_and_was_done_breaks_a_word() {
        let report = |outcome: Value| json!({ "outcome": outcome });
        let completed = report("completed".into());
        assert!(broken_word(&completed, true).is_some_and(|what| what.contains("cancelled")));
        assert_eq!(broken_word(&completed, false), None);
        assert_eq!(broken_word(&report("cancelled".into()), true), None);
        assert_eq!(broken_word(&report("failed".into()), true), None);
        for open in [Value::Null, "in-doubt".into()] {
            assert!(
                broken_word(&report(open.clone()), false).is_some(),
                "{open}"
            );
        }
    }

    #[test]
    fn a_host_that_was_heard_before_the_healing_alone_is_not_heard_yet() {
        let host = |ago: Value| json!({ "last_seen_s": ago });
        let heard = |ago: i64, ms| heard_since(&host(ago.into()), Duration::from_millis(ms));
        assert!(!heard(0, 900) && heard(0, 1000));
        assert!(!heard(2, 2900) && heard(2, 3000));
        assert!(!heard_since(&host(Value::Null), Duration::from_secs(60)));
    }

    #[test]
    fn a_vm_that_waits_for_a_person_and_is_shown_as_running_is_found() {
        let list = json!([
            {"spec": {"name": "vm0"}, "state": "running"},
            {"spec": {"name": "vm1"}, "state": "crashed"},
        ]);
        assert_eq!(shown_as_running(&list, &BTreeSet::from(["vm0"])), None);
        let found = shown_as_running(&list, &BTreeSet::new());
        assert_eq!(found.map(|(vm, _)| vm).as_deref(), Some("vm0"));
    }
}
