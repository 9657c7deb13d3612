//! Moves that must succeed: every page that the guest wrote is at the destination, and nothing is left at the source.

use anyhow::Context as _;
use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::checker;
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{Cipher, MigrationReport, Outcome};
use godwit_types::vm::{Accelerator, VmState};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn booted(guest: &CounterSpec, memory_mib: u64) -> anyhow::Result<Pair> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.boot(&counter_vm(pair.dir(), guest, memory_mib)?)?;
    wait_passes(&pair.a.ram_file()?, 2, LONG)?;
    Ok(pair)
}

#[test]
fn a_running_guest_moves_once() -> anyhow::Result<()> {
    let pair = booted(&CounterSpec::flat(48), 64)?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    Ok(())
}

#[test]
fn a_destination_that_is_slow_to_apply_loses_nothing() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.b.arm("destination.apply", "slow");
    pair.boot(&counter_vm(
        pair.dir(),
        &CounterSpec::flat(48).slowed(20_000),
        64,
    )?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let options = Options {
        max_downtime_ms: 3000,
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    Ok(())
}

#[test]
fn a_guest_that_writes_rarely_loses_nothing() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.boot(&counter_vm(
        pair.dir(),
        &CounterSpec::flat(48).slowed(20_000),
        64,
    )?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    let options = Options {
        max_bandwidth_mbit_per_s: Some(400),
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    Ok(())
}

/// Threads that take all they can get of every core, until dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn on_each_core(threads_per_core: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let stop = Arc::<AtomicBool>::default();
        let spin = |stop: Arc<AtomicBool>| {
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        let all = 0..cores * threads_per_core;
        let threads = all.map(|_| spin(Arc::clone(&stop))).collect();
        Self { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Page threads that gave way to everybody in every pass were too slow for a guest that writes: it was given up.
#[test]
fn a_writing_guest_moves_between_hosts_whose_cores_are_all_busy() -> anyhow::Result<()> {
    let pair = booted(&CounterSpec::flat(24), 32)?;
    let busy = Busy::on_each_core(4);
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    let (deadline, mut nicest) = (Instant::now() + LONG, None);
    let report = loop {
        let report = pair.a.report(&id)?;
        if report.outcome.is_some() {
            break report;
        }
        anyhow::ensure!(Instant::now() < deadline, "not over: {report:?}");
        // Whoever has carried pages of a later pass.
        let mut later = report.iterations.iter().skip(1);
        if later.any(|pass| pass.pages_sent > 0) {
            let sending = least_niceness(&pair.a, "send-")?;
            let receiving = least_niceness(&pair.b, "receive-")?;
            nicest = nicest.max(sending.zip(receiving));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    drop(busy);
    println!(
        "{:?} after {:.1} s, {} iterations, paused {:.0} ms",
        report.outcome,
        report.total_s,
        report.iterations.len(),
        report.switchover_ms
    );
    anyhow::ensure!(
        report.outcome == Some(Outcome::Completed),
        "{:?}: {:?}",
        report.outcome,
        report.reason
    );
    anyhow::ensure!(
        nicest.is_none_or(|both| both == (0, 0)),
        "page threads gave way in a later pass: {nicest:?}"
    );
    pair.conclude(Some(&id))?;
    Ok(())
}

/// The lowest niceness of a host's threads of this name, while it has any.
fn least_niceness(host: &godwit_e2e::Host, name: &str) -> anyhow::Result<Option<i64>> {
    let pid = host.process_id().context("no VM process")?;
    let mut least = None;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        // A thread may end while it is looked at.
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let Some((before, after)) = stat.rsplit_once(')') else {
            continue;
        };
        let niceness = after.split_whitespace().nth(16);
        if before.contains(&format!("({name}"))
            && let Some(niceness) = niceness.and_then(|text| text.parse::<i64>().ok())
        {
            least = Some(least.map_or(niceness, |least: i64| least.min(niceness)));
        }
    }
    Ok(least)
}

/// Both sides stopped: the source after its device state, the destination loaded.
fn compared(
    pair: &Pair,
    from: &Arc<godwit_e2e::Host>,
    to: &Arc<godwit_e2e::Host>,
) -> anyhow::Result<MigrationReport> {
    to.kill_process();
    to.arm("destination.loaded", "hold");
    to.start_process()?;
    let id = pair.begin(from, to, &Options::default())?;
    to.wait_fault(LONG)
        .with_context(|| format!("{:?}", from.report(&id)))?;
    let (left, right) = (File::open(from.ram_file()?)?, File::open(to.ram_file()?)?);
    let (first, differing) = checker::compare(&left, &right)?;
    anyhow::ensure!(
        differing == 0,
        "{differing} pages differ, the first: {first:?}"
    );
    to.release()?;
    let report = pair.wait_end(from, &id, LONG)?;
    // The next move may begin only when this one is confirmed, and the host left behind has tidied up.
    let settled = pair.settle()?;
    pair.wait_confirmed(&settled)?;
    Ok(report)
}

#[test]
fn twenty_moves_back_and_forth_with_equal_memory_and_a_reboot_at_the_end() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.patience(LONG);
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    wait_passes(&pair.a.ram_file()?, 2, LONG)?;
    for round in 0..10 {
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            let report = compared(&pair, from, to)?;
            anyhow::ensure!(
                report.outcome == Some(Outcome::Completed),
                "round {round}: {:?} {:?}",
                report.outcome,
                report.reason
            );
        }
    }
    let settled = pair.settle()?;
    pair.audit(&settled)?;
    settled.owner.ask(&VmRequest::Reset)?;
    let ram = settled.owner.ram_file()?;
    let deadline = Instant::now() + LONG;
    loop {
        match checker::control(&File::open(&ram)?) {
            Ok(control) if control.boots == 2 && control.passes > 2 => return Ok(()),
            other => anyhow::ensure!(Instant::now() < deadline, "no reboot: {other:?}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn memory_is_equal_when_the_guest_was_reset_in_precopy() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.patience(LONG);
    pair.a.arm("source.pass", "hold");
    pair.b.arm("destination.loaded", "hold");
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    wait_passes(&pair.a.ram_file()?, 2, LONG)?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.a.wait_fault(LONG)?;
    pair.a.ask(&VmRequest::Reset)?;
    pair.a.release()?;
    pair.b.wait_fault(LONG)?;
    let (left, right) = (
        File::open(pair.a.ram_file()?)?,
        File::open(pair.b.ram_file()?)?,
    );
    let (first, differing) = checker::compare(&left, &right)?;
    anyhow::ensure!(
        differing == 0,
        "{differing} pages differ, the first: {first:?}"
    );
    pair.b.release()?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Completed));
    Ok(())
}

#[test]
fn a_real_mode_guest_under_kvm_moves_three_times() -> anyhow::Result<()> {
    if !std::path::Path::new("/dev/kvm").exists() {
        println!("skipped: this machine has no /dev/kvm");
        return Ok(());
    }
    let pair = Pair::new(Accelerator::Kvm)?;
    let mut spec = counter_vm(pair.dir(), &CounterSpec::real(), 32)?;
    // On an AMD machine KVM offers this feature for emulation and then refuses its register: QEMU aborts.
    spec.cpu = "host,-arch-capabilities".into();
    pair.boot(&spec)?;
    wait_passes(&pair.a.ram_file()?, 2, LONG)?;
    for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a), (&pair.a, &pair.b)] {
        let report = pair.migrate(from, to, &Options::default())?;
        let settled = pair.settle()?;
        pair.audit(&settled)?;
        println!("KVM: switchover {:.1} ms", report.switchover_ms);
    }
    Ok(())
}

#[test]
fn memory_in_clear_and_ipv6_and_both_families() -> anyhow::Result<()> {
    for (cipher, addresses) in [
        (Cipher::None, vec!["127.0.0.1"]),
        (Cipher::Aes256Gcm, vec!["::1"]),
        (Cipher::None, vec!["::1", "127.0.0.1"]),
    ] {
        let addresses = addresses
            .into_iter()
            .map(str::parse)
            .collect::<Result<Vec<_>, _>>()?;
        let pair = Pair::on(Accelerator::Tcg, addresses)?;
        pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
        wait_passes(&pair.a.ram_file()?, 1, LONG)?;
        let options = Options {
            cipher,
            ..Options::default()
        };
        let id = pair.begin(&pair.a, &pair.b, &options)?;
        let end = pair.conclude(Some(&id))?;
        anyhow::ensure!(end.settled.owner.name == pair.b.name);
        let report = end.report.ok_or_else(|| anyhow::anyhow!("no report"))?;
        anyhow::ensure!(report.encryption == cipher);
    }
    Ok(())
}

#[test]
fn ten_moves_of_an_idle_guest() -> anyhow::Result<()> {
    // So slow that it is idle: a page each few milliseconds.
    let pair = booted(&CounterSpec::flat(2).slowed(2_000_000), 128)?;
    let mut reports = Vec::new();
    for _ in 0..5 {
        for (from, to) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            reports.push(pair.migrate(from, to, &Options::default())?);
            let settled = pair.settle()?;
            pair.wait_confirmed(&settled)?;
        }
    }
    reports.sort_by(|a, b| a.switchover_ms.total_cmp(&b.switchover_ms));
    for (name, index) in [("min", 0), ("median", 5), ("max", 9)] {
        let report = &reports[index];
        println!(
            "{name:6} switchover {:6.1} ms {:?}",
            report.switchover_ms, report.switchover_parts_ms
        );
    }
    Ok(())
}

#[test]
fn a_vm_process_killed_ten_times_is_taken_over_and_the_guest_goes_on() -> anyhow::Result<()> {
    let pair = booted(&CounterSpec::flat(24), 32)?;
    let ram = pair.a.ram_file()?;
    let mut took = Vec::new();
    for _ in 0..10 {
        let pid = pair.a.vm()?.vm_process_pid;
        let before = wait_passes(&ram, 1, LONG)?;
        pair.a.signal_kill()?;
        let killed = Instant::now();
        loop {
            match pair.a.vm() {
                Ok(vm) if vm.vm_process_pid != pid && vm.state == VmState::Running => break,
                _ => anyhow::ensure!(killed.elapsed() < LONG, "not taken over"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        took.push(killed.elapsed());
        wait_passes(&ram, before + 1, LONG)?;
    }
    println!("takeovers: {took:?}");
    // A wait of ours, or one that grows with each death, would be in all of the last ones; a busy machine is not.
    let least = took.iter().skip(5).min().expect("ten");
    anyhow::ensure!(*least < Duration::from_secs(2), "{took:?}");
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.conclude(Some(&id))?;
    Ok(())
}
