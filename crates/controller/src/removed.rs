//! Hosts that a person removed while they did not answer. That person may have been wrong: what such a host ran was started
//! elsewhere, so that it is asked on, and what it says is shown.
//!
//! Owns nothing; what was heard stands in the inventory. Refuses: to command such a host anything, and to take its silence
//! for "off" once it was heard to run a VM.

use crate::app::App;
use crate::error::Outcome;
use crate::survey::refused;
use crate::vms::done;
use godwit_rpc::{AgentClient, Client, ClientError, Role};
use godwit_site::Refusal;
use godwit_types::control_api::Done;
use godwit_types::host_api::HostVm;
use godwit_types::{HostName, VmName};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Between two questions, at least.
const ASK_EACH: Duration = Duration::from_secs(5);
/// How long a host that a person says is off may take to show that it is not.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// A host that was removed while it did not answer.
#[derive(Debug, Clone)]
pub struct Removed {
    pub address: SocketAddr,
    /// The VMs that it was heard to run since.
    pub runs: BTreeSet<VmName>,
}

/// Asks a removed host from now on whether it runs VMs, until it joins anew, or a person says that it is off now.
pub fn watch(app: &Arc<App>, host: HostName, address: SocketAddr) {
    let runs = BTreeSet::new();
    let removed = Removed { address, runs };
    let known = app.state().removed.insert(host.clone(), removed);
    if known.is_some() {
        return;
    }
    let app = app.clone();
    tokio::spawn(async move {
        let mut stop = app.stopped();
        // A test's controller polls much faster than a site's; this one is asked more rarely in both.
        let each = ASK_EACH.min(app.config.poll_every * 10);
        while is_watched(&app, &host) {
            if let Ok(vms) = ask(&app, &host, address).await {
                heard(&app, &host, &vms);
            }
            tokio::select! {
                () = tokio::time::sleep(each) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    });
}

fn is_watched(app: &App, host: &HostName) -> bool {
    let mut state = app.state();
    if state.hosts.contains_key(host) {
        state.removed.remove(host);
    }
    state.removed.contains_key(host)
}

/// Its certificate is revoked, so that it is no host of this site; it is asked under its own name all the same.
async fn ask(app: &App, host: &HostName, address: SocketAddr) -> Result<Vec<HostVm>, ClientError> {
    let client = Client::tls(address, &app.identity.identity(), Role::Host(host.clone()));
    let client = client.map_err(|error| {
        let text = error.to_string();
        ClientError::Refused(godwit_types::ApiError::new(
            godwit_types::ErrorCode::Internal,
            text,
        ))
    })?;
    let agent = AgentClient::new(client).with_deadlines(app.config.deadlines);
    agent.vms().await
}

fn heard(app: &App, host: &HostName, vms: &[HostVm]) {
    let lives = |vm: &&HostVm| vm.holds() && !vm.state.is_off();
    let running: BTreeSet<VmName> = vms
        .iter()
        .filter(lives)
        .map(|vm| vm.spec.name.clone())
        .collect();
    let changed = {
        let mut state = app.state();
        let known = state.removed.get_mut(host);
        known.is_some_and(|known| std::mem::replace(&mut known.runs, running.clone()) != running)
    };
    if changed {
        let vms: Vec<&str> = running.iter().map(VmName::as_str).collect();
        tracing::error!(%host, vms = vms.join(" "), "a host that was removed answers, and says that it runs these VMs");
        app.tell_host(host);
        for vm in &running {
            app.tell_vm(vm);
        }
    }
}

/// A person says that a removed host is off now; none when no such host is asked.
pub async fn is_off(app: &App, host: &HostName) -> Option<Outcome<Done>> {
    // A host that joined under the name since is another one.
    if !is_watched(app, host) {
        return None;
    }
    let address = app.state().removed.get(host).map(|known| known.address)?;
    let asked = tokio::time::timeout(ANSWERS_WITHIN, ask(app, host, address)).await;
    if matches!(asked, Ok(Ok(_))) {
        return Some(Err(refused(Refusal::Answers { host: host.clone() })));
    }
    if let Err(error) = app.store.forget_unheard(host).await {
        return Some(Err(error.into()));
    }
    app.state().removed.remove(host);
    app.tell_host(host);
    Some(Ok(done(format!(
        "Host {host} was removed and counts as powered off: it is not asked any more."
    ))))
}
