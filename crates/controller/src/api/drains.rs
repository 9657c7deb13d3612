//! Handlers of drains. Own nothing.

use super::Shared;
use super::events::{Item, event};
use crate::placement::drain;
use axum::Json;
use axum::extract::State;
use axum::response::sse::{KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use godwit_rpc::{ApiResult, Failure, JsonBody, PathParam};
use godwit_types::control_api::Done;
use godwit_types::drain::{DrainRequest, DrainState, DrainView};
use godwit_types::{ApiError, HostName};

/// How far the emptying of a host is.
#[utoipa::path(get, path = "/v1/hosts/{name}/drain", params(("name" = String, Path)), responses((status = 200, body = DrainView), (status = "default", body = ApiError)))]
pub async fn show(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
) -> ApiResult<DrainView> {
    Ok(Json(drain::view(&app, &name)?))
}

/// Empties a host; with `dry_run` only says how.
#[utoipa::path(post, path = "/v1/hosts/{name}/drain", params(("name" = String, Path)), request_body = DrainRequest, responses((status = 200, body = DrainView), (status = "default", body = ApiError)))]
pub async fn begin(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
    JsonBody(request): JsonBody<DrainRequest>,
) -> ApiResult<DrainView> {
    Ok(Json(drain::begin(&app, &name, &request).await?))
}

/// Ends it: no further move begins, and the host takes VMs again.
#[utoipa::path(delete, path = "/v1/hosts/{name}/drain", params(("name" = String, Path)), responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn stop(State(app): Shared, PathParam(name): PathParam<HostName>) -> ApiResult<Done> {
    Ok(Json(drain::stop(&app, &name).await?))
}

/// The emptying of a host at every change, until nothing is left to move or it is ended.
#[utoipa::path(get, path = "/v1/hosts/{name}/drain/events", params(("name" = String, Path)), responses((status = 200, description = "events `drain` with a DrainView each", content_type = "text/event-stream", body = DrainView), (status = "default", body = ApiError)))]
pub async fn events(
    State(app): Shared,
    PathParam(name): PathParam<HostName>,
) -> Result<Sse<impl Stream<Item = Item>>, Failure> {
    let mut watched = drain::watch(&app, &name)?;
    watched.mark_changed();
    let events = stream::unfold(Some(watched), |watched| async move {
        let mut watched = watched?;
        // Its end is shown before it is forgotten.
        watched.changed().await.ok()?;
        let view = watched.borrow_and_update().clone();
        let goes_on = view.state == DrainState::Draining;
        Some((event("drain", &view), goes_on.then_some(watched)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}
