//! Sockets: made, sized for the link, and asked what the kernel really granted.
//!
//! Owns nothing after returning. Refuses nothing on its own: what the kernel does not grant is reported, since a
//! smaller buffer is slower, not wrong.

use crate::TransportError;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with, sockopt};
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

/// Largest buffer ever asked for, in bytes.
const BUFFER_MAX: u64 = 256 << 20;
/// The congestion control that a lossy long link needs; used where the kernel offers it.
const LONG_LINK_CONGESTION: &str = "bbr";
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES: u32 = 5;

/// What one channel's link is like, as configured or measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// What one channel may use, in bytes per second.
    pub bandwidth_bytes_per_s: u64,
    /// Round trip time, in microseconds.
    pub rtt_us: u64,
    /// How long sent bytes may stay unacknowledged before the kernel gives the connection up, in ms.
    pub user_timeout_ms: u32,
}

impl Default for Tuning {
    /// A local 10 Gb/s link.
    fn default() -> Self {
        Self {
            bandwidth_bytes_per_s: 1_250_000_000,
            rtt_us: 500,
            user_timeout_ms: 20_000,
        }
    }
}

impl Tuning {
    /// The socket buffer that keeps the link busy: twice bandwidth x round trip, at most 256 MiB.
    pub fn buffer_bytes(&self) -> u64 {
        let product = u128::from(self.bandwidth_bytes_per_s) * u128::from(self.rtt_us);
        u64::try_from(product / 500_000).map_or(BUFFER_MAX, |bytes| bytes.min(BUFFER_MAX))
    }
}

/// What the kernel gave to a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// What bandwidth x round trip asks for, in bytes.
    pub wanted_buffer_bytes: u64,
    /// Send buffer at set-up, in bytes.
    pub send_buffer_bytes: u64,
    /// Receive buffer at set-up, in bytes.
    pub receive_buffer_bytes: u64,
    /// Whether the kernel grows the send buffer by itself (its limit reaches what is wanted).
    pub send_autotuned: bool,
    /// Whether the kernel grows the receive buffer by itself.
    pub receive_autotuned: bool,
    /// Congestion control in use; empty when the kernel does not tell.
    pub congestion: String,
}

/// A TCP socket of the address's family.
pub(crate) fn tcp_socket(address: &SocketAddr) -> Result<OwnedFd, TransportError> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
        .map_err(TransportError::system("make a socket"))?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)
            .map_err(TransportError::system("keep a socket to IPv6"))?;
    }
    Ok(socket)
}

/// Sizes the buffers; before connecting or listening, since the window scale is fixed then.
pub(crate) fn size_buffers(socket: impl AsFd, tuning: &Tuning) {
    let Ok(wanted) = usize::try_from(tuning.buffer_bytes()) else {
        return;
    };
    // A fixed size turns the kernel's own tuning off: only where that cannot reach far enough.
    if !autotune_reaches("tcp_wmem", wanted) {
        let forced = sockopt::set_socket_send_buffer_size_force(&socket, wanted);
        let _ = forced.or_else(|_| sockopt::set_socket_send_buffer_size(&socket, wanted));
    }
    if !autotune_reaches("tcp_rmem", wanted) {
        let forced = sockopt::set_socket_recv_buffer_size_force(&socket, wanted);
        let _ = forced.or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, wanted));
    }
}

/// Whether the kernel's automatic buffers may grow to `wanted` bytes. A kernel that does not tell counts as no.
fn autotune_reaches(setting: &str, wanted: usize) -> bool {
    let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{setting}"));
    let limit = text
        .ok()
        .and_then(|text| text.split_whitespace().nth(2)?.parse::<usize>().ok());
    limit.is_some_and(|limit| limit >= wanted)
}

/// Sets what a made connection needs; best effort but for TCP_NODELAY.
pub(crate) fn tune(socket: impl AsFd, tuning: &Tuning) -> Result<(), TransportError> {
    sockopt::set_tcp_nodelay(&socket, true).map_err(TransportError::system("set TCP_NODELAY"))?;
    let _ = sockopt::set_tcp_user_timeout(&socket, tuning.user_timeout_ms);
    let _ = set_keepalive(&socket);
    let _ = sockopt::set_tcp_congestion(&socket, LONG_LINK_CONGESTION);
    Ok(())
}

fn set_keepalive(socket: impl AsFd) -> Result<(), Errno> {
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
    sockopt::set_socket_keepalive(&socket, true)
}

/// What the kernel granted.
pub(crate) fn granted(socket: impl AsFd, tuning: &Tuning) -> Granted {
    let wanted = tuning.buffer_bytes();
    let reaches = |setting| usize::try_from(wanted).is_ok_and(|w| autotune_reaches(setting, w));
    // The kernel reports twice what it grants: the other half is its own bookkeeping.
    let bytes = |reported: Result<usize, Errno>| reported.map_or(0, |bytes| bytes as u64 / 2);
    Granted {
        wanted_buffer_bytes: wanted,
        send_buffer_bytes: bytes(sockopt::socket_send_buffer_size(&socket)),
        receive_buffer_bytes: bytes(sockopt::socket_recv_buffer_size(&socket)),
        send_autotuned: reaches("tcp_wmem"),
        receive_autotuned: reaches("tcp_rmem"),
        congestion: sockopt::tcp_congestion(&socket).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_follow_bandwidth_and_round_trip() {
        let long = Tuning {
            bandwidth_bytes_per_s: 125_000_000,
            rtt_us: 150_000,
            ..Tuning::default()
        };
        assert_eq!(long.buffer_bytes(), 37_500_000);
        let endless = Tuning {
            bandwidth_bytes_per_s: u64::MAX,
            rtt_us: u64::MAX,
            ..Tuning::default()
        };
        assert_eq!(endless.buffer_bytes(), BUFFER_MAX);
    }

    #[test]
    fn a_large_buffer_is_asked_for_and_reported() {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = tcp_socket(&address).expect("a socket");
        let long = Tuning {
            bandwidth_bytes_per_s: 1_000_000_000,
            rtt_us: 100_000,
            ..Tuning::default()
        };
        size_buffers(&socket, &long);
        tune(&socket, &long).expect("TCP_NODELAY");
        let granted = granted(&socket, &long);
        assert_eq!(granted.wanted_buffer_bytes, 200_000_000);
        assert!(granted.send_buffer_bytes > 65_536, "{granted:?}");
        assert!(!granted.congestion.is_empty());
        assert!(sockopt::tcp_nodelay(&socket).expect("TCP_NODELAY"));
    }
}
