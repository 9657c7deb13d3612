//! A whole VM process but its threads of control: starts, hypervisors that speak or do not, and reports.

use crate::testing::{LONG, Site, ask, holds, look, migration, open, report, shown, unconfirmed};
use crate::vm::Vm;
use godwit_ownership::Power;
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{NOTE_FILE, REPORTS_DIR, SPEC_FILE, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome, Side};
use godwit_types::vm::VmState;
use godwit_types::{ErrorCode, Generation, MigrationId};
use std::path::Path;
use std::time::{Duration, Instant};

// ---- starts ----

#[test]
fn a_start_of_a_vm_that_waits_for_its_former_host_does_not_say_that_it_runs() {
    for power in [Power::Off, Power::Paused, Power::On] {
        let site = Site::new();
        site.record(unconfirmed(power));
        let mut vm = open(&site);
        let said = ask(&mut vm, VmRequest::Start).unwrap_err();
        assert_eq!(said.code, ErrorCode::InDoubt, "{said}");
        assert!(said.message.contains("does not run yet"), "{said}");
        assert!(said.message.contains("godwit vm resolve web"), "{said}");
        assert_eq!(shown(&vm).state, VmState::InDoubt);
        drop(vm);
        assert_eq!(site.phase(), unconfirmed(Power::On));
    }
}

#[test]
fn a_paused_vm_whose_guest_is_gone_says_what_brings_it_back() {
    let only = "once host a is powered off and only then: godwit vm resolve web --run-on";
    for (phase, wanted) in [
        (holds(Power::Paused), "'godwit vm start web'"),
        (unconfirmed(Power::Paused), only),
    ] {
        let site = Site::new();
        site.record(phase);
        let seen = shown(&open(&site));
        assert_eq!(seen.state, VmState::Crashed);
        let note = seen.note.unwrap();
        assert!(note.contains("it was paused when its QEMU died"), "{note}");
        assert!(note.contains(wanted), "{note}");
    }
}

#[test]
fn a_boot_that_nobody_asked_for_and_that_fails_turns_no_vm_off() {
    let site = Site::new();
    site.record(holds(Power::On));
    let mut vm = open(&site);
    for request in [VmRequest::Boot, VmRequest::Start, VmRequest::Boot] {
        let refused = ask(&mut vm, request).unwrap_err();
        assert_eq!(refused.code, ErrorCode::MissingFile, "{}", refused.message);
        assert_eq!(shown(&vm).state, VmState::Crashed);
    }
    drop(vm);
    assert_eq!(site.phase(), holds(Power::On));
}

#[test]
fn a_person_s_start_that_fails_leaves_a_vm_off_that_was() {
    let site = Site::new();
    site.record(holds(Power::Off));
    let mut vm = open(&site);
    let refused = ask(&mut vm, VmRequest::Boot).unwrap_err();
    assert_eq!(
        refused.code,
        ErrorCode::WrongState,
        "nobody wants it to run"
    );
    assert!(ask(&mut vm, VmRequest::Start).is_err());
    assert_eq!(shown(&vm).state, VmState::Stopped);
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

/// Whether a start that was refused says that its guest was not let run.
fn is_refused_without_a_guest(change: impl FnOnce(&mut Site)) -> bool {
    let mut site = Site::new();
    site.record(holds(Power::Off));
    change(&mut site);
    let mut vm = open(&site);
    let refused = ask(&mut vm, VmRequest::Start).unwrap_err();
    assert_eq!(shown(&vm).state, VmState::Stopped, "{refused}");
    refused.not_begun
}

#[test]
fn a_start_that_fails_before_its_guest_is_let_run_says_so() {
    let described = |site: &Site, more: &str| {
        let text = format!("name = \"web\"\nvcpus = 1\nmemory_mib = 16\n{more}");
        let spec = godwit_types::VmSpec::from_toml(&text).unwrap();
        save_json(&site.paths.spec(), &spec).unwrap();
    };
    assert!(is_refused_without_a_guest(|_| {}), "there is no kernel");
    assert!(is_refused_without_a_guest(|site| {
        let disk = "[[disk]]\nname = \"root\"\npath = \"/no/such/image\"";
        described(site, &format!("hardware = 2\n{disk}"));
    }));
    // A hypervisor begins without its guest.
    assert!(is_refused_without_a_guest(|site| {
        described(site, "kernel = \"/proc/self/exe\"");
        site.config.qemu = "/bin/false".to_owned();
    }));
}

/// No process of the VM came up any more: what ran could not be stopped, what was down was not booted.
#[test]
fn a_vm_whose_description_or_note_is_damaged_has_a_process_that_can_turn_it_off() {
    for file in [SPEC_FILE, NOTE_FILE] {
        let site = Site::new();
        site.record(holds(Power::On));
        std::fs::write(Path::new(&site.config.state_dir).join(file), "noise").unwrap();
        let mut vm = open(&site);
        assert_eq!(
            ask(&mut vm, VmRequest::Stop { force: true }).map(drop),
            Ok(())
        );
        drop(vm);
        assert_eq!(site.phase(), holds(Power::Off), "{file}");
    }
}

#[test]
fn a_vm_that_was_started_since_it_was_seen_dead_is_not_powered_off() {
    let dead = |generation| VmRequest::PowerOffDead {
        generation: Generation(generation),
    };
    let site = Site::new();
    site.record(holds(Power::On));
    let mut qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let refused = ask(&mut vm, dead(2)).unwrap_err();
    assert!(refused.message.contains("look again"), "{refused}");
    assert!(!qemu.is_gone());
    drop((vm, qemu));
    let site = Site::new();
    site.record(holds(Power::On));
    let mut vm = open(&site);
    assert!(ask(&mut vm, dead(1)).is_err(), "it came here since");
    assert_eq!(shown(&vm).state, VmState::Crashed);
    assert!(ask(&mut vm, dead(2)).is_ok());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
}

// ---- a state directory that is put back ----

#[test]
fn a_record_that_was_put_back_under_a_living_process_is_written_again() {
    let site = Site::new();
    site.record(holds(Power::Off));
    let mut vm = open(&site);
    std::fs::remove_dir_all(&site.paths.state).unwrap();
    assert!(ask(&mut vm, VmRequest::KeepRecord).is_ok());
    drop(vm);
    assert_eq!(site.phase(), holds(Power::Off));
    assert!(site.paths.state.join("vm.json").exists());
}

#[test]
fn what_a_guest_has_for_disks_is_written_again_though_the_record_is_the_same() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    assert!(ask(&mut vm, VmRequest::KeepRecord).is_ok());
    let written = std::fs::read(site.paths.disks()).unwrap();
    std::fs::write(site.paths.disks(), "of last week").unwrap();
    assert!(ask(&mut vm, VmRequest::KeepRecord).is_ok());
    assert_eq!(std::fs::read(site.paths.disks()).unwrap(), written);
}

// ---- a hypervisor that is taken over ----

#[test]
fn a_guest_that_powered_itself_off_unseen_is_off() {
    for statuses in [&["shutdown"][..], &["running", "shutdown"]] {
        let site = Site::new();
        site.record(holds(Power::On));
        let mut qemu = site.qemu(statuses);
        let vm = open(&site);
        assert_eq!(shown(&vm).state, VmState::Stopped, "{statuses:?}");
        assert!(qemu.is_gone());
        assert_eq!(qemu.asked("cont"), 0);
        drop(vm);
        assert_eq!(site.phase(), holds(Power::Off));
    }
}

#[test]
fn a_guest_that_panicked_unseen_stands_still_and_says_why() {
    for statuses in [&["guest-panicked"][..], &["running", "guest-panicked"]] {
        let site = Site::new();
        site.record(holds(Power::On));
        let qemu = site.qemu(statuses);
        let vm = open(&site);
        let seen = shown(&vm);
        assert_eq!(seen.state, VmState::Panicked, "{statuses:?}");
        let note = seen.note.unwrap();
        assert!(note.starts_with("the guest panicked"), "{note}");
        assert!(note.contains("then 'godwit vm start web'"), "{note}");
        assert_eq!(qemu.asked("cont"), 0);
    }
}

#[test]
fn a_hypervisor_in_other_directories_than_those_configured_now_is_taken_over() {
    let mut site = Site::new();
    site.record(holds(Power::On));
    let mut qemu = site.qemu(&["running"]);
    drop(open(&site));
    for dir in [&mut site.config.run_dir, &mut site.config.ram_dir] {
        dir.push_str("-elsewhere");
        std::fs::create_dir_all(dir).unwrap();
    }
    let vm = open(&site);
    let seen = shown(&vm);
    assert_eq!(seen.qemu_pid, Some(qemu.child.id() as i32));
    assert_eq!(seen.state, VmState::Running);
    assert!(!qemu.is_gone());
    let socket = std::path::Path::new(&site.config.run_dir).join("vm.sock");
    assert!(socket.exists(), "the agent asks where it is configured to");
}

#[test]
fn nothing_is_started_beside_a_hypervisor_that_may_run_the_guest() {
    let site = Site::new();
    site.record(holds(Power::Off));
    let mut vm = open(&site);
    let mut other = site.qemu_of(7, &["running"]);
    // Nothing but its RAM file tells of it.
    std::fs::remove_file(site.paths.identity()).unwrap();
    let refused = crate::testing::answer(&mut vm, VmRequest::Start)
        .map(drop)
        .unwrap_err();
    let pid = other.child.id();
    assert!(
        refused
            .message
            .contains(&format!("end it there with 'kill {pid}'")),
        "{refused}"
    );
    assert!(!other.is_gone() && site.paths.ram_file(7).exists());
    assert!(!refused.not_begun, "that one may have let it run");
}

// ---- a hypervisor that does not answer ----

/// A VM whose resume its hypervisor did not answer.
fn unsure(site: &Site) -> (Vm, crate::testing::FakeQemu) {
    site.record(holds(Power::Paused));
    let qemu = site.qemu(&["paused"]);
    let mut vm = open(site);
    vm.cont_wait = Duration::from_millis(50);
    qemu.hangs_at(Some("cont"));
    assert_eq!(
        ask(&mut vm, VmRequest::Resume).unwrap_err().code,
        ErrorCode::Hypervisor
    );
    let seen = shown(&vm);
    assert_eq!(seen.state, VmState::Unreachable);
    assert!(seen.note.unwrap().contains("is not known"));
    let again = ask(&mut vm, VmRequest::Resume).unwrap_err();
    assert_eq!(again.code, ErrorCode::WrongState, "{}", again.message);
    (vm, qemu)
}

#[test]
fn a_guest_that_was_let_run_late_is_running() {
    let site = Site::new();
    let (mut vm, qemu) = unsure(&site);
    qemu.is("running");
    qemu.hangs_at(None);
    look(&mut vm);
    assert_eq!(shown(&vm).state, VmState::Running);
    assert!(
        ask(&mut vm, VmRequest::Resume)
            .unwrap()
            .ends_with("runs already")
    );
}

#[test]
fn a_guest_that_was_refused_late_is_not_shown_as_running() {
    let site = Site::new();
    let (mut vm, qemu) = unsure(&site);
    qemu.refuses(Some("cont"));
    qemu.hangs_at(None);
    look(&mut vm);
    let seen = shown(&vm);
    assert_eq!(seen.state, VmState::Panicked);
    assert!(seen.note.unwrap().contains("did not let the guest run"));
    qemu.refuses(None);
    assert!(
        ask(&mut vm, VmRequest::Resume)
            .unwrap()
            .ends_with("runs again")
    );
    assert_eq!(shown(&vm).state, VmState::Running);
}

#[test]
fn a_request_for_what_is_so_already_succeeds_and_says_so() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    assert!(
        ask(&mut vm, VmRequest::Start)
            .unwrap()
            .ends_with("runs already")
    );
    assert!(
        ask(&mut vm, VmRequest::Resume)
            .unwrap()
            .ends_with("runs already")
    );
}

// ---- reports ----

fn ended() -> MigrationReport {
    let report = report(Side::Source);
    report.end(Outcome::Failed, Some("its disk was full".into()));
    report.read()
}

#[test]
fn a_report_that_could_not_be_written_is_written_when_it_can() {
    let site = Site::new();
    site.record(holds(Power::Off));
    let mut vm = open(&site);
    // No directory can be made where a file is.
    let in_the_way = site.paths.state.join(REPORTS_DIR);
    std::fs::write(&in_the_way, "").unwrap();
    let wanted = ended();
    vm.keep_report(wanted.clone());
    assert!(!vm.unsaved.is_empty());
    assert_eq!(vm.report(&wanted.id).unwrap(), Some(wanted.clone()));
    std::fs::remove_file(&in_the_way).unwrap();
    let until = Instant::now() + LONG;
    while !vm.unsaved.is_empty() {
        assert!(Instant::now() < until, "it is not written again");
        vm.save_again();
        std::thread::yield_now();
    }
    let path = vm.report_path(&wanted.id);
    // Without the digits that nobody measured.
    let wanted = serde_json::to_value(wanted).unwrap();
    assert_eq!(load_json(&path).unwrap(), Some(wanted));
}

#[test]
fn a_destination_that_holds_the_vm_has_completed_its_migration_whatever_the_report_says() {
    let site = Site::new();
    site.record(unconfirmed(Power::On));
    let note = godwit_types::host_api::MigrationNote {
        migration: MigrationId::new("m").unwrap(),
        side: Side::Destination,
        peer: migration("m").source,
    };
    save_json(&site.paths.state.join("migration.json"), &note).unwrap();
    let path = site.paths.state.join(REPORTS_DIR).join("m.json");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let begun = report(Side::Destination).read();
    save_json(&path, &begun).unwrap();
    let vm = open(&site);
    assert_eq!(
        shown(&vm).state,
        VmState::InDoubt,
        "its source has not confirmed"
    );
    let note = shown(&vm).note.unwrap();
    assert!(
        note.contains("once host a is powered off and only then: godwit vm resolve"),
        "{note}"
    );
    let report: MigrationReport = load_json(&path).unwrap().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Completed));
}

#[test]
fn the_report_of_an_older_migration_does_not_stay_open() {
    let site = Site::new();
    site.record(holds(Power::Off));
    let note = godwit_types::host_api::MigrationNote {
        migration: MigrationId::new("later").unwrap(),
        side: Side::Source,
        peer: migration("later").destination,
    };
    save_json(&site.paths.state.join("migration.json"), &note).unwrap();
    let path = site.paths.state.join(REPORTS_DIR).join("m.json");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    save_json(&path, &report(Side::Source).read()).unwrap();
    drop(open(&site));
    let report: MigrationReport = load_json(&path).unwrap().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Failed));
    assert_eq!(report.phase, godwit_types::migration::Phase::Ended);
}
