//! The run of a plan: cell by cell, the systems of a cell taking turns, a row after each run.
//!
//! Owns the stage that is up and the results, which are written after every row, so that an end at any moment leaves
//! what there is. A run that goes wrong is a row that says so. Refuses: to start without root.

use crate::client::Client;
use crate::group::is_ours;
use crate::guest::{self, Boot, Spins, Steps};
use crate::machine::{CpuTime, FirstTouch};
use crate::memory::Memory;
use crate::peer::Programs;
use crate::plan::{CUT_OFF_FACTOR, Cell, Course, Guest};
use crate::row::{CUT_OFF, Measured as _, Results, Row};
use crate::stage::Stage;
use crate::system::System;
use crate::usage::Usage;
use crate::{at_once, cancelled, courses, godwit, limits, machine, peer};
use anyhow::{Context as _, Result, bail};
use godwit_testkit::interrupt;
use godwit_testkit::stage::go_on;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest that our own move may take, and a peer's where ours did not end.
const OWN_LIMIT: Duration = Duration::from_secs(300);
/// A peer is never cut off before this: its start alone takes a part of it.
const LIMIT_MIN: Duration = Duration::from_secs(10);
/// How long a counter guest's speed is looked at before and after.
const LOOK_FOR: Duration = Duration::from_secs(2);
const BYTES_PER_MIB: f64 = 1_048_576.0;
/// A run in which the hypervisor takes more than this part of all cores' time shows the hypervisor.
const STOLEN_MAX: f64 = 0.1;
/// So often such a run is made again.
const DISTURBED_MAX: u32 = 2;

/// Longest pause that all systems are asked for, in ms: the peers' downtime limit.
pub const MAX_DOWNTIME_MS: u64 = 50;

pub struct Run<'a> {
    pub cell: &'a Cell,
    pub boot: &'a Boot,
    /// A name for files and machines.
    pub name: String,
    /// Longest that the move may take.
    pub limit: Duration,
    /// What the guest's random data begin with.
    pub seed: u64,
}

/// What a move left to be made a row of.
pub struct Moved {
    /// When the command was given, seconds since 1970, as all moments.
    pub began: f64,
    /// STOP at the source.
    pub stop: f64,
    /// RESUME at the destination.
    pub resume: f64,
    pub prepare_s: f64,
    pub streams: u32,
    /// What host a and host b spent.
    pub usage: Vec<Usage>,
    /// A counter guest's course.
    pub steps: Steps,
    /// How fast memory came right before.
    pub first_touch: FirstTouch,
    pub equal: bool,
    /// Whether the usage holds the guest's memory too.
    pub guest_memory_counted: bool,
    pub details: Value,
}

pub enum Ended {
    /// The guest runs at the destination.
    Moved(Box<Moved>),
    /// It took too long.
    CutOff,
    /// It cannot be run here: why.
    Skipped(String),
}

impl Run<'_> {
    /// Waits until the guest is up and has its data; the Redis guest is under load then.
    pub fn begin_guest(&self, stage: &Stage, memory: &Memory) -> Result<Option<Client>> {
        if let Guest::Redis { .. } = self.cell.guest {
            return Client::begin(stage, &self.cell.guest).map(Some);
        }
        guest::get_ready(&self.cell.guest, memory, self.seed)?;
        Ok(None)
    }

    /// What becomes of the guest after it has arrived: its client reads everything back, or it is stopped and its memory is
    /// compared with the source's. Gives whether all is equal, what was compared, and what the client saw.
    pub fn check(
        &self,
        client: Option<Client>,
        (began, resume): (f64, f64),
        (source, destination): (&Memory, &Memory),
        stop: impl FnOnce() -> Result<()>,
    ) -> Result<(bool, Value, Value)> {
        if let Some(client) = client {
            return client.end(began, resume);
        }
        stop()?;
        let (equal, checked) = guest::check(self.cell, source, destination)?;
        Ok((equal, checked, Value::Null))
    }

    /// Looks at a counter guest's speed for a while, before it is moved or after.
    pub fn watch(&self, memory: &Memory, steps: &mut Steps) -> Result<()> {
        if !matches!(self.cell.guest, Guest::Counter { .. }) {
            return Ok(());
        }
        let until = Instant::now() + LOOK_FOR;
        while Instant::now() < until {
            go_on()?;
            steps.look(memory, unix_now());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

/// Seconds since 1970 by the clock that QEMU stamps its events with.
pub fn unix_now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

pub struct Bench {
    bin: PathBuf,
    out: PathBuf,
    guests: PathBuf,
    programs: Programs,
    results: Results,
    stage: Option<Stage>,
    spins: Option<Spins>,
    bare_s: HashMap<(&'static str, bool), f64>,
    count: u32,
    call_unix_s: u64,
}

impl Bench {
    /// Prepares the directories. Runs that are among the results already are not done again.
    pub fn new(bin: &Path, out: &Path, target: &Path, results: Results) -> Result<Self> {
        let guests = out.join("work");
        std::fs::create_dir_all(&guests)?;
        let tls = guests.join("tls");
        crate::tls::write(&tls)?;
        Ok(Self {
            bin: bin.to_owned(),
            out: out.to_owned(),
            programs: Programs::find(target, &tls),
            guests,
            results,
            stage: None,
            spins: None,
            bare_s: HashMap::new(),
            count: 0,
            call_unix_s: unix_now() as u64,
        })
    }

    /// Runs the cells and gives all rows. After Ctrl-C it gives those that there are.
    pub fn run(mut self, cells: &[Cell]) -> Result<Results> {
        let rows_of = |cell: &Cell| cell.systems.len() as u32 * cell.runs * cell.rows_a_run();
        let total: u32 = cells.iter().map(rows_of).sum();
        let mut number = 0;
        for cell in cells {
            for repetition in 1..=cell.runs {
                for system in cell.turn(repetition) {
                    number += cell.rows_a_run();
                    if interrupt::caught() {
                        return Ok(self.results);
                    }
                    if self.is_there(cell, system, repetition) {
                        continue;
                    }
                    let rows = self.one(cell, system, repetition);
                    if interrupt::caught() && rows.iter().any(|row| !row.completed()) {
                        return Ok(self.results);
                    }
                    for row in rows {
                        println!("[{number:3}/{total}] {}", line(&row));
                        self.results.rows.push(row);
                    }
                    self.results.write(&self.out.join("memory.json"))?;
                }
            }
        }
        Ok(self.results)
    }

    /// Whether a run was done before, or a peer's run of this cell was cut off: another would be too.
    fn is_there(&self, cell: &Cell, system: &System, repetition: u32) -> bool {
        let wanted = cell.row(system, repetition);
        let mut alike = self.results.rows.iter().filter(|row| row.is_like(&wanted));
        let ours = matches!(system, System::Godwit { .. });
        alike.any(|row| row.run == repetition || !ours && row.outcome == CUT_OFF)
    }

    /// One run, made again while the hypervisor takes too much of the machine away. What went wrong is never made again.
    fn one(&mut self, cell: &Cell, system: &System, repetition: u32) -> Vec<Row> {
        let mut disturbed = 0;
        loop {
            let before = CpuTime::now();
            let mut rows = self.once(cell, system, repetition);
            let stolen = CpuTime::now().zip(before);
            let stolen = stolen.map(|(now, before)| now.stolen_since(before));
            for row in &mut rows {
                row.details["stolen_share"] = json!(stolen);
                row.details["disturbed_before"] = json!(disturbed);
            }
            let calm = stolen.is_none_or(|share| share <= STOLEN_MAX);
            let went_wrong = rows.iter().any(|row| !row.completed());
            if calm || went_wrong || disturbed == DISTURBED_MAX || interrupt::caught() {
                return rows;
            }
            disturbed += 1;
        }
    }

    fn once(&mut self, cell: &Cell, system: &System, repetition: u32) -> Vec<Row> {
        let mut row = cell.row(system, repetition);
        let load = machine::load();
        let attempted = self.attempt(cell, system, row.clone());
        let mut rows = attempted.unwrap_or_else(|error| {
            row.outcome = format!("failed: {error:#}");
            // Whatever went wrong must not reach the next run.
            self.stage = None;
            vec![row]
        });
        // Others' work shows here, our own does too.
        for row in &mut rows {
            row.call_unix_s = self.call_unix_s;
            row.details["load_before"] = json!(load);
        }
        rows
    }

    fn attempt(&mut self, cell: &Cell, system: &System, mut row: Row) -> Result<Vec<Row>> {
        if let Err(error) = self.set_stage(cell) {
            go_on()?;
            row.outcome = format!("skipped: {error:#}");
            return Ok(vec![row]);
        }
        if !system.moves() {
            let stage = self.stage.as_ref().context("no stage")?;
            row.outcome = limits::measure(stage, system, cell, &mut row)?;
            return Ok(vec![row]);
        }
        let boot = self.boot(cell)?;
        self.count += 1;
        let limit = self.limit(cell, system);
        let run = Run {
            cell,
            boot: &boot,
            name: format!("bench{}", self.count),
            limit,
            seed: u64::from(self.count) << 40,
        };
        self.go(system, &run, row)
    }

    /// Runs what the cell is about, and makes rows of it.
    fn go(&mut self, system: &System, run: &Run, mut row: Row) -> Result<Vec<Row>> {
        let stage = self.stage.as_ref().context("no stage")?;
        let limit_s = json!({"limit_s": run.limit.as_secs_f64()});
        match (run.cell.course, *system) {
            (Course::AtOnce(moves), System::Godwit { encrypted, .. }) => {
                if let Some(all) = at_once::run(stage, run, encrypted, moves)? {
                    let made = |moved| completed(row.clone(), moved);
                    return Ok(all.iter().map(made).collect());
                }
                (row.outcome, row.details) = (CUT_OFF.into(), limit_s);
            }
            (Course::Cancelled, System::Godwit { encrypted, .. }) => {
                cancelled::run(stage, run, encrypted, &mut row)?;
                row.outcome = "completed".into();
            }
            (Course::AtOnce(_) | Course::Cancelled, _) => {
                row.outcome = "skipped: only Godwit is asked for this".into();
            }
            _ => match self.move_by(system, run)? {
                Ended::Moved(moved) => row = completed(row, &moved),
                Ended::CutOff => (row.outcome, row.details) = (CUT_OFF.into(), limit_s),
                Ended::Skipped(why) => row.outcome = format!("skipped: {why}"),
            },
        }
        Ok(vec![row])
    }

    fn move_by(&mut self, system: &System, run: &Run) -> Result<Ended> {
        let stage = self.stage.as_ref().context("no stage")?;
        if let System::Godwit {
            encrypted,
            prepared,
        } = *system
        {
            return godwit::run(stage, run, encrypted, prepared);
        }
        let System::Qemu(way) = *system else {
            bail!("{} moves nothing", system.name());
        };
        let mut bare_s = 0.0;
        if way.prepared && self.programs.of(way.version).is_ok() {
            bare_s = match self.bare_s.get(&(system.name(), way.tls)) {
                Some(known) => *known,
                None => peer::bare_start_s(stage, run, &self.programs, way)?,
            };
            self.bare_s.insert((system.name(), way.tls), bare_s);
        }
        peer::run(stage, run, &self.programs, way, bare_s)
    }

    /// The stage that is up is used as long as it can be made like the cell's network.
    fn set_stage(&mut self, cell: &Cell) -> Result<()> {
        if !self
            .stage
            .as_ref()
            .is_some_and(|stage| stage.serves(&cell.network))
        {
            self.stage = None;
            self.stage = Some(Stage::new(&cell.network, &self.bin, &self.guests)?);
        }
        match &self.stage {
            Some(stage) => stage.reshape(&cell.network),
            None => Ok(()),
        }
    }

    fn boot(&mut self, cell: &Cell) -> Result<Boot> {
        let spins = match (self.spins, &cell.guest) {
            (Some(known), _) => known,
            (None, Guest::Counter { .. }) => {
                let stage = self.stage.as_ref().context("no stage")?;
                let measured = peer::measure_spins(stage, &self.programs, &self.guests)?;
                *self.spins.insert(measured)
            }
            _ => Spins::default(),
        };
        Boot::make(&cell.guest, &self.guests, &spins)
    }

    /// Ten times our median in this cell, of the moves most like this one.
    fn limit(&self, cell: &Cell, system: &System) -> Duration {
        if let System::Godwit { .. } = system {
            return OWN_LIMIT;
        }
        let ours: Vec<&Row> = self
            .results
            .rows
            .iter()
            .filter(|row| row.scenario == cell.scenario && row.cell == cell.name)
            .filter(|row| is_ours(row) && row.completed())
            .collect();
        let wanted = cell.row(system, 0);
        let alike = |row: &&&Row| {
            let plain = |row: &Row| row.encryption == "none";
            row.destination == wanted.destination && plain(row) == plain(&wanted)
        };
        let closest: Vec<f64> = ours
            .iter()
            .filter(alike)
            .filter_map(|row| row.total_s)
            .collect();
        let all: Vec<f64> = ours.iter().filter_map(|row| row.total_s).collect();
        let times = if closest.is_empty() { all } else { closest };
        match crate::group::median(&times) {
            Some(median) => Duration::from_secs_f64(median * CUT_OFF_FACTOR).max(LIMIT_MIN),
            None => OWN_LIMIT,
        }
    }
}

fn completed(mut row: Row, moved: &Moved) -> Row {
    fill_in(&mut row, moved);
    row.outcome = "completed".into();
    row
}

fn fill_in(row: &mut Row, moved: &Moved) {
    let gb = row.ram_gib * 1024.0 * BYTES_PER_MIB / 1e9;
    let total_s = moved.resume - moved.began;
    row.total_s = Some(total_s);
    row.prepare_s = moved.prepare_s;
    row.switchover_ms = Some((moved.resume - moved.stop) * 1e3);
    row.throughput_gb_per_s = Some(gb / (total_s - moved.prepare_s).max(1e-3));
    row.streams = moved.streams;
    row.ram_equal = Some(moved.equal);
    row.details = moved.details.clone();
    row.first_touch_gb_per_s = Some(moved.first_touch.warm);
    row.details["first_touch_found_gb_per_s"] = json!(moved.first_touch.found);
    let cost = |index: usize| moved.usage.get(index).map(|usage| usage.cpu_s / gb);
    row.cpu_source_s_per_gb = cost(0);
    row.cpu_destination_s_per_gb = cost(1);
    let guest_mib = if moved.guest_memory_counted {
        row.ram_gib * 1024.0
    } else {
        0.0
    };
    let memory = moved
        .usage
        .iter()
        .map(|usage| (usage.rss_mib - guest_mib).max(0.0));
    row.peak_rss_mib = memory.reduce(f64::max);
    let tables = moved.usage.iter().map(|usage| usage.page_tables_mib);
    row.details["page_tables_mib"] = json!(tables.reduce(f64::max));
    let processes = moved.usage.iter().map(|usage| json!(usage.processes));
    row.details["rss_mib_by_process"] = processes.collect();
    row.details["vcpu_s"] = json!(
        moved
            .usage
            .iter()
            .map(|usage| usage.vcpu_s)
            .collect::<Vec<_>>()
    );
    if !moved.steps.seen.is_empty() {
        let before = moved.steps.rate(0.0, moved.began);
        let during = moved.steps.rate(moved.began, moved.stop);
        row.guest_speed_during = before
            .zip(during)
            .and_then(|(before, during)| (before > 0.0).then(|| during / before));
        row.details["steps_mib_per_s"] = moved.steps.course(moved.began);
        if let (Some(before), Some(gbps)) = (before, row.link_gbps) {
            let link = gbps * 1e9 / 8.0 / 4096.0;
            let share = (moved.steps).share_of(before.min(link), moved.began, moved.stop);
            row.details["write_share"] = json!(share);
        }
    }
    let read_before = moved.steps.read_rate(0.0, moved.began);
    let read_during = moved.steps.read_rate(moved.began, moved.stop);
    if let (Some(before), Some(during)) = (read_before, read_during) {
        row.details["read_share"] = json!(during / before.max(1.0));
    }
    if is_ours(row) {
        let ratio = courses::first_pass_ratio(&moved.details["report"]);
        row.details["first_pass_ratio"] = json!(ratio);
    }
    if let Some(speed) = moved.details["client"]["speed_during"].as_f64() {
        row.guest_speed_during = Some(speed);
    }
}

/// A row for people, while it runs.
fn line(row: &Row) -> String {
    let head = format!(
        "{:<8} {:<14} {:<9} {:<24} {:<8} {:<11}",
        row.scenario, row.cell, row.system, row.config, row.destination, row.encryption
    );
    if let Some(after) = row.details["guest_speed_after"].as_f64() {
        return format!("{head} guest at {after:.2} after it was cancelled");
    }
    let Some(total_s) = row.total_s else {
        let speed = row
            .throughput_gb_per_s
            .map(|rate| format!("{rate:.2} GB/s"));
        return format!("{head} {} {}", speed.unwrap_or_default(), row.outcome);
    };
    format!(
        "{head} {total_s:6.2} s ({:.2} s prepared)  stop {:6.1} ms  {:.2} GB/s  cpu {:.2}/{:.2} s/GB  first touch {:.1} GB/s  equal: {}{}",
        row.prepare_s,
        row.switchover_ms.unwrap_or(0.0),
        row.throughput_gb_per_s.unwrap_or(0.0),
        row.cpu_source_s_per_gb.unwrap_or(0.0),
        row.cpu_destination_s_per_gb.unwrap_or(0.0),
        row.first_touch_gb_per_s.unwrap_or(0.0),
        row.ram_equal
            .map_or("not compared", |equal| if equal { "yes" } else { "NO" }),
        row.guest_speed_during
            .map_or(String::new(), |speed| format!("  guest at {speed:.2}"))
    )
}
