//! What a delta decides about a guest's requests: which part is read from which layer, what is written so that a grain is whole, who
//! waits for whom, and when a flush is done.
//!
//! Events come in, [`Step`]s go out, and whoever drives it carries these out and tells their ends.
//!
//! Who owns the state: the value; a request is known by the number that its driver gave it. Refuses: changes outside of the disk, and
//! ends of what was never begun, which change nothing.
//!
//! What holds at each moment:
//! 1. The lower layers do not change. Writes go to the top alone.
//! 2. A grain counts as present, or zero, only once all of it was written, or erased. So a process that dies leaves each grain as it was or
//!    as it is to be, and what was answered is so.
//! 3. A change that makes grains present or zero excludes every other change of the same grains until it has ended: what it fills a grain
//!    with is never newer than what others wrote there. Changes of what is present exclude nobody.
//! 4. An entry of the tables is written only after a sync that began after its grain was whole, and none after a sync that failed.
//! 5. Of those that wait none could go: whatever ends lets go at most those that it meets, and what those let go.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::AtomicU64;

#[cfg(feature = "planted-faults")]
use crate::Plant;
use crate::layout::{GRAIN, Layout};
use crate::rounds::{Room, Rounds};
use crate::states::{Grain, States, Words};

/// The number of a request.
pub type RequestId = u64;

/// Where bytes of a disk come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Zero,
    /// 0: the base, 1: the lowest delta, and so on to the top.
    Layer(usize),
}

/// Bytes of a disk that come from one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub range: Range<u64>,
    pub from: Source,
}

/// Bytes that are written to the top at once, whole grains where those were not present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filled {
    pub range: Range<u64>,
    /// What of it is not the guest's, and comes from the layers below: at its beginning, at its end, or both.
    pub fill: Vec<Piece>,
}

/// What a guest wants to be changed, in bytes of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Write(Range<u64>),
    Zeroes(Range<u64>),
    /// What is no whole grain stays as it is.
    Discard(Range<u64>),
}

impl Change {
    fn range(&self) -> &Range<u64> {
        match self {
            Self::Write(range) | Self::Zeroes(range) | Self::Discard(range) => range,
        }
    }
}

/// What is to be done at the top.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Write the guest's bytes; [`Overlay::ended`] is told.
    Write {
        id: RequestId,
        write: Filled,
        /// Whether it has to be durable when it has ended, since no round follows for its sake.
        durable: bool,
    },
    /// Write zeros, but for what fills the grains, and punch a hole; [`Overlay::ended`] is told once all of it has ended.
    Erase {
        id: RequestId,
        zeros: Vec<Filled>,
        punch: Option<Range<u64>>,
    },
    /// Make durable what has ended; [`Overlay::synced`] is told. One at a time.
    Sync,
    /// Write these blocks of the tables; [`Overlay::tables_written`] is told.
    Tables(Vec<(u64, Words)>),
    /// Answer a request. A failure is that of what the driver told last.
    Answer { id: RequestId, done: bool },
}

/// A change that has not begun.
#[derive(Debug)]
struct Held {
    id: RequestId,
    change: Change,
    durable: bool,
}

impl Held {
    fn grains(&self) -> Range<u64> {
        grains_of(self.change.range())
    }
}

#[derive(Debug)]
struct Work {
    durable: bool,
    /// Whether it is a write to what is present alone.
    is_straight: bool,
    /// From the first one of which it changes any byte to the last.
    grains: Range<u64>,
    /// Of those, what nobody else may change meanwhile: from the first one that it makes present or zero to the last.
    locked: Range<u64>,
    /// What grains are once it has ended.
    sets: Vec<(Range<u64>, Grain)>,
}

/// The top delta of a disk, and what lies below.
#[derive(Debug)]
pub struct Overlay<M> {
    bytes: u64,
    top: States<M>,
    /// The deltas below, the next one first.
    lower: Vec<States<M>>,
    under_way: BTreeMap<RequestId, Work>,
    /// How many of them lock something.
    locking: usize,
    /// Not begun, oldest first.
    held: VecDeque<Held>,
    rounds: Rounds,
    steps: Vec<Step>,
    #[cfg(feature = "planted-faults")]
    plant: Option<Plant>,
}

impl<M: AsRef<[AtomicU64]>> Overlay<M> {
    /// Over deltas of disks that are as long as this one, from the top down to the one above the base.
    pub fn new(layout: &Layout, top: States<M>, lower: Vec<States<M>>) -> Self {
        Self {
            bytes: layout.disk_bytes(),
            rounds: Rounds::after(&top, Room::default()),
            top,
            lower,
            under_way: BTreeMap::new(),
            locking: 0,
            held: VecDeque::new(),
            steps: Vec::new(),
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }

    /// The same, but as if so many blocks of the tables were many, before anything is asked of it.
    #[must_use]
    pub fn in_room_of(mut self, blocks: usize) -> Self {
        self.rounds = Rounds::after(&self.top, Room::of(blocks));
        self
    }

    /// The same with a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, plant: Plant) {
        (self.plant, self.rounds.plant) = (Some(plant), Some(plant));
    }

    /// The number of the top among the layers.
    pub fn top(&self) -> usize {
        self.lower.len() + 1
    }

    /// Whether nothing is under way and nobody waits.
    pub fn rests(&self) -> bool {
        self.under_way.is_empty() && self.held.is_empty() && self.rounds.rest()
    }

    /// Where a range is read, if that is one place.
    pub fn read_at_once(&self, range: &Range<u64>) -> Option<Source> {
        let grains = grains_of(range);
        let (from, end) = self.source(&grains);
        (end >= grains.end).then_some(from)
    }

    /// Where the parts of a range are read, in order.
    pub fn read(&self, range: &Range<u64>) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        let grains = grains_of(range);
        let mut at = grains.start;
        while at < grains.end {
            let (from, end) = self.source(&(at..grains.end));
            let start = (at * GRAIN).max(range.start);
            let until = (end * GRAIN).min(range.end);
            at = end;
            match pieces.last_mut() {
                Some(last) if last.from == from => last.range.end = until,
                _ => pieces.push(Piece {
                    range: start..until,
                    from,
                }),
            }
        }
        pieces
    }

    /// Of the first of these grains, and up to where it is the same.
    fn source(&self, grains: &Range<u64>) -> (Source, u64) {
        let mut grains = grains.clone();
        for (above, states) in std::iter::once(&self.top).chain(&self.lower).enumerate() {
            let (state, end) = states.run(&grains);
            grains.end = end;
            match state {
                Grain::Absent => {}
                Grain::Zero => return (Source::Zero, end),
                Grain::Present => return (Source::Layer(self.top() - above), end),
            }
        }
        (Source::Layer(0), grains.end)
    }

    /// A guest's change, which is durable before it is answered if it says so. A number that is in use, an empty range or one outside of the
    /// disk is answered as failed.
    pub fn change(&mut self, id: RequestId, change: Change, durable: bool) -> Vec<Step> {
        let range = change.range();
        let known = self.under_way.contains_key(&id) || self.held.iter().any(|held| held.id == id);
        if known || range.start >= range.end || range.end > self.bytes {
            return vec![Step::Answer { id, done: false }];
        }
        let held = Held {
            id,
            change,
            durable,
        };
        let kept = match is_behind(&self.held, &held.grains()) {
            true => Some(held),
            false => self.begin_or_keep(held),
        };
        self.held.extend(kept);
        std::mem::take(&mut self.steps)
    }

    /// Storage may have lost what was answered: nothing is made durable any more, and whoever asks for that hears of it.
    pub fn lose(&mut self) {
        self.rounds.lose();
    }

    /// A guest's flush: what was answered before is durable once this is.
    pub fn flush(&mut self, id: RequestId) -> Vec<Step> {
        self.rounds.ask(id, &self.top, &mut self.steps);
        std::mem::take(&mut self.steps)
    }

    /// A write or an erasure has ended. What failed changes no grain's state.
    pub fn ended(&mut self, id: RequestId, done: bool) -> Vec<Step> {
        if let Some(work) = self.under_way.remove(&id) {
            self.locking -= usize::from(!work.locked.is_empty());
            if done || planted!(self, FailedWriteCounts) {
                self.set(&work.sets);
            }
            let by_itself = work.is_straight;
            self.finish(id, done, (work.durable, by_itself));
            self.release(work.grains);
        }
        std::mem::take(&mut self.steps)
    }

    /// A [`Step::Sync`] has ended.
    pub fn synced(&mut self, done: bool) -> Vec<Step> {
        self.rounds.synced(done, &self.top, &mut self.steps);
        std::mem::take(&mut self.steps)
    }

    /// The blocks of a [`Step::Tables`] are written.
    pub fn tables_written(&mut self, done: bool) -> Vec<Step> {
        self.rounds.written(done, &self.top, &mut self.steps);
        std::mem::take(&mut self.steps)
    }

    fn set(&mut self, sets: &[(Range<u64>, Grain)]) {
        for (grains, state) in sets {
            if planted!(self, ZeroLost) && *state == Grain::Zero {
                for grain in grains.clone() {
                    if self.top.get(grain) != Grain::Absent {
                        self.top.set(grain..grain + 1, *state);
                    }
                }
                continue;
            }
            let blocks = self.top.set(grains.clone(), *state);
            self.rounds.changed(blocks);
        }
    }

    /// A change is over; it may have to be durable, and be so by itself.
    fn finish(&mut self, id: RequestId, done: bool, (durable, by_itself): (bool, bool)) {
        let durable = durable && !planted!(self, DurableWithoutRound);
        match done && durable && (self.rounds.is_due() || !by_itself) {
            true => self.rounds.ask(id, &self.top, &mut self.steps),
            false => self.steps.push(Step::Answer { id, done }),
        }
    }

    /// Lets go, oldest first, what nothing stands against any more once these grains are free; one that waits keeps younger ones of the same
    /// grains. Only those are looked at that may wait for just these, or for an older one that has begun meanwhile.
    fn release(&mut self, freed: Range<u64>) {
        let mut freed = vec![freed];
        let mut waiting = VecDeque::new();
        while let Some(held) = self.held.pop_front() {
            let grains = held.grains();
            let waited_for = freed.iter().any(|freed| meet(freed, &grains));
            let kept = match waited_for && !is_behind(&waiting, &grains) {
                true => self.begin_or_keep(held),
                false => Some(held),
            };
            match kept {
                Some(held) => waiting.push_back(held),
                None => freed.push(grains),
            }
        }
        self.held = waiting;
    }

    /// Begins it unless what is under way stands against it: then it comes back.
    fn begin_or_keep(&mut self, held: Held) -> Option<Held> {
        let (grains, locked) = (held.grains(), self.locked_by(&held.change));
        if self.is_excluded(&grains, &locked) {
            return Some(held);
        }
        self.begin(held.id, held.change, (held.durable, grains, locked));
        None
    }

    fn is_excluded(&self, grains: &Range<u64>, locked: &Range<u64>) -> bool {
        if self.locking == 0 && locked.is_empty() {
            return false;
        }
        let excludes = !planted!(self, FillNotExcluded);
        let mut others = self.under_way.values();
        excludes && others.any(|other| meet(&other.locked, grains) || meet(locked, &other.grains))
    }

    /// From the first grain that a change makes present or zero to the last.
    fn locked_by(&self, change: &Change) -> Range<u64> {
        let range = change.range();
        let (touched, whole) = (grains_of(range), self.whole(range));
        let may_lock = |grain: u64| self.top.get(grain) != Grain::Present;
        match change {
            Change::Discard(_) => whole,
            // All between its edges becomes zero, whatever it is.
            Change::Zeroes(_) if !whole.is_empty() => {
                let first = touched.start < whole.start && may_lock(touched.start);
                let last = whole.end < touched.end && may_lock(whole.end);
                whole.start - u64::from(first)..whole.end + u64::from(last)
            }
            Change::Zeroes(_) | Change::Write(_) => self.not_present(&touched),
        }
    }

    /// From the first of these grains that is not present to the last.
    fn not_present(&self, grains: &Range<u64>) -> Range<u64> {
        let (mut at, mut found) = (grains.start, 0..0);
        while at < grains.end {
            let (state, end) = self.top.run(&(at..grains.end));
            if state != Grain::Present {
                let start = if found.is_empty() { at } else { found.start };
                found = start..end;
            }
            at = end;
        }
        found
    }

    fn begin(
        &mut self,
        id: RequestId,
        change: Change,
        (durable, grains, locked): (bool, Range<u64>, Range<u64>),
    ) {
        let (step, sets) = match &change {
            Change::Write(range) => self.write((id, durable), range, &locked),
            Change::Zeroes(range) => self.erase(id, range, true),
            Change::Discard(range) => self.erase(id, range, false),
        };
        let Some(step) = step else {
            return self.finish(id, true, (durable, true));
        };
        self.locking += usize::from(!locked.is_empty());
        if planted!(self, PresentBeforeWritten) {
            self.set(&sets);
        }
        let work = Work {
            durable,
            is_straight: sets.is_empty() && matches!(change, Change::Write(_)),
            grains,
            locked,
            sets,
        };
        self.under_way.insert(id, work);
        self.steps.push(step);
    }

    fn write(
        &self,
        (id, durable): (RequestId, bool),
        range: &Range<u64>,
        locked: &Range<u64>,
    ) -> (Option<Step>, Vec<(Range<u64>, Grain)>) {
        let write = self.fill(range);
        let sets = match locked.is_empty() {
            true => Vec::new(),
            false => vec![(locked.clone(), Grain::Present)],
        };
        let durable = durable && sets.is_empty();
        (Some(Step::Write { id, write, durable }), sets)
    }

    /// A range with what makes its first and its last grain whole, where those are not present.
    fn fill(&self, range: &Range<u64>) -> Filled {
        let grains = grains_of(range);
        let (start, end) = (grains.start * GRAIN, self.end_of(grains.end));
        let is_partial = |grain: u64| self.top.get(grain) != Grain::Present;
        let mut filled = Filled {
            range: range.clone(),
            fill: Vec::new(),
        };
        if start < range.start && is_partial(grains.start) {
            filled.fill.extend(self.below(&(start..range.start)));
            filled.range.start = start;
        }
        if end > range.end && is_partial(grains.end - 1) {
            filled.fill.extend(self.below(&(range.end..end)));
            filled.range.end = end;
        }
        filled
    }

    fn below(&self, range: &Range<u64>) -> Vec<Piece> {
        match planted!(self, FillFromBase) {
            true => vec![Piece {
                range: range.clone(),
                from: Source::Layer(0),
            }],
            false => self.read(range),
        }
    }

    fn erase(
        &self,
        id: RequestId,
        range: &Range<u64>,
        zeroes: bool,
    ) -> (Option<Step>, Vec<(Range<u64>, Grain)>) {
        let whole = self.whole(range);
        let (mut zeros, mut sets) = (Vec::new(), Vec::new());
        for edge in self.edges(range).into_iter().filter(|_| zeroes) {
            let grain = edge.start / GRAIN;
            match self.top.get(grain) {
                Grain::Zero => continue,
                Grain::Present => {}
                Grain::Absent => sets.push((grain..grain + 1, Grain::Present)),
            }
            zeros.push(self.fill(&edge));
        }
        let is_zero = self.top.run(&whole) == (Grain::Zero, whole.end);
        let punch = (!whole.is_empty() && !is_zero).then(|| {
            sets.push((whole.clone(), Grain::Zero));
            whole.start * GRAIN..self.end_of(whole.end)
        });
        let nothing = zeros.is_empty() && punch.is_none();
        ((!nothing).then_some(Step::Erase { id, zeros, punch }), sets)
    }

    /// The parts of a range in grains that it does not cover.
    fn edges(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let whole = self.whole(range);
        if whole.is_empty() {
            let grains = grains_of(range);
            let parts = grains.map(|grain| {
                (grain * GRAIN).max(range.start)..((grain + 1) * GRAIN).min(range.end)
            });
            return parts.collect();
        }
        let parts = [
            range.start..whole.start * GRAIN,
            self.end_of(whole.end)..range.end,
        ];
        parts.into_iter().filter(|part| !part.is_empty()).collect()
    }

    /// The grains that a range covers. The last one of the disk is covered up to the disk's end.
    fn whole(&self, range: &Range<u64>) -> Range<u64> {
        let end = match range.end >= self.bytes {
            true => self.bytes.div_ceil(GRAIN),
            false => range.end / GRAIN,
        };
        let start = range.start.div_ceil(GRAIN);
        start.min(end)..end
    }

    /// Where the grain before this one ends on the disk.
    fn end_of(&self, grain: u64) -> u64 {
        grain.saturating_mul(GRAIN).min(self.bytes)
    }
}

/// The grains that a range touches.
fn grains_of(range: &Range<u64>) -> Range<u64> {
    range.start / GRAIN..range.end.div_ceil(GRAIN)
}

/// Whether one of these, which are older, changes any of these grains.
fn is_behind(older: &VecDeque<Held>, grains: &Range<u64>) -> bool {
    older.iter().any(|older| meet(&older.grains(), grains))
}

fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
