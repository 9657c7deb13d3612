//! One half of a TCP connection: moves bytes, never waits without an end, and counts how long it waited.
//!
//! Each half owns its buffers and its meter; the socket is shared by both halves and the [`Closer`]s. Every call
//! tries first and waits only when the kernel has nothing to give or no room to take, so that the time waited is the
//! time the link or the peer was the limit, not the time copying took.

use crate::TransportError;
use godwit_wire::ChannelId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::io::IoSlice;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long one call may wait.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    idle: Duration,
    until: Option<Instant>,
}

impl Patience {
    /// As long as bytes move at least this often.
    pub fn idle(idle: Duration) -> Self {
        Self { idle, until: None }
    }

    /// Until this moment, whatever moves.
    pub fn until(deadline: Instant) -> Self {
        Self {
            idle: Duration::MAX,
            until: Some(deadline),
        }
    }

    /// What is left of it when the last byte moved at `since`.
    fn left(&self, since: Instant, now: Instant) -> Duration {
        let idle = self.idle.saturating_sub(now.duration_since(since));
        let until = self.until.map(|until| until.saturating_duration_since(now));
        until.map_or(idle, |left| left.min(idle))
    }
}

/// Counters of one half, read from any thread.
#[derive(Debug, Default)]
pub struct Meter {
    bytes: AtomicU64,
    records: AtomicU64,
    blocked_us: AtomicU64,
}

/// What a [`Meter`] showed at one moment. Excludes the handshake and TCP's own headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MeterReading {
    /// Bytes of records on the wire, headers and tags included.
    pub bytes: u64,
    pub records: u64,
    /// Time spent waiting for the socket, in microseconds; copying and sealing excluded.
    pub blocked_us: u64,
}

impl Meter {
    pub fn read(&self) -> MeterReading {
        MeterReading {
            bytes: self.bytes.load(Ordering::Relaxed),
            records: self.records.load(Ordering::Relaxed),
            blocked_us: self.blocked_us.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn add_records(&self, count: u64) {
        self.records.fetch_add(count, Ordering::Relaxed);
    }

    fn add_bytes(&self, count: usize) {
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn add_blocked(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.blocked_us.fetch_add(us, Ordering::Relaxed);
    }
}

/// Closes a channel from any thread: both halves return [`TransportError::Cancelled`] at once.
#[derive(Debug, Clone)]
pub struct Closer {
    stream: Arc<TcpStream>,
    cancelled: Arc<AtomicBool>,
    deaf: Arc<AtomicBool>,
}

impl Closer {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream: Arc::new(stream),
            cancelled: Arc::default(),
            deaf: Arc::default(),
        }
    }

    /// Closes both directions. Bytes not yet sent may be lost.
    pub fn close(&self) {
        self.cancelled.store(true, Ordering::Release);
        // Fails only when the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Reads no more, whatever the peer still sends; the peer does not notice. The reader returns
    /// [`TransportError::Cancelled`] once it needs bytes that it has not got.
    pub fn stop_reading(&self) {
        self.deaf.store(true, Ordering::Release);
        // Fails only when the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Read);
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) fn shared_stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    fn is_deaf(&self) -> bool {
        self.deaf.load(Ordering::Acquire)
    }
}

pub(crate) struct Pipe {
    closer: Closer,
    channel: ChannelId,
    meter: Arc<Meter>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Bytes(usize),
    End,
}

impl Pipe {
    pub(crate) fn new(closer: Closer, channel: ChannelId) -> Self {
        Self {
            closer,
            channel,
            meter: Arc::default(),
        }
    }

    pub(crate) fn channel(&self) -> ChannelId {
        self.channel
    }

    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    pub(crate) fn closer(&self) -> &Closer {
        &self.closer
    }

    /// Reads until `buffer[*filled..]` is full; `filled` tells how far it came, whatever ended it.
    pub(crate) fn fill(
        &self,
        buffer: &mut [u8],
        filled: &mut usize,
        patience: &Patience,
    ) -> Result<Read, TransportError> {
        let begun = Instant::now();
        let mut moved = begun;
        while let Some(rest) = buffer.get_mut(*filled..).filter(|rest| !rest.is_empty()) {
            // The kernel goes on giving what a peer sends that does not mind.
            if self.closer.is_deaf() {
                return Err(TransportError::Cancelled);
            }
            match recv(self.closer.stream(), rest, RecvFlags::DONTWAIT) {
                Ok((_, 0)) if self.closer.is_cancelled() => return Err(TransportError::Cancelled),
                Ok((_, 0)) => return Ok(Read::End),
                Ok((_, count)) => {
                    *filled += count;
                    self.meter.add_bytes(count);
                    moved = Instant::now();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::IN, moved, patience)? {
                        let (channel, ms) = (self.channel, millis(begun));
                        return Err(TransportError::Silent { channel, ms });
                    }
                }
                Err(errno) => return Err(self.broken(errno)),
            }
        }
        Ok(Read::Bytes(*filled))
    }

    /// Sends all of `parts`.
    pub(crate) fn send(
        &self,
        mut parts: &mut [IoSlice<'_>],
        patience: &Patience,
    ) -> Result<(), TransportError> {
        let begun = Instant::now();
        let mut moved = begun;
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        while !parts.is_empty() {
            let mut control = SendAncillaryBuffer::default();
            match sendmsg(self.closer.stream(), parts, &mut control, flags) {
                Ok(count) => {
                    IoSlice::advance_slices(&mut parts, count);
                    self.meter.add_bytes(count);
                    moved = Instant::now();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if !self.wait(PollFlags::OUT, moved, patience)? {
                        let (channel, ms) = (self.channel, millis(begun));
                        return Err(TransportError::Stalled { channel, ms });
                    }
                }
                Err(errno) => return Err(self.broken(errno)),
            }
        }
        Ok(())
    }

    /// Waits for the socket; `false`: patience ended.
    fn wait(
        &self,
        flags: PollFlags,
        moved: Instant,
        patience: &Patience,
    ) -> Result<bool, TransportError> {
        let begun = Instant::now();
        let ready = wait(self.closer.stream(), flags, patience.left(moved, begun));
        self.meter.add_blocked(begun.elapsed());
        ready.map_err(|errno| self.broken(errno))
    }

    fn broken(&self, errno: Errno) -> TransportError {
        if self.closer.is_cancelled() {
            return TransportError::Cancelled;
        }
        TransportError::Broken {
            channel: self.channel,
            source: errno.into(),
        }
    }
}

/// Waits for one socket; `false` when the time is over. A signal counts as ready: the caller tries again.
pub(crate) fn wait(stream: &TcpStream, flags: PollFlags, time: Duration) -> Result<bool, Errno> {
    let mut sockets = [PollFd::new(stream, flags)];
    match poll(&mut sockets, Some(&timespec(time))) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// As the kernel wants it; what does not fit is as good as forever.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec {
        tv_sec: i64::from(i32::MAX),
        tv_nsec: 0,
    })
}

/// Whole milliseconds since `begun`.
pub(crate) fn millis(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}
