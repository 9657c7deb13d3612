//! When entries of the tables become durable: in rounds, and never before what they tell of.
//!
//! A round makes the data durable, writes the blocks that have to say something new as they were when the round began, and makes those
//! durable. Whoever asks while one is under way waits for the next one, all of them together. Where no block has anything new to say a
//! round is one sync. A sync that failed is the last one: storage tells once that it lost something, and the next one would seem to succeed, so
//! that entries were written of grains that are not there. Nothing is made durable from then on.
//!
//! Who owns the state: the [`Overlay`](crate::Overlay). Refuses: ends of what was never begun, which change nothing.

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;

#[cfg(feature = "planted-faults")]
use crate::Plant;
use crate::overlay::{RequestId, Step};
use crate::states::{States, Words};

/// The rounds of one delta.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// Blocks that have something to say that no round has taken.
    dirty: BTreeSet<u64>,
    running: Option<Running>,
    /// Who waits for the next one.
    next: Vec<RequestId>,
    /// Storage may have lost what was answered: no round succeeds any more.
    is_lost: bool,
    #[cfg(feature = "planted-faults")]
    pub(crate) plant: Option<Plant>,
}

#[derive(Debug)]
struct Running {
    stage: Stage,
    blocks: Vec<(u64, Words)>,
    waiters: Vec<RequestId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Data,
    Tables,
    Entries,
}

impl Rounds {
    /// Of a delta whose tables do not say yet what these blocks have to.
    pub(crate) fn after(marked: Vec<u64>) -> Self {
        Self {
            dirty: marked.into_iter().collect(),
            ..Self::default()
        }
    }

    /// These blocks have something new to say.
    pub(crate) fn changed(&mut self, blocks: std::ops::Range<u64>) {
        self.dirty.extend(blocks);
    }

    /// Whether a round would write any block or fail, or one is under way.
    pub(crate) fn is_due(&self) -> bool {
        self.is_lost || self.running.is_some() || !self.dirty.is_empty()
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
        let dirty = std::mem::take(&mut self.dirty);
        let captured = dirty.into_iter().map(|block| (block, states.block(block)));
        let running = Running {
            stage: Stage::Data,
            blocks: captured.collect(),
            waiters: std::mem::take(&mut self.next),
        };
        if planted!(self, UnmarkedEarly) {
            let blocks = running.blocks.iter();
            blocks.for_each(|(block, _)| states.unmark(*block));
        }
        self.running = Some(running);
        match planted!(self, EntryBeforeData) {
            true => self.synced(true, states, steps),
            false => steps.push(Step::Sync),
        }
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
            .filter(|running| running.stage != Stage::Tables)
        else {
            return;
        };
        self.is_lost |= !done && is_told;
        let done = done && !self.is_lost;
        match running.stage {
            Stage::Data if done && !running.blocks.is_empty() => {
                running.stage = Stage::Tables;
                if late {
                    for (block, words) in &mut running.blocks {
                        *words = states.block(*block);
                    }
                }
                steps.push(Step::Tables(running.blocks.clone()));
            }
            Stage::Data | Stage::Entries => self.end(done, states, steps),
            Stage::Tables => {}
        }
    }

    /// The blocks were written.
    pub(crate) fn written<M>(&mut self, done: bool, states: &States<M>, steps: &mut Vec<Step>)
    where
        M: AsRef<[AtomicU64]>,
    {
        let early = planted!(self, NoSecondSync);
        let done = done && !self.is_lost;
        match &mut self.running {
            Some(running) if running.stage == Stage::Tables => {
                running.stage = Stage::Entries;
                match done && !early {
                    true => steps.push(Step::Sync),
                    false => self.end(done, states, steps),
                }
            }
            _ => {}
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
        for (block, _) in running.blocks {
            if !counts {
                self.dirty.insert(block);
            } else if !self.dirty.contains(&block) {
                states.unmark(block);
            } else if planted!(self, ChangeDuringRoundForgotten) {
                self.dirty.remove(&block);
                states.unmark(block);
            }
        }
        let answers = running.waiters.into_iter();
        steps.extend(answers.map(|id| Step::Answer { id, done }));
        self.begin(states, steps);
    }
}
