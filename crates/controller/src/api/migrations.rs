//! Handlers of migrations. Own nothing.

use super::Shared;
use crate::{migrate, watch};
use axum::Json;
use axum::extract::State;
use godwit_rpc::{ApiResult, JsonBody, PathParam};
use godwit_types::control_api::{CancelRequest, Done};
use godwit_types::migration::MigrationReport;
use godwit_types::{ApiError, MigrationId};

/// All migrations: those in doubt first, then newest first.
#[utoipa::path(get, path = "/v1/migrations", responses((status = 200, body = Vec<MigrationReport>), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared) -> ApiResult<Vec<MigrationReport>> {
    Ok(Json(watch::reports(&app).await?))
}

/// One migration.
#[utoipa::path(get, path = "/v1/migrations/{id}", params(("id" = String, Path)), responses((status = 200, body = MigrationReport), (status = "default", body = ApiError)))]
pub async fn show(
    State(app): Shared,
    PathParam(id): PathParam<MigrationId>,
) -> ApiResult<MigrationReport> {
    Ok(Json(watch::report(&app, &id).await?))
}

/// Cancels a migration; the guest stays at the source.
#[utoipa::path(post, path = "/v1/migrations/{id}/cancel", params(("id" = String, Path)), request_body = CancelRequest, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn cancel(
    State(app): Shared,
    PathParam(id): PathParam<MigrationId>,
    JsonBody(request): JsonBody<CancelRequest>,
) -> ApiResult<Done> {
    Ok(Json(migrate::cancel(&app, &id, &request).await?))
}
