//! The binary `godwit`: command line, and the four roles controller, agent, VM process and user.
//!
//! Owns no logic of its own: parses, calls, shows. Refuses: nothing by itself.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod complete;
#[cfg(test)]
mod configuration_tests;
mod connect;
mod console_stream;
mod controller_file;
mod disk_rows;
#[cfg(test)]
mod examples_tests;
mod exit;
mod figures;
mod file_pages;
mod follow;
mod guest_rows;
mod host_rows;
mod journal;
mod keys;
mod move_report;
mod output;
mod plain;
mod raw_terminal;
mod tables;
#[cfg(test)]
mod troubleshooting_tests;
mod vm_journal;
mod vm_process_log;
mod wait;
mod watch;

use args::{AgentCommand, Cli, Command, ControllerCommand};
use clap::Parser;
use exit::Failure;
use godwit_store::load_json;
use godwit_types::ErrorCode;
use godwit_types::host_api::VmProcessConfig;
use output::Output;
use std::path::Path;
use std::process::ExitCode;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use vm_journal::VmJournal;

fn main() -> ExitCode {
    complete::answer();
    let cli = Cli::parse();
    let journal = start_logging(&cli.command);
    let json = cli.global.json;
    let result = match &cli.command {
        Command::VmProcess { config, handed } => vm_process(config, *handed, journal.as_ref()),
        Command::Controller(ControllerCommand::Run { config }) => {
            // What it keeps is its own, as the unit says.
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
            keep_memory_private().and_then(|()| commands::controller::serve(config))
        }
        _ => in_runtime(cli),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

/// The roles that run for long say what they do; commands only what goes wrong. Gives the journal's copy of a VM process's log.
fn start_logging(command: &Command) -> Option<VmJournal> {
    let daemon = matches!(
        command,
        Command::VmProcess { .. }
            | Command::Agent(AgentCommand::Run { .. })
            | Command::Controller(ControllerCommand::Run { .. })
    );
    let usual = if daemon {
        LevelFilter::INFO
    } else {
        LevelFilter::ERROR
    };
    let wished = std::env::var("GODWIT_LOG").unwrap_or_default();
    // Targets and levels; what is not written so counts as not given.
    let readable = !wished.is_empty() && !wished.contains('[');
    let filter = wished.parse::<Targets>().ok().filter(|_| readable);
    let (writer, journal) = match command {
        Command::VmProcess { config, .. } => {
            let log = vm_process_log::writer();
            let journal = log.is_file().then(|| vm_journal(config)).flatten();
            (BoxMakeWriter::new(move || log.clone()), journal)
        }
        _ => (BoxMakeWriter::new(std::io::stderr), None),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(false);
    let lines = match journal::is_stderr() {
        true => lines.event_format(journal::Lines).boxed(),
        false => lines.boxed(),
    };
    let copy = journal.clone().map(|journal| {
        tracing_subscriber::fmt::layer()
            .with_writer(move || journal.clone())
            .with_ansi(false)
            .event_format(journal::Lines)
    });
    tracing_subscriber::registry()
        .with(lines)
        .with(copy)
        .with(filter.unwrap_or_else(|| Targets::new().with_default(usual)))
        .init();
    journal
}

/// Where this host has a journal. A configuration that cannot be read is told by who needs it.
fn vm_journal(config: &Path) -> Option<VmJournal> {
    let config: VmProcessConfig = load_json(config).ok()??;
    let journal = VmJournal::open(Path::new(vm_journal::SOCKET), config.vm.as_str())?;
    journal.hear_panics();
    Some(journal)
}

fn internal(error: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorCode::Internal, error.to_string())
}

/// The VM process has plain threads only, and a session of its own so that nothing ends it with its agent.
fn vm_process(
    config: &Path,
    handed: Option<i32>,
    journal: Option<&VmJournal>,
) -> exit::CommandResult {
    // Fails only where it leads its session already.
    let _ = rustix::process::setsid();
    godwit_vmproc::run(config, handed).map_err(|error| {
        let why = format!("{error:#}");
        if let Some(journal) = journal {
            journal.tell_end(&why);
        }
        Failure {
            exit: godwit_agent::VM_PROCESS_FAILED,
            ..internal(why)
        }
    })
}

/// Of whoever holds keys: agent, controller, operators, and the commands that make them.
fn keep_memory_private() -> exit::CommandResult {
    godwit_agent::keep_memory_private()
        .map_err(|error| internal(format!("cannot keep keys out of core dumps: {error}")))
}

fn in_runtime(cli: Cli) -> exit::CommandResult {
    if matches!(cli.command, Command::Agent(_)) {
        // Before any other thread exists, since what is given up here is given up per thread.
        godwit_agent::harden()
            .map_err(|error| internal(format!("cannot give up privileges: {error}")))?;
    }
    if matches!(
        cli.command,
        Command::Controller(_) | Command::Host(_) | Command::Operator(_)
    ) {
        keep_memory_private()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(internal)?;
    let output = Output::new(cli.global.json);
    let result = runtime.block_on(commands::run(cli, &output));
    // Blocking work that is still under way is not waited for.
    runtime.shutdown_background();
    result
}
