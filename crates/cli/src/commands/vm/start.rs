//! `godwit vm start`: asks until the VM runs, since its disks may have to be made first, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops asking; the host goes on with the disks. Refuses nothing by itself.

use super::disk_bar::DiskBar;
use crate::connect::controller;
use crate::exit::{CommandResult, Failure};
use crate::output::Output;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::control_api::{DiskMaking, Done, StartRequest};
use godwit_types::{HostName, VmName};
use std::time::Duration;

/// How often it is looked how far a disk is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

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
    let (request, mut shown) = (StartRequest { on }, None);
    loop {
        let asked = saying(of_vm(client, vm), client.start(vm, &request)).await;
        let started = asked.map_err(failure)?;
        let Some(making) = started.making else {
            return Ok(started.message);
        };
        let shown = shown.get_or_insert_with(|| DiskBar::new("is being made", output));
        follow(shown, client, vm, making).await?;
    }
}

/// Shows the disks until all are there, or their making has ended otherwise, which the next start tells.
async fn follow(
    shown: &mut DiskBar,
    client: &ControllerClient,
    vm: &VmName,
    first: DiskMaking,
) -> Result<(), Failure> {
    let mut making = Some(first);
    while let Some(now) = making {
        shown.show(&now.disk, now.done_bytes, now.total_bytes, None);
        tokio::time::sleep(LOOK_EVERY).await;
        making = client.disks(vm).await.map_err(failure)?.making;
    }
    Ok(())
}
