//! Disks that are made larger: by the host that holds the VM, which alone may.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and one that no host has.

use super::move_disks::{host_of, must_stay};
use crate::app::App;
use crate::error::{Outcome, refuse, unknown_vm};
use godwit_types::control_api::Done;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::{ApiError, ErrorCode, VmName};

/// Has the VM's host do it.
pub async fn resize_disk(app: &App, name: &VmName, wish: &ResizeDisk) -> Outcome<Done> {
    wish.check()?;
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
                "no host has VM {name} yet: write how large its disk is to be made as size_gib ('godwit vm edit {name} FILE'), or start it first"
            ),
        );
    }
    let (host, agent) = host_of(app, name)?;
    let resized = agent.resize_disk(name, wish).await;
    app.tell_vm(name);
    resized.map_err(|error| ApiError::from(error).on_host(&host))
}
