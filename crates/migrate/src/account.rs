//! Keeps the books of one migration: iterations and what limited each.
//!
//! Pure; every duration comes in as an argument. Refuses: to guess what is left, which is [`crate::convergence`]'s.

use godwit_types::migration::{IterationReport, LimitedBy, MigrationReport};

/// Bytes of a guest page.
pub const PAGE_BYTES: u64 = 4096;

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

/// Books one iteration into the report and renews its totals. `dirty_bytes` is what the guest wrote meanwhile; `None`
/// when it was stopped.
pub fn book(report: &mut MigrationReport, iteration: IterationReport, dirty_bytes: Option<u64>) {
    report.bytes_on_wire += iteration.bytes;
    if let Some(bytes) = dirty_bytes.filter(|_| iteration.seconds > 0.0) {
        report.dirty_mib_per_s = bytes as f64 / iteration.seconds / f64::from(1 << 20);
    }
    report.remaining_bytes = dirty_bytes.unwrap_or(0);
    report.iterations.push(iteration);
    report.throughput_gb_per_s = throughput_gb_per_s(&report.iterations);
}

/// Page bytes per second over all iterations, GB/s.
fn throughput_gb_per_s(iterations: &[IterationReport]) -> f64 {
    let bytes: u64 = iterations.iter().map(|i| i.pages_sent * PAGE_BYTES).sum();
    let seconds: f64 = iterations.iter().map(|i| i.seconds).sum();
    if seconds > 0.0 {
        bytes as f64 / seconds / 1e9
    } else {
        0.0
    }
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
