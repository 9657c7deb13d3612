//! Snapshots of a disk whose guest writes to it: taken, gone back to and deleted, also by a process that dies in the middle.

mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use disk_site::{BYTES, LONG, LOOK_EVERY, Site, dies_at, has_died, progress};
use godwit_testkit::guest::boot_disk;
use godwit_types::SnapshotName;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::snapshots::{Quiesce, SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::vm::VmState;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

fn named(name: &str) -> Result<SnapshotName> {
    Ok(SnapshotName::new(name)?)
}

fn wish(name: &str) -> Result<TakeSnapshot> {
    Ok(TakeSnapshot {
        name: named(name)?,
        text: String::new(),
        quiesce: Quiesce::IfPossible,
    })
}

fn take(site: &Site, name: &str) -> Result<String> {
    done(site, &VmRequest::TakeSnapshot(wish(name)?))
}

fn delete(site: &Site, name: &str) -> Result<String> {
    let name = named(name)?;
    done(site, &VmRequest::DeleteSnapshot(SnapshotRequest { name }))
}

fn revert(site: &Site, name: &str) -> Result<String> {
    let name = named(name)?;
    done(site, &VmRequest::RevertSnapshot(SnapshotRequest { name }))
}

fn done(site: &Site, request: &VmRequest) -> Result<String> {
    match site.pair.a.ask(request)? {
        VmAnswer::Done(said) => Ok(said),
        other => bail!("{other:?}"),
    }
}

fn list(site: &Site) -> Result<Snapshots> {
    match site.pair.a.ask(&VmRequest::Snapshots)? {
        VmAnswer::Snapshots(snapshots) => Ok(snapshots),
        other => bail!("{other:?}"),
    }
}

fn names(site: &Site) -> Result<Vec<String>> {
    let listed = list(site)?.snapshots.into_iter();
    Ok(listed.map(|snapshot| snapshot.name.to_string()).collect())
}

/// Waits until nothing is left to be merged.
fn is_tidy(site: &Site) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while list(site)?.unneeded_images > 0 {
        ensure!(
            Instant::now() < deadline,
            "{:?} is left",
            site.images(&site.pair.a)?
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
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

/// A file that `qemu-img` makes of the image that is described as this one, by what the files themselves say.
fn as_qemu_reads(disk: &Path, image: &str) -> Result<PathBuf> {
    let raw = disk.with_extension("read");
    let (format, from) = match image == name_of(disk)? {
        true => ("raw", disk.to_owned()),
        false => ("vmdk", disk.with_file_name(format!("{image}.vmdk"))),
    };
    let mut command = Command::new("qemu-img");
    command
        .args(["convert", "-f", format, "-O", "raw"])
        .arg(from)
        .arg(&raw);
    let made = command.output()?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{said}");
    ensure!(std::fs::metadata(&raw)?.len() == BYTES);
    Ok(raw)
}

fn name_of(disk: &Path) -> Result<&str> {
    let name = disk.file_name().and_then(|name| name.to_str());
    name.context("a name")
}

/// What lies beside a disk's own image and says what it consists of.
fn description_of(disk: &Path) -> PathBuf {
    PathBuf::from(format!("{}.images", disk.display()))
}

fn top(site: &Site) -> Result<String> {
    top_of(&site.path)
}

/// The image that the guest writes to, by the description that lies beside the disk's own.
fn top_of(disk: &Path) -> Result<String> {
    let described = description_of(disk);
    if !described.exists() {
        return Ok(name_of(disk)?.to_owned());
    }
    let described: serde_json::Value = serde_json::from_slice(&std::fs::read(described)?)?;
    Ok(described["top"].as_str().context("no top")?.into())
}

/// What a guest finds that ended in this round.
fn has_round(site: &Site, image: &str, round: u32) -> Result<()> {
    let raw = as_qemu_reads(&site.path, image)?;
    let missing = boot_disk::missing(&File::open(&raw)?, round)?;
    std::fs::remove_file(raw)?;
    ensure!(
        missing.is_none(),
        "of round {round}, {missing:?} is missing in {image}"
    );
    Ok(())
}

#[test]
fn snapshots_are_taken_and_deleted_under_a_guest_that_loses_nothing_and_leave_one_image()
-> Result<()> {
    let site = Site::local()?;
    for name in ["first", "second", "third"] {
        println!("  {}", take(&site, name)?);
        site.goes_on(&site.pair.a, 20)?;
    }
    let again = take(&site, "second").err().context("it is taken twice")?;
    ensure!(
        format!("{again:#}").contains("'second' already"),
        "{again:#}"
    );
    ensure!(names(&site)? == ["first", "second", "third"]);
    // A successor goes on with all that was answered.
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    disk_site::has_successor(&site.pair.a, starts)?;
    site.goes_on(&site.pair.a, 20)?;
    for name in ["second", "first", "third"] {
        println!("  {}", delete(&site, name)?);
        is_tidy(&site)?;
        site.goes_on(&site.pair.a, 20)?;
    }
    ensure!(names(&site)?.is_empty());
    let left = site.images(&site.pair.a)?;
    ensure!(
        left.iter()
            .all(|file| file.starts_with("root.raw") && !file.contains(".d")),
        "{left:?}"
    );
    ensure!(!left.iter().any(|file| file.ends_with(".vmdk")), "{left:?}");
    ensure!(top(&site)? == "root.raw", "{}", top(&site)?);
    site.is_whole(&site.pair.a)
}

#[test]
fn a_vm_that_is_off_goes_back_to_a_snapshot_and_qemu_img_reads_each_of_them() -> Result<()> {
    let site = Site::local()?;
    take(&site, "early")?;
    let early = progress(&site.pair.a)?.round;
    site.goes_on(&site.pair.a, 40)?;
    let refused = revert(&site, "early")
        .err()
        .context("it goes back under its guest")?;
    ensure!(
        format!("{refused:#}").contains("stop it first"),
        "{refused:#}"
    );
    let late = stop(&site)?;
    has_round(&site, &top(&site)?, late)?;
    take(&site, "late")?;
    println!("  {}", revert(&site, "early")?);
    // The guest begins with what was there, and goes on with that.
    let raw = as_qemu_reads(&site.path, &top(&site)?)?;
    let image = File::open(&raw)?;
    let found = (early.saturating_sub(8)..early + 8)
        .any(|round| boot_disk::missing(&image, round).is_ok_and(|missing| missing.is_none()));
    ensure!(
        found && boot_disk::missing(&image, late)?.is_some(),
        "it is not round {early}"
    );
    start(&site)?;
    let other = stop(&site)?;
    has_round(&site, &top(&site)?, other)?;
    revert(&site, "late")?;
    has_round(&site, &top(&site)?, late)?;
    ensure!(names(&site)? == ["early", "late"]);
    start(&site)?;
    for name in ["early", "late"] {
        delete(&site, name)?;
    }
    is_tidy(&site)?;
    let last = stop(&site)?;
    ensure!(top(&site)? == "root.raw", "{}", top(&site)?);
    has_round(&site, "root.raw", last)
}

#[test]
fn a_process_that_dies_anywhere_in_a_snapshot_leaves_a_disk_that_has_all_that_was_answered()
-> Result<()> {
    for point in [
        "snapshot.made",
        "snapshot.written",
        "snapshot.committed",
        "snapshot.merged",
        "snapshot.tidied",
        "snapshot.forgotten",
    ] {
        let site = Site::local()?;
        take(&site, "before")?;
        site.goes_on(&site.pair.a, 10)?;
        dies_at(&site.pair.a, point)?;
        // Whoever asked hears nothing of it.
        let took = take(&site, "meanwhile");
        if took.is_ok() {
            drop(delete(&site, "before"));
        }
        has_died(&site.pair.a).with_context(|| point)?;
        site.goes_on(&site.pair.a, 20).with_context(|| point)?;
        let left = names(&site)?;
        println!("  {point}: {left:?}");
        for name in left {
            delete(&site, &name)?;
        }
        is_tidy(&site).with_context(|| point)?;
        let round = stop(&site)?;
        ensure!(top(&site)? == "root.raw", "{point}: {}", top(&site)?);
        has_round(&site, "root.raw", round).with_context(|| point)?;
        let files = site.images(&site.pair.a)?;
        ensure!(
            !files.iter().any(|file| file.contains(".d")),
            "{point}: {files:?}"
        );
    }
    Ok(())
}

/// The rounds near this one that are the last ones which each of these disks may have.
fn at_one_moment(disks: &[PathBuf], near: u32) -> Result<Vec<u32>> {
    let mut read = Vec::new();
    for disk in disks {
        let raw = as_qemu_reads(disk, &top_of(disk)?)?;
        read.push(File::open(&raw)?);
        std::fs::remove_file(raw)?;
    }
    let has = |round: u32| {
        let mut all = read.iter();
        all.all(|image| boot_disk::missing(image, round).is_ok_and(|missing| missing.is_none()))
    };
    let all = near.saturating_sub(8)..near + 8;
    Ok(all.filter(|round| has(*round)).collect())
}

#[test]
fn disks_of_which_only_some_went_back_are_not_used_before_all_have_also_with_a_record_put_back()
-> Result<()> {
    let site = Site::local_of(&["root", "data"])?;
    let disks = [site.path.clone(), site.path.with_file_name("data.raw")];
    take(&site, "early")?;
    let early = progress(&site.pair.a)?.round;
    site.goes_on(&site.pair.a, 40)?;
    let dies_while_it_goes_back = |point: &'static str| -> Result<Vec<u8>> {
        let before = std::fs::read(description_of(&disks[0]))?;
        dies_at(&site.pair.a, point)?;
        ensure!(revert(&site, "early").is_err(), "{point}: it goes back");
        has_died(&site.pair.a).with_context(|| point)?;
        for request in [VmRequest::Start, VmRequest::TakeSnapshot(wish("more")?)] {
            let refused = done(&site, &request).err().context("they are used")?;
            ensure!(
                format!("{refused:#}").contains("not all of them did"),
                "{point}: {refused:#}"
            );
        }
        Ok(before)
    };
    // The first disk alone had noted it, and the record of that is put back: all of them are as they were.
    let late = stop(&site)?;
    let before = dies_while_it_goes_back("snapshot.reverting")?;
    std::fs::write(description_of(&disks[0]), before)?;
    let found = at_one_moment(&disks, late)?;
    ensure!(found.contains(&late), "not round {late}: {found:?}");
    start(&site)?;
    // The first disk alone has gone back, and is what it was before again: the other one knows of it.
    stop(&site)?;
    let before = dies_while_it_goes_back("snapshot.written")?;
    std::fs::write(description_of(&disks[0]), before)?;
    let refused = done(&site, &VmRequest::Start);
    let refused = refused.err().context("they are used")?;
    ensure!(
        format!("{refused:#}").contains("not all of them did"),
        "{refused:#}"
    );
    revert(&site, "early")?;
    let found = at_one_moment(&disks, early)?;
    ensure!(!found.is_empty(), "not round {early}");
    start(&site)?;
    // Nobody put anything back: once more is enough.
    stop(&site)?;
    dies_while_it_goes_back("snapshot.reverting")?;
    revert(&site, "early")?;
    let found = at_one_moment(&disks, early)?;
    ensure!(!found.is_empty(), "not round {early}");
    start(&site)
}

#[test]
fn a_process_is_renewed_though_somebody_removed_the_map_of_what_is_not_durable() -> Result<()> {
    let site = Site::local()?;
    let host = &site.pair.a;
    take(&site, "one")?;
    site.goes_on(host, 20)?;
    let map = || -> Result<Option<PathBuf>> {
        let mut files = std::fs::read_dir(host.run_dir())?.flatten();
        let is_map = |path: &PathBuf| path.extension().is_some_and(|end| end == "states");
        Ok(files.find_map(|entry| Some(entry.path()).filter(is_map)))
    };
    std::fs::remove_file(map()?.context("there is no map")?)?;
    host.renew()?;
    let deadline = Instant::now() + LONG;
    while !std::fs::read_to_string(host.log())?.contains("goes on over QEMU's connection") {
        ensure!(Instant::now() < deadline, "it is not renewed");
        std::thread::sleep(LOOK_EVERY);
    }
    site.goes_on(host, 40)?;
    ensure!(map()?.is_some(), "there is no map");
    delete(&site, "one")?;
    is_tidy(&site)?;
    site.is_whole(host)
}

#[test]
fn a_description_that_somebody_else_may_have_written_is_not_used() -> Result<()> {
    let site = Site::local()?;
    take(&site, "one")?;
    site.goes_on(&site.pair.a, 10)?;
    let round = stop(&site)?;
    let described = description_of(&site.path);
    let kept = std::fs::read(&described)?;
    let allow = |mode| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(&described, std::fs::Permissions::from_mode(mode))
    };
    allow(0o666)?;
    let refused = done(&site, &VmRequest::Start).err().context("it is used")?;
    ensure!(
        format!("{refused:#}").contains("nobody else may write"),
        "{refused:#}"
    );
    allow(0o600)?;
    for (wrong, told) in [
        (kept.get(..kept.len() / 2).unwrap_or_default(), "damaged"),
        (&b"{}"[..], "root.raw.images"),
    ] {
        std::fs::write(&described, wrong)?;
        let refused = done(&site, &VmRequest::Start).err().context("it is used")?;
        ensure!(format!("{refused:#}").contains(told), "{refused:#}");
    }
    std::fs::remove_file(&described)?;
    let refused = done(&site, &VmRequest::Start)
        .err()
        .context("a part of the disk is used")?;
    ensure!(format!("{refused:#}").contains("is gone"), "{refused:#}");
    std::fs::write(&described, kept)?;
    // Another delta than the one that is described.
    let extent = |name: &str| site.path.with_file_name(format!("{name}-sesparse.vmdk"));
    let own = extent(&top(&site)?);
    change_label(&own)?;
    let refused = done(&site, &VmRequest::Start).err().context("it is used")?;
    ensure!(
        format!("{refused:#}").contains("label is damaged"),
        "{refused:#}"
    );
    change_label(&own)?;
    has_round(&site, &top(&site)?, round)?;
    start(&site)
}

#[test]
fn an_image_that_was_put_back_alone_is_not_given_the_snapshots_of_the_one_that_was_there()
-> Result<()> {
    let site = Site::local()?;
    take(&site, "one")?;
    site.goes_on(&site.pair.a, 10)?;
    let round = stop(&site)?;
    let aside = site.path.with_extension("aside");
    std::fs::rename(&site.path, &aside)?;
    // Content alone: what a backup program keeps that knows of no attributes.
    std::fs::write(&site.path, std::fs::read(&aside)?)?;
    let owner = aside.metadata()?;
    chown(&site.path, Some(owner.uid()), Some(owner.gid()))?;
    std::fs::set_permissions(&site.path, owner.permissions())?;
    let refused = done(&site, &VmRequest::Start).err().context("it is used")?;
    ensure!(
        format!("{refused:#}").contains("is another image than"),
        "{refused:#}"
    );
    std::fs::rename(&aside, &site.path)?;
    has_round(&site, &top(&site)?, round)?;
    start(&site)
}

#[test]
fn an_older_description_that_was_put_back_does_not_bring_an_older_disk_back() -> Result<()> {
    let site = Site::local()?;
    let described = description_of(&site.path);
    take(&site, "one")?;
    let older = std::fs::read(&described)?;
    site.goes_on(&site.pair.a, 5)?;
    take(&site, "two")?;
    site.goes_on(&site.pair.a, 5)?;
    let round = stop(&site)?;
    let kept = std::fs::read(&described)?;
    std::fs::write(&described, older)?;
    for request in [VmRequest::Start, VmRequest::TakeSnapshot(wish("three")?)] {
        let refused = done(&site, &request).err().context("it is used")?;
        ensure!(
            format!("{refused:#}").contains("is older than"),
            "{refused:#}"
        );
    }
    std::fs::write(&described, kept)?;
    has_round(&site, &top(&site)?, round)?;
    start(&site)
}

#[test]
fn a_disk_that_nobody_but_the_vms_own_user_may_read_has_snapshots_too() -> Result<()> {
    let site = Site::of_own_user()?;
    take(&site, "one")?;
    site.goes_on(&site.pair.a, 5)?;
    let described = PathBuf::from(format!("{}.images", site.path.display()));
    let owner = |path: &Path| path.metadata().map(|found| found.uid());
    ensure!(
        owner(&described)? == owner(&site.path)?,
        "whoever may write it says what the disk is"
    );
    // Each of them reads what the former has written.
    take(&site, "two")?;
    ensure!(names(&site)? == ["one", "two"]);
    let round = stop(&site)?;
    has_round(&site, &top(&site)?, round)?;
    revert(&site, "one")?;
    start(&site)?;
    for name in ["one", "two"] {
        delete(&site, name)?;
    }
    is_tidy(&site)?;
    let last = stop(&site)?;
    ensure!(top(&site)? == "root.raw", "{}", top(&site)?);
    has_round(&site, "root.raw", last)
}

/// Changes what a delta says that it is, or changes it back.
fn change_label(extent: &Path) -> Result<()> {
    let mut bytes = std::fs::read(extent)?;
    let magic = bytes.windows(8).position(|eight| eight == b"GODWITDL");
    let id = magic.context("no label")? + 16;
    if let Some(byte) = bytes.get_mut(id) {
        *byte ^= 1;
    }
    let file = File::options().write(true).open(extent)?;
    Ok(file.write_all_at(bytes.get(..id + 1).unwrap_or_default(), 0)?)
}
