//! Peers and strangers that break the rules, over real loopback sockets: each ends in a clear error, in time.

mod common;

use common::*;
use godwit_transport::{Class, Gate, PENDING_MAX, Patience, TransportError, Tuning};
use godwit_types::migration::Cipher;
use godwit_wire::handshake::refusal;
use godwit_wire::{ChannelId, ClientHandshake, HEADER_LEN, PAGE_SIZE, RecordKind, WireError};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What a destination says when a source sends `bytes` on a good channel and then leaves.
fn answer_to(cipher: Cipher, make: impl FnOnce(&mut Hostile) -> Vec<u8>) -> TransportError {
    let (mut peer, destination) = hostile(cipher, data(0));
    let bytes = make(&mut peer);
    peer.send(&bytes);
    peer.stream.shutdown(Shutdown::Write).expect("closed");
    let (mut reader, _) = destination.split();
    loop {
        match reader.next(&patience()) {
            Ok(record) => assert_ne!(record.kind, RecordKind::Final, "a clean end"),
            Err(error) => return error,
        }
    }
}

fn is_from_peer(error: &TransportError) -> bool {
    assert_eq!(error.class(), Class::Peer, "{error}");
    assert!(
        error.to_string().contains("0.0"),
        "names its channel: {error}"
    );
    true
}

#[test]
fn a_replayed_record_ends_the_stream() {
    let error = answer_to(Cipher::Aes256Gcm, |peer| {
        seal(&mut peer.session.sealer, RecordKind::Control, b"pay 10").repeat(2)
    });
    let replayed = matches!(
        error,
        TransportError::Wire(WireError::Counter {
            expected: 1,
            got: 0,
            ..
        })
    );
    assert!(is_from_peer(&error) && replayed);
}

#[test]
fn a_lost_record_ends_the_stream() {
    let error = answer_to(Cipher::Aes256Gcm, |peer| {
        seal(&mut peer.session.sealer, RecordKind::Control, b"lost");
        seal(&mut peer.session.sealer, RecordKind::Control, b"came")
    });
    assert!(is_from_peer(&error));
}

#[test]
fn an_altered_bit_ends_the_stream() {
    let error = answer_to(Cipher::None, |peer| {
        let mut frame = seal(&mut peer.session.sealer, RecordKind::Control, b"to: a");
        *frame.last_mut().expect("a tag") ^= 1;
        frame
    });
    assert!(is_from_peer(&error) && matches!(error, TransportError::Wire(WireError::Tag { .. })));
}

#[test]
fn a_truncation_at_every_byte_is_noticed() {
    let (mut length, mut cut) = (1, 0);
    while cut < length {
        let error = answer_to(Cipher::Aes256Gcm, |peer| {
            let mut frame = seal(&mut peer.session.sealer, RecordKind::Control, b"abc");
            length = frame.len();
            frame.truncate(cut);
            frame
        });
        assert_eq!(error.class(), Class::Lost);
        assert!(
            matches!(error, TransportError::Closed { counter: 0, offset, .. } if offset == cut)
        );
        cut += 1;
    }
    let error = answer_to(Cipher::Aes256Gcm, |peer| {
        seal(
            &mut peer.session.sealer,
            RecordKind::Control,
            b"whole, but not the last",
        )
    });
    assert!(matches!(
        error,
        TransportError::Closed {
            counter: 1,
            offset: 0,
            ..
        }
    ));
}

#[test]
fn page_data_in_clear_that_is_cut_short_is_noticed() {
    let (mut peer, destination) = hostile(Cipher::None, data(0));
    let list = [5u64.to_le_bytes().as_slice(), 1u32.to_le_bytes().as_slice()].concat();
    let mut bytes = seal(&mut peer.session.sealer, RecordKind::Pages, &list);
    bytes.extend(seal(
        &mut peer.session.sealer,
        RecordKind::Payload,
        &[1; PAGE_SIZE],
    ));
    bytes.truncate(bytes.len() - 1);
    peer.send(&bytes);
    peer.stream.shutdown(Shutdown::Write).expect("closed");
    let (mut reader, _) = destination.split();
    assert_eq!(
        reader.next(&patience()).expect("a list").kind,
        RecordKind::Pages
    );
    let mut memory = vec![0; PAGE_SIZE];
    let error = refused(reader.next_payload_into(&mut memory, &patience()));
    let offset_due = HEADER_LEN + PAGE_SIZE - 1;
    assert!(
        matches!(error, TransportError::Closed { counter: 1, offset, .. } if offset == offset_due)
    );
    assert_eq!(
        refused(reader.next(&patience()).map(drop)).class(),
        Class::Lost
    );
}

#[test]
fn swapped_channels_end_both_streams() {
    let (mut one, at_one) = hostile(Cipher::Aes256Gcm, data(0));
    let (mut two, at_two) = hostile(Cipher::Aes256Gcm, data(1));
    let for_one = seal(&mut one.session.sealer, RecordKind::Control, b"one");
    let for_two = seal(&mut two.session.sealer, RecordKind::Control, b"two");
    one.send(&for_two);
    two.send(&for_one);
    for end in [at_one, at_two] {
        let error = refused(end.split().0.next(&patience()).map(drop));
        assert!(
            matches!(
                error,
                TransportError::Wire(WireError::Tag { counter: 0, .. })
            ),
            "{error}"
        );
    }
}

#[test]
fn a_reflected_record_ends_the_stream() {
    let (mut peer, destination) = hostile(Cipher::Aes256Gcm, data(0));
    let (mut reader, mut writer) = destination.split();
    writer
        .send(RecordKind::Control, b"mine", &patience())
        .expect("sent");
    let mut frame = vec![0; HEADER_LEN + 4 + 16];
    peer.stream.read_exact(&mut frame).expect("its record");
    peer.send(&frame);
    assert!(is_from_peer(&refused(reader.next(&patience()).map(drop))));
}

#[test]
fn a_huge_length_is_refused_by_its_header_alone() {
    let (mut peer, destination) = hostile(Cipher::Aes256Gcm, data(0));
    let mut frame = seal(&mut peer.session.sealer, RecordKind::Control, b"");
    frame[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    // Nothing follows and the connection stays open: waiting for more would end in silence.
    peer.send(&frame[..HEADER_LEN]);
    let error = refused(destination.split().0.next(&patience()).map(drop));
    assert!(matches!(
        error,
        TransportError::Wire(WireError::Length {
            length: u32::MAX,
            ..
        })
    ));
}

#[test]
fn a_silent_peer_is_noticed_and_half_a_record_is_kept() {
    let (mut peer, destination) = hostile(Cipher::Aes256Gcm, data(0));
    let (mut reader, _) = destination.split();
    let frame = seal(
        &mut peer.session.sealer,
        RecordKind::Control,
        b"in three parts",
    );
    let short = Patience::idle(Duration::from_millis(80));
    let begun = Instant::now();
    // Silence within the header, then within the payload.
    for part in [&frame[..7], &frame[7..20]] {
        peer.send(part);
        let error = refused(reader.next(&short).map(drop));
        assert!(
            matches!(error, TransportError::Silent { ms, .. } if ms >= 80),
            "{error}"
        );
        assert_eq!(error.class(), Class::Lost);
    }
    assert!(begun.elapsed() < LONG && reader.meter().read().blocked_us >= 140_000);
    peer.send(&frame[20..]);
    assert_eq!(
        reader.next(&patience()).expect("the whole record").payload,
        b"in three parts"
    );
}

#[test]
fn a_deadline_holds_even_while_bytes_trickle() {
    let (mut peer, destination) = hostile(Cipher::Aes256Gcm, data(0));
    let frame = seal(&mut peer.session.sealer, RecordKind::Control, &[0; 1000]);
    let until = Instant::now() + Duration::from_millis(150);
    let trickling = thread::spawn(move || {
        // One byte whenever the clock ticks over: faster than any idle limit, slower than the deadline.
        for byte in frame {
            if peer.stream.write_all(&[byte]).is_err() || Instant::now() > until {
                break;
            }
            thread::park_timeout(Duration::from_millis(1));
        }
        peer
    });
    let (mut reader, _) = destination.split();
    let patience = Patience::until(until);
    let error = refused(reader.next(&patience).map(drop));
    assert!(matches!(error, TransportError::Silent { .. }), "{error}");
    trickling.join().expect("no panic");
}

#[test]
fn a_wrong_key_is_refused_on_both_sides() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let other = spec_with(8, "m-1", Cipher::Aes256Gcm);
    let dialled = thread::spawn(move || dial(to, &other, data(0)));
    // The client finds out first: it closes instead of proving anything.
    assert_eq!(turned_away(&mut listener, &gate, 1).left, 1);
    let error = refused(listener.accept(Instant::now()));
    assert!(
        error
            .to_string()
            .contains("strangers turned away: 1, the last 127.0.0.1"),
        "{error}"
    );
    let error = refused(dialled.join().expect("no panic"));
    assert!(is_from_peer(&error) && matches!(error, TransportError::Wire(WireError::Proof { .. })));
}

#[test]
fn a_client_that_cannot_prove_the_key_is_turned_away() {
    let gate = gate(Cipher::None);
    let mut listener = listen(&gate, V4);
    let mut stream = TcpStream::connect(listener.address()).expect("connected");
    let (_, hello) = ClientHandshake::start(&spec(Cipher::None), data(0), [1; 32]);
    stream.write_all(&hello).expect("sent");
    // A proof of the right form that nobody computed.
    let mut forged = refusal();
    (forged[8], forged[9]) = (3, 32);
    forged.extend([0x5a; 32]);
    stream.write_all(&forged).expect("sent");
    assert_eq!(turned_away(&mut listener, &gate, 1).wrong_proof, 1);
    let last = gate.strangers().last.expect("a reason");
    assert!(last.contains("could not prove"), "{last}");
}

#[test]
fn encryption_is_not_a_matter_of_opinion() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let dialled = thread::spawn(move || dial(to, &spec(Cipher::None), data(0)));
    turned_away(&mut listener, &gate, 1);
    let error = refused(dialled.join().expect("no panic"));
    assert!(
        matches!(error, TransportError::Wire(WireError::Proof { .. })),
        "{error}"
    );
}

#[test]
fn another_version_is_named_on_both_sides() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let mut stream = TcpStream::connect(listener.address()).expect("connected");
    let ours = spec(Cipher::Aes256Gcm);
    let (handshake, mut hello) = ClientHandshake::start(&ours, data(0), [1; 32]);
    hello[6] = 2;
    stream.write_all(&hello).expect("sent");
    assert_eq!(turned_away(&mut listener, &gate, 1).wrong_version, 1);
    let last = gate.strangers().last.expect("a reason");
    assert!(
        last.contains("version 2") && last.contains("version 1"),
        "{last}"
    );
    // The answer lets the other side name both too.
    let reply = read_message(&mut stream);
    assert_eq!(reply, refusal());
    assert!(handshake.on_server_hello(&reply).is_err());

    let newer = TcpListener::bind((V4, 0)).expect("a listener");
    let to = newer.local_addr().expect("an address");
    let serving = thread::spawn(move || {
        let (mut stream, _) = newer.accept().expect("accepted");
        let mut reply = refusal();
        reply[6] = 2;
        stream.write_all(&reply).expect("sent");
        read_message(&mut stream)
    });
    let error = refused(dial(to, &spec(Cipher::Aes256Gcm), data(0)));
    let named = WireError::Version { ours: 1, theirs: 2 };
    assert!(
        matches!(&error, TransportError::Wire(version) if *version == named),
        "{error}"
    );
    assert_eq!(error.class(), Class::Incompatible);
    serving.join().expect("no panic");
}

#[test]
fn another_migration_is_turned_away_without_an_answer() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let other = spec_with(7, "m-2", Cipher::Aes256Gcm);
    let dialled = thread::spawn(move || dial(to, &other, data(0)));
    assert_eq!(turned_away(&mut listener, &gate, 1).wrong_migration, 1);
    let error = refused(dialled.join().expect("no panic"));
    assert!(
        matches!(error, TransportError::HandshakeClosed { .. }),
        "{error}"
    );
}

#[test]
fn a_channel_is_never_made_twice() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let one = thread::spawn(move || dial(to, &spec(Cipher::Aes256Gcm), data(0)).expect("made"));
    let first = listener.accept(soon()).expect("accepted");
    let _one = one.join().expect("no panic");
    let again =
        thread::spawn(move || dial(to, &spec(Cipher::Aes256Gcm), data(0)).expect("said yes"));
    assert_eq!(turned_away(&mut listener, &gate, 1).channel_reused, 1);
    // Whoever asked finds its connection closed; the first one is not disturbed.
    let (mut reader, _) = again.join().expect("no panic").split();
    assert_eq!(
        refused(reader.next(&patience()).map(drop)).class(),
        Class::Lost
    );
    let short = Patience::idle(Duration::from_millis(10));
    let error = refused(first.split().0.next(&short).map(drop));
    assert!(matches!(error, TransportError::Silent { .. }));
}

/// With encryption disabled, page data is in clear; still nobody without the key gets a byte in.
#[test]
fn a_stranger_cannot_feed_a_migration_without_encryption() {
    let gate = gate(Cipher::None);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let (mut peer, _destination) = hostile(Cipher::None, data(0));
    let list = [0u64.to_le_bytes().as_slice(), 1u32.to_le_bytes().as_slice()].concat();
    let mut recorded = seal(&mut peer.session.sealer, RecordKind::Pages, &list);
    recorded.extend(seal(
        &mut peer.session.sealer,
        RecordKind::Payload,
        &[1; PAGE_SIZE],
    ));

    let mut bare = TcpStream::connect(to).expect("connected");
    bare.write_all(&recorded).expect("sent");
    let mut web = TcpStream::connect(to).expect("connected");
    web.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
    let mut late = TcpStream::connect(to).expect("connected");
    let (_, hello) = ClientHandshake::start(&spec(Cipher::None), data(0), [1; 32]);
    late.write_all(&[hello, recorded].concat()).expect("sent");
    let strangers = turned_away(&mut listener, &gate, 3);
    assert_eq!(strangers.not_godwit, 3, "{strangers:?}");
}

#[test]
fn strangers_do_not_delay_a_channel() {
    // More than may be pending, and none says a word: each would have longer than anybody here waits.
    let gate = Gate::new(spec(Cipher::Aes256Gcm), Tuning::default(), 10 * LONG);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let crowd = thread::spawn(move || {
        let mut crowd = Vec::new();
        for _ in 0..PENDING_MAX + 36 {
            crowd.push(TcpStream::connect(to).expect("connected"));
        }
        crowd
    });
    let begun = Instant::now();
    let mut turned_away = 0;
    while turned_away < 36 {
        refused(listener.accept(Instant::now() + Duration::from_millis(10)));
        turned_away = gate.strangers().evicted;
        assert!(begun.elapsed() < LONG, "the crowd does not come");
    }
    let crowd = crowd.join().expect("no panic");
    let dialled = thread::spawn(move || dial(to, &spec(Cipher::Aes256Gcm), data(0)));
    let accepted = listener.accept(soon()).expect("accepted");
    assert_eq!(accepted.channel(), data(0));
    dialled.join().expect("no panic").expect("connected");
    assert_eq!(crowd.len(), PENDING_MAX + 36);
}

#[test]
fn a_crowd_does_not_push_out_who_asked_for_this_migration() {
    let gate = gate(Cipher::Aes256Gcm);
    let mut listener = listen(&gate, V4);
    let to = listener.address();
    let (crowd_is_there, go) = mpsc::channel();
    let peer = thread::spawn(move || {
        let ours = spec(Cipher::Aes256Gcm);
        let (handshake, hello) = ClientHandshake::start(&ours, data(0), [1; 32]);
        let mut stream = TcpStream::connect(to).expect("connected");
        stream.write_all(&hello).expect("sent");
        let reply = read_message(&mut stream);
        let (_, proof) = handshake.on_server_hello(&reply).expect("a session");
        let crowd: Vec<_> = (0..PENDING_MAX + 5)
            .map(|_| TcpStream::connect(to).expect("connected"))
            .collect();
        go.recv_timeout(LONG).expect("a word");
        stream.write_all(&proof).expect("sent");
        (stream, crowd)
    });
    assert_eq!(turned_away(&mut listener, &gate, 6).evicted, 6);
    crowd_is_there.send(()).expect("the peer waits");
    assert_eq!(
        listener.accept(soon()).expect("accepted").channel(),
        data(0)
    );
    peer.join().expect("no panic");
}

#[test]
fn a_silent_stranger_is_dropped_in_time() {
    let time = Duration::from_millis(50);
    let gate = Gate::new(spec(Cipher::None), Tuning::default(), time);
    let mut listener = listen(&gate, V4);
    let mut stranger = TcpStream::connect(listener.address()).expect("connected");
    stranger.write_all(b"GODW").expect("sent");
    assert_eq!(turned_away(&mut listener, &gate, 1).silent, 1);
    let read = stranger.read(&mut [0; 1]);
    assert!(
        read.is_err() || matches!(read, Ok(0)),
        "the connection is closed"
    );
}

#[test]
fn records_may_follow_the_proof_in_the_same_packet() {
    let mut listener = listen(&gate(Cipher::Aes256Gcm), V4);
    let mut stream = TcpStream::connect(listener.address()).expect("connected");
    let peer = thread::spawn(move || {
        let ours = spec(Cipher::Aes256Gcm);
        let (handshake, hello) = ClientHandshake::start(&ours, ChannelId::control(2), [1; 32]);
        stream.write_all(&hello).expect("sent");
        let reply = read_message(&mut stream);
        let (mut session, proof) = handshake.on_server_hello(&reply).expect("a session");
        let record = seal(&mut session.sealer, RecordKind::Control, b"first");
        stream.write_all(&[proof, record].concat()).expect("sent");
        stream
    });
    let (mut reader, _) = listener.accept(soon()).expect("accepted").split();
    assert_eq!(
        reader.next(&patience()).expect("a record").payload,
        b"first"
    );
    peer.join().expect("no panic");
}
