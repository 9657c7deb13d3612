//! A host whose VM has booted from its disk, and works with it.
#![allow(dead_code)]

use anyhow::{Context as _, Result, bail, ensure};
use godwit_e2e::guests::vm_with_disk;
use godwit_e2e::pair::Pair;
use godwit_e2e::peers::qemu_10;
use godwit_qemu::qmp::Client;
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_testkit::guest::linux::{GuestNetwork, LinuxGuest, command_line, target_dir};
use godwit_testkit::testvol::Volume;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::vm::{Accelerator, VmSpec, VmState};
use std::fs::{File, Permissions};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub const LONG: Duration = Duration::from_secs(120);
pub const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long slow storage takes for a request.
const SLOW: Duration = Duration::from_millis(20);
/// What Linux says on its console at the end of its load.
pub const LOADED: &str = "disk-load: ";

/// Bytes of QEMU's in-flight area for each queue, and which of its words is how many entries it has.
const AREA: usize = (16 + 16 * 1024_usize).next_multiple_of(64);
const ENTRIES_AT: usize = 10;

/// A host whose VM has booted from its disk.
pub struct Site {
    pub pair: Pair,
    pub image: PathBuf,
    /// What the image is on, where that is slow.
    volume: Option<Volume>,
    _directory: tempfile::TempDir,
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(volume) = &self.volume {
            self.pair.supervised.store(false, Ordering::SeqCst);
            self.pair.a.kill_process();
            // Else its directory could not be removed.
            let _ = Command::new("umount").arg("-l").arg(volume.at()).status();
        }
    }
}

impl Site {
    pub fn booted() -> Result<Self> {
        Self::booted_by(None)
    }

    /// By the QEMU of this `/usr` instead of the distribution's.
    pub fn booted_by(usr: Option<&Path>) -> Result<Self> {
        let mut content = boot_disk::sector()?;
        content.resize(1 << 20, 0);
        let site = Self::of_image(usr, None, &content, |_, _| Ok(()))?;
        site.goes_on(10)?;
        Ok(site)
    }

    /// With a Linux instead, which keeps so many requests of its disk under way for so long, each of which takes its storage a while.
    pub fn with_linux(
        usr: Option<&Path>,
        mounts: &OwnedFd,
        (depth, seconds): (u32, u32),
    ) -> Result<Self> {
        let linux = LinuxGuest::find(&target_dir()?)?;
        Self::of_image(usr, Some(mounts), &[0; 16 << 20], |dir, spec| {
            let copied = |from: &Path, name: &str| -> Result<String> {
                let to = dir.join(name);
                std::fs::copy(from, &to)?;
                std::fs::set_permissions(&to, Permissions::from_mode(0o644))?;
                Ok(to.to_str().context("a path")?.to_owned())
            };
            spec.kernel = copied(&linux.kernel, "vmlinuz")?;
            spec.initramfs = Some(copied(&linux.initrd, "initrd")?);
            let plain = command_line(&GuestNetwork::default());
            spec.cmdline = format!("{plain} godwit.disk=4096,{depth},random,{seconds}");
            spec.memory_mib = 256;
            Ok(())
        })
    }

    fn of_image(
        usr: Option<&Path>,
        slow: Option<&OwnedFd>,
        content: &[u8],
        change: impl FnOnce(&Path, &mut VmSpec) -> Result<()>,
    ) -> Result<Self> {
        let pair = match usr {
            Some(usr) => Pair::with_programs(Accelerator::Tcg, usr)?,
            None => Pair::new(Accelerator::Tcg)?,
        };
        // On a disk, and where QEMU's user comes to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let place = directory.path().join("images");
        std::fs::create_dir(&place)?;
        let volume = slow.map(|mounts| Volume::mount_direct(mounts.as_fd(), &place));
        let volume = volume.transpose()?;
        if let Some(volume) = &volume {
            volume.change(|settings| settings.latency = SLOW);
        }
        std::fs::set_permissions(&place, Permissions::from_mode(0o777))?;
        let image = place.join("root.raw");
        std::fs::write(&image, content)?;
        std::fs::set_permissions(&image, Permissions::from_mode(0o666))?;
        let mut spec = vm_with_disk(pair.dir(), &image, false)?;
        change(pair.dir(), &mut spec)?;
        pair.boot(&spec)?;
        Ok(Self {
            pair,
            image,
            volume,
            _directory: directory,
        })
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
pub fn versions() -> Result<Vec<(&'static str, Option<PathBuf>)>> {
    let ten = qemu_10()?.map(|at| ("10", Some(at.join("tree/usr"))));
    Ok(std::iter::once(("7.2", None)).chain(ten).collect())
}

impl Site {
    /// Says things to QEMU while no VM process lives: where there is one, it alone does.
    pub fn tell_qemu(&self, commands: &[&str]) -> Result<()> {
        let none = serde_json::json!({});
        let mut told = commands.iter();
        told.try_for_each(|command| self.ask_qemu(command, none.clone()).map(drop))
    }

    /// Asks QEMU as [`Self::tell_qemu`] tells it.
    pub fn ask_qemu(
        &self,
        command: &str,
        arguments: serde_json::Value,
    ) -> Result<serde_json::Value> {
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
        Ok(client.execute(command, arguments, deadline)?)
    }
}

impl Site {
    pub fn console(&self) -> Result<String> {
        match self.pair.a.ask(&VmRequest::Console)? {
            VmAnswer::Console(text) => Ok(text),
            other => bail!("{other:?}"),
        }
    }

    /// Waits until so many writes more of Linux have ended.
    pub fn linux_writes(&self, more: u64) -> Result<()> {
        // A successor counts from 0, once it serves the disk.
        let done = || -> Result<u64> {
            let disk = self.pair.a.vm()?.disks.pop();
            Ok(disk.map_or(0, |disk| disk.writes.requests))
        };
        let (from, deadline) = (done()?, Instant::now() + LONG);
        while done()? < from + more {
            ensure!(Instant::now() < deadline, "{}", self.console()?);
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Waits until Linux powers itself off, once each of its threads has come to its end, which waits for its own request.
    pub fn linux_ends(&self) -> Result<()> {
        let (mut said, deadline) = (String::new(), Instant::now() + LONG);
        while !said.contains(LOADED) && self.pair.a.state()? != VmState::Stopped {
            ensure!(Instant::now() < deadline, "a request is lost: {said}");
            std::thread::sleep(LOOK_EVERY);
            said = self.console().unwrap_or(said);
        }
        ensure!(!said.contains("disk-load: failed"), "{said}");
        Ok(())
    }
}

/// Counts what is under way in the area that QEMU keeps for the next who serves the disk.
pub fn under_way(qemu: i32) -> Result<usize> {
    let descriptors = std::fs::read_dir(format!("/proc/{qemu}/fd"))?;
    let paths = descriptors.flatten().map(|entry| entry.path());
    let is_area = |path: &PathBuf| {
        let name = std::fs::read_link(path).unwrap_or_default();
        name.to_string_lossy().contains("godwit-inflight")
    };
    let area = paths
        .into_iter()
        .find(is_area)
        .context("QEMU has no area")?;
    let area = std::fs::read(area)?;
    let queues = area.chunks_exact(AREA);
    ensure!(
        !area.is_empty() && queues.remainder().is_empty(),
        "it has {} bytes",
        area.len()
    );
    let mut count = 0;
    for queue in queues {
        ensure!(queue[ENTRIES_AT..ENTRIES_AT + 2] == 1024_u16.to_le_bytes());
        let entries = queue[16..].chunks_exact(16).take(1024);
        count += entries.filter(|entry| entry[0] != 0).count();
    }
    Ok(count)
}
