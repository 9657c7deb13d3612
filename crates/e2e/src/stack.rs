//! The whole product as it is shipped: a controller and two hosts in namespaces of their own, driven by the command
//! line of the `godwit` program that the release build made.
//!
//! A [`Stack`] owns its lab, the daemons in it and a directory of kernels and logs below the target directory; all of it
//! ends with the value or its process. It uses no product code: what it knows of the product is its commands, its JSON
//! and where its files are. Refuses: to go on when something does not come about in the time given.

use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::guest::checker::{self, Checked};
use godwit_testkit::guest::counter::{self, CounterSpec};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::lab::{Lab, LabConfig, Machine};
use godwit_testkit::link::LinkSpec;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use godwit_testkit::lab::{Link, Process, Subnets};
pub use godwit_testkit::testvol::Survives;

/// Address that hosts reach the controller at.
const CONTROLLER: &str = "10.76.0.100:8471";
/// Where the controller keeps its database, on its machine.
pub const CONTROLLER_DATABASE: &str = "/var/lib/godwit-controller/controller.db";
/// The controller's local socket, on its machine.
pub const CONTROLLER_SOCKET: &str = "/run/godwit/controller.sock";
/// Logs of VM processes, on a host's machine.
const VM_PROCESS_LOGS: &str = "/run/godwit/vms/*/vm-process.log";
/// Longest wait for what takes a moment on a quiet machine.
pub const SOON: Duration = Duration::from_secs(30);
/// Longest wait for a migration or a boot.
pub const LONG: Duration = Duration::from_secs(120);
/// Pages whose counters are looked at to see whether a guest counts.
const SAMPLES: u32 = 128;
/// Signal that nothing survives.
pub const KILL: i32 = 9;
/// Signal that stops a process until [`CONTINUE`].
pub const STOP: i32 = 19;
/// Signal that lets a stopped process go on.
pub const CONTINUE: i32 = 18;
/// Signal of Ctrl-C.
pub const INTERRUPT: i32 = 2;

/// How one host joins.
#[derive(Debug, Clone, Default)]
pub struct HostPlan {
    /// Migration addresses; both families of the lab's when empty.
    pub migration: Vec<String>,
    /// Further arguments of `host join`.
    pub join: Vec<String>,
    /// Lines put before the first table of `host.toml`.
    pub config: String,
}

/// What to bring up.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Puts a router between the migration networks.
    pub routed: bool,
    /// Host a, then host b.
    pub hosts: [HostPlan; 2],
    /// Plain hosts beside these: c, d and so on.
    pub more: u8,
    /// Migration network cards of each host; one when 0.
    pub nics: u8,
    /// How several of them are addressed.
    pub subnets: Subnets,
    /// What the migration network is like; as fast as the machine without it.
    pub link: Option<LinkSpec>,
}

/// How a command ended.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; none after a signal.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it complained.
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// A running controller with two hosts.
pub struct Stack {
    /// The machines and their networks.
    pub lab: Lab,
    godwit: PathBuf,
    dir: PathBuf,
    daemons: Mutex<BTreeMap<String, Child>>,
}

/// A guest of a stack that counts for ever.
#[derive(Debug, Clone)]
pub struct Counter {
    /// The VM's name.
    pub name: String,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// What it counts.
    pub spec: CounterSpec,
    /// Further lines of the description.
    pub lines: String,
}

impl Counter {
    /// A guest of 32 MiB that steps all its pages above 1 MiB.
    pub fn small(name: &str) -> Self {
        Self::flat(name, 32)
    }

    /// A guest that steps all pages above 1 MiB as fast as it can.
    pub fn flat(name: &str, memory_mib: u32) -> Self {
        Self {
            name: name.to_owned(),
            memory_mib: memory_mib.into(),
            spec: CounterSpec::flat(memory_mib),
            lines: String::new(),
        }
    }

    /// The same guest with further lines in its description.
    pub fn with(mut self, lines: &str) -> Self {
        self.lines.push_str(lines);
        self.lines.push('\n');
        self
    }

    /// The same guest, slower by so many idle turns a page.
    pub fn slowed(mut self, spin: u32) -> Self {
        self.spec = self.spec.slowed(spin);
        self
    }
}

impl Stack {
    /// Brings everything up and waits until both hosts are connected.
    pub fn new(name: &str, plan: &Plan) -> Result<Self> {
        let target = target_dir()?;
        let godwit = target.join("release/godwit");
        ensure!(
            godwit.exists(),
            "{} is missing: run 'cargo build --release -p godwit'",
            godwit.display()
        );
        let dir = target.join("stack-tests").join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir)?;
        }
        std::fs::create_dir_all(&dir)?;
        let lab = Lab::new(LabConfig {
            name: format!("stack-{name}-{}", std::process::id()),
            routed: plan.routed,
            migration_nics: plan.nics.max(1),
            migration_subnets: plan.subnets,
            link: plan.link,
            hosts: 2 + plan.more,
            volumes: true,
            ..LabConfig::default()
        })?;
        let stack = Self {
            lab,
            godwit,
            dir,
            daemons: Mutex::default(),
        };
        stack.bring_up(plan)?;
        Ok(stack)
    }

    fn bring_up(&self, plan: &Plan) -> Result<()> {
        self.ok(
            "controller",
            &["controller", "init", "--listen", CONTROLLER],
        )?;
        self.start_daemon("controller")?;
        self.until("the controller answers", SOON, || {
            Ok(self.run("controller", &["host", "list"])?.code == Some(0))
        })?;
        let plain = HostPlan::default();
        let more = (0..plan.more).map(|_| &plain);
        for (index, host) in (0..).zip(plan.hosts.iter().chain(more)) {
            self.join(index, host)?;
        }
        self.wait_connected()
    }

    /// Names of the hosts.
    pub fn hosts(&self) -> Vec<String> {
        (0..self.lab.config().hosts).map(host_name).collect()
    }

    /// Makes a machine a host of the controller and starts its agent; machines are counted from 0.
    pub fn join(&self, index: u8, plan: &HostPlan) -> Result<()> {
        let host = &host_name(index);
        let token = self.token()?;
        let own = self.lab.addresses(index);
        let migration = match plan.migration.as_slice() {
            [] if self.lab.config().migration_nics > 1 => (0..self.lab.config().migration_nics)
                .map(|nic| self.lab.migration_addresses(index, nic).0.to_string())
                .collect(),
            [] => vec![own.migration4.to_string(), own.migration6.to_string()],
            given => given.to_vec(),
        };
        let mut arguments: Vec<&str> = vec!["host", "join", &token, "--name", host, "--no-start"];
        arguments.extend(["--port-group", "vm=vmbr0"]);
        arguments.extend(
            migration
                .iter()
                .flat_map(|address| ["--migration", address.as_str()]),
        );
        arguments.extend(plan.join.iter().map(String::as_str));
        self.ok(host, &arguments)?;
        let config = self.inside(host, "/etc/godwit/host.toml")?;
        let text = std::fs::read_to_string(&config)?;
        std::fs::write(&config, format!("{}\n{text}", plan.config))?;
        // A person's change is old when the power goes.
        File::open(&config)?.sync_all()?;
        self.start_daemon(host)
    }

    /// A new join token.
    pub fn token(&self) -> Result<String> {
        let token = self.json("controller", &["host", "add"])?;
        Ok(token["token"].as_str().context("no token")?.to_owned())
    }

    /// Waits until the controller has heard from all hosts.
    pub fn wait_connected(&self) -> Result<()> {
        let count = usize::from(self.lab.config().hosts);
        self.until("all hosts are connected", SOON, || {
            let hosts = self.json("controller", &["host", "list"])?;
            let mut hosts = hosts.as_array().into_iter().flatten();
            Ok(hosts.clone().count() == count && hosts.all(|host| host["state"] == "connected"))
        })
    }

    /// One of the machines: `a`, `b`, `controller`, `client`, `switch`, `router`.
    pub fn machine(&self, name: &str) -> Result<&Machine> {
        Ok(self.lab.machine(name)?)
    }

    /// A file of a machine as this process reaches it.
    pub fn inside(&self, machine: &str, path: impl AsRef<Path>) -> Result<PathBuf> {
        Ok(self.machine(machine)?.path_from_outside(path))
    }

    /// Directory that all machines see, read-only.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs `godwit` on a machine.
    pub fn run(&self, machine: &str, arguments: &[&str]) -> Result<Ran> {
        let mut command = self.machine(machine)?.command(&self.godwit);
        Ok(command.args(arguments).output()?.into())
    }

    /// Starts `godwit` on a machine and does not wait for it.
    pub fn spawn(&self, machine: &str, arguments: &[&str]) -> Result<Child> {
        let mut command = self.machine(machine)?.command(&self.godwit);
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn()?)
    }

    /// Runs `godwit` on a machine for at most so long; what takes longer is killed, and its outcome is unknown.
    pub fn run_within(&self, machine: &str, arguments: &[&str], within: Duration) -> Result<Ran> {
        let child = self.spawn(machine, arguments)?;
        let pid = i32::try_from(child.id())?;
        let (ended, end) = std::sync::mpsc::channel();
        // What it prints must be read while it runs.
        std::thread::spawn(move || ended.send(child.wait_with_output()));
        let output = match end.recv_timeout(within) {
            Ok(output) => output,
            Err(_) => {
                signal(pid, KILL)?;
                end.recv()?
            }
        };
        Ok(output?.into())
    }

    /// Runs a command that must succeed within a time with `--json` and reads its answer.
    pub fn json_within(
        &self,
        machine: &str,
        arguments: &[&str],
        within: Duration,
    ) -> Result<Value> {
        let ran = self.run_within(machine, &[arguments, &["--json"]].concat(), within)?;
        let said = arguments.join(" ");
        ensure!(ran.code == Some(0), "godwit {said} on {machine}: {ran:?}");
        Ok(serde_json::from_str(&ran.stdout)?)
    }

    /// Runs a command that must succeed and gives what it printed.
    pub fn ok(&self, machine: &str, arguments: &[&str]) -> Result<String> {
        let ran = self.run(machine, arguments)?;
        ensure!(
            ran.code == Some(0),
            "godwit {} on {machine} ended with {:?}: {}{}",
            arguments.join(" "),
            ran.code,
            ran.stderr,
            ran.stdout
        );
        Ok(ran.stdout)
    }

    /// Runs a command that must succeed with `--json` and reads its answer.
    pub fn json(&self, machine: &str, arguments: &[&str]) -> Result<Value> {
        let text = self.ok(machine, &[arguments, &["--json"]].concat())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Runs a command that must be refused, for people and for scripts: the exit code, one sentence on standard error,
    /// nothing on standard output; with `--json` the stable code and the same sentence. Gives the sentence.
    pub fn refused(
        &self,
        machine: &str,
        arguments: &[&str],
        exit: i32,
        code: &str,
    ) -> Result<String> {
        let said = format!("godwit {}", arguments.join(" "));
        let plain = self.run(machine, arguments)?;
        let sentence = plain.stderr.trim().strip_prefix("godwit: ");
        let sentence = sentence.with_context(|| format!("{said}: no sentence: {plain:?}"))?;
        ensure!(
            plain.code == Some(exit),
            "{said}: not exit code {exit}: {plain:?}"
        );
        ensure!(
            plain.stdout.is_empty(),
            "{said}: printed something: {plain:?}"
        );
        let script = self.run(machine, &[arguments, &["--json"]].concat())?;
        ensure!(
            script.code == Some(exit),
            "{said}: --json has another exit code: {script:?}"
        );
        let error: Value = serde_json::from_str(&script.stdout)
            .with_context(|| format!("{said}: --json is no JSON: {script:?}"))?;
        ensure!(
            error["error"]["code"] == code,
            "{said}: not {code}: {error}"
        );
        ensure!(
            error["error"]["message"] == sentence,
            "{said}: says '{sentence}' to people and something else to scripts: {error}"
        );
        Ok(sentence.to_owned())
    }

    fn daemons(&self) -> MutexGuard<'_, BTreeMap<String, Child>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the controller or a host's agent.
    pub fn start_daemon(&self, machine: &str) -> Result<()> {
        let role = if machine == "controller" {
            "controller"
        } else {
            "agent"
        };
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join(format!("{machine}.log")))?;
        let mut command = self.machine(machine)?.command(&self.godwit);
        command.args([role, "run"]).stdin(Stdio::null());
        let child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        self.daemons().insert(machine.to_owned(), child);
        Ok(())
    }

    /// Ends the controller or a host's agent at once, as `kill -9` does.
    pub fn kill_daemon(&self, machine: &str) -> Result<()> {
        let child = self.daemons().remove(machine);
        let mut child = child.with_context(|| format!("no daemon runs on {machine}"))?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Whether the controller or a host's agent runs.
    pub fn daemon_lives(&self, machine: &str) -> bool {
        let mut daemons = self.daemons();
        let child = daemons.get_mut(machine);
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Process id of the controller or a host's agent, as this process sees it.
    pub fn daemon_pid(&self, machine: &str) -> Option<i32> {
        let id = self.daemons().get(machine).map(Child::id);
        id.and_then(|id| i32::try_from(id).ok())
    }

    /// Ends it and starts it again, and waits until it answers.
    pub fn restart_daemon(&self, machine: &str) -> Result<()> {
        self.kill_daemon(machine)?;
        self.start_daemon(machine)?;
        self.wait_connected()
    }

    /// Writes a VM's description and gives its path.
    pub fn describe(&self, name: &str, text: &str) -> Result<String> {
        let path = self.dir.join(format!("{name}.toml"));
        std::fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// The description of a counter guest; its kernel is written beside it.
    pub fn describe_counter(&self, guest: &Counter) -> Result<String> {
        let kernel = self.dir.join(format!("{}.kernel", guest.name));
        std::fs::write(&kernel, counter::build(&guest.spec)?)?;
        let text = format!(
            "name = \"{}\"\nvcpus = 1\nmemory_mib = {}\nkernel = \"{}\"\naccelerator = \"tcg\"\n{}",
            guest.name,
            guest.memory_mib,
            kernel.display(),
            guest.lines
        );
        self.describe(&guest.name, &text)
    }

    /// Makes a VM of a counter guest, starts it on a host and waits until it counts.
    pub fn start_counter(&self, guest: &Counter, host: &str) -> Result<()> {
        let file = self.describe_counter(guest)?;
        self.ok("controller", &["vm", "create", &file])?;
        self.ok("controller", &["vm", "start", &guest.name, "--on", host])?;
        self.wait_counts(&guest.name, host)
    }

    /// Powers a VM off and deletes it.
    pub fn remove(&self, vm: &str) -> Result<()> {
        self.ok("controller", &["vm", "stop", vm, "--force"])?;
        self.until(&format!("VM {vm} is off"), SOON, || {
            Ok(self.vm(vm)?["state"] == "stopped")
        })?;
        self.ok("controller", &["vm", "delete", vm]).map(drop)
    }

    /// A VM as the controller sees it.
    pub fn vm(&self, vm: &str) -> Result<Value> {
        self.json("controller", &["vm", "show", vm])
    }

    /// A VM as a host's agent sees it.
    pub fn vm_at(&self, vm: &str, host: &str) -> Result<Value> {
        self.json(host, &["vm", "show", vm])
    }

    /// The file that is a VM's memory on a host; there must be exactly one.
    pub fn ram_file(&self, vm: &str, host: &str) -> Result<PathBuf> {
        let files = self.ram_files(vm, host)?;
        match files.as_slice() {
            [one] => Ok(one.clone()),
            other => bail!("VM {vm} has {} RAM files on host {host}", other.len()),
        }
    }

    /// The files of a VM's memory on a host.
    pub fn ram_files(&self, vm: &str, host: &str) -> Result<Vec<PathBuf>> {
        let prefix = format!("{vm}.");
        let entries = match std::fs::read_dir(self.inside(host, "/run/godwit/ram")?) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let files = entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        Ok(files.map(|entry| entry.path()).collect())
    }

    /// Passes that a counter guest has made since it booted.
    pub fn passes(&self, vm: &str, host: &str) -> Result<u32> {
        let control = checker::control(&File::open(self.ram_file(vm, host)?)?)?;
        ensure!(control.state != 0, "the guest is still preparing its pages");
        Ok(control.passes)
    }

    /// Counters of some of a counter guest's pages, spread evenly.
    fn sample(&self, vm: &str, host: &str) -> Result<Vec<[u8; 4]>> {
        let ram = File::open(self.ram_file(vm, host)?)?;
        let control = checker::control(&ram)?;
        ensure!(control.state != 0, "the guest is still preparing its pages");
        let pages = control.end_page.saturating_sub(control.first_page);
        let read = |index: u32| {
            let page = control.first_page + pages / SAMPLES * index;
            let mut counter = [0; 4];
            let at = u64::from(page) * counter::PAGE_BYTES + counter::COUNTER_OFFSET;
            ram.read_exact_at(&mut counter, at).map(|()| counter)
        };
        Ok((0..SAMPLES).map(read).collect::<std::io::Result<_>>()?)
    }

    /// Waits until a counter guest has stepped some page: much less than a pass of a slow guest.
    pub fn wait_counts(&self, vm: &str, host: &str) -> Result<()> {
        let first = std::cell::RefCell::new(None);
        self.until(&format!("guest {vm} counts on host {host}"), LONG, || {
            let now = self.sample(vm, host)?;
            let mut first = first.borrow_mut();
            Ok(*first.get_or_insert_with(|| now.clone()) != now)
        })
    }

    /// Waits until a counter guest has made so many more passes.
    pub fn wait_passes(&self, vm: &str, host: &str, more: u32) -> Result<()> {
        let first = std::cell::Cell::new(None);
        self.until(&format!("guest {vm} counts on host {host}"), LONG, || {
            let now = self.passes(vm, host)?;
            let from = first.get().unwrap_or(now);
            first.set(Some(from));
            Ok(now.wrapping_sub(from) >= more)
        })
    }

    /// Pauses a counter guest, checks every page that it counts, and lets it go on. It must never have booted again.
    pub fn check_guest(&self, vm: &str, host: &str) -> Result<Checked> {
        self.wait_counts(vm, host)?;
        self.ok("controller", &["vm", "pause", vm])?;
        let checked = checker::check(&File::open(self.ram_file(vm, host)?)?);
        self.ok("controller", &["vm", "resume", vm])?;
        let checked = checked.with_context(|| format!("memory of guest {vm} on host {host}"))?;
        ensure!(
            checked.control.boots == 1,
            "guest {vm} has booted {} times",
            checked.control.boots
        );
        Ok(checked)
    }

    /// Moves a VM and gives the report, which must say that it completed.
    pub fn migrate(&self, vm: &str, to: &str, arguments: &[&str]) -> Result<Value> {
        let id = self.begin(vm, to, arguments)?;
        self.completed(&id)
    }

    /// Begins a move and gives its id.
    pub fn begin(&self, vm: &str, to: &str, arguments: &[&str]) -> Result<String> {
        let command = ["vm", "migrate", vm, "--to", to, "--detach"];
        let begun = self.json("controller", &[&command, arguments].concat())?;
        Ok(begun["id"].as_str().context("no id")?.to_owned())
    }

    /// A migration as the controller sees it.
    pub fn migration(&self, id: &str) -> Result<Value> {
        self.json("controller", &["migration", "show", id])
    }

    /// Waits until a migration copies memory.
    pub fn wait_precopy(&self, id: &str) -> Result<()> {
        self.until(&format!("migration {id} copies"), SOON, || {
            let report = self.migration(id)?;
            ensure!(
                report["outcome"].is_null(),
                "it is over already: {}",
                report["reason"]
            );
            Ok(report["phase"] == "precopy")
        })
    }

    /// Waits until a migration has ended, by a machine's word.
    pub fn ended(&self, machine: &str, id: &str) -> Result<Value> {
        let last = std::cell::RefCell::new(Value::Null);
        self.until(&format!("migration {id} ends"), LONG, || {
            let report = self.json(machine, &["migration", "show", id])?;
            let over = !report["outcome"].is_null() && report["outcome"] != "in-doubt";
            last.replace(report);
            Ok(over)
        })?;
        Ok(last.into_inner())
    }

    /// Waits until a migration has ended; it must have completed.
    pub fn completed(&self, id: &str) -> Result<Value> {
        let report = self.ended("controller", id)?;
        ensure!(
            report["outcome"] == "completed",
            "migration {id} did not complete: {}; {}",
            report["reason"],
            self.logs()
        );
        Ok(report)
    }

    /// Waits until a VM runs on a host by the controller's word and the other host has neither memory nor QEMU of it.
    pub fn runs_on(&self, vm: &str, host: &str) -> Result<()> {
        self.until(&format!("VM {vm} runs on host {host}"), SOON, || {
            let view = self.vm(vm)?;
            Ok(view["state"] == "running" && view["host"] == host)
        })?;
        self.is_clean(vm, if host == "a" { "b" } else { "a" })
    }

    /// Waits until a host has no memory, no QEMU and no right of a VM.
    pub fn is_clean(&self, vm: &str, host: &str) -> Result<()> {
        self.until(&format!("host {host} is clean of {vm}"), SOON, || {
            let files = self.ram_files(vm, host)?;
            ensure!(files.is_empty(), "RAM files: {files:?}");
            let processes = self.hypervisors(vm, host)?;
            ensure!(processes.is_empty(), "processes: {processes:?}");
            let known = self.json(host, &["vm", "list"])?;
            let mut known = known.as_array().into_iter().flatten();
            let holds =
                known.any(|one| one["spec"]["name"] == vm && one["claim"]["claim"] == "holds");
            Ok(!holds)
        })
    }

    /// QEMUs of a VM on a host.
    pub fn hypervisors(&self, vm: &str, host: &str) -> Result<Vec<Process>> {
        let of_vm = |process: &Process| {
            let line = &process.command_line;
            line.contains("qemu-system") && line.contains(&format!("/{vm}."))
        };
        let mut processes = self.machine(host)?.processes()?;
        processes.retain(of_vm);
        Ok(processes)
    }

    /// Waits until something is so. An error while waiting is only told when time is up.
    pub fn until(
        &self,
        what: &str,
        within: Duration,
        is_so: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + within;
        loop {
            let seen = match is_so() {
                Ok(true) => return Ok(()),
                Ok(false) => String::new(),
                Err(error) => format!(" ({error:#})"),
            };
            if Instant::now() > deadline {
                bail!(
                    "it did not come to this within {within:?}: {what}{seen}; {}",
                    self.logs()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the hosts' VM processes said last, which ends with the lab, and where the other logs stay.
    fn logs(&self) -> String {
        let mut said = format!("logs are in {}", self.dir.display());
        for host in self.hosts() {
            let tails = self.machine(&host).and_then(|machine| {
                let script = format!("tail -n 25 {VM_PROCESS_LOGS}");
                Ok(machine.command("sh").args(["-c", &script]).output()?)
            });
            let text = tails.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            let text = text.unwrap_or_else(|error| format!("{error:#}"));
            let _ = write!(said, "\nhost {host}:\n{text}");
        }
        said
    }
}

/// Sends a signal to a process by the id that it has outside of the lab; one that has ended already is no error.
pub fn signal(pid: i32, signal: i32) -> Result<()> {
    let process = rustix::process::Pid::from_raw(pid).context("no process id")?;
    let signal = rustix::process::Signal::from_named_raw(signal).context("no such signal")?;
    match rustix::process::kill_process(process, signal) {
        Err(rustix::io::Errno::SRCH) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn host_name(index: u8) -> String {
    char::from(b'a' + index).to_string()
}

/// Whether somebody refused in the way that people can use: one sentence that names these words, quoted or not.
pub fn names(sentence: &str, words: &[&str]) -> Result<()> {
    println!("  {sentence}");
    let bare = sentence.replace('\'', "");
    let missing: Vec<_> = words
        .iter()
        .filter(|word| !bare.contains(&word.replace('\'', "")))
        .collect();
    ensure!(missing.is_empty(), "'{sentence}' does not name {missing:?}");
    Ok(())
}
