//! Following what goes on at the controller, by its events, until it is over. Ctrl-C stops watching, never the work.
//!
//! Owns nothing. Refuses: to take a broken stream for an end, or to wait for ever for a controller that is gone.

use crate::exit::{DETACHED, Failure};
use crate::output::Output;
use godwit_rpc::ClientError;
use godwit_rpc::sse::EventStream;
use godwit_types::{ApiError, ErrorCode};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Longest silence of an event stream, which is kept alive while nothing changes.
const SILENCE: Duration = Duration::from_secs(60);
/// Pause before a broken event stream is opened again, longer each time.
const REOPEN_WAIT: Duration = Duration::from_millis(500);
/// How often it is opened again: a controller that restarts comes back within this.
const REOPEN_MAX: u32 = 8;

/// Follows events until one is over. `show` shows what goes on and hands back what is over; `again` says to a person how
/// to go on when the controller does not come back.
pub async fn events<V: DeserializeOwned>(
    open: impl AsyncFn() -> Result<EventStream, ClientError>,
    look: impl AsyncFn() -> Result<V, ClientError>,
    show: impl Fn(V) -> Option<V>,
    again: &str,
) -> Result<V, Failure> {
    let mut broken = 0;
    loop {
        match one_stream(&open, &look, &show).await {
            Ok(Some(over)) => return Ok(over),
            Ok(None) => {}
            Err(ClientError::Refused(error)) => return Err(error.into()),
            // Nothing was reached at all: whoever asked hears it at once.
            Err(error) if !error.may_be_done() && broken == 0 => {
                return Err(ApiError::from(error).into());
            }
            Err(error) if broken >= REOPEN_MAX => {
                let message = format!("{error}; {again}");
                return Err(Failure::new(ErrorCode::HostUnreachable, message));
            }
            Err(_) => {}
        }
        broken += 1;
        tokio::time::sleep(REOPEN_WAIT * broken).await;
    }
}

/// One event stream to its end, and a look after it, since the last event may be lost.
async fn one_stream<V: DeserializeOwned>(
    open: &impl AsyncFn() -> Result<EventStream, ClientError>,
    look: &impl AsyncFn() -> Result<V, ClientError>,
    show: &impl Fn(V) -> Option<V>,
) -> Result<Option<V>, ClientError> {
    let mut events = open().await?;
    while let Some(event) = events.next(SILENCE).await? {
        let told = serde_json::from_str::<V>(&event.data).ok();
        if let Some(over) = told.and_then(show) {
            return Ok(Some(over));
        }
    }
    Ok(show(look().await?))
}

/// Waits for the end, or for Ctrl-C; then `left` is said, as JSON or in words.
pub async fn until_left<V>(
    ended: impl Future<Output = Result<V, Failure>>,
    clear: impl FnOnce(),
    output: &Output,
    left: (serde_json::Value, String),
) -> Result<V, Failure> {
    let ended = tokio::select! {
        ended = ended => Some(ended),
        _ = tokio::signal::ctrl_c() => None,
    };
    clear();
    ended.unwrap_or_else(|| {
        let (json, words) = left;
        match output.json {
            true => output.json(&json),
            false => eprintln!("\n{words}"),
        }
        Err(Failure::told(DETACHED))
    })
}
