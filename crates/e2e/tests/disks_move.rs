//! A VM whose disk goes along to a host with which it shares nothing, and one whose disk changes hands.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::Host;
use godwit_e2e::guests::counter_vm;
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::relay::Mode;
use godwit_testkit::guest::boot_disk::{self, Progress};
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::MigrationId;
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::vm::{Accelerator, DiskSpec, VmState};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(2);
const BYTES: u64 = 64 << 20;
/// From here to the end of the disk is a hole but for its last block.
const HOLE: u64 = 48 << 20;

struct Site {
    pair: Pair,
    /// What the host's processes find at the image's path.
    path: PathBuf,
    /// What the guest does not write.
    tail: Vec<u8>,
    _directory: tempfile::TempDir,
}

impl Site {
    /// A guest that boots on host `a` from a disk which only that host has.
    fn apart() -> Result<Self> {
        Self::booted(Pair::apart, false)
    }

    /// The same on a disk which both hosts have.
    fn shared() -> Result<Self> {
        let pair = |accelerator, dir: &Path| {
            std::fs::create_dir(dir.join("images"))?;
            std::fs::set_permissions(dir.join("images"), Permissions::from_mode(0o777))?;
            Pair::new(accelerator)
        };
        Self::booted(pair, true)
    }

    fn booted(pair: impl FnOnce(Accelerator, &Path) -> Result<Pair>, shared: bool) -> Result<Self> {
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
        let mut spec = counter_vm(pair.dir(), &CounterSpec::flat(8), 32)?;
        spec.set_hardware(Some(2));
        spec.kernel.clear();
        spec.disks = vec![disk("root", &path, shared)?];
        spec.check()?;
        pair.boot(&spec)?;
        let site = Self {
            pair,
            path,
            tail,
            _directory: directory,
        };
        site.goes_on(&site.pair.a, 10)?;
        Ok(site)
    }

    fn goes_on(&self, host: &Host, rounds: u32) -> Result<()> {
        let (from, deadline) = (progress(host)?.round, Instant::now() + LONG);
        while progress(host)?.round < from + rounds {
            ensure!(Instant::now() < deadline, "it stands still at round {from}");
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// The image has all that the guest wrote there last, and all that was there before.
    fn is_whole(&self, host: &Host) -> Result<()> {
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
    fn images(&self, host: &Host) -> Result<Vec<String>> {
        let directory = own(host, self.path.parent().context("a directory")?);
        let names = std::fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
        let mut names: Vec<String> = names.collect::<Result<_, _>>()?;
        names.sort();
        Ok(names)
    }

    fn slowly(&self) -> Options {
        Options {
            max_bandwidth_mbit_per_s: Some(80),
            ..Options::default()
        }
    }

    /// Waits until a part of the disk is copied and a part is not.
    fn is_half_way(&self, id: &MigrationId) -> Result<()> {
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

    fn ends(&self, id: &MigrationId, outcome: Outcome) -> Result<MigrationReport> {
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
    fn has_nothing(&self, host: &Host) -> Result<()> {
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

fn disk(name: &str, path: &Path, shared: bool) -> Result<DiskSpec> {
    Ok(DiskSpec {
        name: name.into(),
        from: None,
        size_gib: None,
        path: path.to_str().context("a path")?.to_owned(),
        read_only: false,
        shared,
    })
}

/// The host's process is one that dies at this point.
fn dies_at(host: &Host, point: &'static str) -> Result<()> {
    let starts = host.starts();
    host.arm(point, "kill");
    host.signal_kill()?;
    has_successor(host, starts)
}

/// Waits until the process has died at its point and another one answers.
fn has_died(host: &Host) -> Result<()> {
    host.wait_fault(LONG)?;
    has_successor(host, 0)
}

fn has_successor(host: &Host, starts: u32) -> Result<()> {
    let deadline = Instant::now() + LONG;
    while host.starts() == starts || host.ask(&VmRequest::KeepRecord).is_err() {
        ensure!(Instant::now() < deadline, "it has no successor");
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn own(host: &Host, path: &Path) -> PathBuf {
    match &host.storage {
        Some(storage) => storage.own_path(path),
        None => path.to_owned(),
    }
}

fn progress(host: &Host) -> Result<Progress> {
    let progress = boot_disk::progress(&File::open(host.ram_file()?)?)?;
    ensure!(!progress.is_wrong, "the guest stopped at {progress:?}");
    Ok(progress)
}

#[test]
fn a_vm_moves_with_its_disk_to_a_host_that_has_nothing_of_it_and_back() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    for (from, to) in [(a, b), (b, a)] {
        let report = site.pair.migrate(from, to, &Options::default())?;
        println!("  {:.2} s, {:.1} ms", report.total_s, report.switchover_ms);
        site.goes_on(to, 20)?;
        site.is_whole(to)?;
        site.has_nothing(from)?;
        ensure!(site.images(to)? == ["root.raw"], "{:?}", site.images(to)?);
        let used = std::fs::metadata(own(to, &site.path))?.blocks() * 512;
        ensure!(used < HOLE + (2 << 20), "holes were filled: {used} bytes");
        ensure!(report.disk_bytes > 40 << 20 && report.disk_left_bytes == 0);
    }
    Ok(())
}

#[test]
fn a_vm_whose_disk_both_hosts_have_moves_its_memory_alone() -> Result<()> {
    let site = Site::shared()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let before = std::fs::metadata(&site.path)?.ino();
    for (from, to) in [(a, b), (b, a)] {
        let report = site.pair.migrate(from, to, &Options::default())?;
        site.goes_on(to, 20)?;
        site.is_whole(to)?;
        ensure!(report.disk_bytes == 0 && report.bytes_on_wire < 24 << 20);
        ensure!(std::fs::metadata(&site.path)?.ino() == before);
    }
    Ok(())
}

#[test]
fn a_cancelled_move_leaves_the_guest_where_it_was_and_nothing_of_its_disk_elsewhere() -> Result<()>
{
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let id = site.pair.begin(a, b, &site.slowly())?;
    site.is_half_way(&id)?;
    ensure!(
        site.images(b)?
            .iter()
            .all(|name| name.contains(".arriving-"))
    );
    a.ask(&VmRequest::Cancel {
        migration: id.clone(),
        reason: "enough".into(),
    })?;
    site.ends(&id, Outcome::Cancelled)?;
    site.has_nothing(b)?;
    site.goes_on(a, 20)?;
    site.is_whole(a)?;
    site.pair.migrate(a, b, &Options::default())?;
    site.is_whole(b)
}

#[test]
fn a_link_that_is_lost_while_a_disk_is_copied_is_made_again_and_nothing_is_missing() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    let options = Options {
        relayed: true,
        ..site.slowly()
    };
    let id = site.pair.begin(a, b, &options)?;
    site.is_half_way(&id)?;
    site.pair.link(Mode::Cut);
    // Nobody waits for a destination that is not there.
    site.goes_on(a, 50)?;
    site.pair.link(Mode::Open);
    site.ends(&id, Outcome::Completed)?;
    site.goes_on(b, 20)?;
    site.is_whole(b)?;
    site.has_nothing(a)
}

#[test]
fn a_process_that_dies_while_a_disk_is_copied_leaves_the_guest_at_its_source() -> Result<()> {
    for (point, at_source) in [
        ("source.connected", true),
        ("source.disks-copied", true),
        ("source.stopped", true),
        ("source.last-pages", true),
        ("destination.disk-change", false),
        ("destination.state-whole", false),
        ("destination.disks-durable", false),
    ] {
        let site = Site::apart()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        let victim = if at_source { a } else { b };
        dies_at(victim, point)?;
        let begun = site.pair.try_begin(a, b, &Options::default())?;
        has_died(victim).with_context(|| point.to_owned())?;
        if begun.1.is_ok() {
            let report = site.ends(&begun.0, Outcome::Failed);
            report.with_context(|| point.to_owned())?;
        }
        site.goes_on(a, 20).with_context(|| point.to_owned())?;
        site.is_whole(a).with_context(|| point.to_owned())?;
        site.has_nothing(b).with_context(|| point.to_owned())?;
        println!("  killed at {point}");
    }
    Ok(())
}

#[test]
fn a_process_that_dies_in_the_handover_leaves_one_guest_with_its_whole_disk() -> Result<()> {
    for (point, at_source) in [
        ("journal.gave.after", true),
        ("source.permit.before", true),
        ("source.permit.after", true),
        ("journal.moved.after", true),
        ("journal.ready.after", false),
        ("journal.holds.before", false),
        ("journal.holds.after", false),
        ("running", false),
    ] {
        let site = Site::apart()?;
        let (a, b) = (&site.pair.a, &site.pair.b);
        let victim = if at_source { a } else { b };
        dies_at(victim, point)?;
        let (id, _) = site.pair.try_begin(a, b, &Options::default())?;
        has_died(victim).with_context(|| point.to_owned())?;
        let told = site.pair.wait_end(a, &id, LONG);
        let outcome = told.with_context(|| point.to_owned())?.outcome;
        let (holder, other) = match outcome {
            Some(Outcome::Completed) => (b, a),
            _ => (a, b),
        };
        let runs = || holder.vm().is_ok_and(|vm| vm.state == VmState::Running);
        let deadline = Instant::now() + LONG;
        while !runs() {
            ensure!(Instant::now() < deadline, "{point}: nobody runs it");
            std::thread::sleep(LOOK_EVERY);
        }
        site.goes_on(holder, 20).with_context(|| point.to_owned())?;
        site.is_whole(holder).with_context(|| point.to_owned())?;
        site.has_nothing(other).with_context(|| point.to_owned())?;
        println!("  killed at {point}: {outcome:?}");
    }
    Ok(())
}

#[test]
fn a_file_where_a_disk_is_to_come_is_not_touched() -> Result<()> {
    let site = Site::apart()?;
    let (a, b) = (&site.pair.a, &site.pair.b);
    std::fs::write(own(b, &site.path), b"somebody's")?;
    let refused = site.pair.begin(a, b, &Options::default());
    let refused = refused.err().context("it began")?.to_string();
    let told = format!("{} exists already", site.path.display());
    ensure!(refused.contains(&told), "{refused}");
    ensure!(std::fs::read(own(b, &site.path))? == b"somebody's");
    ensure!(site.images(b)? == ["root.raw"]);
    site.goes_on(a, 20)
}
