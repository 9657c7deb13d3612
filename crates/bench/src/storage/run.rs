//! Runs of systems in cells: begins a load, has the disk moved under it, compares, and makes a row of that.
//!
//! Owns the site and the rows. What fails is a row that says so, and the bench goes on. Refuses to go on after Ctrl-C.

use super::command::RESULTS;
use super::guest;
use super::model::{self, Carried};
use super::plan::{BEFORE_S, Cell, STEADY_S, System, turns};
use super::row::{Results, Row};
use super::server::{Attempt, Moved, Server};
use super::site::Site;
use crate::group::median;
use crate::machine::{self, CpuTime};
use crate::row::{CUT_OFF, Measured as _};
use anyhow::{Context as _, Result, ensure};
use godwit_testkit::disk_load::course::{Figures, Latency, by_tenths, figures, write_ms_by_tenths};
use godwit_testkit::disk_load::log::Log;
use godwit_testkit::disk_load::{Ended, Load, Running};
use godwit_testkit::interrupt;
use godwit_testkit::stage::pause;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Until a load runs as it will, and after a move.
const SETTLE: Duration = Duration::from_millis(500);
/// How long after the change of images is still looked at.
const AFTER_S: f64 = 0.2;
/// A move is cut off at ten times our time in the same cell, and never before.
const CUT_OFF_FACTOR: f64 = 10.0;
const CUT_OFF_LEAST_S: f64 = 20.0;
/// What dirty block tracking marks at a time.
const TRACKED_BYTES: usize = 64 << 10;
/// Where there is none of ours: at so many times the cell's estimate.
const CUT_OFF_ESTIMATES: f64 = 3.0;

pub struct Bench {
    site: Site,
    programs: PathBuf,
    out: PathBuf,
    results: Results,
    call_unix_s: u64,
}

impl Bench {
    pub fn new(programs: PathBuf, out: PathBuf, results: Results) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Ok(Self {
            site: Site::new(&out)?,
            programs,
            out,
            results,
            call_unix_s: now.map_or(0, |now| now.as_secs()),
        })
    }

    /// Runs all that, and writes the rows after each run.
    pub fn run(mut self, cells: &[Cell]) -> Result<Results> {
        for cell in cells {
            for run in 1..=cell.runs {
                for system in turns(cell, run) {
                    if interrupt::caught() {
                        return Ok(self.results);
                    }
                    if self.was_cut_off(&cell.row(system, run)) {
                        continue;
                    }
                    let row = self.one(cell, system, run);
                    if interrupt::caught() {
                        return Ok(self.results);
                    }
                    println!("{}", line(&row));
                    self.results.rows.push(row);
                    self.results.write(&self.out.join(RESULTS))?;
                }
            }
        }
        Ok(self.results)
    }

    fn one(&self, cell: &Cell, system: System, run: u32) -> Row {
        let mut row = cell.row(system, run);
        row.call_unix_s = self.call_unix_s;
        let (load, cpu) = (machine::load(), CpuTime::now());
        let measured = match (cell.moves(), system) {
            (true, System::Convert) => self.convert(cell, &mut row),
            (true, System::DataMover) => self.offline(cell, &mut row),
            (true, _) => self.moved(cell, system, &mut row),
            (false, _) if cell.has_guest() => self.in_a_guest(cell, system, &mut row),
            (false, _) => self.served(cell, system, &mut row),
        };
        if let Err(error) = measured {
            row.outcome = format!("failed: {error:#}");
        }
        let stolen = CpuTime::now()
            .zip(cpu)
            .map(|(now, then)| now.stolen_since(then));
        note(
            &mut row,
            json!({"machine_load": load, "stolen_share": stolen}),
        );
        row
    }

    /// A disk that is only worked with.
    fn served(&self, cell: &Cell, system: System, row: &mut Row) -> Result<()> {
        let (server, running) = self.begin(cell, system, row.run)?;
        let (from, cpu) = (running.now(), server.cpu_s());
        pause(Duration::from_secs_f64(STEADY_S))?;
        let (to, used) = (running.now(), server.cpu_s() - cpu);
        let ended = running.end()?;
        drop(server);
        check_load(&ended)?;
        let seen = figures(&ended.done, from, to);
        row.iops_before = Some(seen.iops);
        put_latency(row, &seen);
        row.cpu_us_per_io = Some(used * 1e6 / (seen.reads + seen.writes).max(1) as f64);
        row.longest_hold_ms = Some(seen.longest_ms);
        note(row, latencies("", &seen));
        row.outcome = "completed".into();
        Ok(())
    }

    /// A disk of an emulated guest, which makes the load.
    fn in_a_guest(&self, cell: &Cell, system: System, row: &mut Row) -> Result<()> {
        self.site.prepare(cell)?;
        let seen = guest::load(&self.site, cell, system, &self.programs)?;
        row.iops_before = seen["iops"].as_f64();
        row.write_latency_ms = seen["write"]["mean_ms"].as_f64();
        row.write_latency_variance = seen["write"]["variance"].as_f64();
        for kind in ["read", "write"] {
            for what in ["mean_ms", "p99_ms"] {
                let name = format!("{kind}_{what}");
                note(row, json!({ name: seen[kind][what] }));
            }
        }
        row.outcome = "completed".into();
        Ok(())
    }

    /// A disk that is moved under a load.
    fn moved(&self, cell: &Cell, system: System, row: &mut Row) -> Result<()> {
        let (mut server, running) = self.begin(cell, system, row.run)?;
        let (from, cpu) = (running.now(), server.cpu_s());
        pause(Duration::from_secs_f64(BEFORE_S))?;
        let (to, used) = (running.now(), server.cpu_s() - cpu);
        if !matches!(system, System::Godwit(_)) {
            self.site.make_destination(cell.disk_bytes())?;
        }
        let written = self.site.destination_counts()?.written_bytes;
        let deadline = Instant::now() + self.cut_off_after(cell, row);
        let asked = Instant::now();
        let attempt = server.move_to(&self.site.destination(), deadline)?;
        let copied = self.site.destination_counts()?.written_bytes - written;
        let cpu_of_move = server.cpu_s() - cpu - used;
        if let Attempt::Moved(_) = attempt {
            pause(SETTLE)?;
        }
        let (origin, now) = (Instant::now(), running.now());
        let at = |moment: Instant| now - (origin - moment).as_secs_f64();
        let ended = running.end()?;
        drop(server);
        check_load(&ended)?;
        let before = figures(&ended.done, from, to);
        row.iops_before = Some(before.iops);
        row.cpu_us_per_io = Some(used * 1e6 / (before.reads + before.writes).max(1) as f64);
        row.bytes_copied = Some(copied);
        note(row, latencies("before_", &before));
        note(
            row,
            json!({"cpu_of_move_s": cpu_of_move, "volumes": cell.volumes}),
        );
        if cell.scenario == "iterations" {
            note(row, json!({"write_ranks": write_ranks(&ended.log)}));
        }
        match attempt {
            Attempt::CutOff => row.outcome = CUT_OFF.into(),
            Attempt::GaveUp(why, iterations) => {
                row.outcome = format!("gave up: {why}");
                put_try(row, &iterations, at(asked), &ended, &at);
            }
            Attempt::Moved(moved) => {
                self.put_move(cell, row, &moved, &ended, &at);
                self.compare(row, &ended.log)?;
            }
        }
        Ok(())
    }

    fn put_move(
        &self,
        cell: &Cell,
        row: &mut Row,
        moved: &Moved,
        ended: &Ended,
        at: &impl Fn(Instant) -> f64,
    ) {
        let (asked, switching, done) = (at(moved.asked), at(moved.switching), at(moved.done));
        let during = figures(&ended.done, asked, done);
        let near = figures(&ended.done, switching, done + AFTER_S);
        let whole = figures(&ended.done, asked, done + AFTER_S);
        row.total_s = Some(done - asked);
        row.iops_during = Some(during.iops);
        put_latency(row, &during);
        row.switch_stall_ms = Some(near.stall_ms);
        row.longest_hold_ms = Some(whole.longest_ms);
        row.eta_error_pct = eta_error_pct(moved);
        if let Some((source, destination)) = cell.volumes {
            let load = Carried {
                reads: during.reads,
                writes: during.writes,
                io_bytes: cell.kind.io_bytes as u64,
            };
            let bytes = cell.disk_bytes();
            row.bound_s = Some(model::bound_s(&source, &destination, bytes, load));
            // Half of the writes on average go to what was copied, all of them at the end.
            let part = f64::from(cell.kind.write_percent) / 200.0;
            // Reads go to the source alone, whose time for them is that of a volume that is copied, too.
            let read_ms = during.read.map(|read| read.mean_ms);
            let (here, there) = (read_ms.unwrap_or(source.latency_ms), destination.latency_ms);
            let iops = model::equation_1(cell.outstanding, part, here, there);
            note(
                row,
                json!({"equation_1_iops": iops, "equation_1_source_ms": here}),
            );
        }
        put_course(row, ended, (asked, done + AFTER_S));
        let said = moved.estimates.iter();
        let said = said.map(|(when, left, eta_s)| (at(*when) - asked, *left, *eta_s));
        note(row, latencies("during_", &during));
        let until = Some(switching);
        put_iterations(row, &moved.iterations, (asked, until), ended, at);
        note(
            row,
            json!({
                "report": moved.report, "switching_s": switching - asked, "estimates": said.collect::<Vec<_>>(),
            }),
        );
    }

    /// Our copying of a disk that nobody works with.
    fn offline(&self, cell: &Cell, row: &mut Row) -> Result<()> {
        let log = self.site.prepare(cell)?;
        let image = self.site.image(cell);
        let mut server = Server::start(&self.site, System::DataMover, &image, &self.programs)?;
        let deadline = Instant::now() + self.cut_off_after(cell, row);
        let written = self.site.destination_counts()?.written_bytes;
        let attempt = server.move_to(&self.site.destination(), deadline)?;
        drop(server);
        let Attempt::Moved(moved) = attempt else {
            row.outcome = CUT_OFF.into();
            return Ok(());
        };
        row.total_s = Some((moved.done - moved.asked).as_secs_f64());
        row.eta_error_pct = eta_error_pct(&moved);
        self.put_offline(cell, row, written)?;
        self.compare(row, &log)
    }

    fn convert(&self, cell: &Cell, row: &mut Row) -> Result<()> {
        let log = self.site.prepare(cell)?;
        self.site.make_destination(cell.disk_bytes())?;
        let written = self.site.destination_counts()?.written_bytes;
        let mut command = self.site.command("qemu-img");
        command.args([
            "convert", "-m", "16", "-W", "-n", "-t", "none", "-T", "none",
        ]);
        command.args(["-f", "raw", "-O", "raw"]);
        command.arg(self.site.image(cell));
        command.arg(self.site.destination());
        let asked = Instant::now();
        let ended = command.stdin(Stdio::null()).output()?;
        row.total_s = Some(asked.elapsed().as_secs_f64());
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.success(), "qemu-img: {}", said.trim());
        self.put_offline(cell, row, written)?;
        self.compare(row, &log)
    }

    fn put_offline(&self, cell: &Cell, row: &mut Row, written: u64) -> Result<()> {
        row.bytes_copied = Some(self.site.destination_counts()?.written_bytes - written);
        let (source, destination) = cell.volumes.context("no volumes")?;
        let none = Carried {
            reads: 0,
            writes: 0,
            io_bytes: 0,
        };
        row.bound_s = Some(model::bound_s(
            &source,
            &destination,
            cell.disk_bytes(),
            none,
        ));
        Ok(())
    }

    fn begin(&self, cell: &Cell, system: System, run: u32) -> Result<(Server, Running)> {
        let log = self.site.prepare(cell)?;
        let image = self.site.image(cell);
        let server = Server::start(&self.site, system, &image, &self.programs)?;
        let load = Load {
            outstanding: cell.outstanding as usize,
            write_percent: cell.kind.write_percent,
            flush_permille: 0,
            order: cell.kind.order,
            per_second: cell.kind.per_second,
            // The same for all systems of a repetition.
            seed: u64::from(run),
        };
        let running = Running::begin(load, log, &self.site.place())?;
        pause(SETTLE)?;
        Ok((server, running))
    }

    fn compare(&self, row: &mut Row, log: &Log) -> Result<()> {
        let findings = self.site.check(log)?;
        row.acked_writes_lost = Some(findings.lost);
        row.disks_equal = Some(findings.is_equal());
        note(
            row,
            json!({
                "acked_writes": log.writes(), "flushed_writes": log.flushed(), "blocks_compared": findings.blocks,
                "blocks_torn": findings.torn, "blocks_strange": findings.strange,
            }),
        );
        row.outcome = "completed".into();
        Ok(())
    }

    /// Who was cut off in a cell is not run there again.
    fn was_cut_off(&self, row: &Row) -> bool {
        let mut rows = self.results.rows.iter();
        rows.any(|one| {
            one.is_like(row) && one.call_unix_s == self.call_unix_s && one.outcome == CUT_OFF
        })
    }

    fn cut_off_after(&self, cell: &Cell, row: &Row) -> Duration {
        let rows = self.results.rows.iter();
        let ours = rows.filter(|one| one.is_at(row) && one.system == "godwit" && one.completed());
        let times: Vec<f64> = ours.filter_map(|one| one.total_s).collect();
        let seconds = match median(&times) {
            Some(ours) => ours * CUT_OFF_FACTOR,
            None => cell.run_s() * CUT_OFF_ESTIMATES,
        };
        Duration::from_secs_f64(seconds.max(CUT_OFF_LEAST_S))
    }
}

fn check_load(ended: &Ended) -> Result<()> {
    ensure!(
        ended.failed == 0 && ended.wrong_reads == 0,
        "{} requests failed and {} reads brought wrong bytes",
        ended.failed,
        ended.wrong_reads
    );
    Ok(())
}

/// By how much the first estimate after a tenth of the way was wrong.
fn eta_error_pct(moved: &Moved) -> Option<f64> {
    let mut estimates = moved.estimates.iter();
    let (at, _, eta_s) = estimates.find(|(_, left, _)| *left <= 0.9)?;
    let true_s = moved.done.checked_duration_since(*at)?.as_secs_f64();
    Some((eta_s / true_s - 1.0) * 100.0)
}

fn put_latency(row: &mut Row, seen: &Figures) {
    row.write_latency_ms = seen.write.map(|write| write.mean_ms);
    row.write_latency_variance = seen.write.map(|write| write.variance);
}

/// How the load fared by tenths of a second, from before the move on.
fn put_course(row: &mut Row, ended: &Ended, (asked, until): (f64, f64)) {
    let from = (asked - BEFORE_S).max(0.0);
    note(
        row,
        json!({
            "iops_by_tenths": by_tenths(&ended.done, from, until),
            "write_ms_by_tenths": write_ms_by_tenths(&ended.done, from, until),
            "course_begins_s": from - asked,
        }),
    );
}

/// A method that gave up: how long it tried, and how the load fared meanwhile.
fn put_try(
    row: &mut Row,
    iterations: &[(Instant, Value)],
    asked: f64,
    ended: &Ended,
    at: &impl Fn(Instant) -> f64,
) {
    put_iterations(row, iterations, (asked, None), ended, at);
    let Some((last, _)) = iterations.last() else {
        return;
    };
    let until = at(*last);
    let during = figures(&ended.done, asked, until);
    row.iops_during = Some(during.iops);
    put_latency(row, &during);
    note(row, latencies("during_", &during));
    note(row, json!({"tried_s": until - asked}));
    put_course(row, ended, (asked, until + AFTER_S));
}

/// How often blocks of 64 KiB were written, the one that was written most often first: at the ranks 1, 2, 4 and so on.
fn write_ranks(log: &Log) -> Vec<(usize, u64)> {
    let of_a_block = (TRACKED_BYTES / log.block_bytes().max(1)).max(1);
    let blocks = log.times_written().chunks(of_a_block);
    let mut times: Vec<u64> = blocks
        .map(|block| block.iter().copied().map(u64::from).sum())
        .collect();
    times.sort_unstable_by(|one, other| other.cmp(one));
    let ranks = std::iter::successors(Some(1_usize), |rank| rank.checked_mul(2));
    let there = ranks.map_while(|rank| Some((rank, *times.get(rank - 1)?)));
    there.collect()
}

/// The passes of an iterative method, and how the load fared in the first one and after it.
fn put_iterations(
    row: &mut Row,
    iterations: &[(Instant, Value)],
    (asked, switching): (f64, Option<f64>),
    ended: &Ended,
    at: &impl Fn(Instant) -> f64,
) {
    let Some(((first, _), (last, _))) = iterations.first().zip(iterations.last()) else {
        return;
    };
    let (first, until) = (at(*first), switching.unwrap_or(at(*last)));
    let passes = iterations.iter().map(|(when, event)| {
        let mut pass = event.clone();
        pass["ended_s"] = (at(*when) - asked).into();
        pass
    });
    let passes: Vec<Value> = passes.collect();
    note(row, json!({"iterations": passes}));
    for (prefix, from, to) in [("first_pass_", asked, first), ("iterating_", first, until)] {
        if to > from {
            note(row, latencies(prefix, &figures(&ended.done, from, to)));
        }
    }
}

fn latencies(prefix: &str, seen: &Figures) -> Value {
    let mut told = serde_json::Map::new();
    for (name, latency) in [("write", seen.write), ("read", seen.read)] {
        let Some(latency) = latency else {
            continue;
        };
        let Latency {
            mean_ms,
            variance,
            median_ms,
            p99_ms,
            longest_ms,
            ..
        } = latency;
        for (what, number) in [
            ("mean_ms", mean_ms),
            ("variance", variance),
            ("median_ms", median_ms),
            ("p99_ms", p99_ms),
            ("longest_ms", longest_ms),
        ] {
            told.insert(format!("{prefix}{name}_{what}"), number.into());
        }
    }
    told.insert(format!("{prefix}stall_ms"), seen.stall_ms.into());
    told.insert(format!("{prefix}iops"), seen.iops.into());
    told.into()
}

fn note(row: &mut Row, more: Value) {
    if !row.details.is_object() {
        row.details = json!({});
    }
    if let (Some(details), Value::Object(more)) = (row.details.as_object_mut(), more) {
        details.extend(more);
    }
}

/// What somebody who watches is told of a run.
fn line(row: &Row) -> String {
    let number = |value: Option<f64>, unit: &str| {
        value.map_or(String::new(), |value| format!("  {value:.2} {unit}"))
    };
    let mut text = format!(
        "{:<16} {:<22} {:<26} {}",
        row.scenario,
        row.cell,
        row.name(),
        row.run
    );
    text += &number(row.total_s, "s");
    text += &number(row.over_bound_pct(), "% over the bound");
    text += &number(row.iops_before, "IOPS");
    text += &number(row.iops_during, "IOPS during");
    text += &number(row.write_latency_ms, "ms a write");
    text += &number(row.switch_stall_ms, "ms stall");
    text += &number(row.cpu_us_per_io, "us CPU");
    if row.disks_equal == Some(false) {
        text += "  NOT EQUAL";
    }
    if !row.completed() {
        text += &format!("  {}", row.outcome);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_ranked_by_how_often_they_were_written() {
        let mut log = Log::new(4 * TRACKED_BYTES as u64, 8192);
        // The third block of 64 KiB three times in two places, the first one once.
        for block in [16, 17, 16, 0] {
            log.begin(block);
            log.acknowledge(block);
        }
        assert_eq!(write_ranks(&log), [(1, 3), (2, 1), (4, 0)]);
    }
}
