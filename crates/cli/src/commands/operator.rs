//! `godwit operator`: certificates of people and scripts on other machines.
//!
//! Owns what it writes. Refuses: to write over a certificate that is there, but by one that takes its place.

use crate::args::{Global, OperatorCommand};
use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::plain;
use crate::watch::failure;
use godwit_rpc::pki::{PkiError, Request, now_unix_s};
use godwit_rpc::{ControllerClient, Identity};
use godwit_types::certificate::CertificateStage;
use godwit_types::control_api::{Done, OperatorRequest, RenewRequest};
use godwit_types::{ErrorCode, HostName};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn wrong(error: PkiError) -> Failure {
    Failure::new(ErrorCode::Internal, error.to_string())
}

/// Carries a command out.
pub async fn run(command: OperatorCommand, global: &Global, output: &Output) -> CommandResult {
    let message = match command {
        OperatorCommand::Add { name, dir } => add(name, &dir, global).await?,
        OperatorCommand::List => return list(global, output).await,
        OperatorCommand::Remove { operator } => {
            let done = controller(global)?.remove_operator(&operator).await;
            done.map_err(failure)?.message
        }
        OperatorCommand::Renew => {
            let Some(dir) = global.certificate.as_deref() else {
                return Err(Failure::new(
                    ErrorCode::InvalidRequest,
                    "name the certificate's directory with --certificate DIR",
                ));
            };
            renew(&controller(global)?, dir).await?
        }
    };
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

async fn list(global: &Global, output: &Output) -> CommandResult {
    let operators = controller(global)?.operators().await.map_err(failure)?;
    let now = now_unix_s();
    output.show(&operators, |output, operators| {
        if operators.is_empty() {
            return output.line("no operator has a certificate: see 'godwit operator add'");
        }
        let rows = operators.iter().map(|one| {
            let left = one.dates.left(now);
            vec![one.name.clone(), one.life.clone(), left]
        });
        output.table(&["name", "certificate", "until"], rows.collect());
    });
    Ok(())
}

async fn add(name: HostName, dir: &Path, global: &Global) -> Result<String, Failure> {
    if dir.join("cert.pem").exists() {
        let message = format!(
            "{} holds a certificate already: name another directory",
            dir.display()
        );
        return Err(Failure::new(ErrorCode::AlreadyExists, message));
    }
    let made = godwit_store::make_directory(dir, 0o700)
        .map_err(std::io::Error::other)
        .and_then(|()| std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)));
    made.map_err(|error| {
        let message = format!("cannot make {}: {error}", dir.display());
        Failure::new(ErrorCode::InvalidRequest, message)
    })?;
    let request = Request::new().map_err(wrong)?;
    let body = OperatorRequest {
        csr_pem: request.csr_pem.clone(),
        name: name.clone(),
    };
    let answer = controller(global)?.add_operator(&body).await;
    let answer = answer.map_err(failure)?;
    let identity = request.into_identity(answer.certificate_pem, answer.ca_pem);
    identity.and_then(|it| it.save(dir)).map_err(wrong)?;
    Ok(format!(
        "The certificate of operator {name} is in {0}: carry it to where {name} works, and name it there with --certificate {0}.",
        dir.display()
    ))
}

async fn renew(client: &ControllerClient, dir: &Path) -> Result<String, Failure> {
    let known = Identity::load(dir).map_err(wrong)?;
    let request = Request::new().map_err(wrong)?;
    let csr_pem = request.csr_pem.clone();
    let answer = client.renew_certificate(&RenewRequest { csr_pem }).await;
    let answer = answer.map_err(failure)?;
    let identity = request.into_successor(answer.certificate_pem, answer.ca_pem, &known);
    let identity = identity.map_err(wrong)?;
    identity.save(dir).map_err(wrong)?;
    let left = identity.holder().map_err(wrong)?.dates().left(now_unix_s());
    Ok(format!("The certificate in {} {left}.", dir.display()))
}

/// Renews the certificate that a command is about to use, where that is due. A command is not refused because that does
/// not work; what is near its end is told.
pub async fn renew_if_due(global: &Global) {
    let (Some(dir), Some(place)) = (&global.certificate, &global.controller) else {
        return;
    };
    let holder = Identity::load(dir).and_then(|identity| identity.holder());
    let (Ok(holder), Ok(_)) = (holder, place.parse::<SocketAddr>()) else {
        return;
    };
    let (dates, now) = (holder.dates(), now_unix_s());
    let stage = dates.stage(now);
    if !matches!(stage, CertificateStage::Due | CertificateStage::NearEnd) {
        return;
    }
    let renewed = match controller(global) {
        Ok(client) => renew(&client, dir).await,
        Err(error) => Err(error),
    };
    if let (Err(failure), CertificateStage::NearEnd) = (renewed, stage) {
        plain::tell(&format!(
            "warning: the operator certificate in {} {} and cannot be renewed: {}",
            dir.display(),
            dates.left(now),
            failure.error.message
        ));
    }
}
