//! A whole VM process but its threads of control: what it makes of records, of a hypervisor that speaks, and of requests.

use crate::input::GuestNews;
use crate::testing::{Site, migration, report};
use crate::vm::Vm;
use godwit_ownership::{Event, Handover, PeerMessage, Phase, Power, Timer};
use godwit_store::{load_json, save_json};
use godwit_types::host_api::{HostVm, REPORTS_DIR, VmAnswer, VmRequest};
use godwit_types::migration::{COULD_NOT_BEGIN, MigrationReport, Outcome, Side};
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

/// Held here, which the host that it came from has not confirmed.
fn unconfirmed(power: Power) -> Phase {
    Phase::Holds {
        generation: Generation(2),
        power,
        unconfirmed: Some(Handover {
            migration: MigrationId::new("m").unwrap(),
            peer: HostName::new("a").unwrap(),
        }),
    }
}

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

// ---- a disk that takes nothing ----

/// Has nothing written to the record while it lives.
struct FullDisk(std::path::PathBuf);

impl FullDisk {
    fn of(site: &Site) -> Self {
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

#[test]
fn what_the_controller_takes_back_since_it_could_not_begin_was_cancelled_by_nobody() {
    let nobody = format!("{COULD_NOT_BEGIN}cannot reach host b");
    for (why, outcome) in [
        (nobody.as_str(), Outcome::Failed),
        ("cancelled by its user", Outcome::Cancelled),
    ] {
        let site = Site::new();
        site.record(Phase::Absent);
        let mut vm = open(&site);
        vm.feed(Event::PrepareIncoming {
            migration: id_m(),
            from: HostName::new("a").unwrap(),
            generation: Generation(3),
        });
        under_way(&mut vm, Side::Destination);
        let request = VmRequest::Cancel {
            migration: id_m(),
            reason: why.into(),
        };
        ask(&mut vm, request).unwrap();
        let ended = vm.report(&id_m()).unwrap().unwrap();
        assert_eq!(ended.outcome, Some(outcome), "{why}");
        assert_eq!(ended.reason.as_deref(), Some(why));
    }
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

// ---- why the other host gave up ----

/// A migration between this host and host `a`, without a driver.
pub(crate) fn under_way(vm: &mut Vm, side: Side) {
    let spec = migration("m");
    vm.note = Some(godwit_types::host_api::MigrationNote {
        migration: spec.id.clone(),
        side,
        peer: spec.source.clone(),
    });
    vm.migration = Some(crate::vm::Migration {
        id: spec.id,
        side,
        peer: spec.source.host,
        run: 1,
        driver: None,
        control: Default::default(),
        report: report(side),
        throttle: None,
        save_gate: Default::default(),
        deadline: None,
        switchover_wait: LONG,
        reason: None,
        journal_trouble: None,
        unheard: false,
        cancelled: false,
        called_off: false,
        stopped_at: None,
    });
}

fn id_m() -> MigrationId {
    MigrationId::new("m").unwrap()
}

#[test]
fn a_source_whose_channels_are_dead_hears_through_the_agents_why_its_destination_gave_up() {
    let site = Site::new();
    site.record(holds(Power::On));
    let _qemu = site.qemu(&["running"]);
    let mut vm = open(&site);
    vm.feed(godwit_ownership::Event::MigrationBegan {
        migration: id_m(),
        to: HostName::new("a").unwrap(),
        generation: Generation(3),
    });
    under_way(&mut vm, Side::Source);
    let failed = |migration: &str, reason: &str| VmRequest::Peer {
        from: HostName::new("a").unwrap(),
        message: serde_json::json!({"message": "failed", "migration": migration, "reason": reason}),
    };
    ask(&mut vm, failed("other", "its cat")).unwrap();
    assert!(ask(&mut vm, failed("m", &"x".repeat(10_000))).is_err());
    let goes_on = vm.migration.as_ref().unwrap();
    assert_eq!(goes_on.reason, None, "about another migration, or too long");
    ask(&mut vm, failed("m", "its disk is full")).unwrap();
    let ended = vm.report(&id_m()).unwrap().unwrap();
    let why = "host a gave the migration up: its disk is full";
    assert_eq!(
        (ended.outcome, ended.reason.as_deref()),
        (Some(Outcome::Failed), Some(why))
    );
}

#[test]
fn a_destination_that_gives_up_says_why_through_the_agents() {
    let site = Site::new();
    site.record(Phase::Absent);
    let mut vm = open(&site);
    vm.feed(godwit_ownership::Event::PrepareIncoming {
        migration: id_m(),
        from: HostName::new("a").unwrap(),
        generation: Generation(3),
    });
    under_way(&mut vm, Side::Destination);
    vm.outbox.take(Duration::ZERO);
    vm.blame("its disk is full");
    vm.feed(godwit_ownership::Event::IncomingFailed);
    let said = vm.outbox.take(Duration::ZERO);
    let said: Vec<_> = said.into_iter().map(|sent| sent.message).collect();
    let failed =
        serde_json::json!({"message": "failed", "migration": "m", "reason": "its disk is full"});
    assert_eq!(said, [failed]);
}
