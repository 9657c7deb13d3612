//! The destination's side of a migration: receive, promise, wait, take or refuse.
//!
//! Part of [`VmCore`]. Refuses: to break a promise by a time-out, and to take what it did not promise.

use crate::core::{OLD_PERMISSION, VmCore, planted};
use crate::event::{Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase, Power};
use crate::state::{
    Attempt, Coming, Elsewhere, Held, OnFail, Promise, Reaction, State, Step, arm, cleanup, disarm,
    end, go, kill, send, write, write_after,
};
use Reaction::{Ignore, Refuse};
use godwit_types::{Generation, HostName, MigrationId};

const HELD_HERE: &str = "this host holds the VM itself";

impl VmCore {
    pub(crate) fn on_prepare(
        &self,
        migration: MigrationId,
        from: HostName,
        generation: Generation,
    ) -> Reaction {
        match &self.state {
            State::Elsewhere(_) if from == self.host => {
                Refuse("a host cannot receive a VM from itself")
            }
            State::Elsewhere(_) if !self.is_permitted(generation) => Refuse(OLD_PERMISSION),
            State::Elsewhere(_) => {
                let phase = Phase::Incoming {
                    migration: migration.clone(),
                    from: from.clone(),
                };
                let with = Handover {
                    migration,
                    peer: from,
                };
                let prepared = PeerMessage::Prepared {
                    migration: with.migration.clone(),
                    highest: self.highest,
                };
                let then = vec![send(&with.peer, prepared)];
                let back = OnFail::Back(self.state.clone());
                write(
                    State::Coming(Coming::Incoming(with)),
                    self.durable.with(phase),
                    back,
                    then,
                )
            }
            State::Coming(Coming::Incoming(with))
                if with.migration == migration && with.peer == from =>
            {
                Ignore("prepared already")
            }
            State::Coming(_) => Refuse("another migration of the VM to this host is not finished"),
            State::Given(..) => {
                Refuse("this host waits for the answer to an earlier handover of the VM")
            }
            State::Recovering => Refuse("this host is still making its journal durable"),
            State::Held(_) | State::Leaving(_) => Refuse(HELD_HERE),
        }
    }

    pub(crate) fn on_loaded(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Coming(Coming::Incoming(with)) if attempt > self.highest => {
                self.promise(with, attempt)
            }
            State::Coming(Coming::Incoming(with)) => self.fail_incoming(with),
            State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => Ignore("promised already"),
            State::Recovering | State::Elsewhere(_) | State::Given(..) => {
                Ignore("nothing is being received")
            }
            State::Held(_) | State::Leaving(_) => Ignore(HELD_HERE),
        }
    }

    fn promise(&self, with: &Handover, next: Generation) -> Reaction {
        let phase = Phase::Ready {
            generation: next,
            migration: with.migration.clone(),
            from: with.peer.clone(),
        };
        let ready = PeerMessage::Ready {
            migration: with.migration.clone(),
            generation: next,
        };
        let attempt = Attempt {
            with: with.clone(),
            next,
        };
        write(
            State::Coming(Coming::Promised(Promise::Kept, attempt)),
            self.durable.with(phase).raised(next),
            OnFail::FailIncoming(with.clone()),
            vec![send(&with.peer, ready), arm(Timer::Ask)],
        )
    }

    pub(crate) fn on_incoming_failed(&self) -> Reaction {
        match &self.state {
            State::Coming(Coming::Incoming(with)) => self.fail_incoming(with),
            State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                Ignore("everything was loaded: a promise is kept until the source withdraws")
            }
            State::Recovering | State::Elsewhere(_) | State::Given(..) => {
                Ignore("nothing is being received")
            }
            State::Held(_) | State::Leaving(_) => Ignore(HELD_HERE),
        }
    }

    /// Nothing was promised: this host's part is thrown away.
    pub(crate) fn fail_incoming(&self, with: &Handover) -> Reaction {
        // Who carries the message knows why.
        let failed = PeerMessage::Failed {
            migration: with.migration.clone(),
            reason: None,
        };
        let first = vec![
            kill(),
            send(&with.peer, failed),
            end(with, Ending::Failed),
            cleanup(),
        ];
        self.forget_incoming(first)
    }

    /// The record says that nothing is on its way any more. Where that cannot be written it is tried again.
    pub(crate) fn forget_incoming(&self, first: Vec<Step>) -> Reaction {
        let absent = || State::Elsewhere(Elsewhere::Absent);
        let record = self.durable.with(Phase::Absent);
        write_after(absent(), first, record, OnFail::Back(absent()), Vec::new())
    }

    /// Never takes this attempt's generation: durable, QEMU dead, then said.
    pub(crate) fn refuse_attempt(&self, a: &Attempt) -> Reaction {
        let record = self.durable.with(Phase::Refused {
            generation: a.next,
            migration: a.with.migration.clone(),
            from: a.with.peer.clone(),
        });
        let then = vec![
            disarm(Timer::Ask),
            kill(),
            self.refusal(&a.with, a.next),
            end(&a.with, Ending::Failed),
            cleanup(),
        ];
        let back = OnFail::Back(State::Coming(Coming::Refusing(a.clone())));
        write(
            State::Elsewhere(Elsewhere::Refused),
            record.raised(a.next),
            back,
            then,
        )
    }

    fn refusal(&self, with: &Handover, generation: Generation) -> Step {
        let message = PeerMessage::Refused {
            migration: with.migration.clone(),
            generation,
        };
        send(&with.peer, message)
    }

    /// Asks the source whether it gave.
    pub(crate) fn ask_gift(&self, a: &Attempt) -> Vec<Step> {
        let message = PeerMessage::AskGift {
            migration: a.with.migration.clone(),
            generation: a.next,
        };
        vec![send(&a.with.peer, message), arm(Timer::Ask)]
    }

    pub(crate) fn doubt_ready(&self, a: &Attempt) -> Reaction {
        if planted!(self, RefusedNotDurable) {
            return go(
                State::Coming(Coming::Promised(Promise::InDoubt, a.clone())),
                vec![self.refusal(&a.with, a.next)],
            );
        }
        if planted!(self, CleanupReadyOnTimeout) {
            return go(
                State::Elsewhere(Elsewhere::Refused),
                vec![kill(), cleanup()],
            );
        }
        go(
            State::Coming(Coming::Promised(Promise::InDoubt, a.clone())),
            self.ask_gift(a),
        )
    }

    /// The VM is this host's: durable, then running, then said.
    pub(crate) fn take(&self, a: &Attempt) -> Reaction {
        let record = self
            .durable
            .holding(a.next, Power::On, Some(a.with.clone()));
        let holding = send(
            &a.with.peer,
            PeerMessage::Holding {
                migration: a.with.migration.clone(),
                generation: a.next,
            },
        );
        let mut first = Vec::new();
        let mut then = Vec::new();
        if planted!(self, RunBeforeHolds) {
            first.push(Step::Cont);
        } else {
            then.push(Step::Cont);
        }
        if planted!(self, AnswerFromMemory) {
            first.push(holding);
        } else {
            then.push(holding);
        }
        then.push(end(&a.with, Ending::Completed));
        then.push(arm(Timer::Ask));
        let back = OnFail::Back(State::Coming(Coming::Promised(Promise::InDoubt, a.clone())));
        write_after(State::Held(Held::Running), first, record, back, then)
    }

    /// A permit, or the question of a source that gave: both say that the gift is durable.
    pub(crate) fn on_gift(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        match &self.state {
            State::Coming(Coming::Promised(_, a)) if a.next == generation => {
                if a.is(from, migration) {
                    self.take(a)
                } else {
                    Ignore("not from the source of the migration that was promised")
                }
            }
            State::Coming(Coming::Refusing(a)) if a.next == generation && a.is(from, migration) => {
                self.refuse_attempt(a)
            }
            State::Coming(Coming::Incoming(with))
                if with.is(from, migration) && generation > self.durable.highest =>
            {
                self.refuse_incoming(with, generation)
            }
            State::Recovering => Ignore("answered once the journal is durable"),
            State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => self.answer_holding(from, migration, generation),
        }
    }

    /// The source says it gave, but this host is still loading: it never promised.
    fn refuse_incoming(&self, with: &Handover, generation: Generation) -> Reaction {
        self.refuse_attempt(&Attempt {
            with: with.clone(),
            next: generation,
        })
    }

    /// Answers from the durable record alone. Whatever is at or below a generation that was held here was
    /// taken (or is beyond the asker's reach); whatever is at or below the highest seen and was not held
    /// never will be.
    fn answer_holding(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        let with = Handover {
            migration: migration.clone(),
            peer: from.clone(),
        };
        if generation <= self.durable.held {
            let message = PeerMessage::Holding {
                migration: with.migration,
                generation,
            };
            return go(self.state.clone(), vec![send(from, message)]);
        }
        self.answer(generation, self.refusal(&with, generation))
    }

    pub(crate) fn on_peer_undecided(&self) -> Reaction {
        match &self.state {
            State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                Ignore("the source has not decided: the promise stands")
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(Coming::Incoming(_)) => Ignore("nothing was asked"),
        }
    }

    pub(crate) fn on_peer_withdrawn(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        match &self.state {
            State::Coming(Coming::Promised(_, a))
                if a.next == generation && a.is(from, migration) =>
            {
                self.refuse_attempt(a)
            }
            State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                Ignore("about another attempt")
            }
            State::Coming(Coming::Incoming(_)) => {
                Ignore("nothing was promised; the migration may go on")
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..) => Ignore("nothing is promised here"),
        }
    }

    pub(crate) fn on_peer_aborted(&self, from: &HostName, migration: &MigrationId) -> Reaction {
        match &self.state {
            State::Coming(Coming::Incoming(with)) if with.is(from, migration) => {
                self.fail_incoming(with)
            }
            State::Coming(Coming::Promised(_, a)) if a.is(from, migration) => {
                self.refuse_attempt(a)
            }
            State::Coming(_) => Ignore("about another migration"),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..) => Ignore("nothing is received here"),
        }
    }
}
