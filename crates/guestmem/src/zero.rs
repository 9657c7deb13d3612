//! Which pages hold only zeroes: they are sent as a bitmap, never as data.
//!
//! Pure functions over bytes that may change while they are looked at. A page that is found to be
//! zero and is written a moment later is dirty again, so the answer is safe either way.

use std::ops::Range;

use crate::page_set::{CHUNK_WORDS, Chunk};
use crate::{CHUNK_PAGES, PAGE_SIZE};

/// Bytes looked at between two decisions to stop: four cache lines, a loop that vectorises.
const STEP: usize = 256;

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut steps = bytes.chunks_exact(STEP);
    steps.by_ref().all(step_is_zero) && steps.remainder().iter().all(|&byte| byte == 0)
}

fn step_is_zero(step: &[u8]) -> bool {
    let any = step
        .chunks_exact(size_of::<u64>())
        .fold(0, |any, word| match word.try_into() {
            Ok(word) => any | u64::from_ne_bytes(word),
            Err(_) => u64::MAX,
        });
    any == 0
}

/// What the wanted pages of one chunk of 512 pages hold. Bit `n` is the chunk's page `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkContent {
    /// First page of the chunk.
    pub first_page: u64,
    /// Wanted pages that hold data.
    pub data: [u64; CHUNK_WORDS],
    /// Wanted pages that hold only zeroes.
    pub zero: [u64; CHUNK_WORDS],
}

impl ChunkContent {
    /// Looks at the wanted pages of a chunk that begins at page `first_page`. Pages beyond the
    /// bytes given count as zero.
    pub fn of(first_page: u64, bytes: &[u8], wanted: [u64; CHUNK_WORDS]) -> Self {
        let mut content = Self::all_zero(first_page, wanted);
        content.add_data(first_page, bytes);
        content
    }

    /// A chunk whose wanted pages are all zero.
    pub fn all_zero(first_page: u64, wanted: [u64; CHUNK_WORDS]) -> Self {
        Self {
            first_page,
            data: [0; CHUNK_WORDS],
            zero: wanted,
        }
    }

    /// Looks at some pages of the chunk, from page `from` on, and moves those that are wanted and
    /// not zero to the data.
    pub fn add_data(&mut self, from: u64, bytes: &[u8]) {
        let offset = from.saturating_sub(self.first_page);
        for (page, bytes) in (offset..CHUNK_PAGES).zip(bytes.chunks_exact(PAGE_SIZE)) {
            let (word, bit) = ((page / 64) as usize, 1_u64 << (page % 64));
            let (Some(zero), Some(data)) = (self.zero.get_mut(word), self.data.get_mut(word))
            else {
                return;
            };
            if *zero & bit != 0 && !is_zero(bytes) {
                *zero &= !bit;
                *data |= bit;
            }
        }
    }

    /// Runs of pages that hold data, as page numbers of guest RAM.
    pub fn data_runs(&self) -> Vec<Range<u64>> {
        self.chunk(self.data).runs().collect()
    }

    /// Pages that hold data.
    pub fn data_count(&self) -> u64 {
        self.chunk(self.data).count()
    }

    /// Pages that hold only zeroes.
    pub fn zero_count(&self) -> u64 {
        self.chunk(self.zero).count()
    }

    fn chunk(&self, words: [u64; CHUNK_WORDS]) -> Chunk {
        Chunk {
            first_page: self.first_page,
            words,
        }
    }
}

#[cfg(test)]
#[allow(
    clippy::single_range_in_vec_init,
    reason = "a set may be one run of pages"
)]
mod tests {
    use super::*;

    #[test]
    fn a_single_byte_anywhere_is_seen() {
        for len in [1, 7, 8, 255, 256, 257, 511, 512, 4095, 4096] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 0x80;
                assert!(!is_zero(&bytes), "{len} {at}");
                bytes[at] = 0;
            }
        }
        assert!(is_zero(&[]));
    }

    #[test]
    fn only_wanted_pages_are_reported() {
        let mut bytes = vec![0_u8; CHUNK_PAGES as usize * PAGE_SIZE];
        for page in [0, 1, 63, 64, 200, 511] {
            bytes[page * PAGE_SIZE + PAGE_SIZE - 1] = 1;
        }
        let all = ChunkContent::of(1024, &bytes, [u64::MAX; CHUNK_WORDS]);
        let expected = [1024..1026, 1087..1089, 1224..1225, 1535..1536];
        assert_eq!(all.data_runs(), expected);
        assert_eq!((all.data_count(), all.zero_count()), (6, 506));

        let some = ChunkContent::of(1024, &bytes, [0b110, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(some.data_runs(), [1025..1026]);
        assert_eq!(some.zero, [0b100, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn pages_that_were_not_given_count_as_zero() {
        let bytes = vec![1_u8; 2 * PAGE_SIZE];
        let mut content = ChunkContent::all_zero(512, [u64::MAX; CHUNK_WORDS]);
        content.add_data(1022, &bytes);
        content.add_data(9999, &bytes);
        assert_eq!(content.data_runs(), [1022..1024]);
        assert_eq!(content.zero_count(), 510);
    }
}
