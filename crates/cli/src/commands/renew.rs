//! `godwit host renew`: another certificate for a host whose own has ended.
//!
//! Owns what it writes: the certificate and its key. It shows the key that the host had, so that the controller knows it
//! for the host that is enrolled, and has a running agent take the new one before it ends. Refuses: a machine that has not
//! joined, a token of another controller.

use crate::args::HostRenew;
use crate::commands::token;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::watch::failure;
use godwit_agent::config::HostConfig;
use godwit_rpc::pki::{PkiError, Request};
use godwit_rpc::{AgentClient, Client, ClientError, ControllerClient, Identity, Token};
use godwit_types::ErrorCode;
use godwit_types::control_api::{Done, JoinRequest};
use std::net::SocketAddr;

fn wrong(error: PkiError) -> Failure {
    let message = format!("cannot renew this host's certificate: {error}");
    Failure::new(ErrorCode::Internal, message)
}

/// Replaces this host's certificate, also one that has expired.
pub async fn run(arguments: HostRenew, output: &Output) -> CommandResult {
    let token = token::read(&arguments.token)?;
    let config = HostConfig::load(&arguments.config)
        .map_err(|error| Failure::new(ErrorCode::InvalidRequest, error.to_string()))?;
    let dir = config.pki_dir();
    let former = Identity::load(&dir).map_err(wrong)?;
    if former.ca_fingerprint().map_err(wrong)? != token.fingerprint {
        return Err(Failure::new(
            ErrorCode::BadToken,
            "the token is another controller's than the one that this host joined: get one there with 'godwit host add'",
        ));
    }
    let request = Request::new().map_err(wrong)?;
    let shown = former.shown_as_former(token.secret(), &request.csr_pem);
    let body = JoinRequest {
        secret: token.secret().to_owned(),
        name: config.name.clone(),
        agent_address: config.listen,
        csr_pem: request.csr_pem.clone(),
        former: Some(shown.map_err(wrong)?),
    };
    let known = config.controller.as_slice().iter();
    let places: Vec<SocketAddr> = known.chain(&token.addresses).copied().collect();
    let answer = ask(&token, &places, &body).await?;
    let identity = request
        .into_successor(answer.certificate_pem, answer.ca_pem, &former)
        .map_err(wrong)?;
    identity.save(&dir).map_err(wrong)?;
    let taken = take(&config).await;
    let message = format!(
        "host '{}' has a new certificate; {taken}; its VMs keep running",
        config.name
    );
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// Has a running agent take what was written; says how that went.
async fn take(config: &HostConfig) -> String {
    let agent = AgentClient::new(Client::unix(&config.agent_socket()));
    match agent.take_certificate().await {
        Ok(_) => "its agent speaks with it".into(),
        Err(ClientError::NotReached { .. }) => "its agent takes it when it starts".into(),
        Err(ClientError::Refused(error)) if error.code == ErrorCode::NotFound => {
            "its agent is of an older version, and takes it within ten minutes, or at once when it is restarted".into()
        }
        Err(error) => format!("its agent says: {error}"),
    }
}

/// Asks at each place until one is reached.
async fn ask(
    token: &Token,
    places: &[SocketAddr],
    body: &JoinRequest,
) -> Result<godwit_types::control_api::JoinResponse, Failure> {
    let mut last = Failure::new(
        ErrorCode::BadToken,
        "the token names no address of the controller, and host.toml neither: add controller = \"ADDRESS:PORT\"",
    );
    for place in places {
        let client = Client::joining(*place, token.fingerprint).map_err(wrong)?;
        match ControllerClient::new(client).join(body).await {
            Ok(answer) => return Ok(answer),
            Err(error) if error.may_be_done() || error.code() != ErrorCode::HostUnreachable => {
                return Err(failure(error));
            }
            Err(error) => last = failure(error),
        }
    }
    Err(last)
}
