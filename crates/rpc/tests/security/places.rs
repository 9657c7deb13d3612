//! Who gets a place at a listener, and who gives one back.

use super::*;

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

/// Says something as nobody over TLS and reads until the server ends the connection.
async fn ask_as_stranger(house: &House, text: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let config = godwit_rpc::tls::joining_config(house.ca.fingerprint()).unwrap();
    let stream = tokio::net::TcpStream::connect(house.address).await.unwrap();
    let name = rustls_pki_types::ServerName::IpAddress(house.address.ip().into());
    let connector = tokio_rustls::TlsConnector::from(config);
    let mut stream = connector.connect(name, stream).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    let ended = tokio::time::timeout(DEADLINE, read).await;
    ended.expect("the connection is held open").ok();
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_strangers_connection_ends_with_its_first_answer() {
    let long = Limits {
        head: DEADLINE * 2,
        ..Limits::default()
    };
    let house = house_with(long).await;
    let ask = "GET /whoami HTTP/1.1\r\nhost: x\r\n\r\n";
    let answer = ask_as_stranger(&house, &ask.repeat(2)).await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");
}
