//! What a host is, can do, and lacks.
//!
//! Pure data: the agent measures, the controller stores, people read.

use crate::certificate::CertificateInfo;
use crate::datastore::Datastores;
use crate::ids::{HostName, PortGroup, VmName};
use crate::site::{Instance, SiteHeard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use utoipa::ToSchema;

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// As it mostly is: worth knowing, nothing has to be done.
    Note,
    /// Works, but not at its best.
    Warning,
    Failed,
}

/// One check of a host, with its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Check {
    /// Short name: `kernel`, `userfaultfd`, `qemu`, `cpu`, `aes`, `mtu`, `clock`, `ports`, `huge-pages`...
    pub name: String,
    pub status: CheckStatus,
    pub found: String,
    /// What to do; empty when fine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// What a host reports of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostInfo {
    #[schema(value_type = String)]
    pub name: HostName,
    pub version: String,
    /// What it speaks with others.
    #[serde(default)]
    pub speaks: crate::version::Speaks,
    pub kernel: String,
    pub qemu: String,
    /// What runs guests by default: `kvm` or `tcg`.
    pub accelerator: crate::vm::Accelerator,
    /// Machine types that its QEMU knows, versioned names.
    pub machine_types: Vec<String>,
    /// What `q35` and `pc` stand for here.
    pub machine_aliases: BTreeMap<String, String>,
    /// CPU models that it can give a guest whole, under what runs guests by default.
    pub cpu_models: Vec<String>,
    /// The same under each accelerator that it could ask; empty from an agent that did not ask.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cpu_models_under: BTreeMap<crate::vm::Accelerator, Vec<String>>,
    /// Whether it encrypts migrations.
    pub encryption: bool,
    /// Port groups and the bridge each stands for.
    #[schema(value_type = BTreeMap<String, String>)]
    pub port_groups: BTreeMap<PortGroup, String>,
    /// Addresses on its migration networks.
    #[schema(value_type = Vec<String>)]
    pub migration_addresses: Vec<IpAddr>,
    /// Where its agent listens.
    #[schema(value_type = String)]
    pub agent_address: SocketAddr,
    pub memory_total_mib: u64,
    /// Memory that a new guest could have, MiB.
    pub memory_free_mib: u64,
    /// Cores.
    pub cpus: u32,
    /// Changes at each boot of the host.
    pub boot_id: String,
    /// Which of the host's lives speaks.
    #[serde(default)]
    pub instance: Instance,
    /// What it has heard of the controller's words.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub site: SiteHeard,
    /// Its configuration has `boot = "alone"`, which is ignored since a second host is known.
    #[serde(default)]
    pub boot_alone_ignored: bool,
    /// It powered its guests down, or does so, and runs none before its next boot or 'godwit host open' on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closing: bool,
    /// VMs of which this host's record cannot be read, each with the host's own sentence of what to do.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = BTreeMap<String, String>)]
    pub unread: BTreeMap<VmName, String>,
    /// Its certificate; none of an agent that says nothing of it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificateInfo>,
    /// Named places for disks that it has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = BTreeMap<String, crate::datastore::Datastore>)]
    pub datastores: Datastores,
}

impl HostInfo {
    /// CPU models that it can give a guest under an accelerator.
    pub fn models_under(&self, accelerator: crate::vm::Accelerator) -> &[String] {
        if self.cpu_models_under.is_empty() {
            return &self.cpu_models;
        }
        let found = self.cpu_models_under.get(&accelerator);
        found.map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether it can give a guest this CPU model under an accelerator.
    pub fn gives(&self, accelerator: crate::vm::Accelerator, model: &str) -> bool {
        let mut models = self.models_under(accelerator).iter();
        models.any(|known| known == model)
    }
}
