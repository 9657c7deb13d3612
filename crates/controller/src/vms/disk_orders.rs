//! Disks that are made larger, or limited: by the host that holds the VM, which alone may.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and one that no host has.

use super::move_disks::{host_of, must_stay};
use crate::app::App;
use crate::error::{Outcome, refuse, unknown_vm};
use crate::reconcile::refresh;
use godwit_rpc::{AgentClient, ClientError};
use godwit_types::control_api::Done;
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::{ApiError, ErrorCode, HostName, VmName};

/// Has the VM's host make a disk larger.
pub async fn resize_disk(app: &App, name: &VmName, wish: &ResizeDisk) -> Outcome<Done> {
    wish.check()?;
    let resize = async |agent: &AgentClient| agent.resize_disk(name, wish).await;
    let is_described = "write how large its disk is to be made as size_gib";
    let (_, resized) = at_host(app, name, is_described, resize).await?;
    Ok(resized)
}

/// Has the VM's host limit a disk, or limit it no more.
pub async fn limit_disk(app: &App, name: &VmName, wish: &LimitDisk) -> Outcome<Done> {
    wish.check()?;
    let limit = async |agent: &AgentClient| agent.limit_disk(name, wish).await;
    let is_described = "write its limits";
    let (host, limited) = at_host(app, name, is_described, limit).await?;
    // The description here follows the host's: whoever has the answer may start or move the VM at once.
    refresh(app, &host).await;
    Ok(limited)
}

/// Has the VM's host do something to one of its disks. A VM that no host has is described otherwise.
async fn at_host(
    app: &App,
    name: &VmName,
    is_described: &str,
    ordered: impl AsyncFnOnce(&AgentClient) -> Result<Done, ClientError>,
) -> Outcome<(HostName, Done)> {
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    must_stay(app, name)?;
    if !app.state().vms.contains_key(name) {
        return Err(unknown_vm(name));
    }
    if app.state().place(name).is_none() {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "no host has VM {name} yet: {is_described} ('godwit vm edit {name} FILE'), or start it first"
            ),
        );
    }
    let (host, agent) = host_of(app, name)?;
    let done = ordered(&agent).await;
    app.tell_vm(name);
    match done {
        Ok(done) => Ok((host, done)),
        Err(error) => Err(ApiError::from(error).on_host(&host)),
    }
}
