//! The side that listens: lets in who belongs to the migration and turns away everybody else.
//!
//! A [`Gate`] owns what is expected and which channel ids were used; it is shared by the listeners of all addresses.
//! A [`Listener`] owns its socket and the connections that have not proved anything yet: at most [`PENDING_MAX`],
//! each with a deadline, the oldest making room for the newest. All of them are served by the one thread that waits
//! in [`Listener::accept`], so that a silent stranger costs no thread and delays nobody.

use crate::connect::{Connection, random};
use crate::error::TransportError;
use crate::link::rtt;
use crate::pipe::{Closer, millis, timespec};
use crate::socket::{
    Tuning, narrow_stranger, offer_wide_windows, size_receive_buffer, tcp_socket, tune,
};
use godwit_wire::handshake::{HEAD_LEN, MESSAGE_LEN_MAX, body_len, refusal};
use godwit_wire::{ChannelId, ServerHandshake, Session, Spec, WireError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendFlags, Shutdown, SocketFlags, acceptfrom_with, bind, getsockname, listen, recv,
    send, shutdown, sockopt,
};
use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most connections per listener that have not finished the handshake.
pub const PENDING_MAX: usize = 64;
/// Connections that the kernel keeps for us until they are taken.
const BACKLOG: i32 = 512;
/// Connections taken from the kernel's queue before the pending ones are looked at again.
const ACCEPT_BATCH: usize = 16;

/// Connections that were turned away, by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strangers {
    /// Spoke another protocol, or none that made sense.
    pub not_godwit: u64,
    pub wrong_version: u64,
    /// Asked for another migration.
    pub wrong_migration: u64,
    /// Did not hold the key, nonce or cipher of the migration.
    pub wrong_proof: u64,
    /// Asked for a channel that was made already.
    pub channel_reused: u64,
    /// Said too little in the time given.
    pub silent: u64,
    /// Left before the end.
    pub left: u64,
    /// Made room for newer ones.
    pub evicted: u64,
    /// The last one and why, for people.
    pub last: Option<String>,
}

impl Strangers {
    pub fn total(&self) -> u64 {
        [
            self.not_godwit,
            self.wrong_version,
            self.wrong_migration,
            self.wrong_proof,
            self.channel_reused,
            self.silent,
            self.left,
            self.evicted,
        ]
        .iter()
        .sum()
    }

    fn count(&mut self, why: &Refusal, peer: SocketAddr) {
        let counter = match why {
            Refusal::Wire(WireError::Version { .. }) => &mut self.wrong_version,
            Refusal::Wire(WireError::WrongMigration) => &mut self.wrong_migration,
            Refusal::Wire(WireError::Proof { .. }) => &mut self.wrong_proof,
            Refusal::Wire(_) => &mut self.not_godwit,
            Refusal::ChannelReused => &mut self.channel_reused,
            Refusal::Silent => &mut self.silent,
            Refusal::Left => &mut self.left,
            Refusal::Evicted => &mut self.evicted,
        };
        *counter += 1;
        self.last = Some(format!("{peer}: {why}"));
    }
}

/// Why a connection was turned away.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the channel was made already")]
    ChannelReused,
    #[error("it said too little in the time given")]
    Silent,
    #[error("it left before the end of the handshake")]
    Left,
    #[error("it made room for a newer connection")]
    Evicted,
}

/// What a destination expects of those who connect.
pub struct Gate {
    spec: Arc<Spec>,
    tuning: Tuning,
    handshake_time: Duration,
    used: Mutex<HashSet<ChannelId>>,
    strangers: Mutex<Strangers>,
}

impl Gate {
    /// `handshake_time` is what each connection gets to prove itself: 500 ms to 5 s, at least a few round trips.
    pub fn new(spec: Arc<Spec>, tuning: Tuning, handshake_time: Duration) -> Arc<Self> {
        Arc::new(Self {
            spec,
            tuning,
            handshake_time,
            used: Mutex::default(),
            strangers: Mutex::default(),
        })
    }

    /// Who was turned away so far.
    pub fn strangers(&self) -> Strangers {
        let strangers = self.strangers.lock();
        strangers.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn turn_away(&self, why: &Refusal, peer: SocketAddr) {
        let strangers = self.strangers.lock();
        strangers
            .unwrap_or_else(PoisonError::into_inner)
            .count(why, peer);
    }

    /// Marks the id as used; only after its proof, so that nobody else can use ids up.
    fn claim(&self, channel: ChannelId) -> Result<(), Refusal> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.insert(channel) {
            Ok(())
        } else {
            Err(Refusal::ChannelReused)
        }
    }
}

/// A connection that has not proved anything yet.
struct Pending {
    stream: TcpStream,
    peer: SocketAddr,
    until: Instant,
    message: [u8; MESSAGE_LEN_MAX],
    filled: usize,
    /// Once the hello was answered.
    answered: Option<ServerHandshake>,
    answered_at: Instant,
}

/// What one look at a pending connection brought.
enum Progress {
    Waits,
    Proved(Box<Session>),
}

impl Pending {
    /// Takes what has come, without waiting and without reading into what follows the message.
    fn advance(&mut self, gate: &Gate) -> Result<Progress, Refusal> {
        loop {
            let needed = self.needed()?;
            if self.filled < needed {
                let room = self
                    .message
                    .get_mut(self.filled..needed)
                    .unwrap_or_default();
                match recv(&self.stream, room, RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => return Err(Refusal::Left),
                    Ok((_, count)) => self.filled += count,
                    Err(Errno::AGAIN | Errno::INTR) => return Ok(Progress::Waits),
                    Err(_) => return Err(Refusal::Left),
                }
            } else if let Some(session) = self.take_message(gate)? {
                return Ok(Progress::Proved(Box::new(session)));
            }
        }
    }

    /// Bytes until the message is whole, as far as can be told yet.
    fn needed(&self) -> Result<usize, WireError> {
        match self.message.first_chunk::<HEAD_LEN>() {
            Some(head) if self.filled >= HEAD_LEN => Ok(HEAD_LEN + body_len(head)?),
            _ => Ok(HEAD_LEN),
        }
    }

    fn take_message(&mut self, gate: &Gate) -> Result<Option<Session>, Refusal> {
        let message = self.message.get(..self.filled).unwrap_or_default();
        if let Some(answered) = self.answered.take() {
            return Ok(Some(answered.on_client_proof(message)?));
        }
        let random = random().map_err(|_| WireError::Crypto)?;
        let (state, reply) = ServerHandshake::on_client_hello(&gate.spec, message, random)?;
        self.say(&reply)?;
        self.answered = Some(state);
        self.answered_at = Instant::now();
        self.filled = 0;
        Ok(None)
    }

    /// A reply fits a new socket's buffer; where it does not, the peer is no peer of ours.
    fn say(&self, message: &[u8]) -> Result<(), Refusal> {
        match send(
            &self.stream,
            message,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            Ok(count) if count == message.len() => Ok(()),
            _ => Err(Refusal::Left),
        }
    }
}

/// Ends a listener's wait from any thread.
#[derive(Debug, Clone)]
pub struct ListenerCloser {
    socket: Arc<OwnedFd>,
    closed: Arc<AtomicBool>,
}

impl ListenerCloser {
    /// Stops listening: [`Listener::accept`] returns [`TransportError::Cancelled`] at once.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // On Linux this wakes the thread that polls a listening socket.
        let _ = shutdown(&*self.socket, Shutdown::Both);
    }
}

/// Accepts the channels of one migration on one address.
pub struct Listener {
    gate: Arc<Gate>,
    socket: Arc<OwnedFd>,
    closed: Arc<AtomicBool>,
    address: SocketAddr,
    pending: VecDeque<Pending>,
    ready: VecDeque<Connection>,
}

impl Listener {
    /// Listens on the first port of the range that is free; port 0 lets the system choose.
    pub fn bind(
        gate: Arc<Gate>,
        address: IpAddr,
        ports: RangeInclusive<u16>,
    ) -> Result<Self, TransportError> {
        let (first, last) = (*ports.start(), *ports.end());
        let mut failure = Errno::INVAL;
        for port in ports {
            match bind_port(SocketAddr::new(address, port))? {
                Ok(socket) => return Self::on(socket, gate),
                Err(errno) => failure = errno,
            }
        }
        Err(TransportError::Bind {
            address,
            first,
            last,
            source: failure.into(),
        })
    }

    fn on(socket: OwnedFd, gate: Arc<Gate>) -> Result<Self, TransportError> {
        let doing = "learn the listening address";
        let name = getsockname(&socket).map_err(TransportError::system(doing))?;
        let address = SocketAddr::try_from(name).map_err(TransportError::system(doing))?;
        Ok(Self {
            gate,
            socket: Arc::new(socket),
            closed: Arc::default(),
            address,
            pending: VecDeque::new(),
            ready: VecDeque::new(),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends the wait from any thread.
    pub fn closer(&self) -> ListenerCloser {
        ListenerCloser {
            socket: Arc::clone(&self.socket),
            closed: Arc::clone(&self.closed),
        }
    }

    /// The next channel that proved itself, by `deadline`.
    pub fn accept(&mut self, deadline: Instant) -> Result<Connection, TransportError> {
        let begun = Instant::now();
        loop {
            if let Some(connection) = self.ready.pop_front() {
                return Ok(connection);
            }
            if self.closed.load(Ordering::Acquire) {
                return Err(TransportError::Cancelled);
            }
            if Instant::now() >= deadline {
                return Err(self.nobody_came(begun));
            }
            self.turn(deadline)?;
        }
    }

    /// Waits once, takes new connections and looks at the pending ones.
    fn turn(&mut self, deadline: Instant) -> Result<(), TransportError> {
        self.wait(deadline)?;
        self.take_new()?;
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.advance(&self.gate) {
                Ok(Progress::Proved(session)) => self.let_in(pending, *session),
                Ok(Progress::Waits) if Instant::now() < pending.until => {
                    self.pending.push_back(pending);
                }
                Ok(Progress::Waits) => self.gate.turn_away(&Refusal::Silent, pending.peer),
                Err(why) => self.refuse(&pending, &why),
            }
        }
        Ok(())
    }

    fn wait(&self, deadline: Instant) -> Result<(), TransportError> {
        let soonest = self.pending.iter().map(|p| p.until).min();
        let until = soonest.map_or(deadline, |soonest| soonest.min(deadline));
        let left = until.saturating_duration_since(Instant::now());
        let mut sockets = vec![PollFd::new(&*self.socket, PollFlags::IN)];
        sockets.extend((self.pending.iter()).map(|p| PollFd::new(&p.stream, PollFlags::IN)));
        match poll(&mut sockets, Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(TransportError::system("wait for connections")(errno)),
        }
    }

    fn take_new(&mut self) -> Result<(), TransportError> {
        for _ in 0..ACCEPT_BATCH {
            match acceptfrom_with(&*self.socket, SocketFlags::CLOEXEC) {
                Ok((socket, peer)) => {
                    narrow_stranger(&socket);
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    self.add(TcpStream::from(socket), peer.unwrap_or(self.address));
                }
                // The connection was gone before it was taken.
                Err(Errno::CONNABORTED | Errno::INTR | Errno::PROTO | Errno::NETDOWN) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) if self.closed.load(Ordering::Acquire) => {
                    return Err(TransportError::Cancelled);
                }
                Err(errno) => return Err(TransportError::system("accept a connection")(errno)),
            }
        }
        Ok(())
    }

    /// A newcomer is never kept out by those who came before and said nothing; who asked for this migration goes
    /// last.
    fn add(&mut self, stream: TcpStream, peer: SocketAddr) {
        if self.pending.len() >= PENDING_MAX {
            let mute = self.pending.iter().position(|p| p.answered.is_none());
            if let Some(evicted) = self.pending.remove(mute.unwrap_or(0)) {
                self.gate.turn_away(&Refusal::Evicted, evicted.peer);
            }
        }
        self.pending.push_back(Pending {
            stream,
            peer,
            until: Instant::now() + self.gate.handshake_time,
            message: [0; MESSAGE_LEN_MAX],
            filled: 0,
            answered: None,
            answered_at: Instant::now(),
        });
    }

    fn let_in(&mut self, pending: Pending, session: Session) {
        if let Err(why) = self.gate.claim(session.channel) {
            return self.refuse(&pending, &why);
        }
        let tuning = &self.gate.tuning;
        let rtt = rtt(&pending.stream).unwrap_or_else(|| pending.answered_at.elapsed());
        size_receive_buffer(&pending.stream, tuning, rtt);
        // Fails only on a connection that is gone, which its first use shows.
        let _ = tune(&pending.stream, tuning, rtt);
        let closer = Closer::new(pending.stream);
        let connection = Connection::new(closer, pending.peer, session, tuning, rtt);
        self.ready.push_back(connection);
    }

    fn refuse(&self, pending: &Pending, why: &Refusal) {
        if matches!(why, Refusal::Wire(WireError::Version { .. })) {
            // So that the other side can name both versions; it does not matter whether it arrives.
            let _ = pending.say(&refusal());
        }
        self.gate.turn_away(why, pending.peer);
    }

    fn nobody_came(&self, begun: Instant) -> TransportError {
        let strangers = self.gate.strangers();
        let last = strangers
            .last
            .as_ref()
            .map(|last| format!(", the last {last}"));
        TransportError::AcceptDeadline {
            ms: millis(begun),
            strangers: strangers.total(),
            last: last.unwrap_or_default(),
        }
    }
}

/// The inner error is for this port only: another may do.
fn bind_port(address: SocketAddr) -> Result<Result<OwnedFd, Errno>, TransportError> {
    let socket = tcp_socket(&address)?;
    offer_wide_windows(&socket);
    Ok(try_listen(&socket, address).map(|()| socket))
}

fn try_listen(socket: impl AsFd, address: SocketAddr) -> Result<(), Errno> {
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)
}
