//! A disk with snapshots that goes elsewhere while its guest writes to it: with all of them, or not at all.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::snapshots::{
    contents, delete, has_round, is_tidy, revert, start, stop, take, top, tree,
};
use disk_site::{
    LONG, LOOK_EVERY, Site, another, begin_move_by, dies_at, does_at, has_died, has_successor,
    is_described, move_ended,
};
use godwit_types::disk_move::{DiskMoveState, Method};
use godwit_types::host_api::VmRequest;
use std::path::Path;
use std::time::Instant;

/// Two snapshots, one after the other, of a guest that has gone back to the first one and runs on from there. Returns what they hold.
fn branched(site: &Site) -> Result<Vec<(String, Vec<u8>)>> {
    take(site, "first")?;
    site.goes_on(&site.pair.a, 10)?;
    take(site, "second")?;
    site.goes_on(&site.pair.a, 10)?;
    stop(site)?;
    revert(site, "first")?;
    let held = contents(&site.path)?;
    start(site)?;
    site.goes_on(&site.pair.a, 10)?;
    Ok(held)
}

/// Waits until the disk is there and nothing is left of it where it was.
fn has_moved(site: &mut Site, to: &Path) -> Result<()> {
    let former = std::mem::replace(&mut site.path, to.to_owned());
    is_described(&site.pair.a, to)?;
    is_empty_beside(&former)
}

/// Waits until nothing is in the directory of this file.
fn is_empty_beside(path: &Path) -> Result<()> {
    let directory = path.parent().context("a directory")?;
    let deadline = Instant::now() + LONG;
    loop {
        let names = std::fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.file_name()));
        let left: Vec<_> = names.collect::<Result<_, _>>()?;
        if left.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{left:?} is left");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// It can go back to each of them, the guest works with what it finds there, and what is above it is whole.
fn is_of_use(site: &Site, before: &[(String, Vec<u8>)]) -> Result<()> {
    let round = stop(site)?;
    has_round(site, &top(site)?, round)?;
    let now = contents(&site.path)?;
    for ((name, before), (other, now)) in before.iter().zip(&now) {
        ensure!(name == other && before == now, "snapshot '{name}' differs");
    }
    ensure!(before.len() == now.len());
    for name in ["second", "first"] {
        revert(site, name)?;
        start(site)?;
        site.goes_on(&site.pair.a, 5)?;
        let round = stop(site)?;
        has_round(site, &top(site)?, round)?;
    }
    start(site)?;
    for name in ["first", "second"] {
        delete(site, name)?;
    }
    is_tidy(site)?;
    let round = stop(site)?;
    let own = site
        .path
        .file_name()
        .context("a name")?
        .to_string_lossy()
        .into_owned();
    ensure!(top(site)? == own, "{}", top(site)?);
    has_round(site, &own, round)
}

#[test]
fn a_disk_moves_on_its_host_with_its_snapshots_by_either_method_and_its_guest_loses_nothing()
-> Result<()> {
    for method in [Method::Mirror, Method::DirtyTracking] {
        let mut site = Site::local()?;
        let before = branched(&site)?;
        let listed = tree(&site.pair.a)?;
        let fast = another(&site, "fast")?;
        begin_move_by(&site, method, &fast, None)?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        println!("  {} MiB, {method:?}", moved.total_bytes >> 20);
        has_moved(&mut site, &fast)?;
        site.goes_on(&site.pair.a, 20)?;
        ensure!(tree(&site.pair.a)? == listed, "{:?}", tree(&site.pair.a)?);
        // A successor works with what the disk consists of now.
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        has_successor(&site.pair.a, starts)?;
        site.goes_on(&site.pair.a, 20)?;
        is_of_use(&site, &before)?;
    }
    Ok(())
}

#[test]
fn a_move_of_a_disk_with_snapshots_that_is_called_off_leaves_it_where_it_was() -> Result<()> {
    let site = Site::local()?;
    let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
    for point in [
        "disk-move.parts-made",
        "disk-move.below-copied",
        "disk-move.copying",
    ] {
        let fast = another(&site, "fast")?;
        does_at(&site.pair.a, point, "hold")?;
        begin_move_by(&site, Method::Mirror, &fast, None)?;
        site.pair.a.wait_fault(LONG)?;
        let refused = take(&site, "meanwhile").err();
        let refused = refused.context("a snapshot is taken of a disk that moves")?;
        ensure!(
            format!("{refused:#}").contains("being moved"),
            "{refused:#}"
        );
        site.pair.a.ask(&VmRequest::CancelDiskMoves)?;
        site.pair.a.release()?;
        let state = move_ended(&site)?.state;
        ensure!(state == DiskMoveState::Cancelled, "{point}: {state:?}");
        is_empty_beside(&fast)?;
        ensure!(tree(&site.pair.a)? == listed, "{point}");
        site.goes_on(&site.pair.a, 10)?;
        println!("  called off at {point}");
    }
    is_of_use(&site, &before)
}

#[test]
fn a_process_that_dies_while_it_moves_a_disk_with_snapshots_leaves_one_disk_with_all_of_them()
-> Result<()> {
    for (point, is_moved) in [
        ("disk-move.frozen", false),
        ("disk-move.made", false),
        ("disk-move.parts-made", false),
        ("disk-move.below-copied", false),
        ("disk-move.copying", false),
        ("disk-move.parts-named", false),
        ("disk-move.named", false),
        ("disk-move.written", true),
        ("disk-move.switched", true),
        ("disk-move.followed", true),
    ] {
        let mut site = Site::local()?;
        let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        dies_at(&site.pair.a, point)?;
        begin_move_by(&site, Method::Mirror, &fast, None)?;
        has_died(&site.pair.a).with_context(|| point)?;
        if is_moved {
            has_moved(&mut site, &fast).with_context(|| point)?;
        } else {
            is_described(&site.pair.a, &first)?;
            is_empty_beside(&fast).with_context(|| point)?;
        }
        site.goes_on(&site.pair.a, 20).with_context(|| point)?;
        ensure!(tree(&site.pair.a)? == listed, "{point}");
        is_of_use(&site, &before).with_context(|| point)?;
        println!("  killed at {point}");
    }
    Ok(())
}
