//! `godwit vm move-disk`: has disks moved to another datastore of their host while the guest runs, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops looking; the host goes on. Refuses nothing by itself.

use super::disk_bar::DiskBar;
use super::{controller, order};
use crate::args::{Global, VmMoveDisk};
use crate::exit::{CommandResult, FAILED, Failure};
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::ErrorCode;
use godwit_types::VmName;
use godwit_types::disk_move::{DiskMove, DiskMoveState, DiskMoves, MoveDisks};
use std::time::Duration;

/// How often the controller is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn move_disk(
    arguments: VmMoveDisk,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let vm = arguments.vm;
    let Some(to) = arguments.to else {
        let cancel = async |client: &ControllerClient| client.cancel_disk_moves(&vm).await;
        return order(&vm, cancel, global, output).await;
    };
    let wish = MoveDisks {
        disks: arguments.disks,
        to,
    };
    let client = controller(global)?;
    let begun = saying(of_vm(&client, &vm), client.move_disks(&vm, &wish)).await;
    let moves = follow(&client, &vm, begun.map_err(failure)?, output).await?;
    output.show(&moves, |output, moves| {
        for disk in &moves.disks {
            output.line(plain::sentence(&sentence(&vm, disk)));
        }
    });
    let mut disks = moves.disks.iter();
    match disks.all(|disk| disk.state == DiskMoveState::Moved) {
        true => Ok(()),
        // It was said.
        false => Err(Failure::told(FAILED)),
    }
}

async fn follow(
    client: &ControllerClient,
    vm: &VmName,
    begun: DiskMoves,
    output: &Output,
) -> Result<DiskMoves, Failure> {
    let (mut moves, mut shown) = (begun, DiskBar::new("is being moved", output));
    let names: Vec<String> = moves.disks.iter().map(|disk| disk.disk.clone()).collect();
    while moves.are_under_way() {
        let copying = |disk: &&DiskMove| disk.state == DiskMoveState::Copying;
        if let Some(disk) = moves.disks.iter().find(copying) {
            let done = disk.total_bytes.saturating_sub(disk.left_bytes);
            shown.show(&disk.disk, done, disk.total_bytes, disk.eta_s);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        moves = client.disk_moves(vm).await.map_err(failure)?;
        if !names
            .iter()
            .all(|name| moves.disks.iter().any(|disk| disk.disk == *name))
        {
            let message = format!(
                "the VM process of VM '{vm}' ended while it moved disks: one that was not moved yet is where it was, see 'godwit vm show {vm}'; run the command again"
            );
            return Err(Failure::new(ErrorCode::WrongState, message));
        }
    }
    Ok(moves)
}

fn sentence(vm: &VmName, disk: &DiskMove) -> String {
    let (name, from, to) = (&disk.disk, &disk.from, &disk.to);
    match disk.state {
        DiskMoveState::Moved => {
            let waited = disk.switch_ms.unwrap_or(0.0);
            format!(
                "disk '{name}' of VM '{vm}' is {to} now; its guest's requests waited {waited:.1} ms for that"
            )
        }
        DiskMoveState::Failed => {
            let why = disk
                .why
                .as_deref()
                .unwrap_or("see the log of its VM process");
            format!("disk '{name}' of VM '{vm}' is {from} still: {why}")
        }
        DiskMoveState::Cancelled => {
            format!("disk '{name}' of VM '{vm}' is {from} still: it was called off")
        }
        DiskMoveState::Waiting | DiskMoveState::Copying => {
            format!("disk '{name}' of VM '{vm}' is on its way to {to}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_says_where_the_disk_is() {
        let vm = VmName::new("web").unwrap();
        let mut disk = DiskMove {
            disk: "root".into(),
            from: "/old".into(),
            to: "/new".into(),
            state: DiskMoveState::Moved,
            total_bytes: 1,
            left_bytes: 0,
            eta_s: None,
            switch_ms: Some(3.21),
            why: None,
        };
        assert_eq!(
            sentence(&vm, &disk),
            "disk 'root' of VM 'web' is /new now; its guest's requests waited 3.2 ms for that"
        );
        (disk.state, disk.why) = (DiskMoveState::Failed, Some("no room".into()));
        assert_eq!(
            sentence(&vm, &disk),
            "disk 'root' of VM 'web' is /old still: no room"
        );
        disk.state = DiskMoveState::Cancelled;
        assert!(sentence(&vm, &disk).contains("is /old still: it was called off"));
    }
}
