//! Rows of the database that cannot be read: the controller starts where that is safe, and names the row everywhere.

use crate::scripted::{ANYWHERE, Agent, House, STOP, host, spec, to, vm};
use godwit_controller::Controller;
use godwit_types::ApiError;
use godwit_types::control_api::{HostState, KeepRequest, StartRequest, StopRequest};
use godwit_types::site::{Alarm, Claim};
use godwit_types::vm::VmState;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, query_scalar};

/// VM web runs on a, VM off was never started; the controller stands still while this is done to its database.
async fn damaged(sql: &str) -> (House, Agent, Agent) {
    let mut house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    house.client().create_vm(&spec("off")).await.unwrap();
    house.stop().await;
    house.execute(sql).await;
    (house, a, b)
}

async fn start(house: &mut House) {
    house.start().await;
    for name in ["a", "b"] {
        house.until_host(name, HostState::Connected).await;
    }
}

fn has(error: impl Into<ApiError>, words: &[&str]) {
    let text = error.into().message;
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

#[tokio::test]
async fn a_vm_whose_right_cannot_be_read_is_shown_and_granted_to_nobody() {
    let sql = "UPDATE site_vms SET entry = '{\"held\": \"x\"}' WHERE vm = 'web'";
    let (mut house, a, b) = damaged(sql).await;
    start(&mut house).await;
    let view = house.vm("web").await;
    assert_eq!(
        (view.state, view.host),
        (VmState::DamagedRecord, Some(host("a")))
    );
    let note = view.note.unwrap();
    assert!(
        note.contains("row 'web' of table site_vms") && note.contains("host a says"),
        "{note}"
    );
    let site = house.client().site().await.unwrap();
    let alarm = Alarm::UnreadRow {
        table: "site_vms".into(),
        row: "web".into(),
    };
    assert_eq!(site.alarms, [alarm]);
    let (a_put, b_put) = (a.calls("put"), b.calls("put"));
    let client = house.client();
    let words = ["site_vms", "controller.db"];
    let request = StartRequest {
        on: Some(host("b")),
    };
    has(
        client.start(&vm("web"), &request).await.unwrap_err(),
        &words,
    );
    has(
        client.migrate(&vm("web"), &to("b")).await.unwrap_err(),
        &words,
    );
    has(client.delete_vm(&vm("web")).await.unwrap_err(), &words);
    // A guest that runs can be turned off all the same.
    let stop = StopRequest { force: true };
    client.stop(&vm("web"), &stop).await.unwrap();
    has(
        client.start(&vm("web"), &request).await.unwrap_err(),
        &words,
    );
    assert_eq!((a.calls("put"), b.calls("put")), (a_put, b_put));
    // The others go on.
    client.start(&vm("off"), &ANYWHERE).await.unwrap();
    // Nothing was written over what a person may still read.
    let options = SqliteConnectOptions::new().filename(house.database());
    let mut database = options.connect().await.unwrap();
    let entry: String = query_scalar("SELECT entry FROM site_vms WHERE vm = 'web'")
        .fetch_one(&mut database)
        .await
        .unwrap();
    assert_eq!(entry, "{\"held\": \"x\"}");
}

#[tokio::test]
async fn two_guests_of_a_vm_whose_right_cannot_be_read_are_an_alarm_and_one_is_paused() {
    let noise = "UPDATE site_vms SET entry = 'noise' WHERE vm = 'web'";
    let (mut house, a, b) = damaged(noise).await;
    let mut second = a.script().vms[&vm("web")].clone();
    second.generation = second.generation.next().unwrap();
    second.claim = Claim::Holds {
        generation: second.generation,
        on: true,
    };
    b.script().vms.insert(vm("web"), second);
    start(&mut house).await;
    house.until_vm("web", VmState::RunningTwice, "b").await;
    house.until(async |_: &House| a.calls("pause") > 0).await;
    assert_eq!(b.calls("pause"), 0);
    let site = house.client().site().await.unwrap();
    let hosts = vec![host("b"), host("a")];
    let twice = Alarm::RunningTwice {
        vm: vm("web"),
        hosts,
    };
    assert_eq!(site.alarms[0], twice);
    let keep = KeepRequest { host: host("b") };
    house.client().keep(&vm("web"), &keep).await.unwrap();
    house.until_vm("web", VmState::DamagedRecord, "b").await;
    assert!(!a.script().vms.contains_key(&vm("web")));
    let options = SqliteConnectOptions::new().filename(house.database());
    let mut database = options.connect().await.unwrap();
    let entry: String = query_scalar("SELECT entry FROM site_vms WHERE vm = 'web'")
        .fetch_one(&mut database)
        .await
        .unwrap();
    assert_eq!(entry, "noise");
}

#[tokio::test]
async fn a_host_that_runs_a_vm_whose_right_cannot_be_read_is_not_removed_while_it_answers() {
    let noise = "UPDATE site_vms SET entry = 'noise' WHERE vm = 'web'";
    let (mut house, mut a, _b) = damaged(noise).await;
    start(&mut house).await;
    house.until_vm("web", VmState::DamagedRecord, "a").await;
    let client = house.client();
    for confirmed in [false, true] {
        let refused = client.remove_host(&host("a"), confirmed).await;
        has(refused.unwrap_err(), &["VM web", "site_vms"]);
    }
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    let refused = client.remove_host(&host("a"), false).await;
    has(refused.unwrap_err(), &["web"]);
    client.remove_host(&host("a"), true).await.unwrap();
}

#[tokio::test]
async fn a_vm_that_is_described_unreadably_is_described_anew_by_its_host_or_a_person() {
    let (mut house, _a, _b) = damaged("UPDATE vms SET spec = 'noise'").await;
    start(&mut house).await;
    house.until_vm("web", VmState::Running, "a").await;
    assert_eq!(house.vm("web").await.spec.memory_mib, 64);
    let off = house.vm("off").await;
    assert_eq!(off.state, VmState::DamagedRecord);
    let client = house.client();
    let refused = client.start(&vm("off"), &ANYWHERE).await;
    has(
        refused.unwrap_err(),
        &["row 'off' of table vms", "godwit vm edit off"],
    );
    client.edit_vm(&spec("off")).await.unwrap();
    assert!(client.site().await.unwrap().alarms.is_empty());
    client.start(&vm("off"), &ANYWHERE).await.unwrap();
    // It is so for good.
    house.stop().await;
    start(&mut house).await;
    assert!(house.client().site().await.unwrap().alarms.is_empty());
}

#[tokio::test]
async fn a_controller_that_must_not_start_names_the_row_and_what_to_do() {
    let cases = [
        (
            "UPDATE hosts SET agent_address = 'noise' WHERE name = 'b'",
            "row 'b' of table hosts",
        ),
        (
            "UPDATE site_hosts SET record = 'noise' WHERE host = 'b'",
            "row 'b' of table site_hosts",
        ),
        ("DELETE FROM site_stamp", "table site_stamp"),
    ];
    for (sql, words) in cases {
        let (house, _a, _b) = damaged(sql).await;
        let Err(error) = Controller::start(house.config.clone()).await else {
            panic!("it starts after {sql}");
        };
        let text = error.to_string();
        assert!(
            text.contains(words) && text.contains("controller.db"),
            "{text}"
        );
    }
}

#[tokio::test]
async fn reports_and_drains_that_cannot_be_read_stop_nobody() {
    let sql = "INSERT INTO drains (host, record) VALUES ('b', 'noise')";
    let (mut house, _a, _b) = damaged(sql).await;
    let sql = "INSERT INTO migrations (id, vm, source, destination, spec, report, ended) VALUES ('m1', 'web', 'a', 'b', 'noise', 'noise', 1)";
    house.execute(sql).await;
    start(&mut house).await;
    let client = house.client();
    assert!(client.migrations().await.unwrap().is_empty());
    let site = client.site().await.unwrap();
    assert!(
        site.sentences[0].contains("row 'b' of table drains"),
        "{site:?}"
    );
    client.migrate(&vm("web"), &to("b")).await.unwrap();
}

#[tokio::test]
async fn a_vm_that_the_controller_asks_its_host_about_is_not_said_to_migrate() {
    let house = House::new().await;
    let (a, _b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    // What the host does not tell of any more may be a grant that it never got: the controller asks.
    let (_free, asked) = (a.hold("survey"), a.calls("survey"));
    // A poll is two calls, and both must say the same.
    let polls = a.hold_polls().await;
    a.script().unread = [(vm("web"), SENTENCE.to_owned())].into();
    polls.send(true).unwrap();
    house
        .until(async |_: &House| a.calls("survey") > asked)
        .await;
    // The question is answered by nobody until its deadline; what is asked meanwhile waits for that.
    let refused = house.client().migrate(&vm("web"), &to("b")).await;
    has(refused.unwrap_err(), &[SENTENCE, "host a"]);
}

const SENTENCE: &str = "the record is damaged: run 'godwit vm forget-record web' on this host";

#[tokio::test]
async fn a_damaged_record_of_a_host_is_shown_and_every_refusal_has_the_hosts_own_words() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    a.script().unread = [(vm("web"), SENTENCE.to_owned())].into();
    house.until_vm("web", VmState::DamagedRecord, "a").await;
    let note = house.vm("web").await.note.unwrap();
    assert!(
        note.contains("host a says") && note.contains(SENTENCE),
        "{note}"
    );
    let site = house.client().site().await.unwrap();
    let alarm = Alarm::DamagedRecord {
        host: host("a"),
        vm: vm("web"),
    };
    assert_eq!(site.alarms, [alarm]);
    assert!(site.sentences[0].contains(SENTENCE), "{site:?}");
    let client = house.client();
    let request = StartRequest {
        on: Some(host("b")),
    };
    has(
        client.start(&vm("web"), &request).await.unwrap_err(),
        &[SENTENCE, "host a"],
    );
    has(
        client.migrate(&vm("web"), &to("b")).await.unwrap_err(),
        &[SENTENCE, "host a"],
    );
    has(client.delete_vm(&vm("web")).await.unwrap_err(), &[SENTENCE]);
    has(
        client.stop(&vm("web"), &STOP).await.unwrap_err(),
        &[SENTENCE],
    );
    let removed = client.remove_host(&host("a"), false).await;
    has(removed.unwrap_err(), &["web"]);
    assert_eq!(b.calls("put"), 0);
    // A person has it put aside: the host says no from then on.
    a.script().vms.clear();
    a.script().unread.clear();
    house.until_no_alarm().await;
    client.start(&vm("web"), &request).await.unwrap();
}
