//! `godwit vm move-disk`: has disks moved to another datastore of their host while the guest runs, and shows how far that is.
//!
//! Owns nothing. Ctrl-C stops looking; the host goes on. Refuses nothing by itself.

use super::disk_bar::DiskBar;
use super::{controller, order};
use crate::args::{Global, VmMoveDisk, without};
use crate::disk_rows::{iteration, put_over};
use crate::exit::{CommandResult, FAILED, Failure, REFUSED};
use crate::figures::{amount, moment, seconds};
use crate::output::Output;
use crate::plain;
use crate::wait::{of_vm, saying};
use crate::watch::failure;
use godwit_rpc::ControllerClient;
use godwit_types::ErrorCode;
use godwit_types::VmName;
use godwit_types::datastore::is_device_path;
use godwit_types::disk_move::{
    DiskMove, DiskMoveLimit, DiskMoveState, DiskMoves, Method, MoveDisks,
};
use std::time::{Duration, Instant};

/// How often the controller is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Where nobody answers for so long, that is told.
const SILENT_MAX: Duration = Duration::from_secs(60);

pub(super) async fn move_disk(
    arguments: VmMoveDisk,
    global: &Global,
    output: &Output,
) -> CommandResult {
    let vm = arguments.vm;
    if arguments.list {
        return list(&vm, global, output).await;
    }
    let Some(to) = arguments.to else {
        let cancel = async |client: &ControllerClient| client.cancel_disk_moves(&vm).await;
        return order(&vm, cancel, global, output).await;
    };
    let wish = MoveDisks {
        disks: arguments.disks,
        to,
        max_bandwidth_mbit_per_s: arguments.max_bandwidth,
        dry_run: arguments.dry_run,
        method: arguments.method.into(),
        without: without(arguments.no_incremental, arguments.no_hot_blocks),
        first_log: arguments.first_log.into(),
    };
    let client = controller(global)?;
    let begun = saying(of_vm(&client, &vm), client.move_disks(&vm, &wish)).await;
    let begun = begun.map_err(failure)?;
    if wish.dry_run {
        return planned(&vm, &begun, output);
    }
    let moves = follow(&client, &vm, begun, output).await?;
    output.show(&moves, |output, moves| {
        for disk in &moves.disks {
            output.line(plain::sentence(&sentence(&vm, disk)));
            details(disk).for_each(|line| output.line(line));
        }
    });
    let mut disks = moves.disks.iter();
    match disks.all(|disk| disk.state == DiskMoveState::Moved) {
        true => Ok(()),
        // It was said.
        false => Err(Failure::told(FAILED)),
    }
}

/// What would be moved; where something stands in the way, all that does, and nothing would be.
fn planned(vm: &VmName, plan: &DiskMoves, output: &Output) -> CommandResult {
    output.show(plan, |output, plan| {
        for line in plan_lines(vm, plan) {
            output.line(plain::sentence(&line));
        }
    });
    match plan.refusals.is_empty() {
        true => Ok(()),
        false => Err(Failure::told(REFUSED)),
    }
}

fn plan_lines(vm: &VmName, plan: &DiskMoves) -> Vec<String> {
    let refused = plan.refusals.iter();
    match plan.refusals.is_empty() {
        true => plan.disks.iter().map(|disk| sentence(vm, disk)).collect(),
        false => refused
            .map(|why| format!("refused: {}", why.message))
            .collect(),
    }
}

async fn list(vm: &VmName, global: &Global, output: &Output) -> CommandResult {
    let client = controller(global)?;
    let moves = client.disk_moves(vm).await.map_err(failure)?;
    output.show(&moves, |output, moves| {
        let now = moves.disks.iter().filter(|disk| disk.is_under_way());
        for disk in now.chain(&moves.past) {
            let began = disk.began_unix_s.map(|at| format!("{}  ", moment(at)));
            let line = format!("{}{}", began.unwrap_or_default(), listed(disk));
            output.line(plain::sentence(&line));
            details(disk).for_each(|line| output.line(line));
        }
        if !moves.are_under_way() && moves.past.is_empty() {
            output.line(format!("no disk of VM '{vm}' was moved on its host"));
        }
    });
    Ok(())
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
            // The one that is under way.
            shown.note = disk.iterations.last().map_or_else(String::new, |last| {
                format!(", iteration {}", last.number + 1)
            });
            shown.show(&disk.disk, done, disk.total_bytes, disk.eta_s);
        }
        tokio::time::sleep(LOOK_EVERY).await;
        moves = look(client, vm).await?;
        if !names
            .iter()
            .all(|name| moves.disks.iter().any(|disk| disk.disk == *name))
        {
            let message = format!(
                "the VM process of VM '{vm}' ended while it moved disks: one that was not moved yet is where it was, see 'godwit vm show {vm}'; run the command again with the names of those"
            );
            return Err(Failure::new(ErrorCode::WrongState, message));
        }
    }
    Ok(moves)
}

/// How far it is, once somebody answers who knows: the move goes on while an agent or the controller begins anew.
async fn look(client: &ControllerClient, vm: &VmName) -> Result<DiskMoves, Failure> {
    let until = Instant::now() + SILENT_MAX;
    loop {
        let error = match client.disk_moves(vm).await {
            Ok(moves) => return Ok(moves),
            Err(error) => error,
        };
        let code = error.code();
        let is_final = [
            ErrorCode::UnknownVm,
            ErrorCode::NotAllowed,
            ErrorCode::InvalidRequest,
        ];
        if is_final.contains(&code) || Instant::now() >= until {
            let message = format!(
                "{error}; the move goes on by itself, and 'godwit vm move-disk {vm} --list' tells how far it is"
            );
            return Err(Failure::new(code, message));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn sentence(vm: &VmName, disk: &DiskMove) -> String {
    let (name, from, to) = (&disk.disk, &disk.from, &disk.to);
    match disk.state {
        DiskMoveState::Moved => {
            let waited = disk.switch_ms.unwrap_or(0.0);
            let left = match is_device_path(from) {
                true => format!(
                    "; nothing was erased on the device {from}, whose label, if it has one, calls it free"
                ),
                false => String::new(),
            };
            format!(
                "disk '{name}' of VM '{vm}' is {to} now{}; its guest's requests waited {waited:.1} ms for that{left}",
                took(disk)
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
        DiskMoveState::Planned => {
            let eta = match disk.eta_s {
                Some(eta) => format!("about {}", seconds(eta as f64)),
                None => "no estimate, which an earlier move between these places without a cap would give".to_owned(),
            };
            let unknown = match disk.method {
                Method::Mirror => "",
                Method::DirtyTracking => {
                    "; whether its guest writes too much for dirty tracking is seen after the first pass, and the disk stays then"
                }
                Method::Snapshot => {
                    "; how many redo logs that takes, and how much room beside the image, depends on how much its guest writes"
                }
            };
            format!(
                "disk '{name}' of VM '{vm}' would move from {from} to {to}: {}, {eta}{unknown}",
                amount(disk.total_bytes)
            )
        }
        DiskMoveState::Waiting | DiskMoveState::Copying => {
            format!("disk '{name}' of VM '{vm}' is on its way to {to}")
        }
    }
}

/// A move in a list, whatever became of the disk since.
fn listed(disk: &DiskMove) -> String {
    let (name, from, to) = (&disk.disk, &disk.from, &disk.to);
    let way = format!("disk '{name}' from {from} to {to}");
    match disk.state {
        DiskMoveState::Moved => format!("{way}{}", took(disk)),
        DiskMoveState::Failed => {
            let why = disk
                .why
                .as_deref()
                .unwrap_or("see the log of its VM process");
            format!("{way}: not moved: {why}")
        }
        DiskMoveState::Cancelled => format!("{way}: called off"),
        DiskMoveState::Planned | DiskMoveState::Waiting | DiskMoveState::Copying => {
            format!("{way}: under way")
        }
    }
}

/// What each iteration came to, and what redo logs took; nothing of a disk that was mirrored.
fn details(disk: &DiskMove) -> impl Iterator<Item = String> {
    let logs = disk.redo_logs.map(|taken| {
        format!(
            "  {} redo {}, with the new image {} at the most; it was at both places for {}; {}",
            taken.logs,
            match taken.logs {
                1 => "log",
                _ => "logs",
            },
            amount(taken.space_max_bytes),
            seconds(taken.spanned_s),
            put_over(taken.frozen_ms, taken.slowed_to)
        )
    });
    iterations(disk).chain(logs)
}

/// What each iteration of dirty block tracking came to, or each consolidation of a redo log.
fn iterations(disk: &DiskMove) -> impl Iterator<Item = String> {
    let ended = disk.iterations.iter();
    ended.map(|ended| format!("  {}", iteration(ended)))
}

/// How much was copied, in what time, and what that waited for.
fn took(disk: &DiskMove) -> String {
    let Some(taken) = disk.seconds else {
        return String::new();
    };
    let limit = disk.limited_by.map(|limit| match limit {
        DiskMoveLimit::SourceDisk => ", limited by reads of its former image",
        DiskMoveLimit::DestinationDisk => ", limited by writes of its new image",
        DiskMoveLimit::Cap => ", limited by the cap",
    });
    format!(
        ": {} in {}{}",
        amount(disk.total_bytes),
        seconds(taken),
        limit.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_types::ApiError;
    use godwit_types::disk_move::{DiskIteration, RedoLogs};

    #[test]
    fn each_end_says_where_the_disk_is() {
        let vm = VmName::new("web").unwrap();
        let mut disk = DiskMove {
            state: DiskMoveState::Moved,
            total_bytes: 2 << 30,
            switch_ms: Some(3.21),
            ..DiskMove::planned("root", "/old", "/new")
        };
        assert_eq!(
            sentence(&vm, &disk),
            "disk 'root' of VM 'web' is /new now; its guest's requests waited 3.2 ms for that"
        );
        let off_device = DiskMove {
            from: "/dev/vg0/web".to_owned(),
            ..disk.clone()
        };
        let said = sentence(&vm, &off_device);
        let words = "for that; nothing was erased on the device /dev/vg0/web, whose label";
        assert!(said.contains(words), "{said}");
        (disk.seconds, disk.limited_by) = (Some(8.04), Some(DiskMoveLimit::DestinationDisk));
        let said = sentence(&vm, &disk);
        let words = "is /new now: 2.0 GiB in 8.0 s, limited by writes of its new image; its";
        assert!(said.contains(words), "{said}");
        (disk.state, disk.eta_s) = (DiskMoveState::Planned, Some(9));
        assert_eq!(
            sentence(&vm, &disk),
            "disk 'root' of VM 'web' would move from /old to /new: 2.0 GiB, about 9.0 s"
        );
        let refusal = ApiError::new(ErrorCode::Preflight, "there is no room in /new");
        let mut plan = DiskMoves {
            disks: vec![disk.clone()],
            ..DiskMoves::default()
        };
        assert_eq!(plan_lines(&vm, &plan), [sentence(&vm, &disk)]);
        plan.refusals = vec![refusal];
        assert_eq!(
            plan_lines(&vm, &plan),
            ["refused: there is no room in /new"],
            "nothing would be moved"
        );
        disk.iterations = vec![DiskIteration {
            number: 2,
            copied_bytes: 300 << 20,
            seconds: 1.5,
            dirty_bytes: 40 << 20,
            hot_bytes: 10 << 20,
            deferred_bytes: 10 << 20,
        }];
        let lines: Vec<String> = iterations(&disk).collect();
        assert_eq!(
            lines,
            [
                "  iteration 2: 300.0 MiB in 1.50 s, without 10.0 MiB that is written again and again; 30.0 MiB written meanwhile"
            ]
        );
        (disk.state, disk.why) = (DiskMoveState::Failed, Some("no room".into()));
        assert_eq!(
            sentence(&vm, &disk),
            "disk 'root' of VM 'web' is /old still: no room"
        );
        disk.state = DiskMoveState::Cancelled;
        assert!(sentence(&vm, &disk).contains("is /old still: it was called off"));
    }

    #[test]
    fn of_redo_logs_it_is_told_what_they_took() {
        let logs = RedoLogs {
            logs: 3,
            space_max_bytes: 3 << 30,
            spanned_s: 12.0,
            frozen_ms: 4.26,
            slowed_to: Some(0.25),
        };
        let mut disk = DiskMove {
            redo_logs: Some(logs),
            ..DiskMove::planned("root", "/old", "/new")
        };
        let told: Vec<String> = details(&disk).collect();
        assert_eq!(
            told,
            [
                "  3 redo logs, with the new image 3.0 GiB at the most; it was at both places for 12.0 s; its guest waited 4.3 ms while they were put over; its guest was slowed to 25 %"
            ]
        );
        disk.redo_logs = Some(RedoLogs {
            logs: 1,
            slowed_to: None,
            ..logs
        });
        let told = details(&disk).next().unwrap();
        assert!(
            told.contains("1 redo log, ") && !told.contains("slowed"),
            "{told}"
        );
    }
}
