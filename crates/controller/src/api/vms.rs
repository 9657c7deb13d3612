//! Handlers of VMs. Own nothing.

use super::Shared;
use super::events::{Item, event};
use crate::console;
use crate::error::{Outcome, refuse};
use crate::migrate;
use crate::resolve;
use crate::vms::{self, Action, Force};
use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{Stream, StreamExt as _};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{ApiResult, Failure, JsonBody, PathParam};
use godwit_types::console::{ConsolePiece, ConsoleQuery, ConsoleTyped};
use godwit_types::control_api::{
    ConsoleText, DisksMaking, Done, Empty, KeepRequest, MigrationBegun, ResolveRequest,
    StartRequest, Started, StopRequest, VmView,
};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_move::{DiskMoves, MoveDisks};
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::migration::{MigrateRequest, PreflightReport};
use godwit_types::{ApiError, ErrorCode, HostName, VmName, VmSpec};

type Name = PathParam<VmName>;

/// The host whose copy of a VM is meant, if one was named.
fn copy_at(query: Option<&str>) -> Outcome<Option<HostName>> {
    let Some(query) = query.filter(|query| !query.is_empty()) else {
        return Ok(None);
    };
    let named = query.strip_prefix("host=");
    match named.and_then(|name| HostName::new(name).ok()) {
        Some(host) => Ok(Some(host)),
        None => refuse(ErrorCode::InvalidRequest, "the only query is host=HOST"),
    }
}

/// All VMs, those in doubt first.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<VmView>), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared) -> Json<Vec<VmView>> {
    Json(app.state().vm_views(now_unix_s()))
}

/// Describes a new VM; it is off.
#[utoipa::path(post, path = "/v1/vms", request_body = VmSpec, responses((status = 200, body = VmView), (status = "default", body = ApiError)))]
pub async fn create(State(app): Shared, JsonBody(spec): JsonBody<VmSpec>) -> ApiResult<VmView> {
    Ok(Json(vms::create(&app, spec).await?))
}

/// One VM.
#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path)), responses((status = 200, body = VmView), (status = "default", body = ApiError)))]
pub async fn show(State(app): Shared, PathParam(name): Name) -> ApiResult<VmView> {
    Ok(Json(vms::view(&app, &name)?))
}

/// Replaces the description of a VM that is off.
#[utoipa::path(put, path = "/v1/vms/{name}", params(("name" = String, Path)), request_body = VmSpec, responses((status = 200, body = VmView), (status = "default", body = ApiError)))]
pub async fn edit(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(spec): JsonBody<VmSpec>,
) -> ApiResult<VmView> {
    Ok(Json(vms::edit(&app, &name, spec).await?))
}

/// Deletes a VM that is off.
#[utoipa::path(delete, path = "/v1/vms/{name}", params(("name" = String, Path)), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn delete(State(app): Shared, PathParam(name): Name) -> ApiResult<Done> {
    Ok(Json(vms::delete(&app, &name).await?))
}

/// Starts a VM.
#[utoipa::path(post, path = "/v1/vms/{name}/start", params(("name" = String, Path)), request_body = StartRequest, responses((status = 200, body = Started), (status = "default", body = ApiError)))]
pub async fn start(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(request): JsonBody<StartRequest>,
) -> ApiResult<Started> {
    Ok(Json(vms::start(&app, &name, &request).await?))
}

/// How far the disks are of a VM that is being started.
#[utoipa::path(get, path = "/v1/vms/{name}/disks", params(("name" = String, Path)), responses((status = 200, body = DisksMaking), (status = "default", body = ApiError)))]
pub async fn disks(State(app): Shared, PathParam(name): Name) -> ApiResult<DisksMaking> {
    Ok(Json(vms::disks(&app, &name).await?))
}

/// Moves disks to a datastore of the VM's host while the guest runs.
#[utoipa::path(post, path = "/v1/vms/{name}/move-disks", params(("name" = String, Path)), request_body = MoveDisks, responses((status = 200, body = DiskMoves), (status = "default", body = ApiError)))]
pub async fn move_disks(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(wish): JsonBody<MoveDisks>,
) -> ApiResult<DiskMoves> {
    Ok(Json(vms::move_disks(&app, &name, &wish).await?))
}

/// How far disks are that move on their host.
#[utoipa::path(get, path = "/v1/vms/{name}/move-disks", params(("name" = String, Path)), responses((status = 200, body = DiskMoves), (status = "default", body = ApiError)))]
pub async fn disk_moves(State(app): Shared, PathParam(name): Name) -> ApiResult<DiskMoves> {
    Ok(Json(vms::disk_moves(&app, &name).await?))
}

/// Calls that off.
#[utoipa::path(delete, path = "/v1/vms/{name}/move-disks", params(("name" = String, Path)), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn cancel_disk_moves(State(app): Shared, PathParam(name): Name) -> ApiResult<Done> {
    Ok(Json(vms::cancel_disk_moves(&app, &name).await?))
}

/// Makes a disk larger, whether the guest runs or not.
#[utoipa::path(post, path = "/v1/vms/{name}/resize-disk", params(("name" = String, Path)), request_body = ResizeDisk, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn resize_disk(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(wish): JsonBody<ResizeDisk>,
) -> ApiResult<Done> {
    Ok(Json(vms::resize_disk(&app, &name, &wish).await?))
}

/// Limits what a guest may have of a disk in a second, whether it runs or not.
#[utoipa::path(post, path = "/v1/vms/{name}/limit-disk", params(("name" = String, Path)), request_body = LimitDisk, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn limit_disk(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(wish): JsonBody<LimitDisk>,
) -> ApiResult<Done> {
    Ok(Json(vms::limit_disk(&app, &name, &wish).await?))
}

/// Asks a guest to power off, or forces it.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path), ("host" = Option<String>, Query)), request_body = StopRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn stop(
    State(app): Shared,
    PathParam(name): Name,
    RawQuery(query): RawQuery,
    JsonBody(request): JsonBody<StopRequest>,
) -> ApiResult<Done> {
    let force = Force(request.force);
    Ok(Json(match copy_at(query.as_deref())? {
        Some(host) => vms::stop_at(&app, &name, &host, force).await?,
        None => vms::act(&app, &name, Action::Stop(force)).await?,
    }))
}

/// Resets a guest.
#[utoipa::path(post, path = "/v1/vms/{name}/reset", params(("name" = String, Path)), request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn reset(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(vms::act(&app, &name, Action::Reset).await?))
}

/// Stops a guest's CPUs and keeps its memory.
#[utoipa::path(post, path = "/v1/vms/{name}/pause", params(("name" = String, Path)), request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn pause(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(vms::act(&app, &name, Action::Pause).await?))
}

/// Lets a paused guest go on.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", params(("name" = String, Path)), request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn resume(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(vms::act(&app, &name, Action::Resume).await?))
}

/// Has a VM process of the version that is installed on its host take a guest over, which goes on meanwhile.
#[utoipa::path(post, path = "/v1/vms/{name}/renew", params(("name" = String, Path)), request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn renew(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(vms::act(&app, &name, Action::Renew).await?))
}

/// Settles an in-doubt VM.
#[utoipa::path(post, path = "/v1/vms/{name}/resolve", params(("name" = String, Path)), request_body = ResolveRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn resolve(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(request): JsonBody<ResolveRequest>,
) -> ApiResult<Done> {
    Ok(Json(resolve::resolve(&app, &name, &request).await?))
}

/// Of a VM that several hosts hold, keeps the copy of one host; the others are ended.
#[utoipa::path(post, path = "/v1/vms/{name}/keep", params(("name" = String, Path)), request_body = KeepRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn keep(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(request): JsonBody<KeepRequest>,
) -> ApiResult<Done> {
    Ok(Json(resolve::keep(&app, &name, &request).await?))
}

/// Begins a migration; with `dry_run` only checks whether it could.
#[utoipa::path(post, path = "/v1/vms/{name}/migrate", params(("name" = String, Path)), request_body = MigrateRequest, responses((status = 200, description = "dry run", body = PreflightReport), (status = 202, description = "it has begun", body = MigrationBegun), (status = "default", body = ApiError)))]
pub async fn migrate(
    State(app): Shared,
    PathParam(name): Name,
    JsonBody(request): JsonBody<MigrateRequest>,
) -> Result<Response, Failure> {
    let answer = migrate::begin(&app, &name, &request).await?;
    let status = match &answer {
        MigrateAnswer::Begun(_) => StatusCode::ACCEPTED,
        MigrateAnswer::Checked(_) => StatusCode::OK,
    };
    Ok((status, Json(answer)).into_response())
}

/// The last bytes of a guest's serial console.
#[utoipa::path(get, path = "/v1/vms/{name}/console", params(("name" = String, Path), ("host" = Option<String>, Query)), responses((status = 200, body = ConsoleText), (status = "default", body = ApiError)))]
pub async fn console(
    State(app): Shared,
    PathParam(name): Name,
    RawQuery(query): RawQuery,
) -> ApiResult<ConsoleText> {
    let host = copy_at(query.as_deref())?;
    Ok(Json(console::console(&app, &name, host).await?))
}

/// What a guest writes to its serial console, from a place on: that of the last piece that was read, named by its `text` and by
/// `from` and the number of its bytes together. Without a place it begins with all that is kept.
#[utoipa::path(get, path = "/v1/vms/{name}/console/events", params(("name" = String, Path), ("text" = Option<String>, Query), ("after" = Option<u64>, Query), ("host" = Option<String>, Query)), responses((status = 200, description = "events `console` with a ConsolePiece each; it ends when the VM moves, with an event `error` where that is why: ask again from the last place on", content_type = "text/event-stream", body = ConsolePiece), (status = "default", body = ApiError)))]
pub async fn console_events(
    State(app): Shared,
    PathParam(name): Name,
    RawQuery(query): RawQuery,
) -> Result<Sse<impl Stream<Item = Item>>, Failure> {
    let query = ConsoleQuery::parse(query.as_deref().unwrap_or_default())?;
    let pieces = console::follow(&app, &name, query).await?;
    let events = pieces.map(|piece| match piece {
        Ok(piece) => event("console", &piece),
        Err(error) => event("error", &error),
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Types to a guest on its serial console. The audit log says once in ten minutes who does, and never what.
#[utoipa::path(post, path = "/v1/vms/{name}/console/type", params(("name" = String, Path), ("host" = Option<String>, Query)), request_body = ConsoleTyped, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn console_type(
    State(app): Shared,
    PathParam(name): Name,
    RawQuery(query): RawQuery,
    JsonBody(typed): JsonBody<ConsoleTyped>,
) -> ApiResult<Done> {
    let host = copy_at(query.as_deref())?;
    Ok(Json(console::type_in(&app, &name, host, &typed).await?))
}
