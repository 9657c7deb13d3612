//! The handler of the audit log. Owns nothing.

use super::Shared;
use axum::Json;
use axum::extract::{RawQuery, State};
use godwit_rpc::ApiResult;
use godwit_types::ApiError;
use godwit_types::audit::{AuditEntry, AuditQuery};

/// Who asked for what, newest first: the last N (50), all or those about one VM, host or migration.
#[utoipa::path(get, path = "/v1/audit", params(("last" = Option<u32>, Query), ("about" = Option<String>, Query)), responses((status = 200, body = Vec<AuditEntry>), (status = "default", body = ApiError)))]
pub async fn list(State(app): Shared, RawQuery(query): RawQuery) -> ApiResult<Vec<AuditEntry>> {
    let query = AuditQuery::parse(query.as_deref().unwrap_or_default())?;
    let entries = app.store.audit(&query).await.map_err(ApiError::from)?;
    Ok(Json(entries))
}
