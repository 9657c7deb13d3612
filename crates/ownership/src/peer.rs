//! What a peer asks and answers about the VM at its source, and who yields to whom.
//!
//! Part of [`VmCore`]. Refuses: to answer from anything but the durable record.

use crate::core::{VmCore, planted};
use crate::event::{Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase};
use crate::state::{
    Attempt, Coming, Elsewhere, Given, Held, Leaving, OnFail, Reaction, Stage, State, Step,
    cleanup, disarm, go, kill, send, write_after,
};
use Reaction::Ignore;
use godwit_types::{Generation, HostName, MigrationId};

/// A peer cannot push the counter further than this at once: nobody exhausts it with one message.
const PLAUSIBLE_STEP: u64 = 1 << 32;

/// Nor above this with any number of them: no use comes near it, and a controller believes every host up to here, so that
/// its next survey is above whatever peers made of the counter.
pub const PEERS_REACH: Generation = Generation(1 << 40);

const FAR: &str = "a generation far beyond every one known is not believed";
/// Why a question about an unknown generation is not answered.
pub(crate) const UNMOVED: &str =
    "a generation that this host does not know, from a host that its record does not wait for";

impl Handover {
    pub(crate) fn is(&self, peer: &HostName, migration: &MigrationId) -> bool {
        self.peer == *peer && self.migration == *migration
    }
}

impl Attempt {
    pub(crate) fn is(&self, peer: &HostName, migration: &MigrationId) -> bool {
        self.with.is(peer, migration)
    }
}

impl VmCore {
    pub(crate) fn is_plausible(&self, generation: Generation) -> bool {
        generation.0 <= self.highest.0.saturating_add(PLAUSIBLE_STEP)
    }

    /// Whether a peer's word may raise the counter so far.
    fn is_in_reach(&self, generation: Generation) -> bool {
        let in_reach = generation <= PEERS_REACH || planted!(self, PeersReachAll);
        in_reach && self.is_plausible(generation)
    }

    /// Only a host that holds nothing and expects nothing rises for a question of another one, to answer it durably.
    /// What a holder, or a destination in the middle of a migration, knows is moved by its own attempts alone.
    pub(crate) fn may_rise_to(&self, generation: Generation) -> bool {
        let far = !self.is_in_reach(generation);
        match &self.state {
            State::Elsewhere(_) => !far,
            _ if planted!(self, AnybodyMovesGenerations) => !far,
            State::Recovering
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => false,
        }
    }

    /// The source of a migration learns of generations that its destination has seen since (surveys), so that its
    /// next attempt is new to both.
    pub(crate) fn on_peer_prepared(
        &self,
        from: &HostName,
        migration: &MigrationId,
        highest: Generation,
    ) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Precopy(with, _)) if with.is(from, migration) => {
                self.learn(highest)
            }
            State::Leaving(Leaving::Switching(
                Stage::Stopping | Stage::LastPages | Stage::Devices { .. },
                a,
            )) if a.is(from, migration) => self.learn(highest),
            State::Held(_) | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..)) => {
                Ignore("no migration to that host begins or switches over here")
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Leaving(Leaving::GiftUncertain(_))
            | State::Given(..)
            | State::Coming(_) => Ignore("this host does not hold the VM"),
        }
    }

    fn learn(&self, highest: Generation) -> Reaction {
        if highest > self.highest && !self.is_in_reach(highest) {
            Ignore(FAR)
        } else if highest > self.highest {
            self.raise(highest, Vec::new())
        } else {
            Ignore("its generations are known here")
        }
    }

    pub(crate) fn on_peer_ready(
        &self,
        from: &HostName,
        migration: &MigrationId,
        next: Generation,
    ) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(Stage::Stopping | Stage::LastPages, a))
                if a.next == next && a.is(from, migration) =>
            {
                self.roll_back(a, Some(Ending::Failed))
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => self.on_asked_gift(from, migration, next),
        }
    }

    /// Only a destination that is ready asks; so the question also tells a waiting source that it is.
    pub(crate) fn on_asked_gift(
        &self,
        from: &HostName,
        migration: &MigrationId,
        next: Generation,
    ) -> Reaction {
        let mine = |a: &Attempt| a.next == next && a.is(from, migration);
        let undecided = || {
            let message = PeerMessage::Undecided {
                migration: migration.clone(),
                generation: next,
            };
            go(self.state.clone(), vec![send(from, message)])
        };
        match &self.state {
            State::Leaving(Leaving::Switching(Stage::AwaitingReady, a)) if mine(a) => self.give(a),
            State::Leaving(Leaving::Switching(Stage::Devices { .. }, attempt)) if mine(attempt) => {
                go(
                    State::Leaving(Leaving::Switching(
                        Stage::Devices { ready_early: true },
                        attempt.clone(),
                    )),
                    Vec::new(),
                )
            }
            State::Leaving(
                Leaving::Switching(Stage::Stopping | Stage::LastPages, a)
                | Leaving::GiftUncertain(a),
            ) if mine(a) => undecided(),
            State::Elsewhere(Elsewhere::Moved(a)) | State::Given(_, a) if mine(a) => {
                let message = PeerMessage::Permit {
                    migration: migration.clone(),
                    generation: next,
                };
                go(self.state.clone(), vec![send(from, message)])
            }
            State::Recovering => Ignore("answered once the journal is durable"),
            State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => self.answer_gift(from, migration, next),
        }
    }

    /// Not given and not being given: no later gift can have a generation at or below the highest one.
    fn answer_gift(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        let message = PeerMessage::Withdrawn {
            migration: migration.clone(),
            generation,
        };
        self.answer(generation, send(from, message))
    }

    /// Says what is true of every generation that is durably known here and was not held.
    pub(crate) fn answer(&self, generation: Generation, answer: Step) -> Reaction {
        if generation <= self.durable.highest {
            go(self.state.clone(), vec![answer])
        } else if self.may_rise_to(generation) {
            self.raise(generation, vec![answer])
        } else {
            Ignore(UNMOVED)
        }
    }

    pub(crate) fn on_peer_holding(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        if !self.is_plausible(generation) {
            return Ignore(FAR);
        }
        match &self.state {
            State::Given(_, a) if a.next == generation => {
                if a.is(from, migration) {
                    self.moved(a)
                } else {
                    Ignore("not from the host that the VM was given to")
                }
            }
            State::Leaving(Leaving::GiftUncertain(_)) => Ignore("the gift was never sent"),
            State::Recovering => Ignore("answered once the journal is durable"),
            State::Held(_) | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..)) => {
                self.rival_while_holding(from, generation)
            }
            State::Coming(Coming::Promised(_, a))
                if a.with.peer == *from && generation > a.next =>
            {
                self.refuse_attempt(a)
            }
            State::Coming(_) if generation > self.durable.held => {
                Ignore("the source of a running migration is still to be heard")
            }
            // The host that it was given to has taken it and gone ahead by its operator's decision.
            State::Given(_, a)
                if a.with.peer == *from
                    && generation > self.durable.highest
                    && !self.is_in_reach(generation) =>
            {
                Ignore(FAR)
            }
            State::Given(_, a) if a.with.peer == *from && generation > self.durable.highest => self
                .raise(
                    generation,
                    vec![send(from, PeerMessage::Confirmed { generation })],
                ),
            State::Elsewhere(_) | State::Given(..) | State::Coming(_) => {
                self.confirm_holder(from, generation)
            }
        }
    }

    fn superseded(&self, from: &HostName, generation: Generation) -> Reaction {
        let message = PeerMessage::Superseded {
            generation,
            by: self.durable.held,
        };
        go(self.state.clone(), vec![send(from, message)])
    }

    /// Another host says that it holds the VM, and so does this one: the higher generation owns it, if it is the
    /// other end of the handover that is not confirmed. No other host can end the guest here: two holders that know
    /// nothing of each other are shown to people, who decide.
    fn rival_while_holding(&self, from: &HostName, generation: Generation) -> Reaction {
        let is_believed = self.waits_for(from) || planted!(self, YieldsToAnybody);
        if generation < self.durable.held {
            self.superseded(from, generation)
        } else if generation > self.highest && is_believed {
            self.yield_to(from, generation)
        } else if generation > self.highest {
            Ignore("the right to run here does not depend on that host")
        } else {
            Ignore("claims a generation that this host never gave")
        }
    }

    fn confirm_holder(&self, from: &HostName, generation: Generation) -> Reaction {
        if generation < self.durable.held {
            return self.superseded(from, generation);
        }
        self.answer(
            generation,
            send(from, PeerMessage::Confirmed { generation }),
        )
    }

    /// This host's right is void: its guest ends at once, then that is written.
    fn yield_to(&self, to: &HostName, by: Generation) -> Reaction {
        let mut first = vec![disarm(Timer::Ask), kill()];
        let moving = match &self.state {
            State::Leaving(Leaving::Precopy(with, _)) => Some(with),
            State::Leaving(Leaving::Switching(_, a)) => Some(&a.with),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(Leaving::GiftUncertain(_))
            | State::Given(..)
            | State::Coming(_) => None,
        };
        if let Some(with) = moving {
            first.extend(self.leave(with, Ending::Failed));
        }
        let record = self.durable.with(Phase::Absent).raised(by);
        let down = OnFail::Back(State::Held(Held::Down {
            reason: "another host holds a higher generation",
        }));
        let confirmed = send(to, PeerMessage::Confirmed { generation: by });
        write_after(
            State::Elsewhere(Elsewhere::Absent),
            first,
            record,
            down,
            vec![confirmed, cleanup()],
        )
    }

    pub(crate) fn on_peer_confirmed(&self, from: &HostName, generation: Generation) -> Reaction {
        match &self.state {
            State::Held(_) => {
                if self.waits_for(from) && generation == self.durable.held {
                    self.confirmed()
                } else {
                    Ignore("nothing is to be confirmed by that host")
                }
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => Ignore("nothing is to be confirmed"),
        }
    }

    /// Whether the record of a holder waits for that host to confirm.
    fn waits_for(&self, peer: &HostName) -> bool {
        self.unconfirmed().is_some_and(|with| with.peer == *peer)
    }

    pub(crate) fn on_peer_superseded(
        &self,
        from: &HostName,
        generation: Generation,
        by: Generation,
    ) -> Reaction {
        match &self.state {
            State::Held(_) => {
                let mine = self.waits_for(from) && generation == self.durable.held;
                if mine && by > generation && self.is_plausible(by) {
                    self.yield_to(from, by)
                } else {
                    Ignore("the right to run here does not depend on that host any more")
                }
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Leaving(_)
            | State::Given(..)
            | State::Coming(_) => {
                Ignore("the right to run here does not depend on that host any more")
            }
        }
    }

    pub(crate) fn on_peer_refused(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        match &self.state {
            State::Given(_, a) if a.next == generation && a.is(from, migration) => {
                self.reclaim(a, None)
            }
            State::Given(..) => Ignore("about another attempt"),
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("the gift is being taken back already")
            }
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Coming(_) => self.on_peer_failed(from, migration),
        }
    }

    /// The destination cannot go on. Before the gift that ends the migration; after it, only a durable
    /// refusal counts.
    pub(crate) fn on_peer_failed(&self, from: &HostName, migration: &MigrationId) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Precopy(with, _)) if with.is(from, migration) => {
                go(State::Held(Held::Running), self.leave(with, Ending::Failed))
            }
            State::Leaving(Leaving::Switching(_, a)) if a.is(from, migration) => {
                self.roll_back(a, Some(Ending::Failed))
            }
            State::Given(_, a) if a.is(from, migration) => {
                go(State::Given(Given::InDoubt, a.clone()), self.ask_holding(a))
            }
            State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..)) | State::Given(..) => {
                Ignore("about another migration")
            }
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("the gift is being taken back already")
            }
            State::Recovering | State::Elsewhere(_) | State::Held(_) | State::Coming(_) => {
                Ignore("no migration leaves from here")
            }
        }
    }
}
