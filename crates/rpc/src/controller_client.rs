//! The controller's interface: its routes with who may call them, and a typed client.
//!
//! Owns nothing.

use crate::access::{Access, Rule, rule, rule_also_removed};
use crate::client::{Client, Deadlines, Reply, calls, fill};
use crate::limits::{LIST_LEN_MAX, SITE_LIST_LEN_MAX};
use crate::sse::EventStream;
use godwit_types::audit::{AuditEntry, AuditQuery};
use godwit_types::clones::{CloneVm, Cloned};
#[cfg(doc)]
use godwit_types::console::ConsolePiece;
use godwit_types::console::{ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{
    CancelRequest, ConsoleText, DisksMaking, Done, Empty, HostCheck, HostView, JoinRequest,
    JoinResponse, JoinToken, KeepRequest, MigrationBegun, OperatorRequest, OperatorView,
    RenewRequest, ResolveRequest, StartRequest, Started, StopRequest, VersionView, VmView,
};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_move::{DiskMoves, MoveDisks};
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::drain::{DrainRequest, DrainView};
use godwit_types::load::HostTop;
use godwit_types::migration::{MigrateRequest, MigrationReport, PreflightReport};
use godwit_types::site::{SiteAnswer, SiteQuestion, SiteView};
use godwit_types::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::{HostName, MigrationId, VmName, VmSpec};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Paths of the controller's routes.
pub mod path {
    /// GET: list of hosts; POST: a join token.
    pub const HOSTS: &str = "/v1/hosts";
    /// GET: a host; DELETE: remove it (`?confirm_unreachable=true` if it does not answer and holds VMs).
    pub const HOST: &str = "/v1/hosts/{name}";
    /// GET: its checks.
    pub const HOST_CHECK: &str = "/v1/hosts/{name}/check";
    /// POST: a person says that the host is off; holds until it is heard.
    pub const FENCED: &str = "/v1/hosts/{name}/fenced";
    /// GET: how far the emptying of a host is; POST: begin it; DELETE: end it, the host takes VMs again.
    pub const DRAIN: &str = "/v1/hosts/{name}/drain";
    /// GET: the emptying as server-sent events, until nothing is left to move.
    pub const DRAIN_EVENTS: &str = "/v1/hosts/{name}/drain/events";
    /// GET: what every host is busy with.
    pub const TOP: &str = "/v1/top";
    /// POST: enrol a host.
    pub const JOIN: &str = "/v1/join";
    /// GET: whether the certificate that is shown is wanted; POST: renew it; DELETE: a host leaves.
    pub const CERTIFICATE: &str = "/v1/certificate";
    /// GET: operators' certificates; POST, on this machine: make one.
    pub const OPERATORS: &str = "/v1/operators";
    /// DELETE, on this machine: revoke every certificate of an operator.
    pub const OPERATOR: &str = "/v1/operators/{name}";
    /// GET: list of VMs; POST: create one.
    pub const VMS: &str = "/v1/vms";
    /// GET: a VM; PUT: edit it; DELETE: delete it.
    pub const VM: &str = "/v1/vms/{name}";
    /// POST.
    pub const START: &str = "/v1/vms/{name}/start";
    /// GET: how far the disks are of a VM that is being started.
    pub const DISKS: &str = "/v1/vms/{name}/disks";
    /// POST: moves disks to a datastore of the VM's host; GET: how far they are; DELETE: calls it off.
    pub const MOVE_DISKS: &str = "/v1/vms/{name}/move-disks";
    /// POST: makes a disk larger.
    pub const RESIZE_DISK: &str = "/v1/vms/{name}/resize-disk";
    pub const LIMIT_DISK: &str = "/v1/vms/{name}/limit-disk";
    /// GET: `Snapshots`. POST `TakeSnapshot`: [`super::Done`].
    pub const SNAPSHOTS: &str = "/v1/vms/{name}/snapshots";
    /// POST `SnapshotRequest`: [`super::Done`].
    pub const REVERT_SNAPSHOT: &str = "/v1/vms/{name}/revert-snapshot";
    /// POST `SnapshotRequest`: [`super::Done`].
    pub const DELETE_SNAPSHOT: &str = "/v1/vms/{name}/delete-snapshot";
    /// POST `CloneVm`: `Cloned`, begun or gone on with. GET: how far the disks are. DELETE: calls it off.
    pub const CLONE: &str = "/v1/vms/{name}/clone";
    /// POST.
    pub const STOP: &str = "/v1/vms/{name}/stop";
    /// POST.
    pub const RESET: &str = "/v1/vms/{name}/reset";
    /// POST.
    pub const PAUSE: &str = "/v1/vms/{name}/pause";
    /// POST.
    pub const RESUME: &str = "/v1/vms/{name}/resume";
    /// POST.
    pub const RENEW: &str = "/v1/vms/{name}/renew";
    /// POST.
    pub const RESOLVE: &str = "/v1/vms/{name}/resolve";
    /// POST: of a VM that several hosts hold, keep the copy of one.
    pub const KEEP: &str = "/v1/vms/{name}/keep";
    /// GET: how the site stands, alarms first.
    pub const SITE: &str = "/v1/site";
    /// POST: a person has seen the alarms that nothing else ends.
    pub const SITE_ACKNOWLEDGE: &str = "/v1/site/acknowledge";
    /// POST, from a host: whether it may boot what nobody asked it to boot.
    pub const SITE_ASK: &str = "/v1/site/ask";
    /// POST.
    pub const MIGRATE: &str = "/v1/vms/{name}/migrate";
    /// GET.
    pub const CONSOLE: &str = "/v1/vms/{name}/console";
    /// GET: the console as server-sent events, from a place on.
    pub const CONSOLE_EVENTS: &str = "/v1/vms/{name}/console/events";
    /// POST.
    pub const CONSOLE_TYPE: &str = "/v1/vms/{name}/console/type";
    /// GET: list of reports.
    pub const MIGRATIONS: &str = "/v1/migrations";
    /// GET: a report.
    pub const MIGRATION: &str = "/v1/migrations/{id}";
    /// GET: reports as server-sent events, until it ends.
    pub const MIGRATION_EVENTS: &str = "/v1/migrations/{id}/events";
    /// POST.
    pub const CANCEL: &str = "/v1/migrations/{id}/cancel";
    /// GET: changes of the inventory as server-sent events.
    pub const EVENTS: &str = "/v1/events";
    /// GET: who asked for what (`?last=N&about=NAME`).
    pub const AUDIT: &str = "/v1/audit";
    /// GET: what a monitoring system reads, in the text format of Prometheus.
    pub const METRICS: &str = "/metrics";
    /// GET: what answers here.
    pub const VERSION: &str = "/v1/version";
    /// GET: the interface's description.
    pub const OPENAPI: &str = "/v1/openapi.json";
}

const PEOPLE: Access = Access::PEOPLE;
/// Who has a certificate from the controller.
const CERTIFIED: Access = Access::HOST.or(Access::OPERATOR);

/// Who may call which route of the controller.
pub const RULES: &[Rule] = &[
    rule("GET", path::HOSTS, PEOPLE),
    rule("POST", path::HOSTS, PEOPLE),
    rule("GET", path::HOST, PEOPLE),
    rule("DELETE", path::HOST, PEOPLE),
    rule("GET", path::HOST_CHECK, PEOPLE),
    rule("POST", path::FENCED, PEOPLE),
    rule("GET", path::DRAIN, PEOPLE),
    rule("POST", path::DRAIN, PEOPLE),
    rule("DELETE", path::DRAIN, PEOPLE),
    rule("GET", path::DRAIN_EVENTS, PEOPLE),
    rule("GET", path::TOP, PEOPLE),
    rule("POST", path::JOIN, Access::ANYONE),
    rule("GET", path::CERTIFICATE, CERTIFIED),
    rule("POST", path::CERTIFICATE, CERTIFIED),
    rule("DELETE", path::CERTIFICATE, Access::HOST),
    rule("GET", path::OPERATORS, PEOPLE),
    rule("POST", path::OPERATORS, Access::LOCAL),
    rule("DELETE", path::OPERATOR, Access::LOCAL),
    rule("GET", path::VMS, PEOPLE),
    rule("POST", path::VMS, PEOPLE),
    rule("GET", path::VM, PEOPLE),
    rule("PUT", path::VM, PEOPLE),
    rule("DELETE", path::VM, PEOPLE),
    rule("POST", path::START, PEOPLE),
    rule("GET", path::DISKS, PEOPLE),
    rule("POST", path::MOVE_DISKS, PEOPLE),
    rule("GET", path::MOVE_DISKS, PEOPLE),
    rule("DELETE", path::MOVE_DISKS, PEOPLE),
    rule("POST", path::RESIZE_DISK, PEOPLE),
    rule("POST", path::LIMIT_DISK, PEOPLE),
    rule("GET", path::SNAPSHOTS, PEOPLE),
    rule("POST", path::SNAPSHOTS, PEOPLE),
    rule("POST", path::REVERT_SNAPSHOT, PEOPLE),
    rule("POST", path::DELETE_SNAPSHOT, PEOPLE),
    rule("POST", path::CLONE, PEOPLE),
    rule("GET", path::CLONE, PEOPLE),
    rule("DELETE", path::CLONE, PEOPLE),
    rule("POST", path::STOP, PEOPLE),
    rule("POST", path::RESET, PEOPLE),
    rule("POST", path::RENEW, PEOPLE),
    rule("POST", path::PAUSE, PEOPLE),
    rule("POST", path::RESUME, PEOPLE),
    rule("POST", path::RESOLVE, PEOPLE),
    rule("POST", path::KEEP, PEOPLE),
    rule("GET", path::SITE, PEOPLE),
    rule("POST", path::SITE_ACKNOWLEDGE, PEOPLE),
    rule_also_removed("POST", path::SITE_ASK, Access::HOST),
    rule("POST", path::MIGRATE, PEOPLE),
    rule("GET", path::CONSOLE, PEOPLE),
    rule("GET", path::CONSOLE_EVENTS, PEOPLE),
    rule("POST", path::CONSOLE_TYPE, PEOPLE),
    rule("GET", path::MIGRATIONS, PEOPLE),
    rule("GET", path::MIGRATION, PEOPLE),
    rule("GET", path::MIGRATION_EVENTS, PEOPLE),
    rule("POST", path::CANCEL, PEOPLE),
    rule("GET", path::EVENTS, PEOPLE),
    rule("GET", path::AUDIT, PEOPLE),
    rule("GET", path::METRICS, PEOPLE),
    rule("GET", path::VERSION, PEOPLE),
    rule("GET", path::OPENAPI, PEOPLE),
];

/// What a migrate request came to: a report of the checks (dry run) or a migration that has begun.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum MigrateAnswer {
    Begun(MigrationBegun),
    Checked(PreflightReport),
}

const DEADLINES: Deadlines = Deadlines {
    read: Duration::from_secs(10),
    act: Duration::from_secs(180),
    slow: Duration::from_secs(180),
};

/// Calls the controller's routes over any client.
#[derive(Clone)]
pub struct ControllerClient {
    client: Client,
    /// The same for hosts, which need no list of everything.
    of_host: Client,
    deadlines: Deadlines,
}

impl ControllerClient {
    pub fn new(client: Client) -> Self {
        Self {
            of_host: client.clone().with_answer_max(LIST_LEN_MAX),
            client: client.with_answer_max(SITE_LIST_LEN_MAX),
            deadlines: DEADLINES,
        }
    }
}

calls! { ControllerClient
    version() -> VersionView = get client (path::VERSION) in read;
    hosts() -> Vec<HostView> = get client (path::HOSTS) in read;
    host(name: &HostName) -> HostView = get client (fill(path::HOST, name)) in read;
    /// A new join token.
    add_host() -> JoinToken = post client (path::HOSTS, &Empty {}) in read;
    check_host(name: &HostName) -> HostCheck = get client (fill(path::HOST_CHECK, name)) in act;
    /// Empties a host, or says how it would.
    drain(name: &HostName, request: &DrainRequest) -> DrainView
        = post client (fill(path::DRAIN, name), request) in act;
    /// How far the emptying of a host is.
    drain_view(name: &HostName) -> DrainView = get client (fill(path::DRAIN, name)) in read;
    /// Ends it: no further move begins, the host takes VMs again.
    undrain(name: &HostName) -> Done = delete client (fill(path::DRAIN, name)) in act;
    /// The emptying at every change until nothing is left to move; each event's data is a [`DrainView`].
    drain_events(name: &HostName) -> EventStream
        = events client (fill(path::DRAIN_EVENTS, name)) in read;
    /// What every host is busy with.
    top() -> Vec<HostTop> = get client (path::TOP) in read;
    /// Enrols; for a client that was made with [`Client::joining`].
    join(request: &JoinRequest) -> JoinResponse = post of_host (path::JOIN, request) in act;
    /// Whether the certificate that this client shows is wanted.
    certificate() -> Done = get of_host (path::CERTIFICATE) in read;
    /// Another certificate in place of the one that this client shows.
    renew_certificate(request: &RenewRequest) -> JoinResponse
        = post of_host (path::CERTIFICATE, request) in read;
    /// Takes the host that this client shows the certificate of out of the site.
    leave() -> Done = delete of_host (path::CERTIFICATE) in act;
    add_operator(request: &OperatorRequest) -> JoinResponse
        = post of_host (path::OPERATORS, request) in read;
    operators() -> Vec<OperatorView> = get client (path::OPERATORS) in read;
    /// Revokes every certificate of an operator.
    remove_operator(name: &HostName) -> Done = delete client (fill(path::OPERATOR, name)) in read;
    vms() -> Vec<VmView> = get client (path::VMS) in read;
    vm(name: &VmName) -> VmView = get client (fill(path::VM, name)) in read;
    create_vm(spec: &VmSpec) -> VmView = post client (path::VMS, spec) in read;
    /// Edits a stopped VM.
    edit_vm(spec: &VmSpec) -> VmView = put client (fill(path::VM, &spec.name), spec) in act;
    /// Deletes a stopped VM.
    delete_vm(name: &VmName) -> Done = delete client (fill(path::VM, name)) in act;
    start(name: &VmName, request: &StartRequest) -> Started
        = post client (fill(path::START, name), request) in slow;
    /// How far the disks are of a VM that is being started.
    disks(name: &VmName) -> DisksMaking = get client (fill(path::DISKS, name)) in read;
    /// Moves disks to a datastore of the VM's host while the guest runs.
    move_disks(name: &VmName, wish: &MoveDisks) -> DiskMoves
        = post client (fill(path::MOVE_DISKS, name), wish) in slow;
    /// How far they are.
    disk_moves(name: &VmName) -> DiskMoves = get client (fill(path::MOVE_DISKS, name)) in read;
    /// Disks that are not moved yet stay where they are.
    cancel_disk_moves(name: &VmName) -> Done
        = delete client (fill(path::MOVE_DISKS, name)) in act;
    /// Makes a disk larger, whether the guest runs or not.
    resize_disk(name: &VmName, wish: &ResizeDisk) -> Done
        = post client (fill(path::RESIZE_DISK, name), wish) in act;
    /// Limits a disk, whether the guest runs or not.
    limit_disk(name: &VmName, wish: &LimitDisk) -> Done
        = post client (fill(path::LIMIT_DISK, name), wish) in act;
    snapshots(name: &VmName) -> Snapshots = get client (fill(path::SNAPSHOTS, name)) in act;
    take_snapshot(name: &VmName, wish: &TakeSnapshot) -> Done
        = post client (fill(path::SNAPSHOTS, name), wish) in act;
    revert_snapshot(name: &VmName, wish: &SnapshotRequest) -> Done
        = post client (fill(path::REVERT_SNAPSHOT, name), wish) in act;
    delete_snapshot(name: &VmName, wish: &SnapshotRequest) -> Done
        = post client (fill(path::DELETE_SNAPSHOT, name), wish) in act;
    /// Makes a VM that is as this one, or goes on with that.
    clone_vm(name: &VmName, wish: &CloneVm) -> Cloned
        = post client (fill(path::CLONE, name), wish) in slow;
    /// How far its disks are.
    cloning(name: &VmName) -> DisksMaking = get client (fill(path::CLONE, name)) in read;
    cancel_clone(name: &VmName) -> Done = delete client (fill(path::CLONE, name)) in act;
    stop(name: &VmName, request: &StopRequest) -> Done
        = post client (fill(path::STOP, name), request) in act;
    /// Has a VM process of the version installed on its host take a guest over.
    renew(name: &VmName) -> Done = post client (fill(path::RENEW, name), &Empty {}) in act;
    reset(name: &VmName) -> Done = post client (fill(path::RESET, name), &Empty {}) in act;
    pause(name: &VmName) -> Done = post client (fill(path::PAUSE, name), &Empty {}) in act;
    /// Lets it go on.
    resume(name: &VmName) -> Done = post client (fill(path::RESUME, name), &Empty {}) in act;
    /// Settles an in-doubt VM.
    resolve(name: &VmName, request: &ResolveRequest) -> Done
        = post client (fill(path::RESOLVE, name), request) in act;
    /// Of a VM that several hosts hold, keeps the copy of one host and ends the others.
    keep(name: &VmName, request: &KeepRequest) -> Done
        = post client (fill(path::KEEP, name), request) in act;
    /// Says that a host is off.
    fenced(host: &HostName) -> Done = post client (fill(path::FENCED, host), &Empty {}) in act;
    /// How the site stands.
    site() -> SiteView = get client (path::SITE) in read;
    /// Says that a person has seen the alarms that nothing else ends.
    acknowledge() -> Done = post client (path::SITE_ACKNOWLEDGE, &Empty {}) in act;
    /// Asks, as a host, before it boots what nobody asked it to boot.
    site_ask(question: &SiteQuestion) -> SiteAnswer
        = post of_host (path::SITE_ASK, question) in read;
    /// Migrates, or checks whether it could.
    migrate(name: &VmName, request: &MigrateRequest) -> MigrateAnswer
        = post client (fill(path::MIGRATE, name), request) in act;
    /// The guest's serial console.
    console(name: &VmName) -> ConsoleText = get client (fill(path::CONSOLE, name)) in read;
    /// All migrations, newest first, those in doubt before.
    migrations() -> Vec<MigrationReport> = get client (path::MIGRATIONS) in read;
    migration(id: &MigrationId) -> MigrationReport = get client (fill(path::MIGRATION, id)) in read;
    /// Its report about five times a second until it ends; each event's data is a [`MigrationReport`].
    migration_events(id: &MigrationId) -> EventStream
        = events client (fill(path::MIGRATION_EVENTS, id)) in read;
    /// Changes of the inventory.
    events() -> EventStream = events client (path::EVENTS) in read;
    remove_host(name: &HostName, confirm_unreachable: bool) -> Done
        = delete client (format!("/v1/hosts/{name}?confirm_unreachable={confirm_unreachable}")) in act;
    /// Stops the copy of one host, wherever else the VM may be.
    stop_at(name: &VmName, host: &HostName, request: &StopRequest) -> Done
        = post client (format!("/v1/vms/{name}/stop?host={host}"), request) in act;
    /// The serial console of the copy on one host.
    console_at(name: &VmName, host: &HostName) -> ConsoleText
        = get client (format!("/v1/vms/{name}/console?host={host}")) in read;
    /// What a guest writes to its serial console, from a place on; each event's data is a [`ConsolePiece`], but of the last one,
    /// `error`.
    console_events(name: &VmName, query: &ConsoleQuery) -> EventStream
        = events client (format!("{}?{}", fill(path::CONSOLE_EVENTS, name), query.to_text())) in act;
    /// Types to the guest.
    console_type(name: &VmName, typed: &ConsoleTyped) -> Done
        = post client (fill(path::CONSOLE_TYPE, name), typed) in act;
    /// Types to the copy on one host.
    console_type_at(name: &VmName, host: &HostName, typed: &ConsoleTyped) -> Done
        = post client (format!("{}?host={host}", fill(path::CONSOLE_TYPE, name)), typed) in act;
    cancel(id: &MigrationId, request: &CancelRequest) -> Done
        = post client (fill(path::CANCEL, id), request) in act;
    /// Who asked for what, newest first.
    audit(query: &AuditQuery) -> Vec<AuditEntry>
        = get client (format!("{}?{}", path::AUDIT, query.to_text())) in read;
}
