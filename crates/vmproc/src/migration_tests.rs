//! How a migration begins, is cancelled and ends, and what each side says of why.

use crate::disks::FullDisk;
use crate::testing::{FakeQemu, LONG, Site, answer, ask, holds, migration, open, report};
use crate::vm::Vm;
use godwit_migrate::why::Why;
use godwit_ownership::{Event, PeerMessage, Phase, Power};
use godwit_types::host_api::{VmAnswer, VmRequest};
use godwit_types::migration::{COULD_NOT_BEGIN, MigrationSpec, Outcome, Side};
use godwit_types::{ErrorCode, Generation, HostName, MigrationId};
use std::time::Duration;

// ---- scenes ----

/// A host whose guest runs, in no migration.
fn holder(site: &Site) -> (Vm, FakeQemu) {
    site.record(holds(Power::On));
    let qemu = site.qemu(&["running"]);
    (open(site), qemu)
}

/// A source under way, to host `a`.
fn source(site: &Site) -> (Vm, FakeQemu) {
    let (mut vm, qemu) = holder(site);
    vm.feed(Event::MigrationBegan {
        migration: id_m(),
        to: HostName::new("a").unwrap(),
        generation: Generation(3),
    });
    under_way(&mut vm, Side::Source);
    (vm, qemu)
}

/// A destination under way, from host `a`.
fn destination(site: &Site) -> Vm {
    site.record(Phase::Absent);
    let mut vm = open(site);
    vm.feed(Event::PrepareIncoming {
        migration: id_m(),
        from: HostName::new("a").unwrap(),
        generation: Generation(3),
    });
    under_way(&mut vm, Side::Destination);
    vm
}

/// A migration between this host and host `a`, without a driver.
pub(crate) fn under_way(vm: &mut Vm, side: Side) {
    let spec = migration("m");
    vm.note = Some(godwit_types::host_api::MigrationNote {
        migration: spec.id.clone(),
        side,
        peer: spec.source.clone(),
    });
    vm.migration = Some(crate::migration::Migration {
        id: spec.id,
        side,
        peer: spec.source.host,
        run: 1,
        driver: None,
        intake: Default::default(),
        control: Default::default(),
        report: report(side),
        throttle: None,
        save_gate: Default::default(),
        deadline: None,
        switchover_wait: LONG,
        why: None,
        journal_trouble: None,
        unheard: false,
        called_off: false,
        stopped_at: None,
    });
}

/// A migration from this host to host `a`: the other way round than [`migration`].
fn outgoing(id: &str) -> MigrationSpec {
    let mut spec = migration(id);
    std::mem::swap(&mut spec.source, &mut spec.destination);
    spec.generation = Generation(3);
    spec
}

fn id_m() -> MigrationId {
    MigrationId::new("m").unwrap()
}

// ---- a guest that is stopped or reset while it moves ----

#[test]
fn who_stops_or_resets_a_guest_that_moves_hears_what_becomes_of_the_move() {
    let site = Site::new();
    let (mut vm, _qemu) = source(&site);
    for (request, wanted) in [
        (VmRequest::Reset, "is reset; migration 'm' goes on"),
        (
            VmRequest::Stop { force: false },
            "; migration 'm' ends once the guest is off",
        ),
        (
            VmRequest::Stop { force: true },
            "is powered off; migration 'm' ends with that",
        ),
    ] {
        let done = ask(&mut vm, request).unwrap();
        assert!(done.ends_with(wanted), "{done}");
    }
    let site = Site::new();
    let (mut vm, _qemu) = holder(&site);
    for request in [VmRequest::Reset, VmRequest::Stop { force: false }] {
        let done = ask(&mut vm, request).unwrap();
        assert!(!done.contains("migration"), "{done}");
    }
}

// ---- cancelled early ----

#[test]
fn a_migration_that_was_cancelled_before_it_came_does_not_begin() {
    let site = Site::new();
    let (mut vm, _qemu) = holder(&site);
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
    match answer(vm, request).unwrap() {
        VmAnswer::Replies(replies) => replies,
        other => panic!("{other:?}"),
    }
}

fn ended(replies: &[serde_json::Value]) -> bool {
    replies.iter().any(|reply| reply["message"] == "abort")
}

#[test]
fn a_host_from_which_another_migration_took_the_vm_says_that_an_earlier_one_ended() {
    let site = Site::new();
    site.record(Phase::Moved {
        generation: Generation(2),
        migration: id_m(),
        to: HostName::new("a").unwrap(),
    });
    let mut vm = open(&site);
    assert!(ended(&asked_for(&mut vm, "earlier")));
    assert!(!ended(&asked_for(&mut vm, "m")));
}

#[test]
fn a_destination_hears_of_a_migration_that_its_source_was_never_told_of() {
    let site = Site::new();
    let (mut vm, _qemu) = holder(&site);
    let mut spec = outgoing("begun");
    spec.destination_addresses = vec!["127.0.0.1:9".parse().unwrap()];
    ask(&mut vm, VmRequest::Migrate(Box::new(spec))).unwrap();
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

// ---- why the other host gave up ----

#[test]
fn what_the_controller_takes_back_since_it_could_not_begin_was_cancelled_by_nobody() {
    let nobody = format!("{COULD_NOT_BEGIN}cannot reach host b");
    for (why, outcome) in [
        (nobody.as_str(), Outcome::Failed),
        ("cancelled by its user", Outcome::Cancelled),
    ] {
        let site = Site::new();
        let mut vm = destination(&site);
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

#[test]
fn a_source_whose_channels_are_dead_hears_through_the_agents_why_its_destination_gave_up() {
    let site = Site::new();
    let (mut vm, _qemu) = source(&site);
    let failed = |migration: &str, reason: &str| VmRequest::Peer {
        from: HostName::new("a").unwrap(),
        message: serde_json::json!({"message": "failed", "migration": migration, "reason": reason}),
    };
    ask(&mut vm, failed("other", "its cat")).unwrap();
    assert!(ask(&mut vm, failed("m", &"x".repeat(10_000))).is_err());
    let goes_on = vm.migration.as_ref().unwrap();
    assert_eq!(goes_on.why, None, "about another migration, or too long");
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
    let mut vm = destination(&site);
    vm.at_hand.outbox.take(Duration::ZERO);
    vm.blame("its disk is full");
    vm.feed(Event::IncomingFailed);
    let said = vm.at_hand.outbox.take(Duration::ZERO);
    let said: Vec<_> = said.into_iter().map(|sent| sent.message).collect();
    let failed =
        serde_json::json!({"message": "failed", "migration": "m", "reason": "its disk is full"});
    assert_eq!(said, [failed]);
}

/// What was left to the agent to carry since the last look.
fn posted(vm: &Vm) -> Vec<serde_json::Value> {
    let sent = vm.at_hand.outbox.take(Duration::ZERO);
    sent.into_iter().map(|sent| sent.message).collect()
}

fn cancel() -> VmRequest {
    VmRequest::Cancel {
        migration: id_m(),
        reason: "enough".into(),
    }
}

#[test]
fn a_source_that_ends_a_migration_says_why_through_the_agents() {
    let abort =
        |reason: &str| serde_json::json!({"message": "abort", "migration": "m", "reason": reason});
    let mut wish = abort("enough");
    wish["cancelled"] = true.into();
    let site = Site::new();
    let (mut vm, _qemu) = source(&site);
    ask(&mut vm, cancel()).unwrap();
    assert_eq!(posted(&vm), [wish]);
    let ended = vm.report(&id_m()).unwrap().unwrap();
    assert_eq!(ended.outcome, Some(Outcome::Cancelled));
    drop((vm, _qemu, site));
    let site = Site::new();
    let (mut vm, _qemu) = source(&site);
    vm.happened(crate::input::GuestNews::Died);
    let died = "the hypervisor of the guest died during the migration";
    assert_eq!(posted(&vm), [abort(died)]);
}

#[test]
fn a_destination_hears_through_the_agents_why_its_source_ended_the_migration() {
    let cases = [
        (true, Outcome::Cancelled, "enough"),
        (
            false,
            Outcome::Failed,
            "the source ended the migration: enough",
        ),
    ];
    for (cancelled, outcome, reason) in cases {
        let site = Site::new();
        let mut vm = destination(&site);
        let message = serde_json::json!({
            "message": "abort", "migration": "m", "reason": "enough", "cancelled": cancelled
        });
        let from = HostName::new("a").unwrap();
        ask(&mut vm, VmRequest::Peer { from, message }).unwrap();
        let ended = vm.report(&id_m()).unwrap().unwrap();
        assert_eq!(ended.outcome, Some(outcome));
        assert_eq!(ended.reason.as_deref(), Some(reason));
    }
}

#[test]
fn a_destination_hears_why_its_source_could_not_begin() {
    let site = Site::new();
    let (mut vm, _qemu) = holder(&site);
    let request = VmRequest::Migrate(Box::new(outgoing("m")));
    let refused = ask(&mut vm, request).unwrap_err();
    let said = posted(&vm);
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!(said[0]["message"], "abort");
    assert_eq!(said[0]["reason"], refused.message);
}

#[test]
fn a_destination_hears_that_its_source_s_vm_process_died() {
    let site = Site::new();
    let (vm, qemu) = source(&site);
    let note = vm.note.clone().unwrap();
    godwit_store::save_json(&site.paths.state.join("migration.json"), &note).unwrap();
    vm.write_report(&report(Side::Source).read()).unwrap();
    drop(vm);
    let vm = open(&site);
    let abort = serde_json::json!({
        "message": "abort", "migration": "m", "reason": "its VM process ended during the migration"
    });
    assert_eq!(posted(&vm), [abort]);
    drop(qemu);
}

#[test]
fn a_guest_whose_disk_is_full_for_long_while_it_moves_stays_and_can_be_paused_then() {
    let site = Site::new();
    let (mut vm, qemu) = source(&site);
    let full = FullDisk {
        disk: "root".into(),
        path: "/root.raw".into(),
        fails: false,
    };
    vm.is_full_for_long(full.clone());
    let ended = vm.report(&id_m()).unwrap().unwrap();
    assert_eq!(ended.outcome, Some(Outcome::Failed));
    let why = ended.reason.unwrap();
    assert!(why.contains("its disk 'root' is full"), "{why}");
    assert_eq!(qemu.asked("stop"), 0);
    assert!(matches!(
        vm.status,
        godwit_ownership::Status::Running { .. }
    ));
    vm.is_full_for_long(full);
    assert_eq!(qemu.asked("stop"), 1, "it is paused");
}

// ---- what comes too late ----

#[test]
fn a_cancel_or_a_forced_stop_that_comes_too_late_leaves_the_reason_as_it_was() {
    let known = Some(Why::failure("the link was lost"));
    for why in [None, known] {
        for request in [cancel(), VmRequest::Stop { force: true }] {
            let site = Site::new();
            site.record(Phase::Gave {
                generation: Generation(2),
                migration: id_m(),
                to: HostName::new("a").unwrap(),
            });
            let mut vm = open(&site);
            under_way(&mut vm, Side::Source);
            vm.migration.as_mut().unwrap().why = why.clone();
            ask(&mut vm, request).unwrap_err();
            let goes_on = vm.migration.as_ref().unwrap();
            assert_eq!(goes_on.why, why);
            assert!(!goes_on.report.read().guest_ended);
        }
    }
}
