//! The socket that QEMU talks to a disk over: whole messages with their descriptors, without ever waiting for one.
//!
//! Who owns the state: this value owns the socket, the part of a message that has come, and its descriptors. Refuses
//! messages that are too long, and more descriptors than a message may have.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::Error;
use crate::message::{FDS_MAX, HEADER, Header, Message, decode, encode};

#[derive(Debug)]
pub(crate) struct Connection {
    socket: UnixStream,
    header: Option<Header>,
    part: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Whether somebody else may go on with it.
    is_left: bool,
}

/// A message with what came beside it.
#[derive(Debug)]
pub(crate) struct Received {
    pub request: u32,
    pub wants_answer: bool,
    pub message: Message,
    pub fds: Vec<OwnedFd>,
}

impl Connection {
    pub(crate) fn new(socket: UnixStream) -> Result<Self, Error> {
        let set = socket.set_nonblocking(true);
        set.map_err(|error| Error::system("use QEMU's connection", error))?;
        Ok(Self {
            socket,
            header: None,
            part: Vec::new(),
            fds: Vec::new(),
            is_left: false,
        })
    }

    /// The next message that is there as a whole.
    pub(crate) fn receive(&mut self) -> Result<Option<Received>, Error> {
        loop {
            let wanted = self.header.map_or(HEADER, |header| header.body);
            let left = wanted - self.part.len();
            if left > 0 && !self.read(left)? {
                return Ok(None);
            }
            if self.part.len() < wanted {
                continue;
            }
            let part = std::mem::take(&mut self.part);
            let Some(header) = self.header.take() else {
                let header = part.try_into().map_err(|_| refused("half a header"))?;
                self.header = Some(Header::decode(&header)?);
                continue;
            };
            let fds = std::mem::take(&mut self.fds);
            let message = decode(header.request, &part, fds.len())?;
            return Ok(Some(Received {
                request: header.request,
                wants_answer: header.wants_answer,
                message,
                fds,
            }));
        }
    }

    /// Whether no part of a message was read that is not there as a whole.
    pub(crate) fn is_between_messages(&self) -> bool {
        self.header.is_none() && self.part.is_empty() && self.fds.is_empty()
    }

    /// Whether it is to stay open for somebody else who has it, once this value is dropped.
    pub(crate) fn leave(&mut self, is_left: bool) {
        self.is_left = is_left;
    }

    /// Reads at most so many bytes; `false`: there is nothing now.
    fn read(&mut self, most: usize) -> Result<bool, Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; most];
        let mut into = [rustix::io::IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(&self.socket, &mut into, &mut beside, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::CONNRESET) => return Err(Error::Closed),
            Err(error) => return Err(Error::system("hear QEMU", error)),
        };
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if got.bytes == 0 {
            return Err(Error::Closed);
        }
        // More than there is room for the kernel closes, and says so.
        if self.fds.len() > FDS_MAX || got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(refused("too many descriptors came with it"));
        }
        self.part.extend_from_slice(&bytes[..got.bytes]);
        Ok(true)
    }

    /// Answers a request, with a descriptor if one goes with it.
    pub(crate) fn answer(
        &self,
        request: u32,
        body: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        send(self.socket.as_fd(), &encode(request, true, body), fd)
    }
}

fn refused(reason: &str) -> Error {
    Error::Message {
        request: 0,
        reason: reason.to_owned(),
    }
}

/// Sends a whole message. It is short, and QEMU reads each answer before it asks again: a socket that is full is a broken one.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        beside.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, flags);
    match sent {
        Ok(count) if count == bytes.len() => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Closed),
        Ok(_) => Err(Error::system("answer QEMU", Errno::AGAIN)),
        Err(error) => Err(Error::system("answer QEMU", error)),
    }
}

/// Also where somebody else holds the socket for a moment longer, as the kernel does for whoever waits for it.
impl Drop for Connection {
    fn drop(&mut self) {
        if !self.is_left {
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
