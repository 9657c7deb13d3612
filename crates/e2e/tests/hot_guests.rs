//! Guests that write faster than they can be sent, and what a guest is left with after a move that did not happen.

use anyhow::Context as _;
use godwit_e2e::guests::{MIB, Pace, Reads, Written, calibrate, counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_guestmem::mem_tmpfs::{Mounted, ensure_mounted};
use godwit_guestmem::{GuestMapping, RamFile, collapse};
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::MigrationId;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{MigrationReport, Outcome, Phase};
use godwit_types::vm::{Accelerator, VmState};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

/// Waits for the end, and looks at each report from the second iteration until the guest is stopped.
fn watch(
    pair: &Pair,
    id: &MigrationId,
    mut look: impl FnMut(&MigrationReport) -> anyhow::Result<()>,
) -> anyhow::Result<MigrationReport> {
    let deadline = Instant::now() + Duration::from_secs(150);
    loop {
        let report = pair.a.report(id)?;
        if report.outcome.is_some() {
            return Ok(report);
        }
        if report.phase == Phase::Precopy && !report.iterations.is_empty() {
            look(&report)?;
        }
        anyhow::ensure!(Instant::now() < deadline, "no end: {report:?}");
        // Reports are asked for; there is nothing to wait on.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The same; and what the guest wrote per second meanwhile, MiB/s.
fn watch_writes(
    pair: &Pair,
    id: &MigrationId,
    pace: &Pace,
) -> anyhow::Result<(MigrationReport, f64)> {
    let mut written = Written::default();
    let report = watch(pair, id, |_| written.look(pace))?;
    Ok((report, written.mib_per_s()))
}

#[test]
fn a_guest_that_writes_twice_what_the_link_carries_moves_within_its_promise() -> anyhow::Result<()>
{
    let pair = Pair::new(Accelerator::Tcg)?;
    let guest = CounterSpec::flat(128).slowed(20_000);
    pair.boot(&counter_vm(pair.dir(), &guest, 160)?)?;
    let ram = pair.a.ram_file()?;
    wait_passes(&ram, 1, LONG)?;
    let own = calibrate(&ram, 95.0)?;
    let options = Options {
        max_bandwidth_mbit_per_s: Some(400),
        max_downtime_ms: 300,
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let (report, during) = watch_writes(&pair, &id, &Pace::of(&ram)?)?;
    println!(
        "guest {own:.0} MiB/s, in precopy {during:.0} MiB/s, cap 47.7 MiB/s; {:?} after {:.1} s in {} iterations, paused {:.0} ms {:?}",
        report.outcome,
        report.total_s,
        report.iterations.len(),
        report.switchover_ms,
        report.switchover_parts_ms
    );
    for iteration in &report.iterations {
        println!("  {iteration:?}");
    }
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    anyhow::ensure!(report.outcome == Some(Outcome::Completed));
    if !report.promise.kept {
        // What was stopped fitted the promise; a busy machine may still break it.
        println!("  the promise of 300 ms was missed");
    }
    Ok(())
}

/// A vCPU of the QEMU: its number, and how often its quota has made it wait.
fn waits_of_vcpus(qemu_pid: i32) -> anyhow::Result<Vec<(String, u64)>> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{qemu_pid}/task"))? {
        let task = task?.path();
        let name = std::fs::read_to_string(task.join("comm"))?;
        let group = std::fs::read_to_string(task.join("cgroup"))?;
        let slowed = group.lines().find(|line| line.contains("godwit-throttle-"));
        if let (true, Some(line)) = (name.starts_with("CPU "), slowed) {
            found.push((name.trim().to_owned(), waits_in(line)?));
        }
    }
    found.sort();
    Ok(found)
}

/// `line` is one of `/proc/PID/cgroup`: number, controllers, path.
fn waits_in(line: &str) -> anyhow::Result<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = parts.next().zip(parts.next()).context("no group")?;
    let mount = if controllers.is_empty() {
        "unified"
    } else {
        "cpu"
    };
    let places = [
        format!("/sys/fs/cgroup/{mount}{path}"),
        format!("/sys/fs/cgroup{path}"),
    ];
    let stat = places
        .iter()
        .find_map(|place| std::fs::read_to_string(Path::new(place).join("cpu.stat")).ok())
        .with_context(|| format!("no cpu.stat in {places:?}"))?;
    let waits = stat
        .lines()
        .find_map(|line| line.strip_prefix("nr_throttled "));
    Ok(waits.context("no nr_throttled")?.parse()?)
}

/// Each vCPU is held by what it writes. How fast the reading one goes on depends on who else wants its core, and is
/// printed; that no quota ever made it wait is checked.
#[test]
fn a_vcpu_that_only_reads_is_not_made_to_wait() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let guest = CounterSpec::flat(128).slowed(20_000).with_reader();
    let mut spec = counter_vm(pair.dir(), &guest, 160)?;
    spec.vcpus = 2;
    pair.boot(&spec)?;
    let ram = pair.a.ram_file()?;
    wait_passes(&ram, 1, LONG)?;
    let own = calibrate(&ram, 95.0)?;
    let qemu_pid = pair.a.vm()?.qemu_pid.context("no QEMU")?;
    let reads = Reads::of(&ram)?;
    let (before, began) = (reads.pages()?, Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let usual = f64::from(reads.pages()?.wrapping_sub(before)) / began.elapsed().as_secs_f64();
    let options = Options {
        max_bandwidth_mbit_per_s: Some(400),
        max_downtime_ms: 300,
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let (mut first, mut last, mut waits, mut slowest) = (None, None, Vec::new(), 100);
    let report = watch(&pair, &id, |report| {
        let now = Some((reads.pages()?, Instant::now()));
        (first, last) = (first.or(now), now);
        slowest = slowest.min(report.guest_speed_percent);
        // A group may go while it is looked at: the pause begins.
        if let Ok(seen) = waits_of_vcpus(qemu_pid)
            && seen.len() == 2
        {
            waits = seen;
        }
        Ok(())
    })?;
    let settled = pair.conclude(Some(&id))?.settled;
    let unable = |reason: &&String| reason.contains("could not be slowed");
    if let Some(reason) = report.reason.as_ref().filter(unable) {
        println!("skipped: {reason}");
        return Ok(());
    }
    anyhow::ensure!(settled.owner.name == pair.b.name);
    let ((pages, at), (last_pages, last_at)) = first.zip(last).context("never seen in precopy")?;
    let read = f64::from(u32::wrapping_sub(last_pages, pages));
    let during = read / Instant::duration_since(&last_at, at).as_secs_f64();
    println!(
        "guest wrote {own:.0} MiB/s and read {usual:.0} pages/s; slowed to {slowest} % it read {:.2} of that; waits {waits:?}; {:?} after {:.1} s",
        during / usual,
        report.outcome,
        report.total_s
    );
    anyhow::ensure!(usual > 0.0 && during > 0.0, "the second vCPU does not read");
    if slowest >= 100 {
        println!(
            "skipped: others left the writer less than the link carries, so it was not slowed"
        );
        return Ok(());
    }
    let [(writer, held), (reader, kept)] = waits.as_slice() else {
        anyhow::bail!("slowed to {slowest} %, and no quotas seen: {waits:?}");
    };
    anyhow::ensure!(*held > 0, "{writer} was never made to wait");
    anyhow::ensure!(
        *kept == 0,
        "{reader} only reads and was made to wait {kept} times"
    );
    Ok(())
}

#[test]
fn a_guest_that_may_not_be_slowed_is_left_where_it_is_at_full_speed() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let guest = CounterSpec::flat(64).slowed(20_000);
    pair.boot(&counter_vm(pair.dir(), &guest, 96)?)?;
    let ram = pair.a.ram_file()?;
    wait_passes(&ram, 1, LONG)?;
    let own = calibrate(&ram, 95.0)?;
    if own < 60.0 {
        println!("skipped: the guest gets too little of this machine to outrun the link");
        return Ok(());
    }
    let options = Options {
        max_bandwidth_mbit_per_s: Some(160),
        max_downtime_ms: 100,
        max_guest_slowdown_percent: Some(30),
        ..Options::default()
    };
    let pace = Pace::of(&ram)?;
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let (report, during) = watch_writes(&pair, &id, &pace)?;
    println!(
        "guest {own:.0} MiB/s, in precopy {during:.0}; after {:.1} s: {:?}",
        report.total_s, report.reason
    );
    anyhow::ensure!(report.outcome == Some(Outcome::Failed), "{report:?}");
    let settled = pair.settle()?;
    anyhow::ensure!(settled.owner.name == pair.a.name);
    let after = pace.mib_per_s(Duration::from_secs(1))?;
    println!("afterwards {after:.0} MiB/s");
    Ok(())
}

/// A memory file system with huge pages for one host, until the end of a test.
struct Huge(PathBuf);

impl Huge {
    fn on(path: &Path) -> anyhow::Result<Self> {
        anyhow::ensure!(ensure_mounted(path, 1 << 30)? == Mounted::Now);
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn huge_pages_are_back_after_a_cancelled_migration() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let _huge = Huge::on(pair.a.ram_dir())?;
    pair.boot(&counter_vm(
        pair.dir(),
        &CounterSpec::flat(128).slowed(2_000),
        160,
    )?)?;
    let path = pair.a.ram_file()?;
    wait_passes(&path, 1, LONG)?;
    let pid = u32::try_from(pair.a.vm()?.qemu_pid.unwrap_or(0))?;
    let mapping = GuestMapping::find(pid, &RamFile::open(&path, 160 << 20)?)?;
    let huge = || collapse::huge_mapped_bytes(pid, &mapping);
    let before = huge()?;
    if before == 0 {
        println!("skipped: this kernel gives the guest no huge pages");
        return Ok(());
    }
    let options = Options {
        max_bandwidth_mbit_per_s: Some(400),
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let deadline = Instant::now() + LONG;
    while pair.a.report(&id)?.iterations.is_empty() {
        anyhow::ensure!(Instant::now() < deadline, "no iteration ends");
        std::thread::sleep(Duration::from_millis(20));
    }
    let during = huge()?;
    let reason = "the test is over".to_owned();
    let (migration, cancelled) = (id.clone(), Instant::now());
    pair.a.ask(&VmRequest::Cancel { migration, reason })?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Cancelled), "{report:?}");
    pair.a.wait_state(VmState::Running, LONG)?;
    // A huge page or two may not come back on fragmented memory.
    while huge()? < before / 10 * 9 {
        anyhow::ensure!(
            cancelled.elapsed() < LONG,
            "{} of {before} bytes are huge pages again",
            huge()?
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    println!(
        "huge pages: {:.0} MiB, while tracked {:.0}, back after {:.1} s",
        before as f64 / MIB,
        during as f64 / MIB,
        cancelled.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Nothing that is done while the guest stands still may take longer because it is larger.
#[test]
fn large_and_small_guests_are_paused_alike() -> anyhow::Result<()> {
    for (memory_mib, vcpus) in [(1024, 1), (8192, 4)] {
        let pair = Pair::new(Accelerator::Tcg)?;
        let guest = CounterSpec::flat(2).slowed(2_000_000);
        let mut spec = counter_vm(pair.dir(), &guest, memory_mib)?;
        spec.vcpus = vcpus;
        pair.boot(&spec)?;
        wait_passes(&pair.a.ram_file()?, 1, LONG)?;
        let mut reports = Vec::new();
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)].repeat(3) {
            reports.push(pair.migrate(from, to, &Options::default())?);
            let settled = pair.settle()?;
            pair.wait_confirmed(&settled)?;
        }
        reports.sort_by(|a, b| a.switchover_ms.total_cmp(&b.switchover_ms));
        for (name, index) in [("least", 0), ("median", 3), ("most", 5)] {
            let report = &reports[index];
            println!(
                "{memory_mib} MiB, {vcpus} vCPUs, {name}: {:.1} ms {:?}",
                report.switchover_ms, report.switchover_parts_ms
            );
        }
    }
    Ok(())
}
