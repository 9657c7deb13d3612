//! Operations on hosts: tokens, joining, checking, removing.
//!
//! Owns nothing. Refuses: a token twice, a name twice, an agent address that others cannot reach, and removing a host
//! that holds VMs unless it does not answer and the operator says that it is off for good.

use crate::app::{App, unreachable_host};
use crate::error::{ControllerError, Outcome, refuse};
use crate::placement::drain;
use crate::reconcile;
use crate::state::{HostEntry, State};
use crate::store::Joined;
use crate::vms::done;
use godwit_rpc::pki::{PkiError, now_unix_s};
use godwit_rpc::token::hash_of;
use godwit_rpc::{ClientError, Role, Token};
use godwit_types::control_api::{Done, HostCheck, HostView, JoinRequest, JoinResponse, JoinToken};
use godwit_types::load::HostTop;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::sync::Arc;

/// A host as people see it.
pub fn view(app: &App, name: &HostName) -> Outcome<HostView> {
    app.host(name)?;
    let view = app.state().host_view(name, now_unix_s());
    let mut view = view.ok_or_else(|| unreachable_host(name))?;
    view.draining = app.drains.is_draining(name);
    Ok(view)
}

/// All hosts.
pub fn views(app: &App) -> Vec<HostView> {
    let state = app.state();
    let now = now_unix_s();
    let names = state.hosts.keys();
    names
        .filter_map(|name| {
            let mut view = state.host_view(name, now)?;
            view.draining = app.drains.is_draining(name);
            Some(view)
        })
        .collect()
}

/// A new one-time token.
pub async fn token(app: &App) -> Result<JoinToken, ControllerError> {
    let token = Token::new(app.authority.fingerprint(), app.advertise.clone())?;
    let now = now_unix_s();
    let valid_for_s = app.config.token_valid.as_secs();
    let expires = now.saturating_add(i64::try_from(valid_for_s).unwrap_or(i64::MAX));
    app.store
        .add_token(&hash_of(token.secret()), expires, now)
        .await?;
    let text = token.to_text();
    Ok(JoinToken {
        command: format!("godwit host join {text}"),
        token: text,
        valid_for_s,
    })
}

/// Enrols a host: uses the token up and certifies its key, or does neither.
pub async fn join(app: &Arc<App>, request: &JoinRequest) -> Outcome<JoinResponse> {
    let (hash, now) = (hash_of(&request.secret), now_unix_s());
    // Nothing is parsed for somebody without a good token.
    if !app.store.token_is_good(&hash, now).await? {
        return Err(bad_token());
    }
    if request.agent_address.ip().is_unspecified() || request.agent_address.port() == 0 {
        return refuse(
            ErrorCode::InvalidRequest,
            format!(
                "other machines cannot reach the agent at {}: give the host's own address and port",
                request.agent_address
            ),
        );
    }
    let role = Role::Host(request.name.clone());
    let issued = app
        .authority
        .sign(&request.csr_pem, &role, now)
        .map_err(|error| match error {
            PkiError::Request(_) => ApiError::new(ErrorCode::InvalidRequest, error.to_string()),
            other => ControllerError::from(other).into(),
        })?;
    let mut entry = HostEntry::new(request.agent_address, issued.serial);
    entry.last_seen_unix_s = now;
    match app.store.join(&hash, &request.name, &entry, now).await? {
        Joined::BadToken => return Err(bad_token()),
        Joined::NameTaken => {
            return refuse(
                ErrorCode::AlreadyExists,
                format!(
                    "a host {0} is enrolled: choose another name, or remove it first with 'godwit host remove {0}'",
                    request.name
                ),
            );
        }
        Joined::Yes => {}
    }
    app.revocations.extend(app.store.revoked().await?);
    // A host that is new here was never given anything, so nobody needs to wait for it.
    entry.heard = !app.store.was_removed(&request.name).await?;
    app.note_removed(&request.name, false);
    app.state().hosts.insert(request.name.clone(), entry);
    app.tell_host(&request.name);
    tracing::info!(host = %request.name, address = %request.agent_address, "host is enrolled");
    reconcile::spawn(app.clone(), request.name.clone());
    Ok(JoinResponse {
        certificate_pem: issued.certificate_pem,
        ca_pem: app.authority.certificate_pem().to_owned(),
    })
}

fn bad_token() -> ApiError {
    ApiError::new(
        ErrorCode::BadToken,
        "the join token is wrong, used or expired: get a new one with 'godwit host add'",
    )
}

/// A host's own checks.
pub async fn check(app: &App, host: &HostName) -> Outcome<HostCheck> {
    let (_, agent) = app.agent(host)?;
    let mut check = agent.check().await.map_err(|error| match error {
        ClientError::Refused(error) => error.on_host(host),
        _ => unreachable_host(host),
    })?;
    check.host = host.clone();
    Ok(check)
}

/// What every host is busy with, each asked at the same time.
pub async fn top(app: &Arc<App>) -> Vec<HostTop> {
    let names: Vec<HostName> = app.state().hosts.keys().cloned().collect();
    let mut asked = tokio::task::JoinSet::new();
    for host in names {
        let app = app.clone();
        asked.spawn(async move {
            let load = match app.connected_agent(&host) {
                Ok(agent) => agent.load().await.ok(),
                Err(_) => None,
            };
            let draining = app.drains.is_draining(&host);
            HostTop {
                host,
                load,
                draining,
            }
        });
    }
    let mut tops = asked.join_all().await;
    tops.sort_by(|a, b| a.host.cmp(&b.host));
    tops
}

/// Removes a host and revokes its certificate.
pub async fn remove(app: &App, host: &HostName, confirm_unreachable: bool) -> Outcome<Done> {
    let entry = app.host(host)?;
    let vms = app.state().vms_on(host);
    must_not_be_moving(app, host, &entry)?;
    if !vms.is_empty() {
        may_lose(host, &entry, &vms, confirm_unreachable)?;
    }
    if !entry.is_connected() {
        skip_generations(app, host, &entry).await?;
    }
    app.store
        .remove_host(host, &entry.serial, now_unix_s())
        .await?;
    app.revocations.revoke(entry.serial);
    app.note_removed(host, true);
    forget(&mut app.state(), host);
    // Last: no drain of a host that is not in the inventory begins.
    drain::forget(app, host).await?;
    app.tell_host(host);
    tracing::info!(%host, "host is removed, its certificate revoked");
    Ok(done(format!(
        "Host {host} is removed and its certificate revoked."
    )))
}

fn forget(state: &mut State, host: &HostName) {
    state.hosts.remove(host);
    let vms = state.vms.values_mut();
    for vm in vms.filter(|vm| vm.host.as_ref() == Some(host)) {
        vm.host = None;
    }
}

/// A host that answers is not taken out of a migration; one that is gone for good ends it.
fn must_not_be_moving(app: &App, host: &HostName, entry: &HostEntry) -> Outcome<()> {
    let state = app.state();
    let mut moves = state.active.values();
    match moves.find(|moving| entry.is_connected() && (moving.from == *host || moving.to == *host))
    {
        None => Ok(()),
        Some(moving) => refuse(
            ErrorCode::WrongState,
            format!(
                "host {host} takes part in migration {0}: wait for it or run 'godwit migration cancel {0}'",
                moving.id
            ),
        ),
    }
}

/// What the host may have done unheard stays below whatever is granted from now on.
async fn skip_generations(app: &App, host: &HostName, entry: &HostEntry) -> Outcome<()> {
    let skipped: Vec<_> = {
        let mut state = app.state();
        let may_hold = |vm: &VmName| match state.place(vm) {
            Some(place) => place.host == *host,
            None => !entry.heard,
        };
        let vms: Vec<VmName> = state
            .vms
            .keys()
            .filter(|vm| may_hold(vm))
            .cloned()
            .collect();
        vms.into_iter()
            .map(|vm| (state.ledger.skip(&vm), vm))
            .collect()
    };
    for (generation, vm) in skipped {
        app.store.see_generation(&vm, generation).await?;
    }
    Ok(())
}

fn may_lose(host: &HostName, entry: &HostEntry, vms: &[VmName], confirmed: bool) -> Outcome<()> {
    let names: Vec<String> = vms.iter().take(5).map(ToString::to_string).collect();
    let names = names.join(", ");
    if entry.is_connected() {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "host {host} holds {} VMs ({names}): migrate or delete them first",
                vms.len()
            ),
        );
    }
    if !confirmed {
        return refuse(
            ErrorCode::HostUnreachable,
            format!(
                "host {host} does not answer and may run {names}: power it off, then run 'godwit host remove {host} --confirm-unreachable'"
            ),
        );
    }
    Ok(())
}
