//! Several runs of guest pages lent at once, for one record made of scattered pages.
//!
//! Same rules as [`RamFile::with_pages`]; what lies between the runs is never touched.

use std::ops::Range;

use crate::ram_file::byte_span;
use crate::{Error, RamFile};

impl RamFile {
    /// Lends all runs, which ascend, to `read`, in their order.
    pub fn with_runs<R>(
        &self,
        runs: &[Range<u64>],
        read: impl FnOnce(&[&[u8]]) -> R,
    ) -> Result<R, Error> {
        let first = runs.first().map_or(0, |run| run.start);
        let last = runs.last().map_or(first, |run| run.end);
        let hull = self.checked_range(first..last)?;
        let origin = byte_span(&hull).start;
        for run in runs {
            self.require_present(&self.checked_range(run.clone())?)?;
        }
        let parts = |bytes: &[u8]| {
            let cut = |run: &Range<u64>| {
                let span = byte_span(run);
                bytes.get(span.start.checked_sub(origin)?..span.end.checked_sub(origin)?)
            };
            let parts: Option<Vec<&[u8]>> = runs.iter().map(cut).collect();
            parts.map(|parts| read(&parts))
        };
        let lent = self.map.lend(byte_span(&hull), parts).flatten();
        lent.ok_or_else(|| self.out_of_range(&hull))
    }
}
