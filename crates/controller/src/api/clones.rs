//! Handlers of VMs that are made as copies of others. Own nothing.

use super::Shared;
use crate::vms;
use axum::Json;
use axum::extract::State;
use godwit_rpc::{ApiResult, JsonBody, PathParam};
use godwit_types::clones::{CloneVm, Cloned};
use godwit_types::control_api::{DisksMaking, Done};
use godwit_types::{ApiError, VmName};

/// Makes a VM that is as this one, with disks of its own, on the same host; to ask again goes on with what is under way.
#[utoipa::path(post, path = "/v1/vms/{name}/clone", params(("name" = String, Path)), request_body = CloneVm, responses((status = 200, body = Cloned), (status = "default", body = ApiError)))]
pub async fn begin(
    State(app): Shared,
    PathParam(name): PathParam<VmName>,
    JsonBody(wish): JsonBody<CloneVm>,
) -> ApiResult<Cloned> {
    Ok(Json(vms::clone_vm(&app, &name, &wish).await?))
}

/// How far the disks are that are copied.
#[utoipa::path(get, path = "/v1/vms/{name}/clone", params(("name" = String, Path)), responses((status = 200, body = DisksMaking), (status = "default", body = ApiError)))]
pub async fn show(
    State(app): Shared,
    PathParam(name): PathParam<VmName>,
) -> ApiResult<DisksMaking> {
    Ok(Json(vms::cloning(&app, &name).await?))
}

/// Calls that off.
#[utoipa::path(delete, path = "/v1/vms/{name}/clone", params(("name" = String, Path)), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn cancel(State(app): Shared, PathParam(name): PathParam<VmName>) -> ApiResult<Done> {
    Ok(Json(vms::cancel_clone(&app, &name).await?))
}
