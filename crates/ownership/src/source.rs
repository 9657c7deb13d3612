//! The source's side of a migration: stop, send, give, and the way back until the gift.
//!
//! Part of [`VmCore`]. Refuses: to resume after the gift by itself, whatever is lost or late.

use crate::core::{VmCore, planted};
use crate::event::{Action, Ending, PeerMessage, Timer};
use crate::record::{Handover, Phase, Power};
use crate::state::{
    Attempt, OnFail, Qemu, Reaction, State, Step, arm, cleanup, disarm, end, go, kill, release,
    send, write, write_after,
};
use Reaction::{Ignore, Refuse};
use godwit_types::{Generation, HostName, MigrationId};

const LATE: &str = "belongs to an attempt that is over";
const NO_SOURCE: &str = "this host is not the source of a switchover";

impl VmCore {
    pub(crate) fn on_migration_began(&self, migration: MigrationId, to: HostName) -> Reaction {
        match &self.state {
            State::Running if self.unconfirmed().is_some() => {
                Refuse("the VM's former host has not confirmed the last handover yet")
            }
            State::Running if to == self.host => Refuse("the VM is on that host already"),
            State::Running => go(
                State::Precopy(Handover {
                    migration,
                    peer: to,
                }),
                Vec::new(),
            ),
            State::Paused => Refuse("the VM is paused: resume it first"),
            State::Off | State::Down { .. } | State::Unconfirmed => {
                Refuse("the VM is not running: start it first")
            }
            State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_)
            | State::Gave(_)
            | State::InDoubt(_) => Refuse("the VM is already moving"),
            State::Incoming(_) | State::Ready(_) | State::ReadyInDoubt(_) | State::Refusing(_) => {
                Refuse("the VM is just being received by this host")
            }
            State::Recovering => Refuse("this host is still making its journal durable"),
            State::Absent | State::Refused | State::Moved(_) => {
                Refuse("the VM is not on this host")
            }
        }
    }

    pub(crate) fn on_switchover(&self) -> Reaction {
        match &self.state {
            State::Precopy(with) => self.stop_for(with),
            State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::GiftUncertain(_) => Ignore("the switchover has begun already"),
            State::Gave(_) | State::InDoubt(_) => Ignore("the VM was given away already"),
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
            | State::Refused => Refuse("no migration is in precopy here"),
        }
    }

    fn stop_for(&self, with: &Handover) -> Reaction {
        let next = if planted!(self, GenerationGoesBack) {
            self.durable.held.next()
        } else {
            self.highest.next()
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
            State::Stopping(attempt),
            record,
            OnFail::Back(State::Precopy(with.clone())),
            vec![arm(Timer::Switchover), stop],
        )
    }

    pub(crate) fn on_stopped(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Stopping(a) if a.next == attempt && planted!(self, LastPagesSkipped) => {
                self.send_devices(a)
            }
            State::Stopping(a) if a.next == attempt => go(
                State::LastPages(a.clone()),
                vec![Step::Do(Action::SendLastPages { attempt })],
            ),
            State::Stopping(_) => Ignore(LATE),
            State::LastPages(_) | State::Devices { .. } | State::AwaitingReady(_) => {
                Ignore("the guest is known to be stopped")
            }
            State::Precopy(_) | State::Running => Ignore(LATE),
            State::GiftUncertain(_) | State::Gave(_) | State::InDoubt(_) => Ignore(LATE),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Unconfirmed
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore(NO_SOURCE),
        }
    }

    fn send_devices(&self, a: &Attempt) -> Reaction {
        let step = Step::Do(Action::SendDeviceState { attempt: a.next });
        let state = State::Devices {
            attempt: a.clone(),
            ready_early: false,
        };
        go(state, vec![step])
    }

    pub(crate) fn on_last_pages(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::LastPages(a) if a.next == attempt => self.send_devices(a),
            State::LastPages(_) => Ignore(LATE),
            State::Stopping(_) => Ignore("the last pages have not been asked for"),
            State::Devices { .. } | State::AwaitingReady(_) => Ignore("known already"),
            State::Precopy(_) | State::Running => Ignore(LATE),
            State::GiftUncertain(_) | State::Gave(_) | State::InDoubt(_) => Ignore(LATE),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Unconfirmed
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore(NO_SOURCE),
        }
    }

    pub(crate) fn on_device_state(&self, attempt: Generation) -> Reaction {
        match &self.state {
            State::Devices {
                attempt: a,
                ready_early,
            } if a.next == attempt => {
                if *ready_early {
                    self.give(a)
                } else {
                    go(State::AwaitingReady(a.clone()), Vec::new())
                }
            }
            State::Devices { .. } => Ignore(LATE),
            State::Stopping(_) | State::LastPages(_) => {
                Ignore("the device state has not been asked for")
            }
            State::AwaitingReady(_) => Ignore("known already"),
            State::Precopy(_) | State::Running => Ignore(LATE),
            State::GiftUncertain(_) | State::Gave(_) | State::InDoubt(_) => Ignore(LATE),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Unconfirmed
            | State::Moved(_)
            | State::Incoming(_)
            | State::Ready(_)
            | State::ReadyInDoubt(_)
            | State::Refusing(_)
            | State::Refused => Ignore(NO_SOURCE),
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
        write_after(State::Gave(a.clone()), first, record, on_fail, then)
    }

    /// The gift could not be written, and so was not sent: it is taken back.
    pub(crate) fn unwind_gift(&self, attempt: Attempt, unchanged: bool) -> Reaction {
        if unchanged {
            return self.roll_back(&attempt, Some(Ending::Failed));
        }
        go(State::GiftUncertain(attempt), vec![arm(Timer::Ask)])
    }

    fn retry_unwinding(&self, a: &Attempt) -> Reaction {
        let back = OnFail::Back(State::GiftUncertain(a.clone()));
        let mut then = vec![Step::Do(Action::RestoreDirty)];
        then.extend(self.leave(&a.with, Ending::Failed));
        let state = if self.qemu == Qemu::Dead {
            State::Down {
                reason: "its QEMU died",
            }
        } else {
            then.push(Step::Cont);
            State::Running
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
                State::Running
            }
            None => {
                first.push(Step::Cont);
                let message = PeerMessage::Withdrawn {
                    migration: a.with.migration.clone(),
                    generation: a.next,
                };
                first.push(send(&a.with.peer, message));
                State::Precopy(a.with.clone())
            }
        };
        let back = OnFail::Back(state.clone());
        write_after(state, first, self.holds(Power::On), back, Vec::new())
    }

    pub(crate) fn on_switchover_timeout(&self) -> Reaction {
        match self.state.switchover() {
            Some(a) => self.roll_back(a, None),
            None => Ignore("no switchover waits here"),
        }
    }

    pub(crate) fn on_cancel(&self) -> Reaction {
        match &self.state {
            State::Precopy(with) => go(State::Running, self.leave(with, Ending::Cancelled)),
            State::Stopping(a)
            | State::LastPages(a)
            | State::Devices { attempt: a, .. }
            | State::AwaitingReady(a) => self.roll_back(a, Some(Ending::Cancelled)),
            State::Gave(_) | State::InDoubt(_) if planted!(self, PermitTwice) => {
                go(State::Running, vec![Step::Cont])
            }
            State::GiftUncertain(_) => Ignore("the gift is being taken back already"),
            State::Gave(_) | State::InDoubt(_) => {
                Refuse("too late: the VM was given to the destination, which decides now")
            }
            State::Incoming(with) => self.fail_incoming(with),
            State::Ready(_) | State::ReadyInDoubt(_) | State::Refusing(_) => {
                Refuse("the destination has promised to take the VM: cancel at the source")
            }
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Moved(_)
            | State::Refused => Refuse("no migration is in progress here"),
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
            return go(State::Running, vec![Step::Cont]);
        }
        go(State::InDoubt(a.clone()), self.ask_holding(a))
    }

    pub(crate) fn on_link_lost(&self) -> Reaction {
        match &self.state {
            State::Stopping(a)
            | State::LastPages(a)
            | State::Devices { attempt: a, .. }
            | State::AwaitingReady(a) => self.roll_back(a, None),
            State::Gave(a) => self.doubt_gift(a),
            State::InDoubt(_) => Ignore("asks again when the timer fires"),
            State::Ready(a) => self.doubt_ready(a),
            State::ReadyInDoubt(_) | State::Refusing(_) => {
                Ignore("asks again when the timer fires")
            }
            State::Precopy(_) | State::Incoming(_) => {
                Ignore("channels are made again; the shell cancels when that fails")
            }
            State::GiftUncertain(_) => Ignore("the gift is being taken back already"),
            State::Recovering
            | State::Absent
            | State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed
            | State::Moved(_)
            | State::Refused => Ignore("no link is needed here"),
        }
    }

    pub(crate) fn on_ask_timeout(&self) -> Reaction {
        match &self.state {
            State::Gave(a) | State::InDoubt(a) => self.doubt_gift(a),
            State::Ready(a) | State::ReadyInDoubt(a) => self.doubt_ready(a),
            State::Refusing(a) => self.refuse_attempt(a),
            State::GiftUncertain(a) => self.retry_unwinding(a),
            State::Recovering => Reaction::Go(Box::new(self.write_again())),
            State::Off
            | State::Down { .. }
            | State::Paused
            | State::Running
            | State::Unconfirmed => match self.unconfirmed() {
                Some(with) => go(self.state.clone(), self.tell_holding(with)),
                None => Ignore("nothing is asked"),
            },
            State::Absent
            | State::Precopy(_)
            | State::Stopping(_)
            | State::LastPages(_)
            | State::Devices { .. }
            | State::AwaitingReady(_)
            | State::Moved(_)
            | State::Incoming(_)
            | State::Refused => Ignore("nothing is asked"),
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
        let back = OnFail::Back(State::InDoubt(a.clone()));
        write(State::Moved(a.clone()), record, back, then)
    }
}
