//! Names what limited an iteration.
//!
//! Pure; every duration comes in as an argument. Refuses: to guess what is left, which is [`crate::convergence`]'s, and to
//! keep sums, which are [`crate::ledger`]'s.

pub use godwit_types::PAGE_BYTES;

use godwit_types::migration::LimitedBy;

/// Shares of an iteration's time, each 0 to 1 and averaged over the channels, from which the limit is named.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Shares {
    /// The source's sender threads spent computing (reading, testing for zero, sealing).
    pub source_busy: f64,
    /// The destination's channel threads spent opening and writing.
    pub destination_busy: f64,
    /// The destination waited for its memory to be allocated.
    pub destination_memory: f64,
    /// The source held back because of the cap asked for.
    pub cap: f64,
}

/// Names what limited an iteration. The cap and the destination's memory are explicit waits and come first; a side
/// that computed most of the time is the limit; what is left is the link. From the second iteration on, a guest that
/// dirtied as much as was sent is named instead.
pub fn limited_by(shares: Shares, iteration: u32, sent_bytes: u64, dirty_bytes: u64) -> LimitedBy {
    if shares.cap > 0.2 {
        return LimitedBy::Cap;
    }
    if iteration > 1 && sent_bytes > 0 && dirty_bytes as f64 >= 0.9 * sent_bytes as f64 {
        return LimitedBy::GuestWrites;
    }
    if shares.destination_memory > 0.25 {
        return LimitedBy::DestinationMemory;
    }
    if shares.source_busy >= 0.7 && shares.source_busy >= shares.destination_busy {
        return LimitedBy::SourceCpu;
    }
    if shares.destination_busy >= 0.7 {
        return LimitedBy::DestinationCpu;
    }
    LimitedBy::Link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_named_by_the_longest_wait() {
        let busy = Shares {
            source_busy: 0.9,
            destination_busy: 0.4,
            ..Shares::default()
        };
        assert_eq!(limited_by(busy, 1, 100, 0), LimitedBy::SourceCpu);
        let far = Shares {
            source_busy: 0.2,
            destination_busy: 0.2,
            ..Shares::default()
        };
        assert_eq!(limited_by(far, 1, 100, 0), LimitedBy::Link);
        assert_eq!(limited_by(far, 2, 100, 95), LimitedBy::GuestWrites);
        let cold = Shares {
            destination_memory: 0.5,
            ..busy
        };
        assert_eq!(limited_by(cold, 1, 100, 0), LimitedBy::DestinationMemory);
        let capped = Shares { cap: 0.5, ..busy };
        assert_eq!(limited_by(capped, 1, 100, 0), LimitedBy::Cap);
    }
}
