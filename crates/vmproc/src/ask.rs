//! The agent's requests, by who answers them: the connection itself, the VM's thread at once, or a thread that the VM's
//! thread begins.
//!
//! Made once, where a request comes in, from the wire's [`VmRequest`], which says nothing of threads. Plain data.
//! Refuses: a message of the other host that cannot be read, and a person's decision about a host that
//! is not said to be fenced.

use godwit_ownership::PeerMessage;
use godwit_types::clones::CloneDisks;
use godwit_types::console::{ConsolePlace, ConsoleTyped};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_move::DiskPlace;
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::host_api::{CloseStep, PrepareIncoming, VmRequest};
use godwit_types::migration::MigrationSpec;
use godwit_types::site::GiftOvertaken;
use godwit_types::snapshots::TakeSnapshot;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId, SnapshotName};
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait that a request for the outbox may ask for, ms.
const OUTBOX_WAIT_MS_MAX: u64 = 60_000;
/// Longest wait for what a guest writes next, ms.
const CONSOLE_WAIT_MS_MAX: u64 = 60_000;
/// What a person hears who decides without that.
const UNFENCED: &str =
    "say which host is fenced with --confirm-fenced HOST, once it is powered off and only then";

/// A request, by who answers it.
#[derive(Debug)]
pub(crate) enum Ask {
    Connection(Connection),
    Now(Now),
    Later(Later),
}

/// What a connection answers from what it shares with the VM's thread.
#[derive(Debug)]
pub(crate) enum Connection {
    TakeOutbox {
        wait: Duration,
    },
    ReadConsole {
        place: Option<ConsolePlace>,
        wait: Duration,
    },
    TypeConsole(ConsoleTyped),
}

/// What the VM's thread answers before it takes anything else.
#[derive(Debug)]
pub(crate) enum Now {
    Status,
    Start,
    Boot,
    Stop {
        force: bool,
    },
    PowerOffDead(Generation),
    Reset,
    Pause,
    Resume,
    PrepareIncoming(Box<PrepareIncoming>),
    Migrate(Box<MigrationSpec>),
    Cancel(MigrationId, String),
    Report(MigrationId),
    Peer(HostName, PeerMessage),
    Survey(Generation),
    KeepRecord,
    /// A person decides, who swears that this host is fenced.
    RunHere(HostName),
    /// As [`Now::RunHere`], the other way.
    GiveUpHere(HostName),
    Console,
    Blockers,
    HostRemoved(HostName),
    GiftOvertaken(GiftOvertaken),
    MoveDisks(Vec<DiskPlace>),
    PlanDiskMoves(Vec<DiskPlace>),
    DiskMoves,
    CancelDiskMoves,
    LimitDisk(LimitDisk),
    CloneDisks(Box<CloneDisks>),
    Cloning,
    CancelClone,
    Close(CloseStep),
    Renew(PathBuf),
    Detach {
        unless_moving: bool,
    },
}

/// What takes so long that the VM's thread only begins it: the answer comes from a thread of its own.
#[derive(Debug)]
pub(crate) enum Later {
    MeasureDirtyRate { millis: u64 },
    ResizeDisk(ResizeDisk),
    ListSnapshots,
    Snapshots(AskSnapshots),
}

/// What a person orders that is done by a thread, one after the other.
#[derive(Debug)]
pub(crate) enum AskSnapshots {
    Take(TakeSnapshot),
    Revert(SnapshotName),
    Delete(SnapshotName),
}

impl Ask {
    /// Who answers this request.
    pub(crate) fn of(request: VmRequest) -> Result<Self, ApiError> {
        Ok(Self::Now(match request {
            VmRequest::TakeOutbox { wait_ms } => {
                let wait = Duration::from_millis(wait_ms.min(OUTBOX_WAIT_MS_MAX));
                return Ok(Self::Connection(Connection::TakeOutbox { wait }));
            }
            VmRequest::ReadConsole { place, wait_ms } => {
                let wait = Duration::from_millis(wait_ms.min(CONSOLE_WAIT_MS_MAX));
                return Ok(Self::Connection(Connection::ReadConsole { place, wait }));
            }
            VmRequest::TypeConsole(typed) => {
                return Ok(Self::Connection(Connection::TypeConsole(typed)));
            }
            VmRequest::MeasureDirtyRate { millis } => {
                return Ok(Self::Later(Later::MeasureDirtyRate { millis }));
            }
            VmRequest::ResizeDisk(wish) => return Ok(Self::Later(Later::ResizeDisk(wish))),
            VmRequest::Snapshots => return Ok(Self::Later(Later::ListSnapshots)),
            VmRequest::TakeSnapshot(wish) => return Ok(Self::snapshots(AskSnapshots::Take(wish))),
            VmRequest::RevertSnapshot(wish) => {
                return Ok(Self::snapshots(AskSnapshots::Revert(wish.name)));
            }
            VmRequest::DeleteSnapshot(wish) => {
                return Ok(Self::snapshots(AskSnapshots::Delete(wish.name)));
            }
            VmRequest::MoveDisks { places } => Now::MoveDisks(places),
            VmRequest::PlanDiskMoves { places } => Now::PlanDiskMoves(places),
            VmRequest::DiskMoves => Now::DiskMoves,
            VmRequest::CancelDiskMoves => Now::CancelDiskMoves,
            VmRequest::LimitDisk(wish) => Now::LimitDisk(wish),
            VmRequest::CloneDisks(wish) => Now::CloneDisks(wish),
            VmRequest::Cloning => Now::Cloning,
            VmRequest::CancelClone => Now::CancelClone,
            VmRequest::Status => Now::Status,
            VmRequest::Start => Now::Start,
            VmRequest::Boot => Now::Boot,
            VmRequest::Stop { force } => Now::Stop { force },
            VmRequest::PowerOffDead { generation } => Now::PowerOffDead(generation),
            VmRequest::Reset => Now::Reset,
            VmRequest::Pause => Now::Pause,
            VmRequest::Resume => Now::Resume,
            VmRequest::PrepareIncoming(request) => Now::PrepareIncoming(request),
            VmRequest::Migrate(spec) => Now::Migrate(spec),
            VmRequest::Cancel { migration, reason } => Now::Cancel(migration, reason),
            VmRequest::Report { migration } => Now::Report(migration),
            VmRequest::Peer { from, message } => Now::Peer(from, read(message)?),
            VmRequest::Survey { level } => Now::Survey(level),
            VmRequest::KeepRecord => Now::KeepRecord,
            VmRequest::Resolve {
                run_here,
                confirm_fenced,
            } => {
                let fenced = confirm_fenced.ok_or_else(|| invalid(UNFENCED.into()))?;
                match run_here {
                    true => Now::RunHere(fenced),
                    false => Now::GiveUpHere(fenced),
                }
            }
            VmRequest::Console => Now::Console,
            VmRequest::Blockers => Now::Blockers,
            VmRequest::HostRemoved { host } => Now::HostRemoved(host),
            VmRequest::GiftOvertaken(overtaken) => Now::GiftOvertaken(overtaken),
            VmRequest::Close { step } => Now::Close(step),
            VmRequest::Renew { program } => Now::Renew(program.into()),
            VmRequest::Detach { unless_moving } => Now::Detach { unless_moving },
        }))
    }
}

impl Ask {
    fn snapshots(ask: AskSnapshots) -> Self {
        Self::Later(Later::Snapshots(ask))
    }
}

fn read(message: serde_json::Value) -> Result<PeerMessage, ApiError> {
    let unread = |error| invalid(format!("the other host's message cannot be read: {error}"));
    serde_json::from_value(message).map_err(unread)
}

fn invalid(message: String) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, message)
}
