//! Real servers and clients over real sockets: who gets in, how far, and what hostile clients meet.

mod places;

use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use godwit_rpc::access::{Access, Rule, rule};
use godwit_rpc::limits::{Limits, REQUEST_LEN_MAX};
use godwit_rpc::pki::now_unix_s;
use godwit_rpc::unix_socket::OwnSocket;
use godwit_rpc::{
    Authority, Client, ClientError, Current, Fingerprint, Identity, JsonBody, PathParam, Peer,
    Revocations, Role, Server, agent_client, controller_client,
};
use godwit_types::control_api::{CancelRequest, Done};
use godwit_types::{ApiError, ErrorCode, HostName, VmName};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, watch};

const DEADLINE: Duration = Duration::from_secs(60);
/// What a client that is too slow is given.
const SHORT: Duration = Duration::from_millis(200);
const RULES: &[Rule] = &[
    rule("GET", "/whoami", Access::PEOPLE.or(Access::HOST)),
    rule("POST", "/join", Access::ANYONE),
    rule("POST", "/vms/{name}", Access::PEOPLE),
    rule("POST", "/slow", Access::PEOPLE),
    rule("POST", "/faulty", Access::PEOPLE),
];

struct House {
    ca: Authority,
    address: SocketAddr,
    socket: PathBuf,
    revocations: Arc<Revocations>,
    joins: Arc<AtomicUsize>,
    serial: String,
    begun: Arc<Notify>,
    go: Arc<Notify>,
    finished: Arc<Notify>,
    _dir: tempfile::TempDir,
    _stop: watch::Sender<bool>,
}

fn host(name: &str) -> Role {
    Role::Host(HostName::new(name).unwrap())
}

fn operator(name: &str) -> Role {
    Role::Operator(HostName::new(name).unwrap())
}

async fn house() -> House {
    house_with(Limits::default()).await
}

async fn house_with(limits: Limits) -> House {
    let ca = Authority::create(now_unix_s()).unwrap();
    let joins = Arc::new(AtomicUsize::new(0));
    let counted = joins.clone();
    let join = move |JsonBody(_): JsonBody<serde_json::Value>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { done("joined") }
    };
    let named = |PathParam(name): PathParam<VmName>, JsonBody(body): JsonBody<CancelRequest>| async move {
        done(&format!("{name} {:?}", body.reason))
    };
    let [begun, go, finished] = std::array::from_fn(|_| Arc::new(Notify::new()));
    let (begins, go_on, end) = (begun.clone(), go.clone(), finished.clone());
    let slow = move || async move {
        begins.notify_one();
        go_on.notified().await;
        end.notify_one();
        done("slow")
    };
    let router = Router::new()
        .route("/slow", post(slow))
        .route("/faulty", post(faulty))
        .route(
            "/whoami",
            get(|Extension(peer): Extension<Peer>| async move { done(&peer.to_string()) }),
        )
        .route("/join", post(join))
        .route("/vms/{name}", post(named))
        .route(
            "/forgotten",
            get(|| async { done("a route without a rule") }),
        );
    let revocations = Arc::new(Revocations::default());
    let server = Server::new(router, RULES, revocations.clone()).with_limits(limits);
    let (_stop, stopped) = watch::channel(false);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let unix = godwit_rpc::unix_socket::bind_unix(&socket).unwrap();
    tokio::spawn(server.clone().run_unix(unix, stopped.clone()));
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let identity = ca.identity(&Role::Controller, now_unix_s()).unwrap();
    let config = godwit_rpc::tls::server_config(&identity).unwrap();
    tokio::spawn(server.run_tls(tcp, config, stopped));
    House {
        ca,
        address,
        socket,
        revocations,
        joins,
        serial: identity.holder().unwrap().serial,
        begun,
        go,
        finished,
        _dir: dir,
        _stop,
    }
}

async fn faulty() -> Json<Done> {
    panic!("a fault on purpose")
}

fn done(message: &str) -> Json<Done> {
    Json(Done {
        message: message.into(),
    })
}

impl House {
    fn identity(&self, role: &Role) -> Identity {
        self.ca.identity(role, now_unix_s()).unwrap()
    }

    fn client(&self, role: &Role) -> Client {
        Client::tls(self.address, &self.identity(role), Role::Controller).unwrap()
    }

    async fn whoami(&self, client: &Client) -> Result<String, ClientError> {
        client
            .get::<Done>("/whoami", DEADLINE)
            .await
            .map(|done| done.message)
    }

    /// Sends raw bytes over the Unix socket and reads until the server closes.
    async fn raw(&self, bytes: &'static [u8]) -> String {
        let socket = self.socket.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.write_all(bytes).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).unwrap();
            String::from_utf8(answer).unwrap()
        })
        .await
        .unwrap()
    }
}

fn refused(error: &ClientError) -> ErrorCode {
    match error {
        ClientError::Refused(ApiError { code, .. }) => *code,
        other => panic!("not a refusal of ours: {other}"),
    }
}

#[tokio::test]
async fn each_peer_is_known_for_what_it_is() {
    let house = house().await;
    assert_eq!(
        house.whoami(&house.client(&host("a"))).await.unwrap(),
        "host a"
    );
    assert_eq!(
        house.whoami(&house.client(&operator("eve"))).await.unwrap(),
        "operator eve"
    );
    let local = house.whoami(&Client::unix(&house.socket)).await.unwrap();
    let uid = std::fs::metadata(&house.socket)
        .map(|m| std::os::unix::fs::MetadataExt::uid(&m))
        .unwrap();
    assert_eq!(local, format!("local user {uid}"));
}

#[tokio::test]
async fn a_wrong_fingerprint_is_refused_before_anything_is_sent() {
    let house = house().await;
    let wrong = Client::joining(house.address, Fingerprint([1; 32])).unwrap();
    let secret = serde_json::json!({"secret": "x"});
    let error = wrong
        .post::<_, Done>("/join", &secret, DEADLINE)
        .await
        .unwrap_err();
    assert!(matches!(error, ClientError::NotReached { .. }), "{error}");
    assert!(!error.may_be_done());
    assert_eq!(house.joins.load(Ordering::SeqCst), 0);
    let right = Client::joining(house.address, house.ca.fingerprint()).unwrap();
    right
        .post::<_, Done>("/join", &secret, DEADLINE)
        .await
        .unwrap();
    assert_eq!(house.joins.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn without_a_certificate_only_joining_is_open() {
    let house = house().await;
    let nobody = Client::joining(house.address, house.ca.fingerprint()).unwrap();
    for path in ["/whoami", "/forgotten", "/nowhere"] {
        let error = nobody.get::<Done>(path, DEADLINE).await.unwrap_err();
        assert_eq!(refused(&error), ErrorCode::NotAllowed, "{path}");
    }
    let error = nobody
        .put::<_, Done>("/join", &(), DEADLINE)
        .await
        .unwrap_err();
    assert_eq!(refused(&error), ErrorCode::NotAllowed);
}

#[tokio::test]
async fn a_certificate_of_another_ca_is_refused_on_both_sides() {
    let house = house().await;
    let other = Authority::create(now_unix_s()).unwrap();
    let mut stranger = other.identity(&operator("eve"), now_unix_s()).unwrap();
    // It does not trust this house...
    let client = Client::tls(house.address, &stranger, Role::Controller).unwrap();
    let error = house.whoami(&client).await.unwrap_err();
    assert!(matches!(error, ClientError::NotReached { .. }), "{error}");
    // ... and is not trusted when it pretends to.
    stranger.ca_pem = house.ca.certificate_pem().to_owned();
    let client = Client::tls(house.address, &stranger, Role::Controller).unwrap();
    let error = house.whoami(&client).await.unwrap_err();
    assert!(!matches!(error, ClientError::Refused(_)), "{error}");
}

#[tokio::test]
async fn a_server_of_another_role_is_not_talked_to() {
    let house = house().await;
    let identity = house.identity(&operator("eve"));
    let client = Client::tls(house.address, &identity, host("a")).unwrap();
    let error = house.whoami(&client).await.unwrap_err();
    assert!(error.to_string().contains("not of host a"), "{error}");
}

#[tokio::test]
async fn an_expired_certificate_is_refused() {
    let house = house().await;
    let two_years_ago = now_unix_s() - 730 * 86_400;
    let old = house.ca.identity(&operator("eve"), two_years_ago).unwrap();
    let client = Client::tls(house.address, &old, Role::Controller).unwrap();
    let error = house.whoami(&client).await.unwrap_err();
    assert!(!matches!(error, ClientError::Refused(_)), "{error}");
}

#[tokio::test]
async fn a_revoked_certificate_is_refused_and_the_next_one_is_not() {
    let house = house().await;
    let identity = house.identity(&host("a"));
    let client = Client::tls(house.address, &identity, Role::Controller).unwrap();
    assert!(house.whoami(&client).await.is_ok());
    house.revocations.revoke(identity.holder().unwrap().serial);
    let error = house.whoami(&client).await.unwrap_err();
    assert_eq!(refused(&error), ErrorCode::NotAllowed);
    assert!(house.whoami(&house.client(&host("a"))).await.is_ok());
}

#[tokio::test]
async fn a_host_may_not_call_what_is_for_people() {
    let house = house().await;
    let body = CancelRequest::default();
    let error = house
        .client(&host("a"))
        .post::<_, Done>("/vms/web", &body, DEADLINE)
        .await
        .unwrap_err();
    assert_eq!(refused(&error), ErrorCode::NotAllowed);
    let done: Done = house
        .client(&operator("eve"))
        .post("/vms/web", &body, DEADLINE)
        .await
        .unwrap();
    assert_eq!(done.message, "web None");
}

#[tokio::test]
async fn what_is_wrong_with_a_request_has_a_stable_code() {
    let house = house().await;
    let local = Client::unix(&house.socket);
    let post = |path: &'static str, body: serde_json::Value| {
        let local = local.clone();
        async move {
            refused(
                &local
                    .post::<_, Done>(path, &body, DEADLINE)
                    .await
                    .unwrap_err(),
            )
        }
    };
    let unknown_key = serde_json::json!({"raison": "x"});
    assert_eq!(
        post("/vms/web", unknown_key).await,
        ErrorCode::InvalidRequest
    );
    assert_eq!(
        post("/vms/web", serde_json::json!([1])).await,
        ErrorCode::InvalidRequest
    );
    let empty = serde_json::json!({});
    assert_eq!(
        post("/vms/..%2Fx", empty.clone()).await,
        ErrorCode::InvalidRequest
    );
    assert_eq!(
        post("/vms/a'%3B--", empty.clone()).await,
        ErrorCode::InvalidRequest
    );
    assert_eq!(post("/nowhere", empty.clone()).await, ErrorCode::NotFound);
    assert_eq!(post("/whoami", empty).await, ErrorCode::MethodNotAllowed);
    let error = local.get::<Done>("/forgotten", DEADLINE).await.unwrap_err();
    assert_eq!(refused(&error), ErrorCode::NotAllowed);
    let long = serde_json::json!({"reason": "x".repeat(REQUEST_LEN_MAX)});
    let error = local
        .post::<_, Done>("/vms/web", &long, DEADLINE)
        .await
        .unwrap_err();
    assert_eq!(refused(&error), ErrorCode::TooLarge);
}

#[tokio::test]
async fn a_huge_announced_length_is_refused_unread() {
    let house = house().await;
    let head = b"POST /vms/web HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{";
    let answer = house.raw(head).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("too-large"), "{answer}");
}

#[tokio::test]
async fn a_host_that_is_cut_off_is_known_before_anything_was_asked_of_it() {
    let house = house().await;
    // Whoever it is takes the connection and says nothing.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mute.local_addr().unwrap();
    let identity = house.identity(&Role::Controller);
    let client = Client::tls(address, &identity, Role::Controller).unwrap();
    let minute = Duration::from_secs(60);
    let asked = client.get::<Done>("/vms/web", minute);
    let error = tokio::time::timeout(Duration::from_secs(20), asked).await;
    let error = error.expect("it waits too long").unwrap_err();
    assert!(matches!(error, ClientError::NotReached { .. }), "{error}");
    assert!(!error.may_be_done());
}

#[tokio::test]
async fn clients_that_trickle_are_cut_off() {
    let house = house_with(Limits {
        head: SHORT,
        ..Limits::default()
    });
    let answer = house.await.raw(b"GET /whoami HTT").await;
    assert!(!answer.contains("200"), "{answer}");
    let house = house_with(Limits {
        body: SHORT,
        ..Limits::default()
    });
    let head = b"POST /vms/web HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{";
    let answer = house.await.raw(head).await;
    assert!(answer.contains("deadline-missed"), "{answer}");
}

#[tokio::test]
async fn a_client_waits_no_longer_than_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("silent.sock");
    let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let call = Client::unix(&path);
    let error = call
        .get::<Done>("/", Duration::from_millis(50))
        .await
        .unwrap_err();
    assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
    assert!(error.may_be_done());
}

#[tokio::test]
async fn a_socket_is_for_its_group_and_is_not_taken_from_the_living() {
    let house = house().await;
    let mode = std::fs::metadata(&house.socket)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o660);
    assert!(godwit_rpc::unix_socket::bind_unix(&house.socket).is_err());
    let dead = house.socket.with_file_name("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    assert!(godwit_rpc::unix_socket::bind_unix(&dead).is_ok());
}

#[tokio::test]
async fn a_program_that_ends_takes_its_socket_away_and_no_other_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own.sock");
    let first = godwit_rpc::unix_socket::bind_unix(&path).unwrap();
    let own = OwnSocket::of(path.clone());
    drop(first);
    let _next = godwit_rpc::unix_socket::bind_unix(&path).unwrap();
    let next = OwnSocket::of(path.clone());
    own.remove();
    assert!(path.exists(), "the socket is another program's");
    next.remove();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_request_runs_to_its_end_though_its_client_is_gone() {
    let house = house().await;
    let call = Client::unix(&house.socket);
    let client = tokio::spawn(async move { call.post::<_, Done>("/slow", &(), DEADLINE).await });
    tokio::time::timeout(DEADLINE, house.begun.notified())
        .await
        .unwrap();
    client.abort();
    assert!(client.await.is_err_and(|end| end.is_cancelled()));
    house.go.notify_one();
    tokio::time::timeout(DEADLINE, house.finished.notified())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_fault_in_a_handler_is_an_answer() {
    let house = house().await;
    let call = Client::unix(&house.socket);
    let error = call
        .post::<_, Done>("/faulty", &(), DEADLINE)
        .await
        .unwrap_err();
    assert_eq!(refused(&error), ErrorCode::Internal);
    assert!(house.whoami(&call).await.is_ok());
}

#[tokio::test]
async fn a_client_does_not_talk_to_a_server_whose_certificate_was_revoked() {
    let house = house().await;
    let identity = house.identity(&operator("eve"));
    let revocations = Arc::new(Revocations::default());
    let admission: Arc<Revocations> = revocations.clone();
    let client =
        Client::tls_admitted(house.address, &identity, Role::Controller, Some(admission)).unwrap();
    assert!(house.whoami(&client).await.is_ok());
    revocations.revoke(house.serial.clone());
    let error = house.whoami(&client).await.unwrap_err();
    assert!(matches!(error, ClientError::NotReached { .. }), "{error}");
}

#[test]
fn the_tables_of_rules_say_what_they_should() {
    let may = |rules: &[Rule], peer: &Peer| -> Vec<String> {
        let allowed = rules.iter().filter(|rule| rule.access.allows(peer));
        allowed
            .map(|rule| format!("{} {}", rule.method, rule.path))
            .collect()
    };
    let a = Peer::Host(HostName::new("a").unwrap());
    let (agent, controller) = (agent_client::RULES, controller_client::RULES);
    let ask = "POST /v1/site/ask";
    assert_eq!(may(agent, &a), ["POST /v1/vms/{name}/peer", ask]);
    let [look, renew, leave] =
        ["GET", "POST", "DELETE"].map(|method| format!("{method} /v1/certificate"));
    let own = ["POST /v1/join", &look, &renew, &leave, ask];
    assert_eq!(may(controller, &a), own);
    let operator = may(controller, &Peer::Operator("eve".into()));
    for made_here in ["POST /v1/operators", "DELETE /v1/operators/{name}"] {
        assert!(!operator.contains(&made_here.to_owned()), "{made_here}");
    }
    assert_eq!(may(controller, &Peer::Anonymous), ["POST /v1/join"]);
    assert_eq!(may(controller, &Peer::Controller), ["POST /v1/join"]);
    assert!(may(agent, &Peer::Anonymous).is_empty());
    assert!(
        may(agent, &Peer::Operator("eve".into()))
            .iter()
            .all(|rule| rule.starts_with("GET "))
    );
    let not_for_controllers = [
        "/peer",
        "/ask",
        "/boot-alone",
        "/certificate",
        "/forget-record",
        "GET /close",
        "POST /close",
        "/open",
    ];
    assert!(may(agent, &Peer::Controller).len() == agent.len() - not_for_controllers.len());
    for rules in [agent, controller] {
        let open = rules.iter().filter(|rule| rule.also_removed);
        let open: Vec<&str> = open.map(|rule| rule.path).collect();
        assert_eq!(open, ["/v1/site/ask"], "what a removed host may still call");
    }
}

#[tokio::test]
async fn a_server_shows_a_renewed_certificate_without_a_restart() {
    let house = house().await;
    let seen = Arc::new(Revocations::default());
    let current = Current::new(house.identity(&Role::Controller)).unwrap();
    let first = current.holder().serial;
    let router = Router::new().route("/whoami", get(|| async { done("here") }));
    let server = Server::new(router, RULES, seen.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = godwit_rpc::tls::server_config_of(&current).unwrap();
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(server.run_tls(listener, config, stopped));
    // Who refuses the first certificate sees which one is shown.
    let refuses_first = Arc::new(Revocations::default());
    refuses_first.revoke(first);
    let identity = house.identity(&operator("eve"));
    let admission = Some(refuses_first as _);
    let client = Client::tls_admitted(address, &identity, Role::Controller, admission).unwrap();
    assert!(client.get::<Done>("/whoami", DEADLINE).await.is_err());
    current.replace(house.identity(&Role::Controller)).unwrap();
    client.get::<Done>("/whoami", DEADLINE).await.unwrap();
}
