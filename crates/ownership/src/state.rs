//! The states of the core and the plans that lead from one to the next.
//!
//! Owned by [`crate::VmCore`]. Refuses: nothing; handlers decide, this module only names.

use crate::event::{Action, Ending, PeerMessage, Timer};
use crate::record::{Handover, HostRecord};
use godwit_types::{Generation, HostName, named};

/// What is known about this host's QEMU of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Qemu {
    /// None, or one that is verified dead.
    Dead,
    /// There, its vCPUs stopped.
    Paused,
    /// There, its vCPUs running.
    Running,
}

/// One attempt to hand over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub with: Handover,
    pub next: Generation,
}

/// Where the core stands. What is durable is in the record; this is the rest.
///
/// The classes are what most handlers ask about: a new state is a change in its class and in the handlers that tell
/// the states of that class apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    /// What was read is not known to be durable yet.
    Recovering,
    Elsewhere(Elsewhere),
    Held(Held),
    Leaving(Leaving),
    Given(Given, Attempt),
    Coming(Coming),
}

/// This host does not hold the VM and has promised nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    Absent,
    Refused,
    Moved(Attempt),
}

/// This host holds the VM and no migration is in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Held {
    Off,
    Down { reason: &'static str },
    Paused,
    Running,
    Unconfirmed,
}

/// This host holds the VM and means to give it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// With the least generation that the next attempt may take.
    Precopy(Handover, Generation),
    Switching(Stage, Attempt),
    /// The gift may be on the disk, but was never sent.
    GiftUncertain(Attempt),
}

impl Held {
    /// It should run and has no QEMU. Nothing boots by itself: the record may come from an old copy of the disk, so
    /// the shell asks the site who holds the VM before it starts it.
    pub(crate) const UNASKED: Held = Held::Down {
        reason: "its QEMU is gone: it is booted once this host has heard who holds it",
    };
}

/// How far a switchover is, between the source's stop and its gift.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Stopping,
    LastPages,
    Devices { ready_early: bool },
    AwaitingReady,
}

/// This host gave the VM and waits for the destination's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    Gave,
    InDoubt,
}

/// This host may get the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Coming {
    Incoming(Handover),
    /// Ready, and bound by it.
    Promised(Promise, Attempt),
    /// Will not take it, but could not write that yet.
    Refusing(Attempt),
}

/// What a destination that is ready knows about its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    /// It is expected to give at any moment.
    Kept,
    /// It did not answer in time.
    InDoubt,
}

named! {
    /// The name of a state: one column of the transition table.
    pub enum StateName {
        Recovering => "recovering",
        Absent => "absent",
        Off => "off",
        Down => "down",
        Paused => "paused",
        Running => "running",
        Unconfirmed => "unconfirmed",
        Precopy => "precopy",
        Stopping => "stopping",
        LastPages => "last-pages",
        Devices => "devices",
        AwaitingReady => "awaiting-ready",
        GiftUncertain => "gift-uncertain",
        Gave => "gave",
        InDoubt => "in-doubt",
        Moved => "moved",
        Incoming => "incoming",
        Ready => "ready",
        ReadyInDoubt => "ready-in-doubt",
        Refusing => "refusing",
        Refused => "refused",
    }
}

impl State {
    pub(crate) fn name(&self) -> StateName {
        match self {
            State::Recovering => StateName::Recovering,
            State::Elsewhere(Elsewhere::Absent) => StateName::Absent,
            State::Elsewhere(Elsewhere::Refused) => StateName::Refused,
            State::Elsewhere(Elsewhere::Moved(_)) => StateName::Moved,
            State::Held(Held::Off) => StateName::Off,
            State::Held(Held::Down { .. }) => StateName::Down,
            State::Held(Held::Paused) => StateName::Paused,
            State::Held(Held::Running) => StateName::Running,
            State::Held(Held::Unconfirmed) => StateName::Unconfirmed,
            State::Leaving(Leaving::Precopy(..)) => StateName::Precopy,
            State::Leaving(Leaving::Switching(stage, _)) => match stage {
                Stage::Stopping => StateName::Stopping,
                Stage::LastPages => StateName::LastPages,
                Stage::Devices { .. } => StateName::Devices,
                Stage::AwaitingReady => StateName::AwaitingReady,
            },
            State::Leaving(Leaving::GiftUncertain(_)) => StateName::GiftUncertain,
            State::Given(Given::Gave, _) => StateName::Gave,
            State::Given(Given::InDoubt, _) => StateName::InDoubt,
            State::Coming(Coming::Incoming(_)) => StateName::Incoming,
            State::Coming(Coming::Promised(Promise::Kept, _)) => StateName::Ready,
            State::Coming(Coming::Promised(Promise::InDoubt, _)) => StateName::ReadyInDoubt,
            State::Coming(Coming::Refusing(_)) => StateName::Refusing,
        }
    }
}

/// A step of a plan; permits are minted when it is carried out, not when it is planned.
#[derive(Debug)]
pub(crate) enum Step {
    Boot,
    Cont,
    Do(Action),
}

/// What becomes of a plan whose record could not be written.
#[derive(Debug)]
pub(crate) enum OnFail {
    /// Go (back) to this state and try again when the timer fires or the event comes again.
    Back(State),
    /// The gift: if it is known not to be on the disk, resume; else take it back on the disk first.
    UnwindGift(Attempt),
    /// Nothing was promised: give up receiving.
    FailIncoming(Handover),
}

/// Steps, then perhaps a record, then the steps that need it durable.
#[derive(Debug)]
pub(crate) struct Plan {
    pub state: State,
    pub first: Vec<Step>,
    pub persist: Option<(HostRecord, OnFail)>,
    pub then: Vec<Step>,
}

#[derive(Debug)]
pub(crate) enum Reaction {
    Ignore(&'static str),
    Refuse(&'static str),
    Go(Box<Plan>),
}

/// A plan without a record: at once.
pub(crate) fn go(state: State, first: Vec<Step>) -> Reaction {
    Reaction::Go(Box::new(Plan {
        state,
        first,
        persist: None,
        then: Vec::new(),
    }))
}

/// A plan with a record and nothing before it.
pub(crate) fn write(
    state: State,
    record: HostRecord,
    on_fail: OnFail,
    then: Vec<Step>,
) -> Reaction {
    write_after(state, Vec::new(), record, on_fail, then)
}

/// A plan with steps, a record, and steps.
pub(crate) fn write_after(
    state: State,
    first: Vec<Step>,
    record: HostRecord,
    on_fail: OnFail,
    then: Vec<Step>,
) -> Reaction {
    Reaction::Go(Box::new(Plan {
        state,
        first,
        persist: Some((record, on_fail)),
        then,
    }))
}

pub(crate) fn send(to: &HostName, message: PeerMessage) -> Step {
    Step::Do(Action::Send {
        to: to.clone(),
        message,
    })
}

pub(crate) fn arm(timer: Timer) -> Step {
    Step::Do(Action::Arm(timer))
}

pub(crate) fn disarm(timer: Timer) -> Step {
    Step::Do(Action::Disarm(timer))
}

pub(crate) fn end(with: &Handover, outcome: Ending) -> Step {
    Step::Do(Action::EndMigration {
        migration: with.migration.clone(),
        outcome,
    })
}

pub(crate) fn kill() -> Step {
    Step::Do(Action::KillQemu)
}

pub(crate) fn cleanup() -> Step {
    Step::Do(Action::Cleanup)
}

pub(crate) fn release() -> Step {
    Step::Do(Action::ReleaseThrottle)
}

pub(crate) fn abort(with: &Handover) -> Step {
    send(
        &with.peer,
        // Who carries the message knows why.
        PeerMessage::abort(with.migration.clone()),
    )
}
