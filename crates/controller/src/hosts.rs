//! Operations on hosts: tokens, joining, checking, removing.
//!
//! Owns nothing. Refuses: a token twice, a name twice, an agent address that others cannot reach, and removing a host
//! that holds VMs unless it does not answer and the operator says that it is off for good.

use crate::app::{App, site_host};
use crate::certificates;
use crate::error::{ControllerError, Outcome, refuse, silent};
use crate::placement::drain;
use crate::reconcile;
use crate::removed;
use crate::state::HostEntry;
use crate::store::Joined;
use crate::survey::{clear, must_be_newest, refused};
use crate::vms::{done, is_stopped_at, release};
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::token::hash_of;
use godwit_rpc::{ClientError, Role, Token};
use godwit_site::{HostRow, Refusal};
use godwit_types::control_api::{Done, HostCheck, HostView, JoinRequest, JoinResponse, JoinToken};
use godwit_types::load::HostTop;
use godwit_types::site::Claim;
use godwit_types::{ApiError, ErrorCode, HostName};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// A host as people see it.
pub fn view(app: &App, name: &HostName) -> Outcome<HostView> {
    app.host(name)?;
    let view = app.state().host_view(name, now_unix_s());
    let mut view = view.ok_or_else(|| silent(name))?;
    view.draining = app.drains.is_draining(name);
    Ok(view)
}

/// Every enrolled host as people see it.
pub fn views(app: &App) -> Vec<HostView> {
    let mut views = app.state().host_views(now_unix_s());
    for view in &mut views {
        view.draining = app.drains.is_draining(&view.info.name);
    }
    views
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

/// One address may try to join so often at once.
pub const JOINS_AT_ONCE: u32 = 64;
/// One more try of an address after each such time.
pub const JOIN_EACH: Duration = Duration::from_millis(500);

/// Refuses an address that tries to join too often.
pub fn may_try_to_join(app: &App, from: IpAddr) -> Outcome<()> {
    match app.admits_join(from) {
        true => Ok(()),
        false => refuse(
            ErrorCode::NotAllowed,
            format!("{from} tries to join too often: wait half a minute, then try once"),
        ),
    }
}

/// Enrols a host: uses the token up and certifies its key, or does neither.
pub async fn join(app: &Arc<App>, request: &JoinRequest) -> Outcome<JoinResponse> {
    let (hash, now) = (hash_of(&request.secret), now_unix_s());
    // Nothing is parsed for somebody without a good token.
    if !app.store.token_is_good(&hash, now).await? {
        return Err(bad_token());
    }
    if let Some(former) = &request.former {
        return certificates::go_on(app, request, former).await;
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
    app.until_started().await;
    must_be_newest(app)?;
    must_not_be_a_stranger(app, &request.name)?;
    must_not_be_waited_for(app, &request.name)?;
    let role = Role::Host(request.name.clone());
    let issued = app.authority.sign(&request.csr_pem, &role, now);
    let issued = issued.map_err(certificates::not_signed)?;
    let mut entry = HostEntry::new(request.agent_address, issued.serial);
    entry.last_seen_unix_s = now;
    match app.store.join(&hash, &request.name, &entry, now).await? {
        Joined::BadToken => return Err(bad_token()),
        Joined::NameTaken => return refuse(ErrorCode::AlreadyExists, name_taken(app, request)),
        Joined::Yes => {}
    }
    app.revocations.extend(app.store.revoked().await?);
    {
        let mut state = app.state();
        let row = HostRow::default();
        let site = site_host(&request.name, &entry, &row);
        state.hosts.insert(request.name.clone(), entry);
        // What is said of a former host of this name is not about this one.
        state.removed.remove(&request.name);
        state.book.add_host(site, row);
    }
    app.write().await?;
    app.tell_host(&request.name);
    tracing::info!(host = %request.name, address = %request.agent_address, "host is enrolled");
    reconcile::spawn(app.clone(), request.name.clone());
    Ok(JoinResponse {
        certificate_pem: issued.certificate_pem,
        ca_pem: app.authority.certificate_pem().to_owned(),
    })
}

fn name_taken(app: &App, request: &JoinRequest) -> String {
    let name = &request.name;
    let known = app.state().hosts.get(name).cloned();
    match known {
        Some(entry) if entry.info.is_none() => format!(
            "a host {name} at {} joined before and has not answered yet, and now one at {} asks for that name: see that the agent of the first runs, or remove it with 'godwit host remove {name}'",
            entry.address, request.agent_address
        ),
        Some(entry) => format!(
            "a host {name} is enrolled, at {}, {}: choose another name, or remove it first with 'godwit host remove {name}'; if this machine is that host, leave first with 'godwit host leave'",
            entry.address,
            match entry.silent_s(now_unix_s()) {
                None => "and answers".to_owned(),
                Some(silent) => format!("last heard {silent} s ago"),
            }
        ),
        None => format!("a host {name} was just enrolled: choose another name"),
    }
}

/// A host that this database forgot may run what records say went to it: another machine of its name would say no for it.
fn must_not_be_a_stranger(app: &App, name: &HostName) -> Outcome<()> {
    let state = app.state();
    let vms = match state.hosts.contains_key(name) {
        true => Vec::new(),
        false => state.book.may_be_on(name),
    };
    let Some(vm) = vms.first() else { return Ok(()) };
    refuse(
        ErrorCode::AlreadyExists,
        format!(
            "VM {vm} may run on a host {name} that this controller forgot: choose another name for this one"
        ),
    )
}

/// A new host under an old name knows nothing of what the old one had: it must not answer for it.
fn must_not_be_waited_for(app: &App, name: &HostName) -> Outcome<()> {
    let state = app.state();
    for vm in state.vms.keys() {
        let claims = state.book.claims(vm);
        let waits = claims.values().any(|claim| match claim {
            Claim::Gave { to, .. } => to == name,
            Claim::Promised { from, .. } => from == name,
            _ => false,
        });
        if waits {
            return refuse(
                ErrorCode::WrongState,
                format!(
                    "VM {vm} is in doubt because of a former host {name}: resolve it first, see 'godwit vm list', or choose another name"
                ),
            );
        }
        if let Some(silent) = state.book.may_wait_for(vm, name) {
            return refuse(
                ErrorCode::HostUnreachable,
                format!(
                    "VM {vm} may wait on host {silent}, which does not answer, for a word of a former host {name}: bring {silent} back, or power it off and run 'godwit host fenced {silent}', or choose another name"
                ),
            );
        }
    }
    Ok(())
}

/// The token is none that could be used.
pub fn bad_token() -> ApiError {
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
        _ => silent(host),
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
pub async fn remove(app: &Arc<App>, host: &HostName, confirm_unreachable: bool) -> Outcome<Done> {
    app.until_started().await;
    reconcile::refresh(app, host).await;
    let entry = app.host(host)?;
    must_not_be_moving(app, host, &entry)?;
    if entry.is_connected() {
        let_go(app, host).await?;
    }
    must_hold_nothing_unread(app, host, confirm_unreachable)?;
    let writer = app.turn_to_write().await;
    let removed = app.state().book.remove(host, confirm_unreachable);
    let removal = removed.map_err(refused)?;
    let due = writer.due();
    let (rows, now) = (due.rows(), now_unix_s());
    let unheard_at = (!entry.is_connected()).then_some(entry.address);
    let written = app
        .store
        .remove_host(host, &entry.serial, unheard_at, rows, now);
    if let Err(error) = written.await {
        drop(due);
        app.state().book.not_removed(removal);
        return Err(error.into());
    }
    due.written();
    app.revocations.revoke(entry.serial);
    app.state().hosts.remove(host);
    if let Some(address) = unheard_at {
        removed::watch(app, host.clone(), address);
    }
    // Last: no drain of a host that is not in the inventory begins.
    drain::forget(app, host).await?;
    app.tell_host(host);
    tracing::info!(%host, "host is removed, its certificate revoked");
    Ok(done(format!(
        "Host {host} is removed and its certificate revoked."
    )))
}

/// A VM whose row cannot be read is in no set of those that the host may hold: what the host says itself counts.
fn must_hold_nothing_unread(app: &App, host: &HostName, confirmed: bool) -> Outcome<()> {
    let state = app.state();
    let Some(entry) = state.hosts.get(host) else {
        return Ok(());
    };
    let claimed = entry.vms.iter().filter(|(_, vm)| vm.claim.may_hold());
    let mut unread = claimed.filter_map(|(name, _)| Some((name, state.lacking.get(name)?)));
    let Some((name, lack)) = unread.next() else {
        return Ok(());
    };
    if entry.is_connected() {
        let text = format!(
            "host {host} says that it holds VM {name}, and is not removed while that is so: {}",
            lack.row().sentence()
        );
        return Err(ApiError::new(ErrorCode::WrongState, text).on_host(host));
    }
    if confirmed || state.book.is_fenced(host) {
        return Ok(());
    }
    let vms = std::iter::once(name).chain(unread.map(|(name, _)| name));
    Err(refused(Refusal::MayRun {
        host: host.clone(),
        vms: vms.cloned().collect(),
    }))
}

/// Asks a host about every VM that it may hold: what it says no to does not stand in anybody's way.
pub async fn let_go(app: &App, host: &HostName) -> Outcome<()> {
    let vms = app.state().book.may_be_on(host);
    for vm in vms {
        let _turn = app.vm_turns.take(&vm).await;
        clear(app, &vm, BTreeSet::from([host.clone()])).await?;
    }
    Ok(())
}

/// A host gives up every VM that is off there, and what it says no to does not stand in anybody's way.
pub async fn release_all(app: &App, host: &HostName) -> Outcome<()> {
    let vms = app.state().book.may_be_on(host);
    for vm in vms {
        let _turn = app.vm_turns.take(&vm).await;
        // One that is only down is booted again by its host, and stays there.
        if is_stopped_at(app, &vm, host)
            && let Err(error) = release(app, &vm, host).await
        {
            tracing::warn!(%vm, %host, %error, "the host does not give up a VM that is off");
        }
        app.tell_vm(&vm);
        clear(app, &vm, BTreeSet::from([host.clone()])).await?;
    }
    Ok(())
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
