//! What a channel has sent and the destination has not yet said to have applied.
//!
//! Owned by one sender thread. When its channel is lost, all that is here is dirty again.

use godwit_guestmem::PageSet;
use std::collections::VecDeque;
use std::ops::Range;

/// Runs of pages by the record that carried them.
#[derive(Debug, Default)]
pub(crate) struct Unacked {
    /// Records sent when the run had left, ascending; the run.
    sent: VecDeque<(u64, Range<u64>)>,
}

impl Unacked {
    /// Books a run that left with the record before `records`.
    pub(crate) fn push(&mut self, records: u64, run: Range<u64>) {
        self.sent.push_back((records, run));
    }

    /// Forgets what is applied.
    pub(crate) fn applied(&mut self, records: u64) {
        while self.sent.front().is_some_and(|(at, _)| *at <= records) {
            self.sent.pop_front();
        }
    }

    /// Adds all pages to a set.
    pub(crate) fn put_back(&self, pages: &mut PageSet) {
        for (_, run) in &self.sent {
            pages.insert_range(run.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_not_applied_is_dirty_again() {
        let mut unacked = Unacked::default();
        unacked.push(2, 0..10);
        unacked.push(4, 20..30);
        unacked.push(4, 40..41);
        unacked.applied(3);
        let mut set = PageSet::new(512);
        unacked.put_back(&mut set);
        assert_eq!(set.runs().collect::<Vec<_>>(), [20..30, 40..41]);
    }
}
