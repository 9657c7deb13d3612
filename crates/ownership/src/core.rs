//! The core: takes one event at a time, keeps the order of writing and acting, mints permits.
//!
//! Owns the state of one VM at one host, on behalf of the process that has the VM's lock. Refuses: to let any
//! event overtake a record that is being written, and to mint a permit that no durable record backs.

use crate::event::{Action, Event, Status, Timer};
use crate::permit::RunPermit;
use crate::record::{Handover, HostRecord, Phase, Power, RecordError};
use crate::state::{
    Coming, Elsewhere, Given, Held, Leaving, OnFail, Plan, Promise, Qemu, Reaction, Stage, State,
    StateName, Step, arm, go, write,
};
use godwit_types::{Generation, HostName};
use std::collections::VecDeque;

/// Messages and timers that wait for a record are dropped beyond this number; they come again.
const DEFERRED_MAX: usize = 256;

/// A record that is being written.
#[derive(Debug)]
struct Pending {
    record: HostRecord,
    on_fail: OnFail,
    then: Vec<Step>,
}

/// Who may run one VM, at one host. See the crate's documentation for how to drive it.
#[derive(Debug)]
pub struct VmCore {
    pub(crate) host: HostName,
    pub(crate) state: State,
    /// What is known to be durable.
    pub(crate) durable: HostRecord,
    /// The highest generation that may be on the disk: `durable.highest`, or more after a failed write.
    pub(crate) highest: Generation,
    pub(crate) qemu: Qemu,
    pending: Option<Pending>,
    deferred: VecDeque<Event>,
    reported: Option<Status>,
    #[cfg(feature = "planted-faults")]
    pub(crate) plant: Option<crate::plant::Plant>,
}

/// Why a migration is refused whose permission a survey or a later handover has overtaken.
pub(crate) const OLD_PERMISSION: &str = "the permission for this migration is older than what this host knows: ask the controller again";

/// True if the fault is planted into this core; `false`, at compile time, without the feature.
macro_rules! planted {
    ($core:expr, $plant:ident) => {{
        #[cfg(feature = "planted-faults")]
        {
            $core.plant == Some(crate::plant::Plant::$plant)
        }
        #[cfg(not(feature = "planted-faults"))]
        {
            false
        }
    }};
}
pub(crate) use planted;

impl VmCore {
    /// A core for a process that has just taken the VM's lock at `host`: `record` is what the journal says
    /// ([`HostRecord::absent`] if there is none), `qemu` what it sees of the VM's QEMU.
    ///
    /// The first action writes the record once more: what a dead predecessor wrote may be readable without
    /// being durable, and nothing may be said or done on the strength of it before it is.
    pub fn recover(
        record: HostRecord,
        host: HostName,
        qemu: Qemu,
    ) -> Result<(Self, Vec<Action>), RecordError> {
        record.check()?;
        let mut core = Self::unsettled(record, host, qemu);
        let actions = core.begin();
        Ok((core, actions))
    }

    /// As [`VmCore::recover`], with a fault planted from the first action on.
    #[cfg(feature = "planted-faults")]
    pub fn recover_planted(
        record: HostRecord,
        host: HostName,
        qemu: Qemu,
        plant: Option<crate::plant::Plant>,
    ) -> Result<(Self, Vec<Action>), RecordError> {
        record.check()?;
        let mut core = Self::unsettled(record, host, qemu);
        core.plant = plant;
        let actions = core.begin();
        Ok((core, actions))
    }

    pub(crate) fn unsettled(record: HostRecord, host: HostName, qemu: Qemu) -> Self {
        Self {
            host,
            state: State::Recovering,
            highest: record.highest,
            durable: record,
            qemu,
            pending: None,
            deferred: VecDeque::new(),
            reported: None,
            #[cfg(feature = "planted-faults")]
            plant: None,
        }
    }

    fn begin(&mut self) -> Vec<Action> {
        let mut out = Vec::new();
        if planted!(self, TrustUnsyncedRecord) {
            self.settle(&mut out);
        } else {
            let again = self.write_again();
            self.carry_out(again, &mut out);
        }
        out
    }

    /// Takes one event; returns what to do, in order. A [`Action::Persist`] is last: what follows from it comes
    /// with [`Event::Persisted`]. Events that arrive meanwhile wait inside.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        match event {
            Event::Persisted => self.on_persisted(&mut out),
            Event::PersistFailed { unchanged } => self.on_persist_failed(unchanged, &mut out),
            other if self.pending.is_some() => self.defer(other),
            other => self.step(other, &mut out),
        }
        while self.pending.is_none() {
            let Some(next) = self.deferred.pop_front() else {
                break;
            };
            self.step(next, &mut out);
        }
        out
    }

    fn defer(&mut self, event: Event) {
        let repeats = matches!(event, Event::Message { .. } | Event::Timeout(_));
        if !repeats || self.deferred.len() < DEFERRED_MAX {
            self.deferred.push_back(event);
        }
    }

    fn step(&mut self, event: Event, out: &mut Vec<Action>) {
        self.observe(&event);
        let kind = event.kind();
        match self.react(event) {
            Reaction::Ignore(why) => out.push(Action::Ignored { event: kind, why }),
            Reaction::Refuse(why) => out.push(Action::Refuse { event: kind, why }),
            Reaction::Go(plan) => self.carry_out(*plan, out),
        }
    }

    /// Facts about QEMU hold whatever the state makes of them.
    fn observe(&mut self, event: &Event) {
        match event {
            Event::QemuDied => self.qemu = Qemu::Dead,
            Event::Stopped { .. } | Event::GuestHalted | Event::StillOutOfRoom
                if self.qemu == Qemu::Running && self.may_have_stopped(event) =>
            {
                self.qemu = Qemu::Paused;
            }
            _ => {}
        }
    }

    /// A `Stopped` of an attempt that was rolled back says nothing about the guest now.
    fn may_have_stopped(&self, event: &Event) -> bool {
        match (event, &self.state) {
            (
                Event::Stopped { attempt },
                State::Leaving(Leaving::Switching(Stage::Stopping, now)),
            ) => *attempt == now.next,
            (Event::Stopped { .. }, _) => false,
            _ => true,
        }
    }

    fn carry_out(&mut self, plan: Plan, out: &mut Vec<Action>) {
        self.state = plan.state;
        self.emit(plan.first, out);
        match plan.persist {
            None => self.report(out),
            Some((record, on_fail)) => {
                self.highest = self.highest.max(record.highest);
                let record = record.raised(self.highest);
                out.push(Action::Persist(record.clone()));
                self.pending = Some(Pending {
                    record,
                    on_fail,
                    then: plan.then,
                });
            }
        }
    }

    fn on_persisted(&mut self, out: &mut Vec<Action>) {
        let Some(pending) = self.pending.take() else {
            out.push(Action::Ignored {
                event: crate::EventKind::Persisted,
                why: "nothing was being written",
            });
            return;
        };
        self.durable = pending.record;
        self.highest = self.highest.max(self.durable.highest);
        self.emit(pending.then, out);
        if matches!(self.state, State::Recovering) {
            self.settle(out);
        } else if self.pending.is_none() {
            self.report(out);
        }
    }

    fn on_persist_failed(&mut self, unchanged: bool, out: &mut Vec<Action>) {
        let Some(pending) = self.pending.take() else {
            out.push(Action::Ignored {
                event: crate::EventKind::PersistFailed,
                why: "nothing was being written",
            });
            return;
        };
        out.push(Action::Report(Status::JournalFailed));
        self.reported = None;
        let plan = match pending.on_fail {
            OnFail::Back(state) => {
                if matches!(state, State::Recovering) {
                    // What a recovery makes durable before anything is said: the guest's end is not undone.
                    self.durable = pending.record;
                }
                go(state, vec![arm(Timer::Ask)])
            }
            OnFail::UnwindGift(attempt) => self.unwind_gift(attempt, unchanged),
            OnFail::FailIncoming(with) => self.fail_incoming(&with),
        };
        if let Reaction::Go(plan) = plan {
            self.carry_out(*plan, out);
        }
    }

    /// Turns planned steps into actions and mints the permits that the durable record backs.
    fn emit(&mut self, steps: Vec<Step>, out: &mut Vec<Action>) {
        for step in steps {
            match step {
                Step::Boot => self.run(Action::Boot, out),
                Step::Cont => self.run(Action::Cont, out),
                Step::Do(action) => {
                    match action {
                        Action::KillQemu => self.qemu = Qemu::Dead,
                        Action::StopGuest { attempt: None } => self.qemu = Qemu::Paused,
                        _ => {}
                    }
                    out.push(action);
                }
            }
        }
    }

    fn run(&mut self, how: fn(RunPermit) -> Action, out: &mut Vec<Action>) {
        let permit = RunPermit::mint(&self.durable);
        #[cfg(feature = "planted-faults")]
        let permit = permit.or_else(|| {
            self.plant
                .map(|_| RunPermit::forge(self.durable.vm.clone(), self.highest))
        });
        if let Some(permit) = permit {
            self.qemu = Qemu::Running;
            out.push(how(permit));
        }
    }

    fn report(&mut self, out: &mut Vec<Action>) {
        let status = self.status();
        if self.reported.as_ref() != Some(&status) {
            self.reported = Some(status.clone());
            out.push(Action::Report(status));
        }
    }

    /// What to show now.
    pub fn status(&self) -> Status {
        let generation = self.durable.held;
        match &self.state {
            State::Recovering if self.pending.is_none() => Status::JournalFailed,
            State::Recovering => recovering_status(&self.durable),
            State::Elsewhere(Elsewhere::Absent | Elsewhere::Refused) => Status::Absent,
            State::Held(Held::Off) => Status::Off,
            State::Held(Held::Down { reason }) => Status::Down { reason },
            State::Held(Held::Paused) => Status::Paused,
            State::Held(Held::Running) => Status::Running { generation },
            State::Held(Held::Unconfirmed) => self.unconfirmed_status(),
            State::Leaving(Leaving::Precopy(with, _)) => Status::Migrating {
                migration: with.migration.clone(),
            },
            State::Leaving(Leaving::Switching(_, a)) | State::Given(Given::Gave, a) => {
                Status::SwitchingOver {
                    migration: a.with.migration.clone(),
                }
            }
            State::Leaving(Leaving::GiftUncertain(_)) | State::Coming(Coming::Refusing(_)) => {
                Status::JournalFailed
            }
            State::Given(Given::InDoubt, a) => {
                self.doubt(a.next, &a.with.peer, "--run-on", &self.host)
            }
            State::Elsewhere(Elsewhere::Moved(a)) => Status::Moved {
                to: a.with.peer.clone(),
            },
            State::Coming(Coming::Incoming(with)) => Status::Incoming {
                migration: with.migration.clone(),
            },
            State::Coming(Coming::Promised(Promise::Kept, a)) => Status::Incoming {
                migration: a.with.migration.clone(),
            },
            State::Coming(Coming::Promised(Promise::InDoubt, a)) => {
                self.doubt(a.next, &a.with.peer, "--give-up-on", &self.host)
            }
        }
    }

    fn unconfirmed_status(&self) -> Status {
        match self.unconfirmed() {
            Some(with) => self.doubt(self.durable.held, &with.peer, "--run-on", &self.host),
            None => Status::Down {
                reason: "waiting to start",
            },
        }
    }

    fn doubt(
        &self,
        generation: Generation,
        peer: &HostName,
        verb: &str,
        here: &HostName,
    ) -> Status {
        Status::InDoubt {
            generation,
            peer: peer.clone(),
            command: format!(
                "godwit vm resolve {} {verb} {here} --confirm-fenced {peer}",
                self.durable.vm
            ),
        }
    }

    /// The record that is known to be durable.
    pub fn record(&self) -> &HostRecord {
        &self.durable
    }

    /// The highest generation that may be on the disk: what a new permission or grant must be above.
    pub fn highest(&self) -> Generation {
        self.highest
    }

    /// Whether a permission to migrate is newer than all that this host knows: a durable "no" to a survey binds every
    /// permission that was given before it.
    pub(crate) fn is_permitted(&self, generation: Generation) -> bool {
        generation > self.highest || planted!(self, OldPermissionTaken)
    }

    /// What is known of the VM's QEMU.
    pub fn qemu(&self) -> Qemu {
        self.qemu
    }

    /// The state's name, for traces and tables.
    pub fn state_name(&self) -> StateName {
        self.state.name()
    }

    /// Whether a record is being written.
    pub fn is_writing(&self) -> bool {
        self.pending.is_some()
    }

    /// The handover that the source has not confirmed, if any.
    pub(crate) fn unconfirmed(&self) -> Option<&Handover> {
        match &self.durable.phase {
            Phase::Holds { unconfirmed, .. } => unconfirmed.as_ref(),
            Phase::Absent
            | Phase::Stopping { .. }
            | Phase::Gave { .. }
            | Phase::Moved { .. }
            | Phase::Incoming { .. }
            | Phase::Ready { .. }
            | Phase::Refused { .. } => None,
        }
    }

    /// The record of a holder with this power, everything else kept.
    pub(crate) fn holds(&self, power: Power) -> HostRecord {
        self.durable
            .holding(self.durable.held, power, self.unconfirmed().cloned())
    }

    /// Writes the durable record again, unchanged.
    pub(crate) fn write_again(&self) -> Plan {
        let state = self.state.clone();
        let back = OnFail::Back(state.clone());
        Plan {
            state,
            first: Vec::new(),
            persist: Some((self.durable.clone(), back)),
            then: Vec::new(),
        }
    }

    /// Writes the record with `highest` raised to `generation`, keeps the state, then does `then`.
    pub(crate) fn raise(&self, generation: Generation, then: Vec<Step>) -> Reaction {
        let state = self.state.clone();
        let back = OnFail::Back(state.clone());
        write(state, self.tidied().raised(generation), back, then)
    }

    /// The durable record, without what an earlier failed write left standing in it.
    fn tidied(&self) -> HostRecord {
        match (&self.state, &self.durable.phase) {
            (State::Elsewhere(Elsewhere::Absent), _) => self.durable.with(Phase::Absent),
            (
                State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)),
                Phase::Stopping { .. },
            ) => self.holds(Power::On),
            _ => self.durable.clone(),
        }
    }

    fn settle(&mut self, out: &mut Vec<Action>) {
        if let Reaction::Go(plan) = self.settled() {
            self.carry_out(*plan, out);
        }
    }
}

/// What a recovering host may show before its record is durable again.
fn recovering_status(record: &HostRecord) -> Status {
    match &record.phase {
        Phase::Absent | Phase::Incoming { .. } | Phase::Refused { .. } => Status::Absent,
        Phase::Holds {
            power: Power::Off, ..
        } => Status::Off,
        Phase::Holds { .. } | Phase::Stopping { .. } | Phase::Gave { .. } | Phase::Ready { .. } => {
            Status::Down {
                reason: "the host is reading its journal",
            }
        }
        Phase::Moved { to, .. } => Status::Moved { to: to.clone() },
    }
}
