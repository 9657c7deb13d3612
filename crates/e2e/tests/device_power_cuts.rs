//! Power cuts under a disk on a block device that bears a label: what a guest was told is durable is there afterwards, and so is the label.

mod disk_load;

use anyhow::{Context as _, Result, ensure};
use disk_load::{AT, BLOCK, BLOCKS, Load, Site, machine, without_power};
use godwit_blockio::label::{self, Holds, Label};
use godwit_testkit::file_system::Device;
use godwit_testkit::testvol::{Survives, Volume};
use godwit_vhost::block::Geometry;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const CUTS: u64 = 12;
const BYTES: u64 = (BLOCKS * BLOCK) as u64;
const DEVICE: u64 = 2 * label::ROOM + BYTES;

/// The disk's own bytes, once its device is there anew and says that it is whole.
fn found_on(device: &Device, cut: u64) -> Result<Vec<u8>> {
    let file = device.open()?;
    let found = label::read(file.as_fd())?.context("its label is gone")?;
    let (label, number) = (&found.label, found.number);
    ensure!(
        label.holds == Holds::Disk && label.bytes == BYTES,
        "{found:?}"
    );
    // It is written once before each cut.
    ensure!(number == cut + 1, "label {number} after {cut} cuts");
    let mut content = vec![0; BYTES as usize];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

fn begin(volume: &Volume, file: &Path, directory: &Path) -> Result<Option<Load>> {
    // The file that it makes is the device's.
    let mut site = Site::over(file.to_owned(), DEVICE, tempfile::tempdir()?);
    File::open(file)?.sync_all()?;
    File::open(directory)?.sync_all()?;
    let Some(device) = Device::on(file) else {
        println!("skipped: no device can be made of a file of a test volume");
        return Ok(None);
    };
    site.image = device.path().to_owned();
    let disk = Label {
        holds: Holds::Disk,
        bytes: BYTES,
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        text: None,
    };
    label::write(device.open()?.as_fd(), None, disk)?;
    volume.power_off(Survives::Nothing);
    without_power(volume, || drop(device))?;
    volume.power_on();
    Ok(Some(Load::over(site)))
}

#[test]
fn an_acknowledged_flush_of_a_disk_on_a_labelled_device_survives_power_cuts() -> Result<()> {
    let Some(machine) = machine("devicecuts")? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    let directory = machine.path_from_outside(AT);
    let file = directory.join("disk.raw");
    let Some(mut load) = begin(volume, &file, &directory)? else {
        return Ok(());
    };
    for cut in 0..CUTS {
        let device = Device::on(&file).context("the device comes back")?;
        load.site.image = device.path().to_owned();
        load.examine_bytes(&found_on(&device, cut)?)?;
        let geometry = Geometry {
            bytes: BYTES,
            ..load.site.geometry()
        };
        let disk = load.site.disk_of(geometry, Vec::new());
        load.boot();
        let again = device.open()?;
        let found = label::read(again.as_fd())?.context("a label")?;
        label::write(again.as_fd(), Some(&found), found.label.clone())?;
        drop(again);
        load.work().with_context(|| format!("after {cut} cuts"))?;
        volume.power_off(match cut % 3 {
            0 => Survives::Nothing,
            _ => Survives::Some(cut),
        });
        without_power(volume, || {
            drop(disk);
            drop(device);
        })?;
        volume.power_on();
    }
    println!(
        "  {} writes, {} flushes, {CUTS} cuts",
        load.number, load.flushes
    );
    Ok(())
}
