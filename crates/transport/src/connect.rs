//! The side that connects, and what both sides have once a channel is made.
//!
//! Owns the socket until it is split. Refuses: a peer that does not prove the migration's key in time.

use crate::error::TransportError;
use crate::link::{Probe, rtt};
use crate::pipe::{Closer, Patience, Pipe, Read, wait};
use crate::socket::{Granted, Tuning, granted, size_send_buffer, tcp_socket, tune};
use crate::{RecordReader, RecordWriter, kernel};
use godwit_wire::handshake::{HEAD_LEN, body_len};
use godwit_wire::{ChannelId, ClientHandshake, RANDOM_LEN, Session, Spec};
use rustix::event::PollFlags;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{bind, sockopt};
use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How to reach the peer.
#[derive(Debug, Clone, Default)]
pub struct ConnectOptions {
    /// The local address to connect from, of the peer's family; the system's choice without it.
    pub bind: Option<IpAddr>,
    /// The interface to keep to, whatever the routing table says; any without it.
    pub interface: Option<u32>,
    /// What the link is like.
    pub tuning: Tuning,
}

/// The interface that has this address: its index and name.
pub fn interface_of(address: IpAddr) -> Option<(u32, String)> {
    kernel::interface_of(address)
}

/// A channel that is made and authenticated both ways.
pub struct Connection {
    closer: Closer,
    session: Session,
    peer: SocketAddr,
    granted: Granted,
}

impl Connection {
    pub(crate) fn new(
        closer: Closer,
        peer: SocketAddr,
        session: Session,
        tuning: &Tuning,
        rtt: Duration,
    ) -> Self {
        let granted = granted(closer.stream(), tuning, rtt);
        Self {
            closer,
            session,
            peer,
            granted,
        }
    }

    pub fn channel(&self) -> ChannelId {
        self.session.channel
    }

    /// The other end's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// What the kernel granted.
    pub fn granted(&self) -> &Granted {
        &self.granted
    }

    /// The round trip: the kernel's measure where it has one, else what the handshake took.
    pub fn rtt(&self) -> Duration {
        self.granted.rtt
    }

    /// Looks at the link from any thread, also after the channel was split.
    pub fn probe(&self) -> Probe {
        Probe::new(self.closer.shared_stream())
    }

    /// Closes the channel from any thread, also after it was split.
    pub fn closer(&self) -> Closer {
        self.closer.clone()
    }

    /// The two halves, for two threads.
    pub fn split(self) -> (RecordReader, RecordWriter) {
        let channel = self.channel();
        let pipe = || Pipe::new(self.closer.clone(), channel);
        let reader = RecordReader::new(pipe(), self.session.opener);
        let writer = RecordWriter::new(pipe(), self.session.sealer);
        (reader, writer)
    }
}

/// A connection that was made and has not proved anything yet.
#[derive(Debug)]
pub struct Dialed {
    closer: Closer,
    peer: SocketAddr,
    tuning: Tuning,
    /// How long the connection took to make.
    took: Duration,
}

impl Dialed {
    /// The round trip, as far as it is known.
    pub fn rtt(&self) -> Duration {
        rtt(self.closer.stream()).unwrap_or(self.took)
    }

    /// Proves the migration's key and makes the peer prove it, by `deadline`. The caller never uses a channel id
    /// twice.
    pub fn introduce(
        self,
        spec: &Spec,
        channel: ChannelId,
        deadline: Instant,
    ) -> Result<Connection, TransportError> {
        let session = shake_hands(&self.closer, self.peer, spec, channel, deadline)?;
        let rtt = self.rtt();
        Ok(Connection::new(
            self.closer,
            self.peer,
            session,
            &self.tuning,
            rtt,
        ))
    }
}

/// Makes a connection to a listening destination, by `deadline`, and fits it to the round trip that this took.
pub fn dial(
    peer: SocketAddr,
    options: &ConnectOptions,
    deadline: Instant,
) -> Result<Dialed, TransportError> {
    let socket = tcp_socket(&peer)?;
    if let Some(from) = options.bind {
        bind_source(&socket, from)?;
    }
    if let Some(index) = options.interface {
        // Where the kernel refuses, its routing table decides.
        kernel::bind_to_interface(&socket, index);
    }
    let began = Instant::now();
    let stream = open(socket, peer, deadline)?;
    let took = began.elapsed();
    let rtt = rtt(&stream).unwrap_or(took);
    size_send_buffer(&stream, &options.tuning, rtt);
    tune(&stream, &options.tuning, rtt)?;
    Ok(Dialed {
        closer: Closer::new(stream),
        peer,
        tuning: options.tuning.clone(),
        took,
    })
}

/// Opens one channel to a listening destination, by `deadline`. The caller never uses a channel id twice.
pub fn connect(
    peer: SocketAddr,
    options: &ConnectOptions,
    spec: &Spec,
    channel: ChannelId,
    deadline: Instant,
) -> Result<Connection, TransportError> {
    dial(peer, options, deadline)?.introduce(spec, channel, deadline)
}

fn bind_source(socket: &OwnedFd, from: IpAddr) -> Result<(), TransportError> {
    bind(socket, &SocketAddr::new(from, 0)).map_err(TransportError::system(
        "send from the configured migration address",
    ))
}

fn open(socket: OwnedFd, peer: SocketAddr, deadline: Instant) -> Result<TcpStream, TransportError> {
    let failed = |errno: Errno| TransportError::Connect {
        peer,
        source: errno.into(),
    };
    match rustix::net::connect(&socket, &peer) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let stream = TcpStream::from(socket);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if !wait(&stream, PollFlags::OUT, left).map_err(failed)? {
            return Err(failed(Errno::TIMEDOUT));
        }
        sockopt::socket_error(&stream)
            .map_err(failed)?
            .map_err(failed)?;
        // A signal ends the wait early: only a peer's name shows that the connection is made.
        if rustix::net::getpeername(&stream).is_ok() {
            return Ok(stream);
        }
    }
}

/// A fresh random for one handshake.
pub(crate) fn random() -> Result<[u8; RANDOM_LEN], TransportError> {
    let mut random = [0; RANDOM_LEN];
    getrandom::fill(&mut random).map_err(|error| TransportError::System {
        doing: "get random bytes",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(random)
}

fn shake_hands(
    closer: &Closer,
    peer: SocketAddr,
    spec: &Spec,
    channel: ChannelId,
    deadline: Instant,
) -> Result<Session, TransportError> {
    let begun = Instant::now();
    let pipe = Pipe::new(closer.clone(), channel);
    let patience = Patience::until(deadline);
    let during = |error| during_handshake(error, peer, begun);
    let (handshake, hello) = ClientHandshake::start(spec, channel, random()?);
    pipe.send(&mut [IoSlice::new(&hello)], &patience)
        .map_err(during)?;
    let reply = read_message(&pipe, peer, &patience).map_err(during)?;
    let (session, proof) = handshake.on_server_hello(&reply)?;
    pipe.send(&mut [IoSlice::new(&proof)], &patience)
        .map_err(during)?;
    Ok(session)
}

/// Reads exactly one message, at most 256 bytes, and nothing of what follows.
fn read_message(
    pipe: &Pipe,
    peer: SocketAddr,
    patience: &Patience,
) -> Result<Vec<u8>, TransportError> {
    let mut head = [0; HEAD_LEN];
    let mut filled = 0;
    if pipe.fill(&mut head, &mut filled, patience)? == Read::End {
        return Err(TransportError::HandshakeClosed { peer });
    }
    let mut message = head.to_vec();
    message.resize(HEAD_LEN + body_len(&head)?, 0);
    if pipe.fill(&mut message, &mut filled, patience)? == Read::End {
        return Err(TransportError::HandshakeClosed { peer });
    }
    Ok(message)
}

/// Names the peer instead of a channel that does not exist yet.
fn during_handshake(error: TransportError, peer: SocketAddr, begun: Instant) -> TransportError {
    match error {
        TransportError::Silent { .. } | TransportError::Stalled { .. } => {
            let ms = crate::pipe::millis(begun);
            TransportError::HandshakeSilent { peer, ms }
        }
        TransportError::Broken { .. } => TransportError::HandshakeClosed { peer },
        other => other,
    }
}
