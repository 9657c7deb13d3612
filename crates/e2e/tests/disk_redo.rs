//! A disk that goes from one place of its host to another by snapshotting, the laboratory's first method, while its guest writes to it.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::redo::{begin, is_at, is_well};
use disk_site::{HELD_MAX_MS, LONG, Site, another, dies_at, does_at, has_died, move_ended};
use godwit_types::SnapshotName;
use godwit_types::disk_move::{DiskMoveState, FirstLog, Method};
use godwit_types::host_api::VmRequest;
use godwit_types::snapshots::{Quiesce, SnapshotRequest, TakeSnapshot};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where a process dies while a disk moves, and whether it has moved then.
const POINTS: [(&str, bool); 10] = [
    ("redo.made", false),
    ("snapshot.written", false),
    ("redo.put-over", false),
    ("redo.copying", false),
    ("redo.copied", false),
    ("redo.named", false),
    ("redo.held", false),
    ("redo.last", false),
    ("redo.recorded", true),
    ("redo.switched", true),
];

#[test]
fn a_disk_moves_by_redo_logs_and_back_and_its_guest_loses_nothing() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    for (to, from, first_log) in [
        (&fast, &first, FirstLog::Destination),
        (&first, &fast, FirstLog::Source),
    ] {
        begin(&site, to, first_log)?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        ensure!(moved.method == Method::Snapshot, "{moved:?}");
        let logs = moved.redo_logs.context("nothing is told of its logs")?;
        let switch_ms = moved.switch_ms.context("no time")?;
        println!("  {switch_ms:.1} ms, {logs:?}, {:?}", moved.iterations);
        ensure!(
            switch_ms < HELD_MAX_MS && logs.frozen_ms < HELD_MAX_MS,
            "{moved:?}"
        );
        ensure!(
            logs.logs as usize == moved.iterations.len(),
            "each log but the last is consolidated beside the guest: {moved:?}"
        );
        ensure!(
            (logs.spanned_s > 0.0) == (first_log == FirstLog::Destination || logs.logs > 1),
            "{logs:?}"
        );
        is_at(&mut site, to, from)?;
        is_well(&site)?;
    }
    Ok(())
}

#[test]
fn a_process_that_dies_while_a_disk_moves_by_redo_logs_leaves_one_disk_which_is_the_right_one()
-> Result<()> {
    for (point, is_moved) in POINTS {
        for first_log in [FirstLog::Source, FirstLog::Destination] {
            let told = || format!("killed at {point}, first log at the {first_log:?}");
            let mut site = Site::local()?;
            let (first, fast) = (site.path.clone(), another(&site, "fast")?);
            dies_at(&site.pair.a, point)?;
            // It may die before it has answered.
            let _ = begin(&site, &fast, first_log);
            has_died(&site.pair.a).with_context(told)?;
            let (now, other) = match is_moved {
                true => (&fast, &first),
                false => (&first, &fast),
            };
            is_at(&mut site, now, other).with_context(told)?;
            is_well(&site).with_context(told)?;
            println!("  {}", told());
        }
    }
    Ok(())
}

/// Beside the copying, and while the guest's requests are held.
#[test]
fn a_move_that_is_called_off_lets_the_guest_go_on_and_its_logs_come_down() -> Result<()> {
    for point in ["redo.put-over", "redo.copying", "redo.copied", "redo.held"] {
        let mut site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        does_at(&site.pair.a, point, "hold")?;
        begin(&site, &fast, FirstLog::default())?;
        site.pair.a.wait_fault(LONG)?;
        site.pair.a.ask(&VmRequest::CancelDiskMoves)?;
        site.pair.a.release()?;
        let ended = move_ended(&site)?;
        ensure!(
            ended.state == DiskMoveState::Cancelled,
            "{point}: {ended:?}"
        );
        is_at(&mut site, &first, &fast).with_context(|| point.to_owned())?;
        is_well(&site).with_context(|| point.to_owned())?;
        // Nothing stands in the way of the next one.
        begin(&site, &fast, FirstLog::default())?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{point}: {moved:?}");
        is_at(&mut site, &fast, &first)?;
        is_well(&site)?;
    }
    Ok(())
}

/// What it was held for is consolidated while it works on.
#[test]
fn a_guest_that_was_held_for_too_long_works_on_under_another_log() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    does_at(&site.pair.a, "redo.held", "late")?;
    begin(&site, &fast, FirstLog::default())?;
    let moved = move_ended(&site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    ensure!(site.pair.a.fault_happened(), "it was never held");
    let logs = moved.redo_logs.context("nothing is told of its logs")?;
    ensure!(logs.logs == 2 && moved.iterations.len() == 2, "{moved:?}");
    let switch_ms = moved.switch_ms.context("no time")?;
    println!("  {switch_ms:.1} ms, {logs:?}");
    ensure!(switch_ms < HELD_MAX_MS, "{moved:?}");
    is_at(&mut site, &fast, &first)?;
    is_well(&site)
}

/// A file system of its own in a directory, until this is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn of(directory: &Path, mib: u32) -> Result<Self> {
        let options = format!("size={mib}m,mode=0777");
        let words = ["-t", "tmpfs", "-o", &options, "small"];
        let mounted = Command::new("mount").args(words).arg(directory).status()?;
        ensure!(mounted.success(), "no small file system");
        Ok(Self(directory.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Whoever has something open there keeps it for so long.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_destination_without_room_ends_the_move_and_its_guest_goes_on_where_it_was() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    let small = Mounted::of(fast.parent().context("a directory")?, 24)?;
    begin(&site, &fast, FirstLog::default())?;
    let ended = move_ended(&site)?;
    ensure!(ended.state == DiskMoveState::Failed, "{ended:?}");
    let why = ended.why.as_deref().unwrap_or_default();
    ensure!(why.contains("make room there"), "{why}");
    is_at(&mut site, &first, &fast)?;
    is_well(&site)?;
    drop(small);
    Ok(())
}

#[test]
fn a_disk_with_a_snapshot_is_refused_and_goes_once_that_is_deleted() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    let name = SnapshotName::new("clean")?;
    site.pair.a.ask(&VmRequest::TakeSnapshot(TakeSnapshot {
        name: name.clone(),
        text: String::new(),
        quiesce: Quiesce::IfPossible,
    }))?;
    let refused = begin(&site, &fast, FirstLog::default()).err();
    let why = format!("{:#}", refused.context("it moves with a snapshot")?);
    ensure!(why.contains("it has snapshots"), "{why}");
    let delete = SnapshotRequest { name };
    site.pair.a.ask(&VmRequest::DeleteSnapshot(delete))?;
    is_at(&mut site, &first, &fast)?;
    begin(&site, &fast, FirstLog::default())?;
    let moved = move_ended(&site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    is_at(&mut site, &fast, &first)?;
    is_well(&site)
}

/// Each time it finds the disk as the one before has left it.
#[test]
fn a_process_that_is_killed_in_one_move_by_redo_logs_after_another_leaves_one_disk() -> Result<()> {
    let mut site = Site::local()?;
    let places = [site.path.clone(), another(&site, "fast")?];
    let mut at = 0;
    for (round, (point, is_moved)) in POINTS.into_iter().enumerate() {
        let told = || format!("round {round}, killed at {point}");
        let first_log = match round % 2 {
            0 => FirstLog::Destination,
            _ => FirstLog::Source,
        };
        dies_at(&site.pair.a, point).with_context(told)?;
        // It may die before it has answered.
        let _ = begin(&site, &places[1 - at], first_log);
        has_died(&site.pair.a).with_context(told)?;
        if is_moved {
            at = 1 - at;
        }
        is_at(&mut site, &places[at], &places[1 - at]).with_context(told)?;
        is_well(&site).with_context(told)?;
    }
    Ok(())
}
