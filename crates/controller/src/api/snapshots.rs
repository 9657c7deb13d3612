//! Handlers of snapshots. Own nothing.

use super::Shared;
use crate::vms;
use axum::Json;
use axum::extract::State;
use godwit_rpc::{ApiResult, JsonBody, PathParam};
use godwit_types::control_api::Done;
use godwit_types::snapshots::{SnapshotRequest, Snapshots, TakeSnapshot};
use godwit_types::{ApiError, VmName};

/// The snapshots of a VM's disks.
#[utoipa::path(get, path = "/v1/vms/{name}/snapshots", params(("name" = String, Path)), responses((status = 200, body = Snapshots), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared, PathParam(name): PathParam<VmName>) -> ApiResult<Snapshots> {
    Ok(Json(vms::snapshots(&app, &name).await?))
}

/// Takes one, whether the guest runs or not.
#[utoipa::path(post, path = "/v1/vms/{name}/snapshots", params(("name" = String, Path)), request_body = TakeSnapshot, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn take(
    State(app): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(wish): JsonBody<TakeSnapshot>,
) -> ApiResult<Done> {
    Ok(Json(vms::take_snapshot(&app, &name, &wish).await?))
}

/// Has the disks of a VM that is off be what they were at a snapshot.
#[utoipa::path(post, path = "/v1/vms/{name}/revert-snapshot", params(("name" = String, Path)), request_body = SnapshotRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn revert(
    State(app): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(wish): JsonBody<SnapshotRequest>,
) -> ApiResult<Done> {
    Ok(Json(vms::revert_snapshot(&app, &name, &wish).await?))
}

/// Deletes a snapshot; the disks stay as they are.
#[utoipa::path(post, path = "/v1/vms/{name}/delete-snapshot", params(("name" = String, Path)), request_body = SnapshotRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn delete(
    State(app): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(wish): JsonBody<SnapshotRequest>,
) -> ApiResult<Done> {
    Ok(Json(vms::delete_snapshot(&app, &name, &wish).await?))
}
