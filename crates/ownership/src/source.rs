//! The source's side of a migration: stop, send, give, and the way back until the gift.
//!
//! Part of [`VmCore`]. Refuses: to resume after the gift by itself, whatever is lost or late.

use crate::core::{OLD_PERMISSION, VmCore, planted};
use crate::event::{Action, Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase, Power};
use crate::state::{
    Attempt, Coming, Elsewhere, Given, Held, Leaving, OnFail, Promise, Qemu, Reaction, Stage,
    State, Step, arm, cleanup, disarm, end, go, kill, release, send, write, write_after,
};
use Reaction::{Ignore, Refuse};
use godwit_types::{Generation, HostName, MigrationId};

const LATE: &str = "belongs to an attempt that is over";
const NO_SOURCE: &str = "this host is not the source of a switchover";

impl VmCore {
    pub(crate) fn on_migration_began(
        &self,
        migration: MigrationId,
        to: HostName,
        generation: Generation,
    ) -> Reaction {
        match &self.state {
            State::Held(Held::Running) if self.unconfirmed().is_some() => {
                Refuse("the VM's former host has not confirmed the last handover yet")
            }
            State::Held(Held::Running) if to == self.host => {
                Refuse("the VM is on that host already")
            }
            State::Held(Held::Running) if !self.is_permitted(generation) => Refuse(OLD_PERMISSION),
            State::Held(Held::Running) => {
                let with = Handover {
                    migration,
                    peer: to,
                };
                let state = State::Leaving(Leaving::Precopy(with, generation));
                go(state, Vec::new())
            }
            State::Held(Held::Paused) => Refuse("the VM is paused: resume it first"),
            State::Held(Held::Off | Held::Down { .. } | Held::Unconfirmed) => {
                Refuse("the VM is not running: start it first")
            }
            State::Leaving(_) | State::Given(..) => Refuse("the VM is already moving"),
            State::Coming(_) => Refuse("the VM is just being received by this host"),
            State::Recovering => Refuse("this host is still making its journal durable"),
            State::Elsewhere(_) => Refuse("the VM is not on this host"),
        }
    }

    pub(crate) fn on_switchover(&self) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Precopy(with, least)) => self.stop_for(with, *least),
            State::Leaving(Leaving::Switching(..) | Leaving::GiftUncertain(_)) => {
                Ignore("the switchover has begun already")
            }
            State::Given(..) => Ignore("the VM was given away already"),
            State::Recovering | State::Elsewhere(_) | State::Held(_) | State::Coming(_) => {
                Refuse("no migration is in precopy here")
            }
        }
    }

    /// An attempt's generation is above all that this host knows, and not below the permission's: that one is above
    /// all that the destination knew.
    fn stop_for(&self, with: &Handover, least: Generation) -> Reaction {
        let next = if planted!(self, GenerationGoesBack) {
            self.durable.held.next()
        } else {
            self.highest.next().map(|next| next.max(least))
        };
        let Some(next) = next else {
            return Refuse("the generation counter of this VM is exhausted");
        };
        let phase = Phase::Stopping {
            generation: self.durable.held,
            next,
            migration: with.migration.clone(),
            to: with.peer.clone(),
        };
        let record = self.durable.with(phase).raised(next);
        let attempt = Attempt {
            with: with.clone(),
            next,
        };
        let stop = Step::Do(Action::StopGuest {
            attempt: Some(next),
        });
        write(
            State::Leaving(Leaving::Switching(Stage::Stopping, attempt)),
            record,
            OnFail::Back(State::Leaving(Leaving::Precopy(with.clone(), least))),
            vec![arm(Timer::Switchover), stop],
        )
    }

    pub(crate) fn on_stopped(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(Stage::Stopping, a))
                if a.next == attempt && planted!(self, LastPagesSkipped) =>
            {
                self.send_devices(a)
            }
            State::Leaving(Leaving::Switching(Stage::Stopping, a)) if a.next == attempt => go(
                State::Leaving(Leaving::Switching(Stage::LastPages, a.clone())),
                vec![Step::Do(Action::SendLastPages { attempt })],
            ),
            State::Leaving(Leaving::Switching(Stage::Stopping, _)) => Ignore(LATE),
            State::Leaving(Leaving::Switching(
                Stage::LastPages | Stage::Devices { .. } | Stage::AwaitingReady,
                _,
            )) => Ignore("the guest is known to be stopped"),
            State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)) => Ignore(LATE),
            State::Leaving(Leaving::GiftUncertain(_)) | State::Given(..) => Ignore(LATE),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Paused | Held::Unconfirmed)
            | State::Coming(_) => Ignore(NO_SOURCE),
        }
    }

    fn send_devices(&self, a: &Attempt) -> Reaction {
        let step = Step::Do(Action::SendDeviceState { attempt: a.next });
        let state = State::Leaving(Leaving::Switching(
            Stage::Devices { ready_early: false },
            a.clone(),
        ));
        go(state, vec![step])
    }

    pub(crate) fn on_last_pages(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(Stage::LastPages, a)) if a.next == attempt => {
                self.send_devices(a)
            }
            State::Leaving(Leaving::Switching(Stage::LastPages, _)) => Ignore(LATE),
            State::Leaving(Leaving::Switching(Stage::Stopping, _)) => {
                Ignore("the last pages have not been asked for")
            }
            State::Leaving(Leaving::Switching(Stage::Devices { .. } | Stage::AwaitingReady, _)) => {
                Ignore("known already")
            }
            State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)) => Ignore(LATE),
            State::Leaving(Leaving::GiftUncertain(_)) | State::Given(..) => Ignore(LATE),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Paused | Held::Unconfirmed)
            | State::Coming(_) => Ignore(NO_SOURCE),
        }
    }

    pub(crate) fn on_device_state(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(Stage::Devices { ready_early }, a))
                if a.next == attempt =>
            {
                if *ready_early {
                    self.give(a)
                } else {
                    go(
                        State::Leaving(Leaving::Switching(Stage::AwaitingReady, a.clone())),
                        Vec::new(),
                    )
                }
            }
            State::Leaving(Leaving::Switching(Stage::Devices { .. }, _)) => Ignore(LATE),
            State::Leaving(Leaving::Switching(Stage::Stopping | Stage::LastPages, _)) => {
                Ignore("the device state has not been asked for")
            }
            State::Leaving(Leaving::Switching(Stage::AwaitingReady, _)) => Ignore("known already"),
            State::Held(Held::Running) | State::Leaving(Leaving::Precopy(..)) => Ignore(LATE),
            State::Leaving(Leaving::GiftUncertain(_)) | State::Given(..) => Ignore(LATE),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(Held::Off | Held::Down { .. } | Held::Paused | Held::Unconfirmed)
            | State::Coming(_) => Ignore(NO_SOURCE),
        }
    }

    /// The gift: durable first, then the permit. From here only the destination decides.
    pub(crate) fn give(&self, a: &Attempt) -> Reaction {
        let record = self.durable.with(Phase::Gave {
            generation: a.next,
            migration: a.with.migration.clone(),
            to: a.with.peer.clone(),
        });
        let permit = send(
            &a.with.peer,
            PeerMessage::Permit {
                migration: a.with.migration.clone(),
                generation: a.next,
            },
        );
        let mut first = vec![disarm(Timer::Switchover)];
        let mut then = Vec::new();
        if planted!(self, GaveNotPersistedBeforeSend) {
            first.push(permit);
        } else {
            then.push(permit);
        }
        then.push(arm(Timer::Ask));
        let on_fail = OnFail::UnwindGift(a.clone());
        write_after(
            State::Given(Given::Gave, a.clone()),
            first,
            record,
            on_fail,
            then,
        )
    }

    /// The gift could not be written, and so was not sent: it is taken back.
    pub(crate) fn unwind_gift(&self, attempt: Attempt, unchanged: bool) -> Reaction {
        if unchanged {
            return self.roll_back(&attempt, Some(Ending::Failed));
        }
        go(
            State::Leaving(Leaving::GiftUncertain(attempt)),
            vec![arm(Timer::Ask)],
        )
    }

    fn retry_unwinding(&self, a: &Attempt) -> Reaction {
        let back = OnFail::Back(State::Leaving(Leaving::GiftUncertain(a.clone())));
        let mut then = vec![Step::Do(Action::RestoreDirty)];
        then.extend(self.leave(&a.with, Ending::Failed));
        let state = if self.qemu == Qemu::Dead {
            State::Held(Held::Down {
                reason: "its QEMU died",
            })
        } else {
            then.push(Step::Cont);
            State::Held(Held::Running)
        };
        write(state, self.holds(Power::On), back, then)
    }

    /// Before the gift: the guest runs on here at once; the record follows. With `over` the migration ends,
    /// else precopy goes on and this attempt's generation is void for good.
    pub(crate) fn roll_back(&self, a: &Attempt, over: Option<Ending>) -> Reaction {
        if self.qemu == Qemu::Dead {
            return self.guest_lost(&a.with, over.unwrap_or(Ending::Failed));
        }
        let mut first = vec![Step::Do(Action::RestoreDirty), disarm(Timer::Switchover)];
        let state = match over {
            Some(outcome) => {
                first.push(release());
                first.push(Step::Cont);
                first.push(crate::state::abort(&a.with));
                first.push(end(&a.with, outcome));
                State::Held(Held::Running)
            }
            None => {
                first.push(Step::Cont);
                let message = PeerMessage::Withdrawn {
                    migration: a.with.migration.clone(),
                    generation: a.next,
                };
                first.push(send(&a.with.peer, message));
                State::Leaving(Leaving::Precopy(a.with.clone(), a.next))
            }
        };
        let back = OnFail::Back(state.clone());
        write_after(state, first, self.holds(Power::On), back, Vec::new())
    }

    pub(crate) fn on_switchover_timeout(&self) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(_, a)) => self.roll_back(a, None),
            State::Recovering
            | State::Elsewhere(_)
            | State::Held(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::GiftUncertain(_))
            | State::Given(..)
            | State::Coming(_) => Ignore("no switchover waits here"),
        }
    }

    pub(crate) fn on_cancel(&self) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Precopy(with, _)) => go(
                State::Held(Held::Running),
                self.leave(with, Ending::Cancelled),
            ),
            State::Leaving(Leaving::Switching(_, a)) => self.roll_back(a, Some(Ending::Cancelled)),
            State::Given(..) if planted!(self, PermitTwice) => {
                go(State::Held(Held::Running), vec![Step::Cont])
            }
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("the gift is being taken back already")
            }
            State::Given(..) => {
                Refuse("too late: the VM was given to the destination, which decides now")
            }
            State::Coming(Coming::Incoming(with)) => self.fail_incoming(with),
            State::Coming(Coming::Promised(..) | Coming::Refusing(_)) => {
                Refuse("the destination has promised to take the VM: cancel at the source")
            }
            State::Recovering | State::Elsewhere(_) | State::Held(_) => {
                Refuse("no migration is in progress here")
            }
        }
    }

    /// Asks the destination what it decided; counts there as the permit, too.
    pub(crate) fn ask_holding(&self, a: &Attempt) -> Vec<Step> {
        let message = PeerMessage::AskHolding {
            migration: a.with.migration.clone(),
            generation: a.next,
        };
        vec![send(&a.with.peer, message), arm(Timer::Ask)]
    }

    pub(crate) fn doubt_gift(&self, a: &Attempt) -> Reaction {
        if planted!(self, ResumeOnTimeoutAfterGave) {
            return go(State::Held(Held::Running), vec![Step::Cont]);
        }
        go(State::Given(Given::InDoubt, a.clone()), self.ask_holding(a))
    }

    pub(crate) fn on_link_lost(&self) -> Reaction {
        match &self.state {
            State::Leaving(Leaving::Switching(_, a)) => self.roll_back(a, None),
            State::Given(Given::Gave, a) => self.doubt_gift(a),
            State::Given(Given::InDoubt, _) => Ignore("asks again when the timer fires"),
            State::Coming(Coming::Promised(Promise::Kept, a)) => self.doubt_ready(a),
            State::Coming(Coming::Promised(Promise::InDoubt, _) | Coming::Refusing(_)) => {
                Ignore("asks again when the timer fires")
            }
            State::Leaving(Leaving::Precopy(..)) | State::Coming(Coming::Incoming(_)) => {
                Ignore("channels are made again; the shell cancels when that fails")
            }
            State::Leaving(Leaving::GiftUncertain(_)) => {
                Ignore("the gift is being taken back already")
            }
            State::Recovering | State::Elsewhere(_) | State::Held(_) => {
                Ignore("no link is needed here")
            }
        }
    }

    pub(crate) fn on_ask_timeout(&self) -> Reaction {
        match &self.state {
            State::Given(_, a) => self.doubt_gift(a),
            State::Coming(Coming::Promised(_, a)) => self.doubt_ready(a),
            State::Coming(Coming::Refusing(a)) => self.refuse_attempt(a),
            State::Leaving(Leaving::GiftUncertain(a)) => self.retry_unwinding(a),
            State::Recovering => Reaction::Go(Box::new(self.write_again())),
            State::Held(_) => match self.unconfirmed() {
                Some(with) => go(self.state.clone(), self.tell_holding(with)),
                None => Ignore("nothing is asked"),
            },
            State::Elsewhere(Elsewhere::Absent)
                if matches!(self.durable.phase, Phase::Incoming { .. }) =>
            {
                self.forget_incoming(Vec::new())
            }
            State::Elsewhere(_)
            | State::Leaving(Leaving::Precopy(..) | Leaving::Switching(..))
            | State::Coming(Coming::Incoming(_)) => Ignore("nothing is asked"),
        }
    }

    /// The destination holds what was given: the guest here is over.
    pub(crate) fn moved(&self, a: &Attempt) -> Reaction {
        let record = self.durable.with(Phase::Moved {
            generation: a.next,
            migration: a.with.migration.clone(),
            to: a.with.peer.clone(),
        });
        let confirmed = PeerMessage::Confirmed { generation: a.next };
        let then = vec![
            disarm(Timer::Ask),
            send(&a.with.peer, confirmed),
            kill(),
            end(&a.with, Ending::Completed),
            cleanup(),
        ];
        let back = OnFail::Back(State::Given(Given::InDoubt, a.clone()));
        write(
            State::Elsewhere(Elsewhere::Moved(a.clone())),
            record,
            back,
            then,
        )
    }
}
