//! Does to the site what a round's plan says, and keeps account of it: what it excuses, and what a person was told.
//!
//! Owns a round's [`Account`] while it is played. A step that cannot be done at the moment (its process is not there, its
//! command is refused) is written down and is no failure: the site is being broken.

use crate::soak::checks::{Ended, Excuse, Violation, Whose};
use crate::soak::disks::{path_in, store_of};
use crate::soak::orders;
use crate::soak::plan::{Act, Cut, Method, Part, Place, Role, Round, Step};
use crate::soak::rules;
use crate::soak::site::Site;
use crate::soak::snapshots;
use crate::stack::{CONTINUE, KILL, Link, STOP, STORES, signal};
use anyhow::{Context as _, Result};
use godwit_testkit::interrupt;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Child;
use std::time::{Duration, Instant};

/// Shortest time from a round's begin to its healing: its move has gone some way.
const SHORTEST: Duration = Duration::from_secs(4);

/// Longest wait for the round's VM to leave its host.
const LEAVES: Duration = Duration::from_secs(5);

/// What a person wants of a VM, as far as the site said that it is so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    On,
    /// It is off, and the command that did it said that it was done.
    Off,
    /// A command's outcome is not known, or a restored copy may have forgotten it.
    Unknown,
}

/// What a round did.
#[derive(Debug, Default)]
pub struct Account {
    /// Reasons for guests to begin anew.
    pub excuses: Vec<Excuse>,
    /// VMs that commands were about; the others run.
    pub wishes: BTreeMap<String, Wish>,
    /// Whether a VM may stay down, shown as such, until a person acts.
    pub needs_person: bool,
    /// Everything, with times, for the reader.
    pub log: Vec<String>,
    /// VMs that a person's false word may run twice.
    pub false_words: BTreeSet<String>,
    /// Hosts that a person said to be off, and that were not.
    pub falsely_off: BTreeSet<String>,
    /// Those VMs that certainly ran twice.
    pub doubled: BTreeSet<String>,
    /// What the site did not say where it had to.
    pub violations: Vec<Violation>,
    /// Times at which a person had to help.
    pub helped: u32,
    /// Commands that ended a guest, as a person was told.
    pub ended: Vec<Ended>,
    /// Migrations that began, as a person was told.
    pub begun: BTreeSet<String>,
    /// Migrations that a person cancelled, and was told so.
    pub cancelled: BTreeSet<String>,
    /// Whether the controller forgot something, as its database is an older one.
    pub forgot: bool,
    /// Faults that were carried out to their end, with every command that they gave.
    pub in_full: BTreeSet<&'static str>,
    /// Commands that did not end with exit code 0.
    pub in_vain: u32,
    /// Those of them that were refused.
    pub refused: u32,
    /// Snapshots that were taken, as a person was told.
    pub snapshots: u32,
    /// Disks that were held against what their guests were answered.
    pub disks_checked: usize,
    /// Whether a command was given that nobody answered: it may be carried out at any time.
    pub unanswered: bool,
}

/// A round that is being played.
pub struct Scene<'a> {
    pub site: &'a mut Site,
    /// What was done so far.
    pub account: Account,
    /// Where the VMs were when it began.
    pub homes: BTreeMap<String, String>,
    moving: usize,
    destination: usize,
    began: Instant,
    running: Vec<(String, Child)>,
    undo: Vec<(Instant, Undo)>,
}

enum Undo {
    Continue(Vec<i32>),
    Heal(String, Vec<Link>),
    ClearDisk(String),
    Start(String),
    PowerOn(String),
}

impl<'a> Scene<'a> {
    pub fn new(site: &'a mut Site, round: &Round, homes: BTreeMap<String, String>) -> Self {
        Self {
            site,
            account: Account::default(),
            homes,
            moving: round.vm,
            destination: round.destination,
            began: Instant::now(),
            running: Vec::new(),
            undo: Vec::new(),
        }
    }

    /// Plays the round: its move, and its steps at their times.
    pub fn play(&mut self, round: &Round) -> Result<()> {
        snapshots::begin(self, round)?;
        self.site.keep_copies()?;
        self.began = Instant::now();
        self.begin_move(round)?;
        for step in &round.steps {
            self.wait_until(Duration::from_millis(step.at_ms))?;
            if interrupt::caught() {
                return Ok(());
            }
            let name = step.fault.name;
            self.account.needs_person |= step.fault.needs_person;
            let in_vain = self.account.in_vain;
            match self.act(step) {
                Ok(()) if in_vain == self.account.in_vain => {
                    self.account.in_full.insert(name);
                }
                Ok(()) => {}
                Err(error) => self.say(format!("{name}: not done: {error:#}")),
            }
        }
        let rest = self.undo.iter().map(|(at, _)| *at).max();
        let rest = rest.map_or(Duration::ZERO, |at| {
            at.saturating_duration_since(self.began)
        });
        self.wait_until(rest.max(SHORTEST))
    }

    /// Undoes everything and ends what still runs of a person's commands.
    pub fn heal(&mut self) -> Result<()> {
        self.say("healing");
        for (what, mut child) in std::mem::take(&mut self.running) {
            let ended = child.try_wait()?;
            child.kill()?;
            let output = child.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let code = ended.and_then(|ended| ended.code());
            self.account.begun.extend(begun(code, &output.stdout));
            self.account.unanswered |= code.is_none();
            self.account.refused += u32::from(code == Some(orders::REFUSED));
            self.say(format!("{what}: {code:?} {said}"));
        }
        self.site.heal_all()
    }

    /// Writes a line of the round's log.
    pub fn say(&mut self, what: impl AsRef<str>) {
        let at = self.site.watch.now() as f64 / 1e9;
        self.account.log.push(format!("{at:9.3} {}", what.as_ref()));
    }

    /// What was done from that time until then, if it is over, explains that a guest begins anew.
    pub fn excuse(&mut self, at: u64, until: Option<u64>, whose: Whose, why: &'static str) {
        let end = until.map_or("open".to_owned(), |until| {
            format!("{:.3}", until as f64 / 1e9)
        });
        self.say(format!(
            "excuse: {whose:?}, {why}, {:.3} to {end}",
            at as f64 / 1e9
        ));
        let excuse = Excuse {
            at,
            until,
            whose,
            why,
        };
        self.account.excuses.push(excuse);
    }

    /// From now on a person wants this of a VM.
    pub fn wish(&mut self, vm: &str, wish: Wish) {
        self.account.wishes.insert(vm.to_owned(), wish);
    }

    /// Starts a command and goes on.
    pub fn spawn(&mut self, arguments: &[&str]) -> Result<()> {
        let child = self.site.stack.spawn("controller", arguments)?;
        self.say(format!("begins: {}", arguments.join(" ")));
        self.running.push((arguments.join(" "), child));
        Ok(())
    }

    /// Whether nothing is broken at the moment.
    pub fn is_whole(&self) -> bool {
        self.undo.is_empty() && self.site.is_whole()
    }

    /// A host by its role for a VM.
    pub fn host(&self, vm: &str, role: Role) -> Result<String> {
        let home = self.homes.get(vm).context("it was nowhere")?;
        let others = self.site.others(home);
        let other = |number: usize| others.get(number % others.len().max(1)).cloned();
        let host = match role {
            Role::Holder => Some(home.clone()),
            Role::Destination => other(self.destination),
            Role::Third => other(self.destination + 1),
        };
        host.context("too few hosts")
    }

    /// Begins a move, and does not wait for its end.
    pub fn migrate(
        &mut self,
        vm: &str,
        to: &str,
        cap_mbit: Option<u64>,
        method: Method,
    ) -> Result<()> {
        let cap = cap_mbit.map(|cap| cap.to_string());
        let mut command = vec!["vm", "migrate", vm, "--to", to, "--detach", "--json"];
        if method != Method::Mirror {
            command.extend(["--method", method.name()]);
        }
        command.extend(cap.iter().flat_map(|cap| ["--max-bandwidth", cap.as_str()]));
        self.spawn(&command)
    }

    /// Begins to move a VM's disk to the other datastore of its host, and does not wait for its end.
    pub fn move_disk(&mut self, vm: &str, method: Method) -> Result<()> {
        let view = self.site.ask(&["vm", "show", vm])?;
        let here = path_in(&view).and_then(store_of);
        let here = here.context("it has no disk in a datastore")?;
        let to = STORES.into_iter().find(|store| *store != here);
        let to = to.context("one store alone")?;
        let mut command = vec!["vm", "move-disk", vm, "--to", to];
        if method != Method::Mirror {
            command.extend(["--method", method.name()]);
        }
        self.spawn(&command)
    }

    fn begin_move(&mut self, round: &Round) -> Result<()> {
        let vm = self.site.vms.get(round.vm).context("no such VM")?.clone();
        if round.in_place && self.site.disks.has(&vm) {
            return self.move_disk(&vm, round.method);
        }
        let to = self.host(&vm, Role::Destination)?;
        // A VM without a disk moves to another host in any case, for which not every method is.
        let method = match self.site.disks.has(&vm) {
            true => round.method,
            false => Method::Mirror,
        };
        self.migrate(&vm, &to, round.cap_mbit, method)
    }

    /// Waits until so long after the begin; undoes meanwhile what is due.
    fn wait_until(&mut self, after: Duration) -> Result<()> {
        let until = self.began + after;
        loop {
            let now = Instant::now();
            let due = self.undo.iter().position(|(at, _)| *at <= now);
            if let Some(due) = due {
                let (_, undo) = self.undo.swap_remove(due);
                self.undo(undo)?;
                continue;
            }
            if now >= until || interrupt::caught() {
                return Ok(());
            }
            // A plan's times are its own; nothing is waited for here.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn later(&mut self, step: &Step, undo: Undo) {
        let at = Instant::now() + Duration::from_millis(step.for_ms);
        self.undo.push((at, undo));
    }

    /// Leaves what was to come back on a machine by itself to the healing.
    pub fn recall(&mut self, machine: &str) {
        self.undo.retain(|(_, undo)| match undo {
            Undo::Start(one) | Undo::PowerOn(one) => one != machine,
            _ => true,
        });
    }

    fn undo(&mut self, undo: Undo) -> Result<()> {
        match undo {
            Undo::Continue(pids) => {
                self.say(format!("goes on: {pids:?}"));
                pids.into_iter().try_for_each(|pid| signal(pid, CONTINUE))
            }
            Undo::Heal(host, links) => {
                self.say(format!("heals {links:?} of {host}"));
                links
                    .into_iter()
                    .try_for_each(|link| self.site.heal(&host, link))
            }
            Undo::ClearDisk(machine) => {
                self.say(format!("room on {machine}"));
                self.site.clear_disk(&machine)
            }
            Undo::Start(machine) => {
                self.say(format!("starts the daemon of {machine}"));
                self.site.start_daemon(&machine)
            }
            // It joins anew, which needs a controller that is well: the healing does it.
            Undo::PowerOn(host) if self.site.is_removed(&host) => Ok(()),
            Undo::PowerOn(host) => {
                self.say(format!("power on {host}"));
                self.site.power_on(&host)
            }
        }
    }

    fn act(&mut self, step: &Step) -> Result<()> {
        let vm = self.site.vms.get(step.vm).context("no such VM")?.clone();
        let host = self.host(&vm, step.role)?;
        self.say(format!(
            "{} of {vm} on {host} for {} ms",
            step.fault.name, step.for_ms
        ));
        match step.fault.act {
            Act::Kill(part) => self.kill(step, part, &vm, &host),
            Act::Stop(part) => {
                let pids = self.processes(part, &vm, &host)?;
                pids.iter().try_for_each(|pid| signal(*pid, STOP))?;
                self.later(step, Undo::Continue(pids));
                Ok(())
            }
            Act::Cut(cut) => {
                let links = links(cut);
                links
                    .iter()
                    .try_for_each(|link| self.site.cut(&host, *link))?;
                self.later(step, Undo::Heal(host, links));
                Ok(())
            }
            Act::FillDisk(place) => {
                let machine = if place == Place::Host {
                    host
                } else {
                    "controller".into()
                };
                self.site.fill_disk(&machine)?;
                self.later(step, Undo::ClearDisk(machine));
                Ok(())
            }
            Act::PowerCut => self.power_cut(step, &[host]),
            Act::PowerCutAll => self.power_cut(step, &self.site.hosts.clone()),
            Act::OldDatabase => self.old_database(),
            Act::OldHostState => self.old_host_state(step),
            Act::OldLeftHost => rules::old_left_host(self, step, &vm),
            Act::Clone => rules::clone(self, step, &vm),
            Act::Person(order) => orders::give(self, step, order, &vm),
        }
    }

    fn kill(&mut self, step: &Step, part: Part, vm: &str, host: &str) -> Result<()> {
        match part {
            Part::Agent | Part::Controller => {
                let machine = if part == Part::Agent {
                    host
                } else {
                    "controller"
                };
                self.kill_daemon(step, machine);
            }
            Part::VmProcess | Part::Qemu => {
                for pid in self.processes(part, vm, host)? {
                    let at = self.site.watch.now();
                    signal(pid, KILL)?;
                    if part == Part::Qemu {
                        let until = self.site.watch.now();
                        self.excuse(at, Some(until), Whose::Qemu(pid), "its QEMU was killed");
                    }
                }
            }
        }
        Ok(())
    }

    /// Kills a daemon; it is started again later.
    pub fn kill_daemon(&mut self, step: &Step, machine: &str) {
        self.site.kill_daemon(machine);
        self.later(step, Undo::Start(machine.to_owned()));
    }

    fn processes(&self, part: Part, vm: &str, host: &str) -> Result<Vec<i32>> {
        let of = |what: &str, key: &str| -> Result<Vec<i32>> {
            let processes = self.site.stack.machine(host)?.processes()?;
            let wanted = processes.iter().filter(|process| {
                let line = &process.command_line;
                line.contains(what) && line.contains(key)
            });
            Ok(wanted.map(|process| process.pid_outside).collect())
        };
        let found = match part {
            Part::Agent => self.site.stack.daemon_pid(host).into_iter().collect(),
            Part::Controller => self
                .site
                .stack
                .daemon_pid("controller")
                .into_iter()
                .collect(),
            Part::VmProcess => of("vm-process", &format!("/{vm}/"))?,
            Part::Qemu => of("qemu-system", &format!("/{vm}."))?,
        };
        anyhow::ensure!(!found.is_empty(), "there is none");
        Ok(found)
    }

    /// Takes the power of hosts until later.
    pub fn power_cut(&mut self, step: &Step, hosts: &[String]) -> Result<()> {
        self.power_off(hosts)?;
        for host in hosts {
            self.later(step, Undo::PowerOn(host.clone()));
        }
        Ok(())
    }

    /// Takes the power of hosts until the healing.
    pub fn power_off(&mut self, hosts: &[String]) -> Result<()> {
        let at = self.site.watch.now();
        let cut = self.site.power_off(hosts);
        let until = cut.is_ok().then(|| self.site.watch.now());
        for host in hosts {
            self.excuse(at, until, Whose::Host(host.clone()), "its host lost power");
        }
        cut
    }

    /// The copy that is put back still holds the VM whose move is under way, or done when it does not take long.
    fn old_host_state(&mut self, step: &Step) -> Result<()> {
        let vm = self.site.vms.get(self.moving).context("no such VM")?;
        let host = self.host(vm, Role::Holder)?;
        let until = Instant::now() + LEAVES;
        while self.runs_at(vm).as_ref() == Some(&host) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.say(format!("the old copy is that of {host}"));
        self.power_cut(step, std::slice::from_ref(&host))?;
        self.site.restore_host(&host)
    }

    fn old_database(&mut self) -> Result<()> {
        self.account.forgot = true;
        // It may forget what the round's commands did.
        for wish in self.account.wishes.values_mut() {
            *wish = Wish::Unknown;
        }
        self.site.restore_database()
    }

    /// The host that runs a VM at the moment, as seen from outside.
    pub fn runs_at(&self, vm: &str) -> Option<String> {
        let traces = self.site.watch.traces();
        let alive = traces
            .iter()
            .filter(|one| one.vm == vm && one.gone.is_none());
        let last = alive.max_by_key(|one| one.windows.last().map(|window| window.to));
        last.map(|one| one.host.clone())
    }

    /// Whether a migration of a VM copies memory, as the controller says.
    pub fn copies(&self, vm: &str) -> bool {
        let list = self.site.ask(&["migration", "list"]).unwrap_or_default();
        let mut list = list.as_array().into_iter().flatten();
        list.any(|one| one["vm"] == vm && one["outcome"].is_null() && one["phase"] == "precopy")
    }

    /// Migrations of a VM that are under way, as the controller says.
    pub fn migrations(&self, vm: &str) -> Result<Vec<String>> {
        let list = self.site.ask(&["migration", "list"])?;
        let list = list.as_array().into_iter().flatten();
        let open = list.filter(|one| one["vm"] == vm && one["outcome"].is_null());
        let id = |one: &Value| one["id"].as_str().map(str::to_owned);
        Ok(open.filter_map(id).collect())
    }
}

/// The migration that a command began, where it said so.
fn begun(code: Option<i32>, stdout: &[u8]) -> Option<String> {
    let said: Value = serde_json::from_slice(stdout).ok()?;
    let id = said["id"].as_str()?;
    (code == Some(0)).then(|| id.to_owned())
}

fn links(cut: Cut) -> Vec<Link> {
    match cut {
        Cut::Migration => vec![Link::Migration],
        Cut::Management => vec![Link::Management],
        Cut::Both => vec![Link::Migration, Link::Management],
    }
}
