//! What of a frozen delta goes into the image below it, in order.
//!
//! Who owns the state: whoever goes through it. Refuses nothing.

use std::ops::Range;
use std::sync::atomic::AtomicU64;

use crate::layout::{GRAIN, Layout};
use crate::states::{Grain, States};

/// Most bytes of one move.
pub const MOVE_MAX: u64 = 1 << 20;

/// Bytes of a disk that a delta has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    Copy(Range<u64>),
    Zero(Range<u64>),
}

impl Move {
    /// Bytes of the disk, from its beginning.
    pub fn range(&self) -> &Range<u64> {
        match self {
            Self::Copy(range) | Self::Zero(range) => range,
        }
    }

    /// The same of another place.
    #[must_use]
    pub fn at(&self, range: Range<u64>) -> Self {
        match self {
            Self::Copy(_) => Self::Copy(range),
            Self::Zero(_) => Self::Zero(range),
        }
    }
}

/// All that a delta has, from the disk's beginning to its end.
pub fn moves<'a, M: AsRef<[AtomicU64]>>(
    layout: &Layout,
    states: &'a States<M>,
) -> impl Iterator<Item = Move> + use<'a, M> {
    let (bytes, grains) = (layout.disk_bytes(), states.grains());
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < grains {
            let start = at;
            let (state, end) = states.run(&(start..grains));
            if state == Grain::Absent {
                at = end;
                continue;
            }
            at = end.min(start + MOVE_MAX / GRAIN);
            let range = start * GRAIN..(at * GRAIN).min(bytes);
            return Some(match state {
                Grain::Zero => Move::Zero(range),
                _ => Move::Copy(range),
            });
        }
        None
    })
}
