//! What becomes of a guest and its record while its host shuts down.

use crate::adoption::Known;
use crate::input::GuestNews;
use crate::left::Left;
use crate::migration_tests::under_way;
use crate::off::{ASKED_COUNTS, ASKED_FILE, AskedOff};
use crate::off_tests::FullDisk;
use crate::renewal::Handed;
use crate::testing::{FakeQemu, Site, answer, holds, migration, open, shown};
use crate::vm::Vm;
use godwit_ownership::{Phase, Power};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{CLOSING_FILE, CloseState, CloseStep, VmAnswer, VmRequest};
use godwit_types::migration::Side;
use godwit_types::vm::VmState;
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

fn mark(site: &Site) -> std::path::PathBuf {
    let host = site.paths.run.ancestors().nth(2).unwrap();
    host.join(CLOSING_FILE)
}

fn stop_softly(vm: &mut Vm) {
    let stopped = answer(vm, VmRequest::Stop { force: false });
    stopped.map(drop).unwrap();
}

#[test]
fn a_guest_that_obeys_its_closing_host_only_after_it_was_opened_is_meant_to_run() {
    for has_successor in [false, true] {
        let (site, mut qemu, mut vm) = running(true);
        assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Waits);
        // The host goes no further, and a person opens it.
        std::fs::remove_file(mark(&site)).unwrap();
        if has_successor {
            drop(vm);
            qemu.is("shutdown");
            vm = open(&site);
        } else {
            vm.happened(GuestNews::Shutdown);
        }
        assert!(qemu.is_gone());
        vm.off_again();
        drop(vm);
        assert_eq!(site.phase(), holds(Power::On), "{has_successor}");
        assert!(
            !site.paths.pressed().exists(),
            "of the next guest nothing was asked"
        );
    }
}

#[test]
fn a_persons_soft_stop_counts_when_the_host_shuts_down_at_once() {
    // The guest obeys while its host shuts down, or does not and is ended.
    for obeys in [true, false] {
        let (site, mut qemu, mut vm) = running(false);
        stop_softly(&mut vm);
        std::fs::write(mark(&site), "boot-1").unwrap();
        match obeys {
            true => vm.happened(GuestNews::Shutdown),
            false => assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Ended),
        }
        assert!(qemu.is_gone());
        drop(vm);
        assert_eq!(site.phase(), holds(Power::Off), "it obeys: {obeys}");
    }
}

#[test]
fn a_vm_that_a_person_stopped_softly_is_off_when_its_host_lost_its_power_meanwhile() {
    let (site, qemu, mut vm) = running(false);
    stop_softly(&mut vm);
    loses_power(&site, vm, qemu);
    let mut vm = open(&site);
    assert!(answer(&mut vm, VmRequest::Boot).is_err());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

/// Host, VM process and guest lose their power; what is on the host's disk stays.
fn loses_power(site: &Site, vm: Vm, qemu: FakeQemu) {
    drop((vm, qemu));
    std::fs::remove_file(site.paths.identity()).unwrap();
}

/// What a soft stop that long ago would have left.
fn was_asked_off_long_ago(site: &Site) {
    let note = site.paths.state.join(ASKED_FILE);
    let mut asked: AskedOff = load_json(&note).unwrap().unwrap();
    asked.asked_unix_s -= ASKED_COUNTS.as_secs() + 1;
    save_json(&note, &asked).unwrap();
}

#[test]
fn a_vm_that_a_person_stopped_softly_is_off_however_long_its_host_had_no_power() {
    let (site, qemu, mut vm) = running(false);
    stop_softly(&mut vm);
    loses_power(&site, vm, qemu);
    was_asked_off_long_ago(&site);
    let mut vm = open(&site);
    assert!(answer(&mut vm, VmRequest::Boot).is_err());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

#[test]
fn a_guest_that_did_not_obey_a_soft_stop_for_an_hour_is_meant_to_run() {
    let (site, qemu, mut vm) = running(false);
    stop_softly(&mut vm);
    vm.forget_what_was_not_obeyed();
    assert!(vm.is_asked_off(), "it has time yet");
    was_asked_off_long_ago(&site);
    assert!(!vm.is_asked_off());
    vm.forget_what_was_not_obeyed();
    loses_power(&site, vm, qemu);
    drop(open(&site));
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_second_soft_stop_that_fails_does_not_take_the_first_one_back() {
    for has_first in [true, false] {
        let (site, qemu, mut vm) = running(false);
        if has_first {
            stop_softly(&mut vm);
        }
        qemu.refuses(Some("system_powerdown"));
        answer(&mut vm, VmRequest::Stop { force: false })
            .map(drop)
            .unwrap_err();
        loses_power(&site, vm, qemu);
        drop(open(&site));
        let power = if has_first { Power::Off } else { Power::On };
        assert_eq!(site.phase(), holds(power), "a first one: {has_first}");
    }
}

#[test]
fn a_soft_stop_does_not_count_once_a_person_wants_the_vm_to_run() {
    let (site, qemu, mut vm) = running(false);
    stop_softly(&mut vm);
    answer(&mut vm, VmRequest::Start).map(drop).unwrap();
    loses_power(&site, vm, qemu);
    drop(open(&site));
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_guest_that_has_not_come_whole_is_refused_durably_at_the_end() {
    let ready = Phase::Ready {
        generation: Generation(2),
        migration: MigrationId::new("m").unwrap(),
        from: HostName::new("a").unwrap(),
    };
    let site = site(ready.clone(), true);
    let mut qemu = site.qemu(&["paused"]);
    let mut vm = open(&site);
    assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Left);
    assert!(!qemu.is_gone(), "it may come yet");
    assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Ended);
    assert!(qemu.is_gone());
    drop(vm);
    // Its source, which asks, may let it go on.
    assert!(
        matches!(site.phase(), Phase::Refused { .. }),
        "{:?}",
        site.phase()
    );
}

#[test]
fn a_guest_that_came_and_whose_migration_lingers_is_ended_like_others() {
    let (site, mut qemu, mut vm) = running(true);
    under_way(&mut vm, Side::Destination);
    assert_eq!(
        close(&mut vm, CloseStep::Press).unwrap(),
        CloseState::Migrating
    );
    assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Ended);
    assert!(qemu.is_gone());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_guest_that_runs_where_no_journal_can_be_written_is_powered_down_with_its_host() {
    for obeys in [true, false] {
        let site = site(holds(Power::On), true);
        let mut qemu = site.qemu(&["running"]);
        let full = FullDisk::of(&site);
        let mut vm = open(&site);
        let seen = shown(&vm);
        assert_eq!(seen.state, VmState::Running);
        let note = seen.note.unwrap();
        assert!(note.contains("free its disk"), "{note}");
        assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Waits);
        assert_eq!(qemu.asked("system_powerdown"), 1);
        match obeys {
            true => vm.happened(GuestNews::Shutdown),
            false => assert_eq!(close(&mut vm, CloseStep::End).unwrap(), CloseState::Ended),
        }
        assert!(qemu.is_gone());
        drop((vm, full));
        assert_eq!(site.phase(), holds(Power::On), "it obeys: {obeys}");
    }
}

#[test]
fn a_guest_that_stands_still_where_no_journal_can_be_written_is_left_and_shown_as_it_is() {
    for (power, state) in [(Power::Paused, "running"), (Power::On, "paused")] {
        let site = site(holds(power), true);
        let qemu = site.qemu(&[state]);
        let _full = FullDisk::of(&site);
        let mut vm = open(&site);
        assert_eq!(shown(&vm).state, VmState::Paused);
        assert_eq!(close(&mut vm, CloseStep::Press).unwrap(), CloseState::Left);
        assert_eq!(qemu.asked("system_powerdown"), 0);
    }
}

#[test]
fn a_qemu_that_was_being_started_when_its_host_began_to_shut_down_is_ended_before_its_guest_runs() {
    for closes in [true, false] {
        let site = site(holds(Power::On), false);
        let mut vm = open(&site);
        let mut qemu = site.qemu(&["prelaunch"]);
        let identity = load_json(&site.paths.identity()).unwrap().unwrap();
        let spec = vm.spec.clone().unwrap();
        let left = Left::new(&Known {
            config: &site.config,
            paths: &site.paths,
            record: vm.core.record(),
            spec: Some(&spec),
            handed: Handed::default(),
        });
        let (hyper, _) = left.attempt(&identity).unwrap();
        if closes {
            std::fs::write(mark(&site), "boot-1").unwrap();
        }
        let kept = vm.keep(*hyper, &spec);
        assert_eq!(qemu.is_gone(), closes, "{kept:?}");
        assert_eq!(vm.hyper.is_none(), closes);
        assert_eq!(kept.is_err(), closes);
    }
}
