//! What each grain of a delta is: absent, zero or present, in two bits each; and which blocks of the tables do not say so yet.
//!
//! The words may be a mapping of a file that outlives this process: what was set is there for the next one. One process alone writes
//! them, the one that has the delta's lock, and of it one thread.
//!
//! Who owns the state: whoever owns the words, as just said. Refuses: words that are too few, and those that say of a grain what no grain is.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Refused;
use crate::layout::{GRAINS_PER_BLOCK, Layout};

/// Grains that a word tells of.
const PER_WORD: u64 = 32;
/// One of two bits of each grain.
const LOW: u64 = 0x5555_5555_5555_5555;
/// Words that tell of the grains of one block of the tables.
pub const WORDS_PER_BLOCK: usize = (GRAINS_PER_BLOCK / PER_WORD) as usize;

/// The states of all grains of a block of the tables.
pub type Words = [u64; WORDS_PER_BLOCK];

/// What a grain of a delta is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grain {
    /// As in the parent.
    Absent,
    Zero,
    /// As in this delta.
    Present,
}

impl Grain {
    pub(crate) fn bits(self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Zero => 1,
            Self::Present => 2,
        }
    }

    /// By the lowest two bits.
    pub(crate) fn of(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Absent,
            1 => Self::Zero,
            _ => Self::Present,
        }
    }
}

/// The states of a delta's grains, over words of `M`.
#[derive(Debug, Clone)]
pub struct States<M> {
    words: M,
    grains: u64,
    blocks: u64,
}

impl<M: AsRef<[AtomicU64]>> States<M> {
    /// Over these words, of which there must be as many as [`words_for`] says.
    pub fn over(words: M, layout: &Layout) -> Result<Self, Refused> {
        if words.as_ref().len() as u64 != words_for(layout) {
            return Err(Refused::of(
                "the map of its states is not as long as its disk needs",
            ));
        }
        let states = Self {
            words,
            grains: layout.grains(),
            blocks: layout.blocks(),
        };
        let count = states.blocks as usize * WORDS_PER_BLOCK;
        let mut all = states.words.as_ref().iter().take(count);
        if all.any(|word| both(word.load(Ordering::Relaxed)) != 0) {
            return Err(Refused::of("the map of its states is damaged"));
        }
        Ok(states)
    }

    /// What they are over.
    pub fn words(&self) -> &M {
        &self.words
    }

    /// How many grains there are.
    pub fn grains(&self) -> u64 {
        self.grains
    }

    /// What a grain is. Behind the end all are absent.
    pub fn get(&self, grain: u64) -> Grain {
        Grain::of(self.word(grain / PER_WORD) >> (2 * (grain % PER_WORD)))
    }

    /// What the first grain of these is, and where those end that are the same.
    pub fn run(&self, grains: &Range<u64>) -> (Grain, u64) {
        let first = self.get(grains.start);
        let same = first.bits() * LOW;
        let mut at = grains.start;
        while at < grains.end {
            let inside = at % PER_WORD;
            let unlike = both_or_one(self.word(at / PER_WORD) ^ same) >> (2 * inside);
            let count = match unlike {
                0 => PER_WORD - inside,
                _ => u64::from(unlike.trailing_zeros() / 2),
            };
            at += count;
            if unlike != 0 {
                break;
            }
        }
        (first, at.min(grains.end))
    }

    /// All of these are so from now on, whatever they were. Returns the blocks of the tables that have to say so.
    pub fn set(&self, grains: Range<u64>, state: Grain) -> Range<u64> {
        let end = grains.end.min(self.grains);
        let mut at = grains.start.min(end);
        let blocks = at / GRAINS_PER_BLOCK..end.div_ceil(GRAINS_PER_BLOCK);
        // Before the states: whoever comes after a kill writes a block too many, and none too few.
        blocks.clone().for_each(|block| self.mark(block));
        while at < end {
            let (index, inside) = (at / PER_WORD, at % PER_WORD);
            let count = (PER_WORD - inside).min(end - at);
            let mask = (u64::MAX >> (64 - 2 * count)) << (2 * inside);
            if let Some(word) = self.words.as_ref().get(index as usize) {
                let kept = word.load(Ordering::Relaxed) & !mask;
                word.store(kept | ((state.bits() * LOW) & mask), Ordering::Release);
            }
            at += count;
        }
        blocks
    }

    /// The states of a block of the tables, as they are now.
    pub fn block(&self, block: u64) -> Words {
        let first = block * WORDS_PER_BLOCK as u64;
        std::array::from_fn(|at| self.word(first + at as u64))
    }

    /// Takes over what a block of the tables says.
    pub fn load(&self, block: u64, words: &Words) {
        let first = block as usize * WORDS_PER_BLOCK;
        for (word, said) in self.words.as_ref().iter().skip(first).zip(words) {
            word.store(*said, Ordering::Release);
        }
    }

    /// Blocks of the tables that may not say what is so, all of them.
    pub fn marked(&self) -> Vec<u64> {
        self.marked_from(0, usize::MAX)
    }

    /// The first ones of them from this one on, so many at most.
    pub fn marked_from(&self, start: u64, most: usize) -> Vec<u64> {
        let first = self.blocks * WORDS_PER_BLOCK as u64;
        let words = self.blocks.div_ceil(64);
        let mut marked = Vec::new();
        let mut skipped = u64::MAX << (start % 64);
        for at in start / 64..words {
            let mut bits = self.load_word(first + at) & skipped;
            skipped = u64::MAX;
            while bits != 0 {
                let block = at * 64 + u64::from(bits.trailing_zeros());
                // Behind the last one a damaged map may say anything.
                if marked.len() == most || block >= self.blocks {
                    return marked;
                }
                marked.push(block);
                bits &= bits - 1;
            }
        }
        marked
    }

    /// What the tables say counts as durable no more: all blocks that say anything are to be written again.
    pub fn doubt(&self) {
        let says = |block: &u64| self.block(*block).iter().any(|word| *word != 0);
        let blocks = (0..self.blocks).filter(says);
        blocks.for_each(|block| self.mark(block));
    }

    fn mark(&self, block: u64) {
        self.change_mark(block, |bits, bit| bits | bit);
    }

    /// This block of the tables says, durably, what is so.
    pub fn unmark(&self, block: u64) {
        self.change_mark(block, |bits, bit| bits & !bit);
    }

    fn change_mark(&self, block: u64, change: impl Fn(u64, u64) -> u64) {
        let at = self.blocks as usize * WORDS_PER_BLOCK + (block / 64) as usize;
        if let Some(word) = self.words.as_ref().get(at).filter(|_| block < self.blocks) {
            let bits = word.load(Ordering::Relaxed);
            word.store(change(bits, 1 << (block % 64)), Ordering::Release);
        }
    }

    fn word(&self, index: u64) -> u64 {
        match index < self.blocks * WORDS_PER_BLOCK as u64 {
            true => self.load_word(index),
            false => 0,
        }
    }

    fn load_word(&self, index: u64) -> u64 {
        let word = self.words.as_ref().get(index as usize);
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }
}

/// How many words the states of a delta need, with the marks of its tables' blocks.
pub fn words_for(layout: &Layout) -> u64 {
    layout.blocks() * WORDS_PER_BLOCK as u64 + layout.blocks().div_ceil(64)
}

/// A bit for each grain that has both.
fn both(word: u64) -> u64 {
    word & (word >> 1) & LOW
}

/// A bit for each grain that has any.
fn both_or_one(word: u64) -> u64 {
    (word | word >> 1) & LOW
}
