//! Hosts and operators that come and go: tokens, certificates, doubt about a host that left.

use crate::scripted::{ANYWHERE, DEADLINE, House, host, refused, spec, vm};
use godwit_rpc::controller_client::path;
use godwit_rpc::pki::Request;
use godwit_rpc::{Client, ControllerClient, Identity, Role, Token};
use godwit_types::Generation;
use godwit_types::control_api::{JoinRequest, ResolveRequest};
use godwit_types::site::Claim;
use godwit_types::vm::VmState;
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn tokens_are_good_once_and_for_a_while() {
    let mut house = House::new().await;
    let _a = house.host("a").await;
    let key = Request::new().unwrap();
    let join = async |house: &House, token: &Token, secret: &str, name: &str| {
        let request = JoinRequest {
            secret: secret.to_owned(),
            name: host(name),
            agent_address: "127.0.0.1:9".parse().unwrap(),
            csr_pem: key.csr_pem.clone(),
            former: None,
        };
        house.joining(token).join(&request).await
    };
    let token = house.token().await;
    refused!(join(&house, &token, "wrong", "b").await, BadToken);
    // A name that is taken does not use the token up.
    refused!(
        join(&house, &token, token.secret(), "a").await,
        AlreadyExists
    );
    join(&house, &token, token.secret(), "b").await.unwrap();
    refused!(join(&house, &token, token.secret(), "c").await, BadToken);
    // The first token, printed by init, is as good as any.
    let first = Token::parse(&house.made.join.token).unwrap();
    assert!(house.made.join.command.contains(&house.made.join.token));
    join(&house, &token, first.secret(), "c").await.unwrap();
    house.stop().await;
    house.config.token_valid = Duration::ZERO;
    house.start().await;
    let expired = house.token().await;
    refused!(
        join(&house, &expired, expired.secret(), "d").await,
        BadToken
    );
    // Neither token nor secret is in the database.
    let bytes = std::fs::read(house.database()).unwrap();
    let secret = token.secret().as_bytes();
    assert!(!bytes.windows(secret.len()).any(|window| window == secret));
}

#[tokio::test]
async fn a_removed_host_is_shut_out_and_others_hear_of_it() {
    let house = House::new().await;
    let (a, b, client) = (house.host("a").await, house.host("b").await, house.client());
    house.running("web", "a").await;
    refused!(client.remove_host(&host("a"), true).await, WrongState);
    refused!(client.remove_host(&host("x"), true).await, UnknownHost);
    let serial = b.identity.holder().unwrap().serial;
    let as_b = Client::tls(house.address(), &b.identity, Role::Controller).unwrap();
    client.remove_host(&host("b"), false).await.unwrap();
    let error = as_b.get::<Value>(path::HOSTS, DEADLINE).await.unwrap_err();
    assert!(error.to_string().contains("revoked"), "{error}");
    // The other host is told at one of the next polls; a change of a VM there shows that it was polled.
    for state in [VmState::Paused, VmState::Running] {
        a.script().vms.get_mut(&vm("web")).unwrap().state = state;
        house.until_vm("web", state, "a").await;
    }
    assert_eq!(a.script().revoked, [serial]);
}

#[tokio::test]
async fn operators_come_in_from_afar_and_hosts_do_not_operate() {
    let house = House::new().await;
    let a = house.host("a").await;
    let admin = Identity::load(&house.made.operator_dir).unwrap();
    let remote =
        ControllerClient::new(Client::tls(house.address(), &admin, Role::Controller).unwrap());
    assert_eq!(
        remote.version().await.unwrap().ca_fingerprint,
        house.made.ca_fingerprint
    );
    let as_host =
        ControllerClient::new(Client::tls(house.address(), &a.identity, Role::Controller).unwrap());
    refused!(as_host.vms().await, NotAllowed);
    refused!(as_host.create_vm(&spec("web")).await, NotAllowed);
}

#[tokio::test]
async fn in_doubt_comes_first_with_its_command_and_is_resolved_there() {
    let house = House::new().await;
    let (a, mut b, client) = (house.host("a").await, house.host("b").await, house.client());
    house.running("aaa", "a").await;
    house.running("web", "a").await;
    let resolve = ResolveRequest {
        run_on: host("a"),
        give_up: false,
        confirm_fenced: Some(host("b")),
    };
    refused!(client.resolve(&vm("web"), &resolve).await, WrongState);
    let to_b = serde_json::from_value(json!({"to": "b"})).unwrap();
    client.migrate(&vm("web"), &to_b).await.unwrap();
    let generation = Generation(a.generation("web").0 + 1);
    let gave = Claim::Gave {
        generation,
        to: host("b"),
    };
    a.records("web", VmState::InDoubt, generation, gave);
    b.cut().await;
    house.until_vm("web", VmState::InDoubt, "a").await;
    let first = client.vms().await.unwrap().remove(0);
    assert_eq!(first.spec.name, vm("web"));
    let note = first.note.unwrap();
    assert!(
        note.contains("godwit vm resolve web --run-on a --confirm-fenced b"),
        "{note}"
    );
    refused!(client.start(&vm("web"), &ANYWHERE).await, InDoubt);
    refused!(client.delete_vm(&vm("web")).await, InDoubt);
    let same = ResolveRequest {
        confirm_fenced: Some(host("a")),
        ..resolve.clone()
    };
    refused!(client.resolve(&vm("web"), &same).await, InvalidRequest);
    client.resolve(&vm("web"), &resolve).await.unwrap();
    assert_eq!(a.calls("resolve web on a"), 1);
}

#[tokio::test]
async fn a_vm_that_waits_for_a_removed_host_is_resolved_by_the_command_that_is_shown() {
    let house = House::new().await;
    let (a, mut b, client) = (house.host("a").await, house.host("b").await, house.client());
    house.running("web", "a").await;
    let to_b = serde_json::from_value(json!({"to": "b"})).unwrap();
    client.migrate(&vm("web"), &to_b).await.unwrap();
    let generation = Generation(a.generation("web").0 + 1);
    let gave = Claim::Gave {
        generation,
        to: host("b"),
    };
    a.records("web", VmState::InDoubt, generation, gave);
    b.cut().await;
    house.until_vm("web", VmState::InDoubt, "a").await;
    client.remove_host(&host("b"), true).await.unwrap();
    let resolve = ResolveRequest {
        run_on: host("a"),
        give_up: false,
        confirm_fenced: Some(host("b")),
    };
    client.resolve(&vm("web"), &resolve).await.unwrap();
    assert_eq!(a.calls("resolve web on a"), 1);
}
