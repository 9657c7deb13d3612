//! A disk that goes from one place of its host to another by snapshotting, the laboratory's first method, while its guest writes to it.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::redo::{begin, is_at, is_well};
use disk_site::{LONG, LOOK_EVERY, Site, another, dies_at, does_at, has_died, move_ended};
use godwit_types::SnapshotName;
use godwit_types::disk_move::{DiskMoveState, FirstLog, Method};
use godwit_types::host_api::VmRequest;
use godwit_types::snapshots::{Quiesce, SnapshotRequest, TakeSnapshot};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A guest's requests wait for no longer.
const HELD_MAX_MS: f64 = 5000.0;
/// A guest that was held for so long is let go: its last log may take 3 s.
const TOO_LONG: Duration = Duration::from_millis(3200);

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
    for (point, is_moved) in [
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
    ] {
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
    does_at(&site.pair.a, "redo.held", "hold")?;
    begin(&site, &fast, FirstLog::default())?;
    site.pair.a.wait_fault(LONG)?;
    // Not for something to happen: its storage takes so long.
    std::thread::sleep(TOO_LONG);
    site.pair.a.release()?;
    let moved = move_ended(&site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    let logs = moved.redo_logs.context("nothing is told of its logs")?;
    ensure!(logs.logs == 2 && moved.iterations.len() == 2, "{moved:?}");
    let switch_ms = moved.switch_ms.context("no time")?;
    println!("  {switch_ms:.1} ms, {logs:?}");
    ensure!(
        switch_ms >= TOO_LONG.as_secs_f64() * 1e3,
        "all attempts count: {moved:?}"
    );
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

/// Killed at any moment, again and again.
#[test]
fn a_process_that_is_killed_at_any_moment_of_a_move_by_redo_logs_leaves_one_disk() -> Result<()> {
    let mut site = Site::local()?;
    let places = [site.path.clone(), another(&site, "fast")?];
    let (mut at, mut moved) = (0, 0);
    for round in 0..12_u64 {
        let first_log = match round % 2 {
            0 => FirstLog::Destination,
            _ => FirstLog::Source,
        };
        begin(&site, &places[1 - at], first_log)?;
        std::thread::sleep(Duration::from_millis(round * 41 % 320));
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        disk_site::has_successor(&site.pair.a, starts)?;
        let (deadline, told) = (Instant::now() + LONG, || format!("round {round}"));
        // A copy that is not whole has another name, or goes before the disk is looked for.
        let images = || places.iter().filter(|path| path.exists()).count();
        while images() != 1 {
            ensure!(
                Instant::now() < deadline,
                "{}: there are two images",
                told()
            );
            std::thread::sleep(LOOK_EVERY);
        }
        let now = usize::from(places[1].exists());
        moved += usize::from(now != at);
        at = now;
        let (now, other) = (places[at].clone(), places[1 - at].clone());
        is_at(&mut site, &now, &other).with_context(told)?;
        site.goes_on(&site.pair.a, 5).with_context(told)?;
        site.is_whole(&site.pair.a).with_context(told)?;
    }
    println!("  {moved} of 12 were moved before they were killed");
    Ok(())
}
