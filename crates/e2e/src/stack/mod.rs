//! The whole product as it is shipped: a controller and two hosts in namespaces of their own, driven by the command
//! line of the `godwit` program that the release build made.
//!
//! A [`Stack`] owns its lab, the daemons in it and a directory of kernels and logs below the target directory; all of it
//! ends with the value or its process. It uses no product code: what it knows of the product is its commands, its JSON
//! and where its files are. Modules: commands, daemons, guests, moves, site. Refuses: to go on when something does not come about in the time given.

mod commands;
mod daemons;
mod guests;
mod moves;
pub mod site;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::lab::{Lab, LabConfig, Machine, host_name};
use godwit_testkit::link::LinkSpec;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub use commands::{Ran, names};
pub use godwit_testkit::lab::{Link, Process, Subnets};
pub use godwit_testkit::testvol::Survives;
pub use guests::Counter;

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
    /// State directories lie in memory: a test volume's own cost would be taken for the product's.
    pub in_memory: bool,
    /// What the migration network is like; as fast as the machine without it.
    pub link: Option<LinkSpec>,
}

/// A running controller with two hosts.
pub struct Stack {
    /// The machines and their networks.
    pub lab: Lab,
    godwit: PathBuf,
    dir: PathBuf,
    daemons: Mutex<BTreeMap<String, Child>>,
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
            volumes: !plan.in_memory,
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
