//! Handlers of hosts. Own nothing.

use super::Shared;
use crate::certificates;
use crate::error::refuse;
use crate::hosts;
use crate::resolve;
use axum::extract::{RawQuery, State};
use axum::{Extension, Json};
use godwit_rpc::pki::Holder;
use godwit_rpc::{ApiResult, JsonBody, PathParam};
use godwit_types::control_api::{
    Done, Empty, HostCheck, HostView, JoinRequest, JoinResponse, JoinToken, RenewRequest,
};
use godwit_types::load::HostTop;
use godwit_types::{ApiError, ErrorCode, HostName};

/// All hosts.
#[utoipa::path(get, path = "/v1/hosts", responses((status = 200, body = Vec<HostView>), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared) -> Json<Vec<HostView>> {
    Json(hosts::views(&app))
}

/// Makes a one-time token for a host to join with.
#[utoipa::path(post, path = "/v1/hosts", request_body = Empty, responses((status = 200, body = JoinToken), (status = "default", body = ApiError)))]
pub async fn add(State(app): Shared, JsonBody(Empty {}): JsonBody<Empty>) -> ApiResult<JoinToken> {
    Ok(Json(hosts::token(&app).await.map_err(ApiError::from)?))
}

/// One host.
#[utoipa::path(get, path = "/v1/hosts/{name}", params(("name" = String, Path)), responses((status = 200, body = HostView), (status = "default", body = ApiError)))]
pub async fn show(State(app): Shared, PathParam(name): PathParam<HostName>) -> ApiResult<HostView> {
    Ok(Json(hosts::view(&app, &name)?))
}

/// Removes a host and revokes its certificate.
#[utoipa::path(delete, path = "/v1/hosts/{name}", params(("name" = String, Path), ("confirm_unreachable" = Option<bool>, Query, description = "the host is powered off for good")), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn remove(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
    RawQuery(query): RawQuery,
) -> ApiResult<Done> {
    let confirmed = match query.as_deref() {
        None | Some("" | "confirm_unreachable=false") => false,
        Some("confirm_unreachable=true") => true,
        Some(_) => refuse(
            ErrorCode::InvalidRequest,
            "the only query is confirm_unreachable=true or =false",
        )?,
    };
    Ok(Json(hosts::remove(&app, &name, confirmed).await?))
}

/// A person says that a host is powered off; it holds until the host is heard.
#[utoipa::path(post, path = "/v1/hosts/{name}/fenced", params(("name" = String, Path)), request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn fenced(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(resolve::fenced(&app, &name).await?))
}

/// Checks a host: kernel, QEMU, CPU and the rest, each with its remedy.
#[utoipa::path(get, path = "/v1/hosts/{name}/check", params(("name" = String, Path)), responses((status = 200, body = HostCheck), (status = "default", body = ApiError)))]
pub async fn check(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
) -> ApiResult<HostCheck> {
    Ok(Json(hosts::check(&app, &name).await?))
}

/// What every host is busy with: interfaces, cores, memory, and each migration's share.
#[utoipa::path(get, path = "/v1/top", responses((status = 200, body = Vec<HostTop>), (status = "default", body = ApiError)))]
pub async fn top(State(app): Shared) -> Json<Vec<HostTop>> {
    Json(hosts::top(&app).await)
}

/// Enrols a host with its one-time token; the only route that needs no certificate.
#[utoipa::path(post, path = "/v1/join", request_body = JoinRequest, responses((status = 200, body = JoinResponse), (status = "default", body = ApiError)))]
pub async fn join(
    State(app): Shared,
    JsonBody(request): JsonBody<JoinRequest>,
) -> ApiResult<JoinResponse> {
    Ok(Json(hosts::join(&app, &request).await?))
}

/// Whether the certificate that is shown is still wanted.
#[utoipa::path(get, path = "/v1/certificate", responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn certificate(State(app): Shared, holder: Option<Extension<Holder>>) -> ApiResult<Done> {
    Ok(Json(certificates::standing(&app, &shown(holder)?).await?))
}

/// Renews the certificate that is shown, for a new key.
#[utoipa::path(post, path = "/v1/certificate", request_body = RenewRequest, responses((status = 200, body = JoinResponse), (status = "default", body = ApiError)))]
pub async fn renew(
    State(app): Shared,
    holder: Option<Extension<Holder>>,
    JsonBody(request): JsonBody<RenewRequest>,
) -> ApiResult<JoinResponse> {
    let holder = shown(holder)?;
    Ok(Json(certificates::renew(&app, &holder, &request).await?))
}

/// Removes the host that the certificate which is shown is that of.
#[utoipa::path(delete, path = "/v1/certificate", responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn leave(State(app): Shared, holder: Option<Extension<Holder>>) -> ApiResult<Done> {
    let holder = shown(holder)?;
    let host = certificates::leaving(&app, &holder)?;
    Ok(Json(hosts::remove(&app, &host, false).await?))
}

fn shown(holder: Option<Extension<Holder>>) -> Result<Holder, ApiError> {
    match holder {
        Some(Extension(holder)) => Ok(holder),
        None => refuse(ErrorCode::NotAllowed, "no certificate is shown here"),
    }
}
