//! A scripted agent: a real server of the agent's routes over mutual TLS, whose answers the test decides. What it keeps of
//! the site (words, table, highest generations) it keeps by the product's own rules, so that a controller can be judged by
//! what its hosts accept.

use super::{DEADLINE, spec, vm};
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use godwit_rpc::agent_client::{Measure, RULES, path};
use godwit_rpc::{ApiResult, Failure, Identity, JsonBody, PathParam, Revocations, Server};
use godwit_site::HostSite;
use godwit_types::control_api::{
    CancelRequest, ConsoleText, Done, Empty, HostCheck, ResolveRequest, StopRequest,
};
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{
    HostVm, IncomingReady, PreflightIncoming, PreflightOutgoing, PrepareIncoming, ProbeRequest,
    ProbeResult, PutVm, RemovedHosts, Revoked,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{
    MigrationReport, MigrationSpec, Outcome, Phase, PreflightReport, Side,
};
use godwit_types::site::{
    Claim, Instance, RecordSaid, STAMP_HEADER, SiteHeard, SiteTable, SiteUpdate, Stamp,
    SurveyAnswer, SurveyRequest, WholeSurvey,
};
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{
    ApiError, ErrorCode, Generation, HostName, MigrationId, PortGroup, VmName, VmSpec,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// What a scripted agent answers, and what it was asked.
#[derive(Default)]
pub struct Script {
    pub info: Option<HostInfo>,
    pub vms: BTreeMap<VmName, HostVm>,
    pub reports: BTreeMap<MigrationId, MigrationReport>,
    pub specs: BTreeMap<MigrationId, MigrationSpec>,
    pub refuse_put_once: Option<ApiError>,
    pub refuse_start: Option<ApiError>,
    pub refuse_survey: Option<ApiError>,
    pub refuse_prepare: Option<ApiError>,
    pub refuse_migrate: Option<ApiError>,
    pub outgoing_refusals: Vec<ApiError>,
    pub incoming_refusals: Vec<ApiError>,
    pub probe_lost: bool,
    pub revoked: Vec<String>,
    pub removed: Vec<HostName>,
    /// How its guests write, where it measures.
    pub rate: Option<DirtyRate>,
    /// What the link from here carries, where it measures.
    pub link: Option<LinkMeasured>,
    pub calls: Vec<String>,
    /// Answers these calls only once this turns true.
    pub held: BTreeMap<&'static str, watch::Receiver<bool>>,
    /// The highest generation that it has durably seen of each VM, also of those that it has no more.
    pub highest: BTreeMap<VmName, Generation>,
    /// What it knows of the site.
    site: Option<HostSite>,
}

impl Script {
    fn site(&mut self) -> &mut HostSite {
        self.site.as_mut().unwrap()
    }

    pub fn highest(&self, name: &VmName) -> Generation {
        self.highest.get(name).copied().unwrap_or_default()
    }

    fn raise(&mut self, name: &VmName, seen: Generation) {
        let highest = self.highest(name).max(seen);
        self.highest.insert(name.clone(), highest);
        if let Some(vm) = self.vms.get_mut(name) {
            vm.generation = highest;
        }
    }

    fn claim(&self, name: &VmName) -> Claim {
        let vm = self.vms.get(name);
        vm.map(|vm| vm.claim.clone()).unwrap_or_default()
    }

    fn said(&mut self) -> HostInfo {
        let site = self.site();
        let (instance, heard) = (site.instance().clone(), site.heard());
        let info = self.info.clone().unwrap();
        HostInfo {
            instance,
            site: heard,
            ..info
        }
    }

    fn whole(&mut self) -> WholeSurvey {
        let names = self.highest.keys().cloned().collect::<Vec<_>>();
        let records = names.into_iter().map(|vm| RecordSaid {
            highest: self.highest(&vm),
            claim: self.claim(&vm),
            vm,
        });
        let records = records.collect();
        let site = self.site();
        WholeSurvey {
            instance: site.instance().clone(),
            records,
            table: site.table().clone(),
        }
    }
}

type Shared = Arc<Mutex<Script>>;

fn script(shared: &Shared) -> MutexGuard<'_, Script> {
    shared.lock().unwrap()
}

/// A scripted agent.
pub struct Agent {
    pub name: HostName,
    pub address: SocketAddr,
    pub identity: Identity,
    pub script: Shared,
    stop: watch::Sender<bool>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Agent {
    /// One that is enrolled and does not listen yet.
    pub fn new(name: HostName, address: SocketAddr, identity: Identity) -> Self {
        let agent = Self {
            script: Shared::default(),
            stop: watch::channel(false).0,
            task: None,
            name,
            address,
            identity,
        };
        agent.script().info = Some(info(&agent.name, address));
        agent.lives(1, "machine");
        agent
    }

    /// It is in this life now, with what it knows of the site; `counter` is its state directory's.
    pub fn lives(&self, counter: u64, machine_id: &str) {
        let instance = Instance {
            counter,
            boot_id: format!("boot of {machine_id}"),
            machine_id: machine_id.to_owned(),
        };
        let mut script = self.script();
        let table = script.site.as_ref().map(|site| site.table().clone());
        let site = HostSite::new(self.name.clone(), instance, table.unwrap_or_default());
        script.site = Some(site);
    }

    /// Its table of the site.
    pub fn table(&self) -> SiteTable {
        self.script().site().table().clone()
    }

    /// Its life.
    pub fn instance(&self) -> Instance {
        self.script().site().instance().clone()
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        script(&self.script)
    }

    pub fn calls(&self, of: &str) -> usize {
        self.script()
            .calls
            .iter()
            .filter(|call| call.starts_with(of))
            .count()
    }

    pub async fn serve(&mut self, listener: TcpListener) {
        let server = Server::new(
            router(self.script.clone()),
            RULES,
            Arc::new(Revocations::default()),
        );
        let config = godwit_rpc::tls::server_config(&self.identity).unwrap();
        let (stop, stopped) = watch::channel(false);
        self.stop = stop;
        self.task = Some(tokio::spawn(server.run_tls(listener, config, stopped)));
    }

    /// Has calls of this kind wait until the sender says true.
    pub fn hold(&self, call: &'static str) -> watch::Sender<bool> {
        let (free, held) = watch::channel(false);
        self.script().held.insert(call, held);
        free
    }

    /// Waits until a call of this kind has arrived.
    pub async fn until_called(&self, call: &str) {
        let called = async {
            while self.calls(call) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, called)
            .await
            .expect("it was never called");
    }

    /// Does not answer from now on.
    pub async fn cut(&mut self) {
        self.stop.send_replace(true);
        self.task.take().unwrap().await.unwrap();
    }

    /// Answers again.
    pub async fn heal(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.serve(listener).await;
    }

    /// This VM is here now, held or not.
    pub fn has(&self, name: &str, state: VmState, generation: u64, holds: bool) {
        let generation = Generation(generation);
        let claim = match holds {
            true => holding(generation),
            false => Claim::No,
        };
        self.records(name, state, generation, claim);
    }

    /// Its record of this VM is so now.
    pub fn records(&self, name: &str, state: VmState, generation: Generation, claim: Claim) {
        let mut script = self.script();
        let new = known(spec(name), state, generation, claim);
        script.vms.insert(vm(name), new);
        script.raise(&vm(name), generation);
    }

    /// The guest of a VM that is here is in this state now.
    pub fn turns(&self, name: &str, state: VmState) {
        self.script().vms.get_mut(&vm(name)).unwrap().state = state;
    }

    /// The highest generation that it has seen of a VM.
    pub fn generation(&self, name: &str) -> Generation {
        self.script().highest(&vm(name))
    }

    /// How a migration goes here.
    pub fn says(&self, id: &MigrationId, outcome: Option<Outcome>) {
        let mut script = self.script();
        let report = script.reports.get_mut(id).unwrap();
        report.outcome = outcome;
        report.phase = if outcome.is_some() {
            Phase::Ended
        } else {
            Phase::Precopy
        };
    }
}

fn known(spec: VmSpec, state: VmState, generation: Generation, claim: Claim) -> HostVm {
    HostVm {
        spec,
        state,
        generation,
        claim,
        migration: None,
        accelerator: Some(Accelerator::Tcg),
        vm_process_pid: None,
        qemu_pid: None,
        note: None,
    }
}

fn holding(generation: Generation) -> Claim {
    Claim::Holds {
        generation,
        on: true,
    }
}

/// The handover, as two hosts do it among themselves.
pub fn hand_over(from: &Agent, to: &Agent, name: &str, id: &MigrationId) {
    let generation = from.script().specs[id].generation;
    give(from, to, name, id);
    to.has(name, VmState::Running, generation.0, true);
    to.says(id, Some(Outcome::Completed));
}

/// The source's part of it, with the destination's answer.
pub fn give(from: &Agent, to: &Agent, name: &str, id: &MigrationId) {
    let generation = from.script().specs[id].generation;
    let moved = Claim::Moved {
        generation,
        to: to.name.clone(),
    };
    from.records(name, VmState::Stopped, generation, moved);
    from.says(id, Some(Outcome::Completed));
}

fn note(shared: &Shared, call: String) {
    script(shared).calls.push(call);
}

/// Waits until calls of this kind may be answered.
async fn hold(shared: &Shared, call: &str) {
    let held = script(shared).held.get(call).cloned();
    if let Some(mut held) = held {
        let _ = held.wait_for(|free| *free).await;
    }
}

fn fine() -> ApiResult<Done> {
    Ok(Json(Done {
        message: "done".into(),
    }))
}

fn unknown<T>(what: ErrorCode) -> Result<T, Failure> {
    Err(Failure(ApiError::new(what, "not known here")))
}

fn set(shared: &Shared, name: &VmName, state: VmState) -> ApiResult<Done> {
    note(shared, format!("{state} {name}"));
    match script(shared).vms.get_mut(name) {
        Some(vm) => vm.state = state,
        None => return unknown(ErrorCode::UnknownVm),
    }
    fine()
}

type Name = PathParam<VmName>;

fn refuse<T>(why: &str) -> Result<T, Failure> {
    Err(Failure(ApiError::new(ErrorCode::WrongState, why)))
}

/// A grant must follow a survey that this host knows; without one there is only a new description of what is held.
async fn put_vm(State(s): State<Shared>, JsonBody(put): JsonBody<PutVm>) -> ApiResult<Done> {
    note(&s, format!("put {} {}", put.spec.name, put.generation));
    hold(&s, "put").await;
    let mut script = script(&s);
    if let Some(error) = script.refuse_put_once.take() {
        return Err(Failure(error));
    }
    let name = put.spec.name.clone();
    let (highest, claim) = (script.highest(&name), script.claim(&name));
    match put.expect {
        Some(_) if claim.may_hold() => return refuse("the VM is on this host already"),
        Some(expect) if expect != highest => return refuse("another survey came between"),
        Some(_) if put.generation <= highest => return refuse("that generation is known"),
        None if claim.held() != Some(put.generation) => return refuse("that is not held here"),
        _ => {}
    }
    let vm = HostVm {
        accelerator: None,
        ..known(
            put.spec,
            VmState::Stopped,
            put.generation,
            holding(put.generation),
        )
    };
    script.vms.insert(name.clone(), vm);
    script.raise(&name, put.generation);
    fine()
}

async fn delete_vm(State(s): State<Shared>, PathParam(name): Name) -> ApiResult<Done> {
    note(&s, format!("delete {name}"));
    match script(&s).vms.remove(&name) {
        Some(_) => fine(),
        None => unknown(ErrorCode::UnknownVm),
    }
}

/// A host that holds nothing makes the level durable; one that may hold the VM answers as it stands.
async fn survey(
    State(s): State<Shared>,
    PathParam(name): Name,
    JsonBody(request): JsonBody<SurveyRequest>,
) -> ApiResult<SurveyAnswer> {
    note(&s, format!("survey {name} {}", request.level));
    hold(&s, "survey").await;
    let mut script = script(&s);
    if let Some(error) = script.refuse_survey.clone() {
        return Err(Failure(error));
    }
    let claim = script.claim(&name);
    if !claim.may_hold() {
        let above = Generation(script.highest(&name).0 + 1);
        script.raise(&name, request.level.max(above));
    }
    Ok(Json(SurveyAnswer {
        highest: script.highest(&name),
        claim,
    }))
}

async fn site_update(
    State(s): State<Shared>,
    JsonBody(update): JsonBody<SiteUpdate>,
) -> ApiResult<SiteHeard> {
    let mut script = script(&s);
    let site = script.site();
    match site.update(update) {
        Ok(()) => Ok(Json(site.heard())),
        Err(stale) => Err(too_old(&stale)),
    }
}

fn too_old(why: &dyn std::fmt::Display) -> Failure {
    Failure(ApiError::new(ErrorCode::StaleController, why.to_string()))
}

/// Every command must carry a word of the controller at least as high as any that this host has heard.
async fn accept(State(s): State<Shared>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET {
        return next.run(request).await;
    }
    let header = request.headers().get(STAMP_HEADER);
    let stamp = header.and_then(|text| text.to_str().ok()?.parse::<Stamp>().ok());
    let Some(stamp) = stamp else {
        note(&s, format!("without a stamp: {}", request.uri().path()));
        return Failure(ApiError::new(ErrorCode::NotAllowed, "no stamp")).into_response();
    };
    let accepted = script(&s).site().accept(stamp);
    match accepted {
        Ok(_) => next.run(request).await,
        Err(stale) => {
            note(&s, format!("stale {}", request.uri().path()));
            too_old(&stale).into_response()
        }
    }
}

async fn resolve(
    State(s): State<Shared>,
    PathParam(name): Name,
    JsonBody(request): JsonBody<ResolveRequest>,
) -> ApiResult<Done> {
    let what = if request.give_up { "gives up" } else { "on" };
    note(&s, format!("resolve {name} {what} {}", request.run_on));
    if let Some(vm) = script(&s).vms.get_mut(&name)
        && request.give_up
    {
        (vm.claim, vm.state) = (Claim::No, VmState::Stopped);
    }
    fine()
}

async fn start(State(s): State<Shared>, PathParam(name): Name) -> ApiResult<Done> {
    if let Some(error) = script(&s).refuse_start.clone() {
        return Err(Failure(error));
    }
    let done = set(&s, &name, VmState::Running);
    if let Some(vm) = script(&s).vms.get_mut(&name) {
        vm.accelerator = Some(Accelerator::Tcg);
    }
    done
}

async fn preflight_outgoing(
    State(s): State<Shared>,
    PathParam(name): Name,
) -> ApiResult<PreflightOutgoing> {
    let script = script(&s);
    let Some(vm) = script.vms.get(&name).cloned() else {
        return unknown(ErrorCode::UnknownVm);
    };
    Ok(Json(PreflightOutgoing {
        refusals: script.outgoing_refusals.clone(),
        passed: vec!["outgoing".into()],
        vm,
        file_hashes: Vec::new(),
    }))
}

async fn preflight_incoming(
    State(s): State<Shared>,
    JsonBody(_): JsonBody<PreflightIncoming>,
) -> ApiResult<PreflightReport> {
    Ok(Json(PreflightReport {
        passed: vec!["incoming".into()],
        refusals: script(&s).incoming_refusals.clone(),
        ..PreflightReport::default()
    }))
}

async fn prepare(
    State(s): State<Shared>,
    JsonBody(request): JsonBody<PrepareIncoming>,
) -> ApiResult<IncomingReady> {
    note(&s, format!("prepare {}", request.migration.id));
    hold(&s, "prepare").await;
    let mut script = script(&s);
    if let Some(error) = script.refuse_prepare.clone() {
        return Err(Failure(error));
    }
    begun(&mut script, &request.migration, Side::Destination);
    // And one that is not this host's: nobody may be sent there.
    let addresses = ["127.0.0.1:9", "203.0.113.7:9"];
    Ok(Json(IncomingReady {
        addresses: addresses.map(|text| text.parse().unwrap()).to_vec(),
    }))
}

async fn migrate(
    State(s): State<Shared>,
    JsonBody(spec): JsonBody<MigrationSpec>,
) -> ApiResult<Done> {
    note(&s, format!("migrate {}", spec.id));
    let mut script = script(&s);
    if let Some(error) = script.refuse_migrate.clone() {
        return Err(Failure(error));
    }
    begun(&mut script, &spec, Side::Source);
    drop(script);
    fine()
}

fn begun(script: &mut Script, spec: &MigrationSpec, side: Side) {
    let report = MigrationReport::begun(spec, side, 64, 1);
    script.reports.insert(spec.id.clone(), report);
    script.specs.insert(spec.id.clone(), spec.clone());
}

async fn migration(
    State(s): State<Shared>,
    PathParam(id): PathParam<MigrationId>,
) -> ApiResult<MigrationReport> {
    match script(&s).reports.get(&id) {
        Some(report) => Ok(Json(report.clone())),
        None => unknown(ErrorCode::UnknownMigration),
    }
}

async fn cancel(
    State(s): State<Shared>,
    PathParam(id): PathParam<MigrationId>,
    JsonBody(request): JsonBody<CancelRequest>,
) -> ApiResult<Done> {
    note(&s, format!("cancel {id}"));
    match script(&s).reports.get_mut(&id) {
        Some(report) => {
            report.outcome = Some(Outcome::Cancelled);
            report.phase = Phase::Ended;
            report.reason = request.reason;
        }
        None => return unknown(ErrorCode::UnknownMigration),
    }
    fine()
}

async fn probe_result(
    State(s): State<Shared>,
    PathParam(_nonce): PathParam<String>,
) -> ApiResult<ProbeResult> {
    let arrived = !script(&s).probe_lost;
    let group = PortGroup::new("vm").unwrap();
    Ok(Json(ProbeResult {
        arrived: [(group, arrived)].into(),
    }))
}

async fn measure(
    State(s): State<Shared>,
    PathParam(name): Name,
    JsonBody(request): JsonBody<Measure>,
) -> ApiResult<DirtyRate> {
    note(&s, format!("measure {name} {}", request.millis));
    hold(&s, "measure").await;
    match script(&s).rate.clone() {
        Some(rate) => Ok(Json(rate)),
        None => unknown(ErrorCode::WrongState),
    }
}

async fn link_listen(
    State(s): State<Shared>,
    JsonBody(_): JsonBody<LinkProbeListen>,
) -> ApiResult<LinkProbeReady> {
    note(&s, "link-listen".into());
    Ok(Json(LinkProbeReady {
        addresses: vec!["127.0.0.1:9".parse().unwrap()],
    }))
}

async fn link_send(
    State(s): State<Shared>,
    JsonBody(_): JsonBody<LinkProbeSend>,
) -> ApiResult<LinkMeasured> {
    note(&s, "link-send".into());
    match script(&s).link {
        Some(link) => Ok(Json(link)),
        None => unknown(ErrorCode::HostUnreachable),
    }
}

async fn load(State(s): State<Shared>) -> ApiResult<HostLoad> {
    let info = script(&s).info.clone().unwrap();
    Ok(Json(HostLoad {
        host: info.name,
        seconds: 1.0,
        cpus: info.cpus,
        cpu_percent: 12.5,
        memory_total_mib: info.memory_total_mib,
        memory_free_mib: info.memory_free_mib,
        interfaces: Vec::new(),
        migrations: Vec::new(),
    }))
}

fn router(shared: Shared) -> Router {
    type S = State<Shared>;
    Router::new()
        .route(path::HOST, get(|State(s): S| async move { Json(script(&s).said()) }))
        .route(path::CHECK, get(|State(s): S| async move {
            let host = script(&s).info.clone().unwrap().name;
            Json(HostCheck { host, checks: Vec::new() })
        }))
        .route(path::VMS, get(|State(s): S| async move { Json(script(&s).vms.values().cloned().collect::<Vec<_>>()) }))
        .route(path::VM, put(put_vm).delete(delete_vm))
        .route(path::START, post(start))
        .route(path::STOP, post(|State(s): S, PathParam(name): Name, JsonBody(_): JsonBody<StopRequest>| async move { set(&s, &name, VmState::Stopped) }))
        .route(path::RESET, post(|State(s): S, PathParam(name): Name| async move { set(&s, &name, VmState::Running) }))
        .route(path::PAUSE, post(|State(s): S, PathParam(name): Name| async move { set(&s, &name, VmState::Paused) }))
        .route(path::RESUME, post(|State(s): S, PathParam(name): Name| async move { set(&s, &name, VmState::Running) }))
        .route(path::RESOLVE, post(resolve))
        .route(path::PREFLIGHT_OUTGOING, post(preflight_outgoing))
        .route(path::PREFLIGHT_INCOMING, post(preflight_incoming))
        .route(path::PREPARE_INCOMING, post(prepare))
        .route(path::MIGRATE, post(migrate))
        .route(path::PROBE, post(|State(s): S, JsonBody(_): JsonBody<ProbeRequest>| async move {
            note(&s, "probe".into());
            fine()
        }))
        .route(path::PROBE_RESULT, get(probe_result))
        .route(path::MIGRATION, get(migration))
        .route(path::CANCEL, post(cancel))
        .route(path::CONSOLE, get(|| async { Json(ConsoleText { text: "login:".into() }) }))
        .route(path::REVOKED, put(|State(s): S, JsonBody(revoked): JsonBody<Revoked>| async move {
            script(&s).revoked = revoked.serials;
            fine()
        }))
        .route(path::REMOVED_HOSTS, put(|State(s): S, JsonBody(removed): JsonBody<RemovedHosts>| async move {
            script(&s).removed = removed.hosts;
            fine()
        }))
        .route(path::MEASURE, post(measure))
        .route(path::LINK_LISTEN, post(link_listen))
        .route(path::LINK_SEND, post(link_send))
        .route(path::LOAD, get(load))
        .route(path::SURVEY, post(survey))
        .route(path::SITE, put(site_update))
        .route(path::SITE_SURVEY, post(|State(s): S, JsonBody(_): JsonBody<Empty>| async move {
            note(&s, "site-survey".into());
            Json(script(&s).whole())
        }))
        .layer(from_fn_with_state(shared.clone(), accept))
        .with_state(shared)
}

fn info(name: &HostName, agent_address: SocketAddr) -> HostInfo {
    HostInfo {
        name: name.clone(),
        version: "0".into(),
        kernel: "6.18".into(),
        qemu: "7.2.22".into(),
        accelerator: Accelerator::Tcg,
        machine_types: vec!["pc-q35-7.1".into(), "pc-q35-7.2".into()],
        machine_aliases: BTreeMap::new(),
        cpu_models: vec!["qemu64".into(), "max".into()],
        encryption: true,
        port_groups: [(PortGroup::new("vm").unwrap(), "br0".to_owned())].into(),
        migration_addresses: vec!["127.0.0.1".parse().unwrap()],
        agent_address,
        memory_total_mib: 4096,
        memory_free_mib: 2048,
        cpus: 2,
        boot_id: "boot".into(),
        instance: Default::default(),
        site: Default::default(),
        boot_alone_ignored: false,
    }
}
