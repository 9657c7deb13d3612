//! kill -9 of either VM process and of either QEMU at every step of a migration.
//!
//! Whatever is killed: one host runs the guest, no page is lost, nothing is left at the other, the report says what
//! happened, and the guest moves once more.

use godwit_e2e::guests::{counter_vm, wait_passes};
use godwit_e2e::pair::{Options, Pair};
use godwit_testkit::guest::counter::CounterSpec;
use godwit_types::vm::Accelerator;
use std::time::{Duration, Instant};

/// Steps of the source.
const SOURCE: [&str; 18] = [
    "source.setup",
    "source.connected",
    "source.tracking",
    "source.pass",
    "source.barrier",
    "journal.stopping.before",
    "journal.stopping.after",
    "source.stopped",
    "source.last-pages",
    "source.device-state",
    "source.device-state-sent",
    "journal.gave.before",
    "journal.gave.after",
    "source.permit.before",
    "source.permit.after",
    "journal.moved.before",
    "journal.moved.after",
    "running",
];

/// Steps of the destination.
const DESTINATION: [&str; 17] = [
    "journal.incoming.before",
    "journal.incoming.after",
    "qemu.started",
    "destination.prepared",
    "destination.apply",
    "destination.receiving",
    "destination.state-comes",
    "destination.state-whole",
    "destination.loading",
    "destination.loaded",
    "journal.ready.before",
    "journal.ready.after",
    "destination.permit",
    "journal.holds.before",
    "journal.holds.after",
    "running",
    "destination.holding.before",
];

/// Where the guest must be afterwards; `None`: either is right.
fn expected(point: &str, victim: &str, at_source: bool) -> Option<&'static str> {
    let late = [
        "journal.gave.after",
        "source.permit.before",
        "source.permit.after",
        "journal.moved.before",
        "journal.moved.after",
        "destination.permit",
        "journal.holds.before",
        "journal.holds.after",
        "running",
        "destination.holding.before",
    ];
    match (point, victim, at_source) {
        // The boot at a, before any migration; it goes on to b.
        ("running", "kill", true) => None,
        // The destination has the whole state and may be given the guest.
        ("source.device-state-sent", "kill-qemu", true) => None,
        // Refused durably, since its QEMU is gone before it holds.
        (
            "destination.permit" | "journal.holds.before" | "journal.holds.after" | "running",
            "kill-qemu",
            false,
        ) => None,
        // The promise is durable or not; a's patience is 500 ms.
        ("journal.ready.before" | "journal.ready.after" | "destination.loaded", _, false) => None,
        (point, _, _) if late.contains(&point) => Some("b"),
        _ => Some("a"),
    }
}

fn case(point: &'static str, victim: &'static str, at_source: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let pair = Pair::new(Accelerator::Tcg)?;
    let summary = kill_once(&pair, point, victim, at_source)?;
    println!("{summary}, {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

fn kill_once(
    pair: &Pair,
    point: &'static str,
    victim: &'static str,
    at_source: bool,
) -> anyhow::Result<String> {
    let host = if at_source { &pair.a } else { &pair.b };
    host.arm(point, victim);
    pair.boot(&counter_vm(pair.dir(), &CounterSpec::flat(24), 32)?)?;
    let at_boot = point == "running" && at_source;
    if !at_boot {
        wait_passes(&pair.a.ram_file()?, 1, Duration::from_secs(60))?;
    }
    let (id, begun) = pair.try_begin(&pair.a, &pair.b, &Options::default())?;
    host.wait_fault(Duration::from_secs(60))?;
    let conclusion = pair.conclude(begun.is_ok().then_some(&id))?;
    let owner = conclusion.settled.owner.name.to_string();
    if let Some(expected) = expected(point, victim, at_source) {
        anyhow::ensure!(
            owner == expected,
            "the guest is on {owner}, not on {expected}"
        );
    }
    anyhow::ensure!(
        victim == "kill-qemu" || !conclusion.settled.lost,
        "the guest was lost though its QEMU was not killed"
    );
    let side = if at_source { "source" } else { "destination" };
    let outcome = conclusion.report.and_then(|report| report.outcome);
    Ok(format!(
        "{victim:9} {side:11} at {point:26} -> {owner}, {outcome:?}"
    ))
}

fn cases(points: &[&'static str], victim: &'static str, at_source: bool) {
    let only = std::env::var("GODWIT_POINT").ok();
    let points = points
        .iter()
        .filter(|point| only.as_deref().is_none_or(|only| only == **point));
    let failed: Vec<String> = points
        .filter_map(|point| {
            let result = case(point, victim, at_source);
            result.err().map(|error| format!("{point}: {error:?}"))
        })
        .collect();
    assert!(
        failed.is_empty(),
        "{} failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

#[test]
fn the_source_process_killed_at_every_step() {
    cases(&SOURCE[..17], "kill", true);
}

#[test]
fn the_destination_process_killed_at_every_step() {
    cases(&DESTINATION, "kill", false);
}

#[test]
fn the_source_qemu_killed_at_every_phase() {
    let phases = [
        "source.setup",
        "source.tracking",
        "source.pass",
        "journal.stopping.after",
        "source.stopped",
        "source.last-pages",
        "source.device-state-sent",
        "journal.gave.after",
        "source.permit.after",
    ];
    cases(&phases, "kill-qemu", true);
}

#[test]
fn the_destination_qemu_killed_at_every_phase() {
    let phases = [
        "destination.prepared",
        "destination.receiving",
        "destination.loading",
        "destination.loaded",
        "journal.ready.after",
        "destination.permit",
        "journal.holds.after",
        "running",
    ];
    cases(&phases, "kill-qemu", false);
}
