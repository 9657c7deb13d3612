//! What a channel's link is like, as the kernel measured it while bytes flowed.
//!
//! A [`Probe`] owns nothing but a share of the socket and may be used from any thread. Figures that the kernel does not
//! tell are 0.

use crate::kernel::Info;
use crate::socket::{Granted, Tuning, granted, size_send_buffer};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// What the kernel counted on one channel since it was made. Times add up over the channel's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkReading {
    /// Smoothed round trip, with what queues on the way.
    pub rtt: Duration,
    /// Shortest round trip of late: the way without queues.
    pub min_rtt: Duration,
    /// What arrives at the peer, in bytes per second, as last measured.
    pub delivery_bytes_per_s: u64,
    /// Bytes sent, repetitions included.
    pub sent_bytes: u64,
    pub repeated_bytes: u64,
    /// Bytes that the peer's receive window allows to be on their way.
    pub window_bytes: u64,
    /// Time with something to send.
    pub busy: Duration,
    /// Of that, time in which the peer's receive window was the limit.
    pub window_limited: Duration,
    /// Of that, time in which this side's send buffer was the limit.
    pub buffer_limited: Duration,
}

impl LinkReading {
    fn of(info: &Info) -> Self {
        let us = |us: u64| Duration::from_micros(us);
        Self {
            rtt: us(info.u32_at(68).into()),
            min_rtt: us(info.u32_at(148).into()),
            delivery_bytes_per_s: info.u64_at(160),
            sent_bytes: info.u64_at(200),
            repeated_bytes: info.u64_at(208),
            window_bytes: info.u32_at(228).into(),
            busy: us(info.u64_at(168)),
            window_limited: us(info.u64_at(176)),
            buffer_limited: us(info.u64_at(184)),
        }
    }
}

/// Looks at a channel's link from any thread.
#[derive(Debug, Clone)]
pub struct Probe(Arc<TcpStream>);

impl Probe {
    pub(crate) fn new(stream: &Arc<TcpStream>) -> Self {
        Self(Arc::clone(stream))
    }

    /// What the kernel says now; `None` when it says nothing.
    pub fn read(&self) -> Option<LinkReading> {
        Info::of(&*self.0).map(|info| LinkReading::of(&info))
    }

    /// Makes room for what this link needs, now that it is known better. Never less than before.
    pub fn widen(&self, tuning: &Tuning, rtt: Duration) -> Granted {
        size_send_buffer(&*self.0, tuning, rtt);
        granted(&*self.0, tuning, rtt)
    }
}

/// The round trip that the kernel has measured on a connection, if it has.
pub(crate) fn rtt(stream: &TcpStream) -> Option<Duration> {
    let info = Info::of(stream)?;
    let reading = LinkReading::of(&info);
    let shortest = if reading.min_rtt.is_zero() || reading.min_rtt > reading.rtt {
        reading.rtt
    } else {
        reading.min_rtt
    };
    (!shortest.is_zero()).then_some(shortest)
}
