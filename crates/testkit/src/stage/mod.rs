//! The product as it is shipped on a lab's machines: a controller, hosts that joined it, and the command line on each.
//!
//! A [`Stage`] owns its lab and the daemons in it; both end with the value. What it knows of the product is its
//! commands, its JSON and where its files are. The end-to-end cases, the bench and the demo stand on it. Refuses: to go on
//! when something does not come about in the time given, or once somebody wants the program to end.

mod commands;
mod daemons;

use crate::interrupt;
use crate::lab::{Lab, Machine};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub use commands::Ran;

/// Address that hosts reach the controller at.
const CONTROLLER: &str = "10.76.0.100:8471";
/// Longest wait for what takes a moment on a quiet machine.
pub const SOON: Duration = Duration::from_secs(60);
/// Between two looks at what is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The machines with the product on them.
pub struct Stage {
    pub lab: Lab,
    godwit: PathBuf,
    dir: PathBuf,
    daemons: Mutex<BTreeMap<String, Child>>,
}

impl Stage {
    /// On these machines, with the program `godwit` of `programs`; logs go to `dir`, which all machines may read.
    pub fn new(lab: Lab, programs: &Path, dir: &Path) -> Result<Self> {
        Ok(Self {
            lab,
            godwit: program(programs)?,
            dir: dir.to_owned(),
            daemons: Mutex::default(),
        })
    }

    /// Makes a controller, starts it and waits until it answers. `more` are further arguments.
    pub fn start_controller(&self, more: &[&str]) -> Result<()> {
        let init = ["controller", "init", "--listen", CONTROLLER];
        self.ok("controller", &[&init, more].concat())?;
        self.start_daemon("controller")?;
        self.until("the controller answers", SOON, || {
            Ok(self.run("controller", &["host", "list"])?.code == Some(0))
        })
    }

    /// Makes a machine a host of the controller; its agent is not started. `more` are further arguments.
    pub fn join(&self, host: &str, migration: &[String], more: &[&str]) -> Result<()> {
        let token = self.token()?;
        let mut arguments = vec!["host", "join", &token, "--name", host, "--no-start"];
        arguments.extend(["--port-group", "vm=vmbr0"]);
        let of_address = |address| ["--migration", address];
        arguments.extend(migration.iter().map(String::as_str).flat_map(of_address));
        arguments.extend(more);
        self.ok(host, &arguments)?;
        Ok(())
    }

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
            go_on()?;
            let seen = match is_so() {
                Ok(true) => return Ok(()),
                Ok(false) => String::new(),
                Err(error) => format!(" ({error:#})"),
            };
            if Instant::now() > deadline {
                let logs = self.dir.display();
                bail!(
                    "it did not come to this within {within:?}: {what}{seen}; logs are in {logs}"
                );
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Refuses once somebody wants the program to end.
pub fn go_on() -> Result<()> {
    ensure!(!interrupt::caught(), "interrupted");
    Ok(())
}

/// Waits; refuses once somebody wants the program to end.
pub fn pause(time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        go_on()?;
        std::thread::sleep(LOOK_EVERY.min(until.saturating_duration_since(Instant::now())));
    }
    go_on()
}

fn program(programs: &Path) -> Result<PathBuf> {
    let godwit = programs.join("godwit");
    ensure!(
        godwit.exists(),
        "{} is missing: run 'cargo build --release -p godwit'",
        godwit.display()
    );
    Ok(godwit)
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.end();
    }
}
