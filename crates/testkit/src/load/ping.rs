//! A ping every millisecond: how long a guest cannot be reached.
//!
//! ICMP echo, which the guest's kernel answers by itself. The measure is the longest time between two answers as they
//! arrive here, so it holds also while requests are lost on the way. Needs root (a raw socket).

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A time without answers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Wall clock at its start, milliseconds since 1970.
    pub started_unix_ms: u64,
    pub ms: f64,
}

/// What a run of pings showed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PingReport {
    pub network_gap_ms: f64,
    pub sent: u64,
    pub received: u64,
    pub rtt_p50_ms: f64,
    /// Every gap above the limit asked for, in order, at most 1000.
    pub gaps: Vec<Gap>,
}

#[derive(Clone, Copy, Debug)]
pub struct PingConfig {
    pub address: IpAddr,
    pub interval: Duration,
    /// How long, unless stopped.
    pub duration: Duration,
    /// Gaps from here on are listed.
    pub list_gaps_from: Duration,
}

/// Pings until the time is over or `stop` is set.
pub fn run(config: &PingConfig, stop: &AtomicBool) -> io::Result<PingReport> {
    let socket = raw_socket(config.address)?;
    socket.connect(SocketAddr::new(config.address, 0))?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    // Raw sockets see each other's answers: runs of one process need different ids too.
    static RUNS: AtomicU16 = AtomicU16::new(0);
    let id = (std::process::id() as u16).wrapping_add(RUNS.fetch_add(7919, Ordering::Relaxed));
    let (started, over) = (Instant::now(), AtomicBool::new(false));
    let sent = AtomicU64::new(0);
    let mut listener = Listener::new(*config, started, id);
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&socket, config, started, id, &sent, &over));
        let until = started + config.duration;
        while Instant::now() < until && !stop.load(Ordering::Relaxed) {
            listener.receive(&socket);
        }
        over.store(true, Ordering::Relaxed);
    });
    Ok(listener.finish(sent.load(Ordering::Relaxed)))
}

fn send_all(
    socket: &UdpSocket,
    config: &PingConfig,
    started: Instant,
    id: u16,
    sent: &AtomicU64,
    over: &AtomicBool,
) {
    let mut due = Instant::now();
    while !over.load(Ordering::Relaxed) {
        let stamp = started.elapsed().as_nanos() as u64;
        let sequence = sent.fetch_add(1, Ordering::Relaxed) as u16;
        // A request that cannot be sent (no route for a moment) is one that is not answered.
        let _ = socket.send(&request(config.address, id, sequence, stamp));
        due += config.interval;
        let now = Instant::now();
        if due < now {
            due = now; // a late sender does not make up with a burst
        }
        while Instant::now() < due && !over.load(Ordering::Relaxed) {
            let left = due.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
    }
}

struct Listener {
    config: PingConfig,
    started: Instant,
    id: u16,
    last: Option<Instant>,
    longest: Duration,
    round_trips_us: Vec<u32>,
    report: PingReport,
}

impl Listener {
    fn new(config: PingConfig, started: Instant, id: u16) -> Self {
        let (longest, round_trips_us) = (Duration::ZERO, Vec::new());
        Self {
            config,
            started,
            id,
            last: None,
            longest,
            round_trips_us,
            report: PingReport::default(),
        }
    }

    fn receive(&mut self, socket: &UdpSocket) {
        let mut buffer = [0; 256];
        let Ok(length) = socket.recv(&mut buffer) else {
            return;
        };
        let Some(stamp) = answer_stamp(self.config.address, &buffer[..length], self.id) else {
            return;
        };
        let now = Instant::now();
        let round_trip = now.saturating_duration_since(self.started + Duration::from_nanos(stamp));
        self.round_trips_us
            .push(round_trip.as_micros().min(u128::from(u32::MAX)) as u32);
        self.report.received += 1;
        if let Some(last) = self.last.replace(now) {
            self.gap(now - last);
        }
    }

    fn gap(&mut self, gap: Duration) {
        self.longest = self.longest.max(gap);
        if gap >= self.config.list_gaps_from && self.report.gaps.len() < 1000 {
            let now = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default();
            let started_unix_ms = now.saturating_sub(gap).as_millis() as u64;
            self.report.gaps.push(Gap {
                started_unix_ms,
                ms: gap.as_secs_f64() * 1e3,
            });
        }
    }

    /// Silence up to the end counts as well.
    fn finish(mut self, sent: u64) -> PingReport {
        let silent_since = self.last.unwrap_or(self.started);
        let tail = silent_since.elapsed();
        if tail > self.longest.max(Duration::from_millis(100)) {
            self.gap(tail);
        }
        self.round_trips_us.sort_unstable();
        let median = self
            .round_trips_us
            .get(self.round_trips_us.len() / 2)
            .copied()
            .unwrap_or(0);
        let (network_gap_ms, rtt_p50_ms) =
            (self.longest.as_secs_f64() * 1e3, f64::from(median) / 1e3);
        PingReport {
            network_gap_ms,
            rtt_p50_ms,
            sent,
            ..self.report
        }
    }
}

fn raw_socket(address: IpAddr) -> io::Result<UdpSocket> {
    let (family, protocol) = match address {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_ICMP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_ICMPV6),
    };
    // SAFETY: a new descriptor or an error; it is owned exactly once. UdpSocket is used for its connect, send
    // and recv only, which are the same calls on a raw socket.
    unsafe {
        match libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd).into()),
        }
    }
}

const ECHO_REQUEST: [u8; 2] = [8, 128];
const ECHO_REPLY: [u8; 2] = [0, 129];

fn kind(kinds: [u8; 2], address: IpAddr) -> u8 {
    if address.is_ipv4() {
        kinds[0]
    } else {
        kinds[1]
    }
}

/// An echo request that carries when it was sent. The kernel makes the checksum for IPv6.
fn request(address: IpAddr, id: u16, sequence: u16, stamp: u64) -> [u8; 16] {
    let mut packet = [0; 16];
    packet[0] = kind(ECHO_REQUEST, address);
    packet[4..6].copy_from_slice(&id.to_be_bytes());
    packet[6..8].copy_from_slice(&sequence.to_be_bytes());
    packet[8..].copy_from_slice(&stamp.to_be_bytes());
    if address.is_ipv4() {
        let sum = checksum(&packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

/// The Internet checksum of a packet of even length.
fn checksum(packet: &[u8]) -> u16 {
    let mut sum: u32 = packet
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !(sum as u16)
}

/// When the request of this answer was sent; nothing for any other packet. IPv4 raw sockets give the IP header too.
fn answer_stamp(address: IpAddr, packet: &[u8], id: u16) -> Option<u64> {
    let header = match address {
        IpAddr::V4(_) => usize::from(packet.first()? & 0x0F) * 4,
        IpAddr::V6(_) => 0,
    };
    let echo = packet.get(header..)?;
    if *echo.first()? != kind(ECHO_REPLY, address) || echo.get(4..6)? != id.to_be_bytes() {
        return None;
    }
    echo.get(8..16)?.try_into().ok().map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_answered_without_a_gap() {
        for address in ["127.0.0.1", "::1"] {
            let config = PingConfig {
                address: address.parse().unwrap(),
                interval: Duration::from_millis(1),
                duration: Duration::from_secs(2),
                list_gaps_from: Duration::from_secs(10),
            };
            let report = run(&config, &AtomicBool::new(false)).unwrap();
            assert!(
                report.received > 20 && report.received <= report.sent,
                "{report:?}"
            );
            assert!(
                report.network_gap_ms > 0.0 && report.gaps.is_empty(),
                "{report:?}"
            );
        }
    }

    #[test]
    fn silence_is_one_long_gap() {
        let config = PingConfig {
            address: "127.0.0.1".parse().unwrap(),
            interval: Duration::from_secs(10),
            duration: Duration::from_secs(3),
            list_gaps_from: Duration::from_secs(1),
        };
        let report = run(&config, &AtomicBool::new(false)).unwrap();
        assert!(
            report.network_gap_ms >= 1000.0 && report.gaps.len() == 1,
            "{report:?}"
        );
    }

    #[test]
    fn foreign_and_short_packets_are_not_answers() {
        let v6: IpAddr = "::1".parse().unwrap();
        let v4: IpAddr = "127.0.0.1".parse().unwrap();
        let mut reply = request(v6, 7, 1, 99);
        assert_eq!(answer_stamp(v6, &reply, 7), None, "a request");
        reply[0] = 129;
        assert_eq!(answer_stamp(v6, &reply, 7), Some(99));
        assert_eq!(answer_stamp(v6, &reply, 8), None, "another's");
        for length in 0..reply.len() {
            assert_eq!(answer_stamp(v6, &reply[..length], 7), None);
        }
        assert_eq!(
            answer_stamp(v4, &[0x4F; 20], 7),
            None,
            "a header longer than the packet"
        );
    }

    #[test]
    fn the_checksum_of_a_packet_with_its_checksum_is_zero() {
        assert_eq!(checksum(&request("127.0.0.1".parse().unwrap(), 1, 2, 3)), 0);
    }
}
