//! What a migration says of itself while it moves, and what its report keeps of it however it ends.

use anyhow::Context as _;
use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_e2e::relay::Mode;
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::MigrationId;
use godwit_types::host_api::VmRequest;
use godwit_types::migration::{MigrationReport, MoveEvent, MoveEventKind, Outcome};
use godwit_types::vm::Accelerator;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
/// How often a report is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A pair whose migration is capped so that its first pass takes about ten seconds.
fn capped(options: Options) -> anyhow::Result<(Pair, MigrationId)> {
    capped_at(40, options)
}

fn capped_at(mbit_per_s: u64, options: Options) -> anyhow::Result<(Pair, MigrationId)> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.boot(&counter_vm(
        pair.dir(),
        &CounterSpec::flat(48).slowed(800_000),
        64,
    )?)?;
    wait_passes(&pair.a.ram_file()?, 0, LONG)?;
    let options = Options {
        max_bandwidth_mbit_per_s: Some(mbit_per_s),
        ..options
    };
    let id = pair.begin(&pair.a, &pair.b, &options)?;
    Ok((pair, id))
}

/// Looks at the source's report until it is as wanted.
fn until(
    pair: &Pair,
    id: &MigrationId,
    what: &str,
    wanted: impl Fn(&MigrationReport) -> bool,
) -> anyhow::Result<MigrationReport> {
    let deadline = Instant::now() + LONG;
    loop {
        let report = pair.a.report(id)?;
        if wanted(&report) {
            return Ok(report);
        }
        anyhow::ensure!(
            report.outcome.is_none() && Instant::now() < deadline,
            "never {what}: {report:?}"
        );
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The report of a migration that completed in spite of what happened to it, which its report tells with how long that
/// lasted.
fn completed_after(
    pair: &Pair,
    id: &MigrationId,
    kind: MoveEventKind,
    longer_than_s: f64,
) -> anyhow::Result<MigrationReport> {
    let report = pair.wait_end(&pair.a, id, LONG)?;
    anyhow::ensure!(
        report.outcome == Some(Outcome::Completed),
        "{:?}",
        report.reason
    );
    let lasted_s = event(&report, kind).and_then(|event| event.lasted_s);
    anyhow::ensure!(
        lasted_s.is_some_and(|s| s > longer_than_s),
        "{:?}",
        report.events
    );
    pair.conclude(Some(id))?;
    Ok(report)
}

fn ended(pair: &Pair, id: &MigrationId, request: &VmRequest) -> anyhow::Result<MigrationReport> {
    pair.a.ask(request)?;
    pair.wait_end(&pair.a, id, LONG)
}

#[test]
fn a_capped_move_shows_its_rate_its_bytes_and_its_pass_and_keeps_them_when_cancelled()
-> anyhow::Result<()> {
    let (pair, id) = capped(Options::default())?;
    let moves = |report: &MigrationReport| report.wire_bytes_per_s > 0.0 && report.pass.is_some();
    let early = until(&pair, &id, "a rate in the first pass", moves)?;
    let later = until(&pair, &id, "more bytes", |report| {
        report.bytes_on_wire > early.bytes_on_wire + (1 << 20)
    })?;
    anyhow::ensure!(later.iterations.is_empty() && later.pass_number() == 1);
    let pass = later.pass.unwrap_or_default();
    anyhow::ensure!(pass.number == 1 && pass.pages_sent > 0, "{pass:?}");
    anyhow::ensure!(later.throughput_gb_per_s > 0.0 && later.wire_bytes_per_s < 40e6);
    anyhow::ensure!(
        early.done_percent < 50.0 && later.done_percent >= early.done_percent,
        "{} %, then {} %",
        early.done_percent,
        later.done_percent
    );
    anyhow::ensure!((32 << 20..=64 << 20).contains(&later.content_bytes));
    let there = pair.b.report(&id)?;
    anyhow::ensure!(there.bytes_on_wire > 0 && there.wire_bytes_per_s > 0.0);
    let cancel = VmRequest::Cancel {
        migration: id.clone(),
        reason: "the test cancelled it".into(),
    };
    let report = ended(&pair, &id, &cancel)?;
    anyhow::ensure!(report.outcome == Some(Outcome::Cancelled));
    anyhow::ensure!(report.bytes_on_wire >= later.bytes_on_wire, "{report:?}");
    anyhow::ensure!(report.pass.is_some() && report.wire_bytes_per_s > 0.0);
    anyhow::ensure!(
        report
            .ended_unix_s
            .is_some_and(|at| at >= report.began_unix_s)
    );
    anyhow::ensure!(report.done_percent < 100.0, "{}", report.done_percent);
    pair.conclude(Some(&id))?;
    Ok(())
}

#[test]
fn a_forced_stop_in_a_move_is_told_as_powered_off_by_its_user() -> anyhow::Result<()> {
    let (pair, id) = capped(Options::default())?;
    until(&pair, &id, "under way", |report| report.pass.is_some())?;
    let report = ended(&pair, &id, &VmRequest::Stop { force: true })?;
    anyhow::ensure!(
        report.reason.as_deref() == Some("powered off by its user"),
        "{:?}",
        report.reason
    );
    let there = pair
        .wait_end(&pair.b, &id, LONG)?
        .reason
        .unwrap_or_default();
    anyhow::ensure!(there.contains("powered off by its user"), "{there}");
    Ok(())
}

/// It said yes, and the guest arrived and ran on.
#[test]
fn a_guest_that_is_still_coming_is_not_asked_to_power_off() -> anyhow::Result<()> {
    let (pair, id) = capped(Options::default())?;
    until(&pair, &id, "under way", |report| report.pass.is_some())?;
    let refused = pair.b.ask(&VmRequest::Stop { force: false });
    let refused = refused.err().map(|error| format!("{error:#}"));
    let refused = refused.unwrap_or_default();
    anyhow::ensure!(refused.contains("is just being received"), "{refused}");
    let report = ended(&pair, &id, &VmRequest::Stop { force: true })?;
    anyhow::ensure!(report.outcome.is_some());
    Ok(())
}

fn event(report: &MigrationReport, kind: MoveEventKind) -> Option<&MoveEvent> {
    report.events.iter().find(|event| event.kind == kind)
}

#[test]
fn a_link_that_was_lost_and_made_again_is_told_with_its_times() -> anyhow::Result<()> {
    let relayed = Options {
        relayed: true,
        ..Options::default()
    };
    let (pair, id) = capped(relayed)?;
    until(&pair, &id, "under way", |report| report.bytes_on_wire > 0)?;
    pair.link(Mode::Cut);
    let lost = until(&pair, &id, "lost", |report| {
        report.trouble_under_way().is_some()
    })?;
    let under_way = lost.trouble_under_way().cloned();
    let kind = under_way.as_ref().map(|event| event.kind);
    anyhow::ensure!(kind == Some(MoveEventKind::LinkLost), "{under_way:?}");
    pair.link(Mode::Open);
    let remade = until(&pair, &id, "made again", |report| {
        report.trouble_under_way().is_none() && report.pass.is_some()
    })?;
    anyhow::ensure!(remade.bytes_on_wire >= lost.bytes_on_wire);
    anyhow::ensure!(remade.done_percent >= lost.done_percent);
    let report = completed_after(&pair, &id, MoveEventKind::LinkLost, 0.0)?;
    anyhow::ensure!(report.done_percent == 100.0);
    Ok(())
}

#[test]
fn a_link_that_says_nothing_for_seconds_is_told_though_no_channel_was_lost() -> anyhow::Result<()> {
    let relayed = Options {
        relayed: true,
        ..Options::default()
    };
    // Under a lower cap the channels are allowed to be silent for nearly as long as it takes to lose the link.
    let (pair, id) = capped_at(160, relayed)?;
    pair.patience(LONG);
    until(&pair, &id, "under way", |report| report.bytes_on_wire > 0)?;
    pair.link(Mode::Stalled);
    let told = |report: &MigrationReport| event(report, MoveEventKind::LinkSilent).is_some();
    let silent = until(&pair, &id, "silent", told)?;
    pair.link(Mode::Open);
    let over = completed_after(&pair, &id, MoveEventKind::LinkSilent, 1.9);
    over.with_context(|| format!("before {:?}", silent.events))?;
    Ok(())
}

#[test]
fn a_switchover_that_was_called_off_is_told_with_how_long_the_guest_stood_still()
-> anyhow::Result<()> {
    let pair = Pair::new(Accelerator::Tcg)?;
    pair.patience(Duration::from_millis(500));
    pair.a.arm("source.stopped", "hold");
    pair.boot(&counter_vm(
        pair.dir(),
        &CounterSpec::flat(48).slowed(20_000),
        64,
    )?)?;
    wait_passes(&pair.a.ram_file()?, 0, LONG)?;
    let relayed = Options {
        relayed: true,
        ..Options::default()
    };
    let id = pair.begin(&pair.a, &pair.b, &relayed)?;
    pair.a.wait_fault(LONG)?;
    pair.link(Mode::Cut);
    pair.a.release()?;
    let told =
        |report: &MigrationReport| event(report, MoveEventKind::SwitchoverCalledOff).is_some();
    until(&pair, &id, "called off", told)?;
    pair.link(Mode::Open);
    completed_after(&pair, &id, MoveEventKind::SwitchoverCalledOff, 0.0).map(drop)
}
