//! Bodies between controller and agent, between two hosts' agents, and between an agent and its VM processes.
//!
//! Pure data. The agent serves its routes over mutual TLS; the VM process serves [`VmRequest`] over a
//! Unix socket, one JSON line in, one JSON line out. Both sides may be of different versions: fields that a reader does
//! not know are left out, but for a VM's description, which is understood wholly or refused. Refuses: anything over
//! [`MESSAGE_LEN_MAX`].

use crate::clones::{CloneDisks, Cloning};
use crate::console::{ConsolePiece, ConsolePlace, ConsoleTyped};
use crate::control_api::{CancelRequest, ResolveRequest, StopRequest};
use crate::disk_activity::{DiskActivity, LimitDisk};
use crate::disk_move::{DiskMoves, DiskPlace};
use crate::disk_resize::ResizeDisk;
use crate::forecast::DirtyRate;
use crate::guest::GuestInfo;
use crate::ids::{Generation, HostName, MigrationId, VmName};
use crate::image::KnownImage;
use crate::migration::{AgentAddress, DiskToMove, MigrationReport, MigrationSpec, Side};
use crate::site::{Claim, GiftOvertaken, Instance, RecordAnswer, SiteHost};
use crate::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use crate::vm::{Accelerator, VmSpec, VmState};
use crate::{ApiError, vm};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Name of a VM's description in its state directory, a `VmSpec` as JSON.
pub const SPEC_FILE: &str = "vm.json";
/// Moves of its disks on this host that have ended.
pub const DISK_MOVES_FILE: &str = "disk-moves.json";
/// Block devices that were disks of the VM on this host, in a VM's state directory. It stays when the VM leaves.
pub const FORMER_DEVICES_FILE: &str = "former-devices.json";
/// Migrations whose disks went on from this host with later ones, in a VM's state directory.
pub const WENT_ON_FILE: &str = "went-on.json";
/// Name of the note of a VM's last migration in its state directory, a [`MigrationNote`] as JSON.
pub const NOTE_FILE: &str = "migration.json";
/// Directory of a VM's migration reports in its state directory, `ID.json` each.
pub const REPORTS_DIR: &str = "migrations";
/// Name of what a VM process writes of the disks that it serves, in the VM's state directory. A host that does not hold the
/// VM has it only for as long as something of them is to be removed there.
pub const DISKS_FILE: &str = "disks.json";
/// In a VM's state directory: what the controller said that its holders before knew of its images, a list of
/// [`KnownImage`] as JSON.
pub const IMAGES_FILE: &str = "images.json";
/// In the VM's state directory: [`UefiSizes`] of its guest.
pub const UEFI_SIZES_FILE: &str = "uefi.json";
/// Name of the socket that a VM process serves, in its run directory.
pub const SOCKET_FILE: &str = "vm.sock";
/// Name of what a VM process writes of its QEMU, in its run directory: process id, start time and launch, as JSON.
pub const IDENTITY_FILE: &str = "qemu.json";

/// Name of the mark, in a host's run directory, that the host shuts down: a guest that powers itself off while it is there
/// counts as one whose host lost its power, and none starts. It holds the boot that is about to end.
pub const CLOSING_FILE: &str = "closing";

/// Where a host's [`CLOSING_FILE`] is, seen from a VM's run directory `RUN/vms/NAME`.
pub fn closing_mark(vm_run_dir: &Path) -> Option<PathBuf> {
    let vms = vm_run_dir.parent()?;
    let is_vms = vms.file_name().is_some_and(|name| name == "vms");
    is_vms.then(|| vms.with_file_name(CLOSING_FILE))
}

/// Longest time for which a guest's writes are measured, ms.
pub const MEASURE_MS_MAX: u64 = 5_000;

/// Most VMs that a host keeps records of, and names in a list.
pub const VMS_MAX: usize = 16_384;

/// Longest message on an internal interface, bytes.
pub const MESSAGE_LEN_MAX: usize = 1 << 20;

/// A VM as its host knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostVm {
    /// The VM, as resolved for this host's QEMU.
    pub spec: VmSpec,
    /// Where it is in its life.
    pub state: VmState,
    /// Highest generation that this host has durably seen.
    pub generation: Generation,
    /// What this host's durable record says about who may run it.
    pub claim: Claim,
    /// The migration under way or last ended here, if any.
    pub migration: Option<MigrationId>,
    /// What runs it, while it runs.
    pub accelerator: Option<Accelerator>,
    /// Process id of its VM process, while there is one.
    pub vm_process_pid: Option<i32>,
    /// Which Godwit its VM process is, while there is one that says so.
    #[serde(default)]
    pub vm_process: Option<crate::version::Build>,
    /// Process id of its QEMU, while there is one.
    pub qemu_pid: Option<i32>,
    /// What a person should know.
    pub note: Option<String>,
    /// What its disks do, while its VM process serves them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskActivity>,
    /// What it knows of the images on shared storage of the VM, if it holds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
    /// What its guest says of itself, where it has an agent that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestInfo>,
}

impl HostVm {
    /// Whether both say the same, but for what its disks do just now, which never is.
    pub fn says_as(&self, other: &Self) -> bool {
        let still = |vm: &Self| Self {
            disks: Vec::new(),
            ..vm.clone()
        };
        still(self) == still(other)
    }

    /// Whether this host durably holds the right to run the VM.
    pub fn holds(&self) -> bool {
        self.claim.held().is_some()
    }
}

/// What a VM process keeps of the last migration that was prepared or begun on its host: everything but the secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationNote {
    pub migration: MigrationId,
    /// This host's side of it.
    pub side: Side,
    pub peer: AgentAddress,
}

/// How a host's agent is to stop a VM: a person's [`StopRequest`], as machines say it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStop {
    /// Power off at once instead of asking the guest.
    #[serde(default)]
    pub force: bool,
}

impl From<&StopRequest> for HostStop {
    fn from(said: &StopRequest) -> Self {
        Self { force: said.force }
    }
}

/// How a host's agent is to settle an in-doubt VM: a person's [`ResolveRequest`], as machines say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostResolve {
    /// The host that shall run it; with `give_up`, the host that shall not.
    pub run_on: HostName,
    /// That host gives up what it has of the VM.
    #[serde(default)]
    pub give_up: bool,
    /// The operator has made sure that this other host is powered off.
    #[serde(default)]
    pub confirm_fenced: Option<HostName>,
}

impl From<&ResolveRequest> for HostResolve {
    fn from(said: &ResolveRequest) -> Self {
        Self {
            run_on: said.run_on.clone(),
            give_up: said.give_up,
            confirm_fenced: said.confirm_fenced.clone(),
        }
    }
}

/// How a host's agent is to cancel a migration: a person's [`CancelRequest`], as machines say it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCancel {
    #[serde(default)]
    pub reason: Option<String>,
    /// The migration's VM: a host that has not heard of the migration yet then refuses it for good.
    #[serde(default)]
    pub vm: Option<VmName>,
}

impl From<&CancelRequest> for HostCancel {
    fn from(said: &CancelRequest) -> Self {
        Self {
            reason: said.reason.clone(),
            vm: said.vm.clone(),
        }
    }
}

/// Makes a VM known to a host and gives it the right to run it (the first time) or updates its description (stopped).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PutVm {
    /// The VM with CPU model and machine type resolved.
    pub spec: VmSpec,
    /// The generation that the controller grants, or, for a new description alone, the one that this host holds.
    pub generation: Generation,
    /// The level of the survey that the grant follows: a host that has learned of another generation since refuses.
    /// None for a new description alone.
    #[serde(default)]
    pub expect: Option<Generation>,
    /// What its holders before knew of its images on shared storage: an older copy of one is not opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<KnownImage>,
}

/// Asks a host to be a destination.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PrepareIncoming {
    /// The VM as it runs at the source (resolved).
    pub spec: VmSpec,
    /// What runs it at the source; the destination uses the same.
    pub accelerator: Accelerator,
    pub migration: MigrationSpec,
}

/// The destination's answer: where its VM process listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncomingReady {
    /// Migration addresses with ports, best first.
    pub addresses: Vec<SocketAddr>,
}

/// What a VM needs of a destination, asked before anything starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreflightIncoming {
    /// The VM as it runs at the source.
    pub spec: VmSpec,
    /// What runs it there.
    pub accelerator: Accelerator,
    /// SHA-256 of kernel and initramfs at the source, hex, by path.
    pub file_hashes: Vec<(String, String)>,
    /// What of UEFI the guest has there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uefi: Option<UefiSizes>,
    /// Source's clock, ms since 1970, to compare.
    pub source_unix_ms: u64,
    /// Nonce of the probe frame that will be sent to each of the VM's port groups; empty = not probed.
    pub probe_nonce: String,
    /// The disks that go along.
    #[serde(default)]
    pub disks: Vec<DiskToMove>,
}

/// The source's side of preflight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreflightOutgoing {
    /// Refusals found at the source (devices, disks, state).
    pub refusals: Vec<ApiError>,
    /// What was fine, one line each.
    pub passed: Vec<String>,
    /// The VM as it runs.
    pub vm: HostVm,
    /// SHA-256 of kernel and initramfs, hex, by path.
    pub file_hashes: Vec<(String, String)>,
    /// The disks that go along.
    #[serde(default)]
    pub disks: Vec<DiskToMove>,
    /// What of UEFI its guest has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uefi: Option<UefiSizes>,
}

/// Lengths of the flash memory of a guest with UEFI, bytes: QEMU takes a guest only into memory of the same lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UefiSizes {
    pub code: u64,
    pub variables: u64,
}

/// What one host says to another about who may run a VM, carried by their agents over mutual TLS
/// (`POST /v1/vms/NAME/peer`); the receiver knows the sender's name from its certificate. The message's form is crate
/// `ownership`'s `PeerMessage`; here it is carried, not read. The answer is a list of such messages (the replies that
/// are ready at once), which the asking agent gives to its own VM process as [`VmRequest::Peer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerEnvelope {
    /// An `ownership::PeerMessage`, which this crate does not know.
    pub message: serde_json::Value,
    /// Which of the sender's lives speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<Instance>,
    /// The receiver, as the sender's table of the site has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meant: Option<SiteHost>,
}

/// A message that a VM process wants carried to the other host's agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutboxMessage {
    pub peer: AgentAddress,
    /// An `ownership::PeerMessage`, which this crate does not know.
    pub message: serde_json::Value,
}

/// A request from the agent to a VM process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum VmRequest {
    /// How is the VM?
    Status,
    /// Boot it, since a person asks for it (the record must say that this host holds it). A VM that was off is off again
    /// when that fails.
    Start,
    /// Boot it, since it runs by its record and its QEMU is gone. A failure changes no record: it can be tried again.
    Boot,
    /// Ask the guest to power off, or force it.
    Stop {
        /// Power off at once.
        force: bool,
    },
    /// Write that the VM is off, since its QEMU is gone. Refused where it has a QEMU again, or is not held under this
    /// generation any more: who asks has looked before.
    PowerOffDead {
        /// Under which it was held when its QEMU was seen to be gone.
        generation: Generation,
    },
    Reset,
    /// Stop the vCPUs, keep memory.
    Pause,
    Resume,
    /// Become the destination of a migration.
    PrepareIncoming(Box<PrepareIncoming>),
    /// Begin a migration as its source.
    Migrate(Box<MigrationSpec>),
    /// Cancel the migration under way.
    Cancel {
        migration: MigrationId,
        reason: String,
    },
    /// The migration's report so far, or at its end.
    Report {
        migration: MigrationId,
    },
    /// A message from the other host about who may run the VM; answered by `Replies`.
    Peer {
        /// The host that sent it, as its certificate says.
        from: HostName,
        /// An `ownership::PeerMessage`, which this crate does not know.
        message: serde_json::Value,
    },
    /// Hands over, once, the messages that wait to be carried to other hosts; waits up to `wait_ms` for the first
    /// one. An agent keeps one such call open per VM: its connection's end is how it learns that the process died.
    TakeOutbox {
        wait_ms: u64,
    },
    /// The controller surveys who may hold the VM; answered by `Surveyed`, durably.
    Survey {
        level: Generation,
    },
    /// Write the VM's record again if the one on the disk is another: the state directory may have been put back while
    /// this process lived.
    KeepRecord,
    /// An operator settles an in-doubt state.
    Resolve {
        /// Whether this host shall run the VM.
        run_here: bool,
        /// The host that the operator has fenced.
        confirm_fenced: Option<HostName>,
    },
    /// The last bytes that the guest wrote to its serial console.
    Console,
    /// What comes next on the guest's serial console for a reader at `place`, all that is kept for one without; waits up to
    /// `wait_ms` for it. Answered by `ConsolePiece`.
    ReadConsole {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        place: Option<ConsolePlace>,
        #[serde(default)]
        wait_ms: u64,
    },
    /// Type this to the guest on its serial console.
    TypeConsole(ConsoleTyped),
    /// QEMU's reasons against a migration; refused where one is refused for now.
    Blockers,
    /// Measure for this long how the guest writes, at most [`MEASURE_MS_MAX`]; refused while a migration runs.
    MeasureDirtyRate {
        /// How long, ms.
        millis: u64,
    },
    /// An operator has removed a host for good: what this VM was to settle with it is settled.
    HostRemoved {
        /// The host that is gone.
        host: HostName,
    },
    /// The site went on without the VM that this host gave away: give up what nobody takes any more.
    GiftOvertaken(GiftOvertaken),
    /// This host shuts down: have the guest power off, without a word in the record. Answered by `Closing`; refused where
    /// the host has no [`CLOSING_FILE`].
    Close {
        /// How far to go.
        step: CloseStep,
    },
    /// Move disks to other places of this host while the guest runs; answered by `DiskMoves` at once.
    MoveDisks {
        places: Vec<DiskPlace>,
    },
    /// Say whether disks could move to these places, and change nothing; answered by `DiskMoves`.
    PlanDiskMoves {
        places: Vec<DiskPlace>,
    },
    /// How far disks are that are moved on this host.
    DiskMoves,
    /// Call off what moves disks on this host.
    CancelDiskMoves,
    /// Make a disk larger, whether the guest runs or not; answered by `Done` once that is durable, and the guest was told.
    ResizeDisk(ResizeDisk),
    /// Limit a disk, whether the guest runs or not; answered by `Done`.
    LimitDisk(LimitDisk),
    /// The snapshots of the VM's disks; answered by `Snapshots`.
    Snapshots,
    /// Take a snapshot of them, whether the guest runs or not; answered by `Done`.
    TakeSnapshot(TakeSnapshot),
    /// Have disks be what they were at a snapshot, while the VM is off; answered by `Done`.
    RevertSnapshot(SnapshotRequest),
    /// Keep the content of a snapshot no longer; answered by `Done`.
    DeleteSnapshot(SnapshotRequest),
    /// Copy the VM's disks for another one, or tell how far that is; answered by `Cloning` at once.
    CloneDisks(Box<CloneDisks>),
    /// How far that is; answered by `Cloning`.
    Cloning,
    /// Call that copying off.
    CancelClone,
    /// Become this program, which goes on with QEMU over the connections that it has (an upgrade). Refused while disks or the
    /// VM are on their way.
    Renew {
        program: String,
    },
    /// End this VM process and leave QEMU running (an upgrade); the next one takes it over.
    Detach {
        /// Refuse while a migration is under way. One that does not know this ends all the same: whoever asks has looked.
        #[serde(default)]
        unless_moving: bool,
    },
}

/// How far a VM process goes with a guest whose host shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CloseStep {
    Look,
    /// Press the guest's power key; call off a migration that is under way.
    Press,
    End,
}

/// How far a guest has come whose host shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CloseState {
    /// No guest runs any more.
    Off,
    /// It has not powered off yet.
    Waits,
    /// A migration is under way, which is called off if it still can be.
    Migrating,
    /// It is left as it is, since the power key is of no use to it or it is not certain who holds it.
    Left,
    /// It did not power off in time and was ended.
    Ended,
}

/// A VM whose host shuts down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosingVm {
    pub vm: VmName,
    /// How far its guest has come.
    pub state: CloseState,
    /// Why it is not off.
    #[serde(default)]
    pub why: Option<String>,
}

/// How far a host has come with powering its guests down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClosingStage {
    /// Not begun: the host runs guests.
    #[default]
    Open,
    /// Guests are being powered down.
    Closing,
    /// That is over, and no guest starts.
    Closed,
}

/// Has a host power its guests down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CloseRequest {
    /// Its system manager takes the host down, as who asks was told: the host is open again once it is back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_shutdown: bool,
}

/// A host that shuts down, or does not.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostClosing {
    /// How far it has come.
    pub stage: ClosingStage,
    /// How long guests are given, s.
    pub limit_s: u64,
    /// All VMs that had a guest when it began.
    pub vms: Vec<ClosingVm>,
}

/// What a VM process answers to `Status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    pub vm: HostVm,
}

/// A VM process's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer", content = "body")]
pub enum VmAnswer {
    Done(String),
    Status(Box<VmStatus>),
    IncomingReady(IncomingReady),
    Report(Box<MigrationReport>),
    /// To `Peer`: ownership `PeerMessage`s to be carried back to the sender.
    Replies(Vec<serde_json::Value>),
    Surveyed(RecordAnswer),
    Outbox(Vec<OutboxMessage>),
    Console(String),
    ConsolePiece(ConsolePiece),
    Blockers(Vec<String>),
    DirtyRate(DirtyRate),
    Closing(ClosingVm),
    DiskMoves(DiskMoves),
    Snapshots(Snapshots),
    Cloning(Box<Cloning>),
    /// Anything that went wrong.
    Error(ApiError),
}

/// How an agent starts a VM process: everything it needs, as a JSON file in the VM's run directory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmProcessConfig {
    pub vm: VmName,
    pub host: HostName,
    /// Durable directory of this VM (`STATE/vms/NAME`): journal, description, reports.
    pub state_dir: String,
    /// Directory of this VM that a reboot empties: sockets, QEMU's identity.
    pub run_dir: String,
    /// Directory on a tmpfs for the RAM file.
    pub ram_dir: String,
    pub qemu: String,
    /// The common user, for a VM without a user id of its own.
    pub qemu_uid: u32,
    /// The group for what all VMs of the host may use.
    pub qemu_gid: u32,
    /// First and last port for migrations.
    pub migration_ports: (u16, u16),
    /// Port groups and bridges.
    pub port_groups: std::collections::BTreeMap<crate::ids::PortGroup, String>,
    /// This host's migration addresses.
    pub migration_addresses: Vec<std::net::IpAddr>,
    /// Overrides of what runs guests.
    #[serde(default)]
    pub accelerator: vm::Accelerator,
    /// UEFI's program and empty variables on this host; both empty: where distributions have them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uefi_code: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uefi_variables: String,
    /// Where no VM's files may be, beside this host's own directories: the state of a controller on the same machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reserved_dirs: Vec<String>,
}

/// Asks the source to send a probe frame into each port group of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeRequest {
    /// The nonce that the destination listens for.
    pub nonce: String,
}

/// Whether the probe frames arrived at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeResult {
    pub arrived: std::collections::BTreeMap<crate::ids::PortGroup, bool>,
}

/// Serial numbers of certificates that the controller has revoked: all of them, each time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// Serial numbers, lower-case hex.
    pub serials: Vec<String>,
}

/// Hosts that an operator has removed for good: all of them that may matter, each time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedHosts {
    pub hosts: Vec<HostName>,
}
