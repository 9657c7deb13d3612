//! Channels between two sides that behave, over real loopback sockets.

mod common;

use common::*;
use godwit_transport::{
    Class, ConnectOptions, Incoming, Listener, Patience, RecordReader, RecordWriter,
    TransportError, connect,
};
use godwit_types::migration::Cipher;
use godwit_wire::{ChannelId, PAGE_SIZE, PageRun, PageRuns, RecordKind, ZeroPages};
use rustix::net;
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

fn page_runs(list: &[(u64, u32)]) -> PageRuns {
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

fn send_everything(writer: &mut RecordWriter) {
    let (a, b) = (vec![0xaa; PAGE_SIZE], vec![0xbb; 2 * PAGE_SIZE]);
    let mut zero = ZeroPages::new();
    assert_eq!((zero.insert(3), zero.insert(70)), (Ok(true), Ok(true)));
    let runs = page_runs(&[(1, 1), (10, 2)]);
    writer
        .send_pages(&runs, &[&a, &b], &patience())
        .expect("scattered pages");
    let whole = [a, b].concat();
    writer
        .send_pages(&page_runs(&[(20, 3)]), &[&whole], &patience())
        .expect("neighbours");
    writer
        .send_zero_pages(&zero, &patience())
        .expect("zero pages");
    writer.finish(&patience()).expect("the end");
}

fn receive_everything(reader: &mut RecordReader) {
    let mut runs = PageRuns::new();
    let record = reader.next(&patience()).expect("a list");
    runs.decode(record.payload, 100).expect("a valid list");
    assert_eq!(runs, page_runs(&[(1, 1), (10, 2)]));
    let record = reader.next(&patience()).expect("page data");
    assert_eq!((record.kind, record.counter), (RecordKind::Payload, 1));
    assert_eq!(
        record.payload,
        [vec![0xaa; PAGE_SIZE], vec![0xbb; 2 * PAGE_SIZE]].concat()
    );

    let record = reader.next(&patience()).expect("a list");
    runs.decode(record.payload, 100).expect("a valid list");
    let mut memory = vec![0; runs.payload_len()];
    reader
        .next_payload_into(&mut memory, &patience())
        .expect("page data in place");
    assert_eq!(
        memory,
        [vec![0xaa; PAGE_SIZE], vec![0xbb; 2 * PAGE_SIZE]].concat()
    );

    let mut zero = ZeroPages::new();
    let record = reader.next(&patience()).expect("zero pages");
    zero.decode(record.payload, 100).expect("a valid bitmap");
    assert_eq!(
        zero.runs().map(|run| run.first).collect::<Vec<_>>(),
        [3, 70]
    );
    assert_eq!(
        reader.next(&patience()).expect("the end").kind,
        RecordKind::Final
    );
}

#[test]
fn pages_cross_over_ipv4_and_ipv6_sealed_and_in_clear() {
    for ip in [V4, V6] {
        for cipher in [Cipher::Aes256Gcm, Cipher::None] {
            let (source, destination) = channel(ip, cipher, data(0));
            assert_eq!(source.peer().ip(), ip);
            let (mut reader, _) = destination.split();
            let (_, mut writer) = source.split();
            let sending = thread::spawn(move || {
                send_everything(&mut writer);
                writer.meter().read()
            });
            receive_everything(&mut reader);
            let sent = sending.join().expect("no panic");
            let received = reader.meter().read();
            assert_eq!((sent.bytes, sent.records), (received.bytes, 6));
            assert!(sent.bytes > 6 * PAGE_SIZE as u64);
        }
    }
}

#[test]
fn both_directions_work_at_once_from_two_threads() {
    let (source, destination) = channel(V4, Cipher::Aes256Gcm, data(0));
    let ends = [source, destination].map(|end| {
        let (mut reader, mut writer) = end.split();
        let sending = thread::spawn(move || {
            for round in 0..200u32 {
                let text = vec![7; 10_000 + round as usize];
                writer
                    .send(RecordKind::Control, &text, &patience())
                    .expect("sent");
            }
            writer.finish(&patience()).expect("the end");
        });
        let receiving = thread::spawn(move || {
            let mut bytes = 0;
            loop {
                let record = reader.next(&patience()).expect("a record");
                bytes += record.payload.len();
                if record.kind == RecordKind::Final {
                    return bytes;
                }
            }
        });
        (sending, receiving)
    });
    for (sending, receiving) in ends {
        sending.join().expect("no panic");
        assert_eq!(
            receiving.join().expect("no panic"),
            200 * 10_000 + 199 * 100
        );
    }
}

#[test]
fn control_messages_up_to_a_mebibyte_cross_and_end() {
    let (source, destination) = channel(V4, Cipher::None, ChannelId::control(0));
    let (mut sender, _receiver) = source.into_control().expect("a control channel");
    let (_sender, mut receiver) = destination.into_control().expect("a control channel");
    let long = vec![b'x'; 1 << 20];
    let copy = long.clone();
    let sending = thread::spawn(move || {
        sender.send(b"{}", soon()).expect("sent");
        sender.send(&copy, soon()).expect("sent");
        sender.send_device_state(b"cpu", soon()).expect("sent");
        let error = refused(sender.send(&[copy, vec![1]].concat(), soon()));
        assert_eq!(error.class(), Class::Local);
        sender.finish(soon()).expect("the end");
        sender
    });
    assert_eq!(
        receiver.recv(soon()).expect("a message"),
        Incoming::Message(b"{}".to_vec())
    );
    assert_eq!(
        receiver.recv(soon()).expect("a message"),
        Incoming::Message(long)
    );
    assert_eq!(
        receiver.recv(soon()).expect("state"),
        Incoming::DeviceState(b"cpu".to_vec())
    );
    assert_eq!(receiver.recv(soon()).expect("the end"), Incoming::End);
    sending.join().expect("no panic");
}

#[test]
fn a_data_channel_is_no_control_channel() {
    let (source, _destination) = channel(V4, Cipher::None, data(1));
    assert_eq!(refused(source.into_control()).class(), Class::Local);
}

#[test]
fn pages_that_do_not_match_their_list_are_not_sent() {
    let (source, destination) = channel(V4, Cipher::Aes256Gcm, data(0));
    let (_, mut writer) = source.split();
    let page = vec![0; PAGE_SIZE];
    let error = refused(writer.send_pages(&page_runs(&[(0, 2)]), &[&page], &patience()));
    assert_eq!(error.class(), Class::Local);
    assert_eq!(writer.next_counter(), 0);
    writer
        .finish(&patience())
        .expect("the channel is still good");
    let (mut reader, _) = destination.split();
    assert_eq!(
        reader.next(&patience()).expect("the end").kind,
        RecordKind::Final
    );
}

#[test]
fn closing_wakes_both_halves_and_says_who_did_it() {
    let (source, destination) = channel(V4, Cipher::Aes256Gcm, data(0));
    let closer = source.closer();
    let (mut reader, mut writer) = source.split();
    let receiving = thread::spawn(move || refused(reader.next(&patience()).map(drop)));
    let sending = thread::spawn(move || {
        let piece = vec![0; 1 << 20];
        loop {
            if let Err(error) = writer.send(RecordKind::DeviceState, &piece, &patience()) {
                return error;
            }
        }
    });
    closer.close();
    assert!(matches!(
        receiving.join().expect("no panic"),
        TransportError::Cancelled
    ));
    assert!(matches!(
        sending.join().expect("no panic"),
        TransportError::Cancelled
    ));
    drop(destination);
}

#[test]
fn closing_a_listener_wakes_it() {
    let mut listener = listen(&gate(Cipher::None), V4);
    let closer = listener.closer();
    let waiting = thread::spawn(move || refused(listener.accept(soon())));
    closer.close();
    assert!(matches!(
        waiting.join().expect("no panic"),
        TransportError::Cancelled
    ));
}

#[test]
fn one_listener_makes_many_channels() {
    let mut listener = listen(&gate(Cipher::Aes256Gcm), V6);
    let to = listener.address();
    thread::scope(|scope| {
        for index in 0..8 {
            scope.spawn(move || dial(to, &spec(Cipher::Aes256Gcm), data(index)).expect("made"));
        }
        let mut made: Vec<_> = (0..8)
            .map(|_| listener.accept(soon()).expect("accepted").channel().index())
            .collect();
        made.sort();
        assert_eq!(made, (0..8).collect::<Vec<_>>());
    });
}

#[test]
fn a_port_range_in_use_is_named() {
    let taken = TcpListener::bind((V4, 0)).expect("a listener");
    let port = taken.local_addr().expect("an address").port();
    let error = refused(Listener::bind(gate(Cipher::None), V4, port..=port));
    assert!(matches!(error, TransportError::Bind { .. }));
    assert!(error.to_string().contains(&port.to_string()), "{error}");
    assert_eq!(error.class(), Class::Local);
}

#[test]
fn the_next_free_port_of_a_range_is_taken() {
    // The system's own choice has a neighbour that is free, sooner or later: look for one.
    let (taken, port) = (0..100)
        .find_map(|_| {
            let taken = TcpListener::bind((V4, 0)).ok()?;
            let port = taken.local_addr().ok()?.port();
            let next = port.checked_add(1)?;
            TcpListener::bind((V4, next)).ok().map(|_| (taken, port))
        })
        .expect("two neighbouring ports");
    let listener = Listener::bind(gate(Cipher::None), V4, port..=port + 1).expect("the second");
    assert_eq!(listener.address().port(), port + 1);
    drop(taken);
}

#[test]
fn the_configured_source_address_is_used() {
    let mut listener = listen(&gate(Cipher::None), V4);
    let to = listener.address();
    let from = "127.0.0.2".parse().expect("an address");
    let options = ConnectOptions {
        bind: Some(from),
        ..ConnectOptions::default()
    };
    thread::scope(|scope| {
        let dialled = scope.spawn(|| connect(to, &options, &spec(Cipher::None), data(0), soon()));
        assert_eq!(listener.accept(soon()).expect("accepted").peer().ip(), from);
        let source = dialled.join().expect("no panic").expect("connected");
        assert!(!source.granted().congestion.is_empty());
        assert!(source.granted().send_buffer_bytes > 0);
        assert!(source.rtt() > Duration::ZERO && source.rtt() < LONG);
    });
}

#[test]
fn nobody_listening_is_a_clear_error() {
    // Bound and not listening: no other test can have the port meanwhile.
    let socket = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None);
    let socket = socket.expect("a socket");
    net::bind(&socket, &SocketAddr::new(V4, 0)).expect("bound");
    let to = net::getsockname(&socket).expect("an address");
    let to = SocketAddr::try_from(to).expect("an IP address");
    let error = refused(dial(to, &spec(Cipher::None), data(0)));
    assert!(matches!(error, TransportError::Connect { .. }));
    assert!(error.to_string().contains(&to.to_string()), "{error}");
    assert_eq!(error.class(), Class::Lost);
}

#[test]
fn a_server_that_says_nothing_is_given_up_in_time() {
    let silent = TcpListener::bind((V4, 0)).expect("a listener");
    let to: SocketAddr = silent.local_addr().expect("an address");
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(100);
    let options = ConnectOptions::default();
    let error = refused(connect(
        to,
        &options,
        &spec(Cipher::None),
        data(0),
        deadline,
    ));
    assert!(
        matches!(error, TransportError::HandshakeSilent { .. }),
        "{error}"
    );
    assert!(begun.elapsed() < LONG);
}

#[test]
fn a_peer_that_takes_nothing_stalls_the_sender_in_time() {
    let (source, destination) = channel(V4, Cipher::Aes256Gcm, data(0));
    let (_, mut writer) = source.split();
    let (piece, short) = (vec![0; 1 << 20], Patience::idle(Duration::from_millis(100)));
    let error = (0..1000)
        .find_map(|_| writer.send(RecordKind::DeviceState, &piece, &short).err())
        .expect("the buffers end");
    assert!(matches!(error, TransportError::Stalled { .. }), "{error}");
    assert!(writer.meter().read().blocked_us >= 90_000);
    let error = refused(writer.send(RecordKind::Control, b"", &patience()));
    assert!(
        matches!(error, TransportError::Unusable { .. }),
        "half a record was sent"
    );
    drop(destination);
}
