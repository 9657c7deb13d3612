//! A disk with snapshots that goes elsewhere while its guest writes to it: with all of them, or not at all.

mod disk_site;

use anyhow::{Context as _, Result, ensure};
use disk_site::snapshots::{
    contents, delete, has_round_at, is_tidy, revert, start, stop, take, top_at, tree,
};
use disk_site::{
    LONG, LOOK_EVERY, Site, another, begin_move_by, dies_at, does_at, has_died, has_successor,
    is_described, move_ended, own,
};
use godwit_e2e::pair::Options;
use godwit_types::disk_move::{DiskMoveState, Method};
use godwit_types::host_api::VmRequest;
use godwit_types::migration::Outcome;
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
    let held = contents(&own(&site.pair.a, &site.path))?;
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
    let image = own(&site.pair.a, &site.path);
    let whole = |round| has_round_at(&image, &top_at(&image)?, round);
    // A move that was broken off left the top frozen once more: who merges it may still be at that when the guest ends.
    is_tidy(site)?;
    whole(stop(site)?)?;
    let now = contents(&image)?;
    for ((name, before), (other, now)) in before.iter().zip(&now) {
        ensure!(name == other && before == now, "snapshot '{name}' differs");
    }
    ensure!(before.len() == now.len());
    for name in ["second", "first"] {
        revert(site, name)?;
        start(site)?;
        site.goes_on(&site.pair.a, 5)?;
        whole(stop(site)?)?;
    }
    start(site)?;
    for name in ["first", "second"] {
        delete(site, name)?;
    }
    is_tidy(site)?;
    whole(stop(site)?)?;
    let name = image.file_name().context("a name")?.to_string_lossy();
    ensure!(top_at(&image)? == name, "{}", top_at(&image)?);
    Ok(())
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

#[test]
fn a_vm_moves_to_another_host_with_its_snapshots_and_back() -> Result<()> {
    for method in [Method::Mirror, Method::DirtyTracking] {
        let site = Site::apart()?;
        let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
        let (a, b) = (&site.pair.a, &site.pair.b);
        let options = Options {
            method,
            ..Options::default()
        };
        for (from, to) in [(a, b), (b, a)] {
            let report = site.pair.migrate(from, to, &options)?;
            println!(
                "  {:.2} s, {:.1} ms, {} MiB",
                report.total_s,
                report.switchover_ms,
                report.disk_bytes >> 20
            );
            let (all, left) = (report.disk_bytes, report.disk_left_bytes);
            // What is marked when the guest is stopped is copied then, and told of no more.
            let is_told = left == 0 || method == Method::DirtyTracking;
            ensure!(all > 40 << 20 && is_told, "{left} of {all} bytes are left");
            site.goes_on(to, 20)?;
            ensure!(tree(to)? == listed, "{:?}", tree(to)?);
            site.has_nothing(from)?;
            // A successor works with what came.
            let starts = to.starts();
            to.signal_kill()?;
            has_successor(to, starts)?;
            site.goes_on(to, 20)?;
        }
        is_of_use(&site, &before)?;
    }
    Ok(())
}

#[test]
fn a_migration_with_snapshots_that_is_called_off_leaves_nothing_elsewhere() -> Result<()> {
    let site = Site::apart()?;
    let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
    let (a, b) = (&site.pair.a, &site.pair.b);
    let id = site.pair.begin(a, b, &site.slowly())?;
    site.is_half_way(&id)?;
    a.ask(&VmRequest::Cancel {
        migration: id.clone(),
        reason: "enough".into(),
    })?;
    site.ends(&id, Outcome::Cancelled)?;
    site.has_nothing(b)?;
    site.goes_on(a, 20)?;
    ensure!(tree(a)? == listed);
    is_of_use(&site, &before)
}

#[test]
fn a_link_that_is_lost_while_snapshots_are_sent_is_made_again_and_nothing_is_missing() -> Result<()>
{
    let site = Site::apart()?;
    let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
    let (a, b) = (&site.pair.a, &site.pair.b);
    site.migrates_over_a_lost_link(Method::Mirror)?;
    ensure!(tree(b)? == listed);
    site.has_nothing(a)?;
    site.pair.migrate(b, a, &Options::default())?;
    is_of_use(&site, &before)
}

#[test]
fn a_process_that_dies_while_snapshots_go_to_another_host_leaves_the_disk_where_it_was()
-> Result<()> {
    for (point, at_source) in [
        ("source.layers-begun", true),
        ("source.layers-ready", true),
        ("source.disks-copied", true),
        ("source.last-pages", true),
        ("destination.layers-made", false),
        ("destination.layers-whole", false),
        ("destination.disks-durable", false),
    ] {
        let site = Site::apart()?;
        let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
        let ended = site.dies_before_the_handover(point, at_source);
        ended.with_context(|| point)?;
        ensure!(tree(&site.pair.a)? == listed, "{point}");
        is_of_use(&site, &before).with_context(|| point)?;
        println!("  killed at {point}");
    }
    Ok(())
}

#[test]
fn a_process_that_dies_in_the_handover_leaves_one_disk_with_all_its_snapshots() -> Result<()> {
    for (point, at_source) in [
        ("journal.gave.after", true),
        ("source.permit.after", true),
        ("journal.ready.after", false),
        ("journal.holds.before", false),
        ("journal.holds.after", false),
        ("running", false),
    ] {
        let site = Site::apart()?;
        let (before, listed) = (branched(&site)?, tree(&site.pair.a)?);
        let (a, b) = (&site.pair.a, &site.pair.b);
        let has_gone = site.dies_in_the_handover(point, at_source);
        let has_gone = has_gone.with_context(|| point)?;
        let holder = if has_gone { b } else { a };
        ensure!(tree(holder)? == listed, "{point}");
        if has_gone {
            let back = site.pair.migrate(b, a, &Options::default());
            back.with_context(|| point)?;
        }
        is_of_use(&site, &before).with_context(|| point)?;
    }
    Ok(())
}
