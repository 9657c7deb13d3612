//! One run of one system in one cell, and the file that holds them all; the latter for every bench, whatever its rows are.
//!
//! The field names are a stable interface. Times are seconds or milliseconds by the clock of the one machine that all
//! of it runs on. Plain data; refuses nothing.

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Results<R = Row> {
    /// What it ran on, and how it was prepared.
    pub machine: Value,
    /// A row a run, in the order in which they ran.
    pub rows: Vec<R>,
}

impl<R: Serialize + DeserializeOwned> Results<R> {
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("{} is no bench result", path.display()))
    }

    /// Whoever reads it meanwhile finds the former one whole.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fresh = path.with_extension("json.new");
        std::fs::write(&fresh, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(&fresh, path).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// A row of any bench.
pub trait Measured {
    /// Whether two are runs of one system with the same settings in the same cell.
    fn is_like(&self, other: &Self) -> bool;

    /// `completed`, or what came instead.
    fn outcome(&self) -> &str;

    /// Whether it ran to its end.
    fn completed(&self) -> bool {
        self.outcome() == "completed"
    }
}

/// One run. Numbers that were not measured are absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// `idle`, `zero`, `redis`, `hot`, `link`, `ipv6` or `distance`.
    pub scenario: String,
    /// The cell within the scenario: what differs from the scenario's base.
    pub cell: String,
    /// `godwit`, `qemu-7.2`, `qemu-10.0`, or a limit: `iperf3`, `first-touch`, `aes-256-gcm`.
    pub system: String,
    /// How the system was set.
    pub config: String,
    /// `cold`, or `prepared`: the destination's memory allocated before the copying.
    pub destination: String,
    /// What the preparation took; part of `total_s`.
    pub prepare_s: f64,
    /// `none`, `aes-256-gcm` (Godwit) or `tls` (QEMU).
    pub encryption: String,
    pub streams: u32,
    pub ram_gib: f64,
    pub vcpus: u32,
    /// Rate of the link; absent when it is not shaped.
    pub link_gbps: Option<f64>,
    /// Round trip that the link adds.
    pub rtt_ms: f64,
    /// Packets lost in each direction.
    pub loss_pct: f64,
    /// From the command (which starts the destination's QEMU) to the guest running at the destination.
    pub total_s: Option<f64>,
    /// From the STOP event at the source to the RESUME event at the destination.
    pub switchover_ms: Option<f64>,
    /// Guest memory over the time without the preparation, in units of 10^9 bytes.
    pub throughput_gb_per_s: Option<f64>,
    /// Core-seconds at the source for 10^9 bytes of guest memory; the vCPUs' own are not counted.
    pub cpu_source_s_per_gb: Option<f64>,
    /// The same at the destination.
    pub cpu_destination_s_per_gb: Option<f64>,
    /// Memory of all processes that take part at one host, guest memory and page tables not counted; the larger host.
    pub peak_rss_mib: Option<f64>,
    /// The guest's speed while it was moved over its speed before.
    pub guest_speed_during: Option<f64>,
    /// How fast all cores touched fresh memory right before the move, GB/s: far below the other rows' where a hypervisor has
    /// taken free memory back.
    pub first_touch_gb_per_s: Option<f64>,
    /// Whether the destination held what the source had; see `ram_checked` in the details for what was compared.
    pub ram_equal: Option<bool>,
    /// `completed`, `cut-off`, `failed: ...` or `skipped: ...`.
    pub outcome: String,
    /// Which repetition, from 1.
    pub run: u32,
    /// When the call of the bench that made it began, whole seconds since 1970; 0: not known. Systems take turns within a
    /// call, and only rows of one call are held against each other.
    pub call_unix_s: u64,
    /// What else is worth keeping: effective parameters, the system's own report, the guest second by second.
    pub details: Value,
}

impl Measured for Row {
    fn is_like(&self, other: &Self) -> bool {
        let place = |row: &Self| {
            (
                row.scenario.clone(),
                row.cell.clone(),
                row.destination.clone(),
            )
        };
        let system = |row: &Self| {
            (
                row.system.clone(),
                row.config.clone(),
                row.encryption.clone(),
            )
        };
        place(self) == place(other) && system(self) == system(other)
    }

    fn outcome(&self) -> &str {
        &self.outcome
    }
}

impl Row {
    pub fn detail(&self, name: &str) -> Option<f64> {
        self.details.get(name)?.as_f64()
    }
}

/// Outcome of a run that was ended because it took too long.
pub const CUT_OFF: &str = "cut-off";

#[cfg(test)]
impl Row {
    /// A run of the base cell that came to its end in a second.
    pub fn sample(system: &str, encryption: &str, destination: &str) -> Self {
        Self {
            scenario: "idle".into(),
            cell: "base".into(),
            system: system.into(),
            encryption: encryption.into(),
            destination: destination.into(),
            total_s: Some(1.0),
            outcome: "completed".into(),
            ..Self::default()
        }
    }
}
