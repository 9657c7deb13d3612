//! A move by the product that is cancelled in the middle: what the guest is worth afterwards.
//!
//! The guest steps as fast as it can, so that lost huge pages show. Owns the VM that it made, and removes it.

use crate::bench::{Run, unix_now};
use crate::godwit::{Vm, begin, retried};
use crate::guest::{self, Steps};
use crate::machine::warm_again;
use crate::memory::Memory;
use crate::row::Row;
use crate::stage::{SOON, Stage};
use crate::usage;
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::guest::checker;
use godwit_testkit::stage::{go_on, pause};
use serde_json::json;
use std::time::{Duration, Instant};

/// How long a speed is looked at.
const LOOK_FOR: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A guest that has just booted finds its speed first.
const SETTLE: Duration = Duration::from_secs(3);
/// When the guest is looked at after it was left alone, to the end of the look.
const SOONER: Duration = Duration::from_secs(10);
const LATER: Duration = Duration::from_secs(60);

/// Runs it and fills in the row.
pub fn run(stage: &Stage, run: &Run, encrypted: bool, row: &mut Row) -> Result<()> {
    let vm = Vm::start(stage, &run.name, run, run.boot)?;
    let memory = retried(|| Memory::of_file(&vm.ram("a")?))?;
    guest::get_ready(&run.cell.guest, &memory, run.seed)?;
    let machine = stage.machine("a")?;
    pause(SETTLE)?;
    let before = speed(&memory)?;
    let huge_before = usage::huge_mapped_mib(machine);
    let first_touch = warm_again(run.cell.ram_mib)?;
    let id = begin(stage, &vm, encrypted, false)?;
    let show = ["migration", "show", &id];
    stage.until("the migration sends memory", SOON, || {
        Ok(stage.json("controller", &show)?["phase"] == "precopy")
    })?;
    let during = speed(&memory)?;
    let huge_during = usage::huge_mapped_mib(machine);
    stage.ok("controller", &["migration", "cancel", &id])?;
    stage.until("the migration has ended", SOON, || {
        Ok(!stage.json("controller", &show)?["outcome"].is_null())
    })?;
    let ended = Instant::now();
    let report = stage.json("controller", &show)?;
    ensure!(
        report["outcome"] == "cancelled",
        "it was not cancelled in time: it {}",
        report["outcome"]
    );
    let mut after = Vec::new();
    for moment in [SOONER, LATER] {
        pause((moment - LOOK_FOR).saturating_sub(ended.elapsed()))?;
        after.push((speed(&memory)?, usage::huge_mapped_mib(machine)));
    }
    vm.pause()?;
    let checked = checker::check(&memory);
    row.ram_equal = Some(checked.is_ok_and(|checked| checked.control.boots == 1));
    row.guest_speed_during = Some(during / before);
    row.first_touch_gb_per_s = Some(first_touch.warm);
    row.streams = report["streams"].as_u64().unwrap_or(0) as u32;
    let mib_per_s = |pages_per_s: f64| (pages_per_s / 2.56).round() / 100.0;
    row.details = json!({
        "report": report,
        "guest_speed_after_10_s": after[0].0 / before,
        "guest_speed_after": after[1].0 / before,
        "steps_mib_per_s": {
            "before": mib_per_s(before), "during": mib_per_s(during),
            "after_10_s": mib_per_s(after[0].0), "after_60_s": mib_per_s(after[1].0),
        },
        "huge_mapped_mib": {
            "before": huge_before, "during": huge_during, "after_10_s": after[0].1, "after_60_s": after[1].1,
        },
        "ram_checked": {"compared": "every counted page of the guest that stayed, for lost and stale steps"},
    });
    Ok(())
}

/// Pages a second.
fn speed(memory: &Memory) -> Result<f64> {
    let mut steps = Steps::default();
    let until = Instant::now() + LOOK_FOR;
    while Instant::now() < until {
        go_on()?;
        steps.look(memory, unix_now());
        std::thread::sleep(LOOK_EVERY);
    }
    let rate = steps.rate(0.0, unix_now());
    let rate = rate.context("the guest was not seen to step")?;
    ensure!(rate > 0.0, "the guest did not step");
    Ok(rate)
}
