//! Emptying a host: what was asked, how far it is, and why what stays stays.
//!
//! Pure data, both stored and shown. Refuses: a VM that cannot move without a reason.

use crate::ApiError;
use crate::forecast::Prediction;
use crate::ids::{HostName, MigrationId, VmName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Asks for a host to be emptied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// Says what would be done, does nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// Moves at the same time at most; chosen when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_once: Option<u32>,
    /// Only to these hosts; any other than the one that is emptied when none is named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub to: Vec<HostName>,
}

/// Where an emptying is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainState {
    /// Only planned (a dry run).
    Planned,
    /// VMs are moving or about to.
    Draining,
    /// Nothing is left to move; what cannot move is listed. The host takes no new VMs.
    Done,
    /// Ended by its user; the host takes VMs again.
    Stopped,
}

/// Where a VM of a host that is emptied is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DrainStep {
    /// Its turn has not come.
    Waiting,
    /// It is on its way.
    Moving,
    Moved,
    /// It stays as it is; see the reasons.
    CannotMove,
    /// It is off: nothing to move.
    Off,
}

/// A VM of a host that is emptied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainVm {
    #[schema(value_type = String)]
    pub vm: VmName,
    pub step: DrainStep,
    pub memory_mib: u64,
    /// Where it goes or went.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub to: Option<HostName>,
    /// Its migration, begun or ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub migration: Option<MigrationId>,
    /// How often it was tried.
    #[serde(default)]
    pub tries: u32,
    /// Why it cannot move, or why its last try failed; one sentence each, by host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<ApiError>,
    /// What its move is expected to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Percent of its move that is done, while it moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<f64>,
}

impl DrainVm {
    /// One that waits for its turn.
    pub fn waiting(vm: VmName, memory_mib: u64) -> Self {
        Self {
            vm,
            step: DrainStep::Waiting,
            memory_mib,
            to: None,
            migration: None,
            tries: 0,
            reasons: Vec::new(),
            prediction: None,
            percent: None,
        }
    }
}

/// The emptying of a host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainView {
    #[schema(value_type = String)]
    pub host: HostName,
    pub state: DrainState,
    /// When it was asked for, seconds since 1970, UTC.
    pub began_unix_s: u64,
    pub request: DrainRequest,
    /// Its VMs in the order of their moves.
    pub vms: Vec<DrainVm>,
    /// Moves at the same time.
    pub at_once: u32,
    /// Why in this order and so many at once.
    pub plan: String,
    /// Estimated seconds until nothing is left to move, where an honest estimate exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
}

impl DrainView {
    /// VMs that stay, with their reasons.
    pub fn staying(&self) -> impl Iterator<Item = &DrainVm> {
        self.vms
            .iter()
            .filter(|vm| vm.step == DrainStep::CannotMove)
    }
}
