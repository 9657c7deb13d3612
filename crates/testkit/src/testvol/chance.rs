//! Decides what a power cut leaves of each file and each directory, so that a test's seed repeats it.
//!
//! Owns a generator of its own. Refuses nothing.

/// What of the unsynced survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survives {
    /// Nothing: the strictest disk.
    Nothing,
    /// Everything: a disk that was lucky.
    Everything,
    /// What chance lets, always the same for the same seed: of the names a first part of the changes or any of them, of
    /// each file nothing, all, or any of the pages written.
    Some(u64),
}

/// Decides, one after the other, what survives.
#[derive(Debug)]
pub enum Chance {
    Nothing,
    Everything,
    Some(Random),
}

/// A small generator (splitmix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

impl From<Survives> for Chance {
    fn from(survives: Survives) -> Self {
        match survives {
            Survives::Nothing => Self::Nothing,
            Survives::Everything => Self::Everything,
            Survives::Some(seed) => Self::Some(Random(seed)),
        }
    }
}

impl Chance {
    pub fn keeps(&mut self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::Some(random) => random.below(2) == 1,
        }
    }

    /// One of two sizes, or one between them.
    pub fn between(&mut self, lost: u64, kept: u64) -> u64 {
        match self {
            Self::Nothing => lost,
            Self::Everything => kept,
            Self::Some(random) => match random.below(3) {
                0 => lost,
                1 => kept,
                _ => lost.min(kept) + random.below(lost.abs_diff(kept) + 1),
            },
        }
    }

    /// Which of so many changes, oldest first, survive.
    pub fn changes(&mut self, count: usize) -> Vec<bool> {
        let first = match self {
            Self::Some(random) => (random.below(2) == 0).then(|| random.below(count as u64 + 1)),
            Self::Nothing | Self::Everything => None,
        };
        let mut survives = |index| first.map_or_else(|| self.keeps(), |first| index < first);
        (0..count as u64).map(&mut survives).collect()
    }

    /// What happens to one file.
    pub fn for_file(&mut self) -> Self {
        match self {
            Self::Nothing => Self::Nothing,
            Self::Everything => Self::Everything,
            Self::Some(random) => match random.below(3) {
                0 => Self::Nothing,
                1 => Self::Everything,
                _ => Self::Some(Random(random.next())),
            },
        }
    }
}
