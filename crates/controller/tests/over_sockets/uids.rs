//! The user id of each VM's QEMU: one for each VM, the same on every host, never another VM's.

use crate::restored::put_back;
use crate::scripted::{House, STOP, host, refused, spec, to, vm};
use godwit_types::control_api::StartRequest;
use godwit_types::vm::{UIDS, VmState};

async fn uid(house: &House, name: &str) -> u32 {
    house.vm(name).await.spec.uid.expect("it has one")
}

#[tokio::test]
async fn every_vm_gets_a_user_id_that_no_other_vm_ever_gets() {
    let mut house = House::new().await;
    let client = house.client();
    client.create_vm(&spec("web")).await.unwrap();
    client.create_vm(&spec("db")).await.unwrap();
    let (web, db) = (uid(&house, "web").await, uid(&house, "db").await);
    assert_ne!(web, db);
    assert!(UIDS.contains(&web) && UIDS.contains(&db));
    client.delete_vm(&vm("db")).await.unwrap();
    house.stop().await;
    house.start().await;
    assert_eq!(uid(&house, "web").await, web);
    let client = house.client();
    client.create_vm(&spec("db")).await.unwrap();
    let again = uid(&house, "db").await;
    assert!(again != web && again != db, "{again}");
}

/// VM web runs on host a and is deleted. Gives the user id that it had.
async fn ran_and_deleted(house: &House) -> u32 {
    house.running("web", "a").await;
    let had = uid(house, "web").await;
    house.client().stop(&vm("web"), &STOP).await.unwrap();
    house.until_vm("web", VmState::Stopped, "a").await;
    house.client().delete_vm(&vm("web")).await.unwrap();
    had
}

/// Its former images, which only the former id may open, were no longer its own.
#[tokio::test]
async fn a_vm_that_ran_and_is_described_anew_has_its_user_id_again_over_a_restart() {
    let mut house = House::new().await;
    let _a = house.host("a").await;
    let first = ran_and_deleted(&house).await;
    house.stop().await;
    house.start().await;
    let client = house.client();
    client.create_vm(&spec("db")).await.unwrap();
    client.create_vm(&spec("web")).await.unwrap();
    assert_ne!(uid(&house, "db").await, first);
    assert_eq!(uid(&house, "web").await, first);
}

/// Only one of two VMs may open its images.
#[tokio::test]
async fn a_former_user_id_that_another_vm_has_by_now_is_not_given_again() {
    let mut house = House::new().await;
    let a = house.host("a").await;
    let first = ran_and_deleted(&house).await;
    house.client().create_vm(&spec("db")).await.unwrap();
    house.stop().await;
    // As once all ids were given out.
    let sql = format!("UPDATE vms SET spec = json_set(spec, '$.uid', {first}) WHERE name = 'db'");
    house.execute(&sql).await;
    house.start().await;
    house.client().create_vm(&spec("web")).await.unwrap();
    assert_eq!(uid(&house, "db").await, first);
    assert_ne!(uid(&house, "web").await, first);
    assert!(a.script().vms.is_empty());
}

#[tokio::test]
async fn a_person_may_repeat_a_user_id_and_not_choose_one() {
    let house = House::new().await;
    let client = house.client();
    let mut wish = spec("web");
    wish.uid = Some(*UIDS.start() + 7);
    refused!(client.create_vm(&wish).await, InvalidVm);
    client.create_vm(&spec("web")).await.unwrap();
    let own = uid(&house, "web").await;
    refused!(client.edit_vm(&wish).await, InvalidVm);
    wish.uid = Some(own);
    client.edit_vm(&wish).await.unwrap();
    let edited = client.edit_vm(&spec("web")).await.unwrap();
    assert_eq!(edited.spec.uid, Some(own));
}

#[tokio::test]
async fn a_vm_takes_its_user_id_along_to_every_host() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let own = Some(uid(&house, "web").await);
    assert_eq!(a.script().vms[&vm("web")].spec.uid, own);
    house.client().migrate(&vm("web"), &to("b")).await.unwrap();
    assert_eq!(b.script().prepared[&vm("web")].uid, own);
}

#[tokio::test]
async fn a_source_that_tells_another_user_id_moves_nothing() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let mut said = a.script().vms[&vm("web")].spec.clone();
    said.uid = Some(*UIDS.end());
    a.script().outgoing = Some(said);
    let error = house.client().migrate(&vm("web"), &to("b")).await;
    let error = error.map(drop).unwrap_err();
    assert!(error.to_string().contains("(uid)"), "{error}");
    assert_eq!(b.calls("prepare"), 0);
}

#[tokio::test]
async fn a_vm_of_before_gets_its_user_id_with_its_next_start() {
    let mut house = House::new().await;
    let a = house.host("a").await;
    house.running("web", "a").await;
    let client = house.client();
    client.stop(&vm("web"), &STOP).await.unwrap();
    house.stop().await;
    house
        .execute("UPDATE vms SET spec = json_remove(spec, '$.uid'), resolved = json_remove(resolved, '$.uid')")
        .await;
    a.script().vms.get_mut(&vm("web")).unwrap().spec.uid = None;
    house.start().await;
    house.until_vm("web", VmState::Stopped, "a").await;
    assert_eq!(house.vm("web").await.spec.uid, None);
    let request = StartRequest::default();
    house.client().start(&vm("web"), &request).await.unwrap();
    let given = uid(&house, "web").await;
    assert_eq!(a.script().vms[&vm("web")].spec.uid, Some(given));
    house.stop().await;
    house.start().await;
    assert_eq!(uid(&house, "web").await, given);
}

#[tokio::test]
async fn an_old_copy_of_the_database_gives_no_vm_the_user_id_of_another() {
    let mut house = House::new().await;
    let a = house.host("a").await;
    house.stop().await;
    let backup = house.dir.path().join("backup.db");
    std::fs::copy(house.database(), &backup).unwrap();
    house.start().await;
    house.running("new", "a").await;
    let new = uid(&house, "new").await;
    house.stop().await;
    put_back(&house, &backup);
    house.start().await;
    house.until_in_charge().await;
    let knows = async |house: &House| house.client().vm(&vm("new")).await.is_ok();
    house.until(knows).await;
    assert_eq!(uid(&house, "new").await, new);
    house.client().create_vm(&spec("other")).await.unwrap();
    assert_ne!(uid(&house, "other").await, new);
    // One that had it before anybody heard of the other gets another with its start.
    house.stop().await;
    let sql = format!("UPDATE vms SET spec = json_set(spec, '$.uid', {new}) WHERE name = 'other'");
    house.execute(&sql).await;
    house.start().await;
    house.until_vm("new", VmState::Running, "a").await;
    let request = StartRequest {
        on: Some(host("a")),
    };
    house.client().start(&vm("other"), &request).await.unwrap();
    assert_ne!(a.script().vms[&vm("other")].spec.uid, Some(new));
    assert_eq!(uid(&house, "new").await, new);
}
