//! `godwit vm start`: asks until the VM runs, since its disks may have to be made first, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops asking; the host goes on with the disks. Refuses nothing by itself.

use super::disk_bar::until_there;
use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use godwit_rpc::ControllerClient;
use godwit_types::control_api::{Done, StartRequest};
use godwit_types::{HostName, VmName};

pub(super) async fn start(
    vm: &VmName,
    on: Option<HostName>,
    global: &crate::args::Global,
    output: &Output,
) -> CommandResult {
    let client = controller(global)?;
    let message = until_it_runs(&client, vm, on, output).await?;
    output.show(&Done { message }, |output, done| output.line(&done.message));
    Ok(())
}

/// Asks until it runs. Returns what was said then.
pub(super) async fn until_it_runs(
    client: &ControllerClient,
    vm: &VmName,
    on: Option<HostName>,
    output: &Output,
) -> Result<String, Failure> {
    let request = StartRequest { on };
    let ask = async || {
        let asked = client.start(vm, &request).await;
        asked.map(|started| (started.message, started.making))
    };
    let look = async || client.disks(vm).await;
    until_there((client, vm), ("is being made", output), ask, look).await
}
