//! A disk that goes from one place of its host to another while its guest writes to it.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{
    LONG, LOOK_EVERY, Site, another, begin_move, copy_all, dies_at, does_at, has_died,
    is_described, move_ended, places,
};
use godwit_e2e::pair::Options;
use godwit_types::disk_move::{DiskMoveState, DiskMoves, DiskPlace, Method};
use godwit_types::host_api::{VmAnswer, VmRequest};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn begin(site: &Site, to: &Path) -> Result<DiskMoves> {
    begin_move(site, to, None)
}

/// How many files are in the directory of this one.
fn files_beside(path: &Path) -> Result<usize> {
    let directory = path.parent().context("a directory")?;
    Ok(std::fs::read_dir(directory)?.count())
}

/// Waits until nothing is in the directory of this file.
fn is_empty_beside(path: &Path, what: &str) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while files_beside(path)? > 0 {
        ensure!(Instant::now() < deadline, "{what}: something is left");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// The VM's description says that the disk is there, and nowhere else is anything of it.
fn is_at(site: &mut Site, path: &Path) -> Result<()> {
    let former = std::mem::replace(&mut site.path, path.to_owned());
    is_described(&site.pair.a, path)?;
    let deadline = Instant::now() + LONG;
    while former != path && former.exists() {
        ensure!(
            Instant::now() < deadline,
            "it is still {}",
            former.display()
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[test]
fn a_disk_moves_to_another_place_of_its_host_and_back_and_its_guest_loses_nothing() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    for to in [&fast, &first] {
        let begun = begin(&site, to)?;
        ensure!(begun.are_under_way(), "{begun:?}");
        let moved = move_ended(&site)?;
        ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
        println!(
            "  {} MiB, {:.1} ms",
            moved.total_bytes >> 20,
            moved.switch_ms.unwrap_or(0.0)
        );
        ensure!(
            moved.total_bytes > 40 << 20 && moved.total_bytes < 60 << 20,
            "{moved:?}"
        );
        is_at(&mut site, to)?;
        site.goes_on(&site.pair.a, 20)?;
        site.is_whole(&site.pair.a)?;
    }
    ensure!(site.images(&site.pair.a)? == ["root.raw"]);
    // A successor works with the image that the disk has now.
    begin(&site, &fast)?;
    move_ended(&site)?;
    is_at(&mut site, &fast)?;
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    disk_site::has_successor(&site.pair.a, starts)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_move_that_is_called_off_or_refused_leaves_the_disk_where_it_was() -> Result<()> {
    let site = Site::local()?;
    let fast = another(&site, "fast")?;
    std::fs::write(&fast, "somebody's")?;
    begin(&site, &fast)?;
    let refused = move_ended(&site)?;
    let why = refused.why.unwrap_or_default();
    ensure!(
        refused.state == DiskMoveState::Failed && why.contains("a file is at"),
        "{why}"
    );
    ensure!(std::fs::read(&fast)? == b"somebody's");
    std::fs::remove_file(&fast)?;
    does_at(&site.pair.a, "disk-move.copying", "hold")?;
    begin(&site, &fast)?;
    site.pair.a.wait_fault(LONG)?;
    site.pair.a.ask(&VmRequest::CancelDiskMoves)?;
    site.pair.a.release()?;
    let state = move_ended(&site)?.state;
    ensure!(state == DiskMoveState::Cancelled, "{state:?}");
    is_empty_beside(&fast, "called off")?;
    site.is_whole(&site.pair.a)?;
    let places = vec![DiskPlace {
        disk: "swap".into(),
        path: "/nowhere".into(),
        shared: false,
        max_bandwidth_mbit_per_s: None,
        method: Method::default(),
        without: Vec::new(),
        first_log: godwit_types::disk_move::FirstLog::default(),
    }];
    let asked = site.pair.a.ask(&VmRequest::MoveDisks { places });
    let refused = format!(
        "{:#}",
        asked.err().context("a disk that is not there is moved")?
    );
    ensure!(refused.contains("no disk 'swap'"), "{refused}");
    site.goes_on(&site.pair.a, 20)
}

#[test]
fn a_disk_does_not_go_on_with_an_image_that_somebody_has_cut() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    does_at(&site.pair.a, "disk-move.equal", "hold")?;
    begin(&site, &fast)?;
    site.pair.a.wait_fault(LONG)?;
    let cut = std::fs::File::options().write(true).open(&fast)?;
    cut.set_len(1 << 20)?;
    site.pair.a.release()?;
    let failed = move_ended(&site)?;
    let why = failed.why.context("it is moved")?;
    ensure!(why.contains("bytes by now in place of"), "{why}");
    is_at(&mut site, &first)?;
    is_empty_beside(&fast, "cut")?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_file_that_somebody_puts_where_a_new_image_was_made_is_not_written() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    does_at(&site.pair.a, "disk-move.made", "hold")?;
    begin(&site, &fast)?;
    site.pair.a.wait_fault(LONG)?;
    let directory = fast.parent().context("a directory")?;
    let made = std::fs::read_dir(directory)?
        .next()
        .context("nothing is made")??;
    std::fs::remove_file(made.path())?;
    let victim = directory.join("victim.raw");
    std::fs::write(&victim, vec![7; 1 << 20])?;
    std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o666))?;
    std::os::unix::fs::symlink(&victim, made.path())?;
    site.pair.a.release()?;
    let failed = move_ended(&site)?;
    let why = failed.why.context("it is moved")?;
    ensure!(
        why.contains("another file is where its image was made"),
        "{why}"
    );
    ensure!(
        std::fs::read(&victim)? == vec![7; 1 << 20],
        "it was written"
    );
    is_at(&mut site, &first)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_process_that_dies_while_it_moves_a_disk_leaves_one_image_which_is_the_right_one() -> Result<()>
{
    for (point, is_moved) in [
        ("disk-move.copying", false),
        ("disk-move.equal", false),
        ("disk-move.written", true),
        ("disk-move.switched", true),
        ("disk-move.followed", true),
    ] {
        let mut site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        dies_at(&site.pair.a, point)?;
        begin(&site, &fast)?;
        has_died(&site.pair.a).with_context(|| point.to_owned())?;
        is_at(&mut site, if is_moved { &fast } else { &first })?;
        let other = if is_moved { &first } else { &fast };
        is_empty_beside(other, point)?;
        let VmAnswer::DiskMoves(moves) = site.pair.a.ask(&VmRequest::DiskMoves)? else {
            bail!("no moves");
        };
        let states: Vec<_> = moves.past.iter().map(|disk| disk.state).collect();
        let wanted = match is_moved {
            true => DiskMoveState::Moved,
            false => DiskMoveState::Failed,
        };
        ensure!(states == [wanted], "{point}: {moves:?}");
        site.goes_on(&site.pair.a, 20)
            .with_context(|| point.to_owned())?;
        site.is_whole(&site.pair.a)
            .with_context(|| point.to_owned())?;
        println!("  killed at {point}");
    }
    Ok(())
}

/// The copy is from while the disk was being moved: the image that it was moved to was no disk then.
#[test]
fn an_older_copy_of_the_state_directory_takes_no_disk_from_a_guest_that_runs() -> Result<()> {
    for kills in [true, false] {
        let mut site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        let (state, directory) = (site.pair.a.state_dir(), tempfile::tempdir()?);
        let older = directory.path().join("state");
        does_at(&site.pair.a, "disk-move.copying", "hold")?;
        begin(&site, &fast)?;
        site.pair.a.wait_fault(LONG)?;
        copy_all(&state, &older)?;
        site.pair.a.release()?;
        move_ended(&site)?;
        is_at(&mut site, &fast)?;
        is_empty_beside(&first, "moved")?;
        site.goes_on(&site.pair.a, 20)?;
        site.pair.supervised.store(false, Ordering::SeqCst);
        let starts = site.pair.a.starts();
        if kills {
            site.pair.a.signal_kill()?;
        }
        std::fs::remove_dir_all(&state)?;
        copy_all(&older, &state)?;
        if !kills {
            // As an agent that finds it does.
            site.pair.a.ask(&VmRequest::KeepRecord)?;
            site.pair.a.signal_kill()?;
        }
        site.pair.supervised.store(true, Ordering::SeqCst);
        disk_site::has_successor(&site.pair.a, starts)?;
        site.goes_on(&site.pair.a, 20)?;
        site.is_whole(&site.pair.a)?;
        is_at(&mut site, &fast)?;
        // Not even once the guest is gone.
        site.pair.a.ask(&VmRequest::Stop { force: true })?;
        ensure!(files_beside(&fast)? == 1 && files_beside(&first)? == 0);
    }
    Ok(())
}

#[test]
fn a_hypervisor_that_dies_while_a_disk_is_moved_leaves_one_image_and_a_description_of_it()
-> Result<()> {
    for (point, may_move) in [("disk-move.copying", false), ("disk-move.written", true)] {
        let site = Site::local()?;
        let (first, fast) = (site.path.clone(), another(&site, "fast")?);
        does_at(&site.pair.a, point, "kill-qemu")?;
        begin(&site, &fast)?;
        site.pair.a.wait_fault(LONG)?;
        // Both are equal once that is written, and either is good: it may be written back.
        let is_at = |there: &PathBuf, other: &PathBuf| -> Result<bool> {
            let described = site.pair.a.vm()?.spec.disks[0].path == there.to_string_lossy();
            Ok(described && files_beside(there)? == 1 && files_beside(other)? == 0)
        };
        let deadline = Instant::now() + LONG;
        while !(is_at(&first, &fast)? || may_move && is_at(&fast, &first)?) {
            ensure!(Instant::now() < deadline, "{point}: it comes to nothing");
            std::thread::sleep(LOOK_EVERY);
        }
    }
    Ok(())
}

#[test]
fn a_vm_does_not_leave_its_host_while_its_disks_are_on_their_way() -> Result<()> {
    let mut site = Site::apart()?;
    let fast = another(&site, "fast")?;
    does_at(&site.pair.a, "disk-move.copying", "hold")?;
    begin(&site, &fast)?;
    site.pair.a.wait_fault(LONG)?;
    let (_, begun) = site
        .pair
        .try_begin(&site.pair.a, &site.pair.b, &Options::default())?;
    let refused = format!("{:#}", begun.err().context("it was let go")?);
    ensure!(refused.contains("are being moved"), "{refused}");
    let beforehand = site.pair.a.ask(&VmRequest::Blockers);
    ensure!(beforehand.is_err_and(|why| why.to_string().contains("are being moved")));
    site.pair.a.release()?;
    ensure!(move_ended(&site)?.state == DiskMoveState::Moved);
    is_at(&mut site, &fast)?;
    site.goes_on(&site.pair.a, 20)
}

#[test]
fn a_process_that_is_killed_at_any_moment_of_a_move_leaves_one_image_which_is_the_right_one()
-> Result<()> {
    let mut site = Site::local()?;
    let places = [site.path.clone(), another(&site, "fast")?];
    let (mut at, mut moved) = (0, 0);
    for round in 0..16_u64 {
        begin(&site, &places[1 - at])?;
        // A move takes some hundred milliseconds.
        std::thread::sleep(Duration::from_millis(round * 37 % 320));
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        disk_site::has_successor(&site.pair.a, starts)?;
        let deadline = Instant::now() + LONG;
        while files_beside(&places[0])? + files_beside(&places[1])? != 1 {
            ensure!(
                Instant::now() < deadline,
                "round {round}: there are two images"
            );
            std::thread::sleep(LOOK_EVERY);
        }
        let now = usize::from(places[1].exists());
        moved += usize::from(now != at);
        at = now;
        is_at(&mut site, &places[at])?;
        site.goes_on(&site.pair.a, 5)
            .with_context(|| format!("round {round}"))?;
        site.is_whole(&site.pair.a)
            .with_context(|| format!("round {round}"))?;
    }
    println!("  {moved} of 16 were moved before they were killed");
    Ok(())
}

#[test]
fn a_move_is_planned_without_a_change_keeps_its_cap_and_stays_listed_after_its_end() -> Result<()> {
    let mut site = Site::local()?;
    let (first, fast) = (site.path.clone(), another(&site, "fast")?);
    let moves = |site: &Site, request: VmRequest| match site.pair.a.ask(&request)? {
        VmAnswer::DiskMoves(moves) => Ok(moves),
        other => bail!("{other:?}"),
    };
    let places = places(&fast, None)?;
    let planned = moves(&site, VmRequest::PlanDiskMoves { places })?;
    let [disk] = &planned.disks[..] else {
        bail!("{planned:?}");
    };
    ensure!(disk.state == DiskMoveState::Planned && !planned.are_under_way());
    ensure!(Path::new(&disk.to) == fast && Path::new(&disk.from) == first);
    ensure!(files_beside(&fast)? == 0, "something was made");
    ensure!(moves(&site, VmRequest::DiskMoves)?.disks.is_empty());

    // Some 48 MiB, of which so many MiB go in a second.
    begin_move(&site, &fast, Some(100))?;
    let moved = move_ended(&site)?;
    let taken = moved.seconds.context("no time")?;
    println!("  {} MiB in {taken:.1} s", moved.total_bytes >> 20);
    ensure!(
        moved.state == DiskMoveState::Moved && taken > 3.0,
        "{moved:?}"
    );
    // Which limit it was is storage's, too; a set clock tells in the units.
    ensure!(moved.limited_by.is_some(), "{moved:?}");
    is_at(&mut site, &fast)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)?;

    std::fs::write(&first, "somebody's")?;
    begin(&site, &first)?;
    let failed = move_ended(&site)?;
    let listed = |site: &Site| moves(site, VmRequest::DiskMoves).map(|moves| moves.past);
    let past = listed(&site)?;
    ensure!(past == [failed, moved], "{past:?}");
    ensure!(
        past.iter().all(|disk| disk.began_unix_s.is_some()),
        "{past:?}"
    );
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    disk_site::has_successor(&site.pair.a, starts)?;
    ensure!(listed(&site)? == past, "a successor knows of them");
    site.pair.a.ask(&VmRequest::Stop { force: true })?;
    ensure!(listed(&site)? == past, "so does one without a guest");
    Ok(())
}
