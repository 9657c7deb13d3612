//! What a controller must say by itself, over real sockets: removed hosts that run on, invented hosts, clones, clocks; and
//! what it must not do late, or leave undone.

use crate::scripted::{Agent, House, host, vm};
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{AgentClient, Authority, Client, ControllerClient, Role};
use godwit_types::control_api::{HostState, KeepRequest, StartRequest};
use godwit_types::site::{
    Alarm, BootWish, Instance, SiteHost, SiteQuestion, SiteUpdate, Stamp, Standing,
};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation};

fn on(name: &str) -> StartRequest {
    StartRequest {
        on: Some(host(name)),
    }
}

/// Hosts a and b, VM web running on a.
async fn house() -> (House, Agent, Agent) {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    (house, a, b)
}

async fn has_alarm(house: &House, alarm: &Alarm) -> bool {
    house.client().site().await.unwrap().alarms.contains(alarm)
}

fn a_runs_web_though_removed() -> Alarm {
    Alarm::RemovedHostAnswers {
        host: host("a"),
        vms: vec![vm("web")],
    }
}

async fn said(house: &House) -> String {
    house.client().site().await.unwrap().sentences.join(" ")
}

#[tokio::test]
async fn a_host_that_was_removed_and_runs_its_vm_on_is_an_alarm() {
    let (mut house, mut a, _b) = house().await;
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    let client = house.client();
    client.remove_host(&host("a"), true).await.unwrap();
    client.start(&vm("web"), &on("b")).await.unwrap();
    // It was never off: it is heard, and its guest runs.
    a.heal().await;
    let alarm = a_runs_web_though_removed();
    house.until_alarm(&alarm).await;
    let sentence = said(&house).await;
    for command in ["godwit host fenced a", "--force --host a"] {
        assert!(sentence.contains(command), "{sentence}");
    }
    // It answers, so it is not off, whoever says so.
    let refused = client.fenced(&host("a")).await.unwrap_err();
    assert!(refused.to_string().contains("host a answers"), "{refused}");
    assert!(has_alarm(&house, &alarm).await);
    // Also for the next life of the controller, and when it falls silent again.
    house.stop().await;
    house.start().await;
    house.until_alarm(&alarm).await;
    a.cut().await;
    let client = house.client();
    assert!(has_alarm(&house, &alarm).await);
    client.fenced(&host("a")).await.unwrap();
    assert!(!has_alarm(&house, &alarm).await);
    house.stop().await;
    house.start().await;
    a.heal().await;
    house.until_host("b", HostState::Connected).await;
    assert!(!has_alarm(&house, &alarm).await);
}

#[tokio::test]
async fn an_alarm_about_a_removed_host_is_not_about_the_one_that_joins_under_its_name() {
    let (house, mut a, _b) = house().await;
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    house.client().remove_host(&host("a"), true).await.unwrap();
    a.heal().await;
    let alarm = a_runs_web_though_removed();
    house.until_alarm(&alarm).await;
    let _joined = house.host("a").await;
    assert!(!has_alarm(&house, &alarm).await);
}

#[tokio::test]
async fn a_guest_of_a_vm_that_was_deleted_is_an_alarm() {
    let (house, mut a, _b) = house().await;
    let client = house.client();
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    client.fenced(&host("a")).await.unwrap();
    client.delete_vm(&vm("web")).await.unwrap();
    // The person was wrong: it runs on.
    a.heal().await;
    let alarm = Alarm::RunsUnknownVms {
        host: host("a"),
        vms: vec![vm("web")],
    };
    house.until_alarm(&alarm).await;
    let sentence = said(&house).await;
    assert!(sentence.contains("--force --host a"), "{sentence}");
    a.script().vms.clear();
    house
        .until(async |house: &House| !has_alarm(house, &alarm).await)
        .await;
}

#[tokio::test]
async fn a_word_that_a_host_is_off_is_about_the_one_that_joined_under_a_removed_ones_name() {
    let (house, _a, mut b) = house().await;
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    let client = house.client();
    client.remove_host(&host("b"), true).await.unwrap();
    let mut joined = house.host("b").await;
    joined.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    client.fenced(&host("b")).await.unwrap();
    assert!(client.host(&host("b")).await.unwrap().fenced);
}

#[tokio::test]
async fn a_copy_that_a_person_keeps_is_not_paused_by_what_was_seen_before() {
    let (house, a, mut b) = house().await;
    house.running("aaa", "a").await;
    let go_on = b.hold("pause");
    b.cut().await;
    for name in ["aaa", "web"] {
        b.has(name, VmState::Running, a.generation(name).0 + 5, true);
    }
    b.heal().await;
    // The controller has seen both, and is about to pause the copy of aaa, then that of web.
    b.until_called("asked to pause aaa").await;
    let keep = KeepRequest { host: host("b") };
    house.client().keep(&vm("web"), &keep).await.unwrap();
    go_on.send_replace(true);
    b.until_called("paused aaa").await;
    house
        .client()
        .keep(&vm("aaa"), &KeepRequest { host: host("a") })
        .await
        .unwrap();
    house.until_vm("web", VmState::Running, "b").await;
    assert_eq!(b.calls("paused web"), 0);
}

#[tokio::test]
async fn a_grant_that_died_with_its_controller_is_settled_by_the_next_life() {
    let (mut house, a, _b) = house().await;
    house.stop().await;
    // As if the controller had died between writing the grant and saying it.
    {
        let mut script = a.script();
        script.vms.clear();
        let granted = script.highest[&vm("web")];
        script.highest.insert(vm("web"), Generation(granted.0 - 1));
    }
    house.start().await;
    house
        .until(async |house: &House| house.vm("web").await.state == VmState::Stopped)
        .await;
    house.client().start(&vm("web"), &on("b")).await.unwrap();
}

#[tokio::test]
async fn a_clone_that_asks_from_elsewhere_is_an_alarm() {
    let (house, a, _b) = house().await;
    let address = house.address();
    let client = Client::tls(address, &a.identity, Role::Controller).unwrap();
    let mine = a.instance();
    let question = SiteQuestion {
        instance: Instance {
            counter: mine.counter + 1,
            machine_id: "clone".into(),
            ..mine
        },
        knows: a.knows(),
        wishes: vec![BootWish {
            vm: vm("web"),
            generation: Generation(1),
        }],
    };
    let asker = ControllerClient::new(client);
    let answer = asker.site_ask(&question).await.unwrap();
    assert_eq!(answer.standing, Standing::SecondInstance);
    let alarm = Alarm::SecondInstance { host: host("a") };
    assert!(has_alarm(&house, &alarm).await);
    // The host itself is asked meanwhile, and gets VMs as before.
    house.running("other", "a").await;
    assert!(has_alarm(&house, &alarm).await);
}

#[tokio::test]
async fn a_host_whose_certificate_is_not_valid_now_is_said_to_be_so() {
    const DAY_S: i64 = 24 * 3600;
    let (house, mut a, b) = house().await;
    let authority = Authority::load(&house.config.state_dir).unwrap();
    let role = Role::Host(host("a"));
    let alarm = Alarm::ClockOrCertificate { host: host("a") };
    let good = a.identity.clone();
    for off_by in [-400, 400] {
        let then = now_unix_s() + off_by * DAY_S;
        a.cut().await;
        house.until_host("a", HostState::Unreachable).await;
        a.identity = authority.identity(&role, then).unwrap();
        a.heal().await;
        house.until_alarm(&alarm).await;
        a.cut().await;
        a.identity = good.clone();
        a.heal().await;
        house.until_host("a", HostState::Connected).await;
        assert!(!has_alarm(&house, &alarm).await);
        // A host whose clock is wrong says it in these words, which the controller looks for.
        let mine = authority.identity(&Role::Controller, then).unwrap();
        let client = Client::tls(b.address, &mine, Role::Host(host("b"))).unwrap();
        let error = AgentClient::new(client).host().await.unwrap_err();
        let told = error.to_string();
        assert!(told.contains("alert: CertificateExpired"), "{told}");
    }
}

#[tokio::test]
async fn hosts_that_a_table_invents_are_named_and_come_to_no_inventory() {
    let house = House::new().await;
    let a = house.host("a").await;
    let invented = SiteHost {
        name: host("x"),
        address: "127.0.0.1:1".parse().unwrap(),
        serial: "12".into(),
        counter: 0,
        machine_id: String::new(),
    };
    let later = Stamp {
        epoch: 0,
        number: 1 << 20,
    };
    let knows = a.knows();
    let update = SiteUpdate {
        since: knows.complete,
        stamp: later,
        upto: later,
        hosts: vec![invented],
        removed: Default::default(),
        vms: Default::default(),
        you: Standing::Known,
    };
    a.script().site().update(update).unwrap();
    let alarm = Alarm::RestoredController {
        waits_for: vec![host("x")],
        said_by: vec![host("a")],
    };
    house.until_alarm(&alarm).await;
    let sentence = said(&house).await;
    assert!(sentence.contains("x (named by a)"), "{sentence}");
    assert_eq!(house.client().hosts().await.unwrap().len(), 1);
    house.client().fenced(&host("x")).await.unwrap();
    house.until_in_charge().await;
    assert_eq!(house.client().hosts().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_table_that_a_host_refuses_is_an_alarm_until_it_is_taken() {
    let house = House::new().await;
    let a = house.host("a").await;
    let full = ApiError::new(ErrorCode::InvalidRequest, "its limit is 3145728");
    a.script().refuse_table = Some(full);
    // From here on there is news for its table.
    house.running("web", "a").await;
    let alarm = Alarm::TableNotTaken { host: host("a") };
    let is_told = async |house: &House| {
        let site = house.client().site().await.unwrap();
        site.alarms.contains(&alarm)
    };
    house.until(is_told).await;
    let said = house.client().site().await.unwrap().sentences.join(" ");
    assert!(said.contains("its limit is 3145728"), "{said}");
    a.script().refuse_table = None;
    house
        .until(async |house: &House| !is_told(house).await)
        .await;
}

#[tokio::test]
async fn an_address_that_is_not_here_yet_keeps_the_controller_from_nothing_else_and_is_told() {
    let (mut house, _a, _b) = house().await;
    assert!(!said(&house).await.contains("does not have the address"));
    house.stop().await;
    // Nobody's: it is for documentation.
    house.config.listen.push("192.0.2.1:8471".parse().unwrap());
    house.start().await;
    house.until_vm("web", VmState::Running, "a").await;
    let said = said(&house).await;
    assert!(
        said.contains("does not have the address of 192.0.2.1:8471 yet"),
        "{said}"
    );
}
