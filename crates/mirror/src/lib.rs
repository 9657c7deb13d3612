//! What IO mirroring decides: which write of a guest goes where, and which part of its disk is copied when.
//!
//! One pass over the disk copies it, region by region, while its guest works with it ("The Design and Evolution of Live
//! Storage Migration in VMware ESX", section 2.4). A write goes to both sides where it touches what was copied, waits where it
//! touches what is being read, and goes to the source alone otherwise. The paper keeps two offsets, since all below the first
//! one is copied; here each region has a state of its own, so that one can be copied again: after a write that failed at the
//! source, and for what was under way when the destination fell silent.
//!
//! Pure: no IO and no clock. Events come in, [`Step`]s go out, and whoever drives it carries these out and tells their ends.
//!
//! Who owns the state: the value; a write is known by the number that its driver gave it. Refuses: writes outside of the disk,
//! and ends of what was never begun, which change nothing.
//!
//! What holds at each moment:
//! 1. A region is read only once every write that touches it and was begun before has ended on both sides, and no write that
//!    touches it begins before it is copied. So what lands on the destination last is what the source has.
//! 2. Of two writes to both sides that overlap the second one begins once the first one has ended: both sides see one order.
//! 3. A guest hears of a write to both sides once both have ended it. What goes wrong at the destination is no failure of a
//!    write: the guest hears what became of it at the source.
//!
//! When a write or a copy has ended at the destination is its driver's to say. A second image of the same host has to have it;
//! so has one over a near link. A far one, which gets numbered changes and lets the later number win ([`Newest`]), has ended what was given
//! a number.

#![forbid(unsafe_code)]

#[macro_use]
mod plant;
mod flushes;
mod newest;

pub use flushes::{Destination, Flushes, Kind, Route};
pub use newest::Newest;
#[cfg(feature = "planted-faults")]
pub use plant::Plant;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Most regions that are copied at once.
pub const COPIES_MAX: usize = 16;

/// The number of a write.
pub type WriteId = u64;

/// One of the two that have the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Source,
    Destination,
}

/// A region that is read at the source and written at the destination, in bytes of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    pub range: Range<u64>,
    /// Tells this copy of the region from earlier ones, whose ends may come late.
    pub number: u64,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Carry the write out at the source.
    Source(WriteId),
    /// Carry it out at both sides, with bytes that were read from the guest once.
    Both(WriteId),
    /// Copy these bytes.
    Copy(Copy),
    /// Tell the guest that its write was done, or that it failed at the source.
    Answer { write: WriteId, done: bool },
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The destination takes nothing for now: writes go to the source alone, and their regions are copied later.
    Detached,
    Copying,
    /// Both sides are equal but for writes that are under way.
    Synchronised,
    /// Given up: everything goes to the source alone.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Region {
    /// Not copied, nor written since the mirroring began.
    Untouched,
    /// The two sides may be unlike there, and somebody has written since the mirroring began.
    Uncopied,
    /// Locked; writes that were begun before it was are awaited.
    Draining,
    Copying,
    Copied,
}

#[derive(Debug, Clone)]
struct Write {
    range: Range<u64>,
    /// Where it has not ended yet.
    source: bool,
    destination: bool,
    /// Whether it is one to both sides.
    mirrored: bool,
    /// Whether the source had it.
    done: bool,
}

/// The mirror of one disk.
#[derive(Debug)]
pub struct Mirror {
    bytes: u64,
    region_bytes: u64,
    is_attached: bool,
    /// Regions that may be copied at once for now.
    allowed: usize,
    has_ended: bool,
    regions: Vec<Region>,
    /// Those that are not copied.
    left: u64,
    /// No region before this one is to be copied.
    next: u64,
    /// Those that are draining or being copied, by index,
    busy: Vec<u64>,
    /// and under which number each of them is copied.
    numbers: BTreeMap<u64, u64>,
    copies: u64,
    /// Begun and not ended.
    writes: BTreeMap<WriteId, Write>,
    /// Writes that have not begun, oldest first.
    held: VecDeque<(WriteId, Range<u64>)>,
    steps: Vec<Step>,
    #[cfg(feature = "planted-faults")]
    plant: Option<Plant>,
    /// Writes that had to wait,
    #[cfg(feature = "planted-faults")]
    queued: Vec<WriteId>,
    /// and those that write zeroes, which are all the same to it otherwise.
    #[cfg(feature = "planted-faults")]
    zeroes: Vec<WriteId>,
}

impl Mirror {
    /// Of a disk of so many bytes, copied in regions of `region_bytes`. It is detached at first.
    pub fn new(bytes: u64, region_bytes: u64) -> Self {
        let region_bytes = region_bytes.max(1);
        let left = bytes.div_ceil(region_bytes);
        Self {
            bytes,
            region_bytes,
            is_attached: false,
            allowed: COPIES_MAX,
            has_ended: false,
            regions: vec![Region::Untouched; usize::try_from(left).unwrap_or(usize::MAX)],
            left,
            next: 0,
            busy: Vec::new(),
            numbers: BTreeMap::new(),
            copies: 0,
            writes: BTreeMap::new(),
            held: VecDeque::new(),
            steps: Vec::new(),
            #[cfg(feature = "planted-faults")]
            plant: None,
            #[cfg(feature = "planted-faults")]
            queued: Vec::new(),
            #[cfg(feature = "planted-faults")]
            zeroes: Vec::new(),
        }
    }

    /// The same with a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, plant: Plant) {
        self.plant = Some(plant);
    }

    /// The write of this number, which is to come, writes zeroes: for a fault that is one of these alone.
    #[cfg(feature = "planted-faults")]
    pub fn writes_zeroes(&mut self, id: WriteId) {
        self.zeroes.push(id);
    }

    /// How far it is.
    pub fn phase(&self) -> Phase {
        match (self.has_ended, self.is_attached, self.left) {
            (true, _, _) => Phase::Ended,
            (_, false, _) => Phase::Detached,
            (_, _, 0) => Phase::Synchronised,
            _ => Phase::Copying,
        }
    }

    /// Bytes that are still to be copied.
    pub fn left_bytes(&self) -> u64 {
        self.left.saturating_mul(self.region_bytes).min(self.bytes)
    }

    /// How many writes have not begun, since what they touch is being copied.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// These bytes are zero on both sides: what was not written since the mirroring began need not be copied.
    pub fn skip(&mut self, range: &Range<u64>) {
        let first = range.start.div_ceil(self.region_bytes);
        let end = match range.end >= self.bytes {
            true => self.regions.len() as u64,
            false => range.end / self.region_bytes,
        };
        for index in first..end {
            if self.region(index) == Some(Region::Untouched) {
                self.set(index, Region::Copied);
            }
        }
    }

    /// The destination takes changes.
    pub fn attach(&mut self) -> Vec<Step> {
        self.is_attached = true;
        self.advance()
    }

    /// So many regions may be copied at once for now, and [`COPIES_MAX`] at most. Nothing is locked that could not be given to
    /// the destination.
    pub fn allow(&mut self, copies: usize) -> Vec<Step> {
        self.allowed = copies.min(COPIES_MAX);
        self.advance()
    }

    /// The destination takes nothing for now: nobody waits for it.
    pub fn detach(&mut self) -> Vec<Step> {
        self.is_attached = false;
        self.unlock();
        self.advance()
    }

    /// What the destination was given of these bytes may not have come: they are copied again.
    pub fn lost(&mut self, range: &Range<u64>) -> Vec<Step> {
        if !planted!(self, SilenceForgotten) {
            for index in self.regions_of(range) {
                if self.region(index) == Some(Region::Copied) {
                    self.set(index, Region::Uncopied);
                }
            }
        }
        self.advance()
    }

    /// The guest writes. A number that is in use, an empty range or one outside of the disk is answered as failed.
    pub fn write(&mut self, id: WriteId, range: Range<u64>) -> Vec<Step> {
        let known = self.writes.contains_key(&id) || self.held.iter().any(|(held, _)| *held == id);
        if known || range.start >= range.end || range.end > self.bytes {
            return vec![Step::Answer {
                write: id,
                done: false,
            }];
        }
        self.held.push_back((id, range));
        self.advance()
    }

    /// A write has ended at one side. Whether it was done counts for the source.
    pub fn written(&mut self, id: WriteId, side: Side, done: bool) -> Vec<Step> {
        let Some(write) = self.writes.get_mut(&id) else {
            return Vec::new();
        };
        match side {
            Side::Source if write.source => (write.source, write.done) = (false, done),
            Side::Destination if write.destination => write.destination = false,
            _ => return Vec::new(),
        }
        self.settle(id);
        self.advance()
    }

    /// Whether this copy is still wanted: what was read for one that is not must not go to the destination.
    pub fn wants(&self, copy: &Copy) -> bool {
        let index = copy.range.start / self.region_bytes;
        let is_this = self.numbers.get(&index) == Some(&copy.number);
        is_this || planted!(self, OldCopyCounts)
    }

    /// A region was copied.
    pub fn copied(&mut self, copy: &Copy) -> Vec<Step> {
        if self.wants(copy) {
            self.set(copy.range.start / self.region_bytes, Region::Copied);
        }
        self.advance()
    }

    /// A region was read, and cannot be given to the destination now: it is copied later.
    pub fn put_back(&mut self, copy: &Copy) -> Vec<Step> {
        if self.wants(copy) {
            self.set(copy.range.start / self.region_bytes, Region::Uncopied);
        }
        self.advance()
    }

    /// Gives it up: the destination is of no use any more. Everything that waits goes to the source.
    pub fn give_up(&mut self) -> Vec<Step> {
        self.has_ended = true;
        self.unlock();
        // What is under way at the destination is awaited by nobody.
        let ids: Vec<WriteId> = self.writes.keys().copied().collect();
        for id in ids {
            if let Some(write) = self.writes.get_mut(&id) {
                write.destination = false;
            }
            self.settle(id);
        }
        self.advance()
    }

    /// Nothing is read any more, so that nothing has to wait for it.
    fn unlock(&mut self) {
        for index in std::mem::take(&mut self.busy) {
            self.set(index, Region::Uncopied);
        }
    }

    /// Answers a write that has ended everywhere. One that failed at the source may have left anything there.
    fn settle(&mut self, id: WriteId) {
        let early = planted!(self, AnsweredEarly);
        let has_ended = |write: &Write| !write.source && (early || !write.destination);
        let ended = self.writes.get(&id).is_some_and(has_ended);
        let Some(write) = ended.then(|| self.writes.remove(&id)).flatten() else {
            return;
        };
        self.steps.push(Step::Answer {
            write: id,
            done: write.done,
        });
        if write.mirrored && !write.done && !planted!(self, FailureForgotten) {
            self.touch(&write.range);
        }
    }

    /// Both sides may be unlike there.
    fn touch(&mut self, range: &Range<u64>) {
        for index in self.regions_of(range) {
            if matches!(self.region(index), Some(Region::Untouched | Region::Copied)) {
                self.set(index, Region::Uncopied);
            }
        }
    }

    /// Does all that can be done now: lets held writes go, reads regions that are drained, locks new ones.
    fn advance(&mut self) -> Vec<Step> {
        self.release();
        if self.is_attached && !self.has_ended {
            self.lock_more();
            self.begin_copies();
        }
        std::mem::take(&mut self.steps)
    }

    /// Lets go, oldest first, whatever nothing stands against; an older one that waits keeps younger ones that overlap it.
    fn release(&mut self) {
        let mut waiting: VecDeque<(WriteId, Range<u64>)> = VecDeque::new();
        while let Some((id, range)) = self.held.pop_front() {
            let behind = waiting.iter().any(|(_, older)| overlap(older, &range))
                || self.meets_a_mirrored_one(&range);
            let behind = behind && !planted!(self, OverlapReordered);
            let locked = self.is_locked(&range) && !planted!(self, NotHeld);
            #[cfg(feature = "planted-faults")]
            let locked = locked && !(planted!(self, ZeroesNotHeld) && self.zeroes.contains(&id));
            if behind || locked {
                #[cfg(feature = "planted-faults")]
                self.queued.push(id);
                waiting.push_back((id, range));
                continue;
            }
            self.begin(id, range);
        }
        self.held = waiting;
    }

    fn begin(&mut self, id: WriteId, range: Range<u64>) {
        let states = || self.regions_of(&range).map(|index| self.region(index));
        let touches_copied = states().any(|state| state == Some(Region::Copied));
        let mut mirrored = self.is_attached && !self.has_ended && touches_copied;
        if planted!(self, StraddlingToTheSourceAlone)
            && states().any(|state| state != Some(Region::Copied))
        {
            mirrored = false;
        }
        #[cfg(feature = "planted-faults")]
        let is_forgotten = planted!(self, QueuedToTheSourceAlone) && self.queued.contains(&id);
        #[cfg(not(feature = "planted-faults"))]
        let is_forgotten = false;
        mirrored &= !is_forgotten;
        self.steps.push(match mirrored {
            true => Step::Both(id),
            false => Step::Source(id),
        });
        // Regions that are copied stay so under a write to both sides.
        let is_news = !mirrored && !is_forgotten && !planted!(self, StraddlingToTheSourceAlone);
        if is_news && !planted!(self, SilenceForgotten) {
            self.touch(&range);
        }
        let write = Write {
            range,
            source: true,
            destination: mirrored,
            mirrored,
            done: false,
        };
        self.writes.insert(id, write);
    }

    /// Whether it touches a region that is locked.
    fn is_locked(&self, range: &Range<u64>) -> bool {
        let mut states = self.regions_of(range).map(|index| self.region(index));
        states.any(|state| matches!(state, Some(Region::Draining | Region::Copying)))
    }

    fn meets_a_mirrored_one(&self, range: &Range<u64>) -> bool {
        let mut writes = self.writes.values();
        writes.any(|write| write.mirrored && overlap(&write.range, range))
    }

    fn lock_more(&mut self) {
        let end = self.regions.len() as u64;
        while self.busy.len() < self.allowed && self.next < end {
            let index = self.next;
            // A write that waits goes first: one that touches many regions would else wait for each of them in turn.
            let range = self.range_of(index);
            if self.held.iter().any(|(_, held)| overlap(held, &range)) {
                return;
            }
            self.next += 1;
            if matches!(
                self.region(index),
                Some(Region::Untouched | Region::Uncopied)
            ) {
                self.set(index, Region::Draining);
            }
        }
    }

    fn begin_copies(&mut self) {
        for at in 0..self.busy.len() {
            let Some(index) = self.busy.get(at).copied() else {
                return;
            };
            let range = self.range_of(index);
            let mut writes = self.writes.values();
            let touched = writes.any(|write| overlap(&write.range, &range));
            let drained = !touched || planted!(self, NoDrain);
            if self.region(index) == Some(Region::Draining) && drained {
                self.copies += 1;
                let number = self.copies;
                self.set(index, Region::Copying);
                self.numbers.insert(index, number);
                self.steps.push(Step::Copy(Copy { range, number }));
            }
        }
    }

    fn region(&self, index: u64) -> Option<Region> {
        self.regions.get(usize::try_from(index).ok()?).copied()
    }

    fn set(&mut self, index: u64, state: Region) {
        let place = usize::try_from(index).ok();
        let Some(region) = place.and_then(|place| self.regions.get_mut(place)) else {
            return;
        };
        let before = std::mem::replace(region, state);
        match (before == Region::Copied, state == Region::Copied) {
            (false, true) => self.left -= 1,
            (true, false) => self.left += 1,
            _ => {}
        }
        match state {
            Region::Draining => self.busy.push(index),
            Region::Copying => {}
            _ => {
                self.numbers.remove(&index);
                self.busy.retain(|busy| *busy != index);
            }
        }
        if state == Region::Uncopied {
            self.next = self.next.min(index);
        }
    }

    /// Those that a range of the disk touches.
    fn regions_of(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.bytes).div_ceil(self.region_bytes);
        (range.start / self.region_bytes).min(end)..end
    }

    fn range_of(&self, index: u64) -> Range<u64> {
        let start = index.saturating_mul(self.region_bytes);
        start..start.saturating_add(self.region_bytes).min(self.bytes)
    }
}

/// Whether two ranges of a disk have bytes in common.
pub fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
