//! Disks that are made larger, or limited: by the host that holds the VM, which alone may.
//!
//! Owns nothing. Refuses: to begin for a VM that moves to another host, and one that no host has.

use super::entry_of;
use super::move_disks::{host_of, must_stay};
use crate::app::App;
use crate::error::{Outcome, on_no_host, unknown_vm};
use crate::reconcile::refresh;
use godwit_rpc::AgentClient;
use godwit_types::control_api::Done;
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::{ApiError, HostName, VmName};

/// Has the VM's host make a disk larger.
pub async fn resize_disk(app: &App, name: &VmName, wish: &ResizeDisk) -> Outcome<Done> {
    wish.check()?;
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    let instead = "write how large its disk is to be made as size_gib";
    let (host, agent) = holder(app, name, instead)?;
    let resized = agent.resize_disk(name, wish).await;
    app.tell_vm(name);
    resized.map_err(|error| ApiError::from(error).on_host(&host))
}

/// Has the VM's host limit a disk, or limit it no more, and describes it so here: whatever else was described otherwise since the
/// VM's last start, it keeps these limits.
pub async fn limit_disk(app: &App, name: &VmName, wish: &LimitDisk) -> Outcome<Done> {
    wish.check()?;
    app.until_taken_over(name).await;
    let _turn = app.vm_turns.take(name).await;
    let (host, agent) = holder(app, name, "write its limits")?;
    let limited = agent.limit_disk(name, wish).await;
    let limited = limited.map_err(|error| ApiError::from(error).on_host(&host))?;
    describe_limits(app, name, wish).await?;
    // What is shown of a VM that is on is its host's word.
    refresh(app, &host).await;
    app.tell_vm(name);
    Ok(limited)
}

async fn describe_limits(app: &App, name: &VmName, wish: &LimitDisk) -> Outcome<()> {
    let _macs = app.macs_turn().await;
    let mut entry = entry_of(app, name)?;
    let specs = [Some(&mut entry.spec), entry.resolved.as_mut()];
    let disks = specs.into_iter().flatten().flat_map(|spec| &mut spec.disks);
    let disks = disks.filter(|disk| disk.name == wish.disk);
    disks.for_each(|disk| disk.limits = wish.limits);
    app.store.save_vm(&entry).await?;
    app.state().vms.insert(name.clone(), entry);
    Ok(())
}

/// The host that may do something to a VM's disks. `instead`: what a person does about a VM that no host has.
fn holder(app: &App, name: &VmName, instead: &str) -> Outcome<(HostName, AgentClient)> {
    must_stay(app, name)?;
    if !app.state().vms.contains_key(name) {
        return Err(unknown_vm(name));
    }
    if app.state().place(name).is_none() {
        let instead = format!("{instead} ('godwit vm edit {name} FILE')");
        return Err(on_no_host(name, Some(&instead)));
    }
    host_of(app, name)
}
