//! Migrations over real sockets: refusals, beginning exactly once, following to the end, restarts in the middle.

use crate::scripted::{
    Agent, DEADLINE, FORCED, House, STOP, hand_over, host, refused, spec, to, vm,
};
use godwit_rpc::Client;
use godwit_rpc::controller_client::{MigrateAnswer, path};
use godwit_types::control_api::{CancelRequest, StartRequest, StopRequest};

use godwit_types::migration::{
    Cipher, MigrateRequest, MigrationReport, Outcome, PEER_GAVE_UP, PreflightReport,
};
use godwit_types::site::Claim;
use godwit_types::vm::{DiskSpec, EncryptionMode, VmState};
use godwit_types::{ApiError, ErrorCode, Generation, MigrationId};
use std::time::Duration;

pub async fn house() -> (House, Agent, Agent) {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    (house, a, b)
}

pub async fn begin(house: &House, request: &MigrateRequest) -> MigrationId {
    match house.client().migrate(&vm("web"), request).await.unwrap() {
        MigrateAnswer::Begun(begun) => MigrationId::new(begun.id).unwrap(),
        MigrateAnswer::Checked(report) => panic!("only checked: {report:?}"),
    }
}

async fn refused(house: &House, request: &MigrateRequest) -> ApiError {
    ApiError::from(
        house
            .client()
            .migrate(&vm("web"), request)
            .await
            .unwrap_err(),
    )
}

/// Reads a migration's events to their end.
pub async fn watch_to_the_end(house: &House, id: &MigrationId) -> Vec<MigrationReport> {
    let mut events = house.client().migration_events(id).await.unwrap();
    let mut reports = Vec::new();
    while let Some(event) = events.next(DEADLINE).await.unwrap() {
        assert_eq!(event.name, "report");
        reports.push(serde_json::from_str(&event.data).unwrap());
    }
    reports
}

#[tokio::test]
async fn a_source_that_knows_only_that_the_destination_gave_up_leaves_its_reason_to_it() {
    let (house, a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    let ends = |agent: &Agent, why: &str| {
        agent.script().reports.get_mut(&id).unwrap().reason = Some(why.into());
        agent.says(&id, Some(Outcome::Failed));
    };
    // The destination first: while it alone has failed the migration goes on.
    ends(&b, "the disk is full");
    ends(&a, PEER_GAVE_UP);
    let last = watch_to_the_end(&house, &id).await.pop().unwrap();
    let reason = last.reason.unwrap();
    assert_eq!(reason, "host b gave the migration up: the disk is full");
}

/// Its process is started again: what is asked of the VM is not refused but done once that answers.
async fn asked_meanwhile<T>(house: &House, a: &Agent, asked: impl Future<Output = T>) -> T {
    a.turns("web", VmState::Unreachable);
    house.until_vm("web", VmState::Unreachable, "a").await;
    tokio::pin!(asked);
    let meanwhile = tokio::time::timeout(Duration::from_millis(300), &mut asked).await;
    assert!(meanwhile.is_err(), "answered before the process did");
    a.turns("web", VmState::Running);
    asked.await
}

#[tokio::test]
async fn a_vm_process_that_is_started_again_is_waited_for() {
    let (house, a, _b) = house().await;
    let (client, name, request) = (house.client(), vm("web"), to("b"));
    let done = asked_meanwhile(&house, &a, client.pause(&name)).await;
    done.expect("paused");
    // The same while that process takes its QEMU over.
    a.script().vms.get_mut(&name).unwrap().vm_process_pid = Some(4711);
    let done = asked_meanwhile(&house, &a, client.resume(&name)).await;
    done.expect("resumed");
    let begun = asked_meanwhile(&house, &a, client.migrate(&name, &request)).await;
    assert!(matches!(begun, Ok(MigrateAnswer::Begun(_))), "{begun:?}");
}

/// Its process lives, but its QEMU does not answer: that does not pass, and the note says to force a stop, which was refused
/// for ever as something that passes.
#[tokio::test]
async fn a_forced_stop_reaches_a_vm_whose_process_lives_and_cannot_command_its_qemu() {
    let (house, a, _b) = house().await;
    let (client, name) = (house.client(), vm("web"));
    let note = "QEMU has not answered: 'godwit vm stop web --force' gives the guest up";
    {
        let mut script = a.script();
        let vm = script.vms.get_mut(&name).unwrap();
        vm.state = VmState::Unreachable;
        vm.vm_process_pid = Some(4711);
        vm.note = Some(note.into());
    }
    house.until_vm("web", VmState::Unreachable, "a").await;
    let refused = client.pause(&name).await.unwrap_err().to_string();
    assert!(refused.contains(note), "{refused}");
    client
        .stop(&name, &StopRequest { force: true })
        .await
        .unwrap();
    assert_eq!(a.script().vms[&name].state, VmState::Stopped);
}

#[tokio::test]
async fn a_vm_moves_and_everybody_sees_it() {
    let (house, a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    assert_eq!(house.vm("web").await.migration, Some(id.to_string()));
    refused!(
        house.client().migrate(&vm("web"), &to("b")).await,
        AlreadyMigrating
    );
    let spec = a.script().specs[&id].clone();
    assert_eq!(
        (spec.generation, spec.cipher),
        (Generation(a.generation("web").0 + 1), Cipher::Aes256Gcm)
    );
    assert_eq!(spec.generation, b.script().specs[&id].generation);
    assert_eq!((spec.secret.key.len(), spec.secret.nonce.len()), (32, 8));
    assert_eq!(spec.secret.key, b.script().specs[&id].secret.key);
    assert_eq!(spec.destination_addresses, ["127.0.0.1:9".parse().unwrap()]);
    let live = house.client().migration_events(&id).await.unwrap();
    let mut live = live;
    let first: MigrationReport =
        serde_json::from_str(&live.next(DEADLINE).await.unwrap().unwrap().data).unwrap();
    assert_eq!(first.outcome, None);
    hand_over(&a, &b, "web", &id);
    let reports = watch_to_the_end(&house, &id).await;
    assert_eq!(reports.last().unwrap().outcome, Some(Outcome::Completed));
    house.until_vm("web", VmState::Running, "b").await;
    let view = house.vm("web").await;
    assert_eq!((view.generation, view.migration), (spec.generation, None));
    assert_eq!(house.client().migrations().await.unwrap()[0].id, id);
    // The stream of one that is over gives the report once.
    assert_eq!(watch_to_the_end(&house, &id).await.len(), 1);
    // The secret was never written down.
    let secret = serde_json::to_value(&spec.secret).unwrap();
    for file in ["controller.db", "controller.db-wal"] {
        let bytes = std::fs::read(house.config.state_dir.join(file)).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        for part in ["key", "nonce"] {
            assert!(
                !text.contains(secret[part].as_str().unwrap()),
                "{part} in {file}"
            );
        }
    }
}

#[tokio::test]
async fn what_cannot_begin_is_refused_with_its_reason() {
    let (house, a, mut b) = house().await;
    let client = house.client();
    refused!(client.migrate(&vm("nobody"), &to("b")).await, UnknownVm);
    assert_eq!(refused(&house, &to("x")).await.code, ErrorCode::UnknownHost);
    assert_eq!(refused(&house, &to("a")).await.code, ErrorCode::WrongState);
    let zero = MigrateRequest {
        max_downtime_ms: Some(0),
        ..to("b")
    };
    assert_eq!(refused(&house, &zero).await.code, ErrorCode::InvalidRequest);
    a.script().vms.get_mut(&vm("web")).unwrap().state = VmState::InDoubt;
    house.until_vm("web", VmState::InDoubt, "a").await;
    assert_eq!(refused(&house, &to("b")).await.code, ErrorCode::InDoubt);
    a.script().vms.get_mut(&vm("web")).unwrap().state = VmState::Running;
    house.until_vm("web", VmState::Running, "a").await;
    client.stop(&vm("web"), &STOP).await.unwrap();
    assert_eq!(refused(&house, &to("b")).await.code, ErrorCode::WrongState);
    a.script().vms.get_mut(&vm("web")).unwrap().state = VmState::Running;
    house.until_vm("web", VmState::Running, "a").await;
    b.cut().await;
    house
        .until(async |house: &House| {
            house.client().host(&host("b")).await.unwrap().state
                == godwit_types::control_api::HostState::Unreachable
        })
        .await;
    assert_eq!(
        refused(&house, &to("b")).await.code,
        ErrorCode::HostUnreachable
    );
    assert!(client.migrations().await.unwrap().is_empty());
    assert_eq!(a.calls("migrate") + b.calls("prepare"), 0);
}

async fn dry_run(house: &House) -> PreflightReport {
    let dry = MigrateRequest {
        dry_run: true,
        ..to("b")
    };
    match house.client().migrate(&vm("web"), &dry).await.unwrap() {
        MigrateAnswer::Checked(report) => report,
        MigrateAnswer::Begun(begun) => panic!("a dry run began: {begun:?}"),
    }
}

fn a_disk() -> DiskSpec {
    DiskSpec::new("data", "/data.raw")
}

#[tokio::test]
async fn all_refusals_of_preflight_are_shown_together() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let mut web = spec("web");
    web.disks.push(a_disk());
    house.client().create_vm(&web).await.unwrap();
    let on_a = StartRequest {
        on: Some(host("a")),
    };
    house.client().start(&vm("web"), &on_a).await.unwrap();
    {
        let mut script = a.script();
        script.outgoing_refusals.push(ApiError::new(
            ErrorCode::Hypervisor,
            "device x has no migration",
        ));
    }
    {
        let mut script = b.script();
        script.probe_lost = true;
        script.incoming_refusals.push(ApiError::new(
            ErrorCode::Preflight,
            "clock of b is 9 s ahead: set it",
        ));
        // What the inventory says of memory gives way to this.
        let full = ApiError::new(ErrorCode::OutOfMemory, "b is full");
        script.incoming_refusals.push(full);
        script.info.as_mut().unwrap().memory_free_mib = 1;
        script.info.as_mut().unwrap().migration_addresses = vec!["::1".parse().unwrap()];
    }
    house
        .until(async |house: &House| {
            let b = house.client().host(&host("b")).await.unwrap();
            b.info.migration_addresses[0].is_ipv6() && !house.vm("web").await.spec.disks.is_empty()
        })
        .await;
    let report = dry_run(&house).await;
    let found = |text: &str| {
        report
            .refusals
            .iter()
            .any(|refusal| refusal.message.contains(text))
    };
    for text in [
        "disk 'data'",
        "device x",
        "clock of b",
        "b is full",
        "same family",
        "does not arrive",
    ] {
        assert!(found(text), "{text}: {report:?}");
    }
    assert_eq!(report.refusals.len(), 6, "{report:?}");
    assert_eq!(report.passed, ["outgoing", "incoming"]);
    let error = refused(&house, &to("b")).await;
    assert_eq!(error.code, ErrorCode::Preflight);
    assert!(
        error.message.contains("disk 'data'") && error.message.contains("clock of b"),
        "{error}"
    );
    assert!(house.client().migrations().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_dry_run_that_finds_nothing_says_what_was_fine() {
    let (house, a, _b) = house().await;
    let report = dry_run(&house).await;
    assert!(report.refusals.is_empty(), "{report:?}");
    assert!(
        report
            .passed
            .iter()
            .any(|line| line.contains("port group vm")),
        "{report:?}"
    );
    assert_eq!(a.calls("migrate"), 0);
}

#[tokio::test]
async fn encryption_is_decided_here_and_never_below_what_the_vm_requires() {
    let (house, a, b) = house().await;
    let with = |mode| MigrateRequest {
        encryption: Some(mode),
        ..to("b")
    };
    b.script().info.as_mut().unwrap().encryption = false;
    house
        .until(async |house: &House| {
            !house
                .client()
                .host(&host("b"))
                .await
                .unwrap()
                .info
                .encryption
        })
        .await;
    let error = refused(&house, &with(EncryptionMode::Required)).await;
    assert_eq!(
        (error.code, error.host),
        (ErrorCode::Encryption, Some("b".into()))
    );
    let id = begin(&house, &to("b")).await;
    assert_eq!(a.script().specs[&id].cipher, Cipher::None);
    house
        .client()
        .cancel(&id, &CancelRequest::default())
        .await
        .unwrap();
    b.script().reports.get_mut(&id).unwrap().outcome = Some(Outcome::Cancelled);
    assert_eq!(
        watch_to_the_end(&house, &id).await.last().unwrap().outcome,
        Some(Outcome::Cancelled)
    );
    house.until_not_moving("web").await;
    // The description that counts is the controller's own.
    let client = house.client();
    client.stop(&vm("web"), &FORCED).await.unwrap();
    let mut required = client.vm(&vm("web")).await.unwrap().spec;
    required.encryption = EncryptionMode::Required;
    client.edit_vm(&required).await.unwrap();
    let on_a = StartRequest {
        on: Some(host("a")),
    };
    client.start(&vm("web"), &on_a).await.unwrap();
    let error = refused(&house, &with(EncryptionMode::Opportunistic)).await;
    assert_eq!(error.code, ErrorCode::Encryption);
    assert!(error.message.contains("would lower"), "{error}");
}

#[tokio::test]
async fn of_two_requests_at_once_exactly_one_begins() {
    let (house, a, b) = house().await;
    let (one, two) = (house.client(), house.client());
    let (web, request) = (vm("web"), to("b"));
    let (first, second) = tokio::join!(one.migrate(&web, &request), two.migrate(&web, &request));
    let codes: Vec<_> = [first, second]
        .into_iter()
        .filter_map(|result| result.err().map(|error| error.code()))
        .collect();
    assert_eq!(codes, [ErrorCode::AlreadyMigrating]);
    assert_eq!((a.calls("migrate"), b.calls("prepare")), (1, 1));
    assert_eq!(house.client().migrations().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_destination_that_refuses_leaves_the_vm_free_to_move() {
    let (house, a, b) = house().await;
    let full = ApiError::new(ErrorCode::OutOfMemory, "no room for 64 MiB");
    b.script().refuse_prepare = Some(full);
    let error = refused(&house, &to("b")).await;
    assert_eq!(
        (error.code, error.host),
        (ErrorCode::OutOfMemory, Some("b".into()))
    );
    let reports = house.client().migrations().await.unwrap();
    assert_eq!(reports[0].outcome, Some(Outcome::Failed));
    assert_eq!(reports[0].reason.as_deref(), Some("no room for 64 MiB"));
    assert_eq!(a.calls("migrate"), 0);
    b.script().refuse_prepare = None;
    begin(&house, &to("b")).await;
}

#[tokio::test]
async fn a_source_that_refuses_has_its_destination_told() {
    let (house, a, b) = house().await;
    let locked = ApiError::new(ErrorCode::Locked, "another process holds the journal");
    a.script().refuse_migrate = Some(locked);
    assert_eq!(refused(&house, &to("b")).await.code, ErrorCode::Locked);
    assert_eq!(b.calls("cancel"), 1);
    let report = house.client().migrations().await.unwrap().remove(0);
    assert_eq!(report.outcome, Some(Outcome::Failed));
    assert_eq!(house.vm("web").await.migration, None);
}

#[tokio::test]
async fn a_controller_that_was_away_learns_how_it_ended() {
    let (mut house, a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    house.stop().await;
    hand_over(&a, &b, "web", &id);
    house.start().await;
    let reports = watch_to_the_end(&house, &id).await;
    assert_eq!(reports.last().unwrap().outcome, Some(Outcome::Completed));
    house.until_vm("web", VmState::Running, "b").await;
}

#[tokio::test]
async fn a_controller_that_died_before_it_told_anybody_ends_what_never_began() {
    let (mut house, a, b) = house().await;
    let id = begin(&house, &to("b")).await;
    house.stop().await;
    a.script().reports.clear();
    b.script().reports.clear();
    house.start().await;
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Failed));
    assert!(report.reason.unwrap().contains("before it began"));
    begin(&house, &to("b")).await;
}

/// The source has given the VM to host b by its record, and is in doubt.
pub fn gave_and_waits(source: &Agent, id: &MigrationId) {
    let generation = source.script().specs[id].generation;
    let gave = Claim::Gave {
        generation,
        to: host("b"),
    };
    source.records("web", VmState::InDoubt, generation, gave);
}

#[tokio::test]
async fn doubt_is_shown_and_ends_when_the_hosts_agree() {
    let (house, a, mut b) = house().await;
    let id = begin(&house, &to("b")).await;
    b.cut().await;
    gave_and_waits(&a, &id);
    a.says(&id, Some(Outcome::InDoubt));
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(report.outcome, Some(Outcome::InDoubt));
    house.until_vm("web", VmState::InDoubt, "a").await;
    assert_eq!(house.vm("web").await.migration, Some(id.to_string()));
    hand_over(&a, &b, "web", &id);
    b.heal().await;
    house.until_vm("web", VmState::Running, "b").await;
    house
        .until(async |house: &House| {
            house.client().migration(&id).await.unwrap().outcome == Some(Outcome::Completed)
        })
        .await;
}

#[tokio::test]
async fn cancelling_reaches_the_source_and_unknown_migrations_are_said_to_be() {
    let (house, a, b) = house().await;
    let client = house.client();
    let nobody = MigrationId::new("m-0").unwrap();
    let request = CancelRequest {
        reason: Some("maintenance".into()),
        vm: None,
    };
    refused!(client.cancel(&nobody, &request).await, UnknownMigration);
    refused!(client.migration(&nobody).await, UnknownMigration);
    refused!(
        client.migration_events(&nobody).await.map(|_| ()),
        UnknownMigration
    );
    let raw = Client::unix(&house.config.socket);
    let odd = format!("{}/m'%20OR%201=1", path::MIGRATIONS);
    refused!(
        raw.get::<MigrationReport>(&odd, DEADLINE).await,
        InvalidRequest
    );
    let id = begin(&house, &to("b")).await;
    client.cancel(&id, &request).await.unwrap();
    assert_eq!((a.calls("cancel"), b.calls("cancel")), (1, 0));
    let named = format!("cancel {id} of web");
    assert_eq!(a.calls(&named), 1, "a host may not have heard of it yet");
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(
        (report.outcome, report.reason.as_deref()),
        (Some(Outcome::Cancelled), Some("maintenance"))
    );
    refused!(client.cancel(&id, &request).await, WrongState);
}

#[tokio::test]
async fn a_source_that_waits_for_its_former_host_is_asked_again_for_a_moment() {
    let (house, a, b) = house().await;
    a.script().unconfirmed = 3;
    let id = begin(&house, &to("b")).await;
    assert_eq!((a.calls("migrate"), b.calls("prepare")), (4, 1));
    hand_over(&a, &b, "web", &id);
    let report = watch_to_the_end(&house, &id).await.pop().unwrap();
    assert_eq!(report.outcome, Some(Outcome::Completed));
}

#[tokio::test]
async fn a_source_that_waits_too_long_for_its_former_host_refuses_the_move() {
    let (house, a, _b) = house().await;
    a.script().unconfirmed = usize::MAX;
    let refused = house.client().migrate(&vm("web"), &to("b")).await;
    refused!(refused.map(|_| ()), Unconfirmed);
    assert!(a.calls("migrate") > 1);
}
