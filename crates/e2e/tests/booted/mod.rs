//! A host whose VM has booted from its disk, and works with it.
#![allow(dead_code)]

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::guests::vm_with_disk;
use godwit_e2e::pair::Pair;
use godwit_qemu::qmp::Client;
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::vm::Accelerator;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub const LONG: Duration = Duration::from_secs(120);
pub const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A host whose VM has booted from its disk.
pub struct Site {
    pub pair: Pair,
    pub image: PathBuf,
    _directory: tempfile::TempDir,
}

impl Site {
    pub fn booted() -> Result<Self> {
        Self::booted_by(None)
    }

    /// By the QEMU of this `/usr` instead of the distribution's.
    pub fn booted_by(usr: Option<&Path>) -> Result<Self> {
        let pair = match usr {
            Some(usr) => Pair::with_programs(Accelerator::Tcg, usr)?,
            None => Pair::new(Accelerator::Tcg)?,
        };
        // On a disk, and where QEMU's user comes to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let image = directory.path().join("root.raw");
        let mut content = boot_disk::sector()?;
        content.resize(1 << 20, 0);
        std::fs::write(&image, content)?;
        std::fs::set_permissions(&image, Permissions::from_mode(0o666))?;
        pair.boot(&vm_with_disk(pair.dir(), &image, false)?)?;
        let site = Self {
            pair,
            image,
            _directory: directory,
        };
        site.goes_on(10)?;
        Ok(site)
    }

    pub fn progress(&self) -> Result<Progress> {
        let progress = boot_disk::progress(&File::open(self.pair.a.ram_file()?)?)?;
        ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
        Ok(progress)
    }

    /// Waits until the guest has come so many rounds further.
    pub fn goes_on(&self, rounds: u32) -> Result<()> {
        let (from, deadline) = (self.progress()?.round, Instant::now() + LONG);
        while self.progress()?.round < from + rounds {
            ensure!(Instant::now() < deadline, "it stands still at round {from}");
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// What the guest wrote last is on the disk, but for the round that may be under way.
    pub fn image_has_all(&self) -> Result<u32> {
        let (round, image) = (self.progress()?.round, File::open(&self.image)?);
        let missing = boot_disk::missing(&image, round)?;
        ensure!(
            missing.is_none(),
            "of round {round}, {missing:?} is not on the disk"
        );
        Ok(round)
    }

    pub fn ask(&self, request: &VmRequest) -> Result<()> {
        match self.pair.a.ask(request)? {
            VmAnswer::Done(_) => Ok(()),
            other => anyhow::bail!("{request:?}: {other:?}"),
        }
    }

    pub fn sockets(&self) -> Result<usize> {
        Ok(std::fs::read_dir(self.pair.a.ram_dir())?.count())
    }
}

/// The distribution's QEMU, and the `/usr` of version 10 where that is at hand.
pub fn versions() -> Vec<(&'static str, Option<PathBuf>)> {
    let target = godwit_testkit::guest::linux::target_dir();
    let usr = target.map(|target| target.join("peers/qemu-10.0/tree/usr"));
    let ten = usr.ok().filter(|usr| usr.exists());
    if ten.is_none() {
        println!("skipped for QEMU 10: it is not in target/peers");
    }
    let ten = ten.map(|usr| ("10", Some(usr)));
    std::iter::once(("7.2", None)).chain(ten).collect()
}

impl Site {
    /// Says things to QEMU while no VM process lives: where there is one, it alone does.
    pub fn tell_qemu(&self, commands: &[&str]) -> Result<()> {
        let host = &self.pair.a;
        let ram = host.ram_file()?;
        let launch = ram
            .extension()
            .context("a launch")?
            .to_string_lossy()
            .into_owned();
        let monitor = host.run_dir().join("qemu").join(format!("{launch}-1.qmp"));
        let deadline = Instant::now() + LONG;
        let client = Client::connect(&monitor, deadline)?;
        for command in commands {
            client.execute(command, serde_json::json!({}), deadline)?;
        }
        Ok(())
    }
}
