//! What a peer asks and answers about the VM at its source, and who yields to whom.
//!
//! Part of [`VmCore`]. Refuses: to answer from anything but the durable record.

use crate::core::VmCore;
use crate::event::{Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase};
use crate::state::{
    Attempt, OnFail, Reaction, State, cleanup, disarm, go, kill, send, write_after,
};
use Reaction::Ignore;
use godwit_types::{Generation, HostName, MigrationId};

/// A peer cannot push the counter further than this at once: nobody exhausts it with one message.
const PLAUSIBLE_STEP: u64 = 1 << 40;

const FAR: &str = "a generation far beyond every one known is not believed";

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

    /// A holder learns of generations that were used without it (surveys), so that its next one is new.
    pub(crate) fn on_peer_prepared(&self, highest: Generation) -> Reaction {
        match &self.state {
            State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_) => {
                if !self.is_plausible(highest) {
                    Ignore(FAR)
                } else if highest > self.highest {
                    self.raise(highest, Vec::new())
                } else {
                    Ignore("its generations are known here")
                }
            }
            State::Recovering
            | State::Absent
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore("this host does not hold the VM"),
        }
    }

    pub(crate) fn on_peer_ready(
        &self,
        from: &HostName,
        migration: &MigrationId,
        next: Generation,
    ) -> Reaction {
        match &self.state {
            State::Stopping(a) | State::LastPages(a) if a.next == next && a.is(from, migration) => {
                self.roll_back(a, Some(Ending::Failed))
            }
            State::Stopping(_)
            | State::LastPages(_)
            | State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => self.on_asked_gift(from, migration, next),
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
            State::AwaitingReady(a) if mine(a) => self.give(a),
            State::Devices { attempt, .. } if mine(attempt) => go(
                State::Devices {
                    attempt: attempt.clone(),
                    ready_early: true,
                },
                Vec::new(),
            ),
            State::Stopping(a) | State::LastPages(a) | State::GiftUncertain(a) if mine(a) => {
                undecided()
            }
            State::Gave(a) | State::InDoubt(a) | State::Moved(a) if mine(a) => {
                let message = PeerMessage::Permit {
                    migration: migration.clone(),
                    generation: next,
                };
                go(self.state.clone(), vec![send(from, message)])
            }
            State::Recovering => Ignore("answered once the journal is durable"),
            State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => self.answer_gift(from, migration, next),
        }
    }

    /// Not given and not being given: no later gift can have a generation at or below the highest one.
    fn answer_gift(
        &self,
        from: &HostName,
        migration: &MigrationId,
        generation: Generation,
    ) -> Reaction {
        if !self.is_plausible(generation) {
            return Ignore(FAR);
        }
        let message = PeerMessage::Withdrawn {
            migration: migration.clone(),
            generation,
        };
        let answer = vec![send(from, message)];
        if generation <= self.durable.highest {
            go(self.state.clone(), answer)
        } else {
            self.raise(generation, answer)
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
            State::Gave(a) | State::InDoubt(a) if a.next == generation => {
                if a.is(from, migration) {
                    self.moved(a)
                } else {
                    Ignore("not from the host that the VM was given to")
                }
            }
            State::GiftUncertain(_) => Ignore("the gift was never sent"),
            State::Recovering => Ignore("answered once the journal is durable"),
            State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_) => self.rival_while_holding(from, generation),
            State::Ready(a) | State::ReadyInDoubt(a)
                if a.with.peer == *from && generation > a.next =>
            {
                self.refuse_attempt(a)
            }
            State::Ready(_) | State::ReadyInDoubt(_) | State::Refusing(_) | State::Incoming(_)
                if generation > self.durable.held =>
            {
                Ignore("the source of a running migration is still to be heard")
            }
            State::Absent
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => self.confirm_holder(from, generation),
        }
    }

    fn superseded(&self, from: &HostName, generation: Generation) -> Reaction {
        let message = PeerMessage::Superseded {
            generation,
            by: self.durable.held,
        };
        go(self.state.clone(), vec![send(from, message)])
    }

    /// Another host says that it holds the VM, and so does this one: the higher generation owns it.
    fn rival_while_holding(&self, from: &HostName, generation: Generation) -> Reaction {
        if generation < self.durable.held {
            self.superseded(from, generation)
        } else if generation > self.highest {
            self.yield_to(from, generation)
        } else {
            Ignore("claims a generation that this host never gave")
        }
    }

    fn confirm_holder(&self, from: &HostName, generation: Generation) -> Reaction {
        if generation < self.durable.held {
            return self.superseded(from, generation);
        }
        let confirmed = vec![send(from, PeerMessage::Confirmed { generation })];
        if generation <= self.durable.highest {
            go(self.state.clone(), confirmed)
        } else {
            self.raise(generation, confirmed)
        }
    }

    /// This host's right is void: its guest ends at once, then that is written.
    fn yield_to(&self, to: &HostName, by: Generation) -> Reaction {
        let mut first = vec![disarm(Timer::Ask), kill()];
        let moving = match &self.state {
            State::Precopy(with) => Some(with),
            other => other.switchover().map(|a| &a.with),
        };
        if let Some(with) = moving {
            first.extend(self.leave(with, Ending::Failed));
        }
        let record = self.durable.with(Phase::Absent).raised(by);
        let down = OnFail::Back(State::Down {
            reason: "another host holds a higher generation",
        });
        let confirmed = send(to, PeerMessage::Confirmed { generation: by });
        write_after(
            State::Absent,
            first,
            record,
            down,
            vec![confirmed, cleanup()],
        )
    }

    pub(crate) fn on_peer_confirmed(&self, from: &HostName, generation: Generation) -> Reaction {
        match &self.state {
            State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed => {
                if self.waits_for(from) && generation == self.durable.held {
                    self.confirmed()
                } else {
                    Ignore("nothing is to be confirmed by that host")
                }
            }
            State::Recovering
            | State::Absent
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore("nothing is to be confirmed"),
        }
    }

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
            State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed => {
                let mine = self.waits_for(from) && generation == self.durable.held;
                if mine && by > generation && self.is_plausible(by) {
                    self.yield_to(from, by)
                } else {
                    Ignore("the right to run here does not depend on that host any more")
                }
            }
            State::Recovering
            | State::Absent
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => {
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
            State::Gave(a) | State::InDoubt(a) if a.next == generation && a.is(from, migration) => {
                self.reclaim(a, None)
            }
            State::Gave(_) | State::InDoubt(_) => Ignore("about another attempt"),
            State::GiftUncertain(_) => Ignore("the gift is being taken back already"),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => self.on_peer_failed(from, migration),
        }
    }

    /// The destination cannot go on. Before the gift that ends the migration; after it, only a durable
    /// refusal counts.
    pub(crate) fn on_peer_failed(&self, from: &HostName, migration: &MigrationId) -> Reaction {
        match &self.state {
            State::Precopy(with) if with.is(from, migration) => {
                go(State::Running, self.leave(with, Ending::Failed))
            }
            State::Stopping(a)
            | State::LastPages(a)
            | State::Devices { attempt: a, .. }
            | State::AwaitingReady(a)
                if a.is(from, migration) =>
            {
                self.roll_back(a, Some(Ending::Failed))
            }
            State::Gave(a) | State::InDoubt(a) if a.is(from, migration) => {
                go(State::InDoubt(a.clone()), self.ask_holding(a))
            }
            State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::Gave(_)
            | State::InDoubt(_) => Ignore("about another migration"),
            State::GiftUncertain(_) => Ignore("the gift is being taken back already"),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore("no migration leaves from here"),
        }
    }
}
