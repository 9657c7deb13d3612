//! A guest that stands still until its disk has room.

use super::{Driven, host, is_down, running, unconfirmed};
use godwit_ownership::{Action, Event, Power, Qemu, StateName, Status};

fn power(driven: &Driven) -> Option<Power> {
    driven.core.record().power()
}

#[test]
fn a_guest_that_waits_for_room_is_booted_like_one_that_ran_and_one_that_a_person_paused_is_not() {
    let stops = |driven: &Driven| {
        driven
            .actions
            .contains(&Action::StopGuest { attempt: None })
    };
    let mut waits = running("a");
    waits.feed(Event::OutOfRoom);
    assert!(stops(&waits) && waits.core.status() == Status::Paused);
    assert_eq!(power(&waits), Some(Power::WaitsForRoom));
    let record = waits.core.record().clone();
    // Its host lost its power.
    let mut anew = Driven::recover(record.clone(), "a", Qemu::Dead);
    assert!(!anew.ran() && is_down(&anew), "its host asks first");
    assert!(power(&anew).is_some_and(Power::should_run));
    anew.feed(Event::StartRequested);
    assert!(anew.ran() && power(&anew) == Some(Power::On));
    // Only its VM process died, before it had stopped the guest or after.
    for qemu in [Qemu::Running, Qemu::Paused] {
        let mut successor = Driven::recover(record.clone(), "a", qemu);
        assert_eq!(stops(&successor), qemu == Qemu::Running);
        assert!(!successor.ran() && successor.core.status() == Status::Paused);
        successor.feed(Event::ResumeRequested);
        assert!(successor.ran() && power(&successor) == Some(Power::On));
    }
    // A person's word counts for more, whichever came first, and a guest that panicked waits for a person.
    for word in [Event::PauseRequested, Event::GuestHalted] {
        let mut paused = Driven::recover(record.clone(), "a", Qemu::Paused);
        paused.feed(word);
        assert_eq!(power(&paused), Some(Power::Paused));
        assert!(!power(&paused).is_some_and(Power::should_run));
        paused.feed(Event::OutOfRoom);
        assert_eq!(power(&paused), Some(Power::Paused));
    }
}

#[test]
fn a_guest_that_waits_for_room_is_not_booted_before_its_former_host_has_confirmed() {
    let mut taken = unconfirmed();
    taken.feed(Event::OutOfRoom);
    assert_eq!(power(&taken), Some(Power::WaitsForRoom));
    let record = taken.core.record().clone();
    let mut b = Driven::recover(record, "b", Qemu::Dead);
    assert_eq!(b.core.state_name(), StateName::Unconfirmed);
    b.feed(Event::StartRequested);
    assert!(!b.ran(), "the source may run it");
    // Who was outranked goes on waiting for room.
    taken.feed(Event::OperatorResolve {
        run_here: true,
        confirm_fenced: host("a"),
    });
    assert_eq!(power(&taken), Some(Power::WaitsForRoom));
}
