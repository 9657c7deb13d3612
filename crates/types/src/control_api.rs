//! Bodies of the controller's REST interface.
//!
//! Pure data. Everything that a script reads is here or in a type named here; field names are stable.

use crate::certificate::CertificateDates;
use crate::disk_activity::DiskActivity;
use crate::guest::GuestInfo;
use crate::host::{Check, HostInfo};
use crate::ids::{Generation, HostName, VmName};
use crate::text::read_sentence;
use crate::vm::{VmSpec, VmState};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use zeroize::Zeroize as _;

/// Whether the controller has heard from a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    Connected,
    /// Its agent does not answer.
    Unreachable,
}

/// A host in the inventory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// What the host said of itself last.
    #[serde(flatten)]
    pub info: HostInfo,
    pub state: HostState,
    /// VMs whose right to run it holds.
    #[schema(value_type = Vec<String>)]
    pub vms: Vec<VmName>,
    /// Those of them that are off: no guest of theirs is there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub vms_off: Vec<VmName>,
    /// Seconds since it was last heard.
    pub last_seen_s: u64,
    /// Whether it is being emptied and takes no new VMs.
    #[serde(default)]
    pub draining: bool,
    /// Whether a person said that it is off.
    #[serde(default)]
    pub fenced: bool,
    /// What stands against it: an old copy of its disk, or a second machine with its certificate.
    #[serde(default)]
    #[schema(value_type = String)]
    pub standing: crate::site::Standing,
}

impl HostView {
    /// How many of its VMs are on.
    pub fn vms_on(&self) -> usize {
        self.vms.len().saturating_sub(self.vms_off.len())
    }
}

/// A VM in the inventory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// As it was described.
    pub spec: VmSpec,
    /// Where it is in its life.
    pub state: VmState,
    /// The host that holds it; none before its first start.
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// Generation of the right to run it.
    #[schema(value_type = u64)]
    pub generation: Generation,
    /// Seconds since the host was last heard whose word this is; more than a few when it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<u64>,
    /// Hosts that hold it, when there is more than one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub copies: Vec<HostName>,
    /// The migration under way, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<String>,
    /// Version of Godwit that its VM process is of; none while there is no process, or one that does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_process_version: Option<String>,
    /// What runs it: `kvm` or `tcg`; none while stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<crate::vm::Accelerator>,
    /// What a person should know or do: why it crashed, or the command that ends an in-doubt state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What its disks do, while its host answers and serves them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskActivity>,
    /// What its guest says of itself, while its host answers and the guest has an agent that does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestInfo>,
}

/// A new one-time token for a host to join with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinToken {
    /// The token; it carries the CA's fingerprint.
    pub token: String,
    /// The whole command to run on the new host.
    pub command: String,
    /// Seconds that it is good for.
    pub valid_for_s: u64,
}

/// What a joining host sends.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinRequest {
    /// The secret part of the token.
    pub secret: String,
    /// The host's chosen name.
    #[schema(value_type = String)]
    pub name: HostName,
    /// Where its agent listens.
    #[schema(value_type = String)]
    pub agent_address: std::net::SocketAddr,
    /// Certificate signing request, PEM.
    pub csr_pem: String,
    /// Of a host that is enrolled and whose certificate has ended: that it is that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<FormerCertificate>,
}

impl std::fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JoinRequest({}, secret not shown)", self.name)
    }
}

impl Drop for JoinRequest {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

/// Shows that whoever asks has the key of a certificate that may have ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FormerCertificate {
    pub certificate_pem: String,
    /// Signature of its key over the token's secret and the signing request, hex.
    pub signature: String,
}

/// What somebody sends whose certificate is to be renewed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenewRequest {
    /// Certificate signing request for a new key, PEM.
    pub csr_pem: String,
}

/// What an operator's first certificate is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OperatorRequest {
    #[schema(value_type = String)]
    pub name: HostName,
    /// Certificate signing request, PEM.
    pub csr_pem: String,
}

/// An operator's certificate, renewals included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OperatorView {
    pub name: String,
    /// Serial number of the first certificate, lower-case hex, which renewed ones name.
    pub life: String,
    /// When the newest one was made and when it ends.
    #[serde(flatten)]
    pub dates: CertificateDates,
}

/// What it gets back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JoinResponse {
    pub certificate_pem: String,
    /// The CA's certificate, PEM.
    pub ca_pem: String,
}

/// What a host check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostCheck {
    #[schema(value_type = String)]
    pub host: HostName,
    pub checks: Vec<Check>,
}

/// Where to start a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRequest {
    /// Host; chosen by free memory when absent.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub on: Option<HostName>,
}

/// How to stop a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopRequest {
    /// Power off at once instead of asking the guest.
    #[serde(default)]
    pub force: bool,
}

/// Settles an in-doubt VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveRequest {
    /// The host that shall run it; with `give_up`, the host that shall not.
    #[schema(value_type = String)]
    pub run_on: HostName,
    /// That host gives up what it has of the VM: a destination that is ready cannot know whether the source ran on.
    #[serde(default)]
    pub give_up: bool,
    /// The operator has made sure that this other host is powered off.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub confirm_fenced: Option<HostName>,
}

/// Settles a VM that several hosts hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KeepRequest {
    /// The host whose copy goes on; every other copy is ended, with its memory.
    #[schema(value_type = String)]
    pub host: HostName,
}

/// Answer to an operation that was begun or done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// One sentence for a person: one line of bounded length, whoever said it.
    #[serde(deserialize_with = "read_sentence")]
    pub message: String,
}

/// A disk of a VM that is being made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskMaking {
    pub disk: String,
    /// How much of what it is made from is done, bytes.
    pub done_bytes: u64,
    /// How much that is in all.
    pub total_bytes: u64,
}

/// How far the disks of a VM are that is to start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DisksMaking {
    /// The one that is made now; none once all are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making: Option<DiskMaking>,
}

/// Answer to a start; for who does not know of disks that are made, a [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Started {
    /// One sentence for a person, as in [`Done`].
    #[serde(deserialize_with = "read_sentence")]
    pub message: String,
    /// The VM does not run yet, since this disk is made first: to ask again goes on with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub making: Option<DiskMaking>,
}

/// Answer to a migration that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationBegun {
    /// Its id; watch it under `/v1/migrations/ID`.
    pub id: String,
    /// Targets that it will probably miss, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Why a migration is cancelled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelRequest {
    /// One sentence; "cancelled by its user" when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The migration's VM: a host that has not heard of the migration yet then refuses it for good. The controller
    /// adds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub vm: Option<VmName>,
}

/// The last bytes that a guest wrote to its serial console.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleText {
    /// As text; what is not UTF-8 is replaced.
    pub text: String,
    /// The host whose QEMU kept it; none where that is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub host: Option<HostName>,
    /// Since when that QEMU runs the guest, seconds since 1970. Unless the text came along, what the guest wrote before is not in
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_unix_s: Option<u64>,
    /// The host that the guest came from then, running; none where it was booted there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub came_from: Option<HostName>,
    /// The text came along from there: it holds what the guest wrote before it was moved, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub came_along: bool,
}

/// A request that needs no parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Empty {}

/// What a controller says of its own build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VersionView {
    pub version: String,
    /// What it speaks with hosts.
    #[serde(default)]
    pub speaks: crate::version::Speaks,
    /// Fingerprint of the CA, hex.
    pub ca_fingerprint: String,
}

/// A change of the inventory, as sent on the event stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum InventoryEvent {
    /// A host came, went, or changed its state.
    Host { name: String },
    /// A VM came, went, or changed its state or place.
    Vm { name: String },
    /// A migration began or ended.
    Migration { id: String },
    /// The emptying of a host began, went on or ended.
    Drain { host: String },
    /// Several hosts hold a VM; a copy has been paused.
    RunningTwice { name: String, hosts: Vec<String> },
    /// How the whole site stands has changed: an alarm that concerns no single VM came or ended.
    Site,
    /// Events were lost because the reader is slow: read the lists again.
    Missed,
}
