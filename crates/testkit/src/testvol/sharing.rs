//! Transfers that share a disk's rate evenly: each gets the same part of it, so that a small one is not behind a large one.
//!
//! Owns what is being transferred, and no time: the caller says what time it is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Transfers under way. Each is over once as many bytes have gone to every one as it has.
#[derive(Debug)]
pub struct Sharing<T> {
    /// Bytes that a transfer has got which has been there since the beginning.
    got: f64,
    at: Option<Instant>,
    under_way: BinaryHeap<Reverse<Transfer<T>>>,
    order: u64,
}

#[derive(Debug)]
struct Transfer<T> {
    /// What [`Sharing::got`] will be at its end.
    ends_at: f64,
    order: u64,
    what: T,
}

impl<T> PartialEq for Transfer<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Transfer<T> {}

impl<T> PartialOrd for Transfer<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Transfer<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let ends_at = self.ends_at.total_cmp(&other.ends_at);
        ends_at.then(self.order.cmp(&other.order))
    }
}

impl<T> Default for Sharing<T> {
    fn default() -> Self {
        Self {
            got: 0.0,
            at: None,
            under_way: BinaryHeap::new(),
            order: 0,
        }
    }
}

impl<T> Sharing<T> {
    /// A transfer begins. What is over by now was taken out before.
    pub fn begin(&mut self, now: Instant, bytes: u64, what: T) {
        if self.under_way.is_empty() {
            (self.got, self.at) = (0.0, Some(now));
        }
        self.order += 1;
        self.under_way.push(Reverse(Transfer {
            ends_at: self.got + bytes as f64,
            order: self.order,
            what,
        }));
    }

    /// When the next transfer is over if none begins before.
    pub fn next_end(&self, bytes_per_second: u64) -> Option<Instant> {
        let next = &self.under_way.peek()?.0;
        let bytes = (next.ends_at - self.got).max(0.0) * self.under_way.len() as f64;
        let takes = Duration::from_secs_f64(bytes / bytes_per_second.max(1) as f64);
        Some(self.at? + takes)
    }

    /// Takes out what is over by now, oldest end first, with the moments.
    pub fn ended(&mut self, now: Instant, bytes_per_second: u64) -> Vec<(Instant, T)> {
        let mut ended = Vec::new();
        while let Some(at) = self.next_end(bytes_per_second).filter(|at| *at <= now) {
            if let Some(Reverse(transfer)) = self.under_way.pop() {
                (self.got, self.at) = (transfer.ends_at, Some(at));
                ended.push((at, transfer.what));
            }
        }
        if let (Some(at), false) = (self.at, self.under_way.is_empty()) {
            let all = now.saturating_duration_since(at).as_secs_f64() * bytes_per_second as f64;
            self.got += all / self.under_way.len() as f64;
            self.at = Some(at.max(now));
        }
        ended
    }

    /// Takes out everything, whether it is over or not.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        let all = std::mem::take(&mut self.under_way).into_sorted_vec();
        all.into_iter().rev().map(|transfer| transfer.0.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1000;

    fn after(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    fn names(ended: &[(Instant, char)], start: Instant) -> Vec<(char, u128)> {
        let one = |(at, name): &(Instant, char)| (*name, (*at - start).as_micros());
        ended.iter().map(one).collect()
    }

    #[test]
    fn a_small_transfer_passes_a_large_one() {
        let (start, mut sharing) = (Instant::now(), Sharing::default());
        sharing.begin(start, 1000, 'l');
        assert!(sharing.ended(after(start, 500), RATE).is_empty());
        // Half of the rate for each: the small one takes 200 ms, and the large one has 400 bytes left then.
        sharing.begin(after(start, 500), 100, 's');
        let ended = sharing.ended(after(start, 5000), RATE);
        let told = names(&ended, start);
        assert_eq!(told, [('s', 700_000), ('l', 1_100_000)]);
        assert_eq!(sharing.next_end(RATE), None);
    }

    #[test]
    fn together_they_take_as_long_as_one_after_the_other() {
        let (start, mut sharing) = (Instant::now(), Sharing::default());
        for name in ['a', 'b', 'c', 'd'] {
            sharing.begin(start, 250, name);
        }
        assert_eq!(sharing.next_end(RATE), Some(after(start, 1000)));
        let ended = sharing.ended(after(start, 1000), RATE);
        assert_eq!(ended.len(), 4);
    }
}
