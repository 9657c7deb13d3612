//! Two hosts whose power fails and whose VM processes are killed while a disk moves, and a guest that boots from that disk and
//! writes all over it.
//!
//! State directories and images lie on test volumes, each of which loses what was not synced. The guest asks for no flushes, so
//! every write that it was answered must be there afterwards, in the image that the holder's records name. What the guest was
//! answered is read from its memory.

#[path = "../../../vhost/tests/common/chance.rs"]
mod chance;

use anyhow::{Context as _, Result, bail, ensure};
pub use chance::Chance;
use godwit_e2e::Host;
use godwit_e2e::deaths;
use godwit_e2e::guests::vm_with_disk;
use godwit_e2e::host::kill_qemus_on;
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::verdict::{Settled, hypervisors_on};
use godwit_testkit::guest::boot_disk::{self, Spread};
use godwit_testkit::guest::disk_ledger::Ledger;
use godwit_testkit::testvol::{self, Settings, Volume};
use godwit_types::disk_move::Method;
use godwit_types::host_api::{HostVm, VmAnswer, VmRequest};
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{ApiError, ErrorCode};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, Permissions};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub const LONG: Duration = Duration::from_secs(150);
const LOOK_EVERY: Duration = Duration::from_millis(2);
const BYTES: u64 = 16 << 20;
const SPREAD: Spread = Spread {
    places: 256,
    apart: 128,
    has_lives: true,
    counts_until_mib: None,
};
/// So long does a move of the disk take at least.
const RATE: u64 = 40 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    OfA,
    OfB,
    OfBoth,
}

/// What the disk is moved between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// Two volumes of host `a`.
    Volumes,
    /// The hosts, which share nothing.
    Hosts,
    /// The hosts, which both have the image: it changes hands. Its storage has power for as long as `b` has.
    HostsThatShare,
}

pub struct Mortal {
    pub pair: Pair,
    between: Between,
    /// How disks are copied between volumes.
    pub method: Method,
    ledger: Ledger,
    /// Of each host; that of its state first.
    volumes: [Vec<Volume>; 2],
    directory: tempfile::TempDir,
}

/// Works on a thread with mounts of its own.
pub fn apart(work: impl FnOnce(&OwnedFd) -> Result<()> + Send) -> Result<()> {
    testvol::apart(work)?.unwrap_or(Ok(()))
}

fn open_to_all(directory: &Path) -> Result<()> {
    std::fs::set_permissions(directory, Permissions::from_mode(0o777))?;
    Ok(File::open(directory)?.sync_all()?)
}

impl Mortal {
    pub fn new(between: Between, mounts: &OwnedFd) -> Result<Self> {
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let inside = |name: &str| directory.path().join(name);
        let (pair, images) = match between {
            Between::Volumes => {
                let names = ["first", "second"].map(inside);
                names.iter().try_for_each(std::fs::create_dir)?;
                (Pair::new(Accelerator::Tcg)?, [names.to_vec(), Vec::new()])
            }
            Between::Hosts => {
                let pair = Pair::apart(Accelerator::Tcg, directory.path())?;
                (pair, ["a", "b"].map(|name| vec![inside(name)]))
            }
            Between::HostsThatShare => {
                std::fs::create_dir(inside("images"))?;
                let images = vec![inside("images")];
                (Pair::new(Accelerator::Tcg)?, [Vec::new(), images])
            }
        };
        let mut volumes = [Vec::new(), Vec::new()];
        for ((host, images), volumes) in [&pair.a, &pair.b].iter().zip(images).zip(&mut volumes) {
            volumes.push(state_volume(host, mounts)?);
            for at in images {
                volumes.push(Volume::mount_direct(mounts.as_fd(), &at)?);
                open_to_all(&at)?;
            }
        }
        let mut mortal = Self {
            pair,
            between,
            method: Method::default(),
            ledger: Ledger::new(BYTES, SPREAD)?,
            volumes,
            directory,
        };
        mortal.begin()?;
        Ok(mortal)
    }

    fn begin(&mut self) -> Result<()> {
        let path = match self.between {
            Between::Volumes => self.place(0),
            Between::Hosts | Between::HostsThatShare => {
                self.directory.path().join("images/root.raw")
            }
        };
        let is_shared = self.between == Between::HostsThatShare;
        let image = own(&self.pair.a, &path);
        std::fs::write(&image, self.ledger.image()?)?;
        std::fs::set_permissions(&image, Permissions::from_mode(0o666))?;
        File::open(&image)?.sync_all()?;
        File::open(image.parent().context("a directory")?)?.sync_all()?;
        self.pair
            .boot(&vm_with_disk(self.pair.dir(), &path, is_shared)?)?;
        self.set_pace(true);
        self.guest_goes_on()
    }

    /// Where the disk is on one of the volumes of host `a`.
    pub fn place(&self, number: usize) -> PathBuf {
        let name = ["first", "second"][number % 2];
        self.directory.path().join(name).join("root.raw")
    }

    fn hosts(&self) -> [&Arc<Host>; 2] {
        [&self.pair.a, &self.pair.b]
    }

    /// Storage is so slow from here on that memory is there long before the disk is.
    pub fn crawl(&self) {
        let images = self
            .volumes
            .iter()
            .flat_map(|volumes| volumes.iter().skip(1));
        for volume in images {
            volume.change(|settings| settings.bytes_per_second = Some(8 << 20));
        }
    }

    /// Images are on slow storage while a disk moves, and on a fast one while it is looked at.
    fn set_pace(&self, is_slow: bool) {
        let images = self
            .volumes
            .iter()
            .flat_map(|volumes| volumes.iter().skip(1));
        for volume in images {
            volume.change(|settings| {
                *settings = match is_slow {
                    true => Settings {
                        latency: Duration::from_micros(300),
                        bytes_per_second: Some(RATE),
                        ..Settings::default()
                    },
                    false => Settings::default(),
                }
            });
        }
    }

    /// Takes the power, at one moment or of one volume after the other, and gives it back: what ran there has died. Nothing of the
    /// unsynced is left without chance.
    pub fn cut(&mut self, power: Power, mut chance: Option<&mut Chance>) -> Result<()> {
        self.pair.supervised.store(false, Ordering::SeqCst);
        let hosts = match power {
            Power::OfA => 0..1,
            Power::OfB => 1..2,
            Power::OfBoth => 0..2,
        };
        let mut going: Vec<&Volume> = self.volumes[hosts.clone()].iter().flatten().collect();
        deaths::power_off(&mut going, |limit| {
            chance.as_mut().map_or(0, |chance| chance.below(limit))
        });
        for host in hosts.clone() {
            self.end_guest(host)?;
        }
        self.note()?;
        for host in hosts.clone() {
            self.die(host)?;
        }
        let volumes = self.volumes[hosts.clone()].iter().flatten();
        volumes.for_each(Volume::power_on);
        for host in hosts {
            let host = self.hosts()[host];
            // What a reboot empties.
            for directory in [host.ram_dir().to_owned(), host.run_dir()] {
                std::fs::remove_dir_all(&directory)?;
                std::fs::create_dir_all(&directory)?;
            }
            self.tell(host)?;
            host.start_process()?;
        }
        self.pair.supervised.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// What a power cut left, for whoever reads of a failure.
    fn tell(&self, host: &Host) -> Result<()> {
        let record = std::fs::read_to_string(host.state_dir().join("disks.json"));
        println!("  {} has {}", host.name, record.unwrap_or_default());
        for image in self.images()? {
            // Its VM process may have removed it just now.
            let Ok(found) = std::fs::metadata(&image) else {
                continue;
            };
            let (device, inode) = (found.dev(), found.ino());
            println!("  {} is {device}, {inode}", image.display());
        }
        Ok(())
    }

    /// Ends the guest on a host without power. Its VM process does nothing about that any more: its memory is still to be read.
    fn end_guest(&self, host: usize) -> Result<()> {
        let (host, until) = (self.hosts()[host], Instant::now() + LONG);
        let process = host.process_id().and_then(|id| Pid::from_raw(id as i32));
        let process = process.context("no VM process")?;
        match kill_process(process, Signal::STOP) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        while !hypervisors_on(host.ram_dir()).is_empty() {
            kill_qemus_on(host.ram_dir());
            ensure!(Instant::now() < until, "its QEMU does not die");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Ends the VM process on a host without power, whatever waits for its storage.
    fn die(&self, host: usize) -> Result<()> {
        let (volumes, host) = (&self.volumes[host], self.hosts()[host]);
        let until = Instant::now() + LONG;
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| host.kill_process());
            while !ends.is_finished() {
                volumes.iter().for_each(Volume::refuse_held);
                ensure!(Instant::now() < until, "{} does not die", host.name);
                std::thread::yield_now();
            }
            // One that it had just started.
            kill_qemus_on(host.ram_dir());
            Ok(())
        })
    }

    /// Takes note of what the guest was answered, as its memory says; that of a host to which it comes may be older.
    fn note(&mut self) -> Result<()> {
        let mut round = 0;
        for host in self.hosts() {
            for file in std::fs::read_dir(host.ram_dir())?.flatten() {
                let Ok(ram) = File::open(file.path()) else {
                    continue;
                };
                let Ok(progress) = boot_disk::progress(&ram) else {
                    continue; // it has no length yet
                };
                ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
                round = round.max(progress.round);
            }
        }
        self.ledger.note(round);
        Ok(())
    }

    pub fn guest_goes_on(&mut self) -> Result<()> {
        let (from, until) = (self.ledger.last(), Instant::now() + LONG);
        while self.ledger.last() < from + 3 {
            ensure!(Instant::now() < until, "the guest stands still at {from}");
            std::thread::sleep(LOOK_EVERY);
            self.note()?;
        }
        Ok(())
    }

    /// Waits until one host has the VM and the other has nothing of it; gives the first, and whether it runs there.
    fn holder(&self) -> Result<(Settled, bool)> {
        let until = Instant::now() + LONG;
        loop {
            let [a, b] = self.hosts().map(|host| state_at(host));
            for (mine, theirs, owner, other) in [
                (&a, &b, &self.pair.a, &self.pair.b),
                (&b, &a, &self.pair.b, &self.pair.a),
            ] {
                let runs = match mine {
                    Ok(VmState::Running) => true,
                    Ok(VmState::Crashed) => false,
                    _ => continue,
                };
                if matches!(theirs, Ok(VmState::Stopped)) && other.is_clean() {
                    let (owner, other) = (Arc::clone(owner), Arc::clone(other));
                    let lost = !runs;
                    return Ok((Settled { owner, other, lost }, runs));
                }
            }
            ensure!(Instant::now() < until, "nobody has it: a {a:?}, b {b:?}");
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// One image is the right one by the records, and has every write that the guest was answered. Nothing else is left once
    /// the guest runs again. Gives who has it, and where.
    pub fn judge(&mut self) -> Result<(Settled, PathBuf)> {
        let (settled, runs) = self.holder()?;
        let owner = &settled.owner;
        if runs {
            owner.ask(&VmRequest::Pause)?;
        }
        self.note()?;
        self.set_pace(false);
        let vm = owner.vm()?;
        let path = PathBuf::from(&vm.spec.disks.first().context("a disk")?.path);
        let image = own(owner, &path);
        let file = File::open(&image);
        let file = file.with_context(|| format!("{} on {}", image.display(), owner.name))?;
        let wrong = self.ledger.check(&file, 1)?;
        ensure!(wrong.is_empty(), "{}: {wrong:#?}", image.display());
        if runs {
            owner.ask(&VmRequest::Resume)?;
        } else {
            owner.ask(&VmRequest::Start)?;
        }
        self.set_pace(true);
        self.guest_goes_on()?;
        let until = Instant::now() + LONG;
        while self.images()? != [image.clone()] {
            let all = self.images()?;
            ensure!(Instant::now() < until, "{image:?} is the disk, of {all:?}");
            std::thread::sleep(LOOK_EVERY);
        }
        self.pair.wait_confirmed(&settled)?;
        Ok((settled, path))
    }

    /// All files on volumes for images.
    fn images(&self) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for volume in self
            .volumes
            .iter()
            .flat_map(|volumes| volumes.iter().skip(1))
        {
            let entries = std::fs::read_dir(volume.at())?;
            found.extend(entries.flatten().map(|entry| entry.path()));
        }
        Ok(found)
    }

    /// Begins a move from where the disk is; whether it is near its end is asked of what this gives.
    pub fn begin_move(&self, from: &Settled, path: &Path) -> Result<Box<dyn Fn() -> bool + '_>> {
        match self.between {
            Between::Volumes => {
                let to = [self.place(0), self.place(1)];
                let to = to.iter().find(|to| *to != path).context("a place")?;
                let places = vec![godwit_types::disk_move::DiskPlace {
                    disk: "root".into(),
                    path: to.to_str().context("a path")?.into(),
                    shared: false,
                    max_bandwidth_mbit_per_s: None,
                    method: self.method,
                    without: Vec::new(),
                    first_log: godwit_types::disk_move::FirstLog::default(),
                }];
                match self.pair.a.ask(&VmRequest::MoveDisks { places })? {
                    VmAnswer::DiskMoves(_) => {}
                    other => bail!("{other:?}"),
                }
                Ok(Box::new(|| {
                    let Ok(VmAnswer::DiskMoves(moves)) = self.pair.a.ask(&VmRequest::DiskMoves)
                    else {
                        return true;
                    };
                    let is_copied = |one: &godwit_types::disk_move::DiskMove| {
                        let is_tracked = !one.iterations.is_empty();
                        is_tracked || one.total_bytes > 0 && one.left_bytes == 0
                    };
                    !moves.are_under_way() || moves.disks.iter().all(is_copied)
                }))
            }
            Between::Hosts | Between::HostsThatShare => {
                let (from, to) = (Arc::clone(&from.owner), Arc::clone(&from.other));
                let id = self.pair.begin(&from, &to, &Options::default())?;
                Ok(Box::new(move || match from.report(&id) {
                    Ok(report) => {
                        let is_copied = report.disk_bytes > 0 && report.disk_left_bytes == 0;
                        report.outcome.is_some() || is_copied
                    }
                    Err(_) => true,
                }))
            }
        }
    }
}

impl Drop for Mortal {
    fn drop(&mut self) {
        self.pair.supervised.store(false, Ordering::SeqCst);
        for volume in self.volumes.iter().flatten() {
            volume.power_on();
        }
        for host in self.hosts() {
            host.kill_process();
            kill_qemus_on(host.ram_dir());
        }
        for volume in self.volumes.iter().flatten() {
            // Else its directory could not be removed.
            let _ = Command::new("umount").arg("-l").arg(volume.at()).status();
        }
    }
}

/// The volume that a host has its records on, empty.
fn state_volume(host: &Host, mounts: &OwnedFd) -> Result<Volume> {
    let directory = host.state_dir();
    let all: Vec<&Path> = directory.ancestors().take(3).collect();
    let at = all.last().context("a directory")?;
    let volume = Volume::mount(mounts.as_fd(), at)?;
    std::fs::create_dir_all(&directory)?;
    for directory in all {
        File::open(directory)?.sync_all()?;
    }
    Ok(volume)
}

fn own(host: &Host, path: &Path) -> PathBuf {
    match &host.storage {
        Some(storage) => storage.own_path(path),
        None => path.to_owned(),
    }
}

/// In which state a host has the VM, where it moves nothing; a host that knows of none has it stopped.
fn state_at(host: &Host) -> Result<VmState> {
    match host.vm_within(Duration::from_secs(3)) {
        Ok(HostVm {
            state,
            migration: None,
            ..
        }) => Ok(state),
        Ok(vm) => bail!("{} with a migration", vm.state),
        Err(error) if is_unknown(&error) => Ok(VmState::Stopped),
        Err(error) => Err(error),
    }
}

/// Whether a host said that it knows of no such VM.
pub fn is_unknown(error: &anyhow::Error) -> bool {
    let said = error.downcast_ref::<ApiError>();
    said.is_some_and(|error| error.code == ErrorCode::UnknownVm)
}
