//! The `godwit` command line on a stage's machines.
//!
//! Owns nothing. Refuses: to run anything once somebody wants the program to end.

use super::{Stage, go_on};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::process::{Child, Output, Stdio};

#[derive(Debug)]
pub struct Ran {
    /// Exit code; none after a signal.
    pub code: Option<i32>,
    pub stdout: String,
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

impl Stage {
    pub fn run(&self, machine: &str, arguments: &[&str]) -> Result<Ran> {
        go_on()?;
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

    /// Runs a command that must succeed and gives what it printed.
    pub fn ok(&self, machine: &str, arguments: &[&str]) -> Result<String> {
        let ran = self.run(machine, arguments)?;
        // With --json the reason is on the standard output.
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
        let said = arguments.join(" ");
        serde_json::from_str(&text).with_context(|| format!("godwit {said} --json: {text}"))
    }
}
