//! Watching a migration: live progress, then the report.
//!
//! Owns the progress line. Ctrl-C detaches; it never cancels. Refuses: to show an estimate where none is honest.

use crate::connect::Reader;
use crate::exit::{DETACHED, Failure, exit_of_outcome};
use crate::output::{Output, kebab};
use godwit_rpc::ControllerClient;
use godwit_types::migration::{IterationReport, MigrationReport, Phase};
use godwit_types::{ErrorCode, MigrationId};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// Longest silence of the event stream, which speaks several times a second.
const SILENCE: Duration = Duration::from_secs(30);
/// Pause between two looks where there is no event stream.
const POLL: Duration = Duration::from_millis(500);
/// How often a broken event stream is opened again.
const REOPEN_MAX: u32 = 5;

/// Watches until the migration ends, shows its report, and fails unless it completed.
pub async fn watch(reader: &Reader, id: &MigrationId, output: &Output) -> Result<(), Failure> {
    let progress = Progress::new(output);
    let ended = tokio::select! {
        ended = follow(reader, id, &progress) => ended,
        _ = tokio::signal::ctrl_c() => {
            progress.clear();
            return Err(detached(id, output));
        }
    };
    progress.clear();
    let report = ended?;
    output.show(&report, |output, report| output.migration(report));
    match exit_of_outcome(report.outcome) {
        0 => Ok(()),
        exit => Err(Failure::told(exit)),
    }
}

fn detached(id: &MigrationId, output: &Output) -> Failure {
    if output.json {
        output.json(&serde_json::json!({ "detached": true, "id": id }));
    } else {
        eprintln!(
            "\nDetached: the migration goes on.\n  watch it again:  godwit migration watch {id}\n  stop it:         godwit migration cancel {id}"
        );
    }
    Failure::told(DETACHED)
}

async fn follow(
    reader: &Reader,
    id: &MigrationId,
    progress: &Progress,
) -> Result<MigrationReport, Failure> {
    match reader {
        Reader::Controller(client) => follow_events(client, id, progress).await,
        Reader::Agent(client) => loop {
            let report = client.migration(id).await.map_err(failure)?;
            if report.outcome.is_some() {
                return Ok(report);
            }
            progress.show(&report);
            tokio::time::sleep(POLL).await;
        },
    }
}

/// A client's error as a command's.
pub fn failure(error: godwit_rpc::ClientError) -> Failure {
    Failure::from(godwit_types::ApiError::from(error))
}

async fn follow_events(
    client: &ControllerClient,
    id: &MigrationId,
    progress: &Progress,
) -> Result<MigrationReport, Failure> {
    let mut broken = 0;
    loop {
        match one_stream(client, id, progress).await {
            Ok(Some(report)) => return Ok(report),
            Ok(None) => {}
            // What was refused stays refused; a controller that restarts comes back.
            Err(error) if !error.may_be_done() && broken == 0 => return Err(failure(error)),
            Err(error) if broken >= REOPEN_MAX => {
                let message = format!(
                    "{error}; the migration goes on, watch it with 'godwit migration watch {id}'"
                );
                return Err(Failure::new(ErrorCode::HostUnreachable, message));
            }
            Err(_) => {}
        }
        broken += 1;
        tokio::time::sleep(POLL * broken).await;
    }
}

/// One event stream to its end; the last report if the migration has ended.
async fn one_stream(
    client: &ControllerClient,
    id: &MigrationId,
    progress: &Progress,
) -> Result<Option<MigrationReport>, godwit_rpc::ClientError> {
    let mut events = client.migration_events(id).await?;
    while let Some(event) = events.next(SILENCE).await? {
        let Ok(report) = serde_json::from_str::<MigrationReport>(&event.data) else {
            continue;
        };
        if report.outcome.is_some() {
            return Ok(Some(report));
        }
        progress.show(&report);
    }
    let report = client.migration(id).await?;
    Ok(report.outcome.is_some().then_some(report))
}

/// The progress line, on standard error and only on a terminal.
struct Progress(ProgressBar);

impl Progress {
    fn new(output: &Output) -> Self {
        if output.json {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(1000);
        if let Ok(style) = ProgressStyle::with_template("{prefix:>10} [{bar:30}] {msg}") {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    fn show(&self, report: &MigrationReport) {
        self.0.set_prefix(kebab(&report.phase));
        self.0.set_position(permille(report));
        self.0.set_message(line(report));
    }

    fn clear(&self) {
        self.0.finish_and_clear();
    }
}

fn permille(report: &MigrationReport) -> u64 {
    let total = u128::from(report.ram_mib << 20).max(1);
    let left = u128::from(report.remaining_bytes).min(total);
    u64::try_from((total - left) * 1000 / total).unwrap_or(0)
}

fn line(report: &MigrationReport) -> String {
    if report.phase != Phase::Precopy {
        return format!("{:.1} s", report.total_s);
    }
    let mut parts = vec![
        format!("{}%", permille(report) / 10),
        format!("{:.2} GB/s", report.throughput_gb_per_s),
        format!("iteration {}", report.iterations.len().max(1)),
        format!("{} MiB left", report.remaining_bytes >> 20),
    ];
    if let Some(eta) = report.eta_s {
        parts.push(format!("about {eta:.0} s"));
    }
    if let Some(IterationReport { limited_by, .. }) = report.iterations.last() {
        parts.push(format!("limited by {}", kebab(limited_by)));
    }
    if report.guest_speed_percent < 100 {
        parts.push(format!("guest slowed to {}%", report.guest_speed_percent));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(json: serde_json::Value) -> MigrationReport {
        let mut base = serde_json::json!({
            "id": "m", "vm": "web", "from": "a", "to": "b", "outcome": null, "phase": "precopy", "side": "source",
            "encryption": "none", "streams": 2, "total_s": 1.0, "switchover_ms": 0.0,
            "switchover_parts_ms": {"stop_ms": 0.0, "last_pages_ms": 0.0, "device_save_ms": 0.0,
                "device_load_ms": 0.0, "permit_ms": 0.0, "resume_ms": 0.0},
            "iterations": [], "bytes_on_wire": 0, "throughput_gb_per_s": 1.5, "cpu_source_s": 0.0,
            "cpu_destination_s": 0.0, "dirty_mib_per_s": 0.0, "promise": {"max_downtime_ms": 50, "kept": false},
            "ram_mib": 1024, "remaining_bytes": 536870912, "guest_speed_percent": 100, "began_unix_s": 0
        });
        base.as_object_mut()
            .unwrap()
            .extend(json.as_object().unwrap().clone());
        serde_json::from_value(base).unwrap()
    }

    #[test]
    fn the_line_names_rate_rest_and_limit() {
        let text = line(&report(serde_json::json!({
            "eta_s": 3.2, "guest_speed_percent": 40,
            "iterations": [{"pages_sent": 1, "zero_pages": 0, "bytes": 1, "seconds": 1.0, "limited_by": "guest-writes"}]
        })));
        let expected = "50%, 1.50 GB/s, iteration 1, 512 MiB left, about 3 s, limited by guest-writes, guest slowed to 40%";
        assert_eq!(text, expected);
    }

    #[test]
    fn no_estimate_is_shown_where_none_exists() {
        assert!(!line(&report(serde_json::json!({}))).contains("about"));
    }

    #[test]
    fn nonsense_sizes_do_not_overflow() {
        let odd = report(serde_json::json!({ "ram_mib": 0, "remaining_bytes": u64::MAX }));
        assert_eq!(permille(&odd), 0);
    }
}
