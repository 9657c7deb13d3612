//! Learns from the agents: one task per host asks it again and again.
//!
//! Owns nothing; writes what changed to the database and the inventory. Commands nothing but what is always safe: it
//! tells agents which certificates are revoked and which hosts are gone for good.

use crate::app::App;
use crate::error::ControllerError;
use crate::state::Change;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, ClientError};
use godwit_types::HostName;
use godwit_types::control_api::HostState;
use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, RemovedHosts, Revoked};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Asks a host until it is removed or the controller stops.
pub fn spawn(app: Arc<App>, host: HostName) {
    tokio::spawn(async move {
        let mut stop = app.stopped();
        let mut told = Told::default();
        while poll(&app, &host, &mut told).await {
            tokio::select! {
                () = tokio::time::sleep(app.config.poll_every) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    });
}

/// What a host was told.
#[derive(Default)]
struct Told {
    /// How many revocations.
    revoked: usize,
    /// Which hosts are gone for good.
    removed: BTreeSet<HostName>,
}

/// Asks once. False when the host is no more.
async fn poll(app: &App, host: &HostName, told: &mut Told) -> bool {
    let serial = match app.host(host) {
        Ok(entry) => entry.serial,
        Err(_) => return false,
    };
    refresh(app, host).await;
    tell_revoked(app, host, &mut told.revoked).await;
    tell_removed(app, host, &mut told.removed).await;
    // A host that was removed and joined again has a task of its own.
    app.host(host).is_ok_and(|entry| entry.serial == serial)
}

/// Asks a host now, so that what an operation has just changed is seen at once.
pub async fn refresh(app: &App, host: &HostName) {
    let Ok((_, agent)) = app.agent(host) else {
        return;
    };
    // One at a time, so that an older answer never comes after a newer one.
    let _turn = app.host_lock(host).await;
    let deletions = app.state().deletions;
    match ask(&agent).await {
        Ok(_) if app.state().deletions != deletions => {}
        Ok((info, vms)) => {
            if let Err(error) = learn(app, host, info, vms).await {
                tracing::error!(%host, %error, "cannot note what the host said");
            }
        }
        Err(error) => lose(app, host, &error),
    }
}

async fn ask(agent: &AgentClient) -> Result<(HostInfo, Vec<HostVm>), ClientError> {
    Ok((agent.host().await?, agent.vms().await?))
}

fn lose(app: &App, host: &HostName, error: &ClientError) {
    let mut state = app.state();
    let Some(entry) = state
        .hosts
        .get_mut(host)
        .filter(|entry| entry.is_connected())
    else {
        return;
    };
    entry.state = HostState::Unreachable;
    drop(state);
    tracing::warn!(%host, %error, "host does not answer");
    app.tell_host(host);
}

async fn learn(
    app: &App,
    host: &HostName,
    info: HostInfo,
    vms: Vec<HostVm>,
) -> Result<(), ControllerError> {
    let now = now_unix_s();
    let (changes, entries, news) = {
        let mut state = app.state();
        let Some(entry) = state.hosts.get_mut(host) else {
            return Ok(());
        };
        let connected = !entry.is_connected();
        let news = entry.info.as_ref().is_none_or(|old| !same_host(old, &info));
        entry.state = HostState::Connected;
        entry.heard = true;
        entry.last_seen_unix_s = now;
        entry.info = Some(info.clone());
        let changes = state.observe(host, vms);
        let entries = changes.iter().filter_map(|change| match change {
            Change::Moved(vm, _) => state.vms.get(vm).cloned(),
            _ => None,
        });
        let entries: Vec<_> = entries.collect();
        (changes, entries, (news, connected))
    };
    if news.0 {
        app.store.save_host_info(host, &info, now).await?;
    }
    if news.1 {
        tracing::info!(%host, "host answers");
    }
    if news.0 || news.1 {
        app.tell_host(host);
    }
    for entry in &entries {
        app.store.save_vm(entry).await?;
    }
    for change in changes {
        note(app, host, change).await?;
    }
    Ok(())
}

async fn note(app: &App, host: &HostName, change: Change) -> Result<(), ControllerError> {
    match change {
        Change::Generation(vm, generation) => app.store.see_generation(&vm, generation).await?,
        Change::Moved(vm, _) => {
            tracing::info!(%vm, %host, "VM is held here now");
            app.tell_vm(&vm);
        }
        Change::Adopted(entry) => {
            tracing::warn!(vm = %entry.spec.name, %host, "host holds a VM that was not known here; it is now");
            app.store.add_vm(&entry).await?;
            app.tell_vm(&entry.spec.name);
        }
        Change::State(vm) => app.tell_vm(&vm),
    }
    Ok(())
}

/// Whether only fleeting figures differ.
fn same_host(old: &HostInfo, new: &HostInfo) -> bool {
    let mut old = old.clone();
    old.memory_free_mib = new.memory_free_mib;
    old == *new
}

async fn tell_revoked(app: &App, host: &HostName, told: &mut usize) {
    let serials = app.revocations.all();
    if serials.len() == *told {
        return;
    }
    let count = serials.len();
    if let Ok(agent) = app.connected_agent(host)
        && agent.revoked(&Revoked { serials }).await.is_ok()
    {
        *told = count;
    }
}

/// So that nothing waits for a host that is gone for good.
async fn tell_removed(app: &App, host: &HostName, told: &mut BTreeSet<HostName>) {
    let removed = app.removed();
    if removed == *told {
        return;
    }
    let request = RemovedHosts {
        hosts: removed.iter().cloned().collect(),
    };
    if let Ok(agent) = app.connected_agent(host)
        && agent.removed_hosts(&request).await.is_ok()
    {
        *told = removed;
    }
}
