//! What people and circumstances ask of a migration: cancel, deadlines, caps, promises, and hosts that cannot.

use godwit_e2e::Host;
use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::small_ram::SmallRam;
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{MigrationReport, Outcome};
use godwit_types::vm::Accelerator;
use godwit_types::{ApiError, ErrorCode, MigrationId};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

fn boot(pair: &Pair, guest: &CounterSpec) -> anyhow::Result<()> {
    pair.boot(&counter_vm(pair.dir(), guest, 64)?)?;
    wait_passes(&pair.a.ram_file()?, 1, LONG)?;
    Ok(())
}

fn cancel(host: &Host, id: &MigrationId) -> anyhow::Result<()> {
    let request = VmRequest::Cancel {
        migration: id.clone(),
        reason: "the test cancelled it".into(),
    };
    host.ask(&request).map(drop)
}

/// Waits until the VM process is waiting for its held driver, which shows by its silence.
fn wait_busy(host: &Host) -> anyhow::Result<()> {
    let deadline = Instant::now() + LONG;
    let short = Duration::from_secs(1);
    while host.ask_within(&VmRequest::Status, short).is_ok() {
        anyhow::ensure!(Instant::now() < deadline, "the cancel is not taken up");
    }
    Ok(())
}

/// The guest stays at a, with this outcome; the reason is given.
fn stays(pair: &Pair, id: &MigrationId, outcome: Outcome) -> anyhow::Result<MigrationReport> {
    let end = pair.conclude(Some(id))?;
    anyhow::ensure!(end.settled.owner.name == pair.a.name, "the guest left a");
    let report = end.report.ok_or_else(|| anyhow::anyhow!("no report"))?;
    anyhow::ensure!(
        report.outcome == Some(outcome),
        "{:?}: {:?}",
        report.outcome,
        report.reason
    );
    Ok(report)
}

/// Where the destination's driver hears why it is over while the test holds the migration.
const TOLD: [&str; 3] = ["source.pass", "source.last-pages", "journal.ready.before"];

/// Cancelled while held: at the driver's points the VM's own thread still listens.
fn cancelled_at(at_source: bool, point: &'static str) -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let host = if at_source { &pair.a } else { &pair.b };
    host.arm(point, "hold");
    if !at_source {
        // What the source does with its channels before the guest runs again comes first.
        pair.a.arm("running", "slow");
    }
    boot(&pair, &CounterSpec::flat(48))?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    host.wait_fault(LONG)?;
    if at_source {
        // A driver that is held here ends only when it is released; until then the cancel is not answered.
        let (source, wanted) = (Arc::clone(&pair.a), id.clone());
        let cancelling = std::thread::spawn(move || cancel(&source, &wanted));
        wait_busy(&pair.a)?;
        host.release()?;
        cancelling
            .join()
            .map_err(|_| anyhow::anyhow!("panicked"))??;
    } else {
        cancel(&pair.a, &id)?;
        host.release()?;
    }
    let report = stays(&pair, &id, Outcome::Cancelled)?;
    anyhow::ensure!(
        report.reason.as_deref() == Some("the test cancelled it"),
        "{:?}",
        report.reason
    );
    if TOLD.contains(&point) {
        let there = pair.wait_end(&pair.b, &id, LONG)?;
        anyhow::ensure!(
            (there.outcome, there.reason.as_deref())
                == (Some(Outcome::Cancelled), Some("the test cancelled it")),
            "the destination reports {:?}: {:?}",
            there.outcome,
            there.reason
        );
    }
    Ok(())
}

#[test]
fn cancel_in_setup() -> anyhow::Result<()> {
    cancelled_at(true, "source.setup")
}

#[test]
fn cancel_in_precopy() -> anyhow::Result<()> {
    cancelled_at(true, "source.pass")
}

#[test]
fn cancel_while_the_last_pages_are_sent() -> anyhow::Result<()> {
    cancelled_at(true, "source.last-pages")
}

#[test]
fn cancel_while_device_state_is_saved() -> anyhow::Result<()> {
    cancelled_at(true, "source.device-state")
}

#[test]
fn cancel_while_the_destination_loads() -> anyhow::Result<()> {
    cancelled_at(false, "destination.loaded")
}

#[test]
fn cancel_while_the_destination_promises() -> anyhow::Result<()> {
    cancelled_at(false, "journal.ready.before")
}

#[test]
fn cancel_after_the_permit_is_refused() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.b.arm("journal.holds.before", "hold");
    boot(&pair, &CounterSpec::flat(24))?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.b.wait_fault(LONG)?;
    let refused = cancel(&pair.a, &id).err().map(|error| error.to_string());
    pair.b.release()?;
    let refused = refused.ok_or_else(|| anyhow::anyhow!("the cancel was accepted"))?;
    anyhow::ensure!(refused.contains("too late"), "{refused}");
    let end = pair.conclude(Some(&id))?;
    anyhow::ensure!(end.settled.owner.name == pair.b.name);
    Ok(())
}

#[test]
fn a_deadline_that_passes_cancels() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair, &CounterSpec::flat(48))?;
    let options = Options {
        deadline_s: Some(1),
        max_bandwidth_mbit_per_s: Some(20),
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    pair.wait_end(&pair.a, &id, LONG)?;
    let report = stays(&pair, &id, Outcome::Cancelled)?;
    // One pass takes 20 s at this rate.
    anyhow::ensure!(report.iterations.is_empty(), "{:?}", report.iterations);
    anyhow::ensure!(
        report
            .reason
            .is_some_and(|reason| reason.contains("deadline"))
    );
    Ok(())
}

#[test]
fn a_cap_is_kept() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair, &CounterSpec::flat(48).slowed(20_000))?;
    let options = Options {
        max_bandwidth_mbit_per_s: Some(200),
        max_downtime_ms: 500,
        ..Options::default()
    };
    let report = pair.migrate(&pair.a, &pair.b, &options)?;
    let first = report
        .iterations
        .first()
        .ok_or_else(|| anyhow::anyhow!("no iteration"))?;
    let mbit_per_s = first.bytes as f64 * 8e-6 / first.seconds;
    println!(
        "capped at 200 Mb/s: {mbit_per_s:.0} Mb/s over {:.2} s",
        first.seconds
    );
    anyhow::ensure!(mbit_per_s < 220.0, "{mbit_per_s} Mb/s");
    anyhow::ensure!(first.limited_by == godwit_types::migration::LimitedBy::Cap);
    Ok(())
}

#[test]
fn a_promise_is_flagged_as_kept_or_missed() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair, &CounterSpec::flat(2).slowed(20_000))?;
    for (max_downtime_ms, kept) in [(60_000, true), (0, false)] {
        let options = Options {
            max_downtime_ms,
            ..Options::default()
        };
        let settled = pair.settle()?;
        pair.wait_confirmed(&settled)?;
        let report = pair.migrate(&settled.owner, &settled.other, &options)?;
        anyhow::ensure!(report.switchover_ms > 0.0);
        anyhow::ensure!(
            report.promise.kept == kept,
            "{:?} {}",
            report.promise,
            report.switchover_ms
        );
    }
    Ok(())
}

#[test]
fn a_wrong_key_ends_it_and_strangers_are_named() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair, &CounterSpec::flat(24))?;
    let options = Options {
        wrong_key: true,
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    let report = stays(&pair, &id, Outcome::Failed)?;
    println!("wrong key: {:?}", report.reason);
    Ok(())
}

#[test]
fn a_port_range_in_use_is_refused_by_name() -> anyhow::Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port();
    let pair = Pair::with_ports("127.0.0.1".parse()?, (port, port))?;
    boot(&pair, &CounterSpec::flat(24))?;
    let (_, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
    let error = begun.err().ok_or_else(|| anyhow::anyhow!("it began"))?;
    let error = error.downcast::<ApiError>()?;
    anyhow::ensure!(error.code == ErrorCode::PortInUse, "{error:?}");
    drop(taken);
    pair.conclude(None)?;
    Ok(())
}

/// Found at start, not by the first migration.
#[test]
fn a_qemu_that_loses_its_preloaded_library_is_refused_at_start() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let mut qemu = pair.a.qemu.lock().unwrap_or_else(PoisonError::into_inner);
    let script = pair.dir().join("qemu-wrapper");
    let text = format!(
        "#!/bin/sh\nunset LD_PRELOAD\nexec {} \"$@\"\n",
        qemu.display()
    );
    std::fs::write(&script, text)?;
    std::fs::set_permissions(&script, Permissions::from_mode(0o755))?;
    *qemu = script;
    drop(qemu);
    let spec = counter_vm(pair.dir(), &CounterSpec::flat(24), 64)?;
    let refused = match pair.boot(&spec) {
        Ok(()) => anyhow::bail!("the guest runs, and could never be migrated"),
        Err(error) => format!("{error:#}"),
    };
    anyhow::ensure!(refused.contains("without the library"), "{refused}");
    anyhow::ensure!(
        pair.a.vm()?.qemu_pid.is_none(),
        "its QEMU was left: {refused}"
    );
    Ok(())
}

#[test]
fn a_destination_out_of_memory_gives_up_and_the_guest_stays() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let small = SmallRam::over(pair.b.ram_dir(), "8m")?;
    boot(&pair, &CounterSpec::flat(48))?;
    let (id, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
    if begun.is_ok() {
        let report = pair.wait_end(&pair.a, &id, LONG)?;
        println!("out of memory: {:?}", report.reason);
        anyhow::ensure!(report.outcome == Some(Outcome::Failed));
        anyhow::ensure!(
            report
                .reason
                .is_some_and(|reason| reason.contains("memory"))
        );
    }
    pair.settle()?;
    drop(small);
    pair.conclude(begun.is_ok().then_some(&id))?;
    Ok(())
}

/// The channels of a destination that fails stay open until it has said why.
#[test]
fn a_destination_that_is_slow_to_say_why_it_failed_is_no_lost_link() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    let small = SmallRam::over(pair.b.ram_dir(), "8m")?;
    pair.b.arm("destination.giving-up", "hold");
    boot(&pair, &CounterSpec::flat(48))?;
    let (id, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
    begun?;
    pair.b.wait_fault(LONG)?;
    // Time in which a closed channel would be noticed; nothing is waited for.
    std::thread::sleep(std::time::Duration::from_millis(300));
    anyhow::ensure!(pair.a.report(&id)?.outcome.is_none());
    pair.b.release()?;
    let report = pair.wait_end(&pair.a, &id, LONG)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Failed));
    let reason = report.reason.unwrap_or_default();
    anyhow::ensure!(reason.contains("memory"), "{reason}");
    pair.settle()?;
    drop(small);
    pair.conclude(Some(&id))?;
    Ok(())
}

#[test]
fn a_destination_whose_journal_cannot_be_written_is_named_by_both_hosts() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.b.arm("journal.ready.before", "hold");
    boot(&pair, &CounterSpec::flat(24))?;
    let id = pair.begin(&pair.a, &pair.b, &Options::default())?;
    pair.b.wait_fault(LONG)?;
    // Where the next record is prepared stands a directory: as good as a full disk.
    let in_the_way = pair.b.state_dir().join("ownership.new");
    std::fs::create_dir(&in_the_way)?;
    pair.b.release()?;
    for host in [&pair.a, &pair.b] {
        let report = pair.wait_end(host, &id, LONG)?;
        let reason = report.reason.unwrap_or_default();
        anyhow::ensure!(
            report.outcome == Some(Outcome::Failed) && reason.contains("ownership.new"),
            "host {} says {:?}: {reason}",
            host.name,
            report.outcome
        );
    }
    std::fs::remove_dir(&in_the_way)?;
    stays(&pair, &id, Outcome::Failed)?;
    Ok(())
}

#[test]
fn a_cancel_that_comes_before_the_migration_holds() -> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    boot(&pair, &CounterSpec::flat(24))?;
    let first = MigrationId::new("m0")?;
    cancel(&pair.a, &first)?;
    let (id, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
    anyhow::ensure!(id == first);
    let refused = begun
        .err()
        .map(|error| error.to_string())
        .unwrap_or_default();
    anyhow::ensure!(refused.contains("it was cancelled"), "{refused}");
    anyhow::ensure!(pair.a.vm()?.migration.is_none());
    // The destination was prepared before the source refused, waits in vain, and asks.
    let report = pair.wait_end(&pair.b, &first, LONG)?;
    anyhow::ensure!(
        report.reason.as_deref() == Some("the source did not begin the migration"),
        "{:?}",
        report.reason
    );
    pair.conclude(None)?;
    Ok(())
}
