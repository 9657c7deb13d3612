//! Snapshots of a VM's disks: taken, gone back to and deleted by the host that holds the VM, which alone knows them.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and one that no host has.

use super::move_disks::{host_of, must_stay};
use crate::app::App;
use crate::error::{Outcome, on_no_host, unknown_vm};
use godwit_rpc::{AgentClient, ClientError};
use godwit_types::control_api::Done;
use godwit_types::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::{ApiError, VmName};

/// Those that the VM's host knows.
pub async fn snapshots(app: &App, name: &VmName) -> Outcome<Snapshots> {
    let (host, agent) = host_of(app, name)?;
    let found = agent.snapshots(name).await;
    found.map_err(|error| ApiError::from(error).on_host(&host))
}

/// Has the VM's host take one of all disks that the guest may write.
pub async fn take_snapshot(app: &App, name: &VmName, wish: &TakeSnapshot) -> Outcome<Done> {
    wish.check()?;
    order(app, name, async |agent| {
        agent.take_snapshot(name, wish).await
    })
    .await
}

/// Has disks be what they were then.
pub async fn revert_snapshot(app: &App, name: &VmName, wish: &SnapshotRequest) -> Outcome<Done> {
    order(app, name, async |agent| {
        agent.revert_snapshot(name, wish).await
    })
    .await
}

/// Has the content of one be kept no longer.
pub async fn delete_snapshot(app: &App, name: &VmName, wish: &SnapshotRequest) -> Outcome<Done> {
    order(app, name, async |agent| {
        agent.delete_snapshot(name, wish).await
    })
    .await
}

async fn order(
    app: &App,
    name: &VmName,
    ordered: impl AsyncFnOnce(&AgentClient) -> Result<Done, ClientError>,
) -> Outcome<Done> {
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    must_stay(app, name)?;
    if !app.state().vms.contains_key(name) {
        return Err(unknown_vm(name));
    }
    if app.state().place(name).is_none() {
        return Err(on_no_host(name, None));
    }
    let (host, agent) = host_of(app, name)?;
    let done = ordered(&agent).await;
    app.tell_vm(name);
    done.map_err(|error| ApiError::from(error).on_host(&host))
}
