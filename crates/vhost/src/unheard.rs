//! A sync that failed, and of which the guest has not heard.
//!
//! The kernel tells of data that it lost once for each open file, so that the next sync succeeds. Where nobody was there to be told,
//! the guest would take that for the fate of what it wrote before. Part of [`Device`], which remembers it. Refuses: to call anything durable
//! then, once.

use crate::disk::Device;
use godwit_blockio::{Outcome, Request, Work};
use rustix::io::Errno;

impl Device {
    /// Nobody hears of this outcome.
    pub(crate) fn note_unheard(&mut self, request: &Request, outcome: Outcome) {
        self.lost_sync |= syncs(request) && matches!(outcome, Outcome::Failed(_));
    }

    /// What the guest is to hear of a request.
    pub(crate) fn outcome_for_guest(&mut self, request: &Request, outcome: Outcome) -> Outcome {
        if outcome == Outcome::Done && syncs(request) && std::mem::take(&mut self.lost_sync) {
            return Outcome::Failed(Errno::IO);
        }
        outcome
    }
}

/// Whether what the guest wrote counts as durable once this is done.
fn syncs(request: &Request) -> bool {
    request.work == Work::Flush || request.durable
}
