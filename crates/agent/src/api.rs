//! The routes: each takes its parts apart, asks the agent, and gives the answer.
//!
//! Owns nothing; who may call what is [`godwit_rpc::agent_client::RULES`]. Refuses: a body whose VM is not the
//! path's.

use crate::agent::Agent;
use crate::agent::{blocking, check_host};
use crate::probe::parse_nonce;
use crate::renew;
use crate::site;
use axum::extract::{RawQuery, State};
use axum::middleware::from_fn_with_state;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use futures_util::stream::{Stream, StreamExt as _};
use godwit_rpc::agent_client::{Measure, path};
use godwit_rpc::{ApiResult, Failure, JsonBody, PathParam, Peer, Unwanted};
use godwit_types::clones::{CloneDisks, Cloning};
use godwit_types::console::{ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{ConsoleText, DisksMaking, Done, Empty, HostCheck};
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
    PutVm, RemovedHosts, Revoked, VmRequest,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{MigrationReport, MigrationSpec, PreflightReport};
use godwit_types::site::{
    GiftOvertaken, SiteAnswer, SiteHeard, SiteQuestion, SiteUpdate, SurveyAnswer, SurveyRequest,
    WholeSurvey,
};
use godwit_types::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::{ApiError, ErrorCode, MigrationId, VmName, VmSpec};
use std::convert::Infallible;
use std::sync::Arc;

type Shared = State<Arc<Agent>>;

pub(crate) fn router(agent: Arc<Agent>) -> Router {
    let action = |request: fn() -> VmRequest| {
        post(
            move |State(agent): Shared, PathParam(name): PathParam<VmName>| async move {
                reply(agent.act(&name, request()).await)
            },
        )
    };
    Router::new()
        .route(path::HOST, get(host))
        .route(path::CHECK, get(check))
        .route(path::VMS, get(vms))
        .route(path::VM, get(vm).put(put_vm).delete(delete_vm))
        .route(path::START, post(start))
        .route(path::STOP, post(stop))
        .route(path::RESET, action(|| VmRequest::Reset))
        .route(path::PAUSE, action(|| VmRequest::Pause))
        .route(path::RESUME, action(|| VmRequest::Resume))
        .route(path::RESOLVE, post(resolve))
        .route(path::RENEW, post(renew_vm))
        .route(path::DISKS, get(disks).post(make_disks))
        .route(
            path::MOVE_DISKS,
            get(disk_moves).post(move_disks).delete(cancel_disk_moves),
        )
        .route(path::RESIZE_DISK, post(resize_disk))
        .route(path::LIMIT_DISK, post(limit_disk))
        .route(path::SNAPSHOTS, get(snapshots).post(take_snapshot))
        .route(path::REVERT_SNAPSHOT, post(revert_snapshot))
        .route(path::DELETE_SNAPSHOT, post(delete_snapshot))
        .route(
            path::CLONE,
            get(cloning).post(clone_disks).delete(cancel_clone),
        )
        .route(path::FORGET_CLONE, post(forget_clone))
        .route(path::PREPARE_INCOMING, post(prepare_incoming))
        .route(path::MIGRATE, post(migrate))
        .route(path::PREFLIGHT_OUTGOING, post(preflight_outgoing))
        .route(path::PROBE, post(probe))
        .route(path::PEER, post(peer))
        .route(path::CONSOLE, get(console))
        .route(path::CONSOLE_EVENTS, get(console_events))
        .route(path::CONSOLE_TYPE, post(console_type))
        .route(path::PREFLIGHT_INCOMING, post(preflight_incoming))
        .route(path::PROBE_RESULT, get(probe_result))
        .route(path::MIGRATIONS, get(migrations))
        .route(path::MIGRATION, get(migration))
        .route(path::CANCEL, post(cancel))
        .route(path::REVOKED, put(revoked))
        .route(path::REMOVED_HOSTS, put(removed_hosts))
        .route(path::MEASURE, post(measure))
        .route(path::LINK_LISTEN, post(link_listen))
        .route(path::LINK_SEND, post(link_send))
        .route(path::LOAD, get(load))
        .route(path::SURVEY, post(survey))
        .route(path::GIFT_OVERTAKEN, post(gift_overtaken))
        .route(path::SITE, put(site_update))
        .route(path::SITE_ASK, post(site_ask))
        .route(path::SITE_SURVEY, post(site_survey))
        .route(path::CLOSE, get(closing).post(close))
        .route(path::OPEN, post(open))
        .route(path::CERTIFICATE, post(take_certificate))
        .route(path::BOOT_ALONE, post(boot_alone))
        .route(path::FORGET_RECORD, post(forget_record))
        .layer(from_fn_with_state(agent.clone(), site::stamped))
        .with_state(agent)
}

fn reply<T>(result: Result<T, ApiError>) -> ApiResult<T> {
    Ok(Json(result?))
}

fn same(path: &VmName, body: &VmName) -> Result<(), ApiError> {
    if path == body {
        return Ok(());
    }
    let message = format!("the path names VM '{path}', the body '{body}'");
    Err(ApiError::new(ErrorCode::InvalidRequest, message))
}

async fn check(State(agent): Shared) -> ApiResult<HostCheck> {
    let mut found = check_host(&agent.config, &agent.system).await;
    found.checks.push(renew::check(&agent.vms().await));
    reply(Ok(found))
}

async fn put_vm(
    State(agent): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(request): JsonBody<PutVm>,
) -> ApiResult<Done> {
    same(&name, &request.spec.name)?;
    reply(agent.put_vm(request).await)
}

async fn stop(
    State(agent): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(request): JsonBody<HostStop>,
) -> ApiResult<Done> {
    let force = request.force;
    reply(agent.act(&name, VmRequest::Stop { force }).await)
}

async fn resolve(
    State(agent): Shared,
    Extension(caller): Extension<Peer>,
    PathParam(name): PathParam<VmName>,
    JsonBody(request): JsonBody<HostResolve>,
) -> ApiResult<Done> {
    reply(agent.resolve(&name, &caller, request).await)
}

async fn prepare_incoming(
    State(agent): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(request): JsonBody<PrepareIncoming>,
) -> ApiResult<IncomingReady> {
    same(&name, &request.spec.name)?;
    same(&name, &request.migration.vm)?;
    reply(agent.prepare_incoming(request).await)
}

async fn migrate(
    State(agent): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(spec): JsonBody<MigrationSpec>,
) -> ApiResult<Done> {
    same(&name, &spec.vm)?;
    reply(agent.migrate(spec).await)
}

async fn peer(
    State(agent): Shared,
    Extension(caller): Extension<Peer>,
    PathParam(name): PathParam<VmName>,
    JsonBody(envelope): JsonBody<PeerEnvelope>,
) -> ApiResult<Vec<serde_json::Value>> {
    let Peer::Host(from) = caller else {
        let message = "only another host's agent may say who runs a VM";
        return reply(Err(ApiError::new(ErrorCode::NotAllowed, message)));
    };
    reply(agent.peer(&name, from, envelope).await)
}

async fn probe_result(
    State(agent): Shared,
    PathParam(nonce): PathParam<String>,
) -> ApiResult<ProbeResult> {
    let nonce = parse_nonce(&nonce)?;
    reply(agent.probes.result(nonce).await)
}

async fn revoked(State(agent): Shared, JsonBody(revoked): JsonBody<Revoked>) -> ApiResult<Done> {
    agent.revocations.extend(revoked.serials);
    let all = agent.revocations.all();
    let message = format!("{} certificates are revoked", all.len());
    let written = blocking(move || agent.records.remember_revoked(&all)).await;
    reply(written.map(|()| Done { message }))
}

async fn site_ask(
    State(agent): Shared,
    Extension(caller): Extension<Peer>,
    unwanted: Option<Extension<Unwanted>>,
    JsonBody(question): JsonBody<SiteQuestion>,
) -> ApiResult<SiteAnswer> {
    let Peer::Host(asker) = caller else {
        let message = "only another host asks before it boots";
        return reply(Err(ApiError::new(ErrorCode::NotAllowed, message)));
    };
    let unwanted = unwanted.map(|Extension(why)| why);
    reply(agent.site_ask(asker, unwanted, question).await)
}

async fn console_events(
    State(agent): Shared,
    PathParam(name): PathParam<VmName>,
    RawQuery(query): RawQuery,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Failure> {
    let query = ConsoleQuery::parse(query.as_deref().unwrap_or_default())?;
    let pieces = agent.follow_console(name, query.place).await?;
    let events = pieces.map(|piece| {
        let told = match &piece {
            Ok(piece) => Event::default().event("console").json_data(piece),
            Err(error) => Event::default().event("error").json_data(error),
        };
        // Our own words always encode.
        Ok(told.unwrap_or_default())
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Handlers that hand a request to the agent and answer what it says: what the path names, what the body is, the answer.
macro_rules! handlers {
    ($($name:ident($agent:ident $(, path $of:ident: $Of:ty)? $(, body $body:ident: $Body:ty)?) -> $answer:ty
        = $does:expr;)*) => {
        $(async fn $name(
            State($agent): Shared,
            $(PathParam($of): PathParam<$Of>,)?
            $(JsonBody($body): JsonBody<$Body>,)?
        ) -> ApiResult<$answer> {
            reply($does)
        })*
    };
}

handlers! {
    host(agent) -> HostInfo = Ok(tokio::task::block_in_place(|| agent.info()));
    vms(agent) -> Vec<HostVm> = Ok(agent.vms().await);
    vm(agent, path name: VmName) -> HostVm = agent.vm(&name).await;
    delete_vm(agent, path name: VmName) -> Done = agent.delete_vm(&name).await;
    start(agent, path name: VmName) -> Done = agent.start(&name).await;
    renew_vm(agent, path name: VmName) -> Done = agent.renew(&name).await;
    disks(agent, path name: VmName) -> DisksMaking = Ok(agent.disks(&name));
    make_disks(agent, path name: VmName, body spec: VmSpec) -> DisksMaking
        = agent.make_disks(&name, spec).await;
    forget_clone(agent, path name: VmName, body spec: VmSpec) -> Done
        = agent.forget_clone(&name, spec).await;
    disk_moves(agent, path name: VmName) -> DiskMoves = agent.disk_moves(&name).await;
    move_disks(agent, path name: VmName, body wish: MoveDisks) -> DiskMoves
        = agent.move_disks(&name, wish).await;
    cancel_disk_moves(agent, path name: VmName) -> Done
        = agent.act(&name, VmRequest::CancelDiskMoves).await;
    resize_disk(agent, path name: VmName, body wish: ResizeDisk) -> Done
        = agent.act(&name, VmRequest::ResizeDisk(wish)).await;
    limit_disk(agent, path name: VmName, body wish: LimitDisk) -> Done
        = agent.act(&name, VmRequest::LimitDisk(wish)).await;
    snapshots(agent, path name: VmName) -> Snapshots = agent.snapshots(&name).await;
    take_snapshot(agent, path name: VmName, body wish: TakeSnapshot) -> Done
        = agent.act(&name, VmRequest::TakeSnapshot(wish)).await;
    revert_snapshot(agent, path name: VmName, body wish: SnapshotRequest) -> Done
        = agent.act(&name, VmRequest::RevertSnapshot(wish)).await;
    delete_snapshot(agent, path name: VmName, body wish: SnapshotRequest) -> Done
        = agent.act(&name, VmRequest::DeleteSnapshot(wish)).await;
    cloning(agent, path name: VmName) -> Cloning = agent.cloning(&name).await;
    clone_disks(agent, path name: VmName, body wish: CloneDisks) -> Cloning
        = agent.clone_disks(&name, wish).await;
    cancel_clone(agent, path name: VmName) -> Done
        = agent.act(&name, VmRequest::CancelClone).await;
    preflight_outgoing(agent, path name: VmName) -> PreflightOutgoing
        = agent.preflight_outgoing(&name).await;
    probe(agent, path name: VmName, body request: ProbeRequest) -> Done
        = agent.probe(&name, &request.nonce);
    console(agent, path name: VmName) -> ConsoleText
        = agent.console(&name).await;
    console_type(agent, path name: VmName, body typed: ConsoleTyped) -> Done
        = agent.type_console(&name, typed).await;
    preflight_incoming(agent, body request: PreflightIncoming) -> PreflightReport
        = agent.preflight_incoming(request).await;
    migrations(agent) -> Vec<MigrationReport> = agent.migrations().await;
    migration(agent, path id: MigrationId) -> MigrationReport = agent.migration(&id).await;
    cancel(agent, path id: MigrationId, body request: HostCancel) -> Done
        = agent.cancel(&id, request).await;
    removed_hosts(agent, body removed: RemovedHosts) -> Done
        = agent.removed_hosts(removed.hosts).await;
    measure(agent, path name: VmName, body request: Measure) -> DirtyRate
        = agent.measure(&name, request.millis).await;
    link_listen(agent, body probe: LinkProbeListen) -> LinkProbeReady
        = agent.link_listen(probe).await;
    link_send(agent, body probe: LinkProbeSend) -> LinkMeasured = agent.link_send(probe).await;
    load(agent) -> HostLoad = Ok(agent.load().await);
    survey(agent, path name: VmName, body request: SurveyRequest) -> SurveyAnswer
        = agent.survey(&name, request).await;
    gift_overtaken(agent, path name: VmName, body overtaken: GiftOvertaken) -> Done
        = agent.act(&name, VmRequest::GiftOvertaken(overtaken)).await;
    site_update(agent, body update: SiteUpdate) -> SiteHeard = agent.site_update(update).await;
    site_survey(agent, body _empty: Empty) -> WholeSurvey = agent.site_survey().await;
    close(agent, body request: CloseRequest) -> HostClosing = agent.close(request.at_shutdown).await;
    closing(agent) -> HostClosing = Ok(agent.closing.shown());
    open(agent, body _empty: Empty) -> Done = agent.open().await;
    take_certificate(agent, body _empty: Empty) -> Done = agent.certificate.take_now().await;
    boot_alone(agent) -> Done = Ok(agent.boot_alone());
    forget_record(agent, path name: VmName) -> Done = agent.forget_record(&name).await;
}

#[cfg(test)]
#[path = "api_tests.rs"]
pub(crate) mod tests;
