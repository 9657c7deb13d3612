//! Handlers of what concerns the whole site. Own nothing.

use super::Shared;
use crate::site;
use axum::extract::State;
use axum::{Extension, Json};
use godwit_rpc::{ApiResult, JsonBody, Peer, Unwanted};
use godwit_types::control_api::{Done, Empty};
use godwit_types::site::{SiteAnswer, SiteQuestion, SiteView};
use godwit_types::{ApiError, ErrorCode};

/// How the site stands: what a person must know before anything else.
#[utoipa::path(get, path = "/v1/site", responses((status = 200, body = SiteView), (status = "default", body = ApiError)))]
pub async fn view(State(app): Shared) -> Json<SiteView> {
    Json(site::view(&app))
}

/// A person has seen the alarms that nothing else ends: a host that was said to be off and was not, and what a takeover
/// forgot. Nothing else changes.
#[utoipa::path(post, path = "/v1/site/acknowledge", request_body = Empty, responses((status = 200, body = Done), (status = "default", body = ApiError)))]
pub async fn acknowledge(
    State(app): Shared,
    JsonBody(Empty {}): JsonBody<Empty>,
) -> ApiResult<Done> {
    Ok(Json(site::acknowledge(&app).await?))
}

/// A host asks before it boots what nobody asked it to boot; for agents only.
#[utoipa::path(post, path = "/v1/site/ask", request_body = serde_json::Value, responses((status = 200, body = serde_json::Value), (status = "default", body = ApiError)))]
pub async fn ask(
    State(app): Shared,
    Extension(peer): Extension<Peer>,
    unwanted: Option<Extension<Unwanted>>,
    JsonBody(question): JsonBody<SiteQuestion>,
) -> ApiResult<SiteAnswer> {
    let Peer::Host(asker) = peer else {
        let error = ApiError::new(ErrorCode::NotAllowed, "only a host's agent may ask this");
        return Err(error.into());
    };
    let unwanted = unwanted.map(|Extension(why)| why);
    Ok(Json(site::answer(&app, &asker, &question, unwanted).await?))
}
