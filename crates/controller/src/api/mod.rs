//! The REST interface: handlers thin over the operations, and the OpenAPI document made from them.
//!
//! Owns nothing. Who may call what is `godwit_rpc::controller_client::RULES`; a test holds rules, routes and document
//! together.

mod audit;
mod clones;
mod drains;
mod events;
mod hosts;
mod metrics;
mod migrations;
mod operators;
mod site;
mod snapshots;
mod vms;

use crate::app::App;
use axum::extract::State;
use axum::{Json, Router};
use godwit_types::ApiError;
use godwit_types::control_api::VersionView;
use godwit_types::version::{Speaks, VERSION};
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The state that every handler is given.
pub type Shared = State<Arc<App>>;

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Godwit controller",
        description = "Moves running virtual machines between hosts."
    ),
    components(schemas(ApiError, godwit_types::control_api::InventoryEvent))
)]
struct Document;

fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(<Document as utoipa::OpenApi>::openapi())
        .routes(routes!(hosts::list, hosts::add))
        .routes(routes!(hosts::show, hosts::remove))
        .routes(routes!(hosts::check))
        .routes(routes!(hosts::join))
        .routes(routes!(hosts::certificate, hosts::renew, hosts::leave))
        .routes(routes!(operators::list, operators::add))
        .routes(routes!(operators::remove))
        .routes(routes!(hosts::top))
        .routes(routes!(drains::show, drains::begin, drains::stop))
        .routes(routes!(drains::events))
        .routes(routes!(vms::list, vms::create))
        .routes(routes!(vms::show, vms::edit, vms::delete))
        .routes(routes!(vms::start))
        .routes(routes!(vms::disks))
        .routes(routes!(
            vms::move_disks,
            vms::disk_moves,
            vms::cancel_disk_moves
        ))
        .routes(routes!(vms::resize_disk))
        .routes(routes!(vms::limit_disk))
        .routes(routes!(snapshots::list, snapshots::take))
        .routes(routes!(snapshots::revert))
        .routes(routes!(snapshots::delete))
        .routes(routes!(clones::begin, clones::show, clones::cancel))
        .routes(routes!(vms::stop))
        .routes(routes!(vms::reset))
        .routes(routes!(vms::renew))
        .routes(routes!(vms::pause))
        .routes(routes!(vms::resume))
        .routes(routes!(vms::resolve))
        .routes(routes!(vms::keep))
        .routes(routes!(hosts::fenced))
        .routes(routes!(site::view))
        .routes(routes!(site::acknowledge))
        .routes(routes!(site::ask))
        .routes(routes!(vms::migrate))
        .routes(routes!(vms::console))
        .routes(routes!(vms::console_events))
        .routes(routes!(vms::console_type))
        .routes(routes!(migrations::list))
        .routes(routes!(migrations::show))
        .routes(routes!(migrations::cancel))
        .routes(routes!(events::migration))
        .routes(routes!(events::inventory))
        .routes(routes!(audit::list))
        .routes(routes!(metrics::show))
        .routes(routes!(version))
        .routes(routes!(document))
}

/// All routes of the REST interface, with the checks that stand before them.
pub fn router(app: Arc<App>) -> Router {
    routes().split_for_parts().0.with_state(app)
}

/// The OpenAPI document, made from the handlers.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut document = routes().split_for_parts().1;
    document.info.version = env!("CARGO_PKG_VERSION").into();
    document
}

/// What answers here.
#[utoipa::path(get, path = "/v1/version", responses((status = 200, body = VersionView), (status = "default", body = ApiError)))]
async fn version(State(app): Shared) -> Json<VersionView> {
    Json(VersionView {
        speaks: Speaks::here(),
        version: VERSION.into(),
        ca_fingerprint: app.authority.fingerprint().to_string(),
    })
}

/// This document.
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, body = serde_json::Value), (status = "default", body = ApiError)))]
async fn document() -> Json<utoipa::openapi::OpenApi> {
    Json(openapi())
}
