//! Grain tables, a block at a time, and the directory of the tables.
//!
//! An entry says that its grain is absent, zero, or present at its own place. The format could say any place; we say and take no
//! other.
//!
//! Who owns the state: none here. Refuses: every other entry, and a directory that does not name each table in turn.

use crate::Refused;
use crate::layout::{BLOCK, GRAINS_PER_BLOCK, Layout};
use crate::states::{Grain, Words};

const ZERO: u64 = 2 << 60;
const PRESENT: u64 = 3 << 60;
const TABLE: u64 = 1 << 60;
const FOREIGN: &str =
    "a grain of it lies where Godwit puts none: it was written by something else, or is damaged";

/// What the tables say of a grain that is so.
fn entry(grain: u64, state: Grain) -> u64 {
    match state {
        Grain::Absent => 0,
        Grain::Zero => ZERO,
        // Twelve bits of the number stand above the other 48.
        Grain::Present => PRESENT | (grain & 0xfff) << 48 | grain >> 12,
    }
}

/// The block of this number, as these words of [`States`](crate::States) have it.
pub fn encode(block: u64, words: &Words) -> Vec<u8> {
    let first = block * GRAINS_PER_BLOCK;
    let states = words
        .iter()
        .flat_map(|word| (0..32).map(move |at| Grain::of(word >> (2 * at))));
    let entries = (first..).zip(states);
    let mut bytes = Vec::with_capacity(BLOCK as usize);
    for (grain, state) in entries {
        bytes.extend(entry(grain, state).to_le_bytes());
    }
    bytes
}

/// Reads a block: words for [`States`](crate::States). Behind the disk's last grain everything is absent.
pub fn decode(layout: &Layout, block: u64, bytes: &[u8]) -> Result<Words, Refused> {
    let first = block.saturating_mul(GRAINS_PER_BLOCK);
    let (entries, rest) = bytes.as_chunks::<8>();
    if entries.len() as u64 != GRAINS_PER_BLOCK || !rest.is_empty() {
        return Err(Refused::of("a table of it is cut short"));
    }
    let mut words = Words::default();
    for (word, entries) in words
        .iter_mut()
        .zip(entries.chunks(32))
        .enumerate()
        .map(|(at, (word, entries))| ((at, word), entries))
    {
        let (at, word) = word;
        for (bit, bytes) in entries.iter().enumerate() {
            let grain = first + (at * 32 + bit) as u64;
            let said = u64::from_le_bytes(*bytes);
            let state = match said {
                0 => continue,
                ZERO => Grain::Zero,
                _ if said == entry(grain, Grain::Present) => Grain::Present,
                _ => return Err(Refused::of(FOREIGN)),
            };
            if grain >= layout.grains() {
                return Err(Refused::of("it has grains behind the end of its disk"));
            }
            *word |= state.bits() << (2 * bit);
        }
    }
    Ok(words)
}

/// The grain directory: each table is in its place from the beginning.
pub fn directory(layout: &Layout) -> Vec<u8> {
    let tables = (0..layout.table_count()).map(|table| TABLE | table);
    let mut bytes: Vec<u8> = tables.flat_map(u64::to_le_bytes).collect();
    let range = layout.directory();
    bytes.resize((range.end - range.start) as usize, 0);
    bytes
}

/// Whether this is that directory.
pub fn check_directory(layout: &Layout, bytes: &[u8]) -> Result<(), Refused> {
    match bytes == directory(layout) {
        true => Ok(()),
        false => Err(Refused::of(
            "its directory is not as Godwit writes it: it was written by something else, or is damaged",
        )),
    }
}
