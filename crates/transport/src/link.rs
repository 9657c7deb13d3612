//! What a channel's link is like, as the kernel measured it while bytes flowed.
//!
//! A [`Probe`] owns nothing but a share of the socket and may be used from any thread. Figures that the kernel does not
//! tell are 0.

use crate::kernel::info_of;
use linux_raw_sys::net::tcp_info;
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
    fn of(info: &tcp_info) -> Self {
        let us = |us: u64| Duration::from_micros(us);
        Self {
            rtt: us(info.tcpi_rtt.into()),
            min_rtt: us(info.tcpi_min_rtt.into()),
            delivery_bytes_per_s: info.tcpi_delivery_rate,
            sent_bytes: info.tcpi_bytes_sent,
            repeated_bytes: info.tcpi_bytes_retrans,
            window_bytes: info.tcpi_snd_wnd.into(),
            busy: us(info.tcpi_busy_time),
            window_limited: us(info.tcpi_rwnd_limited),
            buffer_limited: us(info.tcpi_sndbuf_limited),
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
        info_of(&*self.0).map(|info| LinkReading::of(&info))
    }
}

/// The round trip that the kernel has measured on a connection, if it has.
pub(crate) fn rtt(stream: &TcpStream) -> Option<Duration> {
    let info = info_of(stream)?;
    let reading = LinkReading::of(&info);
    let shortest = if reading.min_rtt.is_zero() || reading.min_rtt > reading.rtt {
        reading.rtt
    } else {
        reading.min_rtt
    };
    (!shortest.is_zero()).then_some(shortest)
}
