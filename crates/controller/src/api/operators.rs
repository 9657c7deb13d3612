//! Handlers of operators. Own nothing.

use super::Shared;
use crate::operators;
use axum::Json;
use axum::extract::State;
use godwit_rpc::{ApiResult, JsonBody, PathParam};
use godwit_types::control_api::{Done, JoinResponse, OperatorRequest, OperatorView};
use godwit_types::{ApiError, HostName};

/// Operators' certificates that are wanted.
#[utoipa::path(get, path = "/v1/operators", responses((status = 200, body = Vec<OperatorView>), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared) -> ApiResult<Vec<OperatorView>> {
    Ok(Json(operators::views(&app).await?))
}

/// Makes an operator's certificate; only for people on this machine.
#[utoipa::path(post, path = "/v1/operators", request_body = OperatorRequest, responses((status = 200, body = JoinResponse), (status = "default", body = ApiError)))]
pub async fn add(
    State(app): Shared,
    JsonBody(request): JsonBody<OperatorRequest>,
) -> ApiResult<JoinResponse> {
    Ok(Json(operators::add(&app, &request).await?))
}

/// Revokes every certificate of an operator, on open connections too; only for people on this machine.
#[utoipa::path(delete, path = "/v1/operators/{name}", params(("name" = String, Path)), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn remove(State(app): Shared, PathParam(name): PathParam<HostName>) -> ApiResult<Done> {
    Ok(Json(operators::remove(&app, &name).await?))
}
