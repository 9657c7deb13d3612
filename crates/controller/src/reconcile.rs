//! Learns from the agents: one task per host asks it again and again.
//!
//! Owns nothing; writes what changed to the database and the inventory. Commands nothing but what is always safe: it
//! tells agents which certificates are revoked and which hosts are gone for good.

use crate::app::App;
use crate::error::ControllerError;
use crate::state::{Change, Observed};
use crate::takeover;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, ClientError};
use godwit_site::{News, Row, Ticket};
use godwit_types::HostName;
use godwit_types::control_api::{HostState, InventoryEvent};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{HostVm, RemovedHosts, Revoked};
use godwit_types::vm::VmState;
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
async fn poll(app: &Arc<App>, host: &HostName, told: &mut Told) -> bool {
    let serial = match app.host(host) {
        Ok(entry) => entry.serial,
        Err(_) => return false,
    };
    refresh(app, host).await;
    if let Err(error) = takeover::go_on(app, host).await {
        tracing::error!(%host, %error, "cannot note what the host has on record");
    }
    if app.state().book.is_in_charge() {
        tell_site(app, host).await;
        tell_revoked(app, host, &mut told.revoked).await;
        tell_removed(app, host, &mut told.removed).await;
        pause_copies(app, host).await;
    }
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
    let (deletions, ticket) = {
        let mut state = app.state();
        (state.deletions, state.book.ask())
    };
    match ask(&agent).await {
        Ok(_) if app.state().deletions != deletions => {}
        Ok((info, vms)) => {
            if let Err(error) = learn(app, host, ticket, info, vms).await {
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
    let entry = state.hosts.get(host);
    if !entry.is_some_and(|entry| entry.is_connected()) {
        return;
    }
    state.lose(host);
    drop(state);
    tracing::warn!(%host, %error, "host does not answer");
    app.tell_host(host);
}

async fn learn(
    app: &App,
    host: &HostName,
    ticket: Ticket,
    info: HostInfo,
    vms: Vec<HostVm>,
) -> Result<(), ControllerError> {
    let now = now_unix_s();
    let (observed, is_new, connected) = {
        let mut state = app.state();
        let Some(entry) = state.hosts.get_mut(host) else {
            return Ok(());
        };
        let connected = !entry.is_connected();
        let is_new = entry.info.as_ref().is_none_or(|old| !same_host(old, &info));
        entry.state = HostState::Connected;
        entry.last_seen_unix_s = now;
        entry.info = Some(info.clone());
        (state.observe(host, ticket, &info, vms), is_new, connected)
    };
    let Observed {
        rows,
        news,
        changes,
    } = observed;
    app.write(&rows).await?;
    if is_new {
        app.store.save_host_info(host, &info, now).await?;
    }
    if connected {
        tracing::info!(%host, "host answers");
    }
    if is_new || connected {
        app.tell_host(host);
    }
    tell_news(host, &news);
    for change in changes {
        note(app, host, change).await?;
    }
    Ok(())
}

/// What people should find in the log of an answer.
pub fn tell_news(host: &HostName, news: &[News]) {
    for one in news {
        match one {
            News::RestoredCopy { heard } => {
                tracing::error!(%host, %heard, "a host has heard later words than this controller ever said: its database is an old copy. Nothing is granted until every host was read")
            }
            News::FencedAnswered { was_never_off, .. } => {
                tracing::warn!(%host, was_never_off, "a host that a person said is off answers")
            }
            News::NotItself { standing, .. } => {
                tracing::error!(%host, ?standing, "the host is not the one that was enrolled, or not its newest life")
            }
            News::Stranger { vm, host: other } => {
                tracing::error!(%host, %vm, %other, "a record names a host that is not enrolled: nothing is granted for the VM")
            }
            News::Held { vm, host } => tracing::info!(%vm, %host, "VM is held here now"),
        }
    }
}

async fn note(app: &App, host: &HostName, change: Change) -> Result<(), ControllerError> {
    match change {
        Change::Resolved(entry) => {
            app.store.save_vm(&entry).await?;
            app.tell_vm(&entry.spec.name);
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
    old.site = new.site;
    old == *new
}

/// Brings the host's table of the site up to date.
async fn tell_site(app: &App, host: &HostName) {
    let update = app.state().book.update_for(host);
    let (Some(update), Ok(agent)) = (update, app.connected_agent(host)) else {
        return;
    };
    // A word that is not in the database would make the hosts take this controller, restarted, for an old copy.
    if let Err(error) = app.write(&[Row::Stamp(update.stamp)]).await {
        tracing::error!(%host, %error, "cannot note this controller's last word");
        return;
    }
    let you = update.you;
    match agent.site(&update).await {
        Ok(heard) => app.state().book.updated(host, you, heard),
        Err(error) => tracing::debug!(%host, %error, "the host's table is not brought up to date"),
    }
}

/// Of a VM that several hosts hold, the copies that are not the rightful one stand still, with their memory.
async fn pause_copies(app: &App, host: &HostName) {
    let runs = {
        let state = app.state();
        let twice = state.book.all_twice().into_iter();
        let here = twice.filter(|(_, twice)| twice.to_pause().any(|paused| paused == host));
        let vms = state.hosts.get(host).map(|entry| entry.vms.clone());
        let vms = vms.unwrap_or_default();
        let running = |name: &godwit_types::VmName| {
            let mut vms = vms.iter();
            vms.any(|vm| vm.spec.name == *name && vm.state == VmState::Running)
        };
        here.filter(|(vm, _)| running(vm)).collect::<Vec<_>>()
    };
    for (vm, twice) in runs {
        let Ok(agent) = app.connected_agent(host) else {
            return;
        };
        tracing::error!(%vm, %host, "several hosts hold the VM: this copy is paused");
        if let Err(error) = agent.pause(&vm).await {
            tracing::error!(%vm, %host, %error, "the copy cannot be paused");
        }
        let hosts = twice.copies.iter().map(|copy| copy.host.to_string());
        app.tell(InventoryEvent::RunningTwice {
            name: vm.to_string(),
            hosts: hosts.collect(),
        });
        app.tell_vm(&vm);
    }
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
