//! What a front end says to a vhost-user-blk back end, with one queue.
//!
//! Owns the connection, the two descriptors with which queue and driver wake each other, and what the back end gave to be
//! kept. Refuses: answers that are none to what was asked.

use anyhow::{Context as _, Result, bail, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::MEMORY_BYTES;
use super::ring::{AVAILABLE, DESCRIPTORS, GUEST, SIZE, USED};

/// Where the shared memory begins for the front end, as far as the back end knows.
const OWN: u64 = 0x7f12_3400_0000;
/// How long the back end has for an answer, and to be there at all.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Flushes, interrupts by index, features of the protocol, version 1.
const FEATURES: u64 = 1 << 9 | 1 << 29 | 1 << 30 | 1 << 32;
const INFLIGHT: u64 = 1 << 12;

mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
}

/// One end of a started device.
pub struct FrontEnd {
    socket: UnixStream,
    kick: OwnedFd,
    call: OwnedFd,
    /// The back end's record of what is under way, which a front end keeps for it.
    _inflight: Option<OwnedFd>,
}

impl FrontEnd {
    /// Connects, and starts the queue that is in this memory.
    pub fn start(socket: &Path, memory: &File) -> Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let mut front_end = Self {
            socket: connect(socket)?,
            kick: event()?,
            call: event()?,
            _inflight: None,
        };
        front_end.socket.set_read_timeout(Some(PATIENCE))?;
        let features = front_end.number(request::GET_FEATURES)?;
        ensure!(
            features & FEATURES == FEATURES,
            "the back end does not offer what every one offers: {features:#x}"
        );
        let protocol = front_end.number(request::GET_PROTOCOL_FEATURES)? & INFLIGHT;
        front_end.tell(request::SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[])?;
        front_end.tell(request::SET_OWNER, &[], &[])?;
        front_end.tell(request::SET_FEATURES, &FEATURES.to_le_bytes(), &[])?;
        let table = [1, GUEST, MEMORY_BYTES, OWN, 0];
        let table = table.map(u64::to_le_bytes).concat();
        front_end.tell(request::SET_MEM_TABLE, &table, &[memory.as_fd()])?;
        if protocol & INFLIGHT != 0 {
            front_end.keep_inflight()?;
        }
        front_end.start_queue()?;
        Ok(front_end)
    }

    fn keep_inflight(&mut self) -> Result<()> {
        let mut asked = vec![0; 16];
        asked.extend([1, SIZE].map(u16::to_le_bytes).concat());
        asked.extend([0; 4]);
        self.tell(request::GET_INFLIGHT_FD, &asked, &[])?;
        let (body, fd) = self.answer(request::GET_INFLIGHT_FD)?;
        let fd = fd.context("no memory came for what is under way")?;
        self.tell(request::SET_INFLIGHT_FD, &body, &[fd.as_fd()])?;
        self._inflight = Some(fd);
        Ok(())
    }

    fn start_queue(&mut self) -> Result<()> {
        self.tell(request::SET_VRING_NUM, &pair(0, SIZE.into()), &[])?;
        self.tell(request::SET_VRING_BASE, &pair(0, 0), &[])?;
        let mut addresses = pair(0, 0);
        for at in [DESCRIPTORS, USED, AVAILABLE, 0] {
            addresses.extend((OWN + at).to_le_bytes());
        }
        self.tell(request::SET_VRING_ADDR, &addresses, &[])?;
        let (kick, call) = (self.kick.try_clone()?, self.call.try_clone()?);
        let first = 0_u64.to_le_bytes();
        self.tell(request::SET_VRING_CALL, &first, &[call.as_fd()])?;
        self.tell(request::SET_VRING_KICK, &first, &[kick.as_fd()])?;
        self.tell(request::SET_VRING_ENABLE, &pair(0, 1), &[])
    }

    /// Ends the queue; what is under way is done then.
    pub fn stop(&mut self) -> Result<()> {
        self.tell(request::GET_VRING_BASE, &pair(0, 0), &[])?;
        self.answer(request::GET_VRING_BASE).map(drop)
    }

    /// Tells the back end of new requests.
    pub fn kick(&self) -> Result<()> {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    /// Waits for an interrupt, for so long at most. A back end that has gone away is an error.
    pub fn wait(&self, within: Duration) -> Result<()> {
        let mut fds = [
            PollFd::new(&self.call, PollFlags::IN),
            PollFd::new(&self.socket, PollFlags::IN),
        ];
        let limit = rustix::time::Timespec {
            tv_sec: within.as_secs() as i64,
            tv_nsec: within.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        ensure!(
            fds[1].revents().is_empty(),
            "the back end ended the connection"
        );
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.call, &mut count); // empty if none came
        Ok(())
    }

    fn number(&mut self, request: u32) -> Result<u64> {
        self.tell(request, &[], &[])?;
        let (body, _) = self.answer(request)?;
        let number = body.first_chunk().context("an answer is too short")?;
        Ok(u64::from_le_bytes(*number))
    }

    fn tell(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let header = [request, 1, body.len() as u32];
        let mut bytes = header.map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(body);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(
                beside.push(SendAncillaryMessage::ScmRights(fds)),
                "too many descriptors"
            );
        }
        let parts = [IoSlice::new(&bytes)];
        let sent = rustix::net::sendmsg(&self.socket, &parts, &mut beside, SendFlags::NOSIGNAL);
        let sent = sent.with_context(|| format!("the back end takes no message {request}"))?;
        ensure!(sent == bytes.len(), "a message was sent in part");
        Ok(())
    }

    fn answer(&mut self, request: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut header)];
        let got = rustix::net::recvmsg(&self.socket, &mut parts, &mut beside, RecvFlags::WAITALL)
            .with_context(|| format!("no answer to message {request}"))?;
        ensure!(got.bytes == 12, "the back end ended the connection");
        let mut fd = None;
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                fd = fds.last();
            }
        }
        let words = header.chunks_exact(4).map(|word| {
            word.first_chunk()
                .map_or(0, |word| u32::from_le_bytes(*word))
        });
        let words: Vec<u32> = words.collect();
        let &[to, flags, bytes] = words.as_slice() else {
            bail!("a header of {} words", words.len());
        };
        ensure!(
            (to, flags & 7, bytes <= 4096) == (request, 5, true),
            "no answer to message {request}: {words:?}"
        );
        let mut body = vec![0; bytes as usize];
        self.socket.read_exact(&mut body)?;
        Ok((body, fd))
    }
}

/// Waits until the socket is there.
fn connect(path: &Path) -> Result<UnixStream> {
    let until = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(path) {
            Ok(socket) => return Ok(socket),
            Err(error) if Instant::now() >= until => {
                return Err(error)
                    .with_context(|| format!("no disk is served at {}", path.display()));
            }
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
        crate::stage::go_on()?;
    }
}

fn pair(a: u32, b: u32) -> Vec<u8> {
    [a, b].map(u32::to_le_bytes).concat()
}
