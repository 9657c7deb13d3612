//! `godwit vm clone`: asks until the clone is there, since its disks have to be copied first, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops asking: the host goes on, and what it copied waits for a minute for the same command. Refuses nothing by itself.

use super::disk_bar::DiskBar;
use super::{order, start};
use crate::args::{Global, VmClone};
use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::VmName;
use godwit_types::clones::CloneVm;
use godwit_types::control_api::{DiskMaking, Done};
use std::time::Duration;

/// How often it is looked how far a disk is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn clone_vm(
    arguments: VmClone,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let vm = arguments.vm;
    let Some(new) = arguments.new else {
        let cancel = async |client: &ControllerClient| client.cancel_clone(&vm).await;
        return order(&vm, cancel, global, output).await;
    };
    let client = controller(global)?;
    let wish = CloneVm {
        new,
        snapshot: arguments.snapshot,
    };
    let mut message = made(&client, &vm, &wish, output).await?;
    if arguments.start {
        let started = start::until_it_runs(&client, &wish.new, None, output).await?;
        message = format!("{message}; {started}");
    }
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// Asks until it is there. Returns what was said then.
async fn made(
    client: &ControllerClient,
    vm: &VmName,
    wish: &CloneVm,
    output: &Output,
) -> Result<String, Failure> {
    let mut shown = None;
    loop {
        let asked = saying(of_vm(client, vm), client.clone_vm(vm, wish)).await;
        let cloned = asked.map_err(failure)?;
        let Some(making) = cloned.making else {
            return Ok(cloned.message);
        };
        let shown = shown.get_or_insert_with(|| DiskBar::new("is being copied", output));
        follow(shown, client, vm, making).await?;
    }
}

/// Shows the disks until all are there, or their copying has ended otherwise, which the next request tells.
async fn follow(
    shown: &mut DiskBar,
    client: &ControllerClient,
    vm: &VmName,
    first: DiskMaking,
) -> Result<(), Failure> {
    let mut making = Some(first);
    while let Some(now) = making {
        // It has no name before it has begun.
        if !now.disk.is_empty() {
            shown.show(&now.disk, now.done_bytes, now.total_bytes, None);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        making = client.cloning(vm).await.map_err(failure)?.making;
    }
    Ok(())
}
