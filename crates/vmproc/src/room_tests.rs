//! A guest that stands still until its disk has room: who knows it, and what ends it.

use crate::off_tests::FullDisk;
use crate::testing::{FakeQemu, Site, ask, holds, look, open, shown};
use crate::vm::Vm;
use godwit_ownership::{Event, Power};
use godwit_types::ErrorCode;
use godwit_types::host_api::VmRequest;
use godwit_types::vm::VmState;

const WAITS: &str = "disk-full: the guest is paused";

/// A successor of the process that paused its guest for want of room.
fn waiting() -> (Site, FakeQemu, Vm) {
    let site = Site::new();
    site.record(holds(Power::WaitsForRoom));
    let qemu = site.qemu(&["paused"]);
    let vm = open(&site);
    (site, qemu, vm)
}

fn waits(vm: &Vm) -> bool {
    let seen = shown(vm);
    let is_told = seen.note.is_some_and(|note| note.starts_with(WAITS));
    seen.state == VmState::Paused && is_told
}

/// The number of the wait under way.
fn wait(vm: &mut Vm) -> u64 {
    vm.look_for_room();
    vm.room.wait.as_ref().unwrap().number
}

#[test]
fn a_successor_waits_on_and_lets_its_guest_go_on_once_there_is_room() {
    let (site, qemu, mut vm) = waiting();
    assert!(waits(&vm), "also where which disk it is was lost");
    let moved = vm.refuse_while_full().unwrap_err();
    assert!(moved.message.starts_with(WAITS), "{moved}");
    let number = wait(&mut vm);
    vm.may_have_room(number);
    assert_eq!(qemu.asked("cont"), 1);
    assert_eq!(shown(&vm).state, VmState::Running);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn what_is_found_for_an_earlier_wait_ends_no_later_one() {
    let (_site, qemu, mut vm) = waiting();
    let earlier = wait(&mut vm);
    ask(&mut vm, VmRequest::Resume).unwrap();
    vm.look_for_room();
    vm.feed(Event::OutOfRoom);
    let later = wait(&mut vm);
    assert_ne!(earlier, later);
    vm.may_have_room(earlier);
    assert!(waits(&vm) && qemu.asked("cont") == 1);
    vm.may_have_room(later);
    assert_eq!(qemu.asked("cont"), 2);
}

#[test]
fn a_guest_that_cannot_go_on_though_there_is_room_waits_again() {
    let (site, qemu, mut vm) = waiting();
    let first = wait(&mut vm);
    // That it runs cannot be written.
    let full = FullDisk::of(&site);
    vm.may_have_room(first);
    assert!(waits(&vm) && qemu.asked("cont") == 0);
    let second = wait(&mut vm);
    assert_ne!(first, second);
    drop(full);
    vm.may_have_room(second);
    assert_eq!(shown(&vm).state, VmState::Running);
}

#[test]
fn a_guest_whose_hypervisor_does_not_let_it_go_on_waits_again() {
    let (_site, qemu, mut vm) = waiting();
    let first = wait(&mut vm);
    // It answers once nobody waits for that any more.
    qemu.hangs_at(Some("cont"));
    vm.cont_wait = std::time::Duration::from_millis(50);
    vm.may_have_room(first);
    assert_eq!(shown(&vm).state, VmState::Unreachable);
    qemu.refuses(Some("cont"));
    qemu.hangs_at(None);
    look(&mut vm);
    assert!(waits(&vm), "{:?}", shown(&vm));
    assert!(qemu.asked("cont") > 0);
    assert_eq!(vm.core.record().power(), Some(Power::WaitsForRoom));
    let second = wait(&mut vm);
    qemu.refuses(None);
    vm.cont_wait = std::time::Duration::from_secs(60);
    vm.may_have_room(second);
    assert_eq!(shown(&vm).state, VmState::Running);
}

#[test]
fn no_note_of_a_full_disk_outlives_the_wait() {
    let (site, _qemu, mut vm) = waiting();
    let note = vm.paths.waits_for_room();
    std::fs::write(&note, r#"{"launch":1,"disk":"root","path":"/root.raw"}"#).unwrap();
    let number = wait(&mut vm);
    vm.may_have_room(number);
    assert!(!note.exists() && vm.room.full.is_none());
    drop(site);
}

#[test]
fn a_successor_that_could_not_write_its_record_waits_once_it_could() {
    let site = Site::new();
    site.record(holds(Power::WaitsForRoom));
    let qemu = site.qemu(&["paused"]);
    let full = FullDisk::of(&site);
    let mut vm = open(&site);
    vm.look_for_room();
    assert!(vm.room.wait.is_none());
    drop(full);
    vm.feed(Event::Timeout(godwit_ownership::Timer::Ask));
    let number = wait(&mut vm);
    assert!(waits(&vm));
    vm.may_have_room(number);
    assert_eq!(qemu.asked("cont"), 1);
}

#[test]
fn a_persons_pause_ends_the_wait_once_it_is_written() {
    let (site, qemu, mut vm) = waiting();
    let number = wait(&mut vm);
    let full = FullDisk::of(&site);
    ask(&mut vm, VmRequest::Pause).unwrap_err();
    vm.look_for_room();
    assert!(waits(&vm), "nothing says yet that a person paused it");
    drop(full);
    let paused = ask(&mut vm, VmRequest::Pause).unwrap();
    assert!(paused.ends_with("is paused"), "{paused}");
    vm.look_for_room();
    assert!(vm.room.wait.is_none());
    let seen = shown(&vm);
    assert_eq!((seen.state, seen.note), (VmState::Paused, None));
    vm.may_have_room(number);
    assert_eq!(qemu.asked("cont"), 0);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Paused));
}

#[test]
fn a_guest_that_waited_when_its_host_lost_power_is_booted_and_one_that_a_person_paused_is_not() {
    for (power, refused) in [
        (Power::WaitsForRoom, ErrorCode::MissingFile),
        (Power::Paused, ErrorCode::WrongState),
    ] {
        let site = Site::new();
        site.record(holds(power));
        let mut vm = open(&site);
        assert_eq!(shown(&vm).state, VmState::Crashed);
        let said = ask(&mut vm, VmRequest::Boot).unwrap_err();
        assert_eq!(said.code, refused, "{said}");
    }
}
