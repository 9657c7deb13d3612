//! The transition table: every state and every event, and what the core makes of the pair.
//!
//! Made by running the core itself on one example of each, so that it cannot differ from the code. The
//! example is the event that fits the state best: same migration, same generation, the right peer.

use crate::core::VmCore;
use crate::event::{Action, Event, EventKind, PeerMessage, Timer};
use crate::record::{Handover, HostRecord, Phase, Power};
use crate::state::{
    Attempt, Coming, Elsewhere, Given, Held, Leaving, Plan, Promise, Qemu, Reaction, Stage, State,
    StateName, Step,
};
use godwit_types::{Generation, HostName, MigrationId, VmName};

/// One cell of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    pub state: StateName,
    pub event: EventKind,
    /// The state after; the same if nothing changes.
    pub next: StateName,
    /// What is done, in order, or why nothing is. Never empty.
    pub outcome: String,
}

/// Every state with every event, states first. While a record is being written every event but `persisted` and
/// `persist-failed` waits; after it they are taken as in this table.
pub fn transition_table() -> Vec<Cell> {
    let names = Names::new();
    let (states, events) = (StateName::ALL, EventKind::ALL);
    let Some(names) = names else {
        return Vec::new();
    };
    let pairs = states
        .iter()
        .flat_map(|s| events.iter().map(move |e| (*s, *e)));
    pairs.map(|(s, e)| cell(&names, s, e)).collect()
}

/// The names in the examples.
pub(crate) struct Names {
    vm: VmName,
    pub(crate) here: HostName,
    pub(crate) peer: HostName,
    migration: MigrationId,
}

/// Generations of the example: held, and the next one.
const HELD: Generation = Generation(1);
const NEXT: Generation = Generation(2);

impl Names {
    pub(crate) fn new() -> Option<Self> {
        Some(Self {
            vm: VmName::new("vm").ok()?,
            here: HostName::new("here").ok()?,
            peer: HostName::new("peer").ok()?,
            migration: MigrationId::new("m1").ok()?,
        })
    }

    pub(crate) fn with(&self) -> Handover {
        Handover {
            migration: self.migration.clone(),
            peer: self.peer.clone(),
        }
    }

    fn attempt(&self) -> Attempt {
        Attempt {
            with: self.with(),
            next: NEXT,
        }
    }

    fn record(&self, held: Generation, highest: Generation, phase: Phase) -> HostRecord {
        HostRecord {
            highest,
            held,
            phase,
            ..HostRecord::absent(self.vm.clone())
        }
    }

    fn holds(&self, power: Power, unconfirmed: Option<Handover>) -> HostRecord {
        let phase = Phase::Holds {
            generation: HELD,
            power,
            unconfirmed,
        };
        self.record(HELD, HELD, phase)
    }

    fn stopping(&self) -> HostRecord {
        let phase = Phase::Stopping {
            generation: HELD,
            next: NEXT,
            migration: self.migration.clone(),
            to: self.peer.clone(),
        };
        self.record(HELD, NEXT, phase)
    }

    /// An example of each state, with the record and the QEMU that it stands on.
    pub(crate) fn example(&self, name: StateName) -> (State, HostRecord, Qemu) {
        let qemu = match name {
            StateName::Recovering
            | StateName::Running
            | StateName::Precopy
            | StateName::Stopping => Qemu::Running,
            StateName::Paused
            | StateName::LastPages
            | StateName::Devices
            | StateName::AwaitingReady
            | StateName::GiftUncertain
            | StateName::Gave
            | StateName::InDoubt
            | StateName::Incoming
            | StateName::Ready
            | StateName::ReadyInDoubt => Qemu::Paused,
            StateName::Absent
            | StateName::Off
            | StateName::Down
            | StateName::Unconfirmed
            | StateName::Moved
            | StateName::Refusing
            | StateName::Refused => Qemu::Dead,
        };
        (self.state(name), self.record_of(name), qemu)
    }

    fn state(&self, name: StateName) -> State {
        let a = self.attempt();
        let switching = |stage| State::Leaving(Leaving::Switching(stage, self.attempt()));
        match name {
            StateName::Recovering => State::Recovering,
            StateName::Absent => State::Elsewhere(Elsewhere::Absent),
            StateName::Refused => State::Elsewhere(Elsewhere::Refused),
            StateName::Moved => State::Elsewhere(Elsewhere::Moved(a)),
            StateName::Off => State::Held(Held::Off),
            StateName::Down => State::Held(Held::Down { reason: "example" }),
            StateName::Paused => State::Held(Held::Paused),
            StateName::Running => State::Held(Held::Running),
            StateName::Unconfirmed => State::Held(Held::Unconfirmed),
            StateName::Precopy => State::Leaving(Leaving::Precopy(self.with(), NEXT)),
            StateName::Stopping => switching(Stage::Stopping),
            StateName::LastPages => switching(Stage::LastPages),
            StateName::Devices => switching(Stage::Devices { ready_early: false }),
            StateName::AwaitingReady => switching(Stage::AwaitingReady),
            StateName::GiftUncertain => State::Leaving(Leaving::GiftUncertain(a)),
            StateName::Gave => State::Given(Given::Gave, a),
            StateName::InDoubt => State::Given(Given::InDoubt, a),
            StateName::Incoming => State::Coming(Coming::Incoming(self.with())),
            StateName::Ready => State::Coming(Coming::Promised(Promise::Kept, a)),
            StateName::ReadyInDoubt => State::Coming(Coming::Promised(Promise::InDoubt, a)),
            StateName::Refusing => State::Coming(Coming::Refusing(a)),
        }
    }

    fn record_of(&self, name: StateName) -> HostRecord {
        let migration = self.migration.clone();
        let (generation, to, from) = (NEXT, self.peer.clone(), self.peer.clone());
        let (phase, held) = match name {
            StateName::Absent => return HostRecord::absent(self.vm.clone()),
            StateName::Off => return self.holds(Power::Off, None),
            StateName::Paused => return self.holds(Power::Paused, None),
            StateName::Unconfirmed => return self.holds(Power::On, Some(self.with())),
            StateName::Recovering | StateName::Down | StateName::Running | StateName::Precopy => {
                return self.holds(Power::On, None);
            }
            StateName::Stopping
            | StateName::LastPages
            | StateName::Devices
            | StateName::AwaitingReady
            | StateName::GiftUncertain => return self.stopping(),
            StateName::Incoming => {
                return self.record(Generation(0), HELD, Phase::Incoming { migration, from });
            }
            StateName::Gave | StateName::InDoubt => (
                Phase::Gave {
                    generation,
                    migration,
                    to,
                },
                1,
            ),
            StateName::Moved => (
                Phase::Moved {
                    generation,
                    migration,
                    to,
                },
                1,
            ),
            StateName::Ready | StateName::ReadyInDoubt | StateName::Refusing => (
                Phase::Ready {
                    generation,
                    migration,
                    from,
                },
                0,
            ),
            StateName::Refused => (
                Phase::Refused {
                    generation,
                    migration,
                    from,
                },
                0,
            ),
        };
        self.record(Generation(held), NEXT, phase)
    }

    fn message(&self, message: PeerMessage) -> Event {
        Event::Message {
            from: self.peer.clone(),
            message,
        }
    }

    /// An example of each event that comes from a peer.
    pub(crate) fn peer_event(&self, event: EventKind, about: Generation) -> Option<Event> {
        let (migration, generation) = (self.migration.clone(), about);
        let message = match event {
            EventKind::PeerPrepared => PeerMessage::Prepared {
                migration,
                highest: Generation(7),
            },
            EventKind::PeerReady => PeerMessage::Ready {
                migration,
                generation,
            },
            EventKind::PermitReceived => PeerMessage::Permit {
                migration,
                generation,
            },
            EventKind::AskedHolding => PeerMessage::AskHolding {
                migration,
                generation,
            },
            EventKind::PeerHolding => PeerMessage::Holding {
                migration,
                generation,
            },
            EventKind::PeerConfirmed => PeerMessage::Confirmed { generation },
            EventKind::PeerSuperseded => PeerMessage::Superseded {
                generation,
                by: Generation(7),
            },
            EventKind::PeerRefused => PeerMessage::Refused {
                migration,
                generation,
            },
            EventKind::AskedGift => PeerMessage::AskGift {
                migration,
                generation,
            },
            EventKind::PeerUndecided => PeerMessage::Undecided {
                migration,
                generation,
            },
            EventKind::PeerWithdrawn => PeerMessage::Withdrawn {
                migration,
                generation,
            },
            EventKind::PeerAborted => PeerMessage::abort(migration),
            EventKind::PeerFailed => PeerMessage::Failed {
                migration,
                reason: None,
            },
            _ => return None,
        };
        Some(self.message(message))
    }

    /// An example of each event. `about` is the generation that the state is about.
    fn event(&self, event: EventKind, about: Generation, highest: Generation) -> Option<Event> {
        let (migration, peer) = (self.migration.clone(), self.peer.clone());
        let event = match event {
            EventKind::Persisted => Event::Persisted,
            EventKind::PersistFailed => Event::PersistFailed { unchanged: true },
            EventKind::Granted => Event::Granted {
                generation: Generation(9),
                expect: highest,
            },
            EventKind::SurveyRequested => Event::SurveyRequested {
                level: Generation(8),
            },
            EventKind::HostRemoved => Event::HostRemoved { host: peer },
            EventKind::GiftOvertaken => Event::GiftOvertaken {
                by: Generation(9),
                with_guest: true,
            },
            EventKind::DeleteRequested => Event::DeleteRequested,
            EventKind::StartRequested => Event::StartRequested,
            EventKind::StopRequested => Event::StopRequested,
            EventKind::PauseRequested => Event::PauseRequested,
            EventKind::OutOfRoom => Event::OutOfRoom,
            EventKind::StillOutOfRoom => Event::StillOutOfRoom,
            EventKind::ResumeRequested => Event::ResumeRequested,
            EventKind::MigrationBegan => Event::MigrationBegan {
                migration,
                to: peer,
                generation: Generation(9),
            },
            EventKind::SwitchoverRequested => Event::SwitchoverRequested,
            EventKind::Stopped => Event::Stopped { attempt: about },
            EventKind::LastPagesApplied => Event::LastPagesApplied { attempt: about },
            EventKind::DeviceStateSent => Event::DeviceStateSent { attempt: about },
            EventKind::PrepareIncoming => Event::PrepareIncoming {
                migration,
                from: peer,
                generation: Generation(9),
            },
            EventKind::Loaded => Event::Loaded { attempt: about },
            EventKind::IncomingFailed => Event::IncomingFailed,
            EventKind::LinkLost => Event::LinkLost,
            EventKind::SwitchoverTimeout => Event::Timeout(Timer::Switchover),
            EventKind::AskTimeout => Event::Timeout(Timer::Ask),
            EventKind::Cancel => Event::Cancel,
            EventKind::GuestShutdown => Event::GuestShutdown,
            EventKind::GuestHalted => Event::GuestHalted,
            EventKind::GuestReset => Event::GuestReset,
            EventKind::QemuDied => Event::QemuDied,
            EventKind::OperatorResolve => Event::OperatorResolve {
                run_here: true,
                confirm_fenced: peer,
            },
            peer_event => return self.peer_event(peer_event, about),
        };
        Some(event)
    }
}

fn cell(names: &Names, name: StateName, kind: EventKind) -> Cell {
    let (state, record, qemu) = names.example(name);
    let about = match name {
        StateName::Unconfirmed | StateName::Running | StateName::Paused => HELD,
        StateName::Off | StateName::Down | StateName::Precopy => HELD,
        _ => NEXT,
    };
    let highest = record.highest;
    let mut core = VmCore::unsettled(record, names.here.clone(), qemu);
    core.state = state;
    let reaction = match names.event(kind, about, highest) {
        Some(event) => core.react(event),
        None => Reaction::Ignore("no example"),
    };
    let (next, outcome) = match reaction {
        Reaction::Ignore(why) => (name, format!("ignored: {why}")),
        Reaction::Refuse(why) => (name, format!("refused: {why}")),
        Reaction::Go(plan) => (plan.state.name(), describe(&plan)),
    };
    Cell {
        state: name,
        event: kind,
        next,
        outcome,
    }
}

fn describe(plan: &Plan) -> String {
    let mut words: Vec<String> = plan.first.iter().map(step_word).collect();
    if let Some((record, _)) = &plan.persist {
        words.push(format!("WRITE {}", phase_word(&record.phase)));
    }
    words.extend(plan.then.iter().map(step_word));
    if words.is_empty() {
        words.push("noted".to_owned());
    }
    words.join(", ")
}

fn step_word(step: &Step) -> String {
    let word = match step {
        Step::Boot => "boot with a permit",
        Step::Cont => "cont with a permit",
        Step::Do(action) => return action_word(action),
    };
    word.to_owned()
}

fn action_word(action: &Action) -> String {
    let word = match action {
        Action::Send { message, .. } => return format!("send {}", message.word()),
        Action::EndMigration { outcome, .. } => return format!("end migration ({outcome:?})"),
        Action::Arm(timer) => return format!("arm {timer:?}"),
        Action::Disarm(timer) => return format!("disarm {timer:?}"),
        Action::Persist(_) => "write",
        Action::Boot(_) => "boot with a permit",
        Action::Cont(_) => "cont with a permit",
        Action::StopGuest { .. } => "stop guest",
        Action::SendLastPages { .. } => "send last pages",
        Action::SendDeviceState { .. } => "send device state",
        Action::RestoreDirty => "restore dirty",
        Action::ReleaseThrottle => "release throttle",
        Action::KillQemu => "kill QEMU",
        Action::Cleanup => "clean up",
        Action::Surveyed { .. } => "answer the survey",
        Action::Report(_) => "report",
        Action::Refuse { .. } => "refuse",
        Action::Ignored { .. } => "ignore",
    };
    word.to_owned()
}

fn phase_word(phase: &Phase) -> &'static str {
    match phase {
        Phase::Absent => "absent",
        Phase::Holds { .. } => "holds",
        Phase::Stopping { .. } => "stopping",
        Phase::Gave { .. } => "gave",
        Phase::Moved { .. } => "moved",
        Phase::Incoming { .. } => "incoming",
        Phase::Ready { .. } => "ready",
        Phase::Refused { .. } => "refused",
    }
}

impl PeerMessage {
    /// Its name in tables and logs.
    pub fn word(&self) -> &'static str {
        match self {
            PeerMessage::Prepared { .. } => "prepared",
            PeerMessage::Ready { .. } => "ready",
            PeerMessage::Permit { .. } => "permit",
            PeerMessage::AskHolding { .. } => "ask-holding",
            PeerMessage::Holding { .. } => "holding",
            PeerMessage::Confirmed { .. } => "confirmed",
            PeerMessage::Superseded { .. } => "superseded",
            PeerMessage::Refused { .. } => "refused",
            PeerMessage::AskGift { .. } => "ask-gift",
            PeerMessage::Undecided { .. } => "undecided",
            PeerMessage::Withdrawn { .. } => "withdrawn",
            PeerMessage::Abort { .. } => "abort",
            PeerMessage::Failed { .. } => "failed",
        }
    }
}
