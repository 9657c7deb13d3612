//! How fast images of deleted snapshots are merged beside guests that work.
//!
//! Nobody waits for it, and it takes the same storage as they do: after each piece it rests for as long as that took, and it copies no more than so many
//! bytes in a second. Whoever waits for it has it go on without rests. Pure, owns nothing, refuses nothing.

use std::time::Duration;

/// Most bytes that are copied in a second.
const BYTES_PER_S: u64 = 256 << 20;
/// Longest rest: whoever wants it to end waits for as long.
const REST_MAX: Duration = Duration::from_millis(250);

/// How long it rests after a piece of so many bytes that took so long.
pub(super) fn rest_after(took: Duration, bytes: u64) -> Duration {
    let least = Duration::from_secs_f64(bytes as f64 / BYTES_PER_S as f64);
    took.max(least.saturating_sub(took)).min(REST_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

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
