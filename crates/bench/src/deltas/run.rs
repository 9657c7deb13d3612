//! Runs of systems in cells: makes the disks, has a load work with all of them at once, and makes a row of that.
//!
//! Owns the directories in which everything lies, and empties them. What fails is a row that says so, and the bench goes on. Refuses to go on after
//! Ctrl-C.

use super::command::RESULTS;
use super::plan::{Cell, DISK_BYTES, FLUSH_PERMILLE, LOAD_S, OUTSTANDING, System, WRITE_PERCENT};
use super::row::{Results, Row};
use super::server::{Server, Site};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::disk_load::course::{Done, Latency};
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Ended, Load, Running};
use godwit_testkit::interrupt;
use godwit_testkit::stage::pause;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// In memory: sockets, and what front ends share.
const RUN: &str = "/dev/shm/godwit-bench-deltas";

pub struct Bench {
    programs: PathBuf,
    out: PathBuf,
    local: PathBuf,
    results: Results,
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What is left is of no use to anybody.
        for directory in [self.local.as_path(), Path::new(RUN)] {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

impl Bench {
    pub fn new(programs: PathBuf, out: PathBuf, results: Results) -> Self {
        Self {
            local: out.join("deltas-local"),
            programs,
            out,
            results,
        }
    }

    /// Runs all that, and writes the rows after each run.
    pub fn run(mut self, cells: &[Cell], systems: &[System], runs: u32) -> Result<Results> {
        for cell in cells {
            for run in 1..=runs {
                let mut turns = systems.to_vec();
                // What a run leaves warm is not always the same one's.
                if run % 2 == 0 {
                    turns.reverse();
                }
                for system in turns {
                    let row = self.one(cell, system, run);
                    if interrupt::caught() {
                        return Ok(self.results.clone());
                    }
                    println!("{} {} {run}: {}", row.cell, row.system, row.outcome);
                    self.results.rows.push(row);
                    self.results.write(&self.out.join(RESULTS))?;
                }
            }
        }
        Ok(self.results.clone())
    }

    fn one(&self, cell: &Cell, system: System, run: u32) -> Row {
        let mut row = Row {
            cell: cell.name(),
            system: system.name().to_owned(),
            run,
            ..Row::default()
        };
        row.outcome = match self.measure(cell, system, &mut row) {
            Ok(()) => "completed".to_owned(),
            Err(error) => format!("failed: {error:#}"),
        };
        row
    }

    /// An image that holds what a load's log begins with, and nothing else but that.
    fn prepare(&self, log: &Log) -> Result<PathBuf> {
        for directory in [self.local.as_path(), Path::new(RUN)] {
            let _ = std::fs::remove_dir_all(directory);
            std::fs::create_dir_all(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let parent = self.local.join("parent.raw");
        log.fill(&File::create(&parent)?)?;
        Ok(parent)
    }

    fn measure(&self, cell: &Cell, system: System, row: &mut Row) -> Result<()> {
        let log = Log::new(DISK_BYTES, cell.io_bytes);
        let parent = self.prepare(&log)?;
        let site = Site {
            local: &self.local,
            run: Path::new(RUN),
            programs: &self.programs,
            parent: &parent,
            bytes: DISK_BYTES,
        };
        let servers = (0..cell.disks).map(|number| Server::start(site, system, number));
        let servers: Vec<Server> = servers.collect::<Result<_>>()?;
        let empty: u64 = servers.iter().map(Server::takes).sum();
        row.empty_bytes = Some(empty / u64::from(cell.disks));
        let before = written(&servers)?;
        let cpu: f64 = servers.iter().map(Server::cpu_s).sum();
        let loads = servers.iter().zip(0..).map(|(server, seed)| {
            let log = Log::new(DISK_BYTES, cell.io_bytes);
            Running::begin(load(cell, seed), log, &server.place)
        });
        let loads: Vec<Running> = loads.collect::<Result<_>>()?;
        pause(Duration::from_secs_f64(LOAD_S))?;
        let ended: Vec<Ended> = loads.into_iter().map(Running::end).collect::<Result<_>>()?;
        let used = servers.iter().map(Server::cpu_s).sum::<f64>() - cpu;
        let given = written(&servers)?.saturating_sub(before);
        let takes = servers.iter().map(Server::takes).sum::<u64>();
        drop(servers);
        for one in &ended {
            ensure!(one.failed == 0, "{} requests failed", one.failed);
            ensure!(one.wrong_reads == 0, "{} reads are wrong", one.wrong_reads);
        }
        put(
            row,
            cell,
            &ended,
            (used, given, takes.saturating_sub(empty)),
        );
        Ok(())
    }
}

fn load(cell: &Cell, seed: u64) -> Load {
    Load {
        outstanding: OUTSTANDING,
        write_percent: WRITE_PERCENT,
        flush_permille: FLUSH_PERMILLE,
        order: cell.order,
        per_second: cell.per_second(),
        seed: seed + 1,
    }
}

fn written(servers: &[Server]) -> Result<u64> {
    let each = servers.iter().map(Server::written);
    each.sum::<Result<u64>>()
}

/// Of all disks together.
fn put(row: &mut Row, cell: &Cell, ended: &[Ended], (used, given, takes): (f64, u64, u64)) {
    let done: Vec<Done> = ended.iter().flat_map(|one| one.done.clone()).collect();
    let took = done.iter().filter(|one| one.is_write);
    let writes = Latency::of(took.map(|one| one.took_ms).collect());
    row.iops = Some(done.len() as f64 / LOAD_S);
    row.write_median_ms = writes.map(|writes| writes.median_ms);
    row.write_p99_ms = writes.map(|writes| writes.p99_ms);
    row.cpu_us_per_io = Some(used * 1e6 / done.len().max(1) as f64);
    let bytes = |blocks: u64| blocks * cell.io_bytes as u64;
    let of_all = |count: fn(&Log) -> u64| bytes(ended.iter().map(|one| count(&one.log)).sum());
    let (wrote, distinct) = (of_all(Log::writes), of_all(Log::written_blocks));
    row.written_bytes = Some(wrote);
    row.distinct_bytes = Some(distinct);
    row.write_amplification = Some(given as f64 / wrote.max(1) as f64);
    row.space_amplification = Some(takes as f64 / distinct.max(1) as f64);
}
