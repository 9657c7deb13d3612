//! What pauses cost beside memory, learnt from the reports of earlier migrations.
//!
//! Pure. Owns nothing. Refuses: reports of migrations that did not complete, and figures that no pause can have.

use godwit_types::PAGE_BYTES;
use godwit_types::migration::{MigrationReport, Outcome, SwitchoverParts};

/// Newest migrations that are looked at.
pub const HISTORY: usize = 5;
/// No pause that counts took longer, ms: it would tell of a fault.
const PAUSE_MAX_MS: f64 = 60_000.0;

/// The part of a pause that depends on no memory, as earlier migrations had it: medians.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PauseHistory {
    /// How many migrations it comes from.
    pub moves: usize,
    /// All of the pause but the time in which pages, and last blocks of disks, were on their way, ms.
    pub fixed_ms: f64,
    /// Saving device state, ms.
    pub device_save_ms: f64,
    pub device_load_ms: f64,
    /// Permit: both hosts' journals and the ways of the messages, ms.
    pub permit_ms: f64,
}

impl PauseHistory {
    /// Learns from completed migrations, newest first; nothing without one.
    pub fn of<'a>(reports: impl IntoIterator<Item = &'a MigrationReport>) -> Option<Self> {
        let moves: Vec<(f64, &SwitchoverParts)> = reports
            .into_iter()
            .filter_map(|report| Some((fixed_ms(report)?, &report.switchover_parts_ms)))
            .take(HISTORY)
            .collect();
        let median = |figure: &dyn Fn(&(f64, &SwitchoverParts)) -> f64| {
            let mut figures: Vec<f64> = moves.iter().map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures.get(figures.len() / 2).copied()
        };
        Some(Self {
            moves: moves.len(),
            fixed_ms: median(&|(fixed_ms, _)| *fixed_ms)?,
            device_save_ms: median(&|(_, parts)| parts.device_save_ms)?,
            device_load_ms: median(&|(_, parts)| parts.device_load_ms)?,
            permit_ms: median(&|(_, parts)| parts.permit_ms)?,
        })
    }

    /// What it rests on.
    pub fn basis(&self) -> String {
        match self.moves {
            1 => "pause as in the last migration".into(),
            moves => format!("pause as in the last {moves} migrations"),
        }
    }

    /// Why a pause cannot be shorter.
    pub fn why(&self) -> String {
        let Self {
            device_save_ms,
            device_load_ms,
            permit_ms,
            ..
        } = self;
        let of = match self.moves {
            1 => "in the last migration".to_owned(),
            moves => format!("in the last {moves} migrations"),
        };
        format!(
            "{of} it took {:.0} ms beside the memory (devices saved in {device_save_ms:.0} ms and loaded in {device_load_ms:.0} ms, permit {permit_ms:.0} ms)",
            self.fixed_ms
        )
    }
}

/// A completed migration's pause without the time of its last pages, and of the last blocks of its disks: only those have some that are copied by
/// dirty block tracking or by redo logs, and what they take tells nothing of the next migration.
fn fixed_ms(report: &MigrationReport) -> Option<f64> {
    let parts = &report.switchover_parts_ms;
    let figures = [
        report.switchover_ms,
        parts.last_blocks_ms,
        parts.last_pages_ms,
        parts.device_save_ms,
        parts.device_load_ms,
        parts.permit_ms,
        report.throughput_gb_per_s,
    ];
    let plausible = |figure: &f64| (0.0..=PAUSE_MAX_MS).contains(figure);
    let completed = report.outcome == Some(Outcome::Completed) && report.switchover_ms > 0.0;
    if !completed || !figures.iter().all(plausible) {
        return None;
    }
    let last_pages = report.iterations.last().map_or(0, |pass| pass.pages_sent);
    let bytes_per_s = 1e9 * report.throughput_gb_per_s;
    let sending_ms = match bytes_per_s {
        none if none <= 0.0 => 0.0,
        bytes_per_s => 1e3 * last_pages as f64 * PAGE_BYTES as f64 / bytes_per_s,
    };
    let moving_ms = sending_ms.min(parts.last_pages_ms) + parts.last_blocks_ms;
    Some((report.switchover_ms - moving_ms).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(switchover_ms: f64, last_pages: u64) -> MigrationReport {
        serde_json::from_value(json!({
            "id": "m", "vm": "sq", "from": "a", "to": "b", "outcome": "completed", "phase": "ended", "side": "source",
            "encryption": "none", "streams": 2, "total_s": 1.0, "switchover_ms": switchover_ms,
            "switchover_parts_ms": {"stop_ms": 0.0, "last_pages_ms": 8.0, "device_save_ms": 36.0,
                "device_load_ms": 27.0, "permit_ms": 29.0, "resume_ms": 0.0},
            "iterations": [{"pages_sent": last_pages, "zero_pages": 0, "bytes": 1, "seconds": 0.01, "limited_by": "link"}],
            "bytes_on_wire": 1, "throughput_gb_per_s": 0.4096, "cpu_source_s": 0.0,
            "cpu_destination_s": 0.0, "dirty_mib_per_s": 0.0, "promise": {"max_downtime_ms": 50, "kept": false},
            "ram_mib": 512, "remaining_bytes": 0, "guest_speed_percent": 100, "began_unix_s": 0
        }))
        .unwrap()
    }

    #[test]
    fn the_pause_is_learnt_without_its_last_pages() {
        // 400 pages at 0.4096 GB/s: 4 ms of the 8 ms of the last pages.
        let reports = [report(100.0, 400), report(71.0, 400), report(188.0, 400)];
        let history = PauseHistory::of(&reports).unwrap();
        assert_eq!(history.moves, 3);
        assert!((history.fixed_ms - 96.0).abs() < 1e-9, "{history:?}");
        assert!(history.why().contains("saved in 36 ms and loaded in 27 ms"));
        // More pages than the part can have sent take no more than the part.
        let history = PauseHistory::of(&[report(100.0, 40_000)]).unwrap();
        assert_eq!(history.fixed_ms, 92.0);
    }

    #[test]
    fn last_blocks_of_disks_teach_nothing_of_later_pauses() {
        let mut tracked = report(2600.0, 400);
        tracked.switchover_parts_ms.last_blocks_ms = 2500.0;
        let history = PauseHistory::of(&[tracked]).unwrap();
        assert!((history.fixed_ms - 96.0).abs() < 1e-9, "{history:?}");
    }

    #[test]
    fn what_did_not_complete_and_what_no_pause_can_be_teaches_nothing() {
        assert_eq!(PauseHistory::of(&[]), None);
        let mut failed = report(100.0, 1);
        failed.outcome = Some(Outcome::Failed);
        let nonsense = [f64::NAN, -1.0, 1e300].map(|ms| MigrationReport {
            switchover_ms: ms,
            ..report(1.0, 1)
        });
        assert_eq!(PauseHistory::of(nonsense.iter().chain([&failed])), None);
    }
}
