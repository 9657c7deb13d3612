//! Which blocks of a disk are written again and again, counted in little memory: a multi-stage filter.
//!
//! Each write of a block counts in one place of each of four arrays, chosen by a hash of its own for each array. What the lowest of a
//! block's counters says is never too little, and too much only where other blocks share its place in every array. A write raises
//! only those of the block's counters that are lowest (Estan and Varghese's conservative update): the others say too much already.
//!
//! Owned by whoever tracks the disk. Refuses: to call a block hot whose counter is not well above what counters say on average.

/// A block is cold for certain where it is cold in one of so many.
const ARRAYS: usize = 4;
/// One counter of each array for so many blocks: three quarters of a byte of memory for a block in all. With the two bitmaps beside them
/// a block of 64 KiB takes one byte, and 64 GiB take 1 MiB.
const BLOCKS_PER_COUNTERS: (u64, u64) = (3, 16);
/// A counter must say so many times what counters say on average: what is less may be made of cold blocks that share its place. By
/// Markov's inequality no more than half of the places of an array are so high, and of cold blocks no more than one in 16 finds four
/// of them.
const ABOVE_MEAN: u64 = 2;

/// Odd numbers, two for each array: the hashes are independent of one another.
const MIX: [(u64, u64); ARRAYS] = [
    (0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9),
    (0xc2b2_ae3d_27d4_eb4f, 0x94d0_49bb_1331_11eb),
    (0xd6e8_feb8_6659_fd93, 0xff51_afd7_ed55_8ccd),
    (0xa076_1d64_78bd_642f, 0xc4ce_b9fe_1a85_ec53),
];

/// How often blocks were written, as far as it was sampled.
#[derive(Debug, Clone)]
pub struct Heat {
    /// One array after the other.
    counters: Vec<u8>,
    /// How long an array is.
    each: u64,
    /// A block is hot whose counters are all above this.
    threshold: Option<u8>,
}

impl Heat {
    /// Of a disk of so many blocks, of which none is hot.
    pub fn new(blocks: u64) -> Self {
        let (counters, of) = BLOCKS_PER_COUNTERS;
        let each = (blocks.saturating_mul(counters) / of).max(1);
        let all = usize::try_from(each).unwrap_or(usize::MAX);
        Self {
            counters: vec![0; all.saturating_mul(ARRAYS)],
            each,
            threshold: None,
        }
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> u64 {
        self.counters.len() as u64
    }

    fn places(&self, block: u64) -> [usize; ARRAYS] {
        let mut array = 0;
        MIX.map(|(first, second)| {
            let mixed = (block ^ first).wrapping_mul(first);
            let mixed = (mixed ^ mixed >> 29).wrapping_mul(second);
            let mixed = mixed ^ mixed >> 32;
            let inside = (u128::from(mixed) * u128::from(self.each)) >> 64;
            let place = array * self.each + inside as u64;
            array += 1;
            usize::try_from(place).unwrap_or(usize::MAX)
        })
    }

    fn at(&self, place: usize) -> u8 {
        self.counters.get(place).copied().unwrap_or(0)
    }

    /// A block was written once more.
    pub fn count(&mut self, block: u64) {
        let (places, lowest) = (self.places(block), self.counted(block));
        for place in places {
            if let Some(counter) = self.counters.get_mut(place)
                && *counter == lowest
            {
                *counter = counter.saturating_add(1);
            }
        }
    }

    /// How often a block was written, or more, up to 255.
    pub fn counted(&self, block: u64) -> u8 {
        let counters = self.places(block).map(|place| self.at(place));
        counters.into_iter().min().unwrap_or(0)
    }

    /// Nothing more is sampled, and what is hot is certain from now on: so many bytes were copied meanwhile, and so many are to be copied next.
    ///
    /// The next iteration takes the part `next / sampled` of the time that was sampled. A block that was written more often than
    /// `sampled / next` times will be written again, on average, before that iteration has ended: to copy it then is of no use. So no number
    /// has to be set by hand. Where the threshold does not fit a counter the next iteration is so short that nothing is left out.
    pub fn settle(&mut self, sampled: u64, next: u64) {
        let all: u64 = self
            .counters
            .iter()
            .map(|counter| u64::from(*counter))
            .sum();
        let mean = all.div_ceil(self.counters.len().max(1) as u64);
        let threshold = sampled.checked_div(next);
        let threshold = threshold.map(|often| often.max(ABOVE_MEAN * mean));
        let fits = threshold.filter(|often| *often < u64::from(u8::MAX));
        self.threshold = fits.and_then(|often| u8::try_from(often).ok());
    }

    /// Writes of a block above which it is hot; nothing where none is.
    pub fn threshold(&self) -> Option<u8> {
        self.threshold
    }

    /// Whether a block is hot.
    pub fn is_hot(&self, block: u64) -> bool {
        self.threshold
            .is_some_and(|threshold| self.counted(block) > threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 1 << 20;

    fn numbers(mut state: u64) -> impl FnMut() -> u64 {
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005);
            state = state.wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        }
    }

    #[test]
    fn it_takes_three_quarters_of_a_mebibyte_for_64_gib() {
        assert_eq!(Heat::new(BLOCKS).memory(), 768 << 10);
        assert_eq!(Heat::new(0).memory(), 4);
    }

    #[test]
    fn a_counter_never_says_less_than_a_block_was_written() {
        let (mut heat, mut number, mut written) = (Heat::new(512), numbers(3), [0_u64; 512]);
        for _ in 0..20_000 {
            let block = number() % 512 * (number() % 512) / 512;
            written[block as usize] += 1;
            heat.count(block);
        }
        for (block, written) in written.iter().enumerate() {
            let counted = u64::from(heat.counted(block as u64));
            assert!(
                counted >= *written.min(&255),
                "{block}: {counted}, {written}"
            );
        }
    }

    #[test]
    fn blocks_that_are_written_often_are_told_from_many_that_are_written_now_and_then() {
        let (mut heat, mut number) = (Heat::new(BLOCKS), numbers(5));
        // 2,000 hot blocks beside 200,000 writes of any.
        for _ in 0..60 {
            (0..2000).for_each(|hot| heat.count(hot * 521));
        }
        for _ in 0..200_000 {
            heat.count(number() % BLOCKS);
        }
        heat.settle(BLOCKS, BLOCKS / 10);
        assert_eq!(heat.threshold(), Some(10));
        assert!((0..2000).all(|hot| heat.is_hot(hot * 521)));
        let cold = (0..BLOCKS).filter(|block| block % 521 != 0);
        let taken = cold.filter(|block| heat.is_hot(*block)).count();
        assert!(taken < 100, "{taken} cold blocks are taken for hot");
    }

    #[test]
    fn where_all_blocks_are_written_alike_hardly_any_is_hot() {
        for often in [1, 2, 5] {
            let (mut heat, mut number) = (Heat::new(BLOCKS), numbers(7));
            for _ in 0..often * BLOCKS {
                heat.count(number() % BLOCKS);
            }
            heat.settle(BLOCKS, BLOCKS / 2);
            let hot = (0..BLOCKS).filter(|block| heat.is_hot(*block)).count();
            assert!(hot < 1000, "{often}: {hot} are hot");
        }
    }

    #[test]
    fn nothing_is_hot_where_the_next_iteration_is_short_or_there_is_none() {
        let mut heat = Heat::new(16);
        (0..300).for_each(|_| heat.count(3));
        heat.settle(1 << 30, 1 << 20);
        assert!(heat.threshold().is_none() && !heat.is_hot(3));
        heat.settle(1 << 30, 0);
        assert!(!heat.is_hot(3));
    }
}
