//! A controller on an old copy of its database, over real sockets: what it must learn before it grants anything.

use crate::scripted::{Agent, DEADLINE, House, STOP, host, spec, to, vm};
use godwit_rpc::agent_client::Deadlines;
use godwit_rpc::pki::Request;
use godwit_rpc::{AgentClient, Client, Identity, Role};
use godwit_types::control_api::{HostState, StartRequest};
use godwit_types::site::{Alarm, SiteTable, SiteVm, Stamp, SurveyRequest};
use godwit_types::vm::{DiskSpec, VmState};
use godwit_types::{ErrorCode, Generation};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn on(name: &str) -> StartRequest {
    StartRequest {
        on: Some(host(name)),
    }
}

/// Puts the database back that was copied before.
pub fn put_back(house: &House, backup: &Path) {
    for end in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", house.database().display()));
    }
    std::fs::copy(backup, house.database()).unwrap();
}

/// Waits for the host's table to name so many hosts.
async fn until_told(agent: &Agent, hosts: usize) {
    until_table(agent, |table| table.hosts.len() >= hosts).await;
}

/// Waits until a host was told that another one holds a VM.
async fn until_told_of(agent: &Agent, name: &str, holder: &str) {
    let (name, holder) = (vm(name), Some(host(holder)));
    let knows = |row: &SiteVm| row.holder == holder;
    until_table(agent, |table| table.vms.get(&name).is_some_and(knows)).await;
}

async fn until_table(agent: &Agent, is_told: impl Fn(&SiteTable) -> bool) {
    let told = async {
        while !is_told(&agent.table()) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, told)
        .await
        .expect("its table never came to that");
}

/// A copy of the database as it is now.
async fn backed_up(house: &mut House) -> PathBuf {
    house.stop().await;
    let backup = house.dir.path().join("backup.db");
    std::fs::copy(house.database(), &backup).unwrap();
    house.start().await;
    backup
}

/// Waits for the alarm that names these hosts as those that are not read yet.
async fn until_waits_for(house: &House, hosts: &[&str]) {
    let named: Vec<_> = hosts.iter().map(|name| host(name)).collect();
    house
        .until(async |house: &House| {
            let site = house.client().site().await.unwrap();
            site.alarms.iter().any(|alarm| {
                matches!(alarm, Alarm::RestoredController { waits_for, .. } if *waits_for == named)
            })
        })
        .await;
}

/// A command of the controller that has not been restored.
async fn old_command(house: &House, agent: &Agent, stamp: Stamp) -> ErrorCode {
    let identity = Identity::load(&house.config.state_dir).unwrap();
    let client = Client::tls(agent.address, &identity, Role::Host(agent.name.clone())).unwrap();
    let old = AgentClient::new(client.with_stamps(Arc::new(move || stamp)))
        .with_deadlines(Deadlines::default());
    let request = SurveyRequest {
        level: Generation(1 << 40),
    };
    old.survey(&vm("web"), &request).await.unwrap_err().code()
}

#[tokio::test]
async fn a_restored_database_grants_nothing_until_every_host_in_any_record_was_read() {
    let mut house = House::new().await;
    let (a, mut b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    let backup = backed_up(&mut house).await;
    // Life goes on: host c joins, VM web comes to run there, and another one is made.
    let mut c = house.host("c").await;
    let client = house.client();
    house.until_vm("web", VmState::Running, "a").await;
    client.stop(&vm("web"), &STOP).await.unwrap();
    client.start(&vm("web"), &on("c")).await.unwrap();
    house.running("new", "c").await;
    until_told(&a, 3).await;
    let before = client.site().await.unwrap().stamp;
    house.stop().await;
    b.cut().await;
    c.cut().await;
    put_back(&house, &backup);
    let puts = a.calls("put");
    house.start().await;
    until_waits_for(&house, &["b", "c"]).await;
    let refused = house.client().start(&vm("web"), &on("a")).await;
    assert_eq!(refused.unwrap_err().code(), ErrorCode::HostUnreachable);
    let refused = house.client().migrate(&vm("web"), &to("b")).await;
    let error = refused.map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::HostUnreachable, "{error}");
    // A host that was not read may hold a VM of that name, or one with the same user id.
    let refused = house.client().create_vm(&spec("other")).await;
    assert_eq!(refused.unwrap_err().code(), ErrorCode::HostUnreachable);
    let refused = house.client().edit_vm(&spec("web")).await;
    assert_eq!(refused.unwrap_err().code(), ErrorCode::HostUnreachable);
    assert_eq!(a.calls("put"), puts);
    // Nor does another machine say no for a host that runs what this database forgot.
    let key = Request::new().unwrap();
    let namesake = house.join("c", "192.0.2.9:1".parse().unwrap(), &key).await;
    assert_eq!(namesake.unwrap_err().code(), ErrorCode::HostUnreachable);
    b.heal().await;
    until_waits_for(&house, &["c"]).await;
    c.heal().await;
    house.until_in_charge().await;
    house.until_vm("web", VmState::Running, "c").await;
    house.until_vm("new", VmState::Running, "c").await;
    // What is forgotten is said, and not only to whoever looked at that moment.
    for _ in 0..2 {
        let said = house.client().site().await.unwrap().sentences.join(" ");
        assert!(said.contains("What only the lost one knew"), "{said}");
        house.stop().await;
        house.start().await;
    }
    house.until_vm("web", VmState::Running, "c").await;
    let now = house.client().site().await.unwrap().stamp;
    assert_eq!(now.epoch, before.epoch + 1);
    assert_eq!(
        old_command(&house, &a, before).await,
        ErrorCode::StaleController
    );
    let held = c.generation("web");
    house.client().stop(&vm("web"), &STOP).await.unwrap();
    house.client().start(&vm("web"), &on("a")).await.unwrap();
    assert!(a.generation("web") > held);
}

#[tokio::test]
async fn a_table_does_not_say_which_certificate_a_forgotten_host_has() {
    let mut house = House::new().await;
    let a = house.host("a").await;
    let backup = backed_up(&mut house).await;
    let c = house.host("c").await;
    until_told(&a, 2).await;
    house.stop().await;
    put_back(&house, &backup);
    a.script().invented_serial = Some("00ff".into());
    house.start().await;
    house
        .until(async |house: &House| {
            let site = house.client().site().await.unwrap();
            site.in_charge && site.stamp.epoch > 0
        })
        .await;
    // What is revoked is the certificate that the host has.
    house.client().remove_host(&c.name, false).await.unwrap();
    let serial = c.identity.holder().unwrap().serial;
    let revoked = async {
        while !a.script().revoked.contains(&serial) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, revoked)
        .await
        .expect("another certificate was revoked");
}

#[tokio::test]
async fn the_name_of_a_host_that_was_forgotten_is_not_given_to_another() {
    let mut house = House::new().await;
    let a = house.host("a").await;
    house.running("web", "a").await;
    let backup = backed_up(&mut house).await;
    let mut c = house.host("c").await;
    house.until_vm("web", VmState::Running, "a").await;
    house.client().stop(&vm("web"), &STOP).await.unwrap();
    house.client().start(&vm("web"), &on("c")).await.unwrap();
    until_told_of(&a, "web", "c").await;
    house.stop().await;
    c.cut().await;
    put_back(&house, &backup);
    house.start().await;
    until_waits_for(&house, &["c"]).await;
    house.client().fenced(&host("c")).await.unwrap();
    house.until_in_charge().await;
    let (key, elsewhere) = (Request::new().unwrap(), "192.0.2.9:1".parse().unwrap());
    let error = house.join("c", elsewhere, &key).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::AlreadyExists);
    assert!(
        error.to_string().contains("VM web may run on a host c"),
        "{error}"
    );
}

#[tokio::test]
async fn a_disk_that_is_elsewhere_is_not_made_again_for_a_database_that_is_from_before_it_was_made()
{
    let mut house = House::new().await;
    let a = house.host("a").await;
    let mut described = spec("web");
    let mut disk = DiskSpec::new("root", "/fast/root.raw");
    disk.from = Some("/srv/base.raw".to_owned());
    described.disks = vec![disk];
    house.client().create_vm(&described).await.unwrap();
    let backup = backed_up(&mut house).await;
    house.until_host("a", HostState::Connected).await;
    let client = house.client();
    client.start(&vm("web"), &on("a")).await.unwrap();
    client.stop(&vm("web"), &STOP).await.unwrap();
    let made = a.calls("make disks");
    assert_eq!(made, 1);
    house.stop().await;
    put_back(&house, &backup);
    let disks = |path: &str| vec![DiskSpec::new("root", path)];
    a.script().vms.get_mut(&vm("web")).unwrap().spec.disks = disks("/slow/root.raw");
    house.start().await;
    house.until_in_charge().await;
    house.until_vm("web", VmState::Stopped, "a").await;
    let refused = house.client().start(&vm("web"), &on("a")).await;
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("is made, and is /slow/root.raw now"), "{why}");
    // Where it is where it was it is that one, and is not made either.
    a.script().vms.get_mut(&vm("web")).unwrap().spec.disks = disks("/fast/root.raw");
    house
        .until(async |house| house.client().start(&vm("web"), &on("a")).await.is_ok())
        .await;
    assert_eq!(a.calls("make disks"), made);
}
