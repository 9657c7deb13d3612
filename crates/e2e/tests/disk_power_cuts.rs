//! Power cuts under a disk: what a guest was told is durable is there afterwards, and no block is torn or misplaced.

mod disk_load;

use anyhow::{Context as _, Result, ensure};
use disk_load::{AT, BLOCK, BLOCKS, LONG, Load, Site, machine, without_power};
use godwit_blockio::delta::{
    AT_ONCE_MAX, Delta, NewDelta, Opening, Outliving, Target, create, merge,
};
use godwit_blockio::grow::grow;
use godwit_blockio::{Access, Image};
use godwit_delta::{Id, Parent};
use godwit_testkit::testvol::{Survives, Volume};
use godwit_vhost::Disk;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

const CUTS: u64 = 30;
/// Of a disk under redo logs, a multiple of three.
const LOG_CUTS: u64 = 18;

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

/// A redo log, as a disk that moves by snapshotting has them.
struct Log {
    id: Id,
    descriptor: PathBuf,
    extent: PathBuf,
}

impl Log {
    /// An empty one, durable.
    fn make(directory: &Path, number: u64) -> Result<Self> {
        let log = Self {
            id: Id(u128::from(number).to_be_bytes()),
            descriptor: directory.join(format!("log-{number}.vmdk")),
            extent: directory.join(format!("log-{number}-sesparse.vmdk")),
        };
        let parent = Parent {
            cid: 7,
            hint: "disk.vmdk".to_owned(),
        };
        create(&NewDelta {
            descriptor: &log.descriptor,
            bytes: (BLOCKS * BLOCK) as u64,
            id: log.id,
            parent: &parent,
        })?;
        Ok(log)
    }

    fn put_over(&self, disk: &Disk, maps: &Path) -> Result<()> {
        let opening = Opening {
            block_bytes: 512,
            name: "disk",
            patience: Duration::ZERO,
        };
        let map = maps.join(format!("{:x}", u128::from_be_bytes(self.id.0)));
        let outliving = Outliving {
            map: &map,
            boot: Id([9; 16]),
            no_guest_lives: true,
        };
        let file = File::options().read(true).write(true).open(&self.extent)?;
        let top = Delta::top_of((file, &self.extent), self.id, opening, outliving)?;
        let standing = disk.stand_still(LONG)?;
        standing.settle()?;
        standing.change_layers(move |mut had| {
            let frozen = had.last_mut().map_or(Ok(()), Delta::freeze);
            frozen.map_err(|error| error.to_string())?;
            had.push(top);
            Ok(had)
        })?;
        Ok(())
    }

    fn consolidate(&self, into: &Image) -> Result<()> {
        let file = File::options().read(true).write(true).open(&self.extent)?;
        let delta = Delta::unlocked((file, &self.extent), self.id, 512)?;
        let target = Target::Raw(into.as_fd(), into.bytes());
        let merged = merge(&delta, target, false, |_| Some(AT_ONCE_MAX))?;
        ensure!(merged.is_some(), "it ended early");
        Ok(())
    }

    fn remove(self) -> Result<()> {
        std::fs::remove_file(self.descriptor)?;
        Ok(std::fs::remove_file(self.extent)?)
    }
}

/// A durable copy of an image to which nobody writes.
fn copy_of(image: &Path, to: &Path) -> Result<Image> {
    std::fs::write(to, std::fs::read(image)?)?;
    File::open(to)?.sync_all()?;
    File::open(to.parent().context("a directory")?)?.sync_all()?;
    Ok(Image::open(to, Access::ReadWrite, 512)?)
}

/// What a disk holds that has these logs over its image, which stays as it is.
fn consolidated(base: &Path, logs: &[Log], flat: &Path) -> Result<Vec<u8>> {
    let image = copy_of(base, flat)?;
    logs.iter().try_for_each(|log| log.consolidate(&image))?;
    Ok(std::fs::read(flat)?)
}

/// A log is durable before it is put over the disk, and what was consolidated before that is recorded.
#[test]
fn a_disk_under_redo_logs_is_whole_after_power_cuts_and_so_is_its_copy_once_that_is_the_disk()
-> Result<()> {
    let Some(machine) = machine("logcuts")? else {
        return Ok(());
    };
    let volume: &Volume = machine.volume(AT).context("mounted above")?;
    volume.change(|disk| disk.latency = Duration::from_micros(200));
    let directory = machine.path_from_outside(AT);
    let [maps, scratch] = ["/dev/shm", "/var/tmp"].map(tempfile::tempdir_in);
    let (maps, scratch) = (maps?, scratch?);
    let site = Site::over(
        directory.join("disk.raw"),
        (BLOCKS * BLOCK) as u64,
        tempfile::tempdir()?,
    );
    let mut load = Load::over(site);
    for cut in 0..LOG_CUTS {
        File::open(&load.site.image)?.sync_all()?;
        File::open(&directory)?.sync_all()?;
        let disk = load.site.disk(Vec::new());
        load.boot();
        load.work()?;
        let first = Log::make(&directory, 2 * cut + 1)?;
        first.put_over(&disk, maps.path())?;
        let (base, copied) = (load.site.image.clone(), directory.join("copy.raw"));
        let copy = copy_of(&base, &copied)?;
        load.work()?;
        let mut logs = vec![first];
        if cut % 3 > 0 {
            let second = Log::make(&directory, 2 * cut + 2)?;
            second.put_over(&disk, maps.path())?;
            logs[0].consolidate(&copy)?;
            logs.push(second);
            load.work()?;
        }
        let survives = match cut % 2 {
            0 => Survives::Nothing,
            _ => Survives::Some(cut),
        };
        let is_moved = cut % 3 == 2;
        if is_moved {
            // The guest is held; the disk has not changed to its copy when the power fails.
            let standing = disk.stand_still(LONG)?;
            standing.settle()?;
            logs[1].consolidate(&copy)?;
            load.look()?;
            volume.power_off(survives);
            drop(standing);
        } else {
            volume.power_off(survives);
        }
        without_power(volume, || drop((disk, copy)))?;
        volume.power_on();
        let content = match is_moved {
            true => std::fs::read(&copied)?,
            false => consolidated(&base, &logs, &scratch.path().join("flat.raw"))?,
        };
        let told = || format!("after cut {cut}");
        load.examine_bytes(&content).with_context(told)?;
        // The next one begins with that.
        std::fs::write(&base, content)?;
        std::fs::remove_file(copied)?;
        logs.into_iter().try_for_each(Log::remove)?;
    }
    println!(
        "  {} writes, {} flushes, {LOG_CUTS} cuts",
        load.number, load.flushes
    );
    Ok(())
}
