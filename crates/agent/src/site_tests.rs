//! What a host knows of its site, and the routes that serve it.

#[path = "site_living_tests.rs"]
mod living;

use super::*;
use crate::api::tests::{Served, host_name, put, refused};
use crate::test_support::{DIE, TestHost, vm};
use godwit_ownership::{Phase, Power};
use godwit_rpc::revocations::made_before;
use godwit_rpc::{AgentClient, Role};
use godwit_types::control_api::StopRequest;
use godwit_types::host_api::{PutVm, Revoked};
use godwit_types::site::{BootWish, Claim, SiteVm};
use godwit_types::vm::VmState;
use std::collections::{BTreeMap, BTreeSet};

fn stamp(epoch: u64, number: u64) -> Stamp {
    Stamp { epoch, number }
}

fn open(host: &TestHost) -> Result<Site, SiteError> {
    let dir = &host.config.state_dir;
    Site::open(dir, host_name("a"), "boot".into(), "machine".into())
}

fn on_disk(host: &TestHost) -> SiteTable {
    let found = load_json(&host.config.state_dir.join(TABLE_FILE)).unwrap();
    found.unwrap_or_default()
}

fn update(number: u64) -> SiteUpdate {
    let row = SiteVm {
        holder: Some(host_name("b")),
        held: Generation(7),
        may_hold: BTreeSet::from([host_name("b")]),
        deleted: false,
        stamp: stamp(1, number),
    };
    SiteUpdate {
        since: Stamp::default(),
        stamp: stamp(1, number),
        upto: stamp(1, number),
        hosts: vec![],
        removed: BTreeSet::from([host_name("gone")]),
        vms: BTreeMap::from([(vm("web"), row)]),
        you: Standing::Known,
    }
}

fn question(name: &str) -> SiteQuestion {
    let wish = BootWish {
        vm: vm(name),
        generation: Generation(1),
    };
    SiteQuestion {
        instance: Instance::default(),
        knows: SiteHeard::default(),
        wishes: vec![wish],
    }
}

#[test]
fn each_start_of_the_agent_is_a_new_life_and_the_table_outlives_it() {
    let host = TestHost::new();
    let first = open(&host).unwrap();
    assert_eq!(first.with(|site| site.instance().counter), 1);
    first.accept(stamp(2, 5)).unwrap();
    let second = open(&host).unwrap();
    assert_eq!(second.with(|site| site.instance().counter), 2);
    assert_eq!(second.with(|site| site.heard().stamp), stamp(2, 5));
}

#[test]
fn a_table_that_cannot_be_read_is_named_and_never_taken_for_an_empty_one() {
    let host = TestHost::new();
    for file in [TABLE_FILE, INSTANCE_FILE] {
        let path = host.config.state_dir.join(file);
        std::fs::write(&path, "{").unwrap();
        let error = open(&host).err().unwrap().to_string();
        assert!(error.contains(file), "{error}");
        assert!(error.contains("godwit host remove"), "{error}");
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn who_only_asks_does_not_wait_for_a_write() {
    let host = TestHost::new();
    let site = open(&host).unwrap();
    site.accept(stamp(1, 2)).unwrap();
    let writing = site.turn.lock().unwrap();
    assert_eq!(site.heard().stamp, stamp(1, 2));
    assert_eq!(site.with(|site| site.instance().counter), 1);
    std::thread::scope(|scope| {
        let next = scope.spawn(|| site.accept(stamp(1, 3)));
        drop(writing);
        next.join().unwrap().unwrap();
    });
    assert_eq!(on_disk(&host).stamp, stamp(1, 3));
}

#[test]
fn a_host_that_lost_its_table_does_not_take_itself_for_one_without_neighbours() {
    let host = TestHost::new();
    drop(open(&host).unwrap());
    let alone = open(&host).unwrap();
    assert!(
        alone.with(|site| site.may_be_configured_alone()),
        "it never had a VM"
    );
    host.hold("web", Power::On);
    let lost = open(&host).unwrap();
    assert!(!lost.with(|site| site.may_be_configured_alone()));
    assert!(on_disk(&host).had_second);
}

#[test]
fn a_host_that_lost_its_table_and_its_lives_is_no_host_without_neighbours() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let lost = open(&host).unwrap();
    assert!(!lost.with(|site| site.may_be_configured_alone()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_description_is_damaged_is_shown_with_why_and_can_be_stopped() {
    let host = TestHost::new();
    host.hold("web", Power::On);
    let description = host.config.vms_dir().join("web/vm.json");
    std::fs::write(description, "noise").unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    let vms = served.local().vms().await.unwrap();
    let note = vms[0].note.clone().unwrap_or_default();
    assert!(note.contains("godwit vm start web"), "{note}");
    assert!(
        served.local().host().await.unwrap().unread[&vm("web")].contains("vm.json"),
        "it is an alarm"
    );
    let force = StopRequest { force: true };
    served.local().stop(&vm("web"), &force).await.unwrap();
}

/// A host that was granted a VM and could not write its description, as its next agent finds it.
async fn without_description() -> Served {
    let host = TestHost::new();
    let full = host.config.vms_dir().join("web/vm.json.new");
    std::fs::create_dir_all(&full).unwrap();
    host.records().put(&put("web", 1)).unwrap_err();
    std::fs::remove_dir(full).unwrap();
    let served = Served::of_host(host).await;
    served.agent.take_up().unwrap();
    served
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_description_was_not_written_is_shown_and_can_be_started() {
    let served = without_description().await;
    let vms = served.controller().vms().await.unwrap();
    assert_eq!(vms.len(), 1, "who holds it says so");
    let (generation, on) = (Generation(1), false);
    assert_eq!(vms[0].claim, Claim::Holds { generation, on });
    assert_eq!(vms[0].state, VmState::Stopped);
    let note = vms[0].note.clone().unwrap_or_default();
    assert!(note.contains("godwit vm start web"), "{note}");
    let web = vm("web");
    let force = StopRequest { force: true };
    served.controller().stop(&web, &force).await.unwrap();
    let again = PutVm {
        expect: None,
        ..put("web", 1)
    };
    served.controller().put_vm(&again).await.unwrap();
    served.controller().start(&web).await.unwrap();
    let vms = served.controller().vms().await.unwrap();
    assert_eq!(vms[0].state, VmState::Running);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grant_whose_description_was_not_written_can_be_deleted() {
    for has_process in [false, true] {
        let served = without_description().await;
        let web = vm("web");
        if has_process {
            let force = StopRequest { force: true };
            served.controller().stop(&web, &force).await.unwrap();
        }
        served.controller().delete_vm(&web).await.unwrap();
        assert_eq!(served.controller().vms().await.unwrap(), []);
        let record = served.host.records().record(&web).unwrap();
        assert_eq!(record.phase, Phase::Absent);
    }
}

#[test]
fn a_table_that_would_be_too_long_is_refused_and_commands_go_on() {
    let host = TestHost::new();
    let site = open(&host).unwrap();
    let row = update(1).vms[&vm("web")].clone();
    let rows = |from: u32| {
        let names = (from..from + 4000).map(|number| vm(&format!("vm-of-a-large-site-{number}")));
        names.map(|name| (name, row.clone())).collect()
    };
    let mut number = 0;
    let refused = loop {
        number += 1;
        let vms = rows(number * 4000);
        let since = site.heard().complete;
        match site.update(SiteUpdate {
            since,
            vms,
            ..update(u64::from(number))
        }) {
            Ok(_) => assert!(number < 50, "there is no bound"),
            Err(refused) => break refused,
        }
    };
    assert!(refused.message.contains("site.json is kept"), "{refused}");
    let known = on_disk(&host);
    assert_eq!(known.complete, stamp(1, u64::from(number) - 1));
    site.accept(stamp(1, 99)).unwrap();
    site.granted(&vm("web"), Generation(9)).unwrap();
    let again = open(&host).unwrap();
    assert_eq!(again.heard().stamp, stamp(1, 99));
    assert_eq!(again.whole().1.vms[&vm("web")].held, Generation(9));
}

#[test]
fn a_stamp_that_could_not_be_written_is_written_with_the_next_command() {
    let host = TestHost::new();
    let site = open(&host).unwrap();
    let path = host.config.state_dir.join(TABLE_FILE);
    std::fs::create_dir(&path).unwrap();
    site.accept(stamp(1, 4)).unwrap_err();
    site.accept(stamp(1, 4)).unwrap_err();
    std::fs::remove_dir(&path).unwrap();
    site.accept(stamp(1, 4)).unwrap();
    assert_eq!(on_disk(&host).stamp, stamp(1, 4));
}

#[test]
fn a_word_whose_write_failed_is_not_told_as_one_that_is_known() {
    let host = TestHost::new();
    let site = open(&host).unwrap();
    site.accept(stamp(1, 2)).unwrap();
    let path = host.config.state_dir.join(TABLE_FILE);
    std::fs::rename(&path, host.config.state_dir.join("kept")).unwrap();
    std::fs::create_dir(&path).unwrap();
    site.update(update(7)).unwrap_err();
    assert_eq!(site.heard().stamp, stamp(1, 2), "a crash would forget 1.7");
    assert_eq!(site.heard().complete, Stamp::default());
    assert_eq!(site.whole().1.stamp, stamp(1, 2));
    assert_eq!(site.whole().1.complete, Stamp::default());
    std::fs::remove_dir(&path).unwrap();
    assert_eq!(site.update(update(7)).unwrap().complete, stamp(1, 7));
    assert_eq!(site.heard().stamp, stamp(1, 7));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_a_controller_without_a_stamp_is_refused() {
    let served = Served::new().await;
    let unstamped = served.client(&Role::Controller);
    let refused = unstamped.put_vm(&put("web", 1)).await;
    refused!(refused, InvalidRequest);
    assert!(served.host.records().names().unwrap().is_empty());
    // Reading changes nothing and needs none.
    assert_eq!(unstamped.vms().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_carried_out_where_no_stamp_can_be_written_and_nothing_else_is() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    served.agent.take_up().unwrap();
    served.controller_at(1, 1).site(&update(1)).await.unwrap();
    let fresh = served.host.config.state_dir.join("site.json.new");
    std::fs::create_dir(&fresh).unwrap();
    let full = served.controller_at(1, 9);
    let web = vm("web");
    refused!(full.delete_vm(&web).await, Internal);
    let force = StopRequest { force: true };
    full.stop(&web, &force).await.unwrap();
    assert_eq!(on_disk(&served.host).stamp, stamp(1, 1), "nor is it told");
    assert_eq!(served.agent.site.heard().stamp, stamp(1, 1));
    // One of before is refused all the same.
    let old = served.controller_at(1, 0).stop(&web, &force).await;
    refused!(old, StaleController);
    std::fs::remove_dir(fresh).unwrap();
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_controller_is_refused_and_a_new_word_is_durable_before_its_command_is_done() {
    let served = Served::new().await;
    served
        .controller_at(2, 9)
        .put_vm(&put("web", 1))
        .await
        .unwrap();
    assert_eq!(on_disk(&served.host).stamp, stamp(2, 9));
    let old = served.controller_at(2, 8);
    let error = old.put_vm(&put("db", 1)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::StaleController);
    assert!(error.to_string().contains("2.9"), "{error}");
    assert_eq!(served.host.records().names().unwrap(), [vm("web")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_survey_of_an_unknown_vm_binds_and_a_grant_must_follow_the_newest() {
    let served = Served::new().await;
    let controller = served.controller();
    let level = Generation(5);
    let answer = controller
        .survey(&vm("web"), &SurveyRequest { level })
        .await;
    let answer = answer.unwrap();
    assert_eq!((answer.highest, answer.claim), (level, Claim::No));
    assert_eq!(
        served.host.records().record(&vm("web")).unwrap().highest,
        level
    );
    // A grant of before the survey.
    let old = controller.put_vm(&put("web", 5)).await;
    refused!(old, WrongState);
    let overtaken = PutVm {
        expect: Some(Generation(4)),
        ..put("web", 6)
    };
    refused!(controller.put_vm(&overtaken).await, WrongState);
    controller.put_vm(&put("web", 6)).await.unwrap();
    let row = on_disk(&served.host).vms[&vm("web")].clone();
    assert_eq!(
        (row.held, row.holder),
        (Generation(6), Some(host_name("a")))
    );
    let survey = SurveyRequest {
        level: Generation(9),
    };
    let answer = controller.survey(&vm("web"), &survey).await.unwrap();
    let (generation, on) = (Generation(6), false);
    assert_eq!(answer.claim, Claim::Holds { generation, on });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_description_alone_is_for_the_holder_only() {
    let served = Served::new().await;
    let controller = served.controller();
    let description = PutVm {
        expect: None,
        ..put("web", 1)
    };
    refused!(controller.put_vm(&description).await, WrongState);
    controller.put_vm(&put("web", 1)).await.unwrap();
    controller.put_vm(&description).await.unwrap();
    let other = PutVm {
        generation: Generation(2),
        ..description
    };
    refused!(controller.put_vm(&other).await, WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_is_durable_before_it_is_said_to_be_heard() {
    let served = Served::new().await;
    let heard = served.controller_at(1, 3).site(&update(3)).await.unwrap();
    assert_eq!((heard.stamp, heard.complete), (stamp(1, 3), stamp(1, 3)));
    assert_eq!(on_disk(&served.host).complete, stamp(1, 3));
    let info = served.local().host().await.unwrap();
    assert_eq!((info.site, info.instance.counter), (heard, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_is_answered_from_the_table_and_the_records() {
    let served = Served::new().await;
    served.controller_at(1, 3).site(&update(3)).await.unwrap();
    served.host.hold("web", Power::On);
    served.host.hold("db", Power::On);
    let asking = served.client(&Role::Host(host_name("c")));
    let answer = asking.site_ask(&question("web")).await.unwrap();
    assert_eq!(answer.from, Some(host_name("a")));
    assert_eq!(
        (answer.standing, answer.in_charge),
        (Standing::Known, false)
    );
    assert_eq!(answer.vms[&vm("web")].held, Generation(7));
    let [record] = &answer.records[..] else {
        panic!("just what was asked for: {:?}", answer.records);
    };
    assert_eq!(record.claim.held(), Some(Generation(1)));
    // Of one that it cannot read it says so.
    let path = served.host.config.vms_dir().join("web/ownership");
    std::fs::write(path, "noise").unwrap();
    let answer = asking.site_ask(&question("web")).await.unwrap();
    assert!(
        answer.records.is_empty() && !answer.knows(&vm("web")),
        "{answer:?}"
    );
}

/// A host that asks, and what it hears, once its certificate is wanted no more: nothing of any VM, which is not the same as
/// that there is none. `named` makes the text in the list of the serial number of its life.
async fn asks_unwanted(
    served: &Served,
    named: impl FnOnce(String) -> String,
) -> (AgentClient, SiteAnswer) {
    let (asking, serial) = served.client_and_serial(&Role::Host(host_name("c")));
    let serials = vec![named(serial)];
    served
        .controller()
        .revoked(&Revoked { serials })
        .await
        .unwrap();
    let answer = asking.site_ask(&question("web")).await.unwrap();
    assert!(answer.vms.is_empty() && answer.records.is_empty());
    assert!(!answer.knows(&vm("web")));
    (asking, answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_host_is_told_so_though_its_certificate_is_revoked() {
    let served = Served::new().await;
    let (asking, answer) = asks_unwanted(&served, |serial| serial).await;
    assert_eq!(answer.standing, Standing::Removed);
    refused!(asking.vms().await, NotAllowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_whose_certificate_was_replaced_is_told_that_it_is_an_old_copy() {
    let served = Served::new().await;
    // Of its life, which goes on with a later one.
    let replaced = |serial: String| made_before(&serial, i64::MAX);
    let (_asking, answer) = asks_unwanted(&served, replaced).await;
    assert_eq!(
        (answer.standing, answer.replaced),
        (Standing::OldCopy, true)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_survey_has_every_record_and_names_those_that_cannot_be_read() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    let moved = Phase::Moved {
        generation: Generation(3),
        migration: godwit_types::MigrationId::new("m1").unwrap(),
        to: host_name("b"),
    };
    served.host.record("db", Generation(1), moved);
    let whole = served.controller().site_survey().await.unwrap();
    let said: Vec<&str> = whole.records.iter().map(|said| said.vm.as_str()).collect();
    assert_eq!(BTreeSet::from_iter(said), BTreeSet::from(["db", "web"]));
    assert_eq!(whole.instance.machine_id, "machine");
    std::fs::write(served.host.config.vms_dir().join("db/ownership"), "noise").unwrap();
    let whole = served.controller().site_survey().await.unwrap();
    let said: Vec<&str> = whole.records.iter().map(|said| said.vm.as_str()).collect();
    assert_eq!(said, ["web"]);
    assert_eq!(whole.unread, BTreeSet::from([vm("db")]));
    let told = served.controller().host().await.unwrap().unread;
    assert!(
        told[&vm("db")].contains("godwit vm forget-record db"),
        "{told:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_description_that_is_another_vm_s_is_not_taken_for_that_one() {
    let served = Served::new().await;
    served.controller().put_vm(&put("web", 1)).await.unwrap();
    served.controller().put_vm(&put("db", 1)).await.unwrap();
    let of = |name: &str| served.host.config.vms_dir().join(name).join("vm.json");
    std::fs::copy(of("web"), of("db")).unwrap();
    let why = served.host.records().spec(&vm("db")).unwrap_err().message;
    assert!(why.contains("is the description of VM 'web'"), "{why}");
    let told = served.controller().host().await.unwrap().unread;
    assert!(told[&vm("db")].contains("of VM 'web'"), "{told:?}");
    let shown = served.controller().vms().await.unwrap();
    let of_web = shown.iter().filter(|shown| shown.spec.name == vm("web"));
    assert_eq!(of_web.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_given_up_by_a_person_and_nothing_old_is_taken_after_that() {
    let served = Served::new().await;
    served.controller_at(1, 3).site(&update(3)).await.unwrap();
    // A VM process that read its record before it was damaged would know better.
    std::fs::write(served.host.run_dir("web").join(DIE), "none").unwrap();
    served.host.hold("web", Power::On);
    let kept = served.local().forget_record(&vm("web")).await;
    refused!(kept, WrongState);
    let unknown = served.local().forget_record(&vm("webb")).await;
    refused!(unknown, UnknownVm);
    let dir = served.host.config.vms_dir().join("web");
    std::fs::write(dir.join("ownership"), "noise").unwrap();
    let error = served.local().vm(&vm("web")).await.unwrap_err();
    assert!(
        error.to_string().contains("godwit vm forget-record web"),
        "{error}"
    );
    refused!(
        served.controller_at(1, 3).forget_record(&vm("web")).await,
        NotAllowed
    );
    served.local().forget_record(&vm("web")).await.unwrap();
    assert_eq!(
        std::fs::read(dir.join("ownership.damaged-1")).unwrap(),
        b"noise"
    );
    let record = served.host.records().record(&vm("web")).unwrap();
    assert_eq!(record.phase, Phase::Absent);
    assert_eq!(record.highest, Generation(7 + (1 << 20)));
    let old = served.controller_at(1, 3).put_vm(&put("web", 8)).await;
    refused!(old, WrongState);
    served.end("web");
}
