//! Where VMs go and with which CPU, over real sockets: hosts that are closed, and hosts that do not answer.

use crate::scripted::{Agent, FORCED, House, host, spec, to, vm};
use godwit_rpc::controller_client::MigrateAnswer;
use godwit_rpc::pki::Request;
use godwit_types::control_api::{HostState, StartRequest, StopRequest};
use godwit_types::drain::{DrainRequest, DrainStep};
use godwit_types::migration::MigrateRequest;
use godwit_types::vm::{Accelerator, DiskSpec, VmState};
use godwit_types::{ApiError, ErrorCode, VmSpec};
use std::time::Duration;

fn closes(agent: &Agent, closing: bool) {
    agent.script().info.as_mut().unwrap().closing = closing;
}

/// Waits until the controller has heard that the host is closed, or not.
async fn until_closed(house: &House, name: &str, closing: bool) {
    house
        .until(async |house: &House| {
            let view = house.client().host(&host(name)).await.unwrap();
            view.info.closing == closing
        })
        .await;
}

async fn place(house: &House, spec: &VmSpec) -> String {
    let client = house.client();
    client.create_vm(spec).await.unwrap();
    let started = client.start(&spec.name, &StartRequest::default()).await;
    started.unwrap().message
}

#[tokio::test]
async fn a_host_that_is_closed_gets_no_vm_though_it_has_the_most_memory() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    b.script().info.as_mut().unwrap().memory_free_mib = 4000;
    closes(&b, true);
    until_closed(&house, "b", true).await;
    let message = place(&house, &spec("web")).await;
    assert_eq!(message, "VM 'web' runs on host a");
    assert_eq!((a.calls("running web"), b.calls("running web")), (1, 0));
    // Everybody hears of it.
    let client = house.client();
    assert_eq!(client.site().await.unwrap().closing, [host("b")].into());
    // Who names it is told what ends that.
    client
        .stop(&vm("web"), &StopRequest { force: true })
        .await
        .unwrap();
    let on_b = StartRequest {
        on: Some(host("b")),
    };
    let refused = client.start(&vm("web"), &on_b).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::WrongState);
    assert!(
        refused
            .to_string()
            .contains("run 'godwit host open' on host b"),
        "{refused}"
    );
    closes(&b, false);
    client.start(&vm("web"), &on_b).await.unwrap();
    // Nor does one that is closed take VMs of a host that is emptied.
    closes(&a, true);
    until_closed(&house, "a", true).await;
    let dry = DrainRequest {
        dry_run: true,
        ..DrainRequest::default()
    };
    let plan = client.drain(&host("b"), &dry).await.unwrap();
    assert_eq!(plan.vms[0].step, DrainStep::CannotMove);
    let reason = &plan.vms[0].reasons[0].message;
    assert!(
        reason.contains("run 'godwit host open' on host a"),
        "{reason}"
    );
}

#[tokio::test]
async fn a_host_that_was_opened_since_the_last_look_is_not_refused() {
    let mut house = House::new().await;
    let (_a, b) = (house.host("a").await, house.host("b").await);
    house.running("web", "a").await;
    house.stop().await;
    closes(&b, true);
    house.config.poll_every = Duration::from_secs(3600);
    house.start().await;
    until_closed(&house, "b", true).await;
    house.until_vm("web", VmState::Running, "a").await;
    let dry = MigrateRequest {
        dry_run: true,
        ..to("b")
    };
    let refusals = async || match house.client().migrate(&vm("web"), &dry).await.unwrap() {
        MigrateAnswer::Checked(report) => report.refusals,
        MigrateAnswer::Begun(_) => panic!("a dry run began"),
    };
    let refused = refusals().await;
    assert!(
        refused[0].message.contains("godwit host open"),
        "{refused:?}"
    );
    closes(&b, false);
    assert_eq!(refusals().await, []);
}

/// Gives a host KVM and these models.
async fn can_give(house: &House, agent: &Agent, models: &[&str]) {
    let models: Vec<String> = models.iter().map(|model| (*model).to_owned()).collect();
    {
        let mut script = agent.script();
        let info = script.info.as_mut().unwrap();
        info.accelerator = Accelerator::Kvm;
        info.cpu_models.clone_from(&models);
    }
    house
        .until(async |house: &House| {
            let view = house.client().host(&agent.name).await.unwrap();
            view.info.cpu_models == models
        })
        .await;
}

#[tokio::test]
async fn a_silent_weaker_host_counts_when_a_cpu_model_is_chosen() {
    let house = House::new().await;
    let (a, mut b) = (house.host("a").await, house.host("b").await);
    can_give(&house, &a, &["Haswell", "Westmere", "qemu64"]).await;
    can_give(&house, &b, &["Westmere", "qemu64"]).await;
    b.cut().await;
    house.until_host("b", HostState::Unreachable).await;
    let message = place(&house, &spec("web")).await;
    assert_eq!(house.vm("web").await.spec.cpu, "Westmere");
    assert_eq!(message, "VM 'web' runs on host a");
}

#[tokio::test]
async fn a_host_that_was_never_heard_is_named_when_a_cpu_model_is_chosen_without_it() {
    let house = House::new().await;
    let a = house.host("a").await;
    can_give(&house, &a, &["Haswell", "qemu64"]).await;
    let nowhere = "127.0.0.1:9".parse().unwrap();
    let key = Request::new().unwrap();
    house.join("c", nowhere, &key).await.unwrap();
    let message = place(&house, &spec("web")).await;
    assert_eq!(house.vm("web").await.spec.cpu, "Haswell");
    assert!(
        message.contains("Haswell was chosen without regard to host c"),
        "{message}"
    );
    // A VM whose model a person chose is none of this.
    let mut own = spec("own");
    own.cpu = "qemu64".into();
    assert_eq!(place(&house, &own).await, "VM 'own' runs on host a");
}

#[tokio::test]
async fn a_disk_that_was_made_for_a_start_that_failed_stays_and_is_told_of() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let client = house.client();
    let mut described = spec("web");
    let mut disk = DiskSpec::new("root", "/fast/root.raw");
    disk.from = Some("/srv/base.raw".to_owned());
    described.disks = vec![disk];
    client.create_vm(&described).await.unwrap();
    let start = async |name: &str| {
        let on = Some(host(name));
        client.start(&vm("web"), &StartRequest { on }).await
    };
    let failed = ApiError::new(ErrorCode::Hypervisor, "QEMU ended at once");
    a.script().refuse_start = Some(failed.not_begun());
    let why = start("a").await.unwrap_err().to_string();
    let told = "on host a (/fast/root.raw) stays there, and its next start there goes on with that";
    assert!(why.contains(told), "{why}");
    // It is on that host alone, and is made nowhere else meanwhile.
    let why = start("b").await.unwrap_err().to_string();
    assert!(why.contains("last written on host a"), "{why}");
    a.script().refuse_start = None;
    start("a").await.unwrap();
    let made = |agent: &Agent| agent.calls("make disks");
    assert_eq!((made(&a), made(&b)), (1, 0));
    // The other way out, as it is told.
    client.stop(&vm("web"), &FORCED).await.unwrap();
    client.delete_vm(&vm("web")).await.unwrap();
    client.create_vm(&described).await.unwrap();
    start("b").await.unwrap();
    assert_eq!((made(&a), made(&b)), (1, 1));
}

/// It began with an older image that a migration had left on the other host.
#[tokio::test]
async fn a_vm_that_is_described_anew_starts_where_the_deleted_one_ran_last_or_where_a_person_says()
{
    let house = House::new().await;
    let (mut a, b) = (house.host("a").await, house.host("b").await);
    b.script().info.as_mut().unwrap().memory_free_mib = 4000;
    let mut described = spec("web");
    described.disks = vec![DiskSpec::new("root", "/fast/root.raw")];
    let on = |name: &str| StartRequest {
        on: Some(host(name)),
    };
    let client = house.client();
    client.create_vm(&described).await.unwrap();
    client.start(&vm("web"), &on("a")).await.unwrap();
    let deleted = async || {
        client.stop(&vm("web"), &FORCED).await.unwrap();
        client.delete_vm(&vm("web")).await.unwrap();
    };
    deleted().await;
    // The other one has more memory.
    let message = place(&house, &described).await;
    assert_eq!(message, "VM 'web' runs on host a");
    deleted().await;
    // What keeps it from starting there is told with why that was chosen.
    client.create_vm(&described).await.unwrap();
    closes(&a, true);
    until_closed(&house, "a", true).await;
    let closed = client.start(&vm("web"), &StartRequest::default()).await;
    let closed = closed.unwrap_err().to_string();
    for words in ["host open", "ran there last", "vm start web --on HOST"] {
        assert!(closed.contains(words), "{closed}");
    }
    closes(&a, false);
    client.delete_vm(&vm("web")).await.unwrap();
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    client.create_vm(&described).await.unwrap();
    let refused = client.start(&vm("web"), &StartRequest::default()).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::WrongState);
    for words in ["ran last on host a", "disk root", "vm start web --on HOST"] {
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let started = client.start(&vm("web"), &on("b")).await.unwrap();
    assert_eq!(started.message, "VM 'web' runs on host b");
}
