//! Dry runs that predict, promises that cannot be kept, and what agents are told and asked beside migrations.

use crate::scripted::{Agent, House, hand_over, host, refused, to, vm};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_types::forecast::{DirtyAge, DirtyRate, LinkMeasured, PromiseKind};
use godwit_types::migration::{MigrateRequest, PreflightReport};
use godwit_types::{ApiError, ErrorCode, MigrationId};

/// VM web on host a writes so much; the link to host b carries 100 MB/s.
async fn house(writes_mib_per_s: f64) -> (House, Agent, Agent) {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    a.script().rate = Some(DirtyRate {
        ram_mib: 2048,
        data_mib: 1000,
        ages: [0.1, 0.3, 1.0]
            .map(|seconds| DirtyAge {
                seconds,
                mib: writes_mib_per_s * seconds,
            })
            .to_vec(),
    });
    a.script().link = Some(LinkMeasured {
        bytes_per_s: 100e6,
        rtt_ms: 0.5,
        streams: 2,
        seconds: 0.6,
    });
    (house, a, b)
}

async fn dry(house: &House, request: MigrateRequest) -> PreflightReport {
    let request = MigrateRequest {
        dry_run: true,
        ..request
    };
    match house.client().migrate(&vm("web"), &request).await.unwrap() {
        MigrateAnswer::Checked(report) => report,
        MigrateAnswer::Begun(begun) => panic!("begun: {begun:?}"),
    }
}

#[tokio::test]
async fn a_dry_run_predicts_from_what_was_measured() {
    let (house, a, b) = house(1.0).await;
    let report = dry(&house, to("b")).await;
    assert_eq!((report.refusals.len(), report.cannot_keep.len()), (0, 0));
    let prediction = report.prediction.unwrap();
    assert!((10.0..13.0).contains(&prediction.total_s), "{prediction:?}");
    assert!(prediction.downtime_ms <= 50.0);
    assert_eq!(
        (prediction.data_mib, prediction.guest_speed_percent),
        (1000, 100)
    );
    assert!(
        prediction
            .basis
            .contains("a burst of 0.6 s over 2 channels")
    );
    assert_eq!(
        (a.calls("measure web 1000"), b.calls("link-listen")),
        (1, 1)
    );
    assert_eq!(a.calls("migrate"), 0);
}

#[tokio::test]
async fn promises_that_cannot_be_kept_are_listed_warned_of_or_refused() {
    let (house, a, _b) = house(300.0).await;
    let asked = MigrateRequest {
        deadline_s: Some(5),
        max_guest_slowdown_percent: Some(10),
        ..to("b")
    };
    let report = dry(&house, asked.clone()).await;
    let promises: Vec<_> = report.cannot_keep.iter().map(|one| one.promise).collect();
    assert!(
        promises.contains(&PromiseKind::MaxGuestSlowdown),
        "{report:?}"
    );
    let strict = MigrateRequest {
        must_keep: true,
        ..asked.clone()
    };
    let refused = house.client().migrate(&vm("web"), &strict).await;
    refused!(refused, CannotKeep);
    assert_eq!(a.calls("migrate"), 0);
    match house.client().migrate(&vm("web"), &asked).await.unwrap() {
        MigrateAnswer::Begun(begun) => assert!(!begun.warnings.is_empty()),
        MigrateAnswer::Checked(_) => panic!("not begun"),
    }
    assert_eq!(a.calls("migrate"), 1);
}

#[tokio::test]
async fn the_prediction_goes_with_the_migration_and_history_beats_a_burst() {
    let (house, a, b) = house(1.0).await;
    let predicted = dry(&house, to("b")).await.prediction.unwrap();
    let begun = house.client().migrate(&vm("web"), &to("b")).await.unwrap();
    let MigrateAnswer::Begun(begun) = begun else {
        panic!("not begun")
    };
    let id = MigrationId::new(begun.id).unwrap();
    // Nothing was promised: what the dry run measured is enough.
    assert_eq!(a.calls("measure"), 1);
    let spec = a.script().specs[&id].clone();
    assert_eq!(spec.prediction.unwrap().data_mib, predicted.data_mib);
    for agent in [&a, &b] {
        let mut script = agent.script();
        let report = script.reports.get_mut(&id).unwrap();
        report.switchover_ms = 100.0;
        report.iterations = vec![godwit_types::migration::IterationReport {
            pages_sent: 100_000,
            zero_pages: 0,
            bytes: 409_600_000,
            seconds: 2.048,
            limited_by: godwit_types::migration::LimitedBy::Link,
        }];
    }
    hand_over(&a, &b, "web", &id);
    house
        .until(async |house: &House| {
            let report = house.client().migration(&id).await.unwrap();
            report.outcome.is_some()
        })
        .await;
    let report = house.client().migration(&id).await.unwrap();
    assert_eq!(report.prediction.unwrap().data_mib, 1000);
    // Back again, and a third move: the first one's speed counts.
    let generation = b.script().vms[&vm("web")].generation.0;
    a.has(
        "web",
        godwit_types::vm::VmState::Running,
        generation + 1,
        true,
    );
    b.has(
        "web",
        godwit_types::vm::VmState::Stopped,
        generation + 1,
        false,
    );
    house
        .until_vm("web", godwit_types::vm::VmState::Running, "a")
        .await;
    let again = dry(&house, to("b")).await.prediction.unwrap();
    assert!(
        again.basis.contains("the last migration from host a"),
        "{}",
        again.basis
    );
    assert!((again.throughput_gb_per_s - 0.2).abs() < 1e-6);
    assert!(again.basis.contains("round trip 0.5 ms"), "{}", again.basis);
    says_that_a_burst_did_not_get_through(&house, &a).await;
    // So does its pause: what took 100 ms is not begun where 50 must be kept.
    assert!(again.downtime_ms >= 100.0, "{again:?}");
    let strict = MigrateRequest {
        must_keep: true,
        max_downtime_ms: Some(50),
        ..to("b")
    };
    let refused = house.client().migrate(&vm("web"), &strict).await;
    refused!(refused, CannotKeep);
}

/// What was achieved before says nothing of the link as it is now.
async fn says_that_a_burst_did_not_get_through(house: &House, a: &Agent) {
    let why = "a link of this host is being measured already";
    a.script().refuse_link = Some(ApiError::new(ErrorCode::WrongState, why));
    let basis = dry(house, to("b")).await.prediction.unwrap().basis;
    let told = format!("a burst did not get through ({why})");
    assert!(basis.contains(&told), "{basis}");
    a.script().refuse_link = None;
}

#[tokio::test]
async fn a_migration_that_cannot_be_predicted_may_begin() {
    let (house, a, _b) = house(1.0).await;
    a.script().rate = None;
    let report = dry(&house, to("b")).await;
    assert_eq!(report.prediction, None);
    assert!(report.refusals.is_empty());
    let told = |line: &String| line.starts_with("warning:") && line.contains("not be predicted");
    assert!(report.passed.iter().any(told), "{:?}", report.passed);
}

#[tokio::test]
async fn a_dry_run_refuses_where_the_source_does_not_reach_the_destination_and_a_migration_waits() {
    let (house, a, _b) = house(1.0).await;
    let why = "cannot connect to 10.0.0.2:7001 (timed out): see the firewall";
    a.script().refuse_link = Some(ApiError::new(ErrorCode::Preflight, why));
    a.script().rate = None;
    let report = dry(&house, to("b")).await;
    let [refusal] = &report.refusals[..] else {
        panic!("{report:?}")
    };
    let told = format!("host a cannot reach host b for a migration: {why}");
    assert_eq!(
        (&refusal.message, refusal.code),
        (&told, ErrorCode::Preflight)
    );
    assert_eq!(
        (refusal.host.as_deref(), report.prediction),
        (Some("a"), None)
    );
    let promised = MigrateRequest {
        deadline_s: Some(60),
        ..to("b")
    };
    let kept = MigrateRequest {
        must_keep: true,
        ..promised.clone()
    };
    let refused = house.client().migrate(&vm("web"), &kept).await;
    refused!(refused, Preflight);
    let begun = house.client().migrate(&vm("web"), &promised).await;
    assert!(matches!(begun, Ok(MigrateAnswer::Begun(_))), "{begun:?}");
}

#[tokio::test]
async fn a_slowdown_of_everything_is_no_valid_wish() {
    let (house, _a, _b) = house(1.0).await;
    let request = MigrateRequest {
        max_guest_slowdown_percent: Some(100),
        ..to("b")
    };
    let refused = house.client().migrate(&vm("web"), &request).await;
    refused!(refused, InvalidRequest);
}

#[tokio::test]
async fn agents_hear_of_hosts_that_are_gone_for_good() {
    let (house, a, mut b) = house(1.0).await;
    b.cut().await;
    house
        .until(async |house: &House| {
            let view = house.client().host(&host("b")).await.unwrap();
            view.state == godwit_types::control_api::HostState::Unreachable
        })
        .await;
    house.client().remove_host(&host("b"), true).await.unwrap();
    let heard = async {
        while a.script().removed != [host("b")] {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::scripted::DEADLINE, heard)
        .await
        .expect("it was never told");
    // One that joins again is not gone any more.
    let _b = house.host("b").await;
    let heard = async {
        while !a.script().removed.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::scripted::DEADLINE, heard)
        .await
        .expect("it was never told");
}

#[tokio::test]
async fn top_shows_every_host_also_one_that_does_not_answer() {
    let (house, _a, mut b) = house(1.0).await;
    b.cut().await;
    let tops = house.client().top().await.unwrap();
    let hosts: Vec<_> = tops
        .iter()
        .map(|top| (top.host.as_str(), top.load.is_some()))
        .collect();
    assert_eq!(hosts, [("a", true), ("b", false)]);
}
