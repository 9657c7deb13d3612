//! What a host that the record does not wait for can do here with messages: nothing, in any state.
//!
//! The states and records are the transition table's examples, so that a new state is tried as soon as it has one.

use crate::core::VmCore;
use crate::event::{Action, Event, EventKind, PeerMessage};
use crate::record::{HostRecord, Phase};
use crate::state::{Qemu, State, StateName};
use crate::table::Names;
use godwit_types::{Generation, HostName, MigrationId};
use std::collections::BTreeSet;

/// How far a host that holds nothing may rise for one message.
const STEP: u64 = 1 << 32;

fn messages(migration: &MigrationId, generation: Generation) -> Vec<PeerMessage> {
    let migration = migration.clone();
    vec![
        PeerMessage::Prepared {
            migration: migration.clone(),
            highest: generation,
        },
        PeerMessage::Ready {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::Permit {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::AskHolding {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::Holding {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::Confirmed { generation },
        PeerMessage::Superseded {
            generation,
            by: Generation(generation.0.saturating_add(1)),
        },
        PeerMessage::Refused {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::AskGift {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::Undecided {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::Withdrawn {
            migration: migration.clone(),
            generation,
        },
        PeerMessage::abort(migration.clone()),
        PeerMessage::Failed {
            migration,
            reason: None,
        },
    ]
}

fn all_messages() -> Vec<PeerMessage> {
    let mut all = Vec::new();
    for id in ["m1", "m9"] {
        let migration = MigrationId::new(id).expect("a valid id");
        for generation in [0, 1, 2, 3, 9, STEP, STEP + 1, STEP + 9, u64::MAX] {
            all.extend(messages(&migration, Generation(generation)));
        }
    }
    all
}

/// Every state with an example of its record, holders also with a handover that is not confirmed.
fn examples(names: &Names) -> Vec<(State, HostRecord, Qemu)> {
    let mut all = Vec::new();
    for name in StateName::ALL {
        let (state, record, qemu) = names.example(*name);
        if let (State::Held(_), Phase::Holds { .. }) = (&state, &record.phase) {
            let mut waiting = record.clone();
            if let Phase::Holds { unconfirmed, .. } = &mut waiting.phase {
                *unconfirmed = Some(names.with());
            }
            all.push((state.clone(), waiting, qemu));
        }
        all.push((state, record, qemu));
    }
    all
}

fn core(example: &(State, HostRecord, Qemu), names: &Names) -> VmCore {
    let (state, record, qemu) = example.clone();
    let mut core = VmCore::unsettled(record, names.here.clone(), qemu);
    core.state = state;
    #[cfg(feature = "planted-faults")]
    {
        let plant = std::env::var("GODWIT_PLANT").ok();
        core.plant = plant.and_then(|name| crate::plant::Plant::from_name(&name));
    }
    core
}

/// Hands over the message, with a disk that always works; gives what was done about it.
fn hear(core: &mut VmCore, from: &HostName, message: PeerMessage) -> Vec<Action> {
    let from = from.clone();
    let mut done = core.handle(Event::Message { from, message });
    while let Some(Action::Persist(_)) = done.last() {
        done.extend(core.handle(Event::Persisted));
    }
    done
}

fn touches_the_guest(action: &Action) -> bool {
    matches!(
        action,
        Action::Boot(_)
            | Action::Cont(_)
            | Action::StopGuest { .. }
            | Action::KillQemu
            | Action::Cleanup
            | Action::EndMigration { .. }
    )
}

/// Whether only `highest` differs, and by no more than a host that holds nothing may rise.
fn rose_a_step(before: &HostRecord, after: &HostRecord) -> bool {
    after.highest.0 - before.highest.0 <= STEP && before.clone().raised(after.highest) == *after
}

#[test]
fn every_message_is_tried() {
    let names = Names::new().expect("valid names");
    let tried: BTreeSet<_> = all_messages().iter().map(PeerMessage::kind).collect();
    let all = EventKind::ALL.iter().copied();
    let all = all.filter(|kind| names.peer_event(*kind, Generation(1)).is_some());
    assert_eq!(tried, all.collect());
}

#[test]
fn an_unrelated_host_moves_nothing() {
    let names = Names::new().expect("valid names");
    let stranger = HostName::new("stranger").expect("a valid name");
    let mut rose = 0;
    for example in examples(&names) {
        for message in all_messages() {
            let mut core = core(&example, &names);
            let (before, state) = (core.record().clone(), core.state_name());
            let done = hear(&mut core, &stranger, message.clone());
            let what = format!("{state:?} + {message:?} -> {done:?}");
            assert!(!done.iter().any(touches_the_guest), "{what}");
            assert_eq!(core.state_name(), state, "{what}");
            if let State::Elsewhere(_) = example.0 {
                assert!(rose_a_step(&before, core.record()), "{what}");
                rose += usize::from(core.record() != &before);
            } else {
                assert_eq!(core.record(), &before, "{what}");
                assert_eq!(core.highest(), before.highest, "{what}");
            }
        }
    }
    assert!(rose > 0, "a source in doubt must get its durable answer");
}

#[test]
fn a_peer_moves_only_the_migration_that_it_is_part_of() {
    let names = Names::new().expect("valid names");
    let other = MigrationId::new("m9").expect("a valid id");
    for example in examples(&names) {
        if !matches!(example.0, State::Leaving(_) | State::Coming(_)) {
            continue;
        }
        for generation in [1, 2, 3, 9, STEP] {
            for message in messages(&other, Generation(generation)) {
                let mut core = core(&example, &names);
                let (before, state) = (core.record().clone(), core.state_name());
                // A source that says that it holds a higher generation has taken its gift back.
                let took_back = matches!(message, PeerMessage::Holding { .. });
                if took_back && matches!(example.0, State::Coming(_)) {
                    continue;
                }
                let done = hear(&mut core, &names.peer, message.clone());
                let what = format!("{state:?} + {message:?} -> {done:?}");
                assert!(!done.iter().any(touches_the_guest), "{what}");
                assert_eq!(core.record(), &before, "{what}");
            }
        }
    }
}

/// A host that holds nothing answers a survey with a generation that a controller must believe, or no grant for this host
/// ever follows: however often it is asked.
#[test]
fn asked_again_and_again_a_host_stays_within_its_controllers_reach() {
    let names = Names::new().expect("valid names");
    for example in examples(&names) {
        for from in [&names.peer, &HostName::new("stranger").expect("a name")] {
            let mut core = core(&example, &names);
            // One that waits for this peer yields to it once, and has no guest any more.
            let generation = core.record().held;
            hear(&mut core, from, PeerMessage::Confirmed { generation });
            for _ in 0..300 {
                let next = Generation(core.highest().0.saturating_add(STEP));
                for message in messages(&names.with().migration, next) {
                    hear(&mut core, from, message);
                }
            }
            let reached = core.highest();
            assert!(reached <= crate::PEERS_REACH, "{:?}: {reached}", example.0);
        }
    }
}
