//! What a successor does with what it finds: the record on the disk, and QEMU.
//!
//! Part of [`VmCore`]. Refuses: to act before the record that it read is durable again, to resume a guest that
//! was given away, and to boot one at all.

use crate::core::{VmCore, planted};
use crate::event::{Action, Ending};
use crate::record::{Handover, HostRecord, Phase, Power};
use crate::state::{
    Attempt, Coming, Elsewhere, Given, Held, OnFail, Promise, Qemu, Reaction, State, Step, cleanup,
    go, kill, release, write_after,
};
use godwit_types::HostName;

impl VmCore {
    /// What a successor does about a record that is durable again.
    pub(crate) fn settled(&self) -> Reaction {
        let kill_if_alive = || {
            if self.qemu == Qemu::Dead {
                Vec::new()
            } else {
                vec![kill()]
            }
        };
        let attempt = |migration: &_, peer: &HostName, next| Attempt {
            with: Handover {
                migration: Clone::clone(migration),
                peer: peer.clone(),
            },
            next,
        };
        match &self.durable.phase {
            Phase::Absent => go(State::Elsewhere(Elsewhere::Absent), kill_if_alive()),
            Phase::Holds { power, .. } => self.settle_holder(*power),
            Phase::Stopping {
                migration,
                next,
                to,
                ..
            } => self.settle_stopping(&attempt(migration, to, *next)),
            Phase::Gave {
                generation,
                migration,
                to,
            } => self.settle_gave(attempt(migration, to, *generation)),
            Phase::Moved {
                generation,
                migration,
                to,
            } => {
                let mut steps = kill_if_alive();
                steps.push(cleanup());
                go(
                    State::Elsewhere(Elsewhere::Moved(attempt(migration, to, *generation))),
                    steps,
                )
            }
            Phase::Incoming { migration, from } => self.fail_incoming(&Handover {
                migration: migration.clone(),
                peer: from.clone(),
            }),
            Phase::Ready {
                generation,
                migration,
                from,
            } => self.settle_ready(attempt(migration, from, *generation)),
            Phase::Refused { .. } => {
                let mut steps = kill_if_alive();
                steps.push(cleanup());
                go(State::Elsewhere(Elsewhere::Refused), steps)
            }
        }
    }

    fn settle_holder(&self, power: Power) -> Reaction {
        let tell = self
            .unconfirmed()
            .map(|with| self.tell_holding(with))
            .unwrap_or_default();
        let go_telling = |state, mut steps: Vec<Step>| {
            steps.extend(tell);
            go(state, steps)
        };
        match (power, self.qemu) {
            (Power::On, Qemu::Running) => go_telling(State::Held(Held::Running), vec![release()]),
            (Power::On, Qemu::Paused) => {
                go_telling(State::Held(Held::Running), vec![release(), Step::Cont])
            }
            (Power::On | Power::WaitsForRoom, Qemu::Dead) if planted!(self, BootsWithoutAsking) => {
                go(State::Held(Held::Running), vec![Step::Boot])
            }
            (Power::On | Power::WaitsForRoom, Qemu::Dead) => match self.unconfirmed() {
                Some(_) if planted!(self, UnconfirmedBoots) => {
                    go(State::Held(Held::Running), vec![Step::Boot])
                }
                Some(_) => go_telling(State::Held(Held::Unconfirmed), Vec::new()),
                None => go(State::Held(Held::UNASKED), Vec::new()),
            },
            (Power::Paused | Power::WaitsForRoom, Qemu::Running) => {
                let stop = Step::Do(Action::StopGuest { attempt: None });
                go_telling(State::Held(Held::Paused), vec![stop])
            }
            (Power::Paused | Power::WaitsForRoom, Qemu::Paused) => {
                go_telling(State::Held(Held::Paused), Vec::new())
            }
            (Power::Paused, Qemu::Dead) => {
                let down = State::Held(Held::Down {
                    reason: "it was paused when its QEMU died",
                });
                go_telling(down, Vec::new())
            }
            (Power::Off, Qemu::Dead) => go_telling(State::Held(Held::Off), Vec::new()),
            (Power::Off, Qemu::Paused | Qemu::Running) => {
                go_telling(State::Held(Held::Off), vec![kill()])
            }
        }
    }

    /// The guest was stopped, or about to be, and nothing was given: it runs on here, if it still lives.
    fn settle_stopping(&self, a: &Attempt) -> Reaction {
        let mut first = self.leave(&a.with, Ending::Failed);
        let (state, on_fail) = match self.qemu {
            Qemu::Dead => (State::Held(Held::UNASKED), State::Recovering),
            Qemu::Paused | Qemu::Running => {
                (State::Held(Held::Running), State::Held(Held::Running))
            }
        };
        if self.qemu == Qemu::Paused {
            first.push(Step::Cont);
        }
        let record: HostRecord = self.holds(Power::On);
        write_after(state, first, record, OnFail::Back(on_fail), Vec::new())
    }

    fn settle_gave(&self, a: Attempt) -> Reaction {
        if planted!(self, SuccessorResumesGave) {
            return go(State::Held(Held::Running), vec![Step::Cont]);
        }
        let mut steps = Vec::new();
        // No core lets it run past the gift; but if it does run, it is the second one.
        if self.qemu == Qemu::Running && !planted!(self, SuccessorLeavesGaveRunning) {
            steps.push(Step::Do(Action::StopGuest { attempt: None }));
        }
        steps.extend(self.ask_holding(&a));
        go(State::Given(Given::InDoubt, a), steps)
    }

    fn settle_ready(&self, a: Attempt) -> Reaction {
        if self.qemu == Qemu::Paused {
            let ask = self.ask_gift(&a);
            go(State::Coming(Coming::Promised(Promise::InDoubt, a)), ask)
        } else {
            self.refuse_attempt(&a)
        }
    }
}
