//! Power cuts under a disk: what a guest was told is durable is there afterwards, and no block is torn or misplaced.

mod disk_load;

use anyhow::{Context as _, Result, ensure};
use disk_load::{AT, BLOCK, BLOCKS, Load, Site, machine, without_power};
use godwit_blockio::grow::grow;
use godwit_testkit::testvol::{Survives, Volume};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

const CUTS: u64 = 30;

#[test]
fn an_acknowledged_flush_survives_thirty_power_cuts() -> Result<()> {
    let Some(machine) = machine("diskcuts")? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    volume.change(|disk| disk.latency = Duration::from_micros(200));
    let directory = machine.path_from_outside(AT);
    let site = Site::over(
        directory.join("disk.raw"),
        (BLOCKS * BLOCK) as u64,
        tempfile::tempdir()?,
    );
    File::open(&site.image)?.sync_all()?;
    File::open(&directory)?.sync_all()?;
    let mut load = Load::over(site);
    for cut in 0..CUTS {
        let disk = load.site.disk(Vec::new());
        load.boot();
        load.work().with_context(|| format!("after {cut} cuts"))?;
        volume.power_off(if cut % 3 == 0 {
            Survives::Nothing
        } else {
            Survives::Some(cut)
        });
        // It is dead like everything on that machine; what it still asks for ends here.
        without_power(volume, || drop(disk))?;
        volume.power_on();
        load.examine()?;
    }
    println!(
        "  {} writes, {} flushes, {CUTS} cuts",
        load.number, load.flushes
    );
    Ok(())
}

#[test]
fn the_length_of_a_disk_that_was_made_larger_survives_a_power_cut() -> Result<()> {
    let Some(machine) = machine("lengthcuts")? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    let directory = machine.path_from_outside(AT);
    let path = directory.join("disk.raw");
    File::create(&path)?.set_len(1 << 20)?;
    File::open(&path)?.sync_all()?;
    File::open(&directory)?.sync_all()?;
    for gib in 1..=3 {
        let image = File::options().read(true).write(true).open(&path)?;
        let bytes = grow(image.as_fd(), gib << 30, false)?;
        drop(image);
        volume.power_off(Survives::Nothing);
        volume.power_on();
        let found = std::fs::metadata(&path)?.len();
        ensure!(found == bytes, "{found} of {bytes} bytes are left");
    }
    Ok(())
}
