//! What the installed QEMU is and can: version, machine types, sandbox, and what a trial of it shows.
//!
//! Asked by running the program; owned by whoever asked. Refuses: to wait longer than it was told.

use crate::qemu_trial::{TrialSetting, Tried};
use godwit_qemu::program::version_in;
use godwit_types::vm::Accelerator;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use tokio::process::Command;

/// Why QEMU told nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QemuFactsError {
    /// It could not be run.
    #[error(
        "cannot run {program}: {source}; install QEMU (package qemu-system-x86) or set qemu in the configuration"
    )]
    Run {
        program: String,
        source: std::io::Error,
    },
    /// It did not answer.
    #[error("{program} {argument} did not answer within {seconds} s")]
    Silent {
        program: String,
        /// What it was asked.
        argument: String,
        seconds: u64,
    },
    /// Its answer was not understood.
    #[error("{program} --version says '{text}', which names no version")]
    NoVersion { program: String, text: String },
}

/// What QEMU is and can.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QemuFacts {
    /// Version, such as `7.2.22`.
    pub version: String,
    pub machine_types: Vec<String>,
    /// `q35` and `pc` and what they stand for.
    pub machine_aliases: BTreeMap<String, String>,
    /// What it showed when it was started.
    pub tried: Tried,
    /// Whether it was built with its seccomp sandbox.
    pub sandbox: bool,
}

impl QemuFacts {
    /// Asks the program, and starts it as for a VM; each question may take `patience`.
    pub async fn ask_and_try(
        program: &Path,
        setting: TrialSetting,
        patience: Duration,
    ) -> Result<Self, QemuFactsError> {
        let mut facts = Self::ask(program, patience).await?;
        let tried = tokio::task::spawn_blocking(move || setting.ask()).await;
        facts.tried = tried.unwrap_or_default();
        Ok(facts)
    }

    /// CPU models that a guest can have whole under each accelerator that was asked.
    pub fn cpu_models(&self) -> BTreeMap<Accelerator, Vec<String>> {
        let asked = self.tried.cpus.iter();
        let whole = asked.filter_map(|(accelerator, cpus)| {
            let cpus = cpus.as_ref().ok()?;
            Some((*accelerator, cpus.whole().map(str::to_owned).collect()))
        });
        whole.collect()
    }

    /// Asks the program; each question may take `patience`.
    async fn ask(program: &Path, patience: Duration) -> Result<Self, QemuFactsError> {
        let version = parse_version(program, &run(program, &["--version"], patience).await?)?;
        let (machine_types, machine_aliases) =
            parse_machines(&run(program, &["-machine", "help"], patience).await?);
        let help = run(program, &["--help"], patience).await?;
        Ok(Self {
            version,
            machine_types,
            machine_aliases,
            tried: Tried::default(),
            sandbox: help.contains("-sandbox"),
        })
    }
}

async fn run(program: &Path, args: &[&str], patience: Duration) -> Result<String, QemuFactsError> {
    let name = program.display().to_string();
    let output = Command::new(program)
        .args(args)
        .kill_on_drop(true)
        .stdin(std::process::Stdio::null())
        .output();
    match tokio::time::timeout(patience, output).await {
        Ok(Ok(output)) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(Err(source)) => Err(QemuFactsError::Run {
            program: name,
            source,
        }),
        Err(_) => Err(QemuFactsError::Silent {
            program: name,
            argument: args.join(" "),
            seconds: patience.as_secs(),
        }),
    }
}

fn parse_version(program: &Path, text: &str) -> Result<String, QemuFactsError> {
    version_in(text)
        .map(str::to_string)
        .ok_or_else(|| QemuFactsError::NoVersion {
            program: program.display().to_string(),
            text: text.lines().next().unwrap_or_default().to_string(),
        })
}

/// Machine types with a version in their name, and the aliases among the rest.
fn parse_machines(text: &str) -> (Vec<String>, BTreeMap<String, String>) {
    let mut types = Vec::new();
    let mut aliases = BTreeMap::new();
    for line in text.lines().skip(1) {
        let Some(name) = line.split_whitespace().next() else {
            continue;
        };
        if let Some((_, rest)) = line.split_once("(alias of ") {
            let stands_for = rest.split(')').next().unwrap_or_default();
            aliases.insert(name.to_string(), stands_for.to_string());
        } else if name.starts_with("pc-") {
            types.push(name.to_string());
        }
    }
    (types, aliases)
}

/// Numbers of a version such as `7.2.22` or `pc-q35-10.0`, for comparing.
pub fn version_numbers(text: &str) -> Vec<u32> {
    let tail = text.rsplit('-').next().unwrap_or(text);
    tail.split('.')
        .map_while(|part| part.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_types_and_aliases_are_told_apart() {
        let text = "Supported machines are:\nmicrovm  microvm (i386)\npc  Standard PC (alias of pc-i440fx-7.2)\npc-i440fx-7.2 Standard PC\nq35 Q35 (alias of pc-q35-7.2)\npc-q35-7.2 Q35\n";
        let (types, aliases) = parse_machines(text);
        assert_eq!(types, ["pc-i440fx-7.2", "pc-q35-7.2"]);
        assert_eq!(aliases["q35"], "pc-q35-7.2");
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(version_numbers("pc-q35-10.0") > version_numbers("7.2.22"));
        assert!(version_numbers("pc-q35-7.2") <= version_numbers("7.2.22"));
        assert!(parse_version(Path::new("q"), "no numbers").is_err());
    }

    #[tokio::test]
    async fn a_program_that_is_missing_is_named_with_the_remedy() {
        let error = QemuFacts::ask(Path::new("/nonexistent/qemu"), Duration::from_secs(1))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("qemu-system-x86"), "{error}");
    }

    #[tokio::test]
    async fn a_silent_program_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        // Written by a child: a descriptor of ours that is open for writing may be held by a child that another test has
        // just forked, and then the program cannot be run.
        let write = "printf '#!/bin/sh\nexec sleep 60\n' >\"$0\" && chmod 755 \"$0\"";
        let mut sh = std::process::Command::new("sh");
        let status = sh.args(["-c", write]).arg(&program).status();
        assert!(status.unwrap().success());
        let error = QemuFacts::ask(&program, Duration::from_millis(200))
            .await
            .unwrap_err();
        assert!(matches!(error, QemuFactsError::Silent { .. }), "{error}");
    }
}
