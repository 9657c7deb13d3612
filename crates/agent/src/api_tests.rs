//! The routes over real mutual TLS and a real Unix socket, with a stub VM process behind them.

use super::*;
use crate::addresses::Addresses;
use crate::boot::{Asker, Boots, Stopping};
use crate::cancelled::Cancelled;
use crate::closing::Closing;
use crate::disk_record::DiskRecord;
use crate::memory::Memory;
use crate::probe::Probes;
use crate::qemu_facts::QemuFactsError;
use crate::qemu_now::QemuNow;
use crate::renewal::Certificate;
use crate::reports::Reports;
use crate::site::Site;
use crate::supervisor::Supervisor;
use crate::system::System;
use crate::test_support::{HEARD, REASON, TestHost, spec, stub_program, vm};
use crate::users::User;
use godwit_ownership::{Phase, Power};
use godwit_rpc::Current;
use godwit_rpc::agent_client::RULES;
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::{
    AgentClient, Authority, Client, ClientError, Revocations, Role, Server, tls, unix_socket,
};
use godwit_types::control_api::StopRequest;
use godwit_types::host_api::HostCancel;
use godwit_types::site::{SiteHost, Stamp};
use godwit_types::{Generation, HostName};
use rustix::process::{Pid, Signal, kill_process};
use std::net::SocketAddr;
use tokio::sync::watch;

pub(crate) fn host_name(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

fn no_qemu() -> QemuNow {
    QemuNow::told(Err(QemuFactsError::NoVersion {
        program: "none".into(),
        text: String::new(),
    }))
}

pub(crate) struct Served {
    pub host: TestHost,
    pub agent: Arc<Agent>,
    authority: Authority,
    address: SocketAddr,
    _stop: watch::Sender<bool>,
}

impl Served {
    pub(crate) async fn new() -> Self {
        Self::of_host(TestHost::new()).await
    }

    /// A host whose site does not answer.
    pub(crate) async fn of_host(host: TestHost) -> Self {
        let nobody: Asker = Arc::new(|_, _| {
            let error = ApiError::new(ErrorCode::HostUnreachable, "nobody is there");
            Box::pin(async { Err(error) })
        });
        Self::of(host, nobody, false).await
    }

    /// A host whose site answers as `asker` says, and which shuts down or not.
    pub(crate) async fn of(host: TestHost, asker: Asker, is_stopping: bool) -> Self {
        let stopping: Stopping = Arc::new(move || Box::pin(async move { Some(is_stopping) }));
        Self::with(host, asker, stopping).await
    }

    /// A host of which `stopping` says whether it shuts down.
    pub(crate) async fn with(host: TestHost, asker: Asker, stopping: Stopping) -> Self {
        let site = Site::open(
            &host.config.state_dir,
            host_name("a"),
            "boot-1".into(),
            "machine".into(),
        );
        let available_mib = host.available_mib;
        let records = host.records();
        let supervisor = Supervisor::new(
            stub_program(),
            Arc::new(|_, _| Box::pin(async { Ok(vec![]) })),
            records.clone(),
        );
        let authority = Authority::create(now_unix_s()).unwrap();
        let identity = authority
            .identity(&Role::Host(host_name("a")), now_unix_s())
            .unwrap();
        let agent = Arc::new(Agent {
            certificate: Certificate::new(
                Current::new(identity.clone()).unwrap(),
                host.config.pki_dir(),
                None,
            ),
            bursts: Arc::default(),
            crowd: Default::default(),
            rooms: Default::default(),
            readings: Default::default(),
            site: Arc::new(site.unwrap()),
            boots: Boots::new(asker, stopping),
            closing: Closing::open(&host.config.run_dir, "boot-1", host.config.guest_shutdown_s)
                .unwrap(),
            manager: host.manager.clone(),
            memory: Memory::with(
                host.config.ram_dir(),
                Box::new(move |_| available_mib << 20),
            ),
            reports: Reports::new(records.clone()),
            cancelled: Cancelled::open(&host.config.state_dir),
            removed: Default::default(),
            makings: Default::default(),
            config: host.config.clone(),
            system: System::default(),
            user: User {
                uid: 65534,
                gid: 65534,
            },
            qemu: no_qemu(),
            addresses: Addresses::of(&host.config),
            boot_id: "boot-1".into(),
            supervisor,
            records,
            probes: Probes::default(),
            revocations: Arc::new(Revocations::default()),
        });
        let (stop, stopped) = watch::channel(false);
        let server = Server::new(router(agent.clone()), RULES, agent.revocations.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let local = unix_socket::bind_unix(&host.config.agent_socket()).unwrap();
        tokio::spawn(server.clone().run_unix(local, stopped.clone()));
        tokio::spawn(server.run_tls(listener, tls::server_config(&identity).unwrap(), stopped));
        Self {
            host,
            agent,
            authority,
            address,
            _stop: stop,
        }
    }

    fn tls(&self, role: &Role) -> Client {
        let identity = self.authority.identity(role, now_unix_s()).unwrap();
        let peer = Role::Host(host_name("a"));
        Client::tls(self.address, &identity, peer).unwrap()
    }

    pub(crate) fn client(&self, role: &Role) -> AgentClient {
        AgentClient::new(self.tls(role))
    }

    /// The same, with its certificate's serial number.
    pub(crate) fn client_and_serial(&self, role: &Role) -> (AgentClient, String) {
        let identity = self.authority.identity(role, now_unix_s()).unwrap();
        let serial = identity.holder().unwrap().serial;
        let peer = Role::Host(host_name("a"));
        let client = Client::tls(self.address, &identity, peer).unwrap();
        (AgentClient::new(client), serial)
    }

    /// A controller whose last word is this.
    pub(crate) fn controller_at(&self, epoch: u64, number: u64) -> AgentClient {
        let stamp = Stamp { epoch, number };
        AgentClient::new(
            self.tls(&Role::Controller)
                .with_stamps(Arc::new(move || stamp)),
        )
    }

    pub(crate) fn controller(&self) -> AgentClient {
        self.controller_at(1, 1)
    }

    pub(crate) fn local(&self) -> AgentClient {
        AgentClient::new(Client::unix(&self.host.config.agent_socket()))
    }

    /// Ends the stub of a VM, if it has one; it is this test's own.
    pub(crate) fn end(&self, name: &str) {
        if let Some(vm) = self.agent.supervisor.find(&vm(name)) {
            self.agent.supervisor.forget(&vm.config().vm);
            if let crate::life::Life::Live { pid } = vm.life() {
                kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
            }
        }
    }
}

/// Asserts that a call was refused with this code.
macro_rules! refused {
    ($answer:expr, $code:ident) => {
        assert_eq!(
            crate::api::tests::code($answer),
            godwit_types::ErrorCode::$code
        )
    };
}
pub(crate) use refused;

pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorCode {
    result.unwrap_err().code()
}

/// A grant after a survey whose level is one below.
pub(crate) fn put(name: &str, generation: u64) -> PutVm {
    PutVm {
        spec: spec(name),
        generation: Generation(generation),
        expect: Some(Generation(generation - 1)),
        images: Vec::new(),
    }
}

fn ask_holding(generation: u64) -> PeerEnvelope {
    said(
        serde_json::json!({ "message": "ask-holding", "migration": "m1", "generation": generation }),
    )
}

/// As a host of an earlier build says it.
pub(crate) fn said(message: serde_json::Value) -> PeerEnvelope {
    PeerEnvelope {
        message,
        life: None,
        meant: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_caller_may_do_only_its_own() {
    let served = Served::new().await;
    let peer = served.client(&Role::Host(host_name("b")));
    refused!(peer.vms().await, NotAllowed);
    refused!(peer.put_vm(&put("web", 1)).await, NotAllowed);
    let operator = served.client(&Role::Operator(host_name("ann")));
    assert_eq!(operator.vms().await.unwrap(), []);
    refused!(
        operator
            .stop(&vm("web"), &StopRequest { force: true })
            .await,
        NotAllowed
    );
    let local = served.local();
    assert_eq!(local.vms().await.unwrap(), []);
    refused!(local.put_vm(&put("web", 1)).await, NotAllowed);
    refused!(local.peer(&vm("web"), &ask_holding(2)).await, NotAllowed);
    let controller = served.controller();
    refused!(
        controller.peer(&vm("web"), &ask_holding(2)).await,
        NotAllowed
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_host_is_refused_at_once() {
    let served = Served::new().await;
    let identity = served
        .authority
        .identity(&Role::Host(host_name("b")), now_unix_s())
        .unwrap();
    let serial = identity.holder().unwrap().serial;
    let client = Client::tls(served.address, &identity, Role::Host(host_name("a"))).unwrap();
    let peer = AgentClient::new(client);
    assert!(peer.peer(&vm("web"), &ask_holding(2)).await.is_ok());
    served
        .controller()
        .revoked(&Revoked {
            serials: vec![serial.clone()],
        })
        .await
        .unwrap();
    refused!(peer.peer(&vm("web"), &ask_holding(2)).await, NotAllowed);
    assert_eq!(served.host.records().revoked().unwrap(), [serial]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_is_made_started_and_deleted() {
    let served = Served::new().await;
    let controller = served.controller();
    let web = vm("web");
    refused!(controller.start(&web).await, UnknownVm);
    controller.put_vm(&put("web", 1)).await.unwrap();
    let shown = controller.vm(&web).await.unwrap();
    assert!(shown.holds() && shown.generation == Generation(1));
    assert_eq!(controller.start(&web).await.unwrap().message, "started");
    assert_eq!(controller.console(&web).await.unwrap().text, "login:");
    let running = controller.put_vm(&put("web", 1)).await;
    refused!(running, WrongState);
    let force = true;
    controller.stop(&web, &StopRequest { force }).await.unwrap();
    // It is off now, so its process gives way to the agent's own writing.
    controller.put_vm(&put("web", 1)).await.unwrap();
    // What its disks were would have a VM process begun for a VM that is gone, in the way of another one of its name.
    let disks = served.host.config.vms_dir().join("web/disks.json");
    let image = served.host.config.vms_dir().join("root.raw.arriving-m");
    let path = served.host.config.vms_dir().join("root.raw");
    let came = serde_json::json!({"arriving": {"migration": "m"}, "disks": [{"name": "root", "path": path}]});
    std::fs::write(&disks, came.to_string()).unwrap();
    let record = || DiskRecord::in_directory(disks.parent().unwrap());
    let stays = || record().unwrap().unwrap().stays();
    assert!(stays().is_empty());
    // One that came there with a migration is somebody's still: it is named, and stays.
    std::fs::write(&image, "image").unwrap();
    assert!(stays()[0].contains(image.to_str().unwrap()));
    controller.delete_vm(&web).await.unwrap();
    refused!(controller.vm(&web).await, UnknownVm);
    assert!(image.exists());
    assert!(!disks.exists() && !served.host.records().needs_process(&web));
    controller.put_vm(&put("web", 2)).await.unwrap();
    controller.start(&web).await.unwrap();
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_in_a_protocol_without_a_common_version_change_nothing() {
    use godwit_types::version::PROTOCOL_HEADER;
    let served = Served::new().await;
    let socket = served.host.config.agent_socket();
    let ask = async |method: &str, path: &str, header: &str| {
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: godwit\r\n{PROTOCOL_HEADER}: {header}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    for header in ["7-8", "0-0", "x"] {
        let refused = ask("POST", "/v1/vms/web/reset", header).await;
        assert!(
            refused.contains("\"incompatible\"") && refused.contains("speaks protocol 1"),
            "{refused}"
        );
        let read = ask("GET", "/v1/host", header).await;
        assert!(read.starts_with("HTTP/1.1 200"), "{read}");
    }
    let known = ask("POST", "/v1/vms/web/reset", "1-9").await;
    assert!(known.contains("unknown-vm"), "{known}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_vm_starts_the_qemu_that_host_toml_names_now() {
    let served = Served::new().await;
    let controller = served.controller();
    let web = vm("web");
    controller.put_vm(&put("web", 1)).await.unwrap();
    controller.start(&web).await.unwrap();
    let pid = || match served.agent.supervised(&web).life() {
        crate::life::Life::Live { pid } => pid,
        other => panic!("{other:?}"),
    };
    let first = pid();
    let told = served.host.run_dir("web").join(crate::launch::CONFIG_FILE);
    let now = std::fs::read_to_string(&told).unwrap();
    let before = now.replace("/nonexistent/qemu", "/nonexistent/qemu-of-before");
    assert_ne!(now, before);
    // With a guest its process stays: that one is not started anew.
    std::fs::write(&told, &before).unwrap();
    controller.start(&web).await.unwrap();
    assert_eq!(pid(), first);
    let force = true;
    controller.stop(&web, &StopRequest { force }).await.unwrap();
    controller.start(&web).await.unwrap();
    assert_ne!(pid(), first);
    assert_eq!(std::fs::read_to_string(&told).unwrap(), now);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_below_the_known_one_is_refused() {
    let served = Served::new().await;
    let moved = Phase::Moved {
        generation: Generation(3),
        migration: godwit_types::MigrationId::new("m1").unwrap(),
        to: host_name("b"),
    };
    served.host.record("web", Generation(1), moved);
    let error = served
        .controller()
        .put_vm(&put("web", 2))
        .await
        .unwrap_err();
    assert_eq!(error.code(), ErrorCode::WrongState);
    assert!(error.to_string().contains("generation 3"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_path_and_the_body_must_name_the_same_vm() {
    let served = Served::new().await;
    let stamp = Stamp::default();
    let client = served
        .tls(&Role::Controller)
        .with_stamps(Arc::new(move || stamp));
    let wait = std::time::Duration::from_secs(10);
    let result: Result<Done, ClientError> = client.put("/v1/vms/other", &put("web", 1), wait).await;
    refused!(result, InvalidRequest);
    let result: Result<Done, ClientError> = client
        .post("/v1/vms/..%2f/start", &serde_json::json!({}), wait)
        .await;
    refused!(result, InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_knows_nothing_refuses_durably_before_it_says_so() {
    let served = Served::new().await;
    let peer = served.client(&Role::Host(host_name("b")));
    let replies = peer.peer(&vm("web"), &ask_holding(2)).await.unwrap();
    assert_eq!(replies.len(), 1, "{replies:?}");
    assert_eq!(replies[0]["message"], "refused");
    let record = served.host.records().record(&vm("web")).unwrap();
    assert!(record.highest >= Generation(2), "{record:?}");
    refused!(peer.peer(&vm("web"), &said(1.into())).await, InvalidRequest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_of_the_host_that_is_meant_answers_nothing_about_who_runs_a_vm() {
    let served = Served::new().await;
    let peer = served.client(&Role::Host(host_name("b")));
    let meant = |machine_id: &str| SiteHost {
        name: host_name("a"),
        address: served.address,
        serial: "1".into(),
        counter: 1,
        machine_id: machine_id.into(),
    };
    let ask = |machine_id| PeerEnvelope {
        meant: Some(meant(machine_id)),
        ..ask_holding(2)
    };
    let refused = peer
        .peer(&vm("web"), &ask("the first one"))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("another machine"), "{refused}");
    let refused_at = || served.host.records().record(&vm("web")).unwrap().highest;
    assert_eq!(refused_at(), Generation(0));
    let replies = peer.peer(&vm("web"), &ask("machine")).await.unwrap();
    assert_eq!((replies.len(), refused_at()), (1, Generation(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_vm_process_answers_the_peer_itself() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    served.agent.take_up().unwrap();
    let peer = served.client(&Role::Host(host_name("b")));
    let message = ask_holding(2);
    let replies = peer.peer(&vm("web"), &message).await.unwrap();
    assert_eq!(replies, [serde_json::json!({ "echo": message.message })]);
    let heard = std::fs::read_to_string(served.host.run_dir("web").join(HEARD)).unwrap();
    assert!(heard.starts_with("b {"), "{heard}");
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_of_ended_migrations_are_shown_without_any_vm_process() {
    let served = Served::new().await;
    served.host.hold("web", Power::Off);
    served.agent.take_up().unwrap();
    let id = godwit_types::MigrationId::new("m7").unwrap();
    let error = served.local().migration(&id).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::UnknownMigration);
    let dir = served.host.config.vms_dir().join("web/migrations");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("torn.json"), "{").unwrap();
    godwit_store::save_json(&dir.join("m7.json"), &ended(&id)).unwrap();
    assert_eq!(served.local().migration(&id).await.unwrap(), ended(&id));
    assert_eq!(served.local().migrations().await.unwrap().len(), 1);
}

pub(crate) fn ended(id: &MigrationId) -> MigrationReport {
    use godwit_types::migration::{Outcome, Side};
    let mut report = MigrationReport::begun(&migration(id), Side::Source, 64, 1);
    report.outcome = Some(Outcome::Completed);
    report
}

fn migration(id: &MigrationId) -> MigrationSpec {
    use godwit_types::migration::{AgentAddress, Cipher, MigrationSecret};
    let address = |name| AgentAddress {
        host: host_name(name),
        address: "127.0.0.1:1".parse().unwrap(),
    };
    MigrationSpec {
        id: id.clone(),
        vm: vm("web"),
        generation: Generation(2),
        source: address("a"),
        destination: address("b"),
        secret: MigrationSecret {
            key: vec![],
            nonce: vec![],
        },
        cipher: Cipher::Aes256Gcm,
        max_downtime_ms: 50,
        deadline_s: None,
        max_bandwidth_mbit_per_s: None,
        max_guest_slowdown_percent: None,
        prepare_memory: false,
        control_protocol: None,
        prediction: None,
        disks: Vec::new(),
        method: godwit_types::disk_move::Method::default(),
        without: Vec::new(),
        images: Vec::new(),
        source_addresses: vec![],
        destination_addresses: vec![],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_s_reason_is_told_as_one_line_that_somebody_reads() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    served.agent.take_up().unwrap();
    let id = MigrationId::new("m1").unwrap();
    served.agent.migrate(migration(&id)).await.unwrap();
    let request = HostCancel {
        reason: Some("why\n".repeat(10_000)),
        vm: Some(vm("web")),
    };
    served.agent.cancel(&id, request).await.unwrap();
    let told = std::fs::read_to_string(served.host.run_dir("web").join(REASON)).unwrap();
    assert!(told.starts_with("why why ") && !told.contains('\n'));
    assert_eq!(told.len(), godwit_ownership::Reason::LEN_MAX);
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_comes_before_its_migration_keeps_it_from_beginning() {
    let served = Served::new().await;
    served.host.hold("web", Power::On);
    served.agent.take_up().unwrap();
    let id = |text: &str| MigrationId::new(text).unwrap();
    let cancel = |name: &str| HostCancel {
        reason: None,
        vm: Some(vm(name)),
    };
    let unknown = HostCancel::default();
    assert_eq!(
        served
            .agent
            .cancel(&id("m1"), unknown)
            .await
            .unwrap_err()
            .code,
        ErrorCode::UnknownMigration
    );
    for (text, name) in [("m1", "web"), ("m2", "new")] {
        served.agent.cancel(&id(text), cancel(name)).await.unwrap();
    }
    let refused = served.agent.migrate(migration(&id("m1"))).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::WrongState);
    let incoming = PrepareIncoming {
        spec: spec("new"),
        accelerator: godwit_types::vm::Accelerator::Tcg,
        migration: migration(&id("m2")),
    };
    let refused = served.agent.prepare_incoming(incoming).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::WrongState);
    served.agent.migrate(migration(&id("m3"))).await.unwrap();
    served.agent.cancel(&id("m3"), cancel("web")).await.unwrap();
    let heard = std::fs::read_to_string(served.host.run_dir("web").join(HEARD)).unwrap();
    assert_eq!(heard, "migrate m3\ncancel m3\n", "no other one came so far");
    assert!(served.agent.supervisor.find(&vm("new")).is_none());
    served.end("web");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_whose_disk_is_another_vms_memory_is_not_made_known_here() {
    let served = Served::new().await;
    let ram = served.host.config.ram_dir().join("victim.1");
    std::fs::write(&ram, [0; 512]).unwrap();
    let mut of_memory = put("web", 1);
    let disk = format!(
        "name = \"x\"\nvcpus = 1\nmemory_mib = 16\nkernel = \"/k\"\n[[disk]]\nname = \"data\"\npath = \"{}\"\n",
        ram.display()
    );
    of_memory.spec.disks = godwit_types::vm::VmSpec::from_toml(&disk).unwrap().disks;
    let refused = served.agent.put_vm(of_memory).await.unwrap_err();
    assert!(
        refused.message.contains("put the file elsewhere"),
        "{refused}"
    );
    assert!(
        !served.host.records().may_hold(&vm("web")),
        "no right was taken"
    );
    served.agent.put_vm(put("web", 1)).await.unwrap();
}
