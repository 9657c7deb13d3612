//! An answer without an end, such as a stream of events, ends when its reader is not wanted any more.
//!
//! Owns nothing but that answer. Answers with an end pass through as they are: they are on their way.

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Is done when the reader is not wanted any more.
pub(crate) type Gone = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) struct Until {
    body: Body,
    gone: Gone,
}

impl Until {
    /// The same answer, which ends with `gone`.
    pub(crate) fn ends(response: Response, gone: Option<Gone>) -> Response {
        let Some(gone) = gone.filter(|_| response.body().size_hint().exact().is_none()) else {
            return response;
        };
        response.map(|body| Body::new(Self { body, gone }))
    }
}

impl HttpBody for Until {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.gone.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
