//! A controller among agents of the version before and after: something between them takes a field out of every message,
//! or puts one in.

use crate::scripted::{Agent, Between, House, hand_over, host, to, vm};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_types::MigrationId;
use godwit_types::control_api::{HostState, StartRequest, StopRequest};
use godwit_types::migration::{COULD_NOT_BEGIN, Outcome};
use godwit_types::vm::VmState;
use serde_json::Value;
use std::sync::Arc;

/// Objects below these keys are maps, or a VM's description, which is understood wholly or refused.
const CLOSED: &[&str] = &[
    "spec",
    "port_groups",
    "machine_aliases",
    "unread",
    "arrived",
    "vms",
];
/// Fields that the version before does not know, nor say.
const NEWEST: &[&str] = &["speaks", "vm_process", "control_protocol"];

/// A neighbour one version newer: each message has a field more.
fn newer() -> Between {
    Arc::new(|_, message| more(message))
}

fn more(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(more),
        Value::Object(fields) => {
            let open = fields.iter_mut();
            open.filter(|(key, _)| !CLOSED.contains(&key.as_str()))
                .for_each(|(_, value)| more(value));
            fields.insert("of_a_newer_version".into(), Value::from("new"));
        }
        _ => {}
    }
}

/// A neighbour one version older: what was added since is in no message.
fn older() -> Between {
    Arc::new(|_, message| less(message))
}

fn less(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(less),
        Value::Object(fields) => {
            fields.retain(|key, _| !NEWEST.contains(&key.as_str()));
            fields.values_mut().for_each(less);
        }
        _ => {}
    }
}

/// A VM's whole life among such hosts: started, moved there and back, stopped.
async fn lives(house: &House, a: &Agent, b: &Agent) {
    let client = house.client();
    house.running("web", "a").await;
    for (from, there) in [(a, b), (b, a)] {
        let name = if std::ptr::eq(there, b) { "b" } else { "a" };
        let begun = client.migrate(&vm("web"), &to(name)).await.unwrap();
        let MigrateAnswer::Begun(begun) = begun else {
            panic!("only checked");
        };
        let id = MigrationId::new(begun.id).unwrap();
        hand_over(from, there, "web", &id);
        house.until_vm("web", VmState::Running, name).await;
        house
            .until(async |house: &House| {
                let report = house.client().migration(&id).await.unwrap();
                report.outcome == Some(Outcome::Completed)
            })
            .await;
    }
    let stop = StopRequest { force: true };
    client.stop(&vm("web"), &stop).await.unwrap();
    house.until_vm("web", VmState::Stopped, "a").await;
    let again = StartRequest::default();
    client.start(&vm("web"), &again).await.unwrap();
}

#[tokio::test]
async fn agents_one_version_newer_and_older_live_with_this_controller() {
    for (first, second) in [(newer(), older()), (newer(), newer()), (older(), older())] {
        let house = House::new().await;
        let (a, b) = (house.host("a").await, house.host("b").await);
        a.script().between = Some(first);
        b.script().between = Some(second);
        lives(&house, &a, &b).await;
    }
}

#[tokio::test]
async fn a_vm_told_of_in_newer_words_is_shown_and_the_others_are_managed() {
    let house = House::new().await;
    let (a, _b) = (house.host("a").await, house.host("b").await);
    for name in ["web", "old"] {
        house.running(name, "a").await;
    }
    a.script().between = Some(Arc::new(|is_request, message| {
        let all = message.as_array_mut().filter(|_| !is_request);
        for one in all.into_iter().flatten() {
            if one.pointer("/spec/name") == Some(&"web".into()) {
                one["state"] = "dreaming".into();
                one["spec"]["dream"] = "deep".into();
            }
        }
    }));
    house.until_vm("web", VmState::DamagedRecord, "a").await;
    let note = house.vm("web").await.note.unwrap();
    assert!(
        note.contains("this version of Godwit does not know"),
        "{note}"
    );
    house.until_host("a", HostState::Connected).await;
    let client = house.client();
    let there = StartRequest {
        on: Some(host("b")),
    };
    client.start(&vm("web"), &there).await.unwrap_err();
    client.migrate(&vm("web"), &to("b")).await.unwrap_err();
    client.pause(&vm("old")).await.unwrap();
    house.until_vm("old", VmState::Paused, "a").await;
    a.script().between = None;
    house.until_vm("web", VmState::Running, "a").await;
}

#[tokio::test]
async fn a_host_without_a_common_protocol_is_refused_by_name_and_the_others_are_managed() {
    let house = House::new().await;
    let (_a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    b.script().between = Some(speaking("protocol", 7, 8));
    house.until_host("b", HostState::Unreachable).await;
    let site = house.client().site().await.unwrap();
    let told = serde_json::to_string(&site).unwrap();
    assert!(
        told.contains("host b runs Godwit") && told.contains("protocol 7 to 8"),
        "{told}"
    );
    house.client().pause(&vm("web")).await.unwrap();
    house.until_vm("web", VmState::Paused, "a").await;
    b.script().between = None;
    house.until_host("b", HostState::Connected).await;
}

/// An agent whose build has this range of versions.
fn speaking(what: &'static str, min: u32, max: u32) -> Between {
    Arc::new(move |is_request, message| {
        if !is_request && message.get("kernel").is_some() {
            message["speaks"][what] = serde_json::json!({"min": min, "max": max});
        }
    })
}

#[tokio::test]
async fn a_move_without_a_common_control_channel_is_refused_and_the_newest_common_one_is_spoken() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let client = house.client();
    let spoken = async |newest: u32| {
        house
            .until(async |house: &House| {
                let hosts = house.client().hosts().await.unwrap();
                let mut newests = hosts.iter().map(|host| host.info.speaks.migration.max);
                newests.any(|max| max == newest)
            })
            .await;
    };
    b.script().between = Some(speaking("migration", 5, 6));
    spoken(6).await;
    let refused = client.migrate(&vm("web"), &to("b")).await.unwrap_err();
    let why = refused.to_string();
    assert!(
        why.contains("speaks migration protocol 4") && why.contains("speaks 5 to 6"),
        "{why}"
    );
    assert_eq!(b.calls("prepare"), 0);
    b.script().between = Some(speaking("migration", 3, 9));
    spoken(9).await;
    let begun = client.migrate(&vm("web"), &to("b")).await.unwrap();
    let MigrateAnswer::Begun(begun) = begun else {
        panic!("only checked");
    };
    let id = MigrationId::new(begun.id).unwrap();
    assert_eq!(a.script().specs[&id].control_protocol, Some(4));
}

#[tokio::test]
async fn a_database_of_a_newer_godwit_is_left_as_it_is() {
    let mut house = House::new().await;
    house.stop().await;
    let sql = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) VALUES (99, 'later', 1, x'00', 0)";
    house.execute(sql).await;
    let refused = godwit_controller::Controller::start(house.config.clone()).await;
    let why = refused.err().unwrap().to_string();
    assert!(
        why.contains("written by a newer Godwit (its format is 99"),
        "{why}"
    );
}

/// The version before calls cancelled whatever a controller takes back.
#[tokio::test]
async fn a_move_that_could_not_begin_was_cancelled_by_nobody_whatever_an_older_host_says() {
    let house = House::new().await;
    let (mut a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let prepares = b.hold("prepare");
    let client = house.client();
    let begins = tokio::spawn(async move { client.migrate(&vm("web"), &to("b")).await });
    b.until_called("prepare").await;
    a.cut().await;
    prepares.send_replace(true);
    assert!(begins.await.unwrap().is_err(), "its source is away");
    // Until it is back nobody knows whether it was told.
    a.heal().await;
    let is_over = async |house: &House| {
        let all = house.client().migrations().await.unwrap();
        all.iter().all(|report| report.outcome.is_some())
    };
    house.until(is_over).await;
    let report = house.client().migrations().await.unwrap().remove(0);
    let there = b.script().reports[&report.id].clone();
    assert_eq!(there.outcome, Some(Outcome::Cancelled));
    assert!(there.reason.unwrap().starts_with(COULD_NOT_BEGIN));
    assert_eq!(report.outcome, Some(Outcome::Failed), "{report:?}");
}
