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
    if matches!(
        (&command, &reader),
        (MigrationCommand::List, Reader::Agent(_))
    ) {
        tell_own(global, output);
    }
    carry_out(command, &reader, output).await
}

async fn carry_out(command: MigrationCommand, reader: &Reader, output: &Output) -> CommandResult {
    match command {
        MigrationCommand::List => {
            output.show(&list(reader).await.map_err(failure)?, |output, reports| {
                output.migrations(reports)
            });
        }
        MigrationCommand::Show { id } => {
            let report = named(reader, &id, async |id| show(reader, id).await).await?;
            output.show(&report, |output, report| output.migration(report));
        }
        MigrationCommand::Watch { id } => {
            let report = named(reader, &id, async |id| show(reader, id).await).await?;
            watch(reader, &report.id, output).await?;
        }
        MigrationCommand::Cancel { id } => {
            let done = named(reader, &id, async |id| cancel(reader, id).await).await?;
            output.show(&done, |output, done| output.line(&done.message));
        }
    }
    Ok(())
}

/// Does something with a migration, or with the one that moves the VM of this name.
async fn named<T>(
    reader: &Reader,
    id: &MigrationId,
    act: impl AsyncFn(&MigrationId) -> Result<T, ClientError>,
) -> Result<T, Failure> {
    let mut done = act(id).await;
    if matches!(&done, Err(error) if error.code() == ErrorCode::UnknownMigration)
        && let Some(id) = under_way(&list(reader).await.map_err(failure)?, id.as_str())?
    {
        done = act(&id).await;
    }
    done.map_err(failure)
}

async fn list(reader: &Reader) -> Result<Vec<MigrationReport>, ClientError> {
    match reader {
        Reader::Controller(client) => client.migrations().await,
        Reader::Agent(client) => client.migrations().await,
    }
}

async fn show(reader: &Reader, id: &MigrationId) -> Result<MigrationReport, ClientError> {
    match reader {
        Reader::Controller(client) => client.migration(id).await,
        Reader::Agent(client) => client.migration(id).await,
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
                "VM '{vm}' has several migrations whose end is not known: say which one by its id: {}",
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
    use godwit_rpc::{AgentClient, Client};
    use godwit_types::ApiError;
    use serde_json::json;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    /// An agent that knows of the migration m2 alone, which moves the VM web and has ended since it was listed.
    fn agent(listener: &UnixListener) {
        let ended = report(json!({"id": "m2", "outcome": "completed"}));
        let listed = report(json!({"id": "m2", "outcome": null}));
        let unknown = ApiError::new(ErrorCode::UnknownMigration, "there is none");
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let Some(Ok(asked)) = lines.next() else {
                continue;
            };
            lines.find(|line| line.as_ref().is_ok_and(String::is_empty));
            let (status, body) = match asked.split(' ').nth(1).unwrap() {
                "/v1/migrations" => ("200 OK", serde_json::to_string(&[&listed])),
                "/v1/migrations/m2" => ("200 OK", serde_json::to_string(&ended)),
                _ => ("404 Not Found", serde_json::to_string(&unknown)),
            };
            let body = body.unwrap();
            let len = body.len();
            let head = "content-type: application/json\r\nconnection: close";
            let answer =
                format!("HTTP/1.1 {status}\r\n{head}\r\ncontent-length: {len}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).unwrap();
        }
    }

    #[tokio::test]
    async fn a_migration_is_shown_and_watched_by_the_name_of_its_vm() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || agent(&listener));
        let reader = Reader::Agent(AgentClient::new(Client::unix(&socket)));
        let output = Output::new(true);
        for name in ["m2", "web"] {
            let id = MigrationId::new(name).unwrap();
            let show = MigrationCommand::Show { id: id.clone() };
            carry_out(show, &reader, &output).await.unwrap();
            let watch = MigrationCommand::Watch { id };
            carry_out(watch, &reader, &output).await.unwrap();
        }
        let id = MigrationId::new("db").unwrap();
        let show = MigrationCommand::Show { id: id.clone() };
        for command in [show, MigrationCommand::Watch { id }] {
            let refused = carry_out(command, &reader, &output).await.unwrap_err();
            assert_eq!(refused.error.code, ErrorCode::UnknownMigration);
        }
    }

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
