//! A bottom for tests of filters: it keeps what comes to it, in its order, until the test says what came of it.
//!
//! Owns what came. Refuses nothing.

use crate::{Bottom, Outcome, Request};

#[derive(Debug, Default)]
pub(super) struct Keeps(pub Vec<Request>);

impl Bottom for Keeps {
    fn start(&mut self, request: Request) -> Option<(Request, Outcome)> {
        self.0.push(request);
        None
    }
}
