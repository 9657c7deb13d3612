//! What the hypervisor and the bridge say: QMP lines and probe frames.
//!
//! Owns nothing.

use crate::outcome::{self, Outcome};
use godwit_qemu::announce::{parse_probe, probe as probe_frame, rarp};
use godwit_qemu::qmp::parser::{MAX_DEPTH, Message, fuzz, parse_line};

const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

pub fn qmp(input: &[u8]) -> Outcome {
    fuzz::line(input);
    let judged = parse_line(input);
    if let Ok(Message::Return { value, .. }) = &judged {
        assert!(depth(value) <= MAX_DEPTH, "a value nests too deep");
    }
    outcome::of_result(&judged, |message| match message {
        Message::Greeting(_) => 1,
        Message::Return { id, .. } => 3 + u64::from(id.is_some()),
        Message::Error { id, .. } => 5 + u64::from(id.is_some()),
        Message::Event(event) => 8 + u64::from(event.wall_clock_us.is_some()),
        _ => 7,
    })
}

fn depth(value: &serde_json::Value) -> usize {
    let below = match value {
        serde_json::Value::Array(items) => items.iter().map(depth).max(),
        serde_json::Value::Object(items) => items.values().map(depth).max(),
        _ => return 0,
    };
    1 + below.unwrap_or(0)
}

pub fn qmp_seeds() -> Vec<Vec<u8>> {
    [
        r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}"#,
        r#"{"return": {"running": true, "status": "running"}, "id": 7}"#,
        r#"{"return": [], "id": 8}"#,
        r#"{"id": 9, "error": {"class": "GenericError", "desc": "no such device"}}"#,
        r#"{"timestamp": {"seconds": 1, "microseconds": 5}, "event": "MIGRATION", "data": {"status": "completed"}}"#,
        r#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "RESET", "data": {"guest": true, "reason": "guest-reset"}}"#,
        "{\"event\": \"STOP\"}\r\n{\"event\": \"RESUME\"}\n",
    ]
    .iter()
    .map(|line| line.as_bytes().to_vec())
    .collect()
}

pub fn probe(input: &[u8]) -> Outcome {
    let Some(nonce) = parse_probe(input) else {
        return input.len().min(40) as u64;
    };
    let ours = probe_frame(MAC, nonce);
    let payload = 12..38;
    assert_eq!(
        input.get(payload.clone()),
        ours.get(payload),
        "a foreign frame passed as a probe"
    );
    100
}

pub fn probe_seeds() -> Vec<Vec<u8>> {
    vec![probe_frame(MAC, [7; 16]), rarp(MAC)]
}
