//! Server-sent events: a migration's report until it ends, and changes of the inventory.
//!
//! Own nothing; a reader that is too slow misses reports in between, never the last one.

use super::Shared;
use crate::watch;
use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::stream::{self, Stream, StreamExt as _};
use godwit_rpc::{Failure, PathParam};
use godwit_types::control_api::InventoryEvent;
use godwit_types::migration::MigrationReport;
use godwit_types::{ApiError, MigrationId};
use std::convert::Infallible;
use tokio::sync::watch::Receiver;
use tokio_stream::wrappers::BroadcastStream;

/// What a stream of server-sent events yields; it never fails.
pub type Item = Result<Event, Infallible>;

/// A migration's report about five times a second until it ends or is in doubt.
#[utoipa::path(get, path = "/v1/migrations/{id}/events", params(("id" = String, Path)), responses((status = 200, description = "events `report` with a MigrationReport each", content_type = "text/event-stream", body = MigrationReport), (status = "default", body = ApiError)))]
pub async fn migration(
    State(app): Shared,
    PathParam(id): PathParam<MigrationId>,
) -> Result<Sse<impl Stream<Item = Item>>, Failure> {
    let first = watch::report(&app, &id).await?;
    let next = match first.outcome {
        Some(_) => Next::End,
        None => app.live(&id).map_or(Next::Stored, Next::Live),
    };
    let events = stream::unfold((Some(first), next), move |(now, next)| {
        let (app, id) = (app.clone(), id.clone());
        async move {
            if let Some(report) = now {
                return Some((event("report", &report), (None, next)));
            }
            let (report, next) = match next {
                Next::End => return None,
                Next::Stored => (watch::report(&app, &id).await.ok()?, Next::End),
                Next::Live(mut live) => match live.changed().await {
                    Ok(()) => {
                        let report = live.borrow_and_update().clone();
                        (report, Next::Live(live))
                    }
                    Err(_) => (watch::report(&app, &id).await.ok()?, Next::End),
                },
            };
            let next = if report.outcome.is_some() {
                Next::End
            } else {
                next
            };
            Some((event("report", &report), (None, next)))
        }
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

/// Where the next report comes from.
enum Next {
    Live(Receiver<MigrationReport>),
    /// It has just ended: the stored report is the last one.
    Stored,
    End,
}

/// Changes of the inventory from now on.
#[utoipa::path(get, path = "/v1/events", responses((status = 200, description = "events `inventory` with an InventoryEvent each", content_type = "text/event-stream", body = InventoryEvent), (status = "default", body = ApiError)))]
pub async fn inventory(State(app): Shared) -> Sse<impl Stream<Item = Item>> {
    let events = BroadcastStream::new(app.listen())
        .map(|change| event("inventory", &change.unwrap_or(InventoryEvent::Missed)));
    Sse::new(events).keep_alive(KeepAlive::default())
}

/// A server-sent event with `data` as JSON.
pub fn event(name: &str, data: &impl serde::Serialize) -> Item {
    // Our own reports always encode; should one not, the reader gets an empty event rather than a broken stream.
    Ok(Event::default()
        .event(name)
        .json_data(data)
        .unwrap_or_default())
}
