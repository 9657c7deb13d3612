//! What handlers take and give: bodies and path parameters whose every rejection is an [`ApiError`], and the answers.
//!
//! Refuses: bodies that are too long, too slow or not what the route's type says (unknown keys included).

use crate::audit::BodySlot;
use crate::limits::{Limits, REQUEST_LEN_MAX};
use crate::wiped::{Wiped, wipe};
use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::{StatusCode, request::Parts};
use axum::response::{IntoResponse, Response};
use godwit_types::{ApiError, ErrorCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::str::FromStr;

/// A handler's failure: the error's JSON under the status that its code stands for.
#[derive(Debug)]
pub struct Failure(pub ApiError);

/// What a handler returns.
pub type ApiResult<T> = Result<Json<T>, Failure>;

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.http_status())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(&self.0)).into_response();
        response.extensions_mut().insert(self.0);
        response
    }
}

/// A JSON body. An empty body reads as `{}`, so that requests whose fields all have defaults need none.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Failure> {
        let limits = request
            .extensions()
            .get::<Limits>()
            .copied()
            .unwrap_or_default();
        // A length that is announced too long is refused before a byte of it is read.
        if request.body().size_hint().lower() > REQUEST_LEN_MAX as u64 {
            return Err(too_large());
        }
        let slot = request.extensions().get::<BodySlot>().cloned();
        let body = Limited::new(request.into_body(), REQUEST_LEN_MAX);
        // It may hold a migration's key or a token.
        let bytes = tokio::time::timeout(limits.body, read(body))
            .await
            .map_err(|_| slow())?
            .map_err(|error| unreadable(error.as_ref()))?;
        if let Some(slot) = slot {
            slot.keep(bytes.as_ref());
        }
        decode(bytes.as_ref()).map(Self).map_err(Failure)
    }
}

async fn read(mut body: Limited<Body>) -> Result<Wiped, Box<dyn std::error::Error + Send + Sync>> {
    let mut bytes = Wiped::default();
    while let Some(frame) = body.frame().await {
        if let Ok(piece) = frame?.into_data() {
            bytes.push(&piece);
            wipe(piece);
        }
    }
    Ok(bytes)
}

/// Decodes a request's body.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| {
        ApiError::new(
            ErrorCode::InvalidRequest,
            format!("the request's JSON body is not valid: {error}"),
        )
    })
}

fn too_large() -> Failure {
    Failure(ApiError::new(
        ErrorCode::TooLarge,
        format!("the request's body is longer than {REQUEST_LEN_MAX} bytes: make it shorter"),
    ))
}

fn slow() -> Failure {
    Failure(ApiError::new(
        ErrorCode::DeadlineMissed,
        "the request's body did not arrive in time: send it again",
    ))
}

fn unreadable(error: &(dyn std::error::Error + Send + Sync + 'static)) -> Failure {
    if error.downcast_ref::<LengthLimitError>().is_some() {
        return too_large();
    }
    Failure(ApiError::new(
        ErrorCode::InvalidRequest,
        "the request's body broke off: send it again",
    ))
}

/// The one parameter of a path.
#[derive(Debug)]
pub struct PathParam<T>(pub T);

impl<T, S> FromRequestParts<S> for PathParam<T>
where
    T: FromStr,
    T::Err: Display,
    S: Send + Sync,
{
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let invalid = |text: String| Failure(ApiError::new(ErrorCode::InvalidRequest, text));
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|error| invalid(error.to_string()))?;
        let (_, text) = params
            .iter()
            .next()
            .ok_or_else(|| invalid("the path names nothing".into()))?;
        text.parse()
            .map(Self)
            .map_err(|error: T::Err| invalid(error.to_string()))
    }
}
