//! A client against guests that answer well, late, wrongly, without end or not at all.

use super::*;
use crate::sync::lock;
use std::io::{BufRead as _, BufReader, Write as _};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;

/// The guest's side of a port, in a thread.
pub(crate) struct Guest {
    pub port: Arc<Port>,
    connections: Arc<AtomicUsize>,
    _directory: tempfile::TempDir,
    _thread: JoinHandle<()>,
}

/// What a guest says to a command; of a mark the true answer is given to it.
pub(crate) type Say = Box<dyn FnMut(&Value, &mut UnixStream) + Send>;

impl Guest {
    /// One that hears each line of each connection, as JSON, and says what it likes.
    pub(crate) fn that(mut say: Say) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let listener = listen(&path).unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let thread = std::thread::spawn(move || {
            // As QEMU: one connection after the other.
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                counted.fetch_add(1, Ordering::SeqCst);
                let mut lines = BufReader::new(stream.try_clone().unwrap());
                let mut line = Vec::new();
                while lines
                    .read_until(b'\n', &mut line)
                    .is_ok_and(|count| count > 0)
                {
                    let begins = line.iter().rposition(|&byte| byte == DELIMITER);
                    let json = &line[begins.map_or(0, |at| at + 1)..];
                    if let Ok(asked) = serde_json::from_slice(json) {
                        say(&asked, &mut stream);
                    }
                    line.clear();
                }
            }
        });
        Self {
            port: Arc::new(Port::at(path)),
            connections,
            _directory: directory,
            _thread: thread,
        }
    }

    /// One with an agent that is as it should be, but for its answers.
    pub(crate) fn with_agent(mut answer: impl FnMut(&str) -> Value + Send + 'static) -> Self {
        Self::that(Box::new(move |asked, stream| {
            let said = match mark_of(asked) {
                Some(mark) => true_mark(mark),
                None => format!("{}\n", answer(command_of(asked))).into_bytes(),
            };
            let _ = stream.write_all(&said);
        }))
    }
}

fn command_of(asked: &Value) -> &str {
    asked["execute"].as_str().unwrap_or_default()
}

fn mark_of(asked: &Value) -> Option<u64> {
    let is_sync = command_of(asked) == "guest-sync-delimited";
    asked["arguments"]["id"].as_u64().filter(|_| is_sync)
}

fn true_mark(mark: u64) -> Vec<u8> {
    [
        &[DELIMITER][..],
        format!("{{\"return\": {mark}}}\n").as_bytes(),
    ]
    .concat()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

#[test]
fn a_guest_says_who_it_is_over_one_connection() {
    let guest = Guest::with_agent(|command| match command {
        "guest-get-host-name" => json!({"return": {"host-name": "web\u{1b}[2J"}}),
        "guest-get-osinfo" => {
            json!({"return": {"pretty-name": "Debian GNU/Linux 12", "id": "debian"}})
        }
        "guest-network-get-interfaces" => json!({"return": [
            {"name": "lo", "ip-addresses": [{"ip-address": "127.0.0.1", "prefix": 8}]},
            {"name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                {"ip-address": "192.0.2.10", "prefix": 24},
                {"ip-address": "fe80::1", "prefix": 64},
                {"ip-address": "2001:db8::10", "prefix": 64},
                {"ip-address": "no address"},
            ]},
            {"name": "eth1", "hardware-address": "52:54:00:00:00:02"},
            7,
        ]}),
        _ => json!({"error": {"class": "CommandNotFound", "desc": "no"}}),
    });
    for _ in 0..2 {
        let info = guest.port.info(soon()).unwrap();
        assert_eq!(info.hostname.as_deref(), Some("web [2J"));
        assert_eq!(info.os.as_deref(), Some("Debian GNU/Linux 12"));
        let [card] = &info.cards[..] else {
            panic!("{info:?}")
        };
        let shown: Vec<String> = card.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(
            (card.name.as_str(), shown),
            ("eth0", vec!["192.0.2.10".into(), "2001:db8::10".into()])
        );
    }
    assert_eq!(guest.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn what_an_agent_does_not_know_is_left_out_and_what_it_refuses_is_told() {
    let guest = Guest::with_agent(|_| json!({"error": {"class": "x", "desc": "not\nallowed"}}));
    assert_eq!(guest.port.info(soon()).unwrap(), GuestInfo::default());
    let refused = guest.port.freeze(soon()).unwrap_err().to_string();
    assert_eq!(refused, "the guest's agent refuses: not allowed");
    let refused = guest.port.power_off(soon()).unwrap_err();
    assert!(matches!(refused, AgentError::Refused(_)), "{refused}");
}

#[test]
fn a_shutdown_that_is_carried_out_is_answered_by_nobody() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&asked);
    let guest = Guest::that(Box::new(move |asked, stream| match mark_of(asked) {
        Some(mark) => stream.write_all(&true_mark(mark)).unwrap(),
        None => lock(&heard).push(asked.clone()),
    }));
    guest.port.power_off(soon()).unwrap();
    let expected = json!({"execute": "guest-shutdown", "arguments": {"mode": "powerdown"}});
    assert_eq!(*lock(&asked), [expected]);
    // Not even a mark: there is no agent.
    let silent = Guest::that(Box::new(|_, _| {}));
    let error = silent.port.power_off(at_once()).unwrap_err();
    assert!(matches!(error, AgentError::Deadline), "{error}");
}

#[test]
fn what_was_said_before_the_mark_counts_for_nothing() {
    let mut first = true;
    let guest = Guest::that(Box::new(move |asked, stream| {
        let Some(mark) = mark_of(asked) else {
            // One that is late: it comes with the next question.
            if std::mem::replace(&mut first, false) {
                return;
            }
            stream.write_all(b"{\"return\": 7}\n").unwrap();
            return;
        };
        let late = b"{\"return\": 9}\n\xff{\"return\": 1}\n\xff\xff{\"return\n{{{{\xff not";
        stream.write_all(late).unwrap();
        stream.write_all(&true_mark(mark)).unwrap();
    }));
    assert!(matches!(
        guest.port.thaw(at_once()),
        Err(AgentError::Deadline)
    ));
    assert_eq!(guest.port.thaw(soon()).unwrap(), 7);
}

#[test]
fn a_guest_that_babbles_lies_or_hangs_up_takes_neither_memory_nor_time() {
    type Lie = fn(u64, &mut UnixStream);
    let lies: [(Lie, bool); 7] = [
        (
            |_, stream| while stream.write_all(&[b'x'; 4096]).is_ok() {},
            false,
        ),
        (
            |_, stream| while stream.write_all(&[DELIMITER; 4096]).is_ok() {},
            false,
        ),
        (
            |_, stream| while stream.write_all(b"\xff{\"return\": 1}\n").is_ok() {},
            false,
        ),
        (
            |mark, stream| {
                let _ = stream.write_all(&true_mark(mark));
                while stream.write_all(&[b'['; 4096]).is_ok() {}
            },
            false,
        ),
        (
            |mark, stream| {
                let _ = stream.write_all(&true_mark(mark));
                let _ = stream.write_all(format!("{}\n", "[".repeat(100_000)).as_bytes());
            },
            false,
        ),
        (
            |mark, stream| {
                let _ = stream.write_all(&true_mark(mark));
                let _ = stream.write_all(b"{\"return\": \"many\"}\n");
            },
            false,
        ),
        (
            |_, stream| drop(stream.shutdown(std::net::Shutdown::Both)),
            true,
        ),
    ];
    for (number, (lie, hangs_up)) in lies.into_iter().enumerate() {
        let guest = Guest::that(Box::new(move |asked, stream| {
            if let Some(mark) = mark_of(asked) {
                lie(mark, stream);
            }
        }));
        let began = Instant::now();
        let error = guest
            .port
            .thaw(Instant::now() + Duration::from_secs(10))
            .unwrap_err();
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "lie {number}: {error}"
        );
        let is_told = match error {
            AgentError::Nonsense(_) => !hangs_up,
            AgentError::Closed => hangs_up,
            _ => false,
        };
        assert!(is_told, "lie {number}: {error}");
        // An answer that is well made and false spoils no connection.
        let is_left = lock(&guest.port.connection).is_none();
        assert!(is_left || number == 5, "lie {number}");
    }
}

#[test]
fn a_guest_that_reads_nothing_holds_nobody_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent");
    let _listener = listen(&path).unwrap();
    let port = Port::at(path);
    let began = Instant::now();
    let long = json!({"text": "x".repeat(4 << 20)});
    let error = port.ask("guest-ping", &long, at_once()).unwrap_err();
    assert!(matches!(error, AgentError::Deadline), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    let nobody = Port::at("/nonexistent/agent".into());
    assert!(matches!(
        nobody.thaw(at_once()),
        Err(AgentError::Connect(_))
    ));
}

/// A guest whose agent hung up before it was asked counted as one that powers off, and nobody pressed its key.
#[test]
fn a_connection_that_ends_before_the_question_is_no_shutdown() {
    let hangs_up = |stream: &mut UnixStream| {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    };
    let early = Guest::that(Box::new(move |_, stream| hangs_up(stream)));
    let error = early.port.power_off(soon()).unwrap_err();
    assert!(matches!(error, AgentError::Closed), "{error}");
    let asked = Guest::that(Box::new(move |asked, stream| match mark_of(asked) {
        Some(mark) => stream.write_all(&true_mark(mark)).unwrap(),
        None => hangs_up(stream),
    }));
    asked.port.power_off(soon()).unwrap();
}

/// A process that was renewed has the id of the one before it, and asked with the same marks.
#[test]
fn marks_of_a_successor_are_not_those_of_its_predecessor() {
    let first = || {
        let port = Port::at("/nonexistent/agent".into());
        port.marks.load(Ordering::SeqCst)
    };
    let (one, other) = (first(), first());
    assert!(one.abs_diff(other) > 1 << 20, "{one} {other}");
    assert!(one.max(other) <= u64::MAX >> 2);
}

#[test]
fn who_waits_for_another_conversation_waits_no_longer_than_its_deadline() {
    let guest = Guest::with_agent(|_| json!({"return": 1}));
    let other = lock(&guest.port.connection);
    let began = Instant::now();
    let error = guest.port.thaw(at_once()).unwrap_err();
    assert!(matches!(error, AgentError::Deadline), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    drop(other);
    assert_eq!(guest.port.thaw(soon()).unwrap(), 1);
}
