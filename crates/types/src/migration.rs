//! A migration as it is asked for, specified, watched and reported.
//!
//! Pure data. The report's field names are a stable interface; units are in the names.

use crate::disk_move::{DiskIterations, Method, Optimisation, SentLogs};
pub use crate::disk_to_move::{DiskToMove, LinkedTo};
pub use crate::forecast::{CannotKeep, Prediction};
use crate::ids::{DatastoreName, Generation, HostName, MigrationId, VmName};
use crate::image::KnownImage;
use crate::round::{rounded, rounded_finely, rounded_option};
pub use crate::switchover::SwitchoverParts;
use crate::vm::EncryptionMode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use utoipa::ToSchema;
use zeroize::{Zeroize, ZeroizeOnDrop};

/// What a host knows of a migration that the other one gave up without saying more, as [`MigrationReport::reason`].
pub const PEER_GAVE_UP: &str = "the other host gave the migration up; see its log";

/// Longer than either side of a migration waits for a link that is broken: by then a host that was not told that the
/// migration is over has given it up by itself.
pub const GIVEN_UP_WITHIN: Duration = Duration::from_secs(90);

/// How the reason begins that a controller gives the hosts of a migration that could not begin: nobody cancelled that
/// one, so that it failed.
pub const COULD_NOT_BEGIN: &str = "it could not begin: ";

/// Says that no way leads from one host to the other, and why.
pub fn not_reached(from: &HostName, to: &HostName, why: impl fmt::Display) -> String {
    format!("host {from} cannot reach host {to} for a migration: {why}")
}

/// Says why no way works, and which were tried: from an address of this host to one of the other's.
pub fn with_ways(
    why: impl fmt::Display,
    ways: impl IntoIterator<Item = (Option<IpAddr>, SocketAddr)>,
) -> String {
    let way = |(from, to): (Option<IpAddr>, SocketAddr)| match from {
        Some(from) => format!("from {from} to {to}"),
        None => format!("to {to}"),
    };
    let ways: Vec<String> = ways.into_iter().map(way).collect();
    format!("{why} (tried {})", ways.join(", "))
}

/// Downtime that a migration aims at unless asked otherwise, ms.
pub const MAX_DOWNTIME_MS_DEFAULT: u64 = 50;

fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

/// What a user may ask of a migration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    #[schema(value_type = String)]
    pub to: HostName,
    /// Overrides the VM's encryption mode for this move (never below `required`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionMode>,
    /// Longest pause, ms; 50 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_downtime_ms: Option<u64>,
    /// Cancel when not done after this long, s; the guest stays at the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_s: Option<u64>,
    /// Cap of the migration's traffic, Mb/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth_mbit_per_s: Option<u64>,
    /// The guest is slowed by so many percent at most, also where it does not converge; no limit when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_guest_slowdown_percent: Option<u32>,
    /// Have the destination allocate the guest's memory before anything is sent.
    #[serde(default)]
    pub prepare: bool,
    /// Refuse to begin when the prediction says that a target cannot be met; without it that is a warning.
    #[serde(default)]
    pub must_keep: bool,
    /// Run all preflight checks and predict, start nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// Datastores of the destination for disks that go along, by the disk's name. One that is not named comes to the datastore
    /// of the name of the one that it is in, and else to the path that it has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = BTreeMap<String, String>)]
    pub disks: BTreeMap<String, DatastoreName>,
    /// How disks that go along are copied.
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// What `dirty-tracking` is to do without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
}

impl MigrateRequest {
    /// A move to this host that nothing special is asked of: what a request means that names the host alone.
    ///
    /// The VM's own encryption mode, the default downtime, no deadline, no cap, no limit to how far the guest may be
    /// slowed; memory is allocated as pages arrive, a target that cannot be met is a warning, and it really begins.
    pub fn plain(to: HostName) -> Self {
        Self {
            to,
            encryption: None,
            max_downtime_ms: None,
            deadline_s: None,
            max_bandwidth_mbit_per_s: None,
            max_guest_slowdown_percent: None,
            prepare: false,
            must_keep: false,
            dry_run: false,
            disks: BTreeMap::new(),
            method: Method::default(),
            without: Vec::new(),
        }
    }
}

/// The secret of one migration: 256-bit key and 64-bit nonce. Never printed, never stored.
#[derive(Clone, Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
pub struct MigrationSecret {
    /// 32 bytes, base64.
    #[serde(with = "crate::base64_bytes")]
    pub key: Vec<u8>,
    /// 8 bytes, base64.
    #[serde(with = "crate::base64_bytes")]
    pub nonce: Vec<u8>,
}

impl std::fmt::Debug for MigrationSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MigrationSecret(not shown)")
    }
}

/// Encryption that a migration uses, decided by the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum Cipher {
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
    /// Memory pages in clear; handshake and control channel sealed.
    #[serde(rename = "none")]
    None,
}

/// How a host's agent is reached by the other host's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentAddress {
    #[schema(value_type = String)]
    pub host: HostName,
    #[schema(value_type = String)]
    pub address: SocketAddr,
}

/// What the controller gives to both hosts before a migration begins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MigrationSpec {
    /// The migration's id on both hosts.
    pub id: MigrationId,
    pub vm: VmName,
    /// The permission: above every generation that the controller knows of the VM. A host that knows one as high
    /// refuses the migration; its attempts to switch over take this generation or a later one.
    pub generation: Generation,
    /// Where it runs now.
    pub source: AgentAddress,
    pub destination: AgentAddress,
    pub secret: MigrationSecret,
    /// Encryption of memory pages.
    pub cipher: Cipher,
    /// Longest pause aimed at, ms.
    pub max_downtime_ms: u64,
    /// Give up after this long, s.
    pub deadline_s: Option<u64>,
    /// Cap, Mb/s.
    pub max_bandwidth_mbit_per_s: Option<u64>,
    /// The guest keeps at least 100 less this percent of its speed until the switchover; no limit when absent.
    #[serde(default)]
    pub max_guest_slowdown_percent: Option<u32>,
    /// The destination allocates the guest's memory before anything is sent.
    #[serde(default)]
    pub prepare_memory: bool,
    /// The version of the control channel that both sides speak; the source's newest when absent.
    #[serde(default)]
    pub control_protocol: Option<u32>,
    /// What was predicted, to be kept with both hosts' reports.
    #[serde(default)]
    pub prediction: Option<Prediction>,
    /// The disks whose images go along with the VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskToMove>,
    /// How disks that go along are copied.
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// What `dirty-tracking` is to do without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub without: Vec<Optimisation>,
    /// What the source knows of the VM's images on shared storage: the destination opens no older ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
    /// The source's migration addresses, to bind to.
    pub source_addresses: Vec<IpAddr>,
    /// Where the destination listens; filled in when it is prepared.
    #[serde(default)]
    pub destination_addresses: Vec<SocketAddr>,
}

impl MigrationSpec {
    /// What a person is told of its linked disks that do not stay so.
    pub fn become_one(&self) -> Vec<String> {
        let to = &self.destination.host;
        let disks = self.disks.iter();
        disks.filter_map(|disk| disk.told_as_one(to)).collect()
    }
}

/// What limited an iteration, or the copying of disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LimitedBy {
    /// The source's cores.
    SourceCpu,
    Link,
    /// The destination's cores.
    DestinationCpu,
    /// Allocating the destination's memory.
    DestinationMemory,
    /// The guest writes as fast as pages are sent.
    GuestWrites,
    /// The bandwidth cap that was asked for.
    Cap,
    /// Of disks: reads of their images at the source.
    SourceDisk,
    /// Of disks: writes of their images at the destination.
    DestinationDisk,
}

/// One pass over the dirty pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct IterationReport {
    /// Pages sent with their bytes.
    pub pages_sent: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// How long it took, s.
    #[serde(serialize_with = "rounded")]
    pub seconds: f64,
    pub limited_by: LimitedBy,
}

/// The pass that is under way, or that a cancel or a failure cut short.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PassUnderWay {
    /// Which pass, from 1.
    pub number: u32,
    /// Pages sent with their bytes so far.
    pub pages_sent: u64,
    /// Pages sent as zero so far.
    pub zero_pages: u64,
    /// Bytes on the wire so far.
    pub bytes: u64,
    /// Since it began, s.
    #[serde(serialize_with = "rounded")]
    pub seconds: f64,
}

/// What happened to a migration beside its plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveEventKind {
    /// No byte got through for a while, on channels that were not lost.
    LinkSilent,
    /// The channels to the other host were lost; lasts until new ones are made.
    LinkLost,
    /// The switchover was called off and the guest went on at the source; lasts while the guest stood still.
    SwitchoverCalledOff,
    /// Something that this version does not know.
    #[serde(other)]
    Other,
}

/// Something that happened to a migration beside its plan, and when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveEvent {
    /// When it began, s after the migration did.
    #[serde(serialize_with = "rounded")]
    pub at_s: f64,
    pub kind: MoveEventKind,
    /// How long it lasted, s; absent while it lasts.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "rounded_option"
    )]
    pub lasted_s: Option<f64>,
    pub message: String,
}

/// How a migration ended, or that it has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// A person or a deadline ended it; the guest runs at the source.
    Cancelled,
    /// It failed; the guest runs at the source unless its own QEMU died.
    Failed,
    /// The permit was given and the peer has not answered.
    InDoubt,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::InDoubt => "in-doubt",
        })
    }
}

/// Where a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Connecting and preparing the destination.
    Setup,
    /// Copying while the guest runs.
    Precopy,
    /// The guest is stopped at the source and not yet running at the destination.
    Switchover,
    /// The permit is given, the answer is awaited.
    Handover,
    /// Over; see the outcome.
    Ended,
}

/// The target of the pause and whether it was met; the names are older than the word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Promise {
    pub max_downtime_ms: u64,
    /// Whether it was met.
    pub kept: bool,
}

/// The report of one migration; both hosts keep it under the same id.
///
/// While it moves, all figures are as of now and renewed about ten times a second, also in the first pass:
/// `bytes_on_wire` is what the data channels have carried so far, `wire_bytes_per_s` their rate over the last second or so
/// (the rate that `godwit host top` shows), `throughput_gb_per_s` the average of guest memory with content, which zero
/// pages do not count in, `pass` the pass under way, `done_percent` how much of what has to go has gone. When it is over,
/// however it ended, they stay as they were last, but `wire_bytes_per_s`, which is then the average of all passes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationReport {
    #[schema(value_type = String)]
    pub id: MigrationId,
    #[schema(value_type = String)]
    pub vm: VmName,
    #[schema(value_type = String)]
    pub from: HostName,
    #[schema(value_type = String)]
    pub to: HostName,
    /// How it ended; absent while it goes on.
    pub outcome: Option<Outcome>,
    pub phase: Phase,
    /// Why it failed or was cancelled, one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the guest ended before it had moved: powered off by its user or by itself, halted, or crashed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub guest_ended: bool,
    /// Which side wrote this report: `source` or `destination`.
    pub side: Side,
    /// Encryption of memory pages.
    pub encryption: Cipher,
    pub streams: u32,
    /// From the request to the guest running at the destination, or to the end that it had instead, s.
    #[serde(serialize_with = "rounded")]
    pub total_s: f64,
    /// No vCPU ran anywhere for this long, ms, by the source's clock; 0 while no switchover was made.
    #[serde(serialize_with = "rounded")]
    pub switchover_ms: f64,
    pub switchover_parts_ms: SwitchoverParts,
    /// Precopy passes and the last one, as far as they are complete.
    pub iterations: Vec<IterationReport>,
    /// The pass under way; in a migration that was cancelled or failed, the one that it cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass: Option<PassUnderWay>,
    /// All bytes that this side's data channels sent or received so far.
    pub bytes_on_wire: u64,
    /// Bytes per second on the wire: over the last second or so while it moves, on the average of all passes afterwards.
    #[serde(default, serialize_with = "rounded")]
    pub wire_bytes_per_s: f64,
    /// Guest memory with content that was sent per second of all passes so far, GB/s.
    #[serde(serialize_with = "rounded_finely")]
    pub throughput_gb_per_s: f64,
    /// CPU seconds of the source's VM process in this migration.
    #[serde(serialize_with = "rounded")]
    pub cpu_source_s: f64,
    /// CPU seconds of the destination's VM process in this migration.
    #[serde(serialize_with = "rounded")]
    pub cpu_destination_s: f64,
    /// Longest silence seen by a 1 ms ping, ms; only a measuring client can tell.
    #[serde(default)]
    pub network_gap_ms: Option<f64>,
    /// How far the guest's clock fell behind, ms; only a measuring client can tell.
    #[serde(default)]
    pub guest_clock_lag_ms: Option<f64>,
    /// Memory that the guest wrote, on the average of all the time in which its writes were tracked, MiB/s.
    #[serde(serialize_with = "rounded")]
    pub dirty_mib_per_s: f64,
    /// The target of the pause, met or missed.
    pub promise: Promise,
    pub ram_mib: u64,
    /// Guest memory that had content when it began: what has to go at least, bytes. 0 where that is not known.
    #[serde(default)]
    pub content_bytes: u64,
    /// Bytes of guest memory still to be sent, while it goes on.
    pub remaining_bytes: u64,
    /// What was to be copied of the disks that go along, bytes; holes of their images are not.
    #[serde(default, skip_serializing_if = "is_none")]
    pub disk_bytes: u64,
    /// How much of that is still to be copied, while it goes on.
    #[serde(default, skip_serializing_if = "is_none")]
    pub disk_left_bytes: u64,
    /// How the disks that go along are copied.
    #[serde(default, skip_serializing_if = "Method::is_default")]
    pub method: Method,
    /// What the iterations came to of each disk whose writes are tracked, or that is sent by redo logs, one after the other; nothing of disks that are
    /// mirrored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_iterations: Vec<DiskIterations>,
    /// What it takes to send disks by redo logs, so far; nothing of the other methods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redo_logs: Option<SentLogs>,
    /// What limited the copying of disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks_limited_by: Option<LimitedBy>,
    /// How much of what has to go has gone, percent; never less than before, and 100 once it has completed.
    #[serde(default, serialize_with = "rounded")]
    pub done_percent: f64,
    /// Estimated seconds to the end, while it goes on and where an honest estimate exists.
    #[serde(default, serialize_with = "rounded_option")]
    pub eta_s: Option<f64>,
    /// Percent of its speed that a guest that does not converge is left with; 100 = not slowed.
    pub guest_speed_percent: u32,
    /// When it began, seconds since 1970, UTC.
    pub began_unix_s: u64,
    /// When it ended, seconds since 1970, UTC; absent while it goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_s: Option<u64>,
    /// Allocating the destination's memory before anything was sent, s; part of the total.
    #[serde(default, serialize_with = "rounded")]
    pub prepare_s: f64,
    /// What made it slower than it could be, with the remedy; one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What happened beside the plan, in order: links lost and made again, switchovers that were called off.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<MoveEvent>,
    /// What was predicted when it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
}

/// Which side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// Where the guest runs at first.
    Source,
    /// Where it shall run.
    Destination,
}

impl MigrationReport {
    /// Whether its end is still to be told.
    pub fn is_open(&self) -> bool {
        self.outcome
            .is_none_or(|outcome| outcome == Outcome::InDoubt)
    }

    /// Books an end that its own VM process did not book.
    pub fn close(&mut self, outcome: Outcome, reason: Option<String>, now_unix_s: u64) {
        self.total_s = now_unix_s.saturating_sub(self.began_unix_s) as f64;
        self.ended_unix_s = (outcome != Outcome::InDoubt).then_some(now_unix_s);
        self.outcome = Some(outcome);
        self.reason = reason;
        self.eta_s = None;
        self.phase = match outcome {
            Outcome::InDoubt => Phase::Handover,
            Outcome::Completed | Outcome::Cancelled | Outcome::Failed => Phase::Ended,
        };
        if outcome == Outcome::Completed {
            self.remaining_bytes = 0;
            self.done_percent = 100.0;
        }
    }

    /// The pass that is under way, from 1; the last one where none is.
    pub fn pass_number(&self) -> usize {
        let under_way = usize::from(self.pass.is_some());
        (self.iterations.len() + under_way).max(1)
    }

    /// What goes on beside the plan now: a link that is silent or lost.
    pub fn trouble_under_way(&self) -> Option<&MoveEvent> {
        let lasting = |event: &&MoveEvent| event.lasted_s.is_none();
        self.events
            .last()
            .filter(|_| self.outcome.is_none())
            .filter(lasting)
    }

    /// A report of a migration that has just begun.
    pub fn begun(spec: &MigrationSpec, side: Side, ram_mib: u64, began_unix_s: u64) -> Self {
        Self {
            id: spec.id.clone(),
            vm: spec.vm.clone(),
            from: spec.source.host.clone(),
            to: spec.destination.host.clone(),
            outcome: None,
            phase: Phase::Setup,
            reason: None,
            guest_ended: false,
            side,
            encryption: spec.cipher,
            streams: 0,
            total_s: 0.0,
            switchover_ms: 0.0,
            switchover_parts_ms: SwitchoverParts::default(),
            iterations: Vec::new(),
            pass: None,
            bytes_on_wire: 0,
            wire_bytes_per_s: 0.0,
            throughput_gb_per_s: 0.0,
            cpu_source_s: 0.0,
            cpu_destination_s: 0.0,
            network_gap_ms: None,
            guest_clock_lag_ms: None,
            dirty_mib_per_s: 0.0,
            promise: Promise {
                max_downtime_ms: spec.max_downtime_ms,
                kept: false,
            },
            ram_mib,
            content_bytes: 0,
            remaining_bytes: ram_mib << 20,
            disk_bytes: 0,
            method: spec.method,
            disk_left_bytes: 0,
            disk_iterations: Vec::new(),
            redo_logs: None,
            disks_limited_by: None,
            done_percent: 0.0,
            eta_s: None,
            guest_speed_percent: 100,
            began_unix_s,
            ended_unix_s: None,
            prepare_s: 0.0,
            notes: spec.become_one(),
            events: Vec::new(),
            prediction: spec.prediction.clone(),
        }
    }
}

/// What a dry run found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PreflightReport {
    /// Everything that was looked at and was fine, one line each.
    pub passed: Vec<String>,
    /// What stands in the way; empty = the migration may start.
    pub refusals: Vec<crate::ApiError>,
    /// What the migration is expected to be, where it may start and could be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<Prediction>,
    /// Targets that it cannot meet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cannot_keep: Vec<CannotKeep>,
    /// Disks, by name, that stay linked to the image which they begin as, since the destination has it, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stay_linked: Vec<String>,
}
