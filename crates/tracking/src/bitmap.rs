//! One bit for each block of a disk.
//!
//! Owned by whoever tracks the disk. Refuses: blocks that the disk does not have, which are no part of it and never set.

/// Blocks of a disk, each in or out.
#[derive(Debug, Clone)]
pub struct Bitmap {
    words: Vec<u64>,
    blocks: u64,
    count: u64,
}

impl Bitmap {
    /// Of so many blocks, none of which is in.
    pub fn new(blocks: u64) -> Self {
        let words = usize::try_from(blocks.div_ceil(64)).unwrap_or(usize::MAX);
        Self {
            words: vec![0; words],
            blocks,
            count: 0,
        }
    }

    /// How many are in.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> u64 {
        8 * self.words.len() as u64
    }

    fn word(&mut self, block: u64) -> Option<(&mut u64, u64)> {
        let place = usize::try_from(block / 64).ok();
        let place = place.filter(|_| block < self.blocks);
        let word = place.and_then(|place| self.words.get_mut(place))?;
        Some((word, 1 << (block % 64)))
    }

    /// Takes a block in. Returns whether it was out.
    pub fn set(&mut self, block: u64) -> bool {
        let Some((word, bit)) = self.word(block) else {
            return false;
        };
        let was_out = *word & bit == 0;
        *word |= bit;
        self.count += u64::from(was_out);
        was_out
    }

    /// Takes a block out. Returns whether it was in.
    pub fn clear(&mut self, block: u64) -> bool {
        let Some((word, bit)) = self.word(block) else {
            return false;
        };
        let was_in = *word & bit != 0;
        *word &= !bit;
        self.count -= u64::from(was_in);
        was_in
    }

    /// Whether a block is in.
    pub fn has(&self, block: u64) -> bool {
        let place = usize::try_from(block / 64).ok();
        let word = place.and_then(|place| self.words.get(place));
        word.is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// The first block from this one on that is in.
    pub fn next_from(&self, block: u64) -> Option<u64> {
        let first = usize::try_from(block / 64).ok()?;
        let rest = self.words.get(first..)?;
        let before = !0 << (block % 64);
        let masks = std::iter::once(before).chain(std::iter::repeat(!0));
        let mut found = rest.iter().zip(masks).enumerate();
        found.find_map(|(offset, (word, mask))| {
            let left = word & mask;
            let at = (first + offset) as u64 * 64 + u64::from(left.trailing_zeros());
            (left != 0).then_some(at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn it_has_what_a_set_has() {
        let (mut bitmap, mut set, mut state) = (Bitmap::new(200), BTreeSet::new(), 1_u64);
        for _ in 0..5000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let block = (state >> 33) % 210;
            let is_there = block < 200;
            match state >> 62 {
                0 | 1 => assert_eq!(bitmap.set(block), is_there && set.insert(block)),
                2 => assert_eq!(bitmap.clear(block), is_there && set.remove(&block)),
                _ => {
                    assert_eq!(bitmap.has(block), set.contains(&block));
                    let next = set.range(block..).next().copied();
                    assert_eq!(bitmap.next_from(block), next);
                }
            }
            set.retain(|block| *block < 200);
            assert_eq!(bitmap.count(), set.len() as u64);
        }
        assert_eq!(bitmap.next_from(u64::MAX), None);
    }
}
