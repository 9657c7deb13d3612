//! Several moves by the product at the same time, over one link: how it is shared, and whether the guests go on.
//!
//! Owns the VMs that it made, and removes them. A cost for each move cannot be told, since one agent serves all.

use crate::bench::{Moved, Run, unix_now};
use crate::courses::jain_index;
use crate::godwit::{Arrival, Vm, begin, finished, retried, why};
use crate::guest::{self, Steps};
use crate::machine::{FirstTouch, warm_again};
use crate::memory::Memory;
use crate::stage::{SOON, Stage};
use anyhow::Result;
use godwit_testkit::qmp::Qmp;
use serde_json::{Value, json};
use std::time::Instant;

/// Memory differs from guest to guest, so that none could be taken for another.
const SEED_STEP: u64 = 1 << 32;

struct Mover<'a> {
    vm: Vm<'a>,
    memory: Memory,
    monitor: Qmp,
}

struct Under {
    id: String,
    began: f64,
    arrival: Arrival,
}

/// Moves so many guests to host b, as soon after each other as they can be asked for; none when the limit passes.
pub fn run(stage: &Stage, run: &Run, encrypted: bool, moves: u32) -> Result<Option<Vec<Moved>>> {
    let mut movers = Vec::new();
    for index in 0..moves {
        movers.push(make(stage, run, index)?);
    }
    let first_touch = warm_again(run.cell.ram_mib * moves)?;
    let mut under = Vec::new();
    for mover in &movers {
        match start(stage, run, mover, encrypted) {
            Ok(one) => under.push(one),
            Err(error) => {
                under.into_iter().for_each(|one| one.arrival.give_up());
                return Err(error);
            }
        }
    }
    let limit = Instant::now() + run.limit;
    let mut moments = Vec::new();
    let mut failed = None;
    for (mover, one) in movers.iter_mut().zip(under) {
        let stop = match mover.monitor.moment_of("STOP", limit) {
            Ok(Some(stop)) => stop,
            other => {
                one.arrival.give_up();
                failed = failed.or(other.err().map(|error| why(stage, &one.id, error)));
                continue;
            }
        };
        match one.arrival.moment() {
            Ok(Some(resume)) => moments.push((one.id, one.began, stop, resume)),
            Ok(None) => {}
            Err(error) => failed = failed.or(Some(why(stage, &one.id, error))),
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    if moments.len() < movers.len() {
        return Ok(None);
    }
    let mut all = finish(stage, run, &movers, &moments)?;
    all.iter_mut()
        .for_each(|moved| moved.first_touch = first_touch);
    Ok(Some(all))
}

fn make<'a>(stage: &'a Stage, run: &Run, index: u32) -> Result<Mover<'a>> {
    let vm = Vm::start(stage, &format!("{}-{index}", run.name), run, run.boot)?;
    let memory = retried(|| Memory::of_file(&vm.ram("a")?))?;
    let seed = run.seed + u64::from(index) * SEED_STEP;
    guest::get_ready(&run.cell.guest, &memory, seed)?;
    let monitor = Qmp::connect(&vm.monitor("a")?, Instant::now() + SOON)?;
    Ok(Mover {
        vm,
        memory,
        monitor,
    })
}

fn start(stage: &Stage, run: &Run, mover: &Mover, encrypted: bool) -> Result<Under> {
    let arrival = Arrival::watch(mover.vm.sockets("b")?, Instant::now() + run.limit);
    let began = unix_now();
    let begun = begin(stage, &mover.vm, encrypted, false);
    let (id, arrival) = arrival.unless(begun)?;
    Ok(Under { id, began, arrival })
}

fn finish(
    stage: &Stage,
    run: &Run,
    movers: &[Mover],
    moments: &[(String, f64, f64, f64)],
) -> Result<Vec<Moved>> {
    let gb = f64::from(run.cell.ram_mib) * 1.048_576e-3;
    let speeds: Vec<f64> = moments
        .iter()
        .map(|(_, began, _, resume)| gb / (resume - began))
        .collect();
    let index = jain_index(&speeds);
    let mut all = Vec::new();
    for (mover, (id, began, stop, resume)) in movers.iter().zip(moments) {
        let report = finished(stage, id)?;
        let alive = mover.vm.runs_on("b")?;
        let destination = Memory::of_file(&mover.vm.ram("b")?)?;
        mover.vm.pause()?;
        let (equal, checked) = guest::check(run.cell, &mover.memory, &destination)?;
        all.push(Moved {
            began: *began,
            stop: *stop,
            resume: *resume,
            prepare_s: 0.0,
            streams: report["streams"].as_u64().unwrap_or(0) as u32,
            usage: Vec::new(),
            steps: Steps::default(),
            first_touch: FirstTouch::default(),
            equal,
            guest_memory_counted: false,
            details: json!({
                "report": report, "ram_checked": checked, "client": Value::Null, "jain_index": index,
                "moves": movers.len(), "guest_alive": alive,
            }),
        });
    }
    Ok(all)
}
