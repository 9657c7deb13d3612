//! Where each kind of request goes while a disk is mirrored, and what is durable on which side.
//!
//! Reads are the source's alone. What changes the disk is the [`Mirror`](crate::Mirror)'s, whatever it is: it knows of bytes and not
//! of what becomes of them. A flush is the source's alone until both sides are equal, and both sides' from then on.
//!
//! A destination that may be the only one that is left is not equal before what it was given is durable there: a flush of the
//! driver's own, the **base**, makes it so each time anew. A flush that was answered before that is covered by the base, a later
//! one was done on both sides.
//!
//! Pure. Who owns the state: the value, which belongs to whoever drives the mirror; a flush is known by the number that he gave
//! it. Refuses: ends of what was never begun, which change nothing.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Phase, Side};

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Discard,
    Zeroes,
    Flush,
}

/// The side or sides that have to carry a request out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// To this side as it is, and nobody waits for the other.
    Alone(Side),
    /// Through the mirror, which says when and where to.
    Mirrored,
    /// A flush of both sides.
    Both,
}

/// What is to be known of a destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Destination {
    /// Whether it says when it has carried something out.
    pub confirms: bool,
    /// Whether it may be the only one that is left one day.
    pub may_be_left_alone: bool,
    /// Whether nothing is answered any more that it has not.
    pub is_bound: bool,
}

/// A flush of both sides that is not answered, and where it has not ended.
#[derive(Debug, Clone, Copy)]
struct Flush {
    source: bool,
    destination: bool,
}

/// What is durable on which side.
#[derive(Debug, Default)]
pub struct Flushes {
    open: BTreeMap<u64, Flush>,
    /// The driver's own flush of a destination that is equal,
    base: Option<u64>,
    /// and whether it was done since that is so.
    has_base: bool,
    /// All of these flushes that have not ended, of use or not.
    bases: BTreeSet<u64>,
    #[cfg(feature = "planted-faults")]
    plant: Option<crate::Plant>,
}

impl Flushes {
    /// The same with a fault.
    #[cfg(feature = "planted-faults")]
    pub fn plant(&mut self, plant: crate::Plant) {
        self.plant = Some(plant);
    }

    /// Where a request goes that comes now.
    pub fn route(&self, kind: Kind, phase: Phase, to: Destination) -> Route {
        match kind {
            Kind::Read if phase == Phase::Synchronised && planted!(self, ReadAtDestination) => {
                Route::Alone(Side::Destination)
            }
            Kind::Read => Route::Alone(Side::Source),
            Kind::Discard if planted!(self, DiscardPasses) => Route::Alone(Side::Source),
            Kind::Write | Kind::Discard | Kind::Zeroes if phase != Phase::Ended => Route::Mirrored,
            Kind::Flush
                if Self::counts(phase, to)
                    && to.confirms
                    && !planted!(self, FlushedAtSourceAlone) =>
            {
                Route::Both
            }
            _ => Route::Alone(Side::Source),
        }
    }

    /// Whether a write that is to be durable, and that the destination has carried out, is to be made durable there, too. Before
    /// both sides are equal what it has is made durable later.
    pub fn is_due_there(&self, phase: Phase, to: Destination) -> bool {
        Self::counts(phase, to) && !planted!(self, DurableAtSourceAlone)
    }

    /// Whether what the destination has counts.
    fn counts(phase: Phase, to: Destination) -> bool {
        phase == Phase::Synchronised || to.is_bound
    }

    /// A flush of both sides begins; the destination may not be going to tell of it.
    pub fn begin(&mut self, id: u64, is_told_of: bool) {
        let flush = Flush {
            source: true,
            destination: is_told_of,
        };
        self.open.insert(id, flush);
    }

    /// A flush has ended at one side, or is not waited for there. Returns whether it is to be answered now, with what became of it
    /// at the source.
    pub fn ended(&mut self, id: u64, side: Side) -> bool {
        let Some(flush) = self.open.get_mut(&id) else {
            return false;
        };
        match side {
            Side::Source => flush.source = false,
            Side::Destination => flush.destination = false,
        }
        let there = flush.destination && !planted!(self, FlushAnsweredAtSource);
        let here = flush.source;
        let is_answered = !here && !there;
        if is_answered {
            self.open.remove(&id);
        }
        is_answered
    }

    /// Whether it is one that was begun and is not answered.
    pub fn awaits(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    /// Whether a base is to be begun.
    pub fn wants_base(&self, phase: Phase, to: Destination) -> bool {
        phase == Phase::Synchronised
            && to.may_be_left_alone
            && !self.has_base
            && self.base.is_none()
    }

    /// The destination was given this flush as the base: an earlier one is of no use then.
    pub fn begin_base(&mut self, id: u64) {
        self.base = Some(id);
        self.bases.insert(id);
    }

    /// Whether it is a base that is under way, be it of no use any more: no guest waits for it.
    pub fn is_base(&self, id: u64) -> bool {
        self.bases.contains(&id)
    }

    /// The destination has done this one, or is not waited for. Returns whether it was a base.
    pub fn base_ended(&mut self, id: u64) -> bool {
        if self.base == Some(id) {
            self.base = None;
            self.has_base = true;
        }
        self.bases.remove(&id)
    }

    /// What the destination was given may not have come there, a flush among it.
    pub fn lost(&mut self) {
        self.has_base = false;
        if !planted!(self, OldBaseCounts) {
            // What comes again is given later than the base that is under way.
            self.base = None;
        }
    }

    /// How far the mirror is now. To be told each time that it may have changed.
    pub fn observe(&mut self, phase: Phase) {
        if phase != Phase::Synchronised {
            self.lost();
        }
    }

    /// Whether both sides are equal but for what is under way, and all that was durable is so on both.
    pub fn is_synchronised(&self, phase: Phase, to: Destination) -> bool {
        let has_base = self.has_base || !to.may_be_left_alone || planted!(self, NoBase);
        phase == Phase::Synchronised && has_base
    }
}
