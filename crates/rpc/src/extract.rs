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

/// Longest name of a field that is repeated to who sent it, bytes.
const FIELD_LEN_MAX: usize = 32;

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
        let read = decode(bytes.as_ref()).map_err(Failure)?;
        // What was not understood may hold a secret in any place of it.
        if let Some(slot) = slot {
            slot.keep(bytes.as_ref());
        }
        Ok(Self(read))
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

/// Decodes a request's body. The error names fields and places and repeats no value, since logs keep it and a value may be a secret.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    serde_json::from_slice(bytes).map_err(|error| {
        ApiError::new(
            ErrorCode::InvalidRequest,
            format!(
                "the request's JSON body is not valid: {}",
                without_values(&error)
            ),
        )
    })
}

/// What serde says of a body, without the values that it would quote from there.
fn without_values(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let begins = |with: &[&str]| with.iter().any(|word| text.starts_with(word));
    // What is wrong with the JSON itself is told without a word of it, and these two name fields that this program knows.
    if !error.is_data() || begins(&["missing field `", "duplicate field `"]) {
        return text;
    }
    let place = format!("line {} column {}", error.line(), error.column());
    let quotes = begins(&[
        "invalid type: ",
        "invalid value: ",
        "invalid length: ",
        "unknown variant `",
        "unknown field `",
    ]);
    // What was expected stands last, with the place; where nothing was, the words may be those of the value.
    let expected = text
        .rsplit_once(", expected ")
        .map(|(_, expected)| expected);
    let expected = expected.filter(|_| quotes && !text.contains("there are no "));
    let unknown = text.strip_prefix("unknown field `");
    let unknown = unknown.and_then(|rest| Some(rest.split_once('`')?.0));
    match (unknown.filter(|name| is_name(name)), expected) {
        (Some(name), Some(expected)) => format!("unknown field `{name}`, expected {expected}"),
        (Some(name), None) => format!("unknown field `{name}` at {place}"),
        (None, Some(expected)) => format!("expected {expected}"),
        (None, None) => format!("what stands before {place} is not as it has to be"),
    }
}

/// Whether this is as names of fields are: somebody may have put a text where a name should be.
fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=FIELD_LEN_MAX).contains(&text.len()) && text.bytes().all(allowed)
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only the errors count")]
    struct Told {
        user_data: Option<String>,
        count: u8,
        kind: Kind,
        address: std::net::IpAddr,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Kind {
        Near,
        Far,
    }

    #[test]
    fn a_body_that_is_not_understood_is_refused_without_its_values() {
        for (body, told) in [
            (
                r#"{"user_data": ["secret"]}"#,
                "expected a string at line 1",
            ),
            (r#"{"count": "secret, expected secret"}"#, "expected u8 at"),
            (r#"{"count": -70}"#, "expected u8 at line 1"),
            (r#""secret""#, "expected struct Told at line 1"),
            (r#"{"kind": "secret"}"#, "expected `near` or `far` at"),
            (r#"{"address": "secret"}"#, "before line 1 column"),
            (r#"{"count": 7}"#, "missing field `kind`"),
            (r#"{"userdata": "secret"}"#, "unknown field `userdata`"),
            (r##"{"#!a secret": 1}"##, "expected one of `user_data`"),
            (r##"{"a`, secret": 1}"##, "unknown field `a`, expected one"),
            (r#"{"count": 7, "count": 8}"#, "duplicate field `count`"),
            (r#"{"user_data": "secret"#, "EOF while parsing"),
            (r#"{"user_data": secret}"#, "expected value at line 1"),
        ] {
            let refused = decode::<Told>(body.as_bytes()).unwrap_err().message;
            let is_told = refused.contains(told) && !refused.contains("secret");
            assert!(is_told, "{body}: {refused}");
            assert!(!refused.contains("70"), "{refused}");
        }
        let none = decode::<Nothing>(br#"{"a, expected secret": 1}"#);
        let refused = none.unwrap_err().message;
        assert!(!refused.contains("secret"), "{refused}");
    }
}
