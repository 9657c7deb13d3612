//! Says what a command waits for, once it has waited for a moment.
//!
//! Owns nothing. Refuses: to be silent for longer than a person takes for a fault.

use crate::plain;
use godwit_rpc::ControllerClient;
use godwit_types::VmName;
use godwit_types::control_api::HostState;
use std::future::Future;
use std::time::Duration;

/// How long a command is silent.
const SILENT: Duration = Duration::from_millis(1500);
/// How long it may take to find out what is waited for.
const LOOK: Duration = Duration::from_secs(1);

/// Does `work`; when that takes longer, says what `why` finds out, to standard error, in one line.
pub async fn saying<T>(why: impl Future<Output = String>, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(SILENT, work.as_mut()).await {
        return done;
    }
    tokio::select! {
        done = work.as_mut() => return done,
        line = tokio::time::timeout(LOOK, why) => {
            plain::tell(line.as_deref().unwrap_or("waiting for the controller"));
        }
    }
    work.await
}

/// What a command about a VM waits for: the host where it is, and hosts that do not answer.
pub async fn of_vm(client: &ControllerClient, vm: &VmName) -> String {
    let host = client.vm(vm).await.ok().and_then(|view| view.host);
    let hosts = client.hosts().await.unwrap_or_default();
    let silent = hosts
        .iter()
        .filter(|host| host.state != HostState::Connected);
    let silent: Vec<String> = silent.map(|host| host.info.name.to_string()).collect();
    let whom = match host {
        Some(host) => format!("host {host}, where VM {vm} is"),
        None => format!("the hosts that VM {vm} may be on"),
    };
    match silent.is_empty() {
        true => format!(
            "waiting for {whom} (Ctrl-C stops waiting; the request may still be carried out)"
        ),
        false => format!(
            "waiting for {whom}; no answer yet from: {}",
            silent.join(", ")
        ),
    }
}
