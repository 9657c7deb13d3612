//! The whole product as it is shipped: a controller and two hosts in namespaces of their own, driven by the command
//! line of the `godwit` program that the release build made.
//!
//! A [`Stack`] is a [`Stage`] of the testkit with a directory of kernels and logs of its own below the target directory; all
//! of it ends with the value or its process. It uses no product code: what it knows of the product is its commands, its
//! JSON and where its files are. Refuses: to go on when something does not come about in the time given.

mod commands;
pub mod disks;
mod guests;
pub mod linked;
mod moves;
pub mod site;

use anyhow::{Context as _, Result};
use godwit_testkit::guest::linux::target_dir;
use godwit_testkit::lab::{Lab, LabConfig, host_name};
use godwit_testkit::link::LinkSpec;
use godwit_testkit::stage::Stage;
use std::fmt::Write as _;
use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use commands::names;
pub use godwit_testkit::lab::{Link, Process, Subnets};
pub use godwit_testkit::stage::Ran;
pub use godwit_testkit::testvol::Survives;
pub use guests::Counter;

/// Where the controller keeps its database, on its machine.
pub const CONTROLLER_DATABASE: &str = "/var/lib/godwit-controller/controller.db";
/// The controller's local socket, on its machine.
pub const CONTROLLER_SOCKET: &str = "/run/godwit/controller.sock";
/// The directory that all hosts share, in the stack's own.
pub const SHARED: &str = "shared";
/// A host's datastores, each by its name in the directory [`STORES_IN`].
pub const STORES: [&str; 2] = ["vms", "fast"];
/// Where a host has its datastores.
pub const STORES_IN: &str = "/var/lib/stores";
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
    /// Every host has the datastores [`STORES`], each on a test volume of its own.
    pub stores: bool,
    /// Every host has the same directory [`SHARED`] of the stack's own.
    pub shared: bool,
    /// What the migration network is like; as fast as the machine without it.
    pub link: Option<LinkSpec>,
    /// How long certificates are good for, seconds; a year when 0.
    pub certificate_life_s: u64,
}

fn store(name: &&str) -> PathBuf {
    Path::new(STORES_IN).join(name)
}

/// A running controller with two hosts.
pub struct Stack(Stage);

impl Deref for Stack {
    type Target = Stage;

    fn deref(&self) -> &Stage {
        &self.0
    }
}

impl Stack {
    /// Brings everything up and waits until both hosts are connected.
    pub fn new(name: &str, plan: &Plan) -> Result<Self> {
        let target = target_dir()?;
        let dir = target.join("stack-tests").join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir)?;
        }
        std::fs::create_dir_all(&dir)?;
        let shared = plan.shared.then(|| dir.join(SHARED));
        shared.iter().try_for_each(std::fs::create_dir)?;
        let lab = Lab::new(LabConfig {
            name: format!("stack-{name}-{}", std::process::id()),
            routed: plan.routed,
            migration_nics: plan.nics.max(1),
            migration_subnets: plan.subnets,
            link: plan.link,
            hosts: 2 + plan.more,
            volumes: !plan.in_memory,
            shared: shared.into_iter().collect(),
            stores: STORES.iter().filter(|_| plan.stores).map(store).collect(),
            ..LabConfig::default()
        })?;
        let stack = Self(Stage::new(lab, &target.join("release"), &dir)?);
        let life_s = plan.certificate_life_s.to_string();
        match plan.certificate_life_s {
            0 => stack.start_controller(&[])?,
            _ => stack.start_controller(&["--certificate-life-s", &life_s])?,
        }
        let plain = HostPlan::default();
        let more = (0..plan.more).map(|_| &plain);
        for (index, host) in (0..).zip(plan.hosts.iter().chain(more)) {
            stack.join(index, host)?;
        }
        stack.wait_connected()?;
        Ok(stack)
    }

    /// Names of the hosts.
    pub fn hosts(&self) -> Vec<String> {
        (0..self.lab.config().hosts).map(host_name).collect()
    }

    /// Makes a machine a host of the controller and starts its agent; machines are counted from 0.
    pub fn join(&self, index: u8, plan: &HostPlan) -> Result<()> {
        let host = &host_name(index);
        let own = self.lab.addresses(index);
        let migration = match plan.migration.as_slice() {
            [] if self.lab.config().migration_nics > 1 => (0..self.lab.config().migration_nics)
                .map(|nic| self.lab.migration_addresses(index, nic).0.to_string())
                .collect(),
            [] => vec![own.migration4.to_string(), own.migration6.to_string()],
            given => given.to_vec(),
        };
        let more: Vec<&str> = plan.join.iter().map(String::as_str).collect();
        self.0.join(host, &migration, &more)?;
        let config = self.inside(host, "/etc/godwit/host.toml")?;
        let text = std::fs::read_to_string(&config)?;
        let stores = self.datastores();
        std::fs::write(&config, format!("{}\n{stores}{text}", plan.config))?;
        // A person's change is old when the power goes.
        File::open(&config)?.sync_all()?;
        self.start_daemon(host)
    }

    /// The lines of a host's configuration that name its datastores, if there are any.
    fn datastores(&self) -> String {
        let stores = self.lab.config().stores.iter().map(|at| {
            let name = at.file_name().unwrap_or_default().to_string_lossy();
            format!("{name} = {{ path = \"{}\" }}", at.display())
        });
        match stores.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => none,
            all => format!("datastores = {{ {all} }}\n"),
        }
    }

    /// Waits until something is so. An error while waiting is only told when time is up, with the hosts' logs.
    pub fn until(
        &self,
        what: &str,
        within: Duration,
        is_so: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let waited = self.0.until(what, within, is_so);
        waited.map_err(|error| error.context(self.logs()))
    }

    /// What the hosts' VM processes said last, which ends with the lab.
    fn logs(&self) -> String {
        let mut said = String::new();
        for host in self.hosts() {
            let tails = self.machine(&host).and_then(|machine| {
                let script = format!("tail -n 25 {VM_PROCESS_LOGS}");
                Ok(machine.command("sh").args(["-c", &script]).output()?)
            });
            let text = tails.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            let text = text.unwrap_or_else(|error| format!("{error:#}"));
            let _ = write!(said, "host {host}:\n{text}\n");
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
