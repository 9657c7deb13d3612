//! Both ends of a channel over real loopback sockets, and a peer that keeps no rule.
#![allow(dead_code, reason = "each test binary uses its own part")]

use godwit_transport::{
    ConnectOptions, Connection, Gate, Listener, Patience, Strangers, TransportError, Tuning,
    connect,
};
use godwit_types::MigrationId;
use godwit_types::migration::{Cipher, MigrationSecret};
use godwit_wire::handshake::{HEAD_LEN, body_len};
use godwit_wire::{ChannelId, ClientHandshake, KEY_LEN, RecordKind, Sealer, Session, Spec};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);
/// Longer than anything here takes; its end is a failed test.
pub const LONG: Duration = Duration::from_secs(20);

pub fn soon() -> Instant {
    Instant::now() + LONG
}

pub fn patience() -> Patience {
    Patience::idle(LONG)
}

pub fn spec(cipher: Cipher) -> Arc<Spec> {
    spec_with(7, "m-1", cipher)
}

pub fn spec_with(key: u8, id: &str, cipher: Cipher) -> Arc<Spec> {
    let secret = MigrationSecret {
        key: vec![key; KEY_LEN],
        nonce: vec![1; 8],
    };
    let id = MigrationId::new(id).expect("a valid id");
    Arc::new(Spec::new(id, &secret, cipher).expect("a valid secret"))
}

pub fn data(index: u16) -> ChannelId {
    ChannelId::data(0, index).expect("a data channel")
}

pub fn gate(cipher: Cipher) -> Arc<Gate> {
    Gate::new(spec(cipher), Tuning::default(), Duration::from_secs(5))
}

pub fn listen(gate: &Arc<Gate>, ip: IpAddr) -> Listener {
    Listener::bind(Arc::clone(gate), ip, 0..=0).expect("a listener")
}

pub fn dial(to: SocketAddr, spec: &Spec, channel: ChannelId) -> Result<Connection, TransportError> {
    connect(to, &ConnectOptions::default(), spec, channel, soon())
}

/// Serves a listener until its gate has turned `count` connections away; none may get in.
pub fn turned_away(listener: &mut Listener, gate: &Gate, count: u64) -> Strangers {
    let end = soon();
    while gate.strangers().total() < count {
        let slice = Instant::now() + Duration::from_millis(20);
        let error = refused(listener.accept(slice));
        assert!(
            matches!(error, TransportError::AcceptDeadline { .. }),
            "{error}"
        );
        assert!(Instant::now() < end, "{error}");
    }
    gate.strangers()
}

/// Source's and destination's end of one channel.
pub fn channel(ip: IpAddr, cipher: Cipher, channel: ChannelId) -> (Connection, Connection) {
    let mut listener = listen(&gate(cipher), ip);
    let to = listener.address();
    thread::scope(|scope| {
        let source = scope.spawn(move || dial(to, &spec(cipher), channel));
        let destination = listener.accept(soon()).expect("accepted");
        (
            source.join().expect("no panic").expect("connected"),
            destination,
        )
    })
}

/// A source that holds the key and the bare socket.
pub struct Hostile {
    pub stream: TcpStream,
    pub session: Session,
}

impl Hostile {
    /// Shakes hands as a good client does.
    pub fn connect(to: SocketAddr, spec: &Spec, channel: ChannelId) -> Self {
        let mut stream = TcpStream::connect(to).expect("connected");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        let (handshake, hello) = ClientHandshake::start(spec, channel, [1; 32]);
        stream.write_all(&hello).expect("sent");
        let reply = read_message(&mut stream);
        let (session, proof) = handshake.on_server_hello(&reply).expect("a session");
        stream.write_all(&proof).expect("sent");
        Self { stream, session }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }
}

pub fn read_message(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = [0; HEAD_LEN];
    stream.read_exact(&mut head).expect("a head");
    let mut message = head.to_vec();
    message.resize(HEAD_LEN + body_len(&head).expect("a valid head"), 0);
    stream.read_exact(&mut message[HEAD_LEN..]).expect("a body");
    message
}

/// A hostile source and the destination it reached.
pub fn hostile(cipher: Cipher, channel: ChannelId) -> (Hostile, Connection) {
    let mut listener = listen(&gate(cipher), V4);
    let to = listener.address();
    thread::scope(|scope| {
        let peer = scope.spawn(move || Hostile::connect(to, &spec(cipher), channel));
        let destination = listener.accept(soon()).expect("accepted");
        (peer.join().expect("no panic"), destination)
    })
}

pub fn seal(sealer: &mut Sealer, kind: RecordKind, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; sealer.record_len(kind, payload.len())];
    sealer.seal_into(kind, payload, &mut frame).expect("sealed");
    frame
}

/// The error of a call that must fail.
pub fn refused<T>(result: Result<T, TransportError>) -> TransportError {
    result.err().expect("an error")
}
