//! One migration's report as people read it.
//!
//! Part of [`Output`]. Owns nothing. Refuses: figures of what did not happen, such as a switchover that was never made.

use crate::disk_rows::{iteration, put_over};
use crate::figures::{guest_speed, mib, moment, rate, seconds};
use crate::output::{Output, Tone, kebab};
use crate::plain;
use godwit_types::disk_move::SentLogs;
use godwit_types::migration::{
    IterationReport, MigrationReport, MoveEvent, MoveEventKind, Outcome, Phase,
};

impl Output {
    pub fn migration(&self, report: &MigrationReport) {
        let tone = match report.outcome {
            Some(Outcome::Completed) => Tone::Good,
            Some(Outcome::InDoubt | Outcome::Failed) => Tone::Bad,
            Some(Outcome::Cancelled) => Tone::Warn,
            None => Tone::Plain,
        };
        self.line(self.paint(headline(report), tone));
        self.pairs(&report_rows(report));
        for event in &report.events {
            let event = plain::sentence(&event_line(event, report.outcome.is_some()));
            self.line(self.paint(event, Tone::Warn));
        }
        for note in &report.notes {
            let note = plain::sentence(note);
            self.line(self.paint(format!("note: {note}"), Tone::Warn));
        }
        for line in disk_lines(report) {
            self.line(line);
        }
        self.iterations(report);
    }

    fn iterations(&self, report: &MigrationReport) {
        let rows = iteration_rows(report);
        if rows.is_empty() {
            return;
        }
        self.line("");
        let header = [
            "iteration",
            "pages",
            "zero pages",
            "bytes",
            "time",
            "rate",
            "limited by",
        ];
        self.fitting_table(&header, rows, &["limited by", "zero pages"]);
    }
}

/// What each iteration came to of disks that went along by dirty block tracking, or by redo logs.
fn disk_lines(report: &MigrationReport) -> impl Iterator<Item = String> {
    report.disk_iterations.iter().flat_map(|of| {
        let disk = plain::sentence(&of.disk);
        let ended = of.iterations.iter();
        ended.map(move |ended| format!("disk {disk}, {}", iteration(ended)))
    })
}

/// What takes less tells of no rate, s.
const SHORTEST_S: f64 = 0.001;

fn iteration_rows(report: &MigrationReport) -> Vec<Vec<String>> {
    let row = |number: usize, pass: &IterationReport, limited_by: String| {
        vec![
            number.to_string(),
            pass.pages_sent.to_string(),
            pass.zero_pages.to_string(),
            mib(pass.bytes),
            format!("{:.2} s", pass.seconds),
            // A pass that found nothing to send has no rate, and nothing limited it; one that was over at once tells of none.
            match pass.bytes > 0 && pass.seconds >= SHORTEST_S {
                true => rate(pass.bytes as f64 / pass.seconds),
                false => "-".into(),
            },
            limited_by,
        ]
    };
    let complete = report.iterations.iter().enumerate();
    let mut rows: Vec<_> = complete
        .map(|(index, pass)| {
            let limit = (pass.bytes > 0).then(|| kebab(&pass.limited_by));
            row(index + 1, pass, limit.unwrap_or_else(|| "-".into()))
        })
        .collect();
    if let Some(pass) = report.pass {
        let so_far = IterationReport {
            pages_sent: pass.pages_sent,
            zero_pages: pass.zero_pages,
            bytes: pass.bytes,
            seconds: pass.seconds,
            limited_by: godwit_types::migration::LimitedBy::Link,
        };
        let state = match report.outcome {
            None => "(under way)",
            Some(_) => "(cut short)",
        };
        rows.push(row(report.pass_number(), &so_far, state.into()));
    }
    rows
}

/// The report's first line.
pub fn headline(report: &MigrationReport) -> String {
    let MigrationReport { vm, from, to, .. } = report;
    match report.outcome {
        Some(Outcome::Completed) => format!("VM '{vm}' moved from {from} to {to}"),
        // One that is off stays nowhere.
        Some(Outcome::Cancelled | Outcome::Failed) if report.guest_ended => {
            format!("VM '{vm}' was not moved to {to}: it is off")
        }
        Some(Outcome::Cancelled) => format!("Cancelled: VM '{vm}' stays on {from}"),
        Some(Outcome::Failed) => format!("Failed: VM '{vm}' stays on {from}"),
        Some(Outcome::InDoubt) => format!(
            "In doubt: VM '{vm}' is stopped until {from} and {to} reach each other; 'godwit vm show {vm}' has the command for the case that one of them is powered off"
        ),
        None => {
            let trouble = trouble(report).map_or_else(String::new, |text| format!(", {text}"));
            format!(
                "VM '{vm}' is moving from {from} to {to}: {}{trouble}",
                kebab(&report.phase)
            )
        }
    }
}

/// What goes on beside the plan now, and since when.
pub fn trouble(report: &MigrationReport) -> Option<String> {
    let event = report.trouble_under_way()?;
    let since = (report.total_s - event.at_s).max(0.0);
    Some(match event.kind {
        MoveEventKind::LinkLost => format!("link lost {since:.0} s ago, remaking"),
        MoveEventKind::LinkSilent => format!("nothing gets through for {since:.0} s"),
        _ => return None,
    })
}

fn event_line(event: &MoveEvent, has_ended: bool) -> String {
    let MoveEvent { at_s, message, .. } = event;
    let what = match (event.kind, event.lasted_s) {
        (MoveEventKind::LinkLost, Some(lasted)) => {
            format!("the link was lost and made again after {}", seconds(lasted))
        }
        // The end that the move came to closes the link, too.
        (MoveEventKind::LinkLost, None) if has_ended => {
            "the link to the other host ended, and was not made again".into()
        }
        (MoveEventKind::LinkLost, None) => "the link is lost".into(),
        (MoveEventKind::LinkSilent, Some(lasted)) => {
            return format!("at {at_s:.1} s: {message} for {}", seconds(lasted));
        }
        _ => return format!("at {at_s:.1} s: {message}"),
    };
    format!("at {at_s:.1} s: {what}: {message}")
}

fn report_rows(report: &MigrationReport) -> Vec<(&'static str, String)> {
    let mut rows = vec![("id", report.id.to_string())];
    rows.extend(
        report
            .reason
            .iter()
            .map(|reason| ("reason", reason.clone())),
    );
    rows.push(("began", moment(report.began_unix_s)));
    rows.push(("encryption", kebab(&report.encryption)));
    rows.push(("total time", format!("{:.2} s", report.total_s)));
    if report.prepare_s > 0.0 {
        let prepare = format!("{:.2} s allocating memory first", report.prepare_s);
        rows.push(("of it prepare", prepare));
    }
    rows.extend(switchover(report).map(|text| ("switchover", text)));
    rows.extend(last_blocks(report).map(|text| ("of it disks", text)));
    rows.push(("bytes on wire", mib(report.bytes_on_wire)));
    rows.extend(copied(report).map(|text| ("disks", text)));
    rows.extend(
        report
            .redo_logs
            .map(|taken| ("redo logs", redo_logs(taken))),
    );
    // Of an ended move all that went over the link, disks and memory, by the whole time.
    let told = match report.outcome {
        None => format!("{} now", rate(report.wire_bytes_per_s)),
        Some(_) => {
            let average = report.bytes_on_wire as f64 / report.total_s.max(SHORTEST_S);
            format!("{} on average", rate(average))
        }
    };
    rows.push(("rate", told));
    rows.push((
        "throughput",
        format!(
            "{} of memory over {} streams",
            rate(1e9 * report.throughput_gb_per_s),
            report.streams
        ),
    ));
    rows.push((
        "CPU",
        format!(
            "{:.2} s at the source, {:.2} s at the destination",
            report.cpu_source_s, report.cpu_destination_s
        ),
    ));
    rows.push((
        "guest dirtied",
        format!("{:.1} MiB/s on average", report.dirty_mib_per_s),
    ));
    if report.outcome.is_none() && report.phase != Phase::Ended {
        rows.push(("done", format!("{:.0} %", report.done_percent)));
        rows.push(("remaining", mib(report.remaining_bytes)));
    }
    rows.extend(compared(report));
    rows
}

/// How much of its disks was copied, how, and what limited that, where some went along.
fn copied(report: &MigrationReport) -> Option<String> {
    let copied = report.disk_bytes.saturating_sub(report.disk_left_bytes);
    let limit = report.disks_limited_by.as_ref();
    let limit = limit.map(|limit| format!(", limited by {}", kebab(limit)));
    let named = Some(&report.method).filter(|method| !method.is_default());
    let method = named.map(|method| format!(" by {}", kebab(method)));
    (report.disk_bytes > 0).then(|| {
        format!(
            "{} of {} copied{}{}",
            mib(copied),
            mib(report.disk_bytes),
            method.unwrap_or_default(),
            limit.unwrap_or_default()
        )
    })
}

/// What redo logs took.
fn redo_logs(taken: SentLogs) -> String {
    format!(
        "{} of each disk, of {} at the most together; {}",
        taken.logs,
        mib(taken.space_max_bytes),
        put_over(taken.frozen_ms, taken.slowed_to)
    )
}

/// The pause beside its target, where one was made.
fn switchover(report: &MigrationReport) -> Option<String> {
    let target_ms = report.promise.max_downtime_ms;
    if report.outcome != Some(Outcome::Completed) {
        return None;
    }
    let Some(ms) = pause_ms(report) else {
        return Some(format!(
            "not known: nobody told how long it took (target {target_ms} ms)"
        ));
    };
    let met = match report.promise.kept {
        true => "met".to_owned(),
        false => format!("missed by {:.1} ms", ms - target_ms as f64),
    };
    Some(format!("{ms:.1} ms (target {target_ms} ms: {met})"))
}

/// How much of the pause was for the last blocks of disks.
fn last_blocks(report: &MigrationReport) -> Option<String> {
    let ms = report.switchover_parts_ms.last_blocks_ms;
    let stood = pause_ms(report).is_some() && ms > 0.0;
    stood.then(|| format!("{ms:.1} ms for their last blocks"))
}

/// How long the guest stood still at the end of a migration that was completed, if anybody told: whoever measures it may die, or not be in reach.
pub fn pause_ms(report: &MigrationReport) -> Option<f64> {
    let is_within = report.switchover_ms <= report.promise.max_downtime_ms as f64;
    let is_told = report.promise.kept || !is_within;
    (report.outcome == Some(Outcome::Completed) && is_told).then_some(report.switchover_ms)
}

/// What came beside what was predicted, for a report that has both.
pub fn compared(report: &MigrationReport) -> Vec<(&'static str, String)> {
    let Some(prediction) = &report.prediction else {
        return Vec::new();
    };
    if report.outcome != Some(Outcome::Completed) {
        let text = format!(
            "{}, pause {:.0} ms",
            seconds(prediction.total_s),
            prediction.downtime_ms
        );
        return vec![("predicted", text)];
    }
    vec![
        (
            "time",
            format!(
                "took {}, predicted {}",
                seconds(report.total_s),
                seconds(prediction.total_s)
            ),
        ),
        (
            "pause",
            match pause_ms(report) {
                Some(ms) => format!("was {ms:.0} ms, predicted {:.0} ms", prediction.downtime_ms),
                None => format!("not known, predicted {:.0} ms", prediction.downtime_ms),
            },
        ),
        (
            "guest speed",
            format!(
                "was {}, predicted {}",
                guest_speed(report.guest_speed_percent),
                guest_speed(prediction.guest_speed_percent)
            ),
        ),
        ("basis", prediction.basis.clone()),
    ]
}

#[cfg(test)]
#[path = "move_report_tests.rs"]
pub mod tests;
