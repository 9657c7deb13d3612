//! What this host sends on all its links, whoever sends it.
//!
//! Owns nothing. The kernel's counters of the Internet protocol, of both families; where they cannot be read nothing is
//! known, and nothing is decided by them.

use std::fs;
use std::time::Instant;

/// From here on, bytes per second, others fill queues that a round trip is measured through.
const MUCH_BYTES_PER_S: f64 = 12.5e6;

/// Bytes that left this host so far.
pub(super) fn sent_bytes() -> Option<u64> {
    let four = fs::read_to_string("/proc/net/netstat").ok()?;
    let six = fs::read_to_string("/proc/net/snmp6").unwrap_or_default();
    Some(sent_over_ipv4(&four)?.wrapping_add(sent_over_ipv6(&six).unwrap_or(0)))
}

/// Looks whether a host sends much.
pub(super) struct Look {
    since: Instant,
    sent_bytes: Option<u64>,
}

impl Look {
    pub(super) fn begin() -> Self {
        Self {
            since: Instant::now(),
            sent_bytes: sent_bytes(),
        }
    }

    /// Whether much was sent since then.
    pub(super) fn shows_much(&self) -> bool {
        let Some((before, now)) = self.sent_bytes.zip(sent_bytes()) else {
            return false;
        };
        let bytes = now.wrapping_sub(before) as f64;
        bytes >= MUCH_BYTES_PER_S * self.since.elapsed().as_secs_f64()
    }
}

/// A line of names and a line of values, both beginning with what they belong to.
fn sent_over_ipv4(text: &str) -> Option<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with("IpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(name, _)| *name == "OutOctets")?.1.parse().ok()
}

fn sent_over_ipv6(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("Ip6OutOctets"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn counters_are_found_by_their_names() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InOctets OutOctets X\nIpExt: 5 77 9\n";
        assert_eq!(sent_over_ipv4(text), Some(77));
        assert_eq!(sent_over_ipv4("IpExt: OutOctets\n"), None);
        assert_eq!(sent_over_ipv4("IpExt: OutOctets\nIpExt: many\n"), None);
        assert_eq!(sent_over_ipv6("Ip6OutOctets   \t123\n"), Some(123));
        assert_eq!(sent_over_ipv6(""), None);
    }

    #[test]
    fn what_is_sent_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let before = sent_bytes().expect("the kernel tells");
        sender.write_all(&[1; 50_000]).unwrap();
        receiver.read_exact(&mut [0; 50_000]).unwrap();
        let sent = sent_bytes().expect("the kernel tells") - before;
        assert!(sent >= 50_000, "{sent}");
    }

    #[test]
    fn much_is_what_fills_a_tenth_of_a_gigabit() {
        let now = sent_bytes().expect("the kernel tells");
        let look = |bytes_ago: u64| Look {
            since: Instant::now() - std::time::Duration::from_secs(10),
            sent_bytes: Some(now.wrapping_sub(bytes_ago)),
        };
        assert!(look(1_000_000_000).shows_much());
        let unknown = Look {
            sent_bytes: None,
            ..look(1_000_000_000)
        };
        assert!(!unknown.shows_much());
    }
}
