//! How fast images of deleted snapshots are merged beside guests that work.
//!
//! Nobody waits for it, and it takes the same storage as they do: after each few pieces, which are copied at once, it rests for as long as these took, and it copies no
//! more than so many bytes in a second. Whoever waits for it has it go on without rests. Pure, owns nothing, refuses nothing.

use godwit_blockio::delta::Merged;
use std::time::Duration;

/// So many pieces are copied at once,
pub(super) const FEW: usize = 4;
/// unless they have so many bytes.
const FEW_BYTES: u64 = 1 << 20;
/// Most bytes that are copied in a second.
const BYTES_PER_S: u64 = 256 << 20;
/// Longest rest: whoever wants it to end waits for as long.
const REST_MAX: Duration = Duration::from_millis(250);

/// The pieces since the last rest.
#[derive(Debug, Default)]
pub(super) struct Few {
    pieces: usize,
    /// How much had been begun, and copied, then.
    begun: u64,
    copied: u64,
}

/// What comes before another piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It begins at once.
    Begins,
    /// Those that are on their way are to end, and it is asked again.
    Waits,
    /// A rest after so many bytes.
    Rests(u64),
}

impl Few {
    pub fn next(&mut self, done: Merged) -> Next {
        let bytes = done.begun().saturating_sub(self.begun);
        if self.pieces < FEW && bytes < FEW_BYTES {
            self.pieces += 1;
            return Next::Begins;
        }
        if done.under_way > 0 {
            return Next::Waits;
        }
        let copied = done.copied.saturating_sub(self.copied);
        *self = Self {
            pieces: 1,
            begun: done.begun(),
            copied: done.copied,
        };
        Next::Rests(copied)
    }
}

/// How long it rests after pieces of so many bytes that took so long.
pub(super) fn rest_after(took: Duration, bytes: u64) -> Duration {
    let least = Duration::from_secs_f64(bytes as f64 / BYTES_PER_S as f64);
    took.max(least.saturating_sub(took)).min(REST_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_rests_once_a_few_pieces_or_many_bytes_have_been_copied() {
        const BLOCK: u64 = 4096;
        let done = |copied, under_way| Merged {
            copied,
            under_way,
            ..Merged::default()
        };
        let mut few = Few::default();
        let first: Vec<Next> = (0..FEW as u64)
            .map(|piece| few.next(done(0, piece * BLOCK)))
            .collect();
        assert_eq!(first, [Next::Begins; FEW]);
        assert_eq!(few.next(done(BLOCK, 3 * BLOCK)), Next::Waits);
        assert_eq!(few.next(done(4 * BLOCK, 0)), Next::Rests(4 * BLOCK));
        // The one after the rest is the first of the next few.
        let now = 4 * BLOCK;
        assert_eq!(few.next(done(now, FEW_BYTES - 1)), Next::Begins);
        assert_eq!(few.next(done(now, FEW_BYTES)), Next::Waits);
        let end = done(now + FEW_BYTES, 0);
        assert_eq!(few.next(end), Next::Rests(FEW_BYTES));
        assert_eq!(few.next(end), Next::Begins);
        // What becomes zero is no copying, and takes its turn.
        let zeroed = Merged {
            zeroed: 2 * FEW_BYTES,
            ..end
        };
        assert_eq!(few.next(zeroed), Next::Rests(0));
    }

    #[test]
    fn it_takes_half_of_the_time_at_most_and_so_many_bytes_and_ends_soon() {
        let piece = BYTES_PER_S / 100;
        for (took, bytes, rest) in [
            (20 * MS, piece, 20 * MS),
            (5 * MS, piece, 5 * MS),
            (MS, piece, 9 * MS),
            (Duration::ZERO, 0, Duration::ZERO),
            (10_000 * MS, piece, REST_MAX),
        ] {
            let off = rest_after(took, bytes).abs_diff(rest);
            assert!(off < MS / 100, "{took:?}, {bytes} bytes: off by {off:?}");
        }
    }
}
