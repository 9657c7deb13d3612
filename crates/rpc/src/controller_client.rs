//! The controller's interface: its routes with who may call them, and a typed client.
//!
//! Owns nothing.

use crate::access::{Access, Rule, rule, rule_also_removed};
use crate::client::{Client, ClientError};
use crate::limits::{LIST_LEN_MAX, SITE_LIST_LEN_MAX};
use crate::sse::EventStream;
use godwit_types::audit::{AuditEntry, AuditQuery};
use godwit_types::control_api::{
    CancelRequest, ConsoleText, Done, Empty, HostCheck, HostView, JoinRequest, JoinResponse,
    JoinToken, KeepRequest, MigrationBegun, OperatorRequest, OperatorView, RenewRequest,
    ResolveRequest, StartRequest, StopRequest, VersionView, VmView,
};
use godwit_types::drain::{DrainRequest, DrainView};
use godwit_types::load::HostTop;
use godwit_types::migration::{MigrateRequest, MigrationReport, PreflightReport};
use godwit_types::site::{SiteAnswer, SiteQuestion, SiteView};
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
    rule("GET", path::MIGRATIONS, PEOPLE),
    rule("GET", path::MIGRATION, PEOPLE),
    rule("GET", path::MIGRATION_EVENTS, PEOPLE),
    rule("POST", path::CANCEL, PEOPLE),
    rule("GET", path::EVENTS, PEOPLE),
    rule("GET", path::AUDIT, PEOPLE),
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

const READ: Duration = Duration::from_secs(10);
const ACT: Duration = Duration::from_secs(180);

/// Calls the controller's routes over any client.
#[derive(Clone)]
pub struct ControllerClient {
    client: Client,
    /// The same for hosts, which need no list of everything.
    of_host: Client,
}

type Reply<T> = Result<T, ClientError>;

impl ControllerClient {
    pub fn new(client: Client) -> Self {
        Self {
            of_host: client.clone().with_answer_max(LIST_LEN_MAX),
            client: client.with_answer_max(SITE_LIST_LEN_MAX),
        }
    }

    pub async fn version(&self) -> Reply<VersionView> {
        self.client.get(path::VERSION, READ).await
    }

    pub async fn hosts(&self) -> Reply<Vec<HostView>> {
        self.client.get(path::HOSTS, READ).await
    }

    pub async fn host(&self, name: &HostName) -> Reply<HostView> {
        self.client.get(&format!("/v1/hosts/{name}"), READ).await
    }

    /// A new join token.
    pub async fn add_host(&self) -> Reply<JoinToken> {
        self.client.post(path::HOSTS, &Empty {}, READ).await
    }

    pub async fn remove_host(&self, name: &HostName, confirm_unreachable: bool) -> Reply<Done> {
        let path = format!("/v1/hosts/{name}?confirm_unreachable={confirm_unreachable}");
        self.client.delete(&path, ACT).await
    }

    pub async fn check_host(&self, name: &HostName) -> Reply<HostCheck> {
        self.client
            .get(&format!("/v1/hosts/{name}/check"), ACT)
            .await
    }

    /// Empties a host, or says how it would.
    pub async fn drain(&self, name: &HostName, request: &DrainRequest) -> Reply<DrainView> {
        self.client
            .post(&format!("/v1/hosts/{name}/drain"), request, ACT)
            .await
    }

    /// How far the emptying of a host is.
    pub async fn drain_view(&self, name: &HostName) -> Reply<DrainView> {
        self.client
            .get(&format!("/v1/hosts/{name}/drain"), READ)
            .await
    }

    /// Ends it: no further move begins, the host takes VMs again.
    pub async fn undrain(&self, name: &HostName) -> Reply<Done> {
        self.client
            .delete(&format!("/v1/hosts/{name}/drain"), ACT)
            .await
    }

    /// The emptying at every change until nothing is left to move; each event's data is a [`DrainView`].
    pub async fn drain_events(&self, name: &HostName) -> Reply<EventStream> {
        self.client
            .events(&format!("/v1/hosts/{name}/drain/events"), READ)
            .await
    }

    /// What every host is busy with.
    pub async fn top(&self) -> Reply<Vec<HostTop>> {
        self.client.get(path::TOP, READ).await
    }

    /// Enrols; for a client that was made with [`Client::joining`].
    pub async fn join(&self, request: &JoinRequest) -> Reply<JoinResponse> {
        self.of_host.post(path::JOIN, request, ACT).await
    }

    /// Whether the certificate that this client shows is wanted.
    pub async fn certificate(&self) -> Reply<Done> {
        self.of_host.get(path::CERTIFICATE, READ).await
    }

    /// Another certificate in place of the one that this client shows.
    pub async fn renew_certificate(&self, request: &RenewRequest) -> Reply<JoinResponse> {
        self.of_host.post(path::CERTIFICATE, request, READ).await
    }

    /// Takes the host that this client shows the certificate of out of the site.
    pub async fn leave(&self) -> Reply<Done> {
        self.of_host.delete(path::CERTIFICATE, ACT).await
    }

    pub async fn add_operator(&self, request: &OperatorRequest) -> Reply<JoinResponse> {
        self.of_host.post(path::OPERATORS, request, READ).await
    }

    pub async fn operators(&self) -> Reply<Vec<OperatorView>> {
        self.client.get(path::OPERATORS, READ).await
    }

    /// Revokes every certificate of an operator.
    pub async fn remove_operator(&self, name: &HostName) -> Reply<Done> {
        let path = format!("/v1/operators/{name}");
        self.client.delete(&path, READ).await
    }

    pub async fn vms(&self) -> Reply<Vec<VmView>> {
        self.client.get(path::VMS, READ).await
    }

    pub async fn vm(&self, name: &VmName) -> Reply<VmView> {
        self.client.get(&format!("/v1/vms/{name}"), READ).await
    }

    pub async fn create_vm(&self, spec: &VmSpec) -> Reply<VmView> {
        self.client.post(path::VMS, spec, READ).await
    }

    /// Edits a stopped VM.
    pub async fn edit_vm(&self, spec: &VmSpec) -> Reply<VmView> {
        self.client
            .put(&format!("/v1/vms/{}", spec.name), spec, ACT)
            .await
    }

    /// Deletes a stopped VM.
    pub async fn delete_vm(&self, name: &VmName) -> Reply<Done> {
        self.client.delete(&format!("/v1/vms/{name}"), ACT).await
    }

    pub async fn start(&self, name: &VmName, request: &StartRequest) -> Reply<Done> {
        self.vm_action(name, "start", request).await
    }

    pub async fn stop(&self, name: &VmName, request: &StopRequest) -> Reply<Done> {
        self.vm_action(name, "stop", request).await
    }

    /// Stops the copy of one host, wherever else the VM may be.
    pub async fn stop_at(
        &self,
        name: &VmName,
        host: &HostName,
        request: &StopRequest,
    ) -> Reply<Done> {
        let action = format!("stop?host={host}");
        self.vm_action(name, &action, request).await
    }

    /// Has a VM process of the version installed on its host take a guest over.
    pub async fn renew(&self, name: &VmName) -> Reply<Done> {
        self.vm_action(name, "renew", &Empty {}).await
    }

    pub async fn reset(&self, name: &VmName) -> Reply<Done> {
        self.vm_action(name, "reset", &Empty {}).await
    }

    pub async fn pause(&self, name: &VmName) -> Reply<Done> {
        self.vm_action(name, "pause", &Empty {}).await
    }

    /// Lets it go on.
    pub async fn resume(&self, name: &VmName) -> Reply<Done> {
        self.vm_action(name, "resume", &Empty {}).await
    }

    /// Settles an in-doubt VM.
    pub async fn resolve(&self, name: &VmName, request: &ResolveRequest) -> Reply<Done> {
        self.vm_action(name, "resolve", request).await
    }

    /// Of a VM that several hosts hold, keeps the copy of one host and ends the others.
    pub async fn keep(&self, name: &VmName, request: &KeepRequest) -> Reply<Done> {
        self.vm_action(name, "keep", request).await
    }

    /// Says that a host is off.
    pub async fn fenced(&self, host: &HostName) -> Reply<Done> {
        self.client
            .post(&format!("/v1/hosts/{host}/fenced"), &Empty {}, ACT)
            .await
    }

    /// How the site stands.
    pub async fn site(&self) -> Reply<SiteView> {
        self.client.get(path::SITE, READ).await
    }

    /// Says that a person has seen the alarms that nothing else ends.
    pub async fn acknowledge(&self) -> Reply<Done> {
        self.client
            .post(path::SITE_ACKNOWLEDGE, &Empty {}, ACT)
            .await
    }

    /// Asks, as a host, before it boots what nobody asked it to boot.
    pub async fn site_ask(&self, question: &SiteQuestion) -> Reply<SiteAnswer> {
        self.of_host.post(path::SITE_ASK, question, READ).await
    }

    /// Migrates, or checks whether it could.
    pub async fn migrate(&self, name: &VmName, request: &MigrateRequest) -> Reply<MigrateAnswer> {
        self.vm_action(name, "migrate", request).await
    }

    /// The serial console of the copy on one host.
    pub async fn console_at(&self, name: &VmName, host: &HostName) -> Reply<ConsoleText> {
        let path = format!("/v1/vms/{name}/console?host={host}");
        self.client.get(&path, READ).await
    }

    /// The guest's serial console.
    pub async fn console(&self, name: &VmName) -> Reply<ConsoleText> {
        self.client
            .get(&format!("/v1/vms/{name}/console"), READ)
            .await
    }

    /// All migrations, newest first, those in doubt before.
    pub async fn migrations(&self) -> Reply<Vec<MigrationReport>> {
        self.client.get(path::MIGRATIONS, READ).await
    }

    pub async fn migration(&self, id: &MigrationId) -> Reply<MigrationReport> {
        self.client.get(&format!("/v1/migrations/{id}"), READ).await
    }

    pub async fn cancel(&self, id: &MigrationId, request: &CancelRequest) -> Reply<Done> {
        let path = format!("/v1/migrations/{id}/cancel");
        self.client.post(&path, request, ACT).await
    }

    /// Its report about five times a second until it ends; each event's data is a [`MigrationReport`].
    pub async fn migration_events(&self, id: &MigrationId) -> Reply<EventStream> {
        self.client
            .events(&format!("/v1/migrations/{id}/events"), READ)
            .await
    }

    /// Who asked for what, newest first.
    pub async fn audit(&self, query: &AuditQuery) -> Reply<Vec<AuditEntry>> {
        let path = format!("{}?{}", path::AUDIT, query.to_text());
        self.client.get(&path, READ).await
    }

    /// Changes of the inventory.
    pub async fn events(&self) -> Reply<EventStream> {
        self.client.events(path::EVENTS, READ).await
    }

    async fn vm_action<B: Serialize, T: serde::de::DeserializeOwned>(
        &self,
        name: &VmName,
        action: &str,
        body: &B,
    ) -> Reply<T> {
        self.client
            .post(&format!("/v1/vms/{name}/{action}"), body, ACT)
            .await
    }
}
