//! One machine of the lab with a source's and a destination's volume, and a directory of the machine's own storage.
//!
//! Owns the machine, in which all that is measured runs, and what lies on its volumes: each run finds a source that was filled
//! anew and a destination without anything. Refuses: to begin where there is no FUSE.

use super::plan::Cell;
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::disk_load::Place;
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::guest::linux::LinuxGuest;
use godwit_testkit::lab::namespace::Plan;
use godwit_testkit::lab::{Machine, MachineCommand};
use godwit_testkit::testvol::{self, Counts, Settings, Survives, Volume};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

const SOURCE: &str = "/var/lib/source";
const DESTINATION: &str = "/var/lib/destination";
const IMAGE: &str = "disk.raw";
/// Where sockets and what else a run makes lie; in memory.
pub const RUN: &str = "/run/bench";

pub struct Site {
    machine: Machine,
    /// Storage of the machine that this runs on, at the same path inside.
    local: PathBuf,
}

impl Site {
    pub fn new(out: &Path) -> Result<Self> {
        if let Some(why) = testvol::unavailable() {
            anyhow::bail!("there are no test volumes: {why}");
        }
        let local = out.join("storage-local");
        std::fs::create_dir_all(&local)?;
        let mut machine = Machine::start(&Plan {
            name: "bench-storage",
            visible: &[],
            shared: std::slice::from_ref(&local),
            outlive_maker: false,
        })?;
        for at in [SOURCE, DESTINATION] {
            machine.mount_direct_volume(Path::new(at))?;
        }
        std::fs::create_dir_all(machine.path_from_outside(RUN))?;
        Ok(Self { machine, local })
    }

    /// Fills the source of a run and empties everything else; gives what the source holds.
    pub fn prepare(&self, cell: &Cell) -> Result<Log> {
        for at in [SOURCE, DESTINATION] {
            self.volume(at)?
                .change(|settings| *settings = Settings::default());
            clear(&self.machine.path_from_outside(at))?;
        }
        clear(&self.machine.path_from_outside(RUN))?;
        clear(&self.local)?;
        let log = Log::new(cell.disk_bytes(), cell.kind.io_bytes);
        let path = self.outside(&self.image(cell));
        log.fill(&create(&path)?)
            .with_context(|| format!("cannot fill {}", path.display()))?;
        for at in [SOURCE, DESTINATION] {
            sync(&self.machine.path_from_outside(at))?;
        }
        if let Some((source, destination)) = cell.volumes {
            self.volume(SOURCE)?.change(|now| *now = source.settings());
            self.volume(DESTINATION)?
                .change(|now| *now = destination.settings());
        }
        self.place().make_memory()?;
        Ok(log)
    }

    /// Makes the memory that a front end shares as long as a guest's; for once, until the next run is prepared.
    pub fn resize_memory(&self, bytes: u64) -> Result<()> {
        let memory = OpenOptions::new().write(true).open(self.place().memory)?;
        Ok(memory.set_len(bytes)?)
    }

    /// A copy of a guest's kernel and initramfs that the machine sees.
    pub fn lend(&self, guest: &LinuxGuest) -> Result<LinuxGuest> {
        let lent = LinuxGuest {
            kernel: self.local.join("vmlinuz"),
            initrd: self.local.join("initrd"),
        };
        std::fs::copy(&guest.kernel, &lent.kernel)?;
        std::fs::copy(&guest.initrd, &lent.initrd)?;
        Ok(lent)
    }

    /// The image that a disk begins with, as the machine sees it.
    pub fn image(&self, cell: &Cell) -> PathBuf {
        match cell.volumes {
            Some(_) => Path::new(SOURCE).join(IMAGE),
            None => self.local.join(IMAGE),
        }
    }

    /// The image that a disk moves to, as the machine sees it.
    pub fn destination(&self) -> PathBuf {
        Path::new(DESTINATION).join(IMAGE)
    }

    /// Makes the destination's image for those that want it there: nothing of it is written.
    pub fn make_destination(&self, bytes: u64) -> Result<()> {
        let file = create(&self.outside(&self.destination()))?;
        file.set_len(bytes)?;
        file.sync_all()?;
        // Else a power cut would bring back what an earlier run had there.
        sync(&self.machine.path_from_outside(DESTINATION))
    }

    /// Cuts the destination's power, and holds what it then has against a log.
    pub fn check(&self, log: &Log) -> Result<godwit_testkit::disk_load::log::Findings> {
        let volume = self.volume(DESTINATION)?;
        volume.cut(Survives::Nothing);
        volume.change(|settings| *settings = Settings::default());
        let path = self.outside(&self.destination());
        let image = File::open(&path);
        let image = image.with_context(|| format!("cannot open {}", path.display()))?;
        let findings = log.check(&image)?;
        ensure!(findings.blocks == log.blocks(), "a part was not compared");
        Ok(findings)
    }

    /// Where a load meets whoever serves the disk, as seen from outside.
    pub fn place(&self) -> Place {
        Place {
            socket: self.outside(&Path::new(RUN).join("disk")),
            memory: self.outside(&Path::new(RUN).join("memory")),
        }
    }

    pub fn outside(&self, path: &Path) -> PathBuf {
        self.machine.path_from_outside(path)
    }

    pub fn command(&self, program: impl AsRef<OsStr>) -> MachineCommand {
        self.machine.command(program)
    }

    /// What the destination's volume was asked for.
    pub fn destination_counts(&self) -> Result<Counts> {
        Ok(self.volume(DESTINATION)?.counts())
    }

    /// Where a durable record lies: on the machine's own storage.
    pub fn record(&self) -> PathBuf {
        self.local.join("record")
    }

    fn volume(&self, at: &str) -> Result<&Volume> {
        Ok(self.machine.volume(at)?)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.local); // what is left is of no use to anybody
    }
}

fn create(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .create_new(true)
        .read(true)
        .write(true)
        .open(path);
    file.with_context(|| format!("cannot make {}", path.display()))
}

fn sync(directory: &Path) -> Result<()> {
    Ok(File::open(directory)?.sync_all()?)
}

fn clear(directory: &Path) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        // A volume keeps what was durable until the next sync, and a socket has no content.
        if let Ok(file) = OpenOptions::new().write(true).open(&path) {
            file.set_len(0)?;
            file.sync_all()?;
        }
        std::fs::remove_file(&path)?;
    }
    Ok(())
}
