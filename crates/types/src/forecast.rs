//! What is measured before a migration, and what it lets one expect.
//!
//! Pure data: the VM process measures writes, the agents measure the link, the controller predicts. Refuses: figures
//! without their basis, which every prediction carries as a sentence.

use crate::ids::MigrationId;
use crate::migration::{Cipher, MigrationSecret};
use crate::round::{rounded, rounded_finely, rounded_option};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use utoipa::ToSchema;

/// What a migration is expected to be.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Prediction {
    /// From the request to the guest running at the destination, s.
    #[serde(serialize_with = "rounded")]
    pub total_s: f64,
    /// No vCPU runs anywhere for this long, ms.
    #[serde(serialize_with = "rounded")]
    pub downtime_ms: f64,
    /// Percent of its speed that the guest is left with while it is slowed; 100 = not slowed.
    pub guest_speed_percent: u32,
    /// Page bytes per second that the move gets through, GB/s.
    #[serde(serialize_with = "rounded_finely")]
    pub throughput_gb_per_s: f64,
    /// What the guest writes anew per second at the pace of the passes, MiB/s.
    #[serde(serialize_with = "rounded")]
    pub dirty_mib_per_s: f64,
    /// Guest memory that has content, MiB.
    pub data_mib: u64,
    /// What these figures rest on, one sentence.
    pub basis: String,
}

/// Which target of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PromiseKind {
    /// Done within so many seconds.
    Deadline,
    /// Pause of so many milliseconds at most.
    MaxDowntime,
    /// Guest slowed by so many percent at most.
    MaxGuestSlowdown,
}

/// A target that the prediction says cannot be met; the names are older than the word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CannotKeep {
    pub promise: PromiseKind,
    /// What was asked: s, ms or percent.
    #[serde(serialize_with = "rounded")]
    pub asked: f64,
    /// What is expected, in the same unit; none where no value would do.
    #[serde(default, serialize_with = "rounded_option")]
    pub predicted: Option<f64>,
    /// One sentence: why, and what would help.
    pub message: String,
}

/// Different pages written within a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DirtyAge {
    /// The time since the first look, s.
    pub seconds: f64,
    /// Guest memory written at least once in it, MiB.
    pub mib: f64,
}

/// How a running guest uses its memory, measured at its host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DirtyRate {
    pub ram_mib: u64,
    /// Guest memory that has content, MiB.
    pub data_mib: u64,
    /// What was written, oldest look last.
    pub ages: Vec<DirtyAge>,
}

/// Has a host listen for a burst of records that measures the link to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkProbeListen {
    /// Names the burst in both hosts' logs.
    pub id: MigrationId,
    /// Key and nonce of the burst alone.
    pub secret: MigrationSecret,
    /// Whether records are sealed, as in the migration to come.
    pub cipher: Cipher,
}

/// The answer of a host that waits for the burst.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkProbeReady {
    /// Migration addresses with ports, best first.
    pub addresses: Vec<SocketAddr>,
}

/// Has the other host send the burst.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LinkProbeSend {
    /// What the listener was told.
    pub listen: LinkProbeListen,
    pub destination_addresses: Vec<SocketAddr>,
    /// Addresses to send from.
    pub source_addresses: Vec<IpAddr>,
    pub streams: u32,
    /// How long to send at most, ms.
    pub millis: u64,
}

/// What the burst showed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasured {
    /// Page bytes per second that arrived.
    pub bytes_per_s: f64,
    pub rtt_ms: f64,
    /// Data channels that carried them.
    pub streams: u32,
    /// How long it was sent, s.
    pub seconds: f64,
}
