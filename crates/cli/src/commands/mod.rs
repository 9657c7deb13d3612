//! The commands, one file per noun.

pub mod agent;
pub mod audit;
pub mod bench;
pub mod close;
mod config_file;
mod console;
pub mod controller;
pub mod drain;
pub mod host;
pub mod image;
pub mod join;
pub mod leave;
pub mod migration;
pub mod operator;
pub mod pages;
pub mod renew;
pub mod site;
mod token;
pub mod vm;

use crate::args::{Cli, Command, ControllerCommand};
use crate::exit::CommandResult;
use crate::output::Output;

/// Carries a command out.
pub async fn run(cli: Cli, output: &Output) -> CommandResult {
    let global = &cli.global;
    operator::renew_if_due(global).await;
    match cli.command {
        Command::Controller(ControllerCommand::Init(arguments)) => {
            controller::init(arguments, output).await
        }
        Command::Agent(command) => agent::run(command).await,
        Command::Host(command) => host::run(command, global, output).await,
        Command::Operator(command) => operator::run(command, global, output).await,
        Command::Vm(command) => vm::run(command, global, output).await,
        Command::Image(command) => image::run(&command, output),
        Command::Migration(command) => migration::run(command, global, output).await,
        Command::Audit(arguments) => audit::run(arguments, global, output).await,
        Command::Site(command) => site::run(command, global, output).await,
        Command::Bench { arguments } => bench::run(&arguments),
        Command::Completion { shell } => pages::completion(shell),
        Command::Man { dir } => pages::man(&dir, output),
        // Make their own threads or runtime and never come here: see `main`.
        Command::VmProcess { .. } | Command::Controller(ControllerCommand::Run { .. }) => Ok(()),
    }
}
