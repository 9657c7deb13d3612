//! When entries of the tables become durable: in rounds, and never before what they tell of.
//!
//! A round makes the data durable, writes the blocks that have to say something new as they were when that began, and makes those
//! durable. Whoever asks while one is under way waits for the next one, all of them together. Where no block has anything new to say a
//! round is one sync. Where many have, they are written some at a time, each of them after a sync that began when it was looked at. A sync that failed is the
//! last one: storage tells once that it lost something, and the next one would seem to succeed, so that entries were written of grains that are not there.
//! Nothing is made durable from then on.
//!
//! Who owns the state: the [`Overlay`](crate::Overlay). It is bounded: a guest may discard all of a large disk before it flushes, and where more blocks
//! have something new to say than are kept the marks in the states tell of them. Refuses: ends of what was never begun, which change nothing.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

#[cfg(feature = "planted-faults")]
use crate::Plant;
use crate::overlay::{RequestId, Step};
use crate::states::{States, Words};

/// So many blocks are known by their numbers: those of 128 GiB of a disk.
const KNOWN_MAX: usize = 1 << 16;
/// So many are written at a time.
const AT_ONCE: usize = 1 << 12;

/// How much is remembered of what is to be written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    known: usize,
    at_once: usize,
}

impl Room {
    pub(crate) fn of(blocks: usize) -> Self {
        Self {
            known: blocks,
            at_once: blocks.max(1),
        }
    }
}

impl Default for Room {
    fn default() -> Self {
        Self {
            known: KNOWN_MAX,
            at_once: AT_ONCE,
        }
    }
}

/// Blocks of the tables.
#[derive(Debug)]
enum Blocks {
    Known(BTreeSet<u64>),
    /// All that are marked, from this one on.
    Marked(u64),
}

impl Default for Blocks {
    fn default() -> Self {
        Self::Known(BTreeSet::new())
    }
}

impl Blocks {
    fn are_none(&self) -> bool {
        matches!(self, Self::Known(known) if known.is_empty())
    }

    /// Whether this one is among them, or may be.
    fn may_have(&self, block: u64) -> bool {
        match self {
            Self::Known(known) => known.contains(&block),
            Self::Marked(from) => *from <= block,
        }
    }

    /// These, which are marked, are among them, too.
    fn add(&mut self, blocks: Range<u64>, room: Room) {
        let more = blocks.end.saturating_sub(blocks.start);
        match self {
            Self::Known(known) if known.len() as u64 + more <= room.known as u64 => {
                known.extend(blocks);
            }
            _ => *self = Self::Marked(0),
        }
    }

    /// The first ones, which are among them no more.
    fn take<M: AsRef<[AtomicU64]>>(&mut self, states: &States<M>, room: Room) -> Vec<u64> {
        match self {
            Self::Known(known) => {
                let first = std::iter::from_fn(|| known.pop_first());
                first.take(room.at_once).collect()
            }
            Self::Marked(from) => {
                let first = states.marked_from(*from, room.at_once);
                match first.last() {
                    Some(last) => *from = last + 1,
                    None => *self = Self::default(),
                }
                first
            }
        }
    }
}

/// The rounds of one delta.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// Those that have something to say that no round has taken.
    dirty: Blocks,
    running: Option<Running>,
    /// Who waits for the next one.
    next: Vec<RequestId>,
    /// Storage may have lost what was answered: no round succeeds any more.
    is_lost: bool,
    room: Room,
    #[cfg(feature = "planted-faults")]
    pub(crate) plant: Option<Plant>,
}

#[derive(Debug)]
struct Running {
    stage: Stage,
    /// What it has not looked at.
    pending: Blocks,
    /// What it has, and writes after the next sync,
    blocks: Vec<(u64, Words)>,
    /// and what it wrote, which the next sync makes durable.
    written: Vec<u64>,
    waiters: Vec<RequestId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Sync,
    Tables,
}

impl Rounds {
    /// Of a delta whose tables do not say yet what its marks tell of.
    pub(crate) fn after<M: AsRef<[AtomicU64]>>(states: &States<M>, room: Room) -> Self {
        let marked = states.marked_from(0, room.known.saturating_add(1));
        let dirty = match marked.len() <= room.known {
            true => Blocks::Known(marked.into_iter().collect()),
            false => Blocks::Marked(0),
        };
        Self {
            dirty,
            room,
            ..Self::default()
        }
    }

    /// These blocks have something new to say, and are marked.
    pub(crate) fn changed(&mut self, blocks: Range<u64>) {
        self.dirty.add(blocks, self.room);
    }

    /// Whether a round would write any block or fail, or one is under way.
    pub(crate) fn is_due(&self) -> bool {
        self.is_lost || self.running.is_some() || !self.dirty.are_none()
    }

    /// No round succeeds from now on, nor the one that is under way.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// No round is under way, and none is asked for.
    pub(crate) fn rest(&self) -> bool {
        self.running.is_none() && self.next.is_empty()
    }

    /// This one waits for a round that begins from now on.
    pub(crate) fn ask<M>(&mut self, id: RequestId, states: &States<M>, steps: &mut Vec<Step>)
    where
        M: AsRef<[AtomicU64]>,
    {
        if planted!(self, FlushJoinsRound)
            && let Some(running) = &mut self.running
        {
            return running.waiters.push(id);
        }
        self.next.push(id);
        self.begin(states, steps);
    }

    fn begin<M: AsRef<[AtomicU64]>>(&mut self, states: &States<M>, steps: &mut Vec<Step>) {
        if self.running.is_some() || self.next.is_empty() {
            return;
        }
        if self.is_lost {
            let answers = std::mem::take(&mut self.next).into_iter();
            steps.extend(answers.map(|id| Step::Answer { id, done: false }));
            return;
        }
        let mut pending = std::mem::take(&mut self.dirty);
        let blocks = self.look_at(&mut pending, states);
        self.running = Some(Running {
            stage: Stage::Sync,
            pending,
            blocks,
            written: Vec::new(),
            waiters: std::mem::take(&mut self.next),
        });
        match planted!(self, EntryBeforeData) {
            true => self.synced(true, states, steps),
            false => steps.push(Step::Sync),
        }
    }

    /// What the next blocks have to say: all of that was written by now, so that a sync that begins now makes it durable.
    fn look_at<M>(&self, pending: &mut Blocks, states: &States<M>) -> Vec<(u64, Words)>
    where
        M: AsRef<[AtomicU64]>,
    {
        let next = pending.take(states, self.room).into_iter();
        let looked: Vec<_> = next.map(|block| (block, states.block(block))).collect();
        if planted!(self, UnmarkedEarly) {
            looked.iter().for_each(|(block, _)| states.unmark(*block));
        }
        looked
    }

    /// A sync has ended.
    pub(crate) fn synced<M>(&mut self, done: bool, states: &States<M>, steps: &mut Vec<Step>)
    where
        M: AsRef<[AtomicU64]>,
    {
        let late = planted!(self, CapturedLate);
        let is_told = !planted!(self, LossForgotten);
        let Some(running) = self
            .running
            .as_mut()
            .filter(|running| running.stage == Stage::Sync)
        else {
            return;
        };
        self.is_lost |= !done && is_told;
        let done = done && !self.is_lost;
        if !done || running.blocks.is_empty() {
            return self.end(done, states, steps);
        }
        running.stage = Stage::Tables;
        if late {
            for (block, words) in &mut running.blocks {
                *words = states.block(*block);
            }
        }
        steps.push(Step::Tables(running.blocks.clone()));
        for block in std::mem::take(&mut running.written) {
            self.says(block, states);
        }
    }

    /// The blocks were written.
    pub(crate) fn written<M>(&mut self, done: bool, states: &States<M>, steps: &mut Vec<Step>)
    where
        M: AsRef<[AtomicU64]>,
    {
        let early = planted!(self, NoSecondSync);
        let done = done && !self.is_lost;
        let at_it = self
            .running
            .take_if(|running| running.stage == Stage::Tables);
        let Some(mut running) = at_it else {
            return;
        };
        running.stage = Stage::Sync;
        let blocks = std::mem::take(&mut running.blocks).into_iter();
        running.written = blocks.map(|(block, _)| block).collect();
        if done {
            running.blocks = self.look_at(&mut running.pending, states);
        }
        let is_last = running.blocks.is_empty();
        self.running = Some(running);
        match done && !(early && is_last) {
            true => steps.push(Step::Sync),
            false => self.end(done, states, steps),
        }
    }

    /// What this block says is durable, unless it has something new to say since its round began.
    fn says<M: AsRef<[AtomicU64]>>(&mut self, block: u64, states: &States<M>) {
        if !self.dirty.may_have(block) {
            states.unmark(block);
        } else if planted!(self, ChangeDuringRoundForgotten) {
            if let Blocks::Known(known) = &mut self.dirty {
                known.remove(&block);
            }
            states.unmark(block);
        }
    }

    fn end<M>(&mut self, done: bool, states: &States<M>, steps: &mut Vec<Step>)
    where
        M: AsRef<[AtomicU64]>,
    {
        let Some(running) = self.running.take() else {
            return;
        };
        let counts = done || planted!(self, FailedRoundForgotten);
        let looked = running.blocks.iter().map(|(block, _)| *block);
        for block in running.written.iter().copied().chain(looked) {
            match counts {
                true => self.says(block, states),
                false => self.dirty.add(block..block + 1, self.room),
            }
        }
        match running.pending {
            _ if counts => {}
            Blocks::Known(known) => known
                .into_iter()
                .for_each(|block| self.dirty.add(block..block + 1, self.room)),
            // Those before it were looked at.
            Blocks::Marked(_) => self.dirty = Blocks::Marked(0),
        }
        let answers = running.waiters.into_iter();
        steps.extend(answers.map(|id| Step::Answer { id, done }));
        self.begin(states, steps);
    }
}
