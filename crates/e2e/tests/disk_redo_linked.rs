//! A disk that is linked to an image on storage which is mounted for reading only leaves that for a place of its own, by redo logs, while its guest writes.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::redo::{begin, is_at, is_well};
use disk_site::{
    LONG, Site, another, begin_move_by, dies_at, does_at, has_died, has_successor, move_ended,
};
use godwit_types::disk_move::{DiskMoveState, FirstLog, Method};
use godwit_types::host_api::VmRequest;
use std::path::Path;

const BOTH: [FirstLog; 2] = [FirstLog::Source, FirstLog::Destination];

fn directory(path: &Path) -> Result<&Path> {
    path.parent().context("a directory")
}

#[test]
fn a_disk_over_an_image_that_nobody_can_write_moves_by_redo_logs_and_is_linked_to_nothing()
-> Result<()> {
    for first_log in BOTH {
        let (mut site, golden) = Site::linked()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        // Whoever takes it over knows the image again.
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        has_successor(&site.pair.a, starts)?;
        site.goes_on(&site.pair.a, 10)?;
        begin(&site, &fast, first_log)?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        let logs = moved.redo_logs.context("nothing is told of its logs")?;
        println!("  {first_log:?}: {logs:?}, {:?}", moved.iterations);
        ensure!(logs.logs as usize == moved.iterations.len(), "{moved:?}");
        is_at(&mut site, &fast, &first)?;
        is_well(&site)?;
        // It is a disk like any other, and goes back as one.
        begin(&site, &first, FirstLog::default())?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        is_at(&mut site, &first, &fast)?;
        is_well(&site)?;
        golden.is_unchanged()?;
    }
    Ok(())
}

#[test]
fn the_mirror_moves_it_too_and_dirty_block_tracking_says_that_it_does_not() -> Result<()> {
    let (mut site, golden) = Site::linked()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    let refused = begin_move_by(&site, Method::DirtyTracking, &fast, None).err();
    let why = format!("{:#}", refused.context("it is tracked")?);
    ensure!(why.contains("does not copy that"), "{why}");
    begin_move_by(&site, Method::Mirror, &fast, None)?;
    let moved = move_ended(&site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    is_at(&mut site, &fast, &first)?;
    is_well(&site)?;
    golden.is_unchanged()
}

#[test]
fn a_process_that_dies_meanwhile_leaves_one_disk_which_is_the_right_one() -> Result<()> {
    for (point, is_moved) in [
        ("redo.made", false),
        ("redo.put-over", false),
        ("redo.parent-copied", false),
        ("redo.copied", false),
        ("redo.named", false),
        ("redo.last", false),
        ("redo.recorded", true),
        ("redo.switched", true),
    ] {
        for first_log in BOTH {
            let told = || format!("killed at {point}, first log at the {first_log:?}");
            let (mut site, golden) = Site::linked()?;
            let (first, fast) = (site.path.clone(), another(&site, "fast")?);
            dies_at(&site.pair.a, point)?;
            // It may die before it has answered.
            let _ = begin(&site, &fast, first_log);
            has_died(&site.pair.a).with_context(told)?;
            if !is_moved {
                site.is_linked_still(directory(&fast)?).with_context(told)?;
                site.goes_on(&site.pair.a, 20).with_context(told)?;
                // What the guest has is found where all of it is one image.
                begin_move_by(&site, Method::Mirror, &fast, None)?;
                let moved = move_ended(&site)?;
                ensure!(moved.state == DiskMoveState::Moved, "{}: {moved:?}", told());
            }
            is_at(&mut site, &fast, &first).with_context(told)?;
            is_well(&site).with_context(told)?;
            golden.is_unchanged().with_context(told)?;
            println!("  {}", told());
        }
    }
    Ok(())
}

#[test]
fn a_move_that_is_called_off_leaves_it_linked_and_without_logs() -> Result<()> {
    for point in ["redo.put-over", "redo.parent-copied", "redo.held"] {
        for first_log in BOTH {
            let told = || format!("called off at {point}, first log at the {first_log:?}");
            let (mut site, golden) = Site::linked()?;
            let (first, fast) = (site.path.clone(), another(&site, "fast")?);
            does_at(&site.pair.a, point, "hold")?;
            begin(&site, &fast, first_log)?;
            site.pair.a.wait_fault(LONG)?;
            site.pair.a.ask(&VmRequest::CancelDiskMoves)?;
            site.pair.a.release()?;
            let ended = move_ended(&site)?;
            ensure!(
                ended.state == DiskMoveState::Cancelled,
                "{}: {ended:?}",
                told()
            );
            site.is_linked_still(directory(&fast)?).with_context(told)?;
            site.goes_on(&site.pair.a, 20).with_context(told)?;
            // Nothing stands in the way of the next one.
            begin(&site, &fast, first_log)?;
            let moved = move_ended(&site)?;
            ensure!(moved.state == DiskMoveState::Moved, "{}: {moved:?}", told());
            is_at(&mut site, &fast, &first).with_context(told)?;
            is_well(&site).with_context(told)?;
            golden.is_unchanged()?;
        }
    }
    Ok(())
}
