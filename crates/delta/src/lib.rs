//! Delta disks: what was written to a disk since, over a parent that stays as it was.
//!
//! They are what snapshots and linked clones are made of. A delta is kept as a VMDK of the kind seSparse, which QEMU reads: a text
//! ([`descriptor`]) beside an extent file ([`Layout`], [`header`], [`table`]) with grains of 4 KiB. Of all that the format can say we say
//! one thing: a grain lies at its own place. So there is no allocator and no list of what is free that a crash could make wrong.
//! [`Overlay`] decides about requests, and its rounds about what is durable when.
//!
//! Pure: no IO and no clock. Who owns the state: the values; the words below [`States`] may be shared with a later process.
//!
//! What it refuses: extents that anybody else has written or that are damaged, texts without bounds, and to open anything because a
//! file says so.

#![forbid(unsafe_code)]

#[macro_use]
mod plant;
pub mod descriptor;
pub mod header;
mod layout;
mod moves;
mod overlay;
mod rounds;
pub mod states;
pub mod table;

pub use descriptor::{Descriptor, Kind, Parent};
pub use header::{Label, Use};
pub use layout::{BLOCK, BYTES_MAX, GRAIN, GRAINS_PER_BLOCK, LABEL_AT, Layout, SECTOR};
pub use moves::{MOVE_MAX, Move, moves};
pub use overlay::{Change, Filled, Overlay, Piece, RequestId, Source, Step};
#[cfg(feature = "planted-faults")]
pub use plant::Plant;
pub use states::{Grain, States, words_for};

/// Sixteen bytes that tell a delta, or a boot of a host, from all others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// As it stands in a description of images, in hexadecimal digits.
    pub fn of_digits(text: &str) -> Option<Self> {
        let number = u128::from_str_radix(text, 16).ok()?;
        Some(Self(number.to_be_bytes()))
    }

    /// The same of a delta that is described as one. Why it is refused is a part of a sentence.
    pub fn of_delta(digits: &str) -> Result<Self, &'static str> {
        Self::of_digits(digits).ok_or("a delta has an id that is no number")
    }

    /// The number by which descriptors know a disk's content: never one that means something else.
    pub fn cid(&self) -> u32 {
        let [a, b, c, d, ..] = self.0;
        u32::from_le_bytes([a, b, c, d]).clamp(1, u32::MAX - 2)
    }
}

/// Why a delta is refused, as what follows its name in a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(String);

impl Refused {
    pub(crate) fn of(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}
