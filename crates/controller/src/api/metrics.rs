//! The handler of what a monitoring system reads. Owns nothing.

use super::Shared;
use crate::metrics;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use godwit_types::ApiError;

/// Facts of controller, hosts, VMs and migrations in the text format of Prometheus.
#[utoipa::path(get, path = "/metrics", responses((status = 200, description = "Prometheus' text format, version 0.0.4", content_type = "text/plain", body = String), (status = "default", body = ApiError)))]
pub async fn show(State(app): Shared) -> ([(HeaderName, &'static str); 1], String) {
    let is_text = [(CONTENT_TYPE, metrics::CONTENT_TYPE)];
    (is_text, metrics::text(&app))
}
