//! Page lists of the wire as guest memory counts them; used at both ends of a migration. Owns nothing.

use godwit_wire::PageRun;
use std::ops::Range;

/// The pages of a run.
pub(crate) fn span(run: PageRun) -> Range<u64> {
    run.first..run.first + u64::from(run.count)
}
