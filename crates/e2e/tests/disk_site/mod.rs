//! Two hosts and a guest that boots from a disk, whose every round it writes there, beside much that it only reads.
#![allow(dead_code)]

pub mod interrupted;
pub mod linked;
pub mod redo;
pub mod snapshots;

use anyhow::{Context as _, Result, bail, ensure};
use godwit_e2e::Host;
use godwit_e2e::guests::{disk, vm_with_disk};
use godwit_e2e::host::kill_qemus_on;
use godwit_e2e::obedient;
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_testkit::testvol::{Settings, Volume};
use godwit_types::MigrationId;
use godwit_types::disk_move::{DiskMove, DiskMoves, DiskPlace, Method};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::vm::{Accelerator, UIDS};
use std::fs::{File, Permissions};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const LONG: Duration = Duration::from_secs(120);
pub const LOOK_EVERY: Duration = Duration::from_millis(2);
/// A guest's requests wait for no longer, nor does all of it stand still.
pub const HELD_MAX_MS: f64 = 5000.0;
pub const BYTES: u64 = 64 << 20;
/// From here to the end of the disk is a hole but for its last block.
pub const HOLE: u64 = 48 << 20;

pub struct Site {
    pub pair: Pair,
    /// What the host's processes find at the image's path.
    pub path: PathBuf,
    /// The same of the disks beside the first.
    others: Vec<PathBuf>,
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

    /// A guest that does what it is told to ([`obedient`]), with these disks on storage of the machine.
    pub fn local_of(disks: &[&str]) -> Result<Self> {
        Self::obedient_of(Self::on_the_machine, disks)
    }

    fn on_the_machine(accelerator: Accelerator, dir: &Path) -> Result<Pair> {
        std::fs::create_dir(dir.join("images"))?;
        std::fs::set_permissions(dir.join("images"), Permissions::from_mode(0o1777))?;
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
        Self::of_disks(pair, shared, (&["root"], None), &boot_disk::sector()?)
    }

    /// As [`Self::local`], of a VM whose QEMU has a user of its own, to whom the disk belongs and nobody else.
    pub fn of_own_user() -> Result<Self> {
        let sector = boot_disk::sector()?;
        Self::of_disks(
            Self::on_the_machine,
            false,
            (&["root"], Some(*UIDS.start())),
            &sector,
        )
    }

    /// A guest that does what it is told to ([`obedient`]), with these disks, on hosts which share nothing.
    pub fn obedient(disks: &[&str]) -> Result<Self> {
        Self::obedient_of(Pair::apart, disks)
    }

    /// The same on these hosts.
    pub fn obedient_of(
        pair: impl FnOnce(Accelerator, &Path) -> Result<Pair>,
        disks: &[&str],
    ) -> Result<Self> {
        Self::of_disks(
            pair,
            false,
            (disks, None),
            &obedient::sector(disks.len() as u8)?,
        )
    }

    fn of_disks(
        pair: impl FnOnce(Accelerator, &Path) -> Result<Pair>,
        shared: bool,
        (disks, uid): (&[&str], Option<u32>),
        sector: &[u8],
    ) -> Result<Self> {
        // On a disk, and where QEMU's user comes to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let pair = pair(Accelerator::Tcg, directory.path())?;
        let place = |name: &&str| directory.path().join(format!("images/{name}.raw"));
        let mut paths: Vec<PathBuf> = disks.iter().map(place).collect();
        for (number, path) in paths.iter().enumerate() {
            let image = own(&pair.a, path);
            let file = File::create(&image)?;
            // A device that a test has put there has its length.
            if file.metadata()?.is_file() {
                file.set_len(BYTES)?;
            }
            if number == 0 {
                file.write_all_at(sector, 0)?;
            }
            file.write_all_at(&tail(number), 8192)?;
            file.write_all_at(&[7; 512], BYTES - 512)?;
            let mode = if uid.is_some() { 0o600 } else { 0o666 };
            std::fs::set_permissions(&image, Permissions::from_mode(mode))?;
            chown(&image, uid, uid)?;
        }
        let mut spec = vm_with_disk(pair.dir(), paths.first().context("a disk")?, shared)?;
        spec.uid = uid;
        for (name, path) in disks.iter().zip(&paths).skip(1) {
            spec.disks.push(disk(name, path, shared)?);
        }
        spec.check()?;
        pair.boot(&spec)?;
        let others = paths.split_off(1);
        let site = Self {
            pair,
            path: paths.pop().context("a disk")?,
            others,
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

    /// Each image has all that the guest wrote there last, and all that was there before.
    pub fn is_whole(&self, host: &Host) -> Result<()> {
        match host.ask(&VmRequest::Pause)? {
            VmAnswer::Done(_) => {}
            other => bail!("{other:?}"),
        }
        self.has_all(host, progress(host)?.round)?;
        host.ask(&VmRequest::Resume)?;
        self.goes_on(host, 5)
    }

    /// The images on a host have that of a guest which stands still after this round.
    pub fn has_all(&self, host: &Host, round: u32) -> Result<()> {
        let images = std::iter::once(&self.path).chain(&self.others);
        for (number, path) in images.enumerate() {
            let (image, name) = (File::open(own(host, path))?, path.display());
            let missing = boot_disk::missing(&image, round)?;
            ensure!(
                missing.is_none(),
                "of round {round}, {missing:?} is missing in {name}"
            );
            let tail = tail(number);
            let mut found = vec![0; tail.len()];
            image.read_exact_at(&mut found, 8192)?;
            ensure!(
                found == tail,
                "what the guest did not write differs in {name}"
            );
            let mut last = [0; 512];
            image.read_exact_at(&mut last, BYTES - 512)?;
            ensure!(last == [7; 512], "the last block of {name} differs");
        }
        Ok(())
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

    /// The VM goes to another host by a method that holds its guest, for no longer than it may, and its whole disk is one image there.
    pub fn goes_as_one_image(
        &self,
        (from, to): (&Host, &Host),
        method: Method,
    ) -> Result<MigrationReport> {
        let options = Options {
            method,
            ..Options::default()
        };
        let report = self.pair.migrate(from, to, &options)?;
        println!("  {:.2} s, {:.1} ms", report.total_s, report.switchover_ms);
        ensure!(report.switchover_ms < HELD_MAX_MS, "{report:?}");
        ensure!(report.method == method, "{report:?}");
        self.goes_on(to, 20)?;
        self.is_whole(to)?;
        self.has_nothing(from)?;
        let images = self.images(to)?;
        ensure!(images == ["root.raw"], "{images:?}");
        let [of_root] = report.disk_iterations.as_slice() else {
            bail!("of one disk it is told what its iterations came to: {report:?}");
        };
        let first = of_root.iterations.first();
        let has_copied = first.is_some_and(|first| first.number == 1 && first.copied_bytes > 0);
        ensure!(of_root.disk == "root" && has_copied, "{of_root:?}");
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

/// A place for the disk in a directory of this name beside its own, where QEMU's user may make files.
pub fn another(site: &Site, name: &str) -> Result<PathBuf> {
    let above = site.path.parent().and_then(|images| images.parent());
    let directory = above.context("a directory")?.join(name);
    if !directory.exists() {
        std::fs::create_dir(&directory)?;
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o1777))?;
    }
    Ok(directory.join("web-root.raw"))
}

/// The first disk is to come here.
pub fn places(to: &Path, max_bandwidth_mbit_per_s: Option<u64>) -> Result<Vec<DiskPlace>> {
    Ok(vec![DiskPlace {
        disk: "root".into(),
        path: to.to_str().context("a path")?.into(),
        shared: false,
        max_bandwidth_mbit_per_s,
        method: Method::default(),
        without: Vec::new(),
        first_log: godwit_types::disk_move::FirstLog::default(),
    }])
}

/// Lets the first disk of host `a` begin to move on its host.
pub fn begin_move(site: &Site, to: &Path, cap: Option<u64>) -> Result<DiskMoves> {
    begin_move_by(site, Method::default(), to, cap)
}

/// The same by this method.
pub fn begin_move_by(
    site: &Site,
    method: Method,
    to: &Path,
    cap: Option<u64>,
) -> Result<DiskMoves> {
    let mut places = places(to, cap)?;
    places.iter_mut().for_each(|place| place.method = method);
    match site.pair.a.ask(&VmRequest::MoveDisks { places })? {
        VmAnswer::DiskMoves(moves) => Ok(moves),
        other => bail!("{other:?}"),
    }
}

/// Waits until that move is over.
pub fn move_ended(site: &Site) -> Result<DiskMove> {
    let deadline = Instant::now() + LONG;
    loop {
        let VmAnswer::DiskMoves(moves) = site.pair.a.ask(&VmRequest::DiskMoves)? else {
            bail!("no moves");
        };
        if !moves.are_under_way() {
            return moves.disks.into_iter().next().context("no disk was moved");
        }
        ensure!(Instant::now() < deadline, "{moves:?}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Waits until the VM's description says that its first disk is there.
pub fn is_described(host: &Host, path: &Path) -> Result<()> {
    let deadline = Instant::now() + LONG;
    let described = || -> Option<String> {
        let vm = host.vm().ok()?;
        Some(vm.spec.disks.first()?.path.clone())
    };
    while described().as_deref() != path.to_str() {
        ensure!(Instant::now() < deadline, "it is {:?}", described());
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// What the guest does not write of its first disk, its second one and so on.
fn tail(number: usize) -> Vec<u8> {
    let byte = |at: u64| ((at / 509 + 83 * number as u64) % 251) as u8;
    (0..HOLE - 8192).map(byte).collect()
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

pub fn copy_all(from: &Path, to: &Path) -> Result<()> {
    let copied = Command::new("cp")
        .arg("--archive")
        .args([from, to])
        .status()?;
    ensure!(copied.success(), "{} is not copied", from.display());
    Ok(())
}

/// The source of a move, which ends it, and whose image is away meanwhile, so that it cannot say that it has the disk.
pub struct ImageAway {
    pub migration: MigrationId,
    image: PathBuf,
    away: PathBuf,
}

impl ImageAway {
    pub fn of(site: &Site, options: &Options) -> Result<Self> {
        let (a, b) = (&site.pair.a, &site.pair.b);
        does_at(a, "source.disks-copied", "hold")?;
        let migration = site.pair.begin(a, b, options)?;
        a.wait_fault(LONG)?;
        let image = own(a, &site.path);
        let away = image.with_extension("away");
        std::fs::rename(&image, &away)?;
        a.signal_kill()?;
        site.ends(&migration, Outcome::Failed)?;
        site.pair.wait_end(b, &migration, LONG)?;
        Ok(Self {
            migration,
            image,
            away,
        })
    }

    /// The image is there again.
    pub fn is_back(&self) -> Result<()> {
        Ok(std::fs::rename(&self.away, &self.image)?)
    }
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

/// The longest that somebody who asks QEMU may wait.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// Asks a host's QEMU something all the while.
pub struct Answering {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u32, Duration)>,
}

impl Answering {
    /// Has an answer when it returns.
    pub fn of(host: &Arc<Host>) -> Result<Self> {
        let (host, stop) = (Arc::clone(host), Arc::new(AtomicBool::new(false)));
        let is_over = Arc::clone(&stop);
        let asks = move || {
            let asked = Instant::now();
            // A guest that is off has no QEMU, which is said at once, too.
            let answer = host.ask(&VmRequest::Blockers);
            // What keeps the guest here for now is said once QEMU has answered.
            let is_moved = |why: &anyhow::Error| why.to_string().contains("are being moved");
            let has_answered = match &answer {
                Ok(answer) => matches!(answer, VmAnswer::Blockers(_)),
                Err(why) => is_moved(why),
            };
            (asked.elapsed(), has_answered)
        };
        let (mut longest, first) = asks();
        let mut answers = 1;
        ensure!(first, "QEMU does not answer");
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                let (took, has_answered) = asks();
                longest = longest.max(took);
                answers += u32::from(has_answered);
                std::thread::sleep(LOOK_EVERY);
            }
            (answers, longest)
        });
        Ok(Self { stop, thread })
    }

    /// QEMU answered each time, and soon.
    pub fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::SeqCst);
        let ended = self.thread.join();
        let (answers, longest) = ended.map_err(|_| anyhow::anyhow!("nobody asked"))?;
        println!("  QEMU answered {answers} times, within {longest:.1?}");
        ensure!(longest < ANSWERS_WITHIN, "QEMU answered after {longest:?}");
        Ok(())
    }
}

/// Hosts, on whose storage a volume is mounted for what comes.
pub struct Fragile {
    pub site: Site,
    pub volume: Volume,
}

impl Fragile {
    /// The volume is what host `b` has its images on.
    pub fn of_hosts(mounts: &OwnedFd) -> Result<Self> {
        Self::made(mounts, "b", |accelerator, dir| {
            Pair::apart(accelerator, dir)
        })
    }

    /// The volume is a second place for images of host `a`.
    pub fn of_places(mounts: &OwnedFd) -> Result<Self> {
        Self::made(mounts, "second", |accelerator, dir| {
            for name in ["images", "second"] {
                std::fs::create_dir(dir.join(name))?;
                let all = Permissions::from_mode(0o1777);
                std::fs::set_permissions(dir.join(name), all)?;
            }
            Pair::new(accelerator)
        })
    }

    fn made(
        mounts: &OwnedFd,
        name: &str,
        pair: impl FnOnce(Accelerator, &Path) -> Result<Pair>,
    ) -> Result<Self> {
        let mut volume = None;
        let pair = |accelerator, dir: &Path| {
            let pair = pair(accelerator, dir)?;
            let at = dir.join(name);
            volume = Some(Volume::mount_direct(mounts.as_fd(), &at)?);
            std::fs::set_permissions(&at, Permissions::from_mode(0o1777))?;
            Ok(pair)
        };
        let site = Site::obedient_of(pair, &["root"])?;
        let volume = volume.context("a volume")?;
        Ok(Self { site, volume })
    }

    /// As good as new.
    pub fn is_mended(&self) {
        self.volume
            .change(|settings| *settings = Settings::default());
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        self.is_mended();
        let pair = &self.site.pair;
        pair.supervised.store(false, Ordering::SeqCst);
        for host in [&pair.a, &pair.b] {
            host.kill_process();
            kill_qemus_on(host.ram_dir());
        }
        // Else its directory could not be removed.
        let at = self.volume.at();
        let _ = Command::new("umount").arg("-l").arg(at).status();
    }
}
