//! What happens to a stack's hosts as a whole: a power cut, a disk that is put back, a clone, a word of the controller.
//!
//! Owns nothing. Refuses: to copy onto a directory without emptying it first.

use super::{KILL, SOON, Stack, names};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// A host's state directory, on its machine.
pub const HOST_STATE: &str = "/var/lib/godwit";
/// A host's configuration, on its machine.
pub const HOST_CONFIG: &str = "/etc/godwit/host.toml";

impl Stack {
    /// Kills all that runs on a host and empties what a reboot empties.
    pub fn power_off(&self, host: &str) -> Result<()> {
        if self.daemon_pid(host).is_some() {
            self.kill_daemon(host)?;
        }
        let machine = self.machine(host)?;
        self.until("nothing runs there", SOON, || {
            let processes = machine.processes()?;
            for process in &processes {
                machine.kill(process.pid_inside, KILL)?;
            }
            Ok(processes.is_empty())
        })?;
        match std::fs::remove_dir_all(self.inside(host, "/run/godwit")?) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// All QEMUs of a VM, on all hosts.
    pub fn copies(&self, vm: &str) -> Result<usize> {
        let hosts = self.hosts();
        let each = hosts.iter().map(|host| self.hypervisors(vm, host));
        Ok(each.collect::<Result<Vec<_>>>()?.iter().map(Vec::len).sum())
    }

    /// A command that must not be carried out; what it says names these words.
    pub fn is_refused(&self, machine: &str, command: &[&str], words: &[&str]) -> Result<()> {
        let ran = self.run(machine, command)?;
        ensure!(ran.code != Some(0), "{command:?} was carried out: {ran:?}");
        names(&ran.stderr, words)
    }

    /// Waits until a VM is in a state, by the controller's word.
    pub fn wait_state(&self, vm: &str, state: &str, within: Duration) -> Result<Value> {
        let last = std::cell::RefCell::new(Value::Null);
        self.until(&format!("VM {vm} is {state}"), within, || {
            let view = self.vm(vm)?;
            let is_so = view["state"] == state;
            last.replace(view);
            ensure!(is_so, "it is {}", last.borrow()["state"]);
            Ok(true)
        })?;
        Ok(last.into_inner())
    }

    /// How the site stands. Its exit code is not 0 while a VM is held twice.
    pub fn site(&self) -> Result<Value> {
        let ran = self.run("controller", &["site", "show", "--json"])?;
        serde_json::from_str(&ran.stdout).with_context(|| format!("no JSON: {ran:?}"))
    }

    /// Starts a copy of a host's state on the client machine, which has another machine id and another address.
    pub fn start_clone(&self, host: &str, state: &Path) -> Result<()> {
        let number = self.hosts().iter().position(|one| one == host);
        let number = u8::try_from(number.context("no such host")?)?;
        let own = format!("\"{}:", self.lab.addresses(number).management4);
        self.put_state(state, "client")?;
        let text = std::fs::read_to_string(self.inside(host, HOST_CONFIG)?)?;
        ensure!(text.contains(&own), "host {host} listens elsewhere: {text}");
        let config = self.inside("client", HOST_CONFIG)?;
        std::fs::create_dir_all(config.parent().context("no directory")?)?;
        std::fs::write(config, text.replace(&own, "\"10.76.0.101:"))?;
        let script = "umount /etc/machine-id 2>/dev/null; \
                      echo 00000000000000000000000000000002 >/tmp/machine-id && \
                      mount --bind /tmp/machine-id /etc/machine-id";
        let mut command = self.machine("client")?.command("sh");
        let done = command.args(["-c", script]).output()?;
        ensure!(done.status.success(), "the machine id stays: {done:?}");
        self.start_daemon("client")
    }

    /// How often a host's agent was started, as far as the controller has heard.
    pub fn life(&self, host: &str) -> Result<u64> {
        let view = self.json("controller", &["host", "show", host])?;
        let life = view["instance"]["counter"].as_u64();
        life.with_context(|| format!("no life in {view}"))
    }

    /// Starts a host's agent anew and waits until the controller has heard it.
    pub fn live_again(&self, host: &str) -> Result<()> {
        let before = self.life(host)?;
        self.kill_daemon(host)?;
        self.start_daemon(host)?;
        self.until("the new agent is heard", SOON, || {
            Ok(self.life(host)? > before)
        })
    }

    /// Copies a host's state directory to a directory of this process.
    pub fn copy_state(&self, host: &str, to: &Path) -> Result<()> {
        copy_dir(&self.inside(host, HOST_STATE)?, to)
    }

    /// Puts such a copy in the place of a machine's state directory.
    pub fn put_state(&self, from: &Path, machine: &str) -> Result<()> {
        copy_dir(from, &self.inside(machine, HOST_STATE)?)
    }
}

/// Empties a directory and copies another into it.
pub fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        for entry in std::fs::read_dir(to)?.flatten() {
            match entry.file_type()?.is_dir() {
                true => std::fs::remove_dir_all(entry.path())?,
                false => std::fs::remove_file(entry.path())?,
            }
        }
    }
    std::fs::create_dir_all(to)?;
    let source = format!("{}/.", from.display());
    let copied = std::process::Command::new("cp")
        .args(["-a", &source])
        .arg(to)
        .status()?;
    ensure!(copied.success(), "cannot copy {}", from.display());
    Ok(())
}
