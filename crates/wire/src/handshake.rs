//! Both ends prove that they hold the spec, before any record.
//!
//! Owns nothing beyond one connection's set-up: bytes in, bytes out, randoms as arguments. Refuses: another
//! protocol (at its first bytes), another version (naming both), messages longer than [`MESSAGE_LEN_MAX`], another
//! migration, and proofs that do not match. Nothing here tells a stranger more than the protocol version.
//!
//! | message | body |
//! |---|---|
//! | client hello (1) | id length `u8`, migration id, channel id `u32`, client random (32) |
//! | server hello (2) | server random (32), HMAC-SHA256 over client hello and server random (32) |
//! | client proof (3) | HMAC-SHA256 over client hello and server hello (32) |
//! | refused (4) | empty: only the version in its head matters |

use crate::key::{Randoms, Schedule};
use crate::{ChannelId, Direction, Opener, PROTOCOL_VERSION, RANDOM_LEN, Sealer, Spec, WireError};
use aws_lc_rs::hmac;

/// Length of every message's head: magic (6), version `u16`, kind `u8`, body length `u8`.
pub const HEAD_LEN: usize = 10;
/// Most bytes of any message.
pub const MESSAGE_LEN_MAX: usize = 256;
const MAGIC: &[u8; 6] = b"GODWIT";
const PROOF_LEN: usize = 32;
const BODY_LEN_MAX: usize = MESSAGE_LEN_MAX - HEAD_LEN;
/// Client hello's body without the migration id.
const HELLO_FIXED_LEN: usize = 1 + 4 + RANDOM_LEN;
const SERVER_HELLO_LEN: usize = RANDOM_LEN + PROOF_LEN;

/// Which message a head announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    ClientHello,
    ServerHello,
    ClientProof,
    Refused,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::ClientHello => 1,
            Self::ServerHello => 2,
            Self::ClientProof => 3,
            Self::Refused => 4,
        }
    }
}

/// An encoded message: head and body.
pub type Message = Vec<u8>;

/// An authenticated connection: keys for both directions, counters at 0.
pub struct Session {
    /// The channel that was set up.
    pub channel: ChannelId,
    /// For the records that this side sends.
    pub sealer: Sealer,
    /// For the records that this side receives.
    pub opener: Opener,
}

fn malformed(what: &'static str, offset: usize) -> WireError {
    WireError::Handshake { what, offset }
}

/// Checks the head of any message and gives the length of its body, at most `MESSAGE_LEN_MAX - HEAD_LEN`.
pub fn body_len(head: &[u8; HEAD_LEN]) -> Result<usize, WireError> {
    let [m @ .., v0, v1, _kind, len] = *head;
    if m != *MAGIC {
        return Err(WireError::NotGodwit);
    }
    let (ours, theirs) = (PROTOCOL_VERSION, u16::from_le_bytes([v0, v1]));
    if ours != theirs {
        return Err(WireError::Version { ours, theirs });
    }
    let len = usize::from(len);
    if len > BODY_LEN_MAX {
        return Err(malformed("a body above 246 bytes", HEAD_LEN - 1));
    }
    Ok(len)
}

/// What a server sends to a client of another version, so that both can name both.
pub fn refusal() -> Message {
    message(Kind::Refused, &[])
}

/// `parts` together are shorter than `BODY_LEN_MAX`: all of them are ours and of fixed length, but for the id, which
/// its type bounds.
fn message(kind: Kind, parts: &[&[u8]]) -> Message {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = Vec::with_capacity(HEAD_LEN + len);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    out.extend_from_slice(&[kind.code(), u8::try_from(len).unwrap_or(u8::MAX)]);
    for part in parts {
        out.extend_from_slice(part);
    }
    out
}

/// The body of a whole message of the kind that is due.
fn body(message: &[u8], due: Kind) -> Result<&[u8], WireError> {
    let (head, body) = message
        .split_first_chunk::<HEAD_LEN>()
        .ok_or_else(|| malformed("a message cut short", message.len()))?;
    let len = body_len(head)?;
    if head[HEAD_LEN - 2] != due.code() {
        return Err(malformed("another kind of message was due", HEAD_LEN - 2));
    }
    if len != body.len() {
        return Err(malformed("the body has another length", HEAD_LEN - 1));
    }
    Ok(body)
}

struct ClientHello<'a> {
    migration: &'a [u8],
    channel: ChannelId,
    random: [u8; RANDOM_LEN],
}

fn parse_client_hello(message: &[u8]) -> Result<ClientHello<'_>, WireError> {
    let body = body(message, Kind::ClientHello)?;
    let wrong = || malformed("a client hello of the wrong length", HEAD_LEN);
    let (id_len, rest) = body.split_first().ok_or_else(wrong)?;
    if body.len() != HELLO_FIXED_LEN + usize::from(*id_len) {
        return Err(wrong());
    }
    let (rest, random) = rest.split_last_chunk().ok_or_else(wrong)?;
    let (migration, channel) = rest.split_last_chunk().ok_or_else(wrong)?;
    Ok(ClientHello {
        migration,
        channel: ChannelId(u32::from_le_bytes(*channel)),
        random: *random,
    })
}

fn prove(key: &hmac::Key, transcript: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    for part in transcript {
        context.update(part);
    }
    context.sign()
}

/// Compares in constant time.
fn check_proof(
    key: &hmac::Key,
    transcript: &[&[u8]],
    proof: &[u8],
    channel: ChannelId,
) -> Result<(), WireError> {
    let joined = transcript.concat();
    hmac::verify(key, &joined, proof).map_err(|_| WireError::Proof { channel })
}

/// The side that connects, waiting for the server's hello.
pub struct ClientHandshake<'a> {
    spec: &'a Spec,
    channel: ChannelId,
    random: [u8; RANDOM_LEN],
    hello: Message,
}

impl<'a> ClientHandshake<'a> {
    /// Begins; the message goes to the server. `random` is fresh from the system's generator.
    pub fn start(spec: &'a Spec, channel: ChannelId, random: [u8; RANDOM_LEN]) -> (Self, Message) {
        let id = spec.migration.as_str().as_bytes();
        let id_len = [u8::try_from(id.len()).unwrap_or(u8::MAX)];
        let parts: [&[u8]; 4] = [&id_len, id, &channel.0.to_le_bytes(), &random];
        let hello = message(Kind::ClientHello, &parts);
        let state = Self {
            spec,
            channel,
            random,
            hello: hello.clone(),
        };
        (state, hello)
    }

    /// Checks the server's hello; the message proves this side, then records may follow at once.
    pub fn on_server_hello(self, reply: &[u8]) -> Result<(Session, Message), WireError> {
        let body = body(reply, Kind::ServerHello)?;
        let wrong = || malformed("a server hello of the wrong length", HEAD_LEN);
        let body: &[u8; SERVER_HELLO_LEN] = body.try_into().map_err(|_| wrong())?;
        let (server, proof) = body.split_first_chunk().ok_or_else(wrong)?;
        let randoms = Randoms {
            client: self.random,
            server: *server,
        };
        let keys = Schedule::new(self.spec, self.channel, &randoms);
        let server_key = keys.proof_key(Direction::ServerToClient)?;
        check_proof(&server_key, &[&self.hello, server], proof, self.channel)?;
        let client_key = keys.proof_key(Direction::ClientToServer)?;
        let proof = prove(&client_key, &[&self.hello, reply]);
        let cipher = self.spec.cipher;
        let (out, back) = (
            keys.record_key(Direction::ClientToServer)?,
            keys.record_key(Direction::ServerToClient)?,
        );
        let session = Session {
            channel: self.channel,
            sealer: Sealer::new(out, self.channel, cipher),
            opener: Opener::new(back, self.channel, cipher),
        };
        Ok((session, message(Kind::ClientProof, &[proof.as_ref()])))
    }
}

/// The side that listens, waiting for the client's proof.
pub struct ServerHandshake {
    channel: ChannelId,
    proof_key: hmac::Key,
    transcript: Message,
    session: Session,
}

impl ServerHandshake {
    /// Answers a client's hello; the message goes to the client. `random` is fresh from the system's generator.
    pub fn on_client_hello(
        spec: &Spec,
        hello: &[u8],
        random: [u8; RANDOM_LEN],
    ) -> Result<(Self, Message), WireError> {
        let client = parse_client_hello(hello)?;
        if client.migration != spec.migration.as_str().as_bytes() {
            return Err(WireError::WrongMigration);
        }
        let (channel, cipher) = (client.channel, spec.cipher);
        let randoms = Randoms {
            client: client.random,
            server: random,
        };
        let keys = Schedule::new(spec, channel, &randoms);
        let proof = prove(
            &keys.proof_key(Direction::ServerToClient)?,
            &[hello, &random],
        );
        let reply = message(Kind::ServerHello, &[&random, proof.as_ref()]);
        let (out, back) = (
            keys.record_key(Direction::ServerToClient)?,
            keys.record_key(Direction::ClientToServer)?,
        );
        let state = Self {
            channel,
            proof_key: keys.proof_key(Direction::ClientToServer)?,
            transcript: [hello, &reply].concat(),
            session: Session {
                channel,
                sealer: Sealer::new(out, channel, cipher),
                opener: Opener::new(back, channel, cipher),
            },
        };
        Ok((state, reply))
    }

    /// The channel that the client asked for; not authenticated yet.
    pub fn channel(&self) -> ChannelId {
        self.channel
    }

    /// Checks the client's proof; from here the connection is authenticated both ways.
    pub fn on_client_proof(self, proof: &[u8]) -> Result<Session, WireError> {
        let body = body(proof, Kind::ClientProof)?;
        check_proof(&self.proof_key, &[&self.transcript], body, self.channel)?;
        Ok(self.session)
    }
}
