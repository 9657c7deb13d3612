//! A guest's serial console: printed, followed, and typed to.
//!
//! Owns nothing: each word goes to the host where the VM is, and each piece of text comes from there. A stream ends where that
//! host's does, as it does with a move; who follows asks again from its place on and is led to where the VM is then. Refuses:
//! to follow, or to type, on a host that is too old for it.

use crate::app::App;
use crate::error::{Outcome, refuse, way_out};
use futures_util::stream::{self, Stream};
use godwit_rpc::AgentClient;
use godwit_rpc::ClientError;
use godwit_rpc::sse::EventStream;
use godwit_types::console::{ConsolePiece, ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{ConsoleText, Done};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::time::Duration;

/// Longest silence of a host whose guest writes nothing: its stream is kept alive four times in this.
const SILENCE: Duration = Duration::from_secs(60);

/// The host whose copy is meant, and its agent.
fn at(app: &App, name: &VmName, host: Option<HostName>) -> Outcome<(HostName, AgentClient)> {
    let host = match host {
        Some(host) => host,
        None => {
            let place = app.place_of(name).map_err(way_out)?;
            if place.vm.is_none_or(|vm| vm.state.is_off()) {
                return refuse(
                    ErrorCode::WrongState,
                    format!("VM {name} is not running: run 'godwit vm start {name}'"),
                );
            }
            place.host
        }
    };
    let agent = app.connected_agent(&host).map_err(way_out)?;
    Ok((host, agent))
}

/// The last of what the guest wrote: the copy on one host, or where the VM is.
pub async fn console(app: &App, name: &VmName, host: Option<HostName>) -> Outcome<ConsoleText> {
    let (host, agent) = at(app, name, host)?;
    let told = agent.console(name).await;
    let mut console = told.map_err(|error| ApiError::from(error).on_host(&host))?;
    // Who was asked is known here; an older host does not say.
    console.host = Some(host);
    Ok(console)
}

/// What the guest writes, from a place on, for as long as it is on the host where it is now.
pub async fn follow(
    app: &App,
    name: &VmName,
    query: ConsoleQuery,
) -> Outcome<impl Stream<Item = Result<ConsolePiece, ApiError>> + use<>> {
    let (host, agent) = at(app, name, query.host)?;
    let from = ConsoleQuery {
        place: query.place,
        host: None,
    };
    let opened = agent.console_events(name, &from).await;
    let events = opened.map_err(|error| refused(&host, error))?;
    Ok(stream::unfold(Some((events, host)), async |follower| {
        let (mut events, host) = follower?;
        let next = next(&mut events, &host).await?;
        let follower = next.is_ok().then_some((events, host));
        Some((next, follower))
    }))
}

/// Nothing where the host has ended the stream without a word, as one does that ends itself.
async fn next(events: &mut EventStream, host: &HostName) -> Option<Result<ConsolePiece, ApiError>> {
    let event = match events.next_while_heard(SILENCE).await {
        Ok(event) => event?,
        Err(error) => return Some(Err(ApiError::from(error).on_host(host))),
    };
    let unread = |error: serde_json::Error| {
        let message =
            format!("host {host} tells of a console in words that are not known here: {error}");
        ApiError::new(ErrorCode::Internal, message).on_host(host)
    };
    if event.name == "error" {
        let error = serde_json::from_str::<ApiError>(&event.data);
        return Some(Err(
            error.map_or_else(unread, |error| error.bounded().on_host(host))
        ));
    }
    let piece = serde_json::from_str::<ConsolePiece>(&event.data).map_err(unread);
    Some(piece.map(|piece| ConsolePiece {
        host: Some(host.clone()),
        ..piece
    }))
}

/// Types to the guest.
pub async fn type_in(
    app: &App,
    name: &VmName,
    host: Option<HostName>,
    typed: &ConsoleTyped,
) -> Outcome<Done> {
    let (host, agent) = at(app, name, host)?;
    let done = agent.console_type(name, typed).await;
    done.map_err(|error| refused(&host, error))
}

/// A host that is older knows no such route.
fn refused(host: &HostName, error: ClientError) -> ApiError {
    let error = ApiError::from(error);
    if error.code != ErrorCode::NotFound {
        return error.on_host(host);
    }
    let message = format!(
        "host {host} runs an older Godwit, whose consoles only print: update it, or use 'godwit vm console VM --print'"
    );
    ApiError::new(ErrorCode::Incompatible, message).on_host(host)
}
