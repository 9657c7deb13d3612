//! A VM that comes to a block device of another host with its disk, and leaves it again.

mod device;
mod disk_site;

use anyhow::{Context as _, Result, ensure};
use device::Device;
use disk_site::{BYTES, HOLE, ImageAway, LONG, LOOK_EVERY, Site, dies_at, has_died, own};
use godwit_blockio::label::{self, Holds, Label};
use godwit_e2e::Host;
use godwit_e2e::pair::Options;
use godwit_types::migration::Outcome;
use godwit_types::vm::VmState;
use std::path::Path;
use std::time::Instant;

const DEVICE: u64 = BYTES + label::ROOM;

/// With the disk on that device of the destination.
fn to(path: &Path) -> Options {
    Options {
        disk_to: Some(path.to_string_lossy().into_owned()),
        ..Options::default()
    }
}

fn comes_to_hold(device: &Device, holds: &Holds, what: &str) -> Result<()> {
    let until = Instant::now() + LONG;
    while device.label()?.map(|label| label.holds).as_ref() != Some(holds) {
        ensure!(Instant::now() < until, "{what}: {:?}", device.label()?);
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// What was there before shows through nowhere.
fn former_bytes(device: &Device) -> Result<()> {
    device.free()?;
    device.write(&[0xee; 1 << 20], HOLE)
}

fn log_says(host: &Host, words: &str) -> Result<()> {
    let until = Instant::now() + LONG;
    while !std::fs::read_to_string(host.log())?.contains(words) {
        ensure!(Instant::now() < until, "it does not say: {words}");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[test]
fn a_vm_comes_to_a_device_of_another_host_and_goes_back_and_loses_nothing() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let mut site = Site::apart()?;
    former_bytes(&device)?;
    let file = site.path.clone();
    site.pair
        .migrate(&site.pair.a, &site.pair.b, &to(device.node()))?;
    site.path = device.node().to_owned();
    site.goes_on(&site.pair.b, 20)?;
    site.is_whole(&site.pair.b)?;
    let mut hole = vec![1; 1 << 20];
    device.read(&mut hole, HOLE)?;
    ensure!(
        hole.iter().all(|byte| *byte == 0),
        "former bytes are in the disk"
    );
    let label = device.label()?.context("a label")?;
    ensure!(
        label.holds == Holds::Disk && label.bytes == BYTES,
        "{label:?}"
    );
    let until = Instant::now() + LONG;
    while own(&site.pair.a, &file).exists() {
        ensure!(Instant::now() < until, "the former image is left");
        std::thread::sleep(LOOK_EVERY);
    }
    let starts = site.pair.b.starts();
    site.pair.b.signal_kill()?;
    disk_site::has_successor(&site.pair.b, starts)?;
    site.goes_on(&site.pair.b, 20)?;
    site.is_whole(&site.pair.b)?;
    site.pair.migrate(&site.pair.b, &site.pair.a, &to(&file))?;
    site.path = file;
    site.goes_on(&site.pair.a, 20)?;
    site.is_whole(&site.pair.a)?;
    comes_to_hold(&device, &Holds::Nothing, "left")
}

#[test]
fn a_process_that_dies_while_a_disk_is_copied_leaves_the_device_free() -> Result<()> {
    for (point, at_source) in [
        ("source.disks-copied", true),
        ("source.last-pages", true),
        ("destination.disk-change", false),
        ("destination.state-whole", false),
        ("destination.disks-durable", false),
    ] {
        let Some(device) = Device::new(DEVICE)? else {
            return Ok(());
        };
        let site = Site::apart()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        let victim = if at_source { a } else { b };
        dies_at(victim, point)?;
        let begun = site.pair.try_begin(a, b, &to(device.node()))?;
        let told = || point.to_owned();
        has_died(victim).with_context(told)?;
        if begun.1.is_ok() {
            site.ends(&begun.0, Outcome::Failed).with_context(told)?;
        }
        site.goes_on(a, 20).with_context(told)?;
        site.is_whole(a).with_context(told)?;
        comes_to_hold(&device, &Holds::Nothing, point)?;
        println!("  killed at {point}");
    }
    Ok(())
}

#[test]
fn a_process_that_dies_in_the_handover_leaves_one_guest_with_its_whole_disk() -> Result<()> {
    for (point, at_source) in [
        ("journal.gave.after", true),
        ("source.permit.after", true),
        ("journal.moved.after", true),
        ("journal.ready.after", false),
        ("journal.holds.before", false),
        ("journal.holds.after", false),
        ("running", false),
    ] {
        let Some(device) = Device::new(DEVICE)? else {
            return Ok(());
        };
        let mut site = Site::apart()?;
        let victim = if at_source {
            &site.pair.a
        } else {
            &site.pair.b
        };
        dies_at(victim, point)?;
        let told = || point.to_owned();
        let (id, _) = site
            .pair
            .try_begin(&site.pair.a, &site.pair.b, &to(device.node()))?;
        has_died(victim).with_context(told)?;
        let report = site.pair.wait_end(&site.pair.a, &id, LONG);
        let outcome = report.with_context(told)?.outcome;
        let is_there = outcome == Some(Outcome::Completed);
        if is_there {
            site.path = device.node().to_owned();
        }
        let holder = if is_there { &site.pair.b } else { &site.pair.a };
        let runs = || holder.vm().is_ok_and(|vm| vm.state == VmState::Running);
        let until = Instant::now() + LONG;
        while !runs() {
            ensure!(Instant::now() < until, "{point}: nobody runs it");
            std::thread::sleep(LOOK_EVERY);
        }
        site.goes_on(holder, 20).with_context(told)?;
        site.is_whole(holder).with_context(told)?;
        let holds = if is_there {
            Holds::Disk
        } else {
            Holds::Nothing
        };
        comes_to_hold(&device, &holds, point)?;
        println!("  killed at {point}: {outcome:?}");
    }
    Ok(())
}

/// Its source ends the migration, and for now has not the image that its guest works with.
#[test]
fn what_came_of_a_disk_stays_on_the_device_until_its_source_has_the_image() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let source = ImageAway::of(&site, &to(device.node()))?;
    let id = &source.migration;
    log_says(b, &format!("with migration {id} stays on the device"))?;
    let label = device.label()?.context("a label")?;
    ensure!(matches!(label.holds, Holds::Part(_)), "{label:?}");
    source.is_back()?;
    site.goes_on(a, 20)?;
    comes_to_hold(&device, &Holds::Nothing, "its source has the disk")?;
    site.is_whole(a)
}

#[test]
fn a_device_on_which_anything_is_takes_no_disk_of_another_host_and_is_not_changed() -> Result<()> {
    let Some(device) = Device::new(DEVICE)? else {
        return Ok(());
    };
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let disk = Label {
        holds: Holds::Disk,
        bytes: BYTES,
        vm: "db".to_owned(),
        disk: "data".to_owned(),
        text: None,
    };
    device.say(disk)?;
    let before = device.bytes()?;
    let refused = site.pair.try_begin(a, b, &to(device.node()))?.1;
    let refused = format!("{:#}", refused.err().context("it has begun")?);
    ensure!(
        refused.contains("holds disk 'data' of VM 'db'"),
        "{refused}"
    );
    ensure!(device.bytes()? == before, "the device was written");
    site.goes_on(a, 5)?;
    site.is_whole(a)
}
