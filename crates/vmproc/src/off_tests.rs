//! A guest that is to be off where its host's disk takes nothing.

use crate::input::GuestNews;
use crate::testing::{LONG, Site, ask, holds, open, shown, unconfirmed};
use crate::vm::Vm;
use godwit_ownership::{Event, PeerMessage, Phase, Power, Timer};
use godwit_types::host_api::VmRequest;
use godwit_types::vm::VmState;
use godwit_types::{ErrorCode, Generation, HostName, MigrationId};
use std::time::Instant;

/// Has nothing written to the record while it lives.
pub(crate) struct FullDisk(std::path::PathBuf);

impl FullDisk {
    pub(crate) fn of(site: &Site) -> Self {
        let fresh = site.paths.state.join("ownership.new");
        std::fs::create_dir(&fresh).unwrap();
        Self(fresh)
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        std::fs::remove_dir(&self.0).unwrap();
    }
}

fn until_off_is_written(vm: &mut Vm) {
    let deadline = Instant::now() + LONG;
    while vm.off_wanted.is_some() {
        vm.off_again();
        assert!(Instant::now() < deadline, "it is never written");
        std::thread::yield_now();
    }
}

#[test]
fn a_forced_stop_ends_the_guest_where_nothing_can_be_written_and_is_not_forgotten() {
    for is_full_before in [false, true] {
        let site = Site::new();
        site.record(holds(Power::On));
        let mut qemu = site.qemu(&["running"]);
        let early = is_full_before.then(|| FullDisk::of(&site));
        let mut vm = open(&site);
        let full = early.unwrap_or_else(|| FullDisk::of(&site));
        let stopped = ask(&mut vm, VmRequest::Stop { force: true }).unwrap_err();
        assert!(stopped.message.contains("is ended, but"), "{stopped}");
        let again = "process is restarted before that is written, the VM is booted again: then run 'godwit vm stop web --force' once more";
        assert!(stopped.message.contains(again), "{stopped}");
        assert!(qemu.is_gone());
        let refused = ask(&mut vm, VmRequest::Boot).unwrap_err();
        assert!(refused.message.contains("by a person"), "{refused}");
        drop(full);
        vm.feed(Event::Timeout(Timer::Ask));
        until_off_is_written(&mut vm);
        assert_eq!(shown(&vm).state, VmState::Stopped, "{is_full_before}");
        drop(vm);
        assert_eq!(site.phase(), holds(Power::Off));
    }
}

#[test]
fn a_guest_that_powered_itself_off_on_a_full_disk_is_not_booted_again() {
    let site = Site::new();
    site.record(holds(Power::On));
    let mut qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let full = FullDisk::of(&site);
    ask(&mut vm, VmRequest::Stop { force: false }).unwrap();
    vm.happened(GuestNews::Shutdown);
    assert!(qemu.is_gone());
    let refused = ask(&mut vm, VmRequest::Boot).unwrap_err();
    assert!(refused.message.contains("or by its guest"), "{refused}");
    drop(full);
    until_off_is_written(&mut vm);
    assert_eq!(shown(&vm).state, VmState::Stopped);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

#[test]
fn a_guest_that_powered_itself_off_unseen_on_a_full_disk_is_not_booted_again() {
    let site = Site::new();
    site.record(holds(Power::On));
    let mut qemu = site.qemu(&["shutdown"]);
    let full = FullDisk::of(&site);
    let mut vm = open(&site);
    assert!(qemu.is_gone());
    let refused = ask(&mut vm, VmRequest::Boot).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    drop(full);
    vm.feed(Event::Timeout(Timer::Ask));
    until_off_is_written(&mut vm);
    assert_eq!(shown(&vm).state, VmState::Stopped);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

#[test]
fn that_the_vm_is_off_is_known_once_it_is_written_whatever_failed_before() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let full = FullDisk::of(&site);
    // Nobody asked for it, so that nobody is told what failed.
    vm.happened(GuestNews::Shutdown);
    assert!(vm.outcome.failed.is_some() && vm.off_wanted.is_some());
    drop(full);
    let deadline = Instant::now() + LONG;
    while vm.core.record().power() != Some(Power::Off) {
        vm.off_again();
        assert!(Instant::now() < deadline, "it is never written");
        std::thread::yield_now();
    }
    assert!(vm.off_wanted.is_none(), "it is written");
}

#[test]
fn a_start_after_a_power_off_on_a_full_disk_is_not_refused() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let full = FullDisk::of(&site);
    vm.happened(GuestNews::Shutdown);
    drop(full);
    for request in [VmRequest::Start, VmRequest::Boot] {
        let said = ask(&mut vm, request).unwrap_err();
        assert_eq!(said.code, ErrorCode::MissingFile, "{said}");
    }
}

#[test]
fn a_guest_whose_hypervisor_died_on_a_full_disk_is_booted_again() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let full = FullDisk::of(&site);
    vm.happened(GuestNews::Died);
    assert!(vm.off_wanted.is_none());
    drop(full);
    let said = ask(&mut vm, VmRequest::Boot).unwrap_err();
    assert_eq!(said.code, ErrorCode::MissingFile, "{said}");
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_wish_for_off_does_not_outlive_that_the_vm_is_held_here() {
    let site = Site::new();
    site.record(unconfirmed(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let full = FullDisk::of(&site);
    ask(&mut vm, VmRequest::Stop { force: true }).unwrap_err();
    assert!(vm.off_wanted.is_some());
    drop(full);
    // The VM went on elsewhere: what comes here later is another guest.
    vm.feed(Event::Message {
        from: HostName::new("a").unwrap(),
        message: PeerMessage::Holding {
            migration: MigrationId::new("m").unwrap(),
            generation: Generation(9),
        },
    });
    vm.off_again();
    assert!(vm.off_wanted.is_none(), "it would end the next guest");
    drop(vm);
    assert_eq!(site.phase(), Phase::Absent);
}
