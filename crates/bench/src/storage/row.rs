//! One run of one system in one cell of a bench of disks.
//!
//! The field names are a stable interface. Plain data; refuses nothing.

use crate::row::Measured;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a bench of disks has measured.
pub type Results = crate::row::Results<Row>;

/// One run. Numbers that were not measured are absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// `oio`, `size`, `volumes`, `slow-destination`, `iterations`, `latency`, `double`, `timeline`, `steady`, `local` or `guest`.
    pub scenario: String,
    pub cell: String,
    /// `godwit`, `qsd` (QEMU's storage daemon), `qemu-mirror` (a QEMU without a guest), `qemu-virtio-blk` (one with
    /// a guest, and its own device), or `offline`.
    pub system: String,
    /// How the system was set.
    pub method: String,
    /// Requests that the load keeps under way.
    pub outstanding_ios: u32,
    pub disk_gib: f64,
    pub load: String,
    /// From the command to the disk working with its new image.
    pub total_s: Option<f64>,
    /// What both sides' bytes take at the model's rate, the load's among them.
    pub bound_s: Option<f64>,
    /// How long the guest's CPUs stood still. Empty in every row: moves on one host stop none, and no others are measured.
    pub downtime_ms: Option<f64>,
    /// Longest time without an answer around the change of images.
    pub switch_stall_ms: Option<f64>,
    /// Longest that a request took during the move.
    pub longest_hold_ms: Option<f64>,
    pub iops_before: Option<f64>,
    /// Of a method that gave up: while it tried.
    pub iops_during: Option<f64>,
    /// Mean of the writes during the move, or of all in `steady`, `local` and `guest`.
    pub write_latency_ms: Option<f64>,
    /// Of one write, in ms squared.
    pub write_latency_variance: Option<f64>,
    /// CPU of the process that serves the disk, per request, while nothing is moved.
    pub cpu_us_per_io: Option<f64>,
    /// Bytes that were written to the destination's volume.
    pub bytes_copied: Option<u64>,
    /// By how much the system's estimate at a tenth of the way was wrong, of the time that was left.
    pub eta_error_pct: Option<f64>,
    pub acked_writes_lost: Option<u64>,
    /// Whether every block of the destination was what the log says, after a power cut.
    pub disks_equal: Option<bool>,
    /// `completed`, `cut-off`, `gave up: ...` or `failed: ...`.
    pub outcome: String,
    /// Which repetition, from 1.
    pub run: u32,
    /// When the call of the bench that made it began, whole seconds since 1970.
    pub call_unix_s: u64,
    /// What else is worth keeping: latencies, the course of the load, the models, the machine's load.
    pub details: Value,
}

impl Measured for Row {
    fn is_like(&self, other: &Self) -> bool {
        self.is_at(other) && self.name() == other.name()
    }

    fn outcome(&self) -> &str {
        &self.outcome
    }
}

impl Row {
    /// Whether two are runs in one cell.
    pub fn is_at(&self, other: &Self) -> bool {
        (&self.scenario, &self.cell) == (&other.scenario, &other.cell)
    }

    /// What the system is called in tables.
    pub fn name(&self) -> String {
        format!("{} {}", self.system, self.method)
    }

    pub fn detail(&self, name: &str) -> Option<f64> {
        self.details.get(name)?.as_f64()
    }

    /// How much longer than its bound it took, in percent.
    pub fn over_bound_pct(&self) -> Option<f64> {
        Some((self.total_s? / self.bound_s? - 1.0) * 100.0)
    }
}
