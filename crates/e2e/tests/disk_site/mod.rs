//! Two hosts and a guest that boots from a disk, whose every round it writes there, beside much that it only reads.
#![allow(dead_code)]

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::Host;
use godwit_e2e::guests::vm_with_disk;
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_types::MigrationId;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::vm::Accelerator;
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub const LONG: Duration = Duration::from_secs(120);
pub const LOOK_EVERY: Duration = Duration::from_millis(2);
pub const BYTES: u64 = 64 << 20;
/// From here to the end of the disk is a hole but for its last block.
pub const HOLE: u64 = 48 << 20;

pub struct Site {
    pub pair: Pair,
    /// What the host's processes find at the image's path.
    pub path: PathBuf,
    /// What the guest does not write.
    tail: Vec<u8>,
    _directory: tempfile::TempDir,
}

impl Site {
    /// A guest that boots on host `a` from a disk which only that host has.
    pub fn apart() -> Result<Self> {
        Self::booted(Pair::apart, false)
    }

    /// A guest on host `a`, whose disk is on storage of the machine.
    pub fn local() -> Result<Self> {
        Self::booted(Self::on_the_machine, false)
    }

    fn on_the_machine(accelerator: Accelerator, dir: &Path) -> Result<Pair> {
        std::fs::create_dir(dir.join("images"))?;
        std::fs::set_permissions(dir.join("images"), Permissions::from_mode(0o777))?;
        Pair::new(accelerator)
    }

    /// The same on a disk which both hosts have.
    pub fn shared() -> Result<Self> {
        Self::booted(Self::on_the_machine, true)
    }

    pub fn booted(
        pair: impl FnOnce(Accelerator, &Path) -> Result<Pair>,
        shared: bool,
    ) -> Result<Self> {
        // On a disk, and where QEMU's user comes to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let pair = pair(Accelerator::Tcg, directory.path())?;
        let path = directory.path().join("images/root.raw");
        let image = own(&pair.a, &path);
        let file = File::create(&image)?;
        file.set_len(BYTES)?;
        file.write_all_at(&boot_disk::sector()?, 0)?;
        let tail: Vec<u8> = (0..HOLE - 8192).map(|at| (at / 509 % 251) as u8).collect();
        file.write_all_at(&tail, 8192)?;
        file.write_all_at(&[7; 512], BYTES - 512)?;
        std::fs::set_permissions(&image, Permissions::from_mode(0o666))?;
        pair.boot(&vm_with_disk(pair.dir(), &path, shared)?)?;
        let site = Self {
            pair,
            path,
            tail,
            _directory: directory,
        };
        site.goes_on(&site.pair.a, 10)?;
        Ok(site)
    }

    pub fn goes_on(&self, host: &Host, rounds: u32) -> Result<()> {
        let (from, deadline) = (progress(host)?.round, Instant::now() + LONG);
        while progress(host)?.round < from + rounds {
            ensure!(Instant::now() < deadline, "it stands still at round {from}");
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// The image has all that the guest wrote there last, and all that was there before.
    pub fn is_whole(&self, host: &Host) -> Result<()> {
        match host.ask(&VmRequest::Pause)? {
            VmAnswer::Done(_) => {}
            other => anyhow::bail!("{other:?}"),
        }
        let image = File::open(own(host, &self.path))?;
        let round = progress(host)?.round;
        let missing = boot_disk::missing(&image, round)?;
        ensure!(
            missing.is_none(),
            "of round {round}, {missing:?} is missing"
        );
        let mut found = vec![0; self.tail.len()];
        image.read_exact_at(&mut found, 8192)?;
        ensure!(found == self.tail, "what the guest did not write differs");
        let mut last = [0; 512];
        image.read_exact_at(&mut last, BYTES - 512)?;
        ensure!(last == [7; 512], "the last block differs");
        host.ask(&VmRequest::Resume)?;
        self.goes_on(host, 5)
    }

    /// Files in the directory where a host has its images.
    pub fn images(&self, host: &Host) -> Result<Vec<String>> {
        let directory = own(host, self.path.parent().context("a directory")?);
        let names = std::fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        let mut names: Vec<String> = names.collect::<Result<_, _>>()?;
        names.sort();
        Ok(names)
    }

    pub fn slowly(&self) -> Options {
        Options {
            max_bandwidth_mbit_per_s: Some(80),
            ..Options::default()
        }
    }

    /// Waits until a part of the disk is copied and a part is not.
    pub fn is_half_way(&self, id: &MigrationId) -> Result<()> {
        let deadline = Instant::now() + LONG;
        loop {
            let report = self.pair.a.report(id)?;
            let (all, left) = (report.disk_bytes, report.disk_left_bytes);
            ensure!(report.outcome.is_none(), "it is over: {:?}", report.reason);
            if left > 0 && left + (4 << 20) < all {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "no disk is copied");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub fn ends(&self, id: &MigrationId, outcome: Outcome) -> Result<MigrationReport> {
        let report = self.pair.wait_end(&self.pair.a, id, LONG)?;
        ensure!(
            report.outcome == Some(outcome),
            "{:?}: {:?}",
            report.outcome,
            report.reason
        );
        Ok(report)
    }

    /// Waits until nothing of the VM's disk is on a host.
    pub fn has_nothing(&self, host: &Host) -> Result<()> {
        let deadline = Instant::now() + LONG;
        while !self.images(host)?.is_empty() {
            ensure!(
                Instant::now() < deadline,
                "{:?} is left",
                self.images(host)?
            );
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

/// The host's process is one that dies at this point.
pub fn dies_at(host: &Host, point: &'static str) -> Result<()> {
    does_at(host, point, "kill")
}

/// The host's process is one that does this at this point.
pub fn does_at(host: &Host, point: &'static str, action: &'static str) -> Result<()> {
    let starts = host.starts();
    host.arm(point, action);
    host.signal_kill()?;
    has_successor(host, starts)
}

/// Waits until the process has died at its point and another one answers.
pub fn has_died(host: &Host) -> Result<()> {
    host.wait_fault(LONG)?;
    has_successor(host, 0)
}

pub fn has_successor(host: &Host, starts: u32) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while host.starts() == starts || host.ask(&VmRequest::KeepRecord).is_err() {
        ensure!(Instant::now() < deadline, "it has no successor");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

pub fn own(host: &Host, path: &Path) -> PathBuf {
    match &host.storage {
        Some(storage) => storage.own_path(path),
        None => path.to_owned(),
    }
}

pub fn progress(host: &Host) -> Result<Progress> {
    let progress = boot_disk::progress(&File::open(host.ram_file()?)?)?;
    ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
    Ok(progress)
}
