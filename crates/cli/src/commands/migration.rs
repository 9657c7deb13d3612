//! `godwit migration`: list, show, watch, cancel; against the controller, or the agent of either host without it.
//!
//! Owns nothing.

use crate::args::{Global, MigrationCommand};
use crate::connect::{Reader, reader, tell_own};
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::watch::{failure, watch};
use godwit_rpc::ClientError;
use godwit_types::control_api::{CancelRequest, Done};
use godwit_types::migration::MigrationReport;
use godwit_types::{ErrorCode, MigrationId};

/// Carries a command out.
pub async fn run(command: MigrationCommand, global: &Global, output: &Output) -> CommandResult {
    let reader = reader(global).await?;
    match command {
        MigrationCommand::List => {
            if matches!(reader, Reader::Agent(_)) {
                tell_own(global, output);
            }
            output.show(&list(&reader).await.map_err(failure)?, |output, reports| {
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
            let mut done = cancel(&reader, &id).await;
            if matches!(&done, Err(error) if error.code() == ErrorCode::UnknownMigration)
                && let Some(id) = under_way(&list(&reader).await.map_err(failure)?, id.as_str())?
            {
                done = cancel(&reader, &id).await;
            }
            output.show(&done.map_err(failure)?, |output, done| {
                output.line(&done.message)
            });
        }
    }
    Ok(())
}

async fn list(reader: &Reader) -> Result<Vec<MigrationReport>, ClientError> {
    match reader {
        Reader::Controller(client) => client.migrations().await,
        Reader::Agent(client) => client.migrations().await,
    }
}

async fn cancel(reader: &Reader, id: &MigrationId) -> Result<Done, ClientError> {
    let request = CancelRequest::default();
    match reader {
        Reader::Controller(client) => client.cancel(id, &request).await,
        Reader::Agent(client) => client.cancel(id, &request).await,
    }
}

/// The one migration that moves the VM of this name, if there is one.
fn under_way(reports: &[MigrationReport], vm: &str) -> Result<Option<MigrationId>, Failure> {
    let of_vm = |report: &&MigrationReport| report.vm.as_str() == vm && report.is_open();
    let open: Vec<&str> = reports
        .iter()
        .filter(of_vm)
        .map(|report| report.id.as_str())
        .collect();
    match open.as_slice() {
        [] => Ok(None),
        [one] => Ok(MigrationId::new(*one).ok()),
        several => Err(Failure::new(
            ErrorCode::WrongState,
            format!(
                "VM '{vm}' has several migrations whose end is not known: cancel one by its id: {}",
                several.join(", ")
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::REFUSED;
    use crate::move_report::tests::report;
    use serde_json::json;

    #[test]
    fn a_migration_is_found_by_its_vm_where_there_is_one_under_way() {
        let of = |id: &str, vm: &str, outcome: Option<&str>| {
            report(json!({"id": id, "vm": vm, "outcome": outcome}))
        };
        let mut reports = vec![
            of("m1", "web", Some("completed")),
            of("m2", "web", None),
            of("m3", "db", None),
        ];
        let found = |reports: &[MigrationReport]| under_way(reports, "web");
        assert_eq!(found(&reports).unwrap().unwrap().as_str(), "m2");
        assert_eq!(found(&reports[..1]).unwrap(), None);
        reports.push(of("m4", "web", Some("in-doubt")));
        let several = found(&reports).unwrap_err();
        assert_eq!(several.exit, REFUSED);
        assert!(several.error.message.ends_with("its id: m2, m4"));
    }
}
