//! The controller's and the agents' processes of a stage.
//!
//! Each is a child of this process; its log stays in the stage's directory. Refuses: to end a daemon that was not
//! started here.

use super::Stage;
use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{MutexGuard, PoisonError};

impl Stage {
    fn daemons(&self) -> MutexGuard<'_, BTreeMap<String, Child>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the controller or a host's agent.
    pub fn start_daemon(&self, machine: &str) -> Result<()> {
        self.start_daemon_of(machine, &self.godwit)
    }

    pub fn godwit(&self) -> &Path {
        &self.godwit
    }

    /// Starts the controller or a host's agent with another program than the one that was built.
    pub fn start_daemon_of(&self, machine: &str, program: &Path) -> Result<()> {
        let role = match machine {
            "controller" => "controller",
            _ => "agent",
        };
        let log = self.dir.join(format!("{machine}.log"));
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = self.machine(machine)?.command(program);
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

    /// Ends the machines, and with them every daemon, unless the lab is one to be kept.
    pub(super) fn end(&mut self) {
        if self.lab.config().keep {
            return;
        }
        let _ = self.lab.end(); // what is left ends with this process
        for child in self.daemons().values_mut() {
            let _ = child.wait();
        }
    }
}
