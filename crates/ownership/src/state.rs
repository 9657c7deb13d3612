//! The states of the core and the plans that lead from one to the next.
//!
//! Owned by [`crate::VmCore`]. Refuses: nothing; handlers decide, this module only names.

use crate::event::{Action, Ending, PeerMessage, Timer};
use crate::record::{Handover, HostRecord};
use godwit_types::{Generation, HostName};

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    Recovering,
    Absent,
    Off,
    Down {
        reason: &'static str,
    },
    Paused,
    Running,
    Unconfirmed,
    Precopy(Handover),
    Stopping(Attempt),
    LastPages(Attempt),
    Devices {
        attempt: Attempt,
        ready_early: bool,
    },
    AwaitingReady(Attempt),
    GiftUncertain(Attempt),
    Gave(Attempt),
    InDoubt(Attempt),
    Moved(Attempt),
    Incoming(Handover),
    Ready(Attempt),
    ReadyInDoubt(Attempt),
    /// Will not take it, but could not write that yet.
    Refusing(Attempt),
    Refused,
}

macro_rules! state_names {
    ($($name:ident => $text:literal),+ $(,)?) => {
        /// The name of a state: one column of the transition table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum StateName { $($name),+ }

        impl StateName {
            /// Every state, in the table's order.
            pub const ALL: &'static [StateName] = &[$(StateName::$name),+];

            /// Its name in the table and in traces.
            pub fn name(self) -> &'static str {
                match self { $(StateName::$name => $text),+ }
            }
        }
    };
}

state_names! {
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

impl State {
    pub(crate) fn name(&self) -> StateName {
        match self {
            State::Recovering => StateName::Recovering,
            State::Absent => StateName::Absent,
            State::Off => StateName::Off,
            State::Down { .. } => StateName::Down,
            State::Paused => StateName::Paused,
            State::Running => StateName::Running,
            State::Unconfirmed => StateName::Unconfirmed,
            State::Precopy(_) => StateName::Precopy,
            State::Stopping(_) => StateName::Stopping,
            State::LastPages(_) => StateName::LastPages,
            State::Devices { .. } => StateName::Devices,
            State::AwaitingReady(_) => StateName::AwaitingReady,
            State::GiftUncertain(_) => StateName::GiftUncertain,
            State::Gave(_) => StateName::Gave,
            State::InDoubt(_) => StateName::InDoubt,
            State::Moved(_) => StateName::Moved,
            State::Incoming(_) => StateName::Incoming,
            State::Ready(_) => StateName::Ready,
            State::ReadyInDoubt(_) => StateName::ReadyInDoubt,
            State::Refusing(_) => StateName::Refusing,
            State::Refused => StateName::Refused,
        }
    }

    /// The attempt of a source between its stop and its gift.
    pub(crate) fn switchover(&self) -> Option<&Attempt> {
        match self {
            State::Stopping(a) | State::LastPages(a) | State::AwaitingReady(a) => Some(a),
            State::Devices { attempt, .. } => Some(attempt),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => None,
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

/// A handler's verdict.
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
        PeerMessage::Abort {
            migration: with.migration.clone(),
        },
    )
}
