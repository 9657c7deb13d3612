//! What a host knows of its site, and the routes that serve it.

use super::*;
use crate::api::tests::{Served, code, host_name, put};
use crate::test_support::{TestHost, vm};
use godwit_ownership::{Phase, Power};
use godwit_rpc::Role;
use godwit_types::host_api::{PutVm, Revoked};
use godwit_types::site::{BootWish, Claim, SiteVm};
use std::collections::{BTreeMap, BTreeSet};

fn stamp(epoch: u64, number: u64) -> Stamp {
    Stamp { epoch, number }
}

fn open(host: &TestHost) -> Result<Site, StoreError> {
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
        std::fs::remove_file(path).unwrap();
    }
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

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_a_controller_without_a_stamp_is_refused() {
    let served = Served::new().await;
    let unstamped = served.client(&Role::Controller);
    let refused = unstamped.put_vm(&put("web", 1)).await;
    assert_eq!(code(refused), ErrorCode::InvalidRequest);
    assert!(served.host.records().names().is_empty());
    // Reading changes nothing and needs none.
    assert_eq!(unstamped.vms().await.unwrap(), []);
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
    assert_eq!(served.host.records().names(), [vm("web")]);
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
    assert_eq!(code(old), ErrorCode::WrongState);
    let overtaken = PutVm {
        expect: Some(Generation(4)),
        ..put("web", 6)
    };
    assert_eq!(
        code(controller.put_vm(&overtaken).await),
        ErrorCode::WrongState
    );
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
    assert_eq!(
        code(controller.put_vm(&description).await),
        ErrorCode::WrongState
    );
    controller.put_vm(&put("web", 1)).await.unwrap();
    controller.put_vm(&description).await.unwrap();
    let other = PutVm {
        generation: Generation(2),
        ..description
    };
    assert_eq!(code(controller.put_vm(&other).await), ErrorCode::WrongState);
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
    // One that it cannot read says nothing, whatever the table says.
    let path = served.host.config.vms_dir().join("web/ownership");
    std::fs::write(path, "noise").unwrap();
    let answer = asking.site_ask(&question("web")).await.unwrap();
    assert!(
        answer.records.is_empty() && answer.vms.is_empty(),
        "{answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_host_is_told_so_though_its_certificate_is_revoked() {
    let served = Served::new().await;
    let (asking, serial) = served.client_and_serial(&Role::Host(host_name("c")));
    let serials = vec![serial];
    served
        .controller()
        .revoked(&Revoked { serials })
        .await
        .unwrap();
    let answer = asking.site_ask(&question("web")).await.unwrap();
    assert_eq!(answer.standing, Standing::Removed);
    assert_eq!(code(asking.vms().await), ErrorCode::NotAllowed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_survey_has_every_record_or_is_none() {
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
    let error = served.controller().site_survey().await.unwrap_err();
    assert!(error.to_string().contains("db"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_given_up_by_a_person_and_nothing_old_is_taken_after_that() {
    let served = Served::new().await;
    served.controller_at(1, 3).site(&update(3)).await.unwrap();
    served.host.hold("web", Power::On);
    let kept = served.local().forget_record(&vm("web")).await;
    assert_eq!(code(kept), ErrorCode::WrongState);
    let dir = served.host.config.vms_dir().join("web");
    std::fs::write(dir.join("ownership"), "noise").unwrap();
    let error = served.local().vm(&vm("web")).await.unwrap_err();
    assert!(
        error.to_string().contains("godwit vm forget-record web"),
        "{error}"
    );
    assert_eq!(
        code(served.controller_at(1, 3).forget_record(&vm("web")).await),
        ErrorCode::NotAllowed
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
    assert_eq!(code(old), ErrorCode::WrongState);
    served.end("web");
}
