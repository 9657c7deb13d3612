//! `godwit vm clone`: asks until the clone is there, since its disks have to be copied first, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops asking: the host goes on, and what it copied waits for a minute for the same command. Refuses nothing by itself.

use super::disk_bar::until_there;
use super::{order, start};
use crate::args::{Global, VmClone};
use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use godwit_rpc::ControllerClient;
use godwit_types::VmName;
use godwit_types::clones::CloneVm;
use godwit_types::control_api::Done;

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
    let ask = async || {
        let asked = client.clone_vm(vm, wish).await;
        asked.map(|cloned| (cloned.message, cloned.making))
    };
    let look = async || client.cloning(vm).await;
    until_there((client, vm), ("is being copied", output), ask, look).await
}
