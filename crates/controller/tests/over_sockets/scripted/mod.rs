//! A whole controller in this process and scripted agents: real servers of the agent's routes over mutual TLS, whose
//! answers the test decides. Owns its directories and tasks; everything ends with the test.

mod agent;
mod routes;

pub use agent::{Agent, Between, give, hand_over};
use godwit_controller::{Controller, ControllerConfig, Initialised, init};
use godwit_rpc::agent_client::Deadlines;
use godwit_rpc::pki::Request;
use godwit_rpc::{Client, ClientError, ControllerClient, Role, Token};
use godwit_types::control_api::{
    HostState, JoinRequest, JoinResponse, StartRequest, StopRequest, VmView,
};
use godwit_types::drain::DrainRequest;
use godwit_types::migration::MigrateRequest;
use godwit_types::site::Alarm;
use godwit_types::vm::VmState;
use godwit_types::{ErrorCode, HostName, VmName, VmSpec};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpListener;

/// A stop by the guest's own means.
pub const STOP: StopRequest = StopRequest { force: false };
/// A stop without asking the guest.
pub const FORCED: StopRequest = StopRequest { force: true };
/// A start on the host that the controller chooses.
pub const ANYWHERE: StartRequest = StartRequest { on: None };

/// All VMs of a host, anywhere.
pub const DRAIN: DrainRequest = DrainRequest {
    dry_run: false,
    at_once: None,
    to: Vec::new(),
};

/// Longest wait for anything.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub fn host(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

/// A move there that nothing special is asked of.
pub fn to(name: &str) -> MigrateRequest {
    MigrateRequest::plain(host(name))
}

pub fn vm(name: &str) -> VmName {
    VmName::new(name).unwrap()
}

pub fn spec(name: &str) -> VmSpec {
    VmSpec::from_toml(&format!(
        "name = \"{name}\"\nvcpus = 1\nmemory_mib = 64\nkernel = \"/boot/vmlinuz\"\n[[nic]]\nport_group = \"vm\""
    ))
    .unwrap()
}

/// Asserts that a call was refused with this code.
macro_rules! refused {
    ($answer:expr, $code:ident) => {
        assert_eq!(
            crate::scripted::code($answer),
            godwit_types::ErrorCode::$code
        )
    };
}
pub(crate) use refused;

pub fn code<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorCode {
    result.unwrap_err().code()
}

/// A controller and its hosts.
pub struct House {
    pub dir: tempfile::TempDir,
    pub config: ControllerConfig,
    pub made: Initialised,
    controller: Option<Controller>,
}

impl House {
    /// A controller without hosts.
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let mut config = ControllerConfig::new(
            dir.path().join("state"),
            dir.path().join("api.sock"),
            vec![address],
        );
        config.poll_every = Duration::from_millis(20);
        config.watch_every = Duration::from_millis(20);
        config.deadlines = Deadlines {
            read: Duration::from_secs(5),
            act: Duration::from_secs(5),
            slow: Duration::from_secs(5),
        };
        let made = init(&config).await.unwrap();
        let mut house = Self {
            dir,
            config,
            made,
            controller: None,
        };
        house.start().await;
        house
    }

    pub async fn start(&mut self) {
        self.controller = Some(Controller::start(self.config.clone()).await.unwrap());
    }

    pub async fn stop(&mut self) {
        self.controller.take().unwrap().stop().await;
    }

    /// Does this to the database; the controller stands still.
    pub async fn execute(&self, sql: &str) {
        use sqlx::ConnectOptions as _;
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(self.database());
        let mut database = options.connect().await.unwrap();
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        sqlx::query(sql).execute(&mut database).await.unwrap();
    }

    /// The controller's database in this moment.
    pub fn database(&self) -> std::path::PathBuf {
        self.config.state_dir.join("controller.db")
    }

    pub fn address(&self) -> SocketAddr {
        self.controller.as_ref().unwrap().addresses[0]
    }

    pub fn client(&self) -> ControllerClient {
        ControllerClient::new(Client::unix(&self.config.socket))
    }

    pub fn joining(&self, token: &Token) -> ControllerClient {
        ControllerClient::new(Client::joining(self.address(), token.fingerprint).unwrap())
    }

    pub async fn token(&self) -> Token {
        Token::parse(&self.client().add_host().await.unwrap().token).unwrap()
    }

    /// Asks to join under a name, with this address and a key of its own.
    pub async fn join(
        &self,
        name: &str,
        agent_address: SocketAddr,
        key: &Request,
    ) -> Result<JoinResponse, ClientError> {
        let token = self.token().await;
        let request = JoinRequest {
            secret: token.secret().to_owned(),
            name: host(name),
            agent_address,
            csr_pem: key.csr_pem.clone(),
            former: None,
        };
        self.joining(&token).join(&request).await
    }

    /// Enrols a scripted agent and waits until it is connected.
    pub async fn host(&self, name: &str) -> Agent {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let key = Request::new().unwrap();
        let joined = self.join(name, address, &key).await.unwrap();
        let identity = key
            .into_identity(joined.certificate_pem, joined.ca_pem)
            .unwrap();
        assert_eq!(identity.holder().unwrap().role, Role::Host(host(name)));
        let mut agent = Agent::new(host(name), address, identity);
        agent.serve(listener).await;
        self.until(async |house: &House| house.connected(name).await)
            .await;
        agent
    }

    /// Waits until a host is known to answer, or not to.
    pub async fn until_host(&self, name: &str, state: HostState) {
        self.until(async |house: &House| {
            let view = house.client().host(&host(name)).await.unwrap();
            view.state == state
        })
        .await;
    }

    async fn connected(self: &House, name: &str) -> bool {
        let hosts = self.client().hosts().await.unwrap();
        hosts
            .iter()
            .any(|host| host.info.name.as_str() == name && host.state == HostState::Connected)
    }

    /// Waits until something holds, looking again at every change of the inventory.
    pub async fn until(&self, holds: impl AsyncFn(&House) -> bool) {
        let wait = async {
            let mut events = self.client().events().await.unwrap();
            while !holds(self).await {
                events.next(DEADLINE).await.unwrap();
            }
        };
        tokio::time::timeout(DEADLINE, wait)
            .await
            .expect("it never came to that");
    }

    /// Waits until the controller may grant.
    pub async fn until_in_charge(&self) {
        self.until(async |house: &House| house.client().site().await.unwrap().in_charge)
            .await;
    }

    /// Waits until this is among the alarms.
    pub async fn until_alarm(&self, alarm: &Alarm) {
        self.until(async |house: &House| {
            let site = house.client().site().await.unwrap();
            site.alarms.contains(alarm)
        })
        .await;
    }

    /// Waits until there is no alarm.
    pub async fn until_no_alarm(&self) {
        self.until(async |house: &House| house.client().site().await.unwrap().alarms.is_empty())
            .await;
    }

    /// Waits until no migration of a VM is under way.
    pub async fn until_not_moving(&self, name: &str) {
        self.until(async |house: &House| house.vm(name).await.migration.is_none())
            .await;
    }

    pub async fn vm(&self, name: &str) -> VmView {
        self.client().vm(&vm(name)).await.unwrap()
    }

    /// Waits until a VM is in this state on this host.
    pub async fn until_vm(&self, name: &str, state: VmState, on: &str) {
        self.until(async |house: &House| {
            let view = house.vm(name).await;
            view.state == state && view.host == Some(host(on))
        })
        .await;
    }

    /// Creates a VM and starts it there.
    pub async fn running(&self, name: &str, on: &str) {
        let client = self.client();
        client.create_vm(&spec(name)).await.unwrap();
        let request = StartRequest { on: Some(host(on)) };
        client.start(&vm(name), &request).await.unwrap();
    }
}
