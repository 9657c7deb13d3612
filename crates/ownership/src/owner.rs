//! Requests of the owner's people, and what happens to the guest while this host holds it.
//!
//! Part of [`VmCore`]. Refuses: every request whose outcome a handover in progress would make ambiguous.

use crate::core::{VmCore, planted};
use crate::event::{Action, Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase, Power};
use crate::state::{
    Attempt, Coming, Elsewhere, Given, Held, Leaving, OnFail, Qemu, Reaction, Stage, State, Step,
    abort, arm, cleanup, disarm, end, go, kill, release, send, write, write_after,
};
use Reaction::{Ignore, Refuse};
use godwit_types::{Generation, HostName};

const NOT_HERE: &str = "the VM is not on this host";
const SETTLING: &str = "this host is still making its journal durable";
const SWITCHING: &str =
    "a switchover is in progress: ask again in a second, or cancel the migration";
const GIVEN: &str = "the VM was given to another host that has not answered yet";
const RECEIVING: &str = "the VM is just being received by this host";
const WAITING: &str = "this host waits for the VM's former host to confirm the handover";
const JOURNAL: &str = "the journal of this host cannot be written";
const EXHAUSTED: &str = "the generation counter of this VM is exhausted";
/// How far an operator's decision to run an unconfirmed VM goes ahead: never the same generation as one that
/// the former host may have taken by its own operator's decision, which goes ahead by one.
const RESOLVE_STEP: u64 = 1 << 20;

impl VmCore {
    pub(crate) fn on_granted(&self, generation: Generation, expect: Generation) -> Reaction {
        match &self.state {
            State::Elsewhere(_) => self.grant(generation, expect),
            State::Held(_) | State::Leaving(Leaving::Precopy(..)) => {
                Refuse("the VM is on this host already")
            }
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..) | Leaving::GiftUncertain(_)) => Refuse(SWITCHING),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    fn grant(&self, generation: Generation, expect: Generation) -> Reaction {
        if expect != self.highest && !planted!(self, GrantWithoutSurvey) {
            return Refuse("this host has learned of other generations since it was surveyed");
        }
        if generation <= self.highest {
            return Refuse("this host knows that generation or a higher one already");
        }
        let record = self.durable.holding(generation, Power::Off, None);
        let back = OnFail::Back(self.state.clone());
        write(State::Held(Held::Off), record, back, Vec::new())
    }

    /// Every grant made before this survey expects a lower `highest` than the one written now, and nothing at or
    /// below the level is promised any more. A host that may hold the VM answers as it stands: its answer is no "no",
    /// and its next generation is its own business.
    pub(crate) fn on_survey(&self, level: Generation) -> Reaction {
        let surveyed = Step::Do(Action::Surveyed { level });
        match &self.state {
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Elsewhere(_) => match self.surveyed_to(level) {
                Some(highest) => self.raise(highest, vec![surveyed]),
                None => Refuse(EXHAUSTED),
            },
            State::Coming(Coming::Incoming(with)) => match self.surveyed_to(level) {
                Some(highest) => {
                    let prepared = PeerMessage::Prepared {
                        migration: with.migration.clone(),
                        highest,
                    };
                    let told = send(&with.peer, prepared);
                    self.raise(highest, vec![surveyed, told])
                }
                None => Refuse(EXHAUSTED),
            },
            State::Held(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Given(..)
            | State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                go(self.state.clone(), vec![surveyed])
            }
        }
    }

    /// Where a survey leads; none if no generation would be left above it.
    fn surveyed_to(&self, level: Generation) -> Option<Generation> {
        let highest = self.highest.next()?.max(level);
        highest.next().map(|_| highest)
    }

    pub(crate) fn on_host_removed(&self, host: &HostName) -> Reaction {
        match &self.state {
            State::Held(_) => match self.unconfirmed() {
                Some(with) if with.peer == *host => self.confirmed(),
                _ => Ignore("nothing is waited for from that host"),
            },
            State::Given(_, a) | State::Coming(Coming::Promised(_, a)) if a.with.peer == *host => {
                Refuse("the VM is in doubt because of that host: resolve it first")
            }
            State::Leaving(Leaving::Precopy(with, _)) if with.peer == *host => {
                go(State::Held(Held::Running), self.leave(with, Ending::Failed))
            }
            State::Leaving(Leaving::Switching(_, a)) if a.with.peer == *host => {
                self.roll_back(a, Some(Ending::Failed))
            }
            State::Coming(Coming::Incoming(with)) if with.peer == *host => self.fail_incoming(with),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("the gift is being taken back already")
            }
            State::Elsewhere(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Given(..)
            | State::Coming(_) => Ignore("nothing is waited for from that host"),
        }
    }

    /// What was given and not taken is older than what another host holds. The one that it was given to hears, when it
    /// asks, that it was withdrawn.
    pub(crate) fn on_gift_overtaken(&self, by: Generation, with_guest: bool) -> Reaction {
        match &self.state {
            State::Given(_, a) if by <= a.next => {
                Refuse("what was given here is no older than that")
            }
            State::Given(..) if self.qemu != Qemu::Dead && !with_guest => {
                Refuse("its guest stands on this host with its memory: only a person gives that up")
            }
            State::Given(_, a) => write(
                State::Elsewhere(Elsewhere::Absent),
                self.durable.with(Phase::Absent),
                OnFail::Back(State::Given(Given::InDoubt, a.clone())),
                vec![
                    disarm(Timer::Ask),
                    kill(),
                    end(&a.with, Ending::Failed),
                    cleanup(),
                ],
            ),
            State::Elsewhere(_) => Ignore(NOT_HERE),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Held(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Coming(_) => Refuse("this host has not given the VM away"),
        }
    }

    pub(crate) fn on_delete(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Off) => {
                let record = self.durable.with(Phase::Absent);
                write(
                    State::Elsewhere(Elsewhere::Absent),
                    record,
                    OnFail::Back(State::Held(Held::Off)),
                    vec![cleanup()],
                )
            }
            State::Elsewhere(_) => Ignore(NOT_HERE),
            State::Held(Held::Down { .. } | Held::Paused | Held::Running | Held::Unconfirmed)
            | State::Leaving(Leaving::Precopy(..)) => Refuse("stop the VM first"),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..) | Leaving::GiftUncertain(_)) => Refuse(SWITCHING),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    pub(crate) fn on_start(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Off | Held::Down { .. }) => self.start(),
            State::Held(Held::Paused) => Refuse("the VM is paused: resume it"),
            State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)) => {
                Ignore("the VM is running already")
            }
            State::Held(Held::Unconfirmed) => Refuse(WAITING),
            State::Elsewhere(_) => Refuse(NOT_HERE),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..)) => Refuse(SWITCHING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    fn start(&self) -> Reaction {
        let back = OnFail::Back(self.state.clone());
        let (state, then) = match self.unconfirmed() {
            None => (State::Held(Held::Running), vec![Step::Boot]),
            Some(with) => (State::Held(Held::Unconfirmed), self.tell_holding(with)),
        };
        write(state, self.holds(Power::On), back, then)
    }

    /// Tells the source that this host holds the VM, and again until it confirms.
    pub(crate) fn tell_holding(&self, with: &Handover) -> Vec<Step> {
        let message = PeerMessage::Holding {
            migration: with.migration.clone(),
            generation: self.durable.held,
        };
        vec![send(&with.peer, message), arm(Timer::Ask)]
    }

    pub(crate) fn on_stop(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Down { .. } | Held::Paused | Held::Running | Held::Unconfirmed) => {
                self.power_off(Vec::new())
            }
            State::Leaving(Leaving::Precopy(with, _)) => {
                self.power_off(self.leave(with, Ending::Cancelled))
            }
            State::Held(Held::Off) => Ignore("the VM is off already"),
            State::Elsewhere(_) => Refuse(NOT_HERE),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..)) => Refuse(SWITCHING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    /// Kills QEMU and writes that the VM is off.
    fn power_off(&self, mut first: Vec<Step>) -> Reaction {
        first.push(kill());
        let down = State::Held(Held::Down {
            reason: "powered off, but the journal could not be written",
        });
        write_after(
            State::Held(Held::Off),
            first,
            self.holds(Power::Off),
            OnFail::Back(self.unless_unsettled(down)),
            self.tell_if_unconfirmed(),
        )
    }

    /// Where a write that failed leads: a record that was read and never made durable backs nothing, whatever became
    /// of the guest meanwhile.
    fn unless_unsettled(&self, state: State) -> State {
        match self.state {
            State::Recovering => State::Recovering,
            _ => state,
        }
    }

    /// Goes on telling the source that does not know yet.
    fn tell_if_unconfirmed(&self) -> Vec<Step> {
        self.unconfirmed()
            .map(|with| self.tell_holding(with))
            .unwrap_or_default()
    }

    /// The end of a migration that gave nothing away, at its source.
    pub(crate) fn leave(&self, with: &Handover, outcome: Ending) -> Vec<Step> {
        vec![
            disarm(Timer::Switchover),
            release(),
            abort(with),
            end(with, outcome),
        ]
    }

    /// Stops the guest where it stands, and writes why. A person's word counts for more than want of room.
    pub(crate) fn on_pause(&self, why: Power) -> Reaction {
        match &self.state {
            State::Held(Held::Running) => {
                let stop = Step::Do(Action::StopGuest { attempt: None });
                write(
                    State::Held(Held::Paused),
                    self.holds(why),
                    OnFail::Back(State::Held(Held::Running)),
                    vec![stop],
                )
            }
            State::Held(Held::Paused) if why == Power::Paused && self.waits_for_room() => {
                let paused = State::Held(Held::Paused);
                let back = OnFail::Back(paused.clone());
                write(paused, self.holds(why), back, Vec::new())
            }
            State::Held(Held::Paused) => Ignore("the VM is paused already"),
            State::Leaving(Leaving::Precopy(..)) => {
                Refuse("the VM is being migrated: cancel that first")
            }
            State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Refuse("the VM is not running")
            }
            State::Elsewhere(_) => Refuse(NOT_HERE),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..)) => Refuse(SWITCHING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    /// Whether the record says that the guest stands still until its disk has room.
    fn waits_for_room(&self) -> bool {
        self.durable.power() == Some(Power::WaitsForRoom)
    }

    pub(crate) fn on_resume(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Paused) => {
                let record = self.holds(Power::On);
                write(
                    State::Held(Held::Running),
                    record,
                    OnFail::Back(State::Held(Held::Paused)),
                    vec![Step::Cont],
                )
            }
            State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)) => {
                Ignore("the VM is running already")
            }
            State::Held(Held::Off | Held::Down { .. }) => Refuse("the VM is off: start it"),
            State::Held(Held::Unconfirmed) => Refuse(WAITING),
            State::Elsewhere(_) => Refuse(NOT_HERE),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::Switching(..)) => Refuse(SWITCHING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Given(..) => Refuse(GIVEN),
            State::Coming(_) => Refuse(RECEIVING),
        }
    }

    pub(crate) fn on_guest_shutdown(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Paused | Held::Running) => self.power_off(Vec::new()),
            State::Leaving(Leaving::Precopy(with, _)) => {
                self.power_off(self.leave(with, Ending::Failed))
            }
            State::Leaving(Leaving::Switching(_, a)) => {
                self.power_off(self.leave(&a.with, Ending::Failed))
            }
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("decided once the journal can be written")
            }
            State::Given(..) => Ignore(
                "the state that was given away is older than this; the guest goes on from it",
            ),
            State::Recovering if self.durable.may_run().is_some() => self.power_off(Vec::new()),
            State::Recovering => Ignore("no guest runs here"),
            State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Ignore("no guest runs here")
            }
            State::Coming(_) => Ignore("the guest has not run here"),
        }
    }

    /// The guest stands still, for a person or until there is room.
    pub(crate) fn on_guest_halted(&self, why: Power) -> Reaction {
        let paused = |first| {
            write_after(
                State::Held(Held::Paused),
                first,
                self.holds(why),
                OnFail::Back(self.unless_unsettled(State::Held(Held::Paused))),
                self.tell_if_unconfirmed(),
            )
        };
        match &self.state {
            State::Held(Held::Running) => paused(Vec::new()),
            State::Leaving(Leaving::Precopy(with, _)) => paused(self.leave(with, Ending::Failed)),
            State::Leaving(Leaving::Switching(_, a)) => paused(self.leave(&a.with, Ending::Failed)),
            // It does not go on by itself, whatever room there is.
            State::Held(Held::Paused) if why == Power::Paused && self.waits_for_room() => {
                paused(Vec::new())
            }
            State::Held(Held::Paused) => Ignore("the guest is paused already"),
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("decided once the journal can be written")
            }
            State::Given(..) => Ignore(
                "the state that was given away is older than this; the guest goes on from it",
            ),
            State::Recovering if self.durable.may_run().is_some() => paused(Vec::new()),
            State::Recovering => Ignore("no guest runs here"),
            State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Ignore("no guest runs here")
            }
            State::Coming(_) => Ignore("the guest has not run here"),
        }
    }

    pub(crate) fn on_guest_reset(&self) -> Reaction {
        match &self.state {
            State::Held(Held::Paused | Held::Running) => {
                Ignore("a reset does not change who runs the guest")
            }
            State::Leaving(Leaving::Precopy(..)) => {
                Ignore("the reset guest's memory is tracked like any other")
            }
            State::Leaving(Leaving::Switching(..) | Leaving::GiftUncertain(_)) => {
                Ignore("the reset is part of the state that is moved")
            }
            State::Given(..) => Ignore(
                "the state that was given away is older than this; the guest goes on from it",
            ),
            State::Recovering => Ignore("a reset does not change who runs the guest"),
            State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Ignore("no guest runs here")
            }
            State::Coming(_) => Ignore("the guest has not run here"),
        }
    }

    pub(crate) fn on_qemu_died(&self) -> Reaction {
        let down = State::Held(Held::Down {
            reason: "its QEMU died",
        });
        match &self.state {
            State::Held(Held::Paused | Held::Running) => go(down, Vec::new()),
            State::Leaving(Leaving::Precopy(with, _)) => go(down, self.leave(with, Ending::Failed)),
            State::Leaving(Leaving::Switching(
                Stage::Stopping | Stage::LastPages | Stage::Devices { .. },
                a,
            )) => self.guest_lost(&a.with, Ending::Failed),
            State::Leaving(Leaving::Switching(Stage::AwaitingReady, _)) => {
                Ignore("the destination has the whole state: it may still be given the VM")
            }
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("decided once the journal can be written")
            }
            State::Given(..) => Ignore("the destination decides"),
            State::Coming(Coming::Incoming(with)) => self.fail_incoming(with),
            State::Coming(Coming::Promised(_, a)) => self.refuse_attempt(a),
            State::Coming(Coming::Refusing(_)) => Ignore("it is being refused already"),
            State::Recovering => go(State::Recovering, Vec::new()),
            State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Ignore("no QEMU is needed here")
            }
        }
    }

    /// The source's QEMU is gone before the destination had everything.
    pub(crate) fn guest_lost(&self, with: &Handover, outcome: Ending) -> Reaction {
        let down = State::Held(Held::Down {
            reason: "its QEMU died",
        });
        write_after(
            down.clone(),
            self.leave(with, outcome),
            self.holds(Power::On),
            OnFail::Back(down),
            Vec::new(),
        )
    }

    pub(crate) fn on_operator_resolve(&self, run_here: bool, fenced: &HostName) -> Reaction {
        match &self.state {
            State::Given(_, a) if *fenced == a.with.peer => {
                if run_here {
                    self.reclaim(a, Some(a.with.clone()))
                } else {
                    Refuse("the VM would be nowhere: resolve it with --run-on this host")
                }
            }
            State::Coming(Coming::Promised(_, a)) if *fenced == a.with.peer => {
                if run_here {
                    Refuse(
                        "this host cannot know whether the source ran on: give up here, then start the VM anew",
                    )
                } else {
                    self.refuse_attempt(a)
                }
            }
            State::Given(..) | State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                Refuse("the host named as fenced is not the one that must answer")
            }
            State::Held(_) => self.resolve_unconfirmed(run_here, fenced),
            State::Recovering => Refuse(SETTLING),
            State::Leaving(Leaving::GiftUncertain(_)) => Refuse(JOURNAL),
            State::Elsewhere(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Coming(Coming::Incoming(_)) => Refuse("the VM is not in doubt here"),
        }
    }

    fn resolve_unconfirmed(&self, run_here: bool, fenced: &HostName) -> Reaction {
        match self.unconfirmed() {
            Some(with) if run_here && with.peer == *fenced => self.outrank(with),
            Some(_) if run_here => {
                Refuse("the host named as fenced is not the one that must answer")
            }
            Some(_) => Refuse("this host holds the VM: stop it instead"),
            None => Refuse("the VM is not in doubt here"),
        }
    }

    /// The source knows that this host holds the VM (or is fenced for good).
    pub(crate) fn confirmed(&self) -> Reaction {
        let mut record = self.durable.clone();
        if let Phase::Holds { unconfirmed, .. } = &mut record.phase {
            *unconfirmed = None;
        }
        let back = OnFail::Back(self.state.clone());
        let done = disarm(Timer::Ask);
        if self.state == State::Held(Held::Unconfirmed) {
            write(State::Held(Held::UNASKED), record, back, vec![done])
        } else {
            write(self.state.clone(), record, back, vec![done])
        }
    }

    /// The operator runs the VM here although the source has not answered. It may come back as a holder by
    /// its own operator's decision; the one that is higher then wins, so both go on telling each other.
    fn outrank(&self, with: &Handover) -> Reaction {
        let Some(next) = self.highest.0.checked_add(RESOLVE_STEP).map(Generation) else {
            return Refuse(EXHAUSTED);
        };
        let (power, run) = match &self.state {
            State::Held(Held::Unconfirmed) => (Power::On, vec![Step::Boot]),
            State::Held(Held::Off) => (Power::Off, Vec::new()),
            State::Held(Held::Paused) if self.waits_for_room() => (Power::WaitsForRoom, Vec::new()),
            State::Held(Held::Paused) => (Power::Paused, Vec::new()),
            _ => (Power::On, Vec::new()),
        };
        let state = match &self.state {
            State::Held(Held::Unconfirmed) => State::Held(Held::Running),
            other => other.clone(),
        };
        let record = self.durable.holding(next, power, Some(with.clone()));
        let mut then = run;
        then.push(arm(Timer::Ask));
        write(state, record, OnFail::Back(self.state.clone()), then)
    }

    /// The holder's way out of a gift that was not taken: a generation above all, then run. With
    /// `unconfirmed` the destination has not refused but is fenced: it must be told when it comes back.
    pub(crate) fn reclaim(&self, a: &Attempt, unconfirmed: Option<Handover>) -> Reaction {
        let Some(next) = self.highest.next() else {
            return Refuse(EXHAUSTED);
        };
        let again = if unconfirmed.is_some() {
            arm(Timer::Ask)
        } else {
            disarm(Timer::Ask)
        };
        // A guest that is gone is booted on an operator's word alone; else its host asks first, as after any reboot.
        let (state, run) = match (self.qemu, &unconfirmed) {
            (Qemu::Dead, None) => (State::Held(Held::UNASKED), None),
            (Qemu::Dead, Some(_)) => (State::Held(Held::Running), Some(Step::Boot)),
            _ => (State::Held(Held::Running), Some(Step::Cont)),
        };
        let record = self.durable.holding(next, Power::On, unconfirmed);
        let mut then = vec![again, Step::Do(Action::RestoreDirty), release()];
        then.extend(run);
        then.push(end(&a.with, Ending::Refused));
        let back = OnFail::Back(State::Given(Given::InDoubt, a.clone()));
        write(state, record, back, then)
    }
}
