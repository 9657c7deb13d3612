//! What the cases ask of the `godwit` command line beyond running it.
//!
//! Owns nothing. Refuses: an error that is not one sentence, or that says something else to scripts than to people.

use super::{KILL, Ran, Stack, signal};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::time::Duration;

/// Exit code of an answer that shows a VM that is held by two hosts.
const RUNNING_TWICE: i32 = 7;

impl Stack {
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

    /// Asks something that must be answered within a time with `--json` and reads its answer.
    pub fn json_within(
        &self,
        machine: &str,
        arguments: &[&str],
        within: Duration,
    ) -> Result<Value> {
        let ran = self.run_within(machine, &[arguments, &["--json"]].concat(), within)?;
        let said = arguments.join(" ");
        answer(&ran).with_context(|| format!("godwit {said} on {machine}: {ran:?}"))
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
        let told = error["error"]["message"].as_str().unwrap_or_default();
        ensure!(
            without_figures(told) == without_figures(sentence),
            "{said}: says '{sentence}' to people and something else to scripts: {error}"
        );
        Ok(sentence.to_owned())
    }
}

/// A sentence with every number as `#`: free memory changes between two commands.
fn without_figures(sentence: &str) -> String {
    let mut plain = String::new();
    for c in sentence.chars() {
        match c.is_ascii_digit() {
            true if plain.ends_with('#') => {}
            true => plain.push('#'),
            false => plain.push(c),
        }
    }
    plain
}

/// What a question was answered. A list with a VM that is held twice is one, too, in spite of its exit code.
fn answer(ran: &Ran) -> Result<Value> {
    ensure!(matches!(ran.code, Some(0 | RUNNING_TWICE)), "it failed");
    let said: Value = serde_json::from_str(&ran.stdout)?;
    ensure!(said["error"].is_null(), "it is an error");
    Ok(said)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_with_a_vm_that_is_held_twice_is_an_answer() {
        let ran = |code: Option<i32>, stdout: &str| Ran {
            code,
            stdout: stdout.into(),
            stderr: String::new(),
        };
        assert!(answer(&ran(Some(0), "[]")).is_ok());
        assert!(answer(&ran(Some(RUNNING_TWICE), "[]")).is_ok());
        assert!(answer(&ran(Some(RUNNING_TWICE), "{\"error\": {}}")).is_err());
        assert!(answer(&ran(Some(3), "[]")).is_err());
        assert!(answer(&ran(None, "")).is_err());
    }
}
