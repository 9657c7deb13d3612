//! Whom a command talks to: the controller, or the agent of this host where no controller is.
//!
//! Owns the choice. Refuses: a remote controller without an operator certificate.

use crate::args::{Global, controller_address};
use crate::exit::Failure;
use crate::output::Output;
use crate::plain;
use godwit_rpc::{AgentClient, Client, ControllerClient, Identity, Role};
use godwit_types::ErrorCode;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The controller's socket unless said otherwise.
pub const CONTROLLER_SOCKET: &str = "/run/godwit/controller.sock";
/// The agent's socket unless said otherwise.
pub const AGENT_SOCKET: &str = "/run/godwit/agent.sock";

/// The one whom commands that only read may ask.
pub enum Reader {
    Controller(ControllerClient),
    Agent(AgentClient),
}

/// A connection to the controller that the options name.
pub fn controller(global: &Global) -> Result<ControllerClient, Failure> {
    let place = global.controller.as_deref().unwrap_or(CONTROLLER_SOCKET);
    match controller_address(place) {
        Ok(address) => remote(address, global.certificate.as_deref()),
        // A socket has a path; a bare word may be one in this directory.
        Err(_) if !place.contains('/') && !Path::new(place).exists() => Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!(
                "'{place}' is neither a socket's path nor an address: write --controller ADDRESS:PORT with an IP address, such as 10.0.0.1:8471; names of machines are not looked up"
            ),
        )),
        Err(_) => local(Path::new(place)),
    }
}

fn local(path: &Path) -> Result<ControllerClient, Failure> {
    if !path.exists() || is_left_behind(path) {
        return Err(Failure::new(
            ErrorCode::HostUnreachable,
            format!(
                "no controller listens on {}: run this where it runs, start it with 'godwit controller run', or name it with --controller ADDRESS:PORT",
                path.display()
            ),
        ));
    }
    Ok(ControllerClient::new(Client::unix(path)))
}

/// Whether nobody listens on a socket any more: its program was killed.
fn is_left_behind(socket: &Path) -> bool {
    let tried = UnixStream::connect(socket);
    tried.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

fn remote(address: SocketAddr, certificate: Option<&Path>) -> Result<ControllerClient, Failure> {
    let Some(dir) = certificate else {
        return Err(Failure::new(
            ErrorCode::NotAllowed,
            format!(
                "the controller at {address} wants an operator certificate: give its directory with --certificate DIR"
            ),
        ));
    };
    let client =
        Identity::load(dir).and_then(|identity| Client::tls(address, &identity, Role::Controller));
    let client = client.map_err(|error| {
        let remedy = match dir.join("ca.pem").exists() {
            true => "",
            false => "; give the directory that 'godwit operator add' wrote",
        };
        let message = format!(
            "the operator certificate in {} cannot be used: {error}{remedy}",
            dir.display()
        );
        Failure::new(ErrorCode::NotAllowed, message)
    })?;
    Ok(ControllerClient::new(client))
}

/// The agent of this host.
pub fn agent(global: &Global) -> Option<AgentClient> {
    let path = agent_socket(global);
    path.exists().then(|| AgentClient::new(Client::unix(path)))
}

/// The same, of one that may only be starting.
pub fn coming_agent(global: &Global) -> AgentClient {
    AgentClient::new(Client::unix(agent_socket(global)))
}

fn agent_socket(global: &Global) -> &Path {
    let usual = Path::new(AGENT_SOCKET);
    global.agent.as_deref().unwrap_or(usual)
}

/// Says whose word a list is that could have been the controller's: the other one has other columns, and less in it.
pub fn tell_own(global: &Global, output: &Output) {
    let place = global.controller.as_deref().unwrap_or(CONTROLLER_SOCKET);
    if !output.json {
        plain::tell(&format!(
            "no controller answers at {place}, or it turns you away: this is what this host's own agent knows"
        ));
    }
}

/// The controller if it answers, else the agent of this host; a controller that was named is never passed over.
pub async fn reader(global: &Global) -> Result<Reader, Failure> {
    let controller = controller(global);
    if global.controller.is_some() && global.agent.is_none() {
        return controller.map(Reader::Controller);
    }
    let Some(agent) = agent(global) else {
        return controller.map(Reader::Controller);
    };
    match controller {
        Ok(client) if client.version().await.is_ok() => Ok(Reader::Controller(client)),
        _ => Ok(Reader::Agent(agent)),
    }
}
