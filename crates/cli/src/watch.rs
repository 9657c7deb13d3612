//! Watching a migration: live progress, then the report.
//!
//! Owns the progress line. Ctrl-C detaches; it never cancels. Refuses: to show an estimate where none is honest.

use crate::connect::Reader;
use crate::exit::{Failure, exit_of_outcome};
use crate::figures::{columns, fitting, rate};
use crate::follow::{self, until_left};
use crate::move_report::trouble;
use crate::output::{Output, kebab};
use crate::plain;
use godwit_types::MigrationId;
use godwit_types::migration::{MigrationReport, Phase};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Pause between two looks where there is no event stream.
const POLL: Duration = Duration::from_millis(500);

/// Watches until the migration ends, shows its report, and fails unless it completed.
pub async fn watch(reader: &Reader, id: &MigrationId, output: &Output) -> Result<(), Failure> {
    let progress = Progress::new(output);
    let left = (
        serde_json::json!({ "detached": true, "id": id }),
        format!(
            "Detached: the migration continues.\n  watch it again:  godwit migration watch {id}\n  stop it:         godwit migration cancel {id}"
        ),
    );
    let ended = follow(reader, id, &progress);
    let report = until_left(ended, || progress.clear(), output, left).await?;
    output.show(&report, |output, report| output.migration(report));
    match exit_of_outcome(report.outcome) {
        0 => Ok(()),
        exit => Err(Failure::told(exit)),
    }
}

async fn follow(
    reader: &Reader,
    id: &MigrationId,
    progress: &Progress,
) -> Result<MigrationReport, Failure> {
    match reader {
        Reader::Controller(client) => {
            let open = async || client.migration_events(id).await;
            let look = async || client.migration(id).await;
            let again =
                format!("the migration continues; watch it with 'godwit migration watch {id}'");
            follow::events(open, look, |report| progress.show(report), &again).await
        }
        Reader::Agent(client) => loop {
            let report = client.migration(id).await.map_err(failure)?;
            if let Some(ended) = progress.show(report) {
                return Ok(ended);
            }
            tokio::time::sleep(POLL).await;
        },
    }
}

/// A client's error as a command's.
pub fn failure(error: godwit_rpc::ClientError) -> Failure {
    Failure::from(godwit_types::ApiError::from(error))
}

/// The progress line, on standard error and only on a terminal.
struct Progress {
    bar: ProgressBar,
    /// Columns beside the bar.
    room: usize,
    /// Whether what stands in the way has been told.
    is_told: AtomicBool,
    is_json: bool,
}

/// Columns of the longest phase, which stands before the bar.
const PREFIX: usize = 10;

/// Columns of the bar, and those that are left for words beside it and its prefix.
pub fn shape(columns: usize, prefix: usize) -> (usize, usize) {
    let bar = if columns < 110 { 12 } else { 30 };
    // The prefix, its space, the bar's brackets with a space, and the last column, where a terminal wraps.
    (bar, columns.saturating_sub(prefix + 2 + bar + 2 + 1))
}

/// A bar of a thousand steps behind a prefix of so many columns, and the room for words beside it.
pub fn bar(prefix: usize) -> (ProgressBar, usize) {
    let (columns, room) = shape(columns(std::io::stderr()).unwrap_or(80), prefix);
    let bar = ProgressBar::new(1000);
    let template = format!("{{prefix:>{prefix}}} [{{bar:{columns}}}] {{msg}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("=> "));
    }
    (bar, room)
}

impl Progress {
    fn new(output: &Output) -> Self {
        let (bar, room) = bar(PREFIX);
        if output.json {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self {
            bar,
            room,
            is_told: AtomicBool::new(false),
            is_json: output.json,
        }
    }

    /// Shows a migration that goes on; hands back one that has ended.
    fn show(&self, report: MigrationReport) -> Option<MigrationReport> {
        if report.outcome.is_some() {
            return Some(report);
        }
        if let Some(reason) = self.news(&report).filter(|_| !self.is_json) {
            self.bar.suspend(|| plain::tell(reason));
        }
        self.bar.set_prefix(kebab(&report.phase));
        self.bar.set_position(permille(report.done_percent));
        self.bar.set_message(line(&report, self.room));
        None
    }

    /// What stands in the way now, where that was not told yet: a line has room for its beginning alone.
    fn news<'a>(&self, report: &'a MigrationReport) -> Option<&'a str> {
        let reason = report.reason.as_deref();
        let was_told = self.is_told.swap(reason.is_some(), Ordering::Relaxed);
        reason.filter(|_| !was_told)
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Steps of a bar that is full at 100 percent.
pub fn permille(percent: f64) -> u64 {
    (10.0 * percent.clamp(0.0, 100.0)) as u64
}

/// What the bar cannot show, in so many columns; what matters most comes first.
fn line(report: &MigrationReport, columns: usize) -> String {
    let trouble = trouble(report);
    if report.phase != Phase::Precopy {
        let mut parts = vec![format!("{:.1} s", report.total_s)];
        parts.extend(trouble);
        return fitting(&parts, columns);
    }
    let mut parts = vec![format!("{:.0} %", report.done_percent)];
    match trouble {
        Some(trouble) => parts.push(trouble),
        None => parts.push(rate(report.wire_bytes_per_s)),
    }
    parts.push(match report.disk_left_bytes >> 20 {
        0 => format!("{} MiB left", report.remaining_bytes >> 20),
        disks => format!("{disks} MiB of disks left"),
    });
    if let Some(eta) = report.eta_s {
        parts.push(format!("about {eta:.0} s"));
    }
    parts.push(format!("iteration {}", report.pass_number()));
    if report.guest_speed_percent < 100 {
        parts.push(format!("guest slowed to {} %", report.guest_speed_percent));
    }
    let of_disks = report
        .disks_limited_by
        .filter(|_| report.disk_left_bytes > 0);
    let of_pass = report.iterations.last().map(|pass| pass.limited_by);
    if let Some(limited_by) = of_disks.or(of_pass) {
        parts.push(format!("limited by {}", kebab(&limited_by)));
    }
    fitting(&parts, columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::move_report::tests::report;
    use serde_json::json;

    fn moving(fields: serde_json::Value) -> MigrationReport {
        let mut moving = json!({
            "outcome": null, "phase": "precopy", "wire_bytes_per_s": 30.8e6, "done_percent": 24.0,
            "remaining_bytes": 536870912, "pass": {"number": 1, "pages_sent": 1, "zero_pages": 0, "bytes": 1, "seconds": 1.0}
        });
        let fields = fields.as_object().unwrap().clone();
        moving.as_object_mut().unwrap().extend(fields);
        report(moving)
    }

    const WIDE: usize = 200;

    #[test]
    fn the_line_names_rate_rest_and_limit_of_the_pass_under_way() {
        let second = moving(json!({
            "eta_s": 3.2, "guest_speed_percent": 40,
            "iterations": [{"pages_sent": 1, "zero_pages": 0, "bytes": 1, "seconds": 1.0, "limited_by": "guest-writes"}]
        }));
        assert_eq!(
            line(&second, WIDE),
            "24 %, 30.8 MB/s, 512 MiB left, about 3 s, iteration 2, guest slowed to 40 %, limited by guest-writes"
        );
    }

    #[test]
    fn the_first_pass_does_not_show_0_00_gb_per_s() {
        let text = line(&moving(json!({})), WIDE);
        assert_eq!(text, "24 %, 30.8 MB/s, 512 MiB left, iteration 1");
    }

    #[test]
    fn disks_that_are_copied_first_are_what_is_left() {
        let disks = json!({
            "disk_bytes": 9_u64 << 30, "disk_left_bytes": 3_u64 << 30, "eta_s": 99.6,
            "disks_limited_by": "source-disk"
        });
        let text = line(&moving(disks), WIDE);
        assert!(
            text.contains("3072 MiB of disks left, about 100 s"),
            "{text}"
        );
        assert!(text.contains("limited by source-disk"), "{text}");
    }

    #[test]
    fn a_link_that_is_lost_is_said_while_it_lasts() {
        let events = json!([{"at_s": 23.9, "kind": "link-lost", "message": "connection reset"}]);
        let text = line(&moving(json!({ "events": events })), WIDE);
        assert!(text.contains("link lost 3 s ago, remaking"), "{text}");
    }

    #[test]
    fn what_stands_in_the_way_is_told_once_until_it_is_gone() {
        let progress = Progress {
            bar: ProgressBar::hidden(),
            room: WIDE,
            is_told: AtomicBool::new(false),
            is_json: false,
        };
        let setup = |reason| moving(json!({ "phase": "setup", "reason": reason }));
        let (waits, goes_on) = (setup(Some("not connected yet")), setup(None));
        let told = [&goes_on, &waits, &waits, &goes_on, &waits];
        let told = told.map(|report| progress.news(report).is_some());
        assert_eq!(told, [false, true, false, false, true]);
    }

    #[test]
    fn the_line_does_not_wrap_at_80_columns() {
        let long = moving(json!({
            "eta_s": 86_400.0, "guest_speed_percent": 40, "wire_bytes_per_s": 999.9e6,
            "remaining_bytes": u64::MAX, "phase": "precopy",
            "iterations": [{"pages_sent": 1, "zero_pages": 0, "bytes": 1, "seconds": 1.0, "limited_by": "destination-memory"}]
        }));
        let (bar, room) = shape(80, PREFIX);
        let shown = 10 + 2 + bar + 2 + line(&long, room).chars().count();
        assert!(shown < 80, "{shown}");
        assert!(line(&long, room).contains("999.9 MB/s"));
        assert_eq!(shape(0, PREFIX).1, 0);
    }

    #[test]
    fn no_estimate_is_shown_where_none_exists() {
        assert!(!line(&moving(json!({})), WIDE).contains("about"));
    }

    #[test]
    fn nonsense_figures_do_not_overflow() {
        for done in [-1.0, 1e300] {
            assert!(permille(done) <= 1000);
        }
    }
}
