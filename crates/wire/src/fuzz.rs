//! Entry points for fuzzing: arbitrary bytes through every decoder, with keys that are known.
//!
//! Half of the work is structure-aware: the bytes describe what an attacker between the hosts does to a valid
//! conversation (flip, cut, swap, repeat, reflect). Each function panics when something is accepted that was not
//! sealed by the peer in that place: a panic is a finding.

use crate::blocks::SECTOR;
use crate::{
    ChangeKind, ChannelId, Cipher, ClientHandshake, DiskChange, HEADER_LEN, KEY_LEN, MigrationKey,
    Opener, PAGE_SIZE, PageRun, PageRuns, RANDOM_LEN, RecordKind, Sealer, ServerHandshake, Session,
    Spec, WireError, ZeroPages,
};
use godwit_types::MigrationId;

const CLIENT_RANDOM: [u8; RANDOM_LEN] = [1; RANDOM_LEN];
const SERVER_RANDOM: [u8; RANDOM_LEN] = [2; RANDOM_LEN];
const GUEST_PAGES: u64 = 4096;

/// What an input came to: a fuzzer tells one path from another by it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How much was accepted: records, messages, or a number that tells which decoder did.
    pub accepted: usize,
    /// Why the rest was not.
    pub refusal: Option<WireError>,
}

impl<T> From<Result<T, WireError>> for Verdict {
    fn from(result: Result<T, WireError>) -> Self {
        Self {
            accepted: usize::from(result.is_ok()),
            refusal: result.err(),
        }
    }
}

fn spec(cipher: Cipher) -> Option<Spec> {
    Some(Spec {
        migration: MigrationId::new("fuzz").ok()?,
        key: MigrationKey::from_bytes([3; KEY_LEN]),
        nonce: 4,
        cipher,
    })
}

fn pair(spec: &Spec, channel: ChannelId) -> Option<(Session, Session)> {
    let (client, hello) = ClientHandshake::start(spec, channel, CLIENT_RANDOM);
    let (server, reply) = ServerHandshake::on_client_hello(spec, &hello, SERVER_RANDOM).ok()?;
    let (session, proof) = client.on_server_hello(&reply).ok()?;
    Some((session, server.on_client_proof(&proof).ok()?))
}

/// Takes bytes from the input as an attacker's decisions; zeros when it is used up.
struct Decisions<'a>(&'a [u8]);

impl Decisions<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn below(&mut self, end: usize) -> usize {
        let value = usize::from(u16::from_le_bytes([self.byte(), self.byte()]));
        value.checked_rem(end).unwrap_or(0)
    }

    fn is_over(&self) -> bool {
        self.0.is_empty()
    }
}

/// Records: what the opener accepts is, record for record, what the sealer made.
pub fn record(data: &[u8]) -> Verdict {
    let mut decisions = Decisions(data);
    let mode = decisions.byte();
    let cipher = if mode & 1 == 0 {
        Cipher::Aes256Gcm
    } else {
        Cipher::None
    };
    let index = u16::from(mode >> 2 & 1);
    let (Some(spec), Some(channel)) = (spec(cipher), ChannelId::data(0, index)) else {
        return Verdict::default();
    };
    let Some((mut client, mut server)) = pair(&spec, channel) else {
        panic!("two ends of one spec do not agree");
    };
    if mode & 2 == 0 {
        let (accepted, verdict) = feed(&mut server.opener, decisions.0);
        assert!(
            accepted.is_empty(),
            "bytes that nobody sealed were accepted"
        );
        return verdict;
    }
    let sent = make_records(&mut client.sealer, &mut decisions);
    let stream = tamper(&sent, &mut decisions);
    let (accepted, verdict) = feed(&mut server.opener, &stream);
    assert!(
        accepted.len() <= sent.len(),
        "more records came than were sent"
    );
    for (record, (kind, payload, _)) in accepted.iter().zip(&sent) {
        assert_eq!(record.0, *kind, "a record changed its kind");
        // Page data in clear is not authenticated: that is what the mode gives up.
        let is_clear = *kind == RecordKind::Payload && cipher == Cipher::None;
        assert!(
            is_clear || record.1 == *payload,
            "a record changed its content"
        );
    }
    verdict
}

type Sent = (RecordKind, Vec<u8>, Vec<u8>);

/// A few valid records: kind, content and bytes on the wire.
fn make_records(sealer: &mut Sealer, decisions: &mut Decisions<'_>) -> Vec<Sent> {
    let mut sent = Vec::new();
    for _ in 0..1 + decisions.below(4) {
        match decisions.byte() % 5 {
            0 => add(
                sealer,
                &mut sent,
                RecordKind::Control,
                vec![decisions.byte(); 24],
            ),
            1 => add(
                sealer,
                &mut sent,
                RecordKind::DeviceState,
                vec![decisions.byte(); 100],
            ),
            2 => add_pages(sealer, &mut sent, decisions),
            3 => add_change(sealer, &mut sent, decisions),
            _ => add(sealer, &mut sent, RecordKind::Final, Vec::new()),
        }
    }
    sent
}

fn add_pages(sealer: &mut Sealer, sent: &mut Vec<Sent>, decisions: &mut Decisions<'_>) {
    let mut runs = PageRuns::new();
    let first = u64::from(decisions.byte());
    if runs.push(PageRun { first, count: 1 }).is_ok() {
        let mut list = Vec::new();
        runs.encode(&mut list);
        add(sealer, sent, RecordKind::Pages, list);
        add(
            sealer,
            sent,
            RecordKind::Payload,
            vec![decisions.byte(); PAGE_SIZE],
        );
    }
}

fn add_change(sealer: &mut Sealer, sent: &mut Vec<Sent>, decisions: &mut Decisions<'_>) {
    let start = u64::from(decisions.byte()) * SECTOR;
    let change = DiskChange {
        disk: decisions.byte() % 4,
        kind: ChangeKind::Written,
        awaited: start.is_multiple_of(2 * SECTOR),
        range: start..start + SECTOR,
        number: 2,
        below: 1,
    };
    add(
        sealer,
        sent,
        RecordKind::DiskChange,
        change.encode().to_vec(),
    );
    let content = vec![decisions.byte(); SECTOR as usize];
    add(sealer, sent, RecordKind::Payload, content);
}

fn add(sealer: &mut Sealer, sent: &mut Vec<Sent>, kind: RecordKind, payload: Vec<u8>) {
    let mut frame = vec![0; sealer.record_len(kind, payload.len())];
    // Refused after a final record: then nothing is sent.
    if sealer.seal_into(kind, &payload, &mut frame).is_ok() {
        sent.push((kind, payload, frame));
    }
}

/// The stream that arrives when somebody between the hosts does what `decisions` say.
fn tamper(sent: &[Sent], decisions: &mut Decisions<'_>) -> Vec<u8> {
    let mut frames: Vec<Vec<u8>> = sent.iter().map(|(_, _, frame)| frame.clone()).collect();
    while !decisions.is_over() && !frames.is_empty() {
        let (action, at) = (decisions.byte() % 6, decisions.below(frames.len()));
        let (other, position) = (decisions.below(frames.len()), decisions.below(1 << 13));
        match action {
            0 => frames.swap(at, other),
            1 => frames.insert(at, frames.get(other).cloned().unwrap_or_default()),
            2 => drop(frames.remove(at)),
            _ => alter(frames.get_mut(at), action, position, decisions.byte()),
        }
        frames.truncate(16);
    }
    frames.concat()
}

fn alter(frame: Option<&mut Vec<u8>>, action: u8, position: usize, value: u8) {
    let Some(frame) = frame.filter(|frame| !frame.is_empty()) else {
        return;
    };
    let position = position % frame.len();
    match (action, frame.get_mut(position)) {
        (3, Some(byte)) => *byte ^= value,
        (4, _) => frame.truncate(position),
        _ => frame.insert(position, value),
    }
}

/// What an opener accepts of a stream.
fn feed(opener: &mut Opener, mut stream: &[u8]) -> (Vec<(RecordKind, Vec<u8>)>, Verdict) {
    let (mut accepted, mut refusal) = (Vec::new(), None);
    while let Some((head, rest)) = stream.split_first_chunk::<HEADER_LEN>() {
        let header = match opener.header(head) {
            Ok(header) => header,
            Err(error) => {
                refusal = Some(error);
                break;
            }
        };
        let Some((body, rest)) = rest.split_at_checked(header.body_len()) else {
            break;
        };
        let mut payload = vec![0; header.payload_len()];
        if let Err(error) = opener.open_into(&header, body, &mut payload) {
            refusal = Some(error);
            let again = opener.header(head);
            assert!(again.is_err(), "a broken stream went on");
            break;
        }
        accepted.push((header.kind(), payload));
        stream = rest;
    }
    let ended = accepted
        .last()
        .is_some_and(|(kind, _)| *kind == RecordKind::Final);
    let end = opener.end_of_stream(0);
    assert_eq!(ended, end.is_ok(), "a truncation went unnoticed");
    let verdict = Verdict {
        accepted: accepted.len(),
        refusal: refusal.or(end.err()),
    };
    (accepted, verdict)
}

/// Handshake messages: no message but the one made for this very exchange is accepted.
pub fn handshake(data: &[u8]) -> Verdict {
    let mut decisions = Decisions(data);
    let stage = decisions.byte();
    let channel = ChannelId(u32::from(decisions.byte()));
    let Some(spec) = spec(Cipher::Aes256Gcm) else {
        return Verdict::default();
    };
    let (client, hello) = ClientHandshake::start(&spec, channel, CLIENT_RANDOM);
    let Ok((server, reply)) = ServerHandshake::on_client_hello(&spec, &hello, SERVER_RANDOM) else {
        panic!("a valid hello was refused");
    };
    match stage % 3 {
        0 => {
            let hostile = forge(&hello, &mut decisions);
            let answer = ServerHandshake::on_client_hello(&spec, &hostile, SERVER_RANDOM);
            // Anybody may be answered; the answer convinces only a client that said exactly that.
            let judged = answer.and_then(|(_, reply)| client.on_server_hello(&reply));
            let same = hostile == hello;
            assert_eq!(judged.is_ok(), same, "an altered hello went unnoticed");
            judged.into()
        }
        1 => {
            let hostile = forge(&reply, &mut decisions);
            let judged = client.on_server_hello(&hostile);
            let same = hostile == reply;
            assert_eq!(
                judged.is_ok(),
                same,
                "an altered server hello was judged wrongly"
            );
            judged.into()
        }
        _ => {
            let Ok((_, proof)) = client.on_server_hello(&reply) else {
                panic!("a valid server hello was refused");
            };
            let hostile = forge(&proof, &mut decisions);
            let judged = server.on_client_proof(&hostile);
            let same = hostile == proof;
            assert_eq!(judged.is_ok(), same, "an altered proof was judged wrongly");
            judged.into()
        }
    }
}

/// Arbitrary bytes, or a valid message with some changes.
fn forge(valid: &[u8], decisions: &mut Decisions<'_>) -> Vec<u8> {
    if decisions.byte() & 1 == 0 {
        return decisions.0.to_vec();
    }
    let mut message = valid.to_vec();
    while !decisions.is_over() {
        let (action, position) = (3 + decisions.byte() % 3, decisions.below(1 << 9));
        alter(Some(&mut message), action, position, decisions.byte());
    }
    message
}

/// Page lists and zero-page bitmaps: what is accepted is canonical, ascending and within the guest.
pub fn descriptor(data: &[u8]) -> Verdict {
    let mut decisions = Decisions(data);
    let is_plausible = decisions.byte() & 1 == 1;
    let bytes = if is_plausible {
        plausible(&mut decisions)
    } else {
        decisions.0.to_vec()
    };
    let (mut runs, mut zero, mut again) = (PageRuns::new(), ZeroPages::new(), Vec::new());
    let judged = runs.decode(&bytes, GUEST_PAGES);
    if judged.is_ok() {
        runs.encode(&mut again);
        assert_eq!(again, bytes, "a page list has two encodings");
        let total = check_runs(runs.runs().iter().copied());
        assert!(total == u64::from(runs.pages()) && total <= u64::from(crate::pages::PAGES_MAX));
    } else {
        assert!(runs.runs().is_empty(), "a refused list left runs behind");
    }
    again.clear();
    let zero_judged = zero.decode(&bytes, GUEST_PAGES);
    if zero_judged.is_ok() {
        zero.encode(&mut again);
        assert_eq!(again, bytes, "a zero bitmap has two encodings");
        assert_eq!(check_runs(zero.runs()), u64::from(zero.count()));
    }
    let changed = DiskChange::decode(&bytes);
    if let Ok(change) = &changed {
        assert_eq!(change.encode()[..], bytes, "a change has two encodings");
        assert!(change.payload_len().unwrap_or(0) <= crate::PAYLOAD_LEN_MAX);
    }
    let accepted = [judged.is_ok(), zero_judged.is_ok(), changed.is_ok()];
    let accepted = accepted.map(usize::from);
    Verdict {
        accepted: accepted[0] + 2 * accepted[1] + 4 * accepted[2],
        refusal: zero_judged.err().or(judged.err()).or(changed.err()),
    }
}

/// Runs, or the head of a bitmap and bits, whose numbers are near the limits.
fn plausible(decisions: &mut Decisions<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut first = 0;
    while !decisions.is_over() && bytes.len() < 1 << 13 {
        let shape = decisions.byte();
        first = if shape & 1 == 0 {
            first + u64::from(decisions.byte())
        } else {
            GUEST_PAGES - 1
        };
        bytes.extend_from_slice(&first.to_le_bytes());
        bytes.extend_from_slice(&u32::from(decisions.byte()).to_le_bytes());
        if shape & 2 == 2 {
            bytes.extend_from_slice(decisions.0);
            break;
        }
    }
    bytes
}

/// How many pages; panics when runs overlap, are empty or leave the guest.
fn check_runs(runs: impl Iterator<Item = PageRun>) -> u64 {
    let (mut free_from, mut total) = (0, 0);
    for run in runs {
        assert!(
            run.count > 0 && run.first >= free_from,
            "an empty or overlapping run"
        );
        free_from = run.first + u64::from(run.count);
        assert!(free_from <= GUEST_PAGES, "a run beyond the guest");
        total += u64::from(run.count);
    }
    total
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn nothing_unsealed_is_accepted(data in prop::collection::vec(any::<u8>(), 0..200)) {
            super::record(&data);
            super::handshake(&data);
            super::descriptor(&data);
        }
    }
}
