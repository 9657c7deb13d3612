//! Hosts and VMs over real sockets: bad input, placement, restored databases, hosts that come and go.

mod hosts;

use crate::scripted::{
    ANYWHERE, Agent, DEADLINE, FORCED, House, STOP, host, refused, spec, to, vm,
};
use futures_util::future::join_all;
use godwit_controller::{Controller, openapi};
use godwit_rpc::controller_client::{MigrateAnswer, RULES, path};
use godwit_rpc::{Client, ClientError};
use godwit_types::control_api::{HostState, StartRequest, StopRequest};
use godwit_types::migration::MigrateRequest;
use godwit_types::vm::{DiskSpec, EncryptionMode, VmState, mac_text};
use godwit_types::{ApiError, ErrorCode, Generation, VmSpec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

#[tokio::test]
async fn a_vm_is_described_started_and_deleted() {
    let house = House::new().await;
    let (a, client) = (house.host("a").await, house.client());
    let view = client.create_vm(&spec("web")).await.unwrap();
    assert_eq!(
        (view.state, view.host, view.generation),
        (VmState::Stopped, None, Generation(0))
    );
    client.start(&vm("web"), &ANYWHERE).await.unwrap();
    let view = house.vm("web").await;
    assert_eq!(
        (view.state, view.host, view.generation),
        (VmState::Running, Some(host("a")), a.generation("web"))
    );
    let first = view.generation;
    assert_eq!(
        (view.spec.cpu.as_str(), view.spec.machine.as_str()),
        ("qemu64", "pc-q35-7.2")
    );
    let console = client.console(&vm("web")).await.unwrap();
    assert_eq!(
        (console.text.as_str(), console.host),
        ("login:", Some(host("a")))
    );
    assert!(client.host(&host("a")).await.unwrap().vms_off.is_empty());
    refused!(client.delete_vm(&vm("web")).await, WrongState);
    refused!(client.edit_vm(&spec("web")).await, WrongState);
    client.pause(&vm("web")).await.unwrap();
    assert_eq!(house.vm("web").await.state, VmState::Paused);
    client.resume(&vm("web")).await.unwrap();
    client.reset(&vm("web")).await.unwrap();
    client.stop(&vm("web"), &FORCED).await.unwrap();
    let holder = client.host(&host("a")).await.unwrap();
    assert_eq!(
        (holder.vms, holder.vms_off),
        (vec![vm("web")], vec![vm("web")])
    );
    refused!(client.reset(&vm("web")).await, WrongState);
    client.delete_vm(&vm("web")).await.unwrap();
    assert!(a.script().vms.is_empty());
    refused!(client.vm(&vm("web")).await, UnknownVm);
    // A name that is used again goes on above every generation it ever had.
    house.running("web", "a").await;
    assert!(house.vm("web").await.generation > first);
}

#[tokio::test]
async fn each_bad_input_gets_one_sentence_and_leaves_nothing() {
    let house = House::new().await;
    let a = house.host("a").await;
    let (raw, client) = (Client::unix(&house.config.socket), house.client());
    let good = serde_json::to_value(spec("web")).unwrap();
    let with = |key: &str, value: Value| {
        let mut body = good.clone();
        body[key] = value;
        body
    };
    let cases = [
        (with("vcpu", json!(2)), ErrorCode::InvalidRequest),
        (with("name", json!("../web")), ErrorCode::InvalidRequest),
        (
            with("name", json!("web'; DROP TABLE vms; --")),
            ErrorCode::InvalidRequest,
        ),
        (with("memory_mib", json!(15)), ErrorCode::InvalidVm),
        (with("memory_mib", json!(u64::MAX)), ErrorCode::InvalidVm),
        (with("memory_mib", json!(-1)), ErrorCode::InvalidRequest),
        (with("vcpus", json!(0)), ErrorCode::InvalidVm),
        (with("kernel", json!("vmlinuz")), ErrorCode::InvalidVm),
        (with("kernel", json!("/\u{1b}]0;x")), ErrorCode::InvalidVm),
        (with("cmdline", json!("a\tb")), ErrorCode::InvalidVm),
        (
            with("cmdline", json!("x".repeat(2048))),
            ErrorCode::InvalidVm,
        ),
        (with("cpu", json!("a,+")), ErrorCode::InvalidVm),
        (
            with("disk", json!([{"name": "d".repeat(21), "path": "/d"}])),
            ErrorCode::InvalidVm,
        ),
        (json!([]), ErrorCode::InvalidRequest),
        (json!({}), ErrorCode::InvalidRequest),
    ];
    for (body, expected) in cases {
        let result: Result<Value, ClientError> = raw.post(path::VMS, &body, DEADLINE).await;
        let error = result.unwrap_err();
        assert_eq!(error.code(), expected, "{body}");
        let text = error.to_string();
        assert!(!text.contains('\n') && !text.ends_with('.'), "{text}");
    }
    assert!(client.vms().await.unwrap().is_empty());
    client.create_vm(&spec("web")).await.unwrap();
    refused!(client.create_vm(&spec("web")).await, AlreadyExists);
    let result: Result<Value, ClientError> = raw.put("/v1/vms/other", &good, DEADLINE).await;
    refused!(result, InvalidRequest);
    refused!(client.edit_vm(&spec("other")).await, UnknownVm);
    refused!(client.start(&vm("other"), &ANYWHERE).await, UnknownVm);
    let nowhere = StartRequest {
        on: Some(host("b")),
    };
    refused!(client.start(&vm("web"), &nowhere).await, UnknownHost);
    assert_eq!(a.calls("put"), 0);
}

#[tokio::test]
async fn a_mac_is_given_to_one_vm_only_and_written_down() {
    let mut house = House::new().await;
    let client = house.client();
    let made = mac_text(spec("web").default_mac(0));
    let mac = async |house: &House, name: &str| {
        let view = house.vm(name).await;
        view.spec.nics[0].mac.clone().unwrap()
    };
    let with = |name: &str, mac: &str| {
        let mut wish = spec(name);
        wish.nics[0].mac = Some(mac.to_owned());
        wish
    };
    client.create_vm(&with("db", &made)).await.unwrap();
    client.create_vm(&spec("web")).await.unwrap();
    let given = mac(&house, "web").await;
    assert_ne!(given, made);
    for refused in [
        client.create_vm(&with("third", &given)).await,
        client.edit_vm(&with("db", &given)).await,
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidVm);
        assert!(error.to_string().contains("taken by VM web"), "{error}");
    }
    let signed = client.create_vm(&with("third", "+2:54:00:00:00:01")).await;
    refused!(signed, InvalidVm);
    client.delete_vm(&vm("db")).await.unwrap();
    house.stop().await;
    house.start().await;
    assert_eq!(mac(&house, "web").await, given);
    let edited = house.client().edit_vm(&spec("web")).await.unwrap();
    assert_eq!(edited.spec.nics[0].mac, Some(given));
}

#[tokio::test]
async fn two_vms_that_are_created_at_once_get_different_macs() {
    let house = House::new().await;
    let client = house.client();
    let wish = |name: &str| {
        let mut wish = spec(name);
        wish.nics[0].mac = Some("52:54:00:00:00:01".into());
        wish
    };
    let wishes: Vec<_> = (0..8).map(|n| wish(&format!("vm{n}"))).collect();
    let created = join_all(wishes.iter().map(|wish| client.create_vm(wish))).await;
    assert_eq!(created.iter().filter(|one| one.is_ok()).count(), 1);
    assert_eq!(client.vms().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_start_that_cannot_be_leaves_nothing_behind() {
    let house = House::new().await;
    let (a, client) = (house.host("a").await, house.client());
    let start = async |change: &dyn Fn(&mut godwit_types::VmSpec)| {
        let mut wish = spec("web");
        change(&mut wish);
        client.create_vm(&wish).await.unwrap();
        let error = client.start(&vm("web"), &ANYWHERE).await.unwrap_err();
        client.delete_vm(&vm("web")).await.unwrap();
        error.code()
    };
    assert_eq!(
        start(&|vm| vm.memory_mib = 1 << 20).await,
        ErrorCode::OutOfMemory
    );
    assert_eq!(
        start(&|vm| vm.machine = "pc-q35-99.0".into()).await,
        ErrorCode::Incompatible
    );
    assert_eq!(
        start(&|vm| vm.cpu = "EPYC".into()).await,
        ErrorCode::Incompatible
    );
    let group = godwit_types::PortGroup::new("nowhere").unwrap();
    assert_eq!(
        start(&|vm| vm.nics[0].port_group = group.clone()).await,
        ErrorCode::MissingBridge
    );
    assert_eq!(a.calls("put"), 0);
    let missing = ApiError::new(ErrorCode::MissingFile, "there is no /boot/vmlinuz");
    a.script().refuse_start = Some(missing);
    assert_eq!(start(&|_| {}).await, ErrorCode::MissingFile);
    assert!(a.script().vms.is_empty());
    a.script().refuse_start = None;
    house.running("web", "a").await;
}

#[tokio::test]
async fn memory_given_back_since_the_last_look_is_not_refused() {
    let mut house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    house.running("moving", "a").await;
    house.stop().await;
    let free = |agent: &Agent, mib| agent.script().info.as_mut().unwrap().memory_free_mib = mib;
    free(&a, 1);
    free(&b, 1);
    house.config.poll_every = Duration::from_secs(3600);
    house.start().await;
    house
        .until(async |house: &House| {
            let hosts = house.client().hosts().await.unwrap();
            hosts.iter().all(|host| host.info.memory_free_mib == 1)
                && house.vm("moving").await.state == VmState::Running
        })
        .await;
    let client = house.client();
    client.create_vm(&spec("web")).await.unwrap();
    let start = async || client.start(&vm("web"), &ANYWHERE).await;
    let error = start().await.unwrap_err();
    assert!(error.to_string().contains("MiB of memory free"), "{error}");
    free(&b, 4096);
    start().await.unwrap();
    assert_eq!(house.vm("web").await.host, Some(host("b")));
    let dry = MigrateRequest {
        dry_run: true,
        ..to("b")
    };
    free(&b, 1);
    house.client().stop(&vm("web"), &STOP).await.unwrap();
    let refusals = async || match house.client().migrate(&vm("moving"), &dry).await.unwrap() {
        MigrateAnswer::Checked(report) => report.refusals,
        MigrateAnswer::Begun(_) => panic!("a dry run began"),
    };
    assert_eq!(refusals().await[0].code, ErrorCode::OutOfMemory);
    free(&b, 4096);
    assert_eq!(refusals().await, []);
}

#[tokio::test]
async fn a_stop_on_a_host_that_loses_its_power_is_answered_once_the_host_is_missed() {
    let mut house = House::new().await;
    // A guest may take its time to power off.
    house.stop().await;
    house.config.deadlines.slow = std::time::Duration::from_secs(60);
    house.start().await;
    let (a, client) = (house.host("a").await, house.client());
    house.running("web", "a").await;
    let _stop_held = a.hold("stop");
    let stop = tokio::spawn({
        let client = client.clone();
        let request = StopRequest { force: true };
        async move { client.stop(&vm("web"), &request).await }
    });
    a.until_called("asked to stop web").await;
    // From here on the host says nothing to anybody, as one without power.
    let _host_held = a.hold("host");
    let began = std::time::Instant::now();
    let refused = stop.await.unwrap().unwrap_err();
    assert!(
        refused.to_string().contains("stopped answering"),
        "{refused}"
    );
    assert!(began.elapsed() < std::time::Duration::from_secs(50));
    // What comes next for the VM does not wait behind it.
    let next = client.stop(&vm("web"), &FORCED).await;
    assert!(next.unwrap_err().to_string().contains("does not answer"));
}

#[tokio::test]
async fn a_stopped_vm_leaves_its_host_before_another_gets_it() {
    let house = House::new().await;
    let (a, mut b, client) = (house.host("a").await, house.host("b").await, house.client());
    house.running("web", "a").await;
    client.stop(&vm("web"), &STOP).await.unwrap();
    let on_b = StartRequest {
        on: Some(host("b")),
    };
    client.start(&vm("web"), &on_b).await.unwrap();
    assert!(a.script().vms.is_empty());
    let view = house.vm("web").await;
    assert_eq!(
        (view.host, view.generation),
        (Some(host("b")), b.generation("web"))
    );
    assert!(b.generation("web") > a.generation("web"));
    // While its host does not answer nobody else gets it.
    client.stop(&vm("web"), &STOP).await.unwrap();
    b.cut().await;
    house.until_vm("web", VmState::Unreachable, "b").await;
    let on_a = StartRequest {
        on: Some(host("a")),
    };
    refused!(client.start(&vm("web"), &on_a).await, HostUnreachable);
    refused!(client.delete_vm(&vm("web")).await, HostUnreachable);
    refused!(client.remove_host(&host("b"), false).await, HostUnreachable);
    // Its operator says that it is gone for good: what it may have done stays below.
    client.remove_host(&host("b"), true).await.unwrap();
    client.start(&vm("web"), &on_a).await.unwrap();
    assert!(house.vm("web").await.generation > Generation(1 << 20));
}

/// VM web with a disk of its own, writable and not shared.
fn with_a_disk() -> VmSpec {
    let mut wish = spec("web");
    wish.disks.push(DiskSpec::new("data", "/data.raw"));
    wish
}

#[tokio::test]
async fn a_disk_that_a_removed_host_wrote_last_is_looked_for_by_a_person() {
    let house = House::new().await;
    let (mut a, b) = (house.host("a").await, house.host("b").await);
    let client = house.client();
    client.create_vm(&with_a_disk()).await.unwrap();
    let on = |name: &str| StartRequest {
        on: Some(host(name)),
    };
    client.start(&vm("web"), &on("a")).await.unwrap();
    a.cut().await;
    house.until_host("a", HostState::Unreachable).await;
    client.remove_host(&host("a"), true).await.unwrap();
    let anywhere = StartRequest::default();
    let error = client.start(&vm("web"), &anywhere).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::WrongState);
    assert!(error.to_string().contains("--on HOST"), "{error}");
    assert_eq!(b.calls("put"), 0);
    client.start(&vm("web"), &on("b")).await.unwrap();
    assert_eq!(house.vm("web").await.host, Some(host("b")));
}

#[tokio::test]
async fn a_vm_with_a_writable_disk_starts_elsewhere_only_if_the_disk_is_shared() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let client = house.client();
    let mut wish = with_a_disk();
    let on = |name: &str| StartRequest {
        on: Some(host(name)),
    };
    let stop = async || {
        let stopped = client.stop(&vm("web"), &STOP).await;
        stopped.unwrap();
    };
    client.create_vm(&wish).await.unwrap();
    client.start(&vm("web"), &on("a")).await.unwrap();
    stop().await;
    let error = client.start(&vm("web"), &on("b")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::WrongState);
    assert!(error.to_string().contains("shared = true"), "{error}");
    assert_eq!(b.calls("put"), 0);
    assert!(a.script().vms.contains_key(&vm("web")));
    client.start(&vm("web"), &on("a")).await.unwrap();
    stop().await;
    wish.disks[0].shared = true;
    client.edit_vm(&wish).await.unwrap();
    client.start(&vm("web"), &on("b")).await.unwrap();
    assert_eq!(house.vm("web").await.host, Some(host("b")));
}

#[tokio::test]
async fn a_start_by_which_nothing_began_leaves_the_vm_free_to_start_elsewhere() {
    let mut house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let on = |name: &str| StartRequest {
        on: Some(host(name)),
    };
    house.client().create_vm(&with_a_disk()).await.unwrap();
    let start = async |house: &House, name: &str| {
        let client = house.client();
        client.start(&vm("web"), &on(name)).await
    };
    let missing = ApiError::new(ErrorCode::MissingFile, "there is no /data.raw");
    for agent in [&a, &b] {
        agent.script().refuse_start = Some(missing.clone().not_begun());
    }
    for name in ["a", "b"] {
        refused!(start(&house, name).await, MissingFile);
    }
    // Nor does a controller that begins anew forget it.
    house.stop().await;
    house.start().await;
    a.script().refuse_start = None;
    house.until_host("a", HostState::Connected).await;
    start(&house, "a").await.unwrap();
    house.client().stop(&vm("web"), &STOP).await.unwrap();
    // From now on its disk is there, whoever refused it since.
    refused!(start(&house, "b").await, WrongState);
    a.script().vms.clear();
    a.script().refuse_start = Some(missing.not_begun());
    refused!(start(&house, "a").await, MissingFile);
    refused!(start(&house, "b").await, WrongState);
}

#[tokio::test]
async fn a_start_by_which_something_may_have_begun_ties_the_vm_to_its_host() {
    let house = House::new().await;
    let (a, b) = (house.host("a").await, house.host("b").await);
    let client = house.client();
    let on = |name: &str| StartRequest {
        on: Some(host(name)),
    };
    client.create_vm(&with_a_disk()).await.unwrap();
    let error = ApiError::new(ErrorCode::Hypervisor, "QEMU ended at once");
    a.script().refuse_start = Some(error);
    refused!(client.start(&vm("web"), &on("a")).await, Hypervisor);
    assert!(a.script().vms.is_empty());
    let error = client.start(&vm("web"), &on("b")).await.unwrap_err();
    assert!(
        error.to_string().contains("last written on host a"),
        "{error}"
    );
    assert_eq!(b.calls("put"), 0);
}

#[tokio::test]
async fn a_holder_that_wants_a_new_generation_gets_one_above_all() {
    let house = House::new().await;
    let (a, client) = (house.host("a").await, house.client());
    house.running("web", "a").await;
    // Attempts to hand over have used up generations that it does not hold.
    a.has("web", VmState::Stopped, 5, true);
    house.until_vm("web", VmState::Stopped, "a").await;
    let mut wish = spec("web");
    wish.memory_mib = 128;
    client.edit_vm(&wish).await.unwrap();
    let behind = ApiError::new(ErrorCode::WrongState, "generation 5 is not taken");
    a.script().refuse_put_once = Some(behind);
    let anywhere = StartRequest::default();
    client.start(&vm("web"), &anywhere).await.unwrap();
    assert_eq!(
        (
            a.calls("put web 5"),
            a.calls("delete web"),
            a.calls("put web")
        ),
        (1, 1, 3)
    );
    let view = house.vm("web").await;
    assert_eq!((view.spec.memory_mib, view.state), (128, VmState::Running));
    assert!(view.generation > Generation(5));
}

#[tokio::test]
async fn required_encryption_is_placed_where_it_can_be_kept() {
    let house = House::new().await;
    let (a, _b, client) = (house.host("a").await, house.host("b").await, house.client());
    {
        let mut script = a.script();
        let info = script.info.as_mut().unwrap();
        info.encryption = false;
        info.memory_free_mib = 4096;
    }
    house
        .until(async |house: &House| {
            !house
                .client()
                .host(&host("a"))
                .await
                .unwrap()
                .info
                .encryption
        })
        .await;
    let mut wish = spec("web");
    wish.encryption = EncryptionMode::Required;
    client.create_vm(&wish).await.unwrap();
    let on_a = StartRequest {
        on: Some(host("a")),
    };
    refused!(client.start(&vm("web"), &on_a).await, Encryption);
    client.start(&vm("web"), &ANYWHERE).await.unwrap();
    assert_eq!(house.vm("web").await.host, Some(host("b")));
}

#[tokio::test]
async fn a_controller_is_made_once_and_run_only_where_it_was_made() {
    let house = House::new().await;
    let again = godwit_controller::init(&house.config).await.unwrap_err();
    assert!(again.to_string().contains("already"), "{again}");
    let mut elsewhere = house.config.clone();
    elsewhere.state_dir = house.dir.path().join("nothing");
    let none = Controller::start(elsewhere).await.err().unwrap();
    assert!(
        none.to_string().contains("godwit controller init"),
        "{none}"
    );
    let mut taken = house.config.clone();
    taken.listen = vec![house.address()];
    let taken = Controller::start(taken).await.err().unwrap();
    assert!(taken.to_string().contains("cannot listen on"), "{taken}");
}

#[tokio::test]
async fn the_document_the_rules_and_the_routes_agree() {
    let document = serde_json::to_value(openapi()).unwrap();
    let mut documented = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            documented.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    let ruled: BTreeSet<String> = RULES
        .iter()
        .map(|rule| format!("{} {}", rule.method, rule.path))
        .collect();
    assert_eq!(documented, ruled);
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for name in [
        "ApiError",
        "VmSpec",
        "VmView",
        "HostView",
        "MigrationReport",
        "PreflightReport",
        "JoinRequest",
    ] {
        assert!(schemas.contains_key(name), "{name}");
    }
    let house = House::new().await;
    let served: Value = Client::unix(&house.config.socket)
        .get(path::OPENAPI, DEADLINE)
        .await
        .unwrap();
    assert_eq!(served, document);
}
