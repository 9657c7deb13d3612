//! One connection to a hypervisor's control socket.
//!
//! The client owns the socket and one reader thread, which gives answers to whoever asked (by id) and events to every
//! listener. Any thread may send commands; every command has a deadline. A late answer is dropped. A connection that
//! breaks, or whose peer does not speak QMP, fails every command from then on. It never connects again by itself.

use super::error::QmpError;
use super::events::{Event, Events, Queue};
use super::parser::{Greeting, LineBuffer, Message, ParseError, parse_line};
use crate::sync::{lock, poll_until, remaining};
use crate::text::printable;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A command's outcome as the reader thread hands it over.
type Answer = Result<Value, (String, String)>;

/// A QMP connection that is past its greeting and takes commands.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    greeting: Greeting,
    next_id: AtomicU64,
    /// One writer at a time: lines must not mix, and a descriptor must arrive with its command.
    writer: Mutex<()>,
    shared: Arc<Mutex<Shared>>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    pending: HashMap<u64, SyncSender<Answer>>,
    listeners: Vec<Weak<Queue>>,
    closed: bool,
    /// Why the connection was given up, when the peer's bytes were the reason.
    fault: Option<ParseError>,
}

impl Client {
    /// Connects, reads the greeting and negotiates. Ends by `deadline`.
    pub fn connect(path: &Path, deadline: Instant) -> Result<Client, QmpError> {
        let socket = open(path, deadline).map_err(|source| QmpError::Connect {
            path: path.to_owned(),
            source,
        })?;
        Client::negotiate(socket, deadline)
    }

    /// Takes over a connected socket on which nothing was read yet.
    pub fn negotiate(mut socket: UnixStream, deadline: Instant) -> Result<Client, QmpError> {
        let mut lines = LineBuffer::default();
        let greeting = read_greeting(&mut socket, &mut lines, deadline)?;
        let shared = Arc::new(Mutex::new(Shared::default()));
        let reader = {
            let (socket, shared) = (socket.try_clone()?, shared.clone());
            let run = move || read_all(socket, lines, &shared);
            thread::Builder::new()
                .name("qmp-reader".into())
                .spawn(run)?
        };
        let (next_id, writer) = (AtomicU64::new(1), Mutex::new(()));
        let client = Client {
            socket,
            greeting,
            next_id,
            writer,
            shared,
            reader: Some(reader),
        };
        client.execute("qmp_capabilities", json!({}), deadline)?;
        Ok(client)
    }

    /// What the hypervisor said of itself.
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// Runs a command and waits for its answer.
    pub fn execute(
        &self,
        command: &str,
        arguments: Value,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, None, deadline)
    }

    /// Like [`Client::execute`], with a descriptor beside the command, as `getfd` wants it.
    pub fn execute_with_fd(
        &self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        self.run(command, arguments, Some(fd), deadline)
    }

    /// A queue of all events from now on.
    pub fn subscribe(&self) -> Events {
        let queue = Arc::new(Queue::default());
        let mut shared = lock(&self.shared);
        shared
            .listeners
            .retain(|listener| listener.strong_count() > 0);
        if shared.closed {
            queue.close();
        } else {
            shared.listeners.push(Arc::downgrade(&queue));
        }
        Events::new(queue)
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        lock(&self.shared).closed
    }

    fn run(
        &self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        self.ask(command, arguments, fd, deadline)?.wait(deadline)
    }

    /// Sends a command, for what must go on before its answer comes.
    pub fn begin<'a>(
        &'a self,
        command: &'a str,
        arguments: Value,
        deadline: Instant,
    ) -> Result<Pending<'a>, QmpError> {
        self.ask(command, arguments, None, deadline)
    }

    fn ask<'a>(
        &'a self,
        command: &'a str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<Pending<'a>, QmpError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        {
            let mut shared = lock(&self.shared);
            if shared.closed {
                return Err(shared.end());
            }
            shared.pending.insert(id, sender);
        }
        let pending = Pending {
            client: self,
            id,
            command,
            receiver,
            come: None,
        };
        let mut line = json!({"execute": command, "arguments": arguments, "id": id})
            .to_string()
            .into_bytes();
        line.push(b'\n');
        self.send(&line, fd, command, deadline)?;
        Ok(pending)
    }

    /// Writes a whole line. A line cut by the deadline would garble all later ones, so that ends the connection.
    fn send(
        &self,
        line: &[u8],
        fd: Option<BorrowedFd<'_>>,
        command: &str,
        deadline: Instant,
    ) -> Result<(), QmpError> {
        let _writer = lock(&self.writer);
        let (mut rest, mut fd) = (line, fd);
        while !rest.is_empty() {
            match send_some(&self.socket, rest, fd) {
                Ok(sent) => {
                    rest = rest.get(sent..).unwrap_or_default();
                    fd = None;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let [ready] = poll_until([(self.socket.as_fd(), PollFlags::OUT)], deadline)?;
                    if !ready {
                        if rest.len() < line.len() {
                            let _ = self.socket.shutdown(Shutdown::Both);
                        }
                        return Err(QmpError::Deadline {
                            command: command.into(),
                        });
                    }
                }
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(QmpError::Closed),
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
        }
        Ok(())
    }
}

/// A command that was sent. Dropping it gives its answer up.
#[derive(Debug)]
#[must_use]
pub struct Pending<'a> {
    client: &'a Client,
    id: u64,
    command: &'a str,
    receiver: Receiver<Answer>,
    /// The answer, if somebody has looked for it.
    come: Option<Answer>,
}

impl Pending<'_> {
    /// Waits for the answer and keeps it; whether it has come.
    pub fn has_come(&mut self, deadline: Instant) -> bool {
        if self.come.is_none() {
            self.come = self.receiver.recv_timeout(remaining(deadline)).ok();
        }
        self.come.is_some()
    }

    /// Whether the answer has come and is a refusal.
    pub fn is_refused(&mut self) -> bool {
        if self.come.is_none() {
            self.come = self.receiver.try_recv().ok();
        }
        matches!(self.come, Some(Err(_)))
    }

    /// Waits for the answer.
    pub fn wait(mut self, deadline: Instant) -> Result<Value, QmpError> {
        let answer = match self.come.take() {
            Some(answer) => Ok(answer),
            None => self.receiver.recv_timeout(remaining(deadline)),
        };
        let command = || self.command.to_owned();
        match answer {
            Ok(Ok(value)) => Ok(value),
            Ok(Err((class, description))) => Err(QmpError::Refused {
                command: command(),
                class: printable(&class),
                description: printable(&description),
            }),
            Err(RecvTimeoutError::Timeout) => Err(QmpError::Deadline { command: command() }),
            Err(RecvTimeoutError::Disconnected) => Err(lock(&self.client.shared).end()),
        }
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        lock(&self.client.shared).pending.remove(&self.id);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn end(&self) -> QmpError {
        self.fault
            .clone()
            .map_or(QmpError::Closed, QmpError::Protocol)
    }

    fn close(&mut self, fault: Option<ParseError>) {
        self.closed = true;
        self.fault = fault;
        self.pending.clear();
        for listener in self
            .listeners
            .drain(..)
            .filter_map(|listener| listener.upgrade())
        {
            listener.close();
        }
    }

    fn route(&mut self, message: Message, seen_at: Instant) {
        let (id, answer) = match message {
            Message::Event(raw) => {
                let event = Event::new(raw, seen_at);
                self.listeners
                    .iter()
                    .filter_map(Weak::upgrade)
                    .for_each(|listener| listener.push(event.clone()));
                return;
            }
            Message::Return { id, value } => (id, Ok(value)),
            Message::Error {
                id,
                class,
                description,
            } => (id, Err((class, description))),
            Message::Greeting(_) => return,
        };
        if let Some(waiting) = id.and_then(|id| self.pending.remove(&id)) {
            let _ = waiting.try_send(answer);
        }
    }
}

fn open(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let socket = net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // Connecting waits while the listener's backlog is full; the send time-out is what bounds that wait.
    let wait = remaining(deadline).max(Duration::from_millis(1));
    net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, Some(wait))?;
    net::connect(&socket, &net::SocketAddrUnix::new(path)?)?;
    net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

fn send_some(
    socket: &UnixStream,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds
        && !control.push(SendAncillaryMessage::ScmRights(fds))
    {
        return Err(Errno::NOBUFS);
    }
    net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )
}

fn read_greeting(
    socket: &mut UnixStream,
    lines: &mut LineBuffer,
    deadline: Instant,
) -> Result<Greeting, QmpError> {
    let mut bytes = [0; 4096];
    loop {
        if let Some(line) = lines.next_line() {
            return match parse_line(line?)? {
                Message::Greeting(greeting) => Ok(greeting),
                _ => Err(ParseError::NoMessage {
                    what: "it is not the greeting",
                }
                .into()),
            };
        }
        let [ready] = poll_until([(socket.as_fd(), PollFlags::IN)], deadline)?;
        if !ready {
            return Err(QmpError::Deadline {
                command: "greeting".into(),
            });
        }
        match socket.read(&mut bytes) {
            Ok(0) => return Err(QmpError::Closed),
            Ok(count) => lines.push(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(QmpError::Closed);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The reader thread: ends when the socket does, or when the peer stops speaking QMP.
fn read_all(mut socket: UnixStream, mut lines: LineBuffer, shared: &Mutex<Shared>) {
    let mut bytes = vec![0; 64 << 10];
    let fault = loop {
        if let Err(fault) = route_lines(&mut lines, shared) {
            break Some(fault);
        }
        match socket.read(&mut bytes) {
            Ok(0) => break None,
            Ok(count) => lines.push(bytes.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break None,
        }
    };
    let _ = socket.shutdown(Shutdown::Both);
    lock(shared).close(fault);
}

fn route_lines(lines: &mut LineBuffer, shared: &Mutex<Shared>) -> Result<(), ParseError> {
    while let Some(line) = lines.next_line() {
        let (message, seen_at) = (parse_line(line?)?, Instant::now());
        lock(shared).route(message, seen_at);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
