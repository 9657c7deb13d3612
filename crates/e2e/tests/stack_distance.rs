//! Links between the hosts that are long, lose packets, or are cut and come back.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::stack::{Counter, Plan, Stack};
use std::time::{Duration, Instant};

/// How long the link is cut, s; 30 to see what is promised of a real cut.
const CUT_S: &str = "GODWIT_CUT_S";
const CUT_S_USUAL: u64 = 9;

fn stack(name: &str, link: &str) -> Result<Stack> {
    Stack::new(
        name,
        &Plan {
            link: Some(link.parse()?),
            ..Plan::default()
        },
    )
}

#[test]
fn a_long_link_with_loss_is_used_by_several_streams() -> Result<()> {
    let stack = stack("far", "rtt=100ms,rate=200mbit,queue=50ms,loss=0.1%")?;
    stack.start_counter(&Counter::flat("far", 64).slowed(800_000), "a")?;
    let report = stack.migrate("far", "b", &[])?;
    println!(
        "  {} streams, {:.1} s, switchover {:.0} ms, notes {}",
        report["streams"],
        report["total_s"].as_f64().context("no time")?,
        report["switchover_ms"].as_f64().context("no pause")?,
        report["notes"]
    );
    let streams = report["streams"].as_u64().context("no streams")?;
    ensure!(streams >= 8, "{report}");
    stack.runs_on("far", "b")?;
    stack.check_guest("far", "b").map(drop)
}

#[test]
fn a_link_cut_in_precopy_costs_the_cut_and_not_the_migration() -> Result<()> {
    let stack = stack("cut", "rtt=5ms,rate=400mbit,queue=50ms")?;
    let seconds = match std::env::var(CUT_S) {
        Ok(text) => text.parse()?,
        Err(_) => CUT_S_USUAL,
    };
    stack.start_counter(&Counter::flat("cut", 64).slowed(800_000), "a")?;
    let id = stack.begin("cut", "b", &["--max-bandwidth", "40"])?;
    stack.wait_precopy(&id)?;
    let link = stack.lab.link(0)?;
    link.cut()?;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(seconds) {
        stack.wait_counts("cut", "a")?;
    }
    link.heal()?;
    let (cut, healed) = (began.elapsed(), Instant::now());
    let report = stack.completed(&id)?;
    println!(
        "  cut for {:.1} s: done {:.1} s after it healed, {:.1} s in all",
        cut.as_secs_f64(),
        healed.elapsed().as_secs_f64(),
        report["total_s"].as_f64().context("no time")?
    );
    stack.runs_on("cut", "b")?;
    stack.check_guest("cut", "b").map(drop)
}
