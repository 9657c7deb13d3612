//! Everything a peer may get wrong, and one recorded conversation that pins the protocol.

use crate::handshake::{HEAD_LEN, MESSAGE_LEN_MAX, body_len, refusal};
use crate::*;
use godwit_types::MigrationId;
use godwit_types::migration::MigrationSecret;
use proptest::prelude::*;
use std::fmt::Write as _;

mod pages;

pub(crate) fn spec(cipher: Cipher) -> Spec {
    spec_with(7, 9, "m-1", cipher)
}

fn spec_with(key: u8, nonce: u8, id: &str, cipher: Cipher) -> Spec {
    let secret = MigrationSecret {
        key: vec![key; KEY_LEN],
        nonce: vec![nonce; 8],
    };
    let id = MigrationId::new(id).expect("a valid id");
    Spec::new(id, &secret, cipher).expect("a valid secret")
}

fn data_channel() -> ChannelId {
    ChannelId::data(0, 3).expect("a data channel")
}

/// Client's and server's end of one connection.
fn connect(
    client: &Spec,
    server: &Spec,
    channel: ChannelId,
) -> Result<(Session, Session), WireError> {
    let (handshake, hello) = ClientHandshake::start(client, channel, [1; RANDOM_LEN]);
    let (waiting, reply) = ServerHandshake::on_client_hello(server, &hello, [2; RANDOM_LEN])?;
    let (session, proof) = handshake.on_server_hello(&reply)?;
    Ok((session, waiting.on_client_proof(&proof)?))
}

fn pair_on(channel: ChannelId, cipher: Cipher) -> (Session, Session) {
    connect(&spec(cipher), &spec(cipher), channel).expect("a handshake")
}

fn pair(cipher: Cipher) -> (Session, Session) {
    pair_on(data_channel(), cipher)
}

fn refused<T>(result: Result<T, WireError>) -> WireError {
    result.err().expect("a refusal")
}

fn seal(sealer: &mut Sealer, kind: RecordKind, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; sealer.record_len(kind, payload.len())];
    let written = sealer.seal_into(kind, payload, &mut frame).expect("sealed");
    assert_eq!(written, frame.len());
    frame
}

fn open(opener: &mut Opener, frame: &[u8]) -> Result<(RecordKind, Vec<u8>), WireError> {
    let (head, body) = frame.split_first_chunk().expect("a whole header");
    let header = opener.header(head)?;
    let mut out = vec![0; header.payload_len()];
    opener.open_into(&header, body, &mut out)?;
    Ok((header.kind(), out))
}

fn runs(list: &[(u64, u32)]) -> PageRuns {
    let mut runs = PageRuns::new();
    for (first, count) in list {
        let run = PageRun {
            first: *first,
            count: *count,
        };
        runs.push(run).expect("an ascending run");
    }
    runs
}

fn encoded(runs: &PageRuns) -> Vec<u8> {
    let mut out = Vec::new();
    runs.encode(&mut out);
    out
}

/// A list of two pages, their bytes, a control message and the end.
fn conversation(sealer: &mut Sealer) -> Vec<Vec<u8>> {
    vec![
        seal(sealer, RecordKind::Pages, &encoded(&runs(&[(5, 2)]))),
        seal(sealer, RecordKind::Payload, &[0xab; 2 * PAGE_SIZE]),
        seal(sealer, RecordKind::Control, b"{}"),
        seal(sealer, RecordKind::Final, &[]),
    ]
}

#[test]
fn both_directions_and_both_ways_of_sealing_round_trip() {
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let (mut a, mut b) = pair(cipher);
        let frames = conversation(&mut a.sealer);
        let kinds: Vec<_> = (frames.iter())
            .map(|frame| open(&mut b.opener, frame).expect("opened").0)
            .collect();
        use RecordKind::*;
        assert_eq!(kinds, [Pages, Payload, Control, Final]);
        assert_eq!(b.opener.end_of_stream(0), Ok(()));

        let mut frame = vec![0; b.sealer.record_len(Control, 5)];
        frame[HEADER_LEN..HEADER_LEN + 5].copy_from_slice(b"hello");
        b.sealer.seal_in_place(Control, &mut frame).expect("sealed");
        let (head, body) = frame.split_first_chunk_mut().expect("a header");
        let header = a.opener.header(head).expect("a valid header");
        let payload = a.opener.open_in_place(&header, body).expect("opened");
        assert_eq!(payload, b"hello");
    }
}

#[test]
fn only_page_data_is_ever_in_clear() {
    let (mut a, _) = pair(Cipher::None);
    for (frame, clear) in conversation(&mut a.sealer)
        .iter()
        .zip([false, true, false, false])
    {
        assert_eq!(frame[3] & 1 == 0, clear);
    }
    let secret = b"a message that nobody else may read";
    let (mut a, _) = pair(Cipher::None);
    let frame = seal(&mut a.sealer, RecordKind::DeviceState, secret);
    assert!(!frame.windows(8).any(|window| secret.starts_with(window)));
}

#[test]
fn a_clear_header_and_bytes_from_elsewhere_make_the_same_record() {
    let (mut a, mut b) = pair(Cipher::None);
    let list = seal(&mut a.sealer, RecordKind::Pages, &encoded(&runs(&[(0, 1)])));
    open(&mut b.opener, &list).expect("a list");
    let head = a.sealer.clear_payload_header(PAGE_SIZE).expect("a header");
    let header = b.opener.header(&head).expect("a valid header");
    assert_eq!(header.body_len(), PAGE_SIZE);
    b.opener.accept_clear_payload(&header).expect("accepted");

    let (mut a, _) = pair(Cipher::Aes256Gcm);
    seal(&mut a.sealer, RecordKind::Pages, &encoded(&runs(&[(0, 1)])));
    let error = refused(a.sealer.clear_payload_header(PAGE_SIZE));
    assert_eq!(error.blame(), Blame::Local);
}

#[test]
fn a_replayed_record_is_refused_and_ends_the_stream() {
    let (mut a, mut b) = pair(Cipher::Aes256Gcm);
    let first = seal(&mut a.sealer, RecordKind::Control, b"pay 10");
    let second = seal(&mut a.sealer, RecordKind::Control, b"done");
    open(&mut b.opener, &first).expect("the first time");
    let error = refused(open(&mut b.opener, &first));
    let channel = data_channel();
    let (expected, got) = (1, 0);
    assert_eq!(
        error,
        WireError::Counter {
            channel,
            expected,
            got
        }
    );
    assert_eq!(error.blame(), Blame::Peer);
    assert_eq!(
        refused(open(&mut b.opener, &second)),
        error,
        "a broken stream stays broken"
    );
}

#[test]
fn one_header_opens_one_record() {
    let (mut a, mut b) = pair(Cipher::Aes256Gcm);
    let frame = seal(&mut a.sealer, RecordKind::Control, b"once");
    let (head, body) = frame.split_first_chunk().expect("a header");
    let header = b.opener.header(head).expect("valid");
    let mut out = [0; 4];
    b.opener
        .open_into(&header, body, &mut out)
        .expect("the first time");
    let error = refused(b.opener.open_into(&header, body, &mut out));
    assert!(matches!(error, WireError::Counter { .. }));
}

#[test]
fn a_gap_is_refused() {
    let (mut a, mut b) = pair(Cipher::Aes256Gcm);
    seal(&mut a.sealer, RecordKind::Control, b"lost");
    let second = seal(&mut a.sealer, RecordKind::Control, b"came");
    let error = refused(open(&mut b.opener, &second));
    assert!(matches!(
        error,
        WireError::Counter {
            expected: 0,
            got: 1,
            ..
        }
    ));
}

#[test]
fn a_record_of_another_channel_direction_or_connection_is_refused() {
    let (mut a, _) = pair_on(ChannelId(1), Cipher::Aes256Gcm);
    let (_, mut b) = pair_on(ChannelId(2), Cipher::Aes256Gcm);
    let frame = seal(&mut a.sealer, RecordKind::Control, b"x");
    assert!(matches!(
        refused(open(&mut b.opener, &frame)),
        WireError::Tag { counter: 0, .. }
    ));

    let (mut a, _) = pair(Cipher::Aes256Gcm);
    let frame = seal(&mut a.sealer, RecordKind::Control, b"x");
    assert!(
        matches!(refused(open(&mut a.opener, &frame)), WireError::Tag { .. }),
        "reflected"
    );

    let (_, hello) = ClientHandshake::start(&spec(Cipher::Aes256Gcm), data_channel(), [1; 32]);
    let s = spec(Cipher::Aes256Gcm);
    let (_, reply) = ServerHandshake::on_client_hello(&s, &hello, [3; 32]).expect("a reply");
    let (client, _) = ClientHandshake::start(&s, data_channel(), [1; 32]);
    let (mut other, _) = client.on_server_hello(&reply).expect("a session");
    let frame = seal(&mut other.sealer, RecordKind::Control, b"x");
    let (_, mut b) = pair(Cipher::Aes256Gcm);
    assert!(
        matches!(refused(open(&mut b.opener, &frame)), WireError::Tag { .. }),
        "other random"
    );
}

#[test]
fn whoever_disagrees_about_the_spec_fails_the_handshake() {
    let ours = spec(Cipher::Aes256Gcm);
    let proof = |other: Spec| refused(connect(&ours, &other, data_channel()));
    let channel = data_channel();
    assert_eq!(
        proof(spec_with(8, 9, "m-1", Cipher::Aes256Gcm)),
        WireError::Proof { channel }
    );
    assert_eq!(
        proof(spec_with(7, 8, "m-1", Cipher::Aes256Gcm)),
        WireError::Proof { channel }
    );
    assert_eq!(
        proof(spec_with(7, 9, "m-1", Cipher::None)),
        WireError::Proof { channel }
    );
    assert_eq!(
        proof(spec_with(7, 9, "m-2", Cipher::Aes256Gcm)),
        WireError::WrongMigration
    );
}

#[test]
fn a_client_without_the_key_is_refused_by_the_server() {
    let ours = spec(Cipher::None);
    let (_, hello) = ClientHandshake::start(&ours, data_channel(), [1; 32]);
    let (server, _) = ServerHandshake::on_client_hello(&ours, &hello, [2; 32]).expect("a reply");
    // The right shape, from a session that is not this one.
    let (client, hello) = ClientHandshake::start(&ours, data_channel(), [5; 32]);
    let (_, reply) = ServerHandshake::on_client_hello(&ours, &hello, [2; 32]).expect("a reply");
    let (_, proof) = client.on_server_hello(&reply).expect("a session");
    let error = refused(server.on_client_proof(&proof));
    assert_eq!(error.blame(), Blame::Peer);
    assert!(matches!(error, WireError::Proof { .. }));
}

#[test]
fn another_version_is_named_with_ours() {
    let (_, mut hello) = ClientHandshake::start(&spec(Cipher::None), data_channel(), [1; 32]);
    hello[6] = 9;
    let error = refused(ServerHandshake::on_client_hello(
        &spec(Cipher::None),
        &hello,
        [2; 32],
    ));
    let expected = WireError::Version {
        ours: PROTOCOL_VERSION,
        theirs: 9,
    };
    assert_eq!(error, expected);
    assert_eq!(error.blame(), Blame::Incompatible);
    assert!(error.to_string().contains("version 9") && error.to_string().contains("version 1"));
    assert!(refusal().len() <= MESSAGE_LEN_MAX);
}

#[test]
fn every_flipped_bit_of_a_handshake_is_refused() {
    let s = spec(Cipher::Aes256Gcm);
    let start = || ClientHandshake::start(&s, data_channel(), [1; 32]);
    let serve = |hello: &[u8]| ServerHandshake::on_client_hello(&s, hello, [2; 32]);
    let (_, hello) = start();
    for bit in 0..hello.len() * 8 {
        let mut bad = hello.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        // A changed channel or random is noticed by the client's check of the server's proof.
        if let Ok((_, reply)) = serve(&bad) {
            assert!(matches!(
                refused(start().0.on_server_hello(&reply)),
                WireError::Proof { .. }
            ));
        }
    }
    let (_, reply) = serve(&hello).expect("a reply");
    for bit in 0..reply.len() * 8 {
        let mut bad = reply.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        refused(start().0.on_server_hello(&bad));
    }
    let (_, proof) = start().0.on_server_hello(&reply).expect("a session");
    for bit in 0..proof.len() * 8 {
        let mut bad = proof.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        refused(serve(&hello).expect("a reply").0.on_client_proof(&bad));
    }
}

#[test]
fn every_shortened_handshake_is_refused() {
    let s = spec(Cipher::Aes256Gcm);
    let (_, hello) = ClientHandshake::start(&s, data_channel(), [1; 32]);
    for len in 0..hello.len() {
        refused(ServerHandshake::on_client_hello(&s, &hello[..len], [2; 32]));
    }
    let mut long = [0; HEAD_LEN];
    long.copy_from_slice(&hello[..HEAD_LEN]);
    long[HEAD_LEN - 1] = 247;
    assert!(matches!(
        refused(body_len(&long)),
        WireError::Handshake { .. }
    ));
}

#[test]
fn the_longest_migration_id_fits_a_message() {
    let s = spec_with(1, 2, &"x".repeat(63), Cipher::Aes256Gcm);
    let (_, hello) = ClientHandshake::start(&s, data_channel(), [1; 32]);
    assert!(hello.len() <= MESSAGE_LEN_MAX);
    assert!(connect(&s, &s, data_channel()).is_ok());
}

#[test]
fn a_huge_length_is_refused_before_anything_is_read() {
    let (mut a, mut b) = pair(Cipher::Aes256Gcm);
    let frame = seal(&mut a.sealer, RecordKind::Control, b"x");
    let mut head = [0; HEADER_LEN];
    head.copy_from_slice(&frame[..HEADER_LEN]);
    head[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = refused(b.opener.header(&head));
    let max = PAYLOAD_LEN_MAX as u32;
    assert!(matches!(error, WireError::Length { length: u32::MAX, max: m, .. } if m == max));
}

#[test]
fn every_flipped_bit_of_a_record_is_refused() {
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let (mut a, _) = pair(cipher);
        let frame = seal(&mut a.sealer, RecordKind::Control, b"sixteen bytes!!!");
        for bit in 0..frame.len() * 8 {
            let (_, mut b) = pair(cipher);
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let (head, body) = bad.split_first_chunk().expect("a header");
            let result = b.opener.header(head).and_then(|header| {
                // A stream would wait for, or cut off at, the length that the header claims.
                let mut body = body.to_vec();
                body.resize(header.body_len(), 0);
                b.opener.open_in_place(&header, &mut body).map(drop)
            });
            assert_eq!(refused(result).blame(), Blame::Peer, "bit {bit}");
        }
    }
}

#[test]
fn the_end_at_any_byte_but_the_last_is_a_truncation() {
    let (mut a, mut b) = pair(Cipher::Aes256Gcm);
    for (index, frame) in conversation(&mut a.sealer).iter().enumerate() {
        for offset in 0..frame.len() {
            let error = refused(b.opener.end_of_stream(offset));
            assert_eq!(error.blame(), Blame::Lost);
            let counter = index as u64;
            let channel = data_channel();
            assert_eq!(
                error,
                WireError::Truncated {
                    channel,
                    counter,
                    offset
                }
            );
        }
        open(&mut b.opener, frame).expect("opened");
    }
    assert_eq!(b.opener.end_of_stream(0), Ok(()));
    assert!(b.opener.end_of_stream(1).is_err());
}

#[test]
fn the_order_of_records_is_enforced_on_both_sides() {
    let (mut a, _) = pair(Cipher::Aes256Gcm);
    let mut out = vec![0; 3 * PAGE_SIZE];
    let mut try_seal = |kind, payload: &[u8]| a.sealer.seal_into(kind, payload, &mut out);
    let page = [0; PAGE_SIZE];
    assert!(
        try_seal(RecordKind::Payload, &page).is_err(),
        "data that nothing announced"
    );
    try_seal(RecordKind::Pages, &encoded(&runs(&[(1, 2)]))).expect("a list");
    assert!(
        try_seal(RecordKind::Control, b"").is_err(),
        "page data must come next"
    );
    assert!(
        try_seal(RecordKind::Payload, &page).is_err(),
        "page data of another length"
    );
    try_seal(RecordKind::Payload, &[0; 2 * PAGE_SIZE]).expect("page data");
    try_seal(RecordKind::Final, &[]).expect("the end");
    assert!(
        try_seal(RecordKind::Control, b"").is_err(),
        "nothing follows the end"
    );

    let (mut a, _) = pair_on(ChannelId::control(0), Cipher::Aes256Gcm);
    let list = encoded(&runs(&[(1, 2)]));
    assert!(
        a.sealer
            .seal_into(RecordKind::Pages, &list, &mut out)
            .is_err()
    );
    assert_eq!(
        a.sealer.next_counter(),
        0,
        "a refused record uses no counter"
    );
}

/// What the server says to records that a client with the key, but without manners, sends.
fn lawless(channel: ChannelId, records: &[(RecordKind, &[u8])]) -> WireError {
    let (mut a, mut b) = pair_on(channel, Cipher::Aes256Gcm);
    let (last, first) = records.split_last().expect("a record");
    for (kind, payload) in first {
        let frame = a.sealer.seal_lawless(*kind, payload);
        open(&mut b.opener, &frame).expect("a valid record");
    }
    let frame = a.sealer.seal_lawless(last.0, last.1);
    let error = refused(open(&mut b.opener, &frame));
    assert_eq!(error.blame(), Blame::Peer);
    error
}

#[test]
fn a_peer_with_the_key_is_held_to_the_rules_too() {
    use RecordKind::{Control, DeviceState, Final, Pages, Payload};
    let (data, control) = (data_channel(), ChannelId::control(0));
    let (list, page) = (encoded(&runs(&[(1, 2)])), [0; PAGE_SIZE]);
    let unexpected = |error| matches!(error, WireError::Unexpected { .. });
    assert!(unexpected(lawless(data, &[(Payload, &page)])));
    assert!(unexpected(lawless(data, &[(Pages, &list), (Control, b"")])));
    assert!(unexpected(lawless(
        data,
        &[(Pages, &list), (Payload, &page)]
    )));
    assert!(unexpected(lawless(data, &[(Final, b""), (Control, b"")])));
    assert!(unexpected(lawless(control, &[(Pages, &list)])));
    let invalid = lawless(data, &[(Pages, &[0; 12])]);
    assert!(matches!(invalid, WireError::Pages { .. }), "an empty run");
    let long = lawless(data, &[(Final, b"x")]);
    assert!(matches!(long, WireError::Length { max: 0, .. }));
    let huge = vec![0; PAYLOAD_LEN_MAX + 1];
    assert!(matches!(
        lawless(control, &[(DeviceState, &huge)]),
        WireError::Length { .. }
    ));
}

#[test]
fn channel_ids_keep_their_set_and_index() {
    let data = ChannelId::data(3, 4).expect("a data channel");
    assert_eq!((data.set(), data.index(), data.is_control()), (3, 4, false));
    assert!(ChannelId::control(3).is_control());
    assert_eq!(ChannelId::data(3, u16::MAX), None);
    assert_eq!(ChannelId::control(1).to_string(), "1.control");
}

#[test]
fn a_secret_of_another_length_is_refused_and_never_printed() {
    let id = MigrationId::new("m").expect("a valid id");
    let secret = MigrationSecret {
        key: vec![0xaa; 31],
        nonce: vec![0; 8],
    };
    let error = refused(Spec::new(id, &secret, Cipher::None));
    assert_eq!(error, WireError::SecretLength);
    let printed = format!("{:?}", spec(Cipher::None));
    assert_eq!(
        printed,
        "Spec { migration: MigrationId(\"m-1\"), cipher: None, .. }"
    );
    let key = format!("{:?}", MigrationKey::from_bytes([7; KEY_LEN]));
    assert_eq!(key, "MigrationKey(secret)");
}

/// The bytes of version 1. Whoever changes them changes the protocol: raise `PROTOCOL_VERSION`, and record the new
/// ones under the new version.
#[test]
fn version_1_is_what_was_recorded() {
    let recorded = include_str!("golden_v1.txt");
    assert_eq!(PROTOCOL_VERSION, 1, "record the bytes of the new version");
    let mut text = String::new();
    for cipher in [Cipher::Aes256Gcm, Cipher::None] {
        let s = spec(cipher);
        let (client, hello) = ClientHandshake::start(&s, data_channel(), [1; 32]);
        let (server, reply) = ServerHandshake::on_client_hello(&s, &hello, [2; 32]).expect("reply");
        let (mut a, proof) = client.on_server_hello(&reply).expect("a session");
        let mut b = server.on_client_proof(&proof).expect("a session");
        let mut zero = ZeroPages::new();
        assert_eq!((zero.insert(8), zero.insert(20)), (Ok(true), Ok(true)));
        let mut bitmap = Vec::new();
        zero.encode(&mut bitmap);
        let mut frames = vec![hello, reply, proof, refusal()];
        frames.push(seal(&mut a.sealer, RecordKind::ZeroPages, &bitmap));
        frames.extend(conversation(&mut a.sealer).into_iter().map(|mut frame| {
            frame.drain(
                40.min(frame.len())..frame.len().saturating_sub(16).max(40.min(frame.len())),
            );
            frame
        }));
        frames.push(seal(&mut b.sealer, RecordKind::DeviceState, b"state"));
        for frame in frames {
            frame
                .iter()
                .for_each(|byte| write!(text, "{byte:02x}").expect("a string"));
            text.push('\n');
        }
    }
    assert_eq!(text, recorded, "the protocol has changed");
}

proptest! {
    #[test]
    fn any_payload_round_trips(payload in prop::collection::vec(any::<u8>(), 0..5000), clear in any::<bool>()) {
        let cipher = if clear { Cipher::None } else { Cipher::Aes256Gcm };
        let (mut a, mut b) = pair(cipher);
        let frame = seal(&mut a.sealer, RecordKind::Control, &payload);
        prop_assert_eq!(open(&mut b.opener, &frame), Ok((RecordKind::Control, payload)));
    }
}
