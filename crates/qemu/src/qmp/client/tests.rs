//! The client against a scripted peer over a real socket.

use super::*;
use crate::qmp::{EventKind, EventsError};
use std::io::{BufRead, BufReader, Write};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 1, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}"#;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A peer that negotiates and then does what `script` says.
fn connected(
    script: impl FnOnce(BufReader<UnixStream>, UnixStream) + Send + 'static,
) -> (Client, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().expect("socketpair");
    let peer = thread::spawn(move || {
        writeln!(theirs, "{GREETING}").expect("greeting");
        let mut lines = BufReader::new(theirs.try_clone().expect("clone"));
        let id = asked(&mut lines, "qmp_capabilities");
        writeln!(theirs, "{{\"return\": {{}}, \"id\": {id}}}").expect("answer");
        script(lines, theirs);
    });
    (Client::negotiate(ours, soon()).expect("negotiation"), peer)
}

fn asked(lines: &mut BufReader<UnixStream>, command: &str) -> u64 {
    let mut line = String::new();
    lines.read_line(&mut line).expect("a command");
    let value: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(value["execute"], command);
    value["id"].as_u64().expect("a numeric id")
}

#[test]
fn answers_are_matched_by_id_and_events_pass_between_them() {
    let (client, peer) = connected(|mut lines, mut socket| {
        let id = asked(&mut lines, "query-status");
        let stray = id + 1000;
        write!(
            socket,
            "{{\"return\": 1, \"id\": {stray}}}\r\n{{\"event\": \"STOP\"}}\r\n"
        )
        .expect("write");
        writeln!(
            socket,
            "{{\"return\": {{\"status\": \"paused\"}}, \"id\": {id}}}"
        )
        .expect("write");
        let id = asked(&mut lines, "cont");
        writeln!(
            socket,
            "{{\"id\": {id}, \"error\": {{\"class\": \"GenericError\", \"desc\": \"no\"}}}}"
        )
        .expect("write");
    });
    let events = client.subscribe();
    assert_eq!(
        client
            .execute("query-status", json!({}), soon())
            .expect("an answer")["status"],
        "paused"
    );
    assert_eq!(
        events.try_next().expect("came before the answer").kind,
        EventKind::Stop
    );
    let error = client
        .execute("cont", json!({}), soon())
        .expect_err("refused");
    assert_eq!(
        error.to_string(),
        "the hypervisor refused 'cont': no (GenericError)"
    );
    assert!(error.certainly_not_done());
    peer.join().expect("script");
}

#[test]
fn a_peer_that_dies_ends_the_pending_command_and_every_listener() {
    let (client, peer) = connected(|mut lines, socket| {
        asked(&mut lines, "stop");
        drop(socket);
    });
    let events = client.subscribe();
    let error = client.execute("stop", json!({}), soon()).expect_err("dead");
    assert_eq!(
        error.to_string(),
        "the hypervisor closed its control socket"
    );
    assert!(!error.certainly_not_done());
    assert_eq!(events.next(soon()), Err(EventsError::Closed));
    assert!(client.is_closed());
    assert!(matches!(
        client.execute("stop", json!({}), soon()),
        Err(QmpError::Closed)
    ));
    assert_eq!(client.subscribe().next(soon()), Err(EventsError::Closed));
    peer.join().expect("script");
}

#[test]
fn silence_ends_by_the_deadline_and_a_late_answer_is_dropped() {
    let (release, released) = sync_channel::<()>(1);
    let (client, peer) = connected(move |mut lines, mut socket| {
        let late = asked(&mut lines, "stop");
        released.recv().expect("the deadline has passed");
        writeln!(socket, "{{\"return\": \"late\", \"id\": {late}}}").expect("write");
        let id = asked(&mut lines, "query-status");
        writeln!(socket, "{{\"return\": \"right\", \"id\": {id}}}").expect("write");
    });
    let error = client
        .execute(
            "stop",
            json!({}),
            Instant::now() + Duration::from_millis(20),
        )
        .expect_err("silence");
    assert_eq!(
        error.to_string(),
        "the hypervisor did not answer 'stop' in time"
    );
    release.send(()).expect("script waits");
    assert_eq!(
        client
            .execute("query-status", json!({}), soon())
            .expect("an answer"),
        "right"
    );
    peer.join().expect("script");
}

#[test]
fn a_peer_that_does_not_speak_qmp_is_named() {
    let (client, peer) = connected(|mut lines, mut socket| {
        asked(&mut lines, "stop");
        writeln!(socket, "hello").expect("write");
    });
    let error = client
        .execute("stop", json!({}), soon())
        .expect_err("garbage");
    assert!(
        matches!(error, QmpError::Protocol(ParseError::NotJson { .. })),
        "{error}"
    );
    peer.join().expect("script");
}

#[test]
fn a_silent_listener_gives_no_greeting_in_time() {
    let (ours, _theirs) = UnixStream::pair().expect("socketpair");
    let error =
        Client::negotiate(ours, Instant::now() + Duration::from_millis(10)).expect_err("silence");
    assert!(matches!(error, QmpError::Deadline { .. }), "{error}");
}

#[test]
fn a_full_socket_ends_by_the_deadline() {
    let (client, peer) = connected(|mut lines, _socket| {
        // Reads slower than it is written to, and never answers.
        let mut line = String::new();
        while matches!(lines.read_line(&mut line), Ok(count) if count > 0) {
            line.clear();
        }
    });
    let big = json!({"filler": "x".repeat(32 << 20)});
    let started = Instant::now();
    let error = client
        .execute("stop", big, started + Duration::from_millis(5))
        .expect_err("too much");
    assert!(matches!(error, QmpError::Deadline { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
    drop(client);
    peer.join().expect("script");
}
