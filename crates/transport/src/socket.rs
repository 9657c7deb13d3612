//! Sockets: made, sized for the link once its round trip is known, and asked what the kernel really granted.
//!
//! Owns nothing after returning. Refuses nothing on its own: what the kernel does not grant is reported with the remedy,
//! since a smaller buffer is slower, not wrong.
//!
//! Buffers follow need. Where the kernel's own tuning reaches bandwidth x round trip it is left alone, since it keeps
//! what is queued small and so in the caches; only a longer link gets a fixed, larger size. A receive window can grow no
//! further than the scale that was agreed when the connection was made, so where the kernel's own is small a listening
//! socket asks for the largest, and what it accepts goes back to the kernel's tuning until it has proved who it is.

use crate::{TransportError, kernel};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with, sockopt};
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

/// Largest buffer ever asked for, in bytes. It decides the window scale, and with it how coarse every window is: where
/// it is coarser than the kernel's own, Linux 6.18 lets a peer send more than the buffer holds whenever the receiver is
/// slow for a moment, throws that away, and the channel stands still until a timer sends it again.
const BUFFER_MAX: u64 = 64 << 20;
/// A kernel that grows its windows so far by itself is asked for no more.
const OWN_WINDOW_ENOUGH: usize = 16 << 20;
/// A stranger's buffer, in bytes, before the kernel's own tuning: what that begins with.
const STRANGER_BUFFER: usize = 128 << 10;
/// A large send buffer holds what is on its way; what waits behind it stays small, so that a barrier is soon reached.
const UNSENT_MAX: i32 = 2 << 20;
/// From this round trip on loss costs more than pacing does.
const LONG_LINK: Duration = Duration::from_millis(2);
/// The congestion control that a long link with loss needs.
const LONG_LINK_CONGESTION: &str = "bbr";
/// The one that costs less where a timer per packet train is felt: a third more on one core.
const SHORT_LINK_CONGESTION: &str = "cubic";
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_PROBES: u32 = 5;

/// What a migration's link is like, as far as it is known before anything was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuning {
    /// What all channels together may use, in bytes per second.
    pub bandwidth_bytes_per_s: u64,
    /// Among how many channels.
    pub channels: u32,
    /// How long sent bytes may stay unacknowledged before the kernel gives the connection up, in ms.
    pub user_timeout_ms: u32,
}

impl Default for Tuning {
    /// A 10 Gb/s link for one channel.
    fn default() -> Self {
        Self {
            bandwidth_bytes_per_s: 1_250_000_000,
            channels: 1,
            user_timeout_ms: 20_000,
        }
    }
}

impl Tuning {
    /// The buffer that keeps one channel's share of the link busy: twice bandwidth x round trip, at most 64 MiB.
    /// Twice, since channels do not share evenly and what was lost waits for its repetition.
    pub fn buffer_bytes(&self, rtt: Duration) -> u64 {
        let product = u128::from(self.bandwidth_bytes_per_s).saturating_mul(rtt.as_micros());
        let share = product / 500_000 / u128::from(self.channels.max(1));
        u64::try_from(share).map_or(BUFFER_MAX, |bytes| bytes.min(BUFFER_MAX))
    }
}

/// What the kernel gave to a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// What bandwidth x round trip asks for, in bytes.
    pub wanted_buffer_bytes: u64,
    /// Send buffer now, in bytes.
    pub send_buffer_bytes: u64,
    /// Receive buffer now, in bytes.
    pub receive_buffer_bytes: u64,
    /// Whether the kernel grows the send buffer by itself (its limit reaches what is wanted).
    pub send_autotuned: bool,
    /// Whether the kernel grows the receive buffer by itself.
    pub receive_autotuned: bool,
    /// Congestion control in use; empty when the kernel does not tell.
    pub congestion: String,
    /// The round trip that this was decided by.
    pub rtt: Duration,
}

impl Granted {
    /// What keeps a sender slower than its link, with the remedy.
    pub fn send_notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.send_autotuned && self.send_buffer_bytes < self.wanted_buffer_bytes {
            notes.push(self.clamped("send", self.send_buffer_bytes, "wmem"));
        }
        if self.rtt >= LONG_LINK && self.congestion != LONG_LINK_CONGESTION {
            notes.push(format!(
                "this host has no BBR congestion control, so that loss slows a link of {} ms: load the module tcp_bbr; until then '{}' is used, and 'sysctl -w net.ipv4.tcp_slow_start_after_idle=0' keeps it fast after a pause",
                self.rtt.as_millis(),
                self.congestion
            ));
        }
        notes
    }

    /// What keeps a receiver slower than its link, with the remedy.
    pub fn receive_notes(&self) -> Vec<String> {
        if self.receive_autotuned || self.receive_buffer_bytes >= self.wanted_buffer_bytes {
            return Vec::new();
        }
        vec![self.clamped("receive", self.receive_buffer_bytes, "rmem")]
    }

    fn clamped(&self, side: &str, granted: u64, setting: &str) -> String {
        let (wanted, ms) = (self.wanted_buffer_bytes, self.rtt.as_millis());
        format!(
            "the kernel grants a {side} buffer of {} KiB where a round trip of {ms} ms wants {} KiB per channel: 'sysctl -w net.core.{setting}_max={wanted} net.ipv4.tcp_{setting}=\"4096 131072 {}\"'",
            granted >> 10,
            wanted >> 10,
            2 * wanted,
        )
    }
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

/// Asks for the largest window scale where the kernel's own is small, before listening: what is accepted cannot change
/// it any more.
pub(crate) fn offer_wide_windows(socket: impl AsFd) {
    if autotune_reaches("tcp_rmem", OWN_WINDOW_ENOUGH) {
        return;
    }
    if let Ok(bytes) = usize::try_from(BUFFER_MAX) {
        set_receive_buffer(socket, bytes);
    }
}

/// Takes back from a newcomer what its listener asked for: nobody fills the host's memory before it has proved who
/// it is.
pub(crate) fn narrow_stranger(socket: impl AsFd) {
    set_receive_buffer(&socket, STRANGER_BUFFER);
    // A kernel that cannot keeps the small buffer, which `size_receive_buffer` replaces.
    kernel::unlock_buffers(&socket);
}

/// Sizes the receive buffer of a connection whose round trip is known.
pub(crate) fn size_receive_buffer(socket: impl AsFd, tuning: &Tuning, rtt: Duration) {
    if let Some(wanted) = beyond_autotuning("tcp_rmem", tuning, rtt) {
        set_receive_buffer(socket, wanted);
    }
}

/// Sizes the send buffer of a connection whose round trip is known; never smaller than it is.
pub(crate) fn size_send_buffer(socket: impl AsFd, tuning: &Tuning, rtt: Duration) {
    let Some(wanted) = beyond_autotuning("tcp_wmem", tuning, rtt) else {
        return;
    };
    if sockopt::socket_send_buffer_size(&socket).is_ok_and(|doubled| doubled / 2 >= wanted) {
        return;
    }
    let forced = sockopt::set_socket_send_buffer_size_force(&socket, wanted);
    let _ = forced.or_else(|_| sockopt::set_socket_send_buffer_size(&socket, wanted));
    kernel::limit_unsent(&socket, UNSENT_MAX);
}

fn set_receive_buffer(socket: impl AsFd, bytes: usize) {
    let forced = sockopt::set_socket_recv_buffer_size_force(&socket, bytes);
    let _ = forced.or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, bytes));
}

/// What is wanted, where the kernel's own tuning does not reach it. A fixed size turns that tuning off.
fn beyond_autotuning(setting: &str, tuning: &Tuning, rtt: Duration) -> Option<usize> {
    let wanted = usize::try_from(tuning.buffer_bytes(rtt)).ok()?;
    (!autotune_reaches(setting, wanted)).then_some(wanted)
}

/// Whether the kernel's automatic buffers may grow to hold `wanted` bytes; about half of a buffer is its bookkeeping.
/// A kernel that does not tell counts as no.
fn autotune_reaches(setting: &str, wanted: usize) -> bool {
    let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{setting}"));
    let limit = text
        .ok()
        .and_then(|text| text.split_whitespace().nth(2)?.parse::<usize>().ok());
    limit.is_some_and(|limit| limit / 2 >= wanted)
}

/// Sets what a made connection needs; best effort but for TCP_NODELAY.
pub(crate) fn tune(
    socket: impl AsFd,
    tuning: &Tuning,
    rtt: Duration,
) -> Result<(), TransportError> {
    sockopt::set_tcp_nodelay(&socket, true).map_err(TransportError::system("set TCP_NODELAY"))?;
    let _ = sockopt::set_tcp_user_timeout(&socket, tuning.user_timeout_ms);
    let _ = set_keepalive(&socket);
    choose_congestion(&socket, rtt);
    Ok(())
}

/// A long link gets what does not mind loss, where the kernel has it. A short one keeps what its host chose, unless
/// that is made for long ones.
fn choose_congestion(socket: impl AsFd, rtt: Duration) {
    if rtt >= LONG_LINK {
        let _ = sockopt::set_tcp_congestion(&socket, LONG_LINK_CONGESTION);
    } else if sockopt::tcp_congestion(&socket).is_ok_and(|now| now == LONG_LINK_CONGESTION) {
        let _ = sockopt::set_tcp_congestion(&socket, SHORT_LINK_CONGESTION);
    }
}

fn set_keepalive(socket: impl AsFd) -> Result<(), Errno> {
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
    sockopt::set_socket_keepalive(&socket, true)
}

/// What the kernel granted.
pub(crate) fn granted(socket: impl AsFd, tuning: &Tuning, rtt: Duration) -> Granted {
    let wanted = tuning.buffer_bytes(rtt);
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
        rtt,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_millis(150);

    #[test]
    fn buffers_follow_bandwidth_and_round_trip() {
        let one = Tuning {
            bandwidth_bytes_per_s: 125_000_000,
            ..Tuning::default()
        };
        assert_eq!(one.buffer_bytes(LONG), 37_500_000);
        let eight = Tuning {
            channels: 8,
            ..Tuning::default()
        };
        // 10 Gb/s at 150 ms: 188 MB under way in all channels together, and as much again for unevenness.
        assert_eq!(8 * eight.buffer_bytes(LONG), 375_000_000);
        let endless = Tuning {
            bandwidth_bytes_per_s: u64::MAX,
            ..Tuning::default()
        };
        assert_eq!(endless.buffer_bytes(Duration::MAX), BUFFER_MAX);
    }

    #[test]
    fn a_large_buffer_is_asked_for_and_reported() {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = tcp_socket(&address).expect("a socket");
        let fast = Tuning {
            bandwidth_bytes_per_s: 1_000_000_000,
            ..Tuning::default()
        };
        let far = Duration::from_millis(30);
        size_send_buffer(&socket, &fast, far);
        size_receive_buffer(&socket, &fast, far);
        tune(&socket, &fast, far).expect("TCP_NODELAY");
        let granted = granted(&socket, &fast, far);
        assert_eq!(granted.wanted_buffer_bytes, 60_000_000);
        assert!(granted.send_buffer_bytes > 65_536, "{granted:?}");
        assert!(!granted.congestion.is_empty());
        assert!(sockopt::tcp_nodelay(&socket).expect("TCP_NODELAY"));
    }

    /// The scale of the windows that a listening socket's connections offer.
    fn window_scale(listener: &OwnedFd) -> u8 {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        rustix::net::bind(listener, &any).expect("a port");
        rustix::net::listen(listener, 1).expect("listening");
        let bound = rustix::net::getsockname(listener).expect("its name");
        let bound = SocketAddr::try_from(bound).expect("an address");
        let client = std::net::TcpStream::connect(bound).expect("connected");
        let info = kernel::info_of(&client).expect("the kernel tells");
        info.tcpi_snd_wscale()
    }

    #[test]
    fn a_receiver_that_is_slow_for_a_moment_is_not_overrun() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (ours, plain) = (tcp_socket(&any).unwrap(), tcp_socket(&any).unwrap());
        offer_wide_windows(&ours);
        let (ours, plain) = (window_scale(&ours), window_scale(&plain));
        if autotune_reaches("tcp_rmem", OWN_WINDOW_ENOUGH) {
            assert_eq!(ours, plain, "no coarser than the kernel's own");
        } else {
            assert!(ours > plain, "{ours}: no wider than the kernel's own");
        }
    }

    #[test]
    fn a_near_link_is_left_to_the_kernel() {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = tcp_socket(&address).expect("a socket");
        let before = sockopt::socket_send_buffer_size(&socket).expect("a size");
        size_send_buffer(&socket, &Tuning::default(), Duration::from_micros(50));
        let after = sockopt::socket_send_buffer_size(&socket).expect("a size");
        assert_eq!(before, after);
    }

    #[test]
    fn a_clamped_buffer_is_named_with_its_remedy() {
        let granted = Granted {
            wanted_buffer_bytes: 37_500_000,
            send_buffer_bytes: 212_992,
            receive_buffer_bytes: 37_500_000,
            send_autotuned: false,
            receive_autotuned: false,
            congestion: "bbr".into(),
            rtt: LONG,
        };
        let notes = granted.send_notes();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains("net.core.wmem_max=37500000"), "{notes:?}");
        assert_eq!(granted.receive_notes(), Vec::<String>::new());
        let plain = Granted {
            congestion: "cubic".into(),
            send_buffer_bytes: 37_500_000,
            ..granted
        };
        assert!(plain.send_notes()[0].contains("tcp_bbr"));
    }
}
