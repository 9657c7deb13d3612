//! What dirty block tracking decides: which block of a disk is copied next while its guest works with it, and when both sides are equal.
//!
//! The disk is copied once; what the guest writes meanwhile goes to the source alone, and its blocks are marked ("The Design and Evolution
//! of Live Storage Migration in VMware ESX", section 2.3). What is marked is copied in a next iteration, and so on; at the end the guest's
//! requests are held, and what is still marked is copied. When that is worth it [`Convergence`] says. A laboratory method beside IO mirroring
//! (`godwit_mirror`), which needs no end like that.
//!
//! Pure: no IO and no clock. Whoever drives it tells of writes and of copies, and asks what to copy next.
//!
//! Who owns the state: the value; a write is known by the number that its driver gave it. Refuses: writes outside of the disk, and ends of
//! what was never begun, which change nothing.
//!
//! What holds at each moment:
//! 1. A block is clean only if what was read of it last was read after every write of it had ended. A write marks its blocks when it
//!    **ends**: of one that is under way nobody knows what of it is on the disk, so that what is read meanwhile does not count.
//!    To mark it when it begins, too, would copy it once more for nothing.
//! 2. A block's mark is taken away **before** the block is read: a write that ends after that marks it anew.
//! 3. A block is read for one copy at a time: an iteration begins once all copies of the one before have ended. So what is given to the
//!    destination later was read later.
//! 4. Both sides are equal where nothing is marked, nothing is to be read, no copy is under way and no write is.

#![forbid(unsafe_code)]

#[macro_use]
mod plant;
mod bitmap;
mod convergence;
mod heat;

pub use bitmap::Bitmap;
pub use convergence::{
    Convergence, DOWNTIME_MAX_S, Decision, Iteration, LAST_COPY_MAX_S, Why, last_copy_limit_s,
};
pub use heat::Heat;
#[cfg(feature = "planted-faults")]
pub use plant::Plant;

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a block, which has one bit. A guest's write is a few KiB to some hundred; a block of 4 KiB would take 16 times the memory, and
/// one of 256 KiB, which is read at once, would have a write of 4 KiB copied with 63 times as much that nobody wrote.
pub const BLOCK: u64 = 64 << 10;
/// Most bytes that one copy has: neighbouring blocks are read together, as many as the mirror reads at once.
pub const COPY_MAX: u64 = 256 << 10;

/// The number of a write.
pub type WriteId = u64;

/// What may be left away, to see what it is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// What an iteration has still to read is not marked: it will be read as it is then.
    pub incremental: bool,
    /// What is written again and again is left out until the last iteration but one.
    pub hot_blocks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            incremental: true,
            hot_blocks: true,
        }
    }
}

/// Blocks that are read at the source and given to the destination, in bytes of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    pub range: Range<u64>,
    /// Tells this copy from others.
    pub number: u64,
}

/// What an iteration came to, in bytes of blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ended {
    /// 1 is the first pass.
    pub number: u32,
    pub copied: u64,
    /// What is marked now,
    pub dirty: u64,
    /// what of it is hot,
    pub hot: u64,
    /// and what this iteration left out for being hot.
    pub deferred: u64,
}

/// The tracking of one disk.
#[derive(Debug)]
pub struct Tracking {
    bytes: u64,
    block: u64,
    options: Options,
    /// Written since they were read, or never read.
    dirty: Bitmap,
    /// What this iteration has still to read,
    due: Bitmap,
    /// none of it before this block.
    next: u64,
    heat: Option<Heat>,
    /// The iteration: 0 before the first pass.
    number: u32,
    /// Whether it has ended, and that was told.
    has_ended: bool,
    /// Blocks that it has read,
    copied: u64,
    /// and those that it left out.
    deferred: u64,
    /// Being read, by their numbers.
    copies: BTreeMap<u64, Range<u64>>,
    last_copy: u64,
    writes: BTreeMap<WriteId, Range<u64>>,
    #[cfg(feature = "planted-faults")]
    plant: Option<Plant>,
}

impl Tracking {
    /// Of a disk of so many bytes, in blocks of `block` bytes ([`BLOCK`]). From now on every write is to be told of.
    pub fn new(bytes: u64, block: u64, options: Options) -> Self {
        let block = block.max(1);
        let blocks = bytes.div_ceil(block);
        Self {
            bytes,
            block,
            options,
            dirty: Bitmap::new(blocks),
            due: Bitmap::new(blocks),
            next: 0,
            heat: options.hot_blocks.then(|| Heat::new(blocks)),
            number: 0,
            has_ended: false,
            copied: 0,
            deferred: 0,
            copies: BTreeMap::new(),
            last_copy: 0,
            writes: BTreeMap::new(),
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }

    /// The same with a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, plant: Plant) {
        self.plant = Some(plant);
    }

    /// Bytes of memory that bits and counters take.
    pub fn memory(&self) -> u64 {
        let heat = self.heat.as_ref().map_or(0, Heat::memory);
        self.dirty.memory() + self.due.memory() + heat
    }

    /// The first pass begins, once: returns whether it does. These bytes are zero on both sides, but for what was written since the
    /// tracking began.
    pub fn begin(&mut self, zero: &[Range<u64>]) -> bool {
        if self.number > 0 {
            return false;
        }
        self.number = 1;
        for block in 0..self.blocks() {
            self.due.set(block);
        }
        for range in zero {
            let end = match range.end >= self.bytes {
                true => self.blocks(),
                false => range.end / self.block,
            };
            for block in range.start.div_ceil(self.block)..end {
                self.due.clear(block);
                if planted!(self, HoleWritesForgotten) {
                    self.dirty.clear(block);
                }
            }
        }
        true
    }

    /// The guest writes, or has something erased. A number that is in use, an empty range or one outside of the disk changes nothing, and
    /// must not be carried out.
    pub fn write(&mut self, id: WriteId, range: Range<u64>) {
        let is_known = self.writes.contains_key(&id);
        if is_known || range.start >= range.end || range.end > self.bytes {
            return;
        }
        if planted!(self, NotMarkedAtEnd) {
            self.mark(&range);
        }
        self.writes.insert(id, range);
    }

    /// A write has ended, done or not: one that failed may have left anything there.
    pub fn written(&mut self, id: WriteId, done: bool) {
        let Some(range) = self.writes.remove(&id) else {
            return;
        };
        if planted!(self, NotMarkedAtEnd) {
            return;
        }
        if !done && planted!(self, FailureForgotten) {
            return;
        }
        if self.number == 1
            && let Some(heat) = &mut self.heat
        {
            blocks_of(&range, self.block).for_each(|block| heat.count(block));
        }
        self.mark(&range);
    }

    /// What the destination was given of these bytes may not have come.
    pub fn lost(&mut self, range: &Range<u64>) {
        if !planted!(self, LossForgotten) {
            let range = range.start..range.end.min(self.bytes);
            self.mark(&range);
        }
    }

    /// These bytes are to be copied.
    fn mark(&mut self, range: &Range<u64>) {
        for block in blocks_of(range, self.block) {
            let is_ahead = self.due.has(block)
                || planted!(self, ReadCountsAsAhead) && self.is_being_read(block);
            // What is still to be read is read as it is then.
            if !(self.options.incremental && is_ahead) {
                self.dirty.set(block);
            }
            if planted!(self, FirstBlockAlone) {
                return;
            }
        }
    }

    #[cfg(feature = "planted-faults")]
    fn is_being_read(&self, block: u64) -> bool {
        let at = block * self.block;
        self.copies.values().any(|range| range.contains(&at))
    }

    #[cfg(not(feature = "planted-faults"))]
    fn is_being_read(&self, _block: u64) -> bool {
        false
    }

    /// What is to be read now, from the lowest block on; nothing where this iteration has nothing left to be read.
    pub fn next_copy(&mut self) -> Option<Copy> {
        let first = self.due.next_from(self.next)?;
        let most = (COPY_MAX / self.block).max(1);
        let mut end = first;
        while end - first < most && self.due.clear(end) {
            // From here on a write that ends marks it.
            if self.options.incremental && !planted!(self, ClearedAfterCopy) {
                self.dirty.clear(end);
            }
            end += 1;
        }
        self.next = end;
        self.copied += end - first;
        self.last_copy += 1;
        let range = first * self.block..(end * self.block).min(self.bytes);
        let number = self.last_copy;
        self.copies.insert(number, range.clone());
        Some(Copy { range, number })
    }

    /// It was given to the destination.
    pub fn copied(&mut self, number: u64) {
        let Some(range) = self.copies.remove(&number) else {
            return;
        };
        if planted!(self, ClearedAfterCopy) {
            for block in blocks_of(&range, self.block) {
                self.dirty.clear(block);
            }
        }
    }

    /// What the iteration came to, once it has nothing left to be copied; to whoever asks first.
    pub fn ended(&mut self) -> Option<Ended> {
        let is_over =
            self.due.count() == 0 && (self.copies.is_empty() || planted!(self, NoBarrier));
        if self.number == 0 || self.has_ended || !is_over {
            return None;
        }
        self.has_ended = true;
        let copied = self.bytes_of(self.copied);
        if self.number == 1
            && let Some(heat) = &mut self.heat
        {
            heat.settle(copied, self.block * self.dirty.count());
        }
        Some(Ended {
            number: self.number,
            copied,
            dirty: self.dirty_bytes(),
            hot: self.bytes_of(self.hot_count()),
            deferred: self.bytes_of(self.deferred),
        })
    }

    /// Blocks that are marked and hot.
    fn hot_count(&self) -> u64 {
        match &self.heat {
            Some(heat) if heat.threshold().is_some() => dirty_blocks(&self.dirty)
                .filter(|block| heat.is_hot(*block))
                .count() as u64,
            _ => 0,
        }
    }

    /// The next iteration: gets all marks and takes them away. What is hot keeps its mark and is left out, unless it is to be copied,
    /// too. Returns false, and does nothing, before the one under way has ended.
    pub fn iterate(&mut self, with_hot: bool) -> bool {
        if !self.has_ended {
            return false;
        }
        // What was to be read was read, so that no bit of that is left.
        std::mem::swap(&mut self.due, &mut self.dirty);
        (self.next, self.copied, self.deferred) = (0, 0, 0);
        self.number = self.number.saturating_add(1);
        self.has_ended = false;
        let heat = self.heat.as_ref().filter(|_| !with_hot);
        if let Some(heat) = heat.filter(|heat| heat.threshold().is_some()) {
            let hot: Vec<u64> = dirty_blocks(&self.due)
                .filter(|block| heat.is_hot(*block))
                .collect();
            for block in &hot {
                self.due.clear(*block);
                if !planted!(self, HotForgotten) {
                    self.dirty.set(*block);
                }
            }
            self.deferred = hot.len() as u64;
        }
        true
    }

    /// Whether both sides are the same, once all that was given is carried out.
    pub fn is_equal(&self) -> bool {
        let is_copied = self.copies.is_empty() || planted!(self, EqualBesideCopy);
        let is_written = self.writes.is_empty() || planted!(self, EqualBesideWrite);
        self.number > 0
            && is_copied
            && is_written
            && self.due.count() == 0
            && self.dirty.count() == 0
    }

    /// Bytes of blocks that are marked.
    pub fn dirty_bytes(&self) -> u64 {
        self.bytes_of(self.dirty.count())
    }

    /// Bytes that are to be copied before both sides are equal, if nothing more is written.
    pub fn left_bytes(&self) -> u64 {
        if self.number == 0 {
            return self.bytes;
        }
        let copies = self.copies.values().map(|range| range.end - range.start);
        let blocks = self.bytes_of(self.due.count() + self.dirty.count());
        (blocks + copies.sum::<u64>()).min(self.bytes)
    }

    fn bytes_of(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.block).min(self.bytes)
    }

    fn blocks(&self) -> u64 {
        self.bytes.div_ceil(self.block)
    }
}

fn dirty_blocks(bitmap: &Bitmap) -> impl Iterator<Item = u64> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let found = bitmap.next_from(at)?;
        at = found + 1;
        Some(found)
    })
}

/// Those that a range of the disk touches.
fn blocks_of(range: &Range<u64>, block: u64) -> Range<u64> {
    range.start / block..range.end.div_ceil(block)
}
