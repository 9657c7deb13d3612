//! Disks that are copied for another VM: of a VM that is off, and of a snapshot while the guest works, also by a process that dies in the middle.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{LONG, LOOK_EVERY, Site, dies_at, does_at, has_died, has_successor, progress};
use godwit_testkit::guest::boot_disk;
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::snapshots::{Quiesce, SnapshotRequest, TakeSnapshot};
use godwit_types::vm::{VmSpec, VmState};
use godwit_types::{SnapshotName, VmName};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Of the attempt whose part is looked at.
const NUMBER: &str = "0123456789abcdef0123456789abcdef";
const PART: &str = ".web2-root.raw.0123456789abcdef0123456789abcdef.godwit-clone";

fn done(site: &Site, request: &VmRequest) -> Result<String> {
    match site.pair.a.ask(request)? {
        VmAnswer::Done(said) => Ok(said),
        other => bail!("{other:?}"),
    }
}

fn take(site: &Site, name: &str) -> Result<()> {
    let wish = TakeSnapshot {
        name: SnapshotName::new(name)?,
        text: String::new(),
        quiesce: Quiesce::Never,
    };
    done(site, &VmRequest::TakeSnapshot(wish)).map(drop)
}

/// Ends the guest where it stands; says which round it was in.
fn stop(site: &Site) -> Result<u32> {
    done(site, &VmRequest::Pause)?;
    let round = progress(&site.pair.a)?.round;
    done(site, &VmRequest::Stop { force: true })?;
    site.pair.a.wait_state(VmState::Stopped, LONG)?;
    Ok(round)
}

fn start(site: &Site) -> Result<()> {
    done(site, &VmRequest::Start)?;
    site.goes_on(&site.pair.a, 10)
}

fn wish(site: &Site, snapshot: Option<&str>) -> Result<VmRequest> {
    let spec: VmSpec = site.pair.a.vm()?.spec;
    let snapshot = snapshot.map(SnapshotName::new).transpose()?;
    Ok(VmRequest::CloneDisks(Box::new(CloneDisks {
        spec: spec.cloned_as(&VmName::new("web2")?, NUMBER)?,
        snapshot,
        disks: BTreeMap::from([("root".to_owned(), site.path.to_string_lossy().into_owned())]),
    })))
}

fn ask(site: &Site, request: &VmRequest) -> Result<Cloning> {
    match site.pair.a.ask(request)? {
        VmAnswer::Cloning(cloning) => Ok(*cloning),
        other => bail!("{other:?}"),
    }
}

/// Asks until all is copied.
fn copied(site: &Site, request: &VmRequest) -> Result<VmSpec> {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(whole) = ask(site, request)?.whole {
            return Ok(whole);
        }
        ensure!(Instant::now() < deadline, "it comes to no end");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Why it comes to none.
fn refused(site: &Site, request: &VmRequest) -> Result<String> {
    let error = copied(site, request).err().context("it was copied")?;
    Ok(format!("{error:#}"))
}

fn part(site: &Site) -> PathBuf {
    site.path.with_file_name(PART)
}

/// What is beside the disk's own files.
fn of_clones(site: &Site) -> Result<Vec<String>> {
    let mut all = site.images(&site.pair.a)?;
    all.retain(|file| file.contains("web2"));
    Ok(all)
}

fn has_round(image: &Path, round: u32) -> Result<()> {
    let missing = boot_disk::missing(&File::open(image)?, round)?;
    ensure!(
        missing.is_none(),
        "of round {round}, {missing:?} is missing in {}",
        image.display()
    );
    let mut last = [0; 512];
    let image = File::open(image)?;
    image.read_exact_at(&mut last, disk_site::BYTES - 512)?;
    ensure!(last == [7; 512] && image.metadata()?.len() == disk_site::BYTES);
    Ok(())
}

fn are_same(one: &Path, other: &Path) -> Result<bool> {
    let compared = Command::new("cmp").arg("-s").args([one, other]).status()?;
    Ok(compared.success())
}

#[test]
fn a_vm_that_is_off_is_copied_as_it_is_and_one_that_is_on_is_not() -> Result<()> {
    let site = Site::local()?;
    let refusal = refused(&site, &wish(&site, None)?)?;
    ensure!(
        refusal.contains("stop it first") && refusal.contains("--snapshot NAME"),
        "{refusal}"
    );
    let round = stop(&site)?;
    let whole = copied(&site, &wish(&site, None)?)?;
    ensure!(whole.name.as_str() == "web2", "{}", whole.name);
    ensure!(of_clones(&site)? == [PART], "{:?}", of_clones(&site)?);
    has_round(&part(&site), round)?;
    ensure!(are_same(&part(&site), &site.path)?);
    // It goes on from where it was, and so does not the copy.
    start(&site)?;
    site.is_whole(&site.pair.a)?;
    ensure!(!are_same(&part(&site), &site.path)?);
    has_round(&part(&site), round)
}

#[test]
fn a_disk_with_snapshots_becomes_one_raw_image() -> Result<()> {
    let site = Site::local()?;
    for name in ["one", "two"] {
        take(&site, name)?;
        site.goes_on(&site.pair.a, 20)?;
    }
    let round = stop(&site)?;
    copied(&site, &wish(&site, None)?)?;
    has_round(&part(&site), round)?;
    let missing = boot_disk::missing(&File::open(&site.path)?, round)?;
    ensure!(missing.is_some(), "its own image has all of it");
    start(&site)?;
    site.goes_on(&site.pair.a, 20)
}

#[test]
fn a_snapshot_is_copied_while_the_guest_works_and_may_start() -> Result<()> {
    let site = Site::local()?;
    site.goes_on(&site.pair.a, 20)?;
    take(&site, "early")?;
    site.goes_on(&site.pair.a, 40)?;
    // What the disk was at its first snapshot is its own image, frozen.
    copied(&site, &wish(&site, Some("early"))?)?;
    ensure!(are_same(&part(&site), &site.path)?);
    site.goes_on(&site.pair.a, 20)?;
    let unknown = refused(&site, &wish(&site, Some("late"))?)?;
    ensure!(unknown.contains("no snapshot 'late'"), "{unknown}");
    ensure!(of_clones(&site)?.is_empty(), "{:?}", of_clones(&site)?);
    // A later one lies in a delta over that.
    let late = stop(&site)?;
    take(&site, "late")?;
    start(&site)?;
    stop(&site)?;
    does_at(&site.pair.a, "clone.begun", "hold")?;
    ask(&site, &wish(&site, Some("late"))?)?;
    site.pair.a.wait_fault(LONG)?;
    let name = SnapshotName::new("late")?;
    let delete = VmRequest::DeleteSnapshot(SnapshotRequest { name });
    let kept = done(&site, &delete).err().context("it is deleted")?;
    ensure!(format!("{kept:#}").contains("is being made"), "{kept:#}");
    start(&site)?;
    site.pair.a.release()?;
    copied(&site, &wish(&site, Some("late"))?)?;
    has_round(&part(&site), late)?;
    site.goes_on(&site.pair.a, 20)
}

#[test]
fn a_process_that_dies_anywhere_in_a_clone_leaves_nothing_that_counts() -> Result<()> {
    let site = Site::local()?;
    let round = stop(&site)?;
    for point in ["clone.begun", "clone.copied", "clone.whole"] {
        dies_at(&site.pair.a, point)?;
        // Whoever asked hears nothing of its end.
        let request = wish(&site, None)?;
        drop(ask(&site, &request));
        has_died(&site.pair.a).with_context(|| point)?;
        let left = of_clones(&site)?;
        println!("  {point}: {left:?}");
        ensure!(
            !left.contains(&"web2-root.raw".to_owned()),
            "{point}: {left:?}"
        );
        copied(&site, &request).with_context(|| point)?;
        ensure!(of_clones(&site)? == [PART], "{:?}", of_clones(&site)?);
        has_round(&part(&site), round).with_context(|| point)?;
    }
    start(&site)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_vm_neither_starts_nor_is_left_while_it_is_copied_and_what_is_called_off_leaves_nothing()
-> Result<()> {
    let site = Site::local()?;
    stop(&site)?;
    does_at(&site.pair.a, "clone.begun", "hold")?;
    let request = wish(&site, None)?;
    ask(&site, &request)?;
    site.pair.a.wait_fault(LONG)?;
    let detach = VmRequest::Detach {
        unless_moving: false,
    };
    for other in [VmRequest::Start, detach] {
        let refused = done(&site, &other).err().context("it is let go")?;
        ensure!(
            format!("{refused:#}").contains("is being made"),
            "{refused:#}"
        );
    }
    done(&site, &VmRequest::CancelClone)?;
    site.pair.a.release()?;
    let deadline = Instant::now() + LONG;
    while done(&site, &VmRequest::Start).is_err() {
        ensure!(Instant::now() < deadline, "it does not start");
        std::thread::sleep(LOOK_EVERY);
    }
    ensure!(of_clones(&site)?.is_empty(), "{:?}", of_clones(&site)?);
    site.goes_on(&site.pair.a, 10)
}

#[test]
fn what_is_at_the_place_of_a_clone_s_disk_stays_there() -> Result<()> {
    let site = Site::local()?;
    stop(&site)?;
    let taken = site.path.with_file_name("web2-root.raw");
    std::fs::write(&taken, "somebody's")?;
    let refusal = refused(&site, &wish(&site, None)?)?;
    ensure!(refusal.contains("exists already"), "{refusal}");
    ensure!(std::fs::read(&taken)? == b"somebody's");
    ensure!(of_clones(&site)? == ["web2-root.raw"]);
    std::fs::remove_file(taken)?;
    copied(&site, &wish(&site, None)?)?;
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    has_successor(&site.pair.a, starts)?;
    start(&site)
}
