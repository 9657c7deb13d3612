//! `godwit migration`: list, show, watch, cancel; against the controller, or the agent of either host without it.
//!
//! Owns nothing.

use crate::args::{Global, MigrationCommand};
use crate::connect::{Reader, reader, tell_own};
use crate::exit::CommandResult;
use crate::output::Output;
use crate::watch::{failure, watch};
use godwit_types::control_api::CancelRequest;

/// Carries a command out.
pub async fn run(command: MigrationCommand, global: &Global, output: &Output) -> CommandResult {
    let reader = reader(global).await?;
    match command {
        MigrationCommand::List => {
            if matches!(reader, Reader::Agent(_)) {
                tell_own(global, output);
            }
            let reports = match &reader {
                Reader::Controller(client) => client.migrations().await,
                Reader::Agent(client) => client.migrations().await,
            };
            output.show(&reports.map_err(failure)?, |output, reports| {
                output.migrations(reports)
            });
        }
        MigrationCommand::Show { id } => {
            let report = match &reader {
                Reader::Controller(client) => client.migration(&id).await,
                Reader::Agent(client) => client.migration(&id).await,
            };
            output.show(&report.map_err(failure)?, |output, report| {
                output.migration(report)
            });
        }
        MigrationCommand::Watch { id } => watch(&reader, &id, output).await?,
        MigrationCommand::Cancel { id } => {
            let request = CancelRequest::default();
            let done = match &reader {
                Reader::Controller(client) => client.cancel(&id, &request).await,
                Reader::Agent(client) => client.cancel(&id, &request).await,
            };
            output.show(&done.map_err(failure)?, |output, done| {
                output.line(&done.message)
            });
        }
    }
    Ok(())
}
