//! VMs that are made as copies of others: entered once their disks are copied, and whole or not there whatever fails.

use crate::scripted::{Agent, FORCED, House, host, refused, spec, vm};
use godwit_types::clones::CloneVm;
use godwit_types::control_api::StartRequest;
use godwit_types::vm::{DiskSpec, VmState};
use godwit_types::{ApiError, ErrorCode, SnapshotName};

fn wish() -> CloneVm {
    CloneVm {
        new: vm("web2"),
        snapshot: None,
    }
}

/// A VM with a disk, which ran there and is off.
async fn off(house: &House) -> Agent {
    let a = house.host("a").await;
    is_off(house, "web").await;
    a
}

async fn is_off(house: &House, name: &str) {
    let client = house.client();
    let mut spec = spec(name);
    let path = format!("/srv/{name}-root.raw");
    spec.disks.push(DiskSpec::new("root", path));
    client.create_vm(&spec).await.unwrap();
    refused!(client.clone_vm(&vm(name), &wish()).await, WrongState);
    let on = Some(host("a"));
    client.start(&vm(name), &StartRequest { on }).await.unwrap();
    client.stop(&vm(name), &FORCED).await.unwrap();
}

/// Where a call was made among all.
fn place(agent: &Agent, call: &str) -> usize {
    let script = agent.script();
    let mut calls = script.calls.iter();
    calls.position(|made| made.starts_with(call)).unwrap()
}

fn error() -> ApiError {
    ApiError::new(ErrorCode::Internal, "the disk is full")
}

#[tokio::test]
async fn a_clone_is_entered_once_its_disks_are_copied_and_is_off_on_that_host() {
    let house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    let itself = CloneVm {
        new: vm("web"),
        ..wish()
    };
    refused!(client.clone_vm(&vm("web"), &itself).await, InvalidRequest);
    let begun = client.clone_vm(&vm("web"), &wish()).await.unwrap();
    assert_eq!(begun.making.unwrap().disk, "root");
    refused!(client.vm(&vm("web2")).await, UnknownVm);
    let done = client.clone_vm(&vm("web"), &wish()).await.unwrap();
    assert!(done.making.is_none(), "{done:?}");
    assert!(done.message.contains("is off"), "{}", done.message);
    let (web, clone) = (house.vm("web").await, house.vm("web2").await);
    assert_eq!(
        (clone.state, clone.host),
        (VmState::Stopped, Some(host("a")))
    );
    let disk = &clone.spec.disks[0];
    assert_eq!(
        (disk.path.as_str(), &disk.from),
        ("/srv/web2-root.raw", &None)
    );
    assert_ne!(clone.spec.nics[0].mac, web.spec.nics[0].mac);
    assert!(clone.spec.uid.is_some() && clone.spec.uid != web.spec.uid);
    // It has the machine on which the other one ran, and the host knows it so.
    let told = a.script().vms[&vm("web2")].spec.clone();
    assert_eq!(told.machine, "pc-q35-7.2");
    assert_eq!((told.disks, told.uid), (clone.spec.disks, clone.spec.uid));
    assert!(place(&a, "make disks web2") < place(&a, "put web2"));
    refused!(client.clone_vm(&vm("web"), &wish()).await, AlreadyExists);
    client
        .start(&vm("web2"), &StartRequest::default())
        .await
        .unwrap();
    assert_eq!(house.vm("web2").await.host, Some(host("a")));
}

#[tokio::test]
async fn a_clone_whose_disks_have_no_names_yet_is_finished_by_who_asks_again() {
    let mut house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    a.script().refuse_disks_once = Some(error());
    refused!(client.clone_vm(&vm("web"), &wish()).await, Internal);
    let (asked, clone) = (a.calls("clone"), house.vm("web2").await);
    assert!(clone.spec.is_clone_in_part() && clone.host.is_none());
    // Also by the next controller: what was copied is not copied again.
    house.stop().await;
    house.start().await;
    house.until_in_charge().await;
    house.until_vm("web", VmState::Stopped, "a").await;
    let client = house.client();
    let done = client.clone_vm(&vm("web"), &wish()).await.unwrap();
    assert!(done.making.is_none() && a.calls("clone") == asked);
    let clone = house.vm("web2").await;
    assert!(!clone.spec.is_clone_in_part());
    assert_eq!(clone.host, Some(host("a")));
}

#[tokio::test]
async fn two_vms_are_not_cloned_under_one_name_at_once() {
    let house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    is_off(&house, "db").await;
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    let refused = client.clone_vm(&vm("db"), &wish()).await.unwrap_err();
    let told = refused.to_string();
    assert!(told.contains("made as a clone of VM 'web'"), "{told}");
    assert!(told.contains("vm clone web --cancel"), "{told}");
    // The same at another moment is another clone.
    let snapshot = Some(SnapshotName::new("clean").unwrap());
    let later = CloneVm { snapshot, ..wish() };
    refused!(client.clone_vm(&vm("web"), &later).await, WrongState);
    let asked = a.calls("clone");
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    assert_eq!(a.calls("clone"), asked + 1, "nobody else asked the host");
    refused!(client.clone_vm(&vm("db"), &wish()).await, AlreadyExists);
}

#[tokio::test]
async fn a_clone_whose_disks_have_no_names_yet_is_not_finished_as_one_of_another_vm() {
    let house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    is_off(&house, "db").await;
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    a.script().refuse_disks_once = Some(error());
    refused!(client.clone_vm(&vm("web"), &wish()).await, Internal);
    let refused = client.clone_vm(&vm("db"), &wish()).await.unwrap_err();
    let told = refused.to_string();
    assert!(told.contains("of another VM than 'db'"), "{told}");
    let snapshot = Some(SnapshotName::new("clean").unwrap());
    let later = CloneVm { snapshot, ..wish() };
    refused!(client.clone_vm(&vm("web"), &later).await, AlreadyExists);
    assert!(house.vm("web2").await.spec.is_clone_in_part());
    let done = client.clone_vm(&vm("web"), &wish()).await.unwrap();
    assert!(done.message.contains("minutes ago"), "{}", done.message);
}

#[tokio::test]
async fn what_was_copied_for_a_clone_goes_with_it_where_it_is_deleted_half_made() {
    let house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    a.script().refuse_disks_once = Some(error());
    refused!(client.clone_vm(&vm("web"), &wish()).await, Internal);
    client.delete_vm(&vm("web2")).await.unwrap();
    assert_eq!(a.calls("forget parts web2 true"), 1);
    client.delete_vm(&vm("web")).await.unwrap();
    assert_eq!(a.calls("forget parts"), 1, "that was none");
}

#[tokio::test]
async fn a_clone_of_which_its_host_could_not_be_told_is_there_all_the_same() {
    let house = House::new().await;
    let (a, client) = (off(&house).await, house.client());
    client.clone_vm(&vm("web"), &wish()).await.unwrap();
    a.script().refuse_put_once = Some(error());
    let refused = client.clone_vm(&vm("web"), &wish()).await.unwrap_err();
    let told = "start it with 'godwit vm start web2 --on a'";
    assert!(refused.to_string().contains(told), "{refused}");
    let on = Some(host("a"));
    client
        .start(&vm("web2"), &StartRequest { on })
        .await
        .unwrap();
    assert_eq!(house.vm("web2").await.state, VmState::Running);
}
