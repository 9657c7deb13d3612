//! Emptying hosts: what was asked, durably, and one task per host that moves its VMs away.
//!
//! Writes the records of all drains: the database first, then they are shown. A drain that was under way goes
//! on after a restart of the controller. A host that is being emptied, or was, takes no VMs until somebody ends that.
//! Refuses: to shut a VM down; to move one that preflight refuses.

mod dry;
mod patience;
mod plan;
mod run;
mod takers;

use crate::app::{App, now};
use crate::error::{ControllerError, Outcome, refuse, way_out};
use godwit_types::control_api::Done;
use godwit_types::drain::{DrainRequest, DrainState, DrainView};
use godwit_types::{ApiError, ErrorCode, HostName};
use std::sync::Arc;
use tokio::sync::watch;

/// Goes on with what was under way when the controller stopped.
pub async fn resume(app: &Arc<App>) -> Result<(), ControllerError> {
    let (drains, unread) = app.store.drains().await?;
    app.state().unread.extend(unread);
    for view in drains {
        let (host, goes_on) = (view.host.clone(), view.state == DrainState::Draining);
        let run = app.drains.put(view);
        if goes_on {
            tracing::info!(%host, "the host is still to be emptied");
            run::spawn(app.clone(), host, run);
        }
    }
    Ok(())
}

/// Begins, begins anew after the end, or only plans.
pub async fn begin(app: &Arc<App>, host: &HostName, request: &DrainRequest) -> Outcome<DrainView> {
    check(app, host, request)?;
    let mut view = DrainView {
        host: host.clone(),
        state: DrainState::Planned,
        began_unix_s: now(),
        request: request.clone(),
        vms: Vec::new(),
        at_once: 1,
        plan: String::new(),
        eta_s: None,
    };
    if request.dry_run {
        dry::dry(app, &mut view).await;
        return Ok(view);
    }
    let _turn = app.drains.turn().await;
    // Whoever had the turn before may have changed what was found above.
    check(app, host, request)?;
    if let Some(known) = app.drains.get(host)
        && known.state == DrainState::Draining
    {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "host {host} is being emptied already: see 'godwit host drain {host} --status', or end it with 'godwit host undrain {host}'"
            ),
        );
    }
    view.state = DrainState::Draining;
    run::look(app, &mut view);
    app.store.save_drain(&view).await?;
    let run = app.drains.put(view.clone());
    app.tell_drain(host);
    tracing::info!(%host, vms = view.vms.len(), "the host is being emptied");
    run::spawn(app.clone(), host.clone(), run);
    Ok(view)
}

fn check(app: &App, host: &HostName, request: &DrainRequest) -> Outcome<()> {
    app.connected_agent(host).map_err(way_out)?;
    if request.at_once == Some(0) {
        return refuse(
            ErrorCode::InvalidRequest,
            "at_once = 0 moves nothing: give at least 1 or leave it out",
        );
    }
    for to in &request.to {
        app.host(to)?;
        if to == host || app.drains.is_draining(to) {
            return refuse(
                ErrorCode::InvalidRequest,
                format!("host {to} is being emptied itself: name another one"),
            );
        }
    }
    Ok(())
}

/// How far the emptying of a host is.
pub fn view(app: &App, host: &HostName) -> Outcome<DrainView> {
    app.host(host)?;
    app.drains.get(host).ok_or_else(|| not_draining(host))
}

/// How far it is, now and from now on.
pub fn watch(app: &App, host: &HostName) -> Outcome<watch::Receiver<DrainView>> {
    app.host(host)?;
    app.drains.watch(host).ok_or_else(|| not_draining(host))
}

/// Ends it: the host takes VMs again. Moves under way go on to their end.
pub async fn stop(app: &App, host: &HostName) -> Outcome<Done> {
    let _turn = app.drains.turn().await;
    let Some(view) = app.drains.get(host) else {
        app.host(host)?;
        return Err(not_draining(host));
    };
    app.store.delete_drain(host).await?;
    app.drains.remove(host);
    app.tell_drain(host);
    tracing::info!(%host, "the host takes VMs again");
    let going_on = app
        .state()
        .active
        .values()
        .filter(|moving| moving.from == *host)
        .count();
    let rest = match going_on {
        0 => String::new(),
        1 => "; one migration from it is still under way".to_owned(),
        count => format!("; {count} migrations from it go on"),
    };
    let was = if view.state == DrainState::Draining {
        "is not emptied any further and"
    } else {
        ""
    };
    let sentence = format!("Host {host} {was} takes VMs again{rest}.");
    Ok(Done {
        message: sentence.replace("  ", " "),
    })
}

/// Forgets a host that was removed.
pub async fn forget(app: &App, host: &HostName) -> Result<(), ControllerError> {
    let _turn = app.drains.turn().await;
    app.store.delete_drain(host).await?;
    app.drains.remove(host);
    Ok(())
}

fn not_draining(host: &HostName) -> ApiError {
    ApiError::new(
        ErrorCode::NotDraining,
        format!("host {host} is not being emptied: begin with 'godwit host drain {host}'"),
    )
}
