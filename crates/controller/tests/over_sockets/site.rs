//! One VM, exactly once, over real sockets: silent hosts, two holders, removed hosts, writes that fail.

mod moves;

use crate::scripted::{
    Agent, DEADLINE, DRAIN, House, STOP, give, hand_over, host, refused, spec, to, vm,
};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::pki::Request;
use godwit_rpc::{Client, ControllerClient, Role};
use godwit_types::control_api::{
    HostState, KeepRequest, ResolveRequest, StartRequest, StopRequest,
};
use godwit_types::drain::{DrainRequest, DrainState};
use godwit_types::site::{Alarm, BootWish, Claim, Instance, SiteHeard, SiteQuestion, Standing};
use godwit_types::vm::VmState;
use godwit_types::{ApiError, ErrorCode, Generation, MigrationId};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, query, query_scalar};

/// How far a grant goes beyond a host that was fenced unheard.
const GAP: u64 = 1 << 20;

/// Hosts a and b, VM web running on a.
async fn house() -> (House, Agent, Agent) {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    (house, a, b)
}

fn on(name: &str) -> StartRequest {
    StartRequest {
        on: Some(host(name)),
    }
}

async fn begin(house: &House) -> MigrationId {
    match house.client().migrate(&vm("web"), &to("b")).await.unwrap() {
        MigrateAnswer::Begun(begun) => MigrationId::new(begun.id).unwrap(),
        MigrateAnswer::Checked(report) => panic!("only checked: {report:?}"),
    }
}

/// VM web is moved to b, whose agent falls silent before it has said so.
async fn moved_to_silent_b() -> (House, Agent, Agent) {
    let (house, a, mut b) = house().await;
    let id = begin(&house).await;
    b.cut().await;
    give(&a, &b, "web", &id);
    house.until_not_moving("web").await;
    (house, a, b)
}

/// Host a says that it gave VM web to b in a migration, and nobody has said yet that it arrived.
async fn given_to_b(house: &House, a: &Agent) -> Generation {
    let id = begin(house).await;
    let generation = a.script().specs[&id].generation;
    says_it_gave(house, a, generation).await;
    generation
}

/// Host a says that it gave VM web to b under this generation.
async fn says_it_gave(house: &House, a: &Agent, generation: Generation) {
    let gave = Claim::Gave {
        generation,
        to: host("b"),
    };
    a.records("web", VmState::InDoubt, generation, gave);
    house.until_vm("web", VmState::InDoubt, "a").await;
}

/// Host b comes to hold VM web as well, under a later generation than host a; its copy is paused.
async fn held_twice(house: &House, a: &Agent, b: &Agent) {
    b.has("web", VmState::Running, a.generation("web").0 + 5, true);
    house.until_vm("web", VmState::RunningTwice, "a").await;
    b.until_called("paused web").await;
}

/// A person has VM web run on a, and says that b is off.
fn run_on_a() -> ResolveRequest {
    ResolveRequest {
        run_on: host("a"),
        give_up: false,
        confirm_fenced: Some(host("b")),
    }
}

fn must_name(error: &ApiError, name: &str) {
    let text = &error.message;
    assert_eq!(error.code, ErrorCode::HostUnreachable, "{text}");
    assert!(text.contains(&format!("host {name}")), "{text}");
    assert!(
        text.contains(&format!("godwit host fenced {name}")),
        "{text}"
    );
}

/// What the database has of a VM's right to run.
async fn on_record(house: &House) -> serde_json::Value {
    let options = SqliteConnectOptions::new().filename(house.database());
    let mut database = options.connect().await.unwrap();
    let text: String = query_scalar("SELECT entry FROM site_vms WHERE vm = 'web'")
        .fetch_one(&mut database)
        .await
        .unwrap();
    serde_json::from_str(&text).unwrap()
}

async fn execute(house: &House, sql: &'static str) {
    let options = SqliteConnectOptions::new().filename(house.database());
    let mut database = options.connect().await.unwrap();
    query(sql).execute(&mut database).await.unwrap();
}

#[tokio::test]
async fn a_vm_that_moved_to_a_host_that_is_silent_is_unreachable_until_that_is_fenced() {
    let (house, a, mut b) = moved_to_silent_b().await;
    let client = house.client();
    let view = house.vm("web").await;
    assert_eq!(
        (view.state, view.host),
        (VmState::Unreachable, Some(host("b")))
    );
    let refusals = [
        client.start(&vm("web"), &on("a")).await.map(drop),
        client.delete_vm(&vm("web")).await.map(drop),
        client.edit_vm(&spec("web")).await.map(drop),
        client.remove_host(&host("b"), false).await.map(drop),
    ];
    for refused in refusals {
        must_name(&ApiError::from(refused.unwrap_err()), "b");
    }
    let before = a.generation("web");
    client.fenced(&host("b")).await.unwrap();
    assert!(client.host(&host("b")).await.unwrap().fenced);
    client.start(&vm("web"), &on("a")).await.unwrap();
    assert_eq!(house.vm("web").await.state, VmState::Running);
    let after = a.generation("web");
    assert!(after >= Generation(before.0 + GAP), "{after} {before}");
    b.heal().await;
    house.until_host("b", HostState::Connected).await;
    assert!(!client.host(&host("b")).await.unwrap().fenced);
}

#[tokio::test]
async fn a_completed_moves_destination_is_on_record_though_it_never_answers_again() {
    let (mut house, _a, _b) = moved_to_silent_b().await;
    assert_eq!(on_record(&house).await["holder"], "b");
    house.stop().await;
    house.start().await;
    house.until_host("a", HostState::Connected).await;
    let view = house.vm("web").await;
    assert_eq!(
        (view.state, view.host),
        (VmState::Unreachable, Some(host("b")))
    );
    let error = house.client().start(&vm("web"), &on("a")).await;
    must_name(&ApiError::from(error.unwrap_err()), "b");
}

#[tokio::test]
async fn of_two_holders_the_one_that_was_never_granted_is_paused_until_a_person_decides() {
    let (house, a, b) = house().await;
    let client = house.client();
    house.running("aaa", "a").await;
    let granted = a.generation("web").0;
    b.has("web", VmState::Running, granted + 5, true);
    house.until_vm("web", VmState::RunningTwice, "a").await;
    b.until_called("paused web").await;
    let first = client.vms().await.unwrap().remove(0);
    assert_eq!(first.spec.name, vm("web"));
    assert_eq!(first.copies, [host("a"), host("b")]);
    let note = first.note.unwrap();
    assert!(note.contains("godwit vm resolve web --keep HOST"), "{note}");
    for copy in ["a (running, known to be on for ", "b ("] {
        assert!(note.contains(copy), "{note}");
    }
    let site = client.site().await.unwrap();
    let twice = Alarm::RunningTwice {
        vm: vm("web"),
        hosts: vec![host("a"), host("b")],
    };
    assert_eq!(site.alarms, [twice]);
    assert_eq!((b.calls("stopped web"), b.calls("delete web")), (0, 0));
    assert_eq!(a.calls("paused web"), 0);
    let said = site.sentences.join(" ");
    assert!(said.contains("godwit vm console web --host HOST"), "{said}");
    let other = format!("generation {}, which that host was never", granted + 5);
    assert!(said.contains(&format!("generation {granted})")), "{said}");
    assert!(said.contains(&other), "{said}");
    for copy in ["a", "b"] {
        // A person looks at both before deciding.
        client.console_at(&vm("web"), &host(copy)).await.unwrap();
    }
    let start = client.start(&vm("web"), &on("a")).await;
    refused!(start, RunningTwice);
    // A host that has only the paused copy is not empty.
    let drain = DrainRequest::default();
    client.drain(&host("b"), &drain).await.unwrap();
    house
        .until(async |house: &House| {
            let view = house.client().drain_view(&host("b")).await.unwrap();
            view.staying().any(|stays| stays.vm == vm("web"))
        })
        .await;
    client.undrain(&host("b")).await.unwrap();
    let stranger = KeepRequest { host: host("c") };
    let refused = client.keep(&vm("web"), &stranger).await;
    refused!(refused, WrongState);
    client
        .keep(&vm("web"), &KeepRequest { host: host("a") })
        .await
        .unwrap();
    assert!(b.script().vms.is_empty());
    house.until_vm("web", VmState::Running, "a").await;
    assert!(client.site().await.unwrap().alarms.is_empty());
    assert_eq!(a.calls("stopped web"), 0);
}

#[tokio::test]
async fn a_paused_copy_that_a_person_keeps_runs_on() {
    let (house, a, b) = house().await;
    held_twice(&house, &a, &b).await;
    house
        .client()
        .keep(&vm("web"), &KeepRequest { host: host("b") })
        .await
        .unwrap();
    assert!(a.script().vms.is_empty());
    house.until_vm("web", VmState::Running, "b").await;
}

#[tokio::test]
async fn a_host_that_was_emptied_and_is_switched_off_blocks_nobody() {
    let (house, a, mut b) = house().await;
    let client = house.client();
    // One that runs on b and one that is off there.
    house.running("goes", "b").await;
    house.running("off", "b").await;
    client.stop(&vm("off"), &STOP).await.unwrap();
    client.drain(&host("b"), &DRAIN).await.unwrap();
    house
        .until(async |house: &House| {
            let ids: Vec<MigrationId> = b.script().specs.keys().cloned().collect();
            for id in ids {
                if a.script().reports.contains_key(&id) && b.script().reports[&id].outcome.is_none()
                {
                    hand_over(&b, &a, "goes", &id);
                }
            }
            let view = house.client().drain_view(&host("b")).await.unwrap();
            view.state == DrainState::Done
        })
        .await;
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    assert_eq!(house.vm("off").await.state, VmState::Stopped);
    client.start(&vm("off"), &on("a")).await.unwrap();
    client.stop(&vm("goes"), &STOP).await.unwrap();
    client.delete_vm(&vm("goes")).await.unwrap();
}

#[tokio::test]
async fn a_name_that_was_never_heard_is_not_replaced_in_silence() {
    let house = House::new().await;
    let key = Request::new().unwrap();
    let (first, second) = (
        "192.0.2.7:1".parse().unwrap(),
        "192.0.2.8:1".parse().unwrap(),
    );
    house.join("x", first, &key).await.unwrap();
    let error = ApiError::from(house.join("x", second, &key).await.unwrap_err());
    assert_eq!(error.code, ErrorCode::AlreadyExists);
    assert!(
        error.message.contains("192.0.2.7:1") && error.message.contains("192.0.2.8:1"),
        "{error}"
    );
}

#[tokio::test]
async fn a_name_that_a_record_waits_for_does_not_join_anew() {
    let (house, a, mut b) = house().await;
    let client = house.client();
    let next = Generation(a.generation("web").0 + 1);
    says_it_gave(&house, &a, next).await;
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    client.remove_host(&host("b"), true).await.unwrap();
    let key = Request::new().unwrap();
    let error = house.join("b", b.address, &key).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::WrongState);
    assert!(error.to_string().contains("VM web"), "{error}");
}

#[tokio::test]
async fn a_host_that_answers_and_cannot_write_its_no_is_not_called_silent() {
    let (house, _a, b) = house().await;
    house.running("other", "b").await;
    let client = house.client();
    let stopped = client.stop(&vm("other"), &STOP).await;
    stopped.unwrap();
    let full = ApiError::new(ErrorCode::Internal, "no space left to write site.json");
    b.script().refuse_survey = Some(full);
    let refused = client.start(&vm("other"), &on("a")).await;
    let error = ApiError::from(refused.unwrap_err());
    assert_eq!(error.host.as_deref(), Some("b"));
    let text = &error.message;
    assert!(text.starts_with("host b answers, but cannot say"), "{text}");
    assert!(text.contains("no space left"), "{text}");
}

#[tokio::test]
async fn a_name_that_a_silent_host_may_wait_for_does_not_join_anew() {
    let (house, mut a, mut b) = house().await;
    begin(&house).await;
    // Whether a gave the VM away is not known: it has not been heard since.
    a.cut().await;
    b.cut().await;
    for name in ["a", "b"] {
        house.until_host(name, HostState::Unreachable).await;
    }
    house.client().fenced(&host("b")).await.unwrap();
    house
        .until(async |house: &House| house.client().remove_host(&host("b"), true).await.is_ok())
        .await;
    let key = Request::new().unwrap();
    let error = house.join("b", b.address, &key).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::HostUnreachable);
    let text = error.to_string();
    assert!(
        text.contains("VM web") && text.contains("host fenced a"),
        "{text}"
    );
}

#[tokio::test]
async fn the_no_of_a_clone_is_not_taken_for_the_hosts_own() {
    let (house, a, b) = house().await;
    given_to_b(&house, &a).await;
    // Another machine answers with the certificate of b.
    b.lives(2, "clone");
    b.script().vms.clear();
    b.until_heard().await;
    let run_on_a = run_on_a();
    let refused = house.client().resolve(&vm("web"), &run_on_a).await;
    let error = ApiError::from(refused.unwrap_err());
    assert!(error.message.contains("same certificate"), "{error}");
    assert_eq!(a.calls("resolve web"), 0);
}

fn asking(house: &House, agent: &Agent) -> ControllerClient {
    ControllerClient::new(Client::tls(house.address(), &agent.identity, Role::Controller).unwrap())
}

fn question(knows: SiteHeard, instance: Instance) -> SiteQuestion {
    SiteQuestion {
        instance,
        knows,
        wishes: vec![BootWish {
            vm: vm("web"),
            generation: Generation(1),
        }],
    }
}

#[tokio::test]
async fn a_host_that_asks_before_it_boots_is_told_who_it_is() {
    let (house, mut a, mut b) = house().await;
    let asker = asking(&house, &a);
    let knows = a.knows();
    let ask = async |instance| asker.site_ask(&question(knows, instance)).await.unwrap();
    let mine = a.instance();
    let known = ask(mine.clone()).await;
    assert_eq!((known.standing, known.in_charge), (Standing::Known, true));
    assert_eq!(known.vms[&vm("web")].holder, Some(host("a")));
    assert_eq!(known.vms[&vm("web")].held, a.generation("web"));
    // The life that was known answers, and another one asks.
    let next = Instance {
        counter: mine.counter + 1,
        ..mine.clone()
    };
    let second = ask(next.clone()).await;
    assert_eq!(second.standing, Standing::SecondInstance);
    let clone = Instance {
        machine_id: "clone".into(),
        ..next.clone()
    };
    assert_eq!(ask(clone).await.standing, Standing::SecondInstance);
    // It has ended, so this is the host itself, begun anew; what was before is an old copy then.
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    assert_eq!(ask(next).await.standing, Standing::Known);
    assert_eq!(ask(mine).await.standing, Standing::OldCopy);
    let removed = asking(&house, &b);
    let instance = b.instance();
    house.client().remove_host(&host("b"), false).await.unwrap();
    let answer = removed
        .site_ask(&question(b.knows(), instance))
        .await
        .unwrap();
    assert_eq!(answer.standing, Standing::Removed);
    // It is told nothing else, of no VM, and nothing that it says is believed.
    assert!(answer.vms.is_empty() && answer.off.is_empty() && !answer.knows(&vm("web")));
    let mut later = b.knows();
    later.stamp.epoch += 1;
    let instance = b.instance();
    removed.site_ask(&question(later, instance)).await.unwrap();
    let site = house.client().site().await.unwrap();
    assert!(site.in_charge, "{site:?}");
    b.cut().await;
}

#[tokio::test]
async fn a_person_who_resolves_while_the_other_host_answers_has_that_asked_instead() {
    let (house, a, b) = house().await;
    let next = given_to_b(&house, &a).await;
    let run_on_a = run_on_a();
    // It says that it may hold the VM and cannot give it up: nobody takes a person's word for the contrary.
    let receiving = Claim::Receiving { from: host("a") };
    b.records("web", VmState::Incoming, next, receiving);
    let refused = house.client().resolve(&vm("web"), &run_on_a).await;
    let error = ApiError::from(refused.unwrap_err());
    assert_eq!(error.code, ErrorCode::WrongState, "{error}");
    assert_eq!(a.calls("resolve web"), 0);
    // It has only promised: it gives that up, durably, then the other may run the VM.
    let promised = Claim::Promised {
        generation: next,
        from: host("a"),
    };
    b.records("web", VmState::InDoubt, next, promised);
    house.client().resolve(&vm("web"), &run_on_a).await.unwrap();
    assert_eq!(
        (
            b.calls("resolve web gives up b"),
            a.calls("resolve web on a")
        ),
        (1, 1)
    );
    assert!(!house.client().host(&host("b")).await.unwrap().fenced);
}

#[tokio::test]
async fn a_host_that_cannot_read_its_record_has_not_said_no_to_a_person_who_resolves() {
    let (house, a, b) = house().await;
    given_to_b(&house, &a).await;
    // A list leaves out what its host cannot read.
    b.script().vms.clear();
    let unread = ApiError::new(ErrorCode::Internal, "the record is damaged");
    b.script().refuse_survey = Some(unread);
    let run_on_a = run_on_a();
    let refused = house.client().resolve(&vm("web"), &run_on_a).await;
    assert_eq!(refused.unwrap_err().code(), ErrorCode::WrongState);
    assert_eq!(a.calls("resolve web"), 0);
}

#[tokio::test]
async fn a_grant_that_cannot_be_written_is_not_given() {
    let house = House::new().await;
    let a = house.host("a").await;
    let client = house.client();
    client.create_vm(&spec("web")).await.unwrap();
    let full = "CREATE TRIGGER full BEFORE UPDATE ON site_vms WHEN json_extract(NEW.entry, '$.granted[0]') IS NOT NULL BEGIN SELECT RAISE(ABORT, 'the disk is full'); END";
    execute(&house, full).await;
    let refused = client.start(&vm("web"), &on("a")).await;
    refused!(refused, Internal);
    assert_eq!((a.calls("survey web"), a.calls("put web")), (1, 0));
    assert!(a.script().vms.is_empty());
    execute(&house, "DROP TRIGGER full").await;
    client.start(&vm("web"), &on("a")).await.unwrap();
    assert_eq!(house.vm("web").await.state, VmState::Running);
    tokio::time::timeout(DEADLINE, a.until_called("put web"))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_restarted_controller_counts_a_hosts_silence_from_its_own_start() {
    let (mut house, mut a, _b) = house().await;
    house.stop().await;
    a.cut().await;
    // As if the row had last been written when the host joined, long ago.
    execute(&house, "UPDATE hosts SET last_seen_unix_s = 1000").await;
    house.start().await;
    let client = house.client();
    house
        .until(async |house: &House| house.vm("web").await.state == VmState::Unreachable)
        .await;
    let since_1970 = 1_000_000_000;
    let heard = house.vm("web").await.heard_s;
    assert!(heard.is_some_and(|s| s < since_1970), "{heard:?}");
    let seen = client.host(&host("a")).await.unwrap().last_seen_s;
    assert!(seen < since_1970, "{seen}");
}

#[tokio::test]
async fn every_refusal_for_a_silent_host_names_it_and_the_command() {
    let (house, mut a, _b) = house().await;
    let client = house.client();
    a.cut().await;
    house
        .until(async |house: &House| house.vm("web").await.state == VmState::Unreachable)
        .await;
    let force = StopRequest { force: true };
    let refused = |error: godwit_rpc::ClientError| must_name(&ApiError::from(error), "a");
    refused(client.stop(&vm("web"), &force).await.unwrap_err());
    let stopped = client.stop_at(&vm("web"), &host("a"), &force).await;
    refused(stopped.unwrap_err());
    refused(client.reset(&vm("web")).await.unwrap_err());
    refused(client.console(&vm("web")).await.unwrap_err());
    refused(client.check_host(&host("a")).await.unwrap_err());
    refused(client.migrate(&vm("web"), &to("b")).await.unwrap_err());
    let drain = DrainRequest::default();
    refused(client.drain(&host("a"), &drain).await.unwrap_err());
}

#[tokio::test]
async fn a_crashed_vm_can_be_turned_off() {
    let (house, a, _b) = house().await;
    a.turns("web", VmState::Crashed);
    house.until_vm("web", VmState::Crashed, "a").await;
    let client = house.client();
    let reset = client.reset(&vm("web")).await;
    refused!(reset, WrongState);
    for force in [false, true] {
        let stopped = a.calls("stopped web");
        client
            .stop(&vm("web"), &StopRequest { force })
            .await
            .unwrap();
        assert_eq!(a.calls("stopped web"), stopped + 1, "its host was not told");
        a.turns("web", VmState::Crashed);
        house.until_vm("web", VmState::Crashed, "a").await;
    }
}

#[tokio::test]
async fn an_alarm_that_nothing_else_ends_is_acknowledged_for_good() {
    let (mut house, mut a, _b) = house().await;
    let client = house.client();
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    client.fenced(&host("a")).await.unwrap();
    a.heal().await;
    let alarm = Alarm::FencedHostAnswered { host: host("a") };
    house.until_alarm(&alarm).await;
    // As if this controller had taken over a moment ago.
    let now = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_secs();
    let path = house.config.state_dir.join("takeover.json");
    std::fs::write(&path, format!("{{\"epoch\":0,\"unix_s\":{now}}}")).unwrap();
    let site = client.site().await.unwrap();
    let told = site.sentences.join(" ");
    assert_eq!(told.matches("godwit site acknowledge").count(), 2, "{told}");
    let done = client.acknowledge().await.unwrap().message;
    assert!(
        done.contains("host a") && done.contains("takeover"),
        "{done}"
    );
    for _ in 0..2 {
        let site = house.client().site().await.unwrap();
        assert_eq!(
            (site.alarms.len(), site.sentences.len()),
            (0, 0),
            "{site:?}"
        );
        house.stop().await;
        house.start().await;
        house.until_host("a", HostState::Connected).await;
    }
    let done = house.client().acknowledge().await.unwrap().message;
    assert!(done.contains("nothing to acknowledge"), "{done}");
}
