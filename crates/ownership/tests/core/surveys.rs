//! Surveys and grants from outside: what one binds, and what it voids.

use super::{Driven, awaiting_ready, host, m1, running, vm};
use godwit_ownership::{
    Action, Event, EventKind, GenerationLedger, GrantError, HostRecord, Qemu, StateName, Timer,
};
use godwit_types::{Generation, MigrationId};
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn the_ledger_grants_only_when_every_host_was_heard_or_fenced() {
    let mut ledger = GenerationLedger::default();
    let enrolled: BTreeSet<_> = ["a", "b"].map(host).into();
    let level = ledger.survey_level(&vm()).expect("not exhausted");
    let absent = HostRecord {
        highest: level,
        ..HostRecord::absent(vm())
    };
    let mut heard = BTreeMap::from([(host("b"), absent)]);
    let none = BTreeSet::new();
    let silent = ledger.grant(&vm(), level, &enrolled, &heard, &none);
    assert!(matches!(silent, Err(GrantError::Unheard { .. })));
    let fenced = BTreeSet::from([host("a")]);
    let granted = ledger.grant(&vm(), level, &enrolled, &heard, &fenced);
    assert!(granted.is_ok_and(|g| g > level));
    heard.insert(host("a"), running("a").core.record().clone());
    let held = ledger.grant(&vm(), level, &enrolled, &heard, &none);
    assert!(matches!(held, Err(GrantError::Held { .. })));
}

pub(super) fn absent_at(highest: u64) -> HostRecord {
    HostRecord {
        highest: Generation(highest),
        ..HostRecord::absent(vm())
    }
}

fn survey(level: u64) -> Event {
    Event::SurveyRequested {
        level: Generation(level),
    }
}

fn surveyed(driven: &Driven, level: u64) -> bool {
    let level = Generation(level);
    driven.actions.contains(&Action::Surveyed { level })
}

#[test]
fn a_grant_is_taken_only_at_the_level_of_the_last_survey() {
    let mut a = Driven::recover(absent_at(3), "a", Qemu::Dead);
    a.feed(survey(8));
    assert!(surveyed(&a, 8));
    assert_eq!(a.core.record(), &absent_at(8));
    a.feed(survey(20));
    let granted = |generation, expect| Event::Granted {
        generation: Generation(generation),
        expect: Generation(expect),
    };
    for overtaken in [granted(9, 8), granted(21, 8), granted(20, 20)] {
        a.feed(overtaken.clone());
        assert_eq!(a.core.state_name(), StateName::Absent, "{overtaken:?}");
    }
    a.feed(granted(21, 20));
    assert_eq!(a.core.record().may_run(), Some(Generation(21)));
}

#[test]
fn a_survey_far_above_what_a_host_knows_is_answered() {
    let mut a = Driven::recover(absent_at(0), "a", Qemu::Dead);
    a.feed(survey(1 << 50));
    assert!(surveyed(&a, 1 << 50));
    assert_eq!(a.core.record(), &absent_at(1 << 50));
    for no_room in [u64::MAX, u64::MAX - 1] {
        a.feed(survey(no_room));
        assert_eq!(surveyed(&a, no_room), no_room < u64::MAX, "{no_room}");
    }
}

#[test]
fn a_surveyed_holder_stays_as_it_is() {
    let mut a = running("a");
    let before = a.core.record().clone();
    a.feed(survey(1 << 50));
    assert!(surveyed(&a, 1 << 50));
    assert_eq!(a.core.record(), &before);
}

pub(super) fn prepare(migration: MigrationId, generation: u64) -> Event {
    Event::PrepareIncoming {
        migration,
        from: host("a"),
        generation: Generation(generation),
    }
}

fn refused_as_old(driven: &Driven) -> bool {
    let mut why = driven.actions.iter().filter_map(|action| match action {
        Action::Refuse { why, .. } => Some(*why),
        _ => None,
    });
    why.any(|why| why.starts_with("the permission for this migration is older"))
}

#[test]
fn a_survey_voids_the_permissions_before_it_at_both_ends() {
    let mut b = Driven::recover(absent_at(3), "b", Qemu::Dead);
    b.feed(survey(8));
    b.feed(prepare(m1(), 8));
    assert!(refused_as_old(&b));
    assert_eq!(b.core.record(), &absent_at(8));
    b.feed(prepare(m1(), 9));
    assert_eq!(b.core.state_name(), StateName::Incoming);
    // The same one comes twice.
    b.feed(prepare(m1(), 9));
    let again = |a: &Action| matches!(a, Action::Ignored { event, .. } if *event == EventKind::PrepareIncoming);
    assert!(b.actions.iter().any(again), "{:?}", b.actions);

    let mut a = awaiting_ready();
    a.feed(Event::Cancel);
    let began = |generation| Event::MigrationBegan {
        migration: MigrationId::new("m2").expect("a valid id"),
        to: host("b"),
        generation: Generation(generation),
    };
    a.feed(began(2));
    assert!(refused_as_old(&a));
    assert_eq!(a.core.state_name(), StateName::Running);
    a.feed(began(3));
    assert_eq!(a.core.state_name(), StateName::Precopy);
}

#[test]
fn an_attempt_is_not_below_its_permission() {
    let mut a = running("a");
    a.feed(Event::MigrationBegan {
        migration: m1(),
        to: host("b"),
        generation: Generation(1 << 50),
    });
    a.feed(Event::SwitchoverRequested);
    assert_eq!(a.core.record().highest, Generation(1 << 50));
    a.feed(Event::Timeout(Timer::Switchover));
    a.feed(Event::SwitchoverRequested);
    assert_eq!(a.core.record().highest, Generation((1 << 50) + 1));
}
