//! What a client takes of an answer: bounded bytes, a bounded time, and words that fit on a screen.

use godwit_rpc::{AgentClient, Client, ClientError};
use godwit_types::VmName;
use godwit_types::console::ConsoleQuery;
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

/// One agent that answers one request with these pieces, a pause before each but the first.
async fn agent(pieces: Vec<Vec<u8>>, pause: Duration) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        let _ = stream.read(&mut head).await.unwrap();
        for (index, piece) in pieces.iter().enumerate() {
            if index > 0 {
                tokio::time::sleep(pause).await;
            }
            if stream.write_all(piece).await.is_err() {
                return;
            }
        }
        // The connection stays open: only the client's own bounds end it.
        let _ = stream.read(&mut head).await;
    });
    (dir, path)
}

fn head(status: &str, length: usize) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n").into_bytes()
}

async fn vms_of(path: &std::path::Path) -> Result<usize, ClientError> {
    let client = AgentClient::new(Client::unix(path));
    client.vms().await.map(|vms| vms.len())
}

#[tokio::test]
async fn an_answer_that_is_announced_too_long_is_refused_unread() {
    let (_dir, path) = agent(vec![head("200 OK", usize::MAX / 4)], Duration::ZERO).await;
    let error = vms_of(&path).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ClientError::TooLong { .. }), "{text}");
    assert!(text.contains(&path.display().to_string()), "{text}");
}

#[tokio::test]
async fn an_answer_that_goes_on_and_on_is_ended_at_its_bound() {
    let mut pieces = vec![b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec()];
    let chunk = [
        b"100000\r\n".to_vec(),
        vec![b' '; 1 << 20],
        b"\r\n".to_vec(),
    ]
    .concat();
    pieces.extend(std::iter::repeat_n(chunk, 40));
    let (_dir, path) = agent(pieces, Duration::ZERO).await;
    let error = vms_of(&path).await.unwrap_err();
    assert!(matches!(error, ClientError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_long_answer_over_a_slow_link_is_heard_to_its_end() {
    let body = format!("[{}]", " ".repeat(3_500_000)).into_bytes();
    let mut pieces = vec![head("200 OK", body.len())];
    pieces.extend(body.chunks(body.len() / 5).map(<[u8]>::to_vec));
    let (_dir, path) = agent(pieces, Duration::from_millis(900)).await;
    // Together longer than the three seconds in which a host must begin to answer.
    assert_eq!(vms_of(&path).await.unwrap(), 0);
}

#[tokio::test]
async fn an_answer_that_stops_in_the_middle_is_given_up() {
    let (_dir, path) = agent(vec![head("200 OK", 10), b"[".to_vec()], Duration::ZERO).await;
    let error = vms_of(&path).await.unwrap_err();
    assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
}

#[tokio::test]
async fn the_words_of_a_refusal_are_bounded() {
    let body = format!(
        r#"{{"code":"internal","message":"{}"}}"#,
        "x".repeat(900_000)
    );
    let mut refusal = head("500 Internal Server Error", body.len());
    refusal.extend(body.as_bytes());
    let (_dir, path) = agent(vec![refusal], Duration::ZERO).await;
    let error = vms_of(&path).await.unwrap_err();
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
    assert!(error.to_string().len() < 5_000);
}

#[tokio::test]
async fn a_stream_in_which_nothing_happens_is_heard_for_as_long_as_it_is_kept_alive() {
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len()).into_bytes();
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut pieces = vec![head.as_bytes().to_vec()];
    pieces.extend(std::iter::repeat_n(chunk(":\n\n"), 6));
    pieces.push(chunk("event: console\ndata: x\n\n"));
    let (_dir, path) = agent(pieces, Duration::from_millis(400)).await;
    let client = AgentClient::new(Client::unix(&path));
    let name = VmName::new("web").unwrap();
    let events = client.console_events(&name, &ConsoleQuery::default()).await;
    let mut events = events.unwrap();
    // All in all it takes longer, and each silence is shorter.
    let silence = Duration::from_secs(2);
    let event = events.next_while_heard(silence).await.unwrap().unwrap();
    assert_eq!((event.name.as_str(), event.data.as_str()), ("console", "x"));
    let error = events.next_while_heard(silence).await.unwrap_err();
    assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
}
