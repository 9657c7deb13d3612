//! A disk that comes to a block device of its host while its guest writes to it, and leaves it again.

mod device;
mod disk_site;

use anyhow::{Context as _, Result, bail, ensure};
use device::Device;
use disk_site::{
    BYTES, HOLE, LONG, LOOK_EVERY, Site, begin_move, copy_all, dies_at, does_at, has_died,
    is_described, move_ended,
};
use godwit_blockio::label::{self, Holds, Label};
use godwit_e2e::host::kill_qemus_on;
use godwit_types::disk_move::{DiskMove, DiskMoveState};
use godwit_types::host_api::VmRequest;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Room for the disk and its label.
const DEVICE: u64 = BYTES + label::ROOM;

fn moved(site: &mut Site, to: &Path) -> Result<DiskMove> {
    let begun = begin_move(site, to, None)?;
    ensure!(begun.are_under_way(), "{begun:?}");
    let moved = move_ended(site)?;
    ensure!(moved.state == DiskMoveState::Moved, "{moved:?}");
    is_at(site, to)?;
    Ok(moved)
}

fn is_at(site: &mut Site, path: &Path) -> Result<()> {
    site.path = path.to_owned();
    is_described(&site.pair.a, path)?;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)
}

/// Why the disk does not move there.
fn refused(site: &Site, to: &Path) -> Result<String> {
    begin_move(site, to, None)?;
    let ended = move_ended(site)?;
    ensure!(ended.state == DiskMoveState::Failed, "{ended:?}");
    ended.why.context("a reason")
}

/// Waits until the device holds this.
fn comes_to_hold(device: &Device, holds: &Holds, what: &str) -> Result<()> {
    let until = Instant::now() + LONG;
    while device.label()?.map(|label| label.holds).as_ref() != Some(holds) {
        ensure!(Instant::now() < until, "{what}: {:?}", device.label()?);
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn images_are(site: &Site, directory: &Path, names: &[&str]) -> Result<()> {
    let until = Instant::now() + LONG;
    loop {
        let found = std::fs::read_dir(directory)?.flatten();
        let found: Vec<_> = found.map(|entry| entry.file_name()).collect();
        if found == names {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{found:?}: {}", site.path.display());
        std::thread::sleep(LOOK_EVERY);
    }
}

fn starts_anew(site: &Site) -> Result<()> {
    let starts = site.pair.a.starts();
    site.pair.a.signal_kill()?;
    disk_site::has_successor(&site.pair.a, starts)
}

#[test]
fn a_disk_comes_to_a_device_and_leaves_it_and_comes_again_and_its_guest_loses_nothing() -> Result<()>
{
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let mut site = Site::local()?;
    let (file, node) = (site.path.clone(), device.node().to_owned());
    let images = file.parent().context("a directory")?.to_owned();
    let ended = moved(&mut site, &node)?;
    ensure!(
        ended.total_bytes == BYTES,
        "a hole is copied, too: {ended:?}"
    );
    images_are(&site, &images, &[])?;
    let label = device.label()?.context("a label")?;
    ensure!(
        label.holds == Holds::Disk && label.bytes == BYTES,
        "{label:?}"
    );
    starts_anew(&site)?;
    is_at(&mut site, &node)?;
    // Nor does another start lose it.
    site.pair.a.ask(&VmRequest::Stop { force: true })?;
    site.pair.a.ask(&VmRequest::Start)?;
    is_at(&mut site, &node)?;
    moved(&mut site, &file)?;
    comes_to_hold(&device, &Holds::Nothing, "left")?;
    // What is on the device is nobody's, and shows through nowhere.
    device.write(&[0xee; 1 << 20], HOLE)?;
    moved(&mut site, &node)?;
    images_are(&site, &images, &[])?;
    let mut hole = vec![1; 1 << 20];
    device.read(&mut hole, HOLE)?;
    ensure!(
        hole.iter().all(|byte| *byte == 0),
        "former bytes are in the disk"
    );
    moved(&mut site, &file)?;
    comes_to_hold(&device, &Holds::Nothing, "left again")
}

#[test]
fn a_disk_comes_to_a_device_by_a_link_to_it_and_not_over_what_is_there_since() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let device = device.linked()?;
    let mut site = Site::local()?;
    let (file, link) = (site.path.clone(), device.name().to_owned());
    moved(&mut site, &link)?;
    // It is the disk's own device by another name, which its lock tells first.
    let why = refused(&site, device.node())?;
    ensure!(why.contains("is in use"), "{why}");
    starts_anew(&site)?;
    is_at(&mut site, &link)?;
    moved(&mut site, &file)?;
    comes_to_hold(&device, &Holds::Nothing, "left")?;
    // What a person makes there since is somebody's.
    device.write(&[7; 512], 1024)?;
    let why = refused(&site, &link)?;
    ensure!(why.contains("since the disk that it held"), "{why}");
    device.write(&[0; 512], 1024)?;
    site.goes_on(&site.pair.a, 5)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_disk_goes_from_one_device_to_another() -> Result<()> {
    let (Some(one), Some(other)) = (Device::new(DEVICE)?, Device::new(2 * DEVICE)?) else {
        return Ok(());
    };
    let mut site = Site::local()?;
    for (to, from) in [(&one, None), (&other, Some(&one)), (&one, Some(&other))] {
        moved(&mut site, to.node())?;
        if let Some(from) = from {
            comes_to_hold(from, &Holds::Nothing, "left")?;
        }
        let label = to.label()?.context("a label")?;
        ensure!(
            label.holds == Holds::Disk && label.bytes == BYTES,
            "{label:?}"
        );
    }
    Ok(())
}

#[test]
fn a_process_that_dies_while_a_disk_comes_to_a_device_or_leaves_it_leaves_the_right_disk()
-> Result<()> {
    let points = [
        ("disk-move.made", false),
        ("disk-move.copying", false),
        ("disk-move.equal", false),
        ("disk-move.named", false),
        ("disk-move.written", true),
        ("disk-move.switched", true),
        ("disk-move.followed", true),
    ];
    for (point, is_moved) in points {
        let Some(device) = Device::new(DEVICE)? else {
            return Ok(());
        };
        let mut site = Site::local()?;
        let (file, node) = (site.path.clone(), device.node().to_owned());
        let dies = |site: &mut Site, [from, to]: [&PathBuf; 2]| -> Result<()> {
            dies_at(&site.pair.a, point)?;
            begin_move(site, to, None)?;
            has_died(&site.pair.a)?;
            is_at(site, if is_moved { to } else { from })
        };
        dies(&mut site, [&file, &node]).with_context(|| format!("to a device: {point}"))?;
        let holds = if is_moved {
            Holds::Disk
        } else {
            Holds::Nothing
        };
        comes_to_hold(&device, &holds, point)?;
        ensure!(
            file.exists() != is_moved || point == "disk-move.written",
            "{point}"
        );
        if !is_moved {
            moved(&mut site, &node)?;
        }
        dies(&mut site, [&node, &file]).with_context(|| format!("off a device: {point}"))?;
        let holds = if is_moved {
            Holds::Nothing
        } else {
            Holds::Disk
        };
        comes_to_hold(&device, &holds, point)?;
        println!("  killed at {point}");
    }
    Ok(())
}

/// The copy is from while the disk was being moved: what was on the device was no disk then.
#[test]
fn an_older_copy_of_the_state_directory_takes_no_disk_from_a_guest() -> Result<()> {
    for lives in [true, false] {
        let Some(device) = Device::new(DEVICE)? else {
            return Ok(());
        };
        let mut site = Site::local()?;
        let images = site.path.parent().context("a directory")?.to_owned();
        let (state, directory) = (site.pair.a.state_dir(), tempfile::tempdir()?);
        let older = directory.path().join("state");
        does_at(&site.pair.a, "disk-move.copying", "hold")?;
        begin_move(&site, device.node(), None)?;
        site.pair.a.wait_fault(LONG)?;
        copy_all(&state, &older)?;
        site.pair.a.release()?;
        move_ended(&site)?;
        is_at(&mut site, device.node())?;
        images_are(&site, &images, &[])?;
        site.pair.supervised.store(false, Ordering::SeqCst);
        let starts = site.pair.a.starts();
        site.pair.a.signal_kill()?;
        if !lives {
            kill_qemus_on(site.pair.a.ram_dir());
        }
        std::fs::remove_dir_all(&state)?;
        copy_all(&older, &state)?;
        site.pair.supervised.store(true, Ordering::SeqCst);
        disk_site::has_successor(&site.pair.a, starts)?;
        if lives {
            is_at(&mut site, device.node())?;
        } else {
            // Nothing is started with a disk that is gone; where it is now is said, unless the hypervisor was seen alive in between.
            let refused = site.pair.a.ask(&VmRequest::Start);
            let why = format!("{:#}", refused.err().context("it was started")?);
            let node = device.node().to_string_lossy();
            let told = ["does not exist", &node];
            ensure!(told.iter().any(|told| why.contains(told)), "{why}");
        }
        let label = device.label()?.context("a label")?;
        ensure!(label.holds == Holds::Disk, "{label:?}");
    }
    Ok(())
}

#[test]
fn a_device_on_which_anything_is_takes_no_disk_and_is_not_changed() -> Result<()> {
    let (Some(device), Some(small)) = (Device::new(DEVICE)?, Device::new(BYTES)?) else {
        return Ok(());
    };
    let site = Site::local()?;
    let node = device.node().to_owned();
    let whole = |vm: &str, holds| Label {
        holds,
        bytes: BYTES,
        vm: vm.to_owned(),
        disk: "data".to_owned(),
        text: None,
    };
    let says = |words: &[&str]| -> Result<()> {
        let before = device.bytes()?;
        let why = refused(&site, &node)?;
        for words in words {
            ensure!(why.contains(words), "{words:?}: {why}");
        }
        ensure!(device.bytes()? == before, "the device was written: {why}");
        Ok(())
    };
    for at in [0, DEVICE - 4096] {
        device.write(&[7; 4096], at)?;
        says(&["that Godwit has not put there", "blkdiscard -z"])?;
        device.write(&[0; 4096], at)?;
    }
    device.say(whole("db", Holds::Disk))?;
    says(&["holds disk 'data' of VM 'db'", "choose another place"])?;
    device.say(whole("db", Holds::Part("x".to_owned())))?;
    says(&["a part of disk 'data' of VM 'db'"])?;
    let why = refused(&site, small.node())?;
    ensure!(why.contains("at most 63 MiB beside its label"), "{why}");
    ensure!(small.label()?.is_none());
    let locked = device.lock()?;
    device.free()?;
    says(&["is in use"])?;
    drop(locked);
    site.goes_on(&site.pair.a, 5)?;
    site.is_whole(&site.pair.a)
}

#[test]
fn a_vm_whose_device_says_something_else_is_not_started_with_it() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let mut site = Site::local()?;
    moved(&mut site, device.node())?;
    site.pair.a.ask(&VmRequest::Stop { force: true })?;
    let own = device.label()?.context("a label")?;
    let refused = |words: &[&str]| -> Result<()> {
        let Err(why) = site.pair.a.ask(&VmRequest::Start) else {
            bail!("it was started: {words:?}");
        };
        let why = format!("{why:#}");
        ensure!(words.iter().all(|words| why.contains(words)), "{why}");
        Ok(())
    };
    device.free()?;
    refused(&["holds no disk"])?;
    device.say(Label {
        holds: Holds::Part("device.moving-1".to_owned()),
        ..own.clone()
    })?;
    refused(&["a part of disk 'root'"])?;
    device.say(Label {
        vm: "db".to_owned(),
        text: None,
        ..own.clone()
    })?;
    refused(&["it is disk 'root' of VM 'db'"])?;
    let text = String::from_utf8(own.text.clone().context("a record")?)?;
    let taken = |text: &str| -> Result<u64> {
        let record: serde_json::Value = serde_json::from_str(text)?;
        record["taken"].as_u64().context("a number")
    };
    let now = taken(&text)?;
    let older = text.replace(&format!("\"taken\":{now}"), "\"taken\":0");
    device.say(Label {
        text: Some(older.into_bytes()),
        ..own.clone()
    })?;
    refused(&["it is an older copy"])?;
    let others = text.replace("\"holder\":\"a\"", "\"holder\":\"z\"");
    let others = others.replace("\"generation\":1", "\"generation\":99");
    device.say(Label {
        text: Some(others.into_bytes()),
        ..own.clone()
    })?;
    refused(&["host 'z' has had it under generation 99"])?;
    device.wipe_label()?;
    refused(&["has lost the label"])?;
    device.say(own)?;
    site.pair.a.ask(&VmRequest::Start)?;
    is_at(&mut site, device.node())
}

#[test]
fn a_process_that_is_killed_at_any_moment_of_a_move_leaves_the_right_disk() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let mut site = Site::local()?;
    let places = [site.path.clone(), device.node().to_owned()];
    let (mut at, mut moved) = (0, 0);
    for round in 0..16_u64 {
        let told = || format!("round {round}");
        begin_move(&site, &places[1 - at], None)?;
        std::thread::sleep(Duration::from_millis(round * 37 % 320));
        starts_anew(&site)?;
        // Once both say the same nothing is under way.
        let until = Instant::now() + LONG;
        let now = loop {
            let holds = device
                .label()?
                .is_some_and(|label| label.holds == Holds::Disk);
            let is_part = matches!(
                device.label()?,
                Some(Label {
                    holds: Holds::Part(_),
                    ..
                })
            );
            if !is_part && holds != places[0].exists() {
                break usize::from(holds);
            }
            ensure!(Instant::now() < until, "round {round}: it comes to nothing");
            std::thread::sleep(LOOK_EVERY);
        };
        moved += usize::from(now != at);
        at = now;
        is_at(&mut site, &places[at]).with_context(told)?;
    }
    println!("  {moved} of 16 were moved before they were killed");
    Ok(())
}
