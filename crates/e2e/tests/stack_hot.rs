//! Guests that outrun their link, moved by the whole product: what slows them must work where the product runs.

use anyhow::{Context as _, Result, ensure};
use godwit_e2e::guests::{MIB, Pace, Written, calibrate};
use godwit_e2e::stack::{Counter, LONG, Plan, Stack};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Cases to measure instead of the usual ones: caps in Mbit/s and multiples of them, "100:1,2,3,5;400:1,2,3".
const CASES: &str = "GODWIT_HOT_CASES";
const RUNS: &str = "GODWIT_HOT_RUNS";
const CASES_USUAL: &str = "100:2.85";

/// Waits for the end; the report, and what the guest wrote per second from its second iteration until it was stopped.
fn watch(stack: &Stack, id: &str, pace: &Pace) -> Result<(Value, f64)> {
    let deadline = Instant::now() + LONG;
    let mut written = Written::default();
    loop {
        let report = stack.migration(id)?;
        if !report["outcome"].is_null() && report["outcome"] != "in-doubt" {
            return Ok((report, written.mib_per_s()));
        }
        let second = report["iterations"]
            .as_array()
            .is_some_and(|all| !all.is_empty());
        if report["phase"] == "precopy" && second {
            written.look(pace)?;
        }
        ensure!(Instant::now() < deadline, "no end: {report}");
        // Reports are asked for; there is nothing to wait on.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Moves a guest that writes so many times what a cap carries.
fn case(stack: &Stack, at: &mut &'static str, cap_mbit: f64, links: f64) -> Result<()> {
    let to = if *at == "a" { "b" } else { "a" };
    let cap_mib = cap_mbit * 1e6 / 8.0 / MIB;
    let ram = stack.ram_file("hot", at)?;
    let own = calibrate(&ram, links * cap_mib)?;
    let cap = format!("{cap_mbit}");
    let id = stack.begin(
        "hot",
        to,
        &["--max-bandwidth", &cap, "--max-downtime", "300"],
    )?;
    let (report, during) = watch(stack, &id, &Pace::of(&ram)?)?;
    let number = |name: &str| report[name].as_f64().context("no number");
    println!(
        "cap {cap_mib:.1} MiB/s, guest {own:.1} ({:.2} x), in precopy {during:.1} ({:.2} of the least of both): {} after {:.1} s, {} iterations, paused {:.0} ms, lowest speed {} %, notes {} {}",
        own / cap_mib,
        during / own.min(cap_mib),
        report["outcome"],
        number("total_s")?,
        report["iterations"].as_array().map_or(0, Vec::len),
        number("switchover_ms")?,
        report["guest_speed_percent"],
        report["notes"],
        report["reason"]
    );
    ensure!(report["outcome"] == "completed", "{report:#}");
    let unslowed = report["notes"].to_string().contains("could not be slowed");
    ensure!(!unslowed, "{}", report["notes"]);
    if own > 1.5 * cap_mib {
        ensure!(
            number("guest_speed_percent")? < 100.0,
            "never slowed: {report:#}"
        );
    }
    stack.runs_on("hot", to)?;
    *at = to;
    Ok(())
}

#[test]
fn a_guest_that_outruns_a_small_link_is_slowed_where_the_product_runs() -> Result<()> {
    let stack = Stack::new("hot", &Plan::default())?;
    stack.start_counter(&Counter::flat("hot", 32).slowed(20_000), "a")?;
    stack.wait_passes("hot", "a", 1)?;
    let cases = std::env::var(CASES).unwrap_or_else(|_| CASES_USUAL.into());
    let runs = std::env::var(RUNS).map_or(Ok(1), |text| text.parse())?;
    let mut at = "a";
    for _ in 0..runs {
        for line in cases.split(';') {
            let (cap, multiples) = line.split_once(':').context("no cap")?;
            for links in multiples.split(',') {
                case(&stack, &mut at, cap.parse()?, links.parse()?)?;
            }
        }
    }
    stack.check_guest("hot", at).map(drop)
}
