//! What the shell offers when a person presses the tab key: commands, options, and the names of VMs, hosts, migrations
//! and operators as the controller knows them now.
//!
//! Owns nothing. Names come from whom the environment names, else the local sockets. Refuses: to keep a person waiting
//! longer than [`WAIT`] or to print an error where none can be read; then no name is offered.

use crate::args::{Cli, Global};
use crate::connect::{Reader, reader};
use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use godwit_rpc::ClientError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The variable by which a shell asks for completions.
const VAR: &str = "COMPLETE";
/// Names are worth waiting for no longer than this.
const WAIT: Duration = Duration::from_secs(1);

/// What an argument names, by the argument's own name.
const VMS: &[&str] = &["vm"];
const HOSTS: &[&str] = &[
    "host",
    "to",
    "on",
    "run_on",
    "give_up_on",
    "confirm_fenced",
    "keep",
];
const MIGRATIONS: &[&str] = &["id"];
const OPERATORS: &[&str] = &["operator"];

/// Asks for the names of one kind.
type Names = fn() -> Vec<CompletionCandidate>;

/// Answers a shell that asks for completions, and ends the process then.
pub fn answer() {
    CompleteEnv::with_factory(tree).var(VAR).complete();
}

/// Prints what a shell has to run once.
pub fn register(shell: clap_complete::Shell, to: &mut dyn io::Write) -> io::Result<()> {
    let shells = Shells::builtins();
    let Some(shell) = shells.completer(&shell.to_string()) else {
        return Ok(());
    };
    shell.write_registration(VAR, "godwit", "godwit", "godwit", to)
}

/// The commands with what completes their arguments.
fn tree() -> Command {
    named(Cli::command())
}

fn named(mut command: Command) -> Command {
    let kinds: [(&[&str], Names); 4] = [
        (VMS, vms),
        (HOSTS, hosts),
        (MIGRATIONS, migrations),
        (OPERATORS, operators),
    ];
    for (ids, candidates) in kinds {
        for id in ids {
            let takes = |arg: &clap::Arg| arg.get_id() == id && arg.get_action().takes_values();
            if command.get_arguments().any(takes) {
                command = command.mut_arg(id, |arg| arg.add(ArgValueCandidates::new(candidates)));
            }
        }
    }
    command.mut_subcommands(named)
}

fn vms() -> Vec<CompletionCandidate> {
    ask(async |reader| match reader {
        Reader::Controller(client) => told(client.vms().await, |vm| (vm.spec.name, vm.state)),
        Reader::Agent(client) => told(client.vms().await, |vm| (vm.spec.name, vm.state)),
    })
}

fn hosts() -> Vec<CompletionCandidate> {
    ask(async |reader| match reader {
        Reader::Controller(client) => told(client.hosts().await, |host| (host.info.name, "")),
        Reader::Agent(_) => None,
    })
}

fn operators() -> Vec<CompletionCandidate> {
    ask(async |reader| match reader {
        Reader::Controller(client) => {
            let operators = client.operators().await.ok()?.into_iter();
            Some(operators.map(|one| (one.name, String::new())).collect())
        }
        Reader::Agent(_) => None,
    })
}

fn migrations() -> Vec<CompletionCandidate> {
    ask(async |reader| match reader {
        Reader::Controller(client) => told(client.migrations().await, |one| (one.id, one.vm)),
        Reader::Agent(client) => told(client.migrations().await, |one| (one.id, one.vm)),
    })
}

/// Each one's name and a word about it, if they were told.
fn told<T, N: ToString, W: ToString>(
    all: Result<Vec<T>, ClientError>,
    about: impl Fn(T) -> (N, W),
) -> Option<Vec<(String, String)>> {
    let pairs = all.ok()?.into_iter().map(about);
    let texts = pairs.map(|(name, word)| (name.to_string(), word.to_string()));
    Some(texts.collect())
}

/// Names with a word about each, from whoever answers in time.
fn ask(
    question: impl AsyncFnOnce(Reader) -> Option<Vec<(String, String)>>,
) -> Vec<CompletionCandidate> {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    else {
        return Vec::new();
    };
    let asked = async {
        let reader = reader(&global()).await.ok()?;
        question(reader).await
    };
    // Within the runtime, whose clock it is.
    let answer = runtime.block_on(async { tokio::time::timeout(WAIT, asked).await.ok()? });
    let names = answer.unwrap_or_default().into_iter();
    let candidate = |(name, about): (String, String)| {
        let help = (!about.is_empty()).then(|| about.into());
        CompletionCandidate::new(name).help(help)
    };
    names.map(candidate).collect()
}

/// The options on the line that is being written are not known; the environment is.
fn global() -> Global {
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from);
    Global {
        json: false,
        controller: std::env::var("GODWIT_CONTROLLER").ok(),
        certificate: path("GODWIT_CERTIFICATE"),
        agent: path("GODWIT_AGENT"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every argument of the whole tree that completes names.
    fn completed(command: &Command, path: &str, found: &mut Vec<String>) {
        for arg in command.get_arguments() {
            if arg.get::<ArgValueCandidates>().is_some() {
                found.push(format!("{path} {}", arg.get_id()));
            }
        }
        for sub in command.get_subcommands() {
            completed(sub, &format!("{path} {}", sub.get_name()), found);
        }
    }

    #[test]
    fn names_of_vms_hosts_and_migrations_are_completed_and_a_new_hosts_name_is_not() {
        let mut found = Vec::new();
        completed(&tree(), "", &mut found);
        for wanted in [
            " vm migrate vm",
            " vm migrate to",
            " vm start on",
            " host drain host",
            " migration cancel id",
        ] {
            assert!(found.iter().any(|one| one == wanted), "{wanted}: {found:?}");
        }
        assert!(
            !found.iter().any(|one| one.starts_with(" host join")),
            "{found:?}"
        );
    }

    #[test]
    fn every_shell_gets_a_script_that_asks_for_names() {
        use clap_complete::Shell::{Bash, Fish, Zsh};
        for shell in [Bash, Zsh, Fish] {
            let mut script = Vec::new();
            register(shell, &mut script).unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(
                script.contains(VAR) && script.contains("godwit"),
                "{script}"
            );
        }
    }
}
