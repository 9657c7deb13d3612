//! What becomes of a guest and its record while its host shuts down.

use crate::input::GuestNews;
use crate::testing::{FakeQemu, Site, answer, holds, migration, open};
use crate::vm::Vm;
use godwit_ownership::{Phase, Power};
use godwit_types::host_api::{CLOSING_FILE, CloseState, CloseStep, VmAnswer, VmRequest};
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId};

fn site(phase: Phase, closes: bool) -> Site {
    let site = Site::new();
    site.record(phase);
    if closes {
        let host = site.paths.run.ancestors().nth(2).unwrap();
        std::fs::write(host.join(CLOSING_FILE), "boot-1").unwrap();
    }
    site
}

fn close(vm: &mut Vm, step: CloseStep) -> Result<CloseState, ApiError> {
    match answer(vm, VmRequest::Close { step })? {
        VmAnswer::Closing(closing) => Ok(closing.state),
        other => panic!("{other:?}"),
    }
}

fn running(closes: bool) -> (Site, FakeQemu, Vm) {
    let site = site(holds(Power::On), closes);
    let qemu = site.qemu(&["running"]);
    let vm = open(&site);
    (site, qemu, vm)
}

#[test]
fn a_guest_that_powers_off_while_its_host_shuts_down_is_meant_to_run() {
    let (site, mut qemu, mut vm) = running(true);
    assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Waits);
    assert_eq!(qemu.asked("system_powerdown"), 1);
    assert_eq!(close(&mut vm, CloseStep::Look).unwrap(), CloseState::Waits);
    assert_eq!(qemu.asked("system_powerdown"), 1, "a look presses no key");
    vm.happened(GuestNews::Shutdown);
    assert!(qemu.is_gone());
    assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Off);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_guest_that_powers_off_while_its_host_stays_up_stays_off() {
    let (site, mut qemu, mut vm) = running(false);
    vm.happened(GuestNews::Shutdown);
    assert!(qemu.is_gone());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

#[test]
fn a_guest_that_powered_off_while_nobody_listened_is_meant_to_run_if_its_host_shuts_down() {
    for (closes, power) in [(true, Power::On), (false, Power::Off)] {
        let site = site(holds(Power::On), closes);
        let mut qemu = site.qemu(&["shutdown"]);
        let mut vm = open(&site);
        assert!(qemu.is_gone());
        vm.off_again();
        drop(vm);
        assert_eq!(site.phase(), holds(power), "the host closes: {closes}");
    }
}

#[test]
fn a_guest_that_does_not_power_off_is_ended_without_a_word_in_its_record() {
    let (site, mut qemu, mut vm) = running(true);
    assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Waits);
    assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Ended);
    assert!(qemu.is_gone());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_person_s_stop_counts_also_while_the_host_shuts_down() {
    let (site, mut qemu, mut vm) = running(true);
    answer(&mut vm, VmRequest::Stop { force: true }).unwrap();
    assert!(qemu.is_gone());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

#[test]
fn no_guest_starts_or_moves_while_its_host_shuts_down() {
    let site = site(holds(Power::On), true);
    let mut vm = open(&site);
    let moves = VmRequest::Migrate(Box::new(migration("m")));
    for request in [VmRequest::Start, VmRequest::Boot, moves] {
        let refused = answer(&mut vm, request).unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.message.contains("shuts down"), "{refused}");
    }
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn what_is_paused_or_in_doubt_is_left_alone_when_its_host_shuts_down() {
    let gave = Phase::Gave {
        generation: Generation(2),
        migration: MigrationId::new("m").unwrap(),
        to: HostName::new("c").unwrap(),
    };
    for phase in [holds(Power::Paused), gave] {
        let site = site(phase.clone(), true);
        let mut qemu = site.qemu(&["paused"]);
        let mut vm = open(&site);
        for step in [CloseStep::Press, CloseStep::End] {
            assert_eq!(close(&mut vm, step).unwrap(), CloseState::Left);
        }
        assert_eq!(qemu.asked("system_powerdown"), 0);
        assert!(!qemu.is_gone());
        drop(vm);
        assert_eq!(site.phase(), phase);
    }
}

#[test]
fn nothing_is_powered_down_on_a_host_that_stays_up() {
    let (_site, mut qemu, mut vm) = running(false);
    for step in [CloseStep::Look, CloseStep::Press, CloseStep::End] {
        assert!(close(&mut vm, step).is_err());
    }
    assert_eq!(qemu.asked("system_powerdown"), 0);
    assert!(!qemu.is_gone());
}
