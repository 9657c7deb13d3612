//! The agent inside a guest (qemu-ga), spoken with through a port of its machine.
//!
//! The other side is the guest's, which is nobody's friend: it may be silent, babble for ever, answer another question or answer
//! falsely. So every question has a deadline and begins with a mark of its own behind a byte that stands in no JSON (0xFF): all
//! that comes before the mark is thrown away, a piece at a time; lines and what is thrown away have lengths, and a connection
//! that went wrong is left and made anew for the next question. What it says is shown to people and decides nothing.
//!
//! Owns one connection, since QEMU serves one, and asks one thing at a time. Refuses: long lines, answers that are none. Whether anybody
//! listens in the guest says QEMU ([`Machine::has_agent`]): what is written while nobody does waits there for who comes.

use crate::command_line::AGENT;
use crate::machine::Machine;
use crate::qmp::QmpError;
use crate::sync::{lock_until, poll_until};
use crate::text::printable;
use godwit_types::guest::{ADDRESSES_MAX, CARDS_MAX, GuestCard, GuestInfo, word};
use rustix::event::PollFlags;
use rustix::fd::AsFd as _;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest answer that is read, bytes: a guest with a hundred networks of containers needs a tenth of it.
const LINE_MAX: usize = 256 << 10;
/// Most bytes that are thrown away before an answer.
const THROWN_AWAY_MAX: usize = 1 << 20;
/// Read in one piece.
const PIECE: usize = 16 << 10;
/// Stands before a mark, and in no text that is UTF-8.
const DELIMITER: u8 = 0xff;
/// How long a refusal of a shutdown is waited for: none comes of one that is carried out.
const REFUSED_WITHIN: Duration = Duration::from_secs(2);

/// Why the agent did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    #[error("the guest's agent cannot be reached: {0}")]
    Connect(io::Error),
    #[error("the guest's agent did not answer in time")]
    Deadline,
    #[error("the connection to the guest's agent has ended")]
    Closed,
    #[error("the guest's agent says what is no answer: {0}")]
    Nonsense(&'static str),
    /// It understood, and says why not.
    #[error("the guest's agent refuses: {0}")]
    Refused(String),
}

/// The port of a machine behind which the guest's agent may be.
#[derive(Debug)]
pub struct Port {
    socket: PathBuf,
    connection: Mutex<Option<UnixStream>>,
    marks: AtomicU64,
}

/// Where QEMU is to be spoken with about it: made before QEMU starts, in a directory that only root enters.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

impl Machine {
    /// Whether something in the guest has the agent's port open.
    pub fn has_agent(&self, deadline: Instant) -> Result<bool, QmpError> {
        let answer = self
            .client()
            .execute("query-chardev", json!({}), deadline)?;
        let is_it = |port: &&Value| port.get("label").and_then(Value::as_str) == Some(AGENT);
        let port = answer.as_array().into_iter().flatten().find(is_it);
        let open = port.and_then(|port| port.get("frontend-open")?.as_bool());
        Ok(open == Some(true))
    }
}

impl Port {
    /// The one behind this socket. Nothing is connected yet.
    pub fn at(socket: PathBuf) -> Self {
        Self {
            socket,
            connection: Mutex::new(None),
            marks: AtomicU64::new(first_mark()),
        }
    }

    /// Asks one thing, by `deadline`.
    pub fn ask(
        &self,
        command: &str,
        arguments: &Value,
        deadline: Instant,
    ) -> Result<Value, AgentError> {
        self.converse(deadline, |stream| {
            self.begin(stream, command, arguments, deadline)?;
            let line = read_line(stream, deadline)?;
            returned(&line)
        })
    }

    /// Has the guest power off. That it begins to is not told by any agent; that it refuses is. An error, too, where the question did not get to it.
    pub fn power_off(&self, deadline: Instant) -> Result<(), AgentError> {
        let mut is_sent = false;
        let asked = self.converse(deadline, |stream| {
            self.begin(
                stream,
                "guest-shutdown",
                &json!({"mode": "powerdown"}),
                deadline,
            )?;
            is_sent = true;
            let line = read_line(stream, deadline.min(Instant::now() + REFUSED_WITHIN))?;
            returned(&line)
        });
        match asked {
            Err(AgentError::Deadline) if Instant::now() >= deadline => Err(AgentError::Deadline),
            Ok(_) => Ok(()),
            Err(AgentError::Deadline | AgentError::Closed) if is_sent => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// What the guest says of itself; what its agent does not know is left out.
    pub fn info(&self, deadline: Instant) -> Result<GuestInfo, AgentError> {
        let ask = |command| match self.ask(command, &json!({}), deadline) {
            Err(AgentError::Refused(_)) => Ok(Value::Null),
            other => other,
        };
        let name = ask("guest-get-host-name")?;
        let os = ask("guest-get-osinfo")?;
        let cards = ask("guest-network-get-interfaces")?;
        let text = |of: &Value, key| of.get(key).and_then(Value::as_str).and_then(word);
        let cards = cards.as_array().into_iter().flatten();
        Ok(GuestInfo {
            hostname: text(&name, "host-name"),
            os: text(&os, "pretty-name").or_else(|| text(&os, "name")),
            cards: cards.filter_map(card).take(CARDS_MAX).collect(),
        })
    }

    /// Has the guest write its file systems out and keep them as they are; how many.
    pub fn freeze(&self, deadline: Instant) -> Result<u64, AgentError> {
        self.count("guest-fsfreeze-freeze", deadline)
    }

    /// Lets them go on; how many were frozen.
    pub fn thaw(&self, deadline: Instant) -> Result<u64, AgentError> {
        self.count("guest-fsfreeze-thaw", deadline)
    }

    fn count(&self, command: &str, deadline: Instant) -> Result<u64, AgentError> {
        let counted = self.ask(command, &json!({}), deadline)?.as_u64();
        counted.ok_or(AgentError::Nonsense("no number of file systems"))
    }

    /// A connection that went wrong is not used again. Another conversation is waited for until `deadline`.
    fn converse<T>(
        &self,
        deadline: Instant,
        speak: impl FnOnce(&mut UnixStream) -> Result<T, AgentError>,
    ) -> Result<T, AgentError> {
        let connection = lock_until(&self.connection, deadline);
        let mut connection = connection.ok_or(AgentError::Deadline)?;
        let mut stream = match connection.take() {
            Some(stream) => stream,
            None => connect(&self.socket).map_err(AgentError::Connect)?,
        };
        let said = speak(&mut stream);
        if matches!(said, Ok(_) | Err(AgentError::Refused(_))) {
            *connection = Some(stream);
        }
        said
    }

    /// Waits for a mark that nobody else knows, and puts the question behind it.
    fn begin(
        &self,
        stream: &mut UnixStream,
        command: &str,
        arguments: &Value,
        deadline: Instant,
    ) -> Result<(), AgentError> {
        let mark = self.marks.fetch_add(1, Ordering::Relaxed);
        let sync = json!({"execute": "guest-sync-delimited", "arguments": {"id": mark}});
        // The byte ends what a predecessor may have left half said.
        let sync = [&[DELIMITER][..], sync.to_string().as_bytes(), b"\n"].concat();
        write(stream, &sync, deadline)?;
        skip_to_mark(stream, mark, deadline)?;
        let question = json!({"execute": command, "arguments": arguments});
        write(stream, format!("{question}\n").as_bytes(), deadline)
    }
}

/// Where the marks of a port begin: nowhere that a predecessor's were, whose answers may still come. Successors have its process id.
fn first_mark() -> u64 {
    let mut bytes = [0; 8];
    if let Err(error) = getrandom::fill(&mut bytes) {
        tracing::warn!(%error, "the questions to the guest's agent begin as others did");
    }
    // None of those that follow is too large for a signed number.
    u64::from_be_bytes(bytes) >> 2
}

fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

fn write(stream: &UnixStream, mut bytes: &[u8], deadline: Instant) -> Result<(), AgentError> {
    while !bytes.is_empty() {
        match send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(stream, PollFlags::OUT, deadline)?,
            Err(_) => return Err(AgentError::Closed),
        }
    }
    Ok(())
}

fn wait(stream: &UnixStream, what: PollFlags, deadline: Instant) -> Result<(), AgentError> {
    match poll_until([(stream.as_fd(), what)], deadline) {
        Ok([true]) if Instant::now() < deadline => Ok(()),
        Ok(_) => Err(AgentError::Deadline),
        Err(_) => Err(AgentError::Closed),
    }
}

/// The next bytes that come; never none.
fn read<'a>(
    stream: &mut UnixStream,
    piece: &'a mut [u8],
    deadline: Instant,
) -> Result<&'a [u8], AgentError> {
    loop {
        // Also where something always comes.
        if Instant::now() >= deadline {
            return Err(AgentError::Deadline);
        }
        match stream.read(piece) {
            Ok(0) => return Err(AgentError::Closed),
            Ok(count) => return Ok(piece.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(stream, PollFlags::IN, deadline)?;
            }
            Err(_) => return Err(AgentError::Closed),
        }
    }
}

/// Throws away what comes before the answer to this mark.
fn skip_to_mark(stream: &mut UnixStream, mark: u64, deadline: Instant) -> Result<(), AgentError> {
    let mut thrown_away = 0;
    let mut byte = [0];
    // An agent says nothing behind an answer before it is asked again, so that only babble is read so slowly.
    let mut line: Option<Vec<u8>> = None;
    let mut piece = [0; PIECE];
    loop {
        // Behind a delimiter no byte of the next answer may be taken.
        let bytes = match line {
            None => peek_to_delimiter(stream, &mut piece, deadline)?,
            Some(_) => read(stream, &mut byte, deadline)?,
        };
        // Single bytes cost more than they weigh.
        thrown_away += if line.is_some() { 16 } else { bytes.len() };
        if thrown_away > THROWN_AWAY_MAX {
            return Err(AgentError::Nonsense("it does not stop talking"));
        }
        match (bytes.last(), &mut line) {
            (Some(&DELIMITER), _) => line = Some(Vec::new()),
            (Some(b'\n'), Some(said)) => {
                let is_it = returned(said).is_ok_and(|value| value.as_u64() == Some(mark));
                if is_it {
                    return Ok(());
                }
                line = None;
            }
            (Some(&other), Some(said)) if said.len() < 256 => said.push(other),
            (_, Some(_)) => line = None,
            (_, None) => {}
        }
    }
}

/// Takes bytes up to the first delimiter and with it, or a piece without one.
fn peek_to_delimiter<'a>(
    stream: &mut UnixStream,
    piece: &'a mut [u8; PIECE],
    deadline: Instant,
) -> Result<&'a [u8], AgentError> {
    wait(stream, PollFlags::IN, deadline)?;
    let peeked = match rustix::net::recv(&*stream, &mut piece[..], rustix::net::RecvFlags::PEEK) {
        Ok((0, _)) => return Err(AgentError::Closed),
        Ok((count, _)) => count,
        Err(Errno::AGAIN | Errno::INTR) => 0,
        Err(_) => return Err(AgentError::Closed),
    };
    let bytes = piece.get(..peeked).unwrap_or_default();
    let end = bytes.iter().position(|&byte| byte == DELIMITER);
    let take = end.map_or(peeked, |end| end + 1);
    match piece.get_mut(..take) {
        Some(room) if take > 0 => read(stream, room, deadline),
        _ => Ok(&[]),
    }
}

/// A line with an end, without it.
fn read_line(stream: &mut UnixStream, deadline: Instant) -> Result<Vec<u8>, AgentError> {
    let (mut line, mut piece) = (Vec::new(), [0; PIECE]);
    loop {
        let bytes = read(stream, &mut piece, deadline)?;
        let end = bytes.iter().position(|&byte| byte == b'\n');
        // What would come behind the end was asked by nobody.
        line.extend_from_slice(bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default());
        if line.len() > LINE_MAX {
            return Err(AgentError::Nonsense("an answer without an end"));
        }
        if end.is_some() {
            return Ok(line);
        }
    }
}

/// What an answer returns.
fn returned(line: &[u8]) -> Result<Value, AgentError> {
    let answer: Value =
        serde_json::from_slice(line).map_err(|_| AgentError::Nonsense("no JSON"))?;
    if let Some(value) = answer.get("return") {
        return Ok(value.clone());
    }
    let why = answer
        .get("error")
        .and_then(|error| error.get("desc")?.as_str());
    Err(why.map_or(
        AgentError::Nonsense("neither a result nor an error"),
        |why| AgentError::Refused(printable(why)),
    ))
}

/// A card of the guest with the addresses by which others could reach it, if it has any.
fn card(said: &Value) -> Option<GuestCard> {
    let text = |key| said.get(key).and_then(Value::as_str);
    let addresses = said.get("ip-addresses").and_then(Value::as_array);
    let parsed = addresses.into_iter().flatten().filter_map(|address| {
        let address: IpAddr = address.get("ip-address")?.as_str()?.parse().ok()?;
        is_reachable(&address).then_some(address)
    });
    let addresses: Vec<IpAddr> = parsed.take(ADDRESSES_MAX).collect();
    (!addresses.is_empty()).then_some(GuestCard {
        name: word(text("name")?)?,
        mac: text("hardware-address").and_then(word),
        addresses,
    })
}

/// Neither the guest's own alone, nor good on one wire only.
fn is_reachable(address: &IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback() && !address.is_unspecified() && !is_link_local
}

#[cfg(test)]
#[path = "guest_agent_tests.rs"]
pub(crate) mod tests;
