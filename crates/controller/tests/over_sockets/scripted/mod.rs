//! A whole controller in this process and scripted agents: real servers of the agent's routes over mutual TLS, whose
//! answers the test decides. Owns its directories and tasks; everything ends with the test.

use axum::extract::State;
use axum::routing::{get, post, put};
use axum::{Json, Router};
use godwit_controller::{Controller, ControllerConfig, Initialised, init};
use godwit_rpc::agent_client::{Deadlines, Measure, RULES, path};
use godwit_rpc::pki::Request;
use godwit_rpc::{
    ApiResult, Client, ClientError, ControllerClient, Failure, Identity, JsonBody, PathParam,
    Revocations, Role, Server, Token,
};
use godwit_types::control_api::{
    CancelRequest, ConsoleText, Done, HostCheck, JoinRequest, ResolveRequest, StopRequest, VmView,
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
    MigrateRequest, MigrationReport, MigrationSpec, Outcome, Phase, PreflightReport, Side,
};
use godwit_types::site::Claim;
use godwit_types::vm::{Accelerator, VmState};
use godwit_types::{
    ApiError, ErrorCode, Generation, HostName, MigrationId, PortGroup, VmName, VmSpec,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Longest wait for anything.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// A move there that nothing special is asked of.
pub fn to(name: &str) -> MigrateRequest {
    MigrateRequest::plain(host(name))
}

pub fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

pub fn spec(name: &str) -> VmSpec {
    VmSpec::from_toml(&format!(
        "name = \"{name}\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/boot/vmlinuz\"\n[[nic]]\nport_group = \"vm\""
    ))
    .unwrap()
}

pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorCode {
    result.unwrap_err().code()
}

/// What a scripted agent answers, and what it was asked.
#[derive(Default)]
pub struct Script {
    pub info: Option<HostInfo>,
    pub vms: BTreeMap<VmName, HostVm>,
    pub reports: BTreeMap<MigrationId, MigrationReport>,
    pub specs: BTreeMap<MigrationId, MigrationSpec>,
    pub refuse_put_once: Option<ApiError>,
    pub refuse_start: Option<ApiError>,
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

    async fn serve(&mut self, listener: TcpListener) {
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

    /// This VM is here now.
    pub fn has(&self, name: &str, state: VmState, generation: u64, holds: bool) {
        let vm = HostVm {
            spec: spec(name),
            state,
            generation: Generation(generation),
            claim: claim(generation, holds),
            migration: None,
            accelerator: Some(Accelerator::Tcg),
            vm_process_pid: None,
            qemu_pid: None,
            note: None,
        };
        self.script().vms.insert(vm.spec.name.clone(), vm);
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

/// The handover, as two hosts do it among themselves.
pub fn hand_over(from: &Agent, to: &Agent, name: &str, id: &MigrationId) {
    let generation = from.script().vms[&vm(name)].generation.0 + 1;
    to.has(name, VmState::Running, generation, true);
    from.has(name, VmState::Stopped, generation, false);
    from.says(id, Some(Outcome::Completed));
    to.says(id, Some(Outcome::Completed));
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

/// What the record of a host says that holds a VM, or does not.
fn claim(generation: u64, holds: bool) -> Claim {
    match holds {
        true => Claim::Holds {
            generation: Generation(generation),
            on: true,
        },
        false => Claim::No,
    }
}

async fn put_vm(State(s): State<Shared>, JsonBody(put): JsonBody<PutVm>) -> ApiResult<Done> {
    note(&s, format!("put {} {}", put.spec.name, put.generation));
    if let Some(error) = script(&s).refuse_put_once.take() {
        return Err(Failure(error));
    }
    let vm = HostVm {
        state: VmState::Stopped,
        generation: put.generation,
        claim: claim(put.generation.0, true),
        migration: None,
        accelerator: None,
        vm_process_pid: None,
        qemu_pid: None,
        note: None,
        spec: put.spec,
    };
    script(&s).vms.insert(vm.spec.name.clone(), vm);
    fine()
}

async fn delete_vm(State(s): State<Shared>, PathParam(name): Name) -> ApiResult<Done> {
    note(&s, format!("delete {name}"));
    match script(&s).vms.remove(&name) {
        Some(_) => fine(),
        None => unknown(ErrorCode::UnknownVm),
    }
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
        .route(path::HOST, get(|State(s): S| async move { Json(script(&s).info.clone().unwrap()) }))
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
        .route(path::RESOLVE, post(|State(s): S, PathParam(name): Name, JsonBody(request): JsonBody<ResolveRequest>| async move {
            note(&s, format!("resolve {name} on {}", request.run_on));
            fine()
        }))
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
        .with_state(shared)
}

/// A controller and its hosts.
pub struct House {
    pub dir: tempfile::TempDir,
    pub config: ControllerConfig,
    pub made: Initialised,
    controller: Option<Controller>,
}

impl House {
    /// A controller without hosts.
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let mut config = ControllerConfig::new(
            dir.path().join("state"),
            dir.path().join("api.sock"),
            vec![address],
        );
        config.poll_every = Duration::from_millis(20);
        config.watch_every = Duration::from_millis(20);
        config.deadlines = Deadlines {
            read: Duration::from_secs(5),
            act: Duration::from_secs(5),
            slow: Duration::from_secs(5),
        };
        let made = init(&config).await.unwrap();
        let mut house = Self {
            dir,
            config,
            made,
            controller: None,
        };
        house.start().await;
        house
    }

    pub async fn start(&mut self) {
        self.controller = Some(Controller::start(self.config.clone()).await.unwrap());
    }

    pub async fn stop(&mut self) {
        self.controller.take().unwrap().stop().await;
    }

    /// The controller's database in this moment.
    pub fn database(&self) -> std::path::PathBuf {
        self.config.state_dir.join("controller.db")
    }

    pub fn address(&self) -> SocketAddr {
        self.controller.as_ref().unwrap().addresses[0]
    }

    pub fn client(&self) -> ControllerClient {
        ControllerClient::new(Client::unix(&self.config.socket))
    }

    pub fn joining(&self, token: &Token) -> ControllerClient {
        ControllerClient::new(Client::joining(self.address(), token.fingerprint).unwrap())
    }

    pub async fn token(&self) -> Token {
        Token::parse(&self.client().add_host().await.unwrap().token).unwrap()
    }

    /// Enrols a scripted agent and waits until it is connected.
    pub async fn host(&self, name: &str) -> Agent {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let token = self.token().await;
        let key = Request::new().unwrap();
        let request = JoinRequest {
            secret: token.secret().to_owned(),
            name: host(name),
            agent_address: address,
            csr_pem: key.csr_pem.clone(),
        };
        let joined = self.joining(&token).join(&request).await.unwrap();
        let identity = key
            .into_identity(joined.certificate_pem, joined.ca_pem)
            .unwrap();
        assert_eq!(identity.holder().unwrap().role, Role::Host(host(name)));
        let mut agent = Agent {
            name: host(name),
            address,
            identity,
            script: Shared::default(),
            stop: watch::channel(false).0,
            task: None,
        };
        agent.script().info = Some(info(name, address));
        agent.serve(listener).await;
        self.until(async |house: &House| house.connected(name).await)
            .await;
        agent
    }

    async fn connected(self: &House, name: &str) -> bool {
        let hosts = self.client().hosts().await.unwrap();
        hosts.iter().any(|host| {
            host.info.name.as_str() == name
                && host.state == godwit_types::control_api::HostState::Connected
        })
    }

    /// Waits until something holds, looking again at every change of the inventory.
    pub async fn until(&self, holds: impl AsyncFn(&House) -> bool) {
        let wait = async {
            let mut events = self.client().events().await.unwrap();
            while !holds(self).await {
                events.next(DEADLINE).await.unwrap();
            }
        };
        tokio::time::timeout(DEADLINE, wait)
            .await
            .expect("it never came to that");
    }

    pub async fn vm(&self, name: &str) -> VmView {
        self.client().vm(&vm(name)).await.unwrap()
    }

    /// Waits until a VM is in this state on this host.
    pub async fn until_vm(&self, name: &str, state: VmState, on: &str) {
        self.until(async |house: &House| {
            let view = house.vm(name).await;
            view.state == state && view.host == Some(host(on))
        })
        .await;
    }

    /// Creates a VM and starts it there.
    pub async fn running(&self, name: &str, on: &str) {
        let client = self.client();
        client.create_vm(&spec(name)).await.unwrap();
        let request = godwit_types::control_api::StartRequest { on: Some(host(on)) };
        client.start(&vm(name), &request).await.unwrap();
    }
}

fn info(name: &str, agent_address: SocketAddr) -> HostInfo {
    HostInfo {
        name: host(name),
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
