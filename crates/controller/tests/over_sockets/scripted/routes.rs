//! The routes of a scripted agent: each notes that it was called, waits where the test holds it, then answers from the
//! script.

use super::agent::{Script, Shared, holding, known, script};
use axum::body::Body;
use axum::extract::{RawQuery, Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use godwit_rpc::agent_client::{Measure, path};
use godwit_rpc::{ApiResult, Failure, JsonBody, PathParam};
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::console::{ConsoleKept, ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{ConsoleText, DiskMaking, DisksMaking, Done, Empty, HostCheck};
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host_api::{
    HostCancel, HostResolve, HostStop, HostVm, IncomingReady, PreflightIncoming, PreflightOutgoing,
    PrepareIncoming, ProbeRequest, ProbeResult, PutVm, RemovedHosts, Revoked,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{
    MigrationReport, MigrationSpec, Outcome, Phase, PreflightReport, Side,
};
use godwit_types::site::{
    Claim, GiftOvertaken, STAMP_HEADER, SiteHeard, SiteUpdate, Stamp, SurveyAnswer, SurveyRequest,
};
use godwit_types::vm::{Accelerator, VmSpec, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, MigrationId, PortGroup, VmName};

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

async fn gift_overtaken(
    State(s): State<Shared>,
    PathParam(name): Name,
    JsonBody(overtaken): JsonBody<GiftOvertaken>,
) -> ApiResult<Done> {
    let GiftOvertaken { by, with_guest } = overtaken;
    note(&s, format!("overtaken {name} {by} {with_guest}"));
    let mut script = script(&s);
    if script.keeps_guest && !with_guest {
        return refuse("its guest stands here");
    }
    script.vms.remove(&name);
    fine()
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
    if let Some(sentence) = script.unread.get(&name) {
        return Err(Failure(ApiError::new(ErrorCode::Internal, sentence)));
    }
    if let Some(error) = script.refuse_survey.clone() {
        return Err(Failure(error));
    }
    let claim = script.claim(&name);
    if !claim.may_hold() {
        let above = Generation(script.highest(&name).0 + 1);
        script.raise(&name, request.level.max(above));
    }
    let (instance, knows) = {
        let site = script.site();
        (site.instance().clone(), site.heard())
    };
    Ok(Json(SurveyAnswer {
        highest: script.highest(&name),
        may_live: script.may_live(&name),
        claim,
        instance,
        knows,
        images: Vec::new(),
    }))
}

async fn site_update(
    State(s): State<Shared>,
    JsonBody(update): JsonBody<SiteUpdate>,
) -> ApiResult<SiteHeard> {
    let mut script = script(&s);
    if let Some(error) = script.refuse_table.clone() {
        return Err(Failure(error));
    }
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
    JsonBody(request): JsonBody<HostResolve>,
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

async fn show_vm(State(s): State<Shared>, PathParam(name): Name) -> ApiResult<HostVm> {
    let listed = script(&s).listed();
    match listed.into_iter().find(|vm| vm.spec.name == name) {
        Some(vm) => Ok(Json(vm)),
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
    let Some(mut vm) = script.vms.get(&name).cloned() else {
        return unknown(ErrorCode::UnknownVm);
    };
    if let Some(spec) = script.outgoing.clone() {
        vm.spec = spec;
    }
    Ok(Json(PreflightOutgoing {
        refusals: script.outgoing_refusals.clone(),
        passed: vec!["outgoing".into()],
        vm,
        file_hashes: script.file_hashes.clone(),
        disks: Vec::new(),
        uefi: None,
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
    let name = request.spec.name.clone();
    script.prepared.insert(name, request.spec);
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
    if script.unconfirmed > 0 {
        script.unconfirmed -= 1;
        let why = "the VM's former host has not confirmed the last handover yet";
        return Err(Failure(ApiError::new(ErrorCode::Unconfirmed, why)));
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
    note(&s, format!("report {id}"));
    match script(&s).reports.get(&id) {
        Some(report) => Ok(Json(report.clone())),
        None => unknown(ErrorCode::UnknownMigration),
    }
}

async fn cancel(
    State(s): State<Shared>,
    PathParam(id): PathParam<MigrationId>,
    JsonBody(request): JsonBody<HostCancel>,
) -> ApiResult<Done> {
    let of = request.vm.as_ref().map_or("?", VmName::as_str);
    note(&s, format!("cancel {id} of {of}"));
    match script(&s).reports.get_mut(&id) {
        Some(report) => {
            report.outcome = Some(Outcome::Cancelled);
            report.phase = Phase::Ended;
            report.reason = request.reason;
        }
        // It refuses the migration from now on.
        None if request.vm.is_some() => {}
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
    if let Some(error) = script(&s).refuse_link.clone() {
        return Err(Failure(error));
    }
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

/// What stands between the controller and this agent sees every body.
async fn between(State(s): State<Shared>, request: Request, next: Next) -> Response {
    let Some(between) = script(&s).between.clone() else {
        return next.run(request).await;
    };
    let change = async |is_request, body: Body| {
        let bytes = axum::body::to_bytes(body, 8 << 20).await.unwrap();
        let Ok(mut value) = serde_json::from_slice(&bytes) else {
            return Body::from(bytes);
        };
        between(is_request, &mut value);
        Body::from(value.to_string())
    };
    let (head, body) = request.into_parts();
    let request = Request::from_parts(head, change(true, body).await);
    let (mut head, body) = next.run(request).await.into_parts();
    head.headers.remove("content-length");
    Response::from_parts(head, change(false, body).await)
}

async fn make_disks(State(s): State<Shared>, PathParam(name): Name) -> ApiResult<DisksMaking> {
    note(&s, format!("make disks {name}"));
    match script(&s).refuse_disks_once.take() {
        Some(error) => Err(Failure(error)),
        None => Ok(Json(DisksMaking::default())),
    }
}

/// Who asks first hears that it has begun, and who asks again that all is copied.
async fn clone_disks(
    State(s): State<Shared>,
    PathParam(name): Name,
    JsonBody(wish): JsonBody<CloneDisks>,
) -> ApiResult<Cloning> {
    note(&s, format!("clone {name}"));
    let mut script = script(&s);
    let begun = script.cloning.take();
    let making = begun.is_none().then(|| DiskMaking {
        disk: "root".into(),
        done_bytes: 1,
        total_bytes: 2,
    });
    if begun.is_none() {
        script.cloning = Some(wish);
    }
    let whole = begun.map(|begun| begun.spec);
    Ok(Json(Cloning { making, whole }))
}

/// One that has begun goes on until it is asked for again.
async fn cloning(State(s): State<Shared>, PathParam(_): Name) -> Json<Cloning> {
    let goes_on = script(&s).cloning.is_some();
    let making = goes_on.then(|| DiskMaking {
        disk: "root".into(),
        done_bytes: 1,
        total_bytes: 2,
    });
    Json(Cloning {
        making,
        whole: None,
    })
}

/// What the guest wrote behind that place, and that it is gone.
async fn console_events(State(s): State<Shared>, RawQuery(query): RawQuery) -> Response {
    let query = ConsoleQuery::parse(query.as_deref().unwrap_or_default()).unwrap();
    note(&s, format!("follow {}", query.to_text()));
    let mut kept = ConsoleKept::named("a1".into());
    kept.add(b"login:");
    let piece = serde_json::to_string(&kept.after(query.place.as_ref())).unwrap();
    let gone = ApiError::new(ErrorCode::WrongState, "VM 'web' is not running");
    let gone = serde_json::to_string(&gone).unwrap();
    let text = format!("event: console\ndata: {piece}\n\nevent: error\ndata: {gone}\n\n");
    text.into_response()
}

pub fn router(shared: Shared) -> Router {
    type S = State<Shared>;
    Router::new()
        .route(path::HOST, get(|State(s): S| async move { hold(&s, "host").await; Json(script(&s).said()) }))
        .route(path::CHECK, get(|State(s): S| async move {
            let host = script(&s).info.clone().unwrap().name;
            Json(HostCheck { host, checks: Vec::new() })
        }))
        .route(path::VMS, get(|State(s): S| async move { Json(script(&s).listed()) }))
        .route(path::VM, get(show_vm).put(put_vm).delete(delete_vm))
        .route(path::START, post(start))
        .route(path::STOP, post(|State(s): S, PathParam(name): Name, JsonBody(_): JsonBody<HostStop>| async move { note(&s, format!("asked to stop {name}")); hold(&s, "stop").await; set(&s, &name, VmState::Stopped) }))
        .route(path::DISKS, post(make_disks))
        .route(path::CLONE, post(clone_disks).get(cloning))
        .route(path::FORGET_CLONE, post(|State(s): S, PathParam(name): Name, JsonBody(spec): JsonBody<VmSpec>| async move {
            note(&s, format!("forget parts {name} {}", spec.attempt().is_some()));
            fine()
        }))
        .route(path::RESET, post(|State(s): S, PathParam(name): Name| async move { set(&s, &name, VmState::Running) }))
        .route(path::PAUSE, post(|State(s): S, PathParam(name): Name| async move { note(&s, format!("asked to pause {name}")); hold(&s, "pause").await; set(&s, &name, VmState::Paused) }))
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
        .route(path::CONSOLE, get(|| async { Json(ConsoleText { text: "login:".into(), ..Default::default() }) }))
        .route(path::CONSOLE_EVENTS, get(console_events))
        .route(path::CONSOLE_TYPE, post(|State(s): S, JsonBody(typed): JsonBody<ConsoleTyped>| async move {
            note(&s, format!("typed {}", String::from_utf8_lossy(&typed.bytes)));
            fine()
        }))
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
        .route(path::GIFT_OVERTAKEN, post(gift_overtaken))
        .route(path::SITE, put(site_update))
        .route(path::SITE_SURVEY, post(|State(s): S, JsonBody(_): JsonBody<Empty>| async move {
            note(&s, "site-survey".into());
            Json(script(&s).whole())
        }))
        .layer(from_fn_with_state(shared.clone(), accept))
        .layer(from_fn_with_state(shared.clone(), between))
        .with_state(shared)
}
