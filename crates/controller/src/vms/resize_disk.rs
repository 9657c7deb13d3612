//! Disks that are made larger: by the host that holds the VM, which alone may.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and one that no host has.

use crate::app::App;
use crate::error::{Outcome, refuse, unknown_vm, way_out};
use godwit_types::control_api::Done;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::{ApiError, ErrorCode, VmName};

/// Has the VM's host do it.
pub async fn resize_disk(app: &App, name: &VmName, wish: &ResizeDisk) -> Outcome<Done> {
    wish.check()?;
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    if let Some(moving) = app.state().active.get(name) {
        return refuse(
            ErrorCode::AlreadyMigrating,
            format!(
                "VM {name} moves to another host in migration {}: wait for its end",
                moving.id
            ),
        );
    }
    if !app.state().vms.contains_key(name) {
        return Err(unknown_vm(name));
    }
    if app.state().place(name).is_none() {
        return refuse(
            ErrorCode::WrongState,
            format!(
                "no host has VM {name} yet: write how large its disk is to be made as size_gib ('godwit vm edit {name} FILE'), or start it first"
            ),
        );
    }
    let place = app.place_of(name).map_err(way_out)?;
    let agent = app.connected_agent(&place.host).map_err(way_out)?;
    let resized = agent.resize_disk(name, wish).await;
    app.tell_vm(name);
    resized.map_err(|error| ApiError::from(error).on_host(&place.host))
}
