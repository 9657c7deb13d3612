//! The audit log over real sockets: who asked for what, what came of it, and what it does not tell.

use crate::scripted::{House, code, host, refused, spec, vm};
use godwit_rpc::controller_client::path;
use godwit_rpc::pki::Request;
use godwit_rpc::{Client, ClientError, ControllerClient, Identity, Role};
use godwit_types::ErrorCode;
use godwit_types::audit::{AuditEntry, AuditQuery, AuditResult};
use godwit_types::console::ConsoleTyped;
use godwit_types::control_api::{JoinRequest, OperatorRequest, StartRequest};
use serde_json::{Value, json};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(20);

async fn log(house: &House, about: Option<&str>) -> Vec<AuditEntry> {
    let query = AuditQuery {
        last: None,
        about: about.map(str::to_owned),
    };
    let mut entries = house.client().audit(&query).await.unwrap();
    entries.reverse();
    entries
}

#[tokio::test]
async fn who_created_started_and_deleted_a_vm_is_in_the_log_with_what_was_refused() {
    let mut house = House::new().await;
    let (_a, client) = (house.host("a").await, house.client());
    client.create_vm(&spec("web")).await.unwrap();
    let request = StartRequest::default();
    client.start(&vm("web"), &request).await.unwrap();
    let refused = client.delete_vm(&vm("web")).await;
    refused!(refused, WrongState);
    client.vms().await.unwrap();
    let entries = log(&house, Some("web")).await;
    let told: Vec<_> = entries
        .iter()
        .map(|entry| (entry.what.as_str(), entry.result))
        .collect();
    let expected = [
        ("vm create", AuditResult::Done),
        ("vm start", AuditResult::Done),
        ("vm delete", AuditResult::Refused),
    ];
    assert_eq!(told, expected);
    assert!(entries.iter().all(|entry| entry.who.starts_with("root")));
    let created = entries[0].detail.as_deref().unwrap();
    assert!(created.contains("\"memory_mib\":64"), "{created}");
    let why = entries[2].message.as_deref().unwrap();
    assert!(why.contains("godwit vm stop web"), "{why}");
    // It is in the database, not in a process.
    house.stop().await;
    house.start().await;
    assert_eq!(log(&house, Some("web")).await, entries);
}

#[tokio::test]
async fn who_types_to_a_guest_is_told_once_and_what_is_typed_never() {
    let house = House::new().await;
    let (a, client) = (house.host("a").await, house.client());
    client.create_vm(&spec("web")).await.unwrap();
    let bytes = b"hunter2\n".to_vec();
    let typed = ConsoleTyped { bytes };
    refused!(client.console_type(&vm("web"), &typed).await, WrongState);
    let request = StartRequest::default();
    client.start(&vm("web"), &request).await.unwrap();
    for _ in 0..3 {
        client.console_type(&vm("web"), &typed).await.unwrap();
    }
    let heard = a.script().calls.clone();
    let heard = heard.iter().filter(|call| *call == "typed hunter2\n");
    assert_eq!(heard.count(), 3, "the guest hears every key");
    let entries = log(&house, Some("web")).await;
    let told = entries.iter().filter(|entry| entry.what == "vm console");
    let told: Vec<_> = told
        .map(|entry| (entry.result, entry.detail.clone()))
        .collect();
    let expected = [(AuditResult::Refused, None), (AuditResult::Done, None)];
    assert_eq!(told, expected);
}

#[tokio::test]
async fn an_operator_is_named_by_the_certificate_and_a_join_tells_no_secret() {
    let house = House::new().await;
    let admin = Identity::load(&house.made.operator_dir).unwrap();
    let serial = admin.holder().unwrap().serial;
    let remote = Client::tls(house.address(), &admin, Role::Controller).unwrap();
    ControllerClient::new(remote).add_host().await.unwrap();
    let key = Request::new().unwrap();
    house
        .join("a", "127.0.0.1:1".parse().unwrap(), &key)
        .await
        .unwrap();
    let entries = log(&house, None).await;
    let added = entries.iter().find(|entry| entry.what == "host add");
    let added = added.unwrap();
    assert!(added.who.starts_with("operator "), "{added:?}");
    assert_eq!(added.certificate.as_ref(), Some(&serial));
    let joined = entries.iter().find(|entry| entry.what == "host join");
    let joined = joined.unwrap();
    assert_eq!(joined.who, "a client without certificate");
    assert_eq!(joined.detail, None);
}

#[tokio::test]
async fn strangers_who_try_tokens_are_counted_and_push_out_nothing() {
    let house = House::new().await;
    let token = house.token().await;
    let key = Request::new().unwrap();
    let address = "127.0.0.1:9".parse().unwrap();
    house.join("a", address, &key).await.unwrap();
    let before = log(&house, None).await;
    let request = JoinRequest {
        secret: "wrong".into(),
        name: host("b"),
        agent_address: address,
        csr_pem: key.csr_pem.clone(),
        former: None,
    };
    let mut turned_away = 0;
    for _ in 0..300 {
        match code(house.joining(&token).join(&request).await) {
            ErrorCode::BadToken => {}
            ErrorCode::NotAllowed => turned_away += 1,
            other => panic!("{other}"),
        }
    }
    assert!(turned_away > 0);
    let mut after = log(&house, None).await;
    let counted = after.pop().unwrap();
    assert_eq!(after, before, "one row more");
    assert_eq!((counted.what.as_str(), counted.times), ("host join", 300));
    assert_eq!(counted.detail.as_deref(), Some("from 127.0.0.1"));
    assert!(counted.last_unix_s >= Some(counted.unix_s));
}

/// They were counted in memory only until somebody read the log.
#[tokio::test]
async fn strangers_who_were_turned_away_are_counted_though_nobody_reads_the_log_before_the_controller_ends()
 {
    let mut house = House::new().await;
    let token = house.token().await;
    let key = Request::new().unwrap();
    let request = JoinRequest {
        secret: "wrong".into(),
        name: host("b"),
        agent_address: "127.0.0.1:9".parse().unwrap(),
        csr_pem: key.csr_pem.clone(),
        former: None,
    };
    for _ in 0..300 {
        house.joining(&token).join(&request).await.unwrap_err();
    }
    house.stop().await;
    house.start().await;
    let counted = log(&house, None).await.pop().unwrap();
    assert_eq!((counted.what.as_str(), counted.times), ("host join", 300));
}

#[tokio::test]
async fn a_stranger_who_is_turned_away_writes_nothing_into_the_log() {
    let house = House::new().await;
    let token = house.token().await;
    let before = log(&house, None).await;
    let stranger = Client::joining(house.address(), token.fingerprint).unwrap();
    let answer: Result<Value, ClientError> = stranger
        .post(path::VMS, &json!({ "name": "web" }), DEADLINE)
        .await;
    refused!(answer, NotAllowed);
    assert_eq!(log(&house, None).await, before);
}

/// An attacker pushed out all that people had done in under a minute.
#[tokio::test]
async fn what_removed_operators_try_is_counted_by_each_of_them_and_pushes_out_nothing() {
    let house = House::new().await;
    let removed = async |name: &str| {
        let key = Request::new().unwrap();
        let (name, csr_pem) = (host(name), key.csr_pem.clone());
        let request = OperatorRequest {
            name: name.clone(),
            csr_pem,
        };
        let answer = house.client().add_operator(&request).await.unwrap();
        house.client().remove_operator(&name).await.unwrap();
        let identity = key.into_identity(answer.certificate_pem, answer.ca_pem);
        Client::tls(house.address(), &identity.unwrap(), Role::Controller).unwrap()
    };
    let (eve, joe) = (removed("eve").await, removed("joe").await);
    let before = log(&house, None).await;
    let web = format!("{}/web", path::VMS);
    for (client, times) in [(&joe, 3), (&eve, 40)] {
        for _ in 0..times {
            let new = json!({ "name": "web" });
            let answer: Result<Value, ClientError> = client.post(path::VMS, &new, DEADLINE).await;
            refused!(answer, NotAllowed);
        }
    }
    for _ in 0..2 {
        let answer: Result<Value, ClientError> = eve.delete(&web, DEADLINE).await;
        refused!(answer, NotAllowed);
    }
    let after = log(&house, None).await;
    assert_eq!(after[..before.len()], before[..]);
    let told: Vec<(&str, &str, u64)> = after[before.len()..]
        .iter()
        .map(|row| (row.who.as_str(), row.what.as_str(), row.times))
        .collect();
    let expected = [
        ("operator joe", "vm create", 3),
        ("operator eve", "vm create", 40),
        ("operator eve", "vm delete", 2),
    ];
    assert_eq!(told, expected);
    let said = after.last().unwrap().message.as_deref().unwrap();
    assert!(said.contains("operator eve was revoked"), "{said}");
}
