//! The core from outside: the table is complete, the main paths go as described.

mod room;
mod surveys;

use surveys::{absent_at, prepare};

use godwit_ownership::{
    Action, Event, EventKind, HostRecord, PeerMessage, Phase, Power, Qemu, RecordError, StateName,
    Status, Timer, VmCore, transition_table,
};
use godwit_types::{Generation, HostName, MigrationId, VmName};

fn vm() -> VmName {
    VmName::new("web").expect("a valid name")
}

fn host(name: &str) -> HostName {
    HostName::new(name).expect("a valid name")
}

fn m1() -> MigrationId {
    MigrationId::new("m1").expect("a valid id")
}

/// A core; with planted faults built in, with the one that `GODWIT_PLANT` names.
fn recover(record: HostRecord, name: &str, qemu: Qemu) -> (VmCore, Vec<Action>) {
    #[cfg(feature = "planted-faults")]
    let made = {
        let plant = std::env::var("GODWIT_PLANT").ok();
        let plant = plant.and_then(|name| godwit_ownership::plant::Plant::from_name(&name));
        VmCore::recover_planted(record, host(name), qemu, plant)
    };
    #[cfg(not(feature = "planted-faults"))]
    let made = VmCore::recover(record, host(name), qemu);
    made.expect("a good record")
}

/// A core with a disk that always works: every record is acknowledged at once.
struct Driven {
    core: VmCore,
    actions: Vec<Action>,
    records: Vec<HostRecord>,
}

impl Driven {
    fn recover(record: HostRecord, name: &str, qemu: Qemu) -> Self {
        let (core, actions) = recover(record, name, qemu);
        let mut driven = Self {
            core,
            actions: Vec::new(),
            records: Vec::new(),
        };
        driven.take(actions);
        driven
    }

    fn feed(&mut self, event: Event) -> &mut Self {
        self.actions.clear();
        let actions = self.core.handle(event);
        self.take(actions);
        self
    }

    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Persist(record) => {
                    self.records.push(record);
                    let more = self.core.handle(Event::Persisted);
                    self.take(more);
                }
                other => self.actions.push(other),
            }
        }
    }

    fn hear(&mut self, from: &str, message: PeerMessage) -> &mut Self {
        let from = host(from);
        self.feed(Event::Message { from, message })
    }

    fn ran(&self) -> bool {
        let runs = |a: &Action| matches!(a, Action::Cont(_) | Action::Boot(_));
        self.actions.iter().any(runs)
    }

    fn said(&self) -> Vec<&PeerMessage> {
        let mut said = Vec::new();
        for action in &self.actions {
            if let Action::Send { message, .. } = action {
                said.push(message);
            }
        }
        said
    }
}

fn running(name: &str) -> Driven {
    let mut driven = Driven::recover(HostRecord::absent(vm()), name, Qemu::Dead);
    driven.feed(Event::Granted {
        generation: Generation(1),
        expect: Generation(0),
    });
    driven.feed(Event::StartRequested);
    assert!(driven.ran());
    driven
}

/// A source whose destination is about to say that it is ready for generation 2.
fn awaiting_ready() -> Driven {
    let mut a = running("a");
    let attempt = Generation(2);
    a.feed(Event::MigrationBegan {
        migration: m1(),
        to: host("b"),
        generation: Generation(2),
    });
    a.feed(Event::SwitchoverRequested);
    a.feed(Event::Stopped { attempt });
    a.feed(Event::LastPagesApplied { attempt });
    a.feed(Event::DeviceStateSent { attempt });
    assert_eq!(a.core.state_name(), StateName::AwaitingReady);
    a
}

fn ready() -> PeerMessage {
    PeerMessage::Ready {
        migration: m1(),
        generation: Generation(2),
    }
}

#[test]
fn the_table_has_no_empty_cell() {
    let table = transition_table();
    assert_eq!(table.len(), StateName::ALL.len() * EventKind::ALL.len());
    for cell in &table {
        assert!(cell.outcome.len() > 3, "{cell:?}");
        assert!(!cell.outcome.contains("no example"), "{cell:?}");
    }
    let changes = table.iter().filter(|c| c.next != c.state).count();
    assert!(changes > 100, "only {changes} cells change the state");
}

#[test]
fn a_handover_gives_takes_and_confirms() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    assert!(matches!(a.said()[..], [PeerMessage::Permit { .. }]));
    assert!(matches!(a.core.record().phase, Phase::Gave { .. }));

    let mut b = Driven::recover(HostRecord::absent(vm()), "b", Qemu::Dead);
    b.feed(Event::PrepareIncoming {
        migration: m1(),
        from: host("a"),
        generation: Generation(2),
    });
    b.feed(Event::Loaded {
        attempt: Generation(2),
    });
    assert_eq!(b.said(), [&ready()]);
    b.hear(
        "a",
        PeerMessage::Permit {
            migration: m1(),
            generation: Generation(2),
        },
    );
    assert!(b.ran());
    let holding = PeerMessage::Holding {
        migration: m1(),
        generation: Generation(2),
    };
    assert_eq!(b.said(), [&holding]);

    a.hear("b", holding);
    assert!(a.actions.contains(&Action::KillQemu));
    assert_eq!(a.core.status(), Status::Moved { to: host("b") });
    let confirmed = PeerMessage::Confirmed {
        generation: Generation(2),
    };
    assert_eq!(a.said(), [&confirmed]);
    b.hear("a", confirmed);
    assert!(matches!(
        b.core.record().phase,
        Phase::Holds {
            unconfirmed: None,
            ..
        }
    ));
}

#[test]
fn silence_before_the_gift_resumes_the_source_and_voids_the_attempt() {
    let mut a = awaiting_ready();
    a.feed(Event::Timeout(Timer::Switchover));
    assert!(a.ran());
    assert_eq!(a.core.state_name(), StateName::Precopy);
    a.hear("b", ready());
    assert!(!a.ran());
    assert!(matches!(a.said()[..], [PeerMessage::Withdrawn { .. }]));
    a.feed(Event::SwitchoverRequested);
    assert_eq!(a.core.record().highest, Generation(3));
}

#[test]
fn silence_after_the_gift_asks_and_shows_the_command() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    for event in [
        Event::Timeout(Timer::Ask),
        Event::Timeout(Timer::Switchover),
        Event::LinkLost,
        Event::Cancel,
        Event::StartRequested,
        Event::ResumeRequested,
        Event::QemuDied,
    ] {
        a.feed(event);
        assert!(!a.ran());
    }
    let Status::InDoubt { command, .. } = a.core.status() else {
        panic!("{:?}", a.core.status());
    };
    assert_eq!(
        command,
        "godwit vm resolve web --run-on a --confirm-fenced b"
    );
    a.feed(Event::OperatorResolve {
        run_here: true,
        confirm_fenced: host("c"),
    });
    assert!(!a.ran(), "another host than the peer was fenced");
    a.feed(Event::OperatorResolve {
        run_here: true,
        confirm_fenced: host("b"),
    });
    assert!(a.ran());
    assert_eq!(a.core.record().held, Generation(3));
}

#[test]
fn a_durable_refusal_gives_the_vm_back_under_a_higher_generation() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    let refused = PeerMessage::Refused {
        migration: m1(),
        generation: Generation(2),
    };
    a.hear("c", refused.clone());
    assert!(!a.ran(), "not from the destination");
    a.hear("b", refused.clone());
    assert!(a.ran());
    assert_eq!(a.core.record().held, Generation(3));
    a.hear("b", refused);
    assert!(!a.ran(), "a second one is nothing new");
}

#[test]
fn a_source_whose_qemu_died_may_still_give_what_is_complete() {
    let mut a = awaiting_ready();
    a.feed(Event::QemuDied);
    a.hear("b", ready());
    assert!(matches!(a.said()[..], [PeerMessage::Permit { .. }]));
}

#[test]
fn a_full_journal_at_the_gift_resumes_the_source_at_once() {
    let mut a = awaiting_ready();
    let from = host("b");
    let message = ready();
    let asked = a.core.handle(Event::Message { from, message });
    assert!(matches!(asked.last(), Some(Action::Persist(_))));
    let actions = a.core.handle(Event::PersistFailed { unchanged: true });
    assert!(actions.iter().any(|a| matches!(a, Action::Cont(_))));
    let is_permit = |a: &Action| {
        matches!(
            a,
            Action::Send {
                message: PeerMessage::Permit { .. },
                ..
            }
        )
    };
    assert!(!actions.iter().any(is_permit));
}

#[test]
fn a_successor_does_what_the_dead_process_would_have_done() {
    let stopped = awaiting_ready().core.record().clone();
    assert!(Driven::recover(stopped.clone(), "a", Qemu::Paused).ran());
    assert!(!Driven::recover(stopped, "a", Qemu::Dead).ran());
    let mut a = awaiting_ready();
    a.hear("b", ready());
    let gave = a.core.record().clone();
    for qemu in [Qemu::Paused, Qemu::Dead] {
        let successor = Driven::recover(gave.clone(), "a", qemu);
        assert!(!successor.ran());
        assert!(matches!(
            successor.said()[..],
            [PeerMessage::AskHolding { .. }]
        ));
    }
}

fn is_down(driven: &Driven) -> bool {
    matches!(driven.core.status(), Status::Down { .. })
}

/// A destination that runs the VM and whose source has not said that it knows.
fn unconfirmed() -> Driven {
    let generation = Generation(2);
    let mut b = Driven::recover(HostRecord::absent(vm()), "b", Qemu::Dead);
    b.feed(Event::PrepareIncoming {
        migration: m1(),
        from: host("a"),
        generation,
    });
    b.feed(Event::Loaded {
        attempt: generation,
    });
    let migration = m1();
    b.hear(
        "a",
        PeerMessage::Permit {
            migration,
            generation,
        },
    );
    assert!(b.ran());
    b
}

#[test]
fn nothing_boots_by_itself() {
    let holder = running("a").core.record().clone();
    let stopping = awaiting_ready().core.record().clone();
    for record in [holder, stopping] {
        let mut a = Driven::recover(record, "a", Qemu::Dead);
        assert!(!a.ran() && is_down(&a), "{:?}", a.actions);
        assert!(a.core.record().may_run().is_some());
        a.feed(Event::StartRequested);
        assert!(a.ran());
    }
    let taken = unconfirmed().core.record().clone();
    let generation = Generation(2);
    for word in [
        Event::Message {
            from: host("a"),
            message: PeerMessage::Confirmed { generation },
        },
        Event::HostRemoved { host: host("a") },
    ] {
        let mut b = Driven::recover(taken.clone(), "b", Qemu::Dead);
        assert!(!b.ran());
        b.feed(Event::StartRequested);
        assert!(!b.ran(), "the source may run it");
        b.feed(word);
        assert!(!b.ran() && is_down(&b), "{:?}", b.actions);
        b.feed(Event::StartRequested);
        assert!(b.ran());
    }
}

#[test]
fn an_operator_boots_a_guest_whose_qemu_is_gone() {
    let taken = unconfirmed().core.record().clone();
    let mut b = Driven::recover(taken, "b", Qemu::Dead);
    b.feed(Event::OperatorResolve {
        run_here: true,
        confirm_fenced: host("a"),
    });
    assert!(b.ran());
}

#[test]
fn a_refusal_boots_no_guest_that_is_gone_before_its_host_has_asked() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    let gave = a.core.record().clone();
    let mut a = Driven::recover(gave, "a", Qemu::Dead);
    let migration = m1();
    a.hear(
        "b",
        PeerMessage::Refused {
            migration,
            generation: Generation(2),
        },
    );
    assert!(!a.ran());
    assert_eq!(a.core.state_name(), StateName::Down);
}

#[test]
fn a_successor_writes_before_it_acts() {
    let record = running("a").core.record().clone();
    let (_, actions) = VmCore::recover(record.clone(), host("a"), Qemu::Paused).expect("good");
    assert_eq!(actions, [Action::Persist(record)]);
}

#[test]
fn a_successor_that_can_write_nothing_answers_nobody_and_keeps_the_guests_end() {
    let record = running("a").core.record().clone();
    for ended in [Event::GuestHalted, Event::GuestShutdown] {
        let recovered = VmCore::recover(record.clone(), host("a"), Qemu::Paused);
        let (mut core, _) = recovered.expect("a good record");
        core.handle(Event::PersistFailed { unchanged: true });
        core.handle(ended.clone());
        core.handle(Event::PersistFailed { unchanged: true });
        assert_eq!(core.state_name(), StateName::Recovering, "{ended:?}");
        // There is room again.
        let asked = core.handle(Event::Timeout(Timer::Ask));
        assert!(matches!(asked[..], [Action::Persist(_)]), "{asked:?}");
        let settled = core.handle(Event::Persisted);
        let runs = |action: &Action| matches!(action, Action::Cont(_) | Action::Boot(_));
        assert!(!settled.iter().any(runs), "{ended:?}: {settled:?}");
    }
}

#[test]
fn a_destination_whose_journal_was_full_forgets_what_does_not_come_once_there_is_room() {
    let (mut b, _) = recover(absent_at(3), "b", Qemu::Dead);
    b.handle(Event::Persisted);
    b.handle(prepare(m1(), 4));
    b.handle(Event::Persisted);
    assert!(matches!(b.record().phase, Phase::Incoming { .. }));
    b.handle(Event::IncomingFailed);
    for _ in 0..2 {
        let failed = b.handle(Event::PersistFailed { unchanged: true });
        let waits = |action: &Action| matches!(action, Action::Arm(Timer::Ask));
        assert!(failed.iter().any(waits), "{failed:?}");
        assert!(matches!(b.record().phase, Phase::Incoming { .. }));
        let again = b.handle(Event::Timeout(Timer::Ask));
        assert!(matches!(again[..], [Action::Persist(_)]), "{again:?}");
    }
    b.handle(Event::Persisted);
    assert_eq!(b.record().phase, Phase::Absent);
    let nothing = b.handle(Event::Timeout(Timer::Ask));
    assert!(
        matches!(nothing[..], [Action::Ignored { .. }]),
        "{nothing:?}"
    );
}

#[test]
fn records_that_contradict_themselves_are_refused() {
    let mut record = HostRecord::absent(vm());
    record.phase = Phase::Holds {
        generation: Generation(2),
        power: Power::On,
        unconfirmed: None,
    };
    let refused = VmCore::recover(record.clone(), host("a"), Qemu::Dead);
    assert!(matches!(refused, Err(RecordError::Contradiction { .. })));
    record.format = 2;
    assert!(matches!(record.check(), Err(RecordError::Format { .. })));
}

#[test]
fn a_record_survives_its_own_encoding() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    for record in &a.records {
        let text = serde_json::to_string(record).expect("encodes");
        let back: HostRecord = serde_json::from_str(&text).expect("decodes");
        assert_eq!(&back, record);
    }
}

#[test]
fn a_successor_stops_a_guest_that_was_given_away() {
    let mut a = awaiting_ready();
    a.hear("b", ready());
    let gave = a.core.record().clone();
    let a = Driven::recover(gave, "a", Qemu::Running);
    assert!(!a.ran());
    assert_eq!(a.actions[0], Action::StopGuest { attempt: None });
    assert!(matches!(a.said()[..], [PeerMessage::AskHolding { .. }]));
}

fn ignored(driven: &Driven, kind: EventKind) -> bool {
    let is = |a: &Action| matches!(a, Action::Ignored { event, .. } if *event == kind);
    driven.actions.iter().any(is)
}

#[test]
fn a_removed_host_is_removed_once_and_told_again_without_harm() {
    let removed = |name: &str| Event::HostRemoved { host: host(name) };
    let incoming = || {
        let mut b = Driven::recover(absent_at(0), "b", Qemu::Dead);
        b.feed(prepare(m1(), 1));
        b
    };
    let mut precopy = awaiting_ready();
    precopy.feed(Event::Timeout(Timer::Switchover));
    for (mut driven, peer) in [
        (unconfirmed(), "a"),
        (incoming(), "a"),
        (precopy, "b"),
        (awaiting_ready(), "b"),
    ] {
        driven.feed(removed("elsewhere"));
        assert!(ignored(&driven, EventKind::HostRemoved));
        driven.feed(removed(peer));
        assert!(!ignored(&driven, EventKind::HostRemoved));
        assert_eq!(driven.core.record().waits_for(), None);
        let before = driven.core.record().clone();
        driven.feed(removed(peer));
        assert!(ignored(&driven, EventKind::HostRemoved));
        assert_eq!(driven.core.record(), &before);
    }
    let mut absent = Driven::recover(absent_at(3), "b", Qemu::Dead);
    absent.feed(removed("a"));
    assert!(ignored(&absent, EventKind::HostRemoved));
}

#[test]
fn a_gift_that_another_grant_overtook_is_given_up_and_withdrawn() {
    let mut living = awaiting_ready();
    living.hear("b", ready());
    let overtaken = |by, with_guest| Event::GiftOvertaken {
        by: Generation(by),
        with_guest,
    };
    living.feed(overtaken(3, false));
    assert!(
        living.core.record().may_hold(),
        "its memory may be the last"
    );
    assert!(!living.actions.contains(&Action::KillQemu));
    let mut a = Driven::recover(living.core.record().clone(), "a", Qemu::Dead);
    a.feed(overtaken(2, true));
    assert!(a.core.record().may_hold(), "nobody was granted it later");
    a.feed(overtaken(3, false));
    assert_eq!(a.core.record().phase, Phase::Absent);
    assert!(!a.ran());
    assert_eq!(a.core.record().highest, Generation(2));
    living.feed(overtaken(3, true));
    assert!(living.actions.contains(&Action::KillQemu));
    // The one that it was given to comes back, ready to take it.
    a.hear(
        "b",
        PeerMessage::AskGift {
            migration: m1(),
            generation: Generation(2),
        },
    );
    let last = a.said().pop();
    assert!(
        matches!(last, Some(PeerMessage::Withdrawn { .. })),
        "{last:?}"
    );
    let mut runs = running("a");
    runs.feed(overtaken(3, true));
    assert!(runs.core.record().may_run().is_some());
}

#[test]
fn a_record_names_the_host_that_it_waits_for() {
    let (a, b) = (host("a"), host("b"));
    assert_eq!(running("a").core.record().waits_for(), None);
    assert_eq!(unconfirmed().core.record().waits_for(), Some(&a));
    let mut source = awaiting_ready();
    assert_eq!(source.core.record().waits_for(), Some(&b), "stopping");
    source.hear("b", ready());
    assert_eq!(source.core.record().waits_for(), Some(&b), "gave");
    let migration = m1();
    source.hear(
        "b",
        PeerMessage::Holding {
            migration,
            generation: Generation(2),
        },
    );
    assert_eq!(source.core.record().waits_for(), None, "moved");
    let mut destination = Driven::recover(absent_at(0), "b", Qemu::Dead);
    assert_eq!(destination.core.record().waits_for(), None);
    destination.feed(prepare(m1(), 2));
    assert_eq!(destination.core.record().waits_for(), Some(&a), "incoming");
    destination.feed(Event::Loaded {
        attempt: Generation(2),
    });
    assert_eq!(destination.core.record().waits_for(), Some(&a), "ready");
}
