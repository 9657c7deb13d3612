//! Who gets a place at a listener, and who gives one back.

use super::*;
use godwit_rpc::limits::{CONNECTIONS_FOR_CONTROLLER, CONNECTIONS_MAX, CONNECTIONS_PER_HOLDER};

#[tokio::test]
async fn a_stranger_with_many_connections_locks_nobody_out() {
    let long = Limits {
        handshake: DEADLINE,
        ..Limits::default()
    };
    let house = house_with(long).await;
    // None of them says a word.
    let mut strangers = Vec::new();
    for _ in 0..600 {
        let stream = tokio::net::TcpStream::connect(house.address).await;
        strangers.push(stream.unwrap());
    }
    let client = house.client(&host("a"));
    assert_eq!(house.whoami(&client).await.unwrap(), "host a");
    let local = house.whoami(&Client::unix(&house.socket)).await.unwrap();
    assert!(!local.is_empty());
    // One that waits to join has its turn too, and the oldest stranger made room.
    let joining = Client::joining(house.address, house.ca.fingerprint()).unwrap();
    let joined: Result<Done, _> = joining.post("/join", &1, DEADLINE).await;
    assert_eq!(joined.unwrap().message, "joined");
    let mut byte = [0];
    let end = tokio::io::AsyncReadExt::read(&mut strangers[0], &mut byte).await;
    assert_eq!(end.unwrap_or(0), 0, "the oldest was not sent away");
}

type Tls = tokio_rustls::client::TlsStream<tokio::net::TcpStream>;

const ASK: &[u8] = b"GET /whoami HTTP/1.1\r\nhost: x\r\n\r\n";

/// Ends no connection for its silence before a test gives up.
async fn patient_house() -> House {
    let long = Limits {
        head: DEADLINE * 2,
        ..Limits::default()
    };
    house_with(long).await
}

/// TLS without a client that reads.
async fn dial(house: &House, config: Arc<rustls::ClientConfig>) -> Tls {
    let stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let name = rustls_pki_types::ServerName::IpAddress(house.address.ip().into());
    let connector = tokio_rustls::TlsConnector::from(config);
    connector.connect(name, stream).await.unwrap()
}

async fn connect_as(house: &House, identity: &Identity) -> Tls {
    let config = godwit_rpc::tls::client_config(identity, Role::Controller, None);
    dial(house, config.unwrap()).await
}

async fn connect(house: &House, role: &Role) -> Tls {
    connect_as(house, &house.identity(role)).await
}

/// What comes until the server ends the connection.
async fn the_rest(stream: &mut Tls) -> String {
    use tokio::io::AsyncReadExt as _;
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    let ended = tokio::time::timeout(DEADLINE, read).await;
    ended.expect("the connection is held open").ok();
    String::from_utf8(rest).unwrap()
}

#[tokio::test]
async fn a_strangers_connection_ends_with_its_first_answer() {
    use tokio::io::AsyncWriteExt as _;
    let house = patient_house().await;
    let config = godwit_rpc::tls::joining_config(house.ca.fingerprint()).unwrap();
    let mut stream = dial(&house, config).await;
    stream.write_all(&ASK.repeat(2)).await.unwrap();
    let answer = the_rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
}

/// An attacker had an operator's certificate revoked and held all places of a listener with it.
#[tokio::test]
async fn a_removed_certificate_with_many_connections_locks_nobody_out() {
    let house = patient_house().await;
    let eve = house.identity(&operator("eve"));
    house.revocations.revoke(eve.holder().unwrap().serial);
    let joe = house.identity(&operator("joe"));
    house.revocations.revoke(joe.holder().unwrap().serial);
    let mut open = Vec::new();
    for number in 0..CONNECTIONS_MAX + 20 {
        // None of them says a word.
        let identity = if number % 2 == 0 { &eve } else { &joe };
        open.push(connect_as(&house, identity).await);
    }
    let client = house.client(&host("a"));
    assert_eq!(house.whoami(&client).await.unwrap(), "host a");
}

#[tokio::test]
async fn a_connection_ends_with_the_first_answer_after_its_certificate_was_revoked() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let house = patient_house().await;
    let eve = house.identity(&operator("eve"));
    let mut stream = connect_as(&house, &eve).await;
    stream.write_all(ASK).await.unwrap();
    let mut first = Vec::new();
    while !first.windows(3).any(|part| part == b"eve") {
        assert!(stream.read_buf(&mut first).await.unwrap() > 0);
    }
    house.revocations.revoke(eve.holder().unwrap().serial);
    stream.write_all(&ASK.repeat(2)).await.unwrap();
    let rest = the_rest(&mut stream).await;
    assert_eq!(rest.matches("HTTP/1.1 403").count(), 1, "{rest}");
    assert_eq!(rest.matches("HTTP/1.1").count(), 1, "{rest}");
}

/// Whether the server has closed a connection before it was asked anything.
async fn is_sent_away(house: &House, role: &Role) -> bool {
    use tokio::io::AsyncReadExt as _;
    let mut stream = connect(house, role).await;
    let mut byte = [0];
    let read = tokio::time::timeout(DEADLINE, stream.read(&mut byte)).await;
    read.is_ok_and(|read| read.unwrap_or(0) == 0)
}

#[tokio::test]
async fn one_holder_gets_half_of_the_places_and_the_last_ones_are_the_controllers() {
    let house = patient_house().await;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS_PER_HOLDER {
        open.push(connect(&house, &host("b")).await);
    }
    assert!(is_sent_away(&house, &host("b")).await);
    let client = house.client(&host("a"));
    assert_eq!(house.whoami(&client).await.unwrap(), "host a");
    for _ in CONNECTIONS_PER_HOLDER..CONNECTIONS_MAX - CONNECTIONS_FOR_CONTROLLER {
        open.push(connect(&house, &host("c")).await);
    }
    assert!(is_sent_away(&house, &host("a")).await);
    // The controller is let in, and answered, whatever it may ask here.
    let controller = house.client(&Role::Controller);
    let answer = house.whoami(&controller).await;
    assert!(
        !matches!(&answer, Err(error) if !matches!(error, ClientError::Refused(_))),
        "{answer:?}"
    );
    // A place is given back.
    drop(open.pop());
    while house.whoami(&client).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn who_reads_no_answers_is_sent_away() {
    use tokio::io::AsyncWriteExt as _;
    let short = Limits {
        head: DEADLINE * 10,
        write: Duration::from_millis(200),
        ..Limits::default()
    };
    let house = house_with(short).await;
    let mut stream = connect(&house, &host("b")).await;
    let asks = ASK.repeat(1000);
    // Until answers fill what the kernel keeps of them, and then until the server ends it.
    let ended = tokio::time::timeout(DEADLINE, async {
        while stream.write_all(&asks).await.is_ok() {}
    });
    ended.await.expect("the connection is held open");
}
