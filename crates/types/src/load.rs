//! What a host is busy with: its migration interfaces, its cores, and each migration's share.
//!
//! Pure data: the agent reads counters, the controller gathers, people watch.

use crate::ids::{HostName, MigrationId, VmName};
use crate::migration::{Phase, Side};
use crate::round::{rounded, rounded_option};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use utoipa::ToSchema;

/// Traffic of an interface that carries migrations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InterfaceLoad {
    pub name: String,
    /// Migration addresses on it.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Its speed as its driver says, Mb/s; none where it does not.
    pub speed_mbit_per_s: Option<u64>,
    /// Bytes received per second.
    #[serde(serialize_with = "rounded")]
    pub received_bytes_per_s: f64,
    /// Bytes sent per second.
    #[serde(serialize_with = "rounded")]
    pub sent_bytes_per_s: f64,
}

/// A migration as one of its hosts sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationLoad {
    #[schema(value_type = String)]
    pub id: MigrationId,
    #[schema(value_type = String)]
    pub vm: VmName,
    #[schema(value_type = String)]
    pub from: HostName,
    #[schema(value_type = String)]
    pub to: HostName,
    /// Which side this host is.
    pub side: Side,
    pub phase: Phase,
    pub streams: u32,
    /// Bytes per second that this migration's own data channels carried.
    #[serde(serialize_with = "rounded")]
    pub bytes_per_s: f64,
    /// CPU of the VM process, percent of one core.
    #[serde(serialize_with = "rounded")]
    pub cpu_percent: f64,
    /// CPU of its busiest thread, percent of one core: at 100 that thread is the limit.
    #[serde(serialize_with = "rounded")]
    pub busiest_thread_percent: f64,
    pub busiest_thread: String,
    /// CPU of the hypervisor, percent of one core.
    #[serde(serialize_with = "rounded")]
    pub hypervisor_cpu_percent: f64,
    /// Percent of what has to go that has gone; 0 at a destination, which does not know.
    #[serde(serialize_with = "rounded")]
    pub percent: f64,
    /// Percent of its speed that the guest is left with.
    pub guest_speed_percent: u32,
    /// Estimated seconds to the end.
    #[serde(default, serialize_with = "rounded_option")]
    pub eta_s: Option<f64>,
}

/// What a host is busy with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostLoad {
    #[schema(value_type = String)]
    pub host: HostName,
    /// Rates are averages over this time, s.
    #[serde(serialize_with = "rounded")]
    pub seconds: f64,
    /// Cores.
    pub cpus: u32,
    /// CPU in use, percent of all cores.
    #[serde(serialize_with = "rounded")]
    pub cpu_percent: f64,
    pub memory_total_mib: u64,
    /// Memory that a new guest could have, MiB.
    pub memory_free_mib: u64,
    /// Interfaces that carry migrations.
    pub interfaces: Vec<InterfaceLoad>,
    pub migrations: Vec<MigrationLoad>,
}

/// One host among all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostTop {
    #[schema(value_type = String)]
    pub host: HostName,
    /// What it is busy with; none when it does not answer.
    pub load: Option<HostLoad>,
    /// Whether it is being emptied.
    pub draining: bool,
}
