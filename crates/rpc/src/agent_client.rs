//! The agent's interface: its routes with who may call them, and a typed client.
//!
//! The agent's router uses the paths of [`RULES`], so that both sides agree by construction. Owns nothing.

use crate::access::{Access, Rule, rule, rule_also_removed};
use crate::client::{Client, ClientError};
use crate::limits::LIST_LEN_MAX;
use godwit_types::control_api::{
    CancelRequest, ConsoleText, Done, Empty, HostCheck, ResolveRequest, StopRequest,
};
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{
    HostCancel, HostClosing, HostResolve, HostStop, HostVm, IncomingReady, PeerEnvelope,
    PreflightIncoming, PreflightOutgoing, PrepareIncoming, ProbeRequest, ProbeResult, PutVm,
    RemovedHosts, Revoked,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{MigrationReport, MigrationSpec, PreflightReport};
use godwit_types::site::{
    SiteAnswer, SiteHeard, SiteQuestion, SiteUpdate, SurveyAnswer, SurveyRequest, WholeSurvey,
};
use godwit_types::{MigrationId, VmName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

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
    /// PUT [`super::SiteUpdate`]: [`super::SiteHeard`].
    pub const SITE: &str = "/v1/site";
    /// POST [`super::SiteQuestion`], from another host: [`super::SiteAnswer`].
    pub const SITE_ASK: &str = "/v1/site/ask";
    /// POST [`super::Empty`]: [`super::WholeSurvey`].
    pub const SITE_SURVEY: &str = "/v1/site/survey";
    /// POST [`super::Empty`]: [`super::Done`]. Another VM process, of the installed program, takes the guest over.
    pub const RENEW: &str = "/v1/vms/{name}/renew";
    /// POST [`super::Empty`]: [`super::Done`]. A person has a damaged record of this host put aside.
    pub const FORGET_RECORD: &str = "/v1/vms/{name}/forget-record";
    /// POST [`super::Empty`]: [`super::HostClosing`], begun: the host shuts down. GET: the same, as far as it has come.
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
    rule("POST", path::START, POWER),
    rule("POST", path::STOP, POWER),
    rule("POST", path::RESET, POWER),
    rule("POST", path::PAUSE, POWER),
    rule("POST", path::RESUME, POWER),
    rule("POST", path::RESOLVE, POWER),
    rule("POST", path::RENEW, POWER),
    rule("POST", path::PREPARE_INCOMING, CONTROLLER),
    rule("POST", path::MIGRATE, CONTROLLER),
    rule("POST", path::PREFLIGHT_OUTGOING, CONTROLLER),
    rule("POST", path::PROBE, CONTROLLER),
    rule("POST", path::PEER, Access::HOST),
    rule("GET", path::CONSOLE, READ),
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
    fn read_vms(&self, told: Vec<serde_json::Value>) -> Reply<HeardVms> {
        let mut heard = HeardVms::default();
        for one in told {
            let named = one.pointer("/spec/name").cloned().unwrap_or_default();
            match serde_json::from_value::<HostVm>(one) {
                Ok(vm) => heard.vms.push(vm),
                Err(error) => {
                    let name = serde_json::from_value(named)
                        .map_err(|_| self.answer(&error.to_string()))?;
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

/// How long the client waits, by kind of call.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    pub read: Duration,
    pub act: Duration,
    /// Starting a hypervisor, hashing files, checking a host.
    pub slow: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            read: Duration::from_secs(3),
            act: Duration::from_secs(15),
            slow: Duration::from_secs(60),
        }
    }
}

/// Calls an agent's routes over any client, each with a deadline.
#[derive(Clone)]
pub struct AgentClient {
    client: Client,
    /// The same for what may be long.
    lists: Client,
    deadlines: Deadlines,
}

type Reply<T> = Result<T, ClientError>;

/// Puts a name into a path; names have no characters that need escaping.
fn fill(path: &str, name: impl std::fmt::Display) -> String {
    let (Some(open), Some(close)) = (path.find('{'), path.find('}')) else {
        return path.to_owned();
    };
    let (before, after) = (path.get(..open), path.get(close + 1..));
    format!(
        "{}{name}{}",
        before.unwrap_or_default(),
        after.unwrap_or_default()
    )
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

    /// What the host says of itself.
    pub async fn host(&self) -> Reply<HostInfo> {
        self.client.get(path::HOST, self.deadlines.read).await
    }

    pub async fn check(&self) -> Reply<HostCheck> {
        self.client.get(path::CHECK, self.deadlines.slow).await
    }

    pub async fn vms(&self) -> Reply<Vec<HostVm>> {
        self.lists.get(path::VMS, self.deadlines.read).await
    }

    /// Its VMs. One that it tells of in words that this version does not know is unread; the others are not lost by it.
    pub async fn heard_vms(&self) -> Reply<HeardVms> {
        let told: Vec<serde_json::Value> = self.lists.get(path::VMS, self.deadlines.read).await?;
        self.client.read_vms(told)
    }

    pub async fn vm(&self, name: &VmName) -> Reply<HostVm> {
        self.client
            .get(&fill(path::VM, name), self.deadlines.read)
            .await
    }

    /// Makes a VM known or updates it.
    pub async fn put_vm(&self, vm: &PutVm) -> Reply<Done> {
        let path = fill(path::VM, &vm.spec.name);
        self.client.put(&path, vm, self.deadlines.act).await
    }

    /// Forgets a stopped VM.
    pub async fn delete_vm(&self, name: &VmName) -> Reply<Done> {
        self.client
            .delete(&fill(path::VM, name), self.deadlines.act)
            .await
    }

    pub async fn start(&self, name: &VmName) -> Reply<Done> {
        self.slow(path::START, name, &Empty {}).await
    }

    pub async fn stop(&self, name: &VmName, request: &StopRequest) -> Reply<Done> {
        self.slow(path::STOP, name, &HostStop::from(request)).await
    }

    pub async fn reset(&self, name: &VmName) -> Reply<Done> {
        self.act(path::RESET, name, &Empty {}).await
    }

    pub async fn pause(&self, name: &VmName) -> Reply<Done> {
        self.act(path::PAUSE, name, &Empty {}).await
    }

    /// Lets it go on.
    pub async fn resume(&self, name: &VmName) -> Reply<Done> {
        self.act(path::RESUME, name, &Empty {}).await
    }

    /// Settles an in-doubt VM.
    pub async fn resolve(&self, name: &VmName, request: &ResolveRequest) -> Reply<Done> {
        self.act(path::RESOLVE, name, &HostResolve::from(request))
            .await
    }

    /// Has a VM process of the installed program take the guest over.
    pub async fn renew(&self, name: &VmName) -> Reply<Done> {
        self.slow(path::RENEW, name, &Empty {}).await
    }

    /// Makes a destination ready.
    pub async fn prepare_incoming(&self, request: &PrepareIncoming) -> Reply<IncomingReady> {
        self.slow(path::PREPARE_INCOMING, &request.spec.name, request)
            .await
    }

    /// Begins a migration at its source.
    pub async fn migrate(&self, spec: &MigrationSpec) -> Reply<Done> {
        self.act(path::MIGRATE, &spec.vm, spec).await
    }

    /// The source's side of preflight.
    pub async fn preflight_outgoing(&self, name: &VmName) -> Reply<PreflightOutgoing> {
        self.slow(path::PREFLIGHT_OUTGOING, name, &Empty {}).await
    }

    /// The destination's side of preflight.
    pub async fn preflight_incoming(&self, request: &PreflightIncoming) -> Reply<PreflightReport> {
        self.client
            .post(path::PREFLIGHT_INCOMING, request, self.deadlines.slow)
            .await
    }

    /// Sends probe frames from a VM's port groups.
    pub async fn probe(&self, name: &VmName, request: &ProbeRequest) -> Reply<Done> {
        self.act(path::PROBE, name, request).await
    }

    /// Which probe frames arrived; `nonce` is lower-case hex.
    pub async fn probe_result(&self, nonce: &str) -> Reply<ProbeResult> {
        self.client
            .get(&fill(path::PROBE_RESULT, nonce), self.deadlines.act)
            .await
    }

    pub async fn migrations(&self) -> Reply<Vec<MigrationReport>> {
        self.lists.get(path::MIGRATIONS, self.deadlines.read).await
    }

    pub async fn migration(&self, id: &MigrationId) -> Reply<MigrationReport> {
        self.client
            .get(&fill(path::MIGRATION, id), self.deadlines.read)
            .await
    }

    pub async fn cancel(&self, id: &MigrationId, request: &CancelRequest) -> Reply<Done> {
        let request = HostCancel::from(request);
        self.client
            .post(&fill(path::CANCEL, id), &request, self.deadlines.act)
            .await
    }

    /// Carries an ownership message to the other host.
    pub async fn peer(
        &self,
        name: &VmName,
        message: &PeerEnvelope,
    ) -> Reply<Vec<serde_json::Value>> {
        self.act(path::PEER, name, message).await
    }

    /// The guest's serial console.
    pub async fn console(&self, name: &VmName) -> Reply<ConsoleText> {
        self.client
            .get(&fill(path::CONSOLE, name), self.deadlines.read)
            .await
    }

    /// Tells which certificates are revoked.
    pub async fn revoked(&self, revoked: &Revoked) -> Reply<Done> {
        self.client
            .put(path::REVOKED, revoked, self.deadlines.read)
            .await
    }

    /// Tells which hosts are gone for good.
    pub async fn removed_hosts(&self, removed: &RemovedHosts) -> Reply<Done> {
        self.client
            .put(path::REMOVED_HOSTS, removed, self.deadlines.act)
            .await
    }

    /// Measures how a guest writes.
    pub async fn measure(&self, name: &VmName, millis: u64) -> Reply<DirtyRate> {
        self.act(path::MEASURE, name, &Measure { millis }).await
    }

    /// Listens for a burst that measures the link.
    pub async fn link_listen(&self, probe: &LinkProbeListen) -> Reply<LinkProbeReady> {
        self.client
            .post(path::LINK_LISTEN, probe, self.deadlines.read)
            .await
    }

    pub async fn link_send(&self, probe: &LinkProbeSend) -> Reply<LinkMeasured> {
        self.client
            .post(path::LINK_SEND, probe, self.deadlines.act)
            .await
    }

    /// Asks whether the host may hold a VM.
    pub async fn survey(&self, name: &VmName, request: &SurveyRequest) -> Reply<SurveyAnswer> {
        self.act(path::SURVEY, name, request).await
    }

    /// Adds to the host's table of the site.
    pub async fn site(&self, update: &SiteUpdate) -> Reply<SiteHeard> {
        self.client
            .put(path::SITE, update, self.deadlines.read)
            .await
    }

    /// Asks, as another host, before this one boots what nobody asked it to boot.
    pub async fn site_ask(&self, question: &SiteQuestion) -> Reply<SiteAnswer> {
        self.lists
            .post(path::SITE_ASK, question, self.deadlines.read)
            .await
    }

    /// Reads all of the host's records, for a controller that works on an old copy of its database.
    pub async fn site_survey(&self) -> Reply<WholeSurvey> {
        self.lists
            .post(path::SITE_SURVEY, &Empty {}, self.deadlines.act)
            .await
    }

    /// Has a damaged record put aside.
    pub async fn forget_record(&self, name: &VmName) -> Reply<Done> {
        self.act(path::FORGET_RECORD, name, &Empty {}).await
    }

    /// Has the host power its guests down and take no VMs.
    pub async fn close(&self) -> Reply<HostClosing> {
        self.client
            .post(path::CLOSE, &Empty {}, self.deadlines.act)
            .await
    }

    /// How far it has come with that.
    pub async fn closing(&self) -> Reply<HostClosing> {
        self.client.get(path::CLOSE, self.deadlines.read).await
    }

    /// Has the host run guests again.
    pub async fn open(&self) -> Reply<Done> {
        self.client
            .post(path::OPEN, &Empty {}, self.deadlines.act)
            .await
    }

    /// Has the agent take the certificate that stands in its directory now.
    pub async fn take_certificate(&self) -> Reply<Done> {
        self.client
            .post(path::CERTIFICATE, &Empty {}, self.deadlines.act)
            .await
    }

    /// Lets the host boot what it holds without an answer of the site.
    pub async fn boot_alone(&self) -> Reply<Done> {
        self.client
            .post(path::BOOT_ALONE, &Empty {}, self.deadlines.act)
            .await
    }

    /// What the host is busy with.
    pub async fn load(&self) -> Reply<HostLoad> {
        self.client.get(path::LOAD, self.deadlines.read).await
    }

    async fn act<B: serde::Serialize, T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        name: &VmName,
        body: &B,
    ) -> Reply<T> {
        self.client
            .post(&fill(path, name), body, self.deadlines.act)
            .await
    }

    async fn slow<B: serde::Serialize, T: serde::de::DeserializeOwned>(
        &self,
        path: &str,
        name: &VmName,
        body: &B,
    ) -> Reply<T> {
        self.client
            .post(&fill(path, name), body, self.deadlines.slow)
            .await
    }
}
