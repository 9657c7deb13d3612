//! A whole VM process but its threads of control: what it makes of records, of a hypervisor that speaks, and of requests.

use crate::testing::{Site, migration, report};
use crate::vm::Vm;
use godwit_ownership::{Handover, PeerMessage, Phase, Power};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, REPORTS_DIR, VmAnswer, VmRequest};
use godwit_types::migration::{MigrationReport, Outcome, Side};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, HostName, MigrationId};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn holds(power: Power) -> Phase {
    Phase::Holds {
        generation: Generation(2),
        power,
        unconfirmed: None,
    }
}

fn open(site: &Site) -> Vm {
    Vm::open(site.config.clone()).unwrap().unwrap()
}

fn ask(vm: &mut Vm, request: VmRequest) -> Result<String, ApiError> {
    vm.answer(request).map(|answered| match answered.0 {
        VmAnswer::Done(text) => text,
        other => format!("{other:?}"),
    })
}

fn shown(vm: &Vm) -> HostVm {
    vm.host_vm().unwrap()
}

// ---- starts ----

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
        assert_eq!(seen.note.as_deref(), Some("the guest panicked"));
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

/// Looks until it is known whether the guest runs.
fn look(vm: &mut Vm) {
    let until = Instant::now() + LONG;
    while vm.unsure.is_some() {
        assert!(Instant::now() < until, "it is never known");
        vm.look_again();
        std::thread::yield_now();
    }
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
            .ends_with("goes on")
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

// ---- cancelled early ----

#[test]
fn a_migration_that_was_cancelled_before_it_came_does_not_begin() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let spec = migration("early");
    let cancel = VmRequest::Cancel {
        migration: spec.id.clone(),
        reason: "enough".into(),
    };
    for _ in 0..2 {
        let done = ask(&mut vm, cancel.clone()).unwrap();
        assert!(done.contains("will not begin"), "{done}");
    }
    let refused = ask(&mut vm, VmRequest::Migrate(Box::new(spec))).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(
        refused.message.ends_with("it was cancelled"),
        "{}",
        refused.message
    );
    assert!(vm.migration.is_none());
    for number in 0..1000 {
        vm.refuse_later(
            &MigrationId::new(format!("n{number}")).unwrap(),
            "it is full",
        );
    }
    assert!(vm.refused.len() <= 64);
}

/// What the destination hears that asks for a migration.
fn asked_for(vm: &mut Vm, id: &str) -> Vec<serde_json::Value> {
    let question = PeerMessage::AskGift {
        migration: MigrationId::new(id).unwrap(),
        generation: Generation(2),
    };
    let request = VmRequest::Peer {
        from: HostName::new("a").unwrap(),
        message: serde_json::to_value(question).unwrap(),
    };
    match vm.answer(request).unwrap().0 {
        VmAnswer::Replies(replies) => replies,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_destination_hears_of_a_migration_that_its_source_was_never_told_of() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    let mut spec = migration("begun");
    // The other way round than the other tests' migrations.
    std::mem::swap(&mut spec.source, &mut spec.destination);
    spec.generation = Generation(3);
    spec.destination_addresses = vec!["127.0.0.1:9".parse().unwrap()];
    ask(&mut vm, VmRequest::Migrate(Box::new(spec))).unwrap();
    let ended =
        |replies: &[serde_json::Value]| replies.iter().any(|reply| reply["message"] == "abort");
    let begun = asked_for(&mut vm, "begun");
    assert!(
        !begun.is_empty() && !ended(&begun),
        "its source is on its way: {begun:?}"
    );
    let lost = asked_for(&mut vm, "lost");
    assert!(ended(&lost), "{lost:?}");
    let refused = ask(&mut vm, VmRequest::Migrate(Box::new(migration("lost")))).unwrap_err();
    assert!(
        refused.message.contains("did not begin in time"),
        "{}",
        refused.message
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
    assert_eq!(load_json(&path).unwrap(), Some(wanted));
}

#[test]
fn a_destination_that_holds_the_vm_has_completed_its_migration_whatever_the_report_says() {
    let site = Site::new();
    site.record(Phase::Holds {
        generation: Generation(2),
        power: Power::On,
        unconfirmed: Some(Handover {
            migration: MigrationId::new("m").unwrap(),
            peer: HostName::new("a").unwrap(),
        }),
    });
    let note = crate::files::MigrationNote {
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
