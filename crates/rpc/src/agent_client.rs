//! The agent's interface: its routes with who may call them, and a typed client.
//!
//! The agent's router uses the paths of [`RULES`], so that both sides agree by construction. Owns nothing.

use crate::access::{Access, Rule, rule, rule_also_removed};
use crate::client::{Client, Reply, calls, fill};

pub use crate::client::Deadlines;

use crate::limits::LIST_LEN_MAX;
use crate::sse::EventStream;
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::console::{ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{
    CancelRequest, ConsoleText, DisksMaking, Done, Empty, HostCheck, ResolveRequest, StopRequest,
};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_move::{DiskMoves, MoveDisks};
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{
    CloseRequest, HostCancel, HostClosing, HostResolve, HostStop, HostVm, IncomingReady,
    PeerEnvelope, PreflightIncoming, PreflightOutgoing, PrepareIncoming, ProbeRequest, ProbeResult,
    PutVm, RemovedHosts, Revoked,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{MigrationReport, MigrationSpec, PreflightReport};
use godwit_types::site::{
    GiftOvertaken, SiteAnswer, SiteHeard, SiteQuestion, SiteUpdate, SurveyAnswer, SurveyRequest,
    WholeSurvey,
};
use godwit_types::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::{MigrationId, VmName, VmSpec};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// Paths of the agent's routes.
pub mod path {
    /// GET: [`super::HostInfo`].
    pub const HOST: &str = "/v1/host";
    /// GET: [`super::HostCheck`].
    pub const CHECK: &str = "/v1/check";
    /// GET: list of [`super::HostVm`].
    pub const VMS: &str = "/v1/vms";
    /// PUT [`super::PutVm`]: [`super::Done`]; DELETE: [`super::Done`]; GET: [`super::HostVm`].
    pub const VM: &str = "/v1/vms/{name}";
    /// POST [`super::Empty`]: [`super::Done`].
    pub const START: &str = "/v1/vms/{name}/start";
    /// POST [`super::HostStop`]: [`super::Done`].
    pub const STOP: &str = "/v1/vms/{name}/stop";
    /// POST [`super::Empty`]: [`super::Done`].
    pub const RESET: &str = "/v1/vms/{name}/reset";
    /// POST [`super::Empty`]: [`super::Done`].
    pub const PAUSE: &str = "/v1/vms/{name}/pause";
    /// POST [`super::Empty`]: [`super::Done`].
    pub const RESUME: &str = "/v1/vms/{name}/resume";
    /// POST [`super::HostResolve`]: [`super::Done`].
    pub const RESOLVE: &str = "/v1/vms/{name}/resolve";
    /// POST [`super::PrepareIncoming`]: [`super::IncomingReady`].
    pub const PREPARE_INCOMING: &str = "/v1/vms/{name}/prepare-incoming";
    /// POST [`super::MigrationSpec`]: [`super::Done`].
    pub const MIGRATE: &str = "/v1/vms/{name}/migrate";
    /// POST [`super::Empty`]: [`super::PreflightOutgoing`].
    pub const PREFLIGHT_OUTGOING: &str = "/v1/vms/{name}/preflight-outgoing";
    /// POST [`super::ProbeRequest`]: [`super::Done`].
    pub const PROBE: &str = "/v1/vms/{name}/probe";
    /// POST [`super::PeerEnvelope`], from another host's agent: list of ownership messages.
    pub const PEER: &str = "/v1/vms/{name}/peer";
    /// GET: [`super::ConsoleText`].
    pub const CONSOLE: &str = "/v1/vms/{name}/console";
    /// GET, with [`super::ConsoleQuery`]: server-sent events `console` with a [`super::ConsolePiece`] each, `error` at the end.
    pub const CONSOLE_EVENTS: &str = "/v1/vms/{name}/console/events";
    /// POST [`super::ConsoleTyped`]: [`super::Done`].
    pub const CONSOLE_TYPE: &str = "/v1/vms/{name}/console/type";
    /// POST [`super::PreflightIncoming`]: [`super::PreflightReport`]. From here on it listens for the probe.
    pub const PREFLIGHT_INCOMING: &str = "/v1/preflight-incoming";
    /// GET: [`super::ProbeResult`]. Waits up to 2 s for what has not arrived.
    pub const PROBE_RESULT: &str = "/v1/probe/{nonce}";
    /// GET: list of [`super::MigrationReport`].
    pub const MIGRATIONS: &str = "/v1/migrations";
    /// GET: [`super::MigrationReport`].
    pub const MIGRATION: &str = "/v1/migrations/{id}";
    /// POST [`super::HostCancel`]: [`super::Done`].
    pub const CANCEL: &str = "/v1/migrations/{id}/cancel";
    /// PUT [`super::Revoked`]: [`super::Done`].
    pub const REVOKED: &str = "/v1/revoked";
    /// PUT [`super::RemovedHosts`]: [`super::Done`].
    pub const REMOVED_HOSTS: &str = "/v1/removed-hosts";
    /// POST [`super::Measure`]: [`super::DirtyRate`].
    pub const MEASURE: &str = "/v1/vms/{name}/measure";
    /// POST [`super::LinkProbeListen`]: [`super::LinkProbeReady`].
    pub const LINK_LISTEN: &str = "/v1/link-probe/listen";
    /// POST [`super::LinkProbeSend`]: [`super::LinkMeasured`].
    pub const LINK_SEND: &str = "/v1/link-probe/send";
    /// GET: [`super::HostLoad`].
    pub const LOAD: &str = "/v1/load";
    /// POST [`super::SurveyRequest`]: [`super::SurveyAnswer`]; a no binds.
    pub const SURVEY: &str = "/v1/vms/{name}/survey";
    /// POST [`super::GiftOvertaken`]: [`super::Done`].
    pub const GIFT_OVERTAKEN: &str = "/v1/vms/{name}/gift-overtaken";
    /// PUT [`super::SiteUpdate`]: [`super::SiteHeard`].
    pub const SITE: &str = "/v1/site";
    /// POST [`super::SiteQuestion`], from another host: [`super::SiteAnswer`].
    pub const SITE_ASK: &str = "/v1/site/ask";
    /// POST [`super::Empty`]: [`super::WholeSurvey`].
    pub const SITE_SURVEY: &str = "/v1/site/survey";
    /// POST a VM: `DisksMaking`. Makes the disks that are to be made, or goes on with that.
    pub const DISKS: &str = "/v1/vms/{name}/disks";
    /// POST `MoveDisks`: `DiskMoves`, begun: disks go to a datastore of the host. GET: the same, as far as it has come. DELETE:
    /// [`super::Done`], called off.
    pub const MOVE_DISKS: &str = "/v1/vms/{name}/move-disks";
    /// POST `ResizeDisk`: [`super::Done`].
    pub const RESIZE_DISK: &str = "/v1/vms/{name}/resize-disk";
    pub const LIMIT_DISK: &str = "/v1/vms/{name}/limit-disk";
    /// GET: `Snapshots`. POST `TakeSnapshot`: [`super::Done`].
    pub const SNAPSHOTS: &str = "/v1/vms/{name}/snapshots";
    /// POST `SnapshotRequest`: [`super::Done`].
    pub const REVERT_SNAPSHOT: &str = "/v1/vms/{name}/revert-snapshot";
    /// POST `SnapshotRequest`: [`super::Done`].
    pub const DELETE_SNAPSHOT: &str = "/v1/vms/{name}/delete-snapshot";
    /// POST `CloneDisks`: `Cloning`, begun or gone on with: disks are copied for another VM. GET: the same, as far as it has come. DELETE:
    /// [`super::Done`], called off.
    pub const CLONE: &str = "/v1/vms/{name}/clone";
    /// POST the VM that was to be a clone, as its attempt described it: [`super::Done`]. What was copied for it and has no name yet is removed.
    pub const FORGET_CLONE: &str = "/v1/vms/{name}/forget-clone";
    /// POST [`super::Empty`]: [`super::Done`]. Another VM process, of the installed program, takes the guest over.
    pub const RENEW: &str = "/v1/vms/{name}/renew";
    /// POST [`super::Empty`]: [`super::Done`]. A person has a damaged record of this host put aside.
    pub const FORGET_RECORD: &str = "/v1/vms/{name}/forget-record";
    /// POST [`super::CloseRequest`]: [`super::HostClosing`], begun: the host shuts down. GET: the same, as far as it has come.
    pub const CLOSE: &str = "/v1/close";
    /// POST [`super::Empty`]: [`super::Done`]. The host runs guests again.
    pub const OPEN: &str = "/v1/open";
    /// POST [`super::Empty`]: [`super::Done`]. The agent takes the certificate that a person has renewed in its directory.
    pub const CERTIFICATE: &str = "/v1/certificate";
    /// POST [`super::Empty`]: [`super::Done`]. A person lets this host boot what it holds without an answer.
    pub const BOOT_ALONE: &str = "/v1/site/boot-alone";
}

/// How long a guest's writes are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// The time, ms.
    pub millis: u64,
}

const READ: Access = Access::CONTROLLER.or(Access::PEOPLE);
const POWER: Access = Access::CONTROLLER.or(Access::LOCAL);
const CONTROLLER: Access = Access::CONTROLLER;

/// Who may call which route of an agent.
pub const RULES: &[Rule] = &[
    rule("GET", path::HOST, READ),
    rule("GET", path::CHECK, READ),
    rule("GET", path::VMS, READ),
    rule("GET", path::VM, READ),
    rule("PUT", path::VM, CONTROLLER),
    rule("DELETE", path::VM, CONTROLLER),
    rule("POST", path::START, CONTROLLER),
    rule("POST", path::STOP, POWER),
    rule("POST", path::RESET, POWER),
    rule("POST", path::PAUSE, POWER),
    rule("POST", path::RESUME, POWER),
    rule("POST", path::RESOLVE, POWER),
    rule("POST", path::RENEW, POWER),
    rule("POST", path::DISKS, CONTROLLER),
    rule("GET", path::DISKS, READ),
    rule("POST", path::MOVE_DISKS, CONTROLLER),
    rule("GET", path::MOVE_DISKS, READ),
    rule("DELETE", path::MOVE_DISKS, POWER),
    rule("POST", path::RESIZE_DISK, CONTROLLER),
    rule("POST", path::LIMIT_DISK, CONTROLLER),
    rule("GET", path::SNAPSHOTS, READ),
    rule("POST", path::SNAPSHOTS, CONTROLLER),
    rule("POST", path::REVERT_SNAPSHOT, CONTROLLER),
    rule("POST", path::DELETE_SNAPSHOT, CONTROLLER),
    rule("POST", path::CLONE, CONTROLLER),
    rule("GET", path::CLONE, READ),
    rule("DELETE", path::CLONE, CONTROLLER),
    rule("POST", path::FORGET_CLONE, CONTROLLER),
    rule("POST", path::PREPARE_INCOMING, CONTROLLER),
    rule("POST", path::MIGRATE, CONTROLLER),
    rule("POST", path::PREFLIGHT_OUTGOING, CONTROLLER),
    rule("POST", path::PROBE, CONTROLLER),
    rule("POST", path::PEER, Access::HOST),
    rule("GET", path::CONSOLE, READ),
    rule("GET", path::CONSOLE_EVENTS, READ),
    rule("POST", path::CONSOLE_TYPE, POWER),
    rule("POST", path::PREFLIGHT_INCOMING, CONTROLLER),
    rule("GET", path::PROBE_RESULT, CONTROLLER),
    rule("GET", path::MIGRATIONS, READ),
    rule("GET", path::MIGRATION, READ),
    rule("POST", path::CANCEL, POWER),
    rule("PUT", path::REVOKED, CONTROLLER),
    rule("PUT", path::REMOVED_HOSTS, CONTROLLER),
    rule("POST", path::MEASURE, CONTROLLER),
    rule("POST", path::LINK_LISTEN, CONTROLLER),
    rule("POST", path::LINK_SEND, CONTROLLER),
    rule("GET", path::LOAD, READ),
    rule("POST", path::SURVEY, CONTROLLER),
    rule("POST", path::GIFT_OVERTAKEN, CONTROLLER),
    rule("PUT", path::SITE, CONTROLLER),
    rule_also_removed("POST", path::SITE_ASK, Access::HOST),
    rule("POST", path::SITE_SURVEY, CONTROLLER),
    rule("POST", path::CLOSE, Access::LOCAL),
    rule("GET", path::CLOSE, Access::LOCAL),
    rule("POST", path::OPEN, Access::LOCAL),
    rule("POST", path::CERTIFICATE, Access::LOCAL),
    rule("POST", path::BOOT_ALONE, Access::LOCAL),
    rule("POST", path::FORGET_RECORD, Access::LOCAL),
];

/// The VMs of a host, as far as its words are known here.
#[derive(Debug, Clone, Default)]
pub struct HeardVms {
    /// Those that were understood.
    pub vms: Vec<HostVm>,
    /// Those that were not, each with what to do.
    pub unread: BTreeMap<VmName, String>,
}

impl Client {
    fn read_vms(&self, told: &[Box<RawValue>]) -> Reply<HeardVms> {
        let mut heard = HeardVms::default();
        for one in told {
            match serde_json::from_str::<HostVm>(one.get()) {
                Ok(vm) => heard.vms.push(vm),
                Err(error) => {
                    let name = name_in(one).ok_or_else(|| self.answer(&error.to_string()))?;
                    let why = format!(
                        "{} tells of it in words that this version of Godwit does not know ({error}): update this side, too",
                        self.name()
                    );
                    heard.unread.insert(name, why);
                }
            }
        }
        Ok(heard)
    }
}

/// The name of a VM whose other words may be unknown here.
fn name_in(told: &RawValue) -> Option<VmName> {
    let words: serde_json::Value = serde_json::from_str(told.get()).ok()?;
    let name = words.pointer("/spec/name")?;
    VmName::deserialize(name).ok()
}

/// Calls an agent's routes over any client, each with a deadline.
#[derive(Clone)]
pub struct AgentClient {
    client: Client,
    /// The same for what may be long.
    lists: Client,
    deadlines: Deadlines,
}

impl AgentClient {
    pub fn new(client: Client) -> Self {
        Self {
            lists: client.clone().with_answer_max(LIST_LEN_MAX),
            client,
            deadlines: Deadlines::default(),
        }
    }

    /// The same with other deadlines.
    pub fn with_deadlines(mut self, deadlines: Deadlines) -> Self {
        self.deadlines = deadlines;
        self
    }

    /// Its VMs. One that it tells of in words that this version does not know is unread; the others are not lost by it.
    pub async fn heard_vms(&self) -> Reply<HeardVms> {
        let told: Vec<Box<RawValue>> = self.lists.get(path::VMS, self.deadlines.read).await?;
        self.client.read_vms(&told)
    }
}

calls! { AgentClient
    /// What the host says of itself.
    host() -> HostInfo = get client (path::HOST) in read;
    check() -> HostCheck = get client (path::CHECK) in slow;
    vms() -> Vec<HostVm> = get lists (path::VMS) in read;
    vm(name: &VmName) -> HostVm = get client (fill(path::VM, name)) in read;
    /// Forgets a stopped VM.
    delete_vm(name: &VmName) -> Done = delete client (fill(path::VM, name)) in act;
    start(name: &VmName) -> Done = post client (fill(path::START, name), &Empty {}) in slow;
    stop(name: &VmName, request: &StopRequest) -> Done
        = post client (fill(path::STOP, name), &HostStop::from(request)) in slow;
    reset(name: &VmName) -> Done = post client (fill(path::RESET, name), &Empty {}) in act;
    pause(name: &VmName) -> Done = post client (fill(path::PAUSE, name), &Empty {}) in act;
    /// Lets it go on.
    resume(name: &VmName) -> Done = post client (fill(path::RESUME, name), &Empty {}) in act;
    /// Settles an in-doubt VM.
    resolve(name: &VmName, request: &ResolveRequest) -> Done
        = post client (fill(path::RESOLVE, name), &HostResolve::from(request)) in act;
    /// Has a VM process of the installed program take the guest over.
    renew(name: &VmName) -> Done = post client (fill(path::RENEW, name), &Empty {}) in slow;
    /// Makes a VM's disks, or says how far that is.
    make_disks(spec: &VmSpec) -> DisksMaking
        = post client (fill(path::DISKS, &spec.name), spec) in slow;
    /// How far they are.
    disks(name: &VmName) -> DisksMaking = get client (fill(path::DISKS, name)) in read;
    /// Moves disks to a datastore of the host.
    move_disks(name: &VmName, wish: &MoveDisks) -> DiskMoves
        = post client (fill(path::MOVE_DISKS, name), wish) in slow;
    /// How far they are.
    disk_moves(name: &VmName) -> DiskMoves = get client (fill(path::MOVE_DISKS, name)) in read;
    /// Disks that are not moved yet stay where they are.
    cancel_disk_moves(name: &VmName) -> Done
        = delete client (fill(path::MOVE_DISKS, name)) in act;
    /// Makes a disk larger.
    resize_disk(name: &VmName, wish: &ResizeDisk) -> Done
        = post client (fill(path::RESIZE_DISK, name), wish) in slow;
    limit_disk(name: &VmName, wish: &LimitDisk) -> Done
        = post client (fill(path::LIMIT_DISK, name), wish) in act;
    snapshots(name: &VmName) -> Snapshots = get client (fill(path::SNAPSHOTS, name)) in read;
    take_snapshot(name: &VmName, wish: &TakeSnapshot) -> Done
        = post client (fill(path::SNAPSHOTS, name), wish) in slow;
    revert_snapshot(name: &VmName, wish: &SnapshotRequest) -> Done
        = post client (fill(path::REVERT_SNAPSHOT, name), wish) in slow;
    delete_snapshot(name: &VmName, wish: &SnapshotRequest) -> Done
        = post client (fill(path::DELETE_SNAPSHOT, name), wish) in slow;
    /// Copies disks for another VM, or says how far that is.
    clone_disks(name: &VmName, wish: &CloneDisks) -> Cloning
        = post client (fill(path::CLONE, name), wish) in slow;
    /// How far they are.
    cloning(name: &VmName) -> Cloning = get client (fill(path::CLONE, name)) in read;
    cancel_clone(name: &VmName) -> Done = delete client (fill(path::CLONE, name)) in act;
    /// Removes what was copied for a clone that is deleted before its disks have their names.
    forget_clone(spec: &VmSpec) -> Done
        = post client (fill(path::FORGET_CLONE, &spec.name), spec) in act;
    /// Makes a destination ready.
    prepare_incoming(request: &PrepareIncoming) -> IncomingReady
        = post client (fill(path::PREPARE_INCOMING, &request.spec.name), request) in slow;
    /// Begins a migration at its source.
    migrate(spec: &MigrationSpec) -> Done
        = post client (fill(path::MIGRATE, &spec.vm), spec) in act;
    /// The source's side of preflight.
    preflight_outgoing(name: &VmName) -> PreflightOutgoing
        = post client (fill(path::PREFLIGHT_OUTGOING, name), &Empty {}) in slow;
    /// The destination's side of preflight.
    preflight_incoming(request: &PreflightIncoming) -> PreflightReport
        = post client (path::PREFLIGHT_INCOMING, request) in slow;
    /// Sends probe frames from a VM's port groups.
    probe(name: &VmName, request: &ProbeRequest) -> Done
        = post client (fill(path::PROBE, name), request) in act;
    /// Which probe frames arrived; `nonce` is lower-case hex.
    probe_result(nonce: &str) -> ProbeResult = get client (fill(path::PROBE_RESULT, nonce)) in act;
    migrations() -> Vec<MigrationReport> = get lists (path::MIGRATIONS) in read;
    migration(id: &MigrationId) -> MigrationReport = get client (fill(path::MIGRATION, id)) in read;
    /// Carries an ownership message to the other host.
    peer(name: &VmName, message: &PeerEnvelope) -> Vec<serde_json::Value>
        = post client (fill(path::PEER, name), message) in act;
    /// The guest's serial console.
    console(name: &VmName) -> ConsoleText = get client (fill(path::CONSOLE, name)) in read;
    /// What the guest writes there, from a place on.
    console_events(name: &VmName, query: &ConsoleQuery) -> EventStream
        = events client (format!("{}?{}", fill(path::CONSOLE_EVENTS, name), query.to_text())) in act;
    /// Types to the guest.
    console_type(name: &VmName, typed: &ConsoleTyped) -> Done
        = post client (fill(path::CONSOLE_TYPE, name), typed) in act;
    /// Tells which certificates are revoked.
    revoked(revoked: &Revoked) -> Done = put client (path::REVOKED, revoked) in read;
    /// Tells which hosts are gone for good.
    removed_hosts(removed: &RemovedHosts) -> Done
        = put client (path::REMOVED_HOSTS, removed) in act;
    /// Measures how a guest writes.
    measure(name: &VmName, millis: u64) -> DirtyRate
        = post client (fill(path::MEASURE, name), &Measure { millis }) in act;
    /// Listens for a burst that measures the link.
    link_listen(probe: &LinkProbeListen) -> LinkProbeReady
        = post client (path::LINK_LISTEN, probe) in read;
    link_send(probe: &LinkProbeSend) -> LinkMeasured = post client (path::LINK_SEND, probe) in act;
    /// Asks whether the host may hold a VM.
    survey(name: &VmName, request: &SurveyRequest) -> SurveyAnswer
        = post client (fill(path::SURVEY, name), request) in act;
    /// Has the host give up what it gave away and nobody takes any more.
    gift_overtaken(name: &VmName, overtaken: &GiftOvertaken) -> Done
        = post client (fill(path::GIFT_OVERTAKEN, name), overtaken) in act;
    /// Adds to the host's table of the site.
    site(update: &SiteUpdate) -> SiteHeard = put client (path::SITE, update) in read;
    /// Has a damaged record put aside.
    forget_record(name: &VmName) -> Done
        = post client (fill(path::FORGET_RECORD, name), &Empty {}) in act;
    /// Has the host power its guests down and take no VMs.
    close(request: &CloseRequest) -> HostClosing = post client (path::CLOSE, request) in act;
    /// How far it has come with that.
    closing() -> HostClosing = get client (path::CLOSE) in read;
    /// Has the host run guests again.
    open() -> Done = post client (path::OPEN, &Empty {}) in act;
    /// Has the agent take the certificate that stands in its directory now.
    take_certificate() -> Done = post client (path::CERTIFICATE, &Empty {}) in act;
    /// Lets the host boot what it holds without an answer of the site.
    boot_alone() -> Done = post client (path::BOOT_ALONE, &Empty {}) in act;
    /// What the host is busy with.
    load() -> HostLoad = get client (path::LOAD) in read;
    /// Makes a VM known or updates it.
    put_vm(vm: &PutVm) -> Done = put client (fill(path::VM, &vm.spec.name), vm) in act;
    cancel(id: &MigrationId, request: &CancelRequest) -> Done
        = post client (fill(path::CANCEL, id), &HostCancel::from(request)) in act;
    /// Asks, as another host, before this one boots what nobody asked it to boot.
    site_ask(question: &SiteQuestion) -> SiteAnswer = post lists (path::SITE_ASK, question) in read;
    /// Reads all of the host's records, for a controller that works on an old copy of its database.
    site_survey() -> WholeSurvey = post lists (path::SITE_SURVEY, &Empty {}) in act;
}
