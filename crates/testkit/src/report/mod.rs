//! The demo's report: put together from what each part measured, and made into one page.
//!
//! The input is JSON from programs that may be newer or older than this one, so what is missing is shown as "not
//! measured" and what is unknown is carried along untouched. Nothing is computed here that a reader could not compute
//! from the JSON.

pub mod html;
mod pause;
pub mod svg;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::load::ping::PingReport;
use crate::load::series::{Window, Workload};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Version of this form: 1.
    pub schema: u32,
    pub guest: Guest,
    pub migrations: Vec<Migration>,
    /// What the client saw.
    pub workload: Workload,
    /// What made the report, on what.
    pub made: Made,
    /// Whether all that the guest acknowledged to the load was read back and found equal.
    pub ram_verified: bool,
}

/// What made a report: all of it empty where nobody said.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Made {
    pub godwit: String,
    pub qemu: String,
    pub kernel: String,
    pub command: String,
    /// Fresh memory that one thread of this machine touched per second before the run, GB/s.
    pub first_touch_gb_per_s: Option<f64>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Guest {
    pub accelerator: String,
    pub ram_mib: u64,
    pub vcpus: u32,
    /// What it wrote while it was moved (the largest of all migrations).
    pub dirty_mib_per_s: f64,
}

/// One migration's figures, as `godwit migration show --json` gives them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Migration {
    /// Its id on both hosts.
    pub id: String,
    pub from: String,
    pub to: String,
    /// `completed`, `cancelled`, `failed` or `in-doubt`.
    pub outcome: Option<String>,
    /// `aes-256-gcm` or `none`.
    pub encryption: String,
    pub streams: u32,
    /// From request to running at the destination.
    pub total_s: f64,
    /// No vCPU ran anywhere.
    pub switchover_ms: f64,
    /// The parts of it, by name.
    pub switchover_parts_ms: Map<String, Value>,
    /// Precopy passes and the last one.
    pub iterations: Vec<Iteration>,
    pub bytes_on_wire: u64,
    /// Page bytes a second.
    pub throughput_gb_per_s: f64,
    pub cpu_source_s: f64,
    pub cpu_destination_s: f64,
    /// Longest silence that a 1 ms ping saw around it.
    pub network_gap_ms: Option<f64>,
    /// How far the guest's clock fell behind.
    pub guest_clock_lag_ms: Option<f64>,
    pub promise: Option<Promise>,
    /// When it ran, on the workload's time axis.
    pub window_s: Option<Window>,
    /// What else the product reports.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// One pass over the dirty pages.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Iteration {
    /// Pages sent with their bytes.
    pub pages_sent: u64,
    pub zero_pages: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    pub seconds: f64,
    pub limited_by: String,
}

/// A promise and whether it was kept.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Promise {
    pub max_downtime_ms: f64,
    pub kept: bool,
}

/// When a migration ran by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallWindow {
    /// Start, milliseconds since 1970.
    pub from_unix_ms: u64,
    pub to_unix_ms: u64,
}

/// Puts the report together: gives each migration its window on the workload's time axis and the longest ping gap
/// around it (from its start to 2 s after its end), and judges the workload. Migrations and windows pair up in order.
pub fn compose(mut report: Report, windows: &[WallWindow], ping: Option<&PingReport>) -> Report {
    report.schema = 1;
    let zero = report.workload.started_unix_ms as f64;
    let seconds = |unix_ms: u64| (unix_ms as f64 - zero) / 1e3;
    for (migration, window) in report.migrations.iter_mut().zip(windows) {
        migration.window_s = Some(Window {
            from_s: seconds(window.from_unix_ms),
            to_s: seconds(window.to_unix_ms),
        });
        if let Some(ping) = ping {
            migration.network_gap_ms = longest_gap(ping, window);
        }
    }
    let all: Vec<Window> = report
        .migrations
        .iter()
        .filter_map(|migration| migration.window_s)
        .collect();
    report.workload.judge(&all);
    let dirty = |migration: &Migration| {
        migration
            .other
            .get("dirty_mib_per_s")
            .and_then(Value::as_f64)
    };
    report.guest.dirty_mib_per_s = report
        .migrations
        .iter()
        .filter_map(dirty)
        .fold(0.0, f64::max);
    report
}

/// A migration without a gap long enough to be listed has none that matters: nothing is claimed about it.
fn longest_gap(ping: &PingReport, window: &WallWindow) -> Option<f64> {
    let around = |started: u64, ms: f64| {
        started as f64 + ms >= window.from_unix_ms as f64 && started <= window.to_unix_ms + 2000
    };
    let gaps = ping
        .gaps
        .iter()
        .filter(|gap| around(gap.started_unix_ms, gap.ms));
    gaps.map(|gap| gap.ms).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::ping::Gap;
    use crate::load::series::Second;

    #[test]
    fn windows_gaps_and_judgement_come_together() {
        let row = |t: u32| Second {
            t,
            ops: if t == 5 { 10 } else { 100 },
            p50_ms: 1.0,
            p99_ms: 2.0,
            max_ms: 3.0,
        };
        let workload = Workload {
            started_unix_ms: 1_000_000,
            seconds: (0..12).map(row).collect(),
            ..Workload::default()
        };
        let mut migration = Migration::default();
        migration
            .other
            .insert("dirty_mib_per_s".into(), 12.5.into());
        let report = Report {
            workload,
            migrations: vec![migration],
            ..Report::default()
        };
        let gaps = vec![
            Gap {
                started_unix_ms: 1_001_000,
                ms: 900.0,
            },
            Gap {
                started_unix_ms: 1_005_500,
                ms: 33.0,
            },
            Gap {
                started_unix_ms: 1_005_900,
                ms: 21.0,
            },
        ];
        let ping = PingReport {
            gaps,
            ..PingReport::default()
        };
        let window = WallWindow {
            from_unix_ms: 1_005_000,
            to_unix_ms: 1_006_000,
        };
        let report = compose(report, &[window], Some(&ping));
        assert_eq!(
            report.migrations[0].window_s,
            Some(Window {
                from_s: 5.0,
                to_s: 6.0
            })
        );
        assert_eq!(report.migrations[0].network_gap_ms, Some(33.0));
        assert_eq!(
            (
                report.workload.before_ops_per_s,
                report.workload.during_ops_per_s
            ),
            (100.0, 10.0)
        );
        assert_eq!(report.guest.dirty_mib_per_s, 12.5);
    }

    #[test]
    fn unknown_fields_survive() {
        let text = r#"{"id": "x", "phase": "ended", "guest_speed_percent": 100}"#;
        let migration: Migration = serde_json::from_str(text).unwrap();
        assert_eq!(
            serde_json::to_value(&migration).unwrap()["guest_speed_percent"],
            100
        );
    }
}
