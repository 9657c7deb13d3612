//! What a mirroring waits for at a destination that confirms what it has.
//!
//! Owned by the mirroring, by numbers of its own. Refuses nothing.

use std::time::Instant;

use crate::{Outcome, Request};

/// What a destination has that confirms it.
pub(super) struct Given {
    pub since: Instant,
    /// Whether it is to be durable, too, once it is carried out.
    pub durable: bool,
}

/// A flush of both sides.
pub(super) struct Flushing {
    pub request: Request,
    /// What became of it at the source.
    pub outcome: Option<Outcome>,
}
