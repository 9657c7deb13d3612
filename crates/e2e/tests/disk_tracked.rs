//! A disk that goes from one place of its host to another by dirty block tracking, the laboratory's method, while its guest writes to it.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{
    HELD_MAX_MS, LONG, LOOK_EVERY, Site, another, dies_at, does_at, has_died, is_described,
    move_ended, places,
};
use godwit_e2e::pair::Options;
use godwit_types::disk_move::{DiskMoveState, DiskMoves, DiskPlace, Method, Optimisation};
use godwit_types::host_api::{VmAnswer, VmRequest};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn begin(site: &Site, to: &Path, without: &[Optimisation]) -> Result<DiskMoves> {
    let places = places(to, None)?.into_iter().map(|place| DiskPlace {
        method: Method::DirtyTracking,
        without: without.to_vec(),
        ..place
    });
    let places = places.collect();
    match site.pair.a.ask(&VmRequest::MoveDisks { places })? {
        VmAnswer::DiskMoves(moves) => Ok(moves),
        other => bail!("{other:?}"),
    }
}

/// The disk is there, and nothing is at the other place.
fn is_at(site: &mut Site, path: &Path, other: &Path) -> Result<()> {
    path.clone_into(&mut site.path);
    is_described(&site.pair.a, path)?;
    let directory = other.parent().context("a directory")?;
    let deadline = Instant::now() + LONG;
    while std::fs::read_dir(directory)?.count() > 0 {
        ensure!(
            Instant::now() < deadline,
            "something is left in {}",
            directory.display()
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[test]
fn a_disk_moves_by_dirty_tracking_and_back_and_its_guest_loses_nothing() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    let all = [Optimisation::Incremental, Optimisation::HotBlocks];
    for (to, from, without) in [(&fast, &first, &all[..0]), (&first, &fast, &all)] {
        begin(&site, to, without)?;
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        let switch_ms = moved.switch_ms.context("no time")?;
        println!("  {switch_ms:.1} ms, {:?}", moved.iterations);
        ensure!(
            switch_ms < HELD_MAX_MS && moved.iterations.len() > 1,
            "{moved:?}"
        );
        ensure!(moved.method == Method::DirtyTracking);
        is_at(&mut site, to, from)?;
        site.goes_on(&site.pair.a, 20)?;
        site.is_whole(&site.pair.a)?;
    }
    Ok(())
}

#[test]
fn a_process_that_dies_while_a_disk_is_closed_leaves_one_image_which_is_the_right_one() -> Result<()>
{
    for (point, is_moved) in [
        ("disk-move.copying", false),
        ("disk-move.equal", false),
        ("disk-move.closing", false),
        ("disk-move.closed", false),
        ("disk-move.written", true),
        ("disk-move.switched", true),
    ] {
        let mut site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        dies_at(&site.pair.a, point)?;
        begin(&site, &fast, &[])?;
        has_died(&site.pair.a).with_context(|| point.to_owned())?;
        let (now, other) = match is_moved {
            true => (&fast, &first),
            false => (&first, &fast),
        };
        is_at(&mut site, now, other).with_context(|| point.to_owned())?;
        let told = || format!("killed at {point}");
        site.goes_on(&site.pair.a, 20).with_context(told)?;
        site.is_whole(&site.pair.a).with_context(told)?;
        println!("  {}", told());
    }
    Ok(())
}

/// In the middle of the copying, and while the guest's requests are held.
#[test]
fn a_move_that_is_called_off_lets_the_guest_go_on_and_leaves_the_disk_where_it_was() -> Result<()> {
    for point in ["disk-move.copying", "disk-move.closing"] {
        let mut site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        does_at(&site.pair.a, point, "hold")?;
        begin(&site, &fast, &[])?;
        site.pair.a.wait_fault(LONG)?;
        site.pair.a.ask(&VmRequest::CancelDiskMoves)?;
        site.pair.a.release()?;
        let ended = move_ended(&site)?;
        ensure!(
            ended.state == DiskMoveState::Cancelled,
            "{point}: {ended:?}"
        );
        is_at(&mut site, &first, &fast)?;
        site.goes_on(&site.pair.a, 20)
            .with_context(|| point.to_owned())?;
        site.is_whole(&site.pair.a)
            .with_context(|| point.to_owned())?;
    }
    Ok(())
}

/// Its last blocks are copied once it stands still.
#[test]
fn a_vm_moves_with_its_disk_by_dirty_tracking_to_another_host_and_back() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    for (from, to) in [(a, b), (b, a)] {
        let report = site.goes_as_one_image((from, to), Method::DirtyTracking)?;
        ensure!(report.redo_logs.is_none(), "{report:?}");
    }
    Ok(())
}

/// The guest stands still then, and its last blocks are on their way.
#[test]
fn a_source_that_dies_while_its_last_blocks_are_copied_keeps_the_vm_and_its_disk() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let tracked = Options {
        method: Method::DirtyTracking,
        ..Options::default()
    };
    dies_at(a, "source.disks-closed")?;
    site.pair.begin(a, b, &tracked)?;
    has_died(a)?;
    site.goes_on(a, 20)?;
    site.is_whole(a)?;
    site.has_nothing(b)
}

/// Killed at any moment, again and again.
#[test]
fn a_process_that_is_killed_at_any_moment_of_a_move_by_dirty_tracking_leaves_one_image()
-> Result<()> {
    let mut site = Site::local()?;
    let places = [site.path.clone(), another(&site, "fast")?];
    let (mut at, mut moved) = (0, 0);
    for round in 0..12_u64 {
        begin(&site, &places[1 - at], &[])?;
        std::thread::sleep(Duration::from_millis(round * 41 % 320));
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        disk_site::has_successor(&site.pair.a, starts)?;
        let deadline = Instant::now() + LONG;
        let files = || -> Result<usize> {
            let count = |path: &PathBuf| {
                Ok::<_, anyhow::Error>(
                    std::fs::read_dir(path.parent().context("a directory")?)?.count(),
                )
            };
            Ok(count(&places[0])? + count(&places[1])?)
        };
        while files()? != 1 {
            ensure!(
                Instant::now() < deadline,
                "round {round}: there are two images"
            );
            std::thread::sleep(LOOK_EVERY);
        }
        let now = usize::from(places[1].exists());
        moved += usize::from(now != at);
        at = now;
        let (now, other) = (places[at].clone(), places[1 - at].clone());
        is_at(&mut site, &now, &other)?;
        let told = || format!("round {round}");
        site.goes_on(&site.pair.a, 5).with_context(told)?;
        site.is_whole(&site.pair.a).with_context(told)?;
    }
    println!("  {moved} of 12 were moved before they were killed");
    Ok(())
}
