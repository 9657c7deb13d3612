//! `godwit agent`: runs the agent until a signal, or reads its records without one.
//!
//! Owns nothing.

use crate::args::AgentCommand;
use crate::exit::{CommandResult, Failure};
use godwit_agent::VmProgram;
use godwit_types::ErrorCode;
use std::path::Path;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Carries a command out.
pub async fn run(command: AgentCommand) -> CommandResult {
    let config = match command {
        AgentCommand::Run { config } => config,
        AgentCommand::OnRecord { config } => return on_record(&config),
    };
    let program = VmProgram::this_program().map_err(|error| failed(&error))?;
    let stop = stop_signal().map_err(|error| failed(&error))?;
    godwit_agent::run(&config, program, stop)
        .await
        .map_err(|error| failed(&error))
}

/// One name a line: read by the script that is to refuse a removal of the package.
fn on_record(config: &Path) -> CommandResult {
    let found = godwit_agent::on_record(config).map_err(|error| failed(&error))?;
    found.iter().for_each(|vm| println!("{vm}"));
    Ok(())
}

fn failed(error: &impl std::fmt::Display) -> Failure {
    Failure::new(ErrorCode::Internal, error.to_string())
}

/// Turns true at SIGTERM or Ctrl-C.
pub fn stop_signal() -> std::io::Result<watch::Receiver<bool>> {
    let (sender, receiver) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = sender.send(true);
    });
    Ok(receiver)
}
