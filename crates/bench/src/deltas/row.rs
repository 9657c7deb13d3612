//! One run of one system in one cell of a bench of disks over one image.
//!
//! The field names are a stable interface. Plain data; refuses nothing.

use serde::{Deserialize, Serialize};

/// What such a bench has measured.
pub type Results = crate::row::Results<Row>;

/// One run. Numbers that were not measured are absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    pub cell: String,
    pub system: String,
    pub run: u32,
    /// `completed`, or what came instead.
    pub outcome: String,
    /// Requests of all disks a second.
    pub iops: Option<f64>,
    pub write_median_ms: Option<f64>,
    pub write_p99_ms: Option<f64>,
    /// Core-microseconds of those who serve, for each request.
    pub cpu_us_per_io: Option<f64>,
    /// Bytes that the load wrote, and of how many blocks.
    pub written_bytes: Option<u64>,
    pub distinct_bytes: Option<u64>,
    /// Bytes that those who serve gave the kernel to write (`write_bytes` in /proc/PID/io), for each byte that the load wrote.
    pub write_amplification: Option<f64>,
    /// Bytes that the overlays take beyond what empty ones do, for each byte of a block that was written.
    pub space_amplification: Option<f64>,
    /// Bytes that they take when they are made, for each disk.
    pub empty_bytes: Option<u64>,
}
